"""The Blackwell step kernel on a Blackwell GPU: the cases that the host simulates, through the public call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_kernels import copy_stored
from simulated_cases import example_call
from sm100_cases import CASES

from replayssm_cute import api, compare, plan, selfcheck, target
from replayssm_cute.compiler import StepRecipe
from replayssm_cute.sm100 import ARCHES


@pytest.fixture
def on_blackwell() -> None:
    """Skips where the GPU is another."""
    arch = plan.device_target(torch.cuda.current_device()).arch
    if arch not in ARCHES:
        pytest.skip(f"the kernel is for {' and '.join(ARCHES)}, this GPU is {arch}")


def kernel(where: target.Target, name: str) -> list[StepRecipe]:
    """The kernel of a case, where it is one of the GPU's."""
    return [StepRecipe(*CASES[name])] if where.arch in ARCHES else []


@pytest.mark.gpu
@pytest.mark.kernels.with_args(kernel)
@pytest.mark.parametrize("name", CASES)
def test_gpu_step(on_blackwell: None, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Self-checked, then eagerly and from a graph, against the reference."""
    problem, config = CASES[name]
    index = torch.cuda.current_device()
    where = plan.device_target(index)
    copy_stored(kernel(where, name), where, tmp_path)
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    assert selfcheck.passed(problem, config, index), selfcheck.excluded(problem, config, index)
    call, _ = example_call(problem)
    before = call.to(torch.device("cuda", index))
    eager, captured = before.clone(), before.clone()
    api.checkpointing_ssu(**eager.kwargs(), enable_pdl=problem.pdl, config=config)
    assert compare.bounds(problem).violation(compare.errors(before, eager)) is None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        api.checkpointing_ssu(**captured.kwargs(), enable_pdl=problem.pdl, config=config)
    graph.replay()
    torch.cuda.synchronize()
    assert compare.bounds(problem).violation(compare.errors(before, captured)) is None
