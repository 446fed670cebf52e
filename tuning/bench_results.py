"""What the peers command found: the time of every entrant in every cell, and what its options measured beside.

Entrants are this project ("ours"), the peers as `peers` names them, each at its default and at the best of its
variants, and the floor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replayssm_cute import atomic, tables
from replayssm_cute.problem import Problem

from .results import plain

OURS, FLOOR = "ours", "floor"
DEFAULT, BEST = " default", " best"  # what follows a peer's name


@dataclass(frozen=True, slots=True)
class BenchCell:
    """One (problem, batch).

    Attributes:
        label: of the workload.
        bytes: that one call moves.
        flush: share of rows that flush, as apportioned.
        sets: slot sets in rotation.
        config: of ours: its label, where it comes from ("table", "default", ...) and why.
        times: of each entrant: time_us (median), spread, samples, and the variant in words.
        variants: first measurements of every variant of the peers; those that fail say why.
    """

    label: str
    problem: Problem
    batch: int
    bytes: int
    flush: float
    sets: int
    config: Mapping[str, str]
    times: Mapping[str, Mapping[str, Any]]
    variants: tuple[Mapping[str, Any], ...] = ()

    def time_us(self, entrant: str) -> float | None:
        """Median microseconds a call of an entrant, None where it did not run."""
        found = self.times.get(entrant)
        return None if found is None else float(found["time_us"])

    def over(self, entrant: str) -> float | None:
        """An entrant's time over ours: above 1, ours is faster."""
        ours, other = self.time_us(OURS), self.time_us(entrant)
        return None if ours is None or other is None else other / ours


@dataclass(frozen=True, slots=True)
class Bench:
    """All of one run on one GPU.

    Attributes:
        plan, title, source: of the plan.
        manifest: GPU, versions, kernel fingerprint, policy, acceptance.
        read_gbs, read_gbs_method: the streaming limit that the floor is completed with, measured in this run.
        notes: what a reader must know.
        cells: by workload and batch.
        evolved, host, pdl: rows of the options of these names; see `evolve`, `host_time` and `pdl`.
    """

    plan: str
    title: str
    source: str
    manifest: tables.Manifest
    read_gbs: float
    read_gbs_method: str
    notes: tuple[str, ...] = ()
    cells: tuple[BenchCell, ...] = ()
    evolved: tuple[Mapping[str, Any], ...] = ()
    host: tuple[Mapping[str, Any], ...] = ()
    pdl: tuple[Mapping[str, Any], ...] = field(default=())

    def entrants(self) -> list[str]:
        """Names of the entrants that some cell has a time of: ours, the peers by name, the floor."""
        found = {name for cell in self.cells for name in cell.times}
        return [OURS, *sorted(found - {OURS, FLOOR}), *([FLOOR] if FLOOR in found else [])]

    def save(self, path: Path) -> None:
        """Write as JSON, at once."""
        atomic.write_text(path, json.dumps(plain(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Bench:
        """Read what `save` wrote.

        Raises:
            ValueError: if the file is not that, naming it.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            data.pop("historical", None)  # a mark on results that are kept for the record
            cells = tuple(
                BenchCell(**{**c, "problem": Problem.from_json(c["problem"]), "variants": tuple(c["variants"])})
                for c in data["cells"]
            )
            rows = {name: tuple(data[name]) for name in ("notes", "evolved", "host", "pdl")}
            found = cls(**{**data, **rows, "manifest": tables.Manifest.from_json(data["manifest"]), "cells": cells})
            for cell in cells:
                for entrant in cell.times:
                    cell.over(entrant)
            return found
        except (OSError, *_ODD) as e:
            raise ValueError(f"{path}: no results of the peers command ({type(e).__name__}: {e})") from e


# What a file of another layout raises.
_ODD = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    NotImplementedError,
    ArithmeticError,
    RecursionError,
)


def finalists(variants: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Which variants race: of each peer its default, and the fastest of all, under the names of entrants.

    A peer with one variant enters once, under its own name. One whose variants all failed does not enter.
    """
    by_peer: dict[str, list[Mapping[str, Any]]] = {}
    for variant in variants:
        by_peer.setdefault(variant["peer"], []).append(variant)
    found: dict[str, Mapping[str, Any]] = {}
    for peer, all_of_it in by_peer.items():
        timed = [v for v in all_of_it if v.get("time_us") is not None]
        if not timed:
            continue
        best = min(timed, key=lambda v: v["time_us"])
        if len(all_of_it) == 1:
            found[peer] = best
            continue
        default = next((v for v in timed if v["default"]), None)
        if default is not None:
            found[peer + DEFAULT] = default
        found[peer + BEST] = best
    return found


def peer_of(entrant: str) -> str:
    """The peer of an entrant's name."""
    return entrant.removesuffix(DEFAULT).removesuffix(BEST)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of the values that are there; None if there are none."""
    known = [v for v in values if v is not None]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None
