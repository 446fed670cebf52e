"""Random problems and random calls of them: what the property tests feed the step with.

Problems cover pairwise everything that a kernel is specialized on; a draw then varies all that is known at run time:
batch, slots, cursors, padding and its slot id, lengths of ragged rows, strides, and the numbers.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pairwise
import torch

from replayssm_cute.calls import Call, random_call
from replayssm_cute.problem import Problem

AXES: dict[str, tuple[Any, ...]] = {
    "head_dim": (64, 80, 128),
    "d_state": (64, 128, 256),
    "heads": ((2, 1), (4, 4), (6, 3), (14, 1), (8, 2)),  # and groups
    "tokens": (1, 2, 4, 7, 16, 32),
    "window": (0, 1, 8, 16, 40, 64),  # at least T; 0 and 1: T itself, and T + 1
    "state": ("f32", "bf16", "f16"),
    "io": ("bf16", "f16"),
    "dt": ("io", "f32"),
    "weights": ("f32", "bf16", "f16"),
    "without": ("nothing", "D", "dt_bias", "softplus", "z"),
    "index": ("i32", "i64", None),
    "ragged": (False, True),
    "layout": ("contiguous", "projection", "pages"),
    "tile": ("default", "one", "turns", "wide", "split"),
}


def rows(most: int | None = None) -> list[dict[str, Any]]:
    """A greedy pairwise covering of `AXES`, the same on every run; then random rows up to `most`."""
    found = pairwise.cover(AXES)
    more = random.Random(0)
    while most is not None and len(found) < most:
        found.append({axis: more.choice(values) for axis, values in AXES.items()})
    return found


def problem_of(row: dict[str, Any]) -> Problem:
    """The problem of a row of the covering."""
    heads, groups = row["heads"]
    tokens, window, io = row["tokens"], row["window"], row["io"]
    return Problem(
        heads=heads,
        head_dim=row["head_dim"],
        d_state=row["d_state"],
        groups=groups,
        tokens=tokens,
        window=min(64, max(window, tokens + (window == 1))),
        state_dtype=row["state"],
        io_dtype=io,
        dt_dtype=io if row["dt"] == "io" else "f32",
        a_dtype=row["weights"],
        d_dtype=None if row["without"] == "D" else row["weights"],
        dt_bias_dtype=None if row["without"] == "dt_bias" else row["weights"],
        has_z=row["without"] != "z",
        dt_softplus=row["without"] != "softplus",
        index_dtype=row["index"],
        compact=row["layout"] == "contiguous",
        ragged=row["ragged"],
    )


def draw(problem: Problem, layout: str, seed: int, batch: int, device: torch.device | str = "cpu") -> Call:
    """One random call of a problem."""
    rng = random.Random(seed)
    pad = rng.choice((-1, 0, 3, 1 << 20))
    indexed = problem.index_dtype is not None
    padding = [row for row in range(batch) if rng.random() < 0.15] if indexed else []
    edges = [
        rng.choice((0, 1, problem.window - 1, problem.window, rng.randint(0, problem.window))) for _ in range(batch)
    ]
    options: dict[str, Any] = {}
    if problem.ragged:
        lengths = [rng.choice((0, 1, problem.tokens, rng.randint(0, problem.tokens))) for _ in range(batch)]
        options = {"lengths": lengths, "tail": rng.choice((0, 0, 3))}
        if not sum(lengths):
            options["tail"] = 2
    call = random_call(
        dataclasses.replace(problem, compact=True),
        batch,
        slots=batch + rng.randint(2, 6) if indexed else batch,
        pnat=[max(0, min(problem.window, n)) for n in edges],
        padding=padding,
        pad_slot_id=pad if indexed else -1,
        seed=seed,
        device=device,
        **options,
    )
    if layout == "projection":
        _in_one_projection(call)
    elif layout == "pages":
        _in_pages(call)
    return call


def _in_one_projection(call: Call) -> None:
    """x, z, B and C become slices of one wide row a token, padded and poisoned between; out of a wider buffer."""
    b, t = call.x.shape[:2]
    parts = {name: value for name in ("z", "x", "B", "C") if (value := getattr(call, name)) is not None}
    widths = [p.shape[2] * p.shape[3] for p in parts.values()]
    wide = torch.full((b, t, sum(widths) + 24), float("nan"), dtype=call.x.dtype, device=call.x.device)
    for (name, value), part in zip(parts.items(), wide.split([*widths, 24], dim=-1), strict=False):
        part.copy_(value.flatten(2))
        setattr(call, name, part.unflatten(-1, value.shape[2:]))
    out = torch.full((b, t, 2, *call.out.shape[2:]), float("nan"), dtype=call.out.dtype, device=call.out.device)
    out[:, :, 1].copy_(call.out)
    call.out = out[:, :, 1]


def _in_pages(call: Call) -> None:
    """Caches become views into padded pages, 48 bytes of foreign data after each slot, heads further apart."""
    for name in ("state", "x_cache", "B_cache", "dt_cache"):
        t = getattr(call, name)
        slots, heads = t.shape[:2]
        inner = t[0, 0].numel()
        gap = 64 // t.element_size()
        page = torch.full((slots, heads * (inner + gap) + gap), 5, dtype=t.dtype, device=t.device)
        view = page.as_strided(t.shape, (page.stride(0), inner + gap, *t.stride()[2:]), 0)
        view.copy_(t)
        setattr(call, name, view)
    for name in ("ring_start", "prev_num_accepted_tokens"):
        t = getattr(call, name)
        wide = torch.full((len(t), 3), -7, dtype=t.dtype, device=t.device)
        wide[:, 1] = t
        setattr(call, name, wide[:, 1])
