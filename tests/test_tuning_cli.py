"""Habits of the command line: help with examples and exit codes, JSON alone on stdout, progress on stderr."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from replayssm_tuning import arguments, cli, progress
from tuning_fakes import PLAN, Compiler

from replayssm_cute import compiler, tables

COMMANDS = ("sweep", "peers", "report", "diff", "fit", "estimate-all", "list", "explain-plan")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.toml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiler, "compile_many", Compiler())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return tmp_path


def help_of(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit) as e:
        cli.main([*command, "--help"])
    assert e.value.code == 0
    return capsys.readouterr().out


def test_help_has_examples_that_parse_and_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    for command in COMMANDS:
        text = help_of(capsys, command)
        examples = re.findall(r"^  replayssm-tune (.+)$", text, re.M)
        assert examples
        for example in examples:
            assert arguments.parser().parse_args(example.split()).command == command
        codes = {int(code) for code in re.findall(r"^  (\d+)  ", text.split("exit codes:")[1], re.M)}
        assert {0, 1, 2} <= codes
        assert max(map(len, text.splitlines())) <= 110
    whole = help_of(capsys)
    assert all(f"replayssm-tune {command}" in whole for command in COMMANDS)
    assert "exit codes of diff:" in whole


def run(capsys: pytest.CaptureFixture[str], *command: str) -> Any:
    """What a command's `--json` prints, which is all that is on stdout."""
    assert cli.main([*command, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_json_is_all_that_stdout_gets(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    swept = run(capsys, "sweep", "--plan", "small.toml", "--targets", "sm_90a", "--out", "out")
    (made,) = swept["tables"]
    assert (made["provenance"], made["gpu"], swept["out"]) == ("estimated", "NVIDIA H200", "out")
    table = tables.read(made["table"])
    winners = {(p.label(), c.batch): c.config.label() for p, cells in table.entries.items() for c in cells}
    assert {(c["problem"], c["batch"]): c["label"] for c in made["cells"]} == winners

    drawn = run(capsys, "report", "out")
    assert [Path(p).name for p in drawn["pages"]] == ["report.md", "report.html"]
    assert all(Path(p).is_file() for p in drawn["pages"])
    assert drawn["errors"] == []

    plan = run(capsys, "explain-plan", "--plan", "small.toml")
    verify = plan["workloads"][0]
    assert verify["lengths"] == [0.25] * 4
    assert sum(verify["pnat"]) == pytest.approx(1)
    assert verify["flush"] == pytest.approx(sum(verify["pnat"][13:]))  # pnat + 4 > 16

    shipped = {p["plan"]: p for p in run(capsys, "list")}
    assert shipped["nemotron3-super"]["tp"] == [1, 2, 4, 8]
    assert run(capsys, "diff", made["table"], made["table"])["worst_ratio"] == 1.0


def test_a_failure_prints_no_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", "--plan", "none.toml", "--json"]) == 2
    assert cli.main(["report", "nowhere", "--json"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("error: ") == 2


def test_progress_is_not_among_the_results(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_LINE_EVERY_S", 0.0)
    assert cli.main(["sweep", "--plan", "small.toml", "--targets", "sm_90a", "--out", "out"]) == 0
    said = capsys.readouterr()
    assert "compile: 1 of " in said.err and "budget left" in said.err
    assert "compile:" not in said.out and "budget left" not in said.out
    assert "table out/nvidia-h200-sm_90a-estimated.table.json" in said.out
    assert "\x1b" not in said.out + said.err


def test_what_a_plan_says_is_no_markup(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "odd.toml").write_text(PLAN.replace('"A small model"', '"[/red] A [bold]model[/]"'))
    assert cli.main(["explain-plan", "--plan", "odd.toml"]) == 0
    assert "[/red] A [bold]model[/]" in capsys.readouterr().out


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_a_reader_that_leaves_early_is_no_error(more: list[str]) -> None:
    command = [sys.executable, "-m", "replayssm_tuning", "explain-plan", "--plan", "nemotron3-nano-30b", *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()  # before anything is printed
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("sweep --plan small.toml --device 4", "--device: got 4, this machine has no CUDA GPU"),
        ("sweep --plan small.toml --archive small.toml/x.tgz", "--archive: got small.toml, expected a folder"),
        ("sweep --plan small.toml --merge-into small.toml/t.json", "--merge-into: got small.toml, expected a folder"),
        ("sweep --plan small.toml --merge-into .", "--merge-into: got ., expected the name of a file; it is a folder"),
        ("estimate-all --plans small.toml --gpus b200 --out small.toml", "--out: got small.toml, expected a folder"),
        (
            "estimate-all --plans small.toml --out o --pages small.toml/x",
            "--pages: got small.toml/x, expected a folder",
        ),
    ],
)
def test_what_cannot_be_done_is_said_before_the_work(
    command: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr(compiler, "compile_many", never)
    assert cli.main(command.split()) == 2
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert line.startswith(f"error: {said}") and told.out == ""
