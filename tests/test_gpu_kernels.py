"""What GPU tests compile in parallel before they run is what they then ask for; and what `rehearsal` sees."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gpu_kernels
import pytest
import test_fused_early_gpu
import test_fused_gpu
import test_plan
import torch
from fused_calls import layer, random_layer_call
from replayssm_tuning import layer_search

from replayssm_cute import compiler, plan, tables, target
from replayssm_cute.compiler import Recipe, StepRecipe
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import launches
from replayssm_cute.fused.chains import Chain, ConvCut, NormCut, Overlap
from replayssm_cute.fused.problem import LayerCall, layer_problem
from replayssm_cute.fused.warmup import scratch_call
from replayssm_cute.problem import Problem

H200 = target.named("h200")
# It makes tensors on the device itself; its kernels are those of a call of three rows.
IN_GRAPHS = {"test_a_hundred_steps_of_random_acceptance_in_a_graph"}
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
    found = gpu_kernels.of_layers(H200, {"problem": problem, "batch": 3, "overlap": chain})
    assert set(found) == set(layer_search.recipes(problem, chain, 3))


def test_decode_step_tests_with_chains_of_their_own_compile_them_before() -> None:
    early = test_fused_early_gpu
    made = [{"problem": early.PROBLEM, "batch": b, "overlap": chain} for chain in early.CHAINS for b in (1, 40)]
    before = {r for chain in early.CHAINS for r in layer_search.recipes(early.PROBLEM, chain, 1)}
    assert set(gpu_kernels.of_layers(H200, *made)) == before


class Asked(Exception):
    """The end of a test that has asked for its kernels."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Recipe]]:
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


def named(test: Callable[..., None], **params: Any) -> set[Recipe]:
    """What a test's mark names, for some of its parameters."""
    (mark,) = [m for m in test.pytestmark if m.name == "kernels"]  # type: ignore[attr-defined]
    return {r for what in mark.args for r in gpu_kernels.recipes_of(what, H200, params)}


@pytest.mark.parametrize("name", [n for n in vars(test_fused_gpu) if n.startswith("test_") and n not in IN_GRAPHS])
def test_decode_step_tests_ask_for_what_they_name(name: str, asked: list[Recipe]) -> None:
    """Each body, with all its parameters, up to its launch: nothing that its mark does not name."""
    test = getattr(test_fused_gpu, name)
    for params in combinations(test):
        expected = named(test, **params)
        asked.clear()
        launches._kernels.clear()
        given = {"monkeypatch": pytest.MonkeyPatch()} if "monkeypatch" in inspect.signature(test).parameters else {}
        with pytest.raises(Asked):
            test(**params, **given)
        for patch in given.values():
            patch.undo()
        assert asked and set(asked) <= expected, params


def test_decode_step_tests_of_several_launches_name_them_all(asked: list[Recipe]) -> None:
    """Each chain of a test that tries some, in turn."""
    problem = test_fused_gpu.PROBLEMS[0]
    expected = named(test_fused_gpu.test_a_step_that_convolves_x_against_float64, problem=problem, batch=3)
    for chain in test_fused_gpu.with_x(problem, H200):
        with pytest.raises(Asked):
            test_fused_gpu.check_step(problem, 3, chain)
    assert set(asked) == expected


def test_calls_of_the_tests_are_of_the_problems_that_are_compiled() -> None:
    """Strided rows, odd batches and padding make no other problem."""
    small = layer(dataclasses.replace(STEP, heads=4, window=4), norm_groups=2)
    for wide, batch in ((0, 1), (8, 2), (16, 3)):
        call = random_layer_call(small, batch, padding=(1,) if batch > 1 else (), wide=wide)
        assert layer_problem(call) == small


