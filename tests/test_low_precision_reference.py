"""Low-precision states in the reference: against an oracle in plain loops, over many steps, and what a call refuses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import fakes
import numpy as np
import pytest
import torch
from oracle import oracle_step

import replayssm_cute
from replayssm_cute import calls, compare, plan, ring, rounding, target
from replayssm_cute.calls import Call, random_call
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

fake_compiler = fakes.fake_compiler
cpu_as_gpu = fakes.cpu_as_gpu

SMALL = Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=3, window=7)
KINDS: tuple[dict[str, Any], ...] = (
    {"state_dtype": "f8e4m3"},
    {"state_dtype": "i8", "ragged": True},
    {"copy_dtype": "bf16"},
    {"copy_dtype": "f8e4m3"},
    {"copy_dtype": "i8", "ragged": True},
    {"state_dtype": "bf16", "philox_rounds": 10},
    {"state_dtype": "f16", "philox_rounds": 7},
    {"state_dtype": "f8e4m3", "philox_rounds": 10},
    {"state_dtype": "i8", "philox_rounds": 10},
)
LIMIT = {"f8e4m3": 448.0, "i8": 127.0}


def bits_of(call: Call) -> dict[str, torch.Tensor]:
    """Every written tensor's bytes."""
    return {name: getattr(call, name).contiguous().view(torch.uint8).clone() for name in call.written()}


def nearest_code(kind: str, value: float) -> float:
    """A value rounded to an 8-bit format by its definition."""
    if kind == "i8":
        return float(max(-128, min(127, round(value))))
    if value == 0 or math.isnan(value):
        return value
    exponent = max(math.floor(math.log2(abs(value))), -6)
    step = 2.0 ** (exponent - 3)
    return max(-448.0, min(448.0, round(value / step) * step))


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_a_step_against_plain_loops(changes: dict[str, Any]) -> None:
    """Outputs start from what the codes stand for, beside a copy of a row that flushes from the checkpoint; a flush
    leaves codes that are neighbours of the exact values."""
    problem = dataclasses.replace(SMALL, **changes)
    call = random_call(problem, 6, pnat=[0, 2, 4, 5, 6, 7], lengths=[3, 2, 3, 3, 3, 3] if problem.ragged else None)
    before = call.clone()
    replayssm_cute.checkpointing_ssu(**call.kwargs())

    plain = before.clone()
    read = before.state if before.state_copy is None else before.state_copy
    scale = 1.0 if before.state_scale is None else before.state_scale.double()[..., None]
    plain.state = read.double() * scale
    truth = oracle_step(plain.clone())
    if before.state_copy is not None:
        plain.state[list(truth.flushed)] = before.state[list(truth.flushed)].double()
        truth = oracle_step(plain)
    np.testing.assert_allclose(call.out.double().numpy(), truth.out, rtol=5e-3, atol=5e-3 * np.nanstd(truth.out))
    flushed = sorted(truth.flushed)
    assert len(flushed) >= 3
    if problem.copy_dtype is not None:  # the checkpoint goes on from itself, not from its copy
        exact = before.clone()
        exact.state = before.state.double()
        want = oracle_step(exact).state
        np.testing.assert_allclose(call.state.double().numpy()[flushed], want[flushed], rtol=1e-4, atol=1e-5)
        target = want
        got = call.state_copy
    else:
        target, got = truth.state, call.state
    assert got is not None
    kind = problem.read_dtype
    for slot in flushed:
        for head in range(problem.heads):
            for p in (0, 17, 63):
                row = target[slot, head, p]
                codes = got[slot, head, p].double().numpy()
                unit = 1.0
                if kind in LIMIT:
                    assert call.state_scale is not None
                    unit = float(call.state_scale[slot, head, p])
                    assert unit == pytest.approx(np.abs(row).max() / LIMIT[kind], rel=1e-5)
                for value, code in zip(row / unit, codes, strict=True):
                    step = {"f8e4m3": 2.0**-3, "i8": 1.0, "bf16": 2.0**-7, "f16": 2.0**-10}[kind]
                    if kind != "i8":
                        step *= 2.0 ** max(
                            math.floor(math.log2(max(abs(value), 1e-30))), -6 if kind == "f8e4m3" else -14
                        )
                    reach = (0.5 if problem.philox_rounds is None else 1.0) * step
                    assert abs(code - value) <= reach * (1 + 1e-3) + 1e-4 * abs(value)
                    if kind in LIMIT:
                        assert code == nearest_code(kind, code), "a code of the format"


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_only_what_flushes_is_rounded(changes: dict[str, Any]) -> None:
    """Without a flush no bit of a state, copy or scale changes; and never in slots that no row names."""
    problem = dataclasses.replace(dataclasses.replace(SMALL, **changes), ragged=False)
    call = random_call(problem, 3, pnat=[0, 1, 4])
    before = bits_of(call)
    replayssm_cute.checkpointing_ssu(**call.kwargs())
    after = bits_of(call)
    for name in ("state", "state_scale", "state_copy"):
        assert name not in before or torch.equal(before[name], after[name]), name


