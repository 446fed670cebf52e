"""Colours of the plots, on light and on dark paper.

Artists name places of the colour cycle ("C0"), which matplotlib looks up as it draws: the same code draws both. The
lines' hues stay apart for readers with any kind of colour vision, and markers and dashes tell the lines apart without
colour too.
"""

from __future__ import annotations

from typing import Any

OURS, DEFAULT, LIMIT, MUTED, INK, EMPTY = "C0", "C1", "C2", "C3", "C4", "C5"
PEER_COLOURS = ("C6", "C7", "C8", "C9")
PEER_MARKERS = ("s", "^", "D", "v")
DARK_INK = "#1f2430"  # on the light cells of maps, whatever the paper


def _style(paper: str, ink: str, muted: str, grid: str, cycle: tuple[str, ...]) -> dict[Any, Any]:
    import cycler

    return {
        "figure.dpi": 140,
        "savefig.dpi": 140,
        "figure.facecolor": paper,
        "savefig.facecolor": paper,
        "axes.facecolor": paper,
        "font.size": 9.5,
        "axes.edgecolor": muted,
        "axes.labelcolor": ink,
        "axes.titlecolor": ink,
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.prop_cycle": cycler.cycler(color=cycle),
        "grid.color": grid,
        "grid.linewidth": 0.8,
        "xtick.color": muted,
        "ytick.color": muted,
        "text.color": ink,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
    }


# ours, default, limit, muted, ink, empty, four peers
LIGHT = _style(
    "#ffffff",
    "#1f2430",
    "#5b6472",
    "#e5e7eb",
    ("#0057b8", "#9ca3af", "#111827", "#5b6472", "#1f2430", "#f3f4f6", "#c2410c", "#7b3294", "#00796b", "#8c510a"),
)
DARK = _style(
    "#15181e",
    "#e6e8ec",
    "#a3abb8",
    "#2c323c",
    ("#6cb6ff", "#7d8590", "#e6e8ec", "#a3abb8", "#e6e8ec", "#232831", "#ff9b5e", "#d2a8ff", "#4fd1b5", "#e3b341"),
)
