"""What a sweep found for one GPU: every candidate's time in every cell, the decision, and the table it makes."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from replayssm_cute import atomic, tables
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.sm100 import config_from_json

_LEAST_US = 1e-3  # no call is as fast; ratios of zeros would be nonsense
MAX_BYTES = 256 << 20  # results of hundreds of cells are some tens of MB


@dataclass(frozen=True, slots=True)
class Candidate:
    """One config in one cell.

    Attributes:
        config: its tile config.
        time_us: microseconds a call; None if it failed.
        spread: (largest - smallest sample) / median; 0 where estimated.
        stage: the last round it came to, "first" (one brief measurement), "heat" or "raced"; else "estimated" or
            "failed".
        reason: of a failure.
        facts: whatever else is known, JSON-like: registers, occupancy, what bounds it.
    """

    config: TileConfig
    time_us: float | None
    spread: float = 0.0
    stage: str = "first"
    reason: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CellResult:
    """One (problem, batch) with everything that was timed there.

    Attributes:
        label: of the workload.
        bytes: that one call moves.
        flush: share of rows that flush, as apportioned.
        default: the default rule's config for this batch.
        candidates: every config that the budget reached.
        peers: as `DeviceRunner.peers` gives them.
        floor_us: of a kernel that only streams the same state rows and rewrites the same flush rows, plus the other
            bytes at the read limit; None where it was not measured.
        mixes: the race's configs under other acceptance lengths, where that was asked for: name, lengths, and for each
            config its label and time_us.
        space: configs that the problem has on this GPU, whether the budget reached them or not; None in results of
            older sweeps.
    """

    label: str
    problem: Problem
    batch: int
    bytes: int
    flush: float
    default: TileConfig
    candidates: tuple[Candidate, ...]
    peers: tuple[Mapping[str, Any], ...] = ()
    floor_us: float | None = None
    space: int | None = None
    mixes: tuple[Mapping[str, Any], ...] = ()

    @property
    def timed(self) -> list[Candidate]:
        """Candidates that can win: those of the last round that was run; fastest first."""
        stages = [[c for c in self.candidates if c.stage == stage] for stage in ("raced", "heat")]
        known = next((found for found in stages if found), [c for c in self.candidates if c.time_us is not None])
        return sorted(known, key=lambda c: c.time_us or 0.0)

    @property
    def compared(self) -> list[Candidate]:
        """Candidates whose times may be compared closely: raced or of the heat, if there were; else all timed."""
        close = [c for c in self.candidates if c.stage in ("raced", "heat")]
        return close or [c for c in self.candidates if c.time_us is not None]

    def default_time(self) -> float | None:
        """The default config's time, or None if it has none."""
        return next((c.time_us for c in self.timed if c.config == self.default), None)

    def decide(self, margin: float) -> Candidate | None:
        """The winner: the default unless the fastest beats it by `margin`; None if nothing was timed."""
        timed = self.timed
        if not timed:
            return None
        default = next((c for c in timed if c.config == self.default), None)
        fastest = timed[0]
        if default is not None and default.time_us is not None and fastest.time_us is not None:
            return default if default.time_us <= fastest.time_us * (1 + margin) else fastest
        return fastest

    def peers_of_other_work(self) -> set[str]:
        """Peers that do not replay: they move other bytes than a call must (the standard update writes every state)."""
        named = {e["peer"] for e in self.peers if not e.get("replays", not e["peer"].endswith("-standard"))}
        return named | {f"{peer} default" for peer in named}

    def best_peers(self) -> dict[str, float]:
        """Fastest time of each peer, and of its default variant ("<peer> default") where it has others."""
        timed = [e for e in self.peers if e.get("time_us") is not None]
        found: dict[str, float] = {}
        for entry in timed:
            peer, time_us = entry["peer"], entry["time_us"]
            found[peer] = min(found.get(peer, math.inf), time_us)
            if entry["default"] and any(e["peer"] == peer and not e["default"] for e in timed):
                found[f"{peer} default"] = time_us
        return found


