"""States between memory and shared memory, by TMA: a warp's rows of a head, `stages` heads at a time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync

from ..dtypes import BYTES
from .bundles import Row, Share, Shared, Tensors, Thread, Turn
from .primitives import CUTLASS_TYPE
from .spec import P_TILE, StepSpec


@dataclass(frozen=True, eq=False)
class Atoms:
    """On the host: what loads boxes of a tensor, the tensor as it sees it; the same for stores."""

    load: cute.CopyAtom
    loaded: cute.Tensor
    store: cute.CopyAtom
    stored: cute.Tensor


@dataclass(frozen=True, eq=False)
class Boxes:
    """What TMA copies name: boxes in shared memory (None, warp, stage) and in memory (None, 0, tile, 0, head, slot)."""

    load_atom: cute.CopyAtom
    to_shared: cute.Tensor
    from_global: cute.Tensor
    store_atom: cute.CopyAtom
    from_shared: cute.Tensor
    to_global: cute.Tensor


@dataclass(frozen=True, eq=False)
class Pipe:
    """A warp's states on their way: boxes of what is read, of a checkpoint beside a copy, and a barrier a stage."""

    read: Boxes
    checkpoint: Boxes | None
    barriers: Any


class Tiles:
    """Boxes of `rows` rows of a head, all of N, of a (slots, heads, P, N) tensor; a warp's stages hold one each."""

    def __init__(self, spec: StepSpec, kind: str, rows: int) -> None:
        self.spec = spec
        self.kind = kind
        self.rows = rows
        self.size = BYTES[kind]
        self.block = min(128 // self.size, spec.problem.d_state)  # columns of a row of shared memory
        self.bytes = rows * spec.problem.d_state * self.size

    def staged_layout(self) -> cute.ComposedLayout:
        """Shared memory: (column, row, block of columns, warp, stage), 128-byte swizzle (64 for such rows)."""
        blocks, layout = self.spec.problem.d_state // self.block, self.spec.shared
        outer = cute.make_layout(
            (self.block, self.rows, blocks, self.spec.warps, self.spec.config.stages),
            stride=(
                1, self.block, self.rows * self.block, layout.warp_bytes // self.size, layout.stage_bytes // self.size,
            ),
        )  # fmt: skip
        return cute.make_composed_layout(cute.make_swizzle(3 if self.block * self.size == 128 else 2, 4, 3), 0, outer)

    def atoms(self, tensor: cute.Tensor) -> Atoms:
        """On the host: how boxes of a tensor are loaded and stored."""
        p, blocks = self.spec.problem, self.spec.problem.d_state // self.block
        tiled = cute.make_tensor(
            tensor.iterator,
            cute.make_layout(
                (self.block, p.head_dim, blocks, p.heads, tensor.shape[0]),
                stride=(1, tensor.stride[2], self.block, tensor.stride[1], tensor.stride[0]),
            ),
        )
        box = cute.select(self.staged_layout(), mode=[0, 1, 2]), (self.block, self.rows, blocks)
        return Atoms(
            *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tiled, *box),
            *cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileS2GOp(), tiled, *box),
        )

    def boxes(self, atoms: Atoms, shared: Shared) -> Boxes:
        """In the kernel: the boxes of what `atoms` made."""
        staged = self.staged_layout()
        raw = cute.recast_ptr(shared.raw, staged.inner, dtype=CUTLASS_TYPE[self.kind])
        stages = cute.make_tensor(raw, staged.outer)
        tile = self.block, self.rows, self.spec.problem.d_state // self.block

        def partition(atom, tensor):
            tiles = cute.local_tile(tensor, tile, (None, None, None, None, None))
            return cpasync.tma_partition(
                atom, 0, cute.make_layout(1), cute.group_modes(stages, 0, 3), cute.group_modes(tiles, 0, 3)
            )

        return Boxes(
            atoms.load, *partition(atoms.load, atoms.loaded), atoms.store, *partition(atoms.store, atoms.stored)
        )

    @cute.jit
    def expect(self, pipe: Pipe, stage, thread: Thread):
        """Make a stage's barrier expect a box."""
        if thread.lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(pipe.barriers + stage, self.bytes)

    def load(self, boxes: Boxes, pipe: Pipe, place: tuple[Any, Any, Any], stage, thread: Thread):
        """Ask for the box of a place (tile, head, slot)."""
        tile, head, slot = place
        source, target = boxes.from_global[None, 0, tile, 0, head, slot], boxes.to_shared[None, thread.warp, stage]
        cute.copy(boxes.load_atom, source, target, tma_bar_ptr=pipe.barriers + stage)

    def store(self, boxes: Boxes, place: tuple[Any, Any, Any], stage, thread: Thread):
        """Store a stage to a place (tile, head, slot): every lane's part must be seen by TMA."""
        tile, head, slot = place
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.sync_warp()
        source, target = boxes.from_shared[None, thread.warp, stage], boxes.to_global[None, 0, tile, 0, head, slot]
        cute.copy(boxes.store_atom, source, target)
        cute.arch.cp_async_bulk_commit_group()


