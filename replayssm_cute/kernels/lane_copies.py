"""States by the lanes' own copies, for GPUs without TMA (sm_80, sm_89): the rest of the kernel is the same.

They are there to check that rest against other hardware; nothing here is made for speed: every wait waits for all
copies of its warp, x of the ring among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Int32, Int64

from .bundles import Shared, Thread
from .primitives import copy_async, load_words, quotient, remainder, store_words
from .spec import WARP
from .state_copies import Pipe, StateCopies, Tiles

PIECE = 16  # bytes that a lane copies at once


@dataclass(frozen=True, eq=False)
class Rows:
    """In place of TMA's boxes: a tensor (slots, heads, P, N), and where its tiles go."""

    tensor: cute.Tensor
    shared: Shared


class LaneTiles(Tiles):
    """`Tiles` that lanes copy, to where TMA would have put them."""

    def atoms(self, tensor: cute.Tensor) -> Any:
        """On the host: the tensor itself."""
        return tensor

    def boxes(self, atoms: Any, shared: Shared) -> Any:
        """In the kernel: the tensor, and shared memory."""
        return Rows(atoms, shared)

    def _pieces(self, stage, thread: Thread):
        """This lane's pieces of a tile: row, column, and offset in shared memory."""
        size, layout = self.size, self.spec.shared
        each, wide = self.spec.problem.d_state * size // PIECE, self.block * size // PIECE
        base = stage * layout.stage_bytes + thread.warp * layout.warp_bytes
        for first in range(0, self.rows * each, WARP):
            number = first + thread.lane
            row, piece = quotient(number, each), remainder(number, each)
            swizzle = remainder(row, 8) if wide == 8 else remainder(quotient(row, 2), 4)
            at = quotient(piece, wide) * (self.rows * wide) + row * wide + (remainder(piece, wide) ^ swizzle)
            yield row, piece * (PIECE // size), base + at * PIECE

    def _pointer(self, boxes: Rows, place, row, column):
        tile, head, slot = place
        where = head, tile * self.rows + row
        return self.spec.pointer(boxes.tensor, Int64(slot), where, column, PIECE // self.size)

    def expect(self, pipe: Pipe, stage, thread: Thread):
        """Nothing: no barrier waits for lanes."""

    def load(self, boxes: Any, pipe: Pipe, place: tuple[Any, Any, Any], stage, thread: Thread):
        """Ask for the rows of a place (tile, head, slot)."""
        for row, column, at in self._pieces(stage, thread):
            source = self._pointer(boxes, place, row, column)
            copy_async(boxes.shared.address + at, Int64(source.toint()), Int32(PIECE))
        cute.arch.cp_async_commit_group()

    def store(self, boxes: Any, place: tuple[Any, Any, Any], stage, thread: Thread):
        """Store a stage to a place (tile, head, slot), in pieces that other lanes have written."""
        cute.arch.sync_warp()
        for row, column, at in self._pieces(stage, thread):
            words = load_words(boxes.shared.raw + cute.assume(at, divby=PIECE), 4)
            store_words(self._pointer(boxes, place, row, column), words)


class LaneCopies(StateCopies):
    """`StateCopies` without TMA and without barriers."""

    tiles = LaneTiles

    def pipe(self, read: Any, checkpoint: Any, shared: Shared, thread: Thread) -> Pipe:
        """What `atoms` made, and where it goes; there are no barriers."""
        beside = None if self.checkpoint is None else self.checkpoint.boxes(checkpoint, shared)
        return Pipe(self.read.boxes(read, shared), beside, None)

    def prepare(self, pipe: Pipe, thread: Thread):
        """Nothing."""

    def wait(self, pipe: Pipe, stage, phase):
        """Wait for all that this warp has asked for."""
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_warp()

    def drain(self):
        """Stores have read shared memory when they return."""


__all__ = ["LaneCopies"]
