"""The Blackwell kernel in a sweep: its configs are candidates where a GPU decides, and a table may name them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from gpu_kernels import of_layers
from replayssm_tuning import candidates, fit, layer_bench, layer_search, on_device, plan, space, sweep
from replayssm_tuning.results import Results
from replayssm_tuning.worker import Answer
from rich.console import Console
from tuning_fakes import PLAN, POLICY, Compiler, Device

from replayssm_cute import compiler, fingerprint, tables
from replayssm_cute.config import TileConfig
from replayssm_cute.default_rule import default_config
from replayssm_cute.fused.chains import Overlap
from replayssm_cute.fused.recipes import LayerRecipe
from replayssm_cute.fused.shapes import StepShape
from replayssm_cute.problem import Problem
from replayssm_cute.sm100 import ARCHES, Sm100Config, default_sm100_configs
from replayssm_cute.target import named

B200 = named("b200")
SUPER = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
NARROW = dataclasses.replace(SUPER, heads=96, head_dim=80)


class OnB200(Device):
    """A B200 on which launch control with two turns is fastest."""

    def of(self, config: dict[str, Any], batch: int) -> float:
        return super().of(config, batch) * (0.5 if config.get("launch_control") and config["heads_per_cta"] == 4 else 1)

    def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Answer:
        answer = super().call(name, timeout_s=timeout_s, **kwargs)
        if name == "describe":
            assert answer.value is not None
            return Answer(True, {**answer.value, "target": dataclasses.asdict(B200)})
        return answer


@pytest.mark.parametrize("problem", [SUPER, NARROW], ids=lambda p: p.label())
@pytest.mark.parametrize("arch", ARCHES)
def test_candidates_of_either_way_to_the_next_work(problem: Problem, arch: str) -> None:
    target = named(arch)
    found = space.blackwell(problem, target)
    assert len(found) == len(set(found)) and all(c.is_valid(problem, target) for c in found)
    for control in (False, True):
        some = [c for c in found if c.launch_control == control]
        assert {c.turns for c in some} >= {1, 2, 4} and {c.tail_rows > 0 for c in some} == {False, True}
        assert {c.ring for c in some} == {"live", "whole"}
    assert set(default_sm100_configs(problem, target)) <= set(found)
    assert not any(c.launch_control for c in default_sm100_configs(problem, target)), "nobody has measured it"


def test_none_elsewhere() -> None:
    for arch in ("h200", "sm_120a"):
        assert space.blackwell(SUPER, named(arch)) == ()
    assert space.blackwell(dataclasses.replace(SUPER, precision="highest"), B200) == ()


def test_only_where_a_gpu_decides(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text(PLAN)
    workload = plan.load(str(tmp_path / "small.toml")).workloads[0]
    modelled = candidates.ranked(workload, B200, (1, 64))
    timed = candidates.ranked(workload, B200, (1, 64), timed=True)
    assert not any(isinstance(c, Sm100Config) for c in modelled)
    defaults = space.defaults(workload.problem, B200, [1, 64])
    unknown = space.blackwell(workload.problem, B200)
    levels = space.at_other_level(dict.fromkeys((*defaults, candidates.SPLIT)))
    assert timed[: len(defaults) + len(levels) + len(unknown)] == [*defaults, *levels, *unknown]
    assert [c for c in timed if not isinstance(c, Sm100Config) and c not in levels] == modelled


def test_a_level_is_the_other_one_of_ptxas() -> None:
    base = TileConfig(2, tail_rows=8)
    (other,) = space.at_other_level([base])
    assert other == dataclasses.replace(base, opt_level=2) and other.label() == "h2 s1 p1 live c1 t8 O2"
    assert space.at_other_level([other]) == [base]


def swept(folder: Path) -> tuple[Results, OnB200]:
    """A sweep, or what a journal knows of one."""
    (folder / "small.toml").write_text(PLAN)
    small, device = plan.load(str(folder / "small.toml")), OnB200()
    journal = sweep.Journal(folder / "journal.jsonl")
    context = sweep.Context(small, folder, journal, sweep.Budget(30.0), Console(quiet=True), workers=1)
    with journal:
        return on_device.Session(context, device, POLICY, 0).run(peers=False), device  # type: ignore[arg-type]


def test_a_sweep_times_them_and_its_table_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "compile_many", Compiler())
    results, _ = swept(tmp_path)
    path = tmp_path / "results.json"
    results.save(path)
    assert Results.load(path) == results
    for cell in results.cells:
        assert {c.config for c in cell.candidates} >= set(space.blackwell(cell.problem, B200))
    path = tmp_path / "t.json"
    tables.write(path, results.table())
    assert tables.read(path) == results.table()
    choice = tables.Tables.of(B200, [path]).choose(results.cells[0].problem, 64)
    assert isinstance(choice.config, Sm100Config) and choice.config.launch_control and choice.config.turns == 2
    assert "clc" in choice.config.label() and choice.source == "table"
    # a change of either kernel makes it stale
    now = fingerprint.kernels
    for group in ("step", "sm100"):
        monkeypatch.setattr(fingerprint, "kernels", lambda asked="step", g=group: now(asked) + "x" * (asked == g))
        assert "is stale" in (results.manifest.unusable_reason(B200) or "")
    monkeypatch.setattr(fingerprint, "kernels", now)
    again, device = swept(tmp_path)
    assert {name for name, _ in device.jobs} == {"describe"} and again.cells == results.cells, "the journal knows all"
    (timings, _) = fit.read([tmp_path / "journal.jsonl"], B200)
    assert timings and all(type(t.config) is TileConfig for t in timings), "the model is of the portable kernel"


def test_estimates_are_of_the_portable_kernel_alone() -> None:
    assert (
        tables.kernels_named("sm_100a", "estimated")
        == fingerprint.kernels()
        == tables.kernels_named("sm_90a", "measured")
    )
    assert tables.kernels_named("sm_100a", "measured") != fingerprint.kernels()


def test_a_layers_step_that_convolves_x_is_the_portable_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever tables name: the Blackwell kernel takes no conv."""
    problem = layer_bench.layer_problem(4, 16, "f32")
    own = Sm100Config.of(problem.step, launch_control=True)
    monkeypatch.setattr(tables, "choose", lambda *_: tables.Choice(own, "table", ""))
    monkeypatch.setattr(tables, "candidates", lambda *_: (own, TileConfig()))
    assert layer_search.step_config(problem, 4, B200) == default_config(problem.step, B200, 4)
    for made in (Overlap.ALL_X, Overlap.INNER_X):
        loaded = of_layers(B200, {"problem": problem, "batch": 4, "overlap": made})
        shapes = [r.shape for r in loaded if isinstance(r, LayerRecipe) and isinstance(r.shape, StepShape)]
        assert not any(isinstance(shape.config, Sm100Config) for shape in shapes), "the served one is not fused"
        assert any(isinstance(r, compiler.StepRecipe) and r.config == own for r in loaded)
    given = {"problem": problem, "batch": 4, "overlap": Overlap.ALL_X}
    monkeypatch.setattr(tables, "choose", lambda *_: tables.Choice(TileConfig(), "table", ""))
    loaded = of_layers(B200, given)
    shapes = [r.shape for r in loaded if isinstance(r, LayerRecipe) and isinstance(r.shape, StepShape)]
    assert {shape.config for shape in shapes} == {TileConfig()}, "of the tables' configs, those that can be fused"
