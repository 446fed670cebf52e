"""How a sweep measures: the numbers that are part of every journal key and of the table."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Policy:
    """How a sweep measures; part of every journal key and of the table.

    Attributes:
        replays, warmups: timed replays of a first measurement, and untimed ones before (clocks must come up).
        l2_factor: a rotation touches at least this many times the L2.
        min_rows: and at least this many rows, so that quotas come out near the mix.
        graph_us: a graph is filled with rotations up to about this time.
        max_nodes: launches of a graph at most.
        max_bytes: of a cell's caches and inputs at most.
        race_within: configs this close to the fastest race again.
        race_rounds: interleaved rounds of the race, `race_replays` replays each.
        margin: the default is kept unless the fastest beats it by this share.
        seed: of every random choice.
    """

    replays: int = 9
    warmups: int = 8
    l2_factor: float = 4.0
    min_rows: int = 64
    graph_us: float = 2000.0
    max_nodes: int = 1024
    max_bytes: int = 32 * GIB
    race_within: float = 0.05
    race_rounds: int = 7
    race_replays: int = 3
    margin: float = 0.02
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return dataclasses.asdict(self)
