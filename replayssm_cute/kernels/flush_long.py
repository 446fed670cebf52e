"""The flush of windows whose terms do not fit a lane's registers: 16 live rows at a time, as many as there are."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .bundles import Row, Shared, Tensors, Thread
from .decay import Vectors
from .primitives import as_float, bits, high_half, load_matrices, low_half, mma_tf32, to_tf32
from .ring_b import RingB
from .spec import SKIPPED, StepSpec
from .state_tile import PART, StateTile, repack, unpack, x_fragment
from .tokens import place

ROWS = SKIPPED  # ring positions, two k-steps, that are added at a time


class LongFlush:
    """The flush phase where `StepSpec.long_flush`."""

    def __init__(self, spec: StepSpec, state_tile: StateTile, unit: int | None = None, low_terms: bool = True) -> None:
        self.spec = spec
        self.state_tile = state_tile
        self.unit = unit or spec.unit  # columns in a row that a lane works on
        self.ring_b = RingB(spec)
        self.low_terms = low_terms  # without them the added terms have tf32's 11 bits

    @cute.jit
    def add_rows(self, results, tensors: Tensors, shared: Shared, at, inputs, first, column, row: Row, thread: Thread):
        """Add (w_j x_j) (outer) B_j of the 16 positions from `first` to a part's accumulators."""
        lane, t = thread.lane, thread.t
        words = load_matrices(inputs + place(first + lane % 8 + lane // 16 * 8, lane // 8 % 2), 4, True)
        positions = [first + 8 * step + 2 * t + half for step in range(2) for half in range(2)]
        mine = column + thread.g * self.unit
        b_words = [self.ring_b.get(tensors, shared, row, position, mine, PART) for position in positions]
        for step in cutlass.range_constexpr(2):
            values = x_fragment(words[2 * step : 2 * step + 2], self.spec)
            weights = [shared.vectors[at.weights + positions[2 * step + half]] for half in range(2)]
            scaled = [v * weights[k // 2] for k, v in enumerate(values)]
            high = [to_tf32(v) for v in scaled]
            low = [to_tf32(v - as_float(h)) for v, h in zip(scaled, high, strict=True)]
            for terms in (low, high) if self.low_terms else (high,):
                for e in cutlass.range_constexpr(PART):
                    half_of = (low_half, high_half)[e % 2]
                    pair = [bits(half_of(self.spec.io_kind, b_words[2 * step + k][e // 2])) for k in range(2)]
                    sums = mma_tf32([results[4 * e + k] for k in range(4)], terms, pair)
                    for k in cutlass.range_constexpr(4):
                        results[4 * e + k] = sums[k]

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
                for rows in cutlass.range((row.pnat + (ROWS - 1)) // ROWS, unroll=1):
                    self.add_rows(results, tensors, shared, at, inputs, rows * ROWS, column, row, thread)
                for side in cutlass.range_constexpr(2):
                    for which in cutlass.range_constexpr(2):
                        new = [results[4 * e + 2 * side + which] for e in range(PART)]
                        done[side][which] += repack(new, self.spec)
            self.state_tile.put(tile, block, done, thread)
