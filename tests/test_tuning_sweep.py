"""Sweeps end to end with stand-ins for the compiler and the device: decisions, resume, tables, reports."""

from __future__ import annotations

import csv
import dataclasses
import hashlib
import io
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replayssm_tuning import candidates, cli, cost, on_device, plan, report, sweep
from replayssm_tuning.acceptance import stationary
from replayssm_tuning.plots import frame, provenance
from replayssm_tuning.policy import Policy
from replayssm_tuning.results import Candidate, CellResult, Results
from replayssm_tuning.worker import Answer
from rich.console import Console
from tuning_fakes import BEST, CRASHING, PLAN, POLICY, SLOW, WRONG, Compiler, Device

from replayssm_cute import compiler, fingerprint, tables
from replayssm_cute import target as targets
from replayssm_cute.config import TileConfig
from replayssm_cute.default_rule import default_config
from replayssm_cute.problem import Problem
from replayssm_cute.resources import Resources


@pytest.fixture
def small(tmp_path: Path) -> plan.TuningPlan:
    (tmp_path / "small.toml").write_text(PLAN)
    return plan.load(str(tmp_path / "small.toml"))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    stand_in = Compiler()
    monkeypatch.setattr(compiler, "compile_many", stand_in)
    return stand_in


def estimate(small: plan.TuningPlan, out: Path, **more: Any) -> list[Path]:
    return sweep.run(small, out, workers=1, console=Console(quiet=True), **more)


# ---------------------------------------------------------------------------------------------------
# Without a GPU
# ---------------------------------------------------------------------------------------------------


def test_an_estimate_makes_tables_for_the_run_time(small: plan.TuningPlan, fake: Compiler, tmp_path: Path) -> None:
    paths = estimate(small, tmp_path / "out")
    assert [p.name for p in paths] == [
        "nvidia-h200-sm_90a-estimated.table.json",
        "nvidia-rtx-pro-6000-blackwell-sm_120a-estimated.table.json",
    ]
    for path, name in zip(paths, ("sm_90a", "sm_120a"), strict=True):
        target = targets.named(name)
        table = tables.read(path)
        assert table.manifest.provenance == "estimated"
        model = hashlib.sha256(cost.DATA.read_bytes()).hexdigest()[:8]
        assert table.manifest.policy["cost_model"] == model
        line = provenance(Results.load(path.with_name(path.name.replace(".table.", ".results."))))
        assert f"by the cost model {model}, not measured" in line
        assert table.manifest.unusable_reason(target) is None
        assert set(table.entries) == {w.problem for w in small.workloads}
        looked_up = tables.Tables.of(target, [path])
        for workload in small.workloads:
            for batch in small.batches:
                choice = looked_up.choose(workload.problem, batch)
                assert (choice.source, choice.provenance) == ("table", "estimated")
                assert choice.config.is_valid(workload.problem, target)
                assert choice.cell is not None
                assert choice.cell.time_us <= (choice.cell.default_us or 0)
        flush = table.manifest.acceptance["verify"]["flush"]
        assert flush == pytest.approx(small.workloads[0].mix.flush, abs=1e-5)


@pytest.mark.fault(35)
def test_the_budget_ends_an_estimate_early(small: plan.TuningPlan, fake: Compiler, tmp_path: Path) -> None:
    fake.seconds = 0.05
    start = time.monotonic()
    estimate(small, tmp_path, budget_s=7.0)  # one second of compiling, the rest is kept for writing
    assert time.monotonic() - start < 6
    assert 5 < len(fake.asked) < 40
    # every workload and target had its default first
    first = {(p, t) for p, c, t in fake.asked[:8] if c == default_config(p, t, 1)}
    assert len(first) == 4
    results = Results.load(tmp_path / "nvidia-h200-sm_90a-estimated.results.json")
    assert any("reached" in note for note in results.notes)
    assert len(results.cells) == 4


