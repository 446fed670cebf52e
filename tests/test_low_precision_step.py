"""The step kernel on low-precision states, by its own code on the host (see test_step_indices)."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch
from simulated_cases import BASE, FOUR, ONE_GROUP, every_pnat_call, example_call
from simulator.launch import Run
from simulator.source import KERNELS, Source

from replayssm_cute import compare, ring
from replayssm_cute.calls import Call
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

F8, I8 = ({"state_dtype": kind} for kind in ("f8e4m3", "i8"))
WIDE, F16 = {"d_state": 128}, {"io_dtype": "f16", "dt_dtype": "f16"}
BYTE_ONE, TWO_TURNS = TileConfig(), TileConfig(heads_per_cta=2, stages=2)
CASES: dict[str, tuple[Problem, TileConfig]] = {
    "f8, rows of 64 bytes": (dataclasses.replace(BASE, **F8), BYTE_ONE),
    "f8": (dataclasses.replace(BASE, **F8, **WIDE), BYTE_ONE),
    "f8, f16 inputs, two turns": (dataclasses.replace(FOUR, **F8, **WIDE, **F16), TWO_TURNS),
    "f8, d_state 256, head_dim 128, split": (
        dataclasses.replace(BASE, **F8, head_dim=128, d_state=256),
        TileConfig(head_split=4, tiles_per_warp=2),
    ),
    "f8, W 40": (dataclasses.replace(BASE, **F8, window=40), BYTE_ONE),
    "i8, rows of 64 bytes, two tiles, one stage": (
        dataclasses.replace(FOUR, **I8),
        TileConfig(heads_per_cta=2, tiles_per_warp=2),
    ),
    "i8, four turns, a tail": (
        dataclasses.replace(ONE_GROUP, **I8, **WIDE),
        TileConfig(heads_per_cta=4, stages=2, tail_rows=2),
    ),
    "i8, two at a time, f16 inputs": (
        dataclasses.replace(FOUR, **I8, **F16),
        TileConfig(heads_per_cta=2, parallel_heads=2),
    ),
    "i8, gaps everywhere": (dataclasses.replace(BASE, **I8, **WIDE, compact=False), BYTE_ONE),
    "i8, T = W = 1, head_dim 80": (dataclasses.replace(BASE, **I8, head_dim=80, tokens=1, window=1), BYTE_ONE),
    "i8, T 17, W 33": (dataclasses.replace(FOUR, **I8, tokens=17, window=33), TWO_TURNS),
    "f8, stochastic": (dataclasses.replace(BASE, **F8, **WIDE, philox_rounds=10), BYTE_ONE),
    "f8, stochastic, rows of 64 bytes": (dataclasses.replace(FOUR, **F8, philox_rounds=7), TWO_TURNS),
    "i8, stochastic": (dataclasses.replace(BASE, **I8, **WIDE, philox_rounds=10), TileConfig(tiles_per_warp=2)),
    "i8, stochastic, rows of 64 bytes, gaps": (
        dataclasses.replace(BASE, **I8, philox_rounds=10, compact=False),
        TileConfig(head_split=2),
    ),
    "bf16, stochastic": (dataclasses.replace(BASE, state_dtype="bf16", philox_rounds=10), BYTE_ONE),
    "bf16, stochastic, f16 inputs, two turns": (
        dataclasses.replace(FOUR, state_dtype="bf16", philox_rounds=1, **F16),
        TWO_TURNS,
    ),
    "f16, stochastic": (dataclasses.replace(BASE, **WIDE, state_dtype="f16", philox_rounds=10), BYTE_ONE),
    "bf16 copy": (dataclasses.replace(BASE, copy_dtype="bf16"), BYTE_ONE),
    "bf16 copy, four turns, W 32": (
        dataclasses.replace(ONE_GROUP, copy_dtype="bf16", window=32),
        TileConfig(heads_per_cta=4, stages=2),
    ),
    "bf16 copy, f16 inputs, gaps": (dataclasses.replace(BASE, copy_dtype="bf16", compact=False, **F16), BYTE_ONE),
    "f8 copy, two tiles": (dataclasses.replace(FOUR, copy_dtype="f8e4m3"), TileConfig(2, tiles_per_warp=2)),
    "i8 copy, behind another kernel": (dataclasses.replace(BASE, copy_dtype="i8", **WIDE, pdl=True), BYTE_ONE),
    "highest": (dataclasses.replace(BASE, precision="highest"), BYTE_ONE),
    "highest, two turns, T 9": (dataclasses.replace(FOUR, precision="highest", tokens=9), TWO_TURNS),
    "highest, whole": (dataclasses.replace(BASE, precision="highest", **WIDE), TileConfig(ring="whole")),
}
# Of the codes that a flush writes, how many are those of the reference at least: sums differ by 2^-12 of what the ring
# adds where its terms are not split, which moves some values over the edge between two codes.
SAME = {"bf16~": 0.93, "f16~": 0.998, "f8e4m3": 0.98, "i8": 0.98, "f32+": 0.998}
TWO_WAYS = {"readout_c.piece", "products.partial_sums", "products.dot", "byte_state.piece", "byte_state.stage"}


def written(call: Call) -> torch.Tensor:
    """The bits of what steps read."""
    t = call.state if call.state_copy is None else call.state_copy
    return t.contiguous().view(torch.uint8 if t.element_size() == 1 else torch.int16)


def excess(before: Call, after: Call) -> float:
    """How far outputs are from the float64 result beyond their own rounding, relative to their row's norm, at most."""
    exact = before.clone()
    exact.state, exact.out = exact.state.double(), torch.empty(exact.out.shape, dtype=torch.float64)
    exact.dt_cache = exact.dt_cache.double()
    checkpointing_ssu_reference(**exact.kwargs(), compute_dtype=torch.float64)
    mantissa, exponent = torch.frexp(after.out.double())
    half = torch.ldexp(torch.ones_like(mantissa), exponent - 9)  # of a bf16's last bit
    beyond = ((after.out.double() - exact.out).abs() - half).clamp_min(0)
    return float((beyond / exact.out.norm(dim=-1, keepdim=True).clamp_min(1e-30)).max())


