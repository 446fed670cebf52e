"""A warp's 16 x N tiles of the state in shared memory: the read-out S·C, and the flush.

The read-out takes A-fragments by ldmatrix, rows of P in their own order (MMA rows g and g + 8 of a lane's
g = lane / 4, t = lane % 4): conflict-free under the 128-byte swizzle. The flush works on 16-byte chunks 2t and
2t + 1 of the same two rows, as the two columns of an accumulator pair: again free of conflicts. Its results replace
the state in shared memory, and are stored from there in whole lines.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .bundles import Row, Shared, Tensors, Thread
from .decay import Vectors
from .flush_terms import PART, FlushTerms, positions_of
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
    quotient,
    remainder,
    store_words,
)
from .readout_c import ReadoutC
from .ring_b import RingB
from .spec import P_TILE, StepSpec


def unpack(words, spec: StepSpec):
    """State elements of a 16-byte chunk, as f32."""
    if spec.state_kind == "f32":
        return [as_float(w) for w in words]
    return [side(spec.state_kind, w) for w in words for side in (low_half, high_half)]


def repack(values, spec: StepSpec):
    """f32 values as the words of a 16-byte chunk of state, rounded to nearest."""
    if spec.state_kind == "f32":
        return [bits(v) for v in values]
    return [pack(spec.state_kind, values[k], values[k + 1]) for k in range(0, len(values), 2)]


class StateTile:
    """The phases of a step kernel that read a warp's tile of the state."""

    def __init__(self, spec: StepSpec, readout_c: ReadoutC) -> None:
        self.spec = spec
        self.readout_c = readout_c
        self.parts = spec.chunk // PART
        self.ring_b = RingB(spec)
        self.terms = FlushTerms(spec, low=spec.state_kind != "bf16")

    def read_out(self, address, c_addresses, c_held, lane):
        """S·C of this warp's rows: per tile and n-tile (rows g, g + 8) x (tokens 2t, 2t + 1).

        `c_held` are C's fragments where a lane holds them, else empty and read here.
        """
        spec = self.spec
        row, side = remainder(lane, P_TILE), quotient(lane, P_TILE)
        corner = row * 128 + ((side ^ remainder(row, 8)) * 16)
        # Two chains of accumulation: an MMA's latency is several times its issue interval.
        chains = [[[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(spec.token_tiles)] for _ in range(spec.tiles)]
        # A row of 128 bytes is four pairs of 16-byte chunks; a quad of C's pieces has the columns of four pairs of an
        # f32 state, of two of a 2-byte state.
        pairs = 4 if spec.state_kind == "f32" else 2
        for quad in range(4 * spec.blocks // pairs):
            words = [held[quad] for held in c_held] or [self.readout_c.quad(at, quad) for at in c_addresses]
            operands = [self.readout_c.operands(w) for w in words]
            for k in range(pairs):
                pair, each = quad * pairs + k, len(operands[0]) // pairs
                at = address + (corner ^ (pair % 4 * 32))
                for tile in range(spec.tiles):
                    rows = load_matrices(at + (pair // 4 * spec.rows + tile * P_TILE) * 128, 4)
                    for n in range(spec.token_tiles):
                        self._multiply(chains[tile][n], pair % 2, rows, operands[n][each * k : each * (k + 1)])
        return [[[a + b for a, b in zip(*chain, strict=True)] for chain in tile] for tile in chains]

    def _multiply(self, chain, which, rows, operands):
        """Add two chunks of columns: `rows` are words of (row g, g + 8) of the first, then of the second."""
        kind = self.spec.state_kind
        if self.spec.native:
            chain[which] = mma_16bit(kind, chain[which], rows, operands[0])
        elif kind == "f32":
            chain[which] = mma_tf32(chain[which], rows, operands[0])
        else:
            for k in range(2):
                a_frag = [bits(half(kind, word)) for half in (low_half, high_half) for word in rows[2 * k : 2 * k + 2]]
                chain[k] = mma_tf32(chain[k], a_frag, operands[k])

    def _chunk(self, tile, block, side, which, thread):
        """One of this lane's two 16-byte chunks of row g + 8 side (undoing the 128-byte swizzle)."""
        at = block * (self.spec.rows * 32) + (thread.g + 8 * side) * 32
        return tile + cute.assume(at + ((2 * thread.t + which) ^ thread.g) * 4, divby=4)

    def chunks(self, tile, block, side, thread: Thread):
        """This lane's two chunks of row g + 8 side, as words."""
        return [load_words(self._chunk(tile, block, side, which, thread), 4) for which in range(2)]

    def put(self, tile, block, done, thread: Thread):
        """Put flushed chunks, `done[side][which]`, where `chunks` found the old ones."""
        for side in range(2):
            for which in range(2):
                store_words(self._chunk(tile, block, side, which, thread), done[side][which])

    @cute.jit
    def flush(self, tensors: Tensors, shared: Shared, tile, x_words, index, row: Row, thread: Thread):
        """Turn a tile of the checkpoint into the logical state: S' = exp(C_tot) S + sum_j (w_j x_j) (outer) B_j.

        In tf32 high and low terms; a state that is rounded to bf16 does without the low ones.
        A lane's two chunks of a row are the two columns of an accumulator pair: element e of its first chunk in
        column 2t, of its second in column 2t + 1. `x_words[k]` are a k-step's words of x.
        """
        at = Vectors(self.spec, index)
        total = shared.vectors[at.total]
        steps = [positions_of(step, thread) for step in range(self.spec.ring_steps)]
        terms = [self.terms.of_step(shared, at, x_words[k], positions) for k, positions in enumerate(steps)]
        chunk = self.spec.chunk
        for block in cutlass.range(self.spec.blocks, unroll=1):
            chunks = [self.chunks(tile, block, side, thread) for side in range(2)]
            done = [[[] for _ in range(2)] for _ in range(2)]
            column = block * self.spec.block + thread.g * chunk
            b_chunks = [
                [self.ring_b.get(tensors, shared, row, position, column, chunk) for position in positions]
                for positions in steps
            ]
            for part in cutlass.range_constexpr(self.parts):
                per_part = 4 // self.parts  # words of a chunk
                olds = [
                    [unpack(chunks[side][which][per_part * part :][:per_part], self.spec) for which in range(2)]
                    for side in range(2)
                ]
                results = [
                    [olds[side][which][e] * total for side in range(2) for which in range(2)] for e in range(PART)
                ]
                for step in cutlass.range_constexpr(self.spec.ring_steps):
                    b_words = [words[part * (PART // 2) :][: PART // 2] for words in b_chunks[step]]
                    results = self.terms.add(results, terms[step], b_words)
                for side in cutlass.range_constexpr(2):
                    for which in cutlass.range_constexpr(2):
                        done[side][which] += repack([results[e][2 * side + which] for e in range(PART)], self.spec)
            self.put(tile, block, done, thread)
