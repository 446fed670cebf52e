"""Warmup: what it covers, what it verifies, and that it leaves everything as it was."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from fakes import H200, SMALL, FakeKernel

from replayssm_cute import api, compiler, plan, selfcheck, tables, warmup
from replayssm_cute.calls import Call, random_call
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

fake_compiler = fakes.fake_compiler
cpu_as_gpu = fakes.cpu_as_gpu


@pytest.fixture
def warm(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmup on CPU tensors in a GPU's place: the public call goes to the plans instead of the reference."""

    def call(*args: Any, enable_pdl: bool = False, config: TileConfig | None = None, **k: Any) -> torch.Tensor:
        given = Call(*args, **k)
        options = given.philox_rounds, given.precision
        return plan.run(plan.kernel_args(given), given.dt_softplus, enable_pdl, config, given.max_seqlen, options)

    monkeypatch.setattr(api, "checkpointing_ssu", call)


def bits(call: Call) -> list[torch.Tensor]:
    tensors = [t for t in call.kwargs().values() if isinstance(t, torch.Tensor)]
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return [t.contiguous().view(kinds[t.element_size()]).clone() for t in tensors]


def assert_same_bits(before: list[torch.Tensor], call: Call) -> None:
    for old, new in zip(before, bits(call), strict=True):
        assert torch.equal(old, new)


