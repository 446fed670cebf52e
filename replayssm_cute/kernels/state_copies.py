"""The state between the pool and shared memory, by TMA: a warp's rows of a head, `stages` heads at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync

from .bundles import Row, Share, Shared, Thread, Turn
from .primitives import CUTLASS_TYPE
from .spec import StepSpec


@dataclass(frozen=True, eq=False)
class Pipe:
    """What TMA copies name: atoms, boxes in shared memory (None, warp, stage), boxes in the pool
    (None, 0, tile, 0, head, slot), and this warp's barriers, one a stage.
    """

    atom: cute.CopyAtom
    to_shared: cute.Tensor
    from_global: cute.Tensor
    store_atom: cute.CopyAtom
    stored: cute.Tensor
    to_global: cute.Tensor
    barriers: Any


class StateCopies:
    """Loads and stores of the state, and the stages that they go through."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec

    def staged_layout(self) -> cute.ComposedLayout:
        """Shared-memory layout of the state: (column, row, block, warp, stage), 128-byte swizzle (64 for such rows)."""
        spec = self.spec
        tile = spec.rows * spec.problem.d_state
        outer = cute.make_layout(
            (spec.block, spec.rows, spec.blocks, spec.warps, spec.config.stages),
            stride=(1, spec.block, spec.rows * spec.block, tile, tile * spec.warps),
        )
        return cute.make_composed_layout(cute.make_swizzle(3 if spec.row_bytes == 128 else 2, 4, 3), 0, outer)

    def atoms(self, state: cute.Tensor):
        """On the host: the atom that loads a box of the pool and the pool as it sees it; the same to store one."""
        spec, p = self.spec, self.spec.problem
        tiled = cute.make_tensor(
            state.iterator,
            cute.make_layout(
                (spec.block, p.head_dim, spec.blocks, p.heads, state.shape[0]),
                stride=(1, state.stride[2], spec.block, state.stride[1], state.stride[0]),
            ),
        )
        box = cute.select(self.staged_layout(), mode=[0, 1, 2]), (spec.block, spec.rows, spec.blocks)
        return (
            *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tiled, *box),
            *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tiled, *box),
        )

    def pipe(self, atom, tma_state, store_atom, tma_stored, shared: Shared, thread: Thread) -> Pipe:
        """The boxes of what `atoms` made, and the barriers."""
        spec = self.spec
        staged = self.staged_layout()
        shared_state = cute.make_tensor(
            cute.recast_ptr(shared.raw, staged.inner, dtype=CUTLASS_TYPE[spec.state_kind]), staged.outer
        )
        loads, stores = self._boxes(atom, tma_state, shared_state), self._boxes(store_atom, tma_stored, shared_state)
        barriers = cute.recast_ptr(shared.raw + spec.shared.barriers, dtype=Int64) + thread.warp * spec.config.stages
        return Pipe(atom, *loads, store_atom, *stores, barriers)

    def _boxes(self, atom, tma_state, shared_state):
        spec = self.spec
        tiles = cute.local_tile(tma_state, (spec.block, spec.rows, spec.blocks), (None, None, None, None, None))
        return cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared_state, 0, 3), cute.group_modes(tiles, 0, 3)
        )

    @cute.jit
    def prepare(self, pipe: Pipe, thread: Thread):
        """Make a warp's barriers expect the first loads."""
        if thread.lane == 0:
            cpasync.prefetch_descriptor(pipe.atom)
            for stage in cutlass.range_constexpr(self.spec.config.stages):
                cute.arch.mbarrier_init(pipe.barriers + stage, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()  # what racecheck takes for the order of a barrier's first two uses
        if thread.lane == 0:
            for stage in cutlass.range_constexpr(self.spec.config.stages):
                cute.arch.mbarrier_arrive_and_expect_tx(pipe.barriers + stage, self.spec.shared.warp_bytes)

    @cute.jit
    def load_first(self, pipe: Pipe, share: Share, slot32, thread: Thread):
        """Ask for the states of a warp's first heads, one a stage; the barriers expect them already."""
        for stage in cutlass.range_constexpr(self.spec.config.stages):
            if stage < share.turns:
                cute.copy(
                    pipe.atom,
                    pipe.from_global[
                        None, 0, share.rows.tile, 0, share.first + stage * self.spec.config.parallel_heads, slot32
                    ],
                    pipe.to_shared[None, thread.warp, stage],
                    tma_bar_ptr=pipe.barriers + stage,
                )

    @cute.jit
    def refill(self, pipe: Pipe, i, stage, share: Share, row: Row, thread: Thread):
        """Ask for the state that takes the stage of turn i next; every lane must have read the old one."""
        config = self.spec.config
        if i + config.stages < share.turns:
            if thread.lane == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(pipe.barriers + stage, self.spec.shared.warp_bytes)
            head = share.first + (i + config.stages) * config.parallel_heads
            cute.copy(
                pipe.atom,
                pipe.from_global[None, 0, share.rows.tile, 0, head, row.slot32],
                pipe.to_shared[None, thread.warp, stage],
                tma_bar_ptr=pipe.barriers + stage,
            )

    @cute.jit
    def store(self, pipe: Pipe, turn: Turn, share: Share, row: Row, thread: Thread):
        """Store a warp's flushed rows of a turn: every lane's part must be seen by TMA."""
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        target = pipe.to_global[None, 0, share.rows.tile, 0, turn.head, row.slot32]
        cute.copy(pipe.store_atom, pipe.stored[None, thread.warp, turn.stage], target)
        cute.arch.cp_async_bulk_commit_group()
