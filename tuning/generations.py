"""Long generations against float64: how a state's error grows while tokens are drafted, accepted and rejected.

    python -m replayssm_tuning.generations --tokens 4096 --out reports/generations

Each state dtype decodes the same requests: T drafted tokens a step, a random number of them accepted (`decoding`). The
float64 recurrence sees the accepted tokens alone. Beside it runs the standard update, which rounds its state to the
dtype after every token. The error is that of the accepted tokens' outputs, over runs of `SPAN` tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import torch

from replayssm_cute import dtypes, tables, target
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

from .argument_kinds import count
from .command import check_folder, command, usage
from .decoding import Inputs, Steps, Stream, decode, ends, errors, recurrence
from .study_run import StudyRun, add_budget

PROBLEM = Problem(heads=8, head_dim=64, d_state=128, groups=2, tokens=4, window=16)
SPAN = 64  # tokens that one point of a curve averages over
STATES = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Study:
    """What to decode.

    Attributes:
        tokens: accepted tokens of each request.
        problem: geometry, T, W and dtypes; its state dtype is varied. Without D and z, which add nothing to an error.
        requests: decoded beside each other, one slot each.
        seed: of everything random.
    """

    tokens: int = 4096
    problem: Problem = PROBLEM
    requests: int = 4
    seed: int = 0


class Truth:
    """A study's tokens, of the statistics of `calls.random_call`, and the float64 outputs: for all states alike."""

    def __init__(self, study: Study, device: torch.device | str) -> None:
        p, n, b = study.problem, study.tokens, study.requests
        gen = torch.Generator().manual_seed(study.seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=gen).to(dtypes.TORCH[p.io_dtype]).to(device)

        def uniform(kind: str, low: float, high: float, *shape: int) -> torch.Tensor:
            return (torch.rand(shape, generator=gen) * (high - low) + low).to(dtypes.TORCH[kind]).to(device)

        inputs = Inputs(
            x=normal(n, b, p.heads, p.head_dim),
            dt=uniform(p.dt_dtype, -5.0, 0.0, n, b, p.heads),
            B=normal(n, b, p.groups, p.d_state),
            C=normal(n, b, p.groups, p.d_state),
            rate=uniform(p.a_dtype, -16.0, -1.0, p.heads),
            bias=uniform(p.dt_bias_dtype or "f32", -2.0, 0.0, p.heads),
        )
        self.study = study
        self.stream = Stream(inputs, Steps(n, p.tokens, gen))
        self.outputs = recurrence(inputs, torch.float64)

    def curves(self, state: str) -> pd.DataFrame:
        """One state dtype's: columns state, update ("replay" or "every token"), token, error (relative, 2-norm)."""
        problem, inputs, config = problem_of(self.study, state), self.stream.inputs, None
        if inputs.device.type == "cuda":
            config = kernel_of(self.study, state, target.of_device(torch.cuda.current_device()))[1]
        standard = recurrence(inputs, torch.float32, dtypes.TORCH[state]).to(inputs.x.dtype)
        frames = []
        for update, got in (("replay", decode(self.stream, problem, config)), ("every token", standard)):
            found = errors(self.stream.steps, got, self.outputs, SPAN)
            points = {"token": ends(self.stream.steps, SPAN), "error": found.tolist()}
            frames.append(pd.DataFrame({"state": state, "update": update, **points}))
        return pd.concat(frames, ignore_index=True)


def problem_of(study: Study, state: str) -> Problem:
    """The problem of a state dtype."""
    return dataclasses.replace(
        study.problem,
        state_dtype=state,
        d_dtype=None,
        has_z=False,
        dt_softplus=True,
        dt_bias_dtype=study.problem.dt_bias_dtype or "f32",
    )


def kernel_of(study: Study, state: str, where: Target) -> tuple[Problem, TileConfig]:
    """A state dtype's problem, and the config that a call gets: one alone, so that no others are compiled."""
    problem = problem_of(study, state)
    return problem, tables.choose(problem, study.requests, where).config


def draw(curves: pd.DataFrame, path: Path, title: str) -> None:
    """The curves as a PNG, one colour a state dtype, the standard update dashed."""
    from . import plots

    plt = plots.plt
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(figsize=(7.2, 4.0))
        colours = dict(zip(STATES, (plots.OURS, *plots.PEER_COLOURS), strict=False))
        for (state, update), curve in curves.groupby(["state", "update"], sort=False):
            style = "-" if update == "replay" else "--"
            axes.plot(curve["token"], curve["error"], style, color=colours[state], lw=1.4, label=f"{state}, {update}")
        axes.set(yscale="log", xlabel="accepted tokens", ylabel="relative error of the outputs", title=title)
        axes.legend(ncols=2)
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the study on this machine's GPU, or on its CPU; write CSV, PNG and JSON. 1 if the budget ended before it."""
    parser = argparse.ArgumentParser(prog="python -m replayssm_tuning.generations", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=count, default=4096, help="accepted tokens of each request (default 4096)")
    parser.add_argument("--window", type=count, default=16, help="W (default 16); below 4 it is T too")
    parser.add_argument("--out", type=Path, default=Path("reports/tune/generations"), help="folder of the results")
    add_budget(parser)
    args = parser.parse_args(argv)
    drafted = min(PROBLEM.tokens, args.window)
    with usage():
        study = Study(args.tokens, dataclasses.replace(PROBLEM, window=args.window, tokens=drafted))
    check_folder("--out", args.out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {
        "study": {"tokens": study.tokens, "requests": study.requests, "seed": study.seed},
        "problem": study.problem.to_json(),
    }
    run = StudyRun(args.out, "generations", facts, device, args.budget)
    if device.type == "cuda":
        where = target.of_device(torch.cuda.current_device())
        run.compile({state: kernel_of(study, state, where) for state in STATES})
    truth = functools.cache(lambda: Truth(study, device))
    found = run.run({state: lambda state=state: truth().curves(state) for state in STATES})  # type: ignore[misc]
    if len(found):
        draw(found, args.out / "generations.png", f"{study.problem.label()}, T drafted, 1..T accepted ({run.where})")
        last = found.groupby(["state", "update"], sort=False).tail(4).groupby(["state", "update"], sort=False)["error"]
        print(last.mean().to_string(float_format="%.3g"))
    return run.finish()


if __name__ == "__main__":
    raise SystemExit(main())
