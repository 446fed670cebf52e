"""The sweep: on a GPU candidates are compiled, checked and timed; without one they are compiled and estimated.

Both ways end in the same files: results (every candidate of every cell) and a table (the winners), and both keep a
journal, so that a killed sweep resumes where it stopped.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import logging
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from replayssm_cute import compiler, fingerprint, tables
from replayssm_cute import target as targets
from replayssm_cute.config import TileConfig
from replayssm_cute.target import Target

from . import cost, space
from .journal import Journal
from .plan import TuningPlan, Workload
from .progress import Budget, Steps
from .results import Results

log = logging.getLogger("replayssm_cute")

RESULTS_SUFFIX = ".results.json"
TABLE_SUFFIX = ".table.json"
NEAR = (1.05, 1.15)  # modelled time over the fastest: about one and two errors of the model


class SweepError(RuntimeError):
    """A sweep that cannot go on; the message says why and what to do."""


@dataclass(slots=True)
class Context:
    """What every part of a sweep needs.

    Attributes:
        plan: what is tuned.
        out: folder of journal, results and tables.
        journal: results so far.
        budget: time that may be spent.
        console: for progress.
        workers: compile processes.
        retry: try again what the journal says has failed.
    """

    plan: TuningPlan
    out: Path
    journal: Journal
    budget: Budget
    console: Console
    workers: int
    retry: bool = False

    def known(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """The journal's result for these facts; a failure counts as unknown where it is to be retried."""
        found = self.journal.get(key)
        return None if found is not None and self.retry and "failed" in found else found


def run(
    plan: TuningPlan,
    out: Path,
    *,
    target_names: tuple[str, ...] | None = None,
    device: int | None = None,
    budget_s: float | None = None,
    workers: int | None = None,
    retry: bool = False,
    peers: bool = True,
    console: Console | None = None,
) -> list[Path]:
    """Sweep a plan and write its results and tables.

    Args:
        out: folder for them; made if missing.
        target_names: estimate for these targets, whatever this machine has (default: the plan's).
        device: CUDA device to measure on; None estimates.
        budget_s: seconds for compilation and measurement (default: the plan's).
        workers: compile processes (default: the CPUs this process may use).
        retry: try again what failed in an earlier sweep.
        peers: time other implementations beside, where installed.

    Returns:
        The tables written.

    Raises:
        SweepError: if nothing came of it.
        OSError: if `out` cannot be written.
    """
    console = console or Console()
    out.mkdir(parents=True, exist_ok=True)
    with Journal(out / "journal.jsonl") as journal:
        if journal.damaged:
            console.print(f"journal: {journal.damaged} damaged line(s) left out (a kill cuts the last one short)")
        if len(journal):
            console.print(f"journal: {len(journal)} results of earlier sweeps, used where nothing has changed")
        ctx = Context(
            plan=plan,
            out=out,
            journal=journal,
            budget=Budget(budget_s or plan.budget_s),
            console=console,
            workers=workers or len(os.sched_getaffinity(0)),
            retry=retry,
        )
        if device is not None:
            from .on_device import measure

            found = [measure(ctx, device, peers=peers)]
        else:
            from .on_paper import estimate

            found = estimate(ctx, [targets.named(n) for n in target_names or plan.targets])
    return [write(results, out, console) for results in found]


def write(results: Results, out: Path, console: Console) -> Path:
    """Write the results and the table of one GPU; returns the table's path.

    Raises:
        SweepError: if no candidate survived.
    """
    manifest = results.manifest
    stem = f"{slug(manifest.gpu_name)}-{manifest.arch}-{manifest.provenance}"
    results.save(out / f"{stem}{RESULTS_SUFFIX}")
    for note in results.notes:
        console.print(f"[yellow]note[/] {manifest.gpu_name}: {note}", highlight=False)
    try:
        table = results.table()
    except ValueError as e:
        raise SweepError(f"{manifest.gpu_name}: {e}; see {out / 'journal.jsonl'} for the reasons") from e
    path = out / f"{stem}{TABLE_SUFFIX}"
    tables.write(path, table)
    cells = sum(len(c) for c in table.entries.values())
    console.print(f"{manifest.gpu_name}: {cells} cells {manifest.provenance}, table {path}", highlight=False)
    return path


