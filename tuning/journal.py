"""The journal of a sweep: one JSON line a result, written before the next one starts, and found again on a rerun."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from .ranks import Ranks

PATTERN = "journal*.jsonl"


def key_of(facts: Mapping[str, Any]) -> str:
    """A canonical key of JSON facts: equal facts give equal keys in every process."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


class Journal:
    """Append-only results by key; the latest of a key counts.

    A line that a kill cut short is cut off on opening, so that the next one starts clean; `damaged` says so, and
    names any other line that does not parse and is left out.

    Args:
        path: the file that this process alone writes.
        others: files whose results count too; they are read now, and never written.
    """

    def __init__(self, path: Path, others: Iterable[Path] = ()) -> None:
        self.path = path
        self.damaged: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        found: list[tuple[float, str, dict[str, Any]]] = []
        for other in others:
            self._read(other, found)
        if path.exists():
            keep = self._read(path, found)
            if keep < path.stat().st_size:
                os.truncate(path, keep)
        found.sort(key=lambda record: record[0])  # stable: lines without a time come first, in their order
        self._results = {key: result for _, key, result in found}
        self._file = path.open("a", encoding="utf-8")

    @classmethod
    def of(cls, folder: Path, ranks: Ranks) -> Journal:
        """The journal of one rank; it knows what every journal in the folder says, whoever wrote it."""
        path = folder / (f"journal.rank{ranks.rank}.jsonl" if ranks.several else "journal.jsonl")
        return cls(path, (p for p in sorted(folder.glob(PATTERN)) if p != path))

    def _read(self, path: Path, found: list[tuple[float, str, dict[str, Any]]]) -> int:
        """Add the records of a file; returns the length of its whole lines."""
        length = 0
        # Not splitlines: a stray carriage return would end the file there, and what follows would be cut off.
        *whole, rest = path.read_bytes().split(b"\n")
        if rest:
            self.damaged.append(f"{path.name}: its last line is cut short (as by a kill) and left out")
        for number, raw in enumerate(whole, 1):
            length += len(raw) + 1
            try:
                record = json.loads(raw)
                found.append((float(record.get("at", 0.0)), key_of(record["key"]), dict(record["result"])))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                self.damaged.append(f"{path.name}: line {number} is damaged and left out")
        return length

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result recorded for these facts, or None."""
        return self._results.get(key_of(key))

    def add(self, key: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Record a result; it is in the file, and survives a kill, when this returns."""
        line = json.dumps({"at": round(time.time(), 3), "key": dict(key), "result": dict(result)}, sort_keys=True)
        self._file.write(line + "\n")
        self._file.flush()
        self._results[key_of(key)] = dict(result)

    def __iter__(self) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        for key, result in self._results.items():
            yield json.loads(key), result

    def __len__(self) -> int:
        return len(self._results)

    def close(self) -> None:
        """Close the file; everything is on disk already."""
        self._file.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
