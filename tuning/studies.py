"""What ragged rows and long windows cost, and which window is best: steps beside each other in one process.

    python -m replayssm_tuning.studies --out reports/studies

Three studies, timed as cells are (graph replay, cold L2, rows by quota), each group's entrants in turns:

ragged     the same rows, each with all its T tokens, as a dense call and as a ragged one; goal: within 5%
live rows  windows of 16, 32 and 64 with equally many live rows and no row that flushes; goal: W 32 within 10% of W 16,
           each with the config that is fastest there, beside the one that a call gets
windows    W from 8 to 64 at equal acceptance, each in its own stationary mix: a larger window flushes less and reads
           more ring rows. The mean step time, and what a slot's ring and the slot take in memory

Configs are those that a call gets (tables, else the default rule). In the study of windows each window also has those
that the cost model thinks fastest for it (`--race`), and its time is the fastest one's: what a tuned table would give.
Each kernel's numbers are checked before it is timed. A page with tables and plots is drawn from the JSON, again with
`--redraw FILE`.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import functools
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from replayssm_cute import atomic, compiler, tables
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

from . import cost, manifest, peers, space, studies_report
from .acceptance import Acceptance, Mix, read_histogram, stationary
from .argument_kinds import count, seconds
from .bench_device import BenchRunner
from .command import check_folder, command
from .plan import REALISTIC, SHIPPED, TuningPlan, Workload
from .policy import Policy
from .progress import Budget
from .results import plain
from .slots import Cell, make_cell, slot_sets
from .timing import capture, interleave, launch, summary
from .worker import Poisoned

BASE = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
UNIFORM = Acceptance("uniform", "Assumed: 1 to T equally likely.", uniform=True)
STATES = ("f32", "bf16")
BATCHES = (1, 16, 64, 256)
WINDOW_BATCHES = (16, 256)
WINDOWS = (8, 16, 24, 32, 48, 64)
METHOD = "CUDA graph, cold L2, rows by quota; entrants in interleaved rounds"
GOALS = {"ragged": 1.05, "live rows, W 32": 1.10}  # of times over the group's first


@dataclass(frozen=True, slots=True)
class Contender:
    """One that is timed in a group.

    Attributes:
        name: in the group.
        problem, mix: what it runs, and on which rows.
        goal: of its time over the first entrant's; None where none is set.
    """

    name: str
    problem: Problem
    mix: Mix
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Entrants that are timed in turns; times are told over the first one's.

    Attributes:
        study, load: which study, and the rows in words.
        batch: rows of a call.
        tuned: whether each entrant has more configs than the one that a call gets.
    """

    study: str
    load: str
    batch: int
    entrants: tuple[Contender, ...]
    tuned: bool = False


def published() -> Acceptance:
    """The acceptance lengths that were published; the file says where."""
    file = SHIPPED / f"{REALISTIC}.csv"
    return Acceptance(REALISTIC, f"{file.name} says where", shares=read_histogram(file))


def of_window(problem: Problem, acceptance: Acceptance) -> Mix:
    """The stationary mix of a problem's rows."""
    return stationary(acceptance.lengths(problem.tokens), problem.window)


def without_flushes(mix: Mix, tokens: int, window: int, most: int) -> Mix:
    """The rows of a mix that do not flush, as a mix of a window of `most`, where none of them flushes either."""
    kept = [share if n + tokens <= window else 0.0 for n, share in enumerate(mix.pnat)]
    total = sum(kept)
    pnat = (*(share / total for share in kept), *(0.0,) * (most - window))
    return dataclasses.replace(mix, pnat=pnat, flush=0.0)


def ragged_groups() -> Iterator[Group]:
    """A dense call and the same rows packed."""
    for tokens, state in ((4, "f32"), (4, "bf16"), (1, "f32"), (1, "bf16")):
        dense = dataclasses.replace(BASE, tokens=tokens, state_dtype=state)
        mix = of_window(dense, UNIFORM)
        packed = Contender("ragged", dataclasses.replace(dense, ragged=True), mix, GOALS["ragged"])
        for batch in BATCHES:
            yield Group("ragged", "uniform", batch, (Contender("dense", dense, mix), packed))


