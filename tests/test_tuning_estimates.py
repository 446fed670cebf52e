"""Estimated tables that the package brings: how they are made, when they serve, and that they are of these sources."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from replayssm_tuning import cli, estimates, plan
from replayssm_tuning.errors import SweepError
from replayssm_tuning.estimates_page import page, page_name
from rich.console import Console
from tuning_fakes import PLAN, Compiler

from replayssm_cute import compiler, fingerprint, tables
from replayssm_cute import target as targets
from replayssm_cute.config import TileConfig
from replayssm_cute.default_rule import default_config
from replayssm_cute.problem import Problem
from replayssm_cute.resources import Resources, inspect
from replayssm_cute.tables import Table, Tables

B200, GB200, B300 = (targets.named(name) for name in ("b200", "gb200", "b300"))
ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    stand_in = Compiler()
    monkeypatch.setattr(compiler, "compile_many", stand_in)
    return stand_in


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in the place of the package's estimated tables."""
    monkeypatch.setattr(tables.files, "estimated_folder", lambda: tmp_path / "estimated")
    monkeypatch.setattr(tables.files, "shipped", list)
    monkeypatch.delenv("REPLAYSSM_TABLES", raising=False)
    tables.forget()
    yield tmp_path / "estimated"
    monkeypatch.undo()
    tables.forget()


def small(tmp_path: Path, *gpus: str) -> list[estimates.Job]:
    (tmp_path / "small.toml").write_text(PLAN)
    return estimates.jobs([str(tmp_path / "small.toml")], gpus, ("f32", "bf16"))


def make(tmp_path: Path, folder: Path, *gpus: str) -> list[Path]:
    return estimates.make(small(tmp_path, *gpus), folder, tmp_path / "pages", workers=1, console=Console(quiet=True))


# ---- which tables ----------------------------------------------------------------------------------


def test_a_table_for_every_gpu_plan_and_state() -> None:
    found = {(j.gpu, j.plan.name, j.state) for j in estimates.jobs()}
    nemotrons = set(estimates.PLANS)
    assert nemotrons >= {"nemotron3-super", "nemotron3-ultra", "nemotron3-nano-30b", "nemotron-nano-v2"}
    assert {
        (g, p, s) for g in ("b200", "gb200", "b300", "gb300", "h200") for p in nemotrons for s in ("f32", "bf16")
    } <= found
    assert ("b200", "nemotron3-super", "f16") in found and ("b200", "nemotron-h-4b", "f16") not in found
    for job in estimates.jobs(["nemotron3-super"], ["b300"]):
        assert {w.problem.heads for w in job.plan.workloads} == {128, 64, 32, 16}
        assert {w.problem.tokens for w in job.plan.workloads} == {1, 4}
        assert {w.problem.state_dtype for w in job.plan.workloads} == {job.state}
        assert job.path(Path("t")) == Path(f"t/nvidia-b300-sxm6-ac/nemotron3-super-{job.state}.json")


def test_a_state_that_a_plan_does_not_list_is_that_of_f32_with_another_dtype() -> None:
    whole = plan.load("nemotron3-super", tp=(1,))
    own, lent = estimates.in_state(whole, "f16"), estimates.in_state(whole, "bf16")
    assert own.workloads == tuple(w for w in whole.workloads if w.problem.state_dtype == "f16")
    f32 = [w for w in whole.workloads if w.problem.state_dtype == "f32"]
    assert [w.problem for w in lent.workloads] == [dataclasses.replace(w.problem, state_dtype="bf16") for w in f32]
    assert [w.acceptance for w in lent.workloads] == [w.acceptance for w in f32]
    assert lent.workloads[0].label == "verify, 3 drafts, bf16 state"


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate-all", "--plans", "none"]) == 2
    assert "no plan 'none'" in capsys.readouterr().err
    for wrong in (["--gpus", "v100"], ["--states", "f64"], ["--near", "-1"], ["--plans", ","]):
        with pytest.raises(SystemExit) as e:
            cli.main(["estimate-all", *wrong])
        assert e.value.code == 2


# ---- how they are made -----------------------------------------------------------------------------


def test_stand_ins_have_the_registers_of_the_kernels_they_stand_for() -> None:
    problem = plan.load("nemotron3-super").workloads[0].problem
    for config in (TileConfig(), TileConfig(4, 1, tail_rows=9)):
        found = inspect(problem, config, B200)
        like = inspect(*estimates.stand_in(problem, config), B200)
        assert abs(found.registers - like.registers) <= 2
        assert (found.stack_bytes, found.shared_bytes) == (like.stack_bytes, like.shared_bytes)


