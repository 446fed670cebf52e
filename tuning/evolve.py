"""Steps of evolving cursors: each step's own time, while rows accept at random, flush when they must, and go on.

What is timed: two CUDA events around one eager launch of the step, on one stream. Before each such pair a kernel that
only waits keeps the GPU busy until the host has queued the pair and the launch, so that no host time is in between;
a step whose first event the GPU had reached before the second was queued is not counted. After the pair, untimed, the
step's rows commit the tokens that they accept. A step meets a cold L2: it uses the slot set that was used longest ago,
and a rotation over the sets touches several times the L2. Entrants take turns of one rotation each, on the same
caches, with cursors of their own that accept the same tokens. `empty_us` is such a pair of events with nothing between.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from replayssm_cute import calls, ring

from .entrants import Entrant
from .slots import Cell

METHOD = (
    "CUDA events around each eager launch, behind a kernel that waits until all is queued; cold L2 by rotating slot "
    "sets; commits between steps are not timed"
)
_WAIT_US = 60.0  # at least; several times what the host takes to queue a step
_CYCLES = 1_000_000  # of the waiting kernel when it is calibrated
_EMPTY = 200  # pairs of events with nothing between


@dataclass(slots=True)
class Own:
    """An entrant's cursors, and its launches on them; one of each a slot set."""

    name: str
    calls: list[calls.Call]
    launches: list[Callable[[], object]]
    times: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    late: int = 0


def draw(lengths: Sequence[float], steps: int, batch: int, seed: int) -> torch.Tensor:
    """(steps, batch) int32: tokens that each row of each step accepts, 1..T, by P(length = 1..T)."""
    gen = torch.Generator().manual_seed(seed)
    shares = torch.tensor(lengths, dtype=torch.float64)
    return (torch.multinomial(shares, steps * batch, replacement=True, generator=gen) + 1).view(steps, batch).int()


def with_own_cursors(cell: Cell, entrant: Entrant) -> Own:
    """The cell's calls on copies of its cursors: shared by the sets where they share them."""
    copies: dict[int, torch.Tensor] = {}

    def copy(t: torch.Tensor) -> torch.Tensor:
        return copies.setdefault(t.data_ptr(), t.clone())

    own = [
        dataclasses.replace(c, ring_start=copy(c.ring_start), prev_num_accepted_tokens=copy(c.prev_num_accepted_tokens))
        for c in cell.calls
    ]
    return Own(entrant.name, own, [entrant.bind(c) for c in own])


def slots_of(call: calls.Call) -> torch.Tensor:
    """The slot of each row."""
    if call.state_batch_indices is not None:
        return call.state_batch_indices
    return torch.arange(call.batch, device=call.x.device)


def commit(cell: Cell, call: calls.Call, accepted: torch.Tensor) -> torch.Tensor:
    """Commit a step's tokens; returns the share of its rows that flushed, on the device."""
    p, slots = cell.problem, slots_of(call)
    pnat = call.prev_num_accepted_tokens
    flushed = ring.flushes(pnat[slots.long()], p.tokens, p.window).float().mean()
    ring.commit(call.ring_start, pnat, slots, accepted, tokens=p.tokens, window=p.window)
    return flushed


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-round(share * len(ordered) * 1e6) // 1_000_000) - 1)]


def evolve(cell: Cell, entrants: Sequence[Entrant], lengths: Sequence[float], steps: int, seed: int) -> dict[str, Any]:
    """Time `steps` steps of each entrant; see the module.

    Returns:
        A JSON-like row: p50_us, p99_us, mean_us, counted and late steps of each entrant, and the facts of the run.

    Raises:
        RuntimeError: if an output is not finite afterwards, a launch changed the cursors, or no step was in time.
    """
    accepted = draw(lengths, steps, cell.batch, seed).to(cell.out.device)
    fields = [with_own_cursors(cell, e) for e in entrants]
    for own in fields:  # modules load, and lazy set-up happens, before anything is timed
        for launch in own.launches[:2]:
            launch()
    wait = Wait(max(_WAIT_US, 4 * max(_host_us(own.launches[0]) for own in fields)))
    sets = len(cell.calls)
    flushed = []
    cell.out.fill_(float("nan"))
    for first in range(0, steps, sets):
        for own in fields:
            for step in range(first, min(first + sets, steps)):
                timed(own, own.launches[step % sets], wait)
                share = commit(cell, own.calls[step % sets], accepted[step])
                if own is fields[0]:
                    flushed.append(share)
    torch.cuda.synchronize()
    _verify(cell, fields, min(sets, steps))
    found = {own.name: statistics_of(own) for own in fields}
    empty = Own("empty", [], [])
    for _ in range(_EMPTY):
        timed(empty, lambda: None, wait)
    torch.cuda.synchronize()
    return {
        "batch": cell.batch,
        "steps": steps,
        "sets": sets,
        "seed": seed,
        "flush": float(torch.stack(flushed).mean()),
        "wait_us": wait.us,
        "empty_us": statistics_of(empty)["p50_us"],
        "entrants": found,
    }


class Wait:
    """A kernel that waits about `us` microseconds on the GPU and touches no memory."""

    def __init__(self, us: float) -> None:
        self.us = us
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_CYCLES)
        start.record()
        torch.cuda._sleep(_CYCLES)
        stop.record()
        torch.cuda.synchronize()
        self._cycles = round(us * _CYCLES / (start.elapsed_time(stop) * 1e3))

    def __call__(self) -> None:
        torch.cuda._sleep(self._cycles)


def timed(own: Own, launch: Callable[[], object], wait: Callable[[], None]) -> None:
    """Queue one timed step; it counts only if the GPU was still waiting when all of it was queued."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    wait()
    start.record()
    launch()
    stop.record()
    if start.query():
        own.late += 1
    else:
        own.times.append((start, stop))


def microseconds(own: Own) -> list[float]:
    """The counted steps' times."""
    return [start.elapsed_time(stop) * 1e3 for start, stop in own.times]


def statistics_of(own: Own) -> dict[str, Any]:
    """Percentiles and mean of an entrant's steps.

    Raises:
        RuntimeError: if none counts.
    """
    times = microseconds(own)
    if not times:
        raise RuntimeError(f"{own.name}: none of {own.late} steps was queued in time: the host is too slow or too busy")
    return {
        "p50_us": percentile(times, 0.5),
        "p99_us": percentile(times, 0.99),
        "mean_us": statistics.fmean(times),
        "counted": len(times),
        "late": own.late,
    }


def _host_us(launch: Callable[[], object]) -> float:
    """Microseconds that the host takes to queue a launch."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(20):
        launch()
    taken = (time.perf_counter() - start) / 20 * 1e6
    torch.cuda.synchronize()
    return taken


def _verify(cell: Cell, fields: Sequence[Own], used: int) -> None:
    if not bool(torch.isfinite(cell.out[:used]).all()):
        raise RuntimeError("an output is not finite after the steps: a launch is missing, or wrong")
    for own in fields[1:]:
        for mine, other in zip(fields[0].calls, own.calls, strict=True):
            same = torch.equal(mine.ring_start, other.ring_start)
            if not same or not torch.equal(mine.prev_num_accepted_tokens, other.prev_num_accepted_tokens):
                raise RuntimeError(f"{own.name} and {fields[0].name} end with other cursors: a launch changed them")
