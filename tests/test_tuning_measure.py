"""What is timed is what is served: cells against the contract, checks that bite, and, on a GPU, the timing itself."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from replayssm_tuning import cost, floor_kernel, measure, peers
from replayssm_tuning.acceptance import stationary
from replayssm_tuning.measure import DeviceRunner
from replayssm_tuning.policy import Policy
from replayssm_tuning.slots import Cell, make_cell, slot_sets
from replayssm_tuning.timing import capture, launch
from replayssm_tuning.worker import Poisoned, Worker

from replayssm_cute import calls, ring, target
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem, from_tensors
from replayssm_cute.reference import checkpointing_ssu_reference

MIB = 1 << 20
SMALL = Problem(4, 64, 64, 2, 4, 16)
UNIFORM = (0.25,) * 4
MIX = stationary(UNIFORM, 16)
CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "problem",
    [
        SMALL,
        dataclasses.replace(SMALL, state_dtype="bf16", has_z=True, index_dtype="i64", dt_dtype="f32"),
        dataclasses.replace(SMALL, d_dtype=None, dt_bias_dtype=None, index_dtype=None, dt_softplus=False),
        Problem(2, 80, 128, 1, 1, 16, io_dtype="f16", dt_dtype="f16"),
    ],
    ids=lambda p: p.label(),
)
def test_a_cell_is_the_problem_itself(problem: Problem) -> None:
    sets, batch = 3, 5
    mix = stationary((1 / problem.tokens,) * problem.tokens, problem.window)
    cell = make_cell(problem, batch, mix, Policy(), CPU, sets)
    assert len(cell.calls) == sets
    named = []
    for call in cell.calls:
        given = {k: v for k, v in call.kwargs().items() if k != "pad_slot_id"}
        assert from_tensors(**given, enable_pdl=problem.pdl) == problem
        index = call.state_batch_indices
        pointer = call.state.data_ptr()
        named += [(pointer, s) for s in (range(batch) if index is None else index.tolist())]
    # distinct slots over all sets, all of them used
    assert len(set(named)) == sets * batch
    flushing = rows = 0
    for call in cell.calls:
        index = torch.arange(batch) if call.state_batch_indices is None else call.state_batch_indices.long()
        pnat = call.prev_num_accepted_tokens[index]
        flushing += int(ring.flushes(pnat, problem.tokens, problem.window).sum())
        rows += batch
    assert cell.flush == pytest.approx(flushing / rows)
    assert abs(flushing - mix.flush * rows) < 1 + 1e-6
    # replays stay finite: states contract, ring rows are rewritten with what they hold
    for _ in range(4):
        for call in cell.calls:
            checkpointing_ssu_reference(**call.kwargs())
    assert bool(torch.isfinite(cell.out).all())
    assert all(bool(torch.isfinite(c.state).all()) for c in cell.calls)
    assert float(cell.calls[0].state.abs().max()) < 100


@pytest.mark.parametrize("changes", [{}, {"index_dtype": None, "has_z": True}], ids=["indices", "slots in order"])
def test_a_cell_of_ragged_rows_is_packed_by_quota(changes: dict[str, Any]) -> None:
    problem = dataclasses.replace(SMALL, ragged=True, **changes)
    shares, sets, batch = (0.5, 0.25, 0.0, 0.25), 4, 8
    mix = stationary(UNIFORM, problem.window, shares)
    cell = make_cell(problem, batch, mix, Policy(), CPU, sets)
    new, flushing, pointers = [], 0, set()
    for call in cell.calls:
        given = {k: v for k, v in call.kwargs().items() if k != "pad_slot_id"}
        assert from_tensors(**given, enable_pdl=problem.pdl) == problem
        index = torch.arange(batch) if call.state_batch_indices is None else call.state_batch_indices.long()
        lengths = call.lengths()
        assert call.x.shape[:2] == call.B.shape[:2] == (1, int(lengths.sum()))  # no token that no row has
        flushes = call.prev_num_accepted_tokens[index] + lengths > problem.window
        flushing += int(flushes.sum())
        if call.state_batch_indices is not None:
            assert torch.equal(cell.flushing[index], flushes.to(torch.int32) * problem.window)
        new += lengths.tolist()
        pointers.add(call.out.data_ptr())
    assert [new.count(n) for n in (1, 2, 3, 4)] == [16, 8, 0, 8]
    assert len(pointers) == sets and cell.out.shape[0] == sum(new)
    assert (cell.mean_tokens, cell.flush) == (sum(new) / len(new), flushing / len(new))
    assert cell.flush == pytest.approx(mix.flush, abs=0.05)
    dense = make_cell(dataclasses.replace(problem, ragged=False), batch, stationary(UNIFORM, 16), Policy(), CPU, sets)
    assert cell.bytes < dense.bytes
    for _ in range(2):
        for call in cell.calls:
            checkpointing_ssu_reference(**call.kwargs())
    assert bool(torch.isfinite(cell.out).all())


def test_rotations_leave_the_l2_cold_within_memory() -> None:
    policy = Policy(min_rows=1)
    touched = cost.traffic(SMALL, 8, flush=MIX.flush, mean_live=MIX.mean_live).total
    sets = slot_sets(SMALL, 8, MIX, policy, l2=4 * MIB, free=1 << 40)
    assert (sets - 1) * touched < policy.l2_factor * 4 * MIB <= sets * touched
    assert slot_sets(SMALL, 8, MIX, dataclasses.replace(policy, min_rows=4000), l2=1, free=1 << 40) == 500
    assert slot_sets(SMALL, 4096, MIX, policy, l2=4 * MIB, free=1 << 40) == 2
    held = 8 * SMALL.bytes_per_slot()
    tight = slot_sets(SMALL, 8, MIX, policy, l2=4 * MIB, free=round(held * sets * 0.8))
    assert tight < sets
    with pytest.raises(ValueError, match=r"batch 8: .* do not fit"):
        slot_sets(SMALL, 8, MIX, policy, l2=4 * MIB, free=held)


def runner(monkeypatch: pytest.MonkeyPatch, kernel: Callable[..., None]) -> DeviceRunner:
    """A DeviceRunner on the CPU whose every kernel is `kernel`."""
    made = object.__new__(DeviceRunner)
    made.device, made.policy = CPU, Policy()
    made._cell, made._check_calls = None, {}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(DeviceRunner, "_kernel", lambda *_: kernel)
    return made


def as_kernel(change: Callable[[dict[str, Any]], None] = lambda _: None) -> Callable[..., None]:
    """The reference behind the kernel's call signature; `change` spoils its arguments."""
    order = [
        *(
            "state",
            "x_cache",
            "B_cache",
            "dt_cache",
            "ring_start",
            "prev_num_accepted_tokens",
            "x",
            "dt",
            "A",
            "B",
            "C",
        ),
        *("out", "D", "z", "dt_bias", "state_batch_indices", "cu_seqlens", "pad_slot_id"),
    ]

    def run(*given: Any) -> None:
        arguments = dict(zip(order, given, strict=True))
        change(arguments)
        packed = {} if arguments["cu_seqlens"] is None else {"max_seqlen": SMALL.tokens}
        checkpointing_ssu_reference(**arguments, **packed, dt_softplus=True)

    return run


