"""The example: a language model that decodes speculatively gives the tokens of plain decoding, one by one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from speculative_lm.__main__ import main
from speculative_lm.decoder import Decoder
from speculative_lm.generate import RightWith, generate
from speculative_lm.model import Model, Shape
from speculative_lm.text import corpus, prompts

SHAPE = Shape(layers=2)
REQUESTS, LENGTHS = 5, [120, 97, 2, 60, 120]


def model(dtype: torch.dtype = torch.float64, shape: Shape = SHAPE) -> Model:
    """Random weights, of which the recurrent part is large enough to decide what comes next."""
    made = Model(shape, seed=3)
    with torch.no_grad():
        for block in made.blocks:
            block.out_proj.weight *= 4
    return made.to(dtype).eval()


@pytest.fixture(scope="module")
def given() -> torch.Tensor:
    return prompts(corpus(), REQUESTS, 20)


@pytest.fixture(scope="module")
def truth(given: torch.Tensor) -> list[list[int]]:
    return generate(Decoder(model(), REQUESTS, tokens=1), given, LENGTHS).tokens


@pytest.mark.parametrize(("tokens", "window"), [(4, 16), (2, 3), (6, 6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_speculative_decoding_gives_the_tokens_of_plain_decoding(
    tokens: int, window: int, dtype: torch.dtype, given: torch.Tensor, truth: list[list[int]]
) -> None:
    """For every chance that a draft is right; requests end one by one, so that batches shrink and are padded."""
    expected = truth if dtype == torch.float64 else generate(Decoder(model(dtype), REQUESTS, 1), given, LENGTHS).tokens
    decoder = Decoder(model(dtype), REQUESTS, tokens, window, buckets=[1, 2, 5])
    for p in (0.0, 0.6, 1.0):
        run = generate(decoder, given, LENGTHS, RightWith(expected, p, SHAPE.vocabulary))
        assert run.tokens == expected, f"p = {p}"
        if p == 0.0:
            assert run.accepted < 1.2, "a wrong draft was accepted more often than by chance"
        elif p == 1.0:
            assert run.steps <= -(-max(LENGTHS) // tokens) + 1, "a right draft was rejected"
        else:
            assert run.steps < max(LENGTHS) - 1, "no draft was accepted"


def test_the_model_does_not_just_repeat_itself(truth: list[list[int]]) -> None:
    """Equal outputs would say little otherwise."""
    assert all(len(set(tokens)) > 10 for tokens in truth if len(tokens) > 20)
    assert len({tuple(tokens[:2]) for tokens in truth}) > 1


@pytest.mark.parametrize("fault", ["conv", "cursors", "stale"])
def test_a_rollback_that_does_not_roll_back_is_seen(
    fault: str, given: torch.Tensor, truth: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(model(), REQUESTS, 4)
    if fault == "conv":  # the conv's history goes on as if every token had been accepted
        real = Decoder._history
        monkeypatch.setattr(
            Decoder,
            "_history",
            lambda self, layer, index, moved, mixed: real(self, layer, index, moved.clamp(3), mixed),
        )
    else:
        begin = decoder.cache.begin_step
        wrong = 4 if fault == "cursors" else 0
        monkeypatch.setattr(decoder.cache, "begin_step", lambda slots, n: begin(slots, torch.full_like(n, wrong)))
    run = generate(decoder, given, LENGTHS, RightWith(truth, 0.6, SHAPE.vocabulary))
    assert run.tokens != truth


def test_prefill_is_the_steps_of_its_tokens(given: torch.Tensor) -> None:
    """The chunk form and the recurrence: the same tokens follow, whichever took the prompt in."""
    slots = torch.tensor([2, 5, 1, 3, 4], dtype=torch.int32)
    one, other = (Decoder(model(), REQUESTS, tokens=1) for _ in range(2))
    expected = one.prefill(slots, given)
    other.prefill(slots, given[:, :4])
    accepted = torch.ones(REQUESTS, dtype=torch.int32)
    for t in range(4, given.shape[1]):
        got = other.step(slots, given[:, t : t + 1], accepted)
    assert got[:, 0].tolist() == expected.tolist()
    for _ in range(5):
        expected = one.step(slots, expected.view(-1, 1), accepted)
        got = other.step(slots, got.view(-1, 1), accepted)
        assert got.tolist() == expected.tolist()


def test_the_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--train", "1", "--length", "6", "--requests", "2", "--p", "1.0", "--layers", "1"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "nats a token" in out and "2 of 2 requests as plain decoding gave" in out and "tokens/s" in out


@pytest.mark.gpu
def test_gpu_decoding_under_graphs(capsys: pytest.CaptureFixture[str]) -> None:
    """Under DecodeGraphs in bf16: right drafts are accepted, as long as rounding does not part the two paths."""
    shape = Shape(layers=3, width=256, heads=8)
    weights = model(torch.bfloat16, shape).cuda()
    given = prompts(corpus(), 8, 20)
    plain = generate(Decoder(weights, 8, tokens=1), given, [24] * 8)
    decoder = Decoder(weights, 8, tokens=4)
    right = generate(decoder, given, [24] * 8, RightWith(plain.tokens, 1.0, shape.vocabulary))
    wrong = generate(decoder, given, [24] * 8, RightWith(plain.tokens, 0.0, shape.vocabulary))
    with capsys.disabled():
        print(f"\naccepted a window: {right.accepted:.2f} right, {wrong.accepted:.2f} wrong")
    assert right.accepted > 1.5 * wrong.accepted
