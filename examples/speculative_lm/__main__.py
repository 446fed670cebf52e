"""Speculative decoding with a small Mamba2 language model: `python -m examples.speculative_lm --help`.

Trains the model for a while on text that comes with Python, decodes some requests one token a step, and again with
drafts that are right with probability p. Says whether both gave the same tokens, and what the drafts were worth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence

import torch

from .decoder import Decoder
from .generate import Generated, RightWith, generate
from .model import Model, Shape
from .text import corpus, prompts, train

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def describe(what: str, run: Generated) -> str:
    """A line about a run."""
    tokens = sum(map(len, run.tokens))
    # Steps of fewer rows come at the end, when requests have finished.
    return (
        f"{what}: {tokens} tokens in {run.steps} steps, {run.accepted:.2f} a window, "
        f"{tokens / run.seconds:.0f} tokens/s, step {statistics.median(run.step_ms):.2f} ms (median)"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.speculative_lm",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    gpu = torch.cuda.is_available()
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default=None, help="default: bfloat16 on a GPU, float64 on the CPU")
    parser.add_argument("--train", type=float, default=20.0, metavar="SECONDS", help="0: random weights")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--length", type=int, default=64, help="tokens of the longest request")
    parser.add_argument("--drafts", type=int, default=3)
    parser.add_argument("--p", type=float, nargs="+", default=[0.0, 0.5, 0.8, 1.0], help="chance that a draft is right")
    parser.add_argument("--layers", type=int, default=Shape.layers)
    parser.add_argument("--width", type=int, default=Shape.width)
    parser.add_argument("--heads", type=int, default=Shape.heads)
    parser.add_argument("--d-state", type=int, default=Shape.d_state, choices=[64, 128, 256])
    args = parser.parse_args(argv)

    if args.device == "cpu":
        torch.set_num_threads(1)  # the tensors are small: threads would only wait for each other
    shape = Shape(width=args.width, layers=args.layers, heads=args.heads, d_state=args.d_state)
    model = Model(shape).to(args.device)
    if args.train:
        print(f"training {sum(p.numel() for p in model.parameters())} parameters for {args.train:.0f} s")
        train(model, args.train)
    model = model.to(DTYPES[args.dtype or ("bfloat16" if args.device.startswith("cuda") else "float64")]).eval()
    given = prompts(corpus(), args.requests, 48, seed=1)
    lengths = [max(2, args.length * (i + 1) // args.requests) for i in range(args.requests)]

    plain_decoder = Decoder(model, args.requests, tokens=1)
    print(plain_decoder.captured)
    plain = generate(plain_decoder, given, lengths)
    print(describe("plain", plain))
    decoder = Decoder(model, args.requests, tokens=args.drafts + 1)
    if args.device.startswith("cuda"):
        print(decoder.coverage)
    print(decoder.captured)
    for p in args.p:
        run = generate(decoder, given, lengths, RightWith(plain.tokens, p, shape.vocabulary))
        same = sum(a == b for a, b in zip(run.tokens, plain.tokens, strict=True))
        print(
            f"{describe(f'drafts right with {p:.2f}', run)}; {same} of {len(lengths)} requests as plain decoding gave"
        )
    text = bytes(plain.tokens[-1]).decode("ascii", "replace")
    print(f"the longest request: {bytes(given[-1].tolist()).decode('ascii')!r} -> {text!r}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
