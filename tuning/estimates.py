"""The estimated tables that the package brings, for GPUs that nobody here has measured: made without a GPU.

Of each problem the default configs and few others, among which the cost model finds every cell one near its fastest,
are compiled for the target, read for what their code asks for, and ranked with it. The tables serve where "estimated"
is named (see `replayssm_cute.tables.lookup`), behind every measured one. A page for each GPU says what they promise; it
is made of the tables alone.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import math
import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from replayssm_cute import atomic, compiler, tables
from replayssm_cute import target as targets
from replayssm_cute.config import TileConfig
from replayssm_cute.default_rule import usual_tail
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

from . import cost, on_paper, space
from . import plan as plans
from .candidates import guessed, resources_of
from .errors import SweepError
from .estimates_page import page, page_name
from .manifest import manifest
from .on_paper import Kernel
from .plan import TuningPlan, Workload
from .progress import Budget, Steps
from .results import Results

GPUS = ("b200", "gb200", "b300", "gb300", "h200")
# The Nemotrons; ragged rows and seven drafts find the nearest cells of these.
PLANS = (
    "nemotron3-super",
    "nemotron3-ultra",
    "nemotron3-nano-30b",
    "nemotron3-nano-4b",
    "nemotron-nano-v2",
    "nemotron-h-4b",
    "nemotron-h-47b-56b",
)
STATES = ("f32", "bf16")  # of every plan, whatever it lists; others where it does
PAGES = Path("reports") / "estimated"
NEAR = 0.01  # how near the fastest a config must be guessed to serve a cell: far below the model's own error
_REGISTER_STEP = 8  # registers of a thread that are allocated together
_TAIL = 8  # of stand-ins


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One table to be: the workloads of a plan with one state dtype, for one GPU."""

    gpu: str
    plan: TuningPlan
    state: str

    @property
    def target(self) -> Target:
        """The GPU."""
        return targets.named(self.gpu)

    def path(self, folder: Path) -> Path:
        """Its file."""
        return folder / tables.slug(self.target.name) / f"{self.plan.name}-{self.state}.json"


def jobs(plan_names: Sequence[str] = PLANS, gpus: Sequence[str] = GPUS, states: Sequence[str] = STATES) -> list[Job]:
    """The tables of some plans: one for each GPU and state dtype.

    Args:
        states: dtypes of the state, besides those that a plan lists. Where it lists none of a dtype, it is its f32
            workloads with that dtype.

    Raises:
        PlanError, ValueError: for an unknown plan, GPU or state dtype.
    """
    found = []
    for gpu in gpus:
        targets.named(gpu)
        for name in plan_names:
            plan = plans.load(name)
            listed = dict.fromkeys(w.problem.state_dtype for w in plan.workloads)
            found += [Job(gpu, in_state(plan, state), state) for state in dict.fromkeys((*states, *listed))]
    return found


def in_state(plan: TuningPlan, state: str) -> TuningPlan:
    """A plan's workloads with a state dtype; if it lists none, its f32 workloads with that dtype instead."""
    own = tuple(w for w in plan.workloads if w.problem.state_dtype == state)
    if not own:
        own = tuple(
            dataclasses.replace(
                w, label=f"{w.label}, {state} state", problem=dataclasses.replace(w.problem, state_dtype=state)
            )
            for w in plan.workloads
            if w.problem.state_dtype == "f32"
        )
    return dataclasses.replace(plan, workloads=own)


def near_fastest(workload: Workload, gpu: str, batches: Sequence[int], near: float) -> list[dict[TileConfig, float]]:
    """For each batch the configs that the model thinks within `near` of the fastest, with their time over its."""
    target = targets.named(gpu)
    found = []
    for batch in batches:
        times = guessed(workload, target, batch)
        least = min(times.values())
        found.append({c: time / least for c, time in times.items() if time <= least * (1 + near)})
    return found


def stand_in(problem: Problem, config: TileConfig) -> Kernel:
    """A kernel that is the same but for the numbers of groups and of tail rows: compiled once for all of these.

    Of 12 pairs on sm_90a no two differed by more than two registers or in spills. Where a cap holds the registers down
    the one may spill and the other not: see `at_its_cap`.
    """
    return (
        dataclasses.replace(problem, heads=problem.heads_per_group, groups=1),
        dataclasses.replace(config, tail_rows=_TAIL if config.tail_rows else 0),
    )


