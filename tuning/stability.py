"""How far repeated sweeps agree: how often the winner flips, and what a sweep's winner costs where it then serves."""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from replayssm_cute import atomic
from replayssm_cute.config import TileConfig

from .results import CellResult, Results

STABILITY_SUFFIX = ".stability.json"
GOAL = 0.01  # of the regret, at every cell


@dataclass(frozen=True, slots=True)
class CellStability:
    """One cell over all repeats.

    Attributes:
        label, problem, batch: the cell.
        winners: label of each repeat's winner.
        flip_rate: share of the pairs of repeats whose winners differ: how likely two sweeps disagree.
        regrets: of each repeat's winner: its time in the other repeats over the best config's there, minus 1, both
            medians over those repeats; None where some other repeat did not time it.
    """

    label: str
    problem: str
    batch: int
    winners: tuple[str, ...]
    flip_rate: float
    regrets: tuple[float | None, ...]

    @property
    def known_regrets(self) -> list[float]:
        """Those that could be told."""
        return [r for r in self.regrets if r is not None]

    @property
    def worst(self) -> float | None:
        """The largest known regret."""
        return max(self.known_regrets, default=None)


@dataclass(frozen=True, slots=True)
class Stability:
    """All cells of one GPU that at least two repeats decided."""

    repeats: int
    kernel_fingerprint: str
    cells: tuple[CellStability, ...]

    @classmethod
    def of(cls, repeats: Sequence[Results]) -> Stability:
        """Compare repeats of one sweep.

        Raises:
            ValueError: for fewer than two.
        """
        if len(repeats) < 2:
            raise ValueError(f"repeats: got {len(repeats)}, expected at least 2")
        by_cell: dict[tuple[str, int], list[tuple[CellResult, float]]] = {}
        for results in repeats:
            for cell in results.cells:
                by_cell.setdefault((cell.label, cell.batch), []).append((cell, results.margin))
        found = [_compare(cells) for cells in by_cell.values() if len(cells) > 1]
        return cls(len(repeats), repeats[0].manifest.kernel_fingerprint, tuple(found))

    def summary(self) -> str:
        """One line."""
        if not self.cells:
            return f"{self.repeats} repeats: no cell was decided twice"
        flips = statistics.mean(c.flip_rate for c in self.cells)
        flipping = sum(c.flip_rate > 0 for c in self.cells)
        text = (
            f"{self.repeats} repeats: two sweeps choose differently in {flips:.1%} of cells on average "
            f"({flipping} of {len(self.cells)} cells ever flip)"
        )
        known = [r for c in self.cells for r in c.known_regrets]
        if not known:
            return f"{text}; no winner was timed in the other repeats"
        over = sum((c.worst or 0.0) > GOAL for c in self.cells)
        return (
            f"{text}; regret of a winner at serving {statistics.mean(known):.2%} on average, {max(known):.2%} at "
            f"worst; {over} cells exceed {GOAL:.0%}"
        )

    def save(self, path: Path) -> None:
        """Write as JSON, at once."""
        atomic.write_text(path, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Stability:
        """Read what `save` wrote.

        Raises:
            ValueError: if the file is not that, naming it.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            data.pop("historical", None)  # a mark on results that are kept for the record
            cells = tuple(
                CellStability(**{**c, "winners": tuple(c["winners"]), "regrets": tuple(c["regrets"])})
                for c in data["cells"]
            )
            return cls(**{**data, "cells": cells})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f"{path}: no stability of a sweep ({type(e).__name__}: {e})") from e


def _compare(cells: Sequence[tuple[CellResult, float]]) -> CellStability:
    """One cell in the repeats that decided it."""
    decided = [(cell, winner) for cell, margin in cells if (winner := cell.decide(margin)) is not None]
    winners = [w.config for _, w in decided]
    # not those with one brief measurement: the luckiest of many such would look like the best
    times = [{c.config: c.time_us for c in cell.compared if c.time_us is not None} for cell, _ in decided]
    pairs = list(itertools.combinations(winners, 2))
    first = cells[0][0]
    return CellStability(
        label=first.label,
        problem=first.problem.label(),
        batch=first.batch,
        winners=tuple(w.label() for w in winners),
        flip_rate=sum(a != b for a, b in pairs) / max(len(pairs), 1),
        regrets=tuple(_regret(winners[i], [t for j, t in enumerate(times) if j != i]) for i in range(len(winners))),
    )


def _regret(winner: TileConfig, others: Sequence[dict[TileConfig, float]]) -> float | None:
    """The winner's median time in the other repeats over the lowest median of any config that all of them timed."""
    if not others or any(winner not in times for times in others):
        return None
    everywhere = set.intersection(*(set(times) for times in others))
    medians = {config: statistics.median(times[config] for times in others) for config in everywhere}
    return medians[winner] / min(medians.values()) - 1
