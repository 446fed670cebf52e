"""The step kernel for sm_100a and sm_103a: S·C on shared memory by the tensor cores, the rest as the portable kernel.

A turn of a CTA is what an MMA takes of the state: two heads of 64 rows, one of 128, or one of 80. One warp, the issuer,
asks for the states by TMA and starts the MMAs as soon as a state and C are in shared memory; their sums are left in
tensor memory, columns of their own for every turn. Meanwhile the epilogue's warps make B·C, decays and weights, with
the portable kernel's own code. Each then takes its rows of the turn from tensor memory, as fragments of 16-row tiles.
A row that flushes reads its state from the same shared memory. An f32 state is taken to be cut to tf32 by the MMA, as
`mma.sync` cuts it (`decay.TRUNCATION_GAIN`); if it were rounded, outputs would be 3.5e-4 too large.

    issuer:   slot -> states by TMA -> tensor memory -> (C staged) -> per turn: MMAs; next state
    epilogue: slot -> cursors -> ring rows -> (C staged) -> B·C, decay -> weights -> per turn: contributions, outputs,
              flush

With `Sm100Config.launch_control` a CTA does this for one place of the grid after the other (`serve`), and a warp of its
own, the loader, is ahead with the states:

    loader:   per place: per turn: (stage empty) -> state by TMA; -> ask for the next place -> (answer)
    issuer:   tensor memory -> per place: (C staged) -> per turn: MMAs; -> (answer)
    epilogue: per place: as above; -> (answer)

Turns are counted through all places: turn k has stage k % stages, columns k % turns, and the barriers of these in phase
k // stages % 2 and k // turns % 2.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync

from ...problem import Problem
from ...ring import flushes
from ...sm100 import ANSWER_BYTES, ANSWERS, Sm100Config
from ..bundles import Entry, Row, Share, Shared, Tensors, Thread
from ..phases import Inputs, Phases, following
from ..primitives import load_words, quotient, remainder
from ..signature import compile_options, fake_arguments
from ..spec import P_TILE
from ..state_tile import StateTile
from .instructions import (
    allocate,
    ask_for_work,
    commit,
    fence_after_sync,
    fence_before_sync,
    fence_writes,
    given_work,
    load_accumulators,
    multiply,
    release,
)
from .operands import OfEpilogue, Operands, descriptor
from .spec import Sm100Spec
from .state_copies import Pipe, StateCopies
from .write_back import WriteBack

EPILOGUE, STAGED = 1, 2  # named barriers: of the epilogue's warps; of these and the issuer


@dataclass(frozen=True, eq=False)
class Barriers:
    """Barriers of a CTA, each the first of its kind; see `TensorLayout`."""

    full: cute.Pointer
    done: cute.Pointer
    empty: cute.Pointer
    read: cute.Pointer
    known: cute.Pointer
    taken: cute.Pointer


@dataclass(frozen=True, eq=False)
class Place:
    """A CTA's place in the grid: batch row, heads, turns."""

    number: Int32
    head0: Int32
    count: Any
    turns: Any
    entry: Entry


