"""Which chain of kernels runs a decode step: the measured tables, and what serves without one.

By default all start early that may: this hides launches and latencies; the conv convolves x too, and kernels are cut by
the rules of `shapes`. Where a measured table knows the problem on this GPU, and another choice was faster there by more
than MARGIN, that one serves; so does the chain that a search found, where the table has one. A table holds the times of
each choice (see `read`); `replayssm_tuning.layer_bench` measures them, `replayssm_tuning.layer_report` writes them.
Shipped ones lie in `tables/overlap`; those that REPLAYSSM_LAYER_TABLES names (separated as in PATH) go before them.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .. import fingerprint, tables
from ..config import WITHOUT_TMA
from ..problem import Problem
from ..tables.fields import TableError, batch_size, counts, fields_of, list_of, number, read_json, short, text
from ..tables.lookup import _answering
from ..target import Target
from .chains import Chain, Overlap
from .problem import LayerProblem
from .shapes import conv_shape, norm_shape

log = logging.getLogger("replayssm_cute")

Key = tuple[Any, ...]

SCHEMA = 1
_SAME = ("heads", "head_dim", "d_state", "groups", "tokens", "window", "state_dtype", "io_dtype")
MARGIN = 0.02  # samples of one chain spread by 1 to 3%: medians that differ by less are alike
FOLDER = Path(tables.__file__).parent / "overlap"


__all__ = ["Cell", "Overlap", "OverlapTable", "candidates", "choose", "fastest", "forget", "read"]

REQUIRED = (Overlap.NONE, Overlap.INNER, Overlap.ALL)  # what each table has times of


@dataclass(frozen=True, slots=True)
class Cell:
    """What was measured for one batch size.

    Attributes:
        times: microseconds of each choice, its kernels cut by the rules.
        plain, promised: the chain that a search found, without and with a promise that the conv may start early; None
            where none was searched for.
    """

    times: Mapping[Overlap, float]
    plain: Chain | None = None
    promised: Chain | None = None

    def chain(self, promised: bool) -> Chain:
        """What serves."""
        found = self.promised if promised else self.plain
        return Chain(fastest(self.times, promised)) if found is None else found


@dataclass(frozen=True, slots=True)
class OverlapTable:
    """Measured times of one GPU.

    Attributes:
        gpu_name, arch: as `Target` has them.
        kernel_fingerprint, layer_kernel_fingerprint: of the step's kernels, and of the conv's and the norm's.
        entries: of a problem's `_SAME` fields, cells by batch, in ascending order.

    What a search found can run: its cuts are those of a conv and a norm of the entry's layer; `unusable_reason` says
    whether its step's config runs on a GPU.
    """

    gpu_name: str
    arch: str
    kernel_fingerprint: str
    layer_kernel_fingerprint: str
    entries: Mapping[Key, Mapping[int, Cell]]

    def unusable_reason(self, target: Target) -> str | None:
        """Why it says nothing about today's kernels on `target`, or None."""
        if (self.gpu_name, self.arch) != (target.name, target.arch):
            return f"it is for {self.gpu_name} ({self.arch}), this is {target.name} ({target.arch})"
        for group, own in (("step", self.kernel_fingerprint), ("fused", self.layer_kernel_fingerprint)):
            if own != fingerprint.kernels(group):
                return f"its {group} kernels' fingerprint {own[:12]} is stale, now {fingerprint.kernels(group)[:12]}"
        for key, cells in self.entries.items():
            for batch, cell in cells.items():
                for chain in (cell.plain, cell.promised):
                    if chain is None or chain.config is None:
                        continue
                    if reason := chain.config.invalid_reason(_layer(key).step, target):
                        return f"{_layer(key).step.label()}, batch {batch}: {chain.config.label()}: {reason}"
        return None

    def cell(self, problem: Problem, batch: int) -> Cell | None:
        """The cell that answers for `batch` rows, or None: buckets as in `tables`, of this very geometry alone."""
        cells = self.entries.get(key_of(problem), {})
        batches = list(cells)
        at = _answering(batches, batch)
        return None if at is None else cells[batches[at]]


def key_of(problem: Problem) -> Key:
    """What two problems must share for one's times to answer for the other: all but dtypes of weights and indices."""
    return tuple(getattr(problem, name) for name in _SAME)


def _layer(key: Key) -> LayerProblem:
    """A layer of these facts. Dtypes of its weights and groups of its norm decide nothing about what can run.

    Raises:
        ValueError, TypeError, NotImplementedError: if `decode_step` serves no such layer.
    """
    facts = dict(zip(_SAME, key, strict=True))
    return LayerProblem(Problem(**facts, dt_dtype=facts["io_dtype"]), facts["io_dtype"], None, facts["io_dtype"], 1)


