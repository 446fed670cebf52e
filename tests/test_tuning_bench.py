"""The peers command: who races, what is written when, how it fails, what its tables and plots say."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_fakes
import pytest
import torch
from bench_fakes import Runner, canned
from replayssm_tuning import bench, bench_device, bench_report, cli, measure, pdl, peers, plan, producer_kernel
from replayssm_tuning.bench_device import BenchRunner
from replayssm_tuning.bench_results import Bench, finalists, geometric_mean
from replayssm_tuning.errors import SweepError
from replayssm_tuning.policy import Policy
from replayssm_tuning.worker import Poisoned
from rich.console import Console
from tuning_fakes import H200, PLAN, Compiler

from replayssm_cute import calls, compiler, tables
from replayssm_cute import plan as plans
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

SMALL = Problem(4, 64, 64, 2, 4, 16)


# ---- who races -------------------------------------------------------------------------------------


def test_a_peer_races_at_its_default_and_at_its_best() -> None:
    def variant(peer: str, name: str, time_us: float | None, default: bool = False) -> dict[str, Any]:
        return {"peer": peer, "variant": name, "default": default, "time_us": time_us}

    a = [variant("a", "auto", 5.0, True), variant("a", "x", 4.0), variant("a", "y", 6.0), variant("a", "z", None)]
    assert finalists(a) == {"a default": a[0], "a best": a[1]}
    alone, dead = variant("b", "auto", 7.0, True), variant("c", "auto", None, True)
    assert finalists([alone, dead]) == {"b": alone}
    fast_default = [variant("a", "auto", 3.0, True), variant("a", "x", 4.0)]
    assert finalists(fast_default) == {"a default": fast_default[0], "a best": fast_default[0]}
    no_default = [variant("a", "auto", None, True), variant("a", "x", 4.0)]
    assert finalists(no_default) == {"a best": no_default[1]}
    assert finalists([]) == {}


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([None]) is None


# ---- results and reports ---------------------------------------------------------------------------


def test_results_survive_the_file(tmp_path: Path) -> None:
    found = canned()
    found.save(tmp_path / "peers.json")
    again = Bench.load(tmp_path / "peers.json")
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "peers.json").read_bytes()
    assert again.cells[0].problem == found.cells[0].problem
    assert again.entrants() == ["ours", "flashinfer best", "flashinfer default", "flashinfer-standard", "floor"]
    for content in ("", "{}", '{"cells": []}'):
        (tmp_path / "bad.json").write_text(content)
        with pytest.raises(ValueError, match=r"bad\.json: no results of the peers command"):
            Bench.load(tmp_path / "bad.json")


def test_ratios_are_of_the_times() -> None:
    found = canned()
    table = bench_report.frame(found)
    assert len(table) == 10
    first = table.iloc[0]
    assert first["over_floor"] == pytest.approx(first["ours_us"] / first["floor_us"])
    assert first["speedup_over_flashinfer best"] == pytest.approx(first["flashinfer best_us"] / first["ours_us"])
    assert table["speedup_over_flashinfer-standard"].notna().sum() == 5  # T = 1 alone
    means = bench_report.means(found)
    logs = [geometric_mean([v]) for v in table["speedup_over_flashinfer default"]]
    assert means["flashinfer default"] == pytest.approx(geometric_mean(logs))
    assert means["over_floor"] == pytest.approx(geometric_mean(table["over_floor"]))
    assert bench_report.losses(found) == []
    cell = found.cells[0]
    slow = {**cell.times, "ours": {**cell.times["ours"], "time_us": 99.0}}
    lost = dataclasses.replace(found, cells=(dataclasses.replace(cell, times=slow),))
    assert [line.split(" at ")[0] for line in bench_report.losses(lost)] == ["flashinfer best", "flashinfer default"]


def test_tables_on_the_console() -> None:
    text = io.StringIO()
    bench_report.show(canned(), Console(file=text, width=200))
    shown = text.getvalue()
    for word in ("geometric mean", "flashinfer best", "ours/floor", "T 4", "h1 s1 p1", "p99", "a CPU", "ours, PDL"):
        assert word in shown, word
    assert "note: one thing to know" in shown
    assert "failed" in shown
    assert "A PEER IS FASTER" not in shown


def test_files_are_drawn_from_the_json_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    canned().save(tmp_path / "peers.json")
    assert cli.main(["peers", "--redraw", str(tmp_path / "peers.json"), "--out", str(tmp_path / "drawn")]) == 0
    assert "geometric mean" in capsys.readouterr().out
    made = {p.name for p in (tmp_path / "drawn").iterdir()}
    assert made == {"peers.csv", "evolve.csv", "host.csv", "pdl.csv", "peers.png", "evolve.png"}
    with (tmp_path / "drawn" / "peers.csv").open() as f:
        rows = list(csv.DictReader(f))
    assert [r["batch"] for r in rows] == [str(b) for b in bench_fakes.BATCHES] * 2
    assert float(rows[0]["ours_us"]) == pytest.approx(
        bench_fakes.measured(bench_fakes.PROBLEMS[0], 1)["times"]["ours"]["time_us"]
    )
    assert (tmp_path / "drawn" / "peers.png").read_bytes()[:4] == b"\x89PNG"
    assert cli.main(["peers", "--redraw", str(tmp_path / "nothing.json")]) == 1
    assert "no results of the peers command" in capsys.readouterr().err


# ---- the command -----------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> plan.TuningPlan:
    (tmp_path / "small.toml").write_text(PLAN)
    return plan.load(str(tmp_path / "small.toml"))


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> list[Runner]:
    """The runner that the command makes, once it has."""
    made: list[Runner] = []

    def make(device: int, policy: dict[str, Any]) -> Runner:
        made.append(Runner(device, policy))
        return made[0]

    monkeypatch.setattr(bench, "BenchRunner", make)
    monkeypatch.setattr(compiler, "compile_many", Compiler())
    monkeypatch.setattr(tables.lookup, "_paths", ())
    return made


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def test_a_run_measures_every_cell_and_what_is_asked_beside(
    small: plan.TuningPlan, runner: list[Runner], tmp_path: Path
) -> None:
    found = bench.run(small, tmp_path / "out", options=bench.Options(evolve=50, seed=3), console=quiet())
    assert [(c.problem.tokens, c.batch) for c in found.cells] == [(4, 1), (4, 64), (1, 1), (1, 64)]
    assert runner[0].evolving == [(4, 1, 50), (4, 64, 50), (1, 1, 50), (1, 64, 50)]
    assert [r["seed"] for r in found.evolved] == [3] * 4
    assert (runner[0].policy.seed, found.notes) == (3, ())
    saved = json.loads((tmp_path / "out" / "peers.json").read_text())
    m = saved["manifest"]
    assert m["gpu_name"] == H200.name and len(m["kernel_fingerprint"]) > 8 and m["driver"] == "580.1"
    assert m["policy"]["limit"]["read_gbs"] == 4600.0 and "evolve_method" in m["policy"]
    assert [w["name"] for w in m["acceptance"].values()] == ["uniform", "one-token"]


def test_pairs_behind_a_producer_and_a_peer_that_was_not_built_for_them(
    small: plan.TuningPlan, runner: list[Runner], tmp_path: Path
) -> None:
    found = bench.run(small, tmp_path, options=bench.Options(pdl=True), console=quiet())
    assert [(r["label"], r["batch"]) for r in found.pdl] == [
        ("verify", 1),
        ("verify", 64),
        ("one token", 1),
        ("one token", 64),
    ]
    assert [n for n in found.notes if "PDL" in n] == [
        f"{label}: no time of flashinfer best, PDL: RuntimeError: not built" for label in ("verify", "one token")
    ]
    assert "pdl_method" in found.manifest.policy


def test_a_peer_that_serves_nothing_is_named_once_a_workload(
    small: plan.TuningPlan, runner: list[Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Runner.cell

    def cell(self: Runner, *args: Any) -> dict[str, Any]:
        found = real(self, *args)
        found["times"] = {n: t for n, t in found["times"].items() if n in ("ours", "floor")}
        failed = [{k: v for k, v in e.items() if k != "time_us"} for e in found["variants"]]
        return found | {"variants": [e | {"failed": "RuntimeError: not built"} for e in failed]}

    monkeypatch.setattr(Runner, "cell", cell)
    found = bench.run(small, tmp_path, console=quiet())
    missing = "no time of flashinfer: RuntimeError: not built"
    standard = "one token: no time of flashinfer-standard: RuntimeError: not built"
    assert found.notes == (f"verify: {missing}", f"one token: {missing}", standard)
    bench_report.show(found, quiet())
    assert bench_report.write(found, tmp_path)


def test_a_failing_cell_costs_itself(
    small: plan.TuningPlan, runner: list[Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Runner.cell

    def cell(self: Runner, problem: Problem, batch: int, *rest: Any) -> dict[str, Any]:
        if (problem.tokens, batch) == (4, 1):
            raise ValueError("slot sets do not fit")
        return real(self, problem, batch, *rest)

    monkeypatch.setattr(Runner, "cell", cell)
    found = bench.run(small, tmp_path, console=quiet())
    assert len(found.cells) == 3
    assert any("batch 1: ValueError: slot sets do not fit" in n for n in found.notes)
    assert any("1 of 4 cells were not measured" in n for n in found.notes)


def test_a_dead_gpu_ends_the_run_and_what_was_measured_is_kept(
    small: plan.TuningPlan, runner: list[Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Runner.cell

    def cell(self: Runner, problem: Problem, batch: int, *rest: Any) -> dict[str, Any]:
        if batch == 64:
            raise Poisoned("illegal memory access")
        return real(self, problem, batch, *rest)

    monkeypatch.setattr(Runner, "cell", cell)
    with pytest.raises(SweepError, match="answers nothing more: illegal memory access"):
        bench.run(small, tmp_path, console=quiet())
    assert [c.batch for c in Bench.load(tmp_path / "peers.json").cells] == [1]


def test_a_gpu_that_dies_beside_a_cell_ends_the_run_too(
    small: plan.TuningPlan, runner: list[Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def evolve(*_: Any) -> dict[str, Any]:
        raise Poisoned("illegal memory access")

    monkeypatch.setattr(Runner, "evolve", evolve)
    with pytest.raises(SweepError, match="batch 1, evolved: the GPU answers nothing more"):
        bench.run(small, tmp_path, options=bench.Options(evolve=9), console=quiet())
    assert [c.batch for c in Bench.load(tmp_path / "peers.json").cells] == [1]


def test_a_budget_that_ends_leaves_cells_out_and_says_so(
    small: plan.TuningPlan, runner: list[Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Runner.cell

    def cell(self: Runner, *args: Any) -> dict[str, Any]:
        sessions[0].budget.seconds = 0.0
        return real(self, *args)

    sessions: list[bench.Session] = []
    make = bench.Session.__init__

    def noted(self: bench.Session, *args: Any) -> None:
        make(self, *args)
        sessions.append(self)

    monkeypatch.setattr(bench.Session, "__init__", noted)
    monkeypatch.setattr(Runner, "cell", cell)
    found = bench.run(small, tmp_path, console=quiet())
    assert len(found.cells) == 1
    assert any("3 of 4 cells were not measured" in n for n in found.notes)
    with pytest.raises(SweepError, match="no cell was measured"):
        monkeypatch.setattr(Runner, "cell", lambda *_: pytest.fail("there was no time"))
        bench.run(small, tmp_path, budget_s=1e-9, console=quiet())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "neither --plan nor --redraw"),
        (["--plan", "nothing"], "no plan 'nothing'"),
        (["--plan", "nemotron3-super", "--evolve", "-1"], "--evolve: got -1"),
        (["--plan", "nemotron3-super", "--workers", "0"], "--workers: got 0"),
        (["--plan", "nemotron3-super", "--tokens", "7"], "no workload is left"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["peers", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["peers", "--plan", "nemotron3-super"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert cli.main(["peers", "--plan", "nemotron3-super", "--device", "2"]) == 2
    assert "--device: got 2, this machine has devices 0..1" in capsys.readouterr().err


def test_the_command_runs_prints_and_writes(
    runner: list[Runner], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(PLAN)
    monkeypatch.setattr(cli, "_gpu", lambda device: device)
    command = ["peers", "--plan", "small.toml", "--batches", "2,8", "--tokens", "4", "--evolve", "20", "--budget", "9s"]
    assert cli.main(command) == 0
    shown = capsys.readouterr().out
    assert "geometric mean" in shown and "p99" in shown
    assert {p.name for p in (tmp_path / "reports" / "peers" / "small").iterdir()} == {
        "peers.json", "peers.csv", "evolve.csv", "peers.png", "evolve.png",
    }  # fmt: skip
    found = Bench.load(tmp_path / "reports" / "peers" / "small" / "peers.json")
    assert [c.batch for c in found.cells] == [2, 8]


# ---- on one cell -----------------------------------------------------------------------------------


class Clock:
    """Stands in for a captured rotation: runs each call once, then tells made-up times of its entrant."""

    asked: list[bool]

    def __init__(self, run: Callable[[calls.Call], None], cell: Any, _: Policy, writes_outputs: bool = True) -> None:
        for call in cell.calls:
            run(call)
        self.nodes = len(cell.calls)
        Clock.asked.append(writes_outputs)
        self.us = 10.0 * len(Clock.asked)

    def sample(self, replays: int) -> list[float]:
        return [self.us + i for i in range(replays)]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> BenchRunner:
    """A BenchRunner on the CPU: its kernels are the reference, its peers made up."""
    made = object.__new__(BenchRunner)
    made.device, made.policy, made.target = torch.device("cpu"), Policy(), H200
    made._cell, made._check_calls, made._floors = None, {}, {}
    Clock.asked = []

    def kernel(*given: Any) -> None:
        checkpointing_ssu_reference(**plans.as_call(given, True).kwargs())

    def step(call: calls.Call) -> Callable[[], None]:
        return lambda: kernel(*plans.kernel_args(call))

    def broken(call: calls.Call) -> Callable[[], None]:
        raise RuntimeError("no kernel for this shape")

    offered = [
        peers.Variant("other", "auto", True, True, step),
        peers.Variant("other", "tuned", False, True, step),
        peers.Variant("other", "broken", False, True, broken),
        peers.Variant("standard", "auto", True, False, step),
    ]
    for module, name, value in (
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(L2_cache_size=1 << 20)),
        (torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 31)),
        (measure, "capture", Clock),
        (bench_device, "capture", Clock),
        (compiler, "get", lambda *_: kernel),
        (peers, "variants", lambda *_: iter(offered)),
        (BenchRunner, "choice", lambda *_: tables.Choice(TileConfig(), "default", "made up")),
        (BenchRunner, "_floor_kernel", lambda *_: lambda *tensors: None),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    return made


def test_all_entrants_race_on_one_cell(on_cpu: BenchRunner) -> None:
    found = on_cpu.cell(SMALL, 4, {"lengths": [0.25] * 4}, 4600.0)
    assert json.loads(json.dumps(found)) == found
    assert list(found["times"]) == ["ours", "other default", "other best", "standard", "floor"]
    assert Clock.asked[-5:] == [True, True, True, True, False]
    before = len(Clock.asked) - 5
    for number, (name, entry) in enumerate(found["times"].items(), 1):
        time_us = entry["kernel_us"] if name == "floor" else entry["time_us"]
        assert time_us == 10.0 * (before + number) + 1  # the median of interleaved triples
        assert entry["samples"] == on_cpu.policy.race_rounds * on_cpu.policy.race_replays
    assert found["times"]["floor"]["time_us"] > found["times"]["floor"]["kernel_us"]
    assert 0 < found["times"]["ours"]["out_error"] < 2e-3
    assert [v.get("failed") for v in found["variants"]] == [None, None, "RuntimeError: no kernel for this shape", None]
    assert found["config"] == {"label": TileConfig().label(), "source": "default", "reason": "made up"}
    assert found["sets"] >= 16 and found["flush"] == pytest.approx(0.179, abs=0.03)


def test_what_evolves_and_what_follows_a_producer(on_cpu: BenchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours and the peers that replay; the ordinary update does another job."""
    variants = on_cpu.cell(SMALL, 4, {"lengths": [0.25] * 4}, 4600.0)["variants"]
    asked: list[Any] = []

    def evolve(cell: Any, field: Any, lengths: Any, steps: int, seed: int) -> dict[str, Any]:
        asked.append(([e.name for e in field], cell.batch, lengths, steps, seed))
        return {}

    monkeypatch.setattr(bench_device, "evolve", evolve)
    on_cpu.evolve(SMALL, 4, [0.25] * 4, variants, 100, 7)
    assert asked == [(["ours", "other default", "other best"], 4, [0.25] * 4, 100, 7)]

    problems: list[bool] = []
    offer = peers.variants
    monkeypatch.setattr(peers, "variants", lambda p, *_: problems.append(p.pdl) or offer(p, 4, on_cpu.device))
    monkeypatch.setattr(producer_kernel, "compile_producer", lambda *_: copy_pairs)
    monkeypatch.setattr(pdl, "capture", Clock)
    found = on_cpu.pdl(SMALL, 4, [0.25] * 4, variants)
    names = ["ours", "other default", "other best"]
    assert list(found["times"]) == ["producer alone", *names, *(f"{n}, PDL" for n in names)]
    assert all(t["time_us"] > 0 for t in found["times"].values())
    assert False in problems and True in problems
    assert json.loads(json.dumps(found)) == found


