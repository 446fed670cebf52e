"""The portable step kernel: checkpointing SSU on warp-level MMAs and TMA, one source for every target.

A CTA takes `heads_per_cta` heads of one group of one batch row, `parallel_heads` at a time. A warp owns one tile of
16 rows of P, or several, in its head of each turn: it loads its own part of the state by TMA behind its own barrier,
and its own x by asynchronous copies, so no CTA-wide wait stands between memory and arithmetic. With S the checkpoint
and c the sums of A·dt, per token t:

    y_t = exp(C_tot + n_t) (S C_t) + sum_j G_old[j, t] x_j + sum_s G_new[s, t] x_s
    G_old[j, t] = exp(C_tot - c_j + n_t) dt_j (B_j·C_t)
    G_new[s, t] = [s <= t] exp(n_t - n_s) dt_s (B_s·C_t) + [s = t] D

The phases live beside this file: readout_c (C in shared memory), products (B·C), decay (the exponentials), weights
(G_old and G_new), state_copies and state_tile (the state's way, S·C and flush), write_back (which flush) and tokens (x,
outputs, appended rows); `phases` has what is done alike by the Blackwell kernel. A CTA goes through them so:

    slot -> states of the first turns by TMA -> cursors -> ring rows -> read-out of the first turn
    -> B·C, decay -> weights -> per turn: contributions of the ring, outputs, flush, read-out of the next turn

Beside a read copy the cursors come first, and a flush, which is the read-out of its row, before the contributions. GPUs
without TMA copy by lanes (`lane_copies`).

A static condition has an `if` of its own: in `if const_expr(...) and x` the DSL traces a dead branch too.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config import TileConfig
from ..problem import Problem
from .bundles import Entry, Row, Share, Shared, Tensors, Thread, Turn
from .byte_state import ByteReadoutC, ByteStateTile, Scales
from .convert import prefetch_row
from .highest import ExactStateTile
from .lane_copies import LaneCopies
from .phases import Inputs, Phases, following
from .primitives import quotient
from .readout_c import ReadoutC
from .signature import compile_options, fake_arguments
from .spec import P_TILE, StepSpec
from .state_copies import Pipe, StateCopies
from .state_tile import StateTile
from .write_back import WriteBack


@dataclass(frozen=True, eq=False)
class ReadOut:
    """A warp's S·C of one turn, in registers, and what it takes: C, its gains, and the scales of an 8-bit state."""

    sums: cute.Tensor
    c_rows: list[Any]
    c_held: list[Any]
    gains: list[Any] | None
    scales: Any