def live_groups() -> Iterator[Group]:
    """Windows whose rows have equally many live rows."""
    for state in STATES:
        first = dataclasses.replace(BASE, state_dtype=state)
        mix = of_window(first, UNIFORM)
        entrants = []
        for window in (first.window, 32, 64):
            same = without_flushes(mix, first.tokens, first.window, window)
            problem = dataclasses.replace(first, window=window)
            entrants.append(Contender(f"W {window}", problem, same, GOALS.get(f"live rows, W {window}")))
        for batch in BATCHES:
            yield Group("live rows", "uniform, no flushes", batch, tuple(entrants), tuned=True)


def window_groups() -> Iterator[Group]:
    """Windows at equal acceptance."""
    for acceptance in (UNIFORM, published()):
        for state in STATES:
            problems = [dataclasses.replace(BASE, state_dtype=state, window=window) for window in (16, *WINDOWS)]
            field = [Contender(f"W {p.window}", p, of_window(p, acceptance)) for p in dict.fromkeys(problems)]
            for batch in WINDOW_BATCHES:
                yield Group("windows", acceptance.name, batch, tuple(field), tuned=True)


STUDIES = {"ragged": ragged_groups, "live rows": live_groups, "windows": window_groups}


def ring_bytes(problem: Problem) -> int:
    """Bytes of one slot's ring, of one layer: R of its rows, of which a window larger by one has one more."""
    smaller = dataclasses.replace(problem, window=problem.window - 1, tokens=1)
    same = dataclasses.replace(problem, tokens=1)
    return problem.ring_rows * (same.bytes_per_slot() - smaller.bytes_per_slot())


