"""Comparing two tables: what became slower is said first, in words, in JSON and in the exit code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from fakes import SMALL
from replayssm_tuning import cli
from replayssm_tuning.diff import Diff, Side
from replayssm_tuning.results import Candidate, CellResult, Results
from test_tables import ONE, SPLIT, WIDE, cell, table

from replayssm_cute import tables


def written(path: Path, found: tables.Table) -> str:
    tables.write(path, found)
    return str(path)


OLD = table({WIDE: [cell(1, ONE), cell(8, ONE), cell(16, ONE), cell(64, ONE)], SMALL: [cell(4, ONE)]})
NEW = table(
    {
        WIDE: [
            cell(1, ONE, time_us=10.1),  # within 2%
            cell(8, SPLIT, time_us=10.3),
            cell(16, SPLIT, time_us=8.0),
            cell(64, ONE, time_us=20.0),
            cell(128, ONE, time_us=5.0),
        ]
    }
)


def test_slower_cells_come_first_and_decide_the_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = written(tmp_path / "a.json", OLD), written(tmp_path / "b.json", NEW)
    assert cli.main(["diff", a, b]) == 1
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith((WIDE.label().split()[0], SMALL.label()[:5]))]
    kinds = ["SLOWER", "SLOWER", "faster", "same", "gone", "new"]
    assert [next(k for k in kinds if k in row) for row in rows] == kinds
    assert "2.000" in rows[0] and "64" in rows[0]
    assert f"{ONE.label()} -> {SPLIT.label()}" in out
    assert "6 cells: 2 SLOWER, 1 faster, 1 same, 1 gone, 1 new; the same means within 2.0%" in out
    assert "2.000 at worst" in out
    assert "\x1b" not in out  # no colours in a pipe
    assert "differs" not in out
    # the other way round, and with a margin that forgives
    assert cli.main(["diff", a, a]) == 0
    assert cli.main(["diff", b, a]) == 1  # batch 16 was faster
    assert cli.main(["diff", a, b, "--margin", "0.5"]) == 1
    assert cli.main(["diff", a, b, "--margin", "99%"]) == 1
    same = written(tmp_path / "c.json", dataclasses.replace(NEW, entries={WIDE: NEW.entries[WIDE][:3]}))
    assert cli.main(["diff", a, same, "--margin", "3.1%"]) == 0


def test_json_has_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = written(tmp_path / "a.json", OLD), written(tmp_path / "b.json", NEW)
    assert cli.main(["diff", a, b, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["counts"] == {"SLOWER": 2, "faster": 1, "same": 1, "gone": 1, "new": 1}
    assert found["worst_ratio"] == 2.0
    assert found["mean_ratio"] == pytest.approx((1.01 * 1.03 * 0.8 * 2.0) ** 0.25)
    first = found["cells"][0]
    assert (first["batch"], first["ratio"], first["change"]) == (64, 2.0, "SLOWER")
    assert first["a"] == {"config": ONE.label(), "time_us": 10.0}
    gone = next(c for c in found["cells"] if c["change"] == "gone")
    assert (gone["problem"], gone["b"], gone["ratio"]) == (SMALL.label(), None, None)


def test_what_else_differs_is_said(tmp_path: Path) -> None:
    lengths = {"verify": {"problem": WIDE.label(), "lengths": [0.5, 0.5]}, "broken": 3, "other": {"lengths": "x"}}
    a = table({WIDE: [cell(1, ONE)]}, acceptance=lengths, versions={"torch": "1"}, policy={"replays": 9, "commit": "a"})
    other = {**lengths, "verify": {**lengths["verify"], "lengths": [1.0, 0.0]}}  # type: ignore[dict-item]
    b = table(
        {WIDE: [cell(1, ONE)]},
        acceptance=other,
        versions={"torch": "2"},
        policy={"replays": 3, "commit": "b"},
        provenance="estimated",
        gpu_name="NVIDIA B200",
        kernel_fingerprint="f" * 64,
    )
    sides = [Side.read(Path(written(tmp_path / f"{n}.json", t))) for n, t in (("a", a), ("b", b))]
    said = Diff.of(*sides, margin=0.02).differences()
    kernels = OLD.manifest.kernel_fingerprint[:12]
    assert said == [
        "GPU: NVIDIA H200 (sm_90a) in A, NVIDIA B200 (sm_90a) in B",
        "provenance: measured in A, estimated in B",
        f"kernels: {kernels} in A, ffffffffffff in B",
        "torch: 1 in A, 2 in B",
        "policy replays: 9 in A, 3 in B",
        f"acceptance lengths of {WIDE.label()}: [0.5, 0.5] in A, [1.0, 0.0] in B",
    ]


def test_results_are_compared_by_their_winners(tmp_path: Path) -> None:
    candidates = (Candidate(ONE, 10.0), Candidate(SPLIT, 9.0))
    results = Results("p", "P", "s", OLD.manifest, 4600.0, "m", 0.02, (), (
        CellResult("verify", WIDE, 16, 1000, 0.2, ONE, candidates),
    ))  # fmt: skip
    results.save(tmp_path / "x.results.json")
    side = Side.read(tmp_path / "x.results.json")
    assert {k: (c.config, c.time_us, c.default_us) for k, c in side.cells.items()} == {
        (WIDE, 16): (SPLIT.label(), 9.0, 10.0)
    }
    against_table = Diff.of(Side.read(Path(written(tmp_path / "a.json", OLD))), side, 0.02)
    assert against_table.counts()["faster"] == 1


@pytest.mark.parametrize("content", ["", "{}", "[" * 100_000, '{"schema": 1}', "\x00\xff", '{"cells": 3}', None])
def test_files_that_are_neither_cost_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None
) -> None:
    a = written(tmp_path / "a.json", OLD)
    for name in ("b.json", "b.table.json", "b.results.json"):
        if content is not None:
            (tmp_path / name).write_text(content)
        for pair in ([a, str(tmp_path / name)], [str(tmp_path / name), a]):
            assert cli.main(["diff", *pair]) == 2
            said = capsys.readouterr()
            assert said.err.startswith(f"error: {tmp_path / name}: ")
            assert said.err.count("\n") == 1
            assert len(said.err) < 1200
            assert said.out == ""


@pytest.mark.parametrize("margin", ["-1", "2", "100%", "x", "nan"])
def test_a_margin_is_a_share(capsys: pytest.CaptureFixture[str], margin: str) -> None:
    with pytest.raises(SystemExit) as e:
        cli.main(["diff", "a", "b", f"--margin={margin}"])
    assert e.value.code == 2
    assert f"got '{margin}', expected a share" in capsys.readouterr().err


def test_times_of_zero_are_no_ratio() -> None:
    zero, some = (table({WIDE: [cell(1, ONE, time_us=t)]}) for t in (0.0, 1.0))
    sides: list[Any] = [Side(Path("x"), t.manifest, Side.read_cells(t)) for t in (zero, some)]
    assert Diff.of(sides[0], sides[1], 0.02).counts()["SLOWER"] == 1
    assert Diff.of(sides[0], sides[0], 0.02).counts()["same"] == 1
    assert Diff.of(sides[0], sides[0], 0.02).mean() is None
    assert Diff.of(sides[1], sides[0], 0.02).mean() is None
