"""The page of a GPU's estimated tables: what the cost model promises of each problem. Made of the tables alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from replayssm_cute import dtypes, tables
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

from .on_paper import NOTE

SHOWN = (1, 4, 16, 64, 256, 512)  # batches that have a column
_DATASHEET = 0.95  # of the datasheet's bandwidth is the read limit of a GPU that was not measured, see `target`


def page_name(target: Target) -> str:
    """The page's file name."""
    return f"{tables.slug(target.name)}.md"


def page(target: Target, found: Sequence[tables.Table]) -> str:
    """The page, as Markdown.

    Args:
        found: the GPU's tables, at least one.
    """
    found = sorted(found, key=lambda t: (str(t.manifest.policy.get("title")), _state_order(t)))
    kernels = ", ".join(sorted({t.manifest.kernel_fingerprint[:12] for t in found}))
    models = ", ".join(sorted({str(t.manifest.policy.get("cost_model")) for t in found}))
    datasheet = target.read_gbs / _DATASHEET
    lines = [
        f"# {target.name} ({target.arch}), estimated",
        f"**Nothing here was measured**: {NOTE}. The kernels were compiled for {target.arch}; registers, spills and "
        f"shared memory are those of the code. What else is assumed: {target.sms} multiprocessors, and a read limit of "
        f"{target.read_gbs:,.0f} GB/s, {_DATASHEET:.0%} of the datasheet's {datasheet / 1e3:g} TB/s. Times without "
        f"programmatic dependent launch. Kernels {kernels}, cost model {models}.",
        "A cell: microseconds of a call, and in brackets the share of the "
        f"{datasheet / 1e3:g} TB/s at which it moves its bytes. A problem, as in `128x64x128/8 f32 T4 W16`: heads x "
        "head_dim x d_state / groups of one tensor-parallel rank, dtype of the state, tokens a call, window. A config "
        "holds from the batch named to that of the next one; what its label means is told in the README, under "
        '"Which kernel, and why".',
    ]
    for title, members in itertools.groupby(found, key=lambda t: str(t.manifest.policy.get("title"))):
        lines.append(f"## {title}")
        for table in members:
            lines += _of_table(table, target.read_gbs / datasheet)
    return "\n\n".join(lines) + "\n"


def _state_order(table: tables.Table) -> int:
    return min(dtypes.STATE.index(p.state_dtype) for p in table.entries)


def _of_table(table: tables.Table, share: float) -> list[str]:
    """One table: what it assumes of acceptance, and a row for each problem."""
    loads = [
        f"{label}: mean {load['mean']:.2f} of {len(load['lengths'])}, {load['flush']:.1%} of rows flush"
        for label, load in table.manifest.acceptance.items()
    ]
    heads = ["problem", *(f"batch {b}" for b in SHOWN), "configs"]
    rows = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for problem, cells in sorted(table.entries.items(), key=lambda item: _order(item[0])):
        known = {c.batch: c for c in cells}
        values = [f"{c.time_us:.1f} ({c.limit_fraction * share:.0%})" if (c := known.get(b)) else "–" for b in SHOWN]
        rows.append("| " + " | ".join([f"`{problem.label()}`", *values, _configs(cells)]) + " |")
    return [f"Acceptance: {'; '.join(loads)}.", "\n".join(rows)]


def _order(problem: Problem) -> tuple[int, int]:
    return -problem.heads, -problem.tokens


def _configs(cells: Sequence[tables.Cell]) -> str:
    """Which config serves from which batch on."""
    runs = itertools.groupby(cells, key=lambda c: c.config)
    return ", ".join(f"{next(run).batch}: `{config.label()}`" for config, run in runs)
