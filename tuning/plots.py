"""The plots of a report: each a PNG with its numbers in a CSV of the same name, and once more on dark paper."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .results import Candidate, CellResult, Results
from .theme import DARK, DARK_INK, DEFAULT, EMPTY, INK, LIGHT, LIMIT, MUTED, OURS, PEER_COLOURS, PEER_MARKERS

STYLE = LIGHT  # of plots that are drawn once
COLUMNS = 2  # of panels: a page is two panels wide, however many workloads there are
_STRIP = 0.62  # inches of a figure's title and provenance
_PANEL_HEIGHT = 3.8
_MAP_ROWS = 24  # configs of a heat map at most


def provenance(results: Results) -> str:
    """One line that every plot carries."""
    m = results.manifest
    model = m.policy.get("cost_model")
    kind = (
        "measured" if results.measured else f"ESTIMATED by the cost model{f' {model}' if model else ''}, not measured"
    )
    return f"{m.gpu_name} ({m.arch}) · {kind} · kernels {m.kernel_fingerprint[:8]} · {m.date[:10]}"


def frame(results: Results) -> pd.DataFrame:
    """One row a cell: what won, by how much, against what."""
    rows: list[dict[str, Any]] = []
    for cell in results.cells:
        winner = cell.decide(results.margin)
        if winner is None or winner.time_us is None:
            continue
        default_us = cell.default_time()
        gbs = cell.bytes / winner.time_us / 1e3
        row: dict[str, Any] = {
            "workload": cell.label,
            "problem": cell.problem.label(),
            "batch": cell.batch,
            "config": winner.config.label(),
            "default": cell.default.label(),
            "time_us": winner.time_us,
            "spread": winner.spread,
            "default_us": default_us,
            "limit_us": cell.bytes / results.read_gbs / 1e3,
            "floor_us": cell.floor_us,
            "over_floor": None if cell.floor_us is None else winner.time_us / cell.floor_us,
            "bytes": cell.bytes,
            "flush": cell.flush,
            "gb_s": gbs,
            "limit_fraction": gbs / results.read_gbs,
            "default_kept": _kept_within(cell, winner, results.margin),
            "speedup_over_default": None if default_us is None else default_us / winner.time_us,
            "candidates": sum(c.time_us is not None for c in cell.candidates),
            "failed": sum(c.stage == "failed" for c in cell.candidates),
        }
        for peer, time_us in cell.best_peers().items():
            row[f"{peer}_us"] = time_us
            row[f"speedup_over_{peer}"] = time_us / winner.time_us
        rows.append(row)
    return pd.DataFrame(rows)


def _kept_within(cell: CellResult, winner: Candidate, margin: float) -> str:
    """Says so where the default won although another config is a little faster; empty elsewhere."""
    faster = (cell.timed[0].time_us or 0.0) < (winner.time_us or 0.0) and winner.config == cell.default
    return f"lead under {100 * margin:g}%" if faster else ""


def peers_of(table: pd.DataFrame) -> list[str]:
    """Peers that some cell has a time of; each peer's best before its default."""
    return sorted(
        c.removeprefix("speedup_over_") for c in table if c.startswith("speedup_over_") and c != "speedup_over_default"
    )


@dataclass(frozen=True, slots=True)
class Drawn:
    """A plot: its PNG file (the CSV beside it), and the bytes of the same PNG on dark paper."""

    path: Path
    dark: bytes


def draw_all(results: Results, folder: Path, stem: str) -> dict[str, Drawn]:
    """Draw every plot of one GPU's results; returns them by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    table = frame(results)
    made: dict[str, Drawn] = {}
    plans: list[tuple[str, Callable[[], tuple[Figure, pd.DataFrame]]]] = [
        ("time", lambda: _time(results, table)),
        ("bandwidth", lambda: _bandwidth(results, table)),
        ("speedup", lambda: _speedup(results, table)),
        ("winners", lambda: _winners(results, table)),
        ("configs", lambda: _configs(results)),
    ]
    for kind, make in plans:
        path = folder / f"{stem}-{kind}.png"
        light, data = _png(make, LIGHT)
        path.write_bytes(light)
        data.to_csv(path.with_suffix(".csv"), index=False, float_format="%.6g")
        made[kind] = Drawn(path, _png(make, DARK)[0])
    return made


def _png(make: Callable[[], tuple[Figure, pd.DataFrame]], style: dict[Any, Any]) -> tuple[bytes, pd.DataFrame]:
    with plt.rc_context(style):
        figure, data = make()
        image = io.BytesIO()
        figure.savefig(image, format="png", bbox_inches="tight", metadata={"Software": None})
        plt.close(figure)
    return image.getvalue(), data


def _header(figure: Figure, results: Results, title: str) -> None:
    """Title and provenance at the top left, in a strip of their own whatever the figure's height."""
    strip = _STRIP / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - strip), h_pad=0.08)  # type: ignore[union-attr, call-arg]
    figure.text(0.01, 1 - 0.06 * strip, f"{results.title}: {title}", va="top", fontsize=12.5, fontweight="bold")
    colour = MUTED if results.measured else PEER_COLOURS[0]
    figure.text(0.01, 1 - 0.56 * strip, provenance(results), va="top", fontsize=8.5, color=colour)


