"""One cell on a device: check and time its candidates, race the close ones, time peers and the floor beside."""

from __future__ import annotations

from typing import Any

from replayssm_cute.config import TileConfig
from replayssm_cute.default_rule import default_config
from replayssm_cute.problem import Problem
from replayssm_cute.sm100 import Sm100Config
from replayssm_cute.tables import kernels_named
from replayssm_cute.target import Target

from . import cost, space
from .context import Context
from .mixes import others
from .plan import Workload
from .policy import Policy
from .progress import Budget, Steps
from .results import Candidate, CellResult
from .sound import sound
from .worker import Worker

JOB_S = 60.0  # a job takes well under a second; a config that takes this long hangs
_PEERS_S = 300.0  # peers may compile themselves on their first call

Compiled = dict[tuple[Problem, TileConfig], dict[str, Any]]


class CellTimer:
    """Measures cells one after another in a worker, through the journal.

    Attributes:
        compiled: resources of the candidates that may be measured, or why they failed.
        peers: versions of the peers to time beside; empty for none.
        floors: whether to time the floor beside.
        mixes: whether to race the finalists under other acceptance lengths too.
        read_gbs: the streaming limit that floors are completed with.
        notes: what a reader of the results must know.
        unreached: times that were left out, since the budget had ended.
        slow: times that were left out, since the cost model thinks the configs slow there.
    """

    def __init__(self, ctx: Context, worker: Worker, policy: Policy, target: Target, driver: str) -> None:
        self.ctx, self.worker, self.policy, self.target, self.driver = ctx, worker, policy, target, driver
        self.compiled: Compiled = {}
        self.peers: dict[str, str] = {}
        self.floors = True
        self.mixes = False
        self.read_gbs = 0.0
        self.notes: list[str] = []
        self.unreached = 0
        self.slow = 0
        self._without_peers: set[Problem] = set()

    def job(self, name: str, key: dict[str, Any], arguments: dict[str, Any], *, timeout_s: float = JOB_S) -> Any:
        """A worker's job, or what the journal knows of it; a failure is {"failed": ...}, journalled too."""
        full = {
            "kind": name,
            "gpu": self.target.name,
            "driver": self.driver,
            "kernels": kernels_named(self.target.arch, "measured"),
            "policy": self.policy.to_json(),
            **key,
        }
        known = self.ctx.known(full)
        if known is not None:
            value = known.get("value", known)
            if sound(name, value, arguments):
                return value
            self.note(f"a journal's result of {name} is not what such a job gives, and was taken again")
        answer = self.worker.call(name, timeout_s=timeout_s, **arguments)
        if answer.ok:
            self.ctx.journal.add(full, {"value": answer.value})
            return answer.value
        failure = {"failed": answer.kind, "reason": answer.reason}
        self.ctx.journal.add(full, failure)
        return failure

    def cell(
        self, workload: Workload, batch: int, configs: list[TileConfig], share: Budget, steps: Steps
    ) -> CellResult | None:
        """Check and time a cell's candidates until its share of the budget ends; None if nothing could be timed."""
        problem = workload.problem
        default = default_config(problem, self.target, batch)
        where = {"problem": problem.to_json(), "batch": batch, **workload.load}
        candidates: dict[TileConfig, Candidate] = {}
        facts: dict[str, Any] = {}
        worth = self.by_estimate(workload, batch, configs, default)
        everything = {*configs, *space.configs(problem, self.target), *space.blackwell(problem, self.target), default}
        self.slow += len(everything) - len(worth)
        for config in worth:
            resources = self.compiled.get((problem, config))
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
        for candidate in self.rounds(where, timed, default, steps):
            candidates[candidate.config] = candidate
        found = self.time_peers(problem, where, steps) if self.peers else []
        floor = self.job("floor", where, where | {"read_gbs": self.read_gbs}) if self.floors else {}
        if "failed" in floor:
            self.note(f"{problem.label()}, batch {batch}: no floor: {floor['failed']}: {floor.get('reason', '')[:200]}")
        # last: each mix has a cell of its own on the device
        mixes = self.under_other_mixes(problem, where, candidates, default, steps) if self.mixes else []
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
            space=len(everything),
            mixes=tuple(mixes),
        )

    def time_peers(self, problem: Problem, where: dict[str, Any], steps: Steps) -> list[dict[str, Any]]:
        """The peers' times in a cell; a problem whose peers hang or crash is not asked again."""
        if problem in self._without_peers or self.ctx.budget.left <= 0:
            return []
        steps.at(f"{problem.label()}, batch {where['batch']}: peers")
        key = where | {"versions": self.peers}
        answer = self.job("peers", key, where, timeout_s=min(_PEERS_S, max(JOB_S, self.ctx.budget.left / 2)))
        if isinstance(answer, list):
            return answer
        self._without_peers.add(problem)
        self.note(f"{problem.label()}: peers failed: {answer['failed']}: {answer.get('reason', '')[:200]}")
        return []

    def under_other_mixes(
        self,
        problem: Problem,
        where: dict[str, Any],
        candidates: dict[TileConfig, Candidate],
        default: TileConfig,
        steps: Steps,
    ) -> list[dict[str, Any]]:
        """The race's configs, raced again under other acceptance lengths; see `mixes`."""
        raced = sorted((c for c in candidates.values() if c.stage in ("raced", "heat")), key=_time)
        field = _field(raced, default, self.policy.race_field)
        found: list[dict[str, Any]] = []
        for name, lengths in others(problem.tokens).items() if len(field) > 1 else ():
            if self.ctx.budget.left <= 0:
                break
            times = self.interleaved("race", where | {"lengths": list(lengths)}, field, steps)
            if times:
                configs = [{"label": c.config.label(), "time_us": c.time_us} for c in times]
                found.append({"name": name, "lengths": list(lengths), "configs": configs})
        return found

    def by_estimate(
        self, workload: Workload, batch: int, configs: list[TileConfig], default: TileConfig
    ) -> list[TileConfig]:
        """The default first, then what the model knows nothing of, then what it thinks fastest here.

        It knows the compiled kernels. What is slow by `Policy.prune` is left out; what it cannot place is kept, at the
        end.
        """

        def time_of(config: TileConfig) -> float:
            resources = self.compiled.get((workload.problem, config), {})
            known = cost.guess(workload.problem, config)
            if "registers" in resources:
                known = cost.Guess(resources["registers"], resources["shared_bytes"], resources["stack_bytes"])
            try:
                return cost.estimate(workload.problem, config, self.target, batch, workload.mix, known).time_us
            except ValueError:
                return float("inf")

        unknown = [c for c in configs if isinstance(c, Sm100Config)]
        times = {c: time_of(c) for c in configs if c != default and c not in unknown}
        known = [t for t in (*times.values(), time_of(default)) if t != float("inf")]
        limit = self.policy.prune * min(known, default=0.0)
        kept = [c for c, t in times.items() if not 0 < limit < t < float("inf")]
        return [default, *unknown, *sorted(kept, key=lambda c: times[c])]

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

    def rounds(
        self, where: dict[str, Any], timed: list[Candidate], default: TileConfig, steps: Steps
    ) -> list[Candidate]:
        """Time the fast ones again, interleaved: in a heat where they are many, and in the race that decides.

        The default runs in both. Empty if there is nothing to decide; what went wrong is noted.

        Args:
            timed: the candidates, fastest first.
        """
        found: dict[TileConfig, Candidate] = {}
        if len(timed) > self.policy.race_field:
            field = _field(timed, default, self.policy.heat_field)
            found |= {c.config: c for c in self.interleaved("heat", where, field, steps)}
        if found:  # single timings are too noisy to draw a bar
            timed = sorted(found.values(), key=_time)
            bar = _time(timed[0]) * (1 + self.policy.race_within)
            timed = [c for c in timed if _time(c) <= bar or c.config == default]
        field = _field(timed, default, self.policy.race_field)
        if len(field) > 1:
            found |= {c.config: c for c in self.interleaved("race", where, field, steps)}
        return list(found.values())

    def interleaved(self, kind: str, where: dict[str, Any], field: list[Candidate], steps: Steps) -> list[Candidate]:
        """A heat or a race; empty, with a note, if it failed."""
        steps.at(f"batch {where['batch']}: {kind} of {len(field)}")
        names = where | {"configs": [c.config.to_json() for c in field]}
        answer = self.job(kind, names, names)
        if not isinstance(answer, list):
            self.note(f"batch {where['batch']}: the {kind} failed: {answer.get('reason', '')[:200]}")
            return []
        stage = {"heat": "heat", "race": "raced"}[kind]
        return [
            Candidate(c.config, a["time_us"], a["spread"], stage=stage, facts=c.facts)
            for c, a in zip(field, answer, strict=True)
        ]

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _time(candidate: Candidate) -> float:
    return float("inf") if candidate.time_us is None else candidate.time_us


def _field(timed: list[Candidate], default: TileConfig, size: int) -> list[Candidate]:
    """The first `size` of the candidates, the default among them."""
    rest = [c for c in timed[size:] if c.config == default]
    return [*timed[: size - len(rest)], *rest]