@pytest.mark.parametrize("changes", KINDS, ids=str)
def test_the_comparison_bites(changes: dict[str, Any]) -> None:
    """Each of these wrong results breaks a bound."""
    problem = dataclasses.replace(SMALL, **changes)
    call = random_call(problem, 8, pnat=[7] * 8, lengths=3 if problem.ragged else None)
    before = call.clone()
    replayssm_cute.checkpointing_ssu(**call.kwargs())
    bounds = compare.bounds(problem)
    assert bounds.violation(compare.errors(before, call)) is None
    slots = call.state_batch_indices
    assert slots is not None
    slot = int(slots[0])

    def wrong(change: Callable[[Call], None]) -> str | None:
        after = call.clone()
        change(after)
        return bounds.violation(compare.errors(before, after))

    def not_flushed(after: Call) -> None:
        read = "state" if problem.copy_dtype is None else "state_copy"
        getattr(after, read).view(torch.uint8).copy_(getattr(before, read).view(torch.uint8))

    assert wrong(not_flushed) is not None
    if call.state_scale is not None:
        assert wrong(lambda a: a.state_scale.__setitem__((slot, 0, 0), a.state_scale[slot, 0, 0] * 1.01)) is not None  # type: ignore[union-attr]
        assert wrong(lambda a: a.state_scale.__setitem__((slot, 0, 0), float("nan"))) is not None  # type: ignore[union-attr]
    if call.rand_seed is not None:
        assert wrong(lambda a: a.rand_seed.add_(1)) is not None  # type: ignore[union-attr]  # it is read-only


def test_the_recurrence_of_a_dual_state_is_that_of_f32() -> None:
    """Many steps: the checkpoint beside a copy is bit for bit the one without, whatever the copy is."""
    plain = random_call(SMALL, 4, slots=4, pnat=[0] * 4, dead=None)
    duals = [
        random_call(dataclasses.replace(SMALL, copy_dtype=k), 4, slots=4, pnat=[0] * 4, dead=None)
        for k in ("bf16", "i8")
    ]
    for call in (plain, *duals):  # what was drawn differs, since copies are drawn too
        call.state.zero_()
        call.ring_start.zero_()
        if call.state_copy is not None:
            call.state_copy.zero_()
    slots = plain.state_batch_indices
    assert slots is not None
    for step in range(12):
        new = random_call(SMALL, 4, slots=4, seed=100 + step)
        for call in (plain, *duals):
            given = call.kwargs() | {n: getattr(new, n) for n in ("x", "dt", "A", "B", "C", "D", "dt_bias")}
            given["state_batch_indices"] = slots
            replayssm_cute.checkpointing_ssu(**given)
            accepted = torch.tensor([1, 3, 2, 0], dtype=torch.int32)
            ring.commit(call.ring_start, call.prev_num_accepted_tokens, slots, accepted, tokens=3, window=7)
    for dual, tolerance in zip(duals, (4e-3, 1.2e-2), strict=True):
        torch.testing.assert_close(dual.state, plain.state, rtol=0, atol=0)
        assert dual.state_copy is not None
        copy = rounding.decode(dual.state_copy, dual.state_scale)
        assert float((copy - dual.state).norm() / dual.state.norm()) < tolerance


