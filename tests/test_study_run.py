"""A study's run: results on disk as they come, an end by the budget, kernels that do not compile."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch
from replayssm_tuning import precision, study_run
from replayssm_tuning.study_run import StudyRun

from replayssm_cute import compiler, target
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

PROBLEM = Problem(heads=8, head_dim=64, d_state=128, groups=2, tokens=4, window=16)
TARGET = target.named("sm_90a")


def run_of(folder: Path, budget: float = 1e9) -> StudyRun:
    return StudyRun(folder, "study", {"study": 1}, torch.device("cpu"), budget)


def frame(value: int) -> Callable[[], pd.DataFrame]:
    return lambda: pd.DataFrame({"value": [value]})


def manifest(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "study.json").read_text())
    return found


def test_results_are_on_disk_after_each_variant(tmp_path: Path) -> None:
    run = run_of(tmp_path)

    def second() -> pd.DataFrame:
        assert pd.read_csv(tmp_path / "study.csv")["value"].tolist() == [1]
        assert manifest(tmp_path)["missing"] == ["b"] and not manifest(tmp_path)["complete"]
        return frame(2)()

    assert run.run({"a": frame(1), "b": second})["value"].tolist() == [1, 2]
    assert run.finish() == 0
    found = manifest(tmp_path)
    assert found["complete"] and found["missing"] == [] and found["study"] == 1 and found["seconds"] >= 0


def test_no_variant_starts_after_the_budget(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_of(tmp_path)

    def last() -> pd.DataFrame:
        run.budget.end()
        return frame(1)()

    assert run.run({"a": last, "b": frame(2), "c": frame(3)})["value"].tolist() == [1]
    assert run.finish() == 1 and "missing: c: the budget ended" in capsys.readouterr().err
    assert manifest(tmp_path)["missing"] == ["b", "c"] and not manifest(tmp_path)["complete"]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that `compile_many` was asked for; those of 16 heads do not compile."""
    seen: list[str] = []

    def many(items: Any, progress: Callable[[compiler.Done, int, int], None]) -> list[compiler.Done]:
        items = list(items)
        found = []
        for number, item in enumerate(items, 1):
            seen.append(item[0].label())
            found.append(compiler.Done(item, "compiled", 0.0, error="no" if item[0].heads == 16 else None))
            progress(found[-1], number, len(items))
        return found

    monkeypatch.setattr(study_run.compiler, "compile_many", many)
    monkeypatch.setattr(study_run.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(study_run.target, "of_device", lambda index: TARGET)
    return seen


def test_a_kernel_that_does_not_compile_costs_its_variant(tmp_path: Path, compiled: list[str]) -> None:
    run = run_of(tmp_path)
    run.compile({"a": (PROBLEM, TileConfig()), "b": (replace(PROBLEM, heads=16), TileConfig())})
    assert run.run({"a": frame(1), "b": frame(2)})["value"].tolist() == [1]
    assert run.finish() == 1 and manifest(tmp_path)["failed"] == {"b": "no"} and len(compiled) == 2


def test_the_budget_ends_compilation(tmp_path: Path, compiled: list[str]) -> None:
    run = run_of(tmp_path)
    run.budget.end()
    run.compile({str(w): (replace(PROBLEM, window=w), TileConfig()) for w in (8, 16, 32)})
    assert len(compiled) == 1
    assert not len(run.run({"8": frame(1)})) and run.finish() == 1
    assert not (tmp_path / "study.csv").exists() and manifest(tmp_path)["missing"] == ["8"]


def test_an_earlier_runs_table_does_not_stay_beside_a_new_manifest(tmp_path: Path) -> None:
    (tmp_path / "study.csv").write_text("of another run\n")
    run = run_of(tmp_path)
    run.budget.end()
    run.run({"8": frame(1)})
    assert run.finish() == 1 and not (tmp_path / "study.csv").exists()


def test_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a study's command: a duration, refused by name if it is none; too short a one says what is missing."""
    with pytest.raises(SystemExit):
        precision.main(["--budget", "soon"])
    assert "--budget: got 'soon', expected a positive duration" in capsys.readouterr().err
    arguments = ["--tokens", "16", "--heads", "2", "--windows", "8", "--states", "f32", "--out", str(tmp_path)]
    assert precision.main([*arguments, "--budget", "0.000001s"]) == 1
    assert "missing: f32, W 8: the budget ended" in capsys.readouterr().err
    assert precision.main([*arguments, "--budget", "2m"]) == 0
