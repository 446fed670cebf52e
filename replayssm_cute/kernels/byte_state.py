"""The read-out of an 8-bit state: its bytes become operands of the inputs' type in registers.

ldmatrix gives lane t of a row columns 4t .. 4t + 3 of a 16-byte chunk. So that C's fragments hold the same ones, a pair
of its 16-byte pieces (eight words of two columns each) is stored even words first: one piece is then the first k-half
of the MMA's B-fragment, the other the second.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from .bundles import Thread
from .convert import decode_bytes, max_abs
from .primitives import (
    as_float,
    bits,
    high_half,
    load_matrices,
    load_words,
    low_half,
    mma_16bit,
    pack,
    quotient,
    remainder,
    store_words,
)
from .ptx import DECODE_GAIN
from .readout_c import ReadoutC
from .spec import P_TILE, StepSpec
from .state_tile import StateTile

RANGE = 13  # log2 of what a token's largest |C| becomes as f16, rounded down; at the end of its range one more


class ByteReadoutC(ReadoutC):
    """C as the read-out of an 8-bit state takes it.

    Bytes become f16 with far fewer instructions than bf16. So a lane that keeps C from turn to turn keeps bf16 values
    as f16, each token's multiplied by a power of two that puts the largest near the end of f16's range: exact but for
    values 2^-27 of the largest and below, whose errors are 2^-38 of it at most.
    """

    def __init__(self, spec: StepSpec) -> None:
        super().__init__(spec)
        self.rescaled = self.held and spec.io_kind == "bf16"
        self.kind = "f16" if self.rescaled else spec.io_kind  # of the operands of S·C
        self.gain = DECODE_GAIN.get((spec.state_kind, self.kind), 1.0)

    def hold(self, addresses, thread: Thread):
        """C's fragments by token tile, and what this lane's two tokens' sums have to be multiplied with."""
        held, _ = super().hold(addresses, thread)
        if not self.rescaled:
            return held, None
        rescaled, gains = [], []
        for quads in held:
            values = [[(low_half("bf16", w), high_half("bf16", w)) for w in words] for words in quads]
            most = Float32(0.0)
            for pair in (p for words in values for p in words):
                for value in pair:
                    most = max_abs(most, value)
            for distance in (1, 2):  # the lanes of a quad have the same token
                most = max_abs(most, cute.arch.shuffle_sync_bfly(most, distance))
            exponent = cutlass.min(cutlass.max(bits(most) & 0x7F800000, 15 << 23), 253 << 23)
            factor = as_float((254 << 23) - exponent) * Float32(2.0**RANGE)
            rescaled.append([[pack("f16", low * factor, high * factor) for low, high in words] for words in values])
            gain = as_float(exponent) * Float32(2.0**-RANGE)
            gains += [cute.arch.shuffle_sync(gain, 8 * thread.t + 4 * odd) for odd in range(2)]
        return rescaled, gains

    def _halves(self, token, piece):
        """Byte offset of where a piece's even words lie; its odd ones are 16 bytes further."""
        shared = self.spec.shared
        return cute.assume(
            shared.c + token * shared.c_stride + quotient(piece, 2) * 32 + remainder(piece, 2) * 8, divby=8
        )

    @cute.jit
    def stage(self, raw, words):
        """Put the pieces that `load` asked for into shared memory."""
        for k in cutlass.range_constexpr(self.rounds):
            token, piece = self._place(k)
            if token < self.spec.problem.tokens:
                for odd in cutlass.range_constexpr(2):
                    store_words(raw + self._halves(token, piece) + 16 * odd, [words[k][odd], words[k][odd + 2]])

    def piece(self, raw, token, column):
        """Eight columns of C of a token, in their own order, as four words."""
        at = self._halves(self.spec.token(token), quotient(column, 8))
        even, odd = (load_words(raw + at + 16 * k, 2) for k in range(2))
        return [even[0], odd[0], even[1], odd[1]]


class ByteStateTile(StateTile):
    """The phases that read a warp's tile of an 8-bit state; rows of shared memory have 128 bytes, or all 64 of N."""

    def _swizzle(self, row):
        """What the swizzle does to a row's numbers of 16-byte chunks."""
        return remainder(row, 8) if self.spec.block == 128 else remainder(quotient(row, 2), 4)

    def read_out(self, address, c_addresses, c_held, lane):
        """S·C of this warp's rows, of the codes: scales are not in it."""
        spec, kind = self.spec, self.readout_c.kind
        row, side = remainder(lane, P_TILE), quotient(lane, P_TILE)
        corner = row * spec.block + (side ^ self._swizzle(row)) * 16
        chains = [[[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(spec.token_tiles)] for _ in range(spec.tiles)]
        quads = spec.block // 32  # of a row: 32 columns, two chunks, one quad of C's pieces
        for quad in range(spec.problem.d_state // 32):
            words = [held[quad] for held in c_held] or [self.readout_c.quad(at, quad) for at in c_addresses]
            operands = [self.readout_c.operands(w) for w in words]
            at = address + (corner ^ (quad % quads * 32))
            for tile in range(spec.tiles):
                rows = load_matrices(at + (quad // quads * spec.rows + tile * P_TILE) * spec.block, 4)
                for which in range(2):
                    low, high = (decode_bytes(spec.state_kind, kind, word) for word in rows[2 * which : 2 * which + 2])
                    a_frag = (low[0], high[0], low[1], high[1])
                    for n in range(spec.token_tiles):
                        chain = chains[tile][n]
                        chain[which] = mma_16bit(kind, chain[which], a_frag, operands[n][which])
        return [[[a + b for a, b in zip(*chain, strict=True)] for chain in tile] for tile in chains]

    def chunks(self, tile, block, side, thread: Thread):
        """This lane's two units of row g + 8 side, as words: 16-byte chunks 2t and 2t + 1, or the halves of chunk t."""
        if self.spec.block == 128:
            return super().chunks(tile, block, side, thread)
        at = (thread.g + 8 * side) * 16 + (thread.t ^ self._swizzle(thread.g)) * 4
        words = load_words(tile + cute.assume(at, divby=4), 4)
        return [words[:2], words[2:]]


class Scales:
    """The scales of a warp's rows: asked for a turn ahead, and multiplied into the read-out."""

    def __init__(self, spec: StepSpec, gain: float) -> None:
        self.spec = spec
        self.gain = gain

    def new(self):
        """Registers for the scales of rows g and g + 8 of each tile."""
        return cute.make_rmem_tensor(cute.make_layout(2 * self.spec.tiles), Float32)

    def ask(self, held, scale, slot, head, p0, g):
        """Ask for those of a head."""
        for k in range(2 * self.spec.tiles):
            held[k] = Float32(scale[slot, head, p0 + 8 * k + g])

    def apply(self, held, read_out, gains):
        """Make values of the sums over codes; `gains` are those of this lane's tokens, where C was rescaled."""
        for tile in range(self.spec.tiles):
            for n in range(self.spec.token_tiles):
                for e in range(4):
                    at = 4 * (tile * self.spec.token_tiles + n) + e
                    gain = Float32(self.gain) if gains is None else gains[2 * n + e % 2]
                    read_out[at] = read_out[at] * gain * held[2 * tile + e // 2]
