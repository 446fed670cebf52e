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
# Errors that the end of a generation may have: rounding of the bf16 outputs (1.65e-3), and of the state at each flush.
LIMITS = {"f32": 2.2e-3, "f16": 2.2e-3, "bf16": 6e-3}


def end(curves: pd.DataFrame, update: str) -> float:
    """Mean error of the last quarter."""
    errors = curves[curves["update"] == update]["error"]
    return float(errors[-(len(errors) // 4) :].mean())


@pytest.mark.fault(13)
@pytest.mark.parametrize("state", STATES)
def test_errors_stay_bounded(state: str) -> None:
    curves = generations.errors(Study(tokens=256, problem=SMALL, requests=2), state)
    assert list(curves["token"].unique())[-1] >= 256 and curves["token"].is_monotonic_increasing
    assert end(curves, "replay") < LIMITS[state]
    if state != "f32":  # a state that is rounded at flushes only is nearer to the truth than one rounded every token
        assert end(curves, "replay") < end(curves, "every token") * 1.05


def test_a_window_of_one_is_the_anchor() -> None:
    """W = T = 1: every step flushes what the last one brought."""
    problem = dataclasses.replace(SMALL, tokens=1, window=1)
    assert end(generations.errors(Study(96, problem, 2), "f32"), "replay") < LIMITS["f32"]


def test_a_wrong_commit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison bites: a cursor that moves by one token too few spoils everything after it."""
    real = ring.commit

    def late(start: torch.Tensor, pnat: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, **how: int) -> None:
        real(start, pnat, slots, (accepted - 1).clamp(min=0), **how)

    monkeypatch.setattr(generations.replayssm_cute, "commit", late)
    assert end(generations.errors(Study(64, SMALL, 2), "f32"), "replay") > 0.05


def test_the_command_writes_its_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generations, "Study", lambda tokens=32, problem=SMALL: Study(tokens, SMALL, 1))
    assert generations.main(["--tokens", "32", "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"generations.csv", "generations.png", "generations.json"}
    assert set(pd.read_csv(tmp_path / "generations.csv")["state"]) == set(STATES)


@pytest.mark.gpu
@pytest.mark.fault(13)
@pytest.mark.parametrize("state", STATES)
def test_4096_tokens_on_the_device(state: str) -> None:
    curves = generations.errors(Study(), state, "cuda")
    assert end(curves, "replay") < LIMITS[state]
    assert curves[curves["update"] == "replay"]["error"].max() < 2 * LIMITS[state]


@pytest.mark.gpu
@pytest.mark.fault(13)
@pytest.mark.parametrize("state", STATES)
def test_a_window_of_one_on_the_device(state: str) -> None:
    """The anchor: nothing is replayed, every step flushes what the last one brought."""
    problem = dataclasses.replace(Study().problem, tokens=1, window=1)
    curves = generations.errors(Study(512, problem, 4), state, "cuda")
    assert end(curves, "replay") < LIMITS[state]
