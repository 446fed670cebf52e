"""The portable step kernel: checkpointing SSU on warp-level MMAs and TMA, one source for every target.

A CTA takes `heads_per_cta` heads of one group of one batch row, `parallel_heads` at a time. A warp owns one tile of
16 rows of P, or several, in its head of each turn: it loads its own part of the state by TMA behind its own barrier,
and its own x by asynchronous copies, so no CTA-wide wait stands between memory and arithmetic. With S the checkpoint
and c the sums of A·dt, per token t:

    y_t = exp(C_tot + n_t) (S C_t) + sum_j G_old[j, t] x_j + sum_s G_new[s, t] x_s
    G_old[j, t] = exp(C_tot - c_j + n_t) dt_j (B_j·C_t)
    G_new[s, t] = [s <= t] exp(n_t - n_s) dt_s (B_s·C_t) + [s = t] D

The phases live beside this file: readout_c (C in shared memory), products (B·C), decay (the exponentials), weights
(G_old and G_new), state_tile (S·C and flush) and tokens (x, outputs, appended rows). A CTA goes through them so:

    slot -> states of the first turns by TMA -> cursors -> ring rows -> read-out of the first turn
    -> B·C, decay -> weights -> per turn: contributions of the ring, outputs, flush, read-out of the next turn

A static condition has an `if` of its own: in `if const_expr(...) and x` the DSL traces a dead branch too.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..config import TileConfig
from ..problem import Problem
from ..ring import flushes
from .byte_state import ByteReadoutC, ByteStateTile, Scales
from .decay import SEGMENT, Decay
from .decay_long import LongDecay
from .flush_long import LongFlush
from .highest import ExactStateTile
from .primitives import CUTLASS_TYPE
from .products import Products
from .readout_c import ReadoutC
from .rewrite import Rewrite
from .signature import fake_arguments
from .spec import P_TILE, WARP, StepSpec
from .state_tile import StateTile
from .tokens import Tokens
from .weights import Weights


class StepKernel:
    """One step kernel, specialized on a problem and a tile config."""

    def __init__(self, problem: Problem, config: TileConfig, arch: str | None = None) -> None:
        self.spec = StepSpec(problem, config, arch)
        self.readout_c = (ByteReadoutC if problem.scaled else ReadoutC)(self.spec)
        self.products = Products(self.spec, self.readout_c)
        self.decay = (LongDecay if max(problem.window, problem.tokens) > SEGMENT else Decay)(self.spec)
        self.weights = Weights(self.spec, self.products)
        of_state = ByteStateTile if problem.scaled else ExactStateTile if self.spec.highest else StateTile
        self.state_tile = of_state(self.spec, self.readout_c)
        self.long_flush = LongFlush(self.spec, self.state_tile)
        self.rewrite = Rewrite(self.spec, self.state_tile) if problem.rewrites else None
        self.scales = Scales(self.spec)
        self.tokens = Tokens(self.spec)

    def staged_layout(self) -> cute.ComposedLayout:
        """Shared-memory layout of the state: (column, row, block, warp, stage), 128-byte swizzle (64 for such rows)."""
        spec = self.spec
        tile = spec.rows * spec.problem.d_state
        outer = cute.make_layout(
            (spec.block, spec.rows, spec.blocks, spec.warps, spec.config.stages),
            stride=(1, spec.block, spec.rows * spec.block, tile, tile * spec.warps),
        )
        return cute.make_composed_layout(cute.make_swizzle(3 if spec.row_bytes == 128 else 2, 4, 3), 0, outer)

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
        z: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        slots: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        pad_slot_id: Int64,
        stream,
    ):
        self.start(
            state, x_cache, b_cache, dt_cache, ring_start, pnat, x, dt, a, b, c, out, d, z, dt_bias, slots, cu_seqlens,
            pad_slot_id, stream, None, None, None,
        )  # fmt: skip

    def start(
        self, state, x_cache, b_cache, dt_cache, ring_start, pnat, x, dt, a, b, c, out, d, z, dt_bias, slots,
        cu_seqlens, pad_slot_id, stream, scale, seed, copy,
    ):  # fmt: skip
        """Launch the grid; the last three are what only low-precision states have."""
        spec = self.spec
        p, config = spec.problem, spec.config
        read = state if copy is None else copy
        tiled_state = cute.make_tensor(
            read.iterator,
            cute.make_layout(
                (spec.block, p.head_dim, spec.blocks, p.heads, read.shape[0]),
                stride=(1, read.stride[2], spec.block, read.stride[1], read.stride[0]),
            ),
        )
        box = cute.select(self.staged_layout(), mode=[0, 1, 2]), (spec.block, spec.rows, spec.blocks)
        atom, tma_state = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tiled_state, *box)
        store_atom, tma_stored = cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tiled_state, *box)
        self.kernel(
            atom, tma_state, store_atom, tma_stored, x_cache, b_cache, dt_cache, ring_start, pnat,
            x, dt, a, b, c, out, d, z, dt_bias, slots, cu_seqlens, pad_slot_id,
            state if p.rewrites else None, scale, seed, copy,
        ).launch(
            grid=[self.grid_size(self.batch(x, cu_seqlens)), 1, 1],
            block=[spec.threads, 1, 1],
            stream=stream,
            use_pdl=p.pdl,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=100,  # percent; the kernels live in shared memory, and asking needs no GPU
        )  # fmt: skip

    def batch(self, x, cu_seqlens):
        """Rows of a call."""
        return x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1

    def grid_size(self, batch):
        """CTAs for a run-time batch; `TileConfig.ctas` for a known one."""
        config, p = self.spec.config, self.spec.problem
        tail = cutlass.min(batch, config.tail_rows)
        return (batch - tail) * config.ctas_per_row(p) + tail * config.ctas_per_tail_row(p)

    def place(self, bid, batch):
        """What a CTA works on: batch row, part of P, first head and number of heads."""
        config, p = self.spec.config, self.spec.problem

        def where(block, per_row, heads_per_cta):
            within = block % per_row
            return block // per_row, within % config.head_split, within // config.head_split * heads_per_cta

        main = where(bid, config.ctas_per_row(p), config.heads_per_cta)
        if config.tail_rows == 0:
            return *main, config.heads_per_cta
        full_rows = batch - cutlass.min(batch, config.tail_rows)
        first_single = full_rows * config.ctas_per_row(p)
        is_single = bid >= first_single
        row, split, head = where(bid - first_single, config.ctas_per_tail_row(p), config.parallel_heads)
        single = (full_rows + row, split, head)
        chosen = [Int32(cutlass.select_(is_single, s, m)) for s, m in zip(single, main, strict=True)]
        return *chosen, Int32(cutlass.select_(is_single, config.parallel_heads, config.heads_per_cta))

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        tma_state: cute.Tensor,
        store_atom: cute.CopyAtom,
        tma_stored: cute.Tensor,
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
        z: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        slots: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        pad_slot_id: Int64,
        state: cute.Tensor | None,
        scale: cute.Tensor | None,
        seed: cute.Tensor | None,
        copy: cute.Tensor | None,
    ):
        spec = self.spec
        p, config, shared = spec.problem, spec.config, spec.shared
        row, split, head0, count = self.place(cute.arch.block_idx()[0], self.batch(x, cu_seqlens))
        group = head0 // p.heads_per_group
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        only_turn = cutlass.const_expr(config.turns == 1)
        thread = warp * WARP + lane
        side, head_warp = warp // spec.head_warps, warp % spec.head_warps  # which of the heads that are taken at a time
        tile = split * spec.head_warps + head_warp  # which `spec.rows` rows of P
        p0, cta_p0 = tile * spec.rows, split * spec.head_warps * spec.rows
        turns = count // config.parallel_heads

        slot = Int64(row)
        if cutlass.const_expr(slots is not None):
            slot = Int64(slots[row])
        new = spec.new_row(row, cu_seqlens, x.shape[1])
        length = new[2]

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
        to_shared, from_global = self.partition(atom, tma_state, shared_state)
        stored, to_global = self.partition(store_atom, tma_stored, shared_state)
        barriers = cute.recast_ptr(raw + shared.barriers, dtype=Int64) + warp * config.stages
        if lane == 0:
            cpasync.prefetch_descriptor(atom)
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(barriers + stage, 1)
            cute.arch.mbarrier_init_fence()
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + stage, shared.warp_bytes)

        # What needs no slot is asked for while the slot is on its way. Under PDL the state and the cursors go
        # first instead: the predecessor may still be writing the inputs, but nothing else.
        # Heads' vectors are dealt to the warps from the last, since B·C keeps the first ones busy.
        scan = spec.warps - 1 - warp
        scan_head = head0 + cutlass.min(scan, count - 1)
        works = (slot != pad_slot_id) & (slot >= 0)
        if cutlass.const_expr(p.ragged):
            works = works & (length > 0)
        live = cute.arch.make_warp_uniform(Int32(works)) != 0
        slot32 = Int32(slot)
        start, pnat = Int32(0), Int32(0)
        first = head0 + side  # this warp's first head; its others follow `parallel_heads` apart
        if cutlass.const_expr(p.pdl):
            if live:
                self.first_loads(atom, from_global, to_shared, barriers, turns, first, tile, warp, slot32)
                cute.arch.sync_warp()
                start, pnat = Int32(ring_start[slot]), Int32(pnat_of[slot])
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        c_words = self.readout_c.load(c, new, group)
        scan_new = self.decay.load_new(dt, a, dt_bias, d, new, scan_head, lane)
        self.tokens.copy_new(address, x, z, new, head0, count, cta_p0, thread)
        if cutlass.const_expr(only_turn):
            new_x = self.tokens.new_x(x, new, head0, count, cta_p0, thread)
        cute.arch.sync_warp()  # a fence for the scheduler: loads above it are issued above it

        if live:
            if cutlass.const_expr(not p.pdl):
                self.first_loads(atom, from_global, to_shared, barriers, turns, first, tile, warp, slot32)
                cute.arch.sync_warp()
                start, pnat = Int32(ring_start[slot]), Int32(pnat_of[slot])
            row_scales = self.scales.new() if cutlass.const_expr(p.scaled) else None
            if cutlass.const_expr(p.scaled):
                self.scales.ask(row_scales, scale, slot, first, p0, g)
            self.readout_c.stage(raw, c_words)
            bc_tile = warp % shared.tile_warps
            bc_rows = self.products.new_rows()
            ring_dt = self.decay.load_ring(dt_cache, slot, scan_head, start, pnat, lane)
            self.products.load_rows(bc_rows, b_cache, b, new, slot, group, start, pnat, bc_tile, warp, g, t)
            self.tokens.copy_ring(address, x_cache, slot, head0, count, cta_p0, start, pnat, thread)
            cute.arch.cp_async_commit_group()
            cute.arch.sync_threads()
            # A CTA's only turn appends its x here, where the store's way to memory costs no time.
            if cutlass.const_expr(only_turn):
                self.tokens.append_new(x_cache, new_x, slot, head0, count, cta_p0, start, pnat, length, thread)
            # The shuffle keeps what depends on the cursors below the loads that, in "whole" mode, do not.
            flush = Boolean(flushes(cute.arch.shuffle_sync(pnat, 0), length, p.window))
            if cutlass.const_expr(p.copy_dtype is not None):
                if flush:
                    self.rewrite.prefetch(state, slot, first, turns, p0, lane)

            # ---- the first head's read-out: its state was asked for before everything that waits for the cursors
            c_rows = [self.readout_c.address(address, lane, n) for n in range(spec.token_tiles)]
            c_held = [self.readout_c.quads(at) for at in c_rows] if self.readout_c.held else []
            read_out = cute.make_rmem_tensor(cute.make_layout(4 * spec.token_tiles * spec.tiles), Float32)
            refill = cutlass.const_expr(config.stages < config.turns)
            self.next_read_out(read_out, address, barriers, c_rows, c_held, Int32(0), Int32(0), warp, lane)
            if cutlass.const_expr(p.scaled):
                self.scales.apply(row_scales, read_out)
            if cutlass.const_expr(refill):
                if not flush:
                    cute.arch.sync_warp()
                    self.refill(atom, from_global, to_shared, barriers, 0, turns, 0, first, tile, warp, lane, slot32)
            short = cutlass.const_expr(not spec.long_flush)
            flush_b = None
            if cutlass.const_expr(only_turn and short):
                flush_b = self.state_tile.new_b()
                if flush:
                    self.state_tile.first_b(flush_b, b_cache, slot, group, start, pnat, g, t)

            # ---- once per CTA: B·C, decay vectors, appended rows of B and dt, weights ----
            appends = (head0 % p.heads_per_group == 0) & (split == 0)
            self.products.partial_sums(
                bc_rows, raw, products, b_cache, slot, group, start, pnat, length, appends, bc_tile, warp, g, t
            )
            for more in cutlass.range_constexpr(1, -(-shared.tiles // shared.tile_warps)):
                later_tile = bc_tile + more * shared.tile_warps
                self.products.load_rows(bc_rows, b_cache, b, new, slot, group, start, pnat, later_tile, warp, g, t)
                self.products.partial_sums(
                    bc_rows, raw, products, b_cache, slot, group, start, pnat, length, appends, later_tile, warp, g, t
                )
            if scan < count:
                self.decay.make_vectors(
                    dt_cache, scan_new, ring_dt, vectors, scan, slot, scan_head, start, pnat, length, split, lane
                )
            if cutlass.const_expr(config.heads_per_cta > spec.warps):
                for i in cutlass.range(scan + spec.warps, count, spec.warps, unroll=1):
                    later_new = self.decay.load_new(dt, a, dt_bias, d, new, head0 + i, lane)
                    later_dt = self.decay.load_ring(dt_cache, slot, head0 + i, start, pnat, lane)
                    self.decay.make_vectors(
                        dt_cache, later_new, later_dt, vectors, i, slot, head0 + i, start, pnat, length, split, lane
                    )
            self.tokens.await_copies(raw, count, start, pnat, thread)
            cute.arch.sync_threads()
            if cutlass.const_expr(not only_turn):
                self.tokens.append_x(raw, x_cache, slot, head0, count, cta_p0, start, pnat, length, thread)
                for part in cutlass.range(warp, count * spec.steps, spec.warps, unroll=1):
                    self.weights.make(raw, products, vectors, part // spec.steps, part % spec.steps, start, pnat, g, t)
                cute.arch.sync_threads()
            # A CTA's only turn flushes before it makes the outputs: the write takes longest.
            if cutlass.const_expr(only_turn):
                if flush:
                    at = self.tokens.inputs(side, head_warp)
                    if cutlass.const_expr(p.rewrites):
                        self.rewrite_tiles(
                            state, copy, scale, seed, b_cache, raw, address, at, vectors, 0, side, slot, group, first,
                            p0, start, pnat, warp, lane,
                        )  # fmt: skip
                    else:
                        self.flush(
                            b_cache, raw, address, at, vectors, flush_b, 0, side, slot, group, start, pnat, warp, lane
                        )
                        self.store(store_atom, stored, to_global, 0, first, tile, warp, slot32)

            # ---- head by head ----
            stage, phase = Int32(0), Int32(0)
            for i in cutlass.range(turns, unroll=1):
                index = i * config.parallel_heads + side  # of the head in its CTA
                head = head0 + index
                at = self.tokens.inputs(index, head_warp)
                gates = [] if cutlass.const_expr(z is None) else self.tokens.gates(address + at, lane)
                weights = self.weights.fragments(raw, products, vectors, index, start, pnat, g, t)
                sums = self.tokens.contributions(address + at, weights, lane)
                self.tokens.store_outputs(out, raw, read_out, sums, gates, index, new, head, p0, g, t)
                if cutlass.const_expr(not only_turn):
                    if flush:
                        if cutlass.const_expr(p.rewrites):
                            self.rewrite_tiles(
                                state, copy, scale, seed, b_cache, raw, address, at, vectors, stage, index, slot, group,
                                head, p0, start, pnat, warp, lane,
                            )  # fmt: skip
                        else:
                            self.flush(
                                b_cache,
                                raw,
                                address,
                                at,
                                vectors,
                                None,
                                stage,
                                index,
                                slot,
                                group,
                                start,
                                pnat,
                                warp,
                                lane,
                            )
                            self.store(store_atom, stored, to_global, stage, head, tile, warp, slot32)
                if cutlass.const_expr(config.turns > 1):
                    cute.arch.sync_warp()
                    if cutlass.const_expr(refill):
                        if flush:
                            cute.arch.cp_async_bulk_wait_group(0, read=True)
                            self.refill(
                                atom, from_global, to_shared, barriers, i, turns, stage, first, tile, warp, lane, slot32
                            )
                    stage, phase = self.following(stage, phase)
                    if i + 1 < turns:
                        if cutlass.const_expr(p.scaled):
                            self.scales.ask(row_scales, scale, slot, head + config.parallel_heads, p0, g)
                        self.next_read_out(read_out, address, barriers, c_rows, c_held, stage, phase, warp, lane)
                        if cutlass.const_expr(p.scaled):
                            self.scales.apply(row_scales, read_out)
                        if cutlass.const_expr(refill):
                            if not flush:
                                cute.arch.sync_warp()
                                self.refill(
                                    atom, from_global, to_shared, barriers, i + 1, turns, stage, first, tile, warp,
                                    lane, slot32,
                                )  # fmt: skip
            if flush:
                cute.arch.cp_async_bulk_wait_group(0, read=True)  # shared memory outlives what is stored from it
        else:
            cute.arch.cp_async_commit_group()
            cute.arch.cp_async_wait_group(0)  # copies must not land in a later CTA's shared memory
            self.tokens.store_zeros(out, new, first, turns, p0, lane)
        if cutlass.const_expr(p.ragged):
            batch = self.batch(x, cu_seqlens)
            self.tokens.zero_tail(out, row, batch, Int32(cu_seqlens[batch]), new[3], first, turns, p0, lane)

    def partition(self, atom, tma_state, shared_state):
        """The state's boxes in shared memory, (None, warp, stage), and in the pool, (None, 0, tile, 0, head, slot)."""
        spec = self.spec
        tiles = cute.local_tile(tma_state, (spec.block, spec.rows, spec.blocks), (None, None, None, None, None))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared_state, 0, 3), cute.group_modes(tiles, 0, 3)
        )

    @cute.jit
    def flush(
        self, b_cache, raw, address, at, vectors, flush_b, stage, index, slot, group, start, pnat, warp, lane
    ):  # fmt: skip
        """Turn the checkpoint in a stage into the logical state; inputs at `at`.

        `flush_b` is B's first part if it was asked for.
        """
        cute.arch.sync_warp()  # results go where other lanes may still be reading
        coming = flush_b
        if cutlass.const_expr(flush_b is None and not self.spec.long_flush):
            coming = self.state_tile.new_b()
            self.state_tile.first_b(coming, b_cache, slot, group, start, pnat, lane // 4, lane % 4)
        for tile in cutlass.range(self.spec.tiles, unroll=1):
            offset = (
                stage * self.spec.shared.stage_bytes
                + warp * self.spec.shared.warp_bytes
                + tile * (P_TILE * self.spec.row_bytes)
            )
            words = cute.recast_ptr(raw + cute.assume(offset, divby=1024), dtype=Int32)
            inputs = address + (at + tile * self.spec.shared.input_tile_bytes)
            if cutlass.const_expr(self.spec.long_flush):
                self.long_flush.flush(b_cache, vectors, words, inputs, index, slot, group, start, pnat, lane)
            else:
                x_words = self.tokens.x_words(inputs, lane)
                self.state_tile.flush(
                    b_cache, vectors, words, x_words, coming, index, slot, group, start, pnat, lane // 4, lane % 4
                )

    @cute.jit
    def rewrite_tiles(
        self, state, copy, scale, seed, b_cache, raw, address, at, vectors, stage, index, slot, group, head, p0, start,
        pnat, warp, lane,
    ):  # fmt: skip
        """Flush the head whose state is in a stage, inputs at `at`, in global memory: see `rewrite`."""
        for tile in cutlass.range(self.spec.tiles, unroll=1):
            offset = (
                stage * self.spec.shared.stage_bytes
                + warp * self.spec.shared.warp_bytes
                + tile * (P_TILE * self.spec.row_bytes)
            )
            words = cute.recast_ptr(raw + cute.assume(offset, divby=1024), dtype=Int32)
            inputs = address + (at + tile * self.spec.shared.input_tile_bytes)
            self.rewrite.flush(
                state, copy, scale, seed, b_cache, vectors, words, inputs, index, slot, group, head,
                p0 + P_TILE * tile, start, pnat, lane,
            )  # fmt: skip

    @cute.jit
    def store(self, atom, stored, to_global, stage, head, tile, warp, slot):
        """Store a warp's flushed rows from a stage, by TMA: every lane's part must be seen by it."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        cute.copy(atom, stored[None, warp, stage], to_global[None, 0, tile, 0, head, slot])
        cute.arch.cp_async_bulk_commit_group()

    def following(self, stage, phase):
        """The stage after this one, and the phase of its barrier."""
        stages = self.spec.config.stages
        wraps = stage == stages - 1
        return Int32(cutlass.select_(wraps, 0, stage + 1)), Int32(cutlass.select_(wraps, phase ^ 1, phase))

    @cute.jit
    def next_read_out(self, read_out, address, barriers, c_rows, c_held, stage, phase, warp, lane):
        """Wait for a stage's state and leave S·C in `read_out`."""
        shared = self.spec.shared
        cute.arch.mbarrier_wait(barriers + stage, phase)
        tile = address + (stage * shared.stage_bytes + warp * shared.warp_bytes)
        sums = self.state_tile.read_out(tile, c_rows, c_held, lane)
        for k in cutlass.range_constexpr(self.spec.tiles * self.spec.token_tiles):
            for e in cutlass.range_constexpr(4):
                read_out[4 * k + e] = sums[k // self.spec.token_tiles][k % self.spec.token_tiles][e]

    @cute.jit
    def first_loads(self, atom, from_global, to_shared, barriers, turns, first, tile, warp, slot):
        """Ask for the states of a warp's first heads, one a stage; the barriers expect them already."""
        for stage in cutlass.range_constexpr(self.spec.config.stages):
            if stage < turns:
                cute.copy(
                    atom,
                    from_global[None, 0, tile, 0, first + stage * self.spec.config.parallel_heads, slot],
                    to_shared[None, warp, stage],
                    tma_bar_ptr=barriers + stage,
                )

    @cute.jit
    def refill(self, atom, from_global, to_shared, barriers, i, turns, stage, first, tile, warp, lane, slot):
        """Ask for the state that takes the stage of turn i next; every lane must have read the old one."""
        config = self.spec.config
        if i + config.stages < turns:
            if lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + stage, self.spec.shared.warp_bytes)
            cute.copy(
                atom,
                from_global[None, 0, tile, 0, first + (i + config.stages) * config.parallel_heads, slot],
                to_shared[None, warp, stage],
                tma_bar_ptr=barriers + stage,
            )


class LowPrecisionStepKernel(StepKernel):
    """The step kernel of problems that bring scales, a seed or a read copy: it takes these arguments as well."""

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
        z: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        slots: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        pad_slot_id: Int64,
        stream,
        scale: cute.Tensor | None,
        seed: cute.Tensor | None,
        copy: cute.Tensor | None,
    ):
        self.start(
            state, x_cache, b_cache, dt_cache, ring_start, pnat, x, dt, a, b, c, out, d, z, dt_bias, slots, cu_seqlens,
            pad_slot_id, stream, scale, seed, copy,
        )  # fmt: skip


def step_kernel(problem: Problem, config: TileConfig, arch: str | None = None) -> StepKernel:
    """The step kernel of a problem."""
    return (LowPrecisionStepKernel if problem.rewrites else StepKernel)(problem, config, arch)


def compile_step(problem: Problem, config: TileConfig, arch: str):
    """Compile the step kernel for `arch` ("sm_90a", ...); needs no GPU and no tensors.

    Returns:
        A callable that takes torch tensors in the order of `checkpointing_ssu` (state ... out, D, z, dt_bias,
        state_batch_indices, cu_seqlens, pad_slot_id; state_scale, rand_seed and state_copy where there is one of them)
        and launches on torch's current stream.
    """
    return cute.compile(
        step_kernel(problem, config, arch), *fake_arguments(problem), options=f"--enable-tvm-ffi --gpu-arch {arch}"
    )