class StepKernel(Phases):
    """One step kernel, specialized on a problem and a tile config."""

    def __init__(self, problem: Problem, config: TileConfig, arch: str | None = None) -> None:
        spec = StepSpec(problem, config, arch)
        super().__init__(spec, (ByteReadoutC if problem.scaled else ReadoutC)(spec))
        of_state = ByteStateTile if problem.scaled else ExactStateTile if spec.highest else StateTile
        self.state_tile = of_state(spec, self.readout_c)
        self.copies = StateCopies(spec) if spec.tma else LaneCopies(spec)
        self.scales = Scales(spec, self.readout_c.gain) if problem.scaled else None
        self.write_back = WriteBack(spec, self.state_tile, self.tokens, self.copies)
        self.dual = problem.copy_dtype is not None

    def start(self, tensors: Tensors, stream) -> None:
        """Launch the grid."""
        atoms = self.copies.atoms(tensors)
        if self.spec.tma and not self.spec.problem.rewrites:
            tensors = dataclasses.replace(tensors, state=None)  # TMA alone reaches it
        kernel = self.kernel(tensors, *atoms)
        kernel.launch(**self.launch_options(tensors, self.spec.threads, stream))

    @cute.kernel
    def kernel(
        self,
        tensors: Tensors,
        read: Any,
        checkpoint: Any,
    ):
        spec, p = self.spec, self.spec.problem
        number, split, head0, count = self.grid.place(cute.arch.block_idx()[0], tensors.batch)
        group = quotient(head0, p.heads_per_group)
        thread = self.thread()
        rows = self.rows(split, thread)
        slot = self.slot(tensors, number)
        new = spec.new_tokens(number, tensors)
        shared = self.views(*self.allocate(spec.shared.total))
        pipe = self.copies.pipe(read, checkpoint, shared, thread)
        self.copies.prepare(pipe, thread)

        # What needs no slot is asked for while the slot is on its way. Under PDL the state and the cursors go
        # first instead: the predecessor may still be writing the inputs, but nothing else. Ragged rows' inputs wait
        # as the state does, for where they are; the state takes longest.
        share = self.share(rows, head0, count, thread)
        entry = self.entry(tensors, slot, group, new)
        start, pnat = Int32(0), Int32(0)
        state_first = p.pdl or p.ragged
        if cutlass.const_expr(state_first):
            if entry.live:
                start, pnat = self.ask_state(tensors, pipe, entry, share, thread)
        if cutlass.const_expr(p.pdl):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        inputs = self.ask_inputs(tensors, shared, entry, share, thread)
        if entry.live:
            if cutlass.const_expr(not state_first):
                start, pnat = self.ask_state(tensors, pipe, entry, share, thread)
            self.work(tensors, shared, pipe, entry.at(start, pnat), share, thread, inputs)
        else:
            self.leave_out(tensors, new, share, thread)
        if cutlass.const_expr(p.ragged):
            self.tokens.zero_tail(tensors, number, new, share, thread)

    @cute.jit
    def ask_state(self, tensors: Tensors, pipe: Pipe, entry: Entry, share: Share, thread: Thread):
        """Ask for the first states, then for the cursors, which are returned.

        Beside a read copy the cursors come first: a row that flushes reads the checkpoint instead.
        """
        if cutlass.const_expr(not self.dual):
            self.copies.load_first(pipe, share, entry.slot32, thread)
            cute.arch.sync_warp()
        start, pnat = Int32(tensors.ring_start[entry.slot]), Int32(tensors.pnat[entry.slot])
        if cutlass.const_expr(self.dual):
            row = entry.at(start, pnat)
            if self.flushes(row):
                self.copies.load_first_checkpoints(pipe, share, row, thread)
                self.prefetch_checkpoints(tensors, row, share, thread)
            else:
                self.copies.load_first(pipe, share, entry.slot32, thread)
        return start, pnat

    @cute.jit
    def prefetch_checkpoints(self, tensors: Tensors, row: Row, share: Share, thread: Thread):
        """Ask for the rows of a warp's checkpoints that find no stage yet to be put into L2."""
        if cutlass.const_expr(self.spec.tma and (self.spec.tiles > 1 or self.refills)):
            for i in cutlass.range(share.turns, unroll=1):
                head = share.first + i * self.spec.config.parallel_heads
                for tile in cutlass.range_constexpr(self.spec.tiles):
                    if (thread.lane < P_TILE) & ((i >= self.spec.config.stages) | (tile > 0)):
                        p = share.rows.p0 + P_TILE * tile + thread.lane
                        pointer = self.spec.pointer(tensors.state, row.slot, (head, p), 0, 4)
                        prefetch_row(pointer.toint(), 4 * self.spec.problem.d_state)

    @cute.jit
    def work(
        self, tensors: Tensors, shared: Shared, pipe: Pipe, row: Row, share: Share, thread: Thread, inputs: Inputs
    ):
        """The step of one row: what a CTA does once, then its turns."""
        p = self.spec.problem
        scales = None
        if cutlass.const_expr(p.scaled):
            scales = self.scales.new()
            self.scales.ask(scales, tensors.scale, row.slot, share.first, share.rows.p0, thread.g)
        self.readout_c.stage(shared.raw, inputs.c)
        ring = self.ask_ring(tensors, shared, row, share, thread)
        cute.arch.sync_threads()
        # A CTA's only turn appends its x here, where the store's way to memory costs no time.
        if cutlass.const_expr(self.only_turn):
            self.tokens.append_new(tensors, inputs.x, row, share)
        flush = self.flushes(row)

        # The state was asked for before everything that waits for the cursors: its read-out comes before the ring's.
        read_out = self.new_read_out(shared, scales, thread)
        self.first_read_out(read_out, shared, pipe, share, row, flush, thread)
        self.multiply_and_scan(tensors, shared, row, share, thread, inputs, ring, flush)
        cute.arch.sync_threads()
        if cutlass.const_expr(not self.only_turn):
            self.append_and_weigh(tensors, shared, row, share, thread)
            cute.arch.sync_threads()
        # A CTA's only turn flushes before it makes the outputs: the write takes longest.
        if cutlass.const_expr(self.only_turn):
            if flush:
                turn = self.turn(share, share.rows.side, 0)
                self.write_back.flush(tensors, shared, pipe, turn, share, row, thread, read_out.sums)
        self.turns(tensors, shared, pipe, row, share, thread, read_out, flush)
        if flush:
            self.copies.drain()  # shared memory outlives what is stored from it

    @cute.jit
    def first_read_out(
        self, read_out: ReadOut, shared: Shared, pipe: Pipe, share: Share, row: Row, flush, thread: Thread
    ):
        """Read the first turn's state out; without a flush its stage is free then."""
        self.next_read_out(read_out, shared, pipe, Int32(0), Int32(0), flush, thread)
        if cutlass.const_expr(self.refills):
            if not flush:
                cute.arch.sync_warp()
                self.copies.refill(pipe, 0, 0, share, row, thread)

    @cute.jit
    def finish_turn(
        self, tensors: Tensors, shared: Shared, pipe: Pipe, row: Row, share: Share, thread: Thread,
        read_out: ReadOut, sums, gates, turn: Turn, flush,
    ):  # fmt: skip
        """A turn's outputs and its flush, after which its stage may be filled again."""
        self.tokens.store_outputs(tensors, shared, read_out.sums, sums, gates, turn, row.new, share.rows.p0, thread)
        if cutlass.const_expr(not (self.only_turn or self.dual)):
            if flush:
                self.write_back.flush(tensors, shared, pipe, turn, share, row, thread, read_out.sums)
            cute.arch.sync_warp()
            if cutlass.const_expr(self.refills):
                if flush:
                    self.copies.drain()
                    self.copies.refill(pipe, turn.number, turn.stage, share, row, thread)

    @cute.jit
    def turns(
        self, tensors: Tensors, shared: Shared, pipe: Pipe, row: Row, share: Share, thread: Thread, read_out, flush
    ):
        """Head by head: outputs, flush, read-out of the next; the first head has its read-out."""
        config = self.spec.config
        stage, phase = Int32(0), Int32(0)
        for i in cutlass.range(share.turns, unroll=1):
            turn = self.turn(share, i * config.parallel_heads + share.rows.side, stage, phase, i)
            if cutlass.const_expr(self.dual and not self.only_turn):
                if flush:  # which is the read-out
                    self.write_back.flush(tensors, shared, pipe, turn, share, row, thread, read_out.sums)
            sums, gates = self.contributions(tensors, shared, turn, row, thread)
            self.finish_turn(tensors, shared, pipe, row, share, thread, read_out, sums, gates, turn, flush)
            if cutlass.const_expr(not self.only_turn):
                stage, phase = following(stage, phase, config.stages)
                if i + 1 < share.turns:
                    if cutlass.const_expr(self.spec.problem.scaled):
                        later = turn.head + config.parallel_heads
                        self.scales.ask(read_out.scales, tensors.scale, row.slot, later, share.rows.p0, thread.g)
                    self.next_read_out(read_out, shared, pipe, stage, phase, flush, thread)
                    if cutlass.const_expr(self.refills):
                        if not flush:
                            cute.arch.sync_warp()
                            self.copies.refill(pipe, i + 1, stage, share, row, thread)

    def new_read_out(self, shared: Shared, scales, thread: Thread) -> ReadOut:
        """Room for a turn's S·C; C is in shared memory."""
        spec = self.spec
        c_rows = [self.readout_c.address(shared.address, thread.lane, n) for n in range(spec.token_tiles)]
        c_held, gains = self.readout_c.hold(c_rows, thread)
        sums = cute.make_rmem_tensor(cute.make_layout(4 * spec.token_tiles * spec.tiles), Float32)
        return ReadOut(sums, c_rows, c_held, gains, scales)

    @cute.jit
    def next_read_out(self, read_out: ReadOut, shared: Shared, pipe: Pipe, stage, phase, flush, thread: Thread):
        """Wait for a stage's state and leave S·C in `read_out`; beside a copy a flush does it itself."""
        if cutlass.const_expr(self.dual):
            if not flush:
                self.read_stage(read_out, shared, pipe, stage, phase, thread)
        else:
            self.read_stage(read_out, shared, pipe, stage, phase, thread)

    @cute.jit
    def read_stage(self, read_out: ReadOut, shared: Shared, pipe: Pipe, stage, phase, thread: Thread):
        """Wait for a stage's state and leave S·C in `read_out`."""
        spec, layout = self.spec, self.spec.shared
        self.copies.wait(pipe, stage, phase)
        tile = shared.address + (stage * layout.stage_bytes + thread.warp * layout.warp_bytes)
        sums = self.state_tile.read_out(tile, read_out.c_rows, read_out.c_held, thread.lane)
        for k in cutlass.range_constexpr(spec.tiles * spec.token_tiles):
            for e in cutlass.range_constexpr(4):
                read_out.sums[4 * k + e] = sums[k // spec.token_tiles][k % spec.token_tiles][e]
        if cutlass.const_expr(spec.problem.scaled):
            self.scales.apply(read_out.scales, read_out.sums, read_out.gains)


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
        tensors = Tensors.of_call(
            x_cache, b_cache, dt_cache, ring_start, pnat, x, dt, a, b, c, out, d, z, dt_bias, slots, cu_seqlens,
            pad_slot_id, state, scale, seed, copy,
        )  # fmt: skip
        self.start(tensors, stream)


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
        step_kernel(problem, config, arch), *fake_arguments(problem), options=compile_options(arch, config)
    )
