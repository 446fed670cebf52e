"""How a launch's CTAs share out the rows of a batch."""

from __future__ import annotations

import cutlass
from cutlass import Int32

from .primitives import quotient, remainder
from .spec import StepSpec


class Grid:
    """The CTAs of a step kernel: rows in order, each cut alike, and a tail of rows that are cut into single heads."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec

    def size(self, batch):
        """CTAs for a run-time batch; `TileConfig.ctas` for a known one."""
        config, p = self.spec.config, self.spec.problem
        tail = cutlass.min(batch, config.tail_rows)
        return (batch - tail) * config.ctas_per_row(p) + tail * config.ctas_per_tail_row(p)

    def place(self, bid, batch):
        """What a CTA works on: batch row, part of P, first head and number of heads."""
        config, p = self.spec.config, self.spec.problem

        def where(block, per_row, heads_per_cta):
            within = remainder(block, per_row)
            head = quotient(within, config.head_split) * heads_per_cta
            return quotient(block, per_row), remainder(within, config.head_split), head

        main = where(bid, config.ctas_per_row(p), config.heads_per_cta)
        if config.tail_rows == 0:
            return *main, config.heads_per_cta
        full_rows = batch - cutlass.min(batch, config.tail_rows)
        first_single = full_rows * config.ctas_per_row(p)
        is_single = bid >= first_single
        row, split, head = where(cutlass.max(bid - first_single, 0), config.ctas_per_tail_row(p), config.parallel_heads)
        single = (full_rows + row, split, head)
        chosen = [Int32(cutlass.select_(is_single, s, m)) for s, m in zip(single, main, strict=True)]
        return *chosen, Int32(cutlass.select_(is_single, config.parallel_heads, config.heads_per_cta))
