"""The studies of ragged rows and windows: what they compare, and the command with kernels and clocks made up."""

from __future__ import annotations

import csv
import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import test_tuning_bench
import torch
from replayssm_tuning import acceptance, studies, studies_report
from replayssm_tuning.bench_device import BenchRunner
from replayssm_tuning.policy import Policy

from replayssm_cute import compiler, fingerprint, plan, ring
from replayssm_cute.default_rule import default_config
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

on_cpu = test_tuning_bench.on_cpu
SMALL = Problem(heads=2, head_dim=64, d_state=64, groups=1, tokens=2, window=8)


def all_groups() -> list[studies.Group]:
    return [g for make in studies.STUDIES.values() for g in make()]


def test_a_ragged_call_has_the_rows_of_the_dense_one() -> None:
    groups = list(studies.ragged_groups())
    assert {g.batch for g in groups} == set(studies.BATCHES)
    for group in groups:
        dense, ragged = group.entrants
        assert (dense.problem.ragged, ragged.problem.ragged) == (False, True)
        assert dataclasses.replace(ragged.problem, ragged=False) == dense.problem and ragged.mix == dense.mix
        assert ragged.goal == 1.05


def test_rows_of_longer_windows_have_as_many_live_rows_and_no_flush() -> None:
    for group in studies.live_groups():
        first, *others = group.entrants
        assert [e.problem.window for e in group.entrants] == [16, 32, 64]
        assert [e.goal for e in group.entrants] == [None, 1.10, None]
        for entrant in group.entrants:
            p, mix = entrant.problem, entrant.mix
            assert len(mix.pnat) == p.window + 1 and sum(mix.pnat) == pytest.approx(1)
            assert mix.mean_live == pytest.approx(first.mix.mean_live) and mix.mean_live > 4
            assert not any(share for n, share in enumerate(mix.pnat) if ring.flushes(n, p.tokens, p.window))
        assert all(e.mix.pnat[:17] == first.mix.pnat for e in others)


def test_windows_meet_the_same_acceptance() -> None:
    groups = list(studies.window_groups())
    assert {g.load for g in groups} == {"uniform", "mixed-batch"}
    for group in groups:
        assert sorted(e.problem.window for e in group.entrants) == sorted(studies.WINDOWS)
        assert group.entrants[0].problem.window == 16, "what times are told over"
        assert len({round(e.mix.mean_length, 9) for e in group.entrants}) == 1
        flushes = {e.problem.window: e.mix.flush for e in group.entrants}
        assert all(flushes[a] > flushes[b] for a, b in zip(studies.WINDOWS, studies.WINDOWS[1:], strict=False))


@pytest.mark.parametrize("window", studies.WINDOWS)
def test_ring_bytes_are_those_of_a_slot_less_its_checkpoint_and_cursors(window: int) -> None:
    p = dataclasses.replace(studies.BASE, window=window)
    checkpoint = p.heads * p.head_dim * p.d_state * p.state_bytes
    assert studies.ring_bytes(p) == p.bytes_per_slot() - checkpoint - 8


def test_every_entrant_can_be_served() -> None:
    from replayssm_cute import target

    h200 = target.named("h200")
    for group in all_groups():
        for entrant in group.entrants:
            assert default_config(entrant.problem, h200, group.batch).is_valid(entrant.problem, h200)


