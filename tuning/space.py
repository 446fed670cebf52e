"""The tile configs worth considering for a problem on a target."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable

from replayssm_cute.config import OPT_LEVELS, P_TILE, TileConfig
from replayssm_cute.default_rule import default_config, usual_tail
from replayssm_cute.problem import Problem
from replayssm_cute.sm100 import ARCHES, Sm100Config, covers
from replayssm_cute.target import Target

from . import cost

MAX_TILES = 5  # of a warp: more would leave a multiprocessor too few warps
STAGES = (1, 2, 3, 4, 6, 8, 12, 16)  # a stage more or less in between changes little and costs a compilation


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


@functools.lru_cache(maxsize=64)
def configs(problem: Problem, target: Target) -> tuple[TileConfig, ...]:
    """Every valid config of the grid, smallest first; `TileConfig.is_valid` decides.

    The grid: heads a CTA that divide a group's, `STAGES`, splits that divide a head's tiles, registers free or capped
    (see `capped`), and where a CTA takes several heads, without and with the usual tail of single heads. Beside it,
    each on its own: several tiles a warp (in CTAs of whole heads), two heads at a time, and the whole ring. All of
    them with B of the ring from L2 too, where a multiprocessor then holds a CTA more.
    """
    tiles = problem.head_dim // P_TILE
    found = []
    for heads, stages in itertools.product(_divisors(problem.heads_per_group), STAGES):
        found += [TileConfig(heads, stages, split) for split in _divisors(tiles)]
        found += [TileConfig(heads, stages, tiles_per_warp=n) for n in _divisors(tiles) if 1 < n <= MAX_TILES]
        found += [TileConfig(heads, stages, split, ring="whole") for split in _divisors(tiles)]
        found += [TileConfig(heads, stages, parallel_heads=2)]
    found += [c for kept in found if (c := without_b(kept, problem, target))]
    found = [c for free in found if free.is_valid(problem, target) for c in (free, *capped(free, problem, target))]
    tail = usual_tail(problem, target)
    tailed = [dataclasses.replace(c, tail_rows=tail) for c in found if c.turns > 1]
    return tuple(c for c in (*found, *tailed) if c.is_valid(problem, target))


@functools.lru_cache(maxsize=64)
def blackwell(problem: Problem, target: Target) -> tuple[Sm100Config, ...]:
    """Every valid config of the Blackwell kernel worth a measurement, where it covers the problem; elsewhere none.

    The cost model knows nothing of this kernel, so that these are few: turns and stages, the whole ring for the
    smallest CTAs, with and without the usual tail, each with and without launch control. With it kernels take 150 to
    250 registers if they may, so that two CTAs are asked for too where shared memory holds as many; of three nearly all
    would spill.
    """
    if target.arch not in ARCHES or not covers(problem):
        return ()
    tail = usual_tail(problem, target)
    shapes = [(1, 1, "live", 0), (1, 1, "whole", 0)]
    shapes += [(turns, stages, "live", t) for turns in (2, 4, 8) for stages in (1, 2) for t in (0, tail)]
    found = []
    for turns, stages, ring, rows in shapes:
        free = Sm100Config.of(problem, turns, stages, ring, tail_rows=rows)
        found += [free, *(dataclasses.replace(free, launch_control=True, ctas_per_sm=n) for n in (1, 2))]
    return tuple(c for c in found if c.is_valid(problem, target))


def without_b(kept: TileConfig, problem: Problem, target: Target) -> TileConfig | None:
    """The same config with B from L2, where that lets a multiprocessor hold more CTAs."""
    spared = dataclasses.replace(kept, keep_b=False)
    if not spared.is_valid(problem, target):
        return None
    if not kept.is_valid(problem, target):
        return spared
    held, before = (cost.occupancy(problem, c, target, cost.guess(problem, c))[0] for c in (spared, kept))
    return spared if held > before else None


def capped(free: TileConfig, problem: Problem, target: Target) -> list[TileConfig]:
    """The same config with registers capped, where more CTAs would fit than usual registers let in.

    Two caps at most: one CTA a multiprocessor more, and as many as its shared memory and threads hold.
    """
    usual, _ = cost.occupancy(problem, free, target, cost.guess(problem, free))
    held = usual
    while dataclasses.replace(free, ctas_per_sm=held + 1).is_valid(problem, target):
        held += 1
    return [dataclasses.replace(free, ctas_per_sm=n) for n in sorted({usual + 1, held}) if usual < n <= held]


def at_other_level(configs: Iterable[TileConfig]) -> list[TileConfig]:
    """The same configs at the other of ptxas's levels, if their kernel has one: which is faster only a GPU can say."""
    return [
        dataclasses.replace(c, opt_level=next(n for n in OPT_LEVELS if n != c.opt_level))
        for c in configs
        if not isinstance(c, Sm100Config)
    ]


def defaults(problem: Problem, target: Target, batches: list[int]) -> list[TileConfig]:
    """The default config of each batch, once each: candidates that no pruning may drop."""
    return list(dict.fromkeys(default_config(problem, target, b) for b in batches))
