"""The arguments of the command line, with what `--help` says of each command: examples and exit codes."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from pathlib import Path

from replayssm_cute import dtypes

from . import argument_kinds as kinds
from . import estimates as estimates_of

DEFAULT_OUT = Path("reports") / "tune"
PEERS_OUT = Path("reports") / "peers"

_CODES = {
    0: "done",
    1: "nothing came of it: no candidate survived, no results, a file that cannot be read or written",
    2: "wrong usage, or a plan that cannot be used; nothing was done",
    130: "interrupted",
}
_SWEEP_CODES = _CODES | {130: "interrupted by Ctrl-C: the table has what was done, the same command goes on"}
_DIFF_CODES = {
    0: "no cell of B is slower than in A",
    1: "some cell is slower by more than the margin",
    2: "wrong usage, or a file that is neither a table nor results",
}
_EXAMPLES = {
    "sweep": (
        ("sweep --plan nemotron3-super --tp 1", "measure, or estimate where there is no GPU"),
        ("sweep --plan my.toml --budget 3m --archive home.tar.gz", "and bring everything home as one file"),
        ("sweep --plan bamba-9b --targets b300 --json", "estimate for a GPU that is not here; JSON for a script"),
        ("sweep --plan bamba-9b --repeat 5", "how far five sweeps agree"),
    ),
    "peers": (("peers --plan reports/peers/plan.toml --evolve 1000 --host", "ours, FlashInfer and the floor"),),
    "report": (
        ("report", "every sweep under reports/tune"),
        ("report out/h200 other.results.json", "these alone"),
    ),
    "diff": (
        ("diff old.table.json new.table.json", "cells of the new one that are slower come first"),
        ("diff a.results.json b.results.json --margin 5% --json", "JSON for a script"),
    ),
    "fit": (("fit reports/tune/*/journal*.jsonl", "the cost model's constants, from these timings"),),
    "estimate-all": (
        ("estimate-all", "the tables that the package brings, and their pages; without a GPU"),
        ("estimate-all --plans bamba-9b --gpus b200 --out my/tables --pages my", "those of other plans, elsewhere"),
    ),
    "list": (("list --json", "plans, their models and sizes"),),
    "explain-plan": (("explain-plan --plan nemotron3-super --tp 8", "flush share and live rows of its load"),),
}


def parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    whole = argparse.ArgumentParser(
        prog="replayssm-tune",
        description="Tune replayssm-cute for a model: sweep a plan, draw the report.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_epilog([example for examples in _EXAMPLES.values() for example in examples[:1]], _CODES)
        + "\n\nexit codes of diff:\n"
        + "\n".join(f"  {code:<4} {words}" for code, words in _DIFF_CODES.items())
        + "\n\nResults go to stdout, progress and errors to stderr. 'COMMAND --help' has more examples.",
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str, description: str = "", codes: dict[int, str] = _CODES) -> argparse.ArgumentParser:
        made = commands.add_parser(
            name,
            help=help,
            description=textwrap.fill(description or f"{help[0].upper()}{help[1:]}.", 100),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            epilog=_epilog(_EXAMPLES[name], codes),
        )
        made.add_argument("--json", action="store_true", help="print one JSON object to stdout, and nothing else there")
        return made

    sweep = command(
        "sweep",
        help="measure on this machine's GPU, or estimate without one",
        description="Sweep a plan. With a GPU its candidates are compiled, checked and timed; without one (or with "
        "--targets or --estimate) they are compiled and ranked by the cost model. A killed sweep resumes. With several "
        "GPUs: torchrun --nproc-per-node=N -m replayssm_tuning sweep ...",
        codes=_SWEEP_CODES,
    )
    _plan_arguments(sweep)
    sweep.add_argument("--targets", type=kinds.gpus, metavar="A,B", help="estimate for these targets, GPU or not")
    sweep.add_argument("--estimate", action="store_true", help="estimate for the plan's targets, GPU or not")
    sweep.add_argument("--device", type=int, help="CUDA device to measure on (default 0; torchrun: LOCAL_RANK)")
    sweep.add_argument("--budget", type=kinds.duration, help="time to compile and measure, such as 120s or 4m")
    sweep.add_argument("--batches", type=kinds.sizes, metavar="N,M", help="batch buckets instead of the plan's")
    sweep.add_argument("--out", type=Path, help=f"folder of the results (default {DEFAULT_OUT}/<plan>)")
    _archive_argument(sweep)
    sweep.add_argument("--workers", type=int, help="compile processes (default: the CPUs)")
    sweep.add_argument("--retry-failed", action="store_true", help="try again what failed in an earlier sweep")
    sweep.add_argument("--no-peers", action="store_true", help="do not time other implementations beside")
    sweep.add_argument(
        "--whole-grid", action="store_true", help="time every config, also those that the cost model thinks slow"
    )
    sweep.add_argument(
        "--mixes",
        action="store_true",
        help="race each cell's finalists under other acceptance lengths too, from all drafts rejected to all accepted",
    )
    sweep.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="measure N times with fresh seeds, each with the whole budget (compilation comes before, with half of one "
        "at most), and report how often winners flip and what that costs; the table is the first one's",
    )
    sweep.add_argument(
        "--merge-into", type=Path, metavar="FILE", help="add the winners to this table file, which others may share"
    )

    beside = command(
        "peers",
        help="time this project, FlashInfer and the floor beside each other on this machine's GPU",
        description="Time the config that a call would get, FlashInfer's kernels (at their defaults and at the best of "
        "their variants; its ordinary update too where T = 1) and the floor, cell by cell of a plan, in one process on "
        "one GPU, in interleaved rounds; print tables and ratios, and write JSON, CSVs and plots.",
    )
    _plan_arguments(beside, required=False)
    beside.add_argument("--batches", type=kinds.sizes, metavar="N,M", help="batch sizes instead of the plan's")
    beside.add_argument(
        "--budget",
        type=kinds.duration,
        help="time to measure, such as 120s or 8m; what it does not reach is left out",
    )
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

    report = command("report", "draw plots, CSVs and a page from the results of sweeps")
    report.add_argument(
        "results", nargs="*", type=Path, help=f"results files, or folders of them (default {DEFAULT_OUT})"
    )

    compare = command(
        "diff",
        "compare two tables: which cells became slower",
        "Compare two table files, or two results of sweeps, cell by cell: B against A. Says in what else they differ "
        "(GPU, kernels, versions, acceptance), lists the cells that became slower first, and exits with 1 if there are "
        "any.",
        codes=_DIFF_CODES,
    )
    compare.add_argument("a", type=Path, metavar="A", help="the earlier table or results")
    compare.add_argument("b", type=Path, metavar="B", help="the later one")
    compare.add_argument(
        "--margin",
        type=kinds.share,
        default=0.02,
        help="times this close are the same, such as 2%% or 0.02 (default 2%%)",
    )

    refit = command("fit", "fit the cost model's constants to the timings in journals of sweeps")
    refit.add_argument("journals", nargs="+", type=Path, help="journal*.jsonl files (.gz too), all of a sweep together")
    every = command(
        "estimate-all",
        "make the estimated tables that the package brings, and their pages",
        "Make an estimated table for each GPU, plan and state dtype, and a page for each GPU, by the cost model and "
        "compilation for the GPU, on a machine that has none. They serve where REPLAYSSM_TABLES names 'estimated'. "
        "Estimated tables of other kernels that lie there are removed, and nothing else. A rerun finds in the disk "
        "cache what was compiled.",
    )
    every.add_argument(
        "--plans", type=kinds.words, metavar="A,B", help=f"plans (default: {', '.join(estimates_of.PLANS)})"
    )
    every.add_argument(
        "--gpus",
        type=kinds.gpus,
        metavar="A,B",
        help=f"GPUs of the catalogue (default: {', '.join(estimates_of.GPUS)})",
    )
    every.add_argument(
        "--states",
        type=kinds.states,
        default=estimates_of.STATES,
        metavar="A,B",
        help=f"state dtypes, besides those that a plan lists (default: {', '.join(estimates_of.STATES)})",
    )
    every.add_argument(
        "--near",
        type=kinds.share,
        default=estimates_of.NEAR,
        help="compile few configs such that each cell has one that the model thinks this near its fastest, such as 1%% "
        f"or 0.01 (default {estimates_of.NEAR:.0%}%)",
    )
    every.add_argument("--workers", type=kinds.count, help="processes (default: the CPUs)")
    every.add_argument("--out", type=Path, help="folder of the tables (default: the package's)")
    every.add_argument(
        "--pages", type=Path, default=estimates_of.PAGES, help=f"folder of the pages (default {estimates_of.PAGES})"
    )
    command("list", "the shipped plans")
    explain = command("explain-plan", "what a plan tunes, and the mix its rows are timed with")
    _plan_arguments(explain)
    return whole


def _epilog(examples: Sequence[tuple[str, str]], codes: dict[int, str]) -> str:
    lines = ["examples:", *(f"  replayssm-tune {line}\n      {words}" for line, words in examples)]
    return "\n".join([*lines, "", "exit codes:", *(f"  {code:<4} {words}" for code, words in codes.items())])


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
    parser.add_argument("--tp", type=kinds.sizes, metavar="N,M", help="tensor-parallel sizes instead of the plan's")
    parser.add_argument(
        "--state", type=kinds.states, metavar="A,B", help=f"only these states: {', '.join(dtypes.STATE)}"
    )
    parser.add_argument("--tokens", type=kinds.sizes, metavar="N,M", help="only these T")
