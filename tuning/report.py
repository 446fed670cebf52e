"""The report of sweeps: one page (Markdown and self-contained HTML) a folder of results, with plots and CSVs."""

from __future__ import annotations

import base64
import html
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from replayssm_cute import atomic

from . import mixes
from .judge import GOAL_MEDIAN, GOAL_WORST, judge
from .plots import Drawn, draw_all, frame, peers_of
from .results import Results
from .stability import STABILITY_SUFFIX, Stability
from .sweep import RESULTS_SUFFIX, TABLE_SUFFIX

PAGE = "report"
_CAPTIONS = {
    "time": "Time of one call by batch.",
    "bandwidth": "Bytes that a call must move, over its time, against the streaming read limit. Peers that move other "
    "bytes (the standard update writes every state) are left out.",
    "speedup": "Time of the default config (and of each peer) over the winner's: above 1, the winner is faster.",
    "winners": "The winner of each cell. A default stays unless it is beaten by the margin.",
    "configs": "Time over the fastest of the same batch, for the best configs. Times of all rounds stand side by side, "
    "brief single ones too; only the race decides.",
}
LEGEND = (
    "a config, as in `h4/2 s2 p1 r32 live c3 t8`: h = heads a CTA (/2: two at a time); s = stages; p = parts that a "
    "head's rows of P are split into; r = rows of P a warp (none: 16); live or whole = the rows of the ring that are "
    "read; c = CTAs a multiprocessor that the register cap leaves room for (1: no cap); t = batch rows at the end cut "
    "into single heads",
    "a problem, as in `128x64x128/8 f32 T4 W16`: heads x head_dim x d_state / groups, dtype of the state, tokens a "
    "call, window",
)


@dataclass(frozen=True, slots=True)
class Block:
    """A piece of a page: a heading, a paragraph, a list, a table or an image."""

    kind: str
    text: str = ""
    items: tuple[str, ...] = ()
    table: pd.DataFrame | None = None
    image: Drawn | None = None


def draw(files: Iterable[Path]) -> tuple[list[Path], list[str]]:
    """Draw the report of each folder that holds some of `files`.

    Returns:
        The pages written, a Markdown and an HTML file a folder, and where it has results of several GPUs an HTML file
        for each too; and a line for each file that is broken.
    """
    folders: dict[Path, list[Path]] = {}
    for file in files:
        folders.setdefault(file.parent, []).append(file)
    pages: list[Path] = []
    errors: list[str] = []
    for folder, members in folders.items():
        loaded: list[tuple[Path, Results]] = []
        for file in sorted(members):
            try:
                loaded.append((file, Results.load(file)))
            except ValueError as e:
                errors.append(str(e))
        if not loaded:
            continue
        # What was measured comes first.
        loaded.sort(key=lambda item: not item[1].measured)
        title = loaded[0][1].title
        sections = [(item, _section(*item, errors)) for item in loaded]
        blocks = [*_head(loaded), *(block for _, section in sections for block in section)]
        pages.append(_write(folder / f"{PAGE}.md", _markdown(blocks, folder)))
        pages.append(_write(folder / f"{PAGE}.html", _html(blocks, title)))
        for (file, results), section in sections if len(sections) > 1 else ():
            own = folder / f"{PAGE}-{_stem(file)}.html"
            name = f"{title}, {results.manifest.gpu_name}"
            pages.append(_write(own, _html([*_head([(file, results)]), *section], name)))
    return pages, errors


def _stem(file: Path) -> str:
    return file.name.removesuffix(RESULTS_SUFFIX) if file.name.endswith(RESULTS_SUFFIX) else file.stem


def _write(path: Path, text: str) -> Path:
    atomic.write_text(path, text)
    return path


# ---------------------------------------------------------------------------------------------------
# Content
# ---------------------------------------------------------------------------------------------------


