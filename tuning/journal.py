"""The journal of a sweep: one JSON line a result, written before the next one starts, and found again on a rerun."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any


def key_of(facts: Mapping[str, Any]) -> str:
    """A canonical key of JSON facts: equal facts give equal keys in every process."""
    return json.dumps(facts, sort_keys=True, separators=(",", ":"))


class Journal:
    """Append-only results by key; the last line of a key counts.

    A line that a kill cut short is cut off on opening, so that the next one starts clean; `damaged` counts it
    and any other line that does not parse.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.damaged = 0
        self._results: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        keep = 0
        if path.exists():
            content = path.read_bytes()
            for raw in content.splitlines(keepends=True):
                if not raw.endswith(b"\n"):
                    self.damaged += 1
                    break
                keep += len(raw)
                try:
                    record = json.loads(raw)
                    self._results[key_of(record["key"])] = record["result"]
                except (ValueError, KeyError, TypeError):
                    self.damaged += 1
            if keep < len(content):
                os.truncate(path, keep)
        self._file = path.open("a", encoding="utf-8")

    def get(self, key: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result recorded for these facts, or None."""
        return self._results.get(key_of(key))

    def add(self, key: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Record a result; it is in the file, and survives a kill, when this returns."""
        line = json.dumps({"key": dict(key), "result": dict(result)}, sort_keys=True)
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
