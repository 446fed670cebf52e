"""The commands beside `replayssm-tune`: what the caller can mend ends them with one line and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from replayssm_tuning import generations, layer_bench, layer_report, precision, precision_speed, studies
from replayssm_tuning.command import check_file, check_folder, command, usage
from replayssm_tuning.errors import UsageError

MAINS: dict[str, Callable[..., int]] = {
    "precision": precision.main,
    "precision_speed": precision_speed.main,
    "generations": generations.main,
    "layer_bench": layer_bench.main,
    "layer_report": layer_report.main,
    "studies": studies.main,
}
WRONG = [
    ("precision", "--tokens -1", "argument --tokens: got '-1', expected a positive int"),
    ("precision", "--tokens x", "argument --tokens: got 'x'"),
    ("precision", "--windows 0", "argument --windows: got '0', expected positive ints"),
    ("precision", "--windows 8,,16", "argument --windows: got '8,,16'"),
    ("precision", "--windows 2", "window: got W = 2 with T = 4"),
    ("precision", "--windows 65", "window: W = 65, T = 4 is not served yet"),
    ("precision", "--heads 0", "argument --heads: got '0'"),
    ("precision", "--heads 3", "groups: 3 heads do not divide into 2 groups"),
    ("precision", "--out {file}/x", "--out: got {file}/x, expected a folder that can be written: Not a directory"),
    ("precision_speed", "--batches 0", "argument --batches: got '0'"),
    ("precision_speed", "--windows -4", "argument --windows: "),
    ("precision_speed", "--windows 3", "window: got W = 3 with T = 4"),
    ("generations", "--tokens 0", "argument --tokens: got '0'"),
    ("generations", "--window 0", "argument --window: got '0'"),
    ("generations", "--window 65", "window: W = 65, T = 4 is not served yet"),
    ("generations", "--out {file}", "--out: got {file}, expected a folder that can be written: File exists"),
    ("layer_bench", "--batches 0 1", "argument --batches: got '0'"),
    ("layer_bench", "--tokens -4", "argument --tokens: "),
    ("layer_bench", "--tokens 4 --window 3", "window: got W = 3 with T = 4"),
    ("layer_bench", "--tokens 1 --window 2", "window: got W = 2, expected at least 3"),
    ("layer_bench", "--state i8", "state: got i8"),
    ("layer_bench", "--budget soon", "argument --budget: "),
    ("layer_bench", "--compile-for v100", "argument --compile-for: unknown target 'v100'"),
    ("layer_bench", "--jobs 0 --compile-for h200", "argument --jobs: got '0'"),
    ("layer_bench", "--out {file}/x.json", "--out: got {file}, expected a folder that can be written: File exists"),
    ("layer_bench", "--out {folder}", "--out: got {folder}, expected the name of a file; it is a folder"),
    ("layer_report", "{folder}/none.json", "{folder}/none.json: No such file or directory"),
    ("layer_report", "{folder}", "{folder}: Is a directory"),
    ("layer_report", "{file}", "{file}: Expecting value"),
    ("layer_report", "{folder}/list.json", "{folder}/list.json: it is no result of layer_bench"),
    ("layer_report", "{folder}/object.json --table t.json", "{folder}/object.json: it is no result of layer_bench"),
    ("studies", "--budget -1", "argument --budget: "),
    ("studies", "--budget nan", "argument --budget: got 'nan'"),
    ("studies", "--workers 0", "argument --workers: got '0'"),
    ("studies", "--device 99", "--device: got 99"),
]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    for name, text in (("file", "no JSON"), ("list.json", "[]"), ("object.json", "{}")):
        (tmp_path / name).write_text(text)
    return {"file": str(tmp_path / "file"), "folder": str(tmp_path)}


@pytest.mark.parametrize(("name", "arguments", "said"), WRONG, ids=[f"{n} {a}" for n, a, _ in WRONG])
def test_what_the_caller_can_mend_is_one_line_and_code_2(
    name: str, arguments: str, said: str, places: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(p.name for p in Path(places["folder"]).iterdir())
    try:
        code = MAINS[name](arguments.format(**places).split())
    except SystemExit as e:  # argparse's own way
        code = e.code  # type: ignore[assignment]
    told = capsys.readouterr()
    assert code == 2 and told.out == ""
    *_, last = told.err.strip().splitlines()
    assert "error: " in last and said.format(**places) in last
    assert last.startswith(("error: ", "python -m replayssm_tuning."))
    assert "Traceback" not in told.err
    assert sorted(p.name for p in Path(places["folder"]).iterdir()) == before


def test_times_of_another_layout_are_no_traceback(places: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """Every field of a result may be missing or something else."""
    good = {
        "gpu": "NVIDIA H200", "arch": "sm_90a", "kernel_fingerprint": "0" * 64, "layer_kernel_fingerprint": "0" * 64,
        "machine_code": {}, "toolchain": {}, "torch": "2", "window": 16, "state": "f32", "policy": {}, "read_gbs": 1.0,
        "cells": [{"tokens": 4, "batch": 1, "times": {}}],
    }  # fmt: skip
    path = Path(places["folder"]) / "times.json"
    for field in good:
        for value in (None, [], {}, "x", -1, [1], [{}]):
            path.write_text(json.dumps(good | {field: value}))
            assert layer_report.main([str(path)]) == 2
            (line,) = capsys.readouterr().err.splitlines()
            assert line.startswith(f"error: {path}: it is no result of layer_bench")


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (UsageError("a\nb"), 2, "error: a b\n"),
        (OSError(28, "No space left on device", "x.csv"), 1, "error: [Errno 28] No space left on device: 'x.csv'\n"),
        (KeyboardInterrupt(), 130, "interrupted; what was written by then stays\n"),
    ],
)
def test_how_a_command_ends(raised: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main(argv: object) -> int:
        raise raised

    assert command(main)([]) == code
    assert capsys.readouterr().err == said
    assert command(lambda argv: 3)() == 3


def test_faults_of_the_program_stay_tracebacks() -> None:
    def main(argv: object) -> int:
        raise RuntimeError("wrong numbers")

    with pytest.raises(RuntimeError, match="wrong numbers"):
        command(main)([])
    with pytest.raises(KeyError), usage("x"):
        raise KeyError("y")
    with pytest.raises(UsageError, match=r"^x: KeyError: 'y'$"), usage("x", KeyError):
        raise KeyError("y")


def test_places_are_checked_before_the_work(tmp_path: Path) -> None:
    check_folder("--out", tmp_path / "a" / "b")
    check_file("--out", tmp_path / "c" / "d.json")
    assert sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*")) == ["a", "a/b", "c"]
    with pytest.raises(UsageError, match="expected the name of a file; it is a folder"):
        check_file("--out", tmp_path)


def test_run_as_a_module_it_ends_the_same_way(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "replayssm_tuning.layer_report", str(tmp_path / "none.json")],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {tmp_path}/none.json: No such file or directory\n"
