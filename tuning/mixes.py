"""How a winner depends on acceptance: the same cells under other mixes, raced or by the cost model.

A plan tunes for one distribution of acceptance lengths. Serving meets others: a domain whose drafts are rejected, one
whose drafts all pass. They change how many rows flush and how full the rings are, and with them, perhaps, which config
is fastest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from replayssm_cute import target as targets
from replayssm_cute.config import TileConfig
from replayssm_cute.target import Target

from . import cost
from .acceptance import Mix, stationary
from .results import CellResult, Results

COLUMNS = ("workload", "problem", "batch", "mix", "flush", "mean_live", "config", "config_us", "best", "best_us")


def others(tokens: int) -> dict[str, tuple[float, ...]]:
    """Acceptance lengths at both ends and in the middle, by name; none for T = 1, which has one mix only."""
    if tokens == 1:
        return {}
    nothing = (0.0,) * (tokens - 1)
    return {
        "all drafts rejected": (1.0, *nothing),
        "uniform": (1.0 / tokens,) * tokens,
        "all drafts accepted": (*nothing, 1.0),
    }


def measured(results: Results) -> pd.DataFrame:
    """One row a cell and mix that was raced (`sweep --mixes`): the cell's winner there, beside the fastest there."""
    rows = []
    for cell in results.cells:
        winner = cell.decide(results.margin)
        for entry in cell.mixes if winner is not None else ():
            times = {c["label"]: c["time_us"] for c in entry["configs"]}
            if winner is None or winner.config.label() not in times:
                continue
            mix = stationary(entry["lengths"], cell.problem.window, _tokens(results, cell))
            rows.append(_row(cell, entry["name"], mix, winner.config.label(), times))
    return pd.DataFrame(rows, columns=[*COLUMNS, "over_best"])


def modelled(results: Results) -> pd.DataFrame:
    """The same by the cost model, for its own first pick under the plan's mix; empty for a GPU that it does not know.

    Not of the measured winner: how far the model misjudges that one says nothing about acceptance.
    """
    try:
        target = targets.named(results.manifest.arch)
    except ValueError:
        return pd.DataFrame(columns=[*COLUMNS, "over_best"])
    rows = []
    for cell in results.cells:
        lengths = results.manifest.acceptance.get(cell.label, {}).get("lengths")
        if lengths is None or cell.problem.tokens == 1:
            continue
        tokens = _tokens(results, cell)
        own = _times(cell, target, stationary(lengths, cell.problem.window, tokens))
        if len(own) < 2:
            continue
        pick = min(own, key=lambda c: own[c])
        for name, theirs in others(cell.problem.tokens).items():
            mix = stationary(theirs, cell.problem.window, tokens)
            times = {c.label(): t for c, t in _times(cell, target, mix).items()}
            if pick.label() in times:
                rows.append(_row(cell, name, mix, pick.label(), times))
    return pd.DataFrame(rows, columns=[*COLUMNS, "over_best"])


def _tokens(results: Results, cell: CellResult) -> Sequence[float] | None:
    """P(a row has 1..T new tokens) of a cell of ragged rows."""
    found: Sequence[float] | None = results.manifest.acceptance.get(cell.label, {}).get("tokens")
    return found


def _times(cell: CellResult, target: Target, mix: Mix) -> dict[TileConfig, float]:
    found = {}
    for c in cell.candidates:
        if c.time_us is None or c.facts.get("registers") is None:
            continue
        known = cost.Guess(c.facts["registers"], c.facts["shared_bytes"], c.facts["stack_bytes"])
        try:
            found[c.config] = cost.estimate(cell.problem, c.config, target, cell.batch, mix, known).time_us
        except ValueError:
            continue
    return found


def _row(cell: CellResult, name: str, mix: Mix, config: str, times: dict[str, float]) -> dict[str, Any]:
    best = min(times, key=lambda label: times[label])
    return {
        "workload": cell.label,
        "problem": cell.problem.label(),
        "batch": cell.batch,
        "mix": name,
        "flush": mix.flush,
        "mean_live": mix.mean_live,
        "config": config,
        "config_us": times[config],
        "best": best,
        "best_us": times[best],
        "over_best": times[config] / times[best],
    }


def shown(table: pd.DataFrame) -> pd.DataFrame:
    """One row a cell, one column a mix: the config's time over the best, and the best where it is another one."""
    rows = []
    for (_, batch), part in table.groupby(["problem", "batch"], sort=False):
        first = part.iloc[0]
        row: dict[str, Any] = {"workload": first["workload"], "batch": batch, "config": first["config"]}
        for entry in part.itertuples():
            same = entry.best == entry.config
            row[f"{entry.mix}"] = f"{entry.over_best:.3f}x" + ("" if same else f" ({entry.best})")
        rows.append(row)
    return pd.DataFrame(rows).fillna("–")


def summary(table: pd.DataFrame) -> str:
    """One sentence."""
    over = table["over_best"] - 1
    changed = int((table["best"] != table["config"]).sum())
    worst = table.loc[over.idxmax()]
    where = f"{worst['workload']}, batch {worst['batch']}, {worst['mix']}"
    text = f"another config is faster in {changed} of {len(table)} pairs of a cell and a mix"
    if changed:
        text += f", by {over.max():.1%} at most ({where}), {over.median():.1%} in the median"
    return text