def test_few_configs_cover_every_cell() -> None:
    """The most cells first; of those that cover as many, the one that is faster in all."""
    a, b, c, d = (TileConfig(n) for n in (1, 2, 4, 8))
    assert estimates.covering([{a: 1.0}, {a: 1.0, b: 1.0}, {b: 1.0, c: 1.0}], ()) == [a, b]
    assert estimates.covering([{a: 1.005, b: 1.0}, {a: 1.0, b: 1.004}], ()) == [b]
    assert estimates.covering([{a: 1.0}, {b: 1.0, d: 1.005}], [d]) == [a]
    assert estimates.covering([{a: 1.0}], [a]) == []


def test_few_configs_are_compiled_once_for_gpus_and_ranks_alike(fake: Compiler, tmp_path: Path) -> None:
    make(tmp_path, tmp_path / "t", "b200", "gb200", "b300")
    assert len(fake.asked) == len(set(fake.asked))
    assert {t.arch for _, _, t in fake.asked} == {"sm_100a", "sm_103a"}
    assert {p.groups for p, _, _ in fake.asked} == {1}
    for gpu in ("b200", "gb200", "b300"):
        for job in small(tmp_path, gpu):
            for w in job.plan.workloads:
                compiled = {(p, c) for p, c, t in fake.asked if t.arch == job.target.arch}
                for batch, near in zip((1, 64), estimates.near_fastest(w, gpu, (1, 64), estimates.NEAR), strict=True):
                    assert min(near.values()) == 1 and max(near.values()) <= 1.01
                    assert compiled & {estimates.stand_in(w.problem, c) for c in near}
                    assert estimates.stand_in(w.problem, default_config(w.problem, job.target, batch)) in compiled
    of_one = [c for p, c, t in fake.asked if t.arch == "sm_100a" and p.tokens == 4 and p.state_dtype == "f32"]
    assert len(of_one) <= 8


def test_the_winner_is_the_models_with_the_compiled_registers(tmp_path: Path) -> None:
    """Configs whose code spills, however little, are left out; the default stays unless it is beaten by the margin."""
    (job, *_) = small(tmp_path, "b200")
    (workload, *_) = job.plan.workloads
    problem = workload.problem
    default = default_config(problem, B200, 64)
    good, bad = TileConfig(2, 1), [default, default_config(problem, B200, 1), TileConfig(head_split=2)]

    def compiled(spilled: list[TileConfig]) -> Table:
        found = {}
        for w in job.plan.workloads:
            for c in dict.fromkeys((good, *bad)):
                stack = 8 if c in spilled else 0
                resources = Resources("", 96, stack, 0, c.shared_bytes(w.problem), 128, 9000).to_json()
                found[w.problem, c] = {k: v for k, v in resources.items() if k != "kernel"}
        return estimates.table(job, found)

    assert {c.config for c in compiled(bad).entries[problem]} == {good}
    at_64 = compiled([good]).entries[problem][-1]
    assert at_64.config != good and at_64.default_us is not None
    assert at_64.config == default or at_64.time_us < at_64.default_us / 1.05
    failed = {key: {"failed": "no memory"} for w in job.plan.workloads for key in [(w.problem, good)]}
    with pytest.raises(SweepError, match=r"NVIDIA B200: .* batch 1: nothing compiled: no memory"):
        estimates.table(job, failed)


def test_tables_are_small_and_say_where_they_come_from(fake: Compiler, tmp_path: Path) -> None:
    paths = make(tmp_path, tmp_path / "t", "gb200")
    assert [p.relative_to(tmp_path / "t").as_posix() for p in paths] == [
        f"nvidia-gb200/small-{state}.json" for state in ("f32", "bf16")
    ]
    read = tables.read(paths[0])
    assert (read.manifest.gpu_name, read.manifest.arch, read.manifest.sms) == ("NVIDIA GB200", "sm_100a", 152)
    assert read.manifest.provenance == "estimated"
    assert read.manifest.policy["plan"] == "small"
    cells = [c for found in read.entries.values() for c in found]
    assert all(c.runner_up is None and c.default_us is not None and c.time_us > 0 for c in cells)
    assert all(c.limit_fraction == pytest.approx(c.bytes / c.time_us / 1e3 / 7600, rel=0.01) for c in cells)
    lines = [line for line in paths[0].read_text().splitlines() if '"batch"' in line]
    assert len(lines) == len(cells) and max(map(len, lines)) < 260


