"""Fitting the cost model's constants to the timings in sweeps' journals, and saying how well they fit.

Damped least squares (Levenberg-Marquardt) on the logarithms of the constants, from fixed random starts. A timing counts
with the square of (cell's fastest / its time): of slow configs the model need only know that they are slow. Cells, that
is one problem and batch of one journal, count alike.
"""

from __future__ import annotations

import datetime
import gzip
import json
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from replayssm_cute import target as targets
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

from . import cost
from .acceptance import stationary
from .journal import key_of

NAMES = tuple(f.name for f in fields(cost.Constants))
# Where the search starts; it may go a factor of `_REACH` to either side, the norm within bounds of its own.
START = cost.Constants(
    launch_us=1.5,
    start_us=0.8,
    products_us=0.1,
    trip_us=0.5,
    queue=0.3,
    several_us=0.2,
    piece_us=0.4,
    piece_issue_us=0.2,
    start_issue_us=0.15,
    row_work=4.0,
    flush_work=1.0,
    reload_us=0.5,
    short_chain=1.5,
    short_issue=1.0,
    write_factor=1.3,
    ring_trip_us=0.2,
    wave=0.3,
    in_step=0.3,
    last=1.5,
    norm=2.0,
)
_REACH = 8.0
_STARTS = 4
_STEPS = 40
_SEED = 0
_PULL = 0.02  # towards the start, per factor of e: what no timing decides stays where it was


@dataclass(frozen=True, slots=True)
class Timing:
    """One measured time.

    Attributes:
        cell: names the timings that may be compared: journal, kernels, problem and batch.
        load: what the model makes of it, knowing the compiled kernel where the journal does.
        time_us: measured.
    """

    cell: str
    problem: Problem
    config: TileConfig
    batch: int
    load: cost.Load
    time_us: float


def read(paths: Iterable[Path], target: Target) -> tuple[list[Timing], set[str]]:
    """Timings of journals (those of a race or a heat in place of single ones), and the fingerprints of their kernels.

    Raises:
        OSError: if a journal cannot be read.
        ValueError: if there are no timings in them, or some of another GPU.
    """
    found: list[Timing] = []
    kernels: set[str] = set()
    journals = {path: list(_records(path)) for path in paths}
    compiled: dict[str, dict[str, Any]] = {}  # of all: what a rank times, another one may have compiled
    for records in journals.values():
        for key, result in records:
            if key["kind"] == "compile" and "registers" in result and key.get("arch", target.arch) == target.arch:
                compiled[_kernel(key, key["config"])] = result
    for path, records in journals.items():
        times: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {}
        for kind in ("time", "heat", "race"):  # each takes the place of those before
            for key, result in records:
                if key["kind"] != kind or "failed" in result:
                    continue
                configs = [key["config"]] if kind == "time" else key["configs"]
                values = [result["value"]] if kind == "time" else result["value"]
                for config, value in zip(configs, values, strict=True):
                    if "kernel" in config:  # the Blackwell kernel's: the model is of the portable one
                        continue
                    where = [key["batch"], key["lengths"], key.get("tokens")]
                    name = key_of({"kernel": _kernel(key, config), "cell": where})
                    times[name] = (key, config, value["time_us"])
        for key, config_json, time_us in times.values():
            if key["gpu"] != target.name:
                raise ValueError(f"{path}: got timings of {key['gpu']}, expected {target.name}")
            problem, config = Problem.from_json(key["problem"]), TileConfig.from_json(config_json)
            mix = stationary(key["lengths"], problem.window, key.get("tokens"))
            known = compiled.get(_kernel(key, config_json))
            resources: cost.HasResources = cost.guess(problem, config)
            if known is not None:
                resources = cost.Guess(known["registers"], known["shared_bytes"], known["stack_bytes"])
            load = cost.load(problem, config, target, key["batch"], mix, resources)
            cell = f"{path.parent.name}/{path.stem} {key['kernels'][:8]} {problem.label()} b{key['batch']}"
            found.append(Timing(cell, problem, config, key["batch"], load, time_us))
            kernels.add(key["kernels"])
    if not found:
        raise ValueError("no timings in these journals")
    return found, kernels


def _text(path: Path) -> str:
    """A journal's text, unpacked where its name ends in .gz."""
    if path.suffix != ".gz":
        return path.read_text(encoding="utf-8")
    try:
        return gzip.decompress(path.read_bytes()).decode()
    except (EOFError, zlib.error) as error:
        raise OSError(f"{path} is damaged: {error}") from error


