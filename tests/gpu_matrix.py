"""The correctness matrix of the step kernel: pairwise covering instead of the full product, about sixty kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pairwise

from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

# (heads, head_dim, d_state, groups): the geometries that are promised.
GEOMETRIES = (
    (128, 64, 128, 8),
    (16, 64, 128, 1),
    (64, 64, 128, 8),
    (112, 64, 128, 8),
    (96, 80, 128, 8),
    (256, 64, 128, 8),
)
# Other shapes of head that the contract allows, once each.
OTHER_GEOMETRIES = ((24, 128, 256, 1), (80, 64, 64, 1), (32, 64, 256, 2), (16, 80, 256, 4), (32, 128, 128, 2))

# Windows above 16 and more than 16 new tokens, and packed ragged rows, over some of the rest: what differs from a
# plain problem of one group, and the kind of tile.
_PLAIN = Problem(heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=16, has_z=True)
_F16 = {"state_dtype": "f16", "io_dtype": "f16", "dt_dtype": "f16"}
OTHER_WINDOWS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"window": 32}, "one"),
    ({"window": 32, "tokens": 8, "state_dtype": "bf16"}, "tail"),
    ({"window": 33, "tokens": 17, "groups": 2, **_F16}, "tail"),
    ({"window": 64, "tokens": 1, "head_dim": 80, "state_dtype": "bf16"}, "one"),
    ({"window": 64, "tokens": 32}, "one"),
    ({"window": 64, "tokens": 32, "state_dtype": "bf16", "has_z": False, "groups": 2}, "tail"),
    ({"window": 64, "tokens": 5, "state_dtype": "bf16", "index_dtype": "i64"}, "pairs"),
)
RAGGED: tuple[tuple[dict[str, Any], str], ...] = (
    ({}, "one"),
    ({"tokens": 8, "groups": 2, "state_dtype": "bf16"}, "tail"),
    ({"tokens": 3, "window": 11, "dt_dtype": "f32", "index_dtype": "i64", **_F16}, "several whole"),
    ({"tokens": 16, "has_z": False, "d_dtype": None, "index_dtype": None}, "pairs"),
    ({"tokens": 1, "head_dim": 80, "state_dtype": "bf16", "dt_bias_dtype": None}, "wide"),
    ({"tokens": 32, "window": 64, "dt_softplus": False}, "one"),
    ({"tokens": 17, "window": 40, "groups": 2, "state_dtype": "bf16"}, "tail"),
)

AXES: dict[str, tuple[Any, ...]] = {
    "geometry": GEOMETRIES,
    "state": ("f32", "bf16", "f16"),
    "io": ("bf16", "f16"),
    "tokens": (1, 2, 4, 6, 8, 16),
    "without": ("nothing", "D", "dt_bias", "softplus", "z"),
    "dt": ("io", "f32"),
    "index": ("i32", "i64", None),
    "tile": ("one", "split", "whole", "several whole", "wide", "tail", "pairs"),
}
# Pairs of axes that need not be covered: they meet in no line of the kernel.
UNPAIRED = {frozenset(("geometry", axis)) for axis in ("tokens", "without", "dt", "index", "tile")}


@dataclass(frozen=True)
class Case:
    """One problem and the kind of tile config to run it with."""

    problem: Problem
    tile: str

    def config(self, target: Target) -> TileConfig:
        """The first config of that kind that is valid on the target."""
        return tile_config(self.tile, self.problem, target)

    def __str__(self) -> str:
        p = self.problem
        absent = [
            n for n, v in (("D", p.d_dtype), ("bias", p.dt_bias_dtype), ("z", p.has_z), ("sp", p.dt_softplus)) if not v
        ]
        return f"{p.label()} {p.io_dtype} dt-{p.dt_dtype} {p.index_dtype} no-{'-'.join(absent) or 'thing'} {self.tile}"


def tile_config(kind: str, problem: Problem, target: Target) -> TileConfig:
    """A valid config of a kind; the plain one where the target or the problem allows none.

    "wide" warps own several tiles of P, under a cap on registers, as "tail" is; "pairs" take two heads at a time, in
    turns with a tail where there are heads enough.
    """
    ring = "whole" if "whole" in kind else "live"
    tiles = problem.head_dim // 16
    wanted = {
        "one": [TileConfig()],
        "several": [TileConfig(heads_per_cta=n, stages=2) for n in (4, 2)],
        "split": [TileConfig(head_split=n) for n in range(2, tiles + 1)],
        "whole": [TileConfig(ring=ring)],
        "wide": [TileConfig(tiles_per_warp=k, ctas_per_sm=n) for k in (2, 5) for n in (6, 4, 3, 2, 1)],
        "tail": [
            TileConfig(heads_per_cta=n, stages=s, tail_rows=3, ctas_per_sm=c)
            for c in (3, 1)
            for n, s in ((8, 2), (7, 2), (4, 2), (2, 1))
        ],
        "pairs": [
            TileConfig(heads_per_cta=n, stages=s, tail_rows=tail, parallel_heads=2, tiles_per_warp=k)
            for n, s, tail in ((8, 2, 3), (4, 2, 3), (4, 1, 3), (2, 1, 0))
            for k in (2, 5, 1)
        ],
        "several whole": [
            TileConfig(heads_per_cta=n, stages=s, ring=ring) for n, s in ((7, 3), (4, 4), (4, 2), (2, 2), (2, 1))
        ],
    }[kind]
    fallback = [TileConfig(head_split=n, ring=ring) for n in range(1, tiles + 1)]
    return next(c for c in (*wanted, *fallback) if c.is_valid(problem, target))


def pairs(row: dict[str, Any]) -> Iterator[pairwise.Pair]:
    """The pairs of axis values in a row that count."""
    return pairwise.pairs(row, UNPAIRED)


def needed() -> set[pairwise.Pair]:
    """Every pair that some row has to contain."""
    return pairwise.needed(AXES, UNPAIRED)


def rows() -> list[dict[str, Any]]:
    """A pairwise covering, the same on every run."""
    return pairwise.cover(AXES, UNPAIRED)


def _problem(row: dict[str, Any], number: int) -> Problem:
    H, P, N, G = row["geometry"]
    io = row["io"]
    weights = ("f32", "bf16", "f16")
    return Problem(
        heads=H,
        head_dim=P,
        d_state=N,
        groups=G,
        tokens=row["tokens"],
        window=max(row["tokens"], (16, 16, 8, 11)[number % 4]),
        state_dtype=row["state"],
        io_dtype=io,
        dt_dtype=io if row["dt"] == "io" else "f32",
        a_dtype=weights[number // 2 % 3] if number % 2 else "f32",
        d_dtype=None if row["without"] == "D" else weights[number % 3],
        dt_bias_dtype=None if row["without"] == "dt_bias" else weights[(number + 1) % 3],
        has_z=row["without"] != "z",
        dt_softplus=row["without"] != "softplus",
        index_dtype=row["index"],
    )


def cases() -> list[Case]:
    """The matrix: the covering over the promised geometries, the other head shapes, long windows and ragged rows."""
    found = [Case(_problem(row, i), row["tile"]) for i, row in enumerate(rows())]
    for i, geometry in enumerate(OTHER_GEOMETRIES):
        row = {axis: values[i % len(values)] for axis, values in AXES.items()} | {"geometry": geometry}
        found.append(Case(_problem(row, i), row["tile"]))
    found += [Case(dataclasses.replace(_PLAIN, **changes), tile) for changes, tile in OTHER_WINDOWS]
    found += [Case(dataclasses.replace(_PLAIN, ragged=True, **changes), tile) for changes, tile in RAGGED]
    return found
