"""The step kernel on low-precision states, by its own code on the host (see test_step_indices)."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest
import torch
from low_precision_cases import CASES, RAGGED_COPIES, excess, least_share
from simulated_cases import BASE, FOUR, every_pnat_call, example_call, ragged_call
from simulator.launch import Run
from simulator.source import KERNELS, Source

from replayssm_cute import compare, ring, rounding
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

# How often functions go through the banks at most, if not once.
WAYS = {
    "readout_c.piece": 2,
    "products.partial_sums": 2,
    "products.dot": 2,
    "byte_state.piece": 2,
    "byte_state.stage": 2,
    "ring_b.put": 2,
    "ring_b.get": 4,  # a quarter of a lane's 16 columns of an 8-bit state, in flushes alone
}


@pytest.mark.parametrize("name", CASES)
def test_a_whole_step(name: str) -> None:
    """Numbers within bounds, nearly every code the reference's, every element touched as often as it should be."""
    problem, config = CASES[name]
    call, padding = example_call(problem)
    before = call.clone()
    run = Run(problem, config, call)
    errors = compare.errors(before, call)
    assert compare.bounds(problem).violation(errors) is None, errors
    assert {where: n for where, n in run.conflicts.items() if n > WAYS.get(where, 1)} == {}
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
    assert compare.same_codes(before, call) >= least_share(problem)


def check_counts(run: Run, problem: Problem, live: list[int], flushed: list[int]) -> None:
    """What of the states and their scales is read and written, and how often."""
    dual = problem.copy_dtype is not None

    def counts(tensor: str, what: str, slots: list[int], each: int) -> None:
        got = run.tensors[tensor].counts(what)
        want = np.zeros(got.shape, int)
        want[slots] = each
        assert (got == want).all(), f"{tensor}: elements left out, or {what} too often"

    read = "state_copy" if dual else "state"
    counts(read, "read", [slot for slot in live if not (dual and slot in flushed)], 1)
    counts(read, "written", flushed, 1)
    if dual:
        counts("state", "read", flushed, 1)
        counts("state", "written", flushed, 1)
    if problem.scaled:
        counts("state_scale", "written", flushed, 1)
        reads = run.tensors["state_scale"].counts("read")
        assert (reads[live] > 0).all() and not np.delete(reads, live, 0).any()
    if problem.philox_rounds is not None:
        assert not run.tensors["rand_seed"].counts("written").any()


@pytest.mark.parametrize("name", RAGGED_COPIES)
def test_packed_rows_beside_a_copy(name: str) -> None:
    problem, config = RAGGED_COPIES[name]
    call = ragged_call(problem)
    before = call.clone()
    run = Run(problem, config, call)
    assert compare.bounds(problem).violation(compare.errors(before, call)) is None
    assert run.unfinished == [] and compare.same_codes(before, call) >= least_share(problem)


@pytest.mark.parametrize("kind", ["bf16", "f8e4m3", "i8"])
def test_nan_and_inf_in_a_checkpoint_beside_a_copy(kind: str) -> None:
    """They stay where the reference has them; those of a copy that a flush replaces are not read."""
    problem = dataclasses.replace(BASE, copy_dtype=kind)
    call, _ = example_call(problem)
    assert call.state_batch_indices is not None and call.state_copy is not None
    flushed, other = int(call.state_batch_indices[3]), int(call.state_batch_indices[0])
    call.state[flushed, 0, 1, 3], call.state[flushed, 0, 2, 5] = float("nan"), float("inf")
    call.state[other, 0, 1] = float("nan")
    if kind != "i8":
        call.state_copy[flushed, 1, 3] = float("nan")
    expected = call.clone()
    checkpointing_ssu_reference(**expected.kwargs())
    Run(problem, TileConfig(), call)
    for name in ("out", "state", "state_copy", "state_scale"):
        if (got := getattr(call, name)) is not None:
            want = getattr(expected, name).float()
            assert torch.equal(got.float().isnan(), want.isnan()) and torch.equal(got.float().isinf(), want.isinf())
    assert call.out[3].isnan().any()


