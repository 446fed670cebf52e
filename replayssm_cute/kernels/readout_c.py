"""C of the new tokens in shared memory, where every head of a CTA reads it.

For 2-byte states the rows lie there as they come. For f32 states the MMA of the read-out wants columns t and t + 4 of
eight in one lane, so each 16-byte piece (c0 .. c7) is stored as (c0, c4, c1, c5, c2, c6, c3, c7).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .bundles import Thread
from .primitives import (
    HIGH_HALVES,
    LOW_HALVES,
    bits,
    high_half,
    load_matrices,
    load_words,
    low_half,
    permute,
    quotient,
    remainder,
    store_words,
)
from .spec import StepSpec

HELD_WORDS = 16  # fragments of C that a lane keeps from turn to turn; more are read again


class ReadoutC:
    """Staging of C, and its fragments."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec
        self.interleaved = spec.state_kind == "f32"
        self.pieces = spec.problem.d_state // 8  # 16-byte pieces of a row
        self.rounds = -(-spec.problem.tokens * self.pieces // spec.threads)
        self.held = spec.config.turns > 1 and self.pieces * spec.token_tiles <= HELD_WORDS

    def _place(self, k: int) -> tuple[Int32, Int32]:
        piece = cute.arch.thread_idx()[0] + k * self.spec.threads
        return quotient(piece, self.pieces), remainder(piece, self.pieces)

    def load(self, c, new, group):
        """Ask for this thread's pieces of C; threads beyond the last piece repeat the last token's."""
        words = []
        for k in range(self.rounds):
            token, piece = self._place(k)
            outer, index = self.spec.new_token(new, token)
            words.append(load_words(self.spec.pointer(c, outer, (index, group), piece * 8, 8), 4))
        return words

    @cute.jit
    def stage(self, raw, words):
        """Put the pieces that `load` asked for into shared memory."""
        shared = self.spec.shared
        for k in cutlass.range_constexpr(self.rounds):
            token, piece = self._place(k)
            stored = words[k]
            if cutlass.const_expr(self.interleaved):
                stored = [
                    permute(words[k][i], words[k][i + 2], selector)
                    for i in range(2)
                    for selector in (LOW_HALVES, HIGH_HALVES)
                ]
            if token < self.spec.problem.tokens:
                store_words(raw + cute.assume(shared.c + token * shared.c_stride + piece * 16, divby=16), stored)

    def piece(self, raw, token, column):
        """Eight columns of C of a token, in their own order, as four words."""
        shared = self.spec.shared
        at = shared.c + self.spec.token(token) * shared.c_stride + column * 2
        words = load_words(raw + cute.assume(at, divby=16), 4)
        if not self.interleaved:
            return words
        return [permute(words[i], words[i + 1], selector) for selector in (LOW_HALVES, HIGH_HALVES) for i in (0, 2)]

    def address(self, base, lane, n):
        """Shared-memory address of this lane's row of token tile n's matrices."""
        shared = self.spec.shared
        return base + shared.c + self.spec.token(8 * n + remainder(lane, 8)) * shared.c_stride + quotient(lane, 8) * 16

    def quad(self, address, k):
        """A token tile's fragments of 32 columns: one word for each piece of 8.

        Lane (g, t) holds columns 2t and 2t + 1 of the piece, interleaved t and t + 4, of token g of the tile.
        """
        return load_matrices(address + k * 64, 4)

    def quads(self, address):
        """All of a token tile's fragments, to hold from turn to turn."""
        return [self.quad(address, k) for k in range(self.pieces // 4)]

    def hold(self, addresses, thread: Thread):
        """What a lane keeps of C from turn to turn, by token tile, empty if nothing; and what that has to gain back."""
        return [self.quads(at) for at in addresses] if self.held else [], None

    def operands(self, words):
        """B-fragments of a quad's MMAs: two words each for 16 columns, or one as f32 bits for 8."""
        if self.spec.native:
            return [(words[0], words[1]), (words[2], words[3])]
        io = self.spec.io_kind
        return [(bits(low_half(io, word)), bits(high_half(io, word))) for word in words]