def copy_pairs(*pairs: torch.Tensor) -> None:
    for source, target in zip(pairs[::2], pairs[1::2], strict=True):
        target.copy_(source)


def test_a_two_kernel_peer_is_searched_further(on_cpu: BenchRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(call: calls.Call) -> Callable[[], None]:
        return lambda: checkpointing_ssu_reference(**call.kwargs())

    def variant(name: str, **choice: Any) -> peers.Variant:
        return peers.Variant("flashinfer", name, name == "auto", True, step, choice)

    offered = [
        variant("auto"),
        variant("slow", algorithm="two-kernel", n=1),
        variant("quick", algorithm="two-kernel", n=2),
    ]
    asked: list[Any] = []

    def refined(problem: Problem, batch: int, device: torch.device, choice: dict[str, Any]) -> list[peers.Variant]:
        asked.append(choice)
        return [variant("quick, more")]

    monkeypatch.setattr(peers, "variants", lambda *_: iter(offered))
    monkeypatch.setattr(peers, "refined", refined)
    real = BenchRunner._time_variants

    def rated(self: BenchRunner, cell: Any, variants: Any) -> list[dict[str, Any]]:
        us = {"auto": 5.0, "slow": 9.0, "quick": 4.0, "quick, more": 3.0}
        return [v | {"time_us": us[v["variant"]]} for v in real(self, cell, variants)]

    monkeypatch.setattr(BenchRunner, "_time_variants", rated)
    found = on_cpu.cell(SMALL, 4, {"lengths": [0.25] * 4}, 4600.0)
    assert all(choice["n"] == 2 for choice in asked)
    assert [v["variant"] for v in found["variants"]] == ["auto", "slow", "quick", "quick, more"]
    assert found["times"]["flashinfer best"]["variant"] == "quick, more"


@pytest.mark.gpu
def test_a_cell_on_the_device(tmp_path: Path) -> None:
    """A small plan from the command line; how fast is for the command to say."""
    (tmp_path / "small.toml").write_text(PLAN)
    command = ["peers", "--plan", str(tmp_path / "small.toml"), "--batches", "4", "--out", str(tmp_path / "out")]
    assert cli.main([*command, "--evolve", "40", "--host", "--pdl", "--budget", "120s"]) == 0
    found = Bench.load(tmp_path / "out" / "peers.json")
    assert len(found.cells) == 2, found.notes
    for cell in found.cells:
        ours, floor = cell.time_us("ours"), cell.time_us("floor")
        assert ours is not None and floor is not None and floor > 0
        assert cell.times["ours"]["out_error"] < 2e-3
    steps = [row["entrants"]["ours"]["counted"] + row["entrants"]["ours"]["late"] for row in found.evolved]
    too_late = sum("none of 40 steps was queued in time" in note for note in found.notes)  # on a host with more to do
    assert steps == [40] * (2 - too_late), found.notes
    assert {"eager call, by keyword", "prepared launch", "table look-up"} <= {r["what"] for r in found.host}
    for row in found.pdl:
        assert row["times"]["ours"]["time_us"] > row["times"]["producer alone"]["time_us"] > 0
        assert row["times"]["ours, PDL"]["time_us"] > 0
    assert all(r["host_us"] > 0 for r in found.host if "failed" not in r)


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d["cells"][0].update(times={"ours": 7}),
        lambda d: d["cells"][0].update(times=[1]),
        lambda d: d.update(evolved=[3]),
        lambda d: d.update(host=[{}]),
    ],
)
def test_results_of_another_layout_are_one_line(
    change: Callable[[dict[str, Any]], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = json.loads((Path(__file__).parent.parent / "reports/h200/peers/peers.json").read_bytes())
    change(data)
    path = tmp_path / "peers.json"
    path.write_text(json.dumps(data))
    assert cli.main(["peers", "--redraw", str(path)]) == 1
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith(f"error: {path}: no results of the peers command") and told.out == ""
