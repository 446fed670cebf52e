"""Evolving cursors and host times: what advances, what is timed and counted, and how the numbers are made."""

from __future__ import annotations

import dataclasses
import dis
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from replayssm_tuning import evolve, host_time, peers
from replayssm_tuning.acceptance import stationary
from replayssm_tuning.entrants import Entrant
from replayssm_tuning.policy import Policy
from replayssm_tuning.slots import Cell, make_cell

from replayssm_cute import calls, ring
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

fake_compiler = fakes.fake_compiler
cpu_as_gpu = fakes.cpu_as_gpu

SMALL = Problem(2, 64, 64, 1, 4, 16)
LENGTHS = (0.1, 0.2, 0.3, 0.4)
SETS, BATCH = 3, 5


class Gpu:
    """A GPU's clock and events: each launch takes what it says, and waits are free."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.us = 0.0
        self.reached = False  # whether the GPU gets to an event before the host has queued the next
        gpu = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.at = -1.0

            def record(self) -> None:
                gpu.us += 1.0  # an event takes time too
                self.at = gpu.us

            def query(self) -> bool:
                return gpu.reached

            def elapsed_time(self, other: Event) -> float:
                return (other.at - self.at) / 1e3

        def sleep(cycles: int) -> None:
            gpu.us += cycles / 2000

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", sleep)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def entrant(self, name: str, us: float, seen: list[Any], step: bool = True) -> Entrant:
        def bind(call: calls.Call) -> Callable[[], None]:
            def launch() -> None:
                self.us += us
                seen.append((name, call, call.prev_num_accepted_tokens.clone()))
                if step:
                    checkpointing_ssu_reference(**call.kwargs())

            return launch

        return Entrant(name, "made up", bind)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def cell(problem: Problem = SMALL) -> Cell:
    return make_cell(problem, BATCH, stationary(LENGTHS, 16), Policy(), torch.device("cpu"), SETS)


def test_accepted_tokens_follow_the_distribution_and_the_seed() -> None:
    drawn = evolve.draw(LENGTHS, 400, 50, seed=1)
    assert drawn.shape == (400, 50) and drawn.dtype == torch.int32
    shares = torch.bincount(drawn.flatten(), minlength=5)[1:] / drawn.numel()
    assert shares.tolist() == pytest.approx(LENGTHS, abs=0.02)
    assert torch.equal(drawn, evolve.draw(LENGTHS, 400, 50, seed=1))
    assert not torch.equal(drawn, evolve.draw(LENGTHS, 400, 50, seed=2))


def test_percentiles() -> None:
    values = [float(v) for v in range(1, 1001)]
    assert (evolve.percentile(values, 0.5), evolve.percentile(values, 0.99)) == (500.0, 990.0)
    assert evolve.percentile([3.0], 0.99) == 3.0
    assert evolve.percentile([2.0, 1.0], 0.5) == 1.0


@pytest.mark.parametrize("problem", [SMALL, dataclasses.replace(SMALL, index_dtype=None)], ids=["slots", "rows"])
def test_every_entrant_meets_the_same_steps_with_cursors_of_its_own(gpu: Gpu, problem: Problem) -> None:
    made = cell(problem)
    before = [(c.ring_start.clone(), c.prev_num_accepted_tokens.clone()) for c in made.calls]
    seen: list[Any] = []
    steps = 50
    found = evolve.evolve(made, [gpu.entrant("a", 7.0, seen), gpu.entrant("b", 9.0, seen)], LENGTHS, steps, seed=5)
    for call, (start, pnat) in zip(made.calls, before, strict=True):  # the cell's own stay for the next measurement
        assert torch.equal(call.ring_start, start) and torch.equal(call.prev_num_accepted_tokens, pnat)

    warm = 2 + 20  # launches before the timed ones: modules, and the host's time
    by_name = {n: [(c, p) for name, c, p in seen if name == n][warm:] for n in "ab"}
    accepted = evolve.draw(LENGTHS, steps, BATCH, seed=5)
    starts = [c.ring_start.clone() for c in made.calls]
    pnats = [c.prev_num_accepted_tokens.clone() for c in made.calls]
    if problem.index_dtype is not None:  # one cache, shared by the sets
        starts, pnats = [starts[0]] * SETS, [pnats[0]] * SETS
    flushed = []
    for step in range(steps):
        of_set = step % SETS
        slots = evolve.slots_of(made.calls[of_set])
        for name in "ab":
            call, pnat = by_name[name][step]
            assert call.x is made.calls[of_set].x
            assert torch.equal(pnat, pnats[of_set]), (name, step)
        flushed.append(float(ring.flushes(pnats[of_set][slots.long()], 4, 16).float().mean()))
        ring.commit(starts[of_set], pnats[of_set], slots, accepted[step], tokens=4, window=16)
    assert found["flush"] == pytest.approx(statistics.fmean(flushed))
    assert 0.05 < found["flush"] < 0.5
    assert (found["steps"], found["sets"], found["batch"], found["seed"]) == (steps, SETS, BATCH, 5)
    assert len(by_name["a"]) == len(by_name["b"]) == steps
    order = [name for name, *_ in seen[2 * warm :]]
    assert order[: 3 * SETS] == ["a"] * SETS + ["b"] * SETS + ["a"] * SETS  # turns of a rotation


def test_only_the_launch_is_timed(gpu: Gpu) -> None:
    seen: list[Any] = []
    found = evolve.evolve(cell(), [gpu.entrant("a", 7.0, seen), gpu.entrant("b", 9.0, seen)], LENGTHS, 20, seed=0)
    of_a, of_b = found["entrants"]["a"], found["entrants"]["b"]
    assert (of_a["p50_us"], of_a["p99_us"], of_a["counted"], of_a["late"]) == pytest.approx((8.0, 8.0, 20, 0))
    assert of_b["mean_us"] == pytest.approx(10.0)
    assert found["empty_us"] == pytest.approx(1.0)
    assert found["wait_us"] >= 60.0


def test_steps_that_the_host_queued_too_late_do_not_count(gpu: Gpu) -> None:
    own = evolve.Own("a", [], [])
    for gpu.reached in (True, False, True):
        evolve.timed(own, lambda: None, lambda: None)
    assert (own.late, len(own.times)) == (2, 1)
    gpu.reached = True
    with pytest.raises(RuntimeError, match="a: none of 20 steps was queued in time"):
        evolve.evolve(cell(), [gpu.entrant("a", 7.0, [])], LENGTHS, 20, seed=0)


def test_missing_launches_and_moved_cursors_are_noticed(gpu: Gpu) -> None:
    with pytest.raises(RuntimeError, match="not finite after the steps"):
        evolve.evolve(cell(), [gpu.entrant("a", 1.0, [], step=False)], LENGTHS, 5, seed=0)

    def moving(call: calls.Call) -> Callable[[], None]:
        def launch() -> None:
            checkpointing_ssu_reference(**call.kwargs())
            call.ring_start.add_(1).remainder_(SMALL.ring_rows)

        return launch

    entrants = [gpu.entrant("a", 1.0, []), Entrant("b", "made up", moving)]
    with pytest.raises(RuntimeError, match="b and a end with other cursors"):
        evolve.evolve(cell(), entrants, LENGTHS, 5, seed=0)


# ---- host times ------------------------------------------------------------------------------------


def test_a_call_by_keyword_is_one_as_a_caller_writes_it() -> None:
    """Every argument arrives under its own name, and no dictionary is made on the way."""
    seen: list[dict[str, object]] = []
    run = host_time.spelled_out(lambda *, a, b: seen.append({"a": a, "b": b}), {"a": [1], "b": None})
    run()
    assert seen == [{"a": [1], "b": None}]
    assert "CALL_FUNCTION_EX" not in {i.opname for i in dis.get_instructions(run)}


def test_a_host_time_is_a_loops_median(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 10e-6, 100.0, 100.0 + 30e-6, 200.0, 200.0 + 20e-6])
    monkeypatch.setattr(host_time.time, "perf_counter", lambda: next(ticks))
    ran: list[str] = []
    found = host_time.measure(lambda: ran.append("call"), lambda: ran.append("sync"), number=10, repeats=3)
    assert found["host_us"] == pytest.approx(2.0)
    assert found["least_us"] == pytest.approx(1.0)
    assert found["spread"] == pytest.approx(1.0)
    loop = ["sync", *["call"] * 10]
    assert ran == ["call"] * 3 + loop * 3 + ["sync"]


def test_the_queue_stays_far_from_full() -> None:
    """A launch blocks once about a thousand are queued; FlashInfer's two kernels a call count twice."""
    assert host_time.CALLS * 2 < 512