@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
def test_right_numbers_pass_the_check(monkeypatch: pytest.MonkeyPatch, ragged: bool) -> None:
    problem = dataclasses.replace(SMALL, ragged=ragged)
    found = runner(monkeypatch, as_kernel()).check(problem.to_json(), TileConfig().to_json())
    assert 0 < found["out"] < 2e-3
    assert found["state"] < 1e-6


@pytest.mark.parametrize("spoiled", ["A", "ring_start", "D", "pad_slot_id", "B", "cu_seqlens"])
def test_wrong_numbers_fail_the_check(monkeypatch: pytest.MonkeyPatch, spoiled: str) -> None:
    problem = dataclasses.replace(SMALL, ragged=spoiled == "cu_seqlens")

    def change(arguments: dict[str, Any]) -> None:
        value = arguments[spoiled]
        if spoiled == "cu_seqlens":  # rows one token shorter, as if the last one were not seen
            arguments[spoiled] = (value - torch.arange(len(value))).clamp_min(0).cummax(0).values.to(torch.int32)
            return
        arguments[spoiled] = -77 if isinstance(value, int) else value + 1 if spoiled == "ring_start" else value * 1.05

    with pytest.raises(RuntimeError, match="wrong numbers"):
        runner(monkeypatch, as_kernel(change)).check(problem.to_json(), TileConfig().to_json())


