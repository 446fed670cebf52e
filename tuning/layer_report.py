"""What the layer benchmark found, for readers: `python -m replayssm_tuning.layer_report FILE`.

FILE is what `layer_bench --out` wrote. Beside it this writes a CSV and a plot of the same name, and prints the tables
in Markdown. `--beside CSV` names the goals and the times of another chain (columns tokens, batch, goal_us, other_us).
`--table FILE` writes the times as `replayssm_cute.fused.overlap` reads them, so that calls choose by them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd  # type: ignore[import-untyped, unused-ignore]

from replayssm_cute import atomic, fingerprint
from replayssm_cute.fused.chains import Chain, Overlap
from replayssm_cute.fused.overlap import SCHEMA, fastest
from replayssm_cute.target import named

from .command import check_file, command, usage
from .layer_bench import PARTS, conv_bytes, layer_problem, machine_code, norm_bytes
from .plots import batch_axis
from .theme import DEFAULT, INK, LIGHT, MUTED, OURS, PEER_COLOURS

_COLUMNS = {
    Overlap.NONE: "chain_us",
    Overlap.INNER: "pdl_us",
    Overlap.ALL: "pdl_conv_too_us",
    Overlap.INNER_X: "x_in_step_us",
    Overlap.ALL_X: "conv_too_x_in_step_us",
}
_COLOURS = (MUTED, DEFAULT, OURS, PEER_COLOURS[1], PEER_COLOURS[2])
_MARKERS = ("v", "^", "o", "D", "P")


def stale_reason(data: dict[str, Any]) -> str | None:
    """Why a result's times are not those of the kernels in the tree, or None. Compiles conv and norm if it has to."""
    now = fingerprint.kernels()
    if data["kernel_fingerprint"] != now:
        return f"its step was of kernels {data['kernel_fingerprint'][:12]}, the sources are now {now[:12]}"
    own, now = data["layer_kernel_fingerprint"], fingerprint.kernels("fused")
    if own == now:
        return None
    if data["toolchain"] != fingerprint.toolchain():
        return f"conv and norm were of kernels {own[:12]}, now {now[:12]}, and another toolchain compiled them"
    found = machine_code(
        _problems(data), sorted({c["batch"] for c in data["cells"]}), named(data["arch"]), _with_steps(data)
    )
    if other := sorted(
        name for name in found | data["machine_code"] if found.get(name) != data["machine_code"].get(name)
    ):
        return f"conv and norm were of kernels {own[:12]}, now {now[:12]}, which compile to other code for {other}"
    return None


