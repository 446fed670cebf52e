"""The study of precision: its own arithmetic on the CPU, and the order that its errors must have."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch
from replayssm_tuning import precision
from replayssm_tuning.precision import KINDS, STANDARD, Study
from replayssm_tuning.study_run import StudyRun

from replayssm_cute import ring

SMALL = dataclasses.replace(precision.PROBLEM, heads=2, d_state=64, groups=1, tokens=3)
STUDY = Study(tokens=160, problem=SMALL, requests=1)


def curves(study: Study, windows: list[int], kinds: list[str], folder: Path, device: str = "cpu") -> pd.DataFrame:
    return precision.curves(study, windows, kinds, StudyRun(folder, "precision", {}, torch.device(device)))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The last quarter's error of each kind."""
    table = precision.table(curves(STUDY, [6], list(KINDS), tmp_path_factory.mktemp("study")))
    return dict(zip(table["state"], table["last_quarter"], strict=True))


def test_errors_are_those_that_the_formats_have(found: dict[str, float]) -> None:
    """Of f32 next to none; of a copy that of one rounding; of a rounded state more; stochastic ones up to twice."""
    assert all(error == error for error in found.values()), "no span is empty"
    assert max(found[STANDARD], found["f32"], found["f32, highest"]) < 2e-6
    for copy, single in (("f32 + bf16 copy", "bf16"), ("f32 + fp8 copy", "fp8"), ("f32 + int8 copy", "int8")):
        assert 1e-5 < found[copy] < found[single]
    order = ["f32", "f16", "bf16", "int8", "fp8"]
    assert [found[k] for k in order] == sorted(found[k] for k in order)
    for kind in ("f16", "bf16", "int8", "fp8"):
        assert 0.5 < found[f"{kind}, stochastic"] / found[kind] < 2.5


def test_a_late_commit_spoils_the_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison bites."""
    real = ring.commit

    def late(start: torch.Tensor, pnat: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, **how: int) -> None:
        real(start, pnat, slots, (accepted - 1).clamp(min=0), **how)

    monkeypatch.setattr(ring, "commit", late)
    table = precision.table(curves(STUDY, [6], ["f32"], tmp_path))
    assert float(table["last_quarter"].iloc[-1]) > 0.05


def test_the_truth_is_the_recurrence() -> None:
    """A window of one token is the standard update: two ways to the same numbers."""
    study = dataclasses.replace(STUDY, tokens=24, problem=dataclasses.replace(SMALL, tokens=1))
    truth = precision.Truth(study, torch.device("cpu"))
    assert truth.stream.steps.accepted == [1] * 24
    assert float(truth.curve("f32", 1)["error"].max()) < 1e-6


def test_the_command_writes_its_results(tmp_path: Path) -> None:
    names = "f32;bf16, stochastic"
    arguments = ["--tokens", "16", "--heads", "2", "--windows", "8", "--states", names, "--out", str(tmp_path)]
    assert precision.main(arguments) == 0
    written = {p.name for p in tmp_path.iterdir()}
    assert written == {"precision.csv", "precision_table.csv", "precision.png", "precision.json"}
    assert set(pd.read_csv(tmp_path / "precision.csv")["state"]) == {STANDARD, "f32", "bf16, stochastic"}
    with pytest.raises(SystemExit):
        precision.main(["--states", "f64"])


@pytest.mark.gpu
def test_kernels_have_the_errors_that_the_formats_have(tmp_path: Path) -> None:
    """256 tokens by the kernels: no more than the rounding of bf16 outputs and of the state."""
    study = dataclasses.replace(STUDY, tokens=256, problem=dataclasses.replace(SMALL, d_state=128))
    kinds = ["f32", "f32, highest", "f32 + bf16 copy", "f32 + fp8 copy", "bf16", "int8", "fp8"]
    table = precision.table(curves(study, [16], kinds, tmp_path, "cuda"))
    errors = dict(zip(table["state"], table["last_quarter"], strict=True))
    limits = [2.2e-3, 2.2e-3, 3e-3, 3e-2, 4e-3, 1.5e-2, 4e-2]
    assert all(errors[kind] < limit for kind, limit in zip(kinds, limits, strict=True)), errors