@pytest.mark.fault(21)
def test_stochastic_rounding_is_reproducible_and_layers_have_seeds_of_their_own() -> None:
    problem = dataclasses.replace(SMALL, state_dtype="bf16", philox_rounds=10)
    seeds = torch.tensor([11, 12])  # one a layer, as views of one tensor
    found = []
    for layer in (0, 0, 1):
        call = random_call(problem, 2, pnat=[7, 7])
        call.rand_seed = seeds[layer]
        replayssm_cute.checkpointing_ssu(**call.kwargs())
        found.append(call.state.clone().nan_to_num())
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    assert seeds.tolist() == [11, 12]


def test_the_mean_over_seeds_is_the_exact_state() -> None:
    """A whole flush is unbiased, not the rounding alone."""
    problem = dataclasses.replace(SMALL, state_dtype="bf16", philox_rounds=10, heads=1, groups=1)
    start = random_call(problem, 1, pnat=[7], slots=1)
    exact = start.clone()
    exact.state, exact.rand_seed = exact.state.double(), None
    exact.out, exact.dt_cache = exact.out.double(), exact.dt_cache.double()
    checkpointing_ssu_reference(**exact.kwargs(), compute_dtype=torch.float64)
    draws = []
    for seed in range(64):
        call = start.clone()
        call.rand_seed = torch.tensor([seed])
        replayssm_cute.checkpointing_ssu(**call.kwargs())
        draws.append(call.state.double())
    step = 2.0 ** (exact.state.abs().log2().floor() - 7)
    error = (torch.stack(draws).mean(0) - exact.state) / step
    assert float(error.abs().mean()) < 0.06 and abs(float(error.mean())) < 0.005  # of 4,096 elements, 64 draws each


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_seed_of_either_shape_reaches_the_kernel_as_one(
    shape: tuple[int, ...], fake_compiler: Any, cpu_as_gpu: None
) -> None:
    """Kernels take (1,); an f32 state's kernel takes none, in the call and in a prepared launch."""
    plan.forget()
    problem = dataclasses.replace(SMALL, state_dtype="bf16", philox_rounds=10)
    for case in (problem, SMALL):
        call = random_call(case, 2, pnat=[7, 7])
        seed = torch.full(shape, 5)
        arguments, options = plan.with_options(plan.kernel_args(call)[:18], None, seed, 10, None, "default")
        assert len(arguments) == (21 if case is problem else 18)
        assert case is SMALL or arguments[19].shape == (1,)
        plan.run(arguments, call.dt_softplus, False, None, None, options)
        prepared = plan.make(case, 2, -1)
        expected = call.clone()
        given = (*plan.kernel_args(call)[:18], None, seed, None)
        prepared.launch(*given)
        replayssm_cute.checkpointing_ssu(**expected.kwargs() | {"rand_seed": seed})
        assert torch.equal(call.state.nan_to_num(), expected.state.nan_to_num())
    assert {p.problem for p in plan._plans.values() if p} == {problem, SMALL}


def test_an_f32_state_ignores_the_seed() -> None:
    call = random_call(SMALL, 2, pnat=[7, 7])
    seeded = call.clone()
    replayssm_cute.checkpointing_ssu(**call.kwargs())
    replayssm_cute.checkpointing_ssu(**seeded.kwargs() | {"rand_seed": torch.tensor([3])})
    assert torch.equal(call.state.nan_to_num(), seeded.state.nan_to_num())