@pytest.mark.parametrize("name", CASES)
def test_a_whole_step(name: str) -> None:
    """Numbers within bounds, nearly every code the reference's, every element touched as often as it should be."""
    problem, config = CASES[name]
    call, padding = example_call(problem)
    before, expected = call.clone(), call.clone()
    run = Run(problem, config, call)
    errors = compare.errors(before, call)
    assert compare.bounds(problem).violation(errors) is None, errors
    assert {where: n for where, n in run.conflicts.items() if n > (2 if where in TWO_WAYS else 1)} == {}
    assert run.unfinished == []
    slots = call.state_batch_indices
    assert slots is not None
    live = [row for row in range(call.batch) if row != padding]
    pnat = before.prev_num_accepted_tokens
    flushed = [int(slots[r]) for r in live if ring.flushes(int(pnat[slots[r]]), problem.tokens, problem.window)]
    assert len(flushed) == 2
    check_counts(run, problem, [int(slots[r]) for r in live], flushed)
    if problem.precision == "highest":
        assert excess(before, call) < 1e-5
        return
    checkpointing_ssu_reference(**expected.kwargs())
    same = (written(call)[flushed] == written(expected)[flushed]).double().mean()
    kind = "f32+" if problem.copy_dtype else problem.state_dtype + ("~" if problem.state_bytes == 2 else "")
    assert same >= SAME[kind], f"{float(same):.4f} of the codes are the reference's"


def check_counts(run: Run, problem: Problem, live: list[int], flushed: list[int]) -> None:
    """What of the states and their scales is read and written, and how often."""
    dual = problem.copy_dtype is not None

    def counts(tensor: str, what: str, slots: list[int], each: int) -> None:
        got = run.tensors[tensor].counts(what)
        want = np.zeros(got.shape, int)
        want[slots] = each
        assert (got == want).all(), f"{tensor}: elements left out, or {what} too often"

    read = "state_copy" if dual else "state"
    counts(read, "read", live, 1)
    counts(read, "written", flushed, 1)
    if dual:  # once to advance it, once to round what was written
        counts("state", "read", flushed, 2 if problem.scaled else 1)
        counts("state", "written", flushed, 1)
    if problem.scaled:
        counts("state_scale", "written", flushed, 1)
        reads = run.tensors["state_scale"].counts("read")
        assert (reads[live] > 0).all() and not np.delete(reads, live, 0).any()
    if problem.philox_rounds is not None:
        assert not run.tensors["rand_seed"].counts("written").any()


def test_the_default_precision_is_not_the_highest() -> None:
    """What `excess` measures tells the two apart."""
    call, _ = example_call(BASE)
    before = call.clone()
    Run(BASE, TileConfig(), call)
    assert excess(before, call) > 2e-5


@pytest.mark.parametrize("kind", ["f8e4m3", "i8"])
def test_every_number_of_live_rows(kind: str) -> None:
    problem = dataclasses.replace(BASE, groups=1, state_dtype=kind, heads=1)
    call = every_pnat_call(problem)
    before = call.clone()
    Run(problem, TileConfig(), call)
    assert compare.bounds(problem).violation(compare.errors(before, call)) is None


