"""Times of the fused decode step and of its parts: `python -m replayssm_tuning.layer_bench`.

For each number of tokens and batch size, in interleaved rounds on one cell (cold L2, rotating slots, the stationary mix
of uniform acceptance): the conv, the SSU step and the norm alone; the three in a row; and the same with programmatic
dependent launch (PDL), where each starts while the one before ends, without and with the conv starting on its
predecessor too; and the last two with the conv of x in the step. Every number is microseconds a call in a CUDA graph.
`--search` also looks for a faster chain (see `layer_search`) and times what it found; `--cuts` times the chain with
other cuts of the conv and the norm, and these alone, beside those that the rule takes. Kernels are compiled before they
are timed, in `--jobs` processes; `--compile-for h200` only does this, on a machine without a GPU. `--out` is written
anew after every cell, and holds those that are done. Of a `--budget` each cell gets an equal share of what is left, for
its search; when it is over no other cell is begun.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from replayssm_cute import atomic, calls, compiler, dtypes, fingerprint, plan, resources
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import launches, shapes
from replayssm_cute.fused.chains import Chain, Overlap
from replayssm_cute.fused.problem import LayerCall, LayerProblem
from replayssm_cute.fused.recipes import LayerRecipe
from replayssm_cute.fused.shapes import ConvShape, NormShape
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target, named

from . import acceptance, layer_search
from .argument_kinds import count, duration, gpu
from .command import check_file, command, usage
from .kernel_pool import KernelPool
from .manifest import commit
from .policy import Policy
from .slots import Cell, make_cell, slot_sets
from .timing import Timed, capture, interleave, summary

BATCHES, TOKENS = (1, 4, 16, 64, 256), (1, 4)
PARTS = ("conv", "step", "norm")
# (channels of a thread, threads, batch rows of a thread) and (warps, tokens of a CTA)
CONV_CUTS = (
    (2, 64, 1), (2, 128, 1), (4, 64, 1), (4, 128, 1), (8, 64, 1), (8, 128, 1), (8, 256, 1),
    (4, 128, 2), (8, 128, 2), (4, 128, 4),
)  # fmt: skip
SEARCH_ROUNDS, SEARCH_REPLAYS = 4, 2
NORM_CUTS = ((1, 1), (2, 1), (4, 1), (4, 2), (2, 4), (4, 4))


def layer_problem(tokens: int, window: int, state_dtype: str) -> LayerProblem:
    """Nemotron-3 Super's layer: 128 heads of 64 by 128, 8 groups."""
    step = Problem(128, 64, 128, 8, tokens, window, state_dtype=state_dtype)
    return LayerProblem(step, "bf16", "bf16", "bf16", 8)