# What is given wrongly, the error, and words of its message in order.
FAULTS: tuple[tuple[dict[str, Any], str, Callable[[Call], Any], type[Exception], tuple[str, ...]], ...] = (
    ({"state_dtype": "i8"}, "state_scale", lambda c: None, ValueError, ("None with i8", "(slots, H, P) f32 scales")),
    ({"copy_dtype": "f8e4m3"}, "state_scale", lambda c: None, ValueError, ("None with f8e4m3", "f32 scales")),
    ({}, "state_scale", lambda c: torch.ones(c.state.shape[:3]), ValueError, ("a tensor with f32", "expected None")),
    ({"copy_dtype": "bf16"}, "state_scale", lambda c: torch.ones(c.state.shape[:3]), ValueError, ("with bf16", "None")),
    ({"state_dtype": "i8"}, "state_scale", lambda c: c.state_scale[:, :, :3], ValueError, ("shape", "(slots, H, P)")),  # type: ignore[index]
    ({"state_dtype": "i8"}, "state_scale", lambda c: c.state_scale.double(), TypeError, ("float64", "float32")),  # type: ignore[union-attr]
    ({"state_dtype": "i8"}, "state_scale", lambda c: 1.0, TypeError, ("float", "torch.Tensor")),
    (
        {"state_dtype": "i8"},
        "state_scale",
        lambda c: c.state_scale[:1, :1].expand(c.state_scale.shape),
        ValueError,
        ("stride 0", "positive"),
    ),  # type: ignore[index,union-attr]
    ({"copy_dtype": "bf16"}, "state_copy", lambda c: c.state_copy[:, :1], ValueError, ("shape", "(slots, H, P, N)")),  # type: ignore[index]
    ({"copy_dtype": "bf16"}, "state_copy", lambda c: c.state_copy.half(), TypeError, ("float16", "bfloat16")),  # type: ignore[union-attr]
    ({"state_dtype": "bf16"}, "state_copy", lambda c: c.state.clone(), ValueError, ("beside a bf16 state", "None")),
    ({"state_dtype": "bf16"}, "rand_seed", lambda c: 3, TypeError, ("int", "torch.Tensor")),
    (
        {"state_dtype": "bf16"},
        "rand_seed",
        lambda c: torch.zeros(2, dtype=torch.int64),
        ValueError,
        ("shape (2,)", "(1,)"),
    ),
    ({"state_dtype": "bf16"}, "rand_seed", lambda c: torch.zeros(1), TypeError, ("float32", "int64")),
    ({}, "rand_seed", lambda c: torch.zeros(1), TypeError, ("float32", "int64")),
    ({"state_dtype": "bf16"}, "philox_rounds", lambda c: 0, ValueError, ("got 0", "1..16")),
    ({}, "philox_rounds", lambda c: 2.0, TypeError, ("float", "1..16")),
    ({}, "precision", lambda c: "high", ValueError, ("'high'", "default", "highest")),
    ({}, "precision", lambda c: 1, TypeError, ("int", "default", "highest")),
    ({"state_dtype": "bf16"}, "precision", lambda c: "highest", ValueError, ("bf16", "only an f32 state")),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f[1]} {f[0]} {f[3].__name__}")
def test_faults_are_named_before_anything_is_written(fault: Any) -> None:
    changes, name, make, error, words = fault
    call = random_call(dataclasses.replace(SMALL, **changes), 2, pnat=[7, 7])
    before = bits_of(call)
    given = call.kwargs() | {name: make(call)}
    for run in (replayssm_cute.checkpointing_ssu, replayssm_cute.prepare):
        with pytest.raises(error) as caught:
            run(**given)
        message = str(caught.value)
        assert message.startswith(name + ":"), message
        at = 0
        for word in words:
            at = message.find(word, at)
            assert at >= 0, message
    assert all(torch.equal(before[n], after) for n, after in bits_of(call).items())


def test_calls_of_one_kind_share_a_plan_and_no_other(fake_compiler: Any, cpu_as_gpu: None) -> None:
    """Warm calls find their kernel; a call that differs in kind alone gets another."""
    plan.forget()
    every = (*KINDS, {}, {"precision": "highest"})
    problems = [dataclasses.replace(dataclasses.replace(SMALL, **c), ragged=False) for c in every]
    calls_ = [random_call(p, 3) for p in problems]
    for _ in range(2):
        for problem, call in zip(problems, calls_, strict=True):
            options = (call.philox_rounds, call.precision)
            arguments = plan.kernel_args(call)
            plain = problem in (SMALL,)
            plan.run(arguments, call.dt_softplus, False, None, None, plan.PLAIN if plain else options)
    made = [p for p in plan._plans.values() if p is not None]
    assert {p.problem for p in made} == set(problems) and len(made) == len(problems)


def test_configs_of_whole_rings_are_refused_by_name() -> None:
    problem = dataclasses.replace(SMALL, state_dtype="i8")
    reason = TileConfig(ring="whole").invalid_reason(problem, target.named("h200"))
    assert reason is not None and "8-bit" in reason
    assert TileConfig(ring="whole").is_valid(SMALL, target.named("h200"))


def test_written_names_what_there_is() -> None:
    assert random_call(SMALL, 1).written() == list(calls.WRITTEN)
    dual = random_call(dataclasses.replace(SMALL, copy_dtype="i8"), 1)
    assert dual.written() == [*calls.WRITTEN, "state_scale", "state_copy"]
