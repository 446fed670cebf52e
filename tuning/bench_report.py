"""Tables and plots of the peers command's results; CSVs lie beside them. Drawn from the JSON file alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.colors
import matplotlib.pyplot as plt
import matplotlib.ticker
import pandas as pd  # type: ignore[import-untyped, unused-ignore]
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from .bench_results import DEFAULT, FLOOR, OURS, Bench, geometric_mean, peer_of
from .plots import batch_axis, microseconds_axis
from .theme import INK, LIGHT, LIMIT, MUTED, PEER_COLOURS
from .theme import OURS as OUR_BLUE

_STRIP = 0.66  # inches of a figure's title and provenance
_ROW = 3.5  # inches of a row of panels


def frame(bench: Bench) -> pd.DataFrame:
    """One row a cell: every entrant's time and spread, ours over the floor, and the others over ours."""
    rows = []
    for cell in bench.cells:
        row: dict[str, Any] = {
            "workload": cell.label,
            "problem": cell.problem.label(),
            "batch": cell.batch,
            "config": cell.config["label"],
            "config_from": cell.config["source"],
            "flush": cell.flush,
            "bytes": cell.bytes,
        }
        for name in bench.entrants():
            entry = cell.times.get(name, {})
            row[f"{name}_us"], row[f"{name}_spread"] = entry.get("time_us"), entry.get("spread")
            if name not in (OURS, FLOOR):
                row[f"{name}_variant"] = entry.get("variant")
                row[f"speedup_over_{name}"] = cell.over(name)
        floor = cell.over(FLOOR)
        row["over_floor"] = None if floor is None else 1 / floor
        rows.append(row)
    return pd.DataFrame(rows)


def peers_of(bench: Bench) -> list[str]:
    """The entrants that are neither ours nor the floor."""
    return [name for name in bench.entrants() if name not in (OURS, FLOOR)]


def means(bench: Bench) -> dict[str, float | None]:
    """Geometric means over all cells that have the entrant: ours over the floor, and each peer over ours."""
    over = [c.over(FLOOR) for c in bench.cells]
    found = {"over_floor": geometric_mean(None if v is None else 1 / v for v in over)}
    return found | {p: geometric_mean(c.over(p) for c in bench.cells) for p in peers_of(bench)}


def losses(bench: Bench) -> list[str]:
    """Cells in which a peer is faster than ours, in words."""
    return [
        f"{peer} at {c.label}, batch {c.batch} ({c.time_us(peer):.2f} us against {c.time_us(OURS):.2f})"
        for c in bench.cells
        for peer in peers_of(bench)
        if (over := c.over(peer)) is not None and over < 1
    ]


# ---------------------------------------------------------------------------------------------------
# On the console
# ---------------------------------------------------------------------------------------------------


def show(bench: Bench, console: Console) -> None:
    """Print the tables, the means, and every cell that is lost."""
    console.print(_cells(bench))
    for table in (_evolved(bench), _host(bench), _pdl(bench)):
        if table.row_count:
            console.print(table)
    for line in (*(f"A PEER IS FASTER: {loss}" for loss in losses(bench)), *(f"note: {n}" for n in bench.notes)):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in left:
        table.add_column(name, no_wrap=name == "problem", overflow="fold")
    for name in right:
        table.add_column(name, justify="right")
    return table


def _number(value: float | None, form: str = "{:.2f}") -> str:
    return "–" if value is None else form.format(value)


def _ratio(value: float | None) -> str:
    return _number(value, "{:.3f}x")


def _cells(bench: Bench) -> Table:
    m, peers = bench.manifest, peers_of(bench)
    right = ["batch", "ours", "spread", "floor", "ours/floor"]
    right += [column for p in peers for column in (p, "/ours")]
    left = ["workload", "problem", "config", "from"]
    table = _table(f"{bench.title}: {m.gpu_name}, kernels {m.kernel_fingerprint[:8]}; us a call", left, right)
    for c in bench.cells:
        floor, spread = c.over(FLOOR), c.times[OURS]["spread"]
        row = [c.label, c.problem.label(), c.config["label"], c.config["source"], str(c.batch)]
        row += [_number(c.time_us(OURS))]
        row += [_number(spread, "{:.1%}"), _number(c.time_us(FLOOR)), _ratio(None if floor is None else 1 / floor)]
        for peer in peers:
            row += [_number(c.time_us(peer)), _ratio(c.over(peer))]
        table.add_row(*row)
    found = means(bench)
    total = ["geometric mean", *[""] * 7, _ratio(found["over_floor"])]
    table.add_section()
    table.add_row(*total, *(text for peer in peers for text in ("", _ratio(found[peer]))), style="bold")
    return table