def read(path: Path) -> OverlapTable:
    """The table in a JSON file: the attributes of `OverlapTable`, entries as a list of {problem, buckets: [{batch,
    times_us, chains}]}, and "schema". `chains`, which may be absent, holds `Chain.to_json` as "plain" and "promised".

    Raises:
        tables.TableError: if it cannot be read or is no such table; the message is one line.
    """
    data = read_json(Path(path))
    if not isinstance(data, dict):
        raise TableError(f"got {type(data).__name__}, expected an object")
    if data.get("schema") != SCHEMA:
        raise TableError(f"its schema is {short(data.get('schema'))}, this version reads {SCHEMA}")
    names = ("gpu_name", "arch", "kernel_fingerprint", "layer_kernel_fingerprint")
    whole = fields_of("table", data, known := ("schema", *names, "entries"), known)
    entries: dict[Key, Mapping[int, Cell]] = {}
    for one in list_of("entries", whole["entries"]):
        entry = fields_of("entry", one, ("problem", "buckets"), ("problem", "buckets"))
        given = fields_of("problem", entry["problem"], entry["problem"], ())
        counts("problem", given)
        try:
            key = key_of(Problem.from_json(given))
            layer = _layer(key)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise TableError(f"entry: {error}") from error
        if key in entries:
            raise TableError(f"{layer.step.label()}: two entries for one geometry")
        entries[key] = _cells(layer, list_of("buckets", entry["buckets"]))
    return OverlapTable(**{n: text(n, whole[n]) for n in names}, entries=entries)


def _cells(layer: LayerProblem, buckets: list[Any]) -> dict[int, Cell]:
    found: dict[int, Cell] = {}
    for one in buckets:
        bucket = fields_of("bucket", one, ("batch", "times_us", "chains"), ("batch", "times_us"))
        batch = batch_size("bucket", bucket["batch"])
        if batch in found:
            raise TableError(f"batch {batch}: two buckets")
        given = fields_of(f"batch {batch}: times_us", bucket["times_us"], map(str, Overlap), map(str, REQUIRED))
        times = {Overlap(kind): _time(f"batch {batch}: {kind}", us) for kind, us in given.items()}
        chains = fields_of(f"batch {batch}: chains", bucket.get("chains", {}), ("plain", "promised"), ())
        made = {name: _chain(layer, batch, name, chain) for name, chain in chains.items()}
        found[batch] = Cell(times, **made)
    return dict(sorted(found.items()))


def _time(name: str, value: object) -> float:
    us = number(name, value)
    if us is None or not 0 < us < 1e9:
        raise TableError(f"{name}: got {short(value)}, expected microseconds, more than 0 and less than 1e9")
    return us


def _chain(layer: LayerProblem, batch: int, name: str, data: object) -> Chain:
    """A chain that can run, but for its config, which is a GPU's affair."""
    where = f"batch {batch}: chain {name}"
    given = fields_of(where, data, data if isinstance(data, dict) else (), ("overlap",))
    for part in ("config", "conv", "norm"):
        if (values := given.get(part)) is not None:
            counts(f"{where}: {part}", fields_of(f"{where}: {part}", values, values, ()))
    try:
        chain = Chain.from_json(given)
        kind = chain.overlap
        if name == "plain" and kind.first:
            raise TableError(f"got {chain.label()!r} for calls without a promise, whose conv may not start early")
        if chain.conv is not None:
            chain.conv.of(conv_shape(layer, batch, chained=kind.chained, pdl=kind.first, with_x=not kind.x_in_step))
        if chain.norm is not None:
            chain.norm.of(norm_shape(layer, chained=kind.chained))
    except TableError:
        raise
    except (ValueError, TypeError) as error:
        raise TableError(f"{where}: {error}") from error
    return chain


@functools.cache
def _usable(target: Target) -> tuple[OverlapTable, ...]:
    """The tables that may answer on `target`, the user's first; every other file costs a log line."""
    user = [Path(os.path.expanduser(p)) for p in os.environ.get("REPLAYSSM_LAYER_TABLES", "").split(os.pathsep) if p]
    found = []
    for path in (*user, *sorted(FOLDER.glob("*.json"))):
        try:
            table = read(path)
            reason = table.unusable_reason(target)
        except TableError as error:
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


def choose(problem: Problem, batch: int, target: Target, *, promised: bool) -> Chain:
    """The choice for `batch` rows.

    Args:
        promised: whether the conv may start early: whether the caller has promised what `decode_step`'s enable_pdl
            says. Without it no chain with `Overlap.first` is chosen.
    """
    for table in _usable(target):
        cell = table.cell(problem, batch)
        if cell is not None:
            return cell.chain(promised)
    return Chain(_default(promised, target))


def candidates(problem: Problem, target: Target, *, promised: bool) -> tuple[Chain, ...]:
    """Every choice that some batch of the problem may get."""
    cells = [cell for table in _usable(target) for cell in table.entries.get(key_of(problem), {}).values()]
    return tuple(dict.fromkeys([Chain(_default(promised, target)), *(cell.chain(promised) for cell in cells)]))


def fastest(times: Mapping[Overlap, float], promised: bool) -> Overlap:
    """The default, or what is faster than it by more than the margin."""
    default = _default(promised)
    best = min((kind for kind in times if promised or not kind.first), key=times.__getitem__)
    return best if times[default] > (1 + MARGIN) * times[best] else default


def _default(promised: bool, target: Target | None = None) -> Overlap:
    """What serves without a measurement: nothing overlaps on a GPU without programmatic dependent launch."""
    if target is not None and target.arch in WITHOUT_TMA:
        return Overlap.NONE
    return Overlap.ALL if promised else Overlap.INNER
