"""A warp's 16 x N tile of the state in shared memory: the read-out S·C, and the flush.

Fragments. An MMA's K order and row order are free as long as both operands agree. Each lane (g = lane / 4,
t = lane % 4) reads the state in 16-byte chunks of rows 2g and 2g + 1 (MMA rows g and g + 8): one chunk feeds
two MMAs, the two rows of a lane become one 4-byte output, and the chunks {0, 1, 4, 5}[t] (then those + 2) are
free of bank conflicts under the 128-byte swizzle and fill whole 32-byte sectors when a flush writes them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .decay import Decay
from .primitives import (
    as_float,
    bits,
    high_half,
    load_words,
    low_half,
    mma_16bit,
    mma_tf32,
    pack,
    store_words,
    to_tf32,
)
from .spec import P_TILE, StepSpec, first_chunk

# The MMA reads the upper 19 bits of an f32 operand. Cutting 13 bits off a mantissa m in [1, 2) lowers the value by
# the share 2^-10 u / m, u uniform in [0, 1): 2^-10 E[u] E[1/m] = 2^-11 / (2 ln 2) = 3.52e-4 on average for m
# log-uniform. Scaling the read-out by this factor removes the bias, which halves the error (2.2e-4 instead of
# 4.1e-4, as good as rounding each element) without an instruction more.
TRUNCATION_GAIN = 1.0 + 3.52e-4


def state_words(words, block, which, g, t):
    """One 16-byte chunk of each of this lane's two state rows, as words (undoing the 128-byte swizzle)."""
    even = 2 * g
    chunk = (first_chunk(t) ^ (even & 7)) ^ (2 * which)
    base = block * (P_TILE * 32)
    low = load_words(words + cute.assume(base + even * 32 + chunk * 4, divby=4), 4)
    high = load_words(words + cute.assume(base + even * 32 + 32 + (chunk ^ 1) * 4, divby=4), 4)
    return low, high


def _pair(kind, word):
    """A word's two 16-bit values as f32 bits."""
    return bits(low_half(kind, word)), bits(high_half(kind, word))


def x_fragment(x_words, step, spec: StepSpec):
    """x of k-step `step` as an A-fragment: (row 2g, row 2g + 1) of position t, then of t + 4; exact in tf32."""
    return [side(spec.io_kind, x_words[2 * step + half]) for half in range(2) for side in (low_half, high_half)]


def _unpack(words, spec: StepSpec):
    """State elements of a 16-byte chunk, as f32."""
    if spec.state_kind == "f32":
        return [as_float(w) for w in words]
    return [side(spec.state_kind, w) for w in words for side in (low_half, high_half)]


def _repack(values, spec: StepSpec):
    """f32 values as the words of a 16-byte chunk of state, rounded to nearest."""
    if spec.state_kind == "f32":
        return [bits(v) for v in values]
    return [pack(spec.state_kind, values[k], values[k + 1]) for k in range(0, len(values), 2)]