def _evolved(bench: Bench) -> Table:
    names = list(dict.fromkeys(name for row in bench.evolved for name in row["entrants"]))
    right = ["batch", "steps", "flush", "empty us"]
    right += [column for n in names for column in (f"{n} p50", "p99", "late")]
    table = _table("Steps of evolving cursors, us (empty: the same without a launch)", ["workload"], right)
    for row in bench.evolved:
        line = [row["label"], str(row["batch"]), str(row["steps"]), f"{row['flush']:.1%}", _number(row["empty_us"])]
        for name in names:
            entry = row["entrants"].get(name)
            if entry is None:
                line += ["–"] * 3
            else:
                line += [_number(entry["p50_us"]), _number(entry["p99_us"]), str(entry["late"])]
        table.add_row(*line)
    return table


def _host(bench: Bench) -> Table:
    cpu = bench.manifest.policy.get("cpu") or "unknown CPU"
    table = _table(f"Host time of a call on {cpu}, us", ["what", "problem"], ["batch", "median", "least", "spread"])
    for row in bench.host:
        if "failed" in row:
            table.add_row(row["what"], row["problem"], str(row["batch"]), "failed", "–", "–")
        else:
            numbers = (_number(row["host_us"]), _number(row["least_us"]), _number(row["spread"], "{:.1%}"))
            table.add_row(row["what"], row["problem"], str(row["batch"]), *numbers)
    return table


def _pdl(bench: Bench) -> Table:
    names = list(dict.fromkeys(name for row in bench.pdl for name in row["times"]))
    title = "A producer that triggers early, and the step behind it; us a pair (PDL: the step starts before its end)"
    table = _table(title, ["workload"], ["batch", *names])
    for row in bench.pdl:
        times = [_number((row["times"].get(n) or {}).get("time_us")) for n in names]
        table.add_row(row["label"], str(row["batch"]), *times)
    return table


# ---------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------


def write(bench: Bench, out: Path) -> list[Path]:
    """Write the CSVs and draw the plots; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    tables = {"peers": frame(bench), "evolve": _evolved_frame(bench), "host": pd.DataFrame(bench.host)}
    tables["pdl"] = pd.DataFrame(
        {
            **{k: v for k, v in row.items() if k != "times"},
            **{f"{n}_us": t.get("time_us") for n, t in row["times"].items()},
        }
        for row in bench.pdl
    )
    made = []
    for name, table in tables.items():
        if not table.empty:
            made.append(out / f"{name}.csv")
            table.to_csv(made[-1], index=False, float_format="%.6g")
    with plt.rc_context(LIGHT):
        figures = [("peers", _peers_figure(bench))]
        if bench.evolved:
            figures.append(("evolve", _evolve_figure(bench)))
        for name, figure in figures:
            made.append(out / f"{name}.png")
            figure.savefig(made[-1], bbox_inches="tight", facecolor="white", metadata={"Software": None})
            plt.close(figure)
    return made


def _evolved_frame(bench: Bench) -> pd.DataFrame:
    return pd.DataFrame(
        {**{k: v for k, v in row.items() if k != "entrants"}, "entrant": name, **entry}
        for row in bench.evolved
        for name, entry in row["entrants"].items()
    )


def _provenance(bench: Bench) -> str:
    m = bench.manifest
    versions = ", ".join(f"{k} {v}" for k, v in m.versions.items() if k in ("flashinfer", "torch"))
    kernels = f"kernels {m.kernel_fingerprint[:8]}"
    return f"{m.gpu_name} ({m.arch}) · measured in one run · {kernels} · {versions} · {m.date[:10]}"


def _grid(bench: Bench, title: str, rows: int, columns: int, width: float) -> tuple[Figure, Any]:
    figure, grid = plt.subplots(
        rows, columns, figsize=(width * columns, _STRIP + _ROW * rows), squeeze=False, layout="constrained"
    )
    strip = _STRIP / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - strip), h_pad=0.08)  # type: ignore[union-attr, call-arg]
    figure.text(0.01, 1 - 0.06 * strip, f"{bench.title}: {title}", va="top", fontsize=12.5, fontweight="bold")
    figure.text(0.01, 1 - 0.56 * strip, _provenance(bench), va="top", fontsize=8.5, color=MUTED)
    return figure, grid


def _colours(bench: Bench) -> dict[str, str]:
    """A peer's best and its default share a colour; the default is drawn dashed."""
    bases = list(dict.fromkeys(peer_of(p) for p in peers_of(bench)))
    return {p: PEER_COLOURS[bases.index(peer_of(p)) % len(PEER_COLOURS)] for p in peers_of(bench)}


def _pale(colour: str) -> tuple[float, ...]:
    return tuple(1 - 0.45 * (1 - part) for part in matplotlib.colors.to_rgb(colour))


