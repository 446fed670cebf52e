"""What a tuned table is: its manifest, its cells, JSON in both directions, and merging."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .. import fingerprint
from ..config import TileConfig
from ..problem import Problem
from ..sm100 import ARCHES, Sm100Config, config_from_json
from ..target import Target
from .fields import TableError, batch_size, counts, fields_of, list_of, number, short, text

SCHEMA = 1
PROVENANCES = ("measured", "estimated")
# Fields of a config that are not written: tables are of one version of `config`. A portable one names no kernel.
_PLAIN = {**Sm100Config().to_json(), "kernel": None}


def kernels_named(arch: str, provenance: str) -> str:
    """Fingerprint of the kernels that a table may name: measured ones for data-centre Blackwell name both kernels."""
    if provenance != "measured" or arch not in ARCHES:
        return fingerprint.kernels()
    return hashlib.sha256((fingerprint.kernels() + fingerprint.kernels("sm100")).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """Where a table comes from.

    Attributes:
        gpu_name, arch, sms: the GPU, as `Target` names it.
        provenance: "measured" on that GPU, or "estimated" by the cost model.
        kernel_fingerprint: `kernels_named` of the sources that were tuned.
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
            text(f"manifest: {name}", getattr(self, name))
        counts("manifest", {"sms": self.sms})
        if not isinstance(self.sms, int) or isinstance(self.sms, bool) or self.sms < 1:
            raise TableError(f"manifest: sms is {short(self.sms)}, expected a positive int")
        if self.provenance not in PROVENANCES:
            raise TableError(f"manifest: provenance is {self.provenance!r}, expected one of {PROVENANCES}")
        for name in ("versions", "policy", "acceptance"):
            if not isinstance(getattr(self, name), dict):
                raise TableError(f"manifest: {name} is {short(getattr(self, name))}, expected an object")

    def unusable_reason(self, target: Target) -> str | None:
        """Why a table with this manifest must not serve `target` with today's kernels, or None if it may."""
        if (self.gpu_name, self.arch) != (target.name, target.arch):
            return f"it is for {self.gpu_name} ({self.arch}), this is {target.name} ({target.arch})"
        now = kernels_named(self.arch, self.provenance)
        if self.kernel_fingerprint != now:
            return (
                f"its kernel fingerprint {self.kernel_fingerprint[:12]} is stale, the kernels are now "
                f"{now[:12]}; tune again"
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
        return cls(**fields_of("manifest", data, names, names))


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
        cell = absent | fields_of("bucket", data, names, [n for n in names if n not in absent])
        batch = batch_size("bucket", cell["batch"])
        try:
            for name in ("config", "runner_up"):
                if not isinstance(cell[name], dict) and not (name == "runner_up" and cell[name] is None):
                    raise TableError(f"bucket {batch}: {name} is {short(cell[name])}, expected an object")
                counts(f"bucket {batch}: {name}", cell[name] or {})
            config = config_from_json(cell["config"])
            runner_up = None if cell["runner_up"] is None else config_from_json(cell["runner_up"])
        except TableError:
            raise
        except (ValueError, TypeError) as error:
            raise TableError(f"bucket {batch}: {error}") from error
        if not isinstance(cell["peers"], dict):
            raise TableError(f"bucket {batch}: peers is {short(cell['peers'])}, expected an object")
        measured = {n: number(f"bucket {batch}: {n}", cell[n]) for n in ("time_us", "bytes", "gb_s", "limit_fraction")}
        optional = {
            n: number(f"bucket {batch}: {n}", cell[n], optional=True) for n in ("runner_up_us", "margin", "default_us")
        }
        peers = {str(k): number(f"bucket {batch}: peer {k}", v) for k, v in cell["peers"].items()}
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
            raise TableError(f"its schema is {short(data.get('schema'))}, this version reads {SCHEMA}")
        names = ("schema", "manifest", "entries")
        table = fields_of("table", data, names, names)
        entries: dict[Problem, tuple[Cell, ...]] = {}
        for one in list_of("entries", table["entries"]):
            entry = fields_of("entry", one, ("problem", "buckets"), ("problem", "buckets"))
            if not isinstance(entry["problem"], dict) or not isinstance(entry["buckets"], list):
                raise TableError("entry: expected an object for problem and a list for buckets")
            counts("entry: problem", entry["problem"])
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