@pytest.mark.fault(34)
def test_everything_the_tables_can_return_is_ready_afterwards(warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    coverage = warmup([SMALL, SMALL], [4, 1, 4], device=-1, progress=lines.append)
    configs = tables.candidates(SMALL, H200)
    assert set(coverage.kernels) == {(SMALL, c) for c in configs}
    assert coverage.verified == len(configs)
    assert [(c.problem, c.batch, c.source) for c in coverage.covered] == [(SMALL, 1, "default"), (SMALL, 4, "default")]
    assert [c.decoded for c in coverage.covered] == [3, 3]  # W // T + 1: the last one flushes
    assert coverage.counters is not None and coverage.counters.compiled == len(configs)
    assert f"batch 4: {TileConfig().label()} (default)" in str(coverage)
    assert len(lines) >= 2
    monkeypatch.setattr(compiler, "capturing", lambda: True)
    for batch in (1, 4, 9):
        arguments = random_call(SMALL, batch).kwargs()
        api.checkpointing_ssu(**arguments)


def test_second_warmup_compiles_and_verifies_nothing(warm: None) -> None:
    warmup([SMALL], [1], device=-1)
    coverage = warmup([SMALL], [2], device=-1)
    assert coverage.counters is not None and coverage.counters.compiled == coverage.counters.disk == 0
    assert coverage.verified == 0


@pytest.mark.parametrize("pad_slot_id", [-1, 0])
def test_callers_tensors_are_decoded_on_and_restored_bit_for_bit(
    pad_slot_id: int, warm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = random_call(SMALL, 4, slots=9, padding=[3], pad_slot_id=pad_slot_id)
    call.state[call.state.isnan()] = torch.tensor(0x7FC12345, dtype=torch.int32).view(torch.float32)
    before = bits(call)
    flushes: list[int] = []
    real = FakeKernel.__call__

    def watched(self: FakeKernel, *args: Any) -> None:
        old = args[0].clone()
        real(self, *args)
        if args[0] is call.state:
            changed = (args[0] != old).flatten(1).any(1) & ~old.isnan().flatten(1).any(1)
            flushes.append(int(changed.sum()))

    monkeypatch.setattr(FakeKernel, "__call__", watched)
    warmup([SMALL], [4], device=-1, tensors=lambda problem, batch: call)
    assert flushes == [0, 0, 3], "three live rows flush in the last of three steps"
    assert_same_bits(before, call)


def test_callers_tensors_are_restored_when_a_step_fails(warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    warmup([SMALL], [4], device=-1)
    call = random_call(SMALL, 4)
    before = bits(call)
    real = FakeKernel.__call__

    def failing(self: FakeKernel, *args: Any) -> None:
        real(self, *args)
        raise RuntimeError("launch failed")

    monkeypatch.setattr(FakeKernel, "__call__", failing)
    with pytest.raises(RuntimeError, match="launch failed"):
        warmup([SMALL], [4], device=-1, tensors=lambda problem, batch: call)
    assert_same_bits(before, call)


def test_slots_of_a_strided_pool_are_restored_and_their_neighbours_untouched(warm: None) -> None:
    call = random_call(SMALL, 2, slots=4)
    pool = torch.full((4, call.state[0].numel() + 64), 3.5)
    view = pool[:, 32:-32].view(4, *call.state.shape[1:])
    view.copy_(call.state)
    call.state = view
    before, pool_before = bits(call), pool.clone()
    warmup([SMALL], [2], device=-1, tensors=lambda problem, batch: call)
    assert_same_bits(before, call)
    assert torch.equal(pool.view(torch.int32), pool_before.view(torch.int32))


def test_wrong_numbers_are_an_error_that_names_the_kernel(warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(self: FakeKernel, *args: Any) -> None:
        checkpointing_ssu_reference(**plan.call_of(self.problem, args).kwargs())
        args[11].mul_(1.01)

    monkeypatch.setattr(FakeKernel, "__call__", wrong)
    with pytest.raises(
        RuntimeError, match=f"{SMALL.label()} has passed.*config {TileConfig().label()} failed: out error"
    ):
        warmup([SMALL], [1], device=-1)


@pytest.mark.parametrize(
    "change",
    [
        {"has_z": True}, {"index_dtype": None}, {"index_dtype": "i64"}, {"dt_softplus": False}, {"d_dtype": None},
        {"state_dtype": "bf16"}, {"state_dtype": "f16", "io_dtype": "f16", "dt_dtype": "f32"},
        {"tokens": 1, "window": 1}, {"pdl": True}, {"tokens": 4}, {"compact": False}, {"ragged": True},
        {"ragged": True, "index_dtype": None, "has_z": True}, {"ragged": True, "compact": False},
    ],
)  # fmt: skip
def test_every_kind_of_problem_can_be_warmed(change: dict[str, Any], warm: None) -> None:
    problem = dataclasses.replace(SMALL, **change)
    coverage = warmup([problem], [3], device=-1)
    assert coverage.verified == len(coverage.kernels) > 0
    assert {r.problem for r, _ in compiler._memory} == {problem}, "a kernel of another problem was compiled"


def test_tensors_of_another_problem_batch_or_with_shared_slots_are_refused(warm: None) -> None:
    other = dataclasses.replace(SMALL, has_z=True)
    for call, message in (
        (random_call(other, 2), "tensors: got a call of Problem"),
        (random_call(SMALL, 3), "tensors: got a call of 3 rows, expected 2"),
    ):
        with pytest.raises(ValueError, match=message):
            warmup([SMALL], [2], device=-1, tensors=lambda problem, batch, call=call: call)
    shared = random_call(SMALL, 2)
    assert shared.state_batch_indices is not None
    shared.state_batch_indices[:] = 1
    with pytest.raises(ValueError, match="slot 1 more than once"):
        warmup([SMALL], [2], device=-1, tensors=lambda problem, batch: shared)


def test_bad_arguments(warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="batches: got 0"):
        warmup([SMALL], [0], device=-1)
    for bad in ([1, "a"], [None], [1, True], [True, 1], [[1]], [1.0]):
        with pytest.raises(ValueError, match=r"batches: got .*, expected positive ints"):
            warmup([SMALL], bad, device=-1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="batches: got int, expected a list"):
        warmup([SMALL], 4, device=-1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="problems: got Problem, expected a list"):
        warmup(SMALL, [4], device=-1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="problems: got int among them, expected Problem"):
        warmup([SMALL, 1], [4], device=-1)  # type: ignore[list-item]
    for device in (True, 3.5):
        with pytest.raises(TypeError, match=r"device: got (bool|float), expected a torch\.device, str, int or None"):
            warmup([SMALL], [1], device=device)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device: got cpu"):
        warmup([SMALL], [1], device="cpu")
    monkeypatch.setattr(compiler, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="during a CUDA graph capture"):
        warmup([SMALL], [1], device=-1)


# ---- on a GPU --------------------------------------------------------------------------------------


def captured(call: Call) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        api.checkpointing_ssu(**call.kwargs())
    return graph


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", [None, 0])
def test_without_a_gpu_the_error_names_what_to_do(device: int | None) -> None:
    with pytest.raises(RuntimeError, match=r"warmup needs a GPU .* python -m replayssm_cute\.compiler fills a cache"):
        warmup([SMALL], [1], device=device)


WARMED = Problem(heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=16)
FIRST = Problem(heads=16, head_dim=64, d_state=64, groups=2, tokens=2, window=8)


@pytest.mark.gpu
@pytest.mark.kernels(WARMED)
@pytest.mark.fault(18)
def test_gpu_warmup_restores_bits_and_capture_then_compiles_nothing() -> None:
    problem = WARMED
    calls = {batch: random_call(problem, batch, slots=40, device="cuda") for batch in (1, 16, 32)}
    before = {batch: bits(call) for batch, call in calls.items()}
    coverage = warmup([problem], list(calls), tensors=lambda _, batch: calls[batch])
    assert all(selfcheck.passed(p, c, torch.cuda.current_device()) for p, c in coverage.kernels)
    assert coverage.kernels
    for batch, call in calls.items():
        assert_same_bits(before[batch], call)
    compiler.reset_counters()
    for batch, call in calls.items():
        eager = call.clone()
        api.checkpointing_ssu(**eager.kwargs())
        graph = captured(call)
        assert_same_bits(before[batch], call)
        graph.replay()
        torch.cuda.synchronize()
        for ours, theirs in zip(bits(call), bits(eager), strict=True):
            assert torch.equal(ours, theirs)
    assert compiler.counters().compiled == compiler.counters().disk == 0


@pytest.mark.gpu
@pytest.mark.kernels(WARMED)
@pytest.mark.fault(20)
def test_gpu_capture_in_a_fresh_process(tmp_path: Path) -> None:
    """Without warmup a capture raises an error that names the fix; the process goes on and captures after it."""
    code = """
        import torch
        from replayssm_cute import Problem, api, compiler, warmup
        from replayssm_cute.calls import random_call
        problem = Problem(heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=16)
        call = random_call(problem, 8, device="cuda")
        def capture():
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                api.checkpointing_ssu(**call.kwargs())
            return graph
        try:
            capture()
        except RuntimeError as error:
            assert "replayssm_cute.warmup" in str(error) and "batch 8" in str(error), error
        else:
            raise SystemExit("the capture did not raise")
        warmup([problem], [8])
        compiler.reset_counters()
        capture().replay()
        torch.cuda.synchronize()
        assert compiler.counters().compiled == 0
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "REPLAYSSM_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "done", done.stderr


@pytest.mark.gpu
@pytest.mark.kernels(FIRST)
def test_gpu_first_call_with_the_largest_batch_covers_the_smaller_ones() -> None:
    problem = FIRST
    api.checkpointing_ssu(**random_call(problem, 64, device="cuda").kwargs())
    compiler.reset_counters()
    captured(random_call(problem, 1, device="cuda")).replay()
    torch.cuda.synchronize()
    assert compiler.counters().compiled == compiler.counters().disk == 0
