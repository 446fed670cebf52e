"""What a state's precision costs a language model: how often it chooses the token that float64 chooses.

    python -m examples.speculative_lm.agreement --tokens 8192 --out reports/tune/agreement

The model is trained for a while, and then reads one text, for every kind of state and window of
`replayssm_tuning.precision`: its layers decode the text as long generations are decoded there, T tokens a step of which
some are wrong drafts. Everything but the states is in f32, in the truth in float64; x, B and C are bf16 in all of them,
and so is y, but not in the truth. The truth's states, and those of "f32, every token", are the recurrence's, token by
token. Needs the extra [tuning].

Columns: the share of tokens after which the most likely next one is the truth's, the mean Kullback-Leibler divergence
of the next token's distribution from the truth's, and the loss on the text, both in nats a token.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
import torch
import torch.nn.functional as F
from replayssm_tuning.argument_kinds import sizes
from replayssm_tuning.command import check_folder, command, usage
from replayssm_tuning.decoding import Inputs, Steps, Stream, decode, recurrence
from replayssm_tuning.precision import KINDS, STANDARD, WINDOWS, config_of, kinds_of
from replayssm_tuning.study_run import StudyRun, add_budget

from replayssm_cute.problem import Problem

from .model import Block, Model, Shape
from .text import corpus, train

TOKENS = 4  # T
Ssu = Callable[[Inputs], torch.Tensor]  # y (n, 1, H, P), without D x


def problem_of(shape: Shape, kind: str, window: int) -> Problem:
    """The problem of a layer with a kind of state."""
    sizes = {name: getattr(shape, name) for name in ("heads", "head_dim", "d_state", "groups")}
    given = {"dt_dtype": "f32", "dt_bias_dtype": "f32", "d_dtype": None}
    return Problem(**sizes, tokens=TOKENS, window=window, **given, **KINDS[kind])


@torch.inference_mode()
def read(model: Model, text: torch.Tensor, ssu: Ssu) -> torch.Tensor:
    """Logits (n, V) after each token of a text (n,), in the model's dtype."""
    h = model.embedding(text[None])
    for block in model.blocks:
        z, mixed, dt = block.project(h)
        x, B, C = (t[0].bfloat16() for t in block.convolve(F.pad(mixed, (0, 0, model.shape.conv - 1, 0))))
        y = ssu(_inputs(block, x, dt[0], B, C))[:, 0].to(h.dtype) + block.D[:, None] * x.to(h.dtype)
        h = h + block.finish(y[None], z)
    return model.logits(h)[0]


def _inputs(block: Block, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor) -> Inputs:
    """Of one request."""
    x, dt, B, C = (t[:, None].contiguous() for t in (x, dt, B, C))
    wide = dt.dtype
    return Inputs(x, dt, B, C, -torch.exp(block.A_log.to(wide)), block.dt_bias.to(wide))


class Truth:
    """A text, its steps, and the logits in float64."""

    def __init__(self, model: Model, text: torch.Tensor, seed: int = 0) -> None:
        self.model, self.text = model.float(), text
        self.steps = Steps(len(text) - 1, TOKENS, torch.Generator().manual_seed(seed))
        self.seed = seed
        self.logits = read(copy.deepcopy(model).double(), text[:-1], lambda given: recurrence(given, torch.float64))

    def standard(self) -> pd.DataFrame:
        """The standard update in f32."""
        return self._row(STANDARD, 0, lambda given: recurrence(given, torch.float32).to(given.x.dtype))

    def of(self, kind: str, window: int) -> pd.DataFrame:
        """A kind of state and a window."""
        problem = problem_of(self.model.shape, kind, window)
        config = config_of(problem, 1) if self.text.is_cuda else None
        return self._row(kind, window, lambda given: decode(Stream(given, self.steps), problem, config, seed=self.seed))

    def _row(self, kind: str, window: int, ssu: Ssu) -> pd.DataFrame:
        logits = read(self.model, self.text[:-1], ssu).double()
        expected, found = (F.log_softmax(t, -1) for t in (self.logits, logits))
        row = {
            "state": kind,
            "window": window,
            "agreement": float((logits.argmax(-1) == self.logits.argmax(-1)).double().mean()),
            "divergence": float((expected.exp() * (expected - found)).sum(-1).mean()),
            "loss": float(F.nll_loss(found, self.text[1:])),
        }
        return pd.DataFrame([row])


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Train, read, write CSV and JSON. 1 if the budget ended before it."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.speculative_lm.agreement",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokens", type=int, default=8192, help="of the text (default 8192)")
    parser.add_argument("--windows", type=sizes, default=",".join(map(str, WINDOWS)), help="windows (default 8,16,32)")
    parser.add_argument("--states", default=None, help="kinds of state, by name, separated by ';' (default: all)")
    parser.add_argument("--train", type=float, default=15.0, metavar="SECONDS", help="0: random weights")
    parser.add_argument("--out", type=Path, default=Path("reports/tune/agreement"), help="folder of the results")
    add_budget(parser)
    args = parser.parse_args(argv)
    kinds = kinds_of(parser, args.states)
    windows = list(args.windows)
    shape = Shape(heads=4, d_state=128)
    with usage():
        for window in windows:
            problem_of(shape, kinds[0], window)
    check_folder("--out", args.out)
    data = corpus()
    if not 2 <= args.tokens < len(data):
        parser.error(f"--tokens: got {args.tokens}, expected 2..{len(data) - 1}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {
        "model": dataclasses.asdict(shape),
        "training": {"seconds": args.train, "loss": None},
        "study": {"tokens": args.tokens, "tokens_a_step": TOKENS, "windows": windows},
    }
    run = StudyRun(args.out, "agreement", facts, device, args.budget)
    named = {f"{kind}, W {window}": (kind, window) for window in windows for kind in kinds}
    if device.type == "cuda":
        problems = {name: problem_of(shape, *which) for name, which in named.items()}
        run.compile({name: (p, config_of(p, 1)) for name, p in problems.items()})

    @functools.cache
    def truth() -> Truth:
        model = Model(shape).to(device)
        if args.train:
            run.facts["training"] = {"seconds": args.train, "loss": train(model, args.train, run.say)}
        return Truth(model.eval(), data[: args.tokens + 1].to(device))

    variants = {name: lambda which=which: truth().of(*which) for name, which in named.items()}
    found = run.run({STANDARD: lambda: truth().standard(), **variants})
    if len(found):
        print(found.to_string(index=False, float_format="%.4g"))
    return run.finish()


if __name__ == "__main__":
    sys.exit(main())