@pytest.fixture
def command(on_cpu: BenchRunner, monkeypatch: pytest.MonkeyPatch) -> BenchRunner:
    """The command on the CPU: one small group a study, kernels that are the reference, and a made-up clock."""
    on_cpu.policy = Policy(min_rows=8, l2_factor=0.0)
    monkeypatch.setattr(studies, "BATCHES", (2,))
    monkeypatch.setattr(studies, "WINDOW_BATCHES", (2,))
    mix = studies.of_window(SMALL, studies.UNIFORM)
    longer = dataclasses.replace(SMALL, window=16)
    ragged = studies.Contender("ragged", dataclasses.replace(SMALL, ragged=True), mix, 1.05)
    dense = studies.Contender("dense", SMALL, mix)
    long = studies.Contender("W 16", longer, studies.without_flushes(mix, 2, 8, 16), 1.1)
    made = {
        "ragged": lambda: iter([studies.Group("ragged", "uniform", 2, (dense, ragged))]),
        "live rows": lambda: iter([studies.Group("live rows", "no flushes", 2, (dense, long))]),
        "windows": lambda: iter([studies.Group("windows", "uniform", 2, (dense,), tuned=True)]),
    }
    monkeypatch.setattr(studies, "STUDIES", made)
    monkeypatch.setattr(studies, "BenchRunner", lambda device, policy: on_cpu)
    monkeypatch.setattr(studies, "capture", test_tuning_bench.Clock)
    monkeypatch.setattr(on_cpu.__class__, "describe", lambda self: {"driver": "580.1", "peers": {}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(studies, "slot_sets", lambda *_, **__: 4)
    monkeypatch.setattr(compiler, "compile_many", lambda items, workers: list(items))

    def kernel(problem: Problem, *_: object) -> Callable[..., object]:
        return lambda *given: checkpointing_ssu_reference(**plan.call_of(problem, given).kwargs())

    monkeypatch.setattr(compiler, "get", kernel)
    return on_cpu


def test_the_command_writes_what_it_measured(
    command: BenchRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert studies.main(["--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "studies.json").read_text())
    assert data["manifest"]["kernel_fingerprint"] == fingerprint.kernels() and data["notes"] == []
    assert data["manifest"]["policy"]["min_rows"] == 8
    assert [(r["study"], r["entrant"]) for r in data["rows"]] == [
        *(("ragged", "dense"), ("ragged", "ragged")),
        *(("live rows", "dense"), ("live rows", "W 16")),
        ("windows", "dense"),
    ]
    for row in data["rows"]:
        assert row["out_error"] < 2e-3 and row["bytes"] > 0
    assert data["rows"][0]["over_first"] == 1 and data["rows"][1]["over_first"] > 1
    assert data["rows"][2]["mean_live"] != data["rows"][3]["mean_live"] and data["rows"][3]["flush"] == 0
    with (tmp_path / "studies.csv").open() as file:
        assert [float(r["time_us"]) for r in csv.DictReader(file)] == [
            pytest.approx(r["time_us"], rel=1e-4) for r in data["rows"]
        ]
    said = capsys.readouterr().out
    assert "1.05" in said and "wrote" in said


def test_the_page_is_drawn_again_from_the_json(
    command: BenchRunner, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert studies.main(["--out", str(tmp_path)]) == 0
    drawn = ("studies.md", "ratios.png", "windows.png")
    first = {name: (tmp_path / name).read_bytes() for name in drawn}
    assert all(first["studies.md"].count(name.encode()) == 1 for name in drawn[1:])
    data = json.loads((tmp_path / "studies.json").read_text())
    for name in drawn:
        (tmp_path / name).unlink()
    assert studies.main(["--redraw", str(tmp_path / "studies.json")]) == 0
    assert {name: (tmp_path / name).read_bytes() for name in drawn} == first
    for row in data["rows"]:
        row["time_us"] += 1000
    (tmp_path / "studies.json").write_text(json.dumps(data))
    assert studies.main(["--redraw", str(tmp_path / "studies.json")]) == 0
    assert all((tmp_path / name).read_bytes() != first[name] for name in ("studies.md", "windows.png"))
    for text in ("", "{}", '{"rows": []}', '{"rows": [1], "manifest": {}}'):
        (tmp_path / "odd.json").write_text(text)
        assert studies.main(["--redraw", str(tmp_path / "odd.json")]) == 1
        assert "odd.json: no results of studies" in capsys.readouterr().err


def row(
    study: str, problem: str, batch: int, entrant: str, us: float, over: float = 1.0, **more: object
) -> dict[str, object]:
    return {"study": study, "load": "uniform", "problem": problem, "batch": batch, "entrant": entrant, "time_us": us,
            "over_first": over, "goal": None, "slot_bytes": 4096, "ring_bytes": 1024, **more}  # fmt: skip


def test_the_page_has_every_time_and_marks_what_misses_its_goal() -> None:
    dense, packed = "64x64x64/1 f32 T4 W16", "64x64x64/1 f32 T4 W16 ragged"
    rows = [
        row("ragged", dense, 1, "dense", 4.0),
        row("ragged", packed, 1, "ragged", 4.1, 1.025, goal=1.05),
        row("ragged", dense, 8, "dense", 8.0),
        row("ragged", packed, 8, "ragged", 8.8, 1.1, goal=1.05),
        row("windows", dense, 8, "W 16", 8.0),
        row("windows", "64x64x64/1 f32 T4 W8", 8, "W 8", 6.0, 0.75, slot_bytes=3072, ring_bytes=512),
    ]
    data = {"rows": rows, "notes": ["half of it"], "manifest": {"kernel_fingerprint": "f" * 64, "gpu_name": "G",
            "arch": "sm_90a", "date": "2026-01-01T00:00"}}  # fmt: skip
    page = studies_report.page(data)
    for line in (
        "| problem | batch | dense | ragged | / dense |",
        "| 64x64x64/1 f32 T4 | 1 | 4.00 | 4.10 | 1.025 |",
        "| 64x64x64/1 f32 T4 | 8 | 8.00 | 8.80 | **1.100** |",
        "| uniform | 64x64x64/1 f32 T4 | 8 | **6.00** | 8.00 |",
        "| 64x64x64/1 f32 T4 | 3 | 4 |",
        "| of it the ring | 0 | 1 |",
        "- half of it",
    ):
        assert f"{line}\n" in page, page
    assert "equal live rows" not in page and "png" not in page


def test_the_committed_page_is_that_of_its_json() -> None:
    folder = Path(__file__).parent.parent / "reports" / "h200" / "studies"
    data = studies_report.load(folder / "studies.json")
    plots = [name for name in ("ratios.png", "windows.png") if (folder / name).exists()]
    assert plots and (folder / "studies.md").read_text() == studies_report.page(data, plots)


def test_a_tuned_group_takes_the_fastest_config(
    command: BenchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Times of the made-up clock grow with every capture: it has to run backwards for another config to win."""

    class Backwards(test_tuning_bench.Clock):
        def sample(self, replays: int) -> list[float]:
            return [1000.0 - self.us] * replays

    monkeypatch.setattr(studies, "capture", Backwards)
    arguments = ["--out", str(tmp_path), "--studies", "windows,ragged"]
    assert studies.main(arguments) == 0
    windows, dense, ragged = json.loads((tmp_path / "studies.json").read_text())["rows"]
    assert windows["config"] != windows["of_a_call"] and windows["time_us"] < windows["of_a_call_us"]
    assert windows["over_first"] == 1, "told over the first entrant's own best"
    for row in (dense, ragged):
        assert row["config"] == row["of_a_call"] and row["time_us"] == row["of_a_call_us"]
    assert studies.main([*arguments, "--race", "0"]) == 0
    windows = json.loads((tmp_path / "studies.json").read_text())["rows"][0]
    assert windows["config"] == windows["of_a_call"]


def test_a_group_that_fails_costs_itself(
    command: BenchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = command.check

    def broken(problem: dict[str, object], config: dict[str, object]) -> dict[str, float]:
        if problem["ragged"]:
            raise RuntimeError("wrong numbers: out error 1")
        return real(problem, config)

    monkeypatch.setattr(command.__class__, "check", lambda self, p, c: broken(p, c))
    assert studies.main(["--out", str(tmp_path)]) == 0
    data = json.loads((tmp_path / "studies.json").read_text())
    assert [r["study"] for r in data["rows"]] == ["live rows", "live rows", "windows"]
    assert data["notes"] == [f"ragged, {SMALL.label()}, batch 2: RuntimeError: wrong numbers: out error 1"]
    assert "wrong numbers" in capsys.readouterr().err
    assert studies.main(["--out", str(tmp_path), "--studies", "ragged"]) == 1


def test_a_budget_that_ends_says_so(command: BenchRunner, tmp_path: Path) -> None:
    assert studies.main(["--out", str(tmp_path), "--budget", "1e-9"]) == 1
    assert not list(tmp_path.iterdir())


def test_wrong_usage(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit) as error:
        studies.main(["--studies", "ragged,windos"])
    assert error.value.code == 2 and "windos" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert studies.main([]) == 2
    assert "0 CUDA devices" in capsys.readouterr().err


def test_the_published_lengths_are_read() -> None:
    lengths = studies.published().lengths(4)
    assert len(lengths) == 4 and sum(lengths) == pytest.approx(1)
    assert acceptance.stationary(lengths, 16).flush > 0 and sys.modules["replayssm_tuning.studies"] is studies
