"""Measuring on a GPU: compile, check the numbers, time every cell, race the close ones, time the peers beside."""

from __future__ import annotations

from typing import Any

from replayssm_cute import fingerprint
from replayssm_cute.config import TileConfig, default_config
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

from . import cost
from .measure import DeviceRunner, Policy
from .plan import Workload
from .progress import Budget, Steps
from .results import Candidate, CellResult, Results
from .sweep import Context, SweepError, compile_all, manifest, ranked
from .worker import Worker

COMPILE_SHARE = 0.5  # of the budget, at most
_STARTUP_S = 120.0
_JOB_S = 60.0  # a job takes well under a second; a config that takes this long hangs
_PEERS_S = 300.0  # peers may compile themselves on their first call
_RACERS = 8  # at most, the default among them


def measure(ctx: Context, device: int, *, peers: bool, policy: Policy | None = None) -> Results:
    """Results of one CUDA device, marked "measured".

    Raises:
        SweepError: if the device cannot be used, or no kernel compiled.
    """
    policy = policy or Policy()
    with Worker(DeviceRunner, (device, policy.to_json()), log=ctx.out / "worker.log", startup_s=_STARTUP_S) as worker:
        session = _Session(ctx, worker, policy, device)
        return session.run(peers)


class _Session:
    """One sweep on one device."""

    def __init__(self, ctx: Context, worker: Worker, policy: Policy, device: int) -> None:
        self.ctx, self.worker, self.policy = ctx, worker, policy
        answer = worker.call("describe", timeout_s=_JOB_S)
        if not answer.ok:
            raise SweepError(
                f"CUDA device {device} cannot be used: {answer.reason}; see {ctx.out / 'worker.log'}, "
                f"or estimate with --estimate"
            )
        self.driver: str = answer.value["driver"]
        self.peer_versions: dict[str, str] = answer.value["peers"]
        self.target = Target(**answer.value["target"])
        self.resources: dict[tuple[Any, TileConfig], dict[str, Any]] = {}
        self.notes: list[str] = []
        self.unreached = 0
        self.read_gbs = 0.0
        self.without_peers: set[Problem] = set()

    def run(self, peers: bool) -> Results:
        ctx, target = self.ctx, self.target
        ctx.console.print(
            f"measuring on {target.name} ({target.arch}), driver {self.driver or 'unknown'}", highlight=False
        )
        limit = self.job("limit", {}, {})
        read_gbs, method = self.read_limit(limit)
        self.read_gbs = read_gbs

        order = {w.problem: ranked(w, target, ctx.plan.batches) for w in ctx.plan.workloads}
        longest = max(len(c) for c in order.values())
        items = [(p, c[i], target) for i in range(longest) for p, c in order.items() if i < len(c)]
        compiled = compile_all(ctx, items, reserve_s=ctx.budget.seconds * (1 - COMPILE_SHARE), need_code=True)
        self.resources = {(p, c): r for (p, c, _), r in compiled.items()}
        if all("failed" in r for r in compiled.values()):
            reasons = "; ".join(dict.fromkeys(str(r["failed"]) for r in compiled.values())) or "the budget is too short"
            raise SweepError(f"no kernel compiled: {reasons[:600]}")
        if len(compiled) < len(items):
            self.notes.append(f"the budget reached {len(compiled)} of {len(items)} candidates' compilation")

        cells = [(w, b) for w in ctx.plan.workloads for b in ctx.plan.batches]
        found = []
        with Steps(ctx.console, "cells", len(cells), ctx.budget) as steps:
            for number, (workload, batch) in enumerate(cells):
                # the rest of a cell's share is for its race and its peers
                part = 0.7 if peers and self.peer_versions else 0.9
                share = Budget(part * ctx.budget.left / (len(cells) - number))
                cell = self.cell(workload, batch, order[workload.problem], share, steps, peers)
                if cell is not None:
                    found.append(cell)
                steps.step(f"batch {batch} done")
        if len(found) < len(cells):
            self.notes.append(
                f"{len(cells) - len(found)} of {len(cells)} cells have no time; a rerun goes on with them"
            )
        if self.unreached:
            self.notes.append(f"the budget ended before {self.unreached} times (a config in a cell) were taken")
        if self.worker.starts > 1:
            self.notes.append(f"the measuring process was started {self.worker.starts} times (crashes, hangs)")
        return Results(
            plan=ctx.plan.name,
            title=ctx.plan.title,
            source=ctx.plan.source,
            manifest=manifest(
                ctx,
                target,
                provenance="measured",
                driver=self.driver,
                policy={"method": "CUDA graph, cold L2, slots in rotation, pnat by quota", **self.policy.to_json()}
                | {"limit": limit},
                versions=self.peer_versions if peers else {},
            ),
            read_gbs=read_gbs,
            read_gbs_method=method,
            margin=self.policy.margin,
            notes=tuple(self.notes),
            cells=tuple(found),
        )

    def read_limit(self, limit: dict[str, Any]) -> tuple[float, str]:
        """The streaming limit for fractions, and its source."""
        target = self.target
        read = limit.get("read_gbs")
        if read is None:
            self.notes.append(f"the read limit could not be measured: {limit.get('failed')}")
            return target.read_gbs, f"{target.read_gbs_source} value of the target catalogue"
        if target.read_gbs_source == "measured" and target.read_gbs > read:
            return target.read_gbs, f"measured before on this model; plain torch reached {read:,.0f} GB/s in this run"
        return read, f"measured in this run: {limit['method']}"

    def job(self, name: str, key: dict[str, Any], arguments: dict[str, Any], *, timeout_s: float = _JOB_S) -> Any:
        """A worker's job, or what the journal knows of it; a failure is {"failed": ...}, journalled too."""
        full = {
            "kind": name,
            "gpu": self.target.name,
            "driver": self.driver,
            "kernels": fingerprint.kernels(),
            "policy": self.policy.to_json(),
            **key,
        }
        known = self.ctx.known(full)
        if known is not None:
            return known.get("value", known)
        answer = self.worker.call(name, timeout_s=timeout_s, **arguments)
        if answer.ok:
            self.ctx.journal.add(full, {"value": answer.value})
            return answer.value
        failure = {"failed": answer.kind, "reason": answer.reason}
        self.ctx.journal.add(full, failure)
        return failure

    def cell(
        self, workload: Workload, batch: int, configs: list[TileConfig], share: Budget, steps: Steps, peers: bool
    ) -> CellResult | None:
        """Check and time a cell's candidates until its share of the budget ends; None if nothing could be timed."""
        problem = workload.problem
        default = default_config(problem, self.target, batch)
        where = {"problem": problem.to_json(), "batch": batch, "lengths": [round(s, 9) for s in workload.lengths]}
        candidates: dict[TileConfig, Candidate] = {}
        facts: dict[str, Any] = {}
        for config in self.by_estimate(workload, batch, configs, default):
            resources = self.resources.get((problem, config))
            if resources is None or share.left <= 0 or self.ctx.budget.left <= 0:
                self.unreached += 1
                continue
            steps.at(f"{workload.label}, batch {batch}: {config.label()}")
            result = self.one(problem.to_json(), where, config, resources)
            if "failed" in result:
                reason = f"{result['failed']}: {result.get('reason', '')}"
                candidates[config] = Candidate(config, None, stage="failed", reason=reason)
                if config == default:
                    self.note(f"the DEFAULT config {config.label()} of {problem.label()} failed: {reason[:200]}")
            else:
                facts = result
                candidates[config] = Candidate(
                    config,
                    result["time_us"],
                    result["spread"],
                    facts={k: resources.get(k) for k in ("registers", "shared_bytes", "stack_bytes")},
                )
        timed = sorted((c for c in candidates.values() if c.time_us is not None), key=lambda c: c.time_us or 0.0)
        if not timed:
            reasons = [c.reason for c in candidates.values() if c.stage == "failed"]
            self.note(
                f"{problem.label()}, batch {batch}: no time; {reasons[0][:200] if reasons else 'the budget ended'}"
            )
            return None
        for candidate in self.race(where, timed, default, steps):
            candidates[candidate.config] = candidate
        found = self.time_peers(problem, where, steps) if peers and self.peer_versions else []
        floor = self.job("floor", where, where | {"read_gbs": self.read_gbs})
        if "failed" in floor:
            self.note(f"{problem.label()}, batch {batch}: no floor: {floor['failed']}: {floor.get('reason', '')[:200]}")
        return CellResult(
            label=workload.label,
            problem=problem,
            batch=batch,
            bytes=facts["bytes"],
            flush=facts["flush"],
            default=default,
            candidates=tuple(candidates.values()),
            peers=tuple(found),
            floor_us=floor.get("time_us"),
        )

    def time_peers(self, problem: Problem, where: dict[str, Any], steps: Steps) -> list[dict[str, Any]]:
        """The peers' times in a cell; a problem whose peers hang or crash is not asked again."""
        if problem in self.without_peers or self.ctx.budget.left <= 0:
            return []
        steps.at(f"{problem.label()}, batch {where['batch']}: peers")
        key = where | {"versions": self.peer_versions}
        answer = self.job("peers", key, where, timeout_s=min(_PEERS_S, max(_JOB_S, self.ctx.budget.left / 2)))
        if isinstance(answer, list):
            return answer
        self.without_peers.add(problem)
        self.note(f"{problem.label()}: peers failed: {answer['failed']}: {answer.get('reason', '')[:200]}")
        return []

    def by_estimate(
        self, workload: Workload, batch: int, configs: list[TileConfig], default: TileConfig
    ) -> list[TileConfig]:
        """The default first, then what the model, knowing the compiled kernels, thinks fastest here."""

        def time_of(config: TileConfig) -> float:
            resources = self.resources.get((workload.problem, config), {})
            known = cost.guess(workload.problem, config)
            if "registers" in resources:
                known = cost.Guess(resources["registers"], resources["shared_bytes"], resources["stack_bytes"])
            try:
                return cost.estimate(workload.problem, config, self.target, batch, workload.mix, known).time_us
            except ValueError:
                return float("inf")

        return [default, *sorted((c for c in configs if c != default), key=time_of)]

    def one(
        self, problem: dict[str, Any], where: dict[str, Any], config: TileConfig, resources: dict[str, Any]
    ) -> dict[str, Any]:
        """The time of one config in one cell, after its numbers were found right; or {"failed": ...}."""
        if "failed" in resources:
            return {"failed": "compilation", "reason": str(resources["failed"])}
        names = {"problem": problem, "config": config.to_json()}
        checked: dict[str, Any] = self.job("check", names, names)
        if "failed" in checked:
            return checked
        result: dict[str, Any] = self.job(
            "time", where | {"config": config.to_json()}, where | {"config": config.to_json()}
        )
        return result

    def race(self, where: dict[str, Any], timed: list[Candidate], default: TileConfig, steps: Steps) -> list[Candidate]:
        """Time the close ones again, interleaved; the default runs too. Empty if there is nothing to decide."""
        assert timed[0].time_us is not None
        bar = timed[0].time_us * (1 + self.policy.race_within)
        close = [c for c in timed if c.time_us is not None and c.time_us <= bar][:_RACERS]
        rest = [c for c in timed if c.config == default and c not in close]
        field = [*close[: _RACERS - len(rest)], *rest]
        if len(field) < 2:
            return []
        steps.at(f"batch {where['batch']}: race of {len(field)}")
        names = where | {"configs": [c.config.to_json() for c in field]}
        answer = self.job("race", names, names)
        if not isinstance(answer, list):
            self.note(f"batch {where['batch']}: the race failed: {answer.get('reason', '')[:200]}")
            return []
        return [
            Candidate(c.config, a["time_us"], a["spread"], stage="raced", facts=c.facts)
            for c, a in zip(field, answer, strict=True)
        ]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
