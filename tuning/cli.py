"""The command line: sweep a plan, time the peers beside, draw reports, fit the cost model, list and explain plans.

`sweep` may be started by torchrun: its processes then share out the work (see `ranks`), and end with one exit code.
Exit codes: 0 done, 1 the sweep or report came to nothing, 2 wrong usage or a bad plan, 130 interrupted.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from replayssm_cute import dtypes

from . import archive, listing
from . import plan as plans
from .errors import Interrupted, UsageError
from .ranks import RankLost, Ranks

DEFAULT_OUT = Path("reports") / "tune"
_PRINT_WIDTH = 210  # of tables that go to a file or a pipe
PEERS_OUT = Path("reports") / "peers"


def _sizes(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(t) for t in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected positive ints such as 1,4,16")
    return tuple(sorted(set(found)))


def _names(text: str) -> tuple[str, ...]:
    from replayssm_cute import target

    names = tuple(t.strip() for t in text.split(",") if t.strip())
    for name in names:
        try:
            target.named(name)
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None
    if not names:
        raise argparse.ArgumentTypeError("expected names such as sm_100a,sm_90a")
    return names


def _states(text: str) -> tuple[str, ...]:
    names = tuple(t.strip() for t in text.split(","))
    if not set(names) <= set(dtypes.STATE):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one or more of {','.join(dtypes.STATE)}")
    return names


def _duration(text: str) -> float:
    try:
        return plans.seconds(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replayssm-tune", description="Tune replayssm-cute for a model: sweep a plan, draw the report."
    )
    commands = parser.add_subparsers(dest="command", required=True)

    sweep = commands.add_parser(
        "sweep",
        help="measure on this machine's GPU, or estimate without one",
        description="Sweep a plan. With a GPU its candidates are compiled, checked and timed; without one (or with "
        "--targets or --estimate) they are compiled and ranked by the cost model. A killed sweep resumes. With several "
        "GPUs: torchrun --nproc-per-node=N -m replayssm_tuning sweep ...",
    )
    _plan_arguments(sweep)
    sweep.add_argument("--targets", type=_names, metavar="A,B", help="estimate for these targets, GPU or not")
    sweep.add_argument("--estimate", action="store_true", help="estimate for the plan's targets, GPU or not")
    sweep.add_argument("--device", type=int, help="CUDA device to measure on (default 0; torchrun: LOCAL_RANK)")
    sweep.add_argument("--budget", type=_duration, help="time to compile and measure, such as 120s or 4m")
    sweep.add_argument("--batches", type=_sizes, metavar="N,M", help="batch buckets instead of the plan's")
    sweep.add_argument("--out", type=Path, help=f"folder of the results (default {DEFAULT_OUT}/<plan>)")
    _archive_argument(sweep)
    sweep.add_argument("--workers", type=int, help="compile processes (default: the CPUs)")
    sweep.add_argument("--retry-failed", action="store_true", help="try again what failed in an earlier sweep")
    sweep.add_argument("--no-peers", action="store_true", help="do not time other implementations beside")
    sweep.add_argument(
        "--whole-grid", action="store_true", help="time every config, also those that the cost model thinks slow"
    )
    sweep.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="measure N times with fresh seeds, each with the whole budget, and report how often winners flip and "
        "what that costs; the table is the first one's",
    )
    sweep.add_argument(
        "--merge-into", type=Path, metavar="FILE", help="add the winners to this table file, which others may share"
    )

    beside = commands.add_parser(
        "peers",
        help="time this project, FlashInfer and the floor beside each other on this machine's GPU",
        description="Time the config that a call would get, FlashInfer's kernels (at their defaults and at the best of "
        "their variants; its ordinary update too where T = 1) and the floor, cell by cell of a plan, in one process on "
        "one GPU, in interleaved rounds; print tables and ratios, and write JSON, CSVs and plots.",
    )
    _plan_arguments(beside, required=False)
    beside.add_argument("--batches", type=_sizes, metavar="N,M", help="batch sizes instead of the plan's")
    beside.add_argument("--budget", type=_duration, help="time to measure, such as 120s or 8m; what it does not reach "
        "is left out")  # fmt: skip
    beside.add_argument("--out", type=Path, help=f"folder of the results (default {PEERS_OUT}/<plan>)")
    _archive_argument(beside)
    beside.add_argument("--device", type=int, default=0, help="CUDA device (default 0)")
    beside.add_argument("--workers", type=int, help="compile processes (default: the CPUs)")
    beside.add_argument("--seed", type=int, default=0, help="of every random choice (default 0)")
    beside.add_argument(
        "--evolve", type=int, default=0, metavar="N", help="in each cell also N steps of evolving cursors: p50 and p99"
    )
    beside.add_argument(
        "--host", action="store_true", help="also the host's time of a call, of the plan's first problem"
    )
    beside.add_argument(
        "--pdl",
        action="store_true",
        help="in each cell also pairs of a producer and a step, without and with programmatic dependent launch",
    )
    beside.add_argument(
        "--redraw", type=Path, metavar="FILE", help="draw tables and plots of an earlier run's JSON again"
    )

    report = commands.add_parser("report", help="draw plots, CSVs and a page from the results of sweeps")
    report.add_argument(
        "results", nargs="*", type=Path, help=f"results files, or folders of them (default {DEFAULT_OUT})"
    )

    refit = commands.add_parser("fit", help="fit the cost model's constants to the timings in journals of sweeps")
    refit.add_argument("journals", nargs="+", type=Path, help="journal*.jsonl files, all of a sweep together")
    commands.add_parser("list", help="the shipped plans")
    explain = commands.add_parser("explain-plan", help="what a plan tunes, and the mix its rows are timed with")
    _plan_arguments(explain)
    return parser


def _archive_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--archive",
        type=Path,
        metavar="FILE.tar.gz",
        help="pack the folder of the results into one file at the end, journals and logs too, also after a failure",
    )


def _plan_arguments(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    parser.add_argument("--plan", required=required, help="a TOML file, or the name of a shipped plan")
    parser.add_argument("--acceptance", help="use this distribution of the plan for every workload")
    parser.add_argument("--tp", type=_sizes, metavar="N,M", help="tensor-parallel sizes instead of the plan's")
    parser.add_argument("--state", type=_states, metavar="A,B", help=f"only these states: {', '.join(dtypes.STATE)}")
    parser.add_argument("--tokens", type=_sizes, metavar="N,M", help="only these T")


def _plan(args: argparse.Namespace) -> plans.TuningPlan:
    plan = plans.load(args.plan, acceptance=args.acceptance, tp=args.tp, states=args.state, tokens=args.tokens)
    batches = getattr(args, "batches", None)
    return dataclasses.replace(plan, batches=batches) if batches else plan


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING)
    console = Console()
    try:
        if args.command == "list":
            listing.shipped(console)
            return 0
        if args.command == "explain-plan":
            listing.explain(console, _plan(args))
            return 0
        if args.command == "report":
            return _report(console, args.results)
        if args.command == "fit":
            return _fit(console, args.journals)
        if args.command == "peers":
            return _peers(args)
        return _sweep(args)
    except (plans.PlanError, UsageError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    except OSError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except Interrupted as e:
        print(f"interrupted: {e}; the same command goes on from there", file=sys.stderr)
        return 130
    except KeyboardInterrupt:
        if args.command == "peers":
            print("interrupted; cells that were done are in the results", file=sys.stderr)
        else:
            print("interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


def _peers(args: argparse.Namespace) -> int:
    from . import bench, bench_report
    from .bench_results import Bench
    from .errors import SweepError

    console = Console(width=None if sys.stdout.isatty() else _PRINT_WIDTH)
    if args.redraw is not None:
        try:
            found = Bench.load(args.redraw)
        except ValueError as e:
            print(f"error: {e}", file=sys.stderr)
            return 1
        bench_report.show(found, console)
        return _say_files(console, bench_report.write(found, args.out or args.redraw.parent))
    if args.plan is None:
        raise UsageError("peers: got neither --plan nor --redraw, expected one of them")
    if args.evolve < 0:
        raise UsageError(f"--evolve: got {args.evolve}, expected a number of steps, or 0")
    if args.workers is not None and args.workers < 1:
        raise UsageError(f"--workers: got {args.workers}, expected at least 1")
    if args.archive is not None:
        archive.check_name(args.archive)
    plan = _plan(args)
    device = _gpu(args.device)
    out = args.out or PEERS_OUT / plan.name
    options = bench.Options(evolve=args.evolve, host=args.host, pdl=args.pdl, seed=args.seed)
    try:
        found = bench.run(
            plan, out, device=device, budget_s=args.budget, options=options, workers=args.workers, console=console
        )
        bench_report.show(found, console)
        return _say_files(console, [out / bench.RESULTS, *bench_report.write(found, out)])
    except SweepError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    finally:
        if args.archive is not None and out.is_dir():
            _pack(console, out, args.archive)


def _say_files(console: Console, files: list[Path]) -> int:
    for file in files:
        console.print(f"wrote {file}", highlight=False, soft_wrap=True)
    return 0


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
    device = _device(args, ranks)
    console = Console(quiet=not ranks.first)
    if device is None and not (args.estimate or args.targets):
        console.print("no CUDA GPU found: estimating", highlight=False, soft_wrap=True)
    out = args.out or DEFAULT_OUT / plan.name
    try:
        run(
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
    finally:  # also of a sweep that failed: its journals are what the next one starts from
        if args.archive is not None and ranks.first and out.is_dir():
            _pack(console, out, args.archive)
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

    if args.estimate or args.targets is not None or not torch.cuda.is_available():
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


def _report(console: Console, given: list[Path]) -> int:
    from .report import draw
    from .sweep import RESULTS_SUFFIX

    files: list[Path] = []
    for path in given or [DEFAULT_OUT]:
        names = (f"*{RESULTS_SUFFIX}", RESULTS_SUFFIX[1:])  # one that is kept for the record may have no stem
        files += [path] if path.is_file() else sorted(f for name in names for f in path.rglob(name))
    if not files:
        where = ", ".join(str(p) for p in given) or str(DEFAULT_OUT)
        print(f"error: no results (*{RESULTS_SUFFIX}) in {where}; run a sweep first", file=sys.stderr)
        return 1
    pages, errors = draw(files)
    for page in pages:
        console.print(f"report: {page}", highlight=False, soft_wrap=True)
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    return 1 if errors else 0


def _fit(console: Console, journals: list[Path]) -> int:
    from . import cost, fit

    try:
        found = fit.refit(journals)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    console.print(
        f"{cost.DATA}: {found['timings']} timings, rms error {100 * found['rms_error']:.1f}%\n"
        f"fitted to all: {found['fitted']}\none batch held out: {found['held_out_batch']}",
        highlight=False,
        soft_wrap=True,
    )
    return 0
