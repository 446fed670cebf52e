"""What the portable and the Blackwell step kernel have in common: their arguments, what a CTA works on, and the phases
between the states' way into shared memory and the read-out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from ..ring import flushes
from .bundles import Entry, NewTokens, Row, Rows, Share, Shared, Tensors, Thread, Turn
from .decay import SEGMENT, Decay
from .decay_long import LongDecay
from .grid import Grid
from .primitives import quotient, remainder
from .products import Products
from .readout_c import ReadoutC
from .spec import P_TILE, WARP, StepSpec
from .tokens import Tokens
from .weights import Weights


@dataclass(frozen=True, eq=False)
class Inputs:
    """What a thread asked for before it knew its row's slot."""

    c: Any  # `ReadoutC.load`
    decay: Any  # `Decay.load_new`, of the head whose vectors its warp makes
    x: Any  # `Tokens.new_x`, for a CTA's only turn


@dataclass(frozen=True, eq=False)
class RingInputs:
    """What a thread asked for of the ring.

    Attributes:
        b_rows: B of its warp's first tile of B·C.
        dt: of the head whose vectors its warp makes.
        raw: of a step that convolves x itself, x before the conv.
    """

    b_rows: Any
    dt: Any
    raw: Any = None


def following(stage, phase, stages: int):
    """The stage after this one, of so many, and the phase of its barrier."""
    wraps = stage == stages - 1
    return Int32(cutlass.select_(wraps, 0, stage + 1)), Int32(cutlass.select_(wraps, phase ^ 1, phase))


