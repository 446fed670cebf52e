"""What GPU tests compile in parallel before they run is what they then ask for; and what `rehearsal` sees."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import gpu_kernels
import pytest
import test_fused_early_gpu
import test_fused_gpu
import torch
from fused_calls import copied, kwargs, layer, random_layer_call
from replayssm_tuning import layer_search

from replayssm_cute import compiler, plan, tables, target
from replayssm_cute.compiler import StepRecipe
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import launches
from replayssm_cute.fused.chains import Chain, ConvCut, NormCut, Overlap
from replayssm_cute.fused.problem import LayerCall, layer_problem
from replayssm_cute.fused.recipes import LayerRecipe
from replayssm_cute.fused.warmup import scratch_call
from replayssm_cute.problem import Problem

H200 = target.named("h200")
STEP = Problem(heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=16)


def test_a_rehearsal_sees_a_plans_kernels_and_leaves_nothing() -> None:
    with gpu_kernels.rehearsal(H200) as seen:
        made = plan.make(STEP, 300, 0)
        other = plan.make(STEP, 3, 0, TileConfig(heads_per_cta=2))
    assert made.choice is not None and other.choice is not None
    expected = {StepRecipe(STEP, c) for c in tables.candidates(STEP, H200)}
    expected |= {StepRecipe(STEP, p.choice.config) for p in (made, other) if p.choice is not None}
    assert set(seen) == expected and other.choice.config == TileConfig(heads_per_cta=2)
    assert not compiler._memory.keys() & {(recipe, H200.arch) for recipe in seen}
    assert not any((STEP, config, 0) in plan._touched for config in tables.candidates(STEP, H200))


@pytest.mark.parametrize("overlap", Overlap)
def test_a_rehearsal_sees_the_kernels_of_a_chain(overlap: Overlap) -> None:
    """Those that the tuner's own list of a chain's kernels has."""
    problem = layer(STEP, norm_groups=1)
    chain = Chain(overlap, TileConfig(heads_per_cta=2), ConvCut(4, 64), NormCut(4))
    found = gpu_kernels.of_layers([{"problem": problem, "batch": 3, "overlap": chain}], H200)
    assert set(found) == set(layer_search.recipes(problem, chain, 3))


def test_decode_step_tests_with_chains_of_their_own_compile_them_before() -> None:
    early = test_fused_early_gpu
    made = [{"problem": early.PROBLEM, "batch": b, "overlap": chain} for chain in early.CHAINS for b in (1, 40)]
    before = {r for chain in early.CHAINS for r in layer_search.recipes(early.PROBLEM, chain, 1)}
    assert set(gpu_kernels.of_layers(made, H200)) == before


class Asked(Exception):
    """The end of a test that has asked for its kernels."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The kernels that bodies of tests/test_fused_gpu.py ask for up to their first launch, on the CPU."""

    def launch(self: launches.LayerPlan, call: LayerCall) -> torch.Tensor:
        raise Asked

    def decode_step(config: TileConfig | None = None, **given: Any) -> None:
        launches.run(LayerCall(**given), False, config)

    module = test_fused_gpu
    monkeypatch.setattr(launches.LayerPlan, "launch", launch)
    monkeypatch.setattr(module.replayssm_cute, "decode_step", decode_step)
    monkeypatch.setattr(module, "copied", lambda call, *_, **__: call)  # to a GPU: they stay where they are
    monkeypatch.setattr(
        module, "random_layer_call", lambda problem, batch, **_: scratch_call(problem, torch.device("cpu"), batch)
    )
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(plan, "current_device", lambda: -1)  # where CPU tensors say that they are
    with gpu_kernels.rehearsal(H200) as seen:
        yield seen


def test_decode_step_tests_ask_for_what_was_compiled(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test that has parameters, to its launch; those of bits and cuts take the list's own items one by one."""
    module, where = test_fused_gpu, H200
    listed = gpu_kernels.of_layers(module.made(), where)
    asked.clear()
    launches._kernels.clear()
    for problem in module.PROBLEMS:
        for batch in module.BATCHES:
            with pytest.raises(Asked):
                module.check_step(problem, batch, None)
    for problem in module.PROBLEMS[::2]:
        for chain in module.with_x(problem):
            for batch in module.X_BATCHES:
                with pytest.raises(Asked):
                    module.check_step(problem, batch, chain)
    for body in (
        module.test_a_capture_before_a_first_call_is_refused_by_name,
        module.test_bad_input_is_refused_before_a_launch,
        *(lambda b=b: module.test_other_cuts_give_the_same_bits(b) for b in module.CUT_BATCHES),
    ):
        with pytest.raises(Asked):
            body()
    found = set(asked)
    assert len(found) > 100 and not found - set(listed), [r.label() for r in found - set(listed)][:4]
    rest = [*(layer_problem_of(p) for p in module.HUNDRED.values()), module.LARGE]
    others = [{"problem": p, "batch": 3} for p in rest[:-1]]
    others += [{"problem": module.LARGE, "batch": b, "overlap": o} for o in Overlap for b in module.OVERLAP_BATCHES]
    others += [{"problem": module.LARGE, "batch": b, "overlap": c} for c in module.cut() for b in module.CUT_BATCHES]
    others += [{"problem": module.LARGE, "batch": b, **how} for how in module.shaped() for b in module.CUT_BATCHES]
    assert found | set(gpu_kernels.of_layers(others, where)) == set(listed)


def layer_problem_of(problem: Any) -> Any:
    """The problem of a call on random tensors of it, as tests draw them."""
    return layer_problem(random_layer_call(problem, 3, wide=16))


def test_calls_of_the_tests_are_of_the_problems_that_were_compiled() -> None:
    """Strided rows, odd batches and padding make no other problem."""
    small = layer(dataclasses.replace(STEP, heads=4, window=4), norm_groups=2)
    for wide, batch in ((0, 1), (8, 2), (16, 3)):
        call = random_layer_call(small, batch, padding=(1,) if batch > 1 else (), wide=wide)
        assert layer_problem(copied(call)) == small and kwargs(call)["out"] is call.out


def test_every_listed_kernel_can_run_on_the_gpu_that_was_measured() -> None:
    for recipe in gpu_kernels.of_layers(test_fused_gpu.made(), H200):
        recipe.check(H200)
        assert isinstance(recipe, StepRecipe | LayerRecipe)
