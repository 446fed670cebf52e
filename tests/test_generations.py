"""Long generations: the study's own arithmetic on the CPU, and 4,096 tokens on a GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch
from replayssm_tuning import generations
from replayssm_tuning.generations import STATES, Study

from replayssm_cute import ring

SMALL = dataclasses.replace(Study().problem, heads=2, d_state=64, groups=1, tokens=3, window=5)
ANCHOR = Study(512, dataclasses.replace(Study().problem, tokens=1, window=1), 4)
# Errors that the end of a generation may have: rounding of the bf16 outputs (1.65e-3), and of the state at each flush.
LIMITS = {"f32": 2.2e-3, "f16": 2.2e-3, "bf16": 6e-3}


def curves_of(study: Study, state: str, device: str = "cpu") -> pd.DataFrame:
    return generations.Truth(study, device).curves(state)


def end(curves: pd.DataFrame, update: str) -> float:
    """Mean error of the last quarter."""
    errors = curves[curves["update"] == update]["error"]
    return float(errors[-(len(errors) // 4) :].mean())


@pytest.mark.fault(13)
@pytest.mark.parametrize("state", STATES)
def test_errors_stay_bounded(state: str) -> None:
    curves = curves_of(Study(tokens=256, problem=SMALL, requests=2), state)
    for _, curve in curves.groupby("update"):
        assert curve["token"].tolist() == [64, 128, 192, 256]
    assert end(curves, "replay") < LIMITS[state]
    if state != "f32":  # a state that is rounded at flushes only is nearer to the truth than one rounded every token
        assert end(curves, "replay") < end(curves, "every token") * 1.05


def test_a_window_of_one_is_the_anchor() -> None:
    """W = T = 1: every step flushes what the last one brought."""
    problem = dataclasses.replace(SMALL, tokens=1, window=1)
    assert end(curves_of(Study(96, problem, 2), "f32"), "replay") < LIMITS["f32"]


def test_a_wrong_commit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison bites: a cursor that moves by one token too few spoils everything after it."""
    real = ring.commit

    def late(start: torch.Tensor, pnat: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, **how: int) -> None:
        real(start, pnat, slots, (accepted - 1).clamp(min=0), **how)

    monkeypatch.setattr(ring, "commit", late)
    assert end(curves_of(Study(64, SMALL, 2), "f32"), "replay") > 0.05


def test_the_command_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "Study", lambda tokens=32, problem=SMALL: Study(tokens, SMALL, 1))
    assert generations.main(["--tokens", "32", "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"generations.csv", "generations.png", "generations.json"}
    assert set(pd.read_csv(tmp_path / "generations.csv")["state"]) == set(STATES)


@pytest.mark.gpu
@pytest.mark.kernels(lambda where, state: [generations.kernel_of(Study(), state, where)])
@pytest.mark.fault(13)
@pytest.mark.parametrize("state", STATES)
def test_4096_tokens_on_the_device(state: str) -> None:
    curves = curves_of(Study(), state, "cuda")
    assert end(curves, "replay") < LIMITS[state]
    assert curves[curves["update"] == "replay"]["error"].max() < 2 * LIMITS[state]


@pytest.mark.gpu
@pytest.mark.kernels(lambda where, state: [generations.kernel_of(ANCHOR, state, where)])
@pytest.mark.fault(13)
@pytest.mark.parametrize("state", STATES)
def test_a_window_of_one_on_the_device(state: str) -> None:
    """The anchor: nothing is replayed, every step flushes what the last one brought."""
    curves = curves_of(ANCHOR, state, "cuda")
    assert end(curves, "replay") < LIMITS[state]