def _workloads(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    return [
        (f"{part['workload'].iloc[0]}\n{problem}", part.sort_values("batch"))
        for problem, part in table.groupby("problem", sort=False)
    ]


def _peers_figure(bench: Bench) -> Figure:
    """A row a workload: time over the floor's, and speed-up over the peers."""
    parts = _workloads(frame(bench))
    figure, grid = _grid(bench, "time over the floor's, and speed-up over the peers", len(parts), 2, 5.6)
    for (left, right), (label, part) in zip(grid, parts, strict=True):
        _over_floor(left, bench, part)
        _speedups(right, bench, part)
        left.set_title(label)
        right.set_title("")
    return figure


def _over_floor(ax: Axes, bench: Bench, part: pd.DataFrame) -> None:
    batch_axis(ax, part["batch"].tolist())
    floor = f"{FLOOR}_us"
    for peer, colour in _colours(bench).items():
        values = (part[f"{peer}_us"] / part[floor]).astype(float)
        if values.notna().any():
            style = "--" if peer.endswith(DEFAULT) else "-"
            ax.plot(part["batch"], values, style, color=colour, lw=1.3, marker="s", ms=3, label=peer)
    ours = (part[f"{OURS}_us"] / part[floor]).astype(float)
    ax.plot(part["batch"], ours, "-o", color=OUR_BLUE, lw=1.8, ms=4, label=OURS)
    for batch, value in zip(part["batch"], ours, strict=True):
        ax.annotate(
            f"{value:.2f}",
            (batch, value),
            xytext=(0, -12),
            textcoords="offset points",
            ha="center",
            fontsize=7.5,
            color=OUR_BLUE,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
        )
    ax.axhline(1, color=LIMIT, lw=1, ls=":", zorder=0)
    low, high = ax.get_ylim()
    low = min(low, 0.95)
    ax.set_ylim(low - 0.1 * (high - low), high + 0.3 * (high - low))  # room for the labels, and for the legend
    ax.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    ax.set_ylabel("time / floor")
    ax.legend(loc="upper right", ncols=2)


def _speedups(ax: Axes, bench: Bench, part: pd.DataFrame) -> None:
    shown = [p for p in peers_of(bench) if part[f"speedup_over_{p}"].notna().any()]
    if not shown:
        ax.set_axis_off()
        ax.text(0.5, 0.5, "no peer was timed here", ha="center", va="center", color=MUTED, transform=ax.transAxes)
        return
    colours = _colours(bench)
    width = 0.8 / len(shown)
    for number, peer in enumerate(shown):
        values = part[f"speedup_over_{peer}"].astype(float)
        at = [i + (number - (len(shown) - 1) / 2) * width for i in range(len(part))]
        colour = _pale(colours[peer]) if peer.endswith(DEFAULT) else colours[peer]
        bars = ax.bar(at, values - 1, width * 0.9, bottom=1, color=colour, label=f"over {peer}")
        labels = ["" if pd.isna(v) else f"{v:.2f}" for v in values]
        ax.bar_label(bars, labels, fontsize=7, padding=2, color=INK)
    ax.axhline(1, color=LIMIT, lw=1)
    ax.set_xticks(range(len(part)), [str(b) for b in part["batch"]])
    ax.grid(axis="x", visible=False)
    ax.set_xlabel("batch (rows)")
    ax.set_ylabel("times as fast (1 = equal)")
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 0.97), max(high, 1.05) + 0.25 * (high - min(low, 1.0)))
    ax.legend(loc="upper left", ncols=2)


def _evolve_figure(bench: Bench) -> Figure:
    """A panel a workload: p50 and p99 of each entrant's steps by batch, as a dot and a tick joined by a line."""
    table = _evolved_frame(bench)
    parts = list(table.groupby(["label", "problem"], sort=False))
    figure, grid = _grid(
        bench, "a step while cursors evolve: median (dot) and p99 (tick)", -(-len(parts) // 2), min(2, len(parts)), 5.6
    )
    colours = {OURS: OUR_BLUE, **_colours(bench)}
    for ax in list(grid.flat)[len(parts) :]:
        ax.remove()
    for ax, ((label, problem), part) in zip(grid.flat, parts, strict=False):
        batches = sorted(part["batch"].unique())
        names = list(dict.fromkeys(part["entrant"]))
        for number, name in enumerate(names):
            mine = part[part["entrant"] == name]
            at = [batches.index(b) + (number - (len(names) - 1) / 2) * 0.2 for b in mine["batch"]]
            hollow = {"mfc": "white"} if name.endswith(DEFAULT) else {}
            ax.vlines(at, mine["p50_us"], mine["p99_us"], color=colours.get(name, MUTED), lw=1.4)
            ax.plot(at, mine["p50_us"], "o", color=colours.get(name, MUTED), ms=4.5, label=name, **hollow)
            ax.plot(at, mine["p99_us"], "_", color=colours.get(name, MUTED), ms=8)
        microseconds_axis(ax, "µs a step")
        ax.set_xticks(range(len(batches)), [str(b) for b in batches])
        ax.grid(axis="x", visible=False)
        ax.set_xlabel("batch (rows)")
        ax.set_title(f"{label}\n{problem}")
        ax.legend(loc="upper left")
    return figure
