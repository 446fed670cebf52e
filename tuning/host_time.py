"""Host time of a call: what the Python side costs before the GPU has anything to do.

What is timed: `CALLS` calls in a loop without synchronization, by time.perf_counter, from an idle GPU with nothing
queued; the median of `REPEATS` such loops. A loop queues far fewer launches than the driver holds (about a thousand)
before a launch blocks, so that the GPU's own time is not in it. Python's garbage collector is off meanwhile.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from replayssm_cute import api, calls, plan, tables
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

from . import peers

CALLS, REPEATS = 200, 31
METHOD = f"median of {REPEATS} loops of {CALLS} calls without synchronization, each from an idle GPU; perf_counter"


def cpu_name(path: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, or empty."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def measure(
    run: Callable[[], object],
    synchronize: Callable[[], object] = torch.cuda.synchronize,
    *,
    number: int = CALLS,
    repeats: int = REPEATS,
) -> dict[str, Any]:
    """Microseconds a call on the host: median, smallest and spread of the repeats."""
    for _ in range(3):
        run()
    found = []
    enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            synchronize()
            start = time.perf_counter()
            for _ in range(number):
                run()
            found.append((time.perf_counter() - start) / number * 1e6)
    finally:
        if enabled:
            gc.enable()
        synchronize()
    middle = statistics.median(found)
    return {"host_us": middle, "least_us": min(found), "spread": (max(found) - min(found)) / middle}


def spelled_out(function: Callable[..., object], named: Mapping[str, object]) -> Callable[[], object]:
    """A call with keywords as a caller writes it.

    `functools.partial` would not do: it merges dictionaries in every call, which takes as long as a part of the call.
    """
    values = {f"value_{name}": value for name, value in named.items()}
    text = ", ".join(f"{name}=value_{name}" for name in named)
    run: Callable[[], object] = eval(f"lambda: function({text})", {"function": function, **values})
    return run


def ways(
    problem: Problem, batch: int, call: calls.Call, target: Target
) -> dict[str, tuple[Callable[[], object], bool]]:
    """What is timed for ours, by name: the call, and whether it is one that queues launches."""
    named, arguments = call.kwargs(), plan.kernel_args(call)
    keywords = {n: named[n] for n in ("cu_seqlens", "max_seqlen", "state_copy", "precision")}  # never by position
    by_position = {name: value for name, value in named.items() if name not in keywords}
    prepared = api.prepare(**named, enable_pdl=problem.pdl)
    return {
        "eager call, by keyword": (spelled_out(api.checkpointing_ssu, named | {"enable_pdl": problem.pdl}), True),
        "eager call, by position": (functools.partial(api.checkpointing_ssu, *by_position.values(), **keywords), True),
        "prepared launch": (functools.partial(prepared.launch, *arguments), True),
        "bound launch": (prepared.bind(*arguments), True),
        "raw kernel call": (functools.partial(prepared.kernel, *arguments), True),
        "table look-up": (functools.partial(tables.choose, problem, batch, target), False),
    }


def host_times(problem: Problem, batch: int, device: torch.device, target: Target, seed: int) -> list[dict[str, Any]]:
    """Host times of every way to call ours, of the look-up, and of each peer at its default; JSON-like rows."""
    call = calls.random_call(problem, batch, dead=0.0, seed=seed, device=device)
    timed = dict(ways(problem, batch, call, target))
    for variant in peers.variants(problem, batch, device):
        if variant.default:
            timed[f"{variant.peer}, {variant.name}"] = (variant.bind(call), True)
    rows = []
    for name, (run, launches) in timed.items():
        row: dict[str, Any] = {"what": name, "problem": problem.label(), "batch": batch}
        try:
            row |= measure(run) if launches else measure(run, lambda: None, number=2000)
        except Exception as e:  # a peer that cannot serve this costs its own row
            torch.cuda.synchronize()
            row["failed"] = f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]
        rows.append(row)
    return rows
