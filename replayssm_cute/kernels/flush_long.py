"""The flush of windows whose terms do not fit a lane's registers: 16 live rows at a time, as many as there are."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .bundles import Row, Shared, Tensors, Thread
from .decay import Vectors
from .flush_terms import PART, FlushTerms
from .primitives import load_matrices, quotient, remainder
from .ring_b import RingB
from .spec import SKIPPED, StepSpec
from .state_tile import StateTile, repack, unpack
from .tokens import place

ROWS = SKIPPED  # ring positions, two k-steps, that are added at a time


class LongFlush:
    """The flush phase where `StepSpec.long_flush`."""

    def __init__(self, spec: StepSpec, state_tile: StateTile, unit: int | None = None, low_terms: bool = True) -> None:
        self.spec = spec
        self.state_tile = state_tile
        self.unit = unit or spec.unit  # columns in a row that a lane works on
        self.ring_b = RingB(spec)
        self.terms = FlushTerms(spec, low_terms)

    @cute.jit
    def add_rows(self, results, tensors: Tensors, shared: Shared, at, inputs, first, column, row: Row, thread: Thread):
        """Add (w_j x_j) (outer) B_j of the 16 positions from `first` to a part's accumulators."""
        lane, t = thread.lane, thread.t
        words = load_matrices(
            inputs + place(first + remainder(lane, 8) + quotient(lane, 16) * 8, remainder(quotient(lane, 8), 2)),
            4,
            True,
        )
        positions = [first + 8 * step + 2 * t + half for step in range(2) for half in range(2)]
        first_column = column + thread.g * self.unit
        b_words = [self.ring_b.get(tensors, shared, row, position, first_column, PART) for position in positions]
        for step in cutlass.range_constexpr(2):
            mine = slice(2 * step, 2 * step + 2)
            terms = self.terms.of_step(shared, at, words[mine], positions[mine])
            sums = [[results[4 * e + k] for k in range(4)] for e in range(PART)]
            sums = self.terms.add(sums, terms, b_words[mine])
            for e in cutlass.range_constexpr(PART):
                for k in cutlass.range_constexpr(4):
                    results[4 * e + k] = sums[e][k]

    @cute.jit
    def flush(self, tensors: Tensors, shared: Shared, tile, inputs, index, row: Row, thread: Thread):
        """Turn a tile into the logical state, as `StateTile.flush` does; `inputs` is the address of its inputs."""
        at = Vectors(self.spec, index)
        total = shared.vectors[at.total]
        parts = self.state_tile.parts
        for block in cutlass.range(self.spec.blocks, unroll=1):
            chunks = [self.state_tile.chunks(tile, block, side, thread) for side in range(2)]
            done = [[[] for _ in range(2)] for _ in range(2)]
            for part in cutlass.range_constexpr(parts):
                words = 4 // parts  # of a chunk
                results = cute.make_rmem_tensor(cute.make_layout(4 * PART), Float32)
                for side in cutlass.range_constexpr(2):
                    for which in cutlass.range_constexpr(2):
                        olds = unpack(chunks[side][which][words * part :][:words], self.spec)
                        for e in cutlass.range_constexpr(PART):
                            results[4 * e + 2 * side + which] = olds[e] * total
                column = block * self.spec.block + part * PART
                for rows in cutlass.range(quotient(row.pnat + (ROWS - 1), ROWS), unroll=1):
                    self.add_rows(results, tensors, shared, at, inputs, rows * ROWS, column, row, thread)
                for side in cutlass.range_constexpr(2):
                    for which in cutlass.range_constexpr(2):
                        new = [results[4 * e + 2 * side + which] for e in range(PART)]
                        done[side][which] += repack(new, self.spec)
            self.state_tile.put(tile, block, done, thread)
