"""What a state's precision costs: errors of long generations against float64, for every way to keep a state.

    python -m replayssm_tuning.precision --out reports/tune/precision

The same requests are decoded with each kind of state and window: T tokens a step, some accepted, cursors moved by
`commit`. On a GPU the kernels run, on the CPU the reference (use fewer --tokens there). The truth is the float64
recurrence over the accepted tokens; "f32, every token" is the standard update in f32 beside it. Errors are those of
the outputs before rounding to bf16 as far as the reference gives them, and with it where kernels do.

Inputs, as a Mamba2 layer sees them: x, B and C are silu of normal values; A of a head is uniform in -16..-1; dt is
softplus(raw + bias), raw normal, bias such that dt at raw = 0 is log-uniform in 0.001..0.1 over heads. So heads
forget within one to a thousand tokens.
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
import torch.nn.functional as F

import replayssm_cute
from replayssm_cute import compiler, dtypes, fingerprint, plan, ring, target
from replayssm_cute.calls import Call, spread
from replayssm_cute.config import TileConfig, default_config
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

from .argument_kinds import count, sizes
from .command import check_folder, command, usage

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
        tokens: accepted tokens of each request, at least.
        problem: geometry and T; state, window and options are varied. Without D and z, which add nothing to an error.
        requests: decoded beside each other, one slot each.
        seed: of everything random.
    """

    tokens: int = 8192
    problem: Problem = PROBLEM
    requests: int = 2
    seed: int = 0


class Stream:
    """The tokens of a study and the truth: the same for every kind of state.

    Attributes:
        x, dt, B, C: (n, requests, ...) inputs of the tokens, dt raw.
        rate, bias: (H,) A and dt_bias.
        accepted: tokens accepted in each step; all requests accept alike.
        rows: (steps, T) int64, which token each position of a step runs: the next ones, of which the first `accepted`
            count; those after them are others, as wrong drafts are.
        truth: (n, requests, H, P) float64 outputs.
    """

    def __init__(self, study: Study, device: torch.device) -> None:
        p, b = study.problem, study.requests
        gen = torch.Generator().manual_seed(study.seed)
        counts: list[int] = []
        while sum(counts) < study.tokens:
            counts.append(int(torch.randint(1, p.tokens + 1, (), generator=gen)))
        n = sum(counts)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=gen)

        io = dtypes.TORCH[p.io_dtype]
        size = n + p.tokens
        self.x = F.silu(normal(size, b, p.heads, p.head_dim)).to(io).to(device)
        self.B, self.C = (F.silu(normal(size, b, p.groups, p.d_state)).to(io).to(device) for _ in range(2))
        self.dt = normal(size, b, p.heads).to(io).to(device)
        self.rate = -(1 + 15 * torch.rand(p.heads, generator=gen)).to(device)
        at_zero = torch.exp(torch.rand(p.heads, generator=gen) * 4.6052 - 6.9078)
        self.bias = (at_zero + torch.log(-torch.expm1(-at_zero))).to(io).to(device)
        self.accepted = counts
        firsts = torch.tensor([0, *counts[:-1]]).cumsum(0)[:, None]
        place = torch.arange(p.tokens)
        wrong = torch.randint(0, n, (len(counts), p.tokens), generator=gen)
        right = place < torch.tensor(counts)[:, None]
        self.rows = torch.where(right, firsts + place, wrong).to(device)
        self.truth = recurrence(self, n, torch.float64)


