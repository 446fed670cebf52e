"""The tile configs worth considering for a problem on a target."""

from __future__ import annotations

from replayssm_cute.config import P_TILE, RINGS, TileConfig, default_config
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

STAGES = (1, 2, 3, 4, 6, 8, 12, 16)  # a stage more or less in between changes little and costs a compilation


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def configs(problem: Problem, target: Target) -> list[TileConfig]:
    """Every valid config of the grid, smallest first, one-stage configs among them; `TileConfig.is_valid` decides.

    The grid: heads a CTA that divide a group's, `STAGES`, splits that divide a head's tiles, both ways to the ring.
    """
    found = [
        TileConfig(heads_per_cta=heads, stages=stages, head_split=split, ring=ring)
        for heads in _divisors(problem.heads_per_group)
        for stages in STAGES
        if stages <= heads
        for split in _divisors(problem.head_dim // P_TILE)
        for ring in RINGS
    ]
    return [c for c in found if c.is_valid(problem, target)]


def defaults(problem: Problem, target: Target, batches: list[int]) -> list[TileConfig]:
    """The default config of each batch, once each: candidates that no pruning may drop."""
    return list(dict.fromkeys(default_config(problem, target, b) for b in batches))
