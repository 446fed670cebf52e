"""Warmup of decode steps: what it readies, what it says, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import fused_lanes
import pytest
import test_fused_kernels
import torch
from fused_calls import layer, random_layer_call
from gpu_kernels import of_layers
from test_fused_kernels import STEP
from test_fused_overlap import FASTER_ALONE, written

from replayssm_cute import compiler, warmup
from replayssm_cute.cache import CacheSpec, ReplayCache
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import launches, overlap
from replayssm_cute.fused.chains import Overlap
from replayssm_cute.fused.problem import layer_problem
from replayssm_cute.fused.warmup import scratch_call

on_host = test_fused_kernels.on_host
PROBLEM = layer(STEP, norm_groups=2)


def test_every_batch_is_ready_afterwards(on_host: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Also batches between, with every overlap that a table has for them, and under either promise."""
    written(tmp_path / "a.json", {4: FASTER_ALONE | {"chain, PDL, x in step": 9.0}, 64: FASTER_ALONE}, STEP)
    monkeypatch.setattr(overlap, "FOLDER", tmp_path)
    overlap.forget()
    lines: list[str] = []
    try:
        found = warmup([PROBLEM, PROBLEM], [64, 4, 64], device=-1, progress=lines.append)
        assert [(c.batch, c.overlap, c.decoded) for c in found.layers] == [
            (4, Overlap.INNER_X, 2),
            (64, Overlap.NONE, 2),
        ]
        # W 5, T 3: the second step flushes; the proof of the step that convolves x launches it too
        assert on_host.count("step with conv") >= 2 and on_host.count("step") == 2
        assert "batch 4: chain, PDL, x in step, h1 s1 p1 live c1" in str(found) and "4 steps" in str(found)
        assert len(lines) == 2 and not found.covered
        monkeypatch.setattr(compiler, "capturing", lambda: True)
        for batch in (1, 4, 9, 64):
            launches.run(random_layer_call(PROBLEM, batch), False, None)
        with pytest.raises(RuntimeError, match=r"decode_step's .* is not ready.*warmup with its LayerProblem"):
            launches.run(random_layer_call(PROBLEM, 64), True, None)
        monkeypatch.setattr(compiler, "capturing", lambda: False)
        promised = warmup([PROBLEM], [4], enable_pdl=True, device=-1)
        assert promised.layers[0].overlap is Overlap.INNER_X
        monkeypatch.setattr(compiler, "capturing", lambda: True)
        for batch in (4, 64):
            launches.run(random_layer_call(PROBLEM, batch), True, None)
    finally:
        overlap.forget()


def test_its_calls_are_of_the_problem() -> None:
    for changes in (
        {},
        {"index_dtype": None, "d_dtype": None, "dt_bias_dtype": None},
        {"io_dtype": "f16", "dt_dtype": "f16"},
    ):
        problem = layer(dataclasses.replace(STEP, **changes), norm_groups=2, conv_bias_dtype=None if changes else "f16")
        assert layer_problem(scratch_call(problem, torch.device("cpu"), 3)) == problem


def test_kernels_that_are_wrong_stop_it(on_host: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPLAYSSM_SELFCHECK")
    monkeypatch.setattr(fused_lanes.MODULES["norm"], "silu", lambda v: v)
    with pytest.raises(RuntimeError, match="self-check: decode_step's norm"):
        warmup([PROBLEM], [1], device=-1)


def test_bad_input(on_host: list[str]) -> None:
    cache = ReplayCache.allocate(
        CacheSpec(layers=1, heads=4, head_dim=64, d_state=64, groups=1, tokens=3, window=5), 4, "cpu"
    )
    cases: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
        ([PROBLEM, 3], {}, TypeError, "problems: got int among them, expected Problem or LayerProblem"),
        (PROBLEM, {}, TypeError, "problems: got LayerProblem, expected a list"),
        ([PROBLEM], {"enable_pdl": 1}, TypeError, "enable_pdl: got int, expected bool"),
        ([PROBLEM], {"batches": [0]}, ValueError, "batches: got 0"),
        ([PROBLEM], {"cache": cache}, ValueError, "does not fit the cache: heads: got 2, expected 4"),
    ]
    for problems, more, kind, said in cases:
        with pytest.raises(kind, match=said):
            warmup(problems, **({"batches": [1], "device": -1} | more))
    assert on_host == []


@pytest.mark.parametrize(
    ("changes", "kind", "said"),
    [
        ({"has_z": True}, ValueError, "has_z: got True"),
        ({"dt_dtype": "f32"}, TypeError, "dt_dtype: got f32, expected bf16"),
        ({"state_dtype": "i8"}, NotImplementedError, "state: got i8"),
        ({"copy_dtype": "bf16"}, NotImplementedError, r"state: got f32\+bf16"),
        ({"ragged": True}, NotImplementedError, "cu_seqlens: ragged rows"),
        ({"window": 2, "tokens": 2}, ValueError, "window: got W = 2"),
    ],
)
def test_problems_that_no_call_can_have(changes: dict[str, Any], kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        layer(dataclasses.replace(STEP, **changes))


WARMED = layer(dataclasses.replace(STEP, heads=16, tokens=2, window=9), norm_groups=4)


@pytest.mark.gpu
@pytest.mark.kernels(
    lambda where: of_layers(
        where, *({"problem": WARMED, "batch": b, "enable_pdl": p} for b in (1, 17) for p in (False, True))
    )
)
def test_a_capture_after_a_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled, loaded or checked afterwards, whatever the batch; the config is what the coverage says."""
    problem = WARMED
    for promise in (False, True):
        found = warmup([problem], [1, 17], enable_pdl=promise)
        assert [c.batch for c in found.layers] == [1, 17] and all(c.config for c in found.layers)
        assert isinstance(found.layers[0].config, TileConfig) and found.layers[0].decoded == 5
        compiler.reset_counters()
        for batch in (1, 3, 17, 200):
            call = scratch_call(problem, torch.device("cuda"), batch)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                launches.run(call, promise, None)
            graph.replay()
        torch.cuda.synchronize()
        assert compiler.counters().compiled == compiler.counters().disk == 0