@pytest.mark.parametrize("sizes", [(0.0, 1e-38, 1e30, 1.0), (1e-30, 1e34, 1e-25, float("nan"))])
@pytest.mark.parametrize("kind", ["f8e4m3", "i8"])
def test_tokens_whose_c_has_any_size(kind: str, sizes: tuple[float, ...]) -> None:
    """C is kept as f16 from turn to turn, each token's times a power of two."""
    problem = dataclasses.replace(FOUR, state_dtype=kind, d_state=128, has_z=False, d_dtype=None)
    call, padding = example_call(problem)
    call.x.zero_()
    call.x_cache.zero_()
    for token, size in enumerate(sizes):
        call.C[:, token] *= size
    expected = call.clone()
    checkpointing_ssu_reference(**expected.kwargs(), compute_dtype=torch.float64)
    Run(problem, TileConfig(2, 2), call)
    rows = [row for row in range(call.batch) if row != padding]
    for token, size in enumerate(sizes):
        got, want = call.out[rows, token].double(), expected.out[rows, token].double()
        if size != size:
            assert got.isnan().all()
        else:
            assert float((got - want).norm()) <= 4e-3 * float(want.norm())


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
        results.append(compare.codes(call))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_another_seed_rounds_otherwise_and_the_same_seed_alike() -> None:
    problem, config = CASES["bf16, stochastic"]
    found = []
    for seed in (1, 1, 2):
        call, _ = example_call(problem)
        assert call.rand_seed is not None
        call.rand_seed.fill_(seed)
        Run(problem, config, call)
        found.append(compare.codes(call))
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


@pytest.mark.parametrize("slip", [None, ("rewrite", "most < TINY, Float32(0.0), Float32", "most < 0.0, 0.0, Float32")])
def test_rows_that_vanish_stay_zero_under_stochastic_rounding(slip: tuple[str, str, str] | None) -> None:
    """A value below zero, however small, would become -1 of scale 1 where its 16 random bits are zeros."""
    problem, config = CASES["i8, stochastic"]
    call, _ = example_call(problem)
    assert call.state_scale is not None and call.state_batch_indices is not None and call.rand_seed is not None
    slot = int(call.state_batch_indices[3])  # a row that flushes
    call.x_cache[slot, 0] = 0.0
    call.state_scale[slot, 0], call.state[slot, 0] = 1e-35, -1
    where, size = torch.tensor([slot]), problem.head_dim * problem.d_state
    for seed in range(1000):
        call.rand_seed.fill_(seed)
        if not rounding.random_bits("i8", call.rand_seed, where, 1, size, 10).all():
            break
    Run(problem, config, call, *([] if slip is None else [Source(slip)]))
    assert (call.state_scale[slot, 0] == 1.0).all() and bool(call.state[slot, 0].any()) == (slip is not None)


# (module, its text, what it becomes, case): each must be seen in numbers or counts.
SLIPS: dict[str, tuple[str, str, str, str]] = {
    "scales of the wrong half": ("byte_state", "held[2 * tile + e // 2]", "held[2 * tile]", "f8"),
    "columns of C in their own order": (
        "byte_state",
        "[words[k][odd], words[k][odd + 2]]",
        "words[k][2 * odd :][:2]",
        "f8",
    ),
    "no gain": ("byte_state", "Float32(self.gain) if", "Float32(1.0) if", "f8"),
    "the old scale forgotten": (
        "rewrite",
        "total * Float32(tensors.scale[row.slot, turn.head, p0 + 8 * side + thread.g])",
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
    "bits without the head": ("rewrite", "Int32(job.head), Int32", "Int32(0), Int32", "f16, stochastic"),
    "the copy of the old state": (
        "rewrite",
        "store_words(self._chunk(job, number, side, which), kept[side][which])",
        "pass",
        "f8 copy, two tiles",
    ),
    "steps read the checkpoint": ("step", "if self.flushes(row):", "if True:", "bf16 copy"),
    "rows that flush read the copy": ("step", "if self.flushes(row):", "if False:", "bf16 copy"),
    "tiles in one phase": (
        "state_copies",
        "(turn.phase * self.spec.tiles + tile) & 1",
        "turn.phase",
        "f8 copy, two tiles",
    ),
    "a tile over one that is being stored": (
        "state_copies",
        "cute.arch.cp_async_bulk_wait_group(0, read=True)",
        "pass",
        "f8 copy, two tiles",
    ),
    "the first tile's read-out for both": (
        "write_back",
        "mine = tile == k // each",
        "mine = tile == 0",
        "bf16 copy, one turn of two tiles",
    ),
    "columns of the read-out in their own order": (
        "rewrite",
        "words[which * PART // 2 + e // 2]",
        "words[e // 2 * 2 + which]",
        "bf16 copy",
    ),
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
    before = call.clone()
    try:
        Run(problem, config, call, Source((module, text, wrong)))
    except AssertionError:  # the simulator refuses an access
        return
    violation = compare.bounds(problem).violation(compare.errors(before, call))
    if violation is None and problem.precision == "highest":
        violation = "outputs" if excess(before, call) > 1e-5 else None
    if violation is None and problem.rewrites:
        violation = "codes" if compare.same_codes(before, call) < compare.LEAST_CODES else None
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
