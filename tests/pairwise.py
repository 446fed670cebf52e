"""Rows of option values in which every two values of any two options meet."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Collection, Iterator, Mapping
from typing import Any

Axes = Mapping[str, tuple[Any, ...]]
Pair = tuple[tuple[str, Any], tuple[str, Any]]
Unpaired = Collection[frozenset[str]]  # pairs of axes whose values need not meet


def pairs(row: Mapping[str, Any], unpaired: Unpaired = ()) -> Iterator[Pair]:
    """The pairs of axis values in a (partial) row that count."""
    for (a, va), (b, vb) in itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2):
        if frozenset((a, b)) not in unpaired:
            yield (a, va), (b, vb)


def needed(axes: Axes, unpaired: Unpaired = ()) -> set[Pair]:
    """Every pair that some row has to contain."""
    return {
        pair
        for a, b in itertools.combinations(sorted(axes), 2)
        for va, vb in itertools.product(axes[a], axes[b])
        for pair in pairs({a: va, b: vb}, unpaired)
    }


def cover(axes: Axes, unpaired: Unpaired = ()) -> list[dict[str, Any]]:
    """A greedy covering, the same on every run."""
    open_pairs = needed(axes, unpaired)
    order = {pair: i for i, pair in enumerate(sorted(open_pairs, key=repr))}
    used: collections.Counter[tuple[str, Any]] = collections.Counter()
    found = []
    while open_pairs:
        row = dict(min(open_pairs, key=order.__getitem__))
        for axis in sorted(set(axes) - set(row), key=lambda a: (-len(axes[a]), a)):
            gain = {v: len(open_pairs & set(pairs(row | {axis: v}, unpaired))) for v in axes[axis]}
            row[axis] = max(axes[axis], key=lambda v: (gain[v], -used[axis, v]))
        open_pairs -= set(pairs(row, unpaired))
        used.update(row.items())
        found.append(row)
    return found
