"""How good the cost model is, where a GPU has been measured: rank correlation, and the regret of its first pick."""

from __future__ import annotations

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from replayssm_cute import target as targets

from . import cost
from .acceptance import stationary
from .results import Results

GOAL_MEDIAN, GOAL_WORST = 0.10, 0.25  # of the regret of its first pick, over all measured cells


def judge(results: Results) -> pd.DataFrame:
    """One row a cell of measured results: candidates, Spearman's rank correlation, pick, its regret.

    The model is asked as it would be without a GPU: with the compiled kernels' resources and the catalogue's target.
    Empty for estimated results, and for a GPU that the catalogue does not know.
    """
    try:
        target = targets.named(results.manifest.arch)
    except ValueError:
        return pd.DataFrame()
    if not results.measured:
        return pd.DataFrame()
    rows = []
    for cell in results.cells:
        load = results.manifest.acceptance.get(cell.label, {})
        if "lengths" not in load:
            continue
        mix = stationary(load["lengths"], cell.problem.window, load.get("tokens"))
        pairs = []
        for c in cell.candidates:
            if c.time_us is None or c.facts.get("registers") is None:
                continue
            known = cost.Guess(c.facts["registers"], c.facts["shared_bytes"], c.facts["stack_bytes"])
            try:
                modelled = cost.estimate(cell.problem, c.config, target, cell.batch, mix, known).time_us
            except ValueError:
                continue
            pairs.append((c.config.label(), modelled, c.time_us))
        if len(pairs) < 3:
            continue
        frame = pd.DataFrame(pairs, columns=["config", "modelled_us", "measured_us"])
        pick = frame.loc[frame["modelled_us"].idxmin()]
        rows.append(
            {
                "workload": cell.label,
                "batch": cell.batch,
                "candidates": len(frame),
                "rank_correlation": frame["modelled_us"].rank().corr(frame["measured_us"].rank()),
                "pick": pick["config"],
                "modelled_us": pick["modelled_us"],
                "measured_us": pick["measured_us"],
                "regret": pick["measured_us"] / frame["measured_us"].min() - 1,
            }
        )
    return pd.DataFrame(rows)
