"""Page and plots of the studies, drawn from their JSON alone: `python -m replayssm_tuning.studies --redraw FILE`."""

from __future__ import annotations

import itertools
import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import matplotlib.ticker
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from replayssm_cute import atomic

from .plots import batch_axis
from .theme import LIGHT, LIMIT, MUTED, OURS, PEER_COLOURS, PEER_MARKERS

Row = dict[str, Any]

PAGE, RATIOS, WINDOWS = "studies.md", "ratios.png", "windows.png"
_STRIP = 0.66  # inches of a figure's title and provenance
_LINES = tuple(zip((OURS, *PEER_COLOURS), ("o", *PEER_MARKERS), strict=False))


def load(path: Path) -> dict[str, Any]:
    """What `studies.write` wrote.

    Raises:
        ValueError: if the file is not that, naming it.
    """
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if not data["rows"] or not all({"study", "time_us", "over_first"} <= set(r) for r in data["rows"]):
            raise ValueError("no rows of studies")
        data["manifest"]["kernel_fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{path}: no results of studies ({type(e).__name__}: {e})") from e
    return data


def write(data: dict[str, Any], out: Path) -> list[Path]:
    """Draw the plots that there are rows for, and the page that shows them; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    made = []
    with plt.rc_context(LIGHT):
        for name, figure in ((RATIOS, _ratios(data)), (WINDOWS, _windows(data))):
            if figure is not None:
                made.append(out / name)
                figure.savefig(made[-1], bbox_inches="tight", facecolor="white", metadata={"Software": None})
                plt.close(figure)
    atomic.write_text(out / PAGE, page(data, [p.name for p in made]))
    return [out / PAGE, *made]


def groups(data: dict[str, Any], study: str) -> Iterator[list[Row]]:
    """The rows of each group of a study; the first is the one that times are told over."""
    rows = (r for r in data["rows"] if r["study"] == study)
    return (list(group) for _, group in itertools.groupby(rows, _of_group))


def _of_group(row: Row) -> tuple[str, str, int]:
    """Load, problem without window and raggedness, batch."""
    return row["load"], _line(row), row["batch"]


def _line(row: Row) -> str:
    """The problem without what entrants of a group differ in."""
    return " ".join(w for w in row["problem"].split() if w != "ragged" and not (w[0] == "W" and w[1:].isdigit()))


# ---------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------


def page(data: dict[str, Any], plots: Sequence[str] = ()) -> str:
    """Markdown: a table a study, the plots, how it was measured."""
    lines = ["# Ragged rows, and windows", "", _provenance(data), ""]
    for study, title in (("ragged", "Ragged rows beside dense ones"), ("live rows", "Windows at equal live rows")):
        if table := beside(data, study):
            lines += [f"## {title}", "", *_said(data, study), "", *table, ""]
    if RATIOS in plots:
        lines += [f"![Time over the first entrant's]({RATIOS})", ""]
    if table := windows(data):
        said = (
            "Microseconds a step, mean over the mix. Each window's time is that of the fastest of the configs raced "
            "for it: the one that a call gets and those that the cost model thinks fastest. Bold: the fastest window."
        )
        lines += ["## Windows at equal acceptance", "", *textwrap.wrap(said, 120), "", *table, "", *memory(data), ""]
    if WINDOWS in plots:
        lines += [f"![Mean step time against the window]({WINDOWS})", ""]
    lines += [*(f"- {note}" for note in data["notes"]), *([""] if data["notes"] else [])]
    lines += ["`studies.csv` has every entrant's config, flush share, live rows and bytes.", ""]
    return "\n".join(lines)


def _said(data: dict[str, Any], study: str) -> list[str]:
    goals = {r["goal"]: r["entrant"] for r in data["rows"] if r["study"] == study and r["goal"] is not None}
    told = "; ".join(f"goal for {name}: at most {goal:.2f} times as long" for goal, name in goals.items())
    return [f"Microseconds a step, and over the first one's. {told[:1].upper()}{told[1:]}; **bold: missed**."]


def beside(data: dict[str, Any], study: str) -> list[str]:
    """A study's groups as a table: a line a group, every entrant's time, and its ratio to the first one's."""
    found = list(groups(data, study))
    if not found:
        return []
    first, *others = [r["entrant"] for r in found[0]]
    names = [first, *(column for name in others for column in (name, f"/ {first}"))]
    lines = [f"| problem | batch | {' | '.join(names)} |", f"|{'---|' * (2 + len(names))}"]
    for group in found:
        cells = [f"{group[0]['time_us']:.2f}"]
        for row in group[1:]:
            missed = row["goal"] is not None and row["over_first"] > row["goal"]
            ratio = f"{row['over_first']:.3f}"
            cells += [f"{row['time_us']:.2f}", f"**{ratio}**" if missed else ratio]
        lines.append(f"| {_line(group[0])} | {group[0]['batch']} | {' | '.join(cells)} |")
    return lines


