"""The sweep: on a GPU candidates are compiled, checked and timed; without one they are compiled and estimated.

Both ways end in the same files: results (every candidate of every cell) and a table (the winners), and both keep a
journal, so that a killed sweep resumes where it stopped. Started by torchrun, the ranks share out the work and rank 0
decides and writes (see `ranks`).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import filelock
from rich.console import Console
from rich.markup import escape

from replayssm_cute import fingerprint, tables
from replayssm_cute import target as targets

from . import interrupt
from .context import Context
from .errors import Interrupted, SweepError, UsageError
from .journal import Journal
from .merging import conflict, merge
from .plan import TuningPlan
from .policy import Policy
from .progress import Budget
from .ranks import Ranks
from .results import Results
from .stability import STABILITY_SUFFIX, Stability

__all__ = ["RESULTS_SUFFIX", "STABILITY_SUFFIX", "TABLE_SUFFIX", "Context", "SweepError", "run", "write"]

RESULTS_SUFFIX = ".results.json"
TABLE_SUFFIX = ".table.json"
_LOCK_S = 60.0


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
    repeats: int = 1,
    whole_grid: bool = False,
    mixes: bool = False,
    merge_into: Path | None = None,
    ranks: Ranks | None = None,
    console: Console | None = None,
) -> list[Path]:
    """Sweep a plan and write its results and tables.

    Args:
        out: folder for them; made if missing.
        target_names: estimate for these targets, whatever this machine has (default: the plan's).
        device: CUDA device to measure on; None estimates.
        budget_s: seconds for compilation and measurement (default: the plan's).
        workers: compile processes (default: the CPUs this process may use, shared by the ranks of this node).
        retry: try again what failed in an earlier sweep.
        peers: time other implementations beside, where installed.
        repeats: measure so many times with seeds of their own, each with the whole budget (and compile before, with
            its share of one more), and say how far they agree; the table is the first one's.
        whole_grid: time also what the cost model thinks slow (see `Policy.prune`).
        mixes: race the finalists of each cell under other acceptance lengths too.
        merge_into: a table file that gets the cells too; what it has of others stays.
        ranks: this process among those that share the work (default: it is alone).

    Returns:
        The tables written.

    Raises:
        Interrupted: after Ctrl-C, when what there was has been written.
        UsageError: if an estimate is to be repeated, or tables of several targets merged into one file.
        SweepError: if nothing came of it.
        OSError: if `out` cannot be written.
    """
    chosen = list(dict.fromkeys(targets.named(n) for n in target_names or plan.targets))  # names may be of one target
    names = [t.name for t in chosen]
    if device is None and repeats > 1:
        raise UsageError(f"repeats: got {repeats}, expected 1 without a GPU: an estimate comes out the same every time")
    if device is None and merge_into is not None and len(names) > 1:
        raise UsageError(f"merge_into: got targets {', '.join(names)}, expected one: a table holds one GPU's cells")
    ranks = ranks or Ranks()
    console = console or Console()
    with ranks.joined():
        ranks.agree(
            {
                "plan": hashlib.sha256(repr(plan).encode()).hexdigest()[:12],
                "kernels": f"{fingerprint.kernels()[:12]} {fingerprint.kernels('sm100')[:12]}",
                "way": "measure" if device is not None else f"estimate {', '.join(names)}",
                "repeats": repeats,
            }
        )
        opened: list[Journal] = []

        def read() -> None:
            out.mkdir(parents=True, exist_ok=True)
            opened.append(Journal.of(out, ranks))

        ranks.gather("reading the journals", read)  # no rank writes while another one still reads
        with opened[0] as journal:
            for damage in journal.damaged:
                console.print(damage, highlight=False, markup=False, soft_wrap=True)
            if len(journal):
                console.print(
                    f"journal: {len(journal)} results of earlier sweeps, used where nothing has changed", soft_wrap=True
                )
            ctx = Context(
                plan=plan,
                out=out,
                journal=journal,
                budget=Budget(budget_s or plan.budget_s),
                console=console,
                workers=workers or max(1, len(os.sched_getaffinity(0)) // ranks.local_size),
                retry=retry,
                ranks=ranks,
            )
            # torchrun ends its processes itself
            with contextlib.nullcontext() if ranks.several else interrupt.ends(ctx.budget):
                try:
                    if device is not None:
                        from .on_device import measure

                        policy = Policy(prune=0.0) if whole_grid else Policy()
                        repeated = measure(ctx, device, peers=peers, mixes=mixes, policy=policy, repeats=repeats)
                        found = repeated[:1]
                    else:
                        from .on_paper import estimate

                        repeated, found = [], estimate(ctx, chosen)
                    paths = ctx.only_first("writing", lambda: _write_all(found, repeated, out, console, merge_into))
                except SweepError as e:
                    if ctx.budget.ended:
                        raise Interrupted(f"no table was written: {e}") from e
                    raise
            if ctx.budget.ended:
                raise Interrupted(f"{', '.join(map(str, paths))} has what was done", paths)
            return paths


def _write_all(
    found: list[Results], repeated: list[Results], out: Path, console: Console, merge_into: Path | None
) -> list[Path]:
    """Write every table, merge it where that is wanted, and say how far repeats agree."""
    paths, errors = [], []
    for results in found:  # one GPU's failure must not cost the others their tables
        try:
            paths.append(write(results, out, console))
        except SweepError as e:
            errors.append(str(e))
    if errors:
        raise SweepError("; ".join(errors))
    if len(repeated) > 1:
        stability = Stability.of(repeated)
        stability.save(out / f"{stem(repeated[0])}{STABILITY_SUFFIX}")
        console.print(stability.summary(), highlight=False, soft_wrap=True)
    if merge_into is not None:
        for results in found:
            _merge(merge_into, results.table(), console)
    return paths


def _merge(path: Path, table: tables.Table, console: Console) -> None:
    """Bring the cells into a table file that others may write at the same time.

    Raises:
        SweepError: if the file holds the cells of another GPU, or of another provenance: they would be lost.
    """
    if path.exists():
        try:
            there = tables.read(path).manifest
        except tables.TableError:
            pass  # `update` says that it replaces the file
        else:
            ours = table.manifest
            old = (there.gpu_name, there.arch, there.provenance)
            new = (ours.gpu_name, ours.arch, ours.provenance)
            if old != new:
                raise SweepError(
                    f"{path} is not merged: it holds {' '.join(old)}, expected {' '.join(new)}; name another file"
                )
    merged = tables.update(path, table)
    cells = sum(len(c) for c in merged.entries.values())
    console.print(f"merged into {path}: {cells} cells", highlight=False, soft_wrap=True)


def write(results: Results, out: Path, console: Console) -> Path:
    """Write the results and the table of one GPU; returns the table's path.

    What earlier sweeps of the same GPU, kernels and provenance left there stays, except the cells that are new.

    Raises:
        SweepError: if the budget reached no candidate, or none survived.
    """
    if results.cells and not any(cell.candidates for cell in results.cells):
        budget = results.manifest.policy.get("budget_s")
        raise SweepError(
            f"{results.manifest.gpu_name}: the budget{'' if budget is None else f' of {budget:g} s'} ended before any "
            f"of its configs was reached; the same command goes on from there, or give it more"
        )
    name, kept = stem(results), 0
    path = out / f"{name}{TABLE_SUFFIX}"
    out.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(out / ".write.lock", timeout=_LOCK_S):  # several sweeps may end at once
        previous, table_there, reasons = _previous(results, out)
        for reason in reasons:
            console.print(f"{results.manifest.gpu_name}: {reason}", highlight=False, soft_wrap=True)
        fresh = results
        if previous is not None:
            results, kept = merge(previous, results)
        results.save(out / f"{name}{RESULTS_SUFFIX}")
        manifest = results.manifest
        for note in results.notes:
            said = escape(f"{manifest.gpu_name}: {note}")
            console.print(f"[yellow]note[/] {said}", highlight=False, soft_wrap=True)
        try:
            fresh.table()
        except ValueError as e:
            raise SweepError(f"{manifest.gpu_name}: {e}; see the journals in {out} for the reasons") from e
        table = results.table()
        if table_there is not None:
            table = tables.merge(table_there, table)
        tables.write(path, table)
    cells = sum(len(c) for c in table.entries.values())
    of_old = f" ({kept} of earlier sweeps)" if kept else ""
    console.print(
        f"{manifest.gpu_name}: {cells} cells {manifest.provenance}{of_old}, table {path}",
        highlight=False,
        soft_wrap=True,
    )
    return path


def _previous(results: Results, out: Path) -> tuple[Results | None, tables.Table | None, list[str]]:
    """Results and table of earlier sweeps that the new cells join, and why what else is there is replaced."""
    reasons: dict[str, None] = {}
    found: list[Any] = []
    for suffix, read in ((RESULTS_SUFFIX, Results.load), (TABLE_SUFFIX, tables.read)):
        path, old = out / f"{stem(results)}{suffix}", None
        if path.exists():
            try:
                old = read(path)
            except ValueError as e:
                reasons[f"{path.name} is replaced: {e}"] = None
            else:
                if why := conflict(old.manifest, results.manifest):
                    reasons[f"results and table of an earlier sweep are replaced: {why}"] = None
                    old = None
        found.append(old)
    return found[0], found[1], list(reasons)


def stem(results: Results) -> str:
    """What the names of one GPU's files begin with."""
    m = results.manifest
    return f"{tables.slug(m.gpu_name)}-{m.arch}-{m.provenance}"
