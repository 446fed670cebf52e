"""The operands of S·C in shared memory: descriptors, and C as the MMA reads it.

Both matrices lie K-major under the 128-byte swizzle: blocks of 128 bytes of K, in a block one row after the other, and
in row r the 16-byte chunk j at place j ^ (r % 8). A is the state, the rows of a turn's heads a block, put there by TMA;
B is C, 16 rows a block, tokens that are there in the first ones. An MMA reads 128 rows of A: where a turn has fewer
(one head of 80), the others are whatever lies behind the block. Those rows, and rows of tokens that are not there, hold
anything: an MMA keeps rows and tokens apart, and their sums are never read, or never stored.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int64

from ...sm100 import ROWS
from ..primitives import bits, high_half, low_half, quotient, remainder, store_words
from ..readout_c import ReadoutC
from ..spec import WARP
from .spec import Sm100Spec

ROW_GROUP = 8 * 128  # bytes between groups of eight rows: the stride of a descriptor
# Fields of a descriptor, addresses and offsets in units of 16 bytes: start (bits 0-13), leading offset (16-29; not
# used under a swizzle, 1), stride (32-45), version (46-48), swizzle (61-63; 2 is the 128-byte one).
DESCRIPTOR = 1 << 16 | (ROW_GROUP // 16) << 32 | 1 << 46 | 2 << 61
K_BYTES = 32  # of a row that one MMA contracts over
TYPE_CODES = {"f32": 2, "bf16": 1, "f16": 0}  # of an operand, in the instruction's shape; f32 is read as tf32


def descriptor(address):
    """The shared-memory descriptor of a matrix whose first row and column are at an address."""
    return Int64(DESCRIPTOR) + Int64(address >> 4)


def instruction_shape(kind: str, columns: int) -> int:
    """The MMA's instruction descriptor: f32 sums, both operands of a kind, K-major, N and M."""
    code = TYPE_CODES[kind]
    return 1 << 4 | code << 7 | code << 10 | columns // 8 << 17 | ROWS // 16 << 24


class OfEpilogue(ReadoutC):
    """`ReadoutC` whose threads are counted by parts, not by hardware warps."""

    def _place(self, k: int):
        number = cute.arch.thread_idx()[0]
        if self.spec.halves:
            number = self.spec.part(quotient(number, WARP)) * WARP + remainder(number, WARP)
        piece = number + k * self.spec.threads
        return quotient(piece, self.pieces), remainder(piece, self.pieces)


class Operands:
    """Where the MMAs find their operands; staging of C."""

    def __init__(self, spec: Sm100Spec, readout_c: ReadoutC) -> None:
        self.spec = spec
        self.readout_c = readout_c
        self.kind = "tf32" if spec.state_kind == "f32" else "f16"
        self.shape = instruction_shape(spec.state_kind, spec.columns)
        self.steps = spec.problem.d_state * spec.problem.state_bytes // K_BYTES

    def offset(self, step: int, block_bytes: int) -> int:
        """Bytes from a matrix's start to its part in the `step`-th MMA."""
        return step * K_BYTES // 128 * block_bytes + step * K_BYTES % 128

    def _chunk(self, token, chunk):
        """Byte offset of a token's 16-byte chunk in C."""
        place = remainder(chunk, 8) ^ remainder(token, 8)
        return quotient(chunk, 8) * self.spec.tensor.c_block + token * 128 + place * 16

    @cute.jit
    def stage(self, raw, words):
        """Put the pieces of C that `ReadoutC.load` asked for where the MMA reads them, f32 for an f32 state."""
        for k in cutlass.range_constexpr(self.readout_c.rounds):
            token, piece = self.readout_c._place(k)
            chunks = [words[k]]
            if cutlass.const_expr(self.spec.state_kind == "f32"):
                values = [bits(half(self.spec.io_kind, w)) for w in words[k] for half in (low_half, high_half)]
                chunks = [values[:4], values[4:]]
            if token < self.spec.problem.tokens:
                for e in cutlass.range_constexpr(len(chunks)):
                    at = self.spec.tensor.c + self._chunk(token, piece * len(chunks) + e)
                    store_words(raw + cute.assume(at, divby=16), chunks[e])