def test_the_check_covers_flushes_padding_and_empty_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    made = runner(monkeypatch, as_kernel())
    pnat: set[int] = set()
    for call in made._calls(SMALL):
        assert call.state_batch_indices is not None
        live = call.state_batch_indices != call.pad_slot_id
        assert 0 < int(live.sum()) < len(live)
        pnat |= set(call.prev_num_accepted_tokens[call.state_batch_indices[live].long()].tolist())
        assert bool(call.x_cache.isnan().any())
    assert min(pnat) == 0
    assert max(pnat) == SMALL.window
    flushing = [bool(ring.flushes(n, SMALL.tokens, SMALL.window)) for n in pnat]
    assert any(flushing)
    assert not all(flushing)


class Clock:
    """Stands in for a captured rotation: runs each call once, then tells made-up times."""

    def __init__(self, run: Callable[[calls.Call], None], cell: Cell, _: Policy) -> None:
        for call in cell.calls:
            run(call)
        self.nodes = len(cell.calls)

    def sample(self, replays: int) -> list[float]:
        return [10.0 + i for i in range(replays)]


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> DeviceRunner:
    made = runner(monkeypatch, as_kernel())
    monkeypatch.setattr(measure, "capture", Clock)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(L2_cache_size=MIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1 << 30, 1 << 31))
    return made


@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
def test_jobs_answer_in_json_and_keep_their_cell(timing: DeviceRunner, ragged: bool) -> None:
    problem = dataclasses.replace(SMALL, ragged=ragged)
    cell: dict[str, Any] = {"problem": problem.to_json(), "batch": 4, "lengths": list(UNIFORM)}
    cell |= {"tokens": [0.5, 0.5, 0.0, 0.0]} if ragged else {}
    configs = [TileConfig().to_json(), TileConfig(heads_per_cta=2, stages=2).to_json()]
    first = timing.time(**cell, config=configs[0])
    held = timing._cell
    assert json.loads(json.dumps(first)) == first
    assert first["time_us"] == 11.0  # the median of 3
    assert first["spread"] == pytest.approx(2 / 11)
    assert first["nodes"] == first["sets"] >= 16
    raced = timing.race(**cell, configs=configs)
    assert json.loads(json.dumps(raced)) == raced
    assert [r["samples"] for r in raced] == [21, 21]
    assert [r["samples"] for r in timing.heat(**cell, configs=configs)] == [4, 4]
    assert timing._cell is held
    assert held is not None and held[1].mean_tokens == (1.5 if ragged else 4.0)
    timing.time(**{**cell, "batch": 8}, config=configs[0])
    assert timing._cell is not held
    with pytest.raises(ValueError, match="do not fit"):
        timing.time(**{**cell, "batch": 1 << 20}, config=configs[0])
    assert timing._cell is None  # its memory is free for the next


