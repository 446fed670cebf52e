"""The Blackwell step kernel on the host, by its own code: its numbers, its accesses, its order, its tensor memory.

No GPU has run this kernel, so that this is what stands for it: descriptors are taken apart bit by bit, MMAs happen as
late as they may, warps run in random order, and what one does for another must be ordered by a barrier between them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from simulated_cases import BASE, every_pnat_call, example_call, ragged_call
from simulator.blackwell import BlackwellCta, BlackwellRun, BlackwellSource
from simulator.launch import Run
from sm100_cases import CASES, RAGGED
from sm100_slips import BEHIND_ANOTHER, LAUNCH_SLIPS, LONG, NARROW_SLIPS, OF_BF16, RAGGED_SLIPS, SLIPS
from test_step_indices import TWO_WAYS, Rows, check_global, check_ragged

from replayssm_cute import compare
from replayssm_cute.config import TileConfig
from replayssm_cute.sm100 import ROWS, Sm100Config, covers, uncovered


def places(run: BlackwellRun, cta: BlackwellCta, rows: Rows) -> list[tuple[int, int]]:
    """Batch row and turns of every place of the grid that a CTA worked on, but for padding."""
    found = [run.kernel.grid.place(block, len(rows.slots)) for block in cta.blocks]
    return [(row, count // run.config.parallel_heads) for row, _, _, count in found if rows.slots[row] is not None]


def check_tensor_memory(run: BlackwellRun, cta: BlackwellCta, rows: Rows) -> None:
    """Every sum of a turn is read once, by the warp that owns its row; padding rows need no tensor memory."""
    spec = run.kernel.spec
    first = cta.tensor.base
    assert (first < 0) == (not places(run, cta, rows) and not run.config.launch_control)
    expected = np.zeros_like(cta.tensor.reads)
    before = 0
    for _, turns in places(run, cta, rows):
        for turn in range(before, before + turns):
            column = first + turn % run.config.turns * spec.columns
            expected[: spec.rows, column : column + spec.tokens_pad] += 1
        before += turns
    assert (cta.tensor.reads == expected).all()


def check_state_and_operand(run: BlackwellRun, cta: BlackwellCta, rows: Rows) -> None:
    """The state arrives once a turn, C is staged once a row, a row that flushes reads its state once more."""
    spec, config, p, shared = run.kernel.spec, run.config, run.problem, cta.shared
    served, flushed = np.zeros((2, config.stages, 1), int)
    before = 0
    worked_on = places(run, cta, rows)
    for row, turns in worked_on:
        for turn in range(before, before + turns):
            served[turn % config.stages] += 1
            flushed[turn % config.stages] += row in rows.flushes
        before += turns
    state = shared.span("state")
    shape = (config.stages, spec.shared.stage_bytes // 4)
    assert (shared.written[state][: np.prod(shape)].reshape(shape) == served + flushed).all()
    assert (shared.read_words[state][: np.prod(shape)].reshape(shape) == 2 * flushed).all(), "to change, and to store"
    assert not shared.read_matrices[state].any()
    blocks = p.d_state * p.state_bytes // 128
    operand = shared.written[shared.span("operand")][: blocks * spec.columns * 32].reshape(blocks, spec.columns, 32)
    assert (operand[:, : p.tokens] == len(worked_on)).all() and not operand[:, p.tokens :].any()


@pytest.mark.parametrize("name", CASES)
def test_a_whole_step(name: str) -> None:
    """Numbers within the bounds that the GPU's are held to, and every element touched as often as it should be."""
    problem, config = CASES[name]
    call, padding = example_call(problem)
    before = call.clone()
    run = BlackwellRun(problem, config, call)
    rows = Rows(problem, before, padding)
    errors = compare.errors(before, call)
    assert compare.bounds(problem).violation(errors) is None, errors
    check_global(run, rows)
    for cta in run.ctas:
        check_tensor_memory(run, cta, rows)
        check_state_and_operand(run, cta, rows)
    blocks = [block for cta in run.ctas for block in cta.blocks]
    assert sorted(blocks) == list(range(config.ctas(problem, len(rows.slots))))
    assert (len(run.ctas) < len(blocks)) == config.launch_control, "some CTAs have several places"
    two_ways = TWO_WAYS | {"sm100/operands.stage"}
    assert {where: ways for where, ways in run.conflicts.items() if ways > (2 if where in two_ways else 1)} == {}
    assert run.unfinished == [], "a CTA ended while copies were on their way"


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_rows(name: str) -> None:
    """Rows of lengths of their own, empty ones and tokens of no row among them."""
    problem, config = RAGGED[name]
    call = ragged_call(problem)
    before = call.clone()
    run = BlackwellRun(problem, config, call)
    check_ragged(run, before, call)
    assert run.unfinished == []


@pytest.mark.parametrize("slip", RAGGED_SLIPS)
def test_ragged_slips_are_seen(slip: str) -> None:
    problem, config = RAGGED["ragged, three turns, two stages, a tail"]
    call = ragged_call(problem)
    before = call.clone()
    with pytest.raises(AssertionError):
        check_ragged(
            BlackwellRun(problem, config, call, BlackwellSource(("sm100/step", *RAGGED_SLIPS[slip]))), before, call
        )


