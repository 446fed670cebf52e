"""Next-token agreement of the example's model: what it reads, and that a wrong state is seen."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from speculative_lm import agreement
from speculative_lm.model import Model, Shape
from speculative_lm.text import corpus

from replayssm_cute import ring

TEXT = corpus()[:129]


def model() -> Model:
    """Random weights, of which the recurrent part is large enough to decide what comes next."""
    made = Model(Shape(layers=2, heads=4, groups=2), seed=3)
    with torch.no_grad():
        for block in made.blocks:
            block.out_proj.weight *= 4
    return made.eval()


def test_the_truth_is_the_model_in_its_chunk_form() -> None:
    """Two ways to read a text, which differ by the rounding of x, B and C to bf16."""
    found = agreement.Truth(model(), TEXT).logits
    with torch.inference_mode():
        expected = model().double()(TEXT[None, :-1])[0][0]
    assert found.dtype == torch.float64
    assert float((found - expected).norm() / expected.norm()) < 1e-2
    assert float((found - expected).norm()) > 0


def test_agreement_falls_with_the_state_and_bites(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [agreement.Truth(model(), TEXT).of(kind, 8).iloc[0] for kind in ("f32", "bf16", "fp8")]
    assert rows[0]["agreement"] > 0.95
    assert 0 < rows[0]["divergence"] < rows[1]["divergence"] < rows[2]["divergence"]
    real = ring.commit

    def late(start: torch.Tensor, pnat: torch.Tensor, slots: torch.Tensor, accepted: torch.Tensor, **how: int) -> None:
        real(start, pnat, slots, (accepted - 1).clamp(min=0), **how)

    monkeypatch.setattr(ring, "commit", late)
    wrong = agreement.Truth(model(), TEXT).of("f32", 8).iloc[0]
    assert wrong["agreement"] < 0.9 and wrong["divergence"] > 100 * rows[2]["divergence"]


def test_the_command_writes_its_results(tmp_path: Path) -> None:
    arguments = ["--tokens", "24", "--train", "0.1", "--windows", "8", "--states", "f32;int8", "--out", str(tmp_path)]
    assert agreement.main(arguments) == 0
    found = pd.read_csv(tmp_path / "agreement.csv")
    assert found["state"].tolist() == ["f32, every token", "f32", "int8"]
    manifest = json.loads((tmp_path / "agreement.json").read_text())
    assert manifest["complete"] and manifest["training"]["loss"] > 0
    for wrong in (["--states", "f64"], ["--tokens", "1"]):
        with pytest.raises(SystemExit):
            agreement.main(wrong)


@pytest.mark.parametrize("wrong", [["--windows", "x"], ["--windows", "2"], ["--tokens", "1"]])
def test_wrong_usage_is_one_line(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = agreement.main(wrong)
    except SystemExit as end:  # argparse's own
        status = int(str(end.code))
    said = capsys.readouterr().err
    assert status == 2 and "error: " in said and "Traceback" not in said
