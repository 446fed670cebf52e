"""Long generations: their tokens, steps and cursors, and the recurrence that they are held to."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from replayssm_tuning import decoding, precision
from replayssm_tuning.decoding import Inputs, Steps, Stream

import replayssm_cute
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

PROBLEM = Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=3, window=5, d_dtype=None)


def inputs(count: int, requests: int = 2) -> Inputs:
    gen = torch.Generator().manual_seed(3)
    p = PROBLEM

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen).bfloat16()

    return Inputs(
        normal(count, requests, p.heads, p.head_dim),
        normal(count, requests, p.heads) - 3,
        normal(count, requests, p.groups, p.d_state),
        normal(count, requests, p.groups, p.d_state),
        -1 - torch.rand(p.heads, generator=gen),
        normal(p.heads),
    )


def stream(count: int = 40) -> Stream:
    return Stream(inputs(count), Steps(count, PROBLEM.tokens, torch.Generator().manual_seed(1)))


def test_acceptance_ends_with_the_last_token() -> None:
    for count in (1, 2, 7, 64, 65):
        taken = decoding.acceptance(count, 4, torch.Generator().manual_seed(count))
        assert sum(taken) == count and min(taken) >= 1 and max(taken) <= 4
    assert set(decoding.acceptance(500, 4, torch.Generator().manual_seed(0))) == {1, 2, 3, 4}


def test_steps_run_the_tokens_in_order_and_the_cursors_are_those_of_commits() -> None:
    """A decoding by `commit` step by step, with nothing prepared, sees the same windows."""
    given = stream()
    b, p = 2, PROBLEM
    start, pnat = torch.zeros(2, b, dtype=torch.int32)
    cache = decoding.plan.scratch_call(p, torch.device("cpu"), b)
    out = torch.zeros(len(given.steps.accepted), *cache.out.shape)
    done = flushes = 0
    for call, accepted in zip(given.calls(cache, out, None), given.steps.accepted, strict=True):
        assert torch.equal(call.ring_start, start) and torch.equal(call.prev_num_accepted_tokens, pnat)
        flushes += int(pnat[0]) + p.tokens > p.window
        for name in ("x", "B", "C"):
            tokens = getattr(given.inputs, name)[done : done + accepted].transpose(0, 1)
            assert torch.equal(getattr(call, name)[:, :accepted], tokens)
        assert torch.equal(call.dt[:, :accepted, :, 0], given.inputs.dt[done : done + accepted].transpose(0, 1))
        taken = torch.full((b,), accepted)
        replayssm_cute.commit(start, pnat, torch.arange(b), taken, tokens=p.tokens, window=p.window)
        done += accepted
    assert done == given.steps.count == 40 and flushes > 3


def test_wrong_drafts_are_other_tokens() -> None:
    """Else a step that takes in rejected tokens would not be seen."""
    given = stream(200)
    cache = decoding.plan.scratch_call(PROBLEM, torch.device("cpu"), 2)
    calls = given.calls(cache, torch.zeros(len(given.steps.accepted), *cache.out.shape), None)
    other = total = 0
    for call, first, accepted in zip(calls, given.steps.first.tolist(), given.steps.accepted, strict=True):
        for place in range(accepted, PROBLEM.tokens):
            if first + place < given.steps.count:
                total += 1
                other += not torch.equal(call.x[:, place], given.inputs.x[first + place])
    assert total > 50 and other > 0.9 * total


def test_the_recurrence_is_the_formula() -> None:
    """Written out for one head at a time, with no matrix product."""
    given = inputs(12, requests=1)
    found = decoding.recurrence(given, torch.float64)
    for h in range(PROBLEM.heads):
        g, state = h // (PROBLEM.heads // PROBLEM.groups), torch.zeros(PROBLEM.head_dim, PROBLEM.d_state).double()
        for t in range(12):
            dt = torch.log1p(torch.exp(given.dt[t, 0, h].double() + given.bias[h].double()))
            x, B, C = given.x[t, 0, h].double(), given.B[t, 0, g].double(), given.C[t, 0, g].double()
            state = torch.exp(given.rate[h].double() * dt) * state + torch.outer(dt * x, B)
            torch.testing.assert_close(found[t, 0, h], (state * C).sum(1), rtol=1e-12, atol=1e-12)


def test_a_rounded_state_is_rounded_after_every_token() -> None:
    """The output of a token is that of its state before rounding, the next one starts from the rounded state."""
    given = inputs(2, requests=1)
    exact, rounded = (decoding.recurrence(given, torch.float32, kept) for kept in (None, torch.bfloat16))
    assert torch.equal(exact[0], rounded[0])
    dt = torch.nn.functional.softplus(given.dt.float() + given.bias.float())[:, 0]  # (2, H)
    B, C = (t[:, 0].float().repeat_interleave(2, 1) for t in (given.B, given.C))
    state = torch.zeros(PROBLEM.heads, PROBLEM.head_dim, PROBLEM.d_state)
    for t in range(2):
        state = state.bfloat16().float() * torch.exp(given.rate * dt[t])[:, None, None]
        state += (dt[t][:, None] * given.x[t, 0].float())[..., None] * B[t][:, None, :]
    torch.testing.assert_close(rounded[1, 0], (state * C[1][:, None, :]).sum(-1), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(exact[1], rounded[1], rtol=1e-5, atol=1e-5)


def test_errors_of_spans() -> None:
    """Each span's own; a step belongs to where it begins, the rest to the last full span."""
    given = stream(45).steps
    truth = torch.ones(45, 2, 4, 64).double()
    got = truth.clone()
    bad = next(i for i, step in enumerate(given.at[0].tolist()) if i >= 20 and int(given.first[step]) < 20)
    got[bad] = 3.0
    by_step, by_token = (decoding.errors(given, got, truth, 20, by_step=b) for b in (True, False))
    assert by_step.nonzero().flatten().tolist() == [0] and by_token.nonzero().flatten().tolist() == [1]
    assert decoding.ends(given, 20) == [20, 45] and len(by_step) == 2
    torch.testing.assert_close(by_token[1], torch.tensor((4 / 25) ** 0.5).double())


def test_a_stream_of_another_problem_is_refused() -> None:
    other = dataclasses.replace(PROBLEM, dt_dtype="f32")
    with pytest.raises(ValueError, match="stream: its steps are of"):
        decoding.decode(stream(), other, None)


class PretendGpu(str):
    """A device that makes CPU tensors and says that it is a GPU."""

    type = "cuda"

    def __new__(cls) -> PretendGpu:
        return super().__new__(cls, "cpu")


@pytest.mark.parametrize("kind", precision.KINDS)
def test_a_gpu_gets_the_calls_of_the_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch a step, of the kernel's arguments in their order; the same outputs, bit for bit."""
    given = stream(24)
    problem = precision.problem_of(precision.Study(problem=PROBLEM), kind, 5)
    expected = decoding.decode(given, problem, None, seed=3)
    launched = []

    def kernel(*arguments: object) -> None:
        call = decoding.plan.call_of(problem, arguments)
        assert decoding.plan.checked_problem(call, False) == problem
        decoding.checkpointing_ssu_reference(**call.kwargs())
        launched.append(call)

    monkeypatch.setattr(Inputs, "device", property(lambda self: PretendGpu()))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(decoding.target, "of_device", lambda index: decoding.target.named("h200"))
    monkeypatch.setattr(decoding.compiler, "get", lambda p, config, where: kernel if p == problem else None)
    assert torch.equal(decoding.decode(given, problem, TileConfig(), seed=3), expected)
    assert len(launched) == len(given.steps.accepted)
