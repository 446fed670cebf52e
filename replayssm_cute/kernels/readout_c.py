"""C of the new tokens in shared memory, where every head of a CTA reads it: as f32 where the state is f32."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .primitives import as_float, bits, high_half, load_matrices, load_words, low_half, pack, store_words
from .spec import StepSpec


class ReadoutC:
    """Staging of C, and its fragments."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec
        self.wide = spec.state_kind == "f32"
        self.pieces = spec.problem.d_state // 8  # pieces of 8 columns in a row
        self.rounds = -(-spec.problem.tokens * self.pieces // spec.threads)

    def _place(self, k: int) -> tuple[Int32, Int32]:
        piece = cute.arch.thread_idx()[0] + k * self.spec.threads
        return piece // self.pieces, piece % self.pieces

    def load(self, c, row, group):
        """Ask for this thread's pieces of C; threads beyond the last piece repeat the last token's."""
        words = []
        for k in range(self.rounds):
            token, piece = self._place(k)
            words.append(load_words(self.spec.pointer(c, row, (self.spec.token(token), group), piece * 8, 8), 4))
        return words

    @cute.jit
    def stage(self, raw, words):
        """Put the pieces that `load` asked for into shared memory."""
        shared = self.spec.shared
        for k in cutlass.range_constexpr(self.rounds):
            token, piece = self._place(k)
            stored = [words[k]]
            if cutlass.const_expr(self.wide):
                values = [bits(side(self.spec.io_kind, w)) for w in words[k] for side in (low_half, high_half)]
                stored = [values[:4], values[4:]]
            if token < self.spec.problem.tokens:
                at = shared.c + token * shared.c_stride + piece * (16 * len(stored))
                for q in cutlass.range_constexpr(len(stored)):
                    store_words(raw + cute.assume(at + 16 * q, divby=16), stored[q])

    def piece(self, raw, token, column):
        """Eight columns of C of a token as four words."""
        shared = self.spec.shared
        at = shared.c + self.spec.token(token) * shared.c_stride + column * (4 if self.wide else 2)
        if not self.wide:
            return load_words(raw + cute.assume(at, divby=16), 4)
        values = [as_float(w) for q in range(2) for w in load_words(raw + cute.assume(at + 16 * q, divby=16), 4)]
        return [pack(self.spec.io_kind, values[k], values[k + 1]) for k in range(0, 8, 2)]

    def address(self, base, lane, n):
        """Shared-memory address of this lane's row of token tile n's matrices."""
        shared = self.spec.shared
        return base + shared.c + self.spec.token(8 * n + lane % 8) * shared.c_stride + (lane // 8) * 16

    def operands(self, address, quad):
        """B-fragments of four 16-byte pieces of C's columns, one for each of the MMAs that they feed, in turn.

        Lane (g, t) holds of token g: f32 state, column t of a piece and of the next; 16-bit MMAs, columns 2t and
        2t + 1 of a piece and of the next; 16-bit state through tf32, column 2t of one piece, and 2t + 1.
        """
        words = load_matrices(address + quad * 64, 4)
        if self.wide or self.spec.native:
            return [(words[0], words[1]), (words[2], words[3])]
        io = self.spec.io_kind
        return [(bits(low_half(io, word)), bits(high_half(io, word))) for word in words]
