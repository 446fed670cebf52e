"""Compile every config that a shipped table names, for the table's target: `make compile-shipped`.

Measured tables and estimated ones, each kernel once for its architecture: it must compile, ask for the shared memory
that its config says, and keep nothing in local memory, but for what was measured: there the time has it in it. Needs no
GPU. Kernels go to the disk cache, so that a second run only reads them. `--minutes 10` begins no further kernels after
that time; the order changes with `--seed`, so that several short runs see all of them.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from collections.abc import Sequence, Set

from replayssm_cute import compiler, target
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.tables import files

Item = tuple[Problem, TileConfig, target.Target]
Key = tuple[Problem, TileConfig, str]


class Over(Exception):
    """The time is over."""


def shipped() -> list[Item]:
    """The kernels of all shipped tables, each once for an architecture."""
    found: dict[Key, Item] = {}
    paths = [*files.shipped(), *sorted(files.estimated_folder().glob("*/*.json"))]
    for path in paths:
        table = files.read(path)
        where = target.named(table.manifest.arch)
        for problem, cells in table.entries.items():
            for cell in cells:
                found.setdefault((problem, cell.config, where.arch), (problem, cell.config, where))
    return list(found.values())


def measured() -> set[Key]:
    """Problem, config and architecture of all cells of measured tables."""
    tables = [t for t in map(files.read, files.shipped()) if t.manifest.provenance == "measured"]
    return {(p, c.config, t.manifest.arch) for t in tables for p, cells in t.entries.items() for c in cells}


def complaint(done: compiler.Done, timed: Set[Key] = frozenset()) -> str | None:
    """What is wrong with a compiled kernel, or None; those of `timed` may use local memory."""
    problem, config, where = done.item
    what = f"{problem.label()}, {config.label()}, {where.arch}"
    if done.error or done.resources is None:
        return f"{what}: {(done.error or 'no resources')[-300:]}"
    if done.resources.stack_bytes and (problem, config, where.arch) not in timed:
        return f"{what}: {done.resources.stack_bytes} bytes of local memory a thread"
    if done.resources.shared_bytes != config.shared_bytes(problem):
        return (
            f"{what}: {done.resources.shared_bytes} bytes of shared memory, config says {config.shared_bytes(problem)}"
        )
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Compile them; 1 if one is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: the CPUs)")
    parser.add_argument("--minutes", type=float, default=None, help="begin no further kernels after so many minutes")
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    args = parser.parse_args(argv)
    items, timed = shipped(), measured()
    random.Random(args.seed).shuffle(items)
    begun = time.monotonic()
    bad: list[str] = []

    def look(done: compiler.Done, finished: int, count: int) -> None:
        if text := complaint(done, timed):
            bad.append(text)
        seconds = time.monotonic() - begun
        if finished % 20 == 0 or finished == count or text:
            print(f"{finished} of {count} kernels, {seconds:.0f} s, {len(bad)} wrong", flush=True)
        if args.minutes is not None and seconds > 60 * args.minutes and finished < count:
            raise Over(f"{args.minutes:g} minutes are over: {count - finished} of {count} kernels were left out")

    try:
        compiler.compile_many(items, args.workers, look)
    except Over as over:
        print(over)
    for text in bad:
        print(text, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
