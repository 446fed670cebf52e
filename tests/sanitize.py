"""compute-sanitizer over the kernels: `make sanitize`, or `python tests/sanitize.py --help`.

Small problems of every kind (dense and ragged, short and long windows, each state, 8-bit and stochastic ones, read
copies, turns, tails, pairs, splits, gaps),
and every operation of a cache, run under memcheck, racecheck, synccheck and initcheck. Kernels are compiled before, so
that the tools see launches alone; every tensor has an allocation of its own, so that what lies beside one is nobody's.
Exits with 0 only if every tool ran every launch, found nothing, and the numbers were right.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from replayssm_cute.calls import Call
    from replayssm_cute.config import TileConfig
    from replayssm_cute.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
ALL_RAN = "every launch ran"  # the last line of a process that is sanitized
_SUMMARY = {
    "memcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "racecheck": re.compile(r"RACECHECK SUMMARY: (\d+) hazard"),
    "synccheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
    "initcheck": re.compile(r"ERROR SUMMARY: (\d+) error"),
}
_DEVICE = "cuda"
_FOUND_CODE = 86  # of a process in which a tool found something
_INJECTED = "libInterceptorInjectionTarget.so"
_MISSING = (
    "compute-sanitizer: not found; it comes with the CUDA toolkit, and by `pip install nvidia-cuda-sanitizer-api`. "
    "Looked at $COMPUTE_SANITIZER, on PATH, in $CUDA_HOME, /usr/local/cuda and this environment's nvidia packages."
)


def find_tool() -> Path | None:
    """Where compute-sanitizer is, or None."""
    if named := os.environ.get("COMPUTE_SANITIZER"):
        return Path(named) if os.access(named, os.X_OK) else None
    if on_path := shutil.which("compute-sanitizer"):
        return Path(on_path)
    homes = [Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")]
    homes += [p for entry in (sysconfig.get_path("purelib"), *sys.path) for p in Path(entry).glob("nvidia/*")]
    for home in homes:
        for inside in ("bin/compute-sanitizer", "compute-sanitizer/compute-sanitizer"):
            if os.access(home / inside, os.X_OK):
                return home / inside
    return None


def verdict(tool: str, code: int, output: str) -> str | None:
    """Why a tool's run is no success, or None. A tool that counted nothing, or did not see the end, has not passed."""
    counts = [int(n) for n in _SUMMARY[tool].findall(output)]
    if not counts:
        return f"{tool}: no summary in its output (exit code {code})"
    if any(counts):
        return f"{tool}: {max(counts)} found"
    if ALL_RAN not in output:
        return f"{tool}: the launches did not all run (exit code {code})"
    return None if code == 0 else f"{tool}: exit code {code}"