class Studies:
    """Measures groups on one device.

    Attributes:
        race: configs of an entrant of a tuned group, beside the one that a call gets.
        rows: one for each entrant of each group that was measured.
        notes: what a reader must know.
    """

    def __init__(self, runner: BenchRunner, race: int = 0) -> None:
        self.runner, self.race = runner, race
        self.rows: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self._checked: dict[tuple[Problem, TileConfig], float] = {}

    def more(self, entrant: Contender, group: Group, usual: TileConfig) -> list[TileConfig]:
        """Where the group is tuned: the usual config at ptxas's other level, and what the cost model thinks fastest."""
        target, problem = self.runner.target, entrant.problem
        if not group.tuned or not self.race:
            return []

        def time_of(config: TileConfig) -> float:
            known = cost.guess(problem, config)
            try:
                return cost.estimate(problem, config, target, group.batch, entrant.mix, known).time_us
            except ValueError:
                return math.inf

        return [*space.at_other_level([usual]), *sorted(space.configs(problem, target), key=time_of)[: self.race]]

    def compile(self, groups: Sequence[Group], workers: int) -> None:
        """Compile what the groups will run, in parallel; a failure shows when its group does."""
        target = self.runner.target
        items = []
        for group in groups:
            for e in group.entrants:
                usual = tables.choose(e.problem, group.batch, target).config
                items += [(e.problem, config, target) for config in (usual, *self.more(e, group, usual))]
        compiler.compile_many(list(dict.fromkeys(items)), workers)

    def measure(self, group: Group) -> list[dict[str, Any]]:
        """Time a group's entrants in turns, after their numbers were found right."""
        runner, policy = self.runner, self.runner.policy
        with runner._guard():
            choices = [tables.choose(e.problem, group.batch, runner.target) for e in group.entrants]
            field = [
                (i, config)
                for i, (e, c) in enumerate(zip(group.entrants, choices, strict=True))
                for config in dict.fromkeys((c.config, *self.more(e, group, c.config)))
            ]
            errors = [self.error(group.entrants[i].problem, config) for i, config in field]
            torch.cuda.empty_cache()  # of the group before
            cells = [self.cell(e, group) for e in group.entrants]
            captured = []
            for i, config in field:
                kernel = compiler.get(group.entrants[i].problem, config, runner.target)
                captured.append(capture(functools.partial(launch, kernel), cells[i], policy))
                captured[-1].sample(policy.screen_warmups)
            samples = [summary(s) for s in interleave(captured, policy.race_rounds, policy.race_replays)]
        found: list[dict[str, Any]] = []
        for number, (entrant, cell, choice) in enumerate(zip(group.entrants, cells, choices, strict=True)):
            mine = [
                (sample, config, error)
                for (i, config), sample, error in zip(field, samples, errors, strict=True)
                if i == number
            ]
            fastest, config, error = min(mine, key=lambda m: m[0]["time_us"])
            first = found[0]["time_us"] if found else fastest["time_us"]
            p = entrant.problem
            found.append(
                {
                    "study": group.study,
                    "load": group.load,
                    "problem": p.label(),
                    "batch": group.batch,
                    "entrant": entrant.name,
                    **fastest,
                    "over_first": fastest["time_us"] / first,
                    "goal": entrant.goal,
                    "config": config.label(),
                    "of_a_call_us": mine[0][0]["time_us"],
                    "of_a_call": choice.config.label(),
                    "source": choice.source,
                    "flush": cell.flush,
                    "mean_live": cell.mean_live,
                    "bytes": cell.bytes,
                    "ring_bytes": ring_bytes(p),
                    "slot_bytes": p.bytes_per_slot(),
                    "out_error": error,
                }
            )
        self.rows += found
        return found

    def error(self, problem: Problem, config: TileConfig) -> float:
        """The error of a kernel's outputs, once it is found to be within the bounds."""
        if (problem, config) not in self._checked:
            checked = self.runner.check(problem.to_json(), config.to_json())
            self._checked[problem, config] = checked["out"]
        return self._checked[problem, config]

    def cell(self, entrant: Contender, group: Group) -> Cell:
        """An entrant's tensors; those of a group lie beside each other in the device's memory."""
        device, policy = self.runner.device, self.runner.policy
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        free = int(torch.cuda.mem_get_info(device)[0] * 0.9) // len(group.entrants)
        sets = slot_sets(entrant.problem, group.batch, entrant.mix, policy, l2=l2, free=free)
        return make_cell(entrant.problem, group.batch, entrant.mix, policy, device, sets)


