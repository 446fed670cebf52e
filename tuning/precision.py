"""What a state's precision costs: errors of long generations against float64, for every way to keep a state.

    python -m replayssm_tuning.precision --out reports/tune/precision

The same requests are decoded with each kind of state and window: T tokens a step, some accepted, cursors moved by
`commit` (`decoding`). On a GPU the kernels run, on the CPU the reference (use fewer --tokens there). The truth is the
float64 recurrence over the accepted tokens; "f32, every token" is the standard update in f32 beside it. Errors are
those of the outputs before rounding to bf16 as far as the reference gives them, and with it where kernels do.

Inputs, as a Mamba2 layer sees them: x, B and C are silu of normal values; A of a head is uniform in -16..-1; dt is
softplus(raw + bias), raw normal, bias such that dt at raw = 0 is log-uniform in 0.001..0.1 over heads. So heads
forget within one to a thousand tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import torch
import torch.nn.functional as F

from replayssm_cute import dtypes, target
from replayssm_cute.config import TileConfig
from replayssm_cute.default_rule import default_config
from replayssm_cute.problem import Problem

from .argument_kinds import count, sizes
from .command import check_folder, command, usage
from .decoding import Inputs, Steps, Stream, decode, ends, errors, recurrence
from .study_run import StudyRun, add_budget

PROBLEM = Problem(heads=16, head_dim=64, d_state=128, groups=2, tokens=4, window=16)
WINDOWS = (8, 16, 32)
SPAN = 128  # accepted tokens that one point of a curve averages over
STANDARD = "f32, every token"

# Every way to keep a state: what differs in the problem from one of an f32 state.
KINDS: dict[str, dict[str, Any]] = {
    "f32": {},
    "f32, highest": {"precision": "highest"},
    "f32 + bf16 copy": {"copy_dtype": "bf16"},
    "f32 + fp8 copy": {"copy_dtype": "f8e4m3"},
    "f32 + int8 copy": {"copy_dtype": "i8"},
    "f16": {"state_dtype": "f16"},
    "f16, stochastic": {"state_dtype": "f16", "philox_rounds": 10},
    "bf16": {"state_dtype": "bf16"},
    "bf16, stochastic": {"state_dtype": "bf16", "philox_rounds": 10},
    "int8": {"state_dtype": "i8"},
    "int8, stochastic": {"state_dtype": "i8", "philox_rounds": 10},
    "fp8": {"state_dtype": "f8e4m3"},
    "fp8, stochastic": {"state_dtype": "f8e4m3", "philox_rounds": 10},
}


@dataclass(frozen=True, slots=True)
class Study:
    """What to decode.

    Attributes:
        tokens: accepted tokens of each request.
        problem: geometry and T; state, window and options are varied. Without D and z, which add nothing to an error.
        requests: decoded beside each other, one slot each.
        seed: of everything random.
    """

    tokens: int = 8192
    problem: Problem = PROBLEM
    requests: int = 2
    seed: int = 0


class Truth:
    """A study's tokens and the float64 outputs: the same for every kind of state and window."""

    def __init__(self, study: Study, device: torch.device) -> None:
        p, n, b = study.problem, study.tokens, study.requests
        gen = torch.Generator().manual_seed(study.seed)
        io = dtypes.TORCH[p.io_dtype]

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=gen)

        at_zero = torch.exp(torch.rand(p.heads, generator=gen) * 4.6052 - 6.9078)
        inputs = Inputs(
            x=F.silu(normal(n, b, p.heads, p.head_dim)).to(io).to(device),
            dt=normal(n, b, p.heads).to(io).to(device),
            B=F.silu(normal(n, b, p.groups, p.d_state)).to(io).to(device),
            C=F.silu(normal(n, b, p.groups, p.d_state)).to(io).to(device),
            rate=-(1 + 15 * torch.rand(p.heads, generator=gen)).to(device),
            bias=(at_zero + torch.log(-torch.expm1(-at_zero))).to(io).to(device),
        )
        self.study = study
        self.stream = Stream(inputs, Steps(n, p.tokens, gen))
        self.outputs = recurrence(inputs, torch.float64)

    def standard(self) -> pd.DataFrame:
        """The curve of the standard update in f32."""
        inputs = self.stream.inputs
        got = recurrence(inputs, torch.float32)
        if inputs.device.type == "cuda":  # as the kernels' outputs are
            got = got.to(inputs.x.dtype)
        return self._frame(STANDARD, 0, errors(self.stream.steps, got, self.outputs, SPAN, by_step=False))

    def curve(self, kind: str, window: int) -> pd.DataFrame:
        """The curve of a kind of state and a window."""
        p, device = problem_of(self.study, kind, window), self.stream.inputs.device
        config = None if device.type == "cpu" else config_of(p, self.study.requests)
        got = decode(self.stream, p, config, seed=self.study.seed, wide=torch.float64)
        return self._frame(kind, window, errors(self.stream.steps, got, self.outputs, SPAN))

    def _frame(self, kind: str, window: int, found: torch.Tensor) -> pd.DataFrame:
        points = {"token": ends(self.stream.steps, SPAN), "error": found.tolist()}
        return pd.DataFrame({"state": kind, "window": window, **points})


def problem_of(study: Study, kind: str, window: int) -> Problem:
    """The problem of a kind of state and a window."""
    fixed: dict[str, Any] = {"d_dtype": None, "has_z": False, "dt_bias_dtype": study.problem.io_dtype}
    return dataclasses.replace(study.problem, window=window, dt_softplus=True, **fixed, **KINDS[kind])