class Phases:
    """A step kernel, specialized on a problem and a config, without its read-out and its flush."""

    def __init__(self, spec: StepSpec, readout_c: ReadoutC) -> None:
        p = spec.problem
        self.spec = spec
        self.grid = Grid(spec)
        self.readout_c = readout_c
        self.products = Products(spec, readout_c)
        self.decay = (LongDecay if max(p.window, p.tokens) > SEGMENT else Decay)(spec)
        self.weights = Weights(spec, self.products)
        self.tokens = Tokens(spec)
        self.only_turn = spec.config.turns == 1
        self.refills = spec.config.stages < spec.config.turns

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
        """Launch on a stream; the arguments are those of `signature.fake_arguments`."""
        tensors = Tensors.of_call(
            x_cache, b_cache, dt_cache, ring_start, pnat, x, dt, a, b, c, out, d, z, dt_bias, slots, cu_seqlens,
            pad_slot_id, state,
        )  # fmt: skip
        self.start(tensors, stream)

    def launch_options(self, tensors: Tensors, threads: int, stream) -> dict[str, Any]:
        """How the kernel is launched, for tensors on the host."""
        return {
            "grid": [self.grid.size(tensors.batch), 1, 1],
            "block": [threads, 1, 1],
            "stream": stream,
            "use_pdl": self.spec.problem.pdl,
            "min_blocks_per_mp": self.spec.config.ctas_per_sm,
            # percent; the kernels live in shared memory, and asking needs no GPU
            "preferred_smem_carveout": 100,
        }

    # ---- what a CTA works on

    def thread(self) -> Thread:
        """The thread that asks."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        return Thread(warp, lane, quotient(lane, 4), remainder(lane, 4))

    def rows(self, split, thread: Thread) -> Rows:
        """The rows of P of a CTA and a warp."""
        spec = self.spec
        number = thread.warp * WARP + thread.lane
        side, head_warp = quotient(thread.warp, spec.head_warps), remainder(thread.warp, spec.head_warps)
        tile = split * spec.head_warps + head_warp
        each = P_TILE * spec.tiles
        return Rows(
            thread=number,
            split=split,
            side=side,
            head_warp=head_warp,
            tile=tile,
            p0=tile * each,
            cta_p0=split * spec.head_warps * each,
        )

    def share(self, rows: Rows, head0, count, thread: Thread) -> Share:
        """What of a row a CTA and a warp take.

        Heads' vectors are dealt to the warps from the last, since B·C keeps the first ones busy.
        """
        turns = quotient(count, self.spec.config.parallel_heads)
        scan = self.spec.warps - 1 - thread.warp
        scan_head = head0 + cutlass.min(scan, count - 1)
        return Share(rows, head0, count, turns, head0 + rows.side, scan, scan_head)

    def slot(self, tensors: Tensors, number) -> Int64:
        """The slot of a batch row."""
        slot = Int64(number if tensors.slots is None else tensors.slots[number])
        cute.arch.sync_warp()  # a fence for the scheduler: what all else waits for is asked for first
        return slot

    def entry(self, tensors: Tensors, slot, group, new: NewTokens) -> Entry:
        """A batch row; `live` is the same in all lanes, and the compiler knows."""
        works = (slot != tensors.pad_slot_id) & (slot >= 0)
        if self.spec.problem.ragged:
            works = works & (new.length > 0)
        live = cute.arch.make_warp_uniform(Int32(works)) != 0
        return Entry(slot, Int32(slot), group, new, live)

    def allocate(self, total: int):
        """A CTA's shared memory, `total` bytes, as a pointer and an address."""
        raw = SmemAllocator().allocate(total, byte_alignment=1024)
        return raw, Int32(raw.toint())

    def views(self, raw, address) -> Shared:
        """The phases' views of shared memory."""
        products, vectors = (
            cute.make_tensor(cute.recast_ptr(raw + offset, dtype=Float32), cute.make_layout(1 << 20))
            for offset in (self.spec.shared.products, self.spec.shared.vectors)
        )
        return Shared(raw, address, products, vectors)

    def flushes(self, row: Row):
        """Whether a row flushes; the shuffle keeps what depends on the cursors below the loads that do not."""
        return Boolean(flushes(cute.arch.shuffle_sync(row.pnat, 0), row.new.length, self.spec.problem.window))

    def turn(self, share: Share, index, stage, phase: Any = 0, number: Any = 0) -> Turn:
        """A warp's turn with the `index`-th head of its CTA."""
        inputs = self.tokens.inputs(index, share.rows.head_warp)
        return Turn(index, share.head0 + index, inputs, stage, phase, number)

    # ---- phases

    def ask_inputs(self, tensors: Tensors, shared: Shared, entry: Entry, share: Share, thread: Thread) -> Inputs:
        """Ask for what needs no slot."""
        new = entry.new
        c = self.readout_c.load(tensors.c, new, entry.group)
        decay = self.decay.load_new(tensors, new, share.scan_head, thread)
        self.tokens.copy_new(tensors, shared, new, share)
        x = self.tokens.new_x(tensors, new, share) if self.only_turn else None
        cute.arch.sync_warp()  # a fence for the scheduler: loads above it are issued above it
        return Inputs(c, decay, x)

    def ask_ring(self, tensors: Tensors, shared: Shared, row: Row, share: Share, thread: Thread) -> RingInputs:
        """Ask for the ring; x of it goes to shared memory."""
        bc_rows = self.products.new_rows()
        ring_dt = self.decay.load_ring(tensors, row, share.scan_head, thread)
        self.products.ask(bc_rows, tensors, shared, row, thread)
        self.tokens.copy_ring(tensors, shared, row, share)
        cute.arch.cp_async_commit_group()
        return RingInputs(bc_rows, ring_dt)

    @cute.jit
    def multiply_and_scan(
        self,
        tensors: Tensors,
        shared: Shared,
        row: Row,
        share: Share,
        thread: Thread,
        inputs: Inputs,
        ring: RingInputs,
        flush,
    ):
        """Once per CTA: B·C, decay vectors, appended rows of B and dt; B of the ring for a flush."""
        spec, layout = self.spec, self.spec.shared
        number = remainder(thread.warp, layout.tile_warps)
        b_rows = ring.b_rows
        appends = (remainder(share.head0, spec.problem.heads_per_group) == 0) & (share.rows.split == 0)
        if cutlass.const_expr(self.products.ring_b.copied):
            cute.arch.cp_async_wait_group(1)  # x may still be on its way
        self.products.partial_sums(b_rows, tensors, shared, row, appends, flush, self.products.tile(number), thread)
        for more in cutlass.range_constexpr(1, self.products.rounds):
            later_tile = self.products.tile(number + more * layout.tile_warps)
            if cutlass.const_expr(spec.skips):
                if self.products.wanted(row, later_tile):
                    self.products.multiply(b_rows, tensors, shared, row, appends, flush, later_tile, thread)
            else:
                self.products.multiply(b_rows, tensors, shared, row, appends, flush, later_tile, thread)
        if share.scan < share.count:
            self.decay.make_vectors(
                tensors, shared, share.scan, share.scan_head, inputs.decay, ring.dt, row, share, thread
            )
        if cutlass.const_expr(spec.config.heads_per_cta > spec.warps):
            for i in cutlass.range(share.scan + spec.warps, share.count, spec.warps, unroll=1):
                head = share.head0 + i
                later_new = self.decay.load_new(tensors, row.new, head, thread)
                later_dt = self.decay.load_ring(tensors, row, head, thread)
                self.decay.make_vectors(tensors, shared, i, head, later_new, later_dt, row, share, thread)
        self.tokens.await_copies(shared, row, share)

    @cute.jit
    def append_and_weigh(self, tensors: Tensors, shared: Shared, row: Row, share: Share, thread: Thread):
        """Once per CTA that takes several turns: appended rows of x, weights."""
        steps = self.spec.steps
        self.tokens.append_x(tensors, shared, row, share)
        for part in cutlass.range(thread.warp, share.count * steps, self.spec.warps, unroll=1):
            self.weights.make(shared, quotient(part, steps), remainder(part, steps), row, thread)

    def contributions(self, tensors: Tensors, shared: Shared, turn: Turn, row: Row, thread: Thread):
        """What the ring and the new tokens add to a turn's outputs, and the gates of these."""
        inputs = shared.address + turn.inputs
        gates = [] if tensors.z is None else self.tokens.gates(inputs, thread.lane)
        weights = self.weights.fragments(shared, turn.index, row, thread)
        return self.tokens.contributions(inputs, weights, row, thread.lane), gates

    @cute.jit
    def leave_out(self, tensors: Tensors, new: NewTokens, share: Share, thread: Thread):
        """A padding row: zeros."""
        cute.arch.cp_async_commit_group()
        cute.arch.cp_async_wait_group(0)  # copies must not land in a later CTA's shared memory
        self.tokens.store_zeros(tensors, new, share, thread)