def _with_steps(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The cells that say which config their steps had; older results do not, and had no x in the step."""
    return [cell for cell in data["cells"] if "step" in cell]


def _problems(data: dict[str, Any]) -> list[Any]:
    tokens = sorted({c["tokens"] for c in data["cells"]})
    return [layer_problem(t, data["window"], data["state"]) for t in tokens]


def frame(data: dict[str, Any], beside: pd.DataFrame | None = None) -> pd.DataFrame:
    """One row a cell: times of the parts and the chains, what a call takes without and with the promise, and goals."""
    rows = []
    for cell in data["cells"]:
        times = {name: entry["time_us"] for name, entry in cell["times"].items()}
        chains = {kind: times[kind] for kind in Overlap if kind in times}
        problem = layer_problem(cell["tokens"], data["window"], data["state"])
        row = {"tokens": cell["tokens"], "batch": cell["batch"], "flush": cell["flush"], "config": cell["config"]}
        row |= {f"{part}_us": times[part] for part in PARTS}
        for name, moved in (("conv", conv_bytes), ("norm", norm_bytes)):
            row[f"{name}_gb_s"] = moved(problem, cell["batch"]) / times[name] / 1e3
        row |= {column: chains[kind] for kind, column in _COLUMNS.items() if kind in chains}
        for promised in (False, True):
            name = "promised" if promised else "plain"
            label, time_us = _served(cell, chains, promised)
            row |= {f"{name}_choice": label, f"{name}_us": time_us, f"{name}_searched": name in _found(cell, chains)}
        shown = (*PARTS, *chains)
        row["spread"] = max(cell["times"][name]["spread"] for name in shown)
        rows.append(row)
    table = pd.DataFrame(rows).sort_values(["tokens", "batch"], ignore_index=True)
    return table if beside is None else table.merge(beside, on=["tokens", "batch"], how="left", validate="1:1")


def _served(cell: dict[str, Any], chains: dict[Overlap, float], promised: bool) -> tuple[str, float]:
    """The chain that a call gets by a cell's times, and its time: what a search found if it held in the final race."""
    chosen = fastest(chains, promised)
    found = _found(cell, chains).get("promised" if promised else "plain")
    return (str(chosen), chains[chosen]) if found is None else (found[0].label(), found[1])


def _found(cell: dict[str, Any], chains: dict[Overlap, float]) -> dict[str, tuple[Chain, float]]:
    """By "plain" and "promised": a search's chain and its time, where it was faster than what would serve without."""
    kept = {}
    for name, chain in cell.get("found", {}).items():
        time_us = cell["times"][f"found, {name}"]["time_us"]
        if time_us < chains[fastest(chains, name == "promised")]:
            kept[name] = Chain.from_json(chain), time_us
    return kept


def markdown(table: pd.DataFrame) -> str:
    """The tables: the parts and the chains; the chains that serve, if searched for; goals, where they are known."""
    kinds = [kind for kind, column in _COLUMNS.items() if column in table]
    heads = ["T", "batch", "conv", "step", "norm", *(f"{kind}" for kind in kinds), "step's config"]
    columns = ["tokens", "batch", "conv_us", "step_us", "norm_us", *(_COLUMNS[kind] for kind in kinds), "config"]
    text = _markdown(heads, [[_cell(row[c]) for c in columns] for _, row in table.iterrows()])
    if table[["promised_searched", "plain_searched"]].to_numpy().any():
        heads = ["T", "batch", "with the promise", "chain", "without", "chain"]
        columns = ["tokens", "batch", "promised_us", "promised_choice", "plain_us", "plain_choice"]
        text += "\n\n" + _markdown(heads, [[_cell(row[c]) for c in columns] for _, row in table.iterrows()])
    if "goal_us" not in table:
        return text
    heads = ["T", "batch", "goal", "with the promise", "without", "other chain", "/ with", "/ without"]
    lines = []
    for _, row in table.iterrows():
        mine = [f"**{_cell(t)}**" if t > row["goal_us"] else _cell(t) for t in (row["promised_us"], row["plain_us"])]
        over = [f"{row['other_us'] / row[c]:.2f}" for c in ("promised_us", "plain_us")]
        line = [_cell(row["tokens"]), _cell(row["batch"]), f"{row['goal_us']:g}", *mine, f"{row['other_us']:g}", *over]
        lines.append(line)
    return text + "\n\n" + _markdown(heads, lines)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *lines))


def draw(table: pd.DataFrame, data: dict[str, Any], path: Path) -> None:
    """A panel for each number of tokens: each chain's time over that of the step alone, by batch."""
    with plt.rc_context(LIGHT):
        kinds = sorted(table["tokens"].unique())
        figure, axes = plt.subplots(
            1, len(kinds), figsize=(5.2 * len(kinds), 3.9), squeeze=False, sharey=True, layout="constrained"
        )
        figure.suptitle(
            f"A layer's decode step over the SSU step alone: {data['gpu']}, {data['state']} state, W {data['window']}",
            fontsize=11,
        )
        for ax, tokens in zip(axes[0], kinds, strict=True):
            part = table[table["tokens"] == tokens].sort_values("batch")
            batch_axis(ax, part["batch"].tolist())
            ax.axhline(1.0, color=INK, ls=":", lw=1.2)
            if "goal_us" in part:
                ax.plot(part["batch"], part["goal_us"] / part["step_us"], "_", color=INK, ms=14, mew=2, label="goal")
                style = {"color": PEER_COLOURS[0], "lw": 1.2, "ms": 4}
                ax.plot(
                    part["batch"], part["other_us"] / part["step_us"], "-s", label="other chain, another run", **style
                )
            for (kind, column), colour, marker in zip(_COLUMNS.items(), _COLOURS, _MARKERS, strict=True):
                if column not in part:
                    continue
                ax.plot(
                    part["batch"], part[column] / part["step_us"], f"-{marker}", color=colour, ms=4, label=str(kind)
                )
            ax.set_title(f"T {tokens}")
            ax.set_ylabel("time / step alone")
            ax.legend()
        figure.savefig(path, facecolor="white", metadata={"Software": None})
        plt.close(figure)