def _head(loaded: list[tuple[Path, Results]]) -> list[Block]:
    first = loaded[0][1]
    blocks = [Block("h1", f"Tuning report: {first.title}"), Block("p", first.source)]
    rows = [
        {
            "GPU": r.manifest.gpu_name,
            "arch": r.manifest.arch,
            "provenance": "**measured**" if r.measured else "**estimated**, nothing was timed",
            "cells": len(frame(r)),
            "read limit GB/s": f"{r.read_gbs:,.0f}",
            "kernels": r.manifest.kernel_fingerprint[:12],
            "commit": r.manifest.policy.get("commit") or "unknown",
            "date": r.manifest.date[:10],
        }
        for _, r in loaded
    ]
    legend = [Block("p", "Labels:"), Block("list", items=LEGEND)]
    return [blocks[0], *_lost(loaded), *blocks[1:], Block("table", table=pd.DataFrame(rows)), *legend]


def _lost(loaded: list[tuple[Path, Results]]) -> list[Block]:
    """Where a peer is faster: what a page begins with."""
    found = []
    for _, results in loaded:
        table = frame(results)
        if losses := [] if table.empty else _losses(table):
            where = f"A PEER IS FASTER in {len(losses)} cell(s) on {results.manifest.gpu_name}"
            found.append(Block("p", f"**{where}:** {'; '.join(losses)}."))
    return found


def _section(file: Path, results: Results, errors: list[str]) -> list[Block]:
    """One GPU's part of a page; what is broken beside the results is left out and told in `errors`."""
    folder = file.parent
    stem = _stem(file)
    kind = "measured" if results.measured else "ESTIMATED"
    blocks = [Block("h2", f"{results.manifest.gpu_name} ({results.manifest.arch}), {kind}")]
    table = frame(results)
    if table.empty:
        return [*blocks, Block("p", "No candidate survived in any cell."), Block("list", items=results.notes)]
    blocks.append(Block("p", _verdict(results, table)))
    blocks.append(Block("table", table=_headline(table)))
    for image_kind, drawn in draw_all(results, folder / "plots", stem).items():
        blocks.append(Block("image", _CAPTIONS[image_kind], image=drawn))
    judged = judge(results)
    if not judged.empty:
        judged.to_csv(folder / "plots" / f"{stem}-model.csv", index=False, float_format="%.6g")
        blocks.append(
            Block(
                "p",
                f"The cost model against these times: median rank correlation "
                f"{judged['rank_correlation'].median():.2f}; regret of its first pick "
                f"{100 * judged['regret'].median():.1f}% (median, goal {GOAL_MEDIAN:.0%}: "
                f"{_met(judged['regret'].median(), GOAL_MEDIAN)}), {100 * judged['regret'].max():.1f}% (worst, goal "
                f"{GOAL_WORST:.0%}: {_met(judged['regret'].max(), GOAL_WORST)}).",
            )
        )
    blocks += _mixes(results, folder, stem)
    try:
        blocks += _stability(folder, stem)
    except ValueError as e:
        errors.append(str(e))
    blocks.append(Block("h3", "How"))
    blocks.append(Block("list", items=tuple(_method(results, table))))
    if results.notes:
        blocks.append(Block("h3", "Notes"))
        blocks.append(Block("list", items=results.notes))
    table_file = folder / f"{stem}{TABLE_SUFFIX}"
    where = f"Table: `{table_file.name}`; every" if table_file.exists() else "Every"
    blocks.append(Block("p", f"{where} candidate: `{file.name}`."))
    return blocks


def _mixes(results: Results, folder: Path, stem: str) -> list[Block]:
    """How the winner depends on acceptance: raced where it was, and by the cost model."""
    blocks: list[Block] = []
    raced, modelled = mixes.measured(results), mixes.modelled(results)
    ways = (
        ("mixes", raced, "Raced under other acceptance lengths (the winner against the other finalists)"),
        ("mixes-model", modelled, "By the cost model (its pick for the plan's acceptance, of all configs tried)"),
    )
    for name, table, words in ways:
        if table.empty:
            continue
        table.to_csv(folder / "plots" / f"{stem}-{name}.csv", index=False, float_format="%.6g")
        shares = {row.mix: f"{row.flush:.0%}" for row in table.itertuples()}
        flush = ", ".join(f"{mix} {share}" for mix, share in shares.items()) if table["problem"].nunique() == 1 else ""
        blocks.append(Block("p", f"{words}: {mixes.summary(table)}.{f' Rows that flush: {flush}.' if flush else ''}"))
        if name == "mixes" or raced.empty:
            blocks.append(Block("table", table=mixes.shown(table)))
        blocks.append(Block("p", f"A cell's time over the fastest config's there; CSV: `plots/{stem}-{name}.csv`."))
    return [Block("h3", "Other acceptance lengths"), *blocks] if blocks else []


