"""The peers command's measurements: ours as a call would run it, the peers and the floor, in turns on one cell."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from replayssm_cute import compiler, plan, tables
from replayssm_cute.problem import Problem

from . import floor_kernel, pdl, peers, producer_kernel
from .bench_results import FLOOR, OURS, finalists
from .entrants import Entrant
from .evolve import evolve
from .measure import DeviceRunner
from .slots import Cell
from .timing import capture, interleave, summary


class BenchRunner(DeviceRunner):
    """A `DeviceRunner` that also times whole fields of entrants. Its methods answer in JSON-like data."""

    def choice(self, problem: Problem, batch: int) -> tables.Choice:
        """The config that a call gets here: the tables' or the default rule's, if its kernel passes its self-check."""
        index = self.device.index
        return plan.eligible(problem, batch, tables.choose(problem, batch, self.target), index)

    def ours(self, problem: Problem, batch: int) -> Entrant:
        """This project's kernel, launched as a call launches it."""
        config = self.choice(problem, batch).config
        kernel = compiler.get(problem, config, self.target)
        return Entrant(OURS, config.label(), lambda call: functools.partial(kernel, *plan.kernel_args(call)))

    def cell(
        self, problem: Problem, batch: int, load: Mapping[str, Sequence[float]], read_gbs: float
    ) -> dict[str, Any]:
        """All entrants on one cell: the peers' variants and the floor's shapes first alone, then the best in turns.

        Args:
            load: lengths, and of ragged rows tokens, as `Workload.load`.
        """
        where: dict[str, Any] = {"problem": problem.to_json(), "batch": batch, **load}
        with self._guard():
            choice = self.choice(problem, batch)
            errors = self.check(problem.to_json(), choice.config.to_json())
            cell = self._cell_of(problem, batch, **load)
            variants = self.peers(**where)
            variants += self._time_variants(cell, self.refined(problem, batch, variants))
            floor = self.floor(**where, read_gbs=read_gbs)
            field = [self.ours(problem, batch), *self.of_peers(problem, batch, variants)]
            field.append(self.of_floor(cell, floor["heads_per_cta"]))
            return {
                "bytes": cell.bytes,
                "flush": cell.flush,
                "sets": len(cell.calls),
                "config": {"label": choice.config.label(), "source": choice.source, "reason": choice.reason},
                "times": self.race_field(cell, field, read_gbs, errors),
                "variants": variants,
            }

    def evolve(
        self,
        problem: Problem,
        batch: int,
        lengths: Sequence[float],
        variants: Sequence[Mapping[str, Any]],
        steps: int,
        seed: int,
    ) -> dict[str, Any]:
        """Steps of evolving cursors on one cell: ours, and each peer that replays; see `evolve`."""
        with self._guard():
            cell = self._cell_of(problem, batch, lengths)
            replaying = [v for v in variants if "out_error" in v]
            field = [self.ours(problem, batch), *self.of_peers(problem, batch, replaying)]
            return evolve(cell, field, lengths, steps, seed)

    def pdl(
        self, problem: Problem, batch: int, lengths: Sequence[float], variants: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Pairs of a producer and a step on one cell: ours and each peer that replays, without and with PDL."""
        replaying = [v for v in variants if "out_error" in v]
        with self._guard():
            cell = self._cell_of(problem, batch, lengths)
            produce = producer_kernel.compile_producer(problem, self.target.arch)
            entrants = []
            for p in (problem, dataclasses.replace(problem, pdl=True)):
                suffix = pdl.PDL if p.pdl else ""
                for entrant in (self.ours(p, batch), *self.of_peers(p, batch, replaying)):
                    entrants.append(dataclasses.replace(entrant, name=entrant.name + suffix))
            times = pdl.measure(cell, produce, entrants, self.policy, self.device)
            return {"batch": batch, "sets": len(cell.calls), "times": times}

    def of_peers(self, problem: Problem, batch: int, variants: Sequence[Mapping[str, Any]]) -> list[Entrant]:
        """The peers' variants that race, after all of them were timed once."""
        every = [*peers.variants(problem, batch, self.device), *self.refined(problem, batch, variants)]
        offered = {(v.peer, v.name): v for v in every}
        chosen = finalists(variants)
        return [Entrant(n, v["variant"], offered[v["peer"], v["variant"]].bind) for n, v in chosen.items()]

    def refined(self, problem: Problem, batch: int, variants: Sequence[Mapping[str, Any]]) -> list[peers.Variant]:
        """More variants around the fastest two-kernel one of those timed; none without one."""
        choices = {v.name: v.choice for v in peers.variants(problem, batch, self.device)}
        found = [v for v in variants if choices.get(v["variant"], {}).get("algorithm") == "two-kernel"]
        timed = [v for v in found if v.get("time_us") is not None]
        if not timed:
            return []
        fastest = min(timed, key=lambda v: v["time_us"])
        return list(peers.refined(problem, batch, self.device, choices[fastest["variant"]]))

    def of_floor(self, cell: Cell, heads_per_cta: int) -> Entrant:
        """The floor kernel in its fastest shape."""
        run = self._floor_run(cell, floor_kernel.FloorConfig(heads_per_cta))
        return Entrant(FLOOR, f"{heads_per_cta} heads a CTA", lambda call: lambda: run(call), writes_outputs=False)

    def race_field(
        self, cell: Cell, field: Sequence[Entrant], read_gbs: float, errors: dict[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """Median, spread and variant of each entrant, sampled in turns; the floor is completed by its other bytes."""
        captured = [capture(e.run, cell, self.policy, writes_outputs=e.writes_outputs) for e in field]
        samples = interleave(captured, self.policy.race_rounds, self.policy.race_replays)
        found = {e.name: summary(s) | {"variant": e.variant} for e, s in zip(field, samples, strict=True)}
        found[OURS] |= {"out_error": errors["out"], "state_error": errors["state"]}
        kernel_us = found[FLOOR]["time_us"]
        found[FLOOR] |= {"kernel_us": kernel_us, "time_us": kernel_us + self._beyond_floor_us(cell, read_gbs)}
        return found