def at_its_cap(config: TileConfig, resources: Mapping[str, Any], target: Target) -> bool:
    """Whether a kernel has all the registers that its `ctas_per_sm` leaves it."""
    if config.ctas_per_sm == 1 or "failed" in resources:
        return False
    left = target.registers_per_sm // (resources["threads"] * config.ctas_per_sm)
    return bool(resources["registers"] >= left // _REGISTER_STEP * _REGISTER_STEP)


def without_capped(found: Mapping[Kernel, Mapping[str, Any]], target: Target) -> dict[Kernel, Mapping[str, Any]]:
    """Without kernels at their cap, where a problem has others: what stands in for them may hide spills."""
    return on_paper.sparing(found, {k for k, r in found.items() if at_its_cap(k[1], r, target)})


def covering(cells: Sequence[Mapping[TileConfig, float]], have: Iterable[TileConfig]) -> list[TileConfig]:
    """Few configs that, with those that one has, leave each cell one of its own: greedily, the most cells first.

    Args:
        cells: for each cell the configs that will do, with their time over the fastest: what ties are broken by.
    """
    chosen = set(have)
    left = [cell for cell in cells if not chosen & cell.keys()]
    added: list[TileConfig] = []
    while left:
        gains: dict[TileConfig, tuple[float, ...]] = {}
        for config in {c for cell in left for c in cell}:
            ratios = [cell[config] for cell in left if config in cell]
            gains[config] = (-len(ratios), sum(ratios))
        best = min(gains, key=lambda c: (gains[c], c.label()))
        added.append(best)
        left = [cell for cell in left if best not in cell]
    return added


def make(
    todo: Sequence[Job],
    folder: Path,
    pages: Path,
    *,
    near: float = NEAR,
    workers: int | None = None,
    console: Console | None = None,
) -> list[Path]:
    """Make tables, and the pages of their GPUs.

    What else lies in a GPU's folder stays, unless it is an estimated table of that GPU and of other kernels. A rerun
    finds in the disk cache what was compiled.

    Args:
        folder: of the tables; they go into a folder for each GPU.
        pages: folder of the pages.
        near: a cell is served by a config that the model thinks this near the fastest, before any is compiled.
        workers: processes (default: the CPUs this process may use).

    Returns:
        The tables' paths.

    Raises:
        SweepError: if a cell has no config that compiled.
        OSError: if a folder cannot be written.
    """
    console = console or Console()
    workers = workers or len(os.sched_getaffinity(0))
    budget = Budget(math.inf)
    lists = shortlists(todo, near, workers, budget, console)
    kernels: dict[tuple[str, Kernel], None] = {}
    for job in todo:
        for w in job.plan.workloads:
            kernels |= dict.fromkeys((job.target.arch, stand_in(w.problem, c)) for c in lists[job.gpu, w])
    compiled = _compiled(list(kernels), workers, budget, console)
    written = []
    for job in todo:
        found = {
            (w.problem, c): compiled[job.target.arch, stand_in(w.problem, c)]
            for w in job.plan.workloads
            for c in lists[job.gpu, w]
        }
        path = job.path(folder)
        tables.write(path, table(job, without_capped(found, job.target), near))
        written.append(path)
    _drop_stale(folder, [targets.named(gpu) for gpu in dict.fromkeys(j.gpu for j in todo)], console)
    draw(folder, pages, dict.fromkeys(j.gpu for j in todo))
    console.print(f"{len(written)} tables in {folder}, pages in {pages}", highlight=False, soft_wrap=True)
    return written


def draw(folder: Path, pages: Path, gpus: Sequence[str] | Mapping[str, None]) -> list[Path]:
    """Write the page of each GPU that has estimated tables in `folder`; returns their paths."""
    found = []
    for gpu in gpus:
        target = targets.named(gpu)
        read = [table for _, table in _estimated(folder, target)]
        if read:
            found.append(pages / page_name(target))
            atomic.write_text(found[-1], page(target, read))
    return found


def shortlists(
    todo: Sequence[Job], near: float, workers: int, budget: Budget, console: Console
) -> dict[tuple[str, Workload], list[TileConfig]]:
    """The configs of each workload of each GPU that are compiled: its defaults, and few others that cover its cells.

    They are chosen for all that is served by the same kernels at once: the GPUs of all kinds, all ranks of a model.
    """
    like = {gpu: _like(gpu, todo) for gpu in {j.gpu for j in todo}}
    wanted = list(dict.fromkeys((like[j.gpu], w, j.plan.batches) for j in todo for w in j.plan.workloads))
    cells: dict[Problem, list[dict[TileConfig, float]]] = {}
    have: dict[Problem, dict[TileConfig, None]] = {}
    with contextlib.ExitStack() as stack:
        steps = stack.enter_context(Steps(console, "rank", len(wanted), budget))
        if workers == 1:
            ranked = (near_fastest(w, gpu, batches, near) for gpu, w, batches in wanted)
        else:
            pool = concurrent.futures.ProcessPoolExecutor(
                workers, mp_context=multiprocessing.get_context("spawn"), initializer=compiler.end_with_parent
            )
            stack.enter_context(pool)
            running = [pool.submit(near_fastest, w, gpu, batches, near) for gpu, w, batches in wanted]
            ranked = (future.result() for future in running)
        for (gpu, w, batches), found in zip(wanted, ranked, strict=True):
            kind, _ = stand_in(w.problem, TileConfig())
            cells.setdefault(kind, []).extend({stand_in(w.problem, c)[1]: r for c, r in cell.items()} for cell in found)
            for default in _defaults(w, gpu, batches):
                have.setdefault(kind, {})[stand_in(w.problem, default)[1]] = None
            steps.step(w.problem.label())
    others = {kind: covering(found, have[kind]) for kind, found in cells.items()}
    lists = {}
    for job in todo:
        for w in job.plan.workloads:
            kind, _ = stand_in(w.problem, TileConfig())
            tail = usual_tail(w.problem, job.target)
            own = [dataclasses.replace(c, tail_rows=tail if c.tail_rows else 0) for c in (*have[kind], *others[kind])]
            valid = [c for c in own if c.is_valid(w.problem, job.target)]
            lists[job.gpu, w] = list(dict.fromkeys((*_defaults(w, job.gpu, job.plan.batches), *valid)))
    return lists


def _defaults(workload: Workload, gpu: str, batches: Sequence[int]) -> list[TileConfig]:
    return space.defaults(workload.problem, targets.named(gpu), list(batches))


def _like(gpu: str, todo: Sequence[Job]) -> str:
    """The first GPU that the model cannot tell from this one: they differ in name and architecture alone."""
    facts = dataclasses.replace(targets.named(gpu), name="", arch="")
    return next(j.gpu for j in todo if dataclasses.replace(j.target, name="", arch="") == facts)


def _compiled(
    kernels: Sequence[tuple[str, Kernel]], workers: int, budget: Budget, console: Console
) -> dict[tuple[str, Kernel], dict[str, Any]]:
    """What each kernel's code asks for, as JSON, or {"failed": reason}."""
    items = [(problem, config, targets.named(arch)) for arch, (problem, config) in kernels]
    found: dict[tuple[str, Kernel], dict[str, Any]] = {}
    with Steps(console, "compile", len(items), budget) as steps:

        def finished(done: compiler.Done, count: int, total: int) -> None:
            problem, config, target = done.item
            found[target.arch, (problem, config)] = resources_of(done)
            steps.step(f"{target.arch} {problem.label()} {config.label()}")

        compiler.compile_many(items, workers, finished)
    return found


def table(job: Job, compiled: Mapping[Kernel, Mapping[str, Any]], near: float = NEAR) -> tables.Table:
    """The table of a job's winners, without runners-up: what the model thinks of these is worth no bytes.

    Raises:
        SweepError: if a cell has no config that compiled.
    """
    target, plan = job.target, job.plan
    sizes = {w.problem: len(space.configs(w.problem, target)) for w in plan.workloads}
    cells = on_paper.cells(plan, target, compiled, sizes)
    for cell in cells:
        if cell.decide(on_paper.MARGIN) is None:
            reasons = "; ".join(dict.fromkeys(c.reason for c in cell.candidates))
            raise SweepError(f"{target.name}: {cell.problem.label()}, batch {cell.batch}: nothing compiled: {reasons}")
    method = {
        "plan": plan.name,
        "title": plan.title,
        "near": near,
        "resources": "of the kernel with one group, and 8 tail rows where it has any",
    }
    # the acceptance lengths are the same at every tensor-parallel size: those of the largest say it once
    whole = max(w.problem.heads for w in plan.workloads)
    told = dataclasses.replace(plan, workloads=tuple(w for w in plan.workloads if w.problem.heads == whole))
    results = Results(
        plan=plan.name,
        title=plan.title,
        source=plan.source,
        manifest=manifest(
            told, None, target, provenance="estimated", driver="", policy=on_paper.policy(target) | method, versions={}
        ),
        read_gbs=target.read_gbs,
        read_gbs_method="",
        margin=on_paper.MARGIN,
        notes=(on_paper.NOTE,),
        cells=cells,
    )
    full = results.table()
    return tables.Table(full.manifest, {p: tuple(map(_short, found)) for p, found in full.entries.items()})


def _short(cell: tables.Cell) -> tables.Cell:
    return dataclasses.replace(
        cell,
        time_us=round(cell.time_us, 2),
        gb_s=round(cell.gb_s, 1),
        limit_fraction=round(cell.limit_fraction, 4),
        default_us=None if cell.default_us is None else round(cell.default_us, 2),
        runner_up=None,
        runner_up_us=None,
        margin=None,
    )


def _estimated(folder: Path, target: Target) -> list[tuple[Path, tables.Table]]:
    """The estimated tables in a GPU's folder, of whatever kernels; other files there are somebody else's.

    What is no table costs a log line.
    """
    read = [(path, tables.load(path)) for path in sorted((folder / tables.slug(target.name)).glob("*.json"))]
    return [(path, t) for path, t in read if t is not None and t.manifest.provenance == "estimated"]


def _drop_stale(folder: Path, of: Sequence[Target], console: Console) -> None:
    """Remove the estimated tables of these GPUs that are of other kernels, and nothing else."""
    for target in of:
        for path, table in _estimated(folder, target):
            m = table.manifest
            if (m.gpu_name, m.arch) == (target.name, target.arch) and (why := m.unusable_reason(target)):
                path.unlink()
                console.print(f"{path} is removed: {why}", highlight=False, soft_wrap=True)


def complaints(folder: Path, pages: Path, expected: Sequence[Job]) -> list[str]:
    """What is wrong with the tables in a folder and their pages, a line each: missing, stale, or not what they say.

    A table must be of these kernels, this cost model and its GPU, estimated, and have every cell of its job with a
    valid config; a page must be what its tables make.
    """
    found = []
    for job in expected:
        path, target = job.path(folder), job.target
        try:
            read = tables.read(path)
        except tables.TableError as e:
            found.append(f"{path}: {e}")
            continue
        m = read.manifest
        if why := m.unusable_reason(target):
            found.append(f"{path}: {why}")
        if m.provenance != "estimated":
            found.append(f"{path}: it is {m.provenance}, expected estimated: a measured one has another place")
        if m.policy.get("cost_model") != cost.version():
            found.append(f"{path}: of cost model {m.policy.get('cost_model')}, the model is now {cost.version()}")
        wanted = {(w.problem, batch) for w in job.plan.workloads for batch in job.plan.batches}
        if wanted != {(p, c.batch) for p, cells in read.entries.items() for c in cells}:
            found.append(f"{path}: its cells are not those of plan {job.plan.name}")
        for problem, cells in read.entries.items():
            for c in cells:
                if why := c.config.invalid_reason(problem, target):
                    found.append(f"{path}: {problem.label()}, batch {c.batch}: {why}")
    for gpu in dict.fromkeys(j.gpu for j in expected):
        target = targets.named(gpu)
        read_all = [table for _, table in _estimated(folder, target)]
        path = pages / page_name(target)
        if not path.is_file() or path.read_text(encoding="utf-8") != page(target, read_all):
            found.append(f"{path}: it is not what the tables make")
    return found