def test_an_estimate_resumes_and_keeps_failures(small: plan.TuningPlan, fake: Compiler, tmp_path: Path) -> None:
    broken = TileConfig(2, 2, 2)
    fake.broken = {broken}
    estimate(small, tmp_path, target_names=("sm_90a",))
    asked = len(fake.asked)
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines()
    assert len(lines) == asked
    # a kill in the middle of a line, and three results less
    journal.write_text("\n".join(lines[:-3]) + "\n" + lines[-3][:50])
    estimate(small, tmp_path, target_names=("sm_90a",))
    assert len(fake.asked) == asked + 3
    results = Results.load(tmp_path / "nvidia-h200-sm_90a-estimated.results.json")
    failed = [c for cell in results.cells for c in cell.candidates if c.stage == "failed"]
    assert {c.config for c in failed} == {broken}
    assert failed[0].reason == "the compiler process died"
    fake.broken = set()
    estimate(small, tmp_path, target_names=("sm_90a",), retry=True)
    assert len(fake.asked) == asked + 3 + len(small.workloads)


def test_other_kernels_make_old_results_worthless(
    small: plan.TuningPlan, fake: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimate(small, tmp_path, target_names=("sm_90a",))
    asked = len(fake.asked)
    monkeypatch.setattr(fingerprint, "kernels", lambda group="step": "f" * 64)
    estimate(small, tmp_path, target_names=("sm_90a",))
    assert len(fake.asked) == 2 * asked


def test_a_target_that_is_named_twice_is_done_once(small: plan.TuningPlan, fake: Compiler, tmp_path: Path) -> None:
    paths = estimate(small, tmp_path, target_names=("h200", "sm_90a", "h100"))
    assert [p.name for p in paths] == [
        "nvidia-h200-sm_90a-estimated.table.json",
        "nvidia-h100-80gb-hbm3-sm_90a-estimated.table.json",
    ]
    assert len(fake.asked) == len(set(fake.asked))


def test_a_target_that_the_budget_does_not_reach_says_so(
    small: plan.TuningPlan, fake: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep.Budget, "left", property(lambda _: 0.0 if fake.asked else 30.0))  # one compilation
    with pytest.raises(sweep.SweepError) as error:
        estimate(small, tmp_path, target_names=("sm_120a", "sm_90a"), budget_s=6.1)
    assert "RTX PRO 6000" not in str(error.value)
    assert "NVIDIA H200: the budget of 6.1 s ended before any of its configs was reached" in str(error.value)
    assert "survived" not in str(error.value)
    # the other one is not lost, and nothing empty is left behind
    assert [p.name for p in tmp_path.glob("*.table.json")] == [
        "nvidia-rtx-pro-6000-blackwell-sm_120a-estimated.table.json"
    ]
    assert len(list(tmp_path.glob("*.results.json"))) == 1


def test_damaged_lines_of_a_journal_are_named_once(small: plan.TuningPlan, fake: Compiler, tmp_path: Path) -> None:
    estimate(small, tmp_path, target_names=("sm_90a",))
    journal = tmp_path / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    journal.write_text("".join([*lines[:6], "nonsense\n", *lines[7:]]))
    said = io.StringIO()
    sweep.run(small, tmp_path, workers=1, target_names=("sm_90a",), console=Console(file=said, width=40))
    assert [line for line in said.getvalue().splitlines() if "left out" in line] == [
        "journal.jsonl: line 7 is damaged and left out"
    ]
    assert "kill" not in said.getvalue()
    assert str(tmp_path / "nvidia-h200-sm_90a-estimated.table.json") in said.getvalue()  # not folded


def test_nothing_compiled_is_an_error(small: plan.TuningPlan, fake: Compiler, tmp_path: Path) -> None:
    class All(set):
        def __contains__(self, _: object) -> bool:
            return True

    fake.broken = All()
    with pytest.raises(sweep.SweepError, match="the compiler process died"):
        estimate(small, tmp_path)
    assert not list(tmp_path.glob("*.table.json"))


# ---------------------------------------------------------------------------------------------------
# On a device
# ---------------------------------------------------------------------------------------------------


EVERYTHING = dataclasses.replace(POLICY, prune=0.0)  # what the fake device thinks fast, the cost model need not


def measured(
    small: plan.TuningPlan, out: Path, device: Device, policy: Policy = EVERYTHING, seconds: float = 30.0, **more: Any
) -> Results:
    journal = sweep.Journal(out / "journal.jsonl")
    console = Console(quiet=True)
    context = sweep.Context(small, out, journal, sweep.Budget(seconds), console, workers=1, **more)
    with journal:
        return on_device.Session(context, device, policy, 0).run(peers=True)  # type: ignore[arg-type]


def test_ragged_rows_are_timed_with_their_tokens(fake: Compiler, tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        PLAN.replace("[[workload]]", "[rows.short]\nhistogram = [60, 40, 0, 0]\n[[workload]]", 1).replace(
            'label = "verify"', 'label = "verify"\nragged = true\nrows = "short"'
        )
    )
    loaded, device = plan.load(str(path)), Device()
    results = measured(loaded, tmp_path, device)
    assert [w.problem.ragged for w in loaded.workloads] == [True, False]
    named = 0
    for name, kwargs in device.jobs:
        if "lengths" in kwargs:
            assert kwargs.get("tokens") == ([0.6, 0.4, 0.0, 0.0] if kwargs["problem"]["ragged"] else None), name
            named += kwargs["problem"]["ragged"]
    assert named > 20
    load = results.manifest.acceptance["verify"]
    assert (load["rows"], load["tokens"]) == ("short", [0.6, 0.4, 0.0, 0.0])
    assert "tokens" not in results.manifest.acceptance["one token"]
    folder = tmp_path / "out"
    folder.mkdir()
    sweep.write(results, folder, Console(quiet=True))
    (page, _), errors = report.draw(sorted(folder.glob("*.results.json")))
    assert not errors
    assert "Ragged rows 'short': 1..4 new tokens at 60.0, 40.0, 0.0, 0.0%." in page.read_text()
    again = Device()
    assert measured(loaded, tmp_path, again).cells == results.cells
    assert [name for name, _ in again.jobs] == ["describe"]


def test_a_measured_sweep_decides_and_records(small: plan.TuningPlan, fake: Compiler, tmp_path: Path) -> None:
    device = Device()
    results = measured(small, tmp_path, device)
    path = sweep.write(results, tmp_path, Console(quiet=True))
    assert path.name == "nvidia-h200-sm_90a-measured.table.json"
    table = tables.read(path)
    assert (table.manifest.provenance, table.manifest.driver) == ("measured", "580.1")
    assert table.manifest.versions["flashinfer"] == "0.7.4"
    assert table.manifest.policy["replays"] == POLICY.replays
    cell = table.entries[small.workloads[0].problem][1]
    assert (cell.batch, cell.config) == (64, BEST)
    assert cell.time_us == pytest.approx(36 * 0.9)
    assert cell.default_us == pytest.approx(36)
    assert cell.runner_up == TileConfig()
    assert cell.margin == pytest.approx(1 / 0.9 - 1)
    assert cell.gb_s == pytest.approx(64e6 / cell.time_us / 1e3)
    assert cell.limit_fraction == pytest.approx(cell.gb_s / 4600)  # the catalogue's measured limit is the higher one
    assert cell.peers == {"flashinfer": 40.0, "flashinfer default": 50.0}
    # the failing ones cost themselves only, and say why
    loaded = Results.load(tmp_path / "nvidia-h200-sm_90a-measured.results.json")
    assert loaded == results
    failed = {c.config: c.reason for c in loaded.cells[0].candidates if c.stage == "failed"}
    assert set(failed) == {WRONG, CRASHING}
    assert "wrong numbers" in failed[WRONG]
    assert "SIGSEGV" in failed[CRASHING]
    # no config is timed before its numbers were checked, and each is checked once a problem
    checked: set[str] = set()
    for name, kwargs in device.jobs:
        key = json.dumps([kwargs.get("problem"), kwargs.get("config")])
        if name == "check":
            assert key not in checked
            checked.add(key)
        elif name == "time":
            assert key in checked
            assert TileConfig.from_json(kwargs["config"]) != WRONG


@pytest.mark.fault(32)
@pytest.mark.parametrize(("gain", "winner"), [(0.004, TileConfig()), (0.01, BEST), (-0.2, TileConfig())])
def test_the_default_stays_unless_beaten_by_the_margin(
    small: plan.TuningPlan, fake: Compiler, tmp_path: Path, gain: float, winner: TileConfig
) -> None:
    device = Device()
    device.gain = gain
    table = measured(small, tmp_path, device).table()
    for cells in table.entries.values():
        for cell in cells:
            assert cell.config == winner
            assert cell.margin is not None
            assert cell.margin >= 0


@pytest.mark.fault(35)
def test_a_measured_sweep_resumes_without_the_device(small: plan.TuningPlan, fake: Compiler, tmp_path: Path) -> None:
    first = measured(small, tmp_path, Device())
    again = Device()
    second = measured(small, tmp_path, again)
    assert [name for name, _ in again.jobs] == ["describe"]
    assert second.cells == first.cells


def fields(device: Device, kind: str) -> list[list[TileConfig]]:
    """The configs of each heat or race."""
    return [[TileConfig.from_json(c) for c in kwargs["configs"]] for name, kwargs in device.jobs if name == kind]


@pytest.mark.fault(31, 32)
def test_the_race_is_among_the_close_ones_of_the_heat_and_the_default(
    small: plan.TuningPlan, fake: Compiler, tmp_path: Path
) -> None:
    device = Device()
    results = measured(small, tmp_path, device)
    heats, races = fields(device, "heat"), fields(device, "race")
    assert len(heats) == len(races) == 4
    assert all(len(field) == POLICY.heat_field and {BEST, TileConfig()} <= set(field) for field in heats)
    assert all(set(field) == {BEST, TileConfig()} for field in races)
    for cell in results.cells:
        stages = Counter(c.stage for c in cell.candidates)
        assert (stages["raced"], stages["heat"]) == (2, POLICY.heat_field - 2)
        assert stages["first"] > 50


class Drifting(Device):
    """Single timings are off by up to 6% either way, and slower as time goes by; interleaved ones by 0.1%."""

    def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Answer:
        answer = super().call(name, timeout_s=timeout_s, **kwargs)
        random = np.random.default_rng(len(self.jobs))
        if name == "time" and answer.ok:
            answer.value["time_us"] *= random.uniform(0.94, 1.06) * (1 + len(self.jobs) / 20_000)
        if name in ("heat", "race"):
            for one in answer.value:
                one["time_us"] *= random.uniform(0.999, 1.001)
        return answer

    def of(self, config: dict[str, Any], batch: int) -> float:
        """Many configs lie within a few percent of each other, as on a GPU."""
        rank = int(hashlib.sha256(json.dumps(config).encode()).hexdigest()[:6], 16) / 0xFFFFFF
        return (4 + batch / 2) * (1 + rank)


def test_the_fastest_wins_although_first_timings_are_noisy(
    small: plan.TuningPlan, fake: Compiler, tmp_path: Path
) -> None:
    device = Drifting()
    results = measured(small, tmp_path, device)
    assert len(results.cells) == 4
    for cell in results.cells:
        true = {c.config: device.of(c.config.to_json(), cell.batch) for c in cell.candidates if c.stage != "failed"}
        screened = min((c for c in cell.candidates if c.stage == "first"), key=lambda c: true[c.config])
        winner = cell.decide(results.margin)
        assert winner is not None
        fastest = min(true.values())
        assert true[winner.config] <= fastest * 1.002, "interleaved ones tell 0.2% apart"
        assert fastest < true[screened.config]


@pytest.mark.fault(36)
def test_a_heat_that_crashes_leaves_the_race(small: plan.TuningPlan, fake: Compiler, tmp_path: Path) -> None:
    class Hot(Device):
        def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Answer:
            answer = super().call(name, timeout_s=timeout_s, **kwargs)
            return Answer(False, None, "crash", "the process died of SIGBUS") if name == "heat" else answer

    device = Hot()
    results = measured(small, tmp_path, device)
    assert [len(field) for field in fields(device, "race")] == [POLICY.race_field] * 4
    assert "batch 64: the heat failed: the process died of SIGBUS" in results.notes
    assert all((winner := c.decide(0.02)) is not None and winner.config == BEST for c in results.cells)


def test_what_the_model_thinks_slow_is_left_out_unless_the_whole_grid_is_asked_for(
    small: plan.TuningPlan, fake: Compiler, tmp_path: Path
) -> None:
    whole, some = Device(), Device()
    everything = measured(small, tmp_path / "whole", whole)
    results = measured(small, tmp_path / "some", some, POLICY)
    left_out, target = 0, targets.named("h200")
    for cell, full in zip(results.cells, everything.cells, strict=True):
        mix = stationary(results.manifest.acceptance[cell.label]["lengths"], cell.problem.window)
        modelled = {}
        for config in {c.config for c in full.candidates}:
            known = Resources(
                "k", 96 if config.heads_per_cta == 1 else 128, 0, 0, config.shared_bytes(cell.problem), 128, 1
            )
            modelled[config] = cost.estimate(cell.problem, config, target, cell.batch, mix, known).time_us
        tried = {c.config for c in cell.candidates}
        fastest = min(modelled[c] for c in tried)
        assert fastest == min(modelled.values())
        assert all(modelled[c] <= POLICY.prune * fastest for c in tried - {cell.default})
        workload = next(w for w in small.workloads if w.problem == cell.problem)
        compiled = candidates.ranked(workload, target, small.batches, within=POLICY.prune)
        assert all(c not in compiled or modelled[c] > POLICY.prune * fastest for c in modelled.keys() - tried)
        left_out += len(full.candidates) - len(tried)
        assert cell.space == full.space == len(full.candidates)
    assert 0 < left_out < 0.7 * sum(len(cell.candidates) for cell in everything.cells)
    assert any(
        note.startswith(f"{left_out} times (a config in a cell) were left out as slow") for note in results.notes
    )
    assert not any("left out as slow" in note for note in everything.notes)


def test_a_spent_budget_leaves_cells_out_and_says_so(
    small: plan.TuningPlan, fake: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Ending(Device):
        def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Answer:
            if name == "time" and kwargs["batch"] == 64:
                monkeypatch.setattr(sweep.Budget, "left", property(lambda _: 0.0))
            return super().call(name, timeout_s=timeout_s, **kwargs)

    results = measured(small, tmp_path, Ending())
    assert [(c.label, c.batch) for c in results.cells] == [("verify", 1), ("verify", 64)]
    assert any("2 of 4 cells have no time" in note for note in results.notes)


def test_a_device_that_fails_is_an_error(small: plan.TuningPlan, fake: Compiler, tmp_path: Path) -> None:
    class Dead(Device):
        def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Answer:
            return Answer(False, None, "error", "RuntimeError: no CUDA-capable device is detected")

    with pytest.raises(sweep.SweepError, match="no CUDA-capable device"):
        measured(small, tmp_path, Dead())


# ---------------------------------------------------------------------------------------------------
# Decisions and reports
# ---------------------------------------------------------------------------------------------------


def cell_of(*times: tuple[TileConfig, float | None, str]) -> CellResult:
    candidates = tuple(Candidate(c, t, stage=s) for c, t, s in times)
    problem = Problem(16, 64, 128, 2, 4, 16)
    return CellResult("verify", problem, 4, 1_000_000, 0.2, TileConfig(), candidates)


def test_only_raced_times_decide_where_there_was_a_race() -> None:
    cell = cell_of((TileConfig(), 10.0, "raced"), (BEST, 9.0, "raced"), (SLOW, 8.0, "first"), (WRONG, None, "failed"))
    winner = cell.decide(0.02)
    assert winner is not None
    assert winner.config == BEST


def test_without_a_default_the_fastest_wins_and_without_times_nobody() -> None:
    winner = cell_of((BEST, 9.0, "first"), (TileConfig(), None, "failed")).decide(0.5)
    assert winner is not None
    assert winner.config == BEST
    assert cell_of((BEST, None, "failed")).decide(0.02) is None


def test_a_report_has_every_number_beside_its_plot(small: plan.TuningPlan, fake: Compiler, tmp_path: Path) -> None:
    device = Device()
    device.peer_us = 30.0  # faster than the winner at batch 64
    sweep.write(measured(small, tmp_path, device), tmp_path, Console(quiet=True))
    estimate(small, tmp_path, target_names=("sm_100a",))
    assert cli.main(["report", str(tmp_path)]) == 0
    stem = "nvidia-h200-sm_90a-measured"
    for kind in ("time", "bandwidth", "speedup", "winners", "configs"):
        png = tmp_path / "plots" / f"{stem}-{kind}.png"
        assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        with png.with_suffix(".csv").open() as f:
            rows = list(csv.DictReader(f))
        assert rows
        assert {r["batch"] for r in rows} == {"1", "64"}
    with (tmp_path / "plots" / f"{stem}-time.csv").open() as f:
        row = next(r for r in csv.DictReader(f) if r["batch"] == "64" and r["workload"] == "verify")
    assert float(row["time_us"]) == pytest.approx(32.4)
    assert float(row["flashinfer_us"]) == pytest.approx(30)
    with (tmp_path / "plots" / f"{stem}-model.csv").open() as f:
        assert {float(r["regret"]) >= 0 for r in csv.DictReader(f)} == {True}
    text = (tmp_path / "report.md").read_text()
    assert "**measured**" in text
    assert "**estimated**" in text
    assert text.split("\n\n")[1].startswith("**A PEER IS FASTER in 2 cell(s) on NVIDIA H200:** ")  # above all else
    assert "flashinfer at verify, batch 64 (30.0 µs against 32.4)" in text
    assert fingerprint.kernels()[:12] in text
    assert "NVIDIA H200" in text
    for line in text.splitlines():
        if line.startswith("!["):
            assert (tmp_path / line.split("](")[1].rstrip(")")).is_file()
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 20  # two GPUs, five plots, on light and dark paper
    assert "://" not in page  # self-contained


def test_numbers_of_a_frame_agree_with_the_table(small: plan.TuningPlan, fake: Compiler, tmp_path: Path) -> None:
    results = measured(small, tmp_path, Device())
    table = results.table()
    shown = frame(results)
    assert len(shown) == 4
    for row in shown.itertuples():
        problem = next(w.problem for w in small.workloads if w.label == row.workload)
        cell = next(c for c in table.entries[problem] if c.batch == row.batch)
        assert (row.config, row.time_us, row.gb_s) == (cell.config.label(), cell.time_us, pytest.approx(cell.gb_s))
        assert row.speedup_over_default == pytest.approx((cell.default_us or 0) / cell.time_us)


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------


def test_the_command_estimates_where_there_is_no_gpu(
    small: plan.TuningPlan,
    fake: Compiler,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["sweep", "--plan", "small.toml", "--workers", "1", "--batches", "2,8"]) == 0
    out = capsys.readouterr().out
    assert "no CUDA GPU found" in out
    made = tmp_path / "reports" / "tune" / "small"
    table = tables.read(made / "nvidia-h200-sm_90a-estimated.table.json")
    assert [c.batch for c in table.entries[small.workloads[0].problem]] == [2, 8]
    assert cli.main(["report"]) == 0
    assert (made / "report.md").is_file()


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["sweep", "--plan", "none.toml"], 2, "no plan"),
        (["sweep", "--plan", "small.toml", "--acceptance", "x"], 2, "unknown"),
        (["sweep", "--plan", "small.toml", "--workers", "0"], 2, "--workers"),
        (["sweep", "--plan", "small.toml", "--targets", "sm_1"], 2, "unknown target 'sm_1'"),
        (["sweep", "--plan", "small.toml", "--budget", "soon"], 2, "duration"),
        (["sweep", "--plan", "small.toml", "--tp", "3"], 2, "tp"),
        (["sweep"], 2, "--plan"),
        (["report", "nowhere"], 1, "nowhere"),
        (["report"], 1, "run a sweep first"),
        (["explain-plan", "--plan", "small.toml"], 0, ""),
        (["list"], 0, ""),
    ],
)
def test_exit_codes_and_messages(
    small: plan.TuningPlan,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        found = cli.main(arguments)
    except SystemExit as e:  # argparse's own
        found = int(str(e.code))
    assert found == code
    assert words in capsys.readouterr().err


def test_damaged_results_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"x{sweep.RESULTS_SUFFIX}"
    path.write_text('{"cells": 3')
    assert cli.main(["report", str(tmp_path)]) == 1
    assert path.name in capsys.readouterr().err


@pytest.mark.parametrize("peers", [[{}], [{"peer": "p", "time_us": 1.0}], [3], ["p"]])
def test_results_with_peers_of_another_layout_are_one_line(
    small: plan.TuningPlan, fake: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str], peers: list[Any]
) -> None:
    sweep.run(small, tmp_path, target_names=("sm_90a",), workers=1, console=Console(quiet=True))
    (path,) = tmp_path.glob(f"*{sweep.RESULTS_SUFFIX}")
    data = json.loads(path.read_text())
    data["cells"][0]["peers"] = [*peers, {"peer": "p", "time_us": 2.0, "default": True}]
    path.write_text(json.dumps(data))
    assert cli.main(["report", str(path)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {path}: no results of a sweep")


# ---------------------------------------------------------------------------------------------------
# Journals that are damaged, or made up
# ---------------------------------------------------------------------------------------------------

HOSTILE: list[Any] = [
    None, 5, "x", [], {}, {"value": None}, {"value": 5}, {"value": {}}, {"value": [1, 2]},
    {"value": {"time_us": "1"}}, {"value": {"time_us": -1.0, "spread": 0, "bytes": 1, "flush": 0}},
    {"value": {"time_us": 0, "spread": 0, "bytes": 1, "flush": 0}}, {"failed": 3}, {"failed": {}, "reason": "x"},
    {"failed": "crash", "reason": 7}, {"registers": -1}, {"registers": 96, "shared_bytes": "many", "stack_bytes": 0},
    {"value": {"read_gbs": 0, "method": "m"}}, {"value": [{"peer": 1}]}, {"value": [{"peer": "p"}] * 3},
]  # fmt: skip


@pytest.mark.parametrize("hostile", HOSTILE, ids=str)
def test_a_journal_with_made_up_results_changes_nothing(
    small: plan.TuningPlan, fake: Compiler, tmp_path: Path, hostile: Any
) -> None:
    small = dataclasses.replace(small, batches=(64,), workloads=small.workloads[:1])
    policy = dataclasses.replace(POLICY, prune=0.0)
    right = measured(small, tmp_path, Device(), policy)
    journal = tmp_path / "journal.jsonl"
    records = [json.loads(line) for line in journal.read_text().splitlines()]
    assert {r["key"]["kind"] for r in records} == {
        "limit",
        "compile",
        "check",
        "time",
        "heat",
        "race",
        "peers",
        "floor",
    }
    for record in records:
        record["result"] = hostile
    journal.write_text("".join(json.dumps(r) + "\n" for r in records))
    found = measured(small, tmp_path, Device(), policy)
    assert found.cells == right.cells
    assert found.table().entries == right.table().entries


def test_a_hostile_line_of_a_journal_costs_itself_and_one_line(
    small: plan.TuningPlan, fake: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["[" * 100_000, "null", '"x"', '{"key": 1}', '{"key": {}, "result": []}', '{"at": "[red]", "key": {}}']
    (tmp_path / "journal.jsonl").write_text("\n".join(lines) + "\n\xff\n", encoding="latin-1")
    sweep.run(small, tmp_path, workers=1, target_names=("sm_90a",), console=Console(width=40))
    said = capsys.readouterr().out.splitlines()
    damaged = (1, 2, 3, 4, 6, 7)  # the fifth says nothing, of nothing
    assert [line for line in said if "left out" in line] == [
        f"journal.jsonl: line {n} is damaged and left out" for n in damaged
    ]
