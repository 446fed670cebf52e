"""The candidates of a sweep: in which order they are tried, and their compilation."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from replayssm_cute import compiler, fingerprint
from replayssm_cute.config import TileConfig
from replayssm_cute.target import Target

from . import cost, space
from .context import Context
from .plan import Workload
from .progress import Steps
from .sound import sound

SPLIT = TileConfig(head_split=2)  # often the fastest of the smallest batches
NEAR = (1.05, 1.15)  # modelled time over the fastest: about one and two errors of the model


def ranked(
    workload: Workload, target: Target, batches: Iterable[int], *, within: float = 0.0, timed: bool = False
) -> list[TileConfig]:
    """The configs of a workload, the ones to try first in front.

    The batches' defaults come first. Then, if they will be timed, the same and `SPLIT` at ptxas's other level, and
    those of the Blackwell kernel, of both of which the model knows nothing. Then those that the model thinks near the
    fastest of some batch, then the less near, then the rest (see `NEAR`); within each, one of each family (heads a CTA
    and at a time, head split, tiles a warp, ring, cap, tail) per round, so that a model that errs about a family costs
    one round and not the sweep.

    Args:
        within: leave out those whose modelled time is beyond so many times the fastest at every batch; 0 keeps all.
        timed: whether a GPU will decide between them, and not the model.
    """
    batches = tuple(batches)
    best: dict[TileConfig, float] = {}
    for batch in batches:
        times = guessed(workload, target, batch)
        fastest = min(times.values(), default=1.0)
        for config, time_us in times.items():
            best[config] = min(best.get(config, float("inf")), time_us / fastest)
    if within:
        best = {c: ratio for c, ratio in best.items() if ratio <= within or ratio == float("inf")}
    order = sorted(best, key=lambda c: (best[c], *c.to_json().values()))
    rounds: dict[tuple[object, ...], int] = {}
    turn = {}
    for config in order:
        family = (
            *(config.heads_per_cta, config.head_split, config.parallel_heads, config.tiles_per_warp, config.ring),
            *(config.ctas_per_sm > 1, config.tail_rows > 0),
        )
        turn[config] = rounds[family] = rounds.get(family, 0) + 1
    first = space.defaults(workload.problem, target, list(batches))
    rest = sorted(
        (c for c in order if c not in first), key=lambda c: (sum(best[c] > n for n in NEAR), turn[c], best[c])
    )
    if not timed:
        return [*first, *rest]
    levels = space.at_other_level(dict.fromkeys((*first, SPLIT)))
    levels = [c for c in levels if c.is_valid(workload.problem, target) and c not in first]
    unknown = space.blackwell(workload.problem, target)
    return [*first, *levels, *unknown, *(c for c in rest if c not in levels)]


def guessed(workload: Workload, target: Target, batch: int) -> dict[TileConfig, float]:
    """The modelled microseconds of every config, with the resources that kernels usually ask for."""
    times = {}
    for config in space.configs(workload.problem, target):
        guess = cost.guess(workload.problem, config)
        try:
            load = cost.load(workload.problem, config, target, batch, workload.mix, guess)
            times[config] = cost.time_us(load, cost.fitted())
        except ValueError:
            times[config] = float("inf")  # fits nowhere with guessed registers: last, not lost
    return times


class _OutOfTime(Exception):
    """Leaves `compile_many`: its workers end with the item in hand."""


def compile_all(
    ctx: Context, items: list[compiler.Item], *, reserve_s: float, need_code: bool
) -> dict[compiler.Item, dict[str, Any]]:
    """Bring items into the disk cache, in the given order, until the budget has only `reserve_s` left.

    Ranks share them out; each returns what all of them have reached.

    Args:
        need_code: the code itself is wanted; otherwise what the journal knows of it is enough.

    Returns:
        For each item that was reached: its resources as JSON, or {"failed": reason}. Journalled one by one.
    """
    shares = ctx.gather("compilation", lambda: _compile(ctx, ctx.ranks.share(items), reserve_s, need_code))
    found = {item: result for share in shares for item, result in share.items()}
    return {item: found[item] for item in items if item in found}


def _compile(
    ctx: Context, items: list[compiler.Item], reserve_s: float, need_code: bool
) -> dict[compiler.Item, dict[str, Any]]:
    """`compile_all` of this rank's share."""
    results: dict[compiler.Item, dict[str, Any]] = {}

    def key(item: compiler.Item) -> dict[str, Any]:
        problem, config, target = item
        return {
            "kind": "compile",
            "problem": problem.to_json(),
            "config": config.to_json(),
            "arch": target.arch,
            "kernels": compiler.StepRecipe(problem, config).sources(),
            **{k: fingerprint.toolchain()[k] for k in ("dsl", "tvm_ffi")},
        }

    todo = []
    for item in items:
        found = ctx.known(key(item))
        if found is not None and not sound("compile", found, {}):
            found = None  # compiled again, or found in the disk cache
        if found is not None and ("failed" in found or not need_code):
            results[item] = found
        else:
            todo.append(item)

    with Steps(ctx.console, "compile", len(items), ctx.budget) as steps:
        steps.step("from the journal", len(results))

        def finished(done: compiler.Done, count: int, total: int) -> None:
            result = resources_of(done)
            if results.get(done.item) != result:
                results[done.item] = result
                if done.error is None or done.lasting:  # what the machine is to blame for is tried again by a rerun
                    ctx.journal.add(key(done.item), result)
            problem, config, target = done.item
            steps.step(f"{target.arch} {problem.label()} {config.label()}")
            if done.source == "compiled" and ctx.budget.left < reserve_s:
                raise _OutOfTime

        try:
            if todo and ctx.budget.left > reserve_s:
                compiler.compile_many(todo, ctx.workers, finished)
        except _OutOfTime:
            pass
        except KeyboardInterrupt:  # a compile process, which gets the terminal's Ctrl-C too
            if not ctx.budget.ended:
                raise
    return results


def resources_of(done: compiler.Done) -> dict[str, Any]:
    """What a compiled kernel asks for, as JSON; {"failed": reason} if it did not compile."""
    if done.error:
        return {"failed": done.error}
    found = done.resources.to_json() if done.resources is not None else {}
    found.pop("kernel", None)  # the symbol is long and says nothing here
    return found
