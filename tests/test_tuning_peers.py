"""FlashInfer as a peer: which version is there, and its launches below the public call, seen with a stand-in for it."""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from replayssm_tuning import peers

from replayssm_cute.calls import random_call
from replayssm_cute.problem import Problem

PROBLEM = Problem(32, 64, 128, 2, 4, 16)
CHOICE = {"algorithm": "two-kernel", "d_split": 2, "precompute_heads_per_cta": 8}


def test_the_version_of_a_copy_without_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("flashinfer") is not None:
        pytest.skip("FlashInfer is installed here")
    assert peers.installed() == {}
    package = tmp_path / "flashinfer"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert peers.installed() == {"flashinfer": "unknown version"}
    (package / "_build_meta.py").write_text('"""Made by the build."""\n__version__ = "0.7.4"\n')
    assert peers.installed() == {"flashinfer": "0.7.4"}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a stand-in for FlashInfer's runner is made and called with."""
    found: list[Any] = []

    class Runner:
        def __init__(self, specialization: tuple[Any, ...], **options: Any) -> None:
            found.append((specialization, options))

        def forward(self, inputs: list[Any], tactic: tuple[int, ...]) -> None:
            found.append((inputs, tactic))

    module = types.ModuleType("flashinfer.mamba.checkpointing_ssu")
    module.CheckpointingSSURunner, module._ALGORITHM_TWO_KERNEL = Runner, 2  # type: ignore[attr-defined]
    for name in ("flashinfer", "flashinfer.mamba"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(peers, "installed", lambda: {"flashinfer": peers.REFINED_VERSION})
    properties = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return found


def test_launches_below_the_public_call(asked: list[Any]) -> None:
    variants = list(peers.refined(PROBLEM, 16, torch.device("cpu"), CHOICE))
    launches = [(v.choice["stages"], v.choice["ctas_per_sm"]) for v in variants]
    assert launches == [(s, c) for s in (1, 2) for c in (1, 2, 3, 4, 5, 6, 8)]  # more CTAs make the same grid
    assert len({v.name for v in variants}) == len(variants) and not any(v.default for v in variants)
    call = random_call(PROBLEM, 5)
    variants[3].run(call)
    (specialization, options), (inputs, tactic) = asked
    bf16, f32 = torch.bfloat16, torch.float32
    assert specialization == (f32, bf16, bf16, bf16, f32, torch.int32, None, 64, 128, 4, 16, 16, 2, 0, False)
    assert options["dt_softplus"] is True and options["pad_slot_id"] == -1
    assert tactic == (1, 4, 8, 2)  # stages, CTAs a multiprocessor, heads a CTA, d_split
    order = ("state", "x", "dt", "A", "B", "C", "out", "x_cache", "B_cache", "dt_cache", "ring_start")
    order += ("prev_num_accepted_tokens", "D", "z", "dt_bias", "state_batch_indices")
    assert all(given is getattr(call, name) for given, name in zip(inputs, order, strict=False))
    assert inputs[16:19] == [None] * 3
    assert [tuple(t.shape) for t in inputs[19:]] == [(5, 32, 32, 8), (5, 32, 16), (5, 32, 32, 8)]


def test_pdl_and_missing_weights_are_part_of_what_is_compiled(asked: list[Any]) -> None:
    problem = dataclasses.replace(PROBLEM, pdl=True, d_dtype=None, dt_bias_dtype=None, dt_dtype="f32")
    next(peers.refined(problem, 1, torch.device("cpu"), CHOICE)).run(random_call(problem, 1))
    assert asked[0][0][2:4] == (torch.float32, torch.float32)
    assert asked[0][0][-1] is True


def test_other_versions_are_left_alone(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "installed", lambda: {"flashinfer": "0.8.0"})
    assert list(peers.refined(PROBLEM, 16, torch.device("cpu"), CHOICE)) == []
