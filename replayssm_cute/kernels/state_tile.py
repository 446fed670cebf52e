"""A warp's 16 x N tile of the state in shared memory: the read-out S·C, and the flush.

The read-out takes A-fragments by ldmatrix, rows of P in their own order (MMA rows g and g + 8 of a lane's
g = lane / 4, t = lane % 4): conflict-free under the 128-byte swizzle. The flush works on 16-byte chunks 2t and
2t + 1 of the same two rows: as the two columns of an accumulator pair, as 32 bytes in a row to store, and again free
of conflicts.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .decay import Vectors
from .primitives import (
    as_float,
    bits,
    high_half,
    load_matrices,
    load_words,
    low_half,
    mma_16bit,
    mma_tf32,
    pack,
    store_words,
    to_tf32,
)
from .spec import P_TILE, StepSpec


def x_fragment(words, spec: StepSpec):
    """x of a k-step as an A-fragment: (row g, row g + 8) of position 2t, then of 2t + 1; exact in tf32."""
    return [side(spec.io_kind, word) for side in (low_half, high_half) for word in words]


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

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec

    def read_out(self, address, operands, lane):
        """S·C of this warp's 16 rows: per n-tile (rows g, g + 8) x (tokens 2t, 2t + 1).

        `operands[n]` are C's B-fragments for token tile n (`ReadoutC.operands`).
        """
        spec = self.spec
        row, side = lane % P_TILE, lane // P_TILE
        corner = row * 128 + ((side ^ (row % 8)) * 16)
        # Two chains of accumulation: an MMA's latency is several times its issue interval.
        chains = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(spec.token_tiles)]
        for block in range(spec.blocks):
            for pair in range(4):  # pairs of 16-byte chunks in a 128-byte row
                words = load_matrices(address + ((corner ^ (pair * 32)) + block * (P_TILE * 128)), 4)
                step = 4 * block + pair
                for n in range(spec.token_tiles):
                    self._multiply(chains[n], step, words, operands[n])
        return [[a + b for a, b in zip(*pair, strict=True)] for pair in chains]

    def _multiply(self, chain, step, words, operands):
        """Add two chunks of columns: words are (row g, g + 8) of the first, then of the second."""
        kind = self.spec.state_kind
        if self.spec.native:
            chain[step % 2] = mma_16bit(kind, chain[step % 2], words, operands[step])
        elif kind == "f32":
            chain[step % 2] = mma_tf32(chain[step % 2], words, operands[step])
        else:
            for k in range(2):
                a_frag = [bits(half(kind, word)) for half in (low_half, high_half) for word in words[2 * k : 2 * k + 2]]
                chain[k] = mma_tf32(chain[k], a_frag, operands[2 * step + k])

    def _chunks(self, tile, block, side, g, t):
        """This lane's two 16-byte chunks of row g + 8 side, unpacked (undoing the 128-byte swizzle)."""
        chunks = []
        for which in range(2):
            at = block * (P_TILE * 32) + (g + 8 * side) * 32 + ((2 * t + which) ^ g) * 4
            chunks.append(_unpack(load_words(tile + cute.assume(at, divby=4), 4), self.spec))
        return chunks

    def _hold_b(self, held, b_cache, slot, group, b_rows, g, block):
        """Load this lane's chunk of B's columns in a block, for each of its ring rows."""
        spec = self.spec
        column = block * spec.block + g * spec.chunk
        per_row = spec.chunk // 2
        for k, ring in enumerate(b_rows):
            words = load_words(spec.pointer(b_cache, slot, (group, ring), column, spec.chunk), per_row)
            for e, word in enumerate(words):
                held[k * per_row + e] = word

    @cute.jit
    def flush(self, state, b_cache, vectors, tile, x_words, head_index, slot, group, head, p0, start, pnat, g, t):
        """Write the logical state back: S' = exp(C_tot) S + sum_j (w_j x_j) (outer) B_j, in tf32 high and low terms.

        A lane's two chunks of a row are the two columns of an accumulator pair: element e of its first chunk in
        column 2t, of its second in column 2t + 1. `x_words[k]` are a k-step's words of x.
        """
        at = Vectors(self.spec, head_index)
        total = vectors[at.total]
        high_terms, low_terms = [], []
        for step in cutlass.range_constexpr(self.spec.ring_steps):
            values = x_fragment(x_words[step], self.spec)
            weights = [vectors[at.weights + 8 * step + 2 * t + half] for half in range(2)]
            scaled = [v * weights[k // 2] for k, v in enumerate(values)]
            high = [to_tf32(v) for v in scaled]
            high_terms.append(high)
            low_terms.append([to_tf32(v - as_float(h)) for v, h in zip(scaled, high, strict=True)])
        positions = [8 * step + 2 * t + half for step in range(self.spec.ring_steps) for half in range(2)]
        b_rows = [self.spec.read_row(start, pnat, position) for position in positions]
        live = [self.spec.is_live(start, pnat, position) for position in positions]
        per_row = self.spec.chunk // 2
        # B of the next block is asked for before this one is worked on
        coming = cute.make_rmem_tensor(cute.make_layout(len(b_rows) * per_row), Int32)
        self._hold_b(coming, b_cache, slot, group, b_rows, g, Int32(0))
        for block in cutlass.range(self.spec.blocks, unroll=1):
            b_words = [[coming[k * per_row + e] for e in range(per_row)] for k in range(len(b_rows))]
            if cutlass.const_expr(self.spec.whole):
                b_words = [
                    [Int32(cutlass.select_(live[k], word, Int32(0))) for word in chunk]
                    for k, chunk in enumerate(b_words)
                ]
            following = cutlass.min(block + 1, self.spec.blocks - 1)
            self._hold_b(coming, b_cache, slot, group, b_rows, g, following)
            rows = [self._chunks(tile, block, side, g, t) for side in range(2)]
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
            for side in cutlass.range_constexpr(2):
                for which in cutlass.range_constexpr(2):
                    column = block * self.spec.block + (2 * t + which) * self.spec.chunk
                    target = self.spec.pointer(state, slot, (head, p0 + g + 8 * side), column, self.spec.chunk)
                    store_words(target, _repack(rows[side][which], self.spec))