@dataclass(frozen=True, slots=True)
class Results:
    """All cells of one GPU.

    Attributes:
        plan, title, source: of the plan.
        manifest: the table's.
        read_gbs, read_gbs_method: the streaming limit that fractions are of, and where it comes from.
        margin: that a config must beat the default by.
        notes: what a reader must know (cells missing, the default wrong, and so on).
        cells: by workload and batch.
    """

    plan: str
    title: str
    source: str
    manifest: tables.Manifest
    read_gbs: float
    read_gbs_method: str
    margin: float
    notes: tuple[str, ...]
    cells: tuple[CellResult, ...]

    @property
    def measured(self) -> bool:
        """Whether a GPU was timed."""
        return self.manifest.provenance == "measured"

    def table(self) -> tables.Table:
        """The table of the winners.

        Raises:
            ValueError: if no cell has one.
        """
        entries: dict[Problem, list[tables.Cell]] = {}
        for cell in self.cells:
            winner = cell.decide(self.margin)
            if winner is None or winner.time_us is None:
                continue
            others = [c for c in cell.timed if c.config != winner.config]
            runner_up = others[0] if others else None
            entries.setdefault(cell.problem, []).append(
                tables.Cell(
                    batch=cell.batch,
                    config=winner.config,
                    time_us=winner.time_us,
                    bytes=float(cell.bytes),
                    gb_s=cell.bytes / winner.time_us / 1e3,
                    limit_fraction=cell.bytes / winner.time_us / 1e3 / self.read_gbs,
                    runner_up=runner_up.config if runner_up else None,
                    runner_up_us=runner_up.time_us if runner_up else None,
                    # negative where the default is kept although another is a little faster; a table says 0
                    margin=max(runner_up.time_us / winner.time_us - 1, 0.0)
                    if runner_up and runner_up.time_us
                    else None,
                    default_us=cell.default_time(),
                    peers=cell.best_peers(),
                )
            )
        if not entries:
            raise ValueError("no candidate survived in any cell: there is nothing to make a table of")
        return tables.Table(
            self.manifest, {p: tuple(sorted(cells, key=lambda c: c.batch)) for p, cells in entries.items()}
        )

    def save(self, path: Path) -> None:
        """Write as JSON, at once: a cell a line, since a readable layout would be three times as long."""
        data = plain(self)
        cells = ",\n".join(json.dumps(cell, separators=(",", ":")) for cell in data.pop("cells"))
        head = json.dumps(data, indent=1).removesuffix("\n}")
        atomic.write_text(path, f'{head},\n "cells": [\n{cells}\n]}}\n')

    @classmethod
    def load(cls, path: Path) -> Results:
        """Read what `save` wrote.

        Raises:
            ValueError: if the file is not that, naming it.
        """
        try:
            if (size := path.stat().st_size) > MAX_BYTES:
                raise ValueError(f"{size} bytes, expected at most {MAX_BYTES}")
            data = json.loads(path.read_text(encoding="utf-8"))
            data.pop("historical", None)  # a mark on results that are kept for the record
            cells = tuple(
                CellResult(
                    **{
                        **cell,
                        "problem": Problem.from_json(cell["problem"]),
                        "default": config_from_json(cell["default"]),
                        "candidates": tuple(
                            Candidate(**{**c, "config": config_from_json(c["config"])}) for c in cell["candidates"]
                        ),
                        "peers": tuple(cell["peers"]),
                        "mixes": tuple(cell.get("mixes", ())),
                    }
                )
                for cell in data["cells"]
            )
            found = cls(
                **{
                    **data,
                    "manifest": tables.Manifest.from_json(data["manifest"]),
                    "notes": tuple(data["notes"]),
                    "cells": cells,
                }
            )
            _check(found)
            for cell in cells:
                cell.best_peers(), cell.peers_of_other_work()
            return found
        except (OSError, ValueError, KeyError, TypeError, AttributeError, NotImplementedError, RecursionError) as e:
            text = " ".join(str(e).split())
            raise ValueError(f"{path}: no results of a sweep ({type(e).__name__}: {text})"[:400]) from e


def _check(results: Results) -> None:
    """Refuse what a report would stumble over.

    Raises:
        TypeError, ValueError: for fields of the wrong type, and numbers that no measurement gives.
    """

    def number(name: str, value: object, least: float = 0.0) -> None:
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
            raise TypeError(f"{name}: got {str(value)[:60]!r}, expected a finite number >= {least:g}")

    def text(name: str, value: object) -> None:
        if not isinstance(value, str):
            raise TypeError(f"{name}: got {type(value).__name__}, expected a str")

    for name in ("plan", "title", "source", "read_gbs_method"):
        text(name, getattr(results, name))
    for note in results.notes:
        text("notes", note)
    number("read_gbs", results.read_gbs, 1.0)
    number("margin", results.margin)
    for cell in results.cells:
        text("label", cell.label)
        if not isinstance(cell.batch, int) or cell.batch < 1:
            raise TypeError(f"batch: got {str(cell.batch)[:60]!r}, expected a positive int")
        for name in ("bytes", "flush", "floor_us", "space"):
            if getattr(cell, name) is not None or name in ("bytes", "flush"):
                number(name, getattr(cell, name))
        for c in cell.candidates:
            text("stage", c.stage)
            number("spread", c.spread)
            if c.time_us is not None:
                number("time_us", c.time_us, _LEAST_US)
        for mix in cell.mixes:
            text("mix", mix["name"])
            for share in mix["lengths"]:
                number("lengths", share)
            for config in mix["configs"]:
                text("label", config["label"])
                number("time_us", config["time_us"], _LEAST_US)
        for peer in cell.peers:
            text("peer", peer["peer"])
            if peer.get("time_us") is not None:
                number(f"time_us of {peer['peer']}", peer["time_us"], _LEAST_US)


def plain(value: Any) -> Any:
    """JSON-like data of dataclasses, mappings and sequences; what is not finite becomes None."""
    if isinstance(value, TileConfig):
        return value.to_json()  # which says whose kernel's it is
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