def layer_calls(problem: LayerProblem, cell: Cell, seed: int) -> list[LayerCall]:
    """A decode step on each of a cell's slot sets: its caches, projections and a conv ring of their own."""
    first = cell.calls[0]
    device, io = first.state.device, first.x.dtype
    gen = torch.Generator(device).manual_seed(seed)
    p, sets = problem.step, len(cell.calls)

    def normal(*shape: int, kind: str | None = None) -> torch.Tensor:
        t = torch.empty(shape, dtype=io if kind is None else dtypes.TORCH[kind], device=device)
        return t.normal_(generator=gen)

    projected = normal(sets, cell.batch, p.tokens, problem.width)
    conv_cache = normal(first.state.shape[0], p.ring_rows, problem.channels)
    weight = normal(problem.channels, 4, kind=problem.conv_dtype).mul_(0.5)
    bias = None if problem.conv_bias_dtype is None else normal(problem.channels, kind=problem.conv_bias_dtype)
    norm_weight = normal(problem.d_inner, kind=problem.norm_dtype)
    scratch = normal(cell.batch, p.tokens, problem.channels)  # one for all layers, as an engine has it

    def per_head(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else t[:, 0].contiguous()

    made = []
    for i, call in enumerate(cell.calls):
        projected[i, ..., -p.heads :] = call.dt[..., 0]
        made.append(
            LayerCall(
                projected=projected[i],
                state=call.state,
                x_cache=call.x_cache,
                B_cache=call.B_cache,
                dt_cache=call.dt_cache,
                conv_cache=conv_cache,
                ring_start=call.ring_start,
                prev_num_accepted_tokens=call.prev_num_accepted_tokens,
                conv_weight=weight,
                conv_bias=bias,
                A=call.A[:, 0, 0].contiguous(),
                D=per_head(call.D),
                dt_bias=per_head(call.dt_bias),
                norm_weight=norm_weight,
                out=call.out.flatten(-2),
                state_batch_indices=call.state_batch_indices,
                scratch=scratch,
            )
        )
    return made


def conv_bytes(problem: LayerProblem, batch: int) -> int:
    """Bytes that a conv has to move: tokens in, out and into the ring, three rows from it, weights once."""
    p = problem.step
    rows = batch * (3 * p.tokens + 3)
    return dtypes.BYTES[p.io_dtype] * problem.channels * rows + 4 * problem.channels * dtypes.BYTES[problem.conv_dtype]


def norm_bytes(problem: LayerProblem, batch: int) -> int:
    """Bytes that a norm has to move: y in and out, z in."""
    return 3 * batch * problem.step.tokens * problem.d_inner * dtypes.BYTES[problem.step.io_dtype]


def kernels(
    problem: LayerProblem, batch: int, target: Target, cuts: bool, search: bool = False
) -> list[compiler.Recipe]:
    """Every kernel that a cell's entrants launch, and what a search for it is likely to."""
    config = layer_search.step_config(problem, batch, target)
    found: list[compiler.Recipe] = []
    for pdl in (False, True):
        step = dataclasses.replace(problem, step=dataclasses.replace(problem.step, pdl=pdl))
        found.append(compiler.StepRecipe(step.step, config))
        found.append(LayerRecipe(shapes.norm_shape(problem, chained=pdl)))
    found.append(LayerRecipe(shapes.step_shape(step, config)))
    for kind in Overlap:
        how = {"chained": kind.chained, "pdl": kind.first, "with_x": not kind.x_in_step}
        found += [LayerRecipe(s) for s in shapes.conv_shapes(problem, **how)]
    if search:
        found += layer_search.likely(problem, batch, target)
    if cuts:
        found += [LayerRecipe(shape) for shape in conv_cuts(problem, batch).values()]
        for shape in norm_cuts(problem).values():
            found += [LayerRecipe(dataclasses.replace(shape, pdl=pdl)) for pdl in (True, False)]
    return found


def conv_cuts(problem: LayerProblem, batch: int) -> dict[str, ConvShape]:
    """Other cuts of the conv, by name."""
    base = shapes.conv_shape(problem, batch, chained=True, pdl=False)
    return {
        f"conv {v} x {t}{f', {r} rows' if r > 1 else ''}": dataclasses.replace(base, vector=v, threads=t, rows=r)
        for v, t, r in CONV_CUTS
    }


def norm_cuts(problem: LayerProblem) -> dict[str, NormShape]:
    """Other cuts of the norm, by name."""
    base = shapes.norm_shape(problem, chained=True)
    return {
        f"norm {w} warps{f', {n} tokens' if n > 1 else ''}": dataclasses.replace(base, warps=w, together=n)
        for w, n in NORM_CUTS
        if base.tokens % n == 0
    }


class Bench:
    """Measures cells on the current device."""

    def __init__(self, policy: Policy, cuts: bool, search: bool, pool: KernelPool, target: Target) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self.policy, self.cuts, self.search, self.pool, self.target = policy, cuts, search, pool, target

    def plan_of(self, problem: LayerProblem, batch: int, overlap: Overlap | Chain, **cuts: Any) -> launches.LayerPlan:
        """The step's config is the one that a call without PDL gets, so that the chains differ in nothing else."""
        if isinstance(overlap, Chain):
            return launches.make(problem, batch, self.device.index, config=overlap.config, overlap=overlap, **cuts)
        config = layer_search.step_config(problem, batch, self.target)
        return launches.make(problem, batch, self.device.index, config=config, overlap=overlap, **cuts)

    def entrants(self, problem: LayerProblem, batch: int) -> Iterator[tuple[str, launches.LayerPlan, int | None]]:
        """(name, plan, which of its three launches alone; None all)."""
        plain = self.plan_of(problem, batch, Overlap.NONE)
        for k, name in enumerate(PARTS):
            yield name, plain, k
        yield Overlap.NONE, plain, None
        for kind in list(Overlap)[1:]:
            yield kind, self.plan_of(problem, batch, kind), None
        if not self.cuts:
            return
        for name, conv in conv_cuts(problem, batch).items():
            made = self.plan_of(problem, batch, Overlap.INNER, conv=conv)
            yield f"{Overlap.INNER}, {name}", made, None
            yield name, made, 0
        for name, norm in norm_cuts(problem).items():
            made = self.plan_of(problem, batch, Overlap.INNER, norm=norm)
            yield f"{Overlap.INNER}, {name}", made, None
            alone = launches.ready(LayerRecipe(dataclasses.replace(norm, pdl=False)), self.device.index)
            yield name, dataclasses.replace(made, norm=alone), 2

    def cell(self, problem: LayerProblem, batch: int, until: float = math.inf) -> dict[str, Any]:
        """Times of all entrants on one cell.

        Args:
            until: of `time.perf_counter`: when a search ends with what it has.
        """
        mix = acceptance.stationary([1 / problem.step.tokens] * problem.step.tokens, problem.step.window)
        free = torch.cuda.mem_get_info(self.device)[0]
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        sets = slot_sets(problem.step, batch, mix, self.policy, l2=l2, free=free // 2)
        cell = make_cell(problem.step, batch, mix, self.policy, self.device, sets)
        made = layer_calls(problem, cell, self.policy.seed)
        of = {id(call): own for call, own in zip(cell.calls, made, strict=True)}
        found: dict[str, Chain] = {}
        searched = False  # to the end
        if self.search:
            known: dict[Chain, Timed] = {}

            def race(field: Sequence[Chain]) -> Mapping[Chain, float]:
                name = f"T {problem.step.tokens}, batch {batch}"
                self.pool.fill((k for c in field for k in layer_search.recipes(problem, c, batch)), name)
                for chain in field:
                    if chain not in known:
                        known[chain] = self._captured(cell, of, self.plan_of(problem, batch, chain), None)
                return self._race(name, {c: known[c] for c in field})

            def over() -> bool:
                return time.perf_counter() > until

            chains = layer_search.search(problem, batch, self.target, race, over)
            searched = not over()
            found = dict(zip(("plain", "promised"), chains, strict=True))
        names, field = [], []
        for name, chain in found.items():
            field.append(self._captured(cell, of, self.plan_of(problem, batch, chain), None))
            names.append(f"found, {name}")
        for name, made_plan, only in self.entrants(problem, batch):
            field.append(self._captured(cell, of, made_plan, only))
            names.append(name)
        samples = interleave(field, self.policy.race_rounds, self.policy.race_replays)
        times = {name: summary(s) for name, s in zip(names, samples, strict=True)}
        for name, bytes_ in (("conv", conv_bytes(problem, batch)), ("norm", norm_bytes(problem, batch))):
            times[name]["gb_s"] = bytes_ / times[name]["time_us"] / 1e3
        config = layer_search.step_config(problem, batch, self.target)
        return {
            "tokens": problem.step.tokens,
            "batch": batch,
            "sets": sets,
            "flush": cell.flush,
            "config": config.label(),
            "step": config.to_json(),
            "times": times,
            **({"found": {n: c.to_json() for n, c in found.items()}, "searched": searched} if found else {}),
        }

    def _race(self, cell: str, field: Mapping[Chain, Timed]) -> Mapping[Chain, float]:
        """Short interleaved times of some chains, printed as they come."""
        samples = interleave(list(field.values()), SEARCH_ROUNDS, SEARCH_REPLAYS)
        times = {c: summary(s)["time_us"] for c, s in zip(field, samples, strict=True)}
        for chain, time_us in times.items():
            print(f"  {cell}: {time_us:8.2f}  {chain.label()}", flush=True)
        return times

    def _captured(self, cell: Cell, of: dict[int, LayerCall], made: launches.LayerPlan, only: int | None) -> Timed:
        parts = {key: made.parts(own) for key, own in of.items()}

        def run(call: calls.Call) -> None:
            every = parts[id(call)]
            for kernel, arguments in every if only is None else every[only : only + 1]:
                kernel(*arguments)

        return capture(run, cell, self.policy, writes_outputs=only is None)


def table(cells: Sequence[dict[str, Any]]) -> str:
    """The times as text, a cell a line."""
    columns: list[str] = [*PARTS, *Overlap]
    lines = ["  T batch  " + "  ".join(f"{c:>12}" for c in (*columns, "step's config"))]
    for cell in cells:
        row = [f"{cell['times'][c]['time_us']:12.2f}".rjust(max(12, len(c))) for c in columns]
        lines.append(f"{cell['tokens']:3} {cell['batch']:5}  " + "  ".join([*row, cell["config"]]))
        for name, chain in cell.get("found", {}).items():
            lines.append(f"           {name}: {Chain.from_json(chain).label()}")
        if more := [f"{n}: {t['time_us']:.2f}" for n, t in cell["times"].items() if n not in columns]:
            lines.append("           " + "; ".join(more))
    return "\n".join(lines)


def machine_code(
    problems: Sequence[LayerProblem], batches: Sequence[int], target: Target, cells: Sequence[Mapping[str, Any]] = ()
) -> dict[str, str]:
    """Name -> SHA-256 (first 16 digits) of the machine code of each kernel that chains launch beside the plain step's.

    Sources may change around code that stays: times belong to the code.

    Args:
        cells: results of `Bench.cell`: which config steps that convolve x had, and what a search found.
    """
    found: dict[str, compiler.Recipe] = {}
    for problem in problems:
        for batch in batches:
            for kind in Overlap:
                how = {"chained": kind.chained, "pdl": kind.first, "with_x": not kind.x_in_step}
                conv = shapes.conv_shape(problem, batch, **how)
                found[f"conv T {conv.tokens} {conv.vector} x {conv.threads}, {kind}"] = LayerRecipe(conv)
                norm = shapes.norm_shape(problem, chained=kind.chained)
                name = f"norm T {norm.tokens}, {Overlap.INNER if norm.pdl else Overlap.NONE}"
                found[name] = LayerRecipe(norm)
    by_tokens = {problem.step.tokens: problem for problem in problems}
    for cell in cells:
        problem, batch = by_tokens[cell["tokens"]], cell["batch"]
        step = dataclasses.replace(problem, step=dataclasses.replace(problem.step, pdl=True))
        config = TileConfig.from_json(cell["step"])
        found[f"step T {cell['tokens']} {config.label()}"] = LayerRecipe(shapes.step_shape(step, config))
        for chain in map(Chain.from_json, cell.get("found", {}).values()):
            for recipe in layer_search.recipes(problem, chain, batch):
                if isinstance(recipe, LayerRecipe):
                    found[f"{recipe.kind} T {cell['tokens']}, batch {batch}, {chain.label()}"] = recipe
    return {name: _code(recipe, target) for name, recipe in found.items()}


def _code(recipe: compiler.Recipe, target: Target) -> str:
    code = resources.code(resources.cubin(compiler.entry_of(recipe, target).object_bytes()))
    return hashlib.sha256(code).hexdigest()[:16]


def facts(bench: Bench, problems: Sequence[LayerProblem], cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the times of some cells belong to."""
    step = problems[0].step
    done = [p for p in problems if any(c["tokens"] == p.step.tokens for c in cells)]
    batches = sorted({c["batch"] for c in cells})
    return {
        "gpu": bench.target.name,
        "arch": bench.target.arch,
        "commit": commit(),
        "kernel_fingerprint": fingerprint.kernels(),
        "layer_kernel_fingerprint": fingerprint.kernels("fused"),
        "machine_code": machine_code(done, batches, bench.target, cells),
        "toolchain": fingerprint.toolchain(),
        "torch": torch.__version__,
        "window": step.window,
        "state": step.state_dtype,
        "policy": bench.policy.to_json(),
    }


@command
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0; 1 without a GPU; 2 for wrong usage; 3 if the budget ended it."""
    parser = argparse.ArgumentParser(prog="python -m replayssm_tuning.layer_bench", description=__doc__)
    parser.add_argument("--batches", type=count, nargs="+", default=list(BATCHES), metavar="N")
    parser.add_argument("--tokens", type=count, nargs="+", default=list(TOKENS), metavar="T")
    parser.add_argument("--window", type=count, default=16, metavar="W")
    parser.add_argument("--state", choices=dtypes.STATE, default="f32")
    parser.add_argument("--cuts", action="store_true", help="also other cuts of the conv and the norm")
    parser.add_argument("--rows", type=count, default=Policy().min_rows, metavar="N", help="a rotation's at least")
    parser.add_argument("--search", action="store_true", help="also look for a faster chain")
    parser.add_argument("--budget", type=duration, default=math.inf, metavar="TIME", help="of a search, such as 90s")
    parser.add_argument("--jobs", type=count, metavar="N", help="processes that compile; default: one a CPU")
    parser.add_argument("--compile-for", type=gpu, metavar="GPU", help="compile the kernels for it, and time nothing")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the times as JSON")
    args = parser.parse_args(argv)
    with usage():
        problems = [layer_problem(tokens, args.window, args.state) for tokens in args.tokens]
    if args.out is not None:
        check_file("--out", args.out)
    begun = time.perf_counter()
    if args.compile_for is None and not torch.cuda.is_available():
        print("no CUDA GPU available to torch: nothing to time", file=sys.stderr)
        return 1
    where = plan.device_target(torch.cuda.current_device()) if args.compile_for is None else named(args.compile_for)
    wanted = list(
        dict.fromkeys(k for p in problems for b in args.batches for k in kernels(p, b, where, args.cuts, args.search))
    )
    with KernelPool(where, args.jobs, lambda line: print(line, flush=True)) as pool:
        pool.fill(wanted, "before the first cell")
        if args.compile_for is not None:
            print(f"{len(wanted)} kernels for {where.name} are in {compiler.cache_dir()}")
            return 0
        bench = Bench(Policy(min_rows=args.rows), args.cuts, args.search, pool, where)
        cells: list[dict[str, Any]] = []
        todo = [(problem, batch) for problem in problems for batch in args.batches]
        for number, (problem, batch) in enumerate(todo):
            now = time.perf_counter()
            left = begun + args.budget - now
            if left <= 0:
                print(f"the budget is over: {len(todo) - number} cells are left out", file=sys.stderr)
                break
            cells.append(bench.cell(problem, batch, now + left / (len(todo) - number)))
            torch.cuda.empty_cache()
            if args.out is not None:
                found = facts(bench, problems, cells) | {"cells": cells}
                atomic.write_text(args.out, json.dumps(found, indent=1) + "\n")
            took = time.perf_counter() - now
            print(f"T {problem.step.tokens}, batch {batch} done in {took:.1f} s", file=sys.stderr, flush=True)
        print(f"{pool.compiled} kernels were compiled; all took {time.perf_counter() - begun:.0f} s")
    print(table(cells))
    return 0 if len(cells) == len(todo) else 3


if __name__ == "__main__":
    sys.exit(main())
