"""Materialize: checkpoints advanced through the oldest live rows of their rings, into other slots, for all layers.

A CTA moves one tile of one head of one layer (see `FoldShape`) for one row of the batch, or for all rows of the chain
that `moves` planned. The whole tile is asked for at once and stays in registers:

    S' = exp(C) S + sum_j exp(C - c_j) dt_j x_j (outer) B_j

over the rows j that are folded, c_j the sum of A dt up to row j and C its total, all in f32. C - c_j is summed from the
newest row to the oldest: no decay is a difference of two long sums. Where nothing is folded the bits are copied.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ...config import WARP
from ...kernels.primitives import CUTLASS_TYPE, as_float, bits, high_half, load_words, low_half, pack, store_words
from ..shapes import FoldShape
from . import layers, moves


class FoldKernel:
    """One folding kernel, specialized on a cache's geometry and dtypes, not on its layers and slots."""

    def __init__(self, shape: FoldShape) -> None:
        self.shape = shape
        s = self.spec = shape.spec
        self.splits = s.head_dim // shape.tile
        self.state_bytes = 16 // shape.chunk
        self.x_width = next(n for n in (4, 2, 1) if shape.rows % n == 0)  # words that one access of shared memory takes

    @cute.jit
    def __call__(self, table: cute.Tensor, rates: cute.Tensor, records: cute.Tensor, batch: Int32, stream):
        shape = self.shape
        self.kernel(table, rates, records).launch(
            grid=[table.shape[0] * (self.spec.heads * self.splits), batch, 1],
            block=[shape.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=shape.ctas_per_sm,
            preferred_smem_carveout=100,  # percent; asking needs no GPU
        )

    @cute.kernel
    def kernel(self, table: cute.Tensor, rates: cute.Tensor, records: cute.Tensor):
        spec, shape = self.spec, self.shape
        block, at, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        per_layer = spec.heads * self.splits
        layer, head = block // per_layer, block % per_layer // self.splits
        p0 = block % self.splits * shape.tile
        shared = SmemAllocator().allocate(shape.shared_bytes(), byte_alignment=16)
        first = p0 + thread // shape.columns * shape.rows
        mine = ((head * spec.head_dim + first) * spec.d_state + thread % shape.columns * shape.chunk) * self.state_bytes
        # Before anything waits for a record: where all tensors of the layer are.
        state, *ring = [layers.load(table, layer, k) for k in range(len(layers.TENSORS))]
        at = Int32(at)
        while at >= 0:
            move = moves.load_record(records, at)
            if move.src >= 0:
                tile = cute.make_rmem_tensor(cute.make_layout(4 * shape.rows), Int32)
                self.load(tile, state.place(move.src), mine)
                cute.arch.sync_warp()  # a fence for the scheduler: the state is asked for before all that follows
                if move.count > 0:
                    self.fold(tile, ring, rates, move, layer, head, p0, shared, thread)
                kept = shared + shape.kept_at
                if move.held != 0:
                    self.keep(tile, kept, thread)
                else:
                    self.store(tile, state.place(move.dst), mine)
                if move.release >= 0:
                    self.fetch(tile, kept, thread)
                    self.store(tile, state.place(move.release), mine)
                cute.arch.sync_threads()  # the next row of the chain writes the shared memory that this one read
            at = move.link

    # -----------------------------------------------------------------------------------------------
    # A thread's part of the tile
    # -----------------------------------------------------------------------------------------------

    def pieces(self, base, mine):
        """This thread's 16 bytes of each of its rows, in a slot of the state."""
        row = self.spec.d_state * self.state_bytes
        first = layers.at(base, cute.assume(mine, divby=16), Int32, 16)
        return [first + i * row // 4 for i in range(self.shape.rows)]

    def load(self, tile, base, mine) -> None:
        for i, piece in enumerate(self.pieces(base, mine)):
            for e, word in enumerate(load_words(piece, 4)):
                tile[4 * i + e] = word

    def store(self, tile, base, mine) -> None:
        for i, piece in enumerate(self.pieces(base, mine)):
            store_words(piece, [tile[4 * i + e] for e in range(4)])

    def places(self, kept, thread):
        """Where this thread keeps its part aside: no other touches it."""
        words = cute.recast_ptr(kept, dtype=Int32) + cute.assume(thread * 4, divby=4)
        return [words + i * self.shape.threads * 4 for i in range(self.shape.rows)]

    def keep(self, tile, kept, thread) -> None:
        for i, place in enumerate(self.places(kept, thread)):
            store_words(place, [tile[4 * i + e] for e in range(4)])

    def fetch(self, tile, kept, thread) -> None:
        for i, place in enumerate(self.places(kept, thread)):
            for e, word in enumerate(load_words(place, 4)):
                tile[4 * i + e] = word

    # -----------------------------------------------------------------------------------------------
    # Folding
    # -----------------------------------------------------------------------------------------------

    @cute.jit
    def fold(self, tile, ring, rates, move, layer, head, p0, shared, thread):
        """Advance the tile through the oldest `move.count` live rows, in place."""
        spec, shape = self.spec, self.shape
        x_cache, b_cache, dt_cache = ring
        move = move._replace(count=cutlass.min(move.count, spec.window))  # what shared memory has room for
        x_words = self.ring_words(x_cache.place(move.src), head, spec.head_dim, p0, shape.tile, move, thread)
        group = head // (spec.heads // spec.groups)
        b_words = self.ring_words(b_cache.place(move.src), group, spec.d_state, 0, spec.d_state, move, thread)
        weights = cute.make_tensor(cute.recast_ptr(shared, dtype=Float32), cute.make_layout(shape.positions + 1))
        if thread < WARP:
            self.weigh(weights, dt_cache.place(move.src), Float32(rates[layer, head]), head, move)
        xs = cute.recast_ptr(shared + shape.x_at, dtype=Float32)
        bs = cute.recast_ptr(shared + shape.b_at, dtype=Int32)
        self.put_x(xs, x_words, thread)
        self.put_b(bs, b_words, thread)
        cute.arch.sync_threads()
        total = weights[shape.positions]
        sums = cute.make_rmem_tensor(cute.make_layout(shape.rows * shape.chunk), Float32)
        for k, value in enumerate(self.unpack([tile[i] for i in range(4 * shape.rows)], spec.state_dtype)):
            sums[k] = value * total
        mine_x = xs + cute.assume(thread // shape.columns * shape.rows, divby=self.x_width)
        mine_b = bs + cute.assume(thread % shape.columns * (shape.chunk // 2), divby=shape.chunk // 2)
        for j in cutlass.range(move.count, unroll=1):
            row_b = mine_b + cute.assume(j * (spec.d_state // 2), divby=spec.d_state // 2)
            weight = weights[j]
            b = [v * weight for v in self.unpack(load_words(row_b, shape.chunk // 2), spec.io_dtype)]
            x = self.load_x(mine_x + cute.assume(j * shape.tile, divby=shape.tile))
            for i in cutlass.range_constexpr(shape.rows):
                for e in cutlass.range_constexpr(shape.chunk):
                    sums[i * shape.chunk + e] = sums[i * shape.chunk + e] + x[i] * b[e]
        for i, word in enumerate(self.repack([sums[k] for k in range(shape.rows * shape.chunk)])):
            tile[i] = word

    def ring_row(self, move, position):
        """The ring row of live row `position` of a move's source; those beyond the folded ones repeat the last."""
        row = move.start + cutlass.min(position, move.count - 1)
        return Int32(cutlass.select_(row >= self.spec.ring_rows, row - self.spec.ring_rows, row))

    def ring_words(self, base, head, width, first, columns, move, thread):
        """This thread's 16-byte pieces of `columns` columns from `first` on of every folded row, as words."""
        per_row = columns // 8
        loaded = []
        for k in range(-(-self.shape.positions * per_row // self.shape.threads)):
            piece = cutlass.min(thread + k * self.shape.threads, self.shape.positions * per_row - 1)
            row = head * self.spec.ring_rows + self.ring_row(move, piece // per_row)
            offset = (row * width + first + piece % per_row * 8) * 2
            loaded.append(load_words(layers.at(base, cute.assume(offset, divby=16), Int32, 16), 4))
        return loaded

    @cute.jit
    def put_x(self, xs, words, thread):
        """x as f32, [position][row of P]."""
        per_row = self.shape.tile // 8
        for k in cutlass.range_constexpr(len(words)):
            piece = thread + k * self.shape.threads
            if piece < self.shape.positions * per_row:
                values = [bits(v) for v in self.unpack(words[k], self.spec.io_dtype)]
                target = xs + cute.assume(piece * 8, divby=8)
                store_words(target, values[:4])
                store_words(target + 4, values[4:])

    @cute.jit
    def put_b(self, bs, words, thread):
        """B as it is, [position][column of N]."""
        per_row = self.spec.d_state // 8
        for k in cutlass.range_constexpr(len(words)):
            piece = thread + k * self.shape.threads
            if piece < self.shape.positions * per_row:
                store_words(bs + cute.assume(piece * 4, divby=4), words[k])

    def load_x(self, pointer):
        """x of this thread's rows of P."""
        width = self.x_width
        return [as_float(word) for i in range(0, self.shape.rows, width) for word in load_words(pointer + i, width)]

    @cute.jit
    def weigh(self, weights, base, rate, head, move):
        """exp(C - c_j) dt_j of every folded row j, then exp(C), by one warp: lane l has the l-th newest row."""
        lane = cute.arch.lane_idx()
        carried = Float32(0.0)
        for part in cutlass.range_constexpr(-(-self.spec.window // WARP)):
            j = move.count - 1 - lane - part * WARP
            row = head * self.spec.ring_rows + self.ring_row(move, cutlass.max(j, 0))
            step = as_float(load_words(layers.at(base, row * 4, Int32, 4), 1)[0])
            step = Float32(cutlass.select_(j >= 0, step, Float32(0.0)))
            inclusive = rate * step
            for k in cutlass.range_constexpr(5):
                other = cute.arch.shuffle_sync_up(inclusive, 1 << k, mask_and_clamp=0)
                inclusive = inclusive + Float32(cutlass.select_(lane >= 1 << k, other, Float32(0.0)))
            newer = cute.arch.shuffle_sync_up(inclusive, 1, mask_and_clamp=0)
            newer = Float32(cutlass.select_(lane == 0, Float32(0.0), newer))
            if j >= 0:
                weights[j] = cute.math.exp(carried + newer) * step
            carried = carried + cute.arch.shuffle_sync(inclusive, WARP - 1)
        if lane == 0:
            weights[self.shape.positions] = cute.math.exp(carried)

    def unpack(self, words, kind):
        """The elements of words, as f32."""
        if kind == "f32":
            return [as_float(w) for w in words]
        return [half(kind, w) for w in words for half in (low_half, high_half)]

    def repack(self, values):
        """f32 values as words of state, rounded to nearest."""
        if self.spec.state_dtype == "f32":
            return [bits(v) for v in values]
        return [pack(self.spec.state_dtype, values[k], values[k + 1]) for k in range(0, len(values), 2)]


def compile_fold(shape: FoldShape, arch: str):
    """Compile for `arch`; needs no GPU.

    Returns:
        A callable of (table, rates, records, batch): the table of `layers`, A (layers, H) f32, the records of `moves`
        (2 batch, 8) int32, all contiguous, and the number of rows.
    """
    rates = cute.runtime.make_fake_tensor(
        CUTLASS_TYPE["f32"], (cute.sym_int(), shape.spec.heads), (shape.spec.heads, 1), assumed_align=4
    )
    records = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), moves.WORDS), (moves.WORDS, 1), assumed_align=16)
    return cute.compile(
        FoldKernel(shape), layers.fake_table(), rates, records, Int32(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )  # fmt: skip
