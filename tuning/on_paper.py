"""Estimating without a GPU: compile for a target, read what the code asks for, and rank with the cost model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Set
from typing import Any

from replayssm_cute.config import TileConfig
from replayssm_cute.default_rule import default_config
from replayssm_cute.problem import Problem
from replayssm_cute.resources import Resources
from replayssm_cute.target import Target

from . import cost
from .candidates import compile_all, ranked
from .context import Context
from .errors import SweepError
from .manifest import manifest
from .plan import TuningPlan, Workload
from .results import Candidate, CellResult, Results

MARGIN = 0.05  # the model's own error: a smaller lead says nothing
_TIME_FOR_REST_S = 6.0
NOTE = (
    "no GPU was timed: times come from the cost model, whose constants were fitted on one H200; "
    "they order candidates and promise nothing"
)
Kernel = tuple[Problem, TileConfig]
Compiled = Mapping[Kernel, Mapping[str, Any]]


def estimate(ctx: Context, targets: list[Target]) -> list[Results]:
    """Results of each target, all marked "estimated".

    Raises:
        SweepError: if nothing compiled, or every target lacks a read limit.
    """
    queues = [[(w.problem, c, t) for c in ranked(w, t, ctx.plan.batches)] for t in targets for w in ctx.plan.workloads]
    # Round-robin: however early the budget ends, every workload and target has had its best candidates.
    items = [item for row in itertools.zip_longest(*queues) for item in row if item is not None]
    ctx.console.print(
        f"no GPU used: of {len(items)} configs for {', '.join(t.arch for t in targets)}, those that "
        f"{ctx.budget.seconds:.0f} s allow are compiled by {ctx.workers * ctx.ranks.size} process(es) and ranked by "
        f"the cost model",
        highlight=False,
        soft_wrap=True,
    )
    compiled = compile_all(ctx, items, reserve_s=_TIME_FOR_REST_S, need_code=False)
    if all("failed" in c for c in compiled.values()):
        reasons = "; ".join(dict.fromkeys(str(c["failed"]) for c in compiled.values())) or "the budget is too short"
        raise SweepError(f"no kernel compiled: {reasons[:600]}")
    return [_results(ctx, t, {(p, c): r for (p, c, of), r in compiled.items() if of == t}) for t in targets]


def sparing(compiled: Compiled, unwanted: Set[Kernel]) -> dict[Kernel, Mapping[str, Any]]:
    """What was compiled without what is unwanted, where a problem has others that did not fail."""
    served = {k[0] for k, found in compiled.items() if k not in unwanted and "failed" not in found}
    return {k: found for k, found in compiled.items() if k not in unwanted or k[0] not in served}


def cells(plan: TuningPlan, target: Target, compiled: Compiled, space: Mapping[Problem, int]) -> tuple[CellResult, ...]:
    """Every cell of a plan, with each of its problem's compiled configs as a candidate.

    Those that use local memory are left out where a problem has others: what spills cost the model knows least.

    Args:
        compiled: resources as JSON, or {"failed": reason}, by problem and config.
        space: configs that each problem has on the target.
    """
    configs: dict[Problem, list[TileConfig]] = {}
    for problem, config in sparing(compiled, {k for k, r in compiled.items() if r.get("stack_bytes")}):
        configs.setdefault(problem, []).append(config)
    return tuple(
        CellResult(
            label=w.label,
            problem=w.problem,
            batch=batch,
            bytes=cost.of_mix(w.problem, batch, w.mix).total,
            flush=w.mix.flush,
            default=default_config(w.problem, target, batch),
            candidates=tuple(
                _candidate(w, c, target, batch, compiled[w.problem, c]) for c in configs.get(w.problem, ())
            ),
            space=space[w.problem],
        )
        for w in plan.workloads
        for batch in plan.batches
    )


def _results(ctx: Context, target: Target, compiled: Compiled) -> Results:
    space = {w.problem: ranked(w, target, ctx.plan.batches) for w in ctx.plan.workloads}
    ordered = {(p, c): compiled[p, c] for p, configs in space.items() for c in configs if (p, c) in compiled}
    reached, total = len(ordered), sum(map(len, space.values()))
    failed = [r["failed"] for r in compiled.values() if "failed" in r]
    spilled = sum(r.get("stack_bytes", 0) > 0 for r in compiled.values())
    notes = [NOTE]
    if reached < total:
        notes.append(f"the budget of {ctx.budget.seconds:.0f} s reached {reached} of {total} candidates")
    if failed:
        notes.append(f"{len(failed)} candidates failed to compile, first: {failed[0][:200]}")
    if spilled:
        notes.append(f"{spilled} candidates use local memory (spills): left out where a problem has others")
    return Results(
        plan=ctx.plan.name,
        title=ctx.plan.title,
        source=ctx.plan.source,
        manifest=manifest(
            ctx.plan, ctx.budget, target, provenance="estimated", driver="", policy=policy(target), versions={}
        ),
        read_gbs=target.read_gbs,
        read_gbs_method=f"{target.read_gbs_source} streaming limit of the target catalogue",
        margin=MARGIN,
        notes=tuple(notes),
        cells=cells(ctx.plan, target, ordered, {p: len(configs) for p, configs in space.items()}),
    )


def policy(target: Target) -> dict[str, Any]:
    """What a manifest says of the method."""
    return {
        "method": "cost model",
        "cost_model": cost.version(),
        "margin": MARGIN,
        "read_gbs": target.read_gbs,
    }


def _candidate(
    workload: Workload, config: TileConfig, target: Target, batch: int, compiled: Mapping[str, Any]
) -> Candidate:
    if "failed" in compiled:
        return Candidate(config, None, stage="failed", reason=compiled["failed"])
    resources = Resources.from_json({"kernel": "", **compiled})
    try:
        e = cost.estimate(workload.problem, config, target, batch, workload.mix, resources)
    except ValueError as error:
        return Candidate(config, None, stage="failed", reason=str(error))
    facts = {
        "registers": resources.registers,
        "shared_bytes": resources.shared_bytes,
        "stack_bytes": resources.stack_bytes,
        "resident_ctas": e.ctas_per_sm,
        "occupancy_limit": e.occupancy_limit,
        "in_flight": e.in_flight,
        "needed_in_flight": e.needed_in_flight,
        "waves": round(e.waves, 3),
        "bound": e.bound,
    }
    return Candidate(config, e.time_us, stage="estimated", facts=facts)