def windows(data: dict[str, Any]) -> list[str]:
    """The study of windows as a table: a line a group, a column a window."""
    found = list(groups(data, "windows"))
    if not found:
        return []
    sizes = sorted({_window(r) for group in found for r in group})
    lines = [
        f"| acceptance | problem | batch | {' | '.join(f'W {w}' for w in sizes)} |",
        f"|{'---|' * (3 + len(sizes))}",
    ]
    for group in found:
        times = {_window(r): r["time_us"] for r in group}
        best = min(times.values())
        cells = [
            "" if w not in times else f"**{times[w]:.2f}**" if times[w] == best else f"{times[w]:.2f}" for w in sizes
        ]
        lines.append(f"| {group[0]['load']} | {_line(group[0])} | {group[0]['batch']} | {' | '.join(cells)} |")
    return lines


def memory(data: dict[str, Any]) -> list[str]:
    """KiB of a slot and layer by window, as a table: a line a problem, and the ring alone."""
    sizes = sorted({_window(r) for r in data["rows"] if r["study"] == "windows"})
    lines = [f"| KiB of a slot and layer | {' | '.join(f'W {w}' for w in sizes)} |", f"|{'---|' * (1 + len(sizes))}"]
    held: dict[str, dict[int, float]] = {}
    for row in (r for r in data["rows"] if r["study"] == "windows"):
        held.setdefault(_line(row), {})[_window(row)] = row["slot_bytes"] / 1024
        held.setdefault("of it the ring", {})[_window(row)] = row["ring_bytes"] / 1024
    ring = held.pop("of it the ring", {})
    for name, by_window in [*held.items(), ("of it the ring", ring)]:
        lines.append(f"| {name} | {' | '.join(f'{by_window[w]:,.0f}' if w in by_window else '' for w in sizes)} |")
    return lines


def _window(row: Row) -> int:
    return next(int(w[1:]) for w in row["problem"].split() if w[0] == "W" and w[1:].isdigit())


def _provenance(data: dict[str, Any]) -> str:
    m = data["manifest"]
    kernels = f"kernels {m['kernel_fingerprint'][:8]}"
    return f"{m['gpu_name']} ({m['arch']}) · measured in one run · {kernels} · {m['date'][:10]}"


# ---------------------------------------------------------------------------------------------------
# The plots
# ---------------------------------------------------------------------------------------------------


def _grid(data: dict[str, Any], title: str, rows: int, columns: int) -> tuple[Figure, list[Axes]]:
    size = (5.6 * columns, _STRIP + 3.3 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    strip = _STRIP / figure.get_figheight()
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - strip), h_pad=0.08)  # type: ignore[union-attr, call-arg]
    figure.text(0.01, 1 - 0.06 * strip, title, va="top", fontsize=12.5, fontweight="bold")
    figure.text(0.01, 1 - 0.56 * strip, _provenance(data), va="top", fontsize=8.5, color=MUTED)
    return figure, list(grid.flat)