def _panels(
    results: Results,
    labels: Sequence[str],
    title: str,
    *,
    width: float = 5.2,
    heights: Sequence[float] | None = None,
    share_y: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A panel a label, row by row in `COLUMNS` columns; `heights` (inches) of each, a row takes its highest one's."""
    columns = min(COLUMNS, len(labels))
    each = heights or [_PANEL_HEIGHT] * len(labels)
    rows = [max(each[i : i + columns]) for i in range(0, len(each), columns)]
    figure, grid = plt.subplots(
        len(rows),
        columns,
        figsize=(width * columns, _STRIP + sum(rows)),
        squeeze=False,
        sharey=share_y,
        height_ratios=rows,
        layout="constrained",
    )
    _header(figure, results, title)
    axes = list(grid.flat)
    for ax in axes[len(labels) :]:
        ax.remove()
    for ax, label in zip(axes, labels, strict=False):
        ax.set_title(label)
        ax.tick_params(labelleft=True)  # a reader of one panel should not have to look for its scale
    return figure, axes[: len(labels)]


def batch_axis(ax: Axes, batches: Sequence[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(list(batches), [str(b) for b in batches])
    ax.minorticks_off()
    ax.set_xlabel("batch (rows)")


def microseconds_axis(ax: Axes, label: str) -> None:
    """A logarithmic y axis with numbers on it, whatever is drawn already: also where that spans no power of ten."""
    ax.set_yscale("log")
    for subs in ((1.0,), (1.0, 2.0, 5.0)):
        ax.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=subs))
        if len(_ticks(ax)) >= 3:
            break
    else:
        ax.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(4, steps=[1, 2, 2.5, 5, 10]))
    ax.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda v, _: f"{v:g}"))
    ax.yaxis.set_minor_formatter(matplotlib.ticker.NullFormatter())
    ax.set_ylabel(label)


def _ticks(ax: Axes) -> list[float]:
    """The y ticks that are seen."""
    low, high = ax.get_ylim()
    return [tick for tick in ax.get_yticks() if low <= tick <= high]


def _peer_lines(
    ax: Axes,
    part: pd.DataFrame,
    table: pd.DataFrame,
    column: Callable[[str], pd.Series],
    leave_out: frozenset[str] = frozenset(),
) -> None:
    for number, peer in enumerate(peers_of(table)):
        name = f"{peer}_us"
        if peer in leave_out or name not in part or part[name].isna().all():
            continue
        style = "--" if peer.endswith(" default") else "-"
        colour, marker = PEER_COLOURS[number % 4], PEER_MARKERS[number % 4]
        ax.plot(part["batch"], column(name), style, color=colour, lw=1.3, marker=marker, ms=3.5, label=peer)


