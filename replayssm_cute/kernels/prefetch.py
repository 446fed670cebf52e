"""Live ring rows of a later CTA, asked for ahead of time: under load a trip to memory takes several microseconds."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from .primitives import prefetch_line
from .spec import StepSpec

LINE = 128  # bytes
ROWS = 16  # rows that a warp asks for at once; its two halves take a line each


class Prefetch:
    """The prefetch of a step kernel. It changes no result: rows are read again by the CTA that they belong to."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec

    @cute.jit
    def _row_lines(self, tensor, slot, index, start, pnat, width, lane):
        """Lines of the live rows of tensor[slot, index]; none if pnat is 0. Rows have `width` 2-byte elements."""
        for k in cutlass.range_constexpr(-(-self.spec.problem.window // ROWS)):
            for pair in cutlass.range_constexpr(-(-2 * width // (2 * LINE))):
                position = ROWS * k + lane % ROWS
                column = (2 * pair + lane // ROWS) * (LINE // 2)
                if (position < pnat) & (column < width):
                    ring = self.spec.ring_row(start, position)
                    pointer = self.spec.pointer(tensor, slot, (index, ring), column, 8)
                    prefetch_line(Int64(pointer.toint()))

    @cute.jit
    def rows(self, x_cache, b_cache, dt_cache, slot, head0, count, start, pnat, warp, lane):
        """Ask for x, B and dt of the live rows of `count` heads from head0 of a slot, the heads dealt to the warps."""
        for i in cutlass.range(warp, count, self.spec.warps, unroll=1):
            self._row_lines(x_cache, slot, head0 + i, start, pnat, self.spec.problem.head_dim, lane)
            if lane < pnat:
                # a line holds more than the ring of one head; asking for it once a row costs nothing more
                ring = self.spec.ring_row(start, Int32(lane))
                pointer = dt_cache[slot, head0 + i, None].iterator + ring * dt_cache.stride[2]
                prefetch_line(Int64(pointer.toint()))
        if warp == self.spec.warps - 1:
            group = head0 // self.spec.problem.heads_per_group
            self._row_lines(b_cache, slot, group, start, pnat, self.spec.problem.d_state, lane)


