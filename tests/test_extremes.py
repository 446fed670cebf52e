"""Extreme numbers: weak and strong decay in one window, large dt, x near the end of f16.

The reference against the oracle, and the step kernel's own arithmetic on the host; on a GPU every tile.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from extremes import bounds, kinds
from gpu_matrix import AXES, tile_config
from oracle import oracle_step
from simulated_cases import BASE, F16
from simulator.launch import Run

import replayssm_cute
from replayssm_cute import compare, compiler, target
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

HALF = {"io_dtype": "f16", "dt_dtype": "f16"}
SMALL = {
    "f32": BASE,
    "f16": F16,
    "f32, f16 inputs": dataclasses.replace(F16, state_dtype="f32"),
    "ragged bf16": dataclasses.replace(BASE, state_dtype="bf16", ragged=True, has_z=False, d_dtype=None),
}
ASKED = [(name, kind) for name, problem in SMALL.items() for kind in kinds(problem)]


@pytest.mark.parametrize(("name", "kind"), ASKED)
def test_the_reference_against_the_oracle(name: str, kind: str) -> None:
    problem = SMALL[name]
    call = kinds(problem)[kind](problem)
    expected = oracle_step(call)
    before = call.clone()
    replayssm_cute.checkpointing_ssu(**call.kwargs())
    assert np.isfinite(expected.out).all() and bool(torch.isfinite(call.out).all())
    difference = np.linalg.norm(call.out.double().numpy() - expected.out) / np.linalg.norm(expected.out)
    assert difference < bounds(problem).out
    assert bounds(problem).violation(compare.errors(before, call)) is None


@pytest.mark.parametrize(("name", "kind"), [a for a in ASKED if a[1] in ("weak and strong decay", "x 6e4, dt 0.001")])
def test_the_kernels_arithmetic(name: str, kind: str) -> None:
    """The kernel's source, run on the host."""
    problem = SMALL[name]
    call = kinds(problem)[kind](problem)
    before = call.clone()
    Run(problem, TileConfig(), call)
    assert bounds(problem).violation(compare.errors(before, call)) is None


def test_a_window_holds_decays_of_every_size() -> None:
    """The draws reach what they promise: both ends within one window."""
    call = kinds(BASE)["weak and strong decay"](BASE)
    decay = call.A[:, 0, 0, None] * call.dt_cache[:, :, :]
    live = decay[torch.isfinite(decay)]
    assert float(live.max()) > -1e-5 and float(live.min()) < -300 and float(live.min()) >= -1001


LARGE = Problem(heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=16, has_z=True)
GPU: dict[str, Problem] = {
    "f32": LARGE,
    "bf16": dataclasses.replace(LARGE, state_dtype="bf16"),
    "f16": dataclasses.replace(LARGE, state_dtype="f16", **HALF),
    "f32, f16 inputs": dataclasses.replace(LARGE, **HALF),
    "long": dataclasses.replace(LARGE, tokens=32, window=64),
    "ragged, long, f16": dataclasses.replace(
        LARGE, tokens=17, window=40, groups=2, ragged=True, state_dtype="bf16", **HALF
    ),
    "T 1": dataclasses.replace(LARGE, tokens=1, state_dtype="bf16"),
}
TILES = {name: AXES["tile"] if name in ("f32", "f16") else ("one", "tail") for name in GPU}


@pytest.fixture(scope="module")
def kernels() -> Iterator[target.Target]:
    """Every kernel below, compiled in parallel; each is held to more here than in its self-check."""
    where = target.of_device(torch.cuda.current_device())
    compiler.compile_many([(p, tile_config(t, p, where), where) for n, p in GPU.items() for t in TILES[n]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLAYSSM_SELFCHECK", "0")
        yield where


@pytest.mark.gpu
@pytest.mark.fault(2)
@pytest.mark.parametrize(("name", "kind"), [(n, k) for n, p in GPU.items() for k in kinds(p)])
def test_on_a_gpu(name: str, kind: str, kernels: target.Target) -> None:
    problem = GPU[name]
    for tile in TILES[name]:
        before = kinds(problem)[kind](problem, device="cuda")
        after = before.clone()
        replayssm_cute.checkpointing_ssu(**after.kwargs(), config=tile_config(tile, problem, kernels))
        torch.cuda.synchronize()
        found = compare.errors(before, after)
        assert bounds(problem).violation(found) is None, f"{tile}: {found}"
        assert bool(torch.isfinite(after.out).all())
