"""Long generations against float64: how a state's error grows while tokens are drafted, accepted and rejected.

    python -m replayssm_tuning.generations --tokens 4096 --out reports/generations

Each state dtype decodes the same requests: T drafted tokens a step, a random number of them accepted, cursors moved by
`commit`. The float64 recurrence sees the accepted tokens alone. Beside it runs the standard update, which rounds its
state to the dtype after every token. The error is that of the accepted tokens' outputs, over runs of `SPAN` tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import torch

import replayssm_cute
from replayssm_cute import dtypes, fingerprint
from replayssm_cute.calls import random_call
from replayssm_cute.problem import Problem

from .argument_kinds import count
from .command import check_folder, command, usage

PROBLEM = Problem(heads=8, head_dim=64, d_state=128, groups=2, tokens=4, window=16)
SPAN = 64  # tokens that one point of a curve averages over
STATES = ("f32", "f16", "bf16")


@dataclass(frozen=True, slots=True)
class Study:
    """What to decode.

    Attributes:
        tokens: accepted tokens of each request, at least.
        problem: geometry, T, W and dtypes; its state dtype is varied.
        requests: decoded beside each other, one slot each.
        seed: of everything random.
    """

    tokens: int = 4096
    problem: Problem = PROBLEM
    requests: int = 4
    seed: int = 0


class Recurrence:
    """Mamba2's recurrence token by token (`reference.py` has the formula), its state rounded to `kept` each time."""

    def __init__(self, state: torch.Tensor, rate: torch.Tensor, kept: torch.dtype) -> None:
        self.kept, self.rate = kept, rate
        self.state = state.to(kept)

    def advance(
        self, state: torch.Tensor, dt: torch.Tensor, x: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(state, outputs) after one token of every request; dt (b, H), x (b, H, P), b and c (b, H, N), float64."""
        wide = torch.float64 if self.kept == torch.float64 else torch.float32
        s, dt, x, b, c = (t.to(wide) for t in (state, dt, x, b, c))
        s = torch.exp(self.rate.to(wide) * dt)[..., None, None] * s + (dt[..., None] * x)[..., None] * b[..., None, :]
        return s.to(self.kept), (s @ c[..., None])[..., 0].double()

    def window(self, tokens: Sequence[tuple[torch.Tensor, ...]], accepted: torch.Tensor) -> torch.Tensor:
        """Outputs (b, T, H, P) of a window's tokens; then keep the state as of each request's accepted ones."""
        state, states, outputs = self.state, [self.state], []
        for token in tokens:
            state, y = self.advance(state, *token)
            states.append(state)
            outputs.append(y)
        rows = torch.arange(len(accepted), device=accepted.device)
        self.state = torch.stack(states, 1)[rows, accepted]
        return torch.stack(outputs, 1)


def errors(study: Study, state_dtype: str, device: torch.device | str = "cpu") -> pd.DataFrame:
    """One state dtype's curves: columns state, update ("replay" or "every token"), token, error (relative, 2-norm)."""
    p = dataclasses.replace(study.problem, state_dtype=state_dtype, d_dtype=None, has_z=False)
    b, T = study.requests, p.tokens
    gen = torch.Generator().manual_seed(study.seed)
    cache = random_call(p, b, slots=b, pnat=[0] * b, dead=None, seed=study.seed, device=device)
    cache.state.zero_()
    slots = cache.state_batch_indices
    assert slots is not None  # the study's problem has indices
    rate = cache.A[:, 0, 0].double()
    bias = cache.dt_bias[:, 0].double() if cache.dt_bias is not None else 0.0
    zero = torch.zeros(b, p.heads, p.head_dim, p.d_state, dtype=torch.float64, device=cache.state.device)
    exact = Recurrence(zero, rate, torch.float64)
    rounded = Recurrence(zero, rate, dtypes.TORCH[state_dtype])
    groups = p.heads // p.groups
    done, records = 0, []
    sums = {name: [0.0, 0.0] for name in ("replay", "every token")}
    while done < study.tokens:
        step = random_call(p, b, slots=b, seed=int(torch.randint(1 << 30, (), generator=gen)), device=device)
        replayssm_cute.checkpointing_ssu(**cache.kwargs() | {n: getattr(step, n) for n in ("x", "dt", "B", "C", "out")})
        dt = (
            torch.nn.functional.softplus(step.dt[..., 0].double() + bias) if p.dt_softplus else step.dt[..., 0].double()
        )
        wide_b, wide_c = (t.double().repeat_interleave(groups, 2) for t in (step.B, step.C))
        tokens = [(dt[:, t], step.x[:, t].double(), wide_b[:, t], wide_c[:, t]) for t in range(T)]
        # all requests accept alike, so that a span of the curve holds the same tokens of each
        accepted = torch.full((b,), int(torch.randint(1, T + 1, (), generator=gen)), dtype=torch.int32)
        accepted = accepted.to(cache.state.device)
        kept = int(accepted[0])
        truth = exact.window(tokens, accepted)[:, :kept]
        standard = rounded.window(tokens, accepted).to(step.out.dtype).double()
        got = {"replay": step.out.double()[:, :kept], "every token": standard[:, :kept]}
        for name, y in got.items():
            sums[name][0] += float((y - truth).square().sum())
            sums[name][1] += float(truth.square().sum())
        replayssm_cute.commit(
            cache.ring_start, cache.prev_num_accepted_tokens, slots, accepted, tokens=T, window=p.window
        )
        before, done = done, done + kept
        if before // SPAN != done // SPAN or done >= study.tokens:
            for name, (difference, norm) in sums.items():
                error = (difference / norm) ** 0.5
                records.append({"state": state_dtype, "update": name, "token": done, "error": error})
                sums[name] = [0.0, 0.0]
    return pd.DataFrame(records)


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
    """Run the study on this machine's GPU, or on its CPU; write CSV, PNG and JSON."""
    parser = argparse.ArgumentParser(prog="python -m replayssm_tuning.generations", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=count, default=4096, help="accepted tokens of each request (default 4096)")
    parser.add_argument("--window", type=count, default=16, help="W (default 16); below 4 it is T too")
    parser.add_argument("--out", type=Path, default=Path("reports/tune/generations"), help="folder of the results")
    args = parser.parse_args(argv)
    drafted = min(PROBLEM.tokens, args.window)
    with usage():
        study = Study(args.tokens, dataclasses.replace(PROBLEM, window=args.window, tokens=drafted))
    check_folder("--out", args.out)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    curves = pd.concat([errors(study, state, device) for state in STATES], ignore_index=True)
    args.out.mkdir(parents=True, exist_ok=True)
    curves.to_csv(args.out / "generations.csv", index=False, float_format="%.4g")
    where = torch.cuda.get_device_name() if device == "cuda" else "reference on the CPU"
    draw(curves, args.out / "generations.png", f"{study.problem.label()}, T drafted, 1..T accepted ({where})")
    manifest: dict[str, Any] = {
        "gpu": where,
        "kernel_fingerprint": fingerprint.kernels(),
        "torch": torch.__version__,
        "study": {"tokens": study.tokens, "requests": study.requests, "seed": study.seed},
        "problem": study.problem.to_json(),
    }
    (args.out / "generations.json").write_text(json.dumps(manifest, indent=1) + "\n")
    last = curves.groupby(["state", "update"], sort=False).tail(4).groupby(["state", "update"], sort=False)["error"]
    print(last.mean().to_string(float_format="%.3g"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
