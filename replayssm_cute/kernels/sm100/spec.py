"""The static facts of one Blackwell step kernel, and which warp has which part."""

from __future__ import annotations

from typing import Any

from ...problem import Problem
from ...sm100 import Sm100Config, tensor_layout, token_columns
from ..primitives import quotient, remainder
from ..spec import WARP, StepSpec

QUARTERS = 4  # of tensor memory's lanes; a warp reads the one of its number modulo 4


class Sm100Spec(StepSpec):
    """`StepSpec` of the epilogue's warps, and what the MMAs add to it.

    `warps` and `threads` are the epilogue's; the `issuer` starts MMAs and copies, with launch control the `loader`
    does the copies. `rows` is what a block of the state in shared memory holds: all rows of a turn, where the portable
    kernel has those of a warp.

    Parts and warps. A part is a number that says what a warp does: those below `warps` are epilogue warps, in the order
    of their rows. Where each has 32 rows, parts are the hardware's numbers. Where each has 16 (heads of 80 rows), rows
    16k .. belong to the k-th half of a quarter of tensor memory's lanes, which hardware warps k // 2 and k // 2 + 4
    can read: these are parts 2 (k // 2) and 2 (k // 2) + 1. Warp 3, whose lanes nobody needs, is the issuer.
    """

    def __init__(self, problem: Problem, config: Sm100Config) -> None:
        super().__init__(problem, config)
        self.tensor = tensor_layout(problem, config)
        self.columns = token_columns(problem)  # of a turn's accumulators
        self.warp_rows = self.rows
        self.rows = config.parallel_heads * problem.head_dim
        self.launch_control = config.launch_control
        self.halves = self.tiles == 1  # whether a warp has half a quarter's lanes
        self.issuer, self.loader = (self.part(3), self.part(6)) if self.halves else (self.warps, self.warps + 1)
        self.all_threads = config.threads(problem)
        self.staging_threads = self.threads + WARP  # of the epilogue and the issuer

    def part(self, warp: Any) -> Any:
        """The part of a hardware warp."""
        return remainder(warp, QUARTERS) * 2 + quotient(warp, QUARTERS) if self.halves else warp
