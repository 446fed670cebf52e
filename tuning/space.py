"""The tile configs worth considering for a problem on a target."""

from __future__ import annotations

from replayssm_cute.config import P_TILE, TileConfig, default_config
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def configs(problem: Problem, target: Target) -> list[TileConfig]:
    """Every valid config, smallest first. `TileConfig.is_valid` alone decides."""
    found = [
        TileConfig(heads_per_cta=heads, stages=stages, head_split=split)
        for heads in _divisors(problem.heads_per_group)
        for stages in range(1, heads + 1)
        for split in _divisors(problem.head_dim // P_TILE)
    ]
    return [c for c in found if c.is_valid(problem, target)]


def defaults(problem: Problem, target: Target, batches: list[int]) -> list[TileConfig]:
    """The default config of each batch, once each: candidates that no pruning may drop."""
    return list(dict.fromkeys(default_config(problem, target, b) for b in batches))
