"""B of the ring positions, for the flush of every head of a CTA.

Where the config keeps it, it comes to shared memory by asynchronous copies, and B·C takes it from there too; otherwise
B·C reads it into registers, and flushes read it from L2 again. Of short windows, and of the whole ring, B·C puts into
shared memory what it has read: the copies' way is longer, which a few tiles do not make up for (measured on one H200:
W 16 up to 4% slower by copies at small batches, W 32 4% and W 64 9% faster at batch 256; ragged rows of W 16 up to 4%
faster).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .bundles import Row, Shared, Tensors
from .primitives import copy_async, load_words, store_words
from .spec import StepSpec


class RingB:
    """Where B of a ring position lies: in shared memory rows of d_state values of the inputs' type."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec
        self.layout = spec.shared
        self.kept = spec.config.keep_b
        self.copied = self.kept and not spec.whole and (spec.skips or spec.problem.ragged)

    def _at(self, position, column):
        return self.layout.b + position * self.layout.b_stride + 2 * column

    def put(self, shared: Shared, row: Row, position, column, words):
        """Keep a piece of 8 columns of a position."""
        store_words(shared.raw + cute.assume(self._at(position, column), divby=16), self._live(row, position, words))

    def copy(self, tensors: Tensors, base, shared: Shared, row: Row, position, column):
        """Ask for a piece of 8 columns of a position; of a dead one zeros. `base`: `StepSpec.base` of B."""
        where = (row.group, self.spec.read_row(row, position))
        source = self.spec.pointer(tensors.b_cache, row.slot, where, column, 8, base)
        bytes_ = Int32(cutlass.select_(self.spec.is_live(row, position), 16, 0))
        copy_async(shared.address + self._at(position, column), Int64(source.toint()), bytes_)

    def get(self, tensors: Tensors, shared: Shared, row: Row, position, column, count: int):
        """`count` columns of a position, as words."""
        if self.kept:
            return load_words(shared.raw + cute.assume(self._at(position, column), divby=2 * count), count // 2)
        where = (row.group, self.spec.read_row(row, position))
        pointer = self.spec.pointer(tensors.b_cache, row.slot, where, column, count)
        return self._live(row, position, load_words(pointer, count // 2))

    def _live(self, row: Row, position, words):
        """Zeros where NaN may be: in "live" mode a dead position has read a live row."""
        if not self.spec.whole:
            return words
        live = self.spec.is_live(row, position)
        return [Int32(cutlass.select_(live, word, Int32(0))) for word in words]