def test_peers_cost_only_themselves(timing: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = as_kernel()

    def right(call: calls.Call) -> None:
        launch(kernel, call)

    def wrong(call: calls.Call) -> None:
        right(call)
        call.out.mul_(1.1)

    def broken(call: calls.Call) -> None:
        raise RuntimeError("no kernel for this shape")

    def bound(run: Callable[[calls.Call], None]) -> Callable[[calls.Call], Callable[[], None]]:
        return lambda call: lambda: run(call)

    offered = [
        peers.Variant("other", "default", True, True, bound(right)),
        peers.Variant("other", "loose", False, True, bound(wrong)),
        peers.Variant("other", "broken", False, True, bound(broken)),
        peers.Variant("standard", "default", True, False, bound(right)),
    ]
    monkeypatch.setattr(peers, "variants", lambda *_: iter(offered))
    found = timing.peers(problem=SMALL.to_json(), batch=4, lengths=list(UNIFORM))
    assert [f["peer"] for f in found] == ["other", "other", "other", "standard"]
    assert [round(f.get("out_error", -1), 1) for f in found] == [0.0, 0.1, -1, -1]
    assert [f.get("time_us") for f in found] == [14.0, 14.0, None, 14.0]
    assert found[2]["failed"] == "RuntimeError: no kernel for this shape"


def test_a_dead_context_is_told_from_an_error(timing: DeviceRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = {"problem": SMALL.to_json(), "batch": 4, "lengths": list(UNIFORM), "config": TileConfig().to_json()}

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(DeviceRunner, "_kernel", fail)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        timing.time(**cell)  # the device still answers
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(Poisoned, match="illegal memory access"):
        timing.time(**cell)


def test_tuner_modules_import_without_gpu_or_peers() -> None:
    assert list(peers.variants(SMALL, 4, CPU)) == [] or peers.installed()


@pytest.mark.gpu
@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
def test_timing_on_the_device(tmp_path: Path, ragged: bool) -> None:
    """The whole chain in a worker process: limit, check, time, race, floor. How fast is for sweeps to say."""
    problem = Problem(16, 64, 128, 1, 4, 16, ragged=ragged)
    policy = Policy(screen_replays=5, race_rounds=3)
    configs = [TileConfig().to_json(), TileConfig(heads_per_cta=2, stages=2).to_json()]
    with Worker(DeviceRunner, (0, policy.to_json()), log=tmp_path / "worker.log", startup_s=120) as worker:

        def job(name: str, **arguments: Any) -> Any:
            answer = worker.call(name, timeout_s=120, **arguments)
            assert answer.ok, f"{name}: {answer.reason}"
            return answer.value

        assert job("describe")["target"]["arch"].startswith("sm_")
        limit = job("limit")
        assert limit["read_gbs"] == max(limit["torch_read_gbs"], limit["stream_gbs"]) > 0
        for config in configs:
            assert job("check", problem=problem.to_json(), config=config)["out"] < 2e-3
        cell = {"problem": problem.to_json(), "batch": 16, "lengths": list(UNIFORM)}
        cell |= {"tokens": list(UNIFORM)} if ragged else {}
        mix = stationary(UNIFORM, 16, UNIFORM if ragged else None)
        first = job("time", **cell, config=configs[0])
        assert first["time_us"] > 0 and first["samples"] == policy.screen_replays
        assert first["nodes"] % first["sets"] == 0
        assert first["sets"] * first["bytes"] > 2 * 40 * MIB, "a rotation must exceed the L2"
        assert first["flush"] == pytest.approx(mix.flush, abs=0.02)
        raced = job("race", **cell, configs=configs)
        assert [r["samples"] for r in raced] == [policy.race_rounds * policy.race_replays] * 2
        heat = job("heat", **cell, configs=configs)
        assert [r["samples"] for r in heat] == [policy.heat_rounds * policy.heat_replays] * 2
        floor = job("floor", **cell, read_gbs=limit["read_gbs"])
        assert floor["time_us"] > floor["kernel_us"] > 0
        wrong = worker.call("time", timeout_s=60, **cell, config=TileConfig(heads_per_cta=3).to_json())
        assert not wrong.ok
        assert "heads_per_cta" in wrong.reason
        assert job("time", **cell, config=configs[0])["time_us"] > 0  # the process lives on
        assert worker.starts == 1


@pytest.mark.gpu
@pytest.mark.parametrize("state", ["f32", "bf16"])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_the_floor_kernel_changes_nothing(state: str, head_dim: int) -> None:
    """It rewrites the flush rows with what they hold, and has read them first: a spoiled copy is seen."""
    problem = Problem(16, head_dim, 128, 1, 4, 16, state_dtype=state)
    where = target.of_device(0)
    call = calls.random_call(problem, 9, dead=None, pnat=[0, 4, 8, 12, 13, 14, 15, 16, 16], device="cuda")
    before = call.state.clone()
    for config in floor_kernel.configs(problem, where.shared_per_block):
        kernel = floor_kernel.compile_floor(problem, config, where.arch)
        kernel(call.state, call.prev_num_accepted_tokens, call.state_batch_indices)
        torch.cuda.synchronize()
        assert torch.equal(call.state, before), config


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_the_floor_kernel_compiles(arch: str) -> None:
    problem = Problem(96, 80, 128, 8, 4, 16, state_dtype="bf16")
    shapes = floor_kernel.configs(problem, target.named(arch).shared_per_block)
    assert [c.heads_per_cta for c in shapes] == [1, 2, 3, 4]
    assert callable(floor_kernel.compile_floor(problem, shapes[-1], arch))


@pytest.mark.gpu
def test_a_launch_that_is_missing_from_a_graph_is_noticed() -> None:
    cell = make_cell(SMALL, 4, MIX, Policy(), torch.device("cuda", 0), 3)

    def lazy(call: calls.Call) -> None:
        if call is not cell.calls[1]:
            call.out.zero_()

    with pytest.raises(RuntimeError, match="not finite"):
        capture(lazy, cell, Policy())