def _workloads(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """The rows of each problem (two plans may give two of them one label), under its label and its problem's."""
    return [
        (f"{min(part['workload'], key=len)}\n{problem}", part.sort_values("batch"))
        for problem, part in table.groupby("problem", sort=False)
    ]


def _time(results: Results, table: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    parts = _workloads(table)
    figure, axes = _panels(results, [label for label, _ in parts], "time of one call")
    for ax, (_, part) in zip(axes, parts, strict=True):
        batch_axis(ax, part["batch"].tolist())
        ax.plot(part["batch"], part["limit_us"], ":", color=LIMIT, lw=1.2, label="bytes at the read limit")
        if part["floor_us"].notna().any():
            ax.plot(part["batch"], part["floor_us"], "-.", color=LIMIT, lw=1.2, label="floor (streaming kernel)")
        ax.plot(part["batch"], part["default_us"], "-", color=DEFAULT, lw=2.5, label="default config")
        _peer_lines(ax, part, table, lambda name, part=part: part[name])  # type: ignore[misc]
        ax.plot(part["batch"], part["time_us"], "-o", color=OURS, lw=1.6, ms=4, label="winner")
        microseconds_axis(ax, "µs a call")
        ax.legend(loc="upper left")
    columns = ["workload", "problem", "batch", "config", "time_us", "spread", "default_us", "limit_us", "floor_us"]
    return figure, table[columns + [f"{p}_us" for p in peers_of(table)]]


def _bandwidth(results: Results, table: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    parts = _workloads(table)
    figure, axes = _panels(results, [label for label, _ in parts], "bytes moved over time")
    data = table[["workload", "problem", "batch", "config", "bytes", "gb_s", "limit_fraction"]].copy()
    data["limit_gb_s"] = results.read_gbs
    for ax, (_, part) in zip(axes, parts, strict=True):
        batch_axis(ax, part["batch"].tolist())
        ax.axhline(results.read_gbs, color=LIMIT, ls=":", lw=1.2)
        ax.text(
            part["batch"].iloc[0],
            results.read_gbs,
            f"read limit {results.read_gbs:,.0f} GB/s",
            va="bottom",
            fontsize=8.5,
            color=LIMIT,
        )
        ax.plot(
            part["batch"], part["bytes"] / part["default_us"] / 1e3, "-", color=DEFAULT, lw=2.5, label="default config"
        )
        others = frozenset(p for cell in results.cells for p in cell.peers_of_other_work())
        _peer_lines(ax, part, table, lambda name, part=part: part["bytes"] / part[name] / 1e3, others)  # type: ignore[misc]
        ax.plot(part["batch"], part["gb_s"], "-o", color=OURS, lw=1.6, ms=4, label="winner")
        last = part.iloc[-1]
        ax.annotate(
            f"{100 * last['limit_fraction']:.0f}%",
            (last["batch"], last["gb_s"]),
            xytext=(0, -13),  # below: above it may meet the limit
            textcoords="offset points",
            ha="center",
            color=OURS,
            fontweight="bold",
        )
        ax.set_ylim(0, results.read_gbs * 1.13)
        ax.set_ylabel("GB/s")
        ax.legend(loc="best")
    return figure, data


def _speedup(results: Results, table: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    parts = _workloads(table)
    series = ["default", *peers_of(table)]
    against = "default config" + (" and over peers" if len(series) > 1 else "")
    figure, axes = _panels(
        results,
        [label for label, _ in parts],
        f"speed-up over the {against}",
        share_y=True,
    )
    all_values = table[[f"speedup_over_{s}" for s in series]].astype(float).to_numpy()
    known = all_values[np.isfinite(all_values)]
    low, top = min(1.0, known.min(initial=1.0)), max(1.0, known.max(initial=1.0))
    for ax, (_, part) in zip(axes, parts, strict=True):
        shown = [s for s in series if f"speedup_over_{s}" in part and part[f"speedup_over_{s}"].notna().any()]
        x, width = np.arange(len(part)), 0.8 / max(len(shown), 1)
        for number, name in enumerate(shown):
            values = part[f"speedup_over_{name}"].astype(float)
            colour = OURS if name == "default" else PEER_COLOURS[series.index(name) - 1]
            offset = (number - (len(shown) - 1) / 2) * width
            bars = ax.bar(
                x + offset,
                values - 1,
                width * 0.9,
                bottom=1,
                color=colour,
                label=f"over {name}{' config' if name == 'default' else ''}",
            )
            if len(shown) <= 2:
                ax.bar_label(bars, [f"{v:.2f}" for v in values], fontsize=7.5, padding=2, color=INK)
        ax.axhline(1, color=LIMIT, lw=1)
        ax.set_xticks(x, [str(b) for b in part["batch"]])
        ax.grid(axis="x", visible=False)
        ax.set_xlabel("batch (rows)")
        ax.set_ylabel("times as fast (1 = equal)")
        ax.legend(loc="upper left", ncols=min(len(shown), 2))
    # room for the legend above the highest bar
    axes[0].set_ylim(min(0.98, low - 0.05), max(1.1, top + (0.12 + 0.06 * (len(series) // 2)) * (top - low + 0.3)))
    return figure, table[["workload", "problem", "batch", "config", "default", *(f"speedup_over_{s}" for s in series)]]


def _winners(results: Results, table: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    problems = table.drop_duplicates("problem")[["workload", "problem"]]
    batches = sorted(table["batch"].unique())
    heads = {c.config.label(): c.config.heads_per_cta for cell in results.cells for c in cell.candidates}
    heads = {label: heads[label] for label in table["config"].unique()}
    figure, ax = plt.subplots(figsize=(1.9 + 1.0 * len(batches), 1.5 + 0.82 * len(problems)), layout="constrained")
    _header(figure, results, "winner map")
    colours = plt.get_cmap("Blues")
    most = max(heads.values(), default=1)
    for y, problem in enumerate(problems["problem"]):
        for x, batch in enumerate(batches):
            cell = table[(table["problem"] == problem) & (table["batch"] == batch)]
            if cell.empty:
                ax.add_patch(plt.Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=EMPTY))
                ax.text(x, y, "no time", ha="center", va="center", color=MUTED, fontsize=8)
                continue
            row = cell.iloc[0]
            shade = 0.18 + 0.6 * np.log2(heads[row["config"]]) / max(np.log2(most), 1)
            ax.add_patch(plt.Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=colours(shade)))
            ink = "white" if shade > 0.5 else DARK_INK
            gain = row["speedup_over_default"]
            is_default = row["config"] == row["default"]
            below = (
                "default kept"
                if row["default_kept"]
                else "default"
                if is_default
                else ("" if gain is None or pd.isna(gain) else f"{gain:.2f}x default")
            )
            words = row["config"].split()
            ax.text(
                x, y - 0.2, " ".join(words[:3]), ha="center", va="center", color=ink, fontsize=9.5, fontweight="bold"
            )
            ax.text(x, y + 0.04, " ".join(words[3:]), ha="center", va="center", color=ink, fontsize=8.5)
            ax.text(x, y + 0.28, below, ha="center", va="center", color=ink, fontsize=7.5)
    ax.set_xlim(-0.5, len(batches) - 0.5)
    ax.set_ylim(len(problems) - 0.5, -0.5)
    ax.set_xticks(range(len(batches)), [str(b) for b in batches])
    ax.set_yticks(range(len(problems)), [f"{w}\n{p}" for w, p in problems.itertuples(index=False)], color=INK)
    ax.set_xlabel("batch (rows)")
    ax.grid(False)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    return figure, table[["workload", "problem", "batch", "config", "default", "speedup_over_default"]]


def _slowdown(cells: list[CellResult]) -> pd.DataFrame:
    rows = []
    for cell in cells:
        timed = [c for c in cell.candidates if c.time_us is not None]
        fastest = min((c.time_us for c in timed if c.time_us is not None), default=None)
        for c in timed:
            assert c.time_us is not None and fastest is not None
            rows.append(
                {
                    "workload": cell.label,
                    "problem": cell.problem.label(),
                    "batch": cell.batch,
                    "config": c.config.label(),
                    "stage": c.stage,
                    "time_us": c.time_us,
                    "spread": c.spread,
                    "slowdown": c.time_us / fastest,
                    **c.facts,
                }
            )
    return pd.DataFrame(rows)


def _configs(results: Results) -> tuple[Figure, pd.DataFrame]:
    data = _slowdown(list(results.cells))
    parts = _workloads(data)
    grids = []
    for _, part in parts:
        grid = part.pivot(index="config", columns="batch", values="slowdown")
        order = grid.fillna(9.0).mean(axis=1).sort_values().index
        fastest = set(grid.idxmin())  # of each batch, whatever it is elsewhere
        shown = {*fastest, *[c for c in order if c not in fastest][: max(0, _MAP_ROWS - len(fastest))]}
        grids.append(grid.loc[[c for c in order if c in shown]])
    figure, axes = _panels(
        results,
        [f"{label} · best {len(grid)}" for (label, _), grid in zip(parts, grids, strict=True)],
        "time over the fastest of each batch",
        width=5.6,
        heights=[1.25 + 0.235 * len(grid) for grid in grids],
    )
    for ax, grid in zip(axes, grids, strict=True):
        image = ax.imshow(grid.to_numpy(dtype=float), cmap="YlOrRd", vmin=1.0, vmax=1.5, aspect="auto")
        ax.set_xticks(range(len(grid.columns)), [str(b) for b in grid.columns])
        ax.set_yticks(range(len(grid.index)), list(grid.index), fontsize=8)
        ax.set_xlabel("batch (rows)")
        ax.grid(False)
        ax.tick_params(length=0)
        for (y, x), value in np.ndenumerate(grid.to_numpy(dtype=float)):
            if np.isfinite(value):
                ax.text(
                    x,
                    y,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if value > 1.38 else DARK_INK,
                )
    # beside the first row alone: on a page of many rows a bar of the whole height would say no more
    figure.colorbar(image, ax=axes[:COLUMNS], shrink=0.8, label="time / fastest", extend="max")
    return figure, data
