"""The static facts of one Blackwell step kernel."""

from __future__ import annotations

from ...problem import Problem
from ...sm100 import ROWS, Sm100Config, tensor_layout, token_columns
from ..spec import WARP, StepSpec


class Sm100Spec(StepSpec):
    """`StepSpec` of the epilogue's warps, and what the MMAs add to it.

    `warps` and `threads` are the epilogue's; one more warp, the `issuer`, starts copies and MMAs. `rows` is what a
    block of the state in shared memory holds: all rows of a turn, where the portable kernel has those of a warp.
    """

    def __init__(self, problem: Problem, config: Sm100Config) -> None:
        super().__init__(problem, config)
        self.tensor = tensor_layout(problem, config)
        self.columns = token_columns(problem)  # of a turn's accumulators
        self.warp_rows = self.rows
        self.rows = ROWS
        self.issuer = self.warps
        self.all_threads = self.threads + WARP