def _stability(folder: Path, stem: str) -> list[Block]:
    """How far repeated sweeps agree, where there were any."""
    path = folder / f"{stem}{STABILITY_SUFFIX}"
    if not path.exists():
        return []
    stability = Stability.load(path)
    table = _stability_frame(stability)
    blocks = [Block("h3", "Stability of the winners"), Block("p", f"{stability.summary()}.")]
    if table.empty:
        return blocks
    table.to_csv(folder / "plots" / f"{stem}-stability.csv", index=False, float_format="%.6g")
    shown = table[["workload", "batch", "winners"]].copy()
    shown.insert(2, "flip rate", table["flip_rate"].map("{:.0%}".format))
    for column in ("mean_regret", "worst_regret"):
        texts = table[column].map(lambda v: "–" if pd.isna(v) else f"{v:.2%}")
        shown.insert(len(shown.columns) - 1, column.replace("_", " "), texts)
    explained = (
        "Flip rate: share of the pairs of repeats that chose differently. Regret: a repeat's winner in the other "
        "repeats, its median time over the lowest median of any config. The table is the first repeat's. "
        f"CSV: `plots/{stem}-stability.csv`."
    )
    return [*blocks, Block("table", table=shown), Block("p", explained)]


def _stability_frame(stability: Stability) -> pd.DataFrame:
    """One row a cell; the winners' labels with how often each won."""
    rows = [
        {
            "workload": c.label,
            "problem": c.problem,
            "batch": c.batch,
            "repeats": len(c.winners),
            "flip_rate": c.flip_rate,
            "mean_regret": sum(c.known_regrets) / len(c.known_regrets) if c.known_regrets else None,
            "worst_regret": c.worst,
            "winners": "; ".join(f"{n}x {w}" for w, n in Counter(c.winners).most_common()),
        }
        for c in stability.cells
    ]
    return pd.DataFrame(rows)


def _verdict(results: Results, table: pd.DataFrame) -> str:
    changed = int((table["config"] != table["default"]).sum())
    gain = table["speedup_over_default"].dropna()
    text = f"{_tried(results)}; {changed} of {len(table)} cells choose another config than the default"
    if kept := int((table["default_kept"] != "").sum()):
        text += f"; in {kept} the default is kept though another is faster: its lead is under {100 * results.margin:g}%"
    if not gain.empty:
        text += f"; over all cells {_mean(gain):.3f}x the default's speed (geometric mean), {gain.max():.2f}x at most"
    for peer in peers_of(table):
        values = table[f"speedup_over_{peer}"].dropna()
        text += f"; {_mean(values):.2f}x {peer} ({len(values)} cells)"
    if not results.measured:
        text = f"By the cost model: {text}"
    return text + "."


def _met(value: float, goal: float) -> str:
    return "met" if value <= goal else "**missed**"


def _tried(results: Results) -> str:
    """How many of how many configs were tried (of each problem, in some cell), and in what time."""
    tried = {(cell.problem, c.config) for cell in results.cells for c in cell.candidates}
    spaces = {cell.problem: cell.space for cell in results.cells}
    known = [n for n in spaces.values() if n is not None]
    text = f"{len(tried)} of {sum(known)} configs" if len(known) == len(spaces) else f"{len(tried)} configs"
    spent = results.manifest.policy.get("spent_s")
    return f"{text} tried" + ("" if spent is None else f" in {spent:.0f} s")


def _mean(values: pd.Series) -> float:
    return float(values.astype(float).prod() ** (1 / len(values)))


