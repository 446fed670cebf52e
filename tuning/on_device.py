"""Measuring on a GPU: compile, check the numbers, time every cell, race the close ones, time the peers beside."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

from .candidates import compile_all, ranked
from .cells import JOB_S, CellTimer, Compiled
from .context import Context
from .errors import SweepError
from .manifest import manifest
from .measure import DeviceRunner
from .plan import Workload
from .policy import Policy
from .progress import Budget, Steps
from .results import CellResult, Results
from .worker import Worker

COMPILE_SHARE = 0.5  # of the budget, at most
_STARTUP_S = 120.0


def measure(
    ctx: Context,
    device: int,
    *,
    peers: bool,
    mixes: bool = False,
    policy: Policy | None = None,
    repeats: int = 1,
) -> list[Results]:
    """Results of one CUDA device (of each rank's, which must be of one kind), marked "measured".

    Args:
        mixes: race the finalists of each cell under other acceptance lengths too.
        repeats: measure so many times, each with the whole budget and a seed of its own. The first one compiles,
            which more than one do not have to share a budget with, so that all have the same time for their cells; it
            alone times peers, floors and other mixes.

    Raises:
        SweepError: if the device cannot be used, or no kernel compiled.
    """
    policy = policy or Policy()
    log = ctx.out / (f"worker.rank{ctx.ranks.rank}.log" if ctx.ranks.several else "worker.log")
    found: list[Results] = []
    compiled: Compiled | None = None
    for number in range(repeats):
        seeded = dataclasses.replace(policy, seed=policy.seed + number)
        if number:
            if ctx.budget.ended:
                break
            ctx.budget.restart()
            ctx.console.print(f"repeat {number + 1} of {repeats}, seed {seeded.seed}", highlight=False, soft_wrap=True)
        with Worker(DeviceRunner, (device, seeded.to_json()), log=log, startup_s=_STARTUP_S) as worker:
            session = Session(ctx, worker, seeded, device)
            first = number == 0
            found.append(
                session.run(peers and first, floors=first, mixes=mixes and first, compiled=compiled, apart=repeats > 1)
            )
            compiled = session.cells.compiled
    return found


@dataclass(slots=True)
class _Part:
    """What one rank has measured."""

    cells: list[CellResult]
    notes: list[str]
    unreached: int
    slow: int
    starts: int


class Session:
    """One sweep on one device, or one rank's part in it."""

    def __init__(self, ctx: Context, worker: Worker, policy: Policy, device: int) -> None:
        self.ctx, self.worker, self.policy, self.device = ctx, worker, policy, device
        described = ctx.gather("opening the devices", self.describe)
        mine = described[0]
        for rank, other in enumerate(described):
            if odd := [k for k in mine if other[k] != mine[k]]:
                got, expected = ({k: d[k] for k in odd} for d in (other, mine))
                raise SweepError(f"rank {rank} differs from rank 0 in its device: got {got}, expected {expected}")
        self.peers: dict[str, str] = mine["peers"]
        self.target = Target(**mine["target"])
        self.cells = CellTimer(ctx, worker, policy, self.target, mine["driver"])

    def describe(self) -> dict[str, Any]:
        """The device as `DeviceRunner.describe` gives it."""
        answer = self.worker.call("describe", timeout_s=JOB_S)
        if not answer.ok:
            raise SweepError(
                f"CUDA device {self.device} cannot be used: {answer.reason}; see the worker's log in {self.ctx.out}, "
                f"or estimate with --estimate"
            )
        found: dict[str, Any] = answer.value
        return found

    def run(
        self,
        peers: bool,
        *,
        floors: bool = True,
        mixes: bool = False,
        compiled: Compiled | None = None,
        apart: bool = False,
    ) -> Results:
        """Compile, measure and decide.

        Args:
            peers, floors: time them beside.
            mixes: race the finalists of each cell under other acceptance lengths too.
            compiled: what an earlier run of the same sweep compiled: exactly these candidates are measured.
            apart: compilation has a budget of its own: the time for the cells is counted from its end.
        """
        ctx, target, cells, policy = self.ctx, self.target, self.cells, self.policy
        share = f", {ctx.ranks.size} of them sharing the cells" if ctx.ranks.several else ""
        ctx.console.print(
            f"measuring on {target.name} ({target.arch}){share}, driver {cells.driver or 'unknown'}",
            highlight=False,
            soft_wrap=True,
        )
        limit = ctx.only_first("the read limit", lambda: cells.job("limit", {}, {}))
        cells.read_gbs, method = self.read_limit(limit)
        cells.peers, cells.floors, cells.mixes = (self.peers if peers else {}), floors, mixes
        order = {
            w.problem: ranked(w, target, ctx.plan.batches, within=policy.prune, timed=True) for w in ctx.plan.workloads
        }
        if compiled is None:
            compiled = self.compile(order)
            if apart:
                ctx.budget.restart()
        cells.compiled = compiled

        parts = ctx.gather("the measurements", lambda: self.measure(order))
        wanted = {(w.problem, b): n for n, (w, b) in enumerate(self.all_cells())}
        found = sorted((c for part in parts for c in part.cells), key=lambda c: wanted[c.problem, c.batch])
        notes = list(dict.fromkeys(note for part in parts for note in part.notes))
        if slow := sum(part.slow for part in parts):
            notes.append(
                f"{slow} times (a config in a cell) were left out as slow: the cost model puts them beyond "
                f"{policy.prune:g} times the fastest of the cell; --whole-grid takes them too"
            )
        if len(found) < len(wanted):
            notes.append(f"{len(wanted) - len(found)} of {len(wanted)} cells have no time; a rerun goes on with them")
        if unreached := sum(part.unreached for part in parts):
            notes.append(f"the budget ended before {unreached} times (a config in a cell) were taken")
        if (starts := sum(part.starts for part in parts)) > len(parts):
            notes.append(f"the measuring processes were started {starts} times (crashes, hangs)")
        return Results(
            plan=ctx.plan.name,
            title=ctx.plan.title,
            source=ctx.plan.source,
            manifest=manifest(
                ctx.plan,
                ctx.budget,
                target,
                provenance="measured",
                driver=cells.driver,
                policy={"method": "CUDA graph, cold L2, slots in rotation, pnat by quota", **self.policy.to_json()}
                | {"limit": limit, "ranks": ctx.ranks.size},
                versions=cells.peers,
            ),
            read_gbs=cells.read_gbs,
            read_gbs_method=method,
            margin=self.policy.margin,
            notes=tuple(notes),
            cells=tuple(found),
        )

    def compile(self, order: dict[Problem, list[TileConfig]]) -> Compiled:
        """Compile the candidates of all problems, round-robin, while the budget allows."""
        ctx = self.ctx
        longest = max(len(c) for c in order.values())
        items = [(p, c[i], self.target) for i in range(longest) for p, c in order.items() if i < len(c)]
        found = compile_all(ctx, items, reserve_s=ctx.budget.seconds * (1 - COMPILE_SHARE), need_code=True)
        if all("failed" in r for r in found.values()):
            reasons = "; ".join(dict.fromkeys(str(r["failed"]) for r in found.values())) or "the budget is too short"
            raise SweepError(f"no kernel compiled: {reasons[:600]}")
        if len(found) < len(items):
            self.cells.notes.append(f"the budget reached {len(found)} of {len(items)} candidates' compilation")
        return {(p, c): r for (p, c, _), r in found.items()}

    def all_cells(self) -> list[tuple[Workload, int]]:
        """Every cell of the plan."""
        return [(w, b) for w in self.ctx.plan.workloads for b in self.ctx.plan.batches]

    def measure(self, order: dict[Problem, list[TileConfig]]) -> _Part:
        """Measure this rank's cells."""
        ctx, batches, size = self.ctx, len(self.ctx.plan.batches), self.ctx.ranks.size
        # on the diagonal, so that no rank gets the large batches of all workloads
        cells = [
            cell for n, cell in enumerate(self.all_cells()) if (n // batches + n % batches) % size == ctx.ranks.rank
        ]
        found = []
        with Steps(ctx.console, "cells", len(cells), ctx.budget) as steps:
            for number, (workload, batch) in enumerate(cells):
                # the rest of a cell's share is for its race and its peers
                part = 0.7 if self.cells.peers else 0.9
                share = Budget(part * ctx.budget.left / (len(cells) - number))
                cell = self.cells.cell(workload, batch, order[workload.problem], share, steps)
                if cell is not None:
                    found.append(cell)
                steps.step(f"batch {batch} done")
        return _Part(found, self.cells.notes, self.cells.unreached, self.cells.slow, self.worker.starts)

    def read_limit(self, limit: dict[str, Any]) -> tuple[float, str]:
        """The streaming limit for fractions, and its source."""
        target = self.target
        read = limit.get("read_gbs")
        if read is None:
            self.cells.notes.append(f"the read limit could not be measured: {limit.get('failed')}")
            return target.read_gbs, f"{target.read_gbs_source} value of the target catalogue"
        if target.read_gbs_source == "measured" and target.read_gbs > read:
            return target.read_gbs, f"measured before on this model; plain torch reached {read:,.0f} GB/s in this run"
        return read, f"measured in this run: {limit['method']}"