class Sm100StepKernel(Phases):
    """One step kernel, specialized on a problem and a config."""

    def __init__(self, problem: Problem, config: Sm100Config) -> None:
        spec = Sm100Spec(problem, config)
        super().__init__(spec, OfEpilogue(spec))
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
        thread = self.thread()
        raw, address = self.allocate(tensor.total)
        barrier = lambda offset: cute.recast_ptr(raw + offset, dtype=Int64)  # noqa: E731
        offsets = tensor.full, tensor.done, tensor.empty, tensor.read, tensor.known, tensor.taken
        barriers = Barriers(*(barrier(n) for n in offsets))
        if cutlass.const_expr(spec.launch_control):
            self.serve(atom, tma_state, tensors, raw, address, barriers, thread)
        else:
            place = self.place(tensors, cute.arch.block_idx()[0])
            if thread.warp == spec.issuer:
                pipe = self.copies.pipe(atom, tma_state, raw)
                self.issue(tensors, raw, address, barriers, pipe, place)
            else:
                self.finish(tensors, self.views(raw, address), barriers, place, 0, thread)

    def thread(self) -> Thread:
        """The thread that asks; its warp is counted by parts."""
        found = super().thread()
        return dataclasses.replace(found, warp=self.spec.part(found.warp))

    def place(self, tensors: Tensors, block) -> Place:
        """What a CTA of the grid works on."""
        number, _, head0, count = self.grid.place(block, tensors.batch)
        group = quotient(head0, self.spec.problem.heads_per_group)
        slot = self.slot(tensors, number)
        new = self.spec.new_tokens(number, tensors)
        entry = self.entry(tensors, slot, group, new)
        return Place(number, head0, count, quotient(count, self.spec.config.parallel_heads), entry)

    @cute.jit
    def prepare(self, pipe: Pipe, barriers: Barriers):
        """Initialize the barriers, by one warp."""
        spec, config = self.spec, self.spec.config
        # Who arrives at `empty`: with launch control, one thread after a flush, or the MMAs; else a flush's warps.
        empties = 1 if spec.launch_control else spec.warps
        with cute.arch.elect_one():
            cpasync.prefetch_descriptor(pipe.atom)
            for stage in cutlass.range_constexpr(config.stages):
                cute.arch.mbarrier_init(barriers.full + stage, 1)
                cute.arch.mbarrier_init(barriers.empty + stage, empties)
            for turn in cutlass.range_constexpr(config.turns):
                cute.arch.mbarrier_init(barriers.done + turn, 1)
            cute.arch.mbarrier_init(barriers.read, spec.warps)
            if cutlass.const_expr(spec.launch_control):
                for answer in cutlass.range_constexpr(ANSWERS):
                    cute.arch.mbarrier_init(barriers.known + answer, 1)
                    cute.arch.mbarrier_init(barriers.taken + answer, spec.warps + 1)
        cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()

    # ---- the issuer

    @cute.jit
    def issue(self, tensors: Tensors, raw, address, barriers: Barriers, pipe: Pipe, place: Place):
        """What the issuer does without launch control: states by TMA, and the MMAs on them."""
        spec, config, tensor = self.spec, self.spec.config, self.spec.tensor
        entry, turns = place.entry, place.turns
        self.prepare(pipe, barriers)
        first = quotient(place.head0, config.parallel_heads)
        flush = Boolean(False)
        if entry.live:
            for stage in cutlass.range_constexpr(config.stages):
                if stage < turns:
                    self.copies.ask(pipe, barriers.full, first + stage, stage, entry.slot32)
            allocate(address + tensor.base, tensor.columns)
            if cutlass.const_expr(self.refills):
                flush = self.will_flush(tensors, entry)
        # Dependents may start once every CTA has its tensor memory: one that held what is left of it, and waited
        # for this grid, would never be served. So this warp alone lets them, after its allocation.
        if cutlass.const_expr(spec.problem.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if entry.live:
            cute.arch.barrier(barrier_id=STAGED, number_of_threads=spec.staging_threads)
            fence_after_sync()
            base = load_words(raw + tensor.base, 1)[0]
            stage, phase = Int32(0), Int32(0)
            for i in cutlass.range(turns, unroll=1):
                cute.arch.mbarrier_wait(barriers.full + stage, phase)
                self.start_read_out(address, base, stage, i)
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

    def will_flush(self, tensors: Tensors, entry: Entry):
        """Whether a row flushes, for a warp that has no other use for its cursors."""
        return Boolean(flushes(Int32(tensors.pnat[entry.slot]), entry.new.length, self.spec.problem.window))

    @cute.jit
    def start_read_out(self, address, base, stage, at):
        """Start S·C of a stage's state into the `at`-th accumulators; their `done` tells when the sums are there."""
        spec, operands = self.spec, self.operands
        state = address + stage * spec.shared.stage_bytes
        accumulators = base + at * spec.columns
        with cute.arch.elect_one():
            for step in cutlass.range_constexpr(operands.steps):
                a = descriptor(state + operands.offset(step, spec.rows * 128))
                b = descriptor(address + (spec.tensor.c + operands.offset(step, spec.tensor.c_block)))
                multiply(operands.kind, accumulators, a, b, operands.shape, step > 0)
            commit(address + spec.tensor.done + 8 * at)

    # ---- with launch control

    @cute.jit
    def serve(self, atom, tma_state, tensors: Tensors, raw, address, barriers: Barriers, thread: Thread):
        """What a CTA does with launch control: its own place, then one after the other that it is given."""
        spec, tensor = self.spec, self.spec.tensor
        if thread.warp == spec.loader:
            self.prepare(self.copies.pipe(atom, tma_state, raw), barriers)
        # Before dependents may start, as in `issue`; even if this place is padding, the next ones may not be.
        if thread.warp == spec.issuer:
            allocate(address + tensor.base, tensor.columns)
        cute.arch.sync_threads()
        if thread.warp == spec.loader:
            self.load_all(tensors, raw, address, barriers, self.copies.pipe(atom, tma_state, raw))
        elif thread.warp == spec.issuer:
            self.multiply_all(tensors, raw, address, barriers)
        else:
            self.finish_all(tensors, self.views(raw, address), barriers, thread)

    @cute.jit
    def load_all(self, tensors: Tensors, raw, address, barriers: Barriers, pipe: Pipe):
        """The loader: states of one place after the other, as stages become empty; the next place."""
        block, before = Int32(cute.arch.block_idx()[0]), Int32(0)
        answer, phase = Int32(0), Int32(0)
        while block >= 0:
            before = self.load_place(tensors, barriers, pipe, block, before)
            cute.arch.mbarrier_wait(barriers.taken + answer, phase ^ 1)
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(barriers.known + answer, ANSWER_BYTES)
                ask_for_work(self.answer(address, answer), address + (self.spec.tensor.known + 8 * answer))
            cute.arch.mbarrier_wait(barriers.known + answer, phase)
            block = given_work(self.answer(address, answer))
            fence_writes()  # what was read before the answer after next is written there
            cute.arch.sync_warp()
            answer, phase = following(answer, phase, ANSWERS)
        self.await_stages(barriers, before)

    @cute.jit
    def await_stages(self, barriers: Barriers, before):
        """Wait until all stages are empty: a CTA must outlive what arrives at its barriers."""
        stage, phase = self.where(before, self.spec.config.stages)
        for _ in cutlass.range(self.spec.config.stages, unroll=1):
            cute.arch.mbarrier_wait(barriers.empty + stage, phase ^ 1)
            stage, phase = following(stage, phase, self.spec.config.stages)

    @cute.jit
    def load_place(self, tensors: Tensors, barriers: Barriers, pipe: Pipe, block, before):
        """Ask for the states of a place, `before` turns after the CTA's first; returns the turns up to its end."""
        config = self.spec.config
        place = self.place(tensors, block)
        after = before
        if place.entry.live:
            first = quotient(place.head0, config.parallel_heads)
            stage, phase = self.where(before, config.stages)
            for i in cutlass.range(place.turns, unroll=1):
                cute.arch.mbarrier_wait(barriers.empty + stage, phase ^ 1)
                self.copies.ask(pipe, barriers.full, first + i, stage, place.entry.slot32)
                stage, phase = following(stage, phase, config.stages)
            after = before + place.turns
        return after

    @cute.jit
    def multiply_all(self, tensors: Tensors, raw, address, barriers: Barriers):
        """The issuer: MMAs of one place after the other; tensor memory."""
        spec, tensor = self.spec, self.spec.tensor
        if cutlass.const_expr(spec.problem.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        fence_after_sync()
        base = load_words(raw + tensor.base, 1)[0]
        block, before = Int32(cute.arch.block_idx()[0]), Int32(0)
        answer, phase = Int32(0), Int32(0)
        while block >= 0:
            before = self.multiply_place(tensors, address, barriers, base, block, before)
            cute.arch.mbarrier_wait(barriers.known + answer, phase)
            block = self.take(address, barriers, answer)
            answer, phase = following(answer, phase, ANSWERS)
        cute.arch.mbarrier_wait(barriers.read, 0)
        fence_after_sync()
        release(base, tensor.columns)

    @cute.jit
    def multiply_place(self, tensors: Tensors, address, barriers: Barriers, base, block, before):
        """Start the MMAs of a place, and let them empty its stages where no flush does; returns as `load_place`."""
        spec, config = self.spec, self.spec.config
        place = self.place(tensors, block)
        after = before
        if place.entry.live:
            flush = self.will_flush(tensors, place.entry)
            stage, phase = self.where(before, config.stages)
            at, round_ = self.where(before, config.turns)
            cute.arch.barrier(barrier_id=STAGED, number_of_threads=spec.staging_threads)
            fence_after_sync()
            for _ in cutlass.range(place.turns, unroll=1):
                cute.arch.mbarrier_wait(barriers.full + stage, phase)
                self.start_read_out(address, base, stage, at)
                if not flush:
                    with cute.arch.elect_one():
                        commit(address + spec.tensor.empty + 8 * stage)
                stage, phase = following(stage, phase, config.stages)
                at, round_ = following(at, round_, config.turns)
            after = before + place.turns
        return after

    @cute.jit
    def finish_all(self, tensors: Tensors, shared: Shared, barriers: Barriers, thread: Thread):
        """The epilogue of one place after the other."""
        block, before = Int32(cute.arch.block_idx()[0]), Int32(0)
        answer, phase = Int32(0), Int32(0)
        while block >= 0:
            place = self.place(tensors, block)
            self.finish(tensors, shared, barriers, place, before, thread)
            if place.entry.live:
                before = before + place.turns
            fence_before_sync()
            cute.arch.mbarrier_wait(barriers.known + answer, phase)
            block = self.take(shared.address, barriers, answer)
            answer, phase = following(answer, phase, ANSWERS)
            # What the next place brings into shared memory replaces what other warps may still be reading.
            cute.arch.barrier(barrier_id=EPILOGUE, number_of_threads=self.spec.threads)
        self.tell_read(barriers)

    def answer(self, address, answer):
        """Where an answer lies."""
        return address + (self.spec.tensor.answers + ANSWER_BYTES * answer)

    @cute.jit
    def take(self, address, barriers: Barriers, answer):
        """The next place, -1 if there is none, from an answer that has come."""
        block = given_work(self.answer(address, answer))
        fence_writes()  # what was read before the answer after next is written there
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barriers.taken + answer)
        return block

    def where(self, before, count: int):
        """The stage or the accumulators, of so many, of the turn that `before` come before; the barrier's phase."""
        return Int32(remainder(before, count)), Int32(remainder(quotient(before, count), 2))

    # ---- the epilogue

    @cute.jit
    def finish(self, tensors: Tensors, shared: Shared, barriers: Barriers, place: Place, before, thread: Thread):
        """What the epilogue's warps do for a place: all but S·C."""
        share = self.share(self.rows(0, thread), place.head0, place.count, thread)
        self.epilogue(tensors, shared, barriers, place.entry, share, before, thread)
        if cutlass.const_expr(self.spec.problem.ragged):
            self.tokens.zero_tail(tensors, place.number, place.entry.new, share, thread)

    @cute.jit
    def epilogue(
        self, tensors: Tensors, shared: Shared, barriers: Barriers, entry: Entry, share: Share, before, thread: Thread
    ):
        """A place's row: the step, or zeros."""
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
            self.work(tensors, shared, barriers, entry.at(start, pnat), share, before, thread, inputs)
        else:
            self.leave_out(tensors, entry.new, share, thread)

    @cute.jit
    def work(
        self, tensors: Tensors, shared: Shared, barriers: Barriers, row: Row, share: Share, before, thread: Thread,
        inputs: Inputs,
    ):  # fmt: skip
        """The step of one row: what a CTA does once, then its turns."""
        spec = self.spec
        self.readout_c.stage(shared.raw, inputs.c)
        self.operands.stage(shared.raw, inputs.c)
        fence_writes()
        ring = self.ask_ring(tensors, shared, row, share, thread)
        cute.arch.barrier(barrier_id=STAGED, number_of_threads=spec.staging_threads)
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
                cute.arch.mbarrier_wait(barriers.full, remainder(before, 2))
                cute.arch.mbarrier_wait(barriers.done, remainder(before, 2))  # results replace what the MMAs read
                turn = self.turn(share, share.rows.side, 0)
                self.write_back.flush(tensors, shared, turn, share, row, thread)
                if cutlass.const_expr(spec.launch_control):
                    self.leave_stage(barriers, 0, thread)
        self.turns(tensors, shared, barriers, row, share, before, thread, base, flush)
        if cutlass.const_expr(not spec.launch_control):
            fence_before_sync()
            self.tell_read(barriers)

    @cute.jit
    def tell_read(self, barriers: Barriers):
        """This warp will read tensor memory no more."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barriers.read)

    @cute.jit
    def leave_stage(self, barriers: Barriers, stage, thread: Thread):
        """With launch control: a stage that was flushed may be filled again."""
        fence_writes()
        cute.arch.barrier(barrier_id=EPILOGUE, number_of_threads=self.spec.threads)
        if thread.warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive(barriers.empty + stage)

    @cute.jit
    def turns(
        self, tensors: Tensors, shared: Shared, barriers: Barriers, row: Row, share: Share, before, thread: Thread,
        base, flush,
    ):  # fmt: skip
        """Turn by turn: outputs, flush."""
        spec, config = self.spec, self.spec.config
        read_out = cute.make_rmem_tensor(cute.make_layout(4 * spec.token_tiles * spec.tiles), Float32)
        stage, phase = self.where(before, config.stages)
        at, round_ = self.where(before, config.turns)
        for i in cutlass.range(share.turns, unroll=1):
            turn = self.turn(share, i * config.parallel_heads + share.rows.side, stage)
            sums, gates = self.contributions(tensors, shared, turn, row, thread)
            cute.arch.mbarrier_wait(barriers.done + at, round_)
            self.take_read_out(read_out, base + at * spec.columns, thread.warp)
            self.tokens.store_outputs(tensors, shared, read_out, sums, gates, turn, row.new, share.rows.p0, thread)
            if cutlass.const_expr(not self.only_turn):
                if flush:
                    cute.arch.mbarrier_wait(barriers.full + stage, phase)
                    self.write_back.flush(tensors, shared, turn, share, row, thread)
                cute.arch.sync_warp()
                if cutlass.const_expr(spec.launch_control):
                    if flush:
                        self.leave_stage(barriers, stage, thread)
                elif cutlass.const_expr(self.refills):
                    if flush:
                        fence_writes()
                        cute.arch.sync_warp()
                        with cute.arch.elect_one():
                            cute.arch.mbarrier_arrive(barriers.empty + stage)
                stage, phase = following(stage, phase, config.stages)
                at, round_ = following(at, round_, config.turns)

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
        Sm100StepKernel(problem, config), *fake_arguments(problem), options=compile_options(arch, config)
    )