def _losses(table: pd.DataFrame) -> list[str]:
    """Cells in which a peer that does the same job is faster than the winner."""
    found = []
    for peer in peers_of(table):
        if peer.endswith(" default"):
            continue
        slower = table[table[f"speedup_over_{peer}"] < 1]
        found += [
            f"{peer} at {row['workload']}, batch {row['batch']} "
            f"({row[f'{peer}_us']:.1f} µs against {row['time_us']:.1f})"
            for _, row in slower.iterrows()
        ]
    return found


def _headline(table: pd.DataFrame) -> pd.DataFrame:
    shown = pd.DataFrame(
        {
            "workload": table["workload"],
            "batch": table["batch"],
            "winner": table["config"],
            "µs": table["time_us"].map("{:.2f}".format),
            "GB/s": table["gb_s"].map("{:,.0f}".format),
            "of limit": table["limit_fraction"].map("{:.0%}".format),
            "default µs": table["default_us"].map(lambda v: "–" if pd.isna(v) else f"{v:.2f}"),
            "vs default": [
                f"default kept: {kept}" if kept else "–" if pd.isna(v) else f"{v:.3f}x"
                for v, kept in zip(table["speedup_over_default"], table["default_kept"], strict=True)
            ],
        }
    )
    if table["floor_us"].notna().any():
        shown["floor µs"] = table["floor_us"].map(lambda v: "–" if pd.isna(v) else f"{v:.2f}")
        shown["over floor"] = table["over_floor"].map(lambda v: "–" if pd.isna(v) else f"{v:.3f}x")
    for peer in peers_of(table):
        shown[f"{peer} µs"] = table[f"{peer}_us"].map(lambda v: "–" if pd.isna(v) else f"{v:.2f}")
    shown["flush"] = table["flush"].map("{:.1%}".format)
    shown["tried"] = table["candidates"]
    return shown


def _method(results: Results, table: pd.DataFrame) -> list[str]:
    m = results.manifest
    lines = []
    if results.measured:
        p = m.policy
        lines.append(
            f"CUDA-graph replay over slot sets in rotation (one touches at least {p['l2_factor']:g} times the L2); "
            f"{_rounds(p)}; those within {p['race_within']:.0%} of the fastest, at most {p.get('race_field', 8)} with "
            f"the default, raced in {p['race_rounds']} interleaved rounds of {p['race_replays']}, and their medians "
            f"decide."
        )
        if "screen_replays" in p and any(peers_of(table)):
            lines.append(f"Peers and floors: median of {p['replays']} replays each, after the race.")
        if p.get("ranks", 1) > 1:
            lines.append(f"{p['ranks']} GPUs shared the cells; every cell was measured on one of them alone.")
        lines.append("Numbers checked against the float64 reference before timing: padding rows, NaN in dead rows.")
        lines.append(f"Largest spread of a winner's samples: {table['spread'].max():.1%} of its median.")
    else:
        lines.append(
            "Kernels compiled for the target without a GPU; registers, shared memory and stack read from the code; "
            "times from the cost model (bytes, occupancy, bytes in flight, waves and tail, a fixed latency)."
        )
    lines.append(f"Read limit {results.read_gbs:,.0f} GB/s: {results.read_gbs_method}.")
    lines.append(f"The default config stays unless it is beaten by {100 * results.margin:g}%.")
    for label, a in m.acceptance.items():
        shares = ", ".join(f"{100 * s:.1f}" for s in a["lengths"])
        lines.append(
            f"{label} ({a['problem']}): acceptance '{a['name']}', lengths 1..{len(a['lengths'])} at {shares}%, mean "
            f"{a['mean']:.2f}; {a['flush']:.1%} of rows flush. {a['source']}{_ragged(a)}"
        )
    versions = ", ".join(f"{k} {v}" for k, v in m.versions.items())
    lines.append(f"Versions: {versions}{f'; driver {m.driver}' if m.driver else ''}.")
    return lines