def _chains(cell: dict[str, Any], better: dict[str, Any]) -> dict[str, Any]:
    """A bucket's chains, where a search found some that hold, or another run `better` ones."""
    times = {kind: cell["times"][kind]["time_us"] for kind in Overlap if kind in cell["times"]}
    kept = {name: chain.to_json() for name, (chain, _) in _found(cell, times).items()}
    kept |= {name: Chain.from_json(chain).to_json() for name, chain in better.items()}
    return {"chains": kept} if kept else {}


def _better(instead: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any]]:
    """By T and batch, the chains that another run found faster."""
    if instead["kernel_fingerprint"] != fingerprint.kernels():
        raise ValueError(f"the chains to take instead are of kernels {instead['kernel_fingerprint'][:12]}")
    return {(c["tokens"], c["batch"]): c["chains"] for c in instead["cells"]}


def overlap_table(data: dict[str, Any], instead: dict[str, Any] | None = None) -> dict[str, Any]:
    """The times as `replayssm_cute.fused.overlap` reads them, for the kernels in the tree.

    Args:
        instead: chains that another run found faster than those of `data`: {"kernel_fingerprint", "cells": [{"tokens",
            "batch", "chains": {"plain" or "promised": chain}}]}.

    Raises:
        ValueError: if the times, or these chains, are not those of the kernels in the tree.
    """
    if reason := stale_reason(data):
        raise ValueError(f"these times are not those of the kernels in the tree: {reason}")
    better = {} if instead is None else _better(instead)
    entries = []
    for problem in _problems(data):
        cells = [c for c in data["cells"] if c["tokens"] == problem.step.tokens]
        buckets = [
            {
                "batch": c["batch"],
                "times_us": {
                    str(kind): round(c["times"][kind]["time_us"], 3) for kind in Overlap if kind in c["times"]
                },
            }
            | _chains(c, better.get((c["tokens"], c["batch"]), {}))
            for c in cells
        ]
        entries.append({"problem": problem.step.to_json(), "buckets": buckets})
    return {
        "schema": SCHEMA,
        "gpu_name": data["gpu"],
        "arch": data["arch"],
        "kernel_fingerprint": fingerprint.kernels(),
        "layer_kernel_fingerprint": fingerprint.kernels("fused"),
        "entries": entries,
    }


@command
def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0; 1 for times of other kernels; 2 for wrong usage or files."""
    parser = argparse.ArgumentParser(prog="python -m replayssm_tuning.layer_report", description=__doc__)
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("--beside", type=Path, metavar="CSV", help="goals and another chain's times")
    parser.add_argument("--table", type=Path, metavar="FILE", help="write the times as calls read them")
    parser.add_argument(
        "--instead", type=Path, metavar="JSON", help="chains for the table that another run found faster"
    )
    args = parser.parse_args(argv)
    if args.instead is not None and args.table is None:
        parser.error("--instead: got it without --table, which alone has chains")
    odd = (KeyError, AttributeError, IndexError, RecursionError, OverflowError)
    with usage(str(args.file)):
        data = json.loads(args.file.read_bytes())
    instead = None
    if args.instead is not None:
        with usage(str(args.instead), *odd):
            instead = json.loads(args.instead.read_bytes())
            _better(instead)
    check_file("FILE", args.file.with_suffix(".csv"))
    with usage(f"{args.file}: it is no result of layer_bench", *odd):
        own = frame(data, None)
        stale = stale_reason(data) if args.table is not None else None
        made = overlap_table(data, instead) if args.table is not None and stale is None else None
    if args.table is not None:
        check_file("--table", args.table)
        if made is None:
            print(f"these times are not those of the kernels in the tree: {stale}", file=sys.stderr)
            return 1
        atomic.write_text(args.table, json.dumps(made, indent=1) + "\n")
    table = own
    if args.beside is not None:
        with usage(f"{args.beside}: it has no goals and other times", *odd):
            table = frame(data, pd.read_csv(args.beside))
    table.to_csv(args.file.with_suffix(".csv"), index=False, float_format="%.6g")
    draw(table, data, args.file.with_suffix(".png"))
    print(markdown(table))
    return 0


if __name__ == "__main__":
    sys.exit(main())
