"""Steps behind a producer: it copies what it should, and a step that does not wait for it is noticed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pretend_cuda import Pretend
from replayssm_tuning import pdl, producer_kernel
from replayssm_tuning.acceptance import stationary
from replayssm_tuning.entrants import Entrant
from replayssm_tuning.policy import Policy
from replayssm_tuning.slots import make_cell

from replayssm_cute import calls, compiler, target
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

SMALL = Problem(2, 64, 64, 1, 4, 16)
PROBLEMS = [
    SMALL,
    Problem(3, 80, 64, 1, 1, 16, dt_dtype="f32"),
    Problem(128, 64, 128, 8, 4, 16, io_dtype="f16", dt_dtype="f16"),
]


def produce(*pairs: torch.Tensor) -> None:
    """The producer, on the CPU."""
    for source, copy in zip(pairs[::2], pairs[1::2], strict=True):
        copy.copy_(source)


def entrant(name: str, before: Callable[[calls.Call], None] = lambda _: None) -> Entrant:
    def bind(call: calls.Call) -> Callable[[], None]:
        def launch() -> None:
            before(call)
            checkpointing_ssu_reference(**call.kwargs())

        return launch

    return Entrant(name, f"{name}'s config", bind)


class Clock:
    """Stands in for a captured rotation of pairs: runs each once."""

    def __init__(self, run: Callable[[calls.Call], None], cell: Any, _: Policy, writes_outputs: bool = True) -> None:
        cell.out.fill_(float("nan"))
        for call in cell.calls:
            run(call)
        assert bool(torch.isfinite(cell.out).all()) == writes_outputs

    def sample(self, replays: int) -> list[float]:
        return [5.0] * replays


def test_a_producer_copies_inputs_as_flat_tensors() -> None:
    for problem in PROBLEMS:
        call = calls.random_call(problem, 3, dead=0.0)
        source = pdl.with_inputs_copied(call)
        assert all(getattr(source, n).data_ptr() != getattr(call, n).data_ptr() for n in ("x", "B", "C", "dt"))
        pdl.spoil(call)
        producer_kernel.bind(produce, source, call)()
        for name in ("x", "B", "C", "dt"):
            assert torch.equal(getattr(call, name), getattr(source, name)), name
            assert getattr(call, name).stride() == getattr(source, name).stride()
    call.C = call.C.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ValueError, match=r"C: got strides .* expected a contiguous tensor"):
        producer_kernel.flat(call)


def test_pairs_are_timed_and_a_step_that_does_not_wait_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pdl, "capture", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    cell = make_cell(SMALL, 5, stationary((0.25,) * 4, 16), Policy(), torch.device("cpu"), 3)
    inputs = [c.x.clone() for c in cell.calls]
    early = entrant("early", lambda call: call.x.fill_(float("nan")))  # as if the producer had not written yet
    stale = entrant("stale", lambda call: call.C.zero_())
    field = [entrant("ours"), entrant("ours, PDL"), early, stale]
    found = pdl.measure(cell, produce, field, Policy(), torch.device("cpu"))
    assert list(found) == ["producer alone", "ours", "ours, PDL", "early", "stale"]
    assert [f.get("time_us") for f in found.values()] == [5.0, 5.0, 5.0, None, None]
    assert found["ours"]["variant"] == "ours's config"
    for name in ("early", "stale"):
        assert "no wait for it" in found[name]["failed"]
    for call, x in zip(cell.calls, inputs, strict=True):
        assert torch.equal(call.x, x)


def test_no_row_of_a_trial_flushes() -> None:
    """A second run of a row that flushes starts from another state: it would be taken for a step that did not wait."""
    for problem in (SMALL, dataclasses.replace(SMALL, tokens=16), dataclasses.replace(SMALL, tokens=1)):
        trial = pdl.Trial(problem, produce, entrant("ours"), torch.device("cpu"), seed=0)
        before = trial.call.state.clone()
        trial.check(entrant("ours"))
        assert torch.equal(trial.call.state, before)


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretended addresses must not reach a GPU")
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label())
def test_the_producer_compiles_and_takes_its_arguments(problem: Problem, tmp_path: Path) -> None:
    compiler._export(producer_kernel.compile_producer(problem, "sm_90a"), tmp_path / "producer.o")
    kernel = compiler._load(tmp_path / "producer.o")
    flat = producer_kernel.flat(calls.random_call(problem, 2))
    pairs = [Pretend.like(t) for t in flat for _ in range(2)]
    with pytest.raises(RuntimeError, match="Cuda"):  # as far as the missing driver
        kernel(*[p.tensor() for p in pairs])
    shorter = pairs[1].but(shape=(pairs[1].shape[0] - 4,))
    with pytest.raises(ValueError, match="Mismatched x"):
        kernel(*[p.tensor() for p in (pairs[0], shorter, *pairs[2:])])


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.label())
def test_the_producer_copies_on_the_device(problem: Problem) -> None:
    call = calls.random_call(problem, 33, device="cuda")
    source = pdl.with_inputs_copied(call)
    pdl.spoil(call)
    kernel = producer_kernel.compile_producer(problem, target.of_device(0).arch)
    producer_kernel.bind(kernel, source, call)()
    torch.cuda.synchronize()
    for name in ("x", "B", "C", "dt"):
        assert torch.equal(getattr(call, name), getattr(source, name)), name
