"""Steps behind a producer, with and without programmatic dependent launch (PDL).

What is timed: a graph of pairs, a producer that writes a call's x, B, C and dt (see `producer_kernel`) and the step on
it, over rotating slot sets, as cells are timed; microseconds a pair. Every pair runs the same producer; "PDL" says that
the step was compiled and launched for it, and so starts while the producer still runs. Each is seen to wait for it:
where the producer's targets hold NaN before, the results must be those of a step on its sources.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from replayssm_cute import calls
from replayssm_cute.problem import Problem

from .entrants import Entrant
from .policy import Policy
from .producer_kernel import Produce, bind
from .slots import Cell
from .timing import capture, interleave, summary

METHOD = "graph of pairs of a producer, which triggers at its start, and a step; cold L2; us a pair"
PDL = ", PDL"  # what follows an entrant's name
PRODUCER = "producer alone"
_WRITTEN = ("x", "B", "C")  # and dt, through its one value a head
_SAME = 0.02  # relative error of outputs that a peer's own arithmetic explains
_ROWS, _TIMES = 16, 5  # of a trial: rows, and runs


def with_inputs_copied(call: calls.Call) -> calls.Call:
    """The same call on copies of what a producer writes."""
    copies: dict[str, Any] = {name: getattr(call, name).clone() for name in _WRITTEN}
    dt = calls.spread(call.dt[..., 0].clone(), call.dt.shape[-1])
    return dataclasses.replace(call, **copies, dt=dt)


def spoil(call: calls.Call) -> None:
    """Fill what a producer and a step write with NaN."""
    for t in (call.x, call.B, call.C, call.dt[..., 0], call.out):
        t.fill_(float("nan"))


class Trial:
    """A call of its own, none of whose rows flushes, so that its step may be run again and again."""

    def __init__(self, problem: Problem, produce: Produce, right: Entrant, device: torch.device, seed: int) -> None:
        pnat = [i % (problem.window - problem.tokens + 1) for i in range(_ROWS)]
        self.call = calls.random_call(problem, _ROWS, pnat=pnat, dead=0.0, seed=seed, device=device)
        source = with_inputs_copied(self.call)
        right.run(source)
        self.expected = source.out.float().clone()
        self.produce = bind(produce, source, self.call)

    def check(self, entrant: Entrant) -> None:
        """See that an entrant's step waits for its producer.

        Raises:
            RuntimeError: if its outputs are not the expected ones, as far as a peer's own arithmetic goes.
        """
        for _ in range(_TIMES):
            spoil(self.call)
            self.produce()
            entrant.run(self.call)
            error = float((self.call.out.float() - self.expected).norm() / self.expected.norm())
            if not error <= _SAME:
                raise RuntimeError(
                    f"{entrant.name}: outputs behind the producer are off by {error:.2g}: no wait for it"
                )


def measure(
    cell: Cell, produce: Produce, entrants: Sequence[Entrant], policy: Policy, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Microseconds a pair of each entrant, and of the producer alone, in interleaved rounds; or why one failed.

    Args:
        entrants: the first one's results are what the others' are held to.
    """
    producers = {id(c): bind(produce, with_inputs_copied(c), c) for c in cell.calls}
    trial = Trial(cell.problem, produce, entrants[0], device, policy.seed)

    def pair(entrant: Entrant) -> Callable[[calls.Call], None]:
        def run(call: calls.Call) -> None:
            producers[id(call)]()
            entrant.run(call)

        return run

    field = {PRODUCER: capture(lambda call: producers[id(call)](), cell, policy, writes_outputs=False)}
    failed: dict[str, dict[str, Any]] = {}
    for entrant in entrants:
        try:
            trial.check(entrant)
            field[entrant.name] = capture(pair(entrant), cell, policy)
        except Exception as e:
            torch.cuda.synchronize()  # a sticky error ends the whole; any other only this entrant
            failed[entrant.name] = {"failed": f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]}
    samples = interleave(list(field.values()), policy.race_rounds, policy.race_replays)
    variants = {PRODUCER: ""} | {e.name: e.variant for e in entrants}
    timed = {n: summary(s) | {"variant": variants[n]} for n, s in zip(field, samples, strict=True)}
    return {name: (timed | failed)[name] for name in variants}
