"""What a run of the example measured, as JSON and CSV, with the machine and the kernels that it was measured with."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import importlib.metadata
import io
import json
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from replayssm_cute import atomic, fingerprint, selfcheck

from .decoder import Decoder
from .generate import Generated, replay_us

SCHEMA_VERSION = 1
_PACKAGES = ("nvidia-cutlass-dsl", "apache-tvm-ffi", "flashinfer-python", "triton")


@dataclass(frozen=True)
class Row:
    """One way to decode, on the same requests.

    Attributes:
        name: "standard", "replay" (one token a step each) or "drafts right with P".
        update: the state update, in words.
        tokens_a_step: T.
        p: chance that a draft is right, None without drafts.
        generated: tokens of all requests.
        steps: model steps.
        accepted: tokens that a window gave on average, the model's own included.
        step_ms, step_ms_p90: wall time of a step with all requests, host included, median and 90th percentile.
        tokens_per_s: generated tokens over the wall time of all steps.
        graph_us: GPU time of a step with all requests, its graph alone; None on the CPU.
        graph_tokens_per_s: accepted tokens of all requests over that time.
        same: requests whose tokens are those of the standard update.
    """

    name: str
    update: str
    tokens_a_step: int
    p: float | None
    generated: int
    steps: int
    accepted: float
    step_ms: float
    step_ms_p90: float
    tokens_per_s: float
    graph_us: float | None
    graph_tokens_per_s: float | None
    same: int


def row(name: str, decoder: Decoder, run: Generated, truth: Generated, p: float | None = None) -> Row:
    """Measure a run; its decoder's slots are lost."""
    ms = sorted(run.full_ms or run.step_ms)
    us = replay_us(decoder, run)
    generated = sum(map(len, run.tokens)) - len(run.tokens)  # the first token of each is the prefill's
    return Row(
        name, decoder.update, decoder.tokens, p, generated, run.steps, run.accepted, statistics.median(ms),
        ms[min(len(ms) - 1, int(0.9 * len(ms)))], generated / run.seconds, us,
        None if us is None else 1e6 * len(run.tokens) * run.accepted / us,
        sum(a == b for a, b in zip(run.tokens, truth.tokens, strict=True)),
    )  # fmt: skip


def table(rows: list[Row]) -> str:
    """The rows, and how much faster than the first one each is, for people."""
    times = f"{'step ms':>8} {'tokens/s':>9} {'x':>5} {'graph us':>9} {'tokens/s':>9} {'x':>5}"
    lines = [f"{'':26} {'accepted':>8} {times}  same"]
    first = rows[0]
    for r in rows:
        line = f"{r.name:26} {r.accepted:8.2f} {r.step_ms:8.2f} {r.tokens_per_s:9.0f} "
        line += f"{r.tokens_per_s / first.tokens_per_s:5.2f} "
        if r.graph_us is None or r.graph_tokens_per_s is None or first.graph_tokens_per_s is None:
            line += f"{'-':>9} {'-':>9} {'-':>5}"
        else:
            ratio = r.graph_tokens_per_s / first.graph_tokens_per_s
            line += f"{r.graph_us:9.1f} {r.graph_tokens_per_s:9.0f} {ratio:5.2f}"
        lines.append(f"{line}  {r.same}")
    return "\n".join(lines)


def environment(device: torch.device) -> dict[str, Any]:
    """The machine, versions and fingerprints of the kernels."""
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if gpu else platform.machine(),
        "driver": selfcheck.driver_version() if gpu else None,
        "versions": versions,
        "kernel_fingerprint": fingerprint.kernels(),
        "cache_kernel_fingerprint": fingerprint.kernels("cache"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def write(path: Path, rows: list[Row], device: torch.device, facts: dict[str, Any]) -> Path:
    """Write `path` as JSON, and the rows as CSV beside it; gives the CSV's path."""
    dicts = [dataclasses.asdict(r) for r in rows]
    data = {"schema": SCHEMA_VERSION, **environment(device), **facts, "rows": dicts}
    atomic.write_text(path, json.dumps(data, indent=1) + "\n")
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(dicts[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(dicts)
    atomic.write_text(path.with_suffix(".csv"), text.getvalue())
    return path.with_suffix(".csv")