class StateCopies:
    """Loads and stores of what steps read, a warp's rows at a time, and of a checkpoint beside it, a tile at a time.

    A row that flushes beside a copy brings the tiles of its checkpoint to the same stages, one after the other.
    """

    tiles = Tiles

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec
        self.stages = spec.config.stages
        self.heads = spec.config.parallel_heads  # taken at a time
        self.read = self.tiles(spec, spec.state_kind, spec.rows)
        self.checkpoint = None if spec.problem.copy_dtype is None else self.tiles(spec, "f32", P_TILE)

    def atoms(self, tensors: Tensors) -> tuple[Atoms, Atoms | None]:
        """On the host: atoms of what is read, and of a checkpoint beside it."""
        if self.checkpoint is None:
            return self.read.atoms(tensors.state), None
        return self.read.atoms(tensors.copy), self.checkpoint.atoms(tensors.state)

    def pipe(self, read: Atoms, checkpoint: Atoms | None, shared: Shared, thread: Thread) -> Pipe:
        """The boxes of what `atoms` made, and the barriers."""
        barriers = cute.recast_ptr(shared.raw + self.spec.shared.barriers, dtype=Int64) + thread.warp * self.stages
        beside = None if self.checkpoint is None else self.checkpoint.boxes(checkpoint, shared)
        return Pipe(self.read.boxes(read, shared), beside, barriers)

    @cute.jit
    def prepare(self, pipe: Pipe, thread: Thread):
        """Make a warp's barriers; where what comes first is known, they expect it."""
        if thread.lane == 0:
            cpasync.prefetch_descriptor(pipe.read.load_atom)
            for stage in cutlass.range_constexpr(self.stages):
                cute.arch.mbarrier_init(pipe.barriers + stage, 1)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_warp()  # what racecheck takes for the order of a barrier's first two uses
        if cutlass.const_expr(self.checkpoint is None):
            for stage in cutlass.range_constexpr(self.stages):
                self.read.expect(pipe, stage, thread)

    def wait(self, pipe: Pipe, stage, phase):
        """Wait for what a stage's barrier expects."""
        cute.arch.mbarrier_wait(pipe.barriers + stage, phase)

    def drain(self):
        """Wait until all stores of this thread have read shared memory."""
        cute.arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def load_first(self, pipe: Pipe, share: Share, slot32, thread: Thread):
        """Ask for the states of a warp's first heads, one a stage."""
        for stage in cutlass.range_constexpr(self.stages):
            if stage < share.turns:
                if cutlass.const_expr(self.checkpoint is not None):
                    self.read.expect(pipe, stage, thread)
                place = share.rows.tile, share.first + stage * self.heads, slot32
                self.read.load(pipe.read, pipe, place, stage, thread)

    @cute.jit
    def refill(self, pipe: Pipe, i, stage, share: Share, row: Row, thread: Thread):
        """Ask for the state that takes the stage of turn i next; every lane must have read the old one."""
        if i + self.stages < share.turns:
            self.read.expect(pipe, stage, thread)
            place = share.rows.tile, share.first + (i + self.stages) * self.heads, row.slot32
            self.read.load(pipe.read, pipe, place, stage, thread)

    @cute.jit
    def store(self, pipe: Pipe, turn: Turn, share: Share, row: Row, thread: Thread):
        """Store a warp's flushed rows of a turn."""
        self.read.store(pipe.read, (share.rows.tile, turn.head, row.slot32), turn.stage, thread)

    # ---- a checkpoint beside a copy

    @cute.jit
    def load_first_checkpoints(self, pipe: Pipe, share: Share, row: Row, thread: Thread):
        """Ask for the first tile of each of a warp's first heads, one a stage."""
        for stage in cutlass.range_constexpr(self.stages):
            if stage < share.turns:
                self._load_tile(pipe, share.first + stage * self.heads, 0, stage, share, row, thread)

    @cute.jit
    def await_tile(self, pipe: Pipe, turn: Turn, tile):
        """Wait for a tile of a turn's checkpoint: a stage's barrier ends a phase with each."""
        self.wait(pipe, turn.stage, (turn.phase * self.spec.tiles + tile) & 1)
        cute.arch.sync_warp()  # lanes write over what came

    @cute.jit
    def store_tile(self, pipe: Pipe, turn: Turn, tile, share: Share, row: Row, thread: Thread):
        """Store a tile of a turn's checkpoint."""
        place = self._tile(share, tile), turn.head, row.slot32
        self.checkpoint.store(pipe.checkpoint, place, turn.stage, thread)

    @cute.jit
    def load_next_tile(self, pipe: Pipe, turn: Turn, tile, share: Share, row: Row, thread: Thread):
        """Ask for the tile that takes the stage next, of this head or of a later one, once the last one is stored."""
        if cutlass.const_expr(self.spec.tiles > 1 or self.stages < self.spec.config.turns):
            same_head = tile + 1 < self.spec.tiles
            if same_head | (turn.number + self.stages < share.turns):
                self.drain()
                cute.arch.sync_warp()
                head = cutlass.select_(same_head, turn.head, turn.head + self.stages * self.heads)
                following = cutlass.select_(same_head, tile + 1, 0)
                self._load_tile(pipe, head, following, turn.stage, share, row, thread)

    def _tile(self, share: Share, tile):
        return share.rows.tile * self.spec.tiles + tile

    def _load_tile(self, pipe: Pipe, head, tile, stage, share: Share, row: Row, thread: Thread):
        self.checkpoint.expect(pipe, stage, thread)
        place = self._tile(share, tile), head, row.slot32
        self.checkpoint.load(pipe.checkpoint, pipe, place, stage, thread)
