"""The command line of `python -m replayssm_cute.compiler`: fill a kernel cache for a target, without a GPU."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from . import compiler
from .cache import CacheSpec, recipes
from .config import TileConfig
from .default_rule import default_config, default_configs
from .problem import Problem
from .sm100 import config_from_json
from .target import named


def _parse_problems(texts: Sequence[str], files: Sequence[str]) -> list[tuple[Problem, list[TileConfig]]]:
    """Problems (and their configs, if named) of --problem texts and --plan files.

    A plan file is JSON: a list of {"problem": {...}, "configs": [{...}, ...]}, configs optional, or a tuned table.
    """
    wanted: list[tuple[Problem, list[TileConfig]]] = []
    for text in texts:
        wanted.append((Problem.from_json(json.loads(text)), []))
    for file in files:
        data = json.loads(Path(file).read_text())
        if isinstance(data, dict) and "entries" in data:
            from .tables import Table

            table = Table.from_json(data)
            wanted += [(p, list(dict.fromkeys(c.config for c in cells))) for p, cells in table.entries.items()]
            continue
        if not isinstance(data, list):
            raise ValueError(f"--plan {file}: got a {type(data).__name__}, expected a list or a table")
        for one in data:
            configs = [config_from_json(c) for c in one.get("configs", [])]
            wanted.append((Problem.from_json(one["problem"]), configs))
    return wanted


def _cache_spec(text: str) -> CacheSpec:
    data = json.loads(text)
    known = {f.name for f in dataclasses.fields(CacheSpec)}
    if not isinstance(data, dict) or set(data) - known:
        raise ValueError(f"--cache: got {text}, expected an object with fields of {', '.join(sorted(known))}")
    return CacheSpec(**{"layers": 1, **data})


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m replayssm_cute.compiler", description="Fill the kernel cache for a target, without a GPU."
    )
    parser.add_argument(
        "--target", action="append", required=True, help="GPU or architecture: b300, sm_103a; repeatable"
    )
    parser.add_argument("--problem", action="append", default=[], metavar="JSON", help="a problem's fields; repeatable")
    parser.add_argument("--plan", action="append", default=[], metavar="FILE", help="JSON list of problems, or a table")
    parser.add_argument(
        "--cache", action="append", default=[], metavar="JSON", help="a CacheSpec's fields: a cache's own kernels"
    )
    parser.add_argument("--config", action="append", default=[], metavar="JSON", help="configs for every problem")
    parser.add_argument("--batch", action="append", type=int, default=[], help="batches whose default config is wanted")
    parser.add_argument("--workers", type=int, default=None, help="processes (default: CPUs)")
    args = parser.parse_args(argv)
    try:
        wanted = _parse_problems(args.problem, args.plan)
        forced = [config_from_json(json.loads(text)) for text in args.config]
        targets = [named(name) for name in args.target]
        caches = [_cache_spec(text) for text in args.cache]
    except (ValueError, TypeError, KeyError, AttributeError, OSError, NotImplementedError) as error:
        parser.error(str(error))
    if not wanted and not caches:
        parser.error("nothing to compile: give --problem, --plan or --cache")
    items: list[compiler.Item] = []
    for target in targets:
        for problem, configs in wanted:
            chosen = configs + forced
            if not chosen:
                # Both sides of the default rule, unless the batches are named.
                chosen = [default_config(problem, target, b) for b in args.batch] or default_configs(problem, target)
            items += [(problem, config, target) for config in dict.fromkeys(chosen)]

    def report(done: compiler.Done, count: int, total: int) -> None:
        problem, config, target = done.item
        outcome = f"FAILED: {done.error}" if done.error else f"{done.source}, {done.seconds:.1f} s"
        print(f"[{count}/{total}] {target.arch} {problem.label()} {config.label()}: {outcome}", flush=True)

    results = compiler.compile_many(items, args.workers, report)
    failed = sum(r.error is not None for r in results)
    total = len(results)
    for target in targets:  # few and small: not worth a process each
        for recipe in dict.fromkeys(recipe for spec in caches for recipe in recipes.all_of(spec)):
            total += 1
            try:
                compiler.entry_of(recipe, target)
                print(f"{target.arch} {recipe.label()}", flush=True)
            except Exception as error:  # a failing kernel must cost only itself
                failed += 1
                print(f"{target.arch} {recipe.label()}: FAILED: {type(error).__name__}: {error}", flush=True)
    print(f"{total - failed} of {total} kernels are in {compiler.cache_dir()}")
    return 1 if failed else 0
