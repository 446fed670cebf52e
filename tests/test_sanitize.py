"""The sanitizer command without a GPU: what it calls a success, where it finds the tool, and what it would run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import sanitize
import torch

from replayssm_cute import plan, target

CLEAN = {
    "memcheck": "========= ERROR SUMMARY: 0 errors",
    "racecheck": "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)",
    "synccheck": "========= ERROR SUMMARY: 0 errors",
    "initcheck": "========= ERROR SUMMARY: 0 errors",
}


@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_only_a_clean_run_to_the_end_is_a_success(tool: str) -> None:
    clean = f"========= COMPUTE-SANITIZER\n{sanitize.ALL_RAN}\n{CLEAN[tool]}\n"
    assert sanitize.verdict(tool, 0, clean) is None
    assert sanitize.verdict(tool, 86, clean) == f"{tool}: exit code 86"
    assert sanitize.verdict(tool, 0, clean.replace(" 0 ", " 1 ", 1)) == f"{tool}: 1 found"
    assert sanitize.verdict(tool, 0, f"{clean}{CLEAN[tool].replace(' 0 ', ' 3 ', 1)}") == f"{tool}: 3 found"
    assert sanitize.verdict(tool, 0, clean.replace(sanitize.ALL_RAN, "")) == (
        f"{tool}: the launches did not all run (exit code 0)"
    )
    assert "no summary" in (sanitize.verdict(tool, 0, sanitize.ALL_RAN) or "")


def fake(path: Path, *lines: str) -> Path:
    """A tool that prints lines, and runs nothing."""
    path.write_text("#!/bin/sh\n" + "\n".join(f"echo '{line}'" for line in lines) + "\n")
    path.chmod(0o755)
    return path


def test_a_tool_is_run_and_believed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = fake(tmp_path / "good", sanitize.ALL_RAN, CLEAN["memcheck"])
    bad = fake(tmp_path / "bad", "========= Invalid __global__ read of size 4 bytes", "ERROR SUMMARY: 2 errors")
    assert sanitize.run_tool(good, "memcheck", ["true"], 20) is None
    assert "clean" in capsys.readouterr().out
    assert sanitize.run_tool(bad, "memcheck", ["true"], 20) == "memcheck: 2 found"
    assert "Invalid __global__ read" in capsys.readouterr().out
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\necho begun\nexec sleep 30\n")
    slow.chmod(0o755)
    assert sanitize.run_tool(slow, "racecheck", ["true"], 0.5) == "racecheck: not done after 0 s"


def test_the_tool_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COMPUTE_SANITIZER", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(sanitize.sysconfig, "get_path", lambda name: str(tmp_path / "none"))
    assert sanitize.find_tool() is None
    folder = tmp_path / "nvidia" / "cu13" / "compute-sanitizer"
    folder.mkdir(parents=True)
    wheel = fake(folder / "compute-sanitizer")
    assert sanitize.find_tool() == wheel
    (tmp_path / "bin").mkdir()
    toolkit = fake(tmp_path / "bin" / "compute-sanitizer")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert sanitize.find_tool() == toolkit
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert sanitize.find_tool() == toolkit
    monkeypatch.setenv("COMPUTE_SANITIZER", str(wheel))
    assert sanitize.find_tool() == wheel
    monkeypatch.setenv("COMPUTE_SANITIZER", str(tmp_path / "none"))
    assert sanitize.find_tool() is None, "what is named and absent is not replaced by another"


def test_without_a_gpu_or_a_tool_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert sanitize.main([]) == 1
    assert "no CUDA GPU" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "find_tool", lambda: None)
    assert sanitize.main([]) == 1
    assert "compute-sanitizer: not found" in capsys.readouterr().err
    for wrong in (["--tools", "memchek"], ["--only", "nothing like it"]):
        with pytest.raises(SystemExit):
            sanitize.main(wrong)


def test_one_failing_tool_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitize, "find_tool", lambda: Path("tool"))
    monkeypatch.setattr(sanitize, "compile_all", lambda chosen: None)
    monkeypatch.setattr(sanitize, "launch_all", lambda chosen, keep: keep.write_text("kept"))
    ran: list[str] = []

    def run(sanitizer: Path, tool: str, launch: list[str], timeout_s: float) -> str | None:
        ran.append(tool)
        assert launch[2] == "--launch" and Path(launch[3]).read_text() == "kept" and launch[4:] == ["--only", "ragged"]
        return f"{tool}: 1 found" if tool == "synccheck" else None

    monkeypatch.setattr(sanitize, "run_tool", run)
    assert sanitize.main(["--only", "ragged"]) == 1
    assert sorted(ran) == sorted(sanitize.TOOLS), "the others run all the same"
    assert sanitize.main(["--only", "ragged", "--tools", "memcheck,initcheck"]) == 0


def test_every_kind_of_step_is_among_them() -> None:
    h200 = target.named("h200")
    cases = sanitize.step_cases()
    problems = [p for p, _, _ in cases.values()]
    for problem, config, make in cases.values():
        assert config.invalid_reason(problem, h200) is None
        found = plan.problem_of(make(), problem.pdl)
        assert found == problem
    for ragged in (False, True):
        of_kind = [(p, c) for p, c, _ in cases.values() if p.ragged is ragged]
        assert {p.state_dtype for p, _ in of_kind} == {"f32", "bf16", "f16"} | (set() if ragged else {"f8e4m3", "i8"})
        assert {p.window > 16 for p, _ in of_kind} == {p.tokens > 16 for p, _ in of_kind} == {False, True}
        assert any(c.tail_rows for _, c in of_kind) and any(c.heads_per_cta > 1 for _, c in of_kind)
        assert any(c.parallel_heads > 1 for _, c in of_kind) and any(c.ring == "whole" for _, c in of_kind)
    assert {p.head_dim for p in problems} == {64, 80, 128} and {p.d_state for p in problems} == {64, 128, 256}
    assert {p.compact for p in problems} == {p.pdl for p in problems} == {False, True}
    assert {p.index_dtype for p in problems} == {"i32", "i64", None}


def test_launching_here_holds_the_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The launches' own comparison bites: a kernel that does nothing is refused."""
    from replayssm_cute import compiler
    from replayssm_cute.reference import checkpointing_ssu_reference

    monkeypatch.setattr(sanitize, "_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr("replayssm_cute.target.of_device", lambda index: target.named("h200"))

    def reference(problem: object, config: object, where: object) -> object:
        def kernel(*arguments: object) -> None:
            checkpointing_ssu_reference(**plan.call_of(problem, arguments).kwargs())  # type: ignore[arg-type]

        return kernel

    monkeypatch.setattr(compiler, "get", reference)
    chosen = ["ragged", "plain", "gaps everywhere"]
    sanitize.launch_all(chosen)
    assert capsys.readouterr().out.strip() == sanitize.ALL_RAN
    monkeypatch.setattr(compiler, "get", lambda *_: lambda *arguments: None)
    with pytest.raises(SystemExit, match="plain: "):
        sanitize.launch_all(chosen)
    assert sanitize.ALL_RAN not in capsys.readouterr().out
