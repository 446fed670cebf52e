"""The state's way into shared memory, by TMA: the heads of a turn, in the blocks that the MMAs read."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from ..primitives import CUTLASS_TYPE
from .spec import Sm100Spec


@dataclass(frozen=True, eq=False)
class Pipe:
    """What TMA loads name: atom, boxes in the pool (None, 0, 0, tile, 0, slot) and in shared memory (None, stage)."""

    atom: cute.CopyAtom
    from_global: cute.Tensor
    to_shared: cute.Tensor


class StateCopies:
    """Loads of the state."""

    def __init__(self, spec: Sm100Spec) -> None:
        self.spec = spec

    def box(self) -> tuple[int, int, int, int]:
        """What one TMA load brings: (column, row of P, head, block)."""
        spec = self.spec
        return spec.block, spec.problem.head_dim, spec.config.parallel_heads, spec.blocks

    def staged_layout(self) -> cute.ComposedLayout:
        """Shared-memory layout of the state: (column, row of P, head, block, stage), 128-byte swizzle."""
        spec = self.spec
        rows = spec.problem.head_dim * spec.block
        tile = spec.rows * spec.block
        outer = cute.make_layout(
            (*self.box(), spec.config.stages), stride=(1, spec.block, rows, tile, tile * spec.blocks)
        )
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, outer)

    def atom(self, state: cute.Tensor):
        """On the host: the atom that loads a box of the pool, and the pool as it sees it."""
        spec, p = self.spec, self.spec.problem
        tiled_state = cute.make_tensor(
            state.iterator,
            cute.make_layout(
                (spec.block, p.head_dim, p.heads, spec.blocks, state.shape[0]),
                stride=(1, state.stride[2], state.stride[1], spec.block, state.stride[0]),
            ),
        )
        return cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            tiled_state,
            cute.select(self.staged_layout(), mode=[0, 1, 2, 3]),
            self.box(),
        )

    def pipe(self, atom, tma_state, raw) -> Pipe:
        """The state's boxes."""
        staged = self.staged_layout()
        shared_state = cute.make_tensor(
            cute.recast_ptr(raw, staged.inner, dtype=CUTLASS_TYPE[self.spec.state_kind]), staged.outer
        )
        state_tiles = cute.local_tile(tma_state, self.box(), (None, None, None, None, None))
        to_shared, from_global = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared_state, 0, 4), cute.group_modes(state_tiles, 0, 4)
        )
        return Pipe(atom, from_global, to_shared)

    @cute.jit
    def ask(self, pipe: Pipe, full, tile, stage, slot32):
        """Ask for the state of a slot's `tile`-th heads, as many as a turn takes; `full` are the stages' barriers."""
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full + stage, self.spec.shared.stage_bytes)
        source = pipe.from_global[None, 0, 0, tile, 0, slot32]
        cute.copy(pipe.atom, source, pipe.to_shared[None, stage], tma_bar_ptr=full + stage)
