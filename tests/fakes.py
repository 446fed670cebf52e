"""Stand-ins that let the run time be tested without a GPU: a fake compiler, and CPU tensors in a GPU's place."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from replayssm_cute import compiler, plan, resources, selfcheck, tables
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference
from replayssm_cute.target import named

SMALL = Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=4)
H200 = named("h200")
GPU = selfcheck.Gpu("NVIDIA H200", "9.0", "580.1")
RESOURCES = resources.Resources("step", 80, 0, 0, 1000, 128, 4096)


class FakeCompiled:
    """What the fake compiler returns: exports itself as JSON."""

    def __init__(self, problem: Problem, config: TileConfig, arch: str) -> None:
        self.data = {"problem": problem.to_json(), "config": config.to_json(), "arch": arch}

    def export_to_c(self, path: str, function_name: str) -> None:
        Path(path).write_text(json.dumps({**self.data, "symbol": function_name}))


class FakeKernel:
    """A kernel that runs the reference, for the problem that was exported; counts its launches."""

    def __init__(self, path: Path) -> None:
        data = json.loads(path.read_text())
        self.problem = Problem.from_json(data["problem"])
        self.config = TileConfig.from_json(data["config"])
        self.launches = 0

    def __call__(self, *args: Any) -> None:
        self.launches += 1
        checkpointing_ssu_reference(**plan.call_of(self.problem, args).kwargs())


@pytest.fixture
def fake_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The compiler with a fake DSL and a cache of its own; gives the cache directory."""
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler, "_build", FakeCompiled)
    monkeypatch.setattr(compiler, "_load", FakeKernel)
    monkeypatch.setattr(resources, "cubin", lambda data: data)
    monkeypatch.setattr(resources, "read_cubin", lambda data, shared: RESOURCES)
    for name in ("_memory", "_unsaved"):
        monkeypatch.setattr(compiler, name, {})
    monkeypatch.setattr(compiler, "_said", set())
    monkeypatch.setattr(compiler, "_private", None)
    compiler.reset_counters()
    return tmp_path / "cache"


@pytest.fixture
def cpu_as_gpu(fake_compiler: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans on CPU tensors: their device index is -1, their target an H200, their kernels the reference."""
    monkeypatch.setattr(plan, "device_target", lambda index: H200)
    monkeypatch.setattr(plan, "current_device", lambda: -1)
    monkeypatch.setattr(plan, "on_device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(plan, "tensor_device", lambda index: torch.device("cpu"))
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_last", (None, None))
    monkeypatch.setattr(selfcheck, "gpu", lambda index: GPU)
    monkeypatch.setattr(selfcheck, "_verdicts", {})
    selfcheck._say.cache_clear()
    for name in ("_prepared", "_touched"):
        monkeypatch.setattr(plan, name, set())
    monkeypatch.setattr(tables.files, "shipped", list)
    monkeypatch.setattr(tables.lookup, "_paths", ())
    tables.forget()
    yield
    tables.forget()  # what was read here, without shipped tables
