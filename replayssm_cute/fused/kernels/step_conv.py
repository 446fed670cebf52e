"""The conv inside the step: checkpointing SSU on the projection itself, one kernel where there are two.

The portable step's kernel (`kernels/step.py`, whose phases these are) for configs whose CTAs take one turn. Where it
reads x, B and C of the new tokens, this one reads four raw inputs of each, from the projection or, before the first
token, from the ring of the conv's inputs, and makes the value that it needs in registers:

    v_t = silu(bias + w_0 u_{t-3} + w_1 u_{t-2} + w_2 u_{t-1} + w_3 u_t), rounded to the inputs' type

Every head's CTA does B and C of its group again; that is arithmetic and L2 traffic, not DRAM's. The CTAs that append x,
and B of their group, to the step's rings append the raw inputs to the conv's. Rows that are read there and rows that
are written are never the same (T + 3 <= R), so CTAs need not wait for each other.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...kernels.primitives import CUTLASS_TYPE, load_words, pack, store_words
from ...kernels.signature import fake_arguments
from ...kernels.spec import P_TILE
from ...kernels.step import StepKernel
from ...kernels.tokens import ROWS_A_COPY, place
from ...ring import flushes
from ..shapes import PIECE, StepConvShape
from .values import load_at, load_quads, of_pair, silu, unpack

TAPS = 4


class StepConvKernel(StepKernel):
    """One step kernel with the conv in it, specialized on a problem, a tile config of one turn and the conv's types."""

    def __init__(self, shape: StepConvShape) -> None:
        super().__init__(shape.problem, shape.config)
        self.shape = shape
        p = shape.problem
        self.first_b = p.heads * p.head_dim
        self.first_c = self.first_b + p.groups * p.d_state

    @cute.jit
    def __call__(
        self,
        state: cute.Tensor,
        x_cache: cute.Tensor,
        b_cache: cute.Tensor,
        dt_cache: cute.Tensor,
        ring_start: cute.Tensor,
        pnat: cute.Tensor,
        x: cute.Tensor,
        dt: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        out: cute.Tensor,
        d: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        slots: cute.Tensor | None,
        pad_slot_id: Int64,
        conv_x: cute.Tensor,
        conv_b: cute.Tensor,
        conv_c: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor | None,
        stream,
    ):
        spec = self.spec
        p, config = spec.problem, spec.config
        tiled_state = cute.make_tensor(
            state.iterator,
            cute.make_layout(
                (spec.block, p.head_dim, spec.blocks, p.heads, state.shape[0]),
                stride=(1, state.stride[2], spec.block, state.stride[1], state.stride[0]),
            ),
        )
        atom, tma_state = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            tiled_state,
            cute.select(self.staged_layout(), mode=[0, 1, 2]),
            (spec.block, spec.rows, spec.blocks),
        )
        self.kernel(
            atom, tma_state, state, x_cache, b_cache, dt_cache, ring_start, pnat, x, dt, a, b, c, out, d, dt_bias,
            slots, pad_slot_id, conv_x, conv_b, conv_c, weight, bias,
        ).launch(
            grid=[self.grid_size(x.shape[0]), 1, 1],
            block=[spec.threads, 1, 1],
            stream=stream,
            use_pdl=p.pdl,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=100,  # percent, as in the step kernel
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        tma_state: cute.Tensor,
        state: cute.Tensor,
        x_cache: cute.Tensor,
        b_cache: cute.Tensor,
        dt_cache: cute.Tensor,
        ring_start: cute.Tensor,
        pnat_of: cute.Tensor,
        x: cute.Tensor,
        dt: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        out: cute.Tensor,
        d: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        slots: cute.Tensor | None,
        pad_slot_id: Int64,
        conv_x: cute.Tensor,
        conv_b: cute.Tensor,
        conv_c: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor | None,
    ):
        spec = self.spec
        p, config, shared = spec.problem, spec.config, spec.shared
        row, split, head0, count = self.place(cute.arch.block_idx()[0], x.shape[0])
        group = head0 // p.heads_per_group
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        side = warp // spec.head_warps  # which of the heads that are taken at the same time
        tile = split * spec.head_warps + warp % spec.head_warps  # which `spec.rows` rows of P
        p0 = tile * spec.rows
        turns = count // config.parallel_heads  # 1

        slot = Int64(row)
        if cutlass.const_expr(slots is not None):
            slot = Int64(slots[row])
        new = spec.new_row(row, None, x.shape[1])

        smem = SmemAllocator()
        raw = smem.allocate(shared.total, byte_alignment=1024)
        address = Int32(raw.toint())
        floats = lambda offset: cute.make_tensor(  # noqa: E731
            cute.recast_ptr(raw + offset, dtype=Float32), cute.make_layout(1 << 20)
        )
        products = floats(shared.products)
        vectors = floats(shared.vectors)
        staged = self.staged_layout()
        shared_state = cute.make_tensor(
            cute.recast_ptr(raw, staged.inner, dtype=CUTLASS_TYPE[spec.state_kind]), staged.outer
        )
        state_tiles = cute.local_tile(tma_state, (spec.block, spec.rows, spec.blocks), (None, None, None, None, None))
        to_shared, from_global = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared_state, 0, 3), cute.group_modes(state_tiles, 0, 3)
        )
        barriers = cute.recast_ptr(raw + shared.barriers, dtype=Int64) + warp * config.stages
        if lane == 0:
            cpasync.prefetch_descriptor(atom)
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(barriers + stage, 1)
            cute.arch.mbarrier_init_fence()
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + stage, shared.warp_bytes)

        scan = spec.warps - 1 - warp
        scan_head = head0 + cutlass.min(scan, count - 1)
        live = cute.arch.make_warp_uniform(Int32((slot != pad_slot_id) & (slot >= 0))) != 0
        slot32 = Int32(slot)
        start, pnat = Int32(0), Int32(0)
        my_inputs = cute.assume(shared.inputs + warp * shared.input_bytes, divby=128)
        first = head0 + side  # this warp's head
        if live:
            self.first_loads(atom, from_global, to_shared, barriers, turns, first, tile, warp, slot32)
            cute.arch.sync_warp()
            start, pnat = Int32(ring_start[slot]), Int32(pnat_of[slot])
        if cutlass.const_expr(p.pdl):
            cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        scan_new = self.decay.load_new(dt, a, dt_bias, d, new, scan_head, lane)
        cute.arch.sync_warp()  # a fence for the scheduler: loads above it are issued above it

        if live:
            end = self.spec.ring_row(start, pnat)  # where the new tokens go
            appends = (head0 % p.heads_per_group == 0) & (split == 0)
            bc_tile = warp % shared.tile_warps
            raw_c = self.raw_c(c, conv_c, row, slot, end, group)
            raw_x = self.raw_x(x, conv_x, row, slot, end, first, p0, lane)
            bc_rows = self.products.new_rows()
            ring_dt = self.decay.load_ring(dt_cache, slot, scan_head, start, pnat, lane)
            self.tokens.copy_ring(address + my_inputs, x_cache, slot, first, p0, start, pnat, lane)
            cute.arch.cp_async_commit_group()
            self.load_b(
                bc_rows, b_cache, b, conv_b, weight, bias, row, slot, group, start, pnat, end, appends, bc_tile, warp,
                g, t,
            )  # fmt: skip
            self.stage_c(raw, conv_c, raw_c, weight, bias, slot, end, group, appends)
            new_x = self.stage_x(raw, my_inputs, conv_x, raw_x, weight, bias, slot, end, first, p0, lane)
            cute.arch.sync_threads()
            self.tokens.append_new(x_cache, new_x, slot, first, p0, start, pnat, p.tokens, lane)
            flush = Boolean(flushes(cute.arch.shuffle_sync(pnat, 0), p.tokens, p.window))

            # ---- from here on as in the step kernel's only turn
            c_rows = [self.readout_c.address(address, lane, n) for n in range(spec.token_tiles)]
            c_held = [self.readout_c.quads(at) for at in c_rows] if self.readout_c.held else []
            read_out = cute.make_rmem_tensor(cute.make_layout(4 * spec.token_tiles * spec.tiles), Float32)
            self.next_read_out(read_out, address, barriers, c_rows, c_held, Int32(0), Int32(0), warp, lane)
            flush_b = None
            if cutlass.const_expr(not spec.long_flush):
                flush_b = self.state_tile.new_b()
                if flush:
                    self.state_tile.first_b(flush_b, b_cache, slot, group, start, pnat, g, t)
            self.products.partial_sums(
                bc_rows, raw, products, b_cache, slot, group, start, pnat, p.tokens, appends, bc_tile, warp, g, t
            )
            for more in cutlass.range_constexpr(1, -(-shared.tiles // shared.tile_warps)):
                later_tile = bc_tile + more * shared.tile_warps
                self.load_b(
                    bc_rows, b_cache, b, conv_b, weight, bias, row, slot, group, start, pnat, end, appends, later_tile,
                    warp, g, t,
                )  # fmt: skip
                self.products.partial_sums(
                    bc_rows, raw, products, b_cache, slot, group, start, pnat, p.tokens, appends, later_tile, warp, g, t
                )
            if scan < count:
                self.decay.make_vectors(
                    dt_cache, scan_new, ring_dt, vectors, scan, slot, scan_head, start, pnat, p.tokens, split, lane
                )
            if cutlass.const_expr(config.heads_per_cta > spec.warps):
                for i in cutlass.range(scan + spec.warps, count, spec.warps, unroll=1):
                    later_new = self.decay.load_new(dt, a, dt_bias, d, new, head0 + i, lane)
                    later_dt = self.decay.load_ring(dt_cache, slot, head0 + i, start, pnat, lane)
                    self.decay.make_vectors(
                        dt_cache, later_new, later_dt, vectors, i, slot, head0 + i, start, pnat, p.tokens, split, lane
                    )
            cute.arch.sync_threads()
            self.await_inputs(raw, my_inputs, start, pnat, lane)
            if flush:
                self.flush(
                    state, b_cache, raw, address, my_inputs, vectors, flush_b, 0, side, slot, group, first, p0, start,
                    pnat, warp, lane,
                )  # fmt: skip
            weights = self.weights.fragments(raw, products, vectors, side, start, pnat, g, t)
            sums = self.tokens.contributions(address + my_inputs, weights, lane)
            self.tokens.store_outputs(out, raw, read_out, sums, [], side, new, first, p0, g, t)
        else:
            self.tokens.store_zeros(out, new, first, turns, p0, lane)

    # -----------------------------------------------------------------------------------------------
    # The conv
    # -----------------------------------------------------------------------------------------------

    def raw(self, tensor, ring, row, slot, end, token, index, column):
        """Ask for the raw inputs token - 3 .. token of a head or group, eight columns each."""
        found = []
        for k in range(TAPS):
            at = token - (TAPS - 1) + k
            fresh = self.spec.pointer(tensor, row, (cutlass.max(at, 0), index), column, PIECE)
            if k == TAPS - 1:
                found.append(load_words(fresh, 4))
            else:
                behind = self.spec.ring_row(end, self.spec.problem.ring_rows + cutlass.min(at, -1))
                kept = self.spec.pointer(ring, slot, (behind, index), column, PIECE)
                found.append(load_at(Int64(cutlass.select_(at >= 0, Int64(fresh.toint()), Int64(kept.toint())))))
        return found

    def convolved(self, words, weight, bias, channel):
        """The conv's eight outputs, as words, from the raw inputs at the eight channels from `channel` on."""
        kind, shape = self.spec.io_kind, self.shape
        taps = load_quads(weight, shape.weight_dtype, channel * TAPS, TAPS * PIECE)
        bases = [] if bias is None else load_quads(bias, shape.bias_dtype, channel, PIECE)
        # Two channels at a time, so that few values are in registers at once.
        packed = []
        for pair in range(PIECE // 2):
            values = [unpack(kind, [row[pair]]) for row in words]
            mine = unpack(shape.weight_dtype, of_pair(taps, pair))
            totals = [Float32(0.0)] * 2 if bias is None else unpack(shape.bias_dtype, of_pair(bases, pair))
            for k in range(TAPS):
                totals = [total + mine[TAPS * e + k] * values[k][e] for e, total in enumerate(totals)]
            packed.append(pack(kind, *[silu(total) for total in totals]))
        return packed

    def keep(self, ring, words, slot, end, token, index, column):
        """Append a token's raw input, the last of four."""
        at = self.spec.ring_row(end, token)
        store_words(self.spec.pointer(ring, slot, (at, index), column, PIECE), words[TAPS - 1])

    def raw_c(self, c, ring, row, slot, end, group):
        """Ask for what this thread's pieces of C are made of."""
        found = []
        for k in range(self.readout_c.rounds):
            token, piece = self.readout_c._place(k)
            found.append(self.raw(c, ring, row, slot, end, self.spec.token(token), group, piece * PIECE))
        return found

    @cute.jit
    def stage_c(self, raw, ring, raw_c, weight, bias, slot, end, group, appends):
        """Put C into shared memory, and its raw inputs into their ring."""
        made = []
        for k in cutlass.range_constexpr(self.readout_c.rounds):
            token, piece = self.readout_c._place(k)
            channel = self.first_c + group * self.spec.problem.d_state + piece * PIECE
            made.append(self.convolved(raw_c[k], weight, bias, channel))
            if appends & (token < self.spec.problem.tokens):
                self.keep(ring, raw_c[k], slot, end, token, group, piece * PIECE)
        self.readout_c.stage(raw, made)

    @cute.jit
    def load_b(
        self, held, b_cache, b, ring, weight, bias, row, slot, group, start, pnat, end, appends, tile, warp, g, t
    ):  # fmt: skip
        """`Products.load_rows`, with the conv's B for the new tokens; their raw inputs go into the ring."""
        for half in cutlass.range_constexpr(2):
            unit = 2 * tile + half
            at = half * 4 * self.products.columns
            # whether units of this parity may hold new tokens: code for those that cannot would only be long
            news = cutlass.const_expr(any(u % 2 == half for u in range(self.spec.ring_steps, self.spec.steps)))
            if unit < self.spec.ring_steps:
                behind = self.spec.read_row(start, pnat, g + 8 * unit)
                for k in cutlass.range_constexpr(self.products.columns):
                    pointer = self.spec.pointer(b_cache, slot, (group, behind), self.products._column(warp, k, t), 8)
                    self.products._hold(held, at + 4 * k, load_words(pointer, 4))
            if cutlass.const_expr(news) and (unit >= self.spec.ring_steps) & (unit < self.spec.steps):
                token = g + 8 * (unit - self.spec.ring_steps)
                mine = (
                    appends
                    & (token < self.spec.problem.tokens)
                    & (warp // self.spec.shared.tile_warps < self.spec.shared.slices)
                )
                for k in cutlass.range_constexpr(self.products.columns):
                    column = self.products._column(warp, k, t)
                    words = self.raw(b, ring, row, slot, end, self.spec.token(token), group, column)
                    channel = self.first_b + group * self.spec.problem.d_state + column
                    self.products._hold(held, at + 4 * k, self.convolved(words, weight, bias, channel))
                    if mine:
                        self.keep(ring, words, slot, end, token, group, column)

    def raw_x(self, x, ring, row, slot, end, head, p0, lane):
        """Ask for what a head's new x are made of: of each round of tokens, each tile's 16-byte piece of this lane."""
        found = []
        for k in range(self.tokens._token_rounds()):
            token = self.spec.token(ROWS_A_COPY * k + lane // 2)
            for tile in range(self.spec.tiles):
                column = p0 + P_TILE * tile + PIECE * (lane % 2)
                found.append(self.raw(x, ring, row, slot, end, token, head, column))
        return found

    @cute.jit
    def stage_x(self, raw, inputs, ring, raw_x, weight, bias, slot, end, head, p0, lane):
        """Put a head's new x into shared memory and registers, and their raw inputs into the ring."""
        kept = cute.make_rmem_tensor(cute.make_layout(4 * self.spec.tiles * self.tokens._token_rounds()), Int32)
        for k in cutlass.range_constexpr(self.tokens._token_rounds()):
            token, half = ROWS_A_COPY * k + lane // 2, lane % 2
            for tile in cutlass.range_constexpr(self.spec.tiles):
                piece = k * self.spec.tiles + tile
                column = p0 + P_TILE * tile + PIECE * half
                made = self.convolved(raw_x[piece], weight, bias, head * self.spec.problem.head_dim + column)
                for e in cutlass.range_constexpr(4):
                    kept[4 * piece + e] = made[e]
                if token < self.spec.problem.tokens:
                    at = inputs + place(self.tokens.x_rows + token, half) + tile * self.spec.shared.input_tile_bytes
                    store_words(raw + cute.assume(at, divby=16), made)
                    self.keep(ring, raw_x[piece], slot, end, token, head, column)
        return kept


def compile_step_conv(shape: StepConvShape, arch: str):
    """Compile for `arch`; needs no GPU.

    Returns:
        A callable of (state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out, D,
        dt_bias, state_batch_indices, pad_slot_id) as `checkpointing_ssu` has them, but x, B and C raw, and (conv_x
        (slots, R, H, P), conv_B (slots, R, G, N), conv_C (slots, R, G, N), conv_weight, conv_bias), on torch's current
        stream.
    """
    p = shape.problem
    *given, pad_slot_id, stream = fake_arguments(p)
    del given[16], given[13]  # cu_seqlens and z

    def ring(heads, width):
        strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), width, 1)
        return cute.runtime.make_fake_tensor(
            CUTLASS_TYPE[p.io_dtype], (cute.sym_int64(), p.ring_rows, heads, width), strides, assumed_align=16
        )

    def weight(kind, *size):
        strides = (TAPS, 1) if len(size) > 1 else (1,)
        return cute.runtime.make_fake_tensor(CUTLASS_TYPE[kind], size, strides, assumed_align=16)

    channels = p.heads * p.head_dim + 2 * p.groups * p.d_state
    bias = None if shape.bias_dtype is None else weight(shape.bias_dtype, channels)
    return cute.compile(
        StepConvKernel(shape), *given, pad_slot_id, ring(p.heads, p.head_dim), ring(p.groups, p.d_state),
        ring(p.groups, p.d_state), weight(shape.weight_dtype, channels, TAPS), bias, stream,
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )  # fmt: skip