def run_tool(sanitizer: Path, tool: str, launch: Sequence[str], timeout_s: float) -> str | None:
    """Run the launches under one tool, showing its output; why it failed, or None."""
    command = [str(sanitizer), "--tool", tool, "--error-exitcode", str(_FOUND_CODE), "--print-limit", "20"]
    if tool == "memcheck":
        command += ["--report-api-errors", "no"]  # torch asks drivers for what they may not have
    # Every tensor an allocation of its own: a reach beyond one's end is not into another's.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "REPLAYSSM_SELFCHECK": "0"}
    # The wheel's own libraries do not find each other.
    beside = [d for d in (sanitizer.parent, sanitizer.parent.parent / "lib") if (d / _INJECTED).exists()]
    paths = [*map(str, beside), *os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)]
    environment["LD_LIBRARY_PATH"] = os.pathsep.join(p for p in paths if p)
    begin = time.monotonic()
    try:
        done = subprocess.run(
            [*command, *launch], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        print(_text(error.stdout)[-4000:])
        return f"{tool}: not done after {timeout_s:.0f} s"
    failure = verdict(tool, done.returncode, done.stdout)
    lines = done.stdout.splitlines()
    shown = lines if failure else [line for line in lines if "SUMMARY" in line]
    end = f"{tool}: {'FAILED' if failure else 'clean'} after {time.monotonic() - begin:.1f} s"
    print("\n".join([*shown, end]), flush=True)  # at once: other tools print too
    return failure


def _text(output: str | bytes | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


# ---------------------------------------------------------------------------------------------------
# What runs under the tools
# ---------------------------------------------------------------------------------------------------


def step_cases() -> dict[str, tuple[Problem, TileConfig, Callable[[], Call]]]:
    """name -> (problem, config, call on the CPU): the simulator's cases."""
    from low_precision_cases import CASES as LOW_PRECISION
    from simulated_cases import CASES, RAGGED, ragged_call

    found: dict[str, tuple[Problem, TileConfig, Callable[[], Call]]] = {}
    for name, (problem, config) in {**CASES, **RAGGED, **LOW_PRECISION}.items():
        make = functools.partial(ragged_call, problem) if problem.ragged else functools.partial(_dense, problem)
        found[name] = (problem, config, make)
    return found


def _dense(problem: Problem) -> Call:
    from simulated_cases import example_call

    return example_call(problem)[0]


def compile_all(chosen: Sequence[str]) -> None:
    """Compile what `launch_all` will load."""
    import torch
    from test_cache_gpu import SPEC

    from replayssm_cute import compiler, target
    from replayssm_cute.cache import recipes

    where = target.of_device(torch.cuda.current_device())
    items = [(p, c, where) for name, (p, c, _) in step_cases().items() if name in chosen]
    for done in compiler.compile_many(items):
        if done.error:
            raise SystemExit(f"{done.item[0].label()} {done.item[1].label()}: {done.error}")
    for recipe in recipes.all_of(SPEC):
        compiler.entry_of(recipe, where)


def results_of(call: Call) -> dict[str, Any]:
    """What a step writes, as bytes on the host."""
    import torch

    named = {
        n: getattr(call, n) for n in ("out", "state", "x_cache", "B_cache", "dt_cache", "state_scale", "state_copy")
    }
    return {n: t.contiguous().view(torch.uint8).cpu() for n, t in named.items() if t is not None}


def launch_all(chosen: Sequence[str], *, keep: Path | None = None, known: Path | None = None) -> None:
    """Every launch once. Steps' numbers are held to the reference on the host, and kept in a file if so asked; or,
    under a tool that makes the host slow, they have to be those of such a file bit for bit.
    """
    import torch
    from test_cache_gpu import BATCH, OPERATIONS, assert_alike, filled, values

    from replayssm_cute import compare, compiler, plan, target

    where = target.of_device(torch.cuda.current_device())
    compiler.reset_counters()
    expected = {} if known is None else torch.load(known)
    done: dict[str, dict[str, Any]] = {}
    for name, (problem, config, make) in step_cases().items():
        if name not in chosen:
            continue
        before = make()
        after = before.to(_DEVICE)
        kernel = compiler.get(problem, config, where)
        kernel(*plan.kernel_args(after))
        torch.cuda.synchronize()
        done[name] = results_of(after)
        if known is not None:
            print(f"launched: {name}", flush=True)
            if wrong := [n for n, t in done[name].items() if not torch.equal(t, expected[name][n])]:
                raise SystemExit(f"{name}: {', '.join(wrong)}: other bits than without a tool")
            continue
        found = compare.errors(before, after.to("cpu"))
        if violation := compare.bounds(problem).violation(found):
            raise SystemExit(f"{name}: {violation}")
    if keep is not None:
        torch.save(done, keep)
    for name, operation in OPERATIONS.items():
        cache, model = filled(_DEVICE), filled("cpu")
        operation(cache, values(BATCH - 2, _DEVICE, 2))
        torch.cuda.synchronize()
        operation(model, values(BATCH - 2, "cpu", 2))
        assert_alike(cache, model, name)
    if compiler.counters().compiled:
        raise SystemExit(f"{compiler.counters().compiled} kernels were compiled here, expected all of them before")
    print(ALL_RAN, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Compile, then run every tool; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/sanitize.py", description=__doc__.split("\n")[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"some of {','.join(TOOLS)}")
    parser.add_argument("--only", default="", metavar="TEXT", help="only steps whose name has this text in it")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds a tool may take (300)")
    parser.add_argument("--no-tool", action="store_true", help="run the launches without a tool: are they right at all")
    parser.add_argument("--launch", type=Path, metavar="FILE", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    tools = [t for t in args.tools.split(",") if t]
    if not tools:
        parser.error(f"--tools: got none, expected some of {', '.join(TOOLS)}")
    if unknown := sorted(set(tools) - set(TOOLS)):
        parser.error(f"--tools: got {', '.join(unknown)}, expected some of {', '.join(TOOLS)}")
    chosen = [name for name in step_cases() if args.only in name]
    if not chosen:
        parser.error(f"--only: no step has {args.only!r} in its name; there are {', '.join(step_cases())}")
    import torch

    if not torch.cuda.is_available():
        print("sanitize: no CUDA GPU available to torch", file=sys.stderr)
        return 1
    if args.launch:
        torch.set_num_threads(2)  # several tools run beside each other
        launch_all(chosen, known=args.launch)
        return 0
    sanitizer = find_tool()
    if sanitizer is None and not args.no_tool:
        print(_MISSING, file=sys.stderr)
        return 1
    begin = time.monotonic()
    compile_all(chosen)
    print(f"{len(chosen)} steps and the cache's kernels are compiled, {time.monotonic() - begin:.1f} s", flush=True)
    if args.no_tool or sanitizer is None:
        launch_all(chosen)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        known = Path(folder) / "known.pt"
        launch_all(chosen, keep=known)
        print(f"their numbers are right, {time.monotonic() - begin:.1f} s", flush=True)
        launch = [sys.executable, str(Path(__file__).resolve()), "--launch", str(known), "--only", args.only]
        with concurrent.futures.ThreadPoolExecutor(len(tools)) as pool:  # most of a tool's time is the host's
            ran = pool.map(lambda tool: run_tool(sanitizer, tool, launch, args.timeout), tools)
            failures = [failure for failure in ran if failure]
    for failure in failures:
        print(f"sanitize: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
