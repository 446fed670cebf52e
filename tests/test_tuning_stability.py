"""Repeated sweeps say how far they agree; many sweeps share one table file."""

from __future__ import annotations

import csv
import dataclasses
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from rank_sweep import Pretended
from replayssm_tuning import cli, on_device, progress
from replayssm_tuning.results import Candidate, CellResult, Results
from replayssm_tuning.stability import Stability
from replayssm_tuning.sweep import SweepError, _merge
from rich.console import Console
from tuning_fakes import BEST, PLAN, SLOW, Compiler, Device

from replayssm_cute import compiler, tables
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

SCRIPT = str(Path(__file__).with_name("rank_sweep.py"))
DEFAULT = TileConfig()


def repeat(*cells: dict[TileConfig, float], margin: float = 0.0) -> Results:
    """Results of one repeat: a cell for each dict of times, at batches 1, 2, ..."""
    manifest = tables.Manifest("NVIDIA H200", "sm_90a", 132, "measured", "k" * 64, "2026-01-01")
    problem = Problem(16, 64, 128, 2, 4, 16)
    found = tuple(
        CellResult("verify", problem, batch, 1000, 0.2, DEFAULT, tuple(Candidate(c, t) for c, t in times.items()))
        for batch, times in enumerate(cells, 1)
    )
    return Results("p", "P", "s", manifest, 4600.0, "m", margin, (), found)


def test_flips_and_regrets_are_those_of_the_times() -> None:
    steady = {DEFAULT: 10.0, BEST: 8.0}
    repeats = [
        repeat(steady, {DEFAULT: 10.0, BEST: 11.0, SLOW: 30.0}),
        repeat(steady, {DEFAULT: 10.0, BEST: 11.0}),
        repeat(steady, {DEFAULT: 12.0, BEST: 11.0}),
        repeat(steady, {DEFAULT: 10.5, BEST: 11.0}),
    ]
    found = Stability.of(repeats)
    same, flipping = found.cells
    assert (same.flip_rate, same.regrets) == (0.0, (0.0,) * 4)
    assert flipping.winners == tuple(c.label() for c in (DEFAULT, DEFAULT, BEST, DEFAULT))
    assert flipping.flip_rate == pytest.approx(3 / 6)
    # the third one chose BEST: 11 us in the others, where the default's median is 10
    assert flipping.regrets == pytest.approx((0.0, 0.0, 0.1, 0.0))
    assert found.summary() == (
        "4 repeats: two sweeps choose differently in 25.0% of cells on average (1 of 2 cells ever flip); regret of a "
        "winner at serving 1.25% on average, 10.00% at worst; 1 cells exceed 1%"
    )


def test_the_margin_keeps_a_default_from_flipping() -> None:
    near = [{DEFAULT: 10.0, BEST: 9.9}, {DEFAULT: 10.0, BEST: 10.1}]
    assert Stability.of([repeat(c) for c in near]).cells[0].flip_rate == 1.0
    kept = Stability.of([repeat(c, margin=0.02) for c in near]).cells[0]
    assert kept.flip_rate == 0.0
    assert kept.regrets == pytest.approx((0.0, 10.0 / 9.9 - 1))


def test_what_was_not_timed_has_no_regret() -> None:
    found = Stability.of([repeat({DEFAULT: 10.0, BEST: 9.0}), repeat({DEFAULT: 10.0}), repeat()])
    (cell,) = found.cells
    assert cell.regrets == (None, pytest.approx(10 / 9 - 1))  # nobody knows BEST's time in the second
    assert "11.11% on average, 11.11% at worst" in found.summary()
    with pytest.raises(ValueError, match="got 1, expected at least 2"):
        Stability.of([repeat({DEFAULT: 1.0})])
    assert "no cell was decided twice" in Stability.of([repeat(), repeat()]).summary()


class Noisy(Pretended):
    """A device on which the third seed sees another winner."""

    all_jobs: list[str]

    def __init__(self, make: object, args: tuple[int, dict[str, Any]], **more: object) -> None:
        super().__init__(make, args, **more)
        self.gain = -0.05 if args[1]["seed"] == 2 else 0.1

    def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Any:
        self.all_jobs.append(name)
        return Device.call(self, name, timeout_s=timeout_s, **kwargs)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.toml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiler, "compile_many", Compiler())
    monkeypatch.setattr(on_device, "Worker", Noisy)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    Noisy.all_jobs = []
    return tmp_path


