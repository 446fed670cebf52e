"""The example: a language model that decodes speculatively gives the tokens of plain decoding, one by one."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from speculative_lm import standard
from speculative_lm.__main__ import main
from speculative_lm.decoder import Decoder
from speculative_lm.generate import RightWith, generate
from speculative_lm.model import Model, Shape
from speculative_lm.replay import ReplayDecoder
from speculative_lm.standard import StandardDecoder
from speculative_lm.text import corpus, prompts

from replayssm_cute import CacheSpec, fingerprint

SHAPE = Shape(layers=2, heads=4, groups=2)
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
    return generate(ReplayDecoder(model(), REQUESTS, tokens=1), given, LENGTHS).tokens


@pytest.mark.parametrize(("tokens", "window"), [(4, 16), (2, 3), (6, 6)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_speculative_decoding_gives_the_tokens_of_plain_decoding(
    tokens: int, window: int, dtype: torch.dtype, given: torch.Tensor, truth: list[list[int]]
) -> None:
    """For every chance that a draft is right; requests end one by one, so that batches shrink and are padded.

    In float64 plain decoding runs on a ReplayCache, in float32 with the standard update.
    """
    expected = (
        truth if dtype == torch.float64 else generate(StandardDecoder(model(dtype), REQUESTS), given, LENGTHS).tokens
    )
    decoder = ReplayDecoder(model(dtype), REQUESTS, tokens, window, buckets=[1, 2, 5])
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
    decoder = ReplayDecoder(model(), REQUESTS, 4)
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


@pytest.mark.parametrize("kind", ["replay", "standard"])
def test_prefill_is_the_steps_of_its_tokens(kind: str, given: torch.Tensor) -> None:
    """The chunk form and the recurrence: the same tokens follow, whichever took the prompt in."""
    slots = torch.tensor([2, 5, 1, 3, 4], dtype=torch.int32)
    one, other = (
        StandardDecoder(model(), REQUESTS) if kind == "standard" else ReplayDecoder(model(), REQUESTS, tokens=1)
        for _ in range(2)
    )
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


def test_the_standard_update_gives_the_tokens_of_replays(given: torch.Tensor, truth: list[list[int]]) -> None:
    """Both ways to decode one token a step, over shrinking batches."""
    run = generate(StandardDecoder(model(), REQUESTS, buckets=[1, 3, 5]), given, LENGTHS)
    assert run.tokens == truth and run.windows == sum(LENGTHS) - REQUESTS
    assert len(run.moved) == len(run.full_ms) == 1, "the third request needs one step"


def test_the_standard_update_is_the_step_of_the_reference() -> None:
    """One token on empty rings: the same outputs, and states that only flushes would have written."""
    cpu = torch.device("cpu")
    given = standard.example_inputs(SHAPE, torch.float32, cpu)
    before = given["state"].clone()
    y = standard.by_torch(**given)
    dt = torch.nn.functional.softplus(given["dt"] + given["dt_bias"])
    B, C = (given[name].float().repeat_interleave(2, dim=1) for name in ("B", "C"))
    S = before * torch.exp(given["A"] * dt)[..., None, None]
    S += torch.einsum("bh,bhp,bhn->bhpn", dt, given["x"].float(), B)
    expected = torch.einsum("bhpn,bhn->bhp", S, C) + given["D"][:, None] * given["x"].float()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(given["state"][1:], S[1:], rtol=1e-5, atol=1e-5)


def test_an_update_that_is_wrong_or_not_there_is_not_taken_silently(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert standard.choose("auto", SHAPE, torch.float32, cpu) == (standard.by_torch, "plain torch")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(RuntimeError, match="the standard update of flashinfer: ModuleNotFoundError"):
        standard.choose("flashinfer", SHAPE, torch.float32, cpu)

    def forgetful(**given: torch.Tensor) -> torch.Tensor:
        return standard.by_torch(**{**given, "state": given["state"].clone()})

    monkeypatch.setattr(standard, "_flashinfer", lambda: (forgetful, "FlashInfer"))
    with pytest.raises(RuntimeError, match="the standard update of flashinfer: RuntimeError: wrong states"):
        standard.choose("flashinfer", SHAPE, torch.float32, cpu)
    monkeypatch.setattr(standard, "_triton", lambda *_: (standard.by_torch, "Triton"))
    found, words = standard.choose("auto", SHAPE, torch.float32, PretendGpu())
    assert found is standard.by_torch and words.startswith("Triton; not flashinfer: RuntimeError: wrong states")


class PretendGpu(str):
    """A device that makes CPU tensors and says that it is a GPU."""

    type = "cuda"

    def __new__(cls) -> PretendGpu:
        return super().__new__(cls, "cpu")


def test_the_command_runs_and_writes_its_report(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--train", "1", "--length", "6", "--requests", "2", "--p", "1.0", "--layers", "1"]
    assert main([*arguments, "--json", str(tmp_path / "lm.json")]) == 0
    out = capsys.readouterr().out
    assert "nats a token" in out and "tokens/s" in out and "standard update: plain torch" in out
    found = json.loads((tmp_path / "lm.json").read_text())
    assert found["kernel_fingerprint"] == fingerprint.kernels() and found["driver"] is None
    assert found["cache_kernel_fingerprint"] == fingerprint.kernels("cache") and found["versions"]["torch"]
    assert found["model"]["layers"] == 1 and found["requests"]["lengths"] == [4, 6]
    rows = {r["name"]: r for r in found["rows"]}
    assert list(rows) == ["standard", "replay", "drafts right with 1.00"]
    assert rows["standard"]["update"] == "plain torch" and rows["replay"]["update"].startswith("replayssm_cute.")
    for r in rows.values():
        assert r["generated"] == 8 and r["same"] == 2 and r["step_ms"] > 0 and r["graph_us"] is None
        assert r["tokens_per_s"] > 0
    assert rows["standard"]["steps"] == 5 and rows["drafts right with 1.00"]["steps"] == 2
    with open(tmp_path / "lm.csv", newline="") as file:
        assert [r["name"] for r in csv.DictReader(file)] == list(rows)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["triton", "flashinfer", "torch"])
def test_gpu_standard_updates_are_right(name: str) -> None:
    """Each implementation that is installed, against float64; FlashInfer's own limits are its own."""
    if name != "torch":
        pytest.importorskip(name)
    shape = Shape(heads=128, groups=8, d_state=128)
    try:
        standard.choose(name, shape, torch.bfloat16, torch.device("cuda"))
    except RuntimeError as error:
        if name != "flashinfer" or "wrong" in str(error):
            raise
        pytest.skip(str(error))