@pytest.mark.parametrize("name", ["f8, stochastic", "i8, stochastic", "bf16, stochastic"])
def test_rounding_does_not_depend_on_the_config(name: str) -> None:
    problem, _ = CASES[name]
    problem = dataclasses.replace(problem, heads=2, groups=1)
    results = []
    for config in (TileConfig(), TileConfig(head_split=2), TileConfig(heads_per_cta=2, stages=2, tiles_per_warp=2)):
        call, _ = example_call(problem)
        Run(problem, config, call)
        results.append(written(call))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_another_seed_rounds_otherwise_and_the_same_seed_alike() -> None:
    problem, config = CASES["bf16, stochastic"]
    found = []
    for seed in (1, 1, 2):
        call, _ = example_call(problem)
        assert call.rand_seed is not None
        call.rand_seed.fill_(seed)
        Run(problem, config, call)
        found.append(written(call))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_rows_of_zeros_and_rows_with_nan() -> None:
    """A row of zeros has the scale 1; NaN stays in its row, which reads as NaN."""
    problem = dataclasses.replace(BASE, state_dtype="i8")
    call, _ = example_call(problem)
    assert call.state_scale is not None and call.state_batch_indices is not None
    slot = int(call.state_batch_indices[3])  # a row that flushes
    call.x_cache[slot, 0, :, :2] = 0.0
    call.state[slot, 0, 0] = 0
    call.state_scale[slot, 0, 1] = float("nan")
    Run(problem, TileConfig(), call)
    assert call.state_scale[slot, 0, 0] == 1.0 and not call.state[slot, 0, 0].any()
    assert call.state_scale[slot, 0, 1].isnan() and call.out[3, :, 0, 1].isnan().all()
    assert not call.state_scale[slot, 0, 2:].isnan().any() and not call.out[3, :, 0, 2:].isnan().any()


# (module, its text, what it becomes, case): each must be seen in numbers or counts.
SLIPS: dict[str, tuple[str, str, str, str]] = {
    "scales of the wrong half": ("byte_state", "held[2 * tile + e // 2]", "held[2 * tile]", "f8"),
    "columns of C in their own order": (
        "byte_state",
        "[words[k][odd], words[k][odd + 2]]",
        "words[k][2 * odd :][:2]",
        "f8",
    ),
    "no gain": ("byte_state", "Float32(self.spec.decode_gain)", "Float32(1.0)", "f8"),
    "the old scale forgotten": (
        "rewrite",
        "total * Float32(scale[slot, head, p0 + 8 * side + g])",
        "total",
        "i8, gaps everywhere",
    ),
    "the largest of two lanes": ("rewrite", "range_constexpr(1, 3)", "range_constexpr(1, 2)", "f8"),
    "scales of every other tile": (
        "byte_state",
        "p0 + 8 * k + g",
        "p0 + 8 * (k % 2) + g",
        "i8, rows of 64 bytes, two tiles, one stage",
    ),
    "random words of a neighbour": (
        "rewrite",
        "words = held[side][first // group]",
        "words = held[0][first // group]",
        "f16, stochastic",
    ),
    "bits without the head": ("rewrite", "Int32(head), Int32(slot)", "Int32(0), Int32(slot)", "f16, stochastic"),
    "the copy of the old state": ("rewrite", "factors, t, self.dual)", "factors, t, False)", "f8 copy, two tiles"),
    "steps read the checkpoint": ("step", "read = state if copy is None else copy", "read = state", "bf16 copy"),
    "weights of one term": (
        "tokens",
        "sums[tile][n] = mma_tf32(sums[tile][n], a_frag, low)",
        "pass",
        "highest",
    ),
    "a state of one term": (
        "highest",
        "chain[which] = mma_tf32(chain[which], low, operands[0])",
        "pass",
        "highest",
    ),
    "a gain that is not due": ("decay", "and not spec.highest", "", "highest"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_are_seen(slip: str) -> None:
    module, text, wrong, name = SLIPS[slip]
    problem, config = CASES[name]
    call, _ = example_call(problem)
    before, expected = call.clone(), call.clone()
    try:
        Run(problem, config, call, Source((module, text, wrong)))
    except AssertionError:  # the simulator refuses an access
        return
    violation = compare.bounds(problem).violation(compare.errors(before, call))
    if violation is None and problem.precision == "highest":
        violation = "outputs" if excess(before, call) > 1e-5 else None
    if violation is None and problem.rewrites:
        checkpointing_ssu_reference(**expected.kwargs())
        flushed = written(expected) != written(before)
        same = (written(call)[flushed] == written(expected)[flushed]).double().mean()
        violation = "codes" if same < 0.9 else None
    assert violation is not None


def test_the_cases_reach_every_kind() -> None:
    problems, _ = zip(*CASES.values(), strict=True)
    kinds = collections.Counter((p.kinds, p.philox_rounds is not None) for p in problems)
    wanted = {(k, s) for k in ("f8e4m3", "i8") for s in (False, True)}
    assert wanted | {
        ("bf16", True),
        ("f16", True),
        ("f32+bf16", False),
        ("f32+f8e4m3", False),
        ("f32+i8", False),
    } <= set(kinds)
    assert KERNELS.module("step").StepKernel(*CASES["f8"]).spec.row_bytes == 128