@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "two turns, one stage",
        "bf16, two turns",
        "heads of 128 rows",
        "T 9, W 11",
        "heads of 80 rows",
        "launch control, heads of 80 rows, two turns, two stages, a tail",
    ],
)
def test_it_does_what_the_portable_kernel_does(name: str) -> None:
    """Flushed states and rings bit for bit, outputs to within a rounding: what a GPU has shown of the one is shared."""
    problem, config = CASES[name]
    call, _ = example_call(problem)
    other = call.clone()
    BlackwellRun(problem, config, call)
    Run(problem, TileConfig(), other)
    for field in ("state", "x_cache", "B_cache", "dt_cache"):
        assert torch.equal(getattr(call, field).nan_to_num(7), getattr(other, field).nan_to_num(7)), field
    torch.testing.assert_close(call.out, other.out, rtol=2**-7, atol=1e-5, equal_nan=True)
    differ = (call.out != other.out).float().mean()
    assert differ < 0.01, "sums of the same products, in another order"


@pytest.mark.parametrize("shape", [{}, {"turns": 2, "ring": "whole"}], ids=["one turn", "two turns, whole"])
def test_every_number_of_live_rows(shape: dict[str, Any]) -> None:
    """From none to a full window, from starts all over the ring; numbers and counts as above."""
    problem = dataclasses.replace(BASE, heads=4, groups=1, tokens=5)
    call = every_pnat_call(problem)
    before = call.clone()
    run = BlackwellRun(problem, Sm100Config.of(problem, **shape), call)
    violation = compare.bounds(problem).violation(compare.errors(before, call))
    assert violation is None, violation
    check_global(run, Rows(problem, before, None))


@pytest.mark.parametrize("slip", [*SLIPS, *LAUNCH_SLIPS, *NARROW_SLIPS])
def test_slips_are_seen(slip: str) -> None:
    module, text, wrong, said = (SLIPS | LAUNCH_SLIPS | NARROW_SLIPS)[slip]
    where = module if module == "tokens" else f"sm100/{module}"
    problem = dataclasses.replace(BASE, heads=8, groups=1, tokens=12 if slip in LONG else 4)
    if slip in BEHIND_ANOTHER:
        problem = dataclasses.replace(problem, pdl=True)
    if slip in OF_BF16:
        problem = dataclasses.replace(problem, state_dtype="bf16")
    if slip in NARROW_SLIPS:
        problem = dataclasses.replace(problem, head_dim=80, heads=2, tokens=16)
    if slip == "a flush before the MMAs are done" or slip in NARROW_SLIPS:
        config = Sm100Config.of(problem)
    else:  # turns that take each other's stages
        config = Sm100Config.of(problem, turns=4, stages=2)
    if slip in LAUNCH_SLIPS:
        config = Sm100Config.of(problem, turns=2, stages=1, launch_control=True)
    call, padding = example_call(problem)
    before = call.clone()
    with pytest.raises((AssertionError, KeyError), match=said):
        run = BlackwellRun(problem, config, call, BlackwellSource((where, text, wrong)))
        check_global(run, Rows(problem, before, padding))
        violation = compare.bounds(problem).violation(compare.errors(before, call))
        assert violation is None, violation


def test_the_same_run_without_a_slip_passes() -> None:
    for problem in (
        dataclasses.replace(BASE, heads=8, groups=1),
        dataclasses.replace(BASE, heads=8, groups=1, tokens=12),
        dataclasses.replace(BASE, heads=8, groups=1, state_dtype="bf16"),
    ):
        call, padding = example_call(problem)
        before = call.clone()
        run = BlackwellRun(problem, Sm100Config.of(problem, turns=4, stages=2), call)
        check_global(run, Rows(problem, before, padding))
        assert compare.bounds(problem).violation(compare.errors(before, call)) is None


def test_the_cases_reach_every_kind_of_step() -> None:
    problems, configs = zip(*CASES.values(), strict=True)
    for field in ("heads_per_cta", "stages", "ring", "tail_rows", "parallel_heads"):
        assert len({getattr(c, field) for c in configs}) > 1, field
    assert {(p.state_dtype, p.io_dtype) for p in problems} == {
        ("f32", "bf16"), ("f32", "f16"), ("bf16", "bf16"), ("f16", "f16"),
    }  # fmt: skip
    assert {p.head_dim for p in problems} == {64, 80, 128} and {p.d_state for p in problems} == {64, 128, 256}
    assert any(c.turns > c.stages for c in configs) and any(c.turns == 1 for c in configs)
    assert {p.head_dim * c.parallel_heads for p, c in CASES.values()} == {80, ROWS}
    for kind in (True, False):
        some = [c for c in configs if c.launch_control == kind]
        assert {c.turns > c.stages for c in some} == {c.tail_rows > 0 for c in some} == {True, False}


def test_problems_that_are_not_covered() -> None:
    def reason(**fields: Any) -> str:
        problem = dataclasses.replace(BASE, **fields)
        assert covers(problem) == (uncovered(problem) is None)
        return uncovered(problem) or ""

    assert "pairs" in reason(heads=3, groups=1) and "pairs" in reason(heads=2, groups=2)
    assert "one type" in reason(groups=1, state_dtype="bf16", io_dtype="f16", dt_dtype="f16")
    assert (
        reason(groups=1)
        == reason(head_dim=128)
        == reason(head_dim=80, heads=3, groups=3)
        == reason(groups=1, state_dtype="bf16")
        == ""
    )