def show(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """The rows as tables, one a study."""
    for study in STUDIES:
        mine = [r for r in rows if r["study"] == study]
        if not mine:
            continue
        columns = (
            "load",
            "problem",
            "batch",
            "entrant",
            "us",
            "of first",
            "goal",
            "flush",
            "live",
            "ring KiB",
            "config",
        )
        table = Table(*columns, title=study, title_justify="left")
        for r in mine:
            goal = "" if r["goal"] is None else f"{r['goal']:.2f} {'met' if r['over_first'] <= r['goal'] else 'MISSED'}"
            table.add_row(
                *(r["load"], r["problem"], str(r["batch"]), r["entrant"], f"{r['time_us']:.2f}"),
                *(f"{r['over_first']:.3f}", goal, f"{100 * r['flush']:.1f}%", f"{r['mean_live']:.1f}"),
                *(f"{r['ring_bytes'] / 1024:.0f}", r["config"]),
            )
        console.print(table)


def write(out: Path, studies: Studies, groups: Sequence[Group], budget: Budget, driver: str) -> list[Path]:
    """Write studies.json, with the environment and the kernels' fingerprint, studies.csv, the page and its plots."""
    runner = studies.runner
    problems = dict.fromkeys(e.problem for g in groups for e in g.entrants)
    plan = TuningPlan(
        name="studies",
        title="Ragged rows, and windows",
        source=__name__,
        targets=(runner.target.arch,),
        batches=tuple(sorted({g.batch for g in groups})),
        budget_s=budget.seconds,
        workloads=tuple(Workload(p.label(), p, UNIFORM) for p in problems),
    )
    made = manifest.manifest(
        plan,
        budget,
        runner.target,
        provenance="measured",
        driver=driver,
        policy={
            "method": "CUDA graph, cold L2, rows by quota; entrants in interleaved rounds",
            **runner.policy.to_json(),
        },
        versions=peers.installed(),
    )
    data = {"manifest": made.to_json(), "notes": studies.notes, "rows": studies.rows}
    files = [out / "studies.json", out / "studies.csv"]
    atomic.write_text(files[0], json.dumps(plain(data), indent=1) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, list(studies.rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in studies.rows:
        writer.writerow({k: f"{v:.5g}" if isinstance(v, float) else v for k, v in row.items()})
    atomic.write_text(files[1], text.getvalue())
    return [*files, *studies_report.write(studies_report.load(files[0]), out)]


@command
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code: 1 if nothing was measured, 2 for wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m replayssm_tuning.studies", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--studies", default=",".join(STUDIES), help=f"some of {','.join(STUDIES)}")
    parser.add_argument("--out", type=Path, default=Path("reports/tune/studies"), help="folder of the results")
    parser.add_argument("--device", type=int, default=0, help="CUDA device (default 0)")
    parser.add_argument("--budget", type=seconds, default=120.0, metavar="S", help="seconds to measure (default 120)")
    parser.add_argument(
        "--race", type=int, default=3, metavar="N", help="N more configs a window in the study of windows (default 3)"
    )
    parser.add_argument("--workers", type=count, help="compile processes (default: the CPUs)")
    parser.add_argument(
        "--redraw", type=Path, metavar="FILE", help="draw page and plots of an earlier run's JSON again"
    )
    args = parser.parse_args(argv)
    if args.redraw is not None:
        try:
            found = studies_report.load(args.redraw)
            made = studies_report.write(found, args.redraw.parent)
        except (ValueError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print(*(f"wrote {file}" for file in made), sep="\n")
        return 0
    names = [n.strip() for n in args.studies.split(",")]
    if args.race < 0:
        parser.error(f"--race: got {args.race}, expected a number of configs, or 0")
    if unknown := [n for n in names if n not in STUDIES]:
        parser.error(f"--studies: got {', '.join(unknown)}, expected some of {', '.join(STUDIES)}")
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 0 <= args.device < devices:
        print(f"error: --device: got {args.device}, this machine has {devices} CUDA devices", file=sys.stderr)
        return 2
    check_folder("--out", args.out)
    console = Console(width=None if sys.stdout.isatty() else 210)
    runner = BenchRunner(args.device, Policy().to_json())
    studies, budget = Studies(runner, args.race), Budget(args.budget)
    groups = [g for n in names for g in STUDIES[n]()]
    studies.compile(groups, args.workers or len(os.sched_getaffinity(0)))
    console.print(f"compiled, {budget.spent:.1f} s", highlight=False)
    budget.restart()
    for number, group in enumerate(groups):
        if budget.left <= 0:
            studies.notes.append(f"{len(groups) - number} of {len(groups)} groups were not measured: the budget ended")
            break
        try:
            studies.measure(group)
        except (RuntimeError, ValueError, Poisoned) as error:
            what = f"{group.study}, {group.entrants[0].problem.label()}, batch {group.batch}"
            studies.notes.append(f"{what}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
            if isinstance(error, Poisoned):
                break
    for note in studies.notes:
        print(note, file=sys.stderr)
    if not studies.rows:
        return 1
    show(console, studies.rows)
    for file in write(args.out, studies, groups, budget, runner.describe()["driver"]):
        console.print(f"wrote {file}, {budget.spent:.1f} s", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
