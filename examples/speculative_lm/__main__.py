"""Speculative decoding with a small Mamba2 language model: `python -m examples.speculative_lm --help`.

Trains the model for a while on text that comes with Python, and decodes some requests three ways: one token a step with
the standard update, which rewrites every layer's state each token; one token a step with checkpointing SSU; and with it
again, verifying drafts that are right with probability p. Prints what the drafts were worth, whether all gave the same
tokens, and times: of whole steps, and on a GPU of their CUDA graphs alone, each beside the standard update's.

The standard update is FlashInfer's where it is installed and serves the geometry, else a Triton kernel, on the CPU
torch; the report says which. All else, the conv's rollback too, is the same code for all.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from . import report
from .generate import RightWith, generate
from .model import Model, Shape
from .replay import ReplayDecoder
from .standard import StandardDecoder
from .text import corpus, prompts, train

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPT = 48  # tokens


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    made = argparse.ArgumentParser(
        prog="python -m examples.speculative_lm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    gpu = torch.cuda.is_available()
    made.add_argument("--device", default="cuda" if gpu else "cpu")
    made.add_argument("--dtype", choices=DTYPES, default=None, help="default: bfloat16 on a GPU, float64 on the CPU")
    made.add_argument("--train", type=float, default=20.0, metavar="SECONDS", help="0: random weights")
    made.add_argument("--requests", type=int, default=8)
    made.add_argument("--length", type=int, default=64, help="tokens of the longest request; the shortest has half")
    made.add_argument("--drafts", type=int, default=3)
    made.add_argument("--window", type=int, default=16, help="W of the caches")
    made.add_argument("--p", type=float, nargs="+", default=[0.0, 0.5, 0.8, 1.0], help="chance that a draft is right")
    made.add_argument(
        "--update", choices=["auto", "flashinfer", "triton", "torch"], default="auto", help="standard one"
    )
    made.add_argument("--json", type=Path, metavar="FILE", help="write the report there, and as CSV beside it")
    made.add_argument("--layers", type=int, default=Shape.layers)
    made.add_argument("--width", type=int, default=Shape.width)
    made.add_argument("--heads", type=int, default=Shape.heads)
    made.add_argument("--groups", type=int, default=Shape.groups)
    made.add_argument("--d-state", type=int, default=Shape.d_state, choices=[64, 128, 256])
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = parser().parse_args(argv)
    device = torch.device(args.device)
    if device.type == "cpu":
        torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    shape = Shape(
        width=args.width, layers=args.layers, heads=args.heads, d_state=args.d_state, groups=args.groups
    )  # fmt: skip
    model = Model(shape).to(device)
    parameters, loss = sum(p.numel() for p in model.parameters()), None
    if args.train:
        print(f"training {parameters} parameters for {args.train:.0f} s")
        loss = train(model, args.train)
    dtype = args.dtype or ("bfloat16" if device.type == "cuda" else "float64")
    model = model.to(DTYPES[dtype]).eval()
    given = prompts(corpus(), args.requests, PROMPT, seed=1)
    # Requests end one by one, so that batches shrink and are padded.
    lengths = [max(2, args.length * (args.requests + i + 1) // (2 * args.requests)) for i in range(args.requests)]

    standard = StandardDecoder(model, args.requests, args.update)
    print(f"standard update: {standard.update}")
    truth = generate(standard, given, lengths)
    rows = [report.row("standard", standard, truth, truth)]
    one = ReplayDecoder(model, args.requests, tokens=1, window=args.window)
    rows.append(report.row("replay", one, generate(one, given, lengths), truth))
    decoder = ReplayDecoder(model, args.requests, tokens=args.drafts + 1, window=args.window)
    if device.type == "cuda":
        print(one.coverage, decoder.coverage, sep="\n")
    print(decoder.captured)
    for p in args.p:
        run = generate(decoder, given, lengths, RightWith(truth.tokens, p, shape.vocabulary))
        rows.append(report.row(f"drafts right with {p:.2f}", decoder, run, truth, p))
    print(report.table(rows))
    print(f"(x: beside the standard update; same: of {args.requests} requests, those with its tokens)")
    if args.json is not None:
        facts = {
            "model": {**dataclasses.asdict(shape), "parameters": parameters, "dtype": dtype},
            "training": {"seconds": args.train, "loss": loss},
            "requests": {"count": args.requests, "prompt": PROMPT, "lengths": lengths},
            "window": args.window,
            "buckets": decoder.graphs.buckets,
        }
        print(f"written: {args.json}, {report.write(args.json, rows, device, facts)}")
    text = bytes(truth.tokens[-1]).decode("ascii", "replace")
    print(f"the longest request: {bytes(given[-1].tolist()).decode('ascii')!r} -> {text!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
