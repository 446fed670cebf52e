"""Random problems, random calls: the reference against the oracle here, every kernel against float64 on a GPU."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch
from oracle import oracle_step
from property_draws import AXES, draw, problem_of, rows

from replayssm_cute import checkpointing_ssu, compare, compiler, plan, target
from replayssm_cute.config import TileConfig
from replayssm_cute.default_rule import default_config
from replayssm_cute.problem import Problem

ROWS = rows(120)
DRAWS = int(os.environ.get("REPLAYSSM_PROPERTY_DRAWS", "85"))  # rows of calls, for each problem on a GPU
PER_CALL = 17
CPU_DRAWS = 300


def bounds(problem: Problem) -> compare.Bounds:
    """The bounds of few rows: their whole tensor may err as much as one row, token and head of a large one."""
    usual = compare.bounds(problem)
    return dataclasses.replace(usual, out=usual.out_worst)


def relative(got: torch.Tensor, expected: np.ndarray) -> float:
    difference = np.linalg.norm(got.double().numpy() - expected)
    return float(difference / max(np.linalg.norm(expected), 1e-30)) if difference else 0.0


def test_the_rows_cover_every_pair() -> None:
    assert len(ROWS) == 120
    seen = {(a, b, repr(row[a]), repr(row[b])) for row in ROWS for a in AXES for b in AXES if a < b}
    assert len(seen) == sum(len(AXES[a]) * len(AXES[b]) for a in AXES for b in AXES if a < b)


@pytest.mark.parametrize("part", range(10))
def test_the_reference_against_the_oracle(part: int) -> None:
    """300 draws of small heads; on the CPU the public call runs the reference."""
    for number in range(part, CPU_DRAWS, 10):
        row = ROWS[number % len(ROWS)] | {"head_dim": 64, "d_state": 64, "heads": (2, 1 + number % 2)}
        problem = problem_of(row)
        call = draw(problem, row["layout"], seed=number, batch=1 + number % 3)
        expected = oracle_step(call)
        before = call.clone()
        checkpointing_ssu(**call.kwargs())
        what = f"draw {number}: {problem.label()} {row}"
        assert relative(call.out, expected.out) < bounds(problem).out, what
        assert bounds(problem).violation(compare.errors(before, call)) is None, what
        assert relative(torch.nan_to_num(call.x_cache.float()), np.nan_to_num(expected.x_cache)) < 1e-6, what
        assert relative(torch.nan_to_num(call.state.float()), np.nan_to_num(expected.state)) < 5e-3, what


def config_of(kind: str, problem: Problem, gpu: target.Target) -> TileConfig:
    """A valid config of a kind, the default rule's where there is none."""
    wanted = {
        "default": [],
        "one": [TileConfig()],
        "turns": [TileConfig(n, s, tail_rows=2) for n, s in ((7, 2), (4, 2), (2, 2), (2, 1))],
        "wide": [TileConfig(tiles_per_warp=n) for n in (2, 5)],
        "split": [TileConfig(head_split=n) for n in (2, 5)],
    }[kind]
    return next((c for c in wanted if c.is_valid(problem, gpu)), default_config(problem, gpu, 8))


@pytest.fixture(scope="module")
def gpu() -> target.Target:
    found = plan.device_target(0)
    todo = [(p := problem_of(row), config_of(row["tile"], p, found), found) for row in ROWS]
    bad = [done for done in compiler.compile_many(todo) if done.error]
    assert not bad, [f"{d.item[0].label()} {d.item[1].label()}: {d.error}" for d in bad]
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_every_kernel_against_float64(number: int, gpu: target.Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """85 rows of each problem, 10,200 in all, each with cursors, length, slot and numbers of its own."""
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    row = ROWS[number]
    problem = problem_of(row)
    config = config_of(row["tile"], problem, gpu)
    for first in range(0, DRAWS, PER_CALL):
        call = draw(problem, row["layout"], seed=1000 * number + first, batch=PER_CALL, device="cuda")
        before = call.clone()
        checkpointing_ssu(**call.kwargs(), config=config)
        torch.cuda.synchronize()
        found = compare.errors(before, call)
        assert bounds(problem).violation(found) is None, f"{problem.label()} {config.label()} {row}: {found}"