def test_the_page_tells_times_and_shares_of_the_datasheet(fake: Compiler, tmp_path: Path) -> None:
    paths = make(tmp_path, tmp_path / "t", "b200")
    text = (tmp_path / "pages" / "nvidia-b200.md").read_text()
    assert text == page(B200, [tables.read(p) for p in reversed(paths)])
    assert "**Nothing here was measured**" in text and "8 TB/s" in text
    for path in paths:
        for problem, cells in tables.read(path).entries.items():
            (row,) = [line for line in text.splitlines() if line.startswith(f"| `{problem.label()}`")]
            for c in cells:
                share = c.bytes / c.time_us / 1e3 / 8000
                assert f"{c.time_us:.1f} ({share:.0%})" in row or f"{c.time_us:.1f} ({share - 1e-4:.0%})" in row
                assert f"`{c.config.label()}`" in row


def test_the_command_writes_and_says_it_as_json(
    fake: Compiler, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "estimated_folder", lambda: package)
    small(tmp_path)
    arguments = ["--plans", str(tmp_path / "small.toml"), "--gpus", "b300", "--workers", "1", "--json"]
    assert cli.main(["estimate-all", *arguments, "--pages", str(tmp_path / "pages")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["tables"] == [str(package / "nvidia-b300-sxm6-ac" / f"small-{s}.json") for s in ("f32", "bf16")]
    assert all(Path(p).is_file() for p in said["tables"])
    assert (tmp_path / "pages" / page_name(B300)).is_file()


# ---- when they serve -------------------------------------------------------------------------------


def test_estimates_serve_only_where_they_are_named(
    fake: Compiler, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    make(tmp_path, package, "b200")
    problem = small(tmp_path, "b200")[0].plan.workloads[0].problem
    assert tables.choose(problem, 64, B200).source == "default"
    for name in (lambda: monkeypatch.setenv("REPLAYSSM_TABLES", "estimated"), lambda: tables.use(["estimated"])):
        name()
        tables.forget()
        choice = tables.choose(problem, 64, B200)
        assert (choice.source, choice.provenance) == ("table", "estimated")
        assert choice.table == "shipped estimated/nvidia-b200/small-f32.json"
        assert "estimated table for this problem" in choice.reason
        with caplog.at_level(logging.WARNING, "replayssm_cute"):
            assert tables.choose(problem, 64, GB200).source == "default"  # another GPU, for which none is shipped here
        assert "no estimated ones are shipped for NVIDIA GB200" in caplog.text
        caplog.clear()
        monkeypatch.delenv("REPLAYSSM_TABLES", raising=False)
    tables.use(None)


def test_a_measured_table_comes_before_the_estimates(
    fake: Compiler, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first sweep on such a machine replaces them, cell by cell, whether it is named or shipped."""
    (path, *_) = make(tmp_path, package, "b200")
    read = tables.read(path)
    problem, other = read.entries
    swept = dataclasses.replace(read.entries[problem][0], config=TileConfig(2, 1))
    now = tables.kernels_named(B200.arch, "measured")
    manifest = dataclasses.replace(read.manifest, provenance="measured", kernel_fingerprint=now)
    measured = Table(manifest, {problem: (swept,)})
    tables.write(tmp_path / "measured.json", measured)
    for paths in (["estimated", tmp_path / "measured.json"], ["estimated"]):
        if paths == ["estimated"]:
            monkeypatch.setattr(tables.files, "shipped", lambda: [tmp_path / "measured.json"])
        found = Tables.of(B200, paths)
        chosen = found.choose(problem, 1)
        assert (chosen.config, chosen.provenance) == (TileConfig(2, 1), "measured")
        assert found.choose(other, 1).provenance == "estimated"
        assert found.choose(problem, 64).provenance == "estimated"  # which the sweep did not reach


def test_estimates_of_other_kernels_are_refused_and_replaced(
    fake: Compiler, package: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (path, other) = make(tmp_path, package, "b200")
    read = tables.read(path)
    stale = Table(dataclasses.replace(read.manifest, kernel_fingerprint="0" * 64), read.entries)
    for name in (path.name, "of-an-older-plan.json"):
        tables.write(path.with_name(name), stale)
    (problem, *_) = read.entries
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        assert Tables.of(B200, ["estimated"]).choose(problem, 64).source == "default"
    assert sum("kernel fingerprint 000000000000 is stale" in m for m in caplog.messages) == 2
    make(tmp_path, package, "b200")
    assert sorted(p.name for p in path.parent.iterdir()) == sorted([path.name, other.name])
    assert tables.read(path).manifest.kernel_fingerprint == fingerprint.kernels()


def test_a_rerun_removes_its_own_stale_tables_alone(fake: Compiler, tmp_path: Path) -> None:
    """Measured tables, other GPUs' and what is no table at all are somebody else's, whatever the kernels."""
    folder = tmp_path / "t"
    (path, *_) = make(tmp_path, folder, "b200")
    read = tables.read(path)

    def put(name: str, **change: object) -> None:
        made = dataclasses.replace(read.manifest, kernel_fingerprint="0" * 64, **change)  # type: ignore[arg-type]
        tables.write(path.with_name(name), Table(made, read.entries))

    put("stale.json")
    put("measured.json", provenance="measured")
    put("other-gpu.json", gpu_name=B300.name, arch=B300.arch)
    for name, text in (("notes.json", "{}"), ("half.json", path.read_text()[:-9]), ("empty.json", "")):
        path.with_name(name).write_text(text)
    (folder / "measured.json").write_text("{}")
    path.with_name("folder.json").mkdir()
    before = {p.name: p.read_bytes() for p in path.parent.iterdir() if p.is_file()}
    make(tmp_path, folder, "b200")
    after = {p.name: p.read_bytes() for p in path.parent.iterdir() if p.is_file()}
    assert before.keys() - after.keys() == {"stale.json"}
    mine = {p.name for p in path.parent.glob("small-*.json")}
    assert len(mine) == 2 and all(after[name] == before[name] for name in after.keys() - mine)
    assert (folder / "measured.json").exists() and path.with_name("folder.json").is_dir()


# ---- the shipped ones ------------------------------------------------------------------------------


def test_the_shipped_tables_are_complete_and_of_these_sources() -> None:
    folder = tables.estimated_folder()
    if not list(folder.rglob("*.json")):
        pytest.skip("no estimated tables are shipped: make estimates")
    found = estimates.complaints(folder, ROOT / estimates.PAGES, estimates.jobs())
    assert not found, "make estimates makes them anew:\n  " + "\n  ".join(found)


def test_what_is_said_of_tables_that_may_not_be_shipped(fake: Compiler, tmp_path: Path) -> None:
    folder, pages, jobs = tmp_path / "t", tmp_path / "pages", small(tmp_path, "b200", "b300")

    def said() -> list[str]:
        return estimates.complaints(folder, pages, jobs)

    assert len(said()) == 6 and "cannot be read" in said()[0]
    (path, *_) = make(tmp_path, folder, "b200", "b300")
    assert said() == []
    good = tables.read(path)
    (problem, *_) = good.entries
    cells = good.entries[problem]

    def bad(entries: object = None, **change: object) -> str:
        manifest = dataclasses.replace(good.manifest, **change)  # type: ignore[arg-type]
        tables.write(path, Table(manifest, good.entries if entries is None else entries))  # type: ignore[arg-type]
        estimates.draw(folder, pages, ["b200"])
        (line,) = said()
        return line

    assert "is stale" in bad(kernel_fingerprint="0" * 64)
    assert "it is for NVIDIA B300 SXM6 AC" in bad(gpu_name=B300.name)
    assert "it is measured, expected estimated" in bad(
        provenance="measured", kernel_fingerprint=tables.kernels_named(B200.arch, "measured")
    )
    assert "of cost model 0, the model is now" in bad(policy={**good.manifest.policy, "cost_model": "0"})
    assert "its cells are not those of plan small" in bad({**good.entries, problem: cells[:1]})
    wrong = dataclasses.replace(cells[0], config=TileConfig(3))
    assert "heads_per_cta 3 does not divide" in bad({**good.entries, problem: (wrong, *cells[1:])})
    tables.write(path, good)
    assert said() == [f"{pages / page_name(B200)}: it is not what the tables make"]
    estimates.draw(folder, pages, ["b200"])
    assert said() == []


def test_kernels_at_their_cap_are_left_out_where_a_problem_has_others() -> None:
    """What stands in for a kernel may be held down without a spill where the kernel itself spills: it was seen."""
    target = targets.named("b200")
    problem = Problem(112, 64, 128, 8, 1, 16)
    capped, roomy = TileConfig(2, parallel_heads=2, ctas_per_sm=3), TileConfig(2, ctas_per_sm=4)
    free = TileConfig(2)
    known = {"registers": 80, "threads": 256, "shared_bytes": 1, "stack_bytes": 0}
    assert estimates.at_its_cap(capped, known, target)
    assert not estimates.at_its_cap(capped, known | {"registers": 72}, target)
    assert not estimates.at_its_cap(free, known | {"registers": 255}, target)
    found = {(problem, capped): known, (problem, roomy): known | {"threads": 128}, (problem, free): known}
    assert set(estimates.without_capped(found, target)) == {(problem, roomy), (problem, free)}
    alone = {(problem, capped): known, (problem, free): {"failed": "no"}}
    assert estimates.without_capped(alone, target) == alone
