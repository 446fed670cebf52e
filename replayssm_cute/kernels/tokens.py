"""Inputs and outputs of the tokens: x of every position and the gates in shared memory, appended rows, the epilogue.

A warp's inputs of one head are, for each tile of 16 values of P that it owns, rows of 32 bytes: x of the ring
positions, x of the new tokens, z of the new tokens. The two halves of a row change places every four rows, so that
ldmatrix finds eight rows of one half in different banks.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from .bundles import NewTokens, Row, Share, Shared, Tensors, Thread, Turn
from .decay import Vectors
from .flush_terms import x_fragment
from .highest import split
from .primitives import (
    HIGH_HALVES,
    LOW_HALVES,
    as_float,
    bits,
    copy_async,
    high_half,
    load_matrices,
    load_words,
    low_half,
    mma_tf32,
    pack,
    permute,
    quotient,
    remainder,
    store_words,
)
from .spec import P_TILE, SKIPPED, StepSpec

ROW_BYTES = 32
PIECE = 8  # values in 16 bytes, which a thread copies at once


def _silu(v: Float32) -> Float32:
    return v / (Float32(1.0) + cute.math.exp(-v))


def place(row: Int32, half: Int32) -> Int32:
    """Byte offset of half a row in a warp's inputs."""
    return row * ROW_BYTES + (half ^ remainder(quotient(row, 4), 2)) * 16