def _ratios(data: dict[str, Any]) -> Figure | None:
    """A panel each for ragged rows and for windows at equal live rows: time over the first entrant's, by batch."""
    studies = [s for s in ("ragged", "live rows") if any(r["study"] == s for r in data["rows"])]
    if not studies:
        return None
    figure, axes = _grid(data, "time over that of dense rows, and of W 16", 1, len(studies))
    for ax, study in zip(axes, studies, strict=True):
        lines: dict[tuple[str, str], list[Row]] = {}
        for group in groups(data, study):
            for row in group[1:]:
                lines.setdefault((_line(row), row["entrant"]), []).append(row)
        problems = list(dict.fromkeys(problem for problem, _ in lines))
        entrants = list(dict.fromkeys(entrant for _, entrant in lines))
        for (problem, entrant), rows in lines.items():
            colour, marker = _LINES[problems.index(problem) % len(_LINES)]
            style = ("-", "--", ":")[entrants.index(entrant) % 3]
            label = " ".join(problem.split()[1:]) + (f", {entrant}" if len(entrants) > 1 else "")
            at, values = [r["batch"] for r in rows], [r["over_first"] for r in rows]
            ax.plot(at, values, style, color=colour, marker=marker, ms=4, lw=1.5, label=label)
        batch_axis(ax, sorted({r["batch"] for rows in lines.values() for r in rows}))
        ax.axhline(1, color=LIMIT, lw=1)
        for goal in {r["goal"] for rows in lines.values() for r in rows if r["goal"] is not None}:
            ax.axhline(goal, color=MUTED, lw=1, ls=":")
            of = next(r["entrant"] for rows in lines.values() for r in rows if r["goal"] == goal)
            place = ax.get_yaxis_transform()
            ax.text(1, goal, f"goal for {of}", ha="right", va="bottom", fontsize=8, color=MUTED, transform=place)
        low, high = ax.get_ylim()
        ax.set_ylim(low, high + 0.25 * (high - low))  # room for the legend
        first = next(groups(data, study))[0]["entrant"]
        ax.set_ylabel(f"time / {first}")
        ax.set_title({"ragged": "ragged rows", "live rows": "windows at equal live rows, no flushes"}[study])
        ax.legend(loc="upper left", ncols=2)
    return figure


def _windows(data: dict[str, Any]) -> Figure | None:
    """A panel a problem and batch: mean step time against W, a line a kind of acceptance, KiB of a slot below."""
    panels: dict[tuple[str, int], list[list[Row]]] = {}
    for group in groups(data, "windows"):
        panels.setdefault((_line(group[0]), group[0]["batch"]), []).append(sorted(group, key=_window))
    if not panels:
        return None
    figure, axes = _grid(data, "mean step time against the window", -(-len(panels) // 2), min(2, len(panels)))
    for ax in axes[len(panels) :]:
        ax.remove()
    for ax, ((problem, batch), lines) in zip(axes, panels.items(), strict=False):
        for number, rows in enumerate(lines):
            colour, marker = _LINES[number % len(_LINES)]
            at, times = [_window(r) for r in rows], [r["time_us"] for r in rows]
            ax.plot(at, times, "-", color=colour, marker=marker, ms=4, lw=1.5, label=rows[0]["load"])
            best = times.index(min(times))
            ax.plot(at[best], times[best], marker, color=colour, ms=9, mfc="none", mew=1.5)
        held = {_window(r): r["slot_bytes"] / 1024 for rows in lines for r in rows}
        ax.set_xticks(list(held), [f"{w}\n{kib:,.0f}" for w, kib in held.items()])
        ax.set_xlabel("W, and KiB of a slot and layer")
        ax.set_ylabel("µs a step")
        ax.yaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
        ax.set_ylim(0, ax.get_ylim()[1] * 1.05)
        ax.set_title(f"{problem}, batch {batch} (outlined: the fastest)")
        ax.legend(loc="lower right")
    return figure
