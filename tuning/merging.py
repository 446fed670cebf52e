"""Joining a sweep's results with those of earlier sweeps into the same folder: a narrower one loses nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from replayssm_cute import tables

from .results import CellResult, Results


def conflict(old: tables.Manifest, new: tables.Manifest) -> str:
    """In what two manifests differ so that their cells must not stand in one table; empty if they may."""
    pairs = {
        "GPU": (old.gpu_name, new.gpu_name),
        "architecture": (old.arch, new.arch),
        "kernels": (old.kernel_fingerprint[:12], new.kernel_fingerprint[:12]),
        "provenance": (old.provenance, new.provenance),
        "cost model": (old.policy.get("cost_model"), new.policy.get("cost_model")),
    }
    return ", ".join(f"{name} {a or 'unknown'}, now {b or 'unknown'}" for name, (a, b) in pairs.items() if a != b)


def merge(old: Results, new: Results) -> tuple[Results, int]:
    """The new results and the old cells that they have no winner for; also how many cells those are.

    Cells of another acceptance than the new one's under the same label get it into their own.
    """
    there = {(c.problem, c.batch) for c in new.cells if c.decide(new.margin) is not None}
    kept = [c for c in old.cells if (c.problem, c.batch) not in there and c.decide(new.margin) is not None]
    if not kept:
        return _spent(old, new, new.manifest.acceptance), 0
    labels = {c.problem: c.label for c in new.cells}
    ours, theirs = new.manifest.acceptance, old.manifest.acceptance
    acceptance: dict[str, Any] = {}
    merged: list[CellResult] = []
    for cell in kept:
        label = _label(cell.label, labels.get(cell.problem, cell.label), theirs, ours)
        if cell.label in theirs:
            acceptance[label] = theirs[cell.label]
        merged.append(dataclasses.replace(cell, label=label))
    covered = {(c.problem, c.batch) for c in kept}
    merged += [c for c in new.cells if (c.problem, c.batch) not in covered]
    order = {p: n for n, p in enumerate(dict.fromkeys(c.problem for c in (*old.cells, *new.cells)))}
    merged.sort(key=lambda c: (order[c.problem], c.batch))
    said = f"{len(kept)} of {len(merged)} cells are of an earlier sweep (plan {old.plan}, {old.manifest.date[:10]})"
    notes = (*new.notes, said, *(f"earlier: {n.removeprefix('earlier: ')}" for n in old.notes if n not in new.notes))
    found = dataclasses.replace(new, cells=tuple(merged), notes=tuple(dict.fromkeys(notes)))
    return _spent(old, found, acceptance | dict(ours)), len(kept)


def _label(was: str, now: str, theirs: Any, ours: Any) -> str:
    """The label of a kept cell: today's, with its acceptance where that is another one."""
    if was not in theirs or now not in ours or _load(theirs[was]) == _load(ours[now]):
        return now
    suffix = f" ({theirs[was]['name']}, mean {theirs[was]['mean']:.2f})"
    return was if was.endswith(suffix) else now + suffix


def _load(entry: Any) -> tuple[Any, Any]:
    return entry["lengths"], entry.get("tokens")


def _spent(old: Results, new: Results, acceptance: Any) -> Results:
    """`new` with the time of both sweeps, since what the first one tried is in the journal for the second."""
    policy = dict(new.manifest.policy)
    if "spent_s" in policy and "spent_s" in old.manifest.policy:
        policy["spent_s"] = round(policy["spent_s"] + old.manifest.policy["spent_s"], 1)
    return dataclasses.replace(new, manifest=dataclasses.replace(new.manifest, policy=policy, acceptance=acceptance))
