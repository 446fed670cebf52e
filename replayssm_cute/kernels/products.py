"""B·C of every position with every new token, once per CTA: all its heads share a group.

Work is cut into 16-position tiles (M of the MMA) and, where warps are left over, into slices of N. Each part
goes to one warp; slices of the same tile are added when they are read back from shared memory. The warps that read
B of the new tokens also append it to the ring.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .bundles import Row, Shared, Tensors, Thread
from .primitives import load_words, mma_16bit, quotient, remainder, store_words
from .readout_c import ReadoutC
from .ring_b import RingB
from .spec import StepSpec


class Products:
    """The B·C phase of a step kernel."""

    def __init__(self, spec: StepSpec, readout_c: ReadoutC) -> None:
        self.spec = spec
        self.readout_c = readout_c
        self.columns = spec.units // spec.shared.slices  # 32-column units of a warp's slice
        self.ring_b = RingB(spec)
        self.ring_tiles = -(-spec.ring_steps // 2)
        self.token_tiles = spec.shared.tiles - self.ring_tiles
        self.rounds = -(-spec.shared.tiles // spec.shared.tile_warps)

    def tile(self, number):
        """The tile dealt as the `number`-th: where some are skipped, the oldest rows and the new tokens come first."""
        if not self.spec.skips:
            return number
        of_tokens, of_ring = number + self.ring_tiles - 1, number - self.token_tiles
        later = Int32(cutlass.select_(number <= self.token_tiles, of_tokens, of_ring))
        later = Int32(cutlass.select_(number < self.spec.shared.tiles, later, number))
        return Int32(cutlass.select_(number == 0, 0, later))

    def wanted(self, row: Row, tile):
        """Whether a tile of a later round, where some are skipped, is there and has anything to work on."""
        return ((tile >= self.ring_tiles) & (tile < self.spec.shared.tiles)) | self.spec.has_live(row, 2 * tile)

    def _column(self, thread: Thread, step: int) -> Int32:
        """First of the 8 columns that a lane reads in the `step`-th 32-column unit of its warp's slice.

        Warps left over read what the last slice reads: within the row, and from L1.
        """
        shared = self.spec.shared
        mine = cutlass.min(quotient(thread.warp, shared.tile_warps), shared.slices - 1)
        return (mine + step * shared.slices) * 32 + 8 * thread.t

    @cute.jit
    def ask(self, held, tensors: Tensors, shared: Shared, row: Row, thread: Thread):
        """Ask for B of a warp's first tile; what of its later ones comes by copies too."""
        layout = self.spec.shared
        number = remainder(thread.warp, layout.tile_warps)
        self.load_rows(held, tensors, row, self.tile(number), thread)
        if cutlass.const_expr(self.ring_b.copied):
            base = self.spec.base(tensors.b_cache, row.slot)
            for more in cutlass.range_constexpr(self.rounds):
                tile = self.tile(number + more * layout.tile_warps)
                if cutlass.const_expr(more == 0 or not self.spec.skips):
                    self._copy(tensors, base, shared, row, tile, thread)
                else:
                    if self.wanted(row, tile):
                        self._copy(tensors, base, shared, row, tile, thread)
            cute.arch.cp_async_commit_group()

    @cute.jit
    def _copy(self, tensors: Tensors, base, shared: Shared, row: Row, tile, thread: Thread):
        """Ask for the ring positions of a warp's tile, each lane for what it takes from there."""
        if quotient(thread.warp, self.spec.shared.tile_warps) < self.spec.shared.slices:
            for half in cutlass.range_constexpr(2):
                unit = 2 * tile + half
                if unit < self.spec.ring_steps:
                    for k in cutlass.range_constexpr(self.columns):
                        self.ring_b.copy(tensors, base, shared, row, thread.g + 8 * unit, self._column(thread, k))

    @cute.jit
    def load_rows(self, held, tensors: Tensors, row: Row, tile, thread: Thread):
        """Ask for B of a warp's tile, position g of each of its halves; `tile` is the same in all lanes.

        Of ring positions only where they do not come by copies.
        """
        for half in cutlass.range_constexpr(2):
            unit = 2 * tile + half
            at = half * 4 * self.columns
            if cutlass.const_expr(self.ring_b.copied):
                if (unit >= self.spec.ring_steps) & (unit < self.spec.steps):
                    self._load_new(held, at, tensors, row, unit, thread)
            else:
                if unit < self.spec.ring_steps:
                    ring = self.spec.read_row(row, thread.g + 8 * unit)
                    for k in cutlass.range_constexpr(self.columns):
                        where = (row.group, ring)
                        pointer = self.spec.pointer(tensors.b_cache, row.slot, where, self._column(thread, k), 8)
                        self._hold(held, at + 4 * k, load_words(pointer, 4))
                elif unit < self.spec.steps:
                    self._load_new(held, at, tensors, row, unit, thread)

    def _load_new(self, held, at, tensors, row: Row, unit, thread):
        outer, index = self.spec.new_token(row.new, thread.g + 8 * (unit - self.spec.ring_steps))
        for k in range(self.columns):
            pointer = self.spec.pointer(tensors.b, outer, (index, row.group), self._column(thread, k), 8)
            self._hold(held, at + 4 * k, load_words(pointer, 4))

    def _hold(self, held, at, words):
        for e, word in enumerate(words):
            held[at + e] = word

    def new_rows(self):
        """Registers for `load_rows`, zeros: a tile's second half may have no positions."""
        held = cute.make_rmem_tensor(cute.make_layout(8 * self.columns), Int32)
        for k in range(8 * self.columns):
            held[k] = Int32(0)
        return held

    def multiply(self, held, tensors: Tensors, shared: Shared, row: Row, appends, flush, tile, thread: Thread):
        """Ask for a tile and multiply it."""
        self.load_rows(held, tensors, row, tile, thread)
        self.partial_sums(held, tensors, shared, row, appends, flush, tile, thread)

    @cute.jit
    def partial_sums(self, held, tensors: Tensors, shared: Shared, row: Row, appends, flush, tile, thread: Thread):
        """Multiply a tile's slice, leave the sums, (position, token), in its part of `products`, append new rows.

        A flush finds the ring's rows in shared memory, if they are kept.
        """
        g, t = thread.g, thread.t
        slice_index = quotient(thread.warp, self.spec.shared.tile_warps)
        if slice_index < self.spec.shared.slices:
            if cutlass.const_expr(self.ring_b.copied):
                self._take(held, tensors, shared, row, tile, thread)
            # two chains of accumulation, as in the read-out
            chains = [[[Float32(0.0)] * 4 for _ in range(2)] for _ in range(self.spec.token_tiles)]
            for k in cutlass.range_constexpr(self.columns):
                halves = [[held[half * 4 * self.columns + 4 * k + e] for e in range(4)] for half in range(2)]
                for n in cutlass.range_constexpr(self.spec.token_tiles):
                    c_words = self.readout_c.piece(shared.raw, 8 * n + g, self._column(thread, k))
                    for q in cutlass.range_constexpr(2):
                        a_frag = tuple(halves[half][2 * q + e] for e in range(2) for half in range(2))
                        b_frag = (c_words[2 * q], c_words[2 * q + 1])
                        chains[n][q] = mma_16bit(self.spec.io_kind, chains[n][q], a_frag, b_frag)
            sums = [[first + second for first, second in zip(*pair, strict=True)] for pair in chains]
            for half in cutlass.range_constexpr(2):
                unit = 2 * tile + half
                if unit < self.spec.steps:
                    at = (
                        slice_index * self.spec.shared.product_floats
                        + (8 * unit + g) * self.spec.shared.product_stride
                        + 2 * t
                    )
                    if 2 * t < self.spec.shared.product_stride:
                        for n in cutlass.range_constexpr(self.spec.token_tiles):
                            shared.products[at + 8 * n] = sums[n][2 * half]
                            shared.products[at + 8 * n + 1] = sums[n][2 * half + 1]
                if cutlass.const_expr(self.ring_b.kept and not self.ring_b.copied):
                    if flush & (unit < self.spec.ring_steps):
                        self._keep(held, half * 4 * self.columns, shared, row, 8 * unit + g, thread)
                token = g + 8 * (unit - self.spec.ring_steps)
                if appends & (token >= 0) & (token < row.new.length) & (unit >= self.spec.ring_steps):
                    ring = self.spec.ring_row(row.start, row.pnat + token)
                    for k in cutlass.range_constexpr(self.columns):
                        where = (row.group, ring)
                        pointer = self.spec.pointer(tensors.b_cache, row.slot, where, self._column(thread, k), 8)
                        store_words(pointer, [held[half * 4 * self.columns + 4 * k + e] for e in range(4)])

    @cute.jit
    def _take(self, held, tensors: Tensors, shared: Shared, row: Row, tile, thread: Thread):
        """A tile's ring positions, which this lane has asked for and waited for."""
        for half in cutlass.range_constexpr(2):
            unit = 2 * tile + half
            if unit < self.spec.ring_steps:
                for k in cutlass.range_constexpr(self.columns):
                    words = self.ring_b.get(tensors, shared, row, thread.g + 8 * unit, self._column(thread, k), 8)
                    self._hold(held, half * 4 * self.columns + 4 * k, words)

    def _keep(self, held, first, shared, row, position, thread):
        """Put this lane's pieces of a ring position's B where flushes find them."""
        for k in range(self.columns):
            words = [held[first + 4 * k + e] for e in range(4)]
            self.ring_b.put(shared, row, position, self._column(thread, k), words)

    def dot(self, products, position, token):
        """B·C of a position and a token."""
        shared = self.spec.shared
        if shared.product_stride < self.spec.tokens_pad:  # lanes beyond the last token read what the last one has
            token = self.spec.token(token)
        at = position * shared.product_stride + token
        value = products[at]
        for part in range(1, shared.slices):
            value = value + products[at + part * shared.product_floats]
        return value
