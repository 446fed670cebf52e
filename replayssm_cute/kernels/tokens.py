"""Inputs and outputs of the new tokens: x of every position, gates, appended ring rows, the epilogue."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .decay import Decay
from .primitives import bits, high_half, load_words, low_half, mma_tf32, pack, store_words, to_tf32
from .products import Products
from .spec import StepSpec
from .state_tile import TRUNCATION_GAIN, x_fragment


def _silu(v: Float32) -> Float32:
    return v / (Float32(1.0) + cute.math.exp(-v))


class Tokens:
    """The phases of a step kernel that read the tokens' inputs and write what becomes of them."""

    def __init__(self, spec: StepSpec, products: Products, decay: Decay) -> None:
        self.spec = spec
        self.products = products
        self.decay = decay

    def pair(self, tensor, outer, inner, p0, g):
        """Address of the two rows of P that a lane owns, 2g and 2g + 1 of its warp's 16: one word."""
        return self.spec.pointer(tensor, outer, inner, p0 + 2 * g, 2)

    def load_ring_x(self, x_cache, slot, head, p0, start, pnat, g, t):
        """x of the ring positions t, t + 4, ... as words of rows 2g and 2g + 1; dead rows not yet masked."""
        return [
            load_words(self.pair(x_cache, slot, (head, self.spec.read_row(start, pnat, t + 4 * k)), p0, g), 1)[0]
            for k in range(2 * self.spec.ring_steps)
        ]

    def load_new(self, x, z, d, row, head, p0, g, t):
        """A head's inputs of the new tokens that need no slot: words of x and of the gates, and D.

        x of tokens t, t + 4, ... and z of this lane's outputs, per n-tile tokens 2t and 2t + 1, for rows 2g and
        2g + 1; tokens beyond T repeat the last.
        """
        spec = self.spec

        def word(tensor, token):
            return load_words(self.pair(tensor, row, (spec.token(token), head), p0, g), 1)[0]

        words = [word(x, t + 4 * k) for k in range(2 * spec.token_tiles)]
        gates = [] if z is None else [word(z, 2 * t + e + 8 * n) for n in range(spec.token_tiles) for e in range(2)]
        return words, gates, Float32(0.0) if d is None else Float32(d[head, 0])

    def mask_x(self, ring_words, new_words, start, pnat, t):
        """Words of all positions with dead rows and tokens beyond T as zeros: NaN in them must not meet a product."""
        words = [
            Int32(cutlass.select_(self.spec.is_live(start, pnat, t + 4 * k), word, Int32(0)))
            for k, word in enumerate(ring_words)
        ]
        for k, word in enumerate(new_words):
            inside = t + 4 * k < self.spec.problem.tokens
            words.append(Int32(cutlass.select_(inside, word, Int32(0))))
        return words

    def contributions(self, x_words, products, vectors, head_index, skip, start, pnat, g, t):
        """What the ring and the new tokens add to the outputs, and the factors of the read-out.

        Nothing here waits for the state.

        Returns:
            Per n-tile an accumulator tile (rows 2g, 2g + 1) x (tokens 2t, 2t + 1), and the two tokens' factors.
        """
        offsets = self.decay.offsets(head_index)
        total = vectors[offsets[4]]
        if self.spec.state_kind == "f32":
            total = total * Float32(TRUNCATION_GAIN)
        tiles, factors = [], []
        for n in range(self.spec.token_tiles):
            tile = [Float32(0.0)] * 4
            for step in range(self.spec.ring_steps + n + 1):  # tokens of later tiles do not reach this one
                dots = self.products.fragment(products, step, n, g, t)
                weights = self.decay.weight_fragment(dots, vectors, offsets, skip, start, pnat, step, n, g, t)
                a_frag = [bits(v) for v in x_fragment(x_words, step, self.spec)]
                tile = mma_tf32(tile, a_frag, [to_tf32(w) for w in weights])
            tiles.append(tile)
            factors.append([total * vectors[offsets[1] + 8 * n + 2 * t + e] for e in range(2)])
        return tiles, factors

    @cute.jit
    def store_outputs(self, out, read_out, tiles, factors, gates, row, head, p0, g, t):
        """Decayed read-out plus contributions: gate, round and store, two rows of P a word."""
        for n in cutlass.range_constexpr(self.spec.token_tiles):
            for e in cutlass.range_constexpr(2):
                low = read_out[n][e] * factors[n][e] + tiles[n][e]
                high = read_out[n][2 + e] * factors[n][e] + tiles[n][2 + e]
                if cutlass.const_expr(len(gates) > 0):
                    word = gates[2 * n + e]
                    low = low * _silu(low_half(self.spec.io_kind, word))
                    high = high * _silu(high_half(self.spec.io_kind, word))
                token = 2 * t + e + 8 * n
                if token < self.spec.problem.tokens:
                    pointer = self.pair(out, row, (token, head), p0, g)
                    store_words(pointer, [pack(self.spec.io_kind, low, high)])

    @cute.jit
    def store_zeros(self, out, row, head0, count, p0, g, t):
        """The outputs of a padding row."""
        for i in cutlass.range(count, unroll=1):
            for k in cutlass.range_constexpr(2 * self.spec.token_tiles):
                token = t + 4 * k
                if token < self.spec.problem.tokens:
                    store_words(self.pair(out, row, (token, head0 + i), p0, g), [Int32(0)])

    @cute.jit
    def append_x(self, x_cache, x_words, slot, head, p0, start, pnat, g, t):
        """Append the new tokens' x, bit for bit."""
        for k in cutlass.range_constexpr(2 * self.spec.token_tiles):
            s = t + 4 * k
            if s < self.spec.problem.tokens:
                pointer = self.pair(x_cache, slot, (head, self.spec.ring_row(start, pnat + s)), p0, g)
                store_words(pointer, [x_words[2 * self.spec.ring_steps + k]])

    @cute.jit
    def append_b(self, b_cache, b, row, slot, group, start, pnat):
        """Append the new tokens' B, 16 bytes a thread."""
        pieces = self.spec.problem.d_state // 8
        thread = cute.arch.thread_idx()[0]
        for k in cutlass.range_constexpr(-(-self.spec.problem.tokens * pieces // self.spec.threads)):
            piece = thread + k * self.spec.threads
            if piece < self.spec.problem.tokens * pieces:
                s, column = piece // pieces, piece % pieces * 8
                values = load_words(self.spec.pointer(b, row, (s, group), column, 8), 4)
                ring = self.spec.ring_row(start, pnat + s)
                store_words(self.spec.pointer(b_cache, slot, (group, ring), column, 8), values)
