"""`python -m replayssm_cute.sm100_check`: self-check the Blackwell step kernel on this GPU, each config by itself.

Every kernel has a process of its own: one that hangs, or takes the CUDA context down with it, costs only itself. The
verdicts are the ones that calls look up, so that a kernel that fails here is left out from then on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from . import plan, selfcheck
from .problem import Problem
from .sm100 import ARCHES, Sm100Config, covers, default_sm100_configs
from .target import Target

SECONDS = 300.0  # for a kernel: compilation, trials, and `selfcheck.HANG_SECONDS` if it hangs
_BASE = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
_CHANGES: tuple[dict[str, Any], ...] = (
    {},
    {"tokens": 1, "index_dtype": "i64"},
    {"tokens": 16, "has_z": True},
    {"pdl": True, "has_z": True},
    {"compact": False},
    {"state_dtype": "bf16", "has_z": True},
    {"state_dtype": "f16", "io_dtype": "f16", "dt_dtype": "f16", "pdl": True},
    {"heads": 24, "head_dim": 128, "d_state": 256, "groups": 1, "index_dtype": None},
    {"heads": 80, "d_state": 64, "groups": 1, "tokens": 2, "window": 7, "d_dtype": None, "dt_bias_dtype": None},
    {"heads": 96, "head_dim": 80},
    {"heads": 96, "head_dim": 80, "state_dtype": "bf16", "ragged": True, "has_z": True, "tokens": 6},
    {"heads": 96, "head_dim": 80, "state_dtype": "f16", "io_dtype": "f16", "dt_dtype": "f16", "pdl": True},
    {"ragged": True, "has_z": True},
    {"ragged": True, "tokens": 12, "window": 40, "state_dtype": "bf16", "pdl": True},
    {"tokens": 32, "window": 64, "state_dtype": "bf16"},
)
PROBLEMS = tuple(dataclasses.replace(_BASE, **change) for change in _CHANGES)


def kernels(problems: Sequence[Problem], target: Target) -> Iterator[tuple[Problem, Sm100Config]]:
    """What is checked: the default rule's configs, and every way to take turns, stages, the ring and the next work."""
    for problem in problems:
        found = list(default_sm100_configs(problem, target))
        shapes = ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2)) if covers(problem) else ()
        found += [
            Sm100Config.of(problem, turns, stages, ring, 1, 2 if turns > 1 and ring == "live" else 0, control)
            for control in (False, True)
            for turns, stages in shapes
            for ring in ("live", "whole")
        ]
        yield from ((problem, c) for c in dict.fromkeys(found) if c.is_valid(problem, target))


def check(problem: Problem, config: Sm100Config, index: int) -> str:
    """A kernel's verdict on CUDA device `index`, in words; "passed" if it may serve.

    Raises:
        RuntimeError: if the kernel took the CUDA context down with it.
    """
    if selfcheck.passed(problem, config, index):
        return "passed"
    verdict = selfcheck.excluded(problem, config, index)
    return "self-checks are off (REPLAYSSM_SELFCHECK=0)" if verdict is None else f"{verdict.outcome}: {verdict.detail}"


def _in_a_process(problem: Problem, config: Sm100Config, index: int) -> str:
    """`check` in a process of its own."""
    one = json.dumps({"problem": problem.to_json(), "config": config.to_json()})
    command = [sys.executable, "-m", "replayssm_cute.sm100_check", "--device", str(index), "--one", one]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"not finished after {SECONDS:.0f} s"
    lines = (done.stdout.strip() or done.stderr.strip() or f"exit status {done.returncode}").splitlines()
    return lines[-1]


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0 if every kernel passed, 1 if not, 2 where none can run."""
    parser = argparse.ArgumentParser(
        prog="python -m replayssm_cute.sm100_check",
        description="Self-check the Blackwell step kernel on this GPU, each config in a process of its own.",
    )
    parser.add_argument("--device", type=int, default=0, metavar="N", help="CUDA device (default: 0)")
    parser.add_argument("--problem", action="append", default=[], metavar="JSON", help="a problem's fields; repeatable")
    parser.add_argument("--one", metavar="JSON", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    try:
        if args.one is not None:
            one = json.loads(args.one)
            problem, config = Problem.from_json(one["problem"]), Sm100Config.from_json(one["config"])
            print(check(problem, config, args.device))
            return 0
        problems = [Problem.from_json(json.loads(text)) for text in args.problem] or PROBLEMS
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:
        parser.error(str(error))
    try:
        target, where = plan.device_target(args.device), selfcheck.gpu(args.device)
    except (AssertionError, RuntimeError) as error:
        print(f"no GPU to check on: {error}")
        return 2
    wanted = list(kernels(problems, target))
    if not wanted:
        print(f"nothing to check: the kernel is for {' and '.join(ARCHES)}, and covers a part of the problems")
        print(f"this is {where}, {target.arch}")
        return 2
    print(f"{len(wanted)} kernels on {where}")
    good = 0
    for number, (problem, config) in enumerate(wanted, 1):
        found = _in_a_process(problem, config, args.device)
        good += found == "passed"
        print(f"[{number}/{len(wanted)}] {problem.label()} {problem.io_dtype}, {config.label()}: {found}", flush=True)
    print(f"{good} of {len(wanted)} passed. {'REPLAYSSM_SM100=1 lets those serve that did.' if good else ''}".strip())
    return 0 if good == len(wanted) else 1


if __name__ == "__main__":
    sys.exit(main())
