"""The step kernel for sm_100a and sm_103a: S·C on shared memory by the tensor cores, the rest as the portable kernel.

A turn of a CTA is 128 rows of the state: two heads of 64, or one of 128. One warp, the issuer, asks for the states by
TMA and starts the MMAs as soon as a state and C are in shared memory; their sums are left in tensor memory, columns of
their own for every turn. Meanwhile four warps make B·C, decays and weights, with the portable kernel's own code. Warp w
then takes lanes 32w .. 32w + 31 of tensor memory, which are rows 32w .. of the turn, as fragments of two 16-row tiles.
A row that flushes reads its state from the same shared memory. An f32 state is taken to be cut to tf32 by the MMA, as
`mma.sync` cuts it (`decay.TRUNCATION_GAIN`); if it were rounded, outputs would be 3.5e-4 too large.

    issuer:   slot -> states by TMA -> tensor memory -> (C staged) -> per turn: MMAs; next state
    epilogue: slot -> cursors -> ring rows -> (C staged) -> B·C, decay -> weights -> per turn: contributions, outputs,
              flush
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ...problem import Problem
from ...ring import flushes
from ...sm100 import COLUMNS, ROWS, Sm100Config
from ..decay import Decay
from ..primitives import CUTLASS_TYPE, load_words, store_words
from ..products import Products
from ..readout_c import ReadoutC
from ..signature import fake_arguments
from ..spec import P_TILE, WARP
from ..state_tile import StateTile
from ..step import StepKernel
from ..tokens import Tokens
from ..weights import Weights
from .instructions import (
    allocate,
    commit,
    fence_after_sync,
    fence_before_sync,
    fence_writes,
    load_accumulators,
    multiply,
    release,
)
from .operands import Operands, descriptor
from .spec import Sm100Spec

EPILOGUE = 1  # the named barrier of the epilogue's warps


class Sm100StepKernel(StepKernel):
    """One step kernel, specialized on a problem and a config."""

    def __init__(self, problem: Problem, config: Sm100Config) -> None:
        self.spec = Sm100Spec(problem, config)
        self.readout_c = ReadoutC(self.spec)
        self.operands = Operands(self.spec, self.readout_c)
        self.products = Products(self.spec, self.readout_c)
        self.decay = Decay(self.spec)
        self.weights = Weights(self.spec, self.products)
        self.state_tile = StateTile(self.spec, self.readout_c)
        self.tokens = Tokens(self.spec)

    def box(self) -> tuple[int, int, int, int]:
        """What one TMA load brings: (column, row of P, head, block)."""
        spec = self.spec
        return spec.block, spec.problem.head_dim, spec.config.parallel_heads, spec.blocks

    def staged_layout(self) -> cute.ComposedLayout:
        """Shared-memory layout of the state: (column, row of P, head, block, stage), 128-byte swizzle."""
        spec = self.spec
        rows = spec.problem.head_dim * spec.block
        tile = ROWS * spec.block
        outer = cute.make_layout(
            (*self.box(), spec.config.stages), stride=(1, spec.block, rows, tile, tile * spec.blocks)
        )
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, outer)

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
        spec = self.spec
        p, config = spec.problem, spec.config
        tiled_state = cute.make_tensor(
            state.iterator,
            cute.make_layout(
                (spec.block, p.head_dim, p.heads, spec.blocks, state.shape[0]),
                stride=(1, state.stride[2], state.stride[1], spec.block, state.stride[0]),
            ),
        )
        atom, tma_state = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            tiled_state,
            cute.select(self.staged_layout(), mode=[0, 1, 2, 3]),
            self.box(),
        )
        self.kernel(
            atom, tma_state, state, x_cache, b_cache, dt_cache, ring_start, pnat,
            x, dt, a, b, c, out, d, z, dt_bias, slots, cu_seqlens, pad_slot_id,
        ).launch(
            grid=[self.grid_size(x.shape[0]), 1, 1],
            block=[spec.all_threads, 1, 1],
            stream=stream,
            use_pdl=p.pdl,
            min_blocks_per_mp=config.ctas_per_sm,
            preferred_smem_carveout=100,  # percent, as in the portable kernel
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
        z: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        slots: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        pad_slot_id: Int64,
    ):
        spec = self.spec
        p, config, shared, tensor = spec.problem, spec.config, spec.shared, spec.tensor
        row, _, head0, count = self.place(cute.arch.block_idx()[0], x.shape[0])
        group = head0 // p.heads_per_group
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        turns = count // config.parallel_heads
        only_turn = cutlass.const_expr(config.turns == 1)
        refill = cutlass.const_expr(config.stages < config.turns)

        slot = Int64(row)
        if cutlass.const_expr(slots is not None):
            slot = Int64(slots[row])
        new = spec.new_row(row, cu_seqlens, x.shape[1])
        length = new[2]
        live = cute.arch.make_warp_uniform(Int32((slot != pad_slot_id) & (slot >= 0))) != 0
        slot32 = Int32(slot)

        smem = SmemAllocator()
        raw = smem.allocate(tensor.total, byte_alignment=1024)
        address = Int32(raw.toint())
        barrier = lambda offset: cute.recast_ptr(raw + offset, dtype=Int64)  # noqa: E731
        full, done, empty, read = (barrier(n) for n in (tensor.full, tensor.done, tensor.empty, tensor.read))

        if warp == spec.issuer:
            # ---- the issuer ----
            staged = self.staged_layout()
            shared_state = cute.make_tensor(
                cute.recast_ptr(raw, staged.inner, dtype=CUTLASS_TYPE[spec.state_kind]), staged.outer
            )
            state_tiles = cute.local_tile(tma_state, self.box(), (None, None, None, None, None))
            to_shared, from_global = cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(shared_state, 0, 4), cute.group_modes(state_tiles, 0, 4)
            )
            with cute.arch.elect_one():
                cpasync.prefetch_descriptor(atom)
                for stage in cutlass.range_constexpr(config.stages):
                    cute.arch.mbarrier_init(full + stage, 1)
                    cute.arch.mbarrier_init(empty + stage, spec.warps)
                for turn in cutlass.range_constexpr(config.turns):
                    cute.arch.mbarrier_init(done + turn, 1)
                cute.arch.mbarrier_init(read, spec.warps)
            cute.arch.mbarrier_init_fence()
            cute.arch.sync_warp()
            first = head0 // config.parallel_heads
            flush = Boolean(False)
            if live:
                for stage in cutlass.range_constexpr(config.stages):
                    if stage < turns:
                        self.ask(atom, from_global, to_shared, full, first + stage, stage, slot32)
                allocate(address + tensor.base, tensor.columns)
                if cutlass.const_expr(refill):
                    flush = Boolean(flushes(Int32(pnat_of[slot]), p.tokens, p.window))
            # Dependents may start once every CTA has its tensor memory: one that held what is left of it, and waited
            # for this grid, would never be served. So this warp alone lets them, after its allocation.
            if cutlass.const_expr(p.pdl):
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
            if live:
                cute.arch.sync_threads()
                fence_after_sync()
                base = load_words(raw + tensor.base, 1)[0]
                stage, phase = Int32(0), Int32(0)
                for i in cutlass.range(turns, unroll=1):
                    cute.arch.mbarrier_wait(full + stage, phase)
                    self.start_read_out(address, base + i * COLUMNS, stage, i)
                    if cutlass.const_expr(refill):
                        if i + config.stages < turns:
                            if flush:
                                cute.arch.mbarrier_wait(empty + stage, phase)
                            else:
                                cute.arch.mbarrier_wait(done + i, 0)
                            self.ask(atom, from_global, to_shared, full, first + i + config.stages, stage, slot32)
                    stage, phase = self.following(stage, phase)
                cute.arch.mbarrier_wait(read, 0)
                fence_after_sync()
                release(base, tensor.columns)
        else:
            # ---- the epilogue ----
            products = self.floats(raw, shared.products)
            vectors = self.floats(raw, shared.vectors)
            thread = warp * WARP + lane
            side, head_warp = warp // spec.head_warps, warp % spec.head_warps  # which of the heads taken at a time
            p0 = head_warp * spec.warp_rows
            first = head0 + side  # this warp's first head; its others follow `parallel_heads` apart
            scan = spec.warps - 1 - warp  # heads' vectors are dealt from the last warp: B·C keeps the first ones busy
            scan_head = head0 + cutlass.min(scan, count - 1)
            start, pnat = Int32(0), Int32(0)
            if cutlass.const_expr(p.pdl):
                if live:
                    start, pnat = Int32(ring_start[slot]), Int32(pnat_of[slot])
                cute.arch.griddepcontrol_wait()
            c_words = self.readout_c.load(c, new, group)
            scan_new = self.decay.load_new(dt, a, dt_bias, d, new, scan_head, lane)
            self.tokens.copy_new(address, x, z, new, head0, count, 0, thread)
            if cutlass.const_expr(only_turn):
                new_x = self.tokens.new_x(x, new, head0, count, 0, thread)
            cute.arch.sync_warp()  # a fence for the scheduler: loads above it are issued above it

            if live:
                if cutlass.const_expr(not p.pdl):
                    start, pnat = Int32(ring_start[slot]), Int32(pnat_of[slot])
                self.readout_c.stage(raw, c_words)
                self.operands.stage(raw, c_words)
                fence_writes()
                bc_tile = warp % shared.tile_warps
                bc_rows = self.products.new_rows()
                ring_dt = self.decay.load_ring(dt_cache, slot, scan_head, start, pnat, lane)
                self.products.load_rows(bc_rows, b_cache, b, new, slot, group, start, pnat, bc_tile, warp, g, t)
                self.tokens.copy_ring(address, x_cache, slot, head0, count, 0, start, pnat, thread)
                cute.arch.cp_async_commit_group()
                cute.arch.sync_threads()
                fence_after_sync()
                base = load_words(raw + tensor.base, 1)[0]
                if cutlass.const_expr(only_turn):
                    self.tokens.append_new(x_cache, new_x, slot, head0, count, 0, start, pnat, length, thread)
                flush = Boolean(flushes(cute.arch.shuffle_sync(pnat, 0), length, p.window))
                flush_b = None
                if cutlass.const_expr(only_turn):
                    flush_b = self.state_tile.new_b()
                    if flush:
                        self.state_tile.first_b(flush_b, b_cache, slot, group, start, pnat, g, t)

                # ---- once per CTA: B·C, decay vectors, appended rows of B and dt, weights ----
                appends = head0 % p.heads_per_group == 0
                self.products.partial_sums(
                    bc_rows, raw, products, b_cache, slot, group, start, pnat, length, appends, bc_tile, warp, g, t
                )
                for more in cutlass.range_constexpr(1, -(-shared.tiles // shared.tile_warps)):
                    later_tile = bc_tile + more * shared.tile_warps
                    self.products.load_rows(bc_rows, b_cache, b, new, slot, group, start, pnat, later_tile, warp, g, t)
                    self.products.partial_sums(
                        bc_rows,
                        raw,
                        products,
                        b_cache,
                        slot,
                        group,
                        start,
                        pnat,
                        length,
                        appends,
                        later_tile,
                        warp,
                        g,
                        t,
                    )
                if scan < count:
                    self.decay.make_vectors(
                        dt_cache, scan_new, ring_dt, vectors, scan, slot, scan_head, start, pnat, length, 0, lane
                    )
                if cutlass.const_expr(config.heads_per_cta > spec.warps):
                    for i in cutlass.range(scan + spec.warps, count, spec.warps, unroll=1):
                        later_new = self.decay.load_new(dt, a, dt_bias, d, new, head0 + i, lane)
                        later_dt = self.decay.load_ring(dt_cache, slot, head0 + i, start, pnat, lane)
                        self.decay.make_vectors(
                            dt_cache, later_new, later_dt, vectors, i, slot, head0 + i, start, pnat, length, 0, lane
                        )
                self.tokens.await_copies(raw, count, start, pnat, thread)
                cute.arch.barrier(barrier_id=EPILOGUE, number_of_threads=spec.threads)
                if cutlass.const_expr(not only_turn):
                    self.tokens.append_x(raw, x_cache, slot, head0, count, 0, start, pnat, length, thread)
                    for part in cutlass.range(warp, count * spec.steps, spec.warps, unroll=1):
                        self.weights.make(
                            raw, products, vectors, part // spec.steps, part % spec.steps, start, pnat, g, t
                        )
                    cute.arch.barrier(barrier_id=EPILOGUE, number_of_threads=spec.threads)
                # A CTA's only turn flushes before it makes the outputs: the write takes longest.
                if cutlass.const_expr(only_turn):
                    if flush:
                        cute.arch.mbarrier_wait(full, 0)
                        cute.arch.mbarrier_wait(done, 0)  # results replace what the MMAs read
                        at = self.tokens.inputs(side, head_warp)
                        self.flush(
                            state, b_cache, raw, address, at, vectors, flush_b, 0, side, slot, group, first, p0, start,
                            pnat, warp, lane,
                        )  # fmt: skip

                # ---- turn by turn ----
                read_out = cute.make_rmem_tensor(cute.make_layout(4 * spec.token_tiles * spec.tiles), Float32)
                stage, phase = Int32(0), Int32(0)
                for i in cutlass.range(turns, unroll=1):
                    index = i * config.parallel_heads + side  # of the head in its CTA
                    head = head0 + index
                    at = self.tokens.inputs(index, head_warp)
                    gates = [] if cutlass.const_expr(z is None) else self.tokens.gates(address + at, lane)
                    weights = self.weights.fragments(raw, products, vectors, index, start, pnat, g, t)
                    sums = self.tokens.contributions(address + at, weights, lane)
                    cute.arch.mbarrier_wait(done + i, 0)
                    self.take_read_out(read_out, base + i * COLUMNS, warp)
                    self.tokens.store_outputs(out, raw, read_out, sums, gates, index, new, head, p0, g, t)
                    if cutlass.const_expr(not only_turn):
                        if flush:
                            cute.arch.mbarrier_wait(full + stage, phase)
                            self.flush(
                                state, b_cache, raw, address, at, vectors, None, stage, index, slot, group, head, p0,
                                start, pnat, warp, lane,
                            )  # fmt: skip
                    if cutlass.const_expr(config.turns > 1):
                        cute.arch.sync_warp()
                        if cutlass.const_expr(refill):
                            if flush:
                                fence_writes()
                                cute.arch.sync_warp()
                                with cute.arch.elect_one():
                                    cute.arch.mbarrier_arrive(empty + stage)
                        stage, phase = self.following(stage, phase)
                fence_before_sync()
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(read)
            else:
                cute.arch.cp_async_commit_group()
                cute.arch.cp_async_wait_group(0)  # copies must not land in a later CTA's shared memory
                self.tokens.store_zeros(out, new, first, turns, p0, lane)

    def floats(self, raw, offset):
        """Shared memory from an offset on, as floats."""
        return cute.make_tensor(cute.recast_ptr(raw + offset, dtype=Float32), cute.make_layout(1 << 20))

    @cute.jit
    def ask(self, atom, from_global, to_shared, full, tile, stage, slot):
        """Ask for the `tile`-th 128 rows of a slot's state."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.spec.shared.stage_bytes)
        cute.copy(atom, from_global[None, 0, 0, tile, 0, slot], to_shared[None, stage], tma_bar_ptr=full + stage)

    @cute.jit
    def start_read_out(self, address, accumulators, stage, turn):
        """Start S·C of a stage's state; the turn's `done` tells when the sums are there."""
        spec, operands = self.spec, self.operands
        state = address + stage * spec.shared.stage_bytes
        with cute.arch.elect_one():
            for step in cutlass.range_constexpr(operands.steps):
                a = descriptor(state + operands.offset(step, ROWS * 128))
                b = descriptor(address + (spec.tensor.c + operands.offset(step, spec.tensor.c_block)))
                multiply(operands.kind, accumulators, a, b, operands.shape, step > 0)
            commit(address + spec.tensor.done + 8 * turn)

    @cute.jit
    def take_read_out(self, read_out, accumulators, warp):
        """This warp's rows of a turn's S·C: per tile and token tile (rows g, g + 8) x (tokens 2t, 2t + 1)."""
        spec = self.spec
        fence_after_sync()
        lanes = accumulators + (warp * spec.warp_rows << 16)
        places = [lanes + (P_TILE * tile << 16) + 8 * n for tile in range(spec.tiles) for n in range(spec.token_tiles)]
        for k, values in enumerate(load_accumulators(places)):
            for e in cutlass.range_constexpr(4):
                read_out[4 * k + e] = values[e]

    @cute.jit
    def flush(
        self, state, b_cache, raw, address, at, vectors, flush_b, stage, index, slot, group, head, p0, start, pnat,
        warp, lane,
    ):  # fmt: skip
        """Flush the head whose state is in a stage, inputs at `at`; `flush_b` is B's first part if it was asked for."""
        coming = flush_b
        if cutlass.const_expr(flush_b is None):
            coming = self.state_tile.new_b()
            self.state_tile.first_b(coming, b_cache, slot, group, start, pnat, lane // 4, lane % 4)
        for tile in cutlass.range(self.spec.tiles, unroll=1):
            offset = stage * self.spec.shared.stage_bytes + (warp * self.spec.warp_rows + tile * P_TILE) * 128
            words = cute.recast_ptr(raw + cute.assume(offset, divby=1024), dtype=Int32)
            x_words = self.tokens.x_words(address + (at + tile * self.spec.shared.input_tile_bytes), lane)
            self.state_tile.flush(
                b_cache, vectors, words, x_words, coming, index, slot, group, start, pnat, lane // 4, lane % 4
            )
            cute.arch.sync_warp()
            for block in cutlass.range_constexpr(self.spec.blocks):
                for first in cutlass.range_constexpr(0, P_TILE, 4):
                    row, chunk = first + lane // 8, lane % 8  # eight lanes have a row's 128 bytes
                    place = block * (self.spec.rows * 32) + row * 32 + ((chunk ^ (row % 8)) * 4)
                    found = load_words(words + cute.assume(place, divby=4), 4)
                    column = block * self.spec.block + chunk * self.spec.chunk
                    where = (head, p0 + P_TILE * tile + row)
                    store_words(self.spec.pointer(state, slot, where, column, self.spec.chunk), found)


def compile_sm100_step(problem: Problem, config: Sm100Config, arch: str):
    """Compile the step kernel for `arch`; as `step.compile_step`."""
    return cute.compile(
        Sm100StepKernel(problem, config), *fake_arguments(problem), options=f"--enable-tvm-ffi --gpu-arch {arch}"
    )
