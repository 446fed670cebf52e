"""Self-checks on a GPU: a wrong kernel is caught there, the shipped ones pass, and verdicts outlive the process."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_kernels import copy_stored, recipes_of
from test_selfcheck import verdicts, warnings

from replayssm_cute import api, compiler, plan, selfcheck, tables, target
from replayssm_cute.calls import random_call
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

ON_GPU = Problem(heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=16)


def served(where: target.Target) -> list[Any]:
    """What may serve `ON_GPU`, also where a kernel of it fails."""
    return [ON_GPU, *((ON_GPU, config) for batch in (1, 8) for config in selfcheck.substitutes(ON_GPU, batch, where))]


def shipped(where: target.Target, change: dict[str, Any]) -> list[Any]:
    """Kernels of a problem like `ON_GPU`."""
    problem = dataclasses.replace(ON_GPU, **change)
    return [(problem, config) for config in selfcheck.substitutes(problem, 1, where)[:3]]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A process that has seen nothing yet, as far as verdicts go; gives its cache directory, which has the kernels."""
    where = plan.device_target(torch.cuda.current_device())
    copy_stored(recipes_of(served, where, {}), where, tmp_path)
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    for module, name, empty in (
        (compiler, "_memory", {}), (selfcheck, "_verdicts", {}), (plan, "_plans", {}), (plan, "_touched", set()),
        (plan, "_prepared", set()), (plan, "_last", (None, None)),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, empty)
    selfcheck._say.cache_clear()
    return tmp_path


@pytest.mark.gpu
@pytest.mark.kernels.with_args(served)
def test_gpu_a_wrong_kernel_is_caught_and_another_serves(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    index = torch.cuda.current_device()
    victim = tables.choose(ON_GPU, 8, plan.device_target(index)).config
    real = compiler.get

    def get(problem: Problem, config: TileConfig, target: Any, **kwargs: Any) -> compiler.Kernel:
        kernel = real(problem, config, target, **kwargs)

        def wrong(*args: Any) -> None:
            kernel(*args)
            args[11][..., 5, :].mul_(1.02)  # one head of sixteen

        return wrong if config == victim else kernel

    monkeypatch.setattr(compiler, "get", get)
    before = random_call(ON_GPU, 8, padding=[2], device="cuda")
    after = before.clone()
    api.checkpointing_ssu(**after.kwargs())
    violation = selfcheck.compare.bounds(ON_GPU).violation(selfcheck.compare.errors(before, after))
    assert violation is None
    (made,) = plan._plans.values()
    assert made.choice.source == "fallback" and made.choice.config != victim
    (warning,) = warnings(caplog)
    assert victim.label() in warning and torch.cuda.get_device_name() in warning and "error" in warning
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        api.checkpointing_ssu(**before.clone().kwargs())


@pytest.mark.gpu
@pytest.mark.kernels.with_args(shipped)
@pytest.mark.parametrize(
    "change",
    [
        {}, {"index_dtype": None}, {"index_dtype": "i64"}, {"compact": False, "has_z": True, "groups": 2},
        {"pdl": True}, {"state_dtype": "bf16", "tokens": 1}, {"heads": 128, "groups": 8},
        {"heads": 4, "state_dtype": "f16", "io_dtype": "f16", "dt_dtype": "f16"},
    ],
    ids=str,
)  # fmt: skip
def test_gpu_the_shipped_kernels_pass(change: dict[str, Any]) -> None:
    index = torch.cuda.current_device()
    for problem, config in shipped(plan.device_target(index), change):
        kernel = compiler.get(problem, config, plan.device_target(index))
        verdict, lost = selfcheck._examine(problem, config, kernel, torch.device("cuda", index))
        assert (verdict, lost) == (selfcheck.Verdict("passed"), False), config.label()


@pytest.mark.gpu
@pytest.mark.kernels.with_args(served)
def test_gpu_the_first_call_is_checked_and_the_next_process_trusts_it(fresh: Path) -> None:
    code = f"""
        import torch
        from replayssm_cute import Problem, api, selfcheck
        from replayssm_cute.calls import random_call
        call = random_call(Problem.from_json({ON_GPU.to_json()}), 8, device="cuda")
        api.checkpointing_ssu(**call.kwargs())
        torch.cuda.synchronize()
        print(selfcheck.count(), selfcheck.driver_version())
    """
    ran = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ},
        )
        assert done.returncode == 0, done.stderr
        count, driver = done.stdout.split()
        assert driver != "None"
        ran.append(int(count))
    files = verdicts(fresh)
    assert ran == [len(files), 0] and files
    assert {json.loads(file.read_text())["outcome"] for file in files} == {"passed"}


@pytest.mark.gpu
@pytest.mark.kernels.with_args(served)
def test_gpu_a_kernel_that_kills_the_context_is_left_out_by_the_next_process(fresh: Path) -> None:
    code = f"""
        import torch
        from replayssm_cute import Problem, api, compiler, plan, tables
        from replayssm_cute.calls import random_call
        problem = Problem.from_json({ON_GPU.to_json()})
        victim = tables.choose(problem, 8, plan.device_target(0)).config
        real = compiler.get
        def get(problem, config, target, **kwargs):
            if config != victim:
                return real(problem, config, target, **kwargs)
            return lambda *args: torch.zeros(1, device="cuda")[torch.full((1,), 99, device="cuda")]
        compiler.get = get
        call = random_call(problem, 8, device="cuda")
        try:
            api.checkpointing_ssu(**call.kwargs())
            torch.cuda.synchronize()
            print("served", next(iter(plan._plans.values())).choice.source)
        except RuntimeError as error:
            print("raised", "Start the process again" in str(error))
    """
    lines = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ},
        )
        lines.append(done.stdout.strip())
    assert lines == ["raised True", "served fallback"], done.stderr
