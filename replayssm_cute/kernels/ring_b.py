"""B of the ring positions in shared memory: what B·C has read anyway, kept for the flush of every head of a CTA."""

from __future__ import annotations

import cutlass.cute as cute

from .bundles import Shared
from .primitives import load_words, store_words
from .spec import StepSpec


class RingB:
    """Where B of a ring position lies: rows of d_state values of the inputs' type."""

    def __init__(self, spec: StepSpec) -> None:
        self.layout = spec.shared

    def _at(self, position, column):
        return self.layout.b + position * self.layout.b_stride + 2 * column

    def put(self, shared: Shared, position, column, words):
        """Keep a piece of 8 columns of a position."""
        store_words(shared.raw + cute.assume(self._at(position, column), divby=16), words)

    def get(self, shared: Shared, position, column, count: int):
        """`count` columns of a position, as words."""
        return load_words(shared.raw + cute.assume(self._at(position, column), divby=2 * count), count // 2)
