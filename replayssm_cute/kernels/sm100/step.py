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

import dataclasses
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...problem import Problem
from ...ring import flushes
from ...sm100 import ROWS, Sm100Config
from ..bundles import Entry, Row, Share, Shared, Tensors, Thread
from ..phases import Inputs, Phases, following
from ..primitives import load_words
from ..readout_c import ReadoutC
from ..signature import fake_arguments
from ..spec import P_TILE
from ..state_tile import StateTile
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
from .state_copies import Pipe, StateCopies
from .write_back import WriteBack

EPILOGUE = 1  # the named barrier of the epilogue's warps


@dataclass(frozen=True, eq=False)
class Barriers:
    """Barriers of a CTA, each the first of its kind; see `TensorLayout`."""

    full: cute.Pointer
    done: cute.Pointer
    empty: cute.Pointer
    read: cute.Pointer


class Sm100StepKernel(Phases):
    """One step kernel, specialized on a problem and a config."""

    def __init__(self, problem: Problem, config: Sm100Config) -> None:
        spec = Sm100Spec(problem, config)
        super().__init__(spec, ReadoutC(spec))
        self.operands = Operands(spec, self.readout_c)
        self.state_tile = StateTile(spec, self.readout_c)
        self.copies = StateCopies(spec)
        self.write_back = WriteBack(spec, self.state_tile, self.tokens)

    def start(self, tensors: Tensors, stream) -> None:
        """Launch the grid."""
        kernel = self.kernel(*self.copies.atom(tensors.state), tensors.state, dataclasses.replace(tensors, state=None))
        kernel.launch(**self.launch_options(tensors, self.spec.all_threads, stream))

    @cute.kernel
    def kernel(self, atom: cute.CopyAtom, tma_state: cute.Tensor, state: cute.Tensor, others: Tensors):
        spec, tensor = self.spec, self.spec.tensor
        tensors = dataclasses.replace(others, state=state)
        number, _, head0, count = self.grid.place(cute.arch.block_idx()[0], tensors.batch)
        group = head0 // spec.problem.heads_per_group
        thread = self.thread()
        turns = count // spec.config.parallel_heads
        slot = self.slot(tensors, number)
        new = spec.new_tokens(number, tensors)
        entry = self.entry(tensors, slot, group, new)
        raw, address = self.allocate(tensor.total)
        barrier = lambda offset: cute.recast_ptr(raw + offset, dtype=Int64)  # noqa: E731
        barriers = Barriers(*(barrier(n) for n in (tensor.full, tensor.done, tensor.empty, tensor.read)))
        if thread.warp == spec.issuer:
            pipe = self.copies.pipe(atom, tma_state, raw)
            self.issue(tensors, raw, address, barriers, pipe, entry, head0, turns)
        else:
            shared = self.views(raw, address)
            share = self.share(self.rows(0, thread), head0, count, thread)
            self.epilogue(tensors, shared, barriers, entry, share, thread)
            if cutlass.const_expr(spec.problem.ragged):
                self.tokens.zero_tail(tensors, number, new, share, thread)

    # ---- the issuer

    @cute.jit
    def issue(self, tensors: Tensors, raw, address, barriers: Barriers, pipe: Pipe, entry: Entry, head0, turns):
        """What the issuer does: states by TMA, and the MMAs on them."""
        spec, config, tensor = self.spec, self.spec.config, self.spec.tensor
        with cute.arch.elect_one():
            cpasync.prefetch_descriptor(pipe.atom)
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(barriers.full + stage, 1)
                cute.arch.mbarrier_init(barriers.empty + stage, spec.warps)
            for turn in cutlass.range_constexpr(config.turns):
                cute.arch.mbarrier_init(barriers.done + turn, 1)
            cute.arch.mbarrier_init(barriers.read, spec.warps)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()
        first = head0 // config.parallel_heads
        flush = Boolean(False)
        if entry.live:
            for stage in cutlass.range_constexpr(config.stages):
                if stage < turns:
                    self.copies.ask(pipe, barriers.full, first + stage, stage, entry.slot32)
            allocate(address + tensor.base, tensor.columns)
            if cutlass.const_expr(self.refills):
                flush = Boolean(flushes(Int32(tensors.pnat[entry.slot]), entry.new.length, spec.problem.window))
        # Dependents may start once every CTA has its tensor memory: one that held what is left of it, and waited
        # for this grid, would never be served. So this warp alone lets them, after its allocation.
        if cutlass.const_expr(spec.problem.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if entry.live:
            cute.arch.sync_threads()
            fence_after_sync()
            base = load_words(raw + tensor.base, 1)[0]
            stage, phase = Int32(0), Int32(0)
            for i in cutlass.range(turns, unroll=1):
                cute.arch.mbarrier_wait(barriers.full + stage, phase)
                self.start_read_out(address, base + i * spec.columns, stage, i)
                if cutlass.const_expr(self.refills):
                    if i + config.stages < turns:
                        if flush:
                            cute.arch.mbarrier_wait(barriers.empty + stage, phase)
                        else:
                            cute.arch.mbarrier_wait(barriers.done + i, 0)
                        self.copies.ask(pipe, barriers.full, first + i + config.stages, stage, entry.slot32)
                stage, phase = following(stage, phase, config.stages)
            cute.arch.mbarrier_wait(barriers.read, 0)
            fence_after_sync()
            release(base, tensor.columns)

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

    # ---- the epilogue

    @cute.jit
    def epilogue(
        self, tensors: Tensors, shared: Shared, barriers: Barriers, entry: Entry, share: Share, thread: Thread
    ):
        """What the four other warps do: all but S·C."""
        pdl = self.spec.problem.pdl
        start, pnat = Int32(0), Int32(0)
        if cutlass.const_expr(pdl):
            if entry.live:
                start, pnat = Int32(tensors.ring_start[entry.slot]), Int32(tensors.pnat[entry.slot])
            cute.arch.griddepcontrol_wait()
        inputs = self.ask_inputs(tensors, shared, entry, share, thread)
        if entry.live:
            if cutlass.const_expr(not pdl):
                start, pnat = Int32(tensors.ring_start[entry.slot]), Int32(tensors.pnat[entry.slot])
            self.work(tensors, shared, barriers, entry.at(start, pnat), share, thread, inputs)
        else:
            self.leave_out(tensors, entry.new, share, thread)

    @cute.jit
    def work(
        self, tensors: Tensors, shared: Shared, barriers: Barriers, row: Row, share: Share, thread: Thread,
        inputs: Inputs,
    ):  # fmt: skip
        """The step of one row: what a CTA does once, then its turns."""
        spec = self.spec
        self.readout_c.stage(shared.raw, inputs.c)
        self.operands.stage(shared.raw, inputs.c)
        fence_writes()
        ring = self.ask_ring(tensors, shared, row, share, thread)
        cute.arch.sync_threads()
        fence_after_sync()
        base = load_words(shared.raw + spec.tensor.base, 1)[0]
        if cutlass.const_expr(self.only_turn):
            self.tokens.append_new(tensors, inputs.x, row, share)
        flush = self.flushes(row)
        self.multiply_and_scan(tensors, shared, row, share, thread, inputs, ring, flush)
        cute.arch.barrier(barrier_id=EPILOGUE, number_of_threads=spec.threads)
        if cutlass.const_expr(not self.only_turn):
            self.append_and_weigh(tensors, shared, row, share, thread)
            cute.arch.barrier(barrier_id=EPILOGUE, number_of_threads=spec.threads)
        # A CTA's only turn flushes before it makes the outputs: the write takes longest.
        if cutlass.const_expr(self.only_turn):
            if flush:
                cute.arch.mbarrier_wait(barriers.full, 0)
                cute.arch.mbarrier_wait(barriers.done, 0)  # results replace what the MMAs read
                turn = self.turn(share, share.rows.side, 0)
                self.write_back.flush(tensors, shared, turn, share, row, thread)
        self.turns(tensors, shared, barriers, row, share, thread, base, flush)
        fence_before_sync()
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barriers.read)

    @cute.jit
    def turns(
        self, tensors: Tensors, shared: Shared, barriers: Barriers, row: Row, share: Share, thread: Thread, base, flush
    ):
        """Turn by turn: outputs, flush."""
        spec, config = self.spec, self.spec.config
        read_out = cute.make_rmem_tensor(cute.make_layout(4 * spec.token_tiles * spec.tiles), Float32)
        stage, phase = Int32(0), Int32(0)
        for i in cutlass.range(share.turns, unroll=1):
            turn = self.turn(share, i * config.parallel_heads + share.rows.side, stage)
            sums, gates = self.contributions(tensors, shared, turn, row, thread)
            cute.arch.mbarrier_wait(barriers.done + i, 0)
            self.take_read_out(read_out, base + i * spec.columns, thread.warp)
            self.tokens.store_outputs(tensors, shared, read_out, sums, gates, turn, row.new, share.rows.p0, thread)
            if cutlass.const_expr(not self.only_turn):
                if flush:
                    cute.arch.mbarrier_wait(barriers.full + stage, phase)
                    self.write_back.flush(tensors, shared, turn, share, row, thread)
                cute.arch.sync_warp()
                if cutlass.const_expr(self.refills):
                    if flush:
                        fence_writes()
                        cute.arch.sync_warp()
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(barriers.empty + stage)
                stage, phase = following(stage, phase, config.stages)

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


def compile_sm100_step(problem: Problem, config: Sm100Config, arch: str):
    """Compile the step kernel for `arch`; as `step.compile_step`."""
    return cute.compile(
        Sm100StepKernel(problem, config), *fake_arguments(problem), options=f"--enable-tvm-ffi --gpu-arch {arch}"
    )