def slug(name: str) -> str:
    """A file-name-safe form of a GPU's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


# ---------------------------------------------------------------------------------------------------
# Candidates and their compilation
# ---------------------------------------------------------------------------------------------------


def ranked(workload: Workload, target: Target, batches: Iterable[int]) -> list[TileConfig]:
    """All configs of a workload, the ones to try first in front.

    The batches' defaults come first. Then those that the model thinks near the fastest of some batch, then the less
    near, then the rest (see `NEAR`); within each, one of each family (heads a CTA, head split, ring, cap, tail) per
    round, so that a model that errs about a family costs one round and not the sweep.
    """
    batches = tuple(batches)
    best: dict[TileConfig, float] = {}
    for batch in batches:
        times = {}
        for config in space.configs(workload.problem, target):
            try:
                guess = cost.guess(workload.problem, config)
                times[config] = cost.estimate(workload.problem, config, target, batch, workload.mix, guess).time_us
            except ValueError:
                times[config] = float("inf")  # fits nowhere with guessed registers: last, not lost
        fastest = min(times.values(), default=1.0)
        for config, time_us in times.items():
            best[config] = min(best.get(config, float("inf")), time_us / fastest)
    order = sorted(
        best, key=lambda c: (best[c], c.heads_per_cta, c.stages, c.head_split, c.ring, c.ctas_per_sm, c.tail_rows)
    )
    rounds: dict[tuple[int, int, str, bool, bool], int] = {}
    turn = {}
    for config in order:
        family = (config.heads_per_cta, config.head_split, config.ring, config.ctas_per_sm > 1, config.tail_rows > 0)
        turn[config] = rounds[family] = rounds.get(family, 0) + 1
    first = space.defaults(workload.problem, target, list(batches))
    rest = sorted(
        (c for c in order if c not in first), key=lambda c: (sum(best[c] > n for n in NEAR), turn[c], best[c])
    )
    return [*first, *rest]


class _OutOfTime(Exception):
    """Leaves `compile_many`: its workers end with the item in hand."""


def compile_all(
    ctx: Context, items: list[compiler.Item], *, reserve_s: float, need_code: bool
) -> dict[compiler.Item, dict[str, Any]]:
    """Bring items into the disk cache, in the given order, until the budget has only `reserve_s` left.

    Args:
        need_code: the code itself is wanted; otherwise what the journal knows of it is enough.

    Returns:
        For each item that was reached: its resources as JSON, or {"failed": reason}. Journalled one by one.
    """
    results: dict[compiler.Item, dict[str, Any]] = {}

    def key(item: compiler.Item) -> dict[str, Any]:
        problem, config, target = item
        return {
            "kind": "compile",
            "problem": problem.to_json(),
            "config": config.to_json(),
            "arch": target.arch,
            "kernels": fingerprint.kernels(),
            **{k: fingerprint.toolchain()[k] for k in ("dsl", "tvm_ffi")},
        }

    todo = []
    for item in items:
        found = ctx.known(key(item))
        if found is not None and ("failed" in found or not need_code):
            results[item] = found
        else:
            todo.append(item)

    with Steps(ctx.console, "compile", len(items), ctx.budget) as steps:
        steps.step("from the journal", len(results))

        def finished(done: compiler.Done, count: int, total: int) -> None:
            result = {"failed": done.error} if done.error else _resources(done)
            if results.get(done.item) != result:
                results[done.item] = result
                ctx.journal.add(key(done.item), result)
            problem, config, target = done.item
            steps.step(f"{target.arch} {problem.label()} {config.label()}")
            if done.source == "compiled" and ctx.budget.left < reserve_s:
                raise _OutOfTime

        try:
            if todo and ctx.budget.left > reserve_s:
                compiler.compile_many(todo, ctx.workers, finished)
        except _OutOfTime:
            pass
    return results


def _resources(done: compiler.Done) -> dict[str, Any]:
    found = done.resources.to_json() if done.resources is not None else {}
    found.pop("kernel", None)  # the symbol is long and says nothing here
    return found


# ---------------------------------------------------------------------------------------------------
# Manifest
# ---------------------------------------------------------------------------------------------------


def manifest(
    ctx: Context, target: Target, *, provenance: str, driver: str, policy: dict[str, Any], versions: dict[str, str]
) -> tables.Manifest:
    """The manifest of a table made now."""
    return tables.Manifest(
        gpu_name=target.name,
        arch=target.arch,
        sms=target.sms,
        provenance=provenance,
        kernel_fingerprint=fingerprint.kernels(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        driver=driver,
        versions={**_versions(), **versions},
        policy={**policy, "commit": commit(), "budget_s": ctx.budget.seconds},
        acceptance={
            w.label: {
                "problem": w.problem.label(),
                "name": w.acceptance.name,
                "source": w.acceptance.source,
                "lengths": [round(s, 6) for s in w.lengths],
                "mean": round(w.mix.mean_length, 4),
                "flush": round(w.mix.flush, 6),
                "mean_live": round(w.mix.mean_live, 4),
            }
            for w in ctx.plan.workloads
        },
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        found[name] = importlib.metadata.version(name)
    return found


def commit() -> str:
    """The checkout's commit, with "+changes" if kernel or tuner sources differ from it; empty outside a checkout."""
    here = Path(__file__).resolve().parent.parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "replayssm_cute", "tuning")
    except (OSError, subprocess.SubprocessError):
        return ""
    return head + ("+changes" if changed else "")
