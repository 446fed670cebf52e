"""Reading, merging and writing table files, and where they lie."""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
from pathlib import Path

import filelock

from .. import atomic
from .fields import TableError, read_json
from .schema import Table, merge

log = logging.getLogger("replayssm_cute")

_LOCK_SECONDS = 60.0
ESTIMATED = "estimated"  # named in place of a file: the estimated tables that the package brings for the GPU at hand


def read(path: Path | str) -> Table:
    """The table in a file, checked.

    Raises:
        TableError: if it cannot be read or is no table of this schema; the message says why, not where.
    """
    return Table.from_json(read_json(Path(path)))


def load(path: Path | str) -> Table | None:
    """The table in a file, or None with one log line that says why it is not used."""
    try:
        return read(path)
    except TableError as error:
        log.warning("table %s is not used: %s", path, error)
        return None


def write(path: Path | str, table: Table) -> None:
    """Write a table file at once: readers see the old content or the new one, never a part."""
    atomic.write_text(Path(path), _text(table))


def _text(table: Table) -> str:
    """A table's JSON, a bucket a line: a readable layout would be twice as long."""
    data = table.to_json()
    entries = []
    for entry in data.pop("entries"):
        buckets = ",\n  ".join(json.dumps(bucket, allow_nan=False) for bucket in entry["buckets"])
        entries.append(f'{{"problem": {json.dumps(entry["problem"])}, "buckets": [\n  {buckets}]}}')
    head = json.dumps(data, indent=1, allow_nan=False).removesuffix("\n}")
    return f'{head},\n "entries": [\n' + ",\n".join(entries) + "\n]}\n"


def update(path: Path | str, table: Table) -> Table:
    """Merge `table` into the file under a lock, so that many writers lose nothing; returns what was written.

    A file that is no table, or one of another GPU, kernel or provenance, is replaced; it is kept under another name,
    and a log line says so.

    Raises:
        filelock.Timeout: if another process holds the lock for a minute.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(path.with_name(f"{path.name}.lock"), timeout=_LOCK_SECONDS):
        if path.exists():
            try:
                table = merge(read(path), table)
            except TableError as error:
                kept = _set_aside(path)
                log.warning("table %s is replaced: %s; the old file is now %s", path, error, kept.name)
        write(path, table)
    return table


def _set_aside(path: Path) -> Path:
    """Give a file a name that is free."""
    names = (path.with_name(f"{path.name}.replaced{f'-{n}' if n > 1 else ''}") for n in itertools.count(1))
    kept = next(name for name in names if not name.exists())
    path.rename(kept)
    return kept


def shipped() -> list[Path]:
    """The measured table files that the package brings."""
    return sorted(Path(__file__).parent.glob("*.json"))


def estimated(gpu_name: str) -> list[Path]:
    """The estimated table files that the package brings for a GPU; they serve where `ESTIMATED` is named."""
    return sorted((estimated_folder() / slug(gpu_name)).glob("*.json"))


def estimated_folder() -> Path:
    """Where they lie, in a folder for each GPU."""
    return Path(__file__).parent / ESTIMATED


def slug(name: str) -> str:
    """A file-name-safe form of a GPU's name."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def user_paths() -> list[Path]:
    """What REPLAYSSM_TABLES names (separated as in PATH), the first one first: table files, and `ESTIMATED`."""
    # Not Path.expanduser, which raises for a user without a home: such a path is left as it is, and read in vain.
    return [Path(os.path.expanduser(p)) for p in os.environ.get("REPLAYSSM_TABLES", "").split(os.pathsep) if p]
