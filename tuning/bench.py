"""The peers command: this project, its peers and the floor beside each other, in one process on one GPU.

Cells are measured in the plan's order until the budget ends; the results are written after each, so that a run that
is stopped keeps what it has.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from replayssm_cute import compiler, tables

from . import bench_results, evolve, host_time, pdl, peers
from .bench_device import BenchRunner
from .bench_results import Bench, BenchCell
from .errors import SweepError
from .manifest import manifest
from .plan import TuningPlan, Workload
from .policy import Policy
from .progress import Budget, Steps
from .worker import Poisoned

RESULTS = "peers.json"


@dataclass(frozen=True, slots=True)
class Options:
    """What is measured beside the cells.

    Attributes:
        evolve: steps of evolving cursors in each cell, 0 for none.
        host: host times too.
        pdl: behind a producer with programmatic dependent launch too.
        seed: of every random choice.
    """

    evolve: int = 0
    host: bool = False
    pdl: bool = False
    seed: int = 0


def run(
    plan: TuningPlan,
    out: Path,
    *,
    device: int = 0,
    budget_s: float | None = None,
    options: Options | None = None,
    workers: int | None = None,
    console: Console | None = None,
) -> Bench:
    """Measure a plan's cells and write the results to `out`.

    Args:
        budget_s: seconds; cells that it does not reach are left out and noted (default: the plan's).
        workers: compile processes (default: the CPUs this process may use).

    Raises:
        SweepError: if no cell could be measured.
        OSError: if `out` cannot be written.
    """
    console = console or Console()
    options = options or Options()
    budget = Budget(budget_s or plan.budget_s)
    policy = Policy(seed=options.seed)
    out.mkdir(parents=True, exist_ok=True)
    runner = BenchRunner(device, policy.to_json())
    session = Session(plan, out, runner, options, budget, console)
    session.compile(workers or len(os.sched_getaffinity(0)))
    session.measure()
    if not session.cells:
        raise SweepError(f"no cell was measured: {'; '.join(session.notes) or 'the budget is too short'}")
    return session.save()


class Session:
    """One run on one device, and what it has found so far."""

    def __init__(
        self, plan: TuningPlan, out: Path, runner: BenchRunner, options: Options, budget: Budget, console: Console
    ) -> None:
        self.plan, self.out, self.runner, self.options = plan, out, runner, options
        self.budget, self.console = budget, console
        self.notes: list[str] = []
        self.cells: list[BenchCell] = []
        self.rows: dict[str, list[Mapping[str, Any]]] = {"evolved": [], "host": [], "pdl": []}
        self.described = runner.describe()
        if not self.described["peers"]:
            self.notes.append("FlashInfer is not installed: no peers were timed")
        self.limit: dict[str, Any] = {}

    def workloads(self) -> list[tuple[Workload, int]]:
        """Every cell of the plan."""
        return [(w, b) for w in self.plan.workloads for b in self.plan.batches]

    def compile(self, workers: int) -> None:
        """Compile what the cells will run, in parallel; a failure shows when its cell does."""
        target = self.runner.target
        items = [(w.problem, tables.choose(w.problem, b, target).config, target) for w, b in self.workloads()]
        if self.options.pdl:
            items += [(dataclasses.replace(p, pdl=True), c, t) for p, c, t in items]
        if self.options.host:
            problem = self.plan.workloads[0].problem
            items += [(problem, c, target) for c in tables.candidates(problem, target)]
        items = list(dict.fromkeys(items))
        with Steps(self.console, "compile", len(items), self.budget) as steps:
            compiler.compile_many(items, workers, lambda done, *_: steps.step(done.item[1].label()))

    def measure(self) -> None:
        """Measure host times first (they are short), then the cells."""
        self.limit = self.runner.limit()
        self.part("host times", self.host)
        cells = self.workloads()
        with Steps(self.console, "cells", len(cells), self.budget) as steps:
            for workload, batch in cells:
                if self.budget.left <= 0:
                    break
                where = f"{workload.label}, batch {batch}"
                steps.at(where)
                self.part(where, lambda w=workload, b=batch: self.cell(w, b))  # type: ignore[misc]
                steps.step(where)
        if len(self.cells) < len(cells):
            self.notes.append(f"{len(cells) - len(self.cells)} of {len(cells)} cells were not measured")

    def part(self, what: str, measure: Callable[[], None]) -> None:
        """One part of the measurements; one that fails costs itself and is noted."""
        try:
            measure()
        except SweepError:  # of a part of this part
            raise
        except Poisoned as e:
            self.notes.append(f"{what}: {e}")
            self.save()
            raise SweepError(f"{what}: the GPU answers nothing more: {e}; {self.out / RESULTS} has the rest") from e
        except (RuntimeError, ValueError, TypeError) as e:
            self.failed(what, e)

    def failed(self, what: str, error: Exception) -> None:
        """Note and say that a part has no result."""
        self.notes.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:400]}")
        self.console.print(self.notes[-1], style="red", highlight=False, soft_wrap=True, markup=False)

    def host(self) -> None:
        """Host times of the plan's first problem, at its smallest batch."""
        if not self.options.host:
            return
        problem, batch = self.plan.workloads[0].problem, self.plan.batches[0]
        runner = self.runner
        self.rows["host"] += host_time.host_times(problem, batch, runner.device, runner.target, self.options.seed)

    def cell(self, workload: Workload, batch: int) -> None:
        """One cell and what the options ask beside it."""
        problem, runner = workload.problem, self.runner
        found = runner.cell(problem, batch, workload.load, self.read_gbs()[0])
        cell = BenchCell(workload.label, problem, batch, **found)
        self.cells.append(cell)
        self.say(cell)
        self.note_missing(cell)
        self.save()
        if problem.ragged and any(True for _ in self.beside()):
            self.note(f"{workload.label}: evolving cursors and PDL are timed of rows with T tokens each alone")
            return
        for name, make in self.beside():
            self.part(f"{workload.label}, batch {batch}, {name}", lambda: self.add(name, workload, batch, make))  # noqa: B023
        self.save()

    def beside(self) -> Iterator[tuple[str, Callable[[Workload, int], dict[str, Any]]]]:
        """What the options ask of each cell."""
        if self.options.evolve:
            yield "evolved", self.evolved
        if self.options.pdl:
            yield "pdl", self.pdl

    def add(self, name: str, workload: Workload, batch: int, make: Callable[[Workload, int], dict[str, Any]]) -> None:
        """A row of an option."""
        where = {"label": workload.label, "problem": workload.problem.label()}
        self.rows[name].append(where | make(workload, batch))

    def evolved(self, workload: Workload, batch: int) -> dict[str, Any]:
        """Steps of evolving cursors of one cell."""
        return self.runner.evolve(
            workload.problem, batch, workload.lengths, self.cells[-1].variants, self.options.evolve, self.options.seed
        )

    def pdl(self, workload: Workload, batch: int) -> dict[str, Any]:
        """Pairs of a producer and a step of one cell; says once if no peer was built for PDL."""
        found = self.runner.pdl(workload.problem, batch, workload.lengths, self.cells[-1].variants)
        for name, entry in found["times"].items():
            if "failed" in entry:
                self.note(f"{workload.label}: no time of {name}: {entry['failed'][:200]}")
        return found

    def note_missing(self, cell: BenchCell) -> None:
        """Say once a workload which peer serves none of its variants, and why."""
        raced = {bench_results.peer_of(name) for name in cell.times}
        for variant in cell.variants:
            if variant["peer"] not in raced:
                self.note(f"{cell.label}: no time of {variant['peer']}: {variant.get('failed', 'unknown')[:200]}")
                raced.add(variant["peer"])

    def note(self, text: str) -> None:
        """Something that a reader must know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def read_gbs(self) -> tuple[float, str]:
        """The streaming limit of this run, and its source."""
        return float(self.limit["read_gbs"]), f"measured in this run: {self.limit['method']}"

    def say(self, cell: BenchCell) -> None:
        """A cell's line, as soon as it is there."""
        times = ", ".join(f"{name} {entry['time_us']:.2f}" for name, entry in cell.times.items())
        line = f"{cell.label}, batch {cell.batch} ({cell.config['label']}, {cell.config['source']}): {times} us"
        self.console.print(line, highlight=False, soft_wrap=True, markup=False)

    def save(self) -> Bench:
        """Write what is there."""
        read_gbs, method = self.read_gbs()
        policy = {
            "method": "CUDA graph, cold L2, slots in rotation, pnat by quota; entrants in interleaved rounds",
            **self.runner.policy.to_json(),
            "limit": self.limit,
            "cpu": host_time.cpu_name(),
        }
        if self.options.host:
            policy["host_method"] = host_time.METHOD
        if self.options.evolve:
            policy["evolve_method"] = evolve.METHOD
        if self.options.pdl:
            policy["pdl_method"] = pdl.METHOD
        bench = Bench(
            plan=self.plan.name,
            title=self.plan.title,
            source=self.plan.source,
            manifest=manifest(
                self.plan,
                self.budget,
                self.runner.target,
                provenance="measured",
                driver=self.described["driver"],
                policy=policy,
                versions=peers.installed(),
            ),
            read_gbs=read_gbs,
            read_gbs_method=method,
            notes=tuple(self.notes),
            cells=tuple(self.cells),
            **{name: tuple(rows) for name, rows in self.rows.items()},
        )
        bench.save(self.out / RESULTS)
        return bench
