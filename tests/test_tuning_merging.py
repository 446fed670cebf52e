"""Sweeps into one folder: cells of the same GPU, kernels and provenance join; others are replaced, and it is said."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import pytest
from replayssm_tuning import cost, plan, sweep
from replayssm_tuning.errors import SweepError
from replayssm_tuning.results import Candidate, Results
from rich.console import Console
from tuning_fakes import PLAN, Compiler

from replayssm_cute import compiler, fingerprint, tables
from replayssm_cute.config import TileConfig

STEM = "nvidia-h200-sm_90a-estimated"
ACCEPTANCES = PLAN + '[acceptance.many]\nmean = 3.5\nsource = "made up"\n[acceptance.few]\nmean = 1.5\nsource = "too"\n'


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    stand_in = Compiler()
    monkeypatch.setattr(compiler, "compile_many", stand_in)
    return stand_in


def estimate(folder: Path, batches: tuple[int, ...] = (1, 64), **more: Any) -> str:
    """Sweep into `folder`/out; returns what was printed."""
    path = folder / "small.toml"
    path.write_text(ACCEPTANCES)
    found = dataclasses.replace(plan.load(str(path), **{"acceptance": "many", **more}), batches=batches)
    said = io.StringIO()
    sweep.run(found, folder / "out", target_names=("sm_90a",), workers=1, console=Console(file=said, width=60))
    return said.getvalue()


def files(folder: Path) -> tuple[Results, tables.Table]:
    out = folder / "out"
    return Results.load(out / f"{STEM}.results.json"), tables.read(out / f"{STEM}.table.json")


def cells(found: Results | tables.Table) -> set[tuple[int, int]]:
    if isinstance(found, Results):
        return {(c.problem.tokens, c.batch) for c in found.cells}
    return {(p.tokens, c.batch) for p, cells in found.entries.items() for c in cells}


def test_a_narrower_sweep_keeps_the_cells_that_it_does_not_touch(fake: Compiler, tmp_path: Path) -> None:
    estimate(tmp_path)
    before, table_before = files(tmp_path)
    said = estimate(tmp_path, (8, 64), tokens=(4,))
    after, table = files(tmp_path)
    assert cells(after) == cells(table) == {(4, 1), (4, 8), (4, 64), (1, 1), (1, 64)}
    assert "3 of earlier sweeps" in said
    assert "replaced" not in said
    kept = [c for c in after.cells if c.batch == 1 or c.problem.tokens == 1]
    assert kept == [c for c in before.cells if c.batch == 1 or c.problem.tokens == 1]
    assert set(table.manifest.acceptance) == {"verify", "one token"}  # also of the workload that was left out
    assert table.manifest.policy["spent_s"] >= table_before.manifest.policy["spent_s"]
    assert sum("no GPU was timed" in n for n in after.notes) == 1  # what holds of both is said once
    assert any(n.startswith("3 of 5 cells are of an earlier sweep (plan small") for n in after.notes)
    # the same sweep again touches every cell it has, and says nothing of what it found
    again = estimate(tmp_path, (1, 8, 64))
    assert "earlier" not in again.replace("earlier sweeps, used", "")
    assert cells(files(tmp_path)[1]) == {(t, b) for t in (1, 4) for b in (1, 8, 64)}


def test_cells_of_another_acceptance_say_so(fake: Compiler, tmp_path: Path) -> None:
    estimate(tmp_path)
    estimate(tmp_path, (64,), acceptance="few")
    estimate(tmp_path, (64,), acceptance="few")
    results, table = files(tmp_path)
    labels = {(c.problem.tokens, c.batch): c.label for c in results.cells}
    assert labels == {
        (4, 1): "verify (many, mean 3.50)",
        (4, 64): "verify",
        (1, 1): "one token",
        (1, 64): "one token",
    }
    of = table.manifest.acceptance
    assert (of["verify"]["name"], of["verify (many, mean 3.50)"]["name"]) == ("few", "many")
    flush = {c.label: c.flush for c in results.cells}
    assert all(flush[label] == pytest.approx(entry["flush"], abs=1e-5) for label, entry in of.items())


@pytest.mark.parametrize("what", ["kernels", "cost model"])
def test_what_does_not_agree_is_replaced_and_it_is_said(
    fake: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    estimate(tmp_path)
    if what == "kernels":
        monkeypatch.setattr(fingerprint, "kernels", lambda group="step": "f" * 64)
    else:
        monkeypatch.setattr(cost, "version", lambda: "ffffffff")
    said = estimate(tmp_path, (8,))
    assert said.count("are replaced") == 1
    assert f"an earlier sweep are replaced: {what} " in said
    assert "now ffffffff" in said
    for found in files(tmp_path):
        assert cells(found) == {(4, 8), (1, 8)}


def test_damaged_files_are_replaced_and_it_is_said(fake: Compiler, tmp_path: Path) -> None:
    estimate(tmp_path)
    (tmp_path / "out" / f"{STEM}.results.json").write_text("{")
    said = estimate(tmp_path, (8,))
    assert f"{STEM}.results.json is replaced" in said
    results, table = files(tmp_path)
    assert cells(results) == {(4, 8), (1, 8)}
    assert cells(table) == {(4, 1), (4, 8), (4, 64), (1, 1), (1, 8), (1, 64)}  # the table was whole


def test_a_cell_that_a_sweep_has_no_time_of_stays_what_it_was(fake: Compiler, tmp_path: Path) -> None:
    estimate(tmp_path)
    results, table = files(tmp_path)
    failed = (Candidate(TileConfig(), None, stage="failed", reason="no"),)
    one_less = dataclasses.replace(
        results, cells=(dataclasses.replace(results.cells[0], candidates=failed), *results.cells[1:])
    )
    sweep.write(one_less, tmp_path / "out", Console(quiet=True))
    assert files(tmp_path)[0].cells == results.cells
    assert files(tmp_path)[1].entries == table.entries
    none = dataclasses.replace(results, cells=tuple(dataclasses.replace(c, candidates=failed) for c in results.cells))
    with pytest.raises(SweepError, match="no candidate survived"):
        sweep.write(none, tmp_path / "out", Console(quiet=True))
    assert files(tmp_path)[1].entries == table.entries