def layers(shape: Shape, tokens: int) -> list[Any]:
    """What the kernels of a bf16 ReplayDecoder of W 16 are named by: its cache and its step."""
    s = shape
    spec = CacheSpec(s.layers, s.heads, s.head_dim, s.d_state, s.groups, tokens, 16)
    return [spec, spec.problem(dt_dtype="bf16", d_dtype="bf16", dt_bias_dtype="bf16")]


GRAPHS, COMMAND = Shape(layers=3, width=256, heads=8), Shape(layers=2, d_state=128)


@pytest.mark.gpu
@pytest.mark.kernels(*layers(GRAPHS, 4))
def test_gpu_decoding_under_graphs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Under DecodeGraphs in bf16: right drafts are accepted, as long as rounding does not part the two paths."""
    shape = GRAPHS
    weights = model(torch.bfloat16, shape).cuda()
    given = prompts(corpus(), 8, 20)
    plain = generate(StandardDecoder(weights, 8, "torch"), given, [24] * 8)
    decoder = ReplayDecoder(weights, 8, tokens=4)
    right = generate(decoder, given, [24] * 8, RightWith(plain.tokens, 1.0, shape.vocabulary))
    wrong = generate(decoder, given, [24] * 8, RightWith(plain.tokens, 0.0, shape.vocabulary))
    with capsys.disabled():
        print(f"\naccepted a window: {right.accepted:.2f} right, {wrong.accepted:.2f} wrong")
    assert right.accepted > 1.5 * wrong.accepted


@pytest.mark.gpu
@pytest.mark.kernels(*layers(COMMAND, 1), *layers(COMMAND, 4))
def test_gpu_command_reports_times_of_graphs(tmp_path: Path) -> None:
    arguments = ["--train", "0", "--length", "32", "--requests", "4", "--p", "1.0", "--layers", "2", "--d-state", "128"]
    assert main([*arguments, "--update", "torch", "--json", str(tmp_path / "lm.json")]) == 0
    found = json.loads((tmp_path / "lm.json").read_text())
    assert found["driver"] and found["device"] == torch.cuda.get_device_name()
    assert all(r["graph_us"] > 0 and r["graph_tokens_per_s"] > 0 for r in found["rows"])
