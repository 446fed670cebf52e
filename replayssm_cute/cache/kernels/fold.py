"""Materialize: checkpoints advanced through the oldest live rows of their rings, into other slots, for all layers.

A CTA moves one tile of one head of one layer (see `FoldShape`) for one row of the batch, or for all rows of the chain
that `moves` planned. The whole tile is asked for at once and stays in registers:

    S' = exp(C) S + sum_j (exp(C - c_j) dt_j x_j) (outer) B_j

over the rows j that are folded, c_j the sum of A dt up to row j and C its total, all as exact as f32 (see `products`).
C - c_j is summed from the newest row to the oldest: no decay is a difference of two long sums. Where nothing is folded
the bits are copied.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.memory import SmemAllocator

from ...config import WARP
from ...kernels.primitives import CUTLASS_TYPE, as_float, bits, load_words, pack, store_words
from ..shapes import GROUP, STEP, FoldShape
from . import layers, moves
from .folded_rows import FoldedRows
from .products import Operands, Products, unpack


class FoldKernel:
    """One folding kernel, specialized on a cache's geometry and dtypes, not on its layers and slots."""

    def __init__(self, shape: FoldShape) -> None:
        self.shape = shape
        s = self.spec = shape.spec
        self.splits = s.head_dim // shape.tile
        self.row_bytes = s.d_state * 16 // shape.chunk
        self.rows, self.products = FoldedRows(shape), Products(shape)

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
        warp, lane = thread // WARP, thread % WARP
        first = head * spec.head_dim + p0 + warp * (GROUP * shape.groups) + lane % 4
        mine = first * self.row_bytes + lane // 4 * 16
        at = Int32(at)
        while at >= 0:
            # Where the layer's tensors are, beside the record: read again for a chain's next move rather than kept.
            state, *ring = [layers.load(table, layer, k) for k in range(4)]  # the first of `layers.TENSORS`
            move = moves.load_record(records, at)
            cute.arch.sync_warp()  # a fence for the scheduler, which would read the table after the record has come
            if move.src >= 0:
                tile = cute.make_rmem_tensor(cute.make_layout(4 * shape.accesses), Int32)
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

    def places(self, base, mine):
        """This thread's pieces of a slot of the state: by rows t and 4 + t of each group, then along N."""
        first = layers.at(base, cute.assume(mine, divby=16), Int32, 16)
        rows, lines = range(0, GROUP * self.shape.groups, 4), range(self.shape.lines)
        return [first + (row * self.row_bytes + line * 128) // 4 for row in rows for line in lines]

    def load(self, tile, base, mine) -> None:
        for i, piece in enumerate(self.places(base, mine)):
            for e, word in enumerate(load_words(piece, 4)):
                tile[4 * i + e] = word

    def store(self, tile, base, mine) -> None:
        for i, piece in enumerate(self.places(base, mine)):
            store_words(piece, [tile[4 * i + e] for e in range(4)])

    def aside(self, kept, thread):
        """Where this thread keeps its part aside: no other touches it."""
        words = cute.recast_ptr(kept, dtype=Int32) + cute.assume(thread * 4, divby=4)
        return [words + i * self.shape.threads * 4 for i in range(self.shape.accesses)]

    def keep(self, tile, kept, thread) -> None:
        for i, place in enumerate(self.aside(kept, thread)):
            store_words(place, [tile[4 * i + e] for e in range(4)])

    def fetch(self, tile, kept, thread) -> None:
        for i, place in enumerate(self.aside(kept, thread)):
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
        # Not from the count within W, of which the compiler would learn that 16 rows are one step: without a loop it
        # works on all lines and groups at a time, and has more sums than there are registers.
        steps = (cutlass.min(move.count, shape.weights) + (STEP - 1)) // STEP
        move = move._replace(count=cutlass.min(move.count, spec.window))  # what shared memory has room for
        operands = Operands(
            cute.recast_ptr(shared, dtype=Float32),
            cute.recast_ptr(shared + shape.x_at, dtype=Float32),
            cute.recast_ptr(shared + shape.b_at, dtype=Int32),
        )
        x_words = self.rows.x(x_cache.place(move.src), head, p0, move, thread)
        b_words = self.rows.b(b_cache.place(move.src), head // (spec.heads // spec.groups), move, thread)
        if thread < WARP:
            self.rows.weigh(operands.weights, dt_cache.place(move.src), Float32(rates[layer, head]), head, move)
        self.products.put_x(operands.x, x_words, thread)
        self.products.put_b(operands.b, b_words, thread)
        cute.arch.sync_threads()
        total = as_float(load_words(operands.weights + shape.weights, 1)[0])
        for line in cutlass.range_constexpr(shape.lines):
            for group in cutlass.range_constexpr(shape.groups):
                sums = cute.make_rmem_tensor(cute.make_layout(2 * shape.chunk), Float32)
                self.products.sums(sums, operands, steps, group, line, thread)
                for row in cutlass.range_constexpr(2):
                    at = 4 * ((2 * group + row) * shape.lines + line)
                    old = unpack([tile[at + w] for w in range(4)], spec.state_dtype)
                    added = self.products.of_piece(sums, row)
                    for w, word in enumerate(self.repack([old[k] * total + added[k] for k in range(shape.chunk)])):
                        tile[at + w] = word

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
