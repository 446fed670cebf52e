"""Timing a cell: its rotations captured in a CUDA graph, and the time of a call as the replay's over its launches.

Cursors never change, so every replay meets the same rows: ring rows are rewritten with what they hold, and flushed
states stay finite, since A < 0 contracts them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replayssm_cute import calls
from replayssm_cute.plan import kernel_args

from .policy import Policy
from .slots import Cell


def launch(kernel: Callable[..., Any], call: calls.Call) -> None:
    """Launch a compiled step kernel on a call's tensors."""
    kernel(*kernel_args(call))


@dataclass(slots=True)
class Timed:
    """A captured rotation."""

    graph: torch.cuda.CUDAGraph
    nodes: int

    def sample(self, replays: int) -> list[float]:
        """Microseconds a call of each of `replays` replays."""
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        for start, stop in events:
            start.record()
            self.graph.replay()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e3 / self.nodes for start, stop in events]


def interleave(field: Sequence[Timed], rounds: int, replays: int) -> list[list[float]]:
    """Microseconds a call of each, sampled in turns: the drift of clocks and memory meets all of them alike.

    Every other round goes backwards, and each turn begins with a replay that is not counted: what the one before left
    in the caches is not this one's to pay for.
    """
    samples: list[list[float]] = [[] for _ in field]
    for number in range(rounds):
        order = range(len(field)) if number % 2 == 0 else range(len(field) - 1, -1, -1)
        for i in order:
            field[i].sample(1)
            samples[i] += field[i].sample(replays)
    return samples


def capture(run: Callable[[calls.Call], None], cell: Cell, policy: Policy, *, writes_outputs: bool = True) -> Timed:
    """Capture rotations of `run` over the cell's calls, and see that a replay writes every output.

    Args:
        writes_outputs: False for a kernel that is no step and leaves `out` alone.

    Raises:
        RuntimeError: if an output is not finite after a replay.
    """
    for call in cell.calls[:2]:  # modules load, and lazy set-up happens, outside the capture
        run(call)
    torch.cuda.synchronize()
    # a guess at one call: its bytes at 3 TB/s and a few microseconds
    guess_us = cell.bytes / 3e6 + 4
    rotation_us = guess_us * len(cell.calls)
    rotations = max(1, min(round(policy.graph_us / rotation_us), policy.max_nodes // len(cell.calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rotations):
            for call in cell.calls:
                run(call)
    cell.out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    if writes_outputs and not bool(torch.isfinite(cell.out).all()):
        raise RuntimeError("outputs are not finite after a graph replay: a launch is missing from the graph, or wrong")
    return Timed(graph, rotations * len(cell.calls))


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median and relative spread (largest minus smallest, over the median) of microseconds a call."""
    middle = statistics.median(samples)
    return {"time_us": middle, "spread": (max(samples) - min(samples)) / middle, "samples": len(samples)}
