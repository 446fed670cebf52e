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
from test_step_indices import TWO_WAYS, Rows, check_global, check_ragged

from replayssm_cute import compare
from replayssm_cute.config import TileConfig
from replayssm_cute.sm100 import ROWS, Sm100Config, covers, uncovered


def check_tensor_memory(run: BlackwellRun, cta: BlackwellCta, rows: Rows) -> None:
    """Every sum of a turn is read once, by the warp that owns its row; padding rows allocate nothing."""
    spec = run.kernel.spec
    row, _, _, count = run.kernel.grid.place(cta.block, len(rows.slots))
    if rows.slots[row] is None:
        assert cta.tensor.base < 0 and not cta.tensor.reads.any()
        return
    turns = count // run.config.parallel_heads
    first = cta.tensor.base
    expected = np.zeros_like(cta.tensor.reads)
    for turn in range(turns):
        column = first + turn * spec.columns
        expected[:, column : column + spec.tokens_pad] = 1
    assert (cta.tensor.reads == expected).all()


def check_state_and_operand(run: BlackwellRun, cta: BlackwellCta, rows: Rows) -> None:
    """The state arrives once a turn, C is staged once, a row that flushes reads its state once more."""
    spec, config, p, shared = run.kernel.spec, run.config, run.problem, cta.shared
    row, _, _, count = run.kernel.grid.place(cta.block, len(rows.slots))
    if rows.slots[row] is None:
        return
    turns = count // config.parallel_heads
    served = np.array([len(range(stage, turns, config.stages)) for stage in range(config.stages)])[:, None]
    state = shared.span("state")
    shape = (config.stages, spec.shared.stage_bytes // 4)
    flushed = served * (row in rows.flushes)
    assert (shared.written[state][: np.prod(shape)].reshape(shape) == served + flushed).all()
    assert (shared.read_words[state][: np.prod(shape)].reshape(shape) == 2 * flushed).all(), "to change, and to store"
    assert not shared.read_matrices[state].any()
    blocks = p.d_state * p.state_bytes // 128
    operand = shared.written[shared.span("operand")][: blocks * spec.columns * 32].reshape(blocks, spec.columns, 32)
    assert (operand[:, : p.tokens] == 1).all() and not operand[:, p.tokens :].any()


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
    assert len(run.ctas) == config.ctas(problem, len(rows.slots))
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


RAGGED_SLIPS = {
    "states refilled as if every row were as long as the longest": (
        "entry.new.length, spec.problem.window",
        "spec.problem.tokens, spec.problem.window",
    ),
    "what belongs to no row is left as it was": ("self.tokens.zero_tail(", "(lambda *_: None)("),
}


@pytest.mark.parametrize("slip", RAGGED_SLIPS)
def test_ragged_slips_are_seen(slip: str) -> None:
    problem, config = RAGGED["ragged, three turns, two stages, a tail"]
    call = ragged_call(problem)
    before = call.clone()
    with pytest.raises(AssertionError):
        check_ragged(
            BlackwellRun(problem, config, call, BlackwellSource(("sm100/step", *RAGGED_SLIPS[slip]))), before, call
        )


@pytest.mark.parametrize("name", ["plain", "two turns, one stage", "bf16, two turns", "heads of 128 rows", "T 9, W 11"])
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


# One slip each: (module, its text, what it becomes, what is said about it). The simulator must not let it pass.
SLIPS = {
    "half the stride of a descriptor": ("operands", "ROW_GROUP = 8 * 128", "ROW_GROUP = 4 * 128", "error|read"),
    "no swizzle in a descriptor": ("operands", "| 2 << 61", "| 0 << 61", "swizzle"),
    "a descriptor without its version": ("operands", "| 1 << 46 ", "", "version"),
    "K that goes on in the wrong block": (
        "operands",
        "step * K_BYTES // 128 *",
        "step * K_BYTES // 64 *",
        "on its way|outside",
    ),
    "K twice the same": ("operands", "+ step * K_BYTES % 128", "", "error"),
    "C without its swizzle": ("operands", "(chunk % 8) ^ (token % 8)", "chunk % 8", "error"),
    "C of f16 for bf16": ("operands", '"bf16": 1, "f16": 0', '"bf16": 0, "f16": 1', "error"),
    "N of 8": ("operands", "columns // 8 << 17", "1 << 17", "\\(128, 8\\)"),
    "lanes of another warp": ("step", "(warp * spec.warp_rows << 16)", "((3 - warp) * spec.warp_rows << 16)", "lane"),
    "tiles of a warp exchanged": ("step", "(P_TILE * tile << 16)", "(P_TILE * (1 - tile) << 16)", "error"),
    "tokens of the next tile": ("step", "<< 16) + 8 * n", "<< 16) + 8 * (n + 1)", "not awaited"),
    "sums of the first turn again": ("step", "read_out, base + i * spec.columns", "read_out, base", "error"),
    "one set of sums for all turns": ("step", "address, base + i * spec.columns", "address, base", "under way"),
    "MMAs that do not add": ("step", "operands.shape, step > 0", "operands.shape, False", "error"),
    "a first MMA that adds": ("step", "operands.shape, step > 0", "operands.shape, True", "adds to sums"),
    "no wait for the sums": (
        "step",
        "            cute.arch.mbarrier_wait(barriers.done + i, 0)\n            self.take",
        "            self.take",
        "under way|no MMA|not awaited|agents",
    ),
    "no wait for the state": (
        "step",
        "cute.arch.mbarrier_wait(barriers.full + stage, phase)\n                self.start",
        "self.start",
        "on its way",
    ),
    "a flush before the MMAs are done": (
        "step",
        "                cute.arch.mbarrier_wait(barriers.done, 0)  # results replace what the MMAs read\n",
        "",
        "an MMA may read it",
    ),
    "a stage filled while MMAs read it": (
        "step",
        "                            cute.arch.mbarrier_wait(barriers.done + i, 0)\n",
        "                            pass\n",
        "while an MMA may read it",
    ),
    "a stage filled before it was flushed": (
        "step",
        "cute.arch.mbarrier_wait(barriers.empty + stage, phase)",
        "cute.arch.mbarrier_wait(barriers.done + i, 0)",
        "while others may read it|while an MMA|on its way|error",
    ),
    "C without a fence": (
        "step",
        "inputs.c)\n        fence_writes()\n",
        "inputs.c)\n",
        "without a fence",
    ),
    "flushed rows without a fence": (
        "step",
        "                        fence_writes()\n",
        "",
        "over unfenced words",
    ),
    "tensor memory freed before it was read": (
        "step",
        "            cute.arch.mbarrier_wait(barriers.read, 0)\n",
        "",
        "released",
    ),
    "dependents before the allocation": (
        "step",
        "griddepcontrol_wait()\n        inputs =",
        "griddepcontrol_wait()\n            cute.arch.griddepcontrol_launch_dependents()\n        inputs =",
        "allocated when dependents may hold",
    ),
    "no wait for the predecessor": (
        "step",
        "            cute.arch.griddepcontrol_wait()\n        inputs =",
        "            pass\n        inputs =",
        "still be writing",
    ),
    "tensor memory never freed": ("step", "            release(base, tensor.columns)\n", "", "allocated"),
    "tensor memory of padding rows": (
        "step",
        "        if entry.live:\n            for stage in cutlass.range_constexpr(config.stages):\n",
        "        if not entry.live:\n"
        "            allocate(address + tensor.base, 32)\n"
        "        if entry.live:\n"
        "            for stage in cutlass.range_constexpr(config.stages):\n",
        "ended with tensor memory allocated",
    ),
    "an arrival too few": (
        "step",
        "mbarrier_init(barriers.read, spec.warps)",
        "mbarrier_init(barriers.read, spec.warps + 1)",
        "hangs",
    ),
    "an arrival too many": (
        "step",
        "mbarrier_init(barriers.done + turn, 1)",
        "mbarrier_init(barriers.done + turn, 2)",
        "hangs",
    ),
    "bytes too few": (
        "state_copies",
        "expect_tx(full + stage, self.spec.shared.stage_bytes)",
        "expect_tx(full + stage, 4096)",
        "hangs|on its way",
    ),
    "a barrier without the issuer": (
        "step",
        "        if entry.live:\n            cute.arch.sync_threads()\n",
        "        if entry.live:\n            cute.arch.sync_warp()\n",
        "no barrier after the write|hangs",
    ),
    "heads exchanged": (
        "step",
        "first = head0 // config.parallel_heads",
        "first = head0 // config.parallel_heads ^ 1",
        "beyond its tensor|state",
    ),
    "a state row's wrong place": (
        "write_back",
        "(thread.warp * spec.warp_rows + tile * P_TILE) * 128",
        "(thread.warp * spec.warp_rows + (1 - tile) * P_TILE) * 128",
        "error|read",
    ),
    "x without its barrier": ("tokens", "exists = position < row.pnat", "exists = position <= row.pnat", "x_cache"),
}
OF_BF16 = {"C of f16 for bf16"}
BEHIND_ANOTHER = {"dependents before the allocation", "no wait for the predecessor"}
LONG = {"tokens of the next tile"}


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_are_seen(slip: str) -> None:
    module, text, wrong, said = SLIPS[slip]
    where = module if module == "tokens" else f"sm100/{module}"
    problem = dataclasses.replace(BASE, heads=8, groups=1, tokens=12 if slip in LONG else 4)
    if slip in BEHIND_ANOTHER:
        problem = dataclasses.replace(problem, pdl=True)
    if slip in OF_BF16:
        problem = dataclasses.replace(problem, state_dtype="bf16")
    # The only turn's own code, or that of turns that take each other's stages.
    config = (
        Sm100Config.of(problem)
        if slip == "a flush before the MMAs are done"
        else Sm100Config.of(problem, turns=4, stages=2)
    )
    call, padding = example_call(problem)
    before = call.clone()
    with pytest.raises(AssertionError, match=said):
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
    assert {p.head_dim for p in problems} == {64, 128} and {p.d_state for p in problems} == {64, 128, 256}
    assert any(c.turns > c.stages for c in configs) and any(c.turns == 1 for c in configs)
    assert {p.head_dim * c.parallel_heads for p, c in CASES.values()} == {ROWS}


def test_problems_that_are_not_covered() -> None:
    def reason(**fields: Any) -> str:
        problem = dataclasses.replace(BASE, **fields)
        assert covers(problem) == (uncovered(problem) is None)
        return uncovered(problem) or ""

    assert "head_dim 80" in reason(head_dim=80)
    assert "pairs" in reason(heads=3, groups=1) and "pairs" in reason(heads=2, groups=2)
    assert "one type" in reason(groups=1, state_dtype="bf16", io_dtype="f16", dt_dtype="f16")
    assert reason(groups=1) == reason(head_dim=128) == reason(groups=1, state_dtype="bf16") == ""