def config_of(problem: Problem, batch: int) -> TileConfig:
    """The default rule's: one alone, so that no others are compiled; a generation has few rows."""
    return default_config(problem, target.of_device(torch.cuda.current_device()), batch)


def curves(study: Study, windows: Sequence[int], kinds: Sequence[str], run: StudyRun) -> pd.DataFrame:
    """Every curve that the budget allows: columns state, window (0 for the standard update), token, error."""
    truth = functools.cache(lambda: Truth(study, run.device))
    named = {f"{kind}, W {window}": (kind, window) for window in windows for kind in kinds}
    if run.device.type == "cuda":
        problems = {name: problem_of(study, *which) for name, which in named.items()}
        run.compile({name: (p, config_of(p, study.requests)) for name, p in problems.items()})
    variants = {name: lambda which=which: truth().curve(*which) for name, which in named.items()}
    return run.run({STANDARD: lambda: truth().standard(), **variants})


def table(found: pd.DataFrame) -> pd.DataFrame:
    """A row for each kind of state: the mean error of the last quarter for each window, and how it has grown."""
    records = []
    for (state, window), curve in found.groupby(["state", "window"], sort=False):
        errors = curve["error"].to_numpy()
        quarter = max(1, len(errors) // 4)
        records.append(
            {
                "state": state,
                "window": window,
                "first_quarter": errors[:quarter].mean(),
                "last_quarter": errors[-quarter:].mean(),
                "worst": errors.max(),
            }
        )
    return pd.DataFrame(records)


def draw(found: pd.DataFrame, path: Path, title: str) -> None:
    """A panel for each window, a curve for each kind of state, stochastic ones dashed."""
    from . import plots

    plt = plots.plt
    windows = [w for w in found["window"].unique() if w]
    families = list(dict.fromkeys(name.removesuffix(", stochastic") for name in found["state"].unique()))
    colours = (plots.OURS, plots.MUTED, *plots.PEER_COLOURS)
    markers = ("",) * len(colours) + plots.PEER_MARKERS  # with a colour's second family
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(1, len(windows), figsize=(4.2 * len(windows), 4.4), sharey=True, squeeze=False)
        for axis, window in zip(axes[0], windows, strict=True):
            for state, curve in found[found["window"].isin((0, window))].groupby("state", sort=False):
                number = families.index(state.removesuffix(", stochastic"))
                style = "--" if state.endswith("stochastic") else ":" if state == STANDARD else "-"
                look = {"color": colours[number % len(colours)], "lw": 1.3, "ls": style, "ms": 4, "markevery": 8}
                axis.plot(curve["token"], curve["error"], label=state, marker=markers[number % len(markers)], **look)
            axis.set(yscale="log", xlabel="accepted tokens", title=f"W {window}")
        axes[0][0].set_ylabel("relative error of the outputs")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=4)
        figure.suptitle(title)
        figure.tight_layout(rect=(0, 0.18, 1, 1))
        figure.savefig(path)
        plt.close(figure)


def kinds_of(parser: argparse.ArgumentParser, states: str | None) -> list[str]:
    """The kinds of state that `--states` names, separated by ';'; all of them where it was not given."""
    kinds = list(KINDS) if states is None else [name.strip() for name in states.split(";")]
    if unknown := [name for name in kinds if name not in KINDS]:
        parser.error(f"--states: got {unknown}, expected some of {list(KINDS)}")
    return kinds


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the study on this machine's GPU, or on its CPU; write CSV, PNG and JSON. 1 if the budget ended before it."""
    parser = argparse.ArgumentParser(prog="python -m replayssm_tuning.precision", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=count, default=8192, help="accepted tokens of each request (default 8192)")
    parser.add_argument("--windows", type=sizes, default="8,16,32", help="windows (default 8,16,32)")
    parser.add_argument("--states", default=None, help="kinds of state, by name, separated by ';' (default: all)")
    parser.add_argument("--heads", type=count, default=PROBLEM.heads, help=f"heads (default {PROBLEM.heads})")
    parser.add_argument("--out", type=Path, default=Path("reports/tune/precision"), help="folder of the results")
    add_budget(parser)
    args = parser.parse_args(argv)
    kinds = kinds_of(parser, args.states)
    windows = list(args.windows)
    with usage():
        study = Study(args.tokens, dataclasses.replace(PROBLEM, heads=args.heads))
        _ = [dataclasses.replace(study.problem, window=window) for window in windows]
    check_folder("--out", args.out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {
        "study": {"tokens": study.tokens, "requests": study.requests, "seed": study.seed, "windows": windows},
        "problem": study.problem.to_json(),
    }
    run = StudyRun(args.out, "precision", facts, device, args.budget)
    found = curves(study, windows, kinds, run)
    if not len(found):
        return run.finish()
    summary = table(found)
    summary.to_csv(args.out / "precision_table.csv", index=False, float_format="%.4g")
    draw(found, args.out / "precision.png", f"{args.tokens} tokens, T {study.problem.tokens} ({run.where})")
    wide = summary.pivot(index="state", columns="window", values="last_quarter")
    print(wide.reindex(summary["state"].unique()).to_string(float_format="%.3g"))
    return run.finish()


if __name__ == "__main__":
    raise SystemExit(main())
