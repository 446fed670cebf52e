"""What the command line says about plans and sweeps: as text, and as JSON-like data for `--json`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from replayssm_cute import tables

from . import plan as plans


def shipped_data() -> list[dict[str, Any]]:
    """The shipped plans; workloads are counted at tensor-parallel size 1."""
    found = []
    for path in sorted(plans.SHIPPED.glob("*.toml"), key=lambda p: p.stem):
        whole, plan = plans.load(str(path), tp=(1,)), plans.load(str(path))
        found.append(
            {
                "plan": path.stem,
                "workloads": len(whole.workloads),
                "tp": list(plan.tp),
                "tokens": sorted({w.problem.tokens for w in whole.workloads}),
                "states": list(dict.fromkeys(w.problem.state_dtype for w in whole.workloads)),
                "models": whole.title,
            }
        )
    return found


def shipped(console: Console) -> None:
    """A line a plan."""
    rows = [("plan", "workloads", "tp", "T", "states", "models")]
    for plan in shipped_data():
        numbers = (str(plan["workloads"]), _row(plan["tp"]), _row(plan["tokens"]))
        rows.append((plan["plan"], *numbers, " ".join(plan["states"]), plan["models"]))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.print(line.rstrip(), highlight=False, markup=False, soft_wrap=True)


def _row(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def explain(console: Console, plan: plans.TuningPlan) -> None:
    """Everything that a sweep of this plan would tune."""
    head = f"[bold]{escape(plan.title)}[/] ({escape(plan.name)})\n{escape(plan.source)}"
    console.print(head, highlight=False, soft_wrap=True)
    console.print(
        f"targets {', '.join(plan.targets)} · batches {', '.join(map(str, plan.batches))} · budget {plan.budget_s:g} s",
        highlight=False,
        soft_wrap=True,
    )
    for w in plan.workloads:
        shares = ", ".join(f"{k}: {100 * s:.1f}%" for k, s in enumerate(w.lengths, 1))
        console.print(
            f"\n[bold]{escape(w.label)}[/]  {w.problem.label()}\n"
            f"  acceptance {escape(w.acceptance.name)}: lengths {shares}; mean {w.mix.mean_length:.2f}\n"
            f"  {escape(w.acceptance.source)}\n"
            f"  stationary mix: {100 * w.mix.flush:.1f}% of rows flush, {w.mix.mean_live:.1f} live rows on average\n"
            f"{_rows_text(w)}"
            f"  {w.problem.bytes_per_slot() / 2**20:.2f} MiB a slot",
            highlight=False,
            soft_wrap=True,
        )


def _rows_text(w: plans.Workload) -> str:
    """A line on ragged rows' tokens; empty where all have T."""
    if w.rows is None or w.tokens is None:
        return ""
    shares = ", ".join(f"{k}: {100 * s:.1f}%" for k, s in enumerate(w.tokens, 1))
    return (
        f"  rows {escape(w.rows.name)}: new tokens {shares}; mean {w.mix.mean_tokens:.2f}\n  {escape(w.rows.source)}\n"
    )


def explain_data(plan: plans.TuningPlan) -> dict[str, Any]:
    """`explain` as data; each workload's pnat shares are those of 0, 1, ..., W live rows."""
    return {
        "plan": plan.name,
        "title": plan.title,
        "source": plan.source,
        "targets": list(plan.targets),
        "batches": list(plan.batches),
        "budget_s": plan.budget_s,
        "workloads": [
            {
                "label": w.label,
                "problem": w.problem.to_json(),
                "acceptance": w.acceptance.name,
                "acceptance_source": w.acceptance.source,
                "lengths": list(w.lengths),
                "tokens": list(w.mix.tokens),
                "mean_length": w.mix.mean_length,
                "flush": w.mix.flush,
                "mean_live": w.mix.mean_live,
                "pnat": list(w.mix.pnat),
                "slot_bytes": w.problem.bytes_per_slot(),
            }
            for w in plan.workloads
        ],
    }


def swept_data(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The tables that a sweep wrote, with their winners."""
    found = []
    for path in paths:
        table = tables.read(path)
        m = table.manifest
        cells = [
            {
                "problem": problem.label(),
                "batch": c.batch,
                "config": c.config.to_json(),
                "label": c.config.label(),
                "time_us": c.time_us,
                "default_us": c.default_us,
                "limit_fraction": c.limit_fraction,
                "peers": dict(c.peers),
            }
            for problem, cells in table.entries.items()
            for c in cells
        ]
        gpu = {"gpu": m.gpu_name, "arch": m.arch, "provenance": m.provenance, "kernels": m.kernel_fingerprint}
        found.append({"table": str(path), **gpu, "cells": cells})
    return found