def recurrence(stream: Stream, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Outputs (tokens, requests, H, P) of the token-by-token update (`reference.py` has the formula) in a dtype."""
    repeat = stream.x.shape[2] // stream.B.shape[2]
    state = torch.zeros((*stream.x.shape[1:], stream.B.shape[3]), dtype=dtype, device=stream.x.device)
    dt = F.softplus(stream.dt[:tokens].to(dtype) + stream.bias.to(dtype))
    decay = torch.exp(stream.rate.to(dtype) * dt)
    scaled = dt[..., None] * stream.x[:tokens].to(dtype)
    B, C = (t[:tokens].to(dtype).repeat_interleave(repeat, 2) for t in (stream.B, stream.C))
    out = torch.empty(tokens, *state.shape[:3], dtype=dtype, device=state.device)
    for t in range(tokens):
        state.mul_(decay[t, ..., None, None]).addcmul_(scaled[t, ..., None], B[t, :, :, None, :])
        out[t] = (state @ C[t, ..., None])[..., 0]
    return out


def problem_of(study: Study, kind: str, window: int) -> Problem:
    """The problem of a kind of state and a window."""
    fixed: dict[str, Any] = {"d_dtype": None, "has_z": False, "dt_bias_dtype": study.problem.io_dtype}
    return dataclasses.replace(study.problem, window=window, dt_softplus=True, **fixed, **KINDS[kind])


def decode(study: Study, stream: Stream, kind: str, window: int) -> torch.Tensor:
    """Errors of one kind of state: (spans,) relative, 2-norm over the accepted tokens of each span, all heads."""
    p, device = problem_of(study, kind, window), stream.x.device
    cache = plan.scratch_call(p, device, study.requests)
    slots = cache.state_batch_indices
    assert slots is not None  # the study's problem has indices
    A = spread(stream.rate, p.head_dim, p.d_state)
    bias = spread(stream.bias, p.head_dim)
    wide = torch.float64 if device.type == "cpu" else cache.out.dtype
    # One config, so that no others are compiled: a generation has few rows.
    config = None if device.type == "cpu" else _config(p, study.requests)
    errors = Spans(sum(stream.accepted), device)
    generator = torch.Generator(device).manual_seed(study.seed)
    done = 0
    for rows, accepted in zip(stream.rows, stream.accepted, strict=True):
        x, B, C = (t[rows].transpose(0, 1).contiguous() for t in (stream.x, stream.B, stream.C))
        dt = spread(stream.dt[rows].transpose(0, 1).contiguous(), p.head_dim)
        call = dataclasses.replace(cache, x=x, dt=dt, A=A, B=B, C=C, out=torch.empty_like(x), dt_bias=bias)
        if call.rand_seed is not None:
            call.rand_seed.random_(generator=generator)
        out = _step(call, wide, config)
        errors.add(done, out[:, :accepted].transpose(0, 1).double(), stream.truth[done : done + accepted])
        done += accepted
        taken = torch.full((study.requests,), accepted, dtype=torch.int32, device=device)
        ring.commit(cache.ring_start, cache.prev_num_accepted_tokens, slots, taken, tokens=p.tokens, window=p.window)
    return errors.relative()


def _config(problem: Problem, batch: int) -> TileConfig:
    return default_config(problem, target.of_device(torch.cuda.current_device()), batch)


def _step(call: Call, wide: torch.dtype, config: TileConfig | None) -> torch.Tensor:
    """One step; on the CPU its outputs are not rounded, so that nothing hides the state's own error."""
    if wide == call.out.dtype:
        return replayssm_cute.checkpointing_ssu(**call.kwargs(), config=config)
    call.out = call.out.to(wide)
    return checkpointing_ssu_reference(**call.kwargs())


class Spans:
    """Sums of squares over spans of tokens, kept on the device."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self.sums = torch.zeros(2, max(1, tokens // SPAN), dtype=torch.float64, device=device)

    def add(self, first: int, got: torch.Tensor, truth: torch.Tensor) -> None:
        """Count tokens from `first` on; a step's go to the span of its first one, the rest to the last."""
        at = min(first // SPAN, self.sums.shape[1] - 1)
        self.sums[0, at] += (got - truth).square().sum()
        self.sums[1, at] += truth.square().sum()

    def relative(self) -> torch.Tensor:
        """(spans,) relative errors."""
        return (self.sums[0] / self.sums[1]).sqrt().cpu()


def curves(study: Study, windows: Sequence[int], kinds: Sequence[str], device: torch.device) -> pd.DataFrame:
    """Every curve: columns state, window (0 for the standard update), token, error."""
    stream = Stream(study, device)
    n = sum(stream.accepted)
    frames = []

    def keep(kind: str, window: int, errors: torch.Tensor) -> None:
        tokens = [*(SPAN * (k + 1) for k in range(len(errors) - 1)), n]
        frames.append(pd.DataFrame({"state": kind, "window": window, "token": tokens, "error": errors.tolist()}))

    standard = Spans(n, device)
    outputs = recurrence(stream, n, torch.float32)
    if device.type == "cuda":  # as the kernels' outputs are
        outputs = outputs.to(dtypes.TORCH[study.problem.io_dtype])
    for first in range(0, n, SPAN):
        part = slice(first, min(n, first + SPAN))
        standard.add(first, outputs[part].double(), stream.truth[part])
    keep(STANDARD, 0, standard.relative())
    if device.type == "cuda":
        problems = [problem_of(study, kind, window) for window in windows for kind in kinds]
        where = target.of_device(torch.cuda.current_device())
        compiler.compile_many([(p, _config(p, study.requests), where) for p in problems])
    for window in windows:
        for kind in kinds:
            keep(kind, window, decode(study, stream, kind, window))
    return pd.concat(frames, ignore_index=True)


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
    with plt.rc_context(plots.STYLE):
        figure, axes = plt.subplots(1, len(windows), figsize=(4.2 * len(windows), 4.4), sharey=True, squeeze=False)
        for axis, window in zip(axes[0], windows, strict=True):
            for state, curve in found[found["window"].isin((0, window))].groupby("state", sort=False):
                colour = f"C{families.index(state.removesuffix(', stochastic')) % 10}"
                style = "--" if state.endswith("stochastic") else ":" if state == STANDARD else "-"
                axis.plot(curve["token"], curve["error"], style, color=colour, lw=1.3, label=state)
            axis.set(yscale="log", xlabel="accepted tokens", title=f"W {window}")
        axes[0][0].set_ylabel("relative error of the outputs")
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncols=4)
        figure.suptitle(title)
        figure.tight_layout(rect=(0, 0.18, 1, 1))
        figure.savefig(path)
        plt.close(figure)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the study on this machine's GPU, or on its CPU; write CSV, PNG and JSON."""
    parser = argparse.ArgumentParser(prog="python -m replayssm_tuning.precision", description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=count, default=8192, help="accepted tokens of each request (default 8192)")
    parser.add_argument("--windows", type=sizes, default="8,16,32", help="windows (default 8,16,32)")
    parser.add_argument("--states", default=None, help="kinds of state, by name, separated by ';' (default: all)")
    parser.add_argument("--heads", type=count, default=PROBLEM.heads, help=f"heads (default {PROBLEM.heads})")
    parser.add_argument("--out", type=Path, default=Path("reports/tune/precision"), help="folder of the results")
    args = parser.parse_args(argv)
    kinds = list(KINDS) if args.states is None else [name.strip() for name in args.states.split(";")]
    if unknown := [name for name in kinds if name not in KINDS]:
        parser.error(f"--states: got {unknown}, expected some of {list(KINDS)}")
    windows = list(args.windows)
    with usage():
        study = Study(args.tokens, dataclasses.replace(PROBLEM, heads=args.heads))
        _ = [dataclasses.replace(study.problem, window=window) for window in windows]
    check_folder("--out", args.out)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = curves(study, windows, kinds, device)
    args.out.mkdir(parents=True, exist_ok=True)
    found.to_csv(args.out / "precision.csv", index=False, float_format="%.4g")
    summary = table(found)
    summary.to_csv(args.out / "precision_table.csv", index=False, float_format="%.4g")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "reference on the CPU"
    draw(found, args.out / "precision.png", f"{args.tokens} tokens, T {study.problem.tokens} ({where})")
    manifest = {
        "gpu": where,
        "kernel_fingerprint": fingerprint.kernels(),
        "torch": torch.__version__,
        "study": {"tokens": study.tokens, "requests": study.requests, "seed": study.seed, "windows": windows},
        "problem": study.problem.to_json(),
    }
    (args.out / "precision.json").write_text(json.dumps(manifest, indent=1) + "\n")
    wide = summary.pivot(index="state", columns="window", values="last_quarter")
    print(wide.reindex(summary["state"].unique()).to_string(float_format="%.3g"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