def _records(path: Path) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
    for line in _text(path).splitlines():
        try:
            record = json.loads(line)
            key, result = record["key"], record["result"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue  # a line that a kill cut short, or no journal's
        if isinstance(key, dict) and isinstance(result, dict) and "kind" in key:
            yield key, result


def _kernel(key: dict[str, Any], config: dict[str, Any]) -> str:
    return key_of({"problem": key["problem"], "config": config, "kernels": key["kernels"]})


def stacked(timings: Sequence[Timing]) -> cost.Load:
    """All loads as one, of arrays: the model's arithmetic takes both."""
    columns = {f.name: np.array([float(getattr(t.load, f.name)) for t in timings]) for f in fields(cost.Load)}
    return cost.Load(**columns)  # type: ignore[arg-type]


def cells(timings: Iterable[Timing]) -> dict[str, list[Timing]]:
    """Timings by cell."""
    found: dict[str, list[Timing]] = defaultdict(list)
    for t in timings:
        found[t.cell].append(t)
    return dict(found)


def fit(timings: Sequence[Timing]) -> cost.Constants:
    """The constants that fit best."""
    weights = np.empty(len(timings))
    fastest = {name: min(t.time_us for t in ts) for name, ts in cells(timings).items()}
    sums: dict[str, float] = defaultdict(float)
    for t in timings:
        sums[t.cell] += (fastest[t.cell] / t.time_us) ** 2
    for i, t in enumerate(timings):
        weights[i] = math.sqrt((fastest[t.cell] / t.time_us) ** 2 / sums[t.cell])
    measured, loads = np.log([t.time_us for t in timings]), stacked(timings)
    centre = np.log(astuple(START))
    low, high = centre - math.log(_REACH), centre + math.log(_REACH)
    high[NAMES.index("in_step")] = math.log(0.95)
    low[NAMES.index("norm")], high[NAMES.index("norm")] = math.log(1.2), math.log(8.0)

    def residuals(point: np.ndarray) -> np.ndarray:
        k = cost.Constants(*np.exp(point).tolist())
        modelled = np.log(cost.time_us(loads, k))
        return np.concatenate(((modelled - measured) * weights, (point - centre) * _PULL))

    random = np.random.default_rng(_SEED)
    best, best_sum = centre, math.inf
    for attempt in range(_STARTS):
        point = np.clip(centre + (random.normal(0, 0.4, len(centre)) if attempt else 0), low, high)
        now, damping = residuals(point), 1e-2
        for _ in range(_STEPS):
            slope = np.stack([(residuals(point + 1e-4 * e) - now) / 1e-4 for e in np.eye(len(point))], axis=1)
            normal = slope.T @ slope
            step = np.linalg.solve(normal + damping * np.eye(len(point)) * normal.diagonal().max(), -slope.T @ now)
            tried = np.clip(point + np.clip(step, -0.5, 0.5), low, high)
            then = residuals(tried)
            if then @ then < now @ now:
                done = now @ now - then @ then < 1e-7 * (now @ now)
                point, now, damping = tried, then, damping / 3
                if done:
                    break
            else:
                damping *= 4
                if damping > 1e6:
                    break
        if now @ now < best_sum:
            best, best_sum = point, float(now @ now)
    return cost.Constants(*(float(f"{v:.4g}") for v in np.exp(best)))


def judge(timings: Iterable[Timing], k: cost.Constants) -> list[dict[str, Any]]:
    """Each cell's errors, rank correlation and the regret of the model's first pick."""
    rows = []
    for name, ts in cells(timings).items():
        modelled = np.asarray(cost.time_us(stacked(ts), k))
        measured = np.array([t.time_us for t in ts])
        error = modelled / measured - 1
        pick = int(modelled.argmin())
        rows.append(
            {
                "cell": name,
                "timings": len(ts),
                "rms_error": round(float(np.sqrt((error**2).mean())), 4),
                "worst_error": round(float(error[np.abs(error).argmax()]), 4),
                "rank_correlation": _spearman(modelled, measured),
                "pick": ts[pick].config.label(),
                "best": ts[int(measured.argmin())].config.label(),
                "regret": round(float(measured[pick] / measured.min() - 1), 4),
            }
        )
    return rows


def _spearman(a: np.ndarray, b: np.ndarray) -> float | None:
    """Rank correlation; None for fewer than three values, or where all are equal."""
    if len(a) < 3:
        return None
    ranks = [np.array([(np.sum(v < x) + np.sum(v <= x)) / 2 for x in v]) for v in (a, b)]  # ties share a mean rank
    if any(r.std() == 0 for r in ranks):
        return None
    return round(float(np.corrcoef(ranks[0], ranks[1])[0, 1]), 4)


def held_out(timings: Sequence[Timing]) -> list[dict[str, Any]]:
    """As `judge`, each cell with the constants fitted to all other batch sizes."""
    rows = []
    for batch in sorted({t.batch for t in timings}):
        seen = [t for t in timings if t.batch != batch]
        if seen:
            rows += judge([t for t in timings if t.batch == batch], fit(seen))
    return rows


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Medians and worst over the cells with at least five timings: of fewer, a pick says little."""
    rows = [r for r in rows if r["timings"] >= 5]
    regrets = [r["regret"] for r in rows]
    ranks = [r["rank_correlation"] for r in rows if r["rank_correlation"] is not None]
    found = {}
    if ranks:
        found = {"median_rank_correlation": round(float(np.median(ranks)), 4), "worst_rank_correlation": min(ranks)}
    if regrets:
        found |= {"median_regret": round(float(np.median(regrets)), 4), "worst_regret": max(regrets)}
    return found


def refit(paths: Sequence[Path], out: Path | None = None, target_name: str = "h200") -> dict[str, Any]:
    """Fit to journals and write the data file, by default the one that the model reads; returns what it holds.

    Raises:
        OSError: if a journal cannot be read, or `out` cannot be written.
        ValueError: if there are no timings in them, or some of another GPU.
    """
    out = out or cost.DATA
    target = targets.named(target_name)
    timings, kernels = read(paths, target)
    k = fit(timings)
    rows, unseen = judge(timings, k), held_out(timings)
    error = np.array([cost.time_us(t.load, k) / t.time_us - 1 for t in timings])
    data = {
        "gpu": target.name,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "kernels": sorted(kernels),
        # as given, so that who stands in the repository finds them; of a path of one machine only its end
        "journals": [f"{p.parent.name}/{p.name}" if p.is_absolute() else p.as_posix() for p in paths],
        "timings": len(timings),
        "rms_error": round(float(np.sqrt((error**2).mean())), 4),
        "worst_error": round(float(error[np.abs(error).argmax()]), 4),
        "constants": dict(zip(NAMES, astuple(k), strict=True)),
        "fitted": summary(rows),
        "held_out_batch": summary(unseen),
        "cells": rows,
        "cells_held_out": unseen,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    cost.fitted.cache_clear()
    return data
