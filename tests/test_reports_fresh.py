"""Committed results belong to the kernels in the tree: each records the fingerprint of the sources it was made with.

Times of whole decode steps record that of the conv's and the norm's too, and the machine code of both: sources that
compile to the same code as those that were timed are as good.

A report that is kept for the record says `"historical": true` at its top level; a table never may, since the run
time would not use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from replayssm_tuning import layer_report

from replayssm_cute import fingerprint

ROOT = Path(__file__).resolve().parent.parent
TABLES = ROOT / "replayssm_cute" / "tables"


def recorded(data: Any, name: str = "kernel_fingerprint") -> Iterator[Any]:
    """Every value of a key of that name, at any depth."""
    if isinstance(data, dict):
        for key, value in data.items():
            if key == name:
                yield value
            else:
                yield from recorded(value, name)
    elif isinstance(data, list):
        for value in data:
            yield from recorded(value, name)


def complaint(path: Path, *, may_be_historical: bool) -> str | None:
    """What is wrong with one result file, or None."""
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        return f"is no JSON: {error}"
    if isinstance(data, dict) and data.get("historical") is True:
        return None if may_be_historical else 'says "historical", which a table may not be: remove it'
    if isinstance(data, dict) and "layer_kernel_fingerprint" in data:
        return layer_complaint(data)
    found = set(recorded(data))
    now = fingerprint.kernels()
    if not found:
        return 'records no "kernel_fingerprint": write fingerprint.kernels() into it'
    if found != {now}:
        others = ", ".join(sorted(str(f)[:12] for f in found - {now}))
        return f"was made with kernels {others}, the sources are now {now[:12]}"
    of_cache, cache_now = set(recorded(data, "cache_kernel_fingerprint")), fingerprint.kernels("cache")
    if of_cache - {cache_now}:
        others = ", ".join(sorted(str(f)[:12] for f in of_cache - {cache_now}))
        return f"was made with cache kernels {others}, the sources are now {cache_now[:12]}"
    return None


def layer_complaint(data: dict[str, Any]) -> str | None:
    """What is wrong with times of decode steps, or with a table made from them."""
    if "machine_code" in data:
        return layer_report.stale_reason(data)
    for key, group in (("kernel_fingerprint", "step"), ("layer_kernel_fingerprint", "fused")):
        if data.get(key) != fingerprint.kernels(group):
            return f"was made with {group} kernels {str(data.get(key))[:12]}, now {fingerprint.kernels(group)[:12]}"
    return None


def complaints(root: Path, reports: Iterable[Path], tables: Iterable[Path]) -> list[str]:
    """One line for each file that is stale or says too little."""
    lines = []
    for paths, may_be_historical in ((reports, True), (tables, False)):
        for path in sorted(paths):
            if problem := complaint(path, may_be_historical=may_be_historical):
                lines.append(f"{path.relative_to(root)} {problem}")
    return lines


def test_results_in_the_tree_are_fresh() -> None:
    mine = ROOT / "reports" / "tune"  # what `make tune` left here; never committed
    reports = (p for p in (ROOT / "reports").rglob("*.json") if mine not in p.parents)
    stale = complaints(ROOT, reports, TABLES.rglob("*.json"))
    assert not stale, (
        "these results do not belong to the kernels in the tree; make them again, or, for a report kept for the "
        'record, add "historical": true at its top level:\n  ' + "\n  ".join(stale)
    )


@pytest.mark.parametrize(
    "text,said",
    [
        ('{"manifest": {"kernel_fingerprint": "NOW"}, "cells": []}', None),
        ('{"runs": [{"kernel_fingerprint": "NOW"}, {"kernel_fingerprint": "NOW"}]}', None),
        ('{"kernel_fingerprint": "0123456789abcdef"}', "made with kernels 0123456789ab, the sources are now"),
        ('{"runs": [{"kernel_fingerprint": "NOW"}, {"kernel_fingerprint": "0123456789abcdef"}]}', "0123456789ab"),
        ('{"kernel_fingerprint": null}', "made with kernels None"),
        ('{"kernel_fingerprint": "0123", "historical": true}', None),
        ('{"kernel_fingerprint": "0123", "historical": "yes"}', "made with kernels 0123"),
        ('{"us": 3.0}', "records no"),
        ("[]", "records no"),
        ('{"kernel_fingerprint": "NOW", "cache_kernel_fingerprint": "CACHE"}', None),
        ('{"kernel_fingerprint": "NOW", "cache_kernel_fingerprint": "0123456789abcdef"}', "cache kernels 0123456789ab"),
        ('{"kernel_fingerprint": "NOW", "layer_kernel_fingerprint": "FUSED"}', None),
        ('{"kernel_fingerprint": "NOW", "layer_kernel_fingerprint": "0123"}', "was made with fused kernels 0123, now"),
        ('{"kernel_fingerprint": "0123", "layer_kernel_fingerprint": "FUSED"}', "was made with step kernels 0123, now"),
        ('{"kernel_fingerprint": ', "is no JSON"),
    ],
)
def test_what_is_said_of_a_report(tmp_path: Path, text: str, said: str | None) -> None:
    path = tmp_path / "reports" / "deep" / "r.json"
    path.parent.mkdir(parents=True)
    for name, group in (("NOW", "step"), ("CACHE", "cache"), ("FUSED", "fused")):
        text = text.replace(name, fingerprint.kernels(group))
    path.write_text(text)
    lines = complaints(tmp_path, (tmp_path / "reports").rglob("*.json"), [])
    assert len(lines) == (said is not None)
    if said is not None:
        assert lines[0].startswith("reports/deep/r.json ") and said in lines[0]


def test_a_table_may_not_be_historical(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"historical": True, "kernel_fingerprint": fingerprint.kernels()}))
    assert complaints(tmp_path, [], [path]) == ['table.json says "historical", which a table may not be: remove it']


def test_the_fingerprint_covers_the_kernel_sources() -> None:
    """A change in any kernel file, or in what shapes its code, makes another fingerprint; other files do not count."""
    sources = fingerprint.kernel_sources()
    assert {"kernels/step.py", "ring.py", "config.py", "problem.py"} <= set(sources)
    assert "reference.py" not in sources
    assert fingerprint.of_sources(sources) == fingerprint.kernels()
    for name in sources:
        assert fingerprint.of_sources(sources | {name: sources[name] + b"pass\n"}) != fingerprint.kernels()
