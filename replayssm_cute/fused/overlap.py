"""Which of a decode step's kernels start while the one before them still runs, and which of them convolves x.

By default all start early that may: this hides launches and latencies; and the conv's kernel convolves x, too. Where a
measured table knows the problem on this GPU, and another choice was faster there by more than MARGIN, that one serves. A table holds the times of each choice (see
`read`); `replayssm_tuning.layer_bench` measures them, `replayssm_tuning.layer_report` writes them. Shipped ones lie in
`tables/overlap`; those that REPLAYSSM_LAYER_TABLES names (separated as in PATH) go before them.
"""

from __future__ import annotations

import functools
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from .. import fingerprint, tables
from ..problem import Problem
from ..tables.lookup import _answering
from ..target import Target

log = logging.getLogger("replayssm_cute")

Key = tuple[Any, ...]

SCHEMA = 1
_SAME = ("heads", "head_dim", "d_state", "groups", "tokens", "window", "state_dtype", "io_dtype")
MARGIN = 0.02  # samples of one chain spread by 1 to 3%: medians that differ by less are alike
FOLDER = Path(tables.__file__).parent / "overlap"


class Overlap(StrEnum):
    """What starts early, and where x is convolved, by the names that measurements have."""

    NONE = "chain"
    INNER = "chain, PDL"
    ALL = "chain, PDL, conv too"
    INNER_X = "chain, PDL, x in step"
    ALL_X = "chain, PDL, conv too, x in step"

    @property
    def chained(self) -> bool:
        """Whether the step starts while the conv runs, and the norm while the step runs."""
        return self is not Overlap.NONE

    @property
    def first(self) -> bool:
        """Whether the conv starts while the kernel before the call runs."""
        return self in (Overlap.ALL, Overlap.ALL_X)

    @property
    def x_in_step(self) -> bool:
        """Whether the step convolves x, and the conv before it B and C alone."""
        return self in (Overlap.INNER_X, Overlap.ALL_X)


REQUIRED = (Overlap.NONE, Overlap.INNER, Overlap.ALL)  # what each table has times of


@dataclass(frozen=True, slots=True)
class OverlapTable:
    """Measured times of one GPU.

    Attributes:
        gpu_name, arch: as `Target` has them.
        kernel_fingerprint, layer_kernel_fingerprint: of the step's kernels, and of the conv's and the norm's.
        entries: of a problem's `_SAME` fields, microseconds of each choice by batch, in ascending order.
    """

    gpu_name: str
    arch: str
    kernel_fingerprint: str
    layer_kernel_fingerprint: str
    entries: Mapping[Key, Mapping[int, Mapping[Overlap, float]]]

    def unusable_reason(self, target: Target) -> str | None:
        """Why it says nothing about today's kernels on `target`, or None."""
        if (self.gpu_name, self.arch) != (target.name, target.arch):
            return f"it is for {self.gpu_name} ({self.arch}), this is {target.name} ({target.arch})"
        for group, own in (("step", self.kernel_fingerprint), ("fused", self.layer_kernel_fingerprint)):
            if own != fingerprint.kernels(group):
                return f"its {group} kernels' fingerprint {own[:12]} is stale, now {fingerprint.kernels(group)[:12]}"
        return None

    def times(self, problem: Problem, batch: int) -> Mapping[Overlap, float] | None:
        """The times that answer for `batch` rows, or None: buckets as in `tables`, of this very geometry alone."""
        cells = self.entries.get(key_of(problem), {})
        batches = list(cells)
        at = _answering(batches, batch)
        return None if at is None else cells[batches[at]]


def key_of(problem: Problem) -> Key:
    """What two problems must share for one's times to answer for the other: all but dtypes of weights and indices."""
    return tuple(getattr(problem, name) for name in _SAME)


def read(path: Path) -> OverlapTable:
    """The table in a JSON file: the attributes of `OverlapTable`, entries as a list of {problem, buckets: [{batch,
    times_us}]}, and "schema".

    Raises:
        tables.TableError: if it cannot be read or is no such table.
    """
    try:
        data = json.loads(path.read_bytes())
        if data["schema"] != SCHEMA:
            raise tables.TableError(f"its schema is {data['schema']!r}, this version reads {SCHEMA}")
        entries = {key_of(Problem.from_json(e["problem"])): _cells(e["buckets"]) for e in data["entries"]}
        names = ("gpu_name", "arch", "kernel_fingerprint", "layer_kernel_fingerprint")
        return OverlapTable(**{n: str(data[n]) for n in names}, entries=entries)
    except tables.TableError:
        raise
    except OSError as error:
        raise tables.TableError(f"it cannot be read ({error.strerror or error})") from error
    except (ValueError, KeyError, TypeError, AttributeError, NotImplementedError, RecursionError) as error:
        raise tables.TableError(f"it is no table of overlaps ({error!r})") from error


def _cells(buckets: list[dict[str, Any]]) -> dict[int, dict[Overlap, float]]:
    found = {}
    for bucket in sorted(buckets, key=lambda b: b["batch"]):
        given = bucket["times_us"]
        times = {kind: float(given[kind]) for kind in Overlap if kind in REQUIRED or kind in given}
        if type(bucket["batch"]) is not int or bucket["batch"] < 1 or not all(0 < t < 1e9 for t in times.values()):
            raise tables.TableError(f"got a bucket {bucket}, expected a positive batch and positive times")
        found[bucket["batch"]] = times
    return found


@functools.cache
def _usable(target: Target) -> tuple[OverlapTable, ...]:
    """The tables that may answer on `target`, the user's first; every other file costs a log line."""
    user = [Path(os.path.expanduser(p)) for p in os.environ.get("REPLAYSSM_LAYER_TABLES", "").split(os.pathsep) if p]
    found = []
    for path in (*user, *sorted(FOLDER.glob("*.json"))):
        try:
            table = read(path)
            reason = table.unusable_reason(target)
        except tables.TableError as error:
            reason, table = str(error), None
        if reason is None and table is not None:
            found.append(table)
            continue
        foreign = path not in user and table is not None and table.gpu_name != target.name
        log.log(logging.DEBUG if foreign else logging.WARNING, "table %s is not used: %s", path, reason)
    return tuple(found)


def forget() -> None:
    """Forget the tables that this process read."""
    _usable.cache_clear()


def choose(problem: Problem, batch: int, target: Target, *, promised: bool) -> Overlap:
    """The choice for `batch` rows.

    Args:
        promised: whether the conv may start early: whether the caller has promised what `decode_step`'s enable_pdl
            says. Without it `Overlap.ALL` is never chosen.
    """
    for table in _usable(target):
        times = table.times(problem, batch)
        if times is not None:
            return fastest(times, promised)
    return _default(promised)


def candidates(problem: Problem, target: Target, *, promised: bool) -> tuple[Overlap, ...]:
    """Every choice that some batch of the problem may get."""
    cells = [times for table in _usable(target) for times in table.entries.get(key_of(problem), {}).values()]
    return tuple(dict.fromkeys([_default(promised), *(fastest(times, promised) for times in cells)]))


def fastest(times: Mapping[Overlap, float], promised: bool) -> Overlap:
    """The default, or what is faster than it by more than the margin."""
    default = _default(promised)
    best = min((kind for kind in times if promised or not kind.first), key=times.__getitem__)
    return best if times[default] > (1 + MARGIN) * times[best] else default


def _default(promised: bool) -> Overlap:
    return Overlap.ALL if promised else Overlap.INNER