def combinations(test: Callable[..., None]) -> Iterator[dict[str, Any]]:
    """Every set of parameters of a test."""
    axes = []
    for mark in getattr(test, "pytestmark", []):
        if mark.name == "parametrize":
            names = mark.args[0].split(",") if isinstance(mark.args[0], str) else mark.args[0]
            rows = [value if len(names) > 1 else (value,) for value in mark.args[1]]
            axes.append([dict(zip([n.strip() for n in names], row, strict=True)) for row in rows])
    for chosen in itertools.product(*axes):
        yield {name: value for part in chosen for name, value in part.items()}


# Files whose kernels a fixture of their own compiles in parallel, or whose tests compile in parallel themselves.
WITH_FIXTURES = {
    "test_step_gpu", "test_extremes", "test_property", "test_low_precision_gpu", "test_fused_early_gpu",
    "test_lane_copies", "test_tuning_bench", "test_tuning_layer_bench", "test_tuning_measure", "test_tuning_precision",
}  # fmt: skip
# Tests of kernels that are no recipes, or of none.
WITHOUT = {
    "test_gpu_standard_updates_are_right", "test_the_producer_copies_on_the_device"
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(Path(__file__).parent.glob("test_*.py")), ids=lambda p: p.stem)
def test_every_gpu_test_names_its_kernels(path: Path) -> None:
    """And what it names can run on the GPU that everything was measured on."""
    if "mark.gpu" not in path.read_text() or path.stem in WITH_FIXTURES or path.stem == Path(__file__).stem:
        return
    module = importlib.import_module(path.stem)
    whole = getattr(module, "pytestmark", [])
    whole = whole if isinstance(whole, list) else [whole]
    for name, test in vars(module).items():
        if not name.startswith("test_") or not callable(test):
            continue
        marks = [*whole, *getattr(test, "pytestmark", [])]
        if "gpu" not in {m.name for m in marks}:
            continue
        names = [what for m in marks if m.name == "kernels" for what in m.args]
        assert names or name in WITHOUT, name
        for params in combinations(test):
            for recipe in {r for what in names for r in gpu_kernels.recipes_of(what, H200, params)}:
                recipe.check(H200)


def test_what_needs_two_gpus_is_marked() -> None:
    """`pytest -m two_gpus` finds all of them; each is marked gpu too."""
    found = []
    for path in (*Path(__file__).parent.glob("test_*_gpu.py"), Path(test_plan.__file__)):
        module = importlib.import_module(path.stem)
        for name, test in vars(module).items():
            if not name.startswith("test_") or not callable(test):
                continue
            marks = {m.name for m in getattr(test, "pytestmark", [])}
            if "two_gpus" in marks:
                assert "gpu" in marks
                found.append(name)
            else:
                assert not {"cuda:1", '"cuda", 1'} & set(re.findall(r'cuda:1|"cuda", 1', inspect.getsource(test)))
    assert len(found) == 4


class Item:
    """A test as pytest selects it."""

    nodeid = "a test"

    def __init__(self, what: Any, *marks: str, **params: Any) -> None:
        self.what, self.marks, self.callspec = what, marks, SimpleNamespace(params=params)

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks

    def iter_markers(self, name: str) -> list[pytest.Mark]:
        return [pytest.mark.kernels.with_args(self.what).mark]


def test_what_selected_tests_name() -> None:
    """Those on a GPU that are not skipped; one whose mark fails costs itself."""
    config = TileConfig()
    items: list[Any] = [
        Item((STEP, config), "gpu"),
        Item(lambda where, heads: [(dataclasses.replace(STEP, heads=heads), config)], "gpu", heads=32, other=1),
        Item((dataclasses.replace(STEP, heads=48), config), "gpu", "skip"),
        Item((dataclasses.replace(STEP, heads=64), config)),
    ]
    assert gpu_kernels.named(items, H200) == [
        StepRecipe(STEP, config), StepRecipe(dataclasses.replace(STEP, heads=32), config)
    ]  # fmt: skip
    with pytest.warns(UserWarning, match="a test: what it names is not compiled before it"):
        assert gpu_kernels.named([Item(lambda where: 1 // 0, "gpu"), items[0]], H200) == [StepRecipe(STEP, config)]  # type: ignore[list-item]