def _ragged(a: Mapping[str, Any]) -> str:
    """What is said of a workload's ragged rows."""
    if "tokens" not in a:
        return ""
    shares = ", ".join(f"{100 * s:.1f}" for s in a["tokens"])
    return f" Ragged rows '{a['rows']}': 1..{len(a['tokens'])} new tokens at {shares}%. {a['rows_source']}"


def _rounds(policy: Mapping[str, Any]) -> str:
    """How candidates were timed before the race; results from before there were heats say it too."""
    if "heat_field" not in policy:
        return f"a candidate's time is the median of {policy['replays']} replays"
    return (
        f"every candidate timed alone, the median of {policy['screen_replays']} replays; the fastest "
        f"{policy['heat_field']} and the default again in a heat of {policy['heat_rounds']} interleaved rounds of "
        f"{policy['heat_replays']}"
    )


# ---------------------------------------------------------------------------------------------------
# Two formats
# ---------------------------------------------------------------------------------------------------


def _markdown(blocks: list[Block], folder: Path) -> str:
    out: list[str] = []
    for b in blocks:
        if b.kind in ("h1", "h2", "h3"):
            out.append(f"{'#' * int(b.kind[1])} {b.text}")
        elif b.kind == "p" and b.text:
            out.append(b.text)
        elif b.kind == "list":
            out.append("\n".join(f"- {item}" for item in b.items))
        elif b.kind == "table" and b.table is not None:
            lines = ["| " + " | ".join(map(str, b.table.columns)) + " |", "|" + " --- |" * len(b.table.columns)]
            lines += ["| " + " | ".join(str(v) for v in row) + " |" for row in b.table.itertuples(index=False)]
            out.append("\n".join(lines))
        elif b.kind == "image" and b.image is not None:
            name = b.image.path.relative_to(folder).as_posix()
            out.append(f"![{b.text}]({name})\n\n{b.text} [CSV]({name.removesuffix('.png')}.csv)")
    return "\n\n".join(out) + "\n"


# The papers are the plots' own, see `theme`.
_CSS = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2430; --muted: #5b6472; --line: #e5e7eb; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #15181e; --ink: #e6e8ec; --muted: #a3abb8; --line: #2c323c; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1080px;
  margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; font-size: 13px; display: block; overflow-x: auto; }
th, td { padding: .25em .7em; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; margin-top: 1em; } figcaption { color: var(--muted); font-size: 13px; }
figure { margin: 0 0 1em; } h2 { border-bottom: 1px solid var(--line); padding-top: 1em; }
"""


def _inline(text: str) -> str:
    """Escaped HTML of a text with **bold** and `code`."""
    escaped = html.escape(text, quote=False)
    escaped = re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escaped)
    return re.sub(r"`(.+?)`", r"<code>\1</code>", escaped)


def _html(blocks: list[Block], title: str) -> str:
    out: list[str] = []
    for b in blocks:
        if b.kind in ("h1", "h2", "h3", "p") and b.text:
            out.append(f"<{b.kind}>{_inline(b.text)}</{b.kind}>")
        elif b.kind == "list":
            out.append("<ul>" + "".join(f"<li>{_inline(item)}</li>" for item in b.items) + "</ul>")
        elif b.kind == "table" and b.table is not None:
            head = "".join(f"<th>{_inline(str(c))}</th>" for c in b.table.columns)
            rows = "".join(
                "<tr>" + "".join(f"<td>{_inline(str(v))}</td>" for v in row) + "</tr>"
                for row in b.table.itertuples(index=False)
            )
            out.append(f"<table><tr>{head}</tr>{rows}</table>")
        elif b.kind == "image" and b.image is not None:
            light, dark = (
                f"data:image/png;base64,{base64.b64encode(data).decode()}"
                for data in (b.image.path.read_bytes(), b.image.dark)
            )
            out.append(
                f'<figure><picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
                f'<img alt="{html.escape(b.text)}" src="{light}"></picture>'
                f"<figcaption>{_inline(b.text)}</figcaption></figure>"
            )
    body = "\n".join(out)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{html.escape(title)}</title>'
        f"<style>{_CSS}</style><body>\n{body}\n</body></html>\n"
    )