def test_every_way_to_call_is_timed(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def variant(peer: str, default: bool, run: Callable[[], None]) -> peers.Variant:
        return peers.Variant(peer, "auto", default, True, lambda call: run)

    def broken() -> None:
        raise RuntimeError("no kernel")

    offered = [variant("a", True, lambda: None), variant("a", False, broken), variant("b", True, broken)]
    monkeypatch.setattr(peers, "variants", lambda *_: iter(offered))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)

    def once(run: Callable[[], object], *_: Any, **__: Any) -> dict[str, Any]:
        run()
        return {"host_us": 1.0}

    monkeypatch.setattr(host_time, "measure", once)
    rows = host_time.host_times(SMALL, 2, torch.device("cpu"), fakes.H200, seed=0)
    assert [r["what"] for r in rows] == [
        "eager call, by keyword", "eager call, by position", "prepared launch", "bound launch", "raw kernel call",
        "table look-up", "a, auto", "b, auto",
    ]  # fmt: skip
    assert [r.get("failed") for r in rows] == [None] * 7 + ["RuntimeError: no kernel"]
    assert {r["problem"] for r in rows} == {SMALL.label()}


def test_the_cpus_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Made-up 9000\n")
    assert host_time.cpu_name(tmp_path / "cpuinfo") == "Made-up 9000"
    assert host_time.cpu_name(tmp_path / "nothing") == ""
