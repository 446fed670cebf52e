"""How a winner depends on acceptance: raced on a device that prefers another config there, and by the cost model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from replayssm_tuning import mixes, on_device, plan, report, sweep
from replayssm_tuning.acceptance import stationary
from replayssm_tuning.results import Results
from replayssm_tuning.worker import Answer
from rich.console import Console
from tuning_fakes import BEST, PLAN, POLICY, Compiler, Device

from replayssm_cute import compiler
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

DEFAULT = TileConfig()


class Fickle(Device):
    """BEST is fastest at the plan's acceptance; the default is, by 25%, where every draft is accepted."""

    def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Answer:
        answer = super().call(name, timeout_s=timeout_s, **kwargs)
        if name == "race" and kwargs["lengths"][-1] == 1.0 and len(kwargs["lengths"]) > 1:
            for config, one in zip(kwargs["configs"], answer.value, strict=True):
                one["time_us"] *= 0.72 if TileConfig.from_json(config) == DEFAULT else 1.0
        return answer


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> plan.TuningPlan:
    (tmp_path / "small.toml").write_text(PLAN)
    monkeypatch.setattr(compiler, "compile_many", Compiler())
    return plan.load(str(tmp_path / "small.toml"))


def swept(small: plan.TuningPlan, out: Path, device: Device) -> Results:
    policy = dataclasses.replace(POLICY, prune=0.0)
    with sweep.Journal(out / "journal.jsonl") as journal:
        context = sweep.Context(small, out, journal, sweep.Budget(30), Console(quiet=True), workers=1)
        return on_device.Session(context, device, policy, 0).run(peers=True, mixes=True)  # type: ignore[arg-type]


def test_finalists_race_under_other_mixes(small: plan.TuningPlan, tmp_path: Path) -> None:
    device = Fickle()
    results = swept(small, tmp_path, device)
    races = [kwargs for name, kwargs in device.jobs if name == "race"]
    lengths = [tuple(kw["lengths"]) for kw in races if kw["problem"]["tokens"] == 4]
    assert lengths == [(0.25,) * 4, (1, 0, 0, 0), (0.25,) * 4, (0, 0, 0, 1)] * 2
    assert sum(kw["problem"]["tokens"] == 1 for kw in races) == 2  # one token has one mix

    table = mixes.measured(results)
    assert table["mix"].tolist() == ["all drafts rejected", "uniform", "all drafts accepted"] * 2
    assert set(table["config"]) == {BEST.label()}
    accepted = table[table["mix"] == "all drafts accepted"]
    assert set(accepted["best"]) == {DEFAULT.label()}
    assert accepted["over_best"].tolist() == pytest.approx([0.9 / 0.72] * 2)
    assert table["over_best"].tolist().count(1.0) == 4
    assert mixes.summary(table).startswith(
        "another config is faster in 2 of 6 pairs of a cell and a mix, by 25.0% at most (verify, batch 1, all drafts"
    )
    path = tmp_path / "x.results.json"
    results.save(path)
    assert Results.load(path) == results
    page = report.draw([path])[0][0].read_text()
    assert f"| verify | 64 | {BEST.label()} | 1.000x | 1.000x | 1.250x ({DEFAULT.label()}) |" in page
    assert "### Other acceptance lengths" in page
    assert "By the cost model" in page
    for name in ("mixes", "mixes-model"):
        assert (tmp_path / "plots" / f"x-{name}.csv").read_text().count("\n") == 7
    # winners are those of the plan's own acceptance, and a rerun knows all of it
    assert {c.decide(0.02).config for c in results.cells if c.decide(0.02)} == {BEST}  # type: ignore[union-attr]
    again = Fickle()
    assert swept(small, tmp_path, again).cells == results.cells
    assert [name for name, _ in again.jobs] == ["describe"]


def test_the_model_is_asked_about_its_own_pick(small: plan.TuningPlan, tmp_path: Path) -> None:
    results = swept(small, tmp_path, Device())
    table = mixes.modelled(results)
    assert len(table) == 6  # T = 4 alone
    for (_, batch), part in table.groupby(["problem", "batch"]):
        assert part["config"].nunique() == 1
        own = part[part["mix"] == "uniform"].iloc[0]  # the plan's
        assert (own["over_best"], own["best"]) == (1.0, own["config"]), batch
    assert (table["over_best"] >= 1).all()
    assert table["flush"].is_monotonic_increasing or table["flush"].nunique() == 3
    foreign = dataclasses.replace(results, manifest=dataclasses.replace(results.manifest, arch="sm_1"))
    assert mixes.modelled(foreign).empty


def test_the_ends_are_what_their_names_say() -> None:
    assert mixes.others(1) == {}
    ends = mixes.others(4)
    assert all(sum(lengths) == 1 for lengths in ends.values())
    rejected, accepted = (stationary(ends[f"all drafts {how}"], 16) for how in ("rejected", "accepted"))
    # one live row more a step, until the 13th does not leave room for four: 1..13, the last one flushes
    assert rejected.pnat[1:14] == pytest.approx([1 / 13] * 13)
    assert rejected.flush == pytest.approx(1 / 13)
    # four more a step: 4, 8, 12, 16, of which the last flushes
    assert [accepted.pnat[n] for n in (4, 8, 12, 16)] == pytest.approx([0.25] * 4)
    assert accepted.flush == pytest.approx(0.25)


def test_damaged_mixes_are_refused(small: plan.TuningPlan, tmp_path: Path) -> None:
    path = tmp_path / "x.results.json"
    results = swept(small, tmp_path, Device())
    for mix in (3, {}, {"name": "x", "lengths": ["a"], "configs": []}, {"name": 1, "lengths": [], "configs": []}):
        cells = (dataclasses.replace(results.cells[0], mixes=(mix,)),)  # type: ignore[arg-type]
        dataclasses.replace(results, cells=cells).save(path)
        with pytest.raises(ValueError, match="no results of a sweep"):
            Results.load(path)
    assert Problem.from_json(results.cells[0].problem.to_json()) == results.cells[0].problem