class Tokens:
    """The phases of a step kernel that read the tokens' inputs and write what becomes of them."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec
        self.warp_rows = P_TILE * spec.tiles  # of P that a warp owns
        self.x_rows = spec.ring_positions  # first row of the new tokens' x
        self.z_rows = spec.ring_positions + spec.problem.tokens

    def _pieces(self, rows: int, share: Share):
        """Deal pieces of some rows of x or z, of all heads, to the CTA's threads: (head, row, column, is there one).

        A piece is 16 bytes, its column from the CTA's first row of P. Neighbouring threads have neighbouring pieces:
        memory sees whole rows of a head.
        """
        spec = self.spec
        each = spec.head_warps * self.warp_rows // PIECE
        heads = spec.config.heads_per_cta
        for first in range(0, heads * rows * each, spec.threads):
            number = first + share.rows.thread
            head = quotient(number, rows * each) if heads > 1 else Int32(0)
            row = remainder(quotient(number, each), rows)
            yield head, row, remainder(number, each) * PIECE, (number < share.count * (rows * each))

    def inputs(self, index, warp):
        """Offset of the inputs of the `index`-th head's `warp`-th warp."""
        shared = self.spec.shared
        at = shared.inputs + (index * self.spec.head_warps + warp) * shared.input_bytes
        return cute.assume(at, divby=32)

    def _place(self, index, row, column):
        """Offset of a piece in the inputs."""
        spec = self.spec
        tile = quotient(remainder(column, self.warp_rows), P_TILE) * spec.shared.input_tile_bytes
        return self.inputs(index, quotient(column, self.warp_rows)) + (
            tile + place(row, remainder(quotient(column, PIECE), 2))
        )

    @cute.jit
    def copy_new(self, tensors: Tensors, shared: Shared, new: NewTokens, share: Share):
        """Ask for the heads' x and z of the new tokens; those that a ragged row lacks become zeros."""
        for index, token, column, wanted in self._pieces(self.spec.problem.tokens, share):
            if wanted:
                outer, where = self.spec.new_token(new, token)
                bytes_ = Int32(16)
                if cutlass.const_expr(self.spec.problem.ragged):
                    bytes_ = Int32(cutlass.select_(token < new.length, 16, 0))
                for tensor, first in ((tensors.x, self.x_rows), (tensors.z, self.z_rows)):
                    if cutlass.const_expr(tensor is not None):
                        head, p = share.head0 + index, share.rows.cta_p0 + column
                        source = self.spec.pointer(tensor, outer, (where, head), p, PIECE)
                        target = shared.address + self._place(index, first + token, column)
                        copy_async(target, Int64(source.toint()), bytes_)

    @cute.jit
    def copy_ring(self, tensors: Tensors, shared: Shared, row: Row, share: Share):
        """Ask for the heads' x of the ring positions; dead ones become zeros ("whole": those beyond the ring)."""
        always = 8 * self.spec.always_steps
        base = self.spec.base(tensors.x_cache, row.slot)
        self._copy_rows(tensors, base, shared, row, share, 0, always)
        for first in cutlass.range_constexpr(always, self.spec.ring_positions, SKIPPED):
            if first < row.pnat:
                self._copy_rows(tensors, base, shared, row, share, first, SKIPPED)

    @cute.jit
    def _copy_rows(self, tensors: Tensors, base, shared: Shared, row: Row, share: Share, first, rows):
        for index, place_in, column, wanted in self._pieces(rows, share):
            if wanted:
                position = first + place_in
                ring = self.spec.read_row(row, position)
                head, p = share.head0 + index, share.rows.cta_p0 + column
                source = self.spec.pointer(tensors.x_cache, row.slot, (head, ring), p, PIECE, base)
                exists = position < self.spec.problem.ring_rows
                if cutlass.const_expr(not self.spec.whole):
                    exists = position < row.pnat
                bytes_ = Int32(cutlass.select_(exists, 16, 0))
                copy_async(shared.address + self._place(index, position, column), Int64(source.toint()), bytes_)

    @cute.jit
    def await_copies(self, shared: Shared, row: Row, share: Share):
        """Wait for this thread's copies; a barrier of the CTA has to follow.

        "whole" copied rows that the cursors do not count: zeros over them, since NaN must not meet a product.
        """
        cute.arch.cp_async_wait_group(0)
        if cutlass.const_expr(self.spec.whole):
            for index, position, column, wanted in self._pieces(self.spec.ring_positions, share):
                if wanted & (self.spec.is_live(row, position) == False):  # noqa: E712
                    at = self._place(index, position, column)
                    store_words(shared.raw + cute.assume(at, divby=16), [Int32(0)] * 4)

    @cute.jit
    def new_x(self, tensors: Tensors, new: NewTokens, share: Share):
        """The heads' new x straight from memory: needs no slot."""
        pieces = list(self._pieces(self.spec.problem.tokens, share))
        words = cute.make_rmem_tensor(cute.make_layout(4 * len(pieces)), Int32)
        for k, (index, token, column, wanted) in enumerate(pieces):
            if wanted:
                outer, where = self.spec.new_token(new, token)
                head, p = share.head0 + index, share.rows.cta_p0 + column
                found = load_words(self.spec.pointer(tensors.x, outer, (where, head), p, PIECE), 4)
                for e in cutlass.range_constexpr(4):
                    words[4 * k + e] = found[e]
        return words

    @cute.jit
    def append_new(self, tensors: Tensors, words, row: Row, share: Share):
        """Append what `new_x` read, bit for bit."""
        for k, piece in enumerate(self._pieces(self.spec.problem.tokens, share)):
            index, token, column, wanted = piece
            if wanted & (token < row.new.length):
                target = self._appended(tensors, row, share, index, token, column)
                store_words(target, [words[4 * k + e] for e in range(4)])

    @cute.jit
    def append_x(self, tensors: Tensors, shared: Shared, row: Row, share: Share):
        """Append the new tokens' x from shared memory, bit for bit."""
        for index, token, column, wanted in self._pieces(self.spec.problem.tokens, share):
            if wanted & (token < row.new.length):
                at = self._place(index, self.x_rows + token, column)
                words = load_words(shared.raw + cute.assume(at, divby=16), 4)
                store_words(self._appended(tensors, row, share, index, token, column), words)

    def _appended(self, tensors, row, share, index, token, column):
        """Where a piece of a new token's x goes in the ring."""
        ring = self.spec.ring_row(row.start, row.pnat + token)
        inner = (share.head0 + index, ring)
        return self.spec.pointer(tensors.x_cache, row.slot, inner, share.rows.cta_p0 + column, PIECE)

    def x_words(self, address, lane, steps=None):
        """A tile's x of some k-steps, of all of them: words of rows g and g + 8 of P, positions 2t and 2t + 1."""
        steps = range(self.spec.steps) if steps is None else steps
        half, second, within = remainder(quotient(lane, 8), 2), quotient(lane, 16), remainder(lane, 8)
        words = []
        for k in range(0, len(steps), 2):
            row = self._input_row(steps[k], within)
            if k + 1 < len(steps):
                row = Int32(cutlass.select_(second == 0, row, self._input_row(steps[k + 1], within)))
                four = load_matrices(address + place(row, half), 4, True)
                words += [four[:2], four[2:]]
            else:
                words.append(load_matrices(address + place(row, half), 2, True))
        return words

    def _input_row(self, step, within):
        if step < self.spec.ring_steps:
            return Int32(8 * step + within)
        return self.x_rows + self.spec.token(8 * (step - self.spec.ring_steps) + within)

    def gates(self, address, lane):
        """z of each tile and token tile: words of rows g and g + 8 of P, tokens 2t and 2t + 1."""
        half = remainder(quotient(lane, 8), 2)
        return [
            [
                load_matrices(
                    address
                    + (
                        place(self.z_rows + self.spec.token(8 * n + remainder(lane, 8)), half)
                        + tile * self.spec.shared.input_tile_bytes
                    ),
                    2,
                    True,
                )
                for n in range(self.spec.token_tiles)
            ]
            for tile in range(self.spec.tiles)
        ]

    def contributions(self, address, weights, row: Row, lane):
        """What the ring and the new tokens add to the outputs.

        `weights(step, n)` is a B-fragment; the result is per tile and n-tile (rows g, g + 8) x (tokens 2t, 2t + 1).
        """
        spec = self.spec
        sums = [[[Float32(0.0)] * 4 for _ in range(spec.token_tiles)] for _ in range(spec.tiles)]
        always = [*range(spec.always_steps), *range(spec.ring_steps, spec.steps)]
        sums = self._contribute(sums, address, weights, always, lane)
        if not spec.skips:
            return sums
        held = cute.make_rmem_tensor(cute.make_layout(4 * spec.tiles * spec.token_tiles), Float32)
        self._put(held, sums)
        for step in range(spec.always_steps, spec.ring_steps, 2):
            self._contribute_live(held, address, weights, step, row, lane)
        return self._got(held)

    @cute.jit
    def _contribute_live(self, held, address, weights, step, row: Row, lane):
        """Add the two ring steps from `step` where a position of theirs is live."""
        if self.spec.has_live(row, step):
            self._put(held, self._contribute(self._got(held), address, weights, [step, step + 1], lane))

    def _put(self, held, sums):
        for k, value in enumerate(v for tile in sums for four in tile for v in four):
            held[k] = value

    def _got(self, held):
        n = self.spec.token_tiles
        return [[[held[4 * (tile * n + k) + e] for e in range(4)] for k in range(n)] for tile in range(self.spec.tiles)]

    def _contribute(self, sums, address, weights, steps, lane):
        """Add what some k-steps contribute."""
        spec = self.spec
        x_words = [
            self.x_words(address + tile * spec.shared.input_tile_bytes, lane, steps) for tile in range(spec.tiles)
        ]
        for n in range(spec.token_tiles):
            for k, step in enumerate(steps):
                if step > spec.ring_steps + n:  # tokens of later tiles do not reach this one
                    continue
                fragment = weights(step, n)
                for tile in range(spec.tiles):
                    a_frag = [bits(v) for v in x_fragment(x_words[tile][k], spec)]
                    if spec.highest:  # x is exact in tf32, its weight takes two terms
                        high, low = split(fragment)
                        sums[tile][n] = mma_tf32(sums[tile][n], a_frag, low)
                        fragment = high
                    sums[tile][n] = mma_tf32(sums[tile][n], a_frag, fragment)
        return sums

    @cute.jit
    def store_outputs(self, tensors, shared, read_out, sums, gates, turn: Turn, new: NewTokens, p0, thread: Thread):
        """Decayed read-out plus contributions: gate, round and store, two rows of P a word.

        Lanes g and g ^ 1 trade tokens, so that one holds neighbouring rows of token 2t, the other of token 2t + 1.
        """
        vectors = Vectors(self.spec, turn.index)
        g, t = thread.g, thread.t
        odd = remainder(g, 2)
        low_rows = Int32(cutlass.select_(odd == 1, 0x1054, LOW_HALVES))
        high_rows = Int32(cutlass.select_(odd == 1, 0x3276, HIGH_HALVES))
        for n in cutlass.range_constexpr(self.spec.token_tiles):
            at = self.spec.shared.vectors + 4 * (vectors.factors + 8 * n + 2 * t)
            factors = [as_float(w) for w in load_words(shared.raw + cute.assume(at, divby=8), 2)]
            words = []
            for tile in cutlass.range_constexpr(self.spec.tiles):
                halves = []
                for e in cutlass.range_constexpr(2):
                    start = 4 * (tile * self.spec.token_tiles + n) + e
                    pair = [read_out[start + 2 * side] * factors[e] + sums[tile][n][2 * side + e] for side in range(2)]
                    if cutlass.const_expr(len(gates) > 0):
                        half = (low_half, high_half)[e]
                        pair = [v * _silu(half(self.spec.io_kind, gates[tile][n][side])) for side, v in enumerate(pair)]
                    halves.append(pack(self.spec.io_kind, pair[0], pair[1]))
                kept = Int32(cutlass.select_(odd == 1, halves[1], halves[0]))
                sent = Int32(cutlass.select_(odd == 1, halves[0], halves[1]))
                got = cute.arch.shuffle_sync_bfly(sent, 4)
                words.append([permute(kept, got, low_rows), permute(kept, got, high_rows)])
            token = 8 * n + 2 * t + odd
            if token < new.length:
                for tile in cutlass.range_constexpr(self.spec.tiles):
                    for side in cutlass.range_constexpr(2):
                        p = p0 + P_TILE * tile + 8 * side + g - odd
                        where = (new.first + token, turn.head)
                        store_words(self.spec.pointer(tensors.out, new.outer, where, p, 2), [words[tile][side]])

    @cute.jit
    def store_zeros(self, tensors: Tensors, new: NewTokens, share: Share, thread: Thread):
        """The outputs of a padding row."""
        for i in cutlass.range(share.turns, unroll=1):
            head = share.first + i * self.spec.config.parallel_heads
            for k in cutlass.range_constexpr(-(-self.spec.problem.tokens // 16)):
                token, half = 16 * k + quotient(thread.lane, 2), remainder(thread.lane, 2)
                if token < new.length:
                    for tile in cutlass.range_constexpr(self.spec.tiles):
                        p = share.rows.p0 + P_TILE * tile + 8 * half
                        where = (new.first + token, head)
                        store_words(self.spec.pointer(tensors.out, new.outer, where, p, 8), [Int32(0)] * 4)

    @cute.jit
    def zero_tail(self, tensors: Tensors, number, new: NewTokens, share: Share, thread: Thread):
        """Zeros for ragged tokens that belong to no row, shared out over the rows' CTAs; `number` is the row's."""
        for token in cutlass.range(new.used + number, new.total, tensors.batch, unroll=1):
            for i in cutlass.range(share.turns, unroll=1):
                head = share.first + i * self.spec.config.parallel_heads
                if thread.lane < 2 * self.spec.tiles:
                    p = share.rows.p0 + 8 * thread.lane
                    store_words(self.spec.pointer(tensors.out, 0, (token, head), p, 8), [Int32(0)] * 4)
