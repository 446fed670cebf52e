"""Comparing two tables or results of sweeps: which cells became slower, which faster, which changed their config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from replayssm_cute import tables
from replayssm_cute.problem import Problem

from .results import Results

SLOWER, FASTER, SAME, GONE, NEW = "SLOWER", "faster", "same", "gone", "new"
_SHOWN = {SLOWER: "bold red", FASTER: "green", SAME: "dim", GONE: "yellow", NEW: "cyan"}


@dataclass(frozen=True, slots=True)
class Cell:
    """What one side says of a cell: the winner, its time, and the default rule's."""

    config: str
    time_us: float
    default_us: float | None


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two files."""

    path: Path
    manifest: tables.Manifest
    cells: Mapping[tuple[Problem, int], Cell]

    @classmethod
    def read(cls, path: Path) -> Side:
        """A table's file, or the results of a sweep.

        Raises:
            ValueError: if it is neither, naming it.
        """
        try:
            found: tables.Table = tables.read(path)
        except tables.TableError as no_table:
            if path.name.endswith(".table.json"):
                raise ValueError(f"{path}: {no_table}") from None
            try:
                found = Results.load(path).table()
            except ValueError as no_results:
                raise ValueError(f"{path}: no table ({no_table}), and no results of a sweep ({no_results})") from None
        return cls(path, found.manifest, cls.read_cells(found))

    @staticmethod
    def read_cells(table: tables.Table) -> dict[tuple[Problem, int], Cell]:
        """The cells of a table."""
        return {
            (problem, c.batch): Cell(c.config.label(), c.time_us, c.default_us)
            for problem, cells in table.entries.items()
            for c in cells
        }


@dataclass(frozen=True, slots=True)
class Change:
    """One cell on both sides.

    Attributes:
        problem, batch: the cell.
        old, new: what the sides say; None where a side does not have it.
        ratio: new time over old; None where a side lacks one.
        kind: "SLOWER", "faster", "same" (within the margin), "gone" or "new".
    """

    problem: Problem
    batch: int
    old: Cell | None
    new: Cell | None
    ratio: float | None
    kind: str

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        sides = {
            name: None if cell is None else {"config": cell.config, "time_us": cell.time_us}
            for name, cell in (("a", self.old), ("b", self.new))
        }
        what = {"problem": self.problem.label(), "batch": self.batch}
        return {**what, **sides, "ratio": self.ratio, "change": self.kind}


@dataclass(frozen=True, slots=True)
class Diff:
    """Both files and every cell of either, the slower ones first."""

    old: Side
    new: Side
    margin: float
    changes: tuple[Change, ...]

    @classmethod
    def of(cls, old: Side, new: Side, margin: float) -> Diff:
        """Compare cell by cell.

        Args:
            margin: times within this share of each other count as the same.
        """
        changes = []
        for problem, batch in {**old.cells, **new.cells}:
            a, b = old.cells.get((problem, batch)), new.cells.get((problem, batch))
            ratio = b.time_us / a.time_us if a is not None and b is not None and a.time_us > 0 else None
            if a is None or b is None:
                kind = NEW if a is None else GONE
            elif ratio is None:
                kind = SAME if b.time_us == a.time_us else SLOWER
            else:
                kind = SLOWER if ratio > 1 + margin else FASTER if ratio < 1 / (1 + margin) else SAME
            changes.append(Change(problem, batch, a, b, ratio, kind))
        order = list(_SHOWN)
        changes.sort(key=lambda c: (order.index(c.kind), -(c.ratio or 0.0), c.problem.label(), c.batch))
        return cls(old, new, margin, tuple(changes))

    def counts(self) -> dict[str, int]:
        """Cells of each kind."""
        return {kind: sum(c.kind == kind for c in self.changes) for kind in _SHOWN}

    @property
    def worst(self) -> float | None:
        """The largest ratio of new to old."""
        return max((c.ratio for c in self.changes if c.ratio is not None), default=None)

    def mean(self) -> float | None:
        """Geometric mean of new over old, over the cells that both have."""
        ratios = [c.ratio for c in self.changes if c.ratio is not None]
        if not ratios or min(ratios) <= 0:
            return None
        product = 1.0
        for ratio in ratios:
            product *= ratio ** (1 / len(ratios))
        return product

    def differences(self) -> list[str]:
        """In what else the files differ, so that their times may differ for another reason than a config."""
        a, b = self.old.manifest, self.new.manifest
        pairs: list[tuple[str, Any, Any]] = [
            ("GPU", f"{a.gpu_name} ({a.arch})", f"{b.gpu_name} ({b.arch})"),
            ("provenance", a.provenance, b.provenance),
            ("kernels", a.kernel_fingerprint[:12], b.kernel_fingerprint[:12]),
            ("driver", a.driver, b.driver),
        ]
        pairs += [(name, a.versions.get(name), b.versions.get(name)) for name in sorted({*a.versions, *b.versions})]
        skip = {"commit", "spent_s", "budget_s", "limit", "ranks"}
        names = sorted({*a.policy, *b.policy} - skip)
        pairs += [(f"policy {name}", a.policy.get(name), b.policy.get(name)) for name in names]
        lengths = [_lengths(side.manifest) for side in (self.old, self.new)]
        for problem in sorted(lengths[0].keys() & lengths[1].keys()):
            pairs.append((f"acceptance lengths of {problem}", lengths[0][problem], lengths[1][problem]))
        return [f"{name}: {_said(x)} in A, {_said(y)} in B" for name, x, y in pairs if x != y]

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return {
            "a": str(self.old.path),
            "b": str(self.new.path),
            "margin": self.margin,
            "counts": self.counts(),
            "mean_ratio": self.mean(),
            "worst_ratio": self.worst,
            "differences": self.differences(),
            "cells": [c.to_json() for c in self.changes],
        }

    def show(self, console: Console) -> None:
        """Print what differs, then every cell, the slower ones first, then a line that sums it up."""
        for side, name in ((self.old, "A"), (self.new, "B")):
            m = side.manifest
            console.print(
                f"{name}: {side.path}  {m.gpu_name} ({m.arch}), {m.provenance}, {len(side.cells)} cells, "
                f"kernels {m.kernel_fingerprint[:12]}, {m.date[:10]}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )
        for line in self.differences():
            console.print(f"  differs in {line}", highlight=False, markup=False, soft_wrap=True)
        table = Table(box=None, pad_edge=False)
        for name in ("problem", "batch", "A µs", "B µs", "B / A", "", "config"):
            table.add_column(name, justify="left" if name in ("problem", "", "config") else "right", no_wrap=True)
        for c in self.changes:
            times = ["–" if cell is None else f"{cell.time_us:.2f}" for cell in (c.old, c.new)]
            ratio = "–" if c.ratio is None else f"{c.ratio:.3f}"
            configs = dict.fromkeys(cell.config for cell in (c.old, c.new) if cell is not None)
            table.add_row(
                c.problem.label(), str(c.batch), *times, ratio, Text(c.kind, _SHOWN[c.kind]), " -> ".join(configs)
            )
        console.print(table, soft_wrap=True)
        console.print(self.summary(), highlight=False, markup=False, soft_wrap=True)

    def summary(self) -> str:
        """One line."""
        counts = ", ".join(f"{n} {kind}" for kind, n in self.counts().items() if n)
        text = f"{len(self.changes)} cells: {counts or 'none'}; the same means within {self.margin:.1%}"
        mean, worst = self.mean(), self.worst
        return text if mean is None else f"{text}; B / A {mean:.3f} in the geometric mean, {worst:.3f} at worst"


def _lengths(manifest: tables.Manifest) -> dict[str, tuple[Any, ...]]:
    """Acceptance lengths by problem; what is not as a sweep writes it is left out."""
    return {
        str(entry["problem"]): (*entry["lengths"], *entry.get("tokens", ()))
        for entry in manifest.acceptance.values()
        if isinstance(entry, dict) and isinstance(entry.get("lengths"), list) and "problem" in entry
    }


def _said(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
