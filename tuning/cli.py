"""The command line: sweep a plan, estimate many, time peers beside, draw reports, compare tables, fit the cost model.

`sweep` may be started by torchrun: its processes then share out the work (see `ranks`), and end with one exit code.
What a command found goes to stdout; progress, warnings and errors to stderr. Exit codes: see `arguments`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich import console as rich_console
from rich.errors import NotRenderableError

from . import archive, arguments, listing
from . import plan as plans
from .arguments import DEFAULT_OUT, PEERS_OUT
from .command import check_file, check_folder, command, usage
from .errors import Interrupted, UsageError
from .ranks import RankLost, Ranks

if TYPE_CHECKING:
    from .bench_results import Bench

_PRINT_WIDTH = 210  # of tables that go to a file or a pipe


class Console(rich_console.Console):
    """One that leaves it to `main` what is done when the reader of the output has left."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _plan(args: argparse.Namespace) -> plans.TuningPlan:
    plan = plans.load(args.plan, acceptance=args.acceptance, tp=args.tp, states=args.state, tokens=args.tokens)
    batches = getattr(args, "batches", None)
    return dataclasses.replace(plan, batches=batches) if batches else plan


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = arguments.parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    console = Console(stderr=args.json)  # stdout is the JSON's alone
    try:
        if args.command == "list":
            if not args.json:
                listing.shipped(console)
            return _said(args, listing.shipped_data)
        if args.command == "explain-plan":
            plan = _plan(args)
            if not args.json:
                listing.explain(console, plan)
            return _said(args, lambda: listing.explain_data(plan))
        if args.command == "report":
            return _report(console, args)
        if args.command == "diff":
            return _diff(args)
        if args.command == "estimate-all":
            return _estimate_all(console, args)
        if args.command == "fit":
            return _fit(console, args)
        if args.command == "peers":
            return _peers(args)
        return _sweep(args)
    except Interrupted as e:
        print(f"interrupted: {e}; the same command goes on from there", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        if args.command == "estimate-all":
            print("interrupted; what was compiled is kept, and the same command takes it from there", file=sys.stderr)
        elif args.command == "peers":
            print("interrupted; cells that were done are in the results", file=sys.stderr)
        else:
            print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


def _said(args: argparse.Namespace, data: Callable[[], object]) -> int:
    """Print what `--json` asks for."""
    if args.json:
        print(json.dumps(data(), indent=1, allow_nan=False))
    return 0


def _peers(args: argparse.Namespace) -> int:
    from . import bench, bench_report
    from .bench_results import Bench
    from .errors import SweepError

    console = Console(width=None if sys.stdout.isatty() else _PRINT_WIDTH, stderr=args.json)
    if args.redraw is not None:
        check_folder("--out", args.out or args.redraw.parent)
        try:
            found = Bench.load(args.redraw)
            with usage(f"{args.redraw}: no results of the peers command", KeyError, AttributeError, NotRenderableError):
                bench_report.show(found, Console(quiet=True))  # so that nothing is printed of what cannot be drawn
                made = bench_report.write(found, args.out or args.redraw.parent)
        except ValueError as e:
            print(f"error: {e}", file=sys.stderr)
            return 1
        bench_report.show(found, console)
        return _say_files(args, console, made, found)
    if args.plan is None:
        raise UsageError("peers: got neither --plan nor --redraw, expected one of them")
    if args.evolve < 0:
        raise UsageError(f"--evolve: got {args.evolve}, expected a number of steps, or 0")
    if args.workers is not None and args.workers < 1:
        raise UsageError(f"--workers: got {args.workers}, expected at least 1")
    if args.archive is not None:
        archive.check_name(args.archive)
        check_file("--archive", args.archive)
    plan = _plan(args)
    device = _gpu(args.device)
    out = args.out or PEERS_OUT / plan.name
    options = bench.Options(evolve=args.evolve, host=args.host, pdl=args.pdl, seed=args.seed)
    try:
        found = bench.run(
            plan, out, device=device, budget_s=args.budget, options=options, workers=args.workers, console=console
        )
        bench_report.show(found, console)
        return _say_files(args, console, [out / bench.RESULTS, *bench_report.write(found, out)], found)
    except SweepError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    finally:
        if args.archive is not None and out.is_dir():
            _pack(console, out, args.archive)


def _say_files(args: argparse.Namespace, console: Console, files: list[Path], found: Bench) -> int:
    from . import bench_report

    for file in files:
        console.print(f"wrote {file}", highlight=False, soft_wrap=True)
    return _said(
        args, lambda: {"files": [str(f) for f in files], "cells": len(found.cells), "means": bench_report.means(found)}
    )


def _gpu(device: int) -> int:
    """A CUDA device that is there.

    Raises:
        UsageError: if it is not.
    """
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise UsageError("peers: needs a CUDA GPU; --redraw draws an earlier run's results without one")
    if not 0 <= device < found:
        raise UsageError(f"--device: got {device}, this machine has devices 0..{found - 1}")
    return device


def _sweep(args: argparse.Namespace) -> int:
    from .sweep import SweepError, run

    plan = _plan(args)
    ranks = Ranks.of_environment()
    for name in ("workers", "repeat"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise UsageError(f"--{name}: got {getattr(args, name)}, expected at least 1")
    if args.archive is not None:
        archive.check_name(args.archive)
        check_file("--archive", args.archive)
    if args.merge_into is not None:
        check_file("--merge-into", args.merge_into)
    device = _device(args, ranks)
    console = Console(quiet=not ranks.first, stderr=args.json)
    if device is None and not (args.estimate or args.targets):
        console.print("no CUDA GPU found: estimating", highlight=False, soft_wrap=True)
    out = args.out or DEFAULT_OUT / plan.name
    written: list[Path] = []
    try:
        written = run(
            plan,
            out,
            target_names=args.targets,
            device=device,
            budget_s=args.budget,
            workers=args.workers,
            retry=args.retry_failed,
            peers=not args.no_peers,
            repeats=args.repeat,
            whole_grid=args.whole_grid,
            mixes=args.mixes,
            merge_into=args.merge_into,
            ranks=ranks,
            console=console,
        )
    except RankLost as e:  # what every rank knows in its own way
        print(f"error: rank {ranks.rank}: {e}", file=sys.stderr)
        return 1
    except SweepError as e:
        if ranks.first:
            print(f"error: {e}", file=sys.stderr)
        return 1
    except Interrupted as e:
        written = e.tables
        raise
    finally:  # also of a sweep that failed: its journals are what the next one starts from
        if args.archive is not None and ranks.first and out.is_dir():
            _pack(console, out, args.archive)
        if ranks.first and written:
            _said(args, lambda: {"tables": listing.swept_data(written), "out": str(out)})
    return 0


def _pack(console: Console, out: Path, path: Path) -> None:
    count = archive.pack(out, path)
    console.print(f"archive {path}: {count} files of {out}", highlight=False, soft_wrap=True)


def _device(args: argparse.Namespace, ranks: Ranks) -> int | None:
    """The CUDA device to measure on, or None to estimate.

    Raises:
        UsageError: if it is not there.
    """
    import torch

    if args.estimate or args.targets is not None:
        return None
    if not torch.cuda.is_available():
        if args.device is not None:
            raise UsageError(
                f"--device: got {args.device}, this machine has no CUDA GPU; without --device it estimates"
            )
        return None
    found = torch.cuda.device_count()
    if ranks.several:
        if args.device is not None:
            raise UsageError("--device: torchrun's processes take the device of their LOCAL_RANK")
        if ranks.local_size > found:
            raise UsageError(
                f"torchrun: got {ranks.local_size} processes on this node, expected at most {found} (GPUs)"
            )
        return ranks.local_rank
    device = args.device or 0
    if not 0 <= device < found:
        raise UsageError(f"--device: got {device}, this machine has devices 0..{found - 1}")
    return int(device)


def _report(console: Console, args: argparse.Namespace) -> int:
    from .report import draw
    from .sweep import RESULTS_SUFFIX

    files: list[Path] = []
    for path in args.results or [DEFAULT_OUT]:
        names = (f"*{RESULTS_SUFFIX}", RESULTS_SUFFIX[1:])  # one that is kept for the record may have no stem
        files += [path] if path.is_file() else sorted(f for name in names for f in path.rglob(name))
    if not files:
        where = ", ".join(str(p) for p in args.results) or str(DEFAULT_OUT)
        print(f"error: no results (*{RESULTS_SUFFIX}) in {where}; run a sweep first", file=sys.stderr)
        return 1
    pages, errors = draw(files)
    for page in pages:
        console.print(f"report: {page}", highlight=False, soft_wrap=True)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    _said(args, lambda: {"pages": [str(p) for p in pages], "errors": errors})
    return 1 if errors else 0


def _diff(args: argparse.Namespace) -> int:
    from .diff import SLOWER, Diff, Side

    try:
        found = Diff.of(Side.read(args.a), Side.read(args.b), args.margin)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    if not args.json:
        found.show(Console(width=None if sys.stdout.isatty() else _PRINT_WIDTH))
    _said(args, found.to_json)
    return 1 if found.counts()[SLOWER] else 0


def _estimate_all(console: Console, args: argparse.Namespace) -> int:
    from replayssm_cute import tables

    from . import estimates
    from .errors import SweepError

    jobs = estimates.jobs(args.plans or estimates.PLANS, args.gpus or estimates.GPUS, args.states)
    folder = args.out or tables.estimated_folder()
    check_folder("--out", folder)
    check_folder("--pages", args.pages)
    try:
        made = estimates.make(jobs, folder, args.pages, near=args.near, workers=args.workers, console=console)
    except SweepError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    return _said(args, lambda: {"tables": [str(p) for p in made], "pages": str(args.pages)})


def _fit(console: Console, args: argparse.Namespace) -> int:
    from . import cost, fit

    try:
        found = fit.refit(args.journals)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    console.print(
        f"{cost.DATA}: {found['timings']} timings, rms error {100 * found['rms_error']:.1f}%\n"
        f"fitted to all: {found['fitted']}\none batch held out: {found['held_out_batch']}",
        highlight=False,
        soft_wrap=True,
    )
    return _said(args, lambda: found)
