"""Compiled kernels on disk: what an entry consists of, how it is written, and when it may be used.

An entry is two files in a directory named after its key: the exported object, and a JSON file that commits it
(its hash, what it was compiled from, the kernel's resources). The key holds everything that shapes the GPU
code. The host code in the object is generated for the CPU that compiled it, so an entry also names that CPU's
instruction sets, and is used where all of them exist; hosts that differ keep entries side by side.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import fingerprint, resources


def cache_dir() -> Path:
    """Where compiled kernels are kept: $REPLAYSSM_CACHE_DIR, else ~/.cache/replayssm_cute."""
    chosen = os.environ.get("REPLAYSSM_CACHE_DIR")
    try:
        return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "replayssm_cute"
    except RuntimeError:  # no home: a path that nobody can create, which ends in the documented fallback
        return Path(os.devnull) / (chosen or "replayssm_cute")


def key_of(parts: object) -> str:
    """The key (hex) of JSON data."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def host() -> str:
    """Name of this CPU's files in an entry's directory."""
    return hashlib.sha256(" ".join(sorted(fingerprint.host_isa())).encode()).hexdigest()[:12]


class DamagedEntry(ValueError):
    """An entry on disk that must not be used."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled kernel as it lies on disk.

    Attributes:
        path: the object file; its JSON file has the same name with another suffix.
        resources: what the kernel asks of a multiprocessor.
    """

    path: Path
    resources: resources.Resources

    def object_bytes(self) -> bytes:
        """The object file's content."""
        return self.path.read_bytes()


def _read(meta_path: Path) -> Entry | None:
    """The entry that `meta_path` commits; None if it was compiled for instruction sets that this CPU lacks.

    Raises:
        DamagedEntry: if anything about it is not as it was written.
    """
    try:
        meta = json.loads(meta_path.read_bytes())
        isa = meta["host_isa"]
        if not isinstance(isa, list) or not all(isinstance(x, str) for x in isa):
            raise DamagedEntry("host_isa is no list of names")
        if not fingerprint.host_isa().issuperset(isa):
            return None
        if key_of(meta["key"]) != meta_path.parent.name:
            raise DamagedEntry("it is the entry of another kernel")
        path = meta_path.with_suffix(".o")
        # A truncated object can crash the loader, so its hash is checked before it gets there.
        if hashlib.sha256(path.read_bytes()).hexdigest() != meta["sha256"]:
            raise DamagedEntry("the object's hash is not the one recorded")
        return Entry(path, resources.Resources.from_json(meta["resources"]))
    except DamagedEntry:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedEntry(f"{type(error).__name__}: {error}") from error


def find(directory: Path, damaged: Callable[[Path, DamagedEntry], None]) -> Entry | None:
    """A usable entry in `directory`: this CPU's own, else one whose instruction sets this CPU has.

    A damaged one is told to `damaged`, and counts as none.
    """
    own = f"{host()}.json"
    committed: list[Path] = []
    with contextlib.suppress(OSError):  # no such directory, or none that this user may look into
        committed = sorted((p for p in directory.iterdir() if p.suffix == ".json"), key=lambda p: (p.name != own, p))
    for meta_path in committed:
        try:
            found = _read(meta_path)
        except DamagedEntry as error:
            damaged(meta_path, error)
            continue
        if found is not None:
            return found
    return None


def store(directory: Path, export: Callable[[Path], None], shared_bytes: int, parts: dict[str, Any]) -> Entry:
    """Write an entry into `directory`: each file to a temporary name, then renamed; the JSON file last.

    Args:
        directory: named after the key.
        export: writes the object file.
        shared_bytes: dynamic shared memory of the kernel's launch.
        parts: what the key was made of.
    """
    path = directory / f"{host()}.o"
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(f"{host()}.*.tmp*"):  # of writers that were killed: the key's lock is held
        with contextlib.suppress(OSError):
            leftover.unlink()
    # The exporter tells its format from the suffix.
    part = directory / f"{host()}.{os.getpid()}.tmp.o"
    meta_part = part.with_suffix(".json.tmp")
    try:
        export(part)
        data = part.read_bytes()
        found = resources.read_cubin(resources.cubin(data), shared_bytes)
        meta = {
            "sha256": hashlib.sha256(data).hexdigest(),
            "host_isa": sorted(fingerprint.host_isa()),
            "resources": found.to_json(),
            "key": parts,
        }
        meta_part.write_text(json.dumps(meta, indent=1))
        os.replace(part, path)
        os.replace(meta_part, path.with_suffix(".json"))
    finally:
        for leftover in (part, meta_part):
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)
    return Entry(path, found)
