"""How fast low-precision states are: every kind of state beside f32 at equal W, in one process.

    python -m replayssm_tuning.precision_speed --batches 256 --windows 16,32 --out reports/tune/precision

Needs a GPU. A kind's configs are timed briefly, and the fastest of each then in turns with all others, from CUDA
graphs with a cold L2 as in a sweep. The byte ratio is what the bytes alone would give over f32; `of_bytes` is how much
of it the time gives.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import torch

from replayssm_cute import compiler, target
from replayssm_cute.config import TileConfig
from replayssm_cute.default_rule import default_config, usual_tail
from replayssm_cute.problem import Problem

from . import acceptance, space
from .argument_kinds import sizes
from .command import check_folder, command, usage
from .policy import Policy
from .precision import KINDS, kinds_of
from .slots import Cell, make_cell, slot_sets
from .timing import capture, interleave, launch

PROBLEM = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
POLICY = Policy(max_bytes=12 << 30)


def candidates(problem: Problem, where: target.Target, batch: int) -> list[TileConfig]:
    """A few shapes for large and small batches; more bytes are in flight where states are small."""
    tail = usual_tail(problem, where)
    kept = [
        TileConfig(tiles_per_warp=2),
        TileConfig(tiles_per_warp=2, ctas_per_sm=8),
        TileConfig(2, 1, tail_rows=tail, tiles_per_warp=2),
        TileConfig(2, 1, tail_rows=tail),
        TileConfig(2, 1, tail_rows=tail, ctas_per_sm=4),
        TileConfig(4, 1, tail_rows=tail),
        TileConfig(4, 2, tail_rows=tail, ctas_per_sm=4),
    ]
    spared = [c for config in kept if (c := space.without_b(config, problem, where))]
    found = [default_config(problem, where, batch), *kept, *spared]
    found += space.at_other_level(found)
    return [c for c in dict.fromkeys(found) if c.is_valid(problem, where)]


def cell_of(problem: Problem, batch: int, device: torch.device) -> Cell:
    """The tensors of one problem, uniform acceptance."""
    mix = acceptance.stationary([1 / problem.tokens] * problem.tokens, problem.window)
    l2 = torch.cuda.get_device_properties(device).L2_cache_size
    free = int(torch.cuda.mem_get_info(device)[0] * 0.9)
    return make_cell(problem, batch, mix, POLICY, device, slot_sets(problem, batch, mix, POLICY, l2=l2, free=free))


def measure(kinds: Sequence[str], batch: int, window: int) -> list[dict[str, Any]]:
    """Times of every kind at one batch and window, f32 first."""
    device = torch.device("cuda", torch.cuda.current_device())
    where = target.of_device(device.index)
    problems = {kind: dataclasses.replace(PROBLEM, window=window, **KINDS[kind]) for kind in kinds}
    wanted = [(p, c, where) for p in problems.values() for c in candidates(p, where, batch)]
    compiler.compile_many(wanted)
    field, held = [], []
    facts: list[dict[str, Any]] = []
    for kind, problem in problems.items():
        cell = cell_of(problem, batch, device)
        held.append(cell)
        timed = []
        for config in candidates(problem, where, batch):
            kernel = compiler.get(problem, config, where)
            run = capture(lambda call, kernel=kernel: launch(kernel, call), cell, POLICY)  # type: ignore[misc]
            run.sample(2)
            timed.append((statistics.median(run.sample(3)), config, run))
        _, config, run = min(timed, key=lambda t: t[0])
        field.append(run)
        facts.append({"state": kind, "batch": batch, "window": window, "config": config.label(), "bytes": cell.bytes})
    samples = interleave(field, 5, 3)
    times = [statistics.median(s) for s in samples]
    for fact, us, cell in zip(facts, times, held, strict=True):
        ratio, bytes_ratio = times[0] / us, held[0].bytes / cell.bytes
        fact |= {"us": us, "over_f32": ratio, "byte_ratio": bytes_ratio, "of_bytes": ratio / bytes_ratio}
    return facts


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Time, print and write a CSV."""
    parser = argparse.ArgumentParser(
        prog="python -m replayssm_tuning.precision_speed", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--batches", type=sizes, default="256", help="batch sizes (default 256)")
    parser.add_argument("--windows", type=sizes, default="16", help="windows (default 16)")
    parser.add_argument("--states", default=None, help="kinds of state beside f32, separated by ';' (default: all)")
    parser.add_argument("--out", type=Path, default=Path("reports/tune/precision"), help="folder of the results")
    args = parser.parse_args(argv)
    kinds = kinds_of(parser, args.states)
    with usage():
        for window in args.windows:
            dataclasses.replace(PROBLEM, window=window)
    if not torch.cuda.is_available():
        parser.error("no GPU: nothing can be timed here")
    check_folder("--out", args.out)
    kinds = list(dict.fromkeys(("f32", *kinds)))
    found = []
    for batch in args.batches:
        for window in args.windows:
            found += measure(kinds, batch, window)
            torch.cuda.empty_cache()
            frame = pd.DataFrame(found)  # written as it grows: what a run that is cut off has measured counts
            frame.to_csv(args.out / "precision_speed.csv", index=False, float_format="%.4g")
    print(frame.to_string(index=False, float_format="%.4g"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
