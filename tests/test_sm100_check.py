"""The command that checks the Blackwell kernel on its owner's GPU."""

from __future__ import annotations

import json
from pathlib import Path

import fakes
import pytest
import test_sm100_choice
from fakes import SMALL
from test_sm100_choice import EitherKernel

from replayssm_cute import plan, selfcheck, sm100_check
from replayssm_cute.sm100 import Sm100Config, covers
from replayssm_cute.target import named

fake_compiler = fakes.fake_compiler
cpu_as_gpu = fakes.cpu_as_gpu
blackwell = test_sm100_choice.blackwell

ONE = json.dumps({"problem": SMALL.to_json(), "config": Sm100Config.of(SMALL).to_json()})
HERE = ["--device", "-1"]


def test_it_checks_every_way_to_take_turns() -> None:
    wanted = list(sm100_check.kernels(sm100_check.PROBLEMS, named("b200")))
    assert len(wanted) == len(set(wanted)) > 50
    assert all(covers(problem) for problem in sm100_check.PROBLEMS)
    assert {problem for problem, _ in wanted} == set(sm100_check.PROBLEMS)
    for control in (False, True):
        shapes = {(c.turns, c.stages, c.ring) for _, c in wanted if c.launch_control == control}
        assert {(t, s, r) for t, s in ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)) for r in ("live", "whole")} <= shapes
    assert {p.head_dim for p, _ in wanted} == {64, 80, 128}
    assert not list(sm100_check.kernels(sm100_check.PROBLEMS, named("h200")))


def test_a_verdict_in_words(blackwell: type[EitherKernel], capsys: pytest.CaptureFixture[str]) -> None:
    assert sm100_check.main([*HERE, "--one", ONE]) == 0
    assert capsys.readouterr().out == "passed\n"


def test_a_wrong_kernel_s_verdict(blackwell: type[EitherKernel], capsys: pytest.CaptureFixture[str]) -> None:
    blackwell.wrong = Sm100Config
    assert sm100_check.main([*HERE, "--one", ONE]) == 0
    assert capsys.readouterr().out.startswith("failed: out error")


def test_unchecked_is_not_passed(
    blackwell: type[EitherKernel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    sm100_check.main([*HERE, "--one", ONE])
    assert "self-checks are off" in capsys.readouterr().out


def test_the_whole_command(
    blackwell: type[EitherKernel], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sm100_check, "_in_a_process", sm100_check.check)
    problem = ["--problem", json.dumps(SMALL.to_json())]
    assert sm100_check.main([*HERE, *problem]) == 0
    said = capsys.readouterr().out
    assert "4 of 4 passed. REPLAYSSM_SM100=1 lets" in said and "[4/4]" in said and "sm100 h2/2" in said
    assert "clc: passed" in said
    selfcheck._verdicts.clear()
    monkeypatch.setattr(sm100_check, "_in_a_process", lambda problem, config, index: "not finished after 300 s")
    assert sm100_check.main([*HERE, *problem]) == 1
    assert "0 of 4 passed." in capsys.readouterr().out
    monkeypatch.setattr(plan, "device_target", lambda index: named("h200"))
    assert sm100_check.main(HERE) == 2
    assert "sm_90a" in capsys.readouterr().out


def test_a_process_of_its_own_tells_what_happened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without a GPU the process fails, and its last words are the verdict; one that hangs is ended."""
    config = Sm100Config.of(SMALL)
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "Error" in sm100_check._in_a_process(SMALL, config, 0)
    monkeypatch.setattr(sm100_check, "SECONDS", 0.01)
    assert sm100_check._in_a_process(SMALL, config, 0) == "not finished after 0 s"


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sm100_check.main(["--problem", '{"heads": 4}'])
    assert "missing" in capsys.readouterr().err
