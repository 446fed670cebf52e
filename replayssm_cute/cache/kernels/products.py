"""What materialize adds to a state, on the tensor cores: sum_j (w_j x_j) (outer) B_j, 16 ring rows j at a time.

The operands of the products are bf16, so each f32 value w_j x_j is cut into three of them that add up to it exactly
(and an f16 value of B into two): every product is exact, and their sum as good as one of f32. An Inf in a folded row
may become NaN.

In a warp's products (m16n8k16) the 16 rows are columns of the state, two of each of 8 pieces of 16 bytes, and the 8
columns are rows of P. So the sums that a thread has after a few products are those of whole pieces: of the g-th of
128 bytes in rows t and 4 + t, g = lane / 4 and t = lane % 4.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ...config import WARP
from ...kernels.primitives import (
    HIGH_HALVES,
    as_float,
    bits,
    high_half,
    load_words,
    low_half,
    mma_16bit,
    permute,
    store_words,
)
from ..shapes import GROUP, STEP, FoldShape

X_TERMS = 3  # bf16 values that add up to an f32 one


class Operands(NamedTuple):
    """Shared memory of the rows that are folded, by position from the oldest on; see `FoldShape`.

    Attributes:
        weights: w of every position, 0 of those that are not folded, and the total decay.
        x: f32, [position][row of P].
        b: bf16, words of two positions, by `Products.fragment`, product, lane and word.
    """

    weights: cute.Pointer
    x: cute.Pointer
    b: cute.Pointer


def unpack(words, kind: str):
    """The elements of words, as f32."""
    if kind == "f32":
        return [as_float(w) for w in words]
    return [half(kind, w) for w in words for half in (low_half, high_half)]


def cut(pair, count: int):
    """Two f32 values as `count` words of two bf16 each, the largest terms first; what is left over is lost."""
    words = []
    for _ in range(count):
        words.append(permute(bits(pair[0]), bits(pair[1]), HIGH_HALVES))
        pair = [v - as_float(bits(v) & -0x10000) for v in pair]  # cut off, not rounded: no term can overflow
    return words


class Products:
    """The products of a CTA of a `FoldShape`."""

    def __init__(self, shape: FoldShape) -> None:
        self.shape = shape
        self.io_dtype = shape.spec.io_dtype
        self.per_piece = shape.chunk // 2  # products that give the sums of a thread's pieces

    @cute.jit
    def put_x(self, xs, words, thread):
        """Put this thread's pieces of x, 8 rows of P of a position each, where `sums` finds them."""
        per_row = self.shape.tile // 8
        for k in cutlass.range_constexpr(len(words)):
            piece = thread + k * self.shape.threads
            if piece < self.shape.positions * per_row:
                values = [bits(v) for v in unpack(words[k], self.io_dtype)]
                target = xs + cute.assume(piece // per_row * self.shape.x_stride + piece % per_row * 8, divby=2)
                for e in cutlass.range_constexpr(0, 8, 2):
                    store_words(target + e, values[e : e + 2])

    @cute.jit
    def put_b(self, bs, words, thread):
        """Put this thread's pieces of B, 8 columns of a lane's four positions each, where `sums` finds them."""
        shape, per_row = self.shape, self.shape.spec.d_state // 8
        for k in cutlass.range_constexpr(len(words) // 4):
            piece = thread + k * shape.threads
            if piece < shape.positions // 4 * per_row:
                step, t = piece // 4 // per_row, piece % 4
                values = [unpack(words[4 * k + i], self.io_dtype) for i in range(4)]
                # [column][pair of positions][term]
                cuts = [[cut([values[i][c], values[i + 1][c]], shape.b_terms) for i in (0, 2)] for c in range(8)]
                for term in cutlass.range_constexpr(shape.b_terms):
                    for first in cutlass.range_constexpr(0, 8, shape.chunk):  # column of a piece of the state
                        place = piece // 4 % per_row * (8 // shape.chunk) + first // shape.chunk
                        at = self.fragment(term, step, place // 8) + place % 8 * 4 + t
                        for e in cutlass.range_constexpr(self.per_piece):
                            pairs = [cuts[first + e + half * self.per_piece] for half in range(2)]
                            store_words(
                                bs + cute.assume((at + e * WARP) * 4, divby=4),
                                [pairs[half][pair][term] for pair in range(2) for half in range(2)],
                            )

    def fragment(self, term, step, line):
        """Where the words of B begin for a warp's products of a step and 128 bytes, in fours."""
        steps, lines = self.shape.positions // STEP, self.shape.lines
        return ((term * steps + step) * lines + line) * (self.per_piece * WARP)

    @cute.jit
    def sums(self, sums, operands: Operands, steps, group, line, thread):
        """The sums over `steps` times 16 positions of this thread's pieces in 8 rows of P; see `of_piece`."""
        sums.fill(0.0)
        for step in cutlass.range(steps, unroll=1):
            self.add(sums, operands, step, group, line, thread)

    def of_piece(self, sums, row):
        """The sums of this thread's piece in row t (`row` 0) or 4 + t (1) of the 8, in order."""
        return [sums[e * 4 + half * 2 + row] for half in range(2) for e in range(self.per_piece)]

    @cute.jit
    def add(self, sums, operands: Operands, step, group, line, thread):
        """Add 16 positions: a thread's k are 4 t ... 4 t + 3 of them."""
        shape = self.shape
        lane = thread % WARP
        g, t = lane // 4, lane % 4
        row = thread // WARP * (GROUP * shape.groups) + group * GROUP + g // 2 + g % 2 * 4
        first = cute.assume(step * STEP + 4 * t, divby=4)
        scale = [as_float(word) for word in load_words(operands.weights + first, 4)]
        x = [as_float(load_words(operands.x + ((first + i) * shape.x_stride + row), 1)[0]) for i in range(4)]
        scaled = [Float32(x[i] * scale[i]) for i in range(4)]
        x_terms = [cut(scaled[i : i + 2], X_TERMS) for i in (0, 2)]
        # The smallest terms first; all products of a term together: neighbours do not wait for each other.
        for b_term in cutlass.range_constexpr(shape.b_terms - 1, -1, -1):
            at = self.fragment(b_term, step, line) + lane
            fragments = [
                load_words(operands.b + cute.assume((at + e * WARP) * 4, divby=4), 4) for e in range(self.per_piece)
            ]
            for x_term in cutlass.range_constexpr(X_TERMS - 1, -1, -1):
                for e in cutlass.range_constexpr(self.per_piece):
                    before = [sums[4 * e + i] for i in range(4)]
                    after = mma_16bit("bf16", before, fragments[e], [terms[x_term] for terms in x_terms])
                    for i in cutlass.range_constexpr(4):
                        sums[4 * e + i] = after[i]