class StateTile:
    """The phases of a step kernel that read a warp's tile of the state."""

    def __init__(self, spec: StepSpec, decay: Decay) -> None:
        self.spec = spec
        self.decay = decay

    def load_c(self, c, row, group, g, t):
        """C as B-fragments of the read-out: [block][chunk][n-tile] -> this lane's chunk of columns, as words."""
        spec = self.spec
        rows = [
            spec.pointer(c, row, (spec.token(g + 8 * n), group), first_chunk(t) * spec.chunk, spec.chunk)
            for n in range(spec.token_tiles)
        ]
        return [
            [
                [
                    load_words(pointer + (block * spec.block + 2 * which * spec.chunk), spec.chunk // 2)
                    for pointer in rows
                ]
                for which in range(2)
            ]
            for block in range(spec.blocks)
        ]

    def read_out(self, words, c_words, g, t):
        """S·C of this warp's 16 rows: per n-tile (rows 2g, 2g + 1) x (tokens 2t, 2t + 1)."""
        spec = self.spec
        # Two chains of accumulation: an MMA's latency is several times its issue interval.
        chains = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(spec.token_tiles)]
        for block in range(spec.blocks):
            for which in range(2):
                low, high = state_words(words, block, which, g, t)
                for half in range(2):
                    rows = (low[2 * half], high[2 * half], low[2 * half + 1], high[2 * half + 1])
                    for n in range(spec.token_tiles):
                        chains[n][which] = self._multiply(chains[n][which], rows, c_words[block][which][n], half)
        return [[a + b for a, b in zip(*pair, strict=True)] for pair in chains]

    def _multiply(self, acc, rows, c_chunk, half):
        """One half chunk of the two rows, words (row 2g, 2g + 1) twice, times the same columns of C."""
        kind, io = self.spec.state_kind, self.spec.io_kind
        if self.spec.native:
            return mma_16bit(io, acc, rows, (c_chunk[2 * half], c_chunk[2 * half + 1]))
        if kind == "f32":
            return mma_tf32(acc, rows, _pair(io, c_chunk[half]))
        for k in range(2):
            a_frag = [bits(side(kind, word)) for side in (low_half, high_half) for word in rows[2 * k : 2 * k + 2]]
            acc = mma_tf32(acc, a_frag, _pair(io, c_chunk[2 * half + k]))
        return acc

    def _hold_b(self, held, b_cache, slot, group, b_rows, b_chunk, block):
        """Load this lane's chunk of B's columns in a block, for each of its ring rows."""
        spec = self.spec
        column = block * spec.block + b_chunk * spec.chunk
        per_row = spec.chunk // 2
        for k, ring in enumerate(b_rows):
            words = load_words(spec.pointer(b_cache, slot, (group, ring), column, spec.chunk), per_row)
            for e, word in enumerate(words):
                held[k * per_row + e] = word

    @cute.jit
    def flush(self, state, b_cache, vectors, words, x_words, head_index, slot, group, head, p0, start, pnat, g, t):
        """Write the logical state back: S' = exp(C_tot) S + sum_j (w_j x_j) (outer) B_j, in tf32 high and low terms.

        A lane's two chunks of a row are the two columns of an accumulator pair: element e of its first chunk in
        column 2t, of its second in column 2t + 1.
        """
        weights_at, _, _, _, total_at = self.decay.offsets(head_index)
        total = vectors[total_at]
        high_terms, low_terms = [], []
        for step in cutlass.range_constexpr(self.spec.ring_steps):
            values = x_fragment(x_words, step, self.spec)
            weights = [vectors[weights_at + 8 * step + 4 * half + t] for half in range(2)]
            scaled = [v * weights[k // 2] for k, v in enumerate(values)]
            high = [to_tf32(v) for v in scaled]
            high_terms.append(high)
            low_terms.append([to_tf32(v - as_float(h)) for v, h in zip(scaled, high, strict=True)])
        b_chunk = first_chunk(g // 2) + 2 * (g % 2)  # the chunk of B that accumulator column g stands for
        positions = [t + 4 * k for k in range(2 * self.spec.ring_steps)]
        b_rows = [self.spec.read_row(start, pnat, position) for position in positions]
        live = [self.spec.is_live(start, pnat, position) for position in positions]
        per_row = self.spec.chunk // 2
        # B of the next block is asked for before this one is worked on
        coming = cute.make_rmem_tensor(cute.make_layout(len(b_rows) * per_row), Int32)
        self._hold_b(coming, b_cache, slot, group, b_rows, b_chunk, Int32(0))
        for block in cutlass.range(self.spec.blocks, unroll=1):
            b_words = [[coming[k * per_row + e] for e in range(per_row)] for k in range(len(b_rows))]
            if cutlass.const_expr(self.spec.whole):
                b_words = [
                    [Int32(cutlass.select_(live[k], word, Int32(0))) for word in chunk]
                    for k, chunk in enumerate(b_words)
                ]
            following = cutlass.min(block + 1, self.spec.blocks - 1)
            self._hold_b(coming, b_cache, slot, group, b_rows, b_chunk, following)
            chunks = [state_words(words, block, which, g, t) for which in range(2)]
            rows = [[_unpack(chunks[which][side], self.spec) for which in range(2)] for side in range(2)]
            results = [
                [rows[side][which][e] * total for side in range(2) for which in range(2)]
                for e in range(self.spec.chunk)
            ]
            # Term by term over all tiles: neighbouring MMAs do not wait for each other.
            for step in cutlass.range_constexpr(self.spec.ring_steps):
                fragments = [
                    [
                        bits((low_half, high_half)[e % 2](self.spec.io_kind, b_words[2 * step + half][e // 2]))
                        for half in range(2)
                    ]
                    for e in range(self.spec.chunk)
                ]
                for terms in (low_terms[step], high_terms[step]):
                    results = [mma_tf32(results[e], terms, fragments[e]) for e in range(self.spec.chunk)]
            rows = [
                [[results[e][2 * side + which] for e in range(self.spec.chunk)] for which in range(2)]
                for side in range(2)
            ]
            for which in cutlass.range_constexpr(2):
                column = block * self.spec.block + (first_chunk(t) + 2 * which) * self.spec.chunk
                for side in cutlass.range_constexpr(2):
                    target = self.spec.pointer(state, slot, (head, p0 + 2 * g + side), column, self.spec.chunk)
                    store_words(target, _repack(rows[side][which], self.spec))
