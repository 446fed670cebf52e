"""How a sweep measures: the numbers that are part of every journal key and of the table.

A cell's candidates meet in three rounds, each of fewer and longer: every one alone and briefly, the best of these in an
interleaved heat, and the best of the heat in the race that decides. A short timing only has to keep the good ones among
the first `heat_field`; the time goes to those that can win.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Policy:
    """How a sweep measures; part of every journal key and of the table.

    Attributes:
        replays, warmups: timed replays of a peer or a floor, and untimed ones before (clocks must come up).
        screen_replays, screen_warmups: the same of a candidate's first timing; a cell's first one warms up in full.
        screen_graph_us: a first timing's graph is filled up to about this time.
        prune: configs that the cost model puts beyond so many times the fastest of the cell are not timed; 0 times all.
            Of 20 cells measured on an H200 it put every winner within 1.16.
        heat_field: so many of the fastest, by their first timing, run in the heat.
        heat_rounds: interleaved rounds of the heat, `heat_replays` replays each.
        l2_factor: a rotation touches at least this many times the L2.
        min_rows: and at least this many rows. They bring quotas near the mix, and average over where in a batch the
            rows that flush lie: with 4 sets of 16 rows, seed to seed the ratio of two configs moved by 7% on an H200.
        graph_us: a graph is filled with rotations up to about this time.
        max_nodes: launches of a graph at most.
        max_bytes: of a cell's caches and inputs at most.
        race_field: so many race at most, the default among them.
        race_within: and only configs this close to the fastest of the heat.
        race_rounds: interleaved rounds of the race, `race_replays` replays each.
        margin: the default is kept unless the fastest beats it by this share. Ratios of two configs of a cell differed
            by about 0.2% from heat to race in a sweep on an H200.
        seed: of every random choice.
    """

    replays: int = 9
    warmups: int = 8
    screen_replays: int = 3
    screen_warmups: int = 2
    screen_graph_us: float = 1000.0
    prune: float = 1.3
    heat_field: int = 24
    heat_rounds: int = 2
    heat_replays: int = 2
    l2_factor: float = 4.0
    min_rows: int = 512
    graph_us: float = 2000.0
    max_nodes: int = 1024
    max_bytes: int = 32 * GIB
    race_field: int = 8
    race_within: float = 0.05
    race_rounds: int = 7
    race_replays: int = 3
    margin: float = 0.005
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return dataclasses.asdict(self)
