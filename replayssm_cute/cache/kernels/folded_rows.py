"""The ring rows that materialize folds, on their way from a slot to shared memory, and what they weigh."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ...config import WARP
from ...kernels.primitives import as_float, load_words
from ..shapes import STEP, FoldShape
from . import layers


class FoldedRows:
    """The oldest `move.count` live rows of a move's source; the positions after them repeat the last."""

    def __init__(self, shape: FoldShape) -> None:
        self.shape = shape
        self.spec = shape.spec

    def ring_row(self, move, position):
        """The ring row of a position."""
        row = move.start + cutlass.min(position, move.count - 1)
        return Int32(cutlass.select_(row >= self.spec.ring_rows, row - self.spec.ring_rows, row))

    def words(self, base, head, width, column, position, move):
        """16 bytes of a position, from a column on."""
        row = head * self.spec.ring_rows + self.ring_row(move, position)
        return load_words(layers.at(base, cute.assume((row * width + column) * 2, divby=16), Int32, 16), 4)

    def pieces(self, count, thread):
        """This thread's share of `count` pieces; where there are too few, the last again."""
        return [cutlass.min(thread + k * self.shape.threads, count - 1) for k in range(-(-count // self.shape.threads))]

    def x(self, base, head, p0, move, thread):
        """This thread's pieces of x: 8 rows of P of a position."""
        per_row, loaded = self.shape.tile // 8, []
        for piece in self.pieces(self.shape.positions * per_row, thread):
            column = p0 + piece % per_row * 8
            loaded.append(self.words(base, head, self.spec.head_dim, column, piece // per_row, move))
        return loaded

    def b(self, base, group, move, thread):
        """This thread's pieces of B: 8 columns of the four positions that a lane has in a product."""
        per_row, loaded = self.spec.d_state // 8, []
        for piece in self.pieces(self.shape.positions // 4 * per_row, thread):
            first, column = piece // 4 // per_row * STEP + piece % 4 * 4, piece // 4 % per_row * 8
            loaded += [self.words(base, group, self.spec.d_state, column, first + i, move) for i in range(4)]
        return loaded

    @cute.jit
    def weigh(self, weights, base, rate, head, move):
        """exp(C - c_j) dt_j of every folded row j, 0 of the positions after them, and exp(C) after all, by one warp.

        Lane l has the l-th newest row.
        """
        weights = cute.make_tensor(weights, cute.make_layout(self.shape.weights + 1))
        lane = cute.arch.lane_idx()
        carried = Float32(0.0)
        for part in cutlass.range_constexpr(-(-self.spec.window // WARP)):
            newest = lane + part * WARP
            j = move.count - 1 - newest
            row = head * self.spec.ring_rows + self.ring_row(move, cutlass.max(j, 0))
            step = as_float(load_words(layers.at(base, row * 4, Int32, 4), 1)[0])
            step = Float32(cutlass.select_(j >= 0, step, Float32(0.0)))
            inclusive = rate * step
            for k in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(inclusive, 1 << k, mask_and_clamp=0)
                inclusive = inclusive + Float32(cutlass.select_(lane >= 1 << k, other, Float32(0.0)))
            newer = cute.arch.shuffle_sync_up(inclusive, 1, mask_and_clamp=0)
            newer = Float32(cutlass.select_(lane == 0, Float32(0.0), newer))
            weight = Float32(cutlass.select_(j >= 0, cute.math.exp(carried + newer) * step, Float32(0.0)))
            weights[cutlass.select_(j >= 0, j, newest)] = weight
            carried = carried + cute.arch.shuffle_sync(inclusive, WARP - 1)
        if lane == 0:
            weights[self.shape.weights] = cute.math.exp(carried)
