"""The static facts of one step kernel, derived once from its problem and config, and its index arithmetic."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from ..config import P_TILE, SHORT_WINDOW, SKIPPED, WARP, WITHOUT_TMA, TileConfig, shared_layout
from ..problem import Problem
from .bundles import NewTokens, Row, Tensors
from .primitives import quotient
from .ptx import HARDWARE_ARCHES


class StepSpec:
    """What every phase of a step kernel needs to know at trace time.

    Rows of the replay. The kernel contracts over "positions": first the ring's, then the new tokens, each
    padded to a multiple of 8. With `config.ring == "live"` ring position j is live row j, so only live rows are
    read, but their addresses wait for the cursors. With "whole", position r is ring row r: every row is read,
    at once, and the cursors only mask.
    """

    def __init__(self, problem: Problem, config: TileConfig, arch: str | None = None) -> None:
        p = self.problem = problem
        self.config = config
        self.shared = shared_layout(problem, config)
        self.whole = config.ring == "whole"
        self.warps = config.warps(problem)
        self.head_warps = self.warps // config.parallel_heads  # warps of a head
        self.tiles = config.tiles_per_warp
        self.rows = P_TILE * self.tiles  # of P that a warp owns
        self.threads = self.warps * WARP
        self.state_kind = p.read_dtype
        self.io_kind = p.io_dtype
        self.chunk = 16 // p.read_bytes  # state elements in 16 bytes
        # columns of N in one shared-memory row: 128 bytes, or all of N where that is less
        self.block = min(8 * self.chunk, p.d_state)
        self.row_bytes = self.block * p.read_bytes
        self.unit = self.block // 8  # columns in a row that a lane works on in a flush
        self.blocks = p.d_state // self.block
        self.token_tiles = -(-p.tokens // 8)  # n-tiles of the outputs, k-steps of the new tokens
        self.tokens_pad = 8 * self.token_tiles
        self.ring_positions = config.ring_positions(p)
        self.ring_steps = self.ring_positions // 8  # k-steps of the ring
        self.steps = self.ring_steps + self.token_tiles
        self.skips = config.skips(p)
        self.always_steps = SKIPPED // 8 if self.skips else self.ring_steps  # of the ring, whatever is live
        self.long_flush = p.window > SHORT_WINDOW or p.rewrites  # see flush_long and rewrite
        self.highest = p.precision == "highest"
        self.tma = arch not in WITHOUT_TMA
        self.hardware_rounding = arch in HARDWARE_ARCHES
        self.units = p.d_state // 32  # column units of B·C
        # bf16 times bf16 and f16 times f16 need no conversion; everything else goes through tf32: exactly
        # for 2-byte values, with 11 bits for f32.
        # 8-bit values are decoded to the inputs' type.
        self.native = self.state_kind == self.io_kind or p.scaled

    def ring_row(self, start: Int32, offset: Int32) -> Int32:
        """(start + offset) mod R for start < R and 0 <= offset < R."""
        rows = self.problem.ring_rows
        index = start + offset
        return Int32(cutlass.select_(index >= rows, index - rows, index))

    def read_row(self, row: Row, position: Int32) -> Int32:
        """The ring row to read for a ring position.

        In "live" mode a dead position gives the last live row again: no extra traffic, and a valid address.
        """
        if self.whole:
            return Int32(cutlass.min(position, self.problem.ring_rows - 1))
        return self.ring_row(row.start, cutlass.max(cutlass.min(position, row.pnat - 1), 0))

    def is_live(self, row: Row, position: Int32) -> Boolean:
        """Whether a ring position holds a live row."""
        if self.whole:
            rows = self.problem.ring_rows
            age = position - row.start
            age = Int32(cutlass.select_(age < 0, age + rows, age))
            return (age < row.pnat) & (position < rows)
        return position < row.pnat

    def has_live(self, row: Row, step: Any) -> Boolean:
        """Whether a ring step beyond `always_steps` is worked on: whether its 16 positions have a live one."""
        return quotient(step, 2) * SKIPPED < row.pnat

    def new_tokens(self, row: Int32, tensors: Tensors) -> NewTokens:
        """Where a row's new tokens are."""
        if tensors.cu_seqlens is None:
            return NewTokens(row, 0, self.problem.tokens, self.problem.tokens)
        # All three at once: a load at the kernel's end would be waited for there.
        first, end, used = (Int32(tensors.cu_seqlens[at]) for at in (row, row + 1, tensors.batch))
        return NewTokens(0, first, end - first, Int32(tensors.x.shape[1]), used)

    def new_token(self, new: NewTokens, s: Int32) -> tuple[Any, Int32]:
        """Indices of a row's token s in dimensions 0 and 1, clamped to its last: padding lanes repeat it.

        A ragged row may be empty, and begin where the tensor ends: then any token of the tensor.
        """
        if not self.problem.ragged:
            return new.outer, self.token(s)
        within = cutlass.max(cutlass.min(s, new.length - 1), 0)
        return new.outer, Int32(cutlass.min(new.first + within, new.total - 1))

    def token(self, s: Int32) -> Int32:
        """Token s, clamped to the last: padding lanes repeat it."""
        return Int32(cutlass.min(s, self.problem.tokens - 1))

    def base(self, tensor: cute.Tensor, outer: Any) -> Any:
        """Address of tensor[outer], for copies that lie in branches, each of which would find it anew.

        Only of long windows, which have many: shorter ones get slower by it (up to 9% at small batches on one H200),
        since their branches become predicates, and every warp takes the way of all.
        """
        return tensor[(outer, *(0 for _ in tensor.stride[1:-1]), None)].iterator if self.skips else None

    def pointer(
        self, tensor: cute.Tensor, outer: Any, inner: tuple[Any, ...], column: Any, divisor: int, base: Any = None
    ) -> cute.Pointer:
        """Address of tensor[outer, *inner, column], known to be a multiple of `divisor` elements; `base`: if known.

        In compact problems everything inside a slot or batch row is reached by 32-bit offsets from one uniform
        base, which keeps 64-bit pointers, one for each row that a lane reads, out of the registers.
        """
        if not self.problem.compact:
            row = tensor[(outer, *inner, None)].iterator
            return row + (column if isinstance(column, int) else cute.assume(column, divby=divisor))
        base = tensor[(outer, *(0 for _ in inner), None)].iterator if base is None else base
        offset = Int32(column)
        for index, stride in zip(inner, tensor.stride[1:-1], strict=True):
            offset = offset + Int32(index) * Int32(stride)
        return base + cute.assume(offset, divby=divisor)


__all__ = ["P_TILE", "SKIPPED", "WARP", "StepSpec"]
