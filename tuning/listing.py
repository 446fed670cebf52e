"""What the command line says about plans: the shipped ones as a table, and one in full."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from . import plan as plans


def shipped(console: Console) -> None:
    """A line a plan; workloads are counted at tensor-parallel size 1."""
    rows = [("plan", "workloads", "tp", "T", "states", "models")]
    for path in sorted(plans.SHIPPED.glob("*.toml"), key=lambda p: p.stem):
        whole, plan = plans.load(str(path), tp=(1,)), plans.load(str(path))
        tokens = sorted({w.problem.tokens for w in whole.workloads})
        states = dict.fromkeys(w.problem.state_dtype for w in whole.workloads)
        rows.append((path.stem, str(len(whole.workloads)), _row(plan.tp), _row(tokens), " ".join(states), whole.title))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        console.print(line.rstrip(), highlight=False, markup=False, soft_wrap=True)


def _row(numbers: Iterable[int]) -> str:
    return " ".join(map(str, numbers))


def explain(console: Console, plan: plans.TuningPlan) -> None:
    """Everything that a sweep of this plan would tune."""
    console.print(f"[bold]{plan.title}[/] ({plan.name})\n{plan.source}", highlight=False, soft_wrap=True)
    console.print(
        f"targets {', '.join(plan.targets)} · batches {', '.join(map(str, plan.batches))} · budget {plan.budget_s:g} s",
        highlight=False,
        soft_wrap=True,
    )
    for w in plan.workloads:
        shares = ", ".join(f"{k}: {100 * s:.1f}%" for k, s in enumerate(w.lengths, 1))
        console.print(
            f"\n[bold]{w.label}[/]  {w.problem.label()}\n"
            f"  acceptance {w.acceptance.name}: lengths {shares}; mean {w.mix.mean_length:.2f}\n"
            f"  {w.acceptance.source}\n"
            f"  stationary mix: {100 * w.mix.flush:.1f}% of rows flush, {w.mix.mean_live:.1f} live rows on average\n"
            f"  {w.problem.bytes_per_slot() / 2**20:.2f} MiB a slot",
            highlight=False,
            soft_wrap=True,
        )