@pytest.mark.fault(31)
def test_a_repeated_sweep_reports_flips_and_resumes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["sweep", "--plan", "small.toml", "--out", "out", "--repeat", "3", "--whole-grid"]
    assert cli.main(command) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "3 repeats: two sweeps choose differently in 66.7% of cells on average (4 of 4 cells ever flip)" in text
    assert Noisy.all_jobs.count("peers") == Noisy.all_jobs.count("floor") == 4  # in the first repeat alone
    stem = "nvidia-h200-sm_90a-measured"
    found = Stability.load(folder / "out" / f"{stem}.stability.json")
    assert {c.winners for c in found.cells} == {(BEST.label(), BEST.label(), DEFAULT.label())}
    # BEST serves best in the mean of a sweep at -10% and one at +5%; the default loses where both are at -10%
    lost = 1 / 0.9 - 1
    assert found.cells[0].regrets == pytest.approx((0.0, 0.0, lost))
    # the table is the first one's
    assert {
        c.config for cells in tables.read(folder / "out" / f"{stem}.table.json").entries.values() for c in cells
    } == {BEST}
    Noisy.all_jobs.clear()
    assert cli.main(command) == 0
    assert set(Noisy.all_jobs) == {"describe"}
    assert Stability.load(folder / "out" / f"{stem}.stability.json") == found

    assert cli.main(["report", "out"]) == 0
    page = (folder / "out" / "report.md").read_text()
    assert found.summary() in page
    assert f"| verify | 64 | 67% | 3.70% | 11.11% | 2x {BEST.label()}; 1x {DEFAULT.label()} |" in page
    with (folder / "out" / "plots" / f"{stem}-stability.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert [r["batch"] for r in rows] == ["1", "64"] * 2
    assert [float(r["worst_regret"]) for r in rows] == pytest.approx([lost] * 4, abs=1e-5)
    (folder / "out" / f"{stem}.stability.json").write_text("[]")
    assert cli.main(["report", "out"]) == 1
    assert f"{stem}.stability.json: no stability" in capsys.readouterr().err


def test_all_repeats_have_the_same_time_for_their_cells(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first one compiles: its winners would else come of fewer candidates, and a flip say nothing."""
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))

    class Slow(Compiler):
        def __call__(
            self, items: list[compiler.Item], workers: int, progress: Callable[[compiler.Done, int, int], None]
        ) -> list[compiler.Done]:
            def finished(done: compiler.Done, count: int, total: int) -> None:
                now[0] += 2.0
                progress(done, count, total)

            return super().__call__(items, workers, finished)

    class Timed(Pretended):
        timed: ClassVar[dict[int, int]] = {}

        def __init__(self, make: object, args: tuple[int, dict[str, Any]], **more: object) -> None:
            super().__init__(make, args, **more)
            self.seed = args[1]["seed"]

        def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Any:
            now[0] += 1.0 if name == "time" else 0.0
            self.timed[self.seed] = self.timed.get(self.seed, 0) + (name == "time")
            return super().call(name, timeout_s=timeout_s, **kwargs)

    monkeypatch.setattr(compiler, "compile_many", Slow())
    monkeypatch.setattr(on_device, "Worker", Timed)
    options = ["--repeat", "3", "--budget", "30s", "--no-peers"]
    assert cli.main(["sweep", "--plan", "small.toml", "--out", "out", *options]) == 0
    assert set(Timed.timed) == {0, 1, 2} and len(set(Timed.timed.values())) == 1, Timed.timed
    assert Timed.timed[0] > 10


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--repeat", "2", "--estimate"], "comes out the same every time"),
        (["--repeat", "0"], "--repeat: got 0"),
        (["--estimate", "--merge-into", "t.json"], "expected one: a table holds one GPU"),
        (["--state", "f32,f64"], "expected one or more of f32,bf16,f16"),
        (["--state", "bf16"], "the plan has states f32 and T 1, 4"),
        (["--tokens", "5"], "no workload is left"),
    ],
)
def test_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    try:
        code = cli.main(["sweep", "--plan", "small.toml", "--out", "out", *arguments])
    except SystemExit as e:  # argparse's own
        code = int(str(e.code))
    assert code == 2
    assert words in capsys.readouterr().err
    assert not (folder / "out").exists()


def test_four_sweeps_fill_one_table(folder: Path) -> None:
    """Four processes at once, each with a batch or a T of its own; a fifth then changes one cell alone."""

    def sweep(tokens: int, batch: int) -> subprocess.Popen[bytes]:
        options = ["--targets", "sm_90a", "--tokens", str(tokens), "--batches", str(batch), "--merge-into", "all.json"]
        command = [sys.executable, SCRIPT, "sweep", "--plan", "small.toml", "--out", f"o{tokens}-{batch}", *options]
        return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)

    running = [sweep(tokens, batch) for tokens in (1, 4) for batch in (2, 8)]
    assert [p.wait(timeout=60) for p in running] == [0] * 4
    merged = tables.read("all.json")
    assert {(p.tokens, c.batch) for p, cells in merged.entries.items() for c in cells} == {
        (1, 2),
        (1, 8),
        (4, 2),
        (4, 8),
    }
    for tokens, batch in ((1, 2), (1, 8), (4, 2), (4, 8)):
        own = tables.read(f"o{tokens}-{batch}/nvidia-h200-sm_90a-estimated.table.json")
        ((problem, (cell,)),) = own.entries.items()
        assert cell in merged.entries[problem]


def test_a_table_of_another_gpu_is_not_merged_over(folder: Path) -> None:
    other = repeat({DEFAULT: 2.0})
    foreign = dataclasses.replace(other, manifest=dataclasses.replace(other.manifest, gpu_name="NVIDIA B200"))
    path, quiet = folder / "shared.json", Console(quiet=True)
    tables.write(path, foreign.table())
    with pytest.raises(SweepError, match=r"holds NVIDIA B200 sm_90a measured, expected NVIDIA H200 sm_90a measured"):
        _merge(path, other.table(), quiet)
    assert tables.read(path) == foreign.table()
    path.write_text("{")  # damaged: nothing to lose
    _merge(path, other.table(), quiet)
    assert tables.read(path) == other.table()
