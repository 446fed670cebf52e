"""What a tuned table is: its manifest, its cells, JSON in both directions, and merging."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import fingerprint
from ..config import TileConfig
from ..problem import Problem
from ..target import Target

SCHEMA = 1
_INT32 = 1 << 31
PROVENANCES = ("measured", "estimated")
_PLAIN = TileConfig().to_json()  # fields of a config that are not written: tables are of one version of `config`


class TableError(ValueError):
    """A table that must not be used, and why."""


def _number(name: str, value: object, *, optional: bool = False) -> float | None:
    if value is None and optional:
        return None
    try:
        if not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value) and value >= 0:
            return float(value)
    except OverflowError:  # JSON has integers that are no floats
        pass
    raise TableError(f"{name}: got {_short(value)}, expected a finite number >= 0{' or null' if optional else ''}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _counts(name: str, values: Mapping[str, Any]) -> None:
    """Refuse integers that no kernel argument holds."""
    for key, value in values.items():
        if isinstance(value, int) and abs(value) >= _INT32:
            raise TableError(f"{name}: {key} is {_short(value)}, expected less than 2^31")


def _object(name: str, value: object, known: Iterable[str], required: Iterable[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TableError(f"{name}: got {type(value).__name__}, expected an object")
    if missing := [k for k in required if k not in value]:
        raise TableError(f"{name}: fields {missing} are missing")
    if unknown := sorted(set(value) - set(known)):
        raise TableError(f"{name}: unknown fields {unknown}")
    return value


@dataclass(frozen=True, slots=True)
class Manifest:
    """Where a table comes from.

    Attributes:
        gpu_name, arch, sms: the GPU, as `Target` names it.
        provenance: "measured" on that GPU, or "estimated" by the cost model.
        kernel_fingerprint: `fingerprint.kernels()` of the sources that were tuned.
        date: ISO 8601, UTC.
        driver: CUDA driver version, empty when estimated.
        versions: package versions by name.
        policy: how it was measured (repetitions, cold L2, margin, …), free-form JSON.
        acceptance: the acceptance distribution, free-form JSON.
    """

    gpu_name: str
    arch: str
    sms: int
    provenance: str
    kernel_fingerprint: str
    date: str
    driver: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)
    acceptance: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("gpu_name", "arch", "provenance", "kernel_fingerprint", "date", "driver"):
            if not isinstance(getattr(self, name), str):
                raise TableError(f"manifest: {name} is {getattr(self, name)!r}, expected a str")
        if not isinstance(self.sms, int) or isinstance(self.sms, bool) or self.sms < 1:
            raise TableError(f"manifest: sms is {self.sms!r}, expected a positive int")
        if self.provenance not in PROVENANCES:
            raise TableError(f"manifest: provenance is {self.provenance!r}, expected one of {PROVENANCES}")
        for name in ("versions", "policy", "acceptance"):
            if not isinstance(getattr(self, name), dict):
                raise TableError(f"manifest: {name} is {getattr(self, name)!r}, expected an object")

    def unusable_reason(self, target: Target) -> str | None:
        """Why a table with this manifest must not serve `target` with today's kernels, or None if it may."""
        if (self.gpu_name, self.arch) != (target.name, target.arch):
            return f"it is for {self.gpu_name} ({self.arch}), this is {target.name} ({target.arch})"
        if self.kernel_fingerprint != fingerprint.kernels():
            return (
                f"its kernel fingerprint {self.kernel_fingerprint[:12]} is stale, the kernels are now "
                f"{fingerprint.kernels()[:12]}; tune again"
            )
        return None

    def origin(self) -> tuple[str, str, str, str]:
        """What two tables must share to be merged."""
        return self.gpu_name, self.arch, self.kernel_fingerprint, self.provenance

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `from_json` gives the same Manifest back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Manifest:
        """The Manifest of a `to_json` dict.

        Raises:
            TableError: for missing, unknown or mistyped fields.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        return cls(**_object("manifest", data, names, names))


@dataclass(frozen=True, slots=True)
class Cell:
    """The answer for one problem in one batch bucket: `batch` rows and those near it (`lookup` says how near).

    Attributes:
        batch: rows that were timed.
        config: the winner.
        time_us: its time for one step.
        bytes: bytes that the step moves (mean over the mix of flush and other rows).
        gb_s: bytes / time in GB/s (1e9).
        limit_fraction: gb_s over the GPU's streaming read limit.
        runner_up, runner_up_us: the next best config and its time, None if there was no other.
        margin: by which fraction of the winner's time the runner-up is slower; 0 where it is faster by too little to
            replace the default (see `runner_up_slower`).
        default_us: time of the default rule's config.
        peers: times of other implementations in the same run, by name.
    """

    batch: int
    config: TileConfig
    time_us: float
    bytes: float
    gb_s: float
    limit_fraction: float
    runner_up: TileConfig | None = None
    runner_up_us: float | None = None
    margin: float | None = None
    default_us: float | None = None
    peers: Mapping[str, float] = field(default_factory=dict)

    @property
    def runner_up_slower(self) -> float | None:
        """Like `margin`, but negative where the runner-up is faster; None if the cell does not tell."""
        if self.runner_up_us is None or not self.time_us:
            return self.margin
        return self.runner_up_us / self.time_us - 1

    def to_json(self) -> dict[str, Any]:
        """A plain dict, less what says nothing (None, no peers, a config's defaults); `from_json` reads it back."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        data = {k: v for k, v in fields.items() if v is not None}
        for name in ("config", "runner_up"):
            if name in data:
                data[name] = {k: v for k, v in data[name].to_json().items() if v != _PLAIN[k]}
        if self.peers:
            data["peers"] = dict(self.peers)
        else:
            del data["peers"]
        return data

    @classmethod
    def from_json(cls, data: object) -> Cell:
        """The Cell of a `to_json` dict.

        Raises:
            TableError: for missing, unknown or mistyped fields.
        """
        absent: dict[str, Any] = {
            "runner_up": None,
            "runner_up_us": None,
            "margin": None,
            "default_us": None,
            "peers": {},
        }
        names = [f.name for f in dataclasses.fields(cls)]
        cell = absent | _object("bucket", data, names, [n for n in names if n not in absent])
        batch = cell["batch"]
        _counts("bucket", {"batch": batch})
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise TableError(f"bucket: batch is {batch!r}, expected a positive int")
        try:
            for name in ("config", "runner_up"):
                if not isinstance(cell[name], dict) and not (name == "runner_up" and cell[name] is None):
                    raise TableError(f"bucket {batch}: {name} is {_short(cell[name])}, expected an object")
                _counts(f"bucket {batch}: {name}", cell[name] or {})
            config = TileConfig.from_json(cell["config"])
            runner_up = None if cell["runner_up"] is None else TileConfig.from_json(cell["runner_up"])
        except TableError:
            raise
        except (ValueError, TypeError) as error:
            raise TableError(f"bucket {batch}: {error}") from error
        if not isinstance(cell["peers"], dict):
            raise TableError(f"bucket {batch}: peers is {cell['peers']!r}, expected an object")
        measured = {n: _number(f"bucket {batch}: {n}", cell[n]) for n in ("time_us", "bytes", "gb_s", "limit_fraction")}
        optional = {
            n: _number(f"bucket {batch}: {n}", cell[n], optional=True) for n in ("runner_up_us", "margin", "default_us")
        }
        peers = {str(k): _number(f"bucket {batch}: peer {k}", v) for k, v in cell["peers"].items()}
        return cls(batch=batch, config=config, runner_up=runner_up, peers=peers, **measured, **optional)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Table:
    """A manifest and, for each problem, its cells by ascending batch."""

    manifest: Manifest
    entries: Mapping[Problem, tuple[Cell, ...]]

    def __post_init__(self) -> None:
        for problem, cells in self.entries.items():
            batches = [c.batch for c in cells]
            if not cells or batches != sorted(set(batches)):
                raise TableError(f"{problem.label()}: got buckets {batches}, expected ascending batches, each once")

    def to_json(self) -> dict[str, Any]:
        """A plain dict in a stable order; `from_json` gives the same Table back."""
        ordered = sorted(self.entries.items(), key=lambda item: [str(v) for v in dataclasses.astuple(item[0])])
        return {
            "schema": SCHEMA,
            "manifest": self.manifest.to_json(),
            "entries": [{"problem": p.to_json(), "buckets": [c.to_json() for c in cells]} for p, cells in ordered],
        }

    @classmethod
    def from_json(cls, data: object) -> Table:
        """The Table of a `to_json` dict.

        Raises:
            TableError: for another schema version, missing, unknown or mistyped fields.
        """
        if not isinstance(data, dict):
            raise TableError(f"got {type(data).__name__}, expected an object")
        if data.get("schema") != SCHEMA:
            raise TableError(f"its schema is {data.get('schema')!r}, this version reads {SCHEMA}")
        names = ("schema", "manifest", "entries")
        table = _object("table", data, names, names)
        if not isinstance(table["entries"], list):
            raise TableError("entries: expected a list")
        entries: dict[Problem, tuple[Cell, ...]] = {}
        for one in table["entries"]:
            entry = _object("entry", one, ("problem", "buckets"), ("problem", "buckets"))
            if not isinstance(entry["problem"], dict) or not isinstance(entry["buckets"], list):
                raise TableError("entry: expected an object for problem and a list for buckets")
            _counts("entry: problem", entry["problem"])
            try:
                problem = Problem.from_json(entry["problem"])
            except (ValueError, TypeError, NotImplementedError) as error:
                raise TableError(f"entry: {error}") from error
            if problem in entries:
                raise TableError(f"{problem.label()}: two entries for one problem")
            entries[problem] = tuple(Cell.from_json(c) for c in entry["buckets"])
        return cls(Manifest.from_json(table["manifest"]), entries)


def merge(old: Table, new: Table) -> Table:
    """Both tables' cells; where both have one for the same problem and batch, the new one's. The new manifest.

    Raises:
        TableError: if they differ in GPU, architecture, kernel fingerprint or provenance.
    """
    if old.manifest.origin() != new.manifest.origin():
        raise TableError(f"cannot merge: {old.manifest.origin()} is not {new.manifest.origin()}")
    entries = {p: {c.batch: c for c in cells} for p, cells in old.entries.items()}
    for problem, cells in new.entries.items():
        entries.setdefault(problem, {}).update({c.batch: c for c in cells})
    return Table(new.manifest, {p: tuple(cells[b] for b in sorted(cells)) for p, cells in entries.items()})
