"""Problems and configs that the simulated step kernel runs, and the calls that it runs them on."""

from __future__ import annotations

import dataclasses

import torch

from replayssm_cute import ring
from replayssm_cute.calls import Call, random_call
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

BASE = Problem(heads=2, head_dim=64, d_state=64, groups=2, tokens=4, window=16, has_z=True)
FOUR = dataclasses.replace(BASE, heads=4)
ONE_GROUP = dataclasses.replace(FOUR, groups=1)
BF16 = dataclasses.replace(BASE, state_dtype="bf16")
F16 = dataclasses.replace(BASE, state_dtype="f16", io_dtype="f16", dt_dtype="f16", dt_bias_dtype="f16")
FULL = dataclasses.replace(BASE, tokens=16)
ODD = dataclasses.replace(BASE, tokens=9, window=11)
WHOLE = TileConfig(ring="whole")
L2 = TileConfig(keep_b=False)
PAIRS = TileConfig(heads_per_cta=2, parallel_heads=2)

CASES: dict[str, tuple[Problem, TileConfig]] = {
    "plain": (dataclasses.replace(BASE, d_state=128), TileConfig()),
    "whole": (BASE, WHOLE),
    "two turns, one stage": (FOUR, TileConfig(heads_per_cta=2)),
    "four turns, two stages": (ONE_GROUP, TileConfig(heads_per_cta=4, stages=2)),
    "four turns, two stages, whole": (ONE_GROUP, TileConfig(heads_per_cta=4, stages=2, ring="whole")),
    "four turns, four stages": (ONE_GROUP, TileConfig(heads_per_cta=4, stages=4)),
    "three turns, two stages, a tail": (
        dataclasses.replace(BASE, heads=3, groups=1),
        TileConfig(heads_per_cta=3, stages=2, tail_rows=2),
    ),
    "a tail longer than the batch": (FOUR, TileConfig(heads_per_cta=2, tail_rows=9)),
    "split in four": (BASE, TileConfig(head_split=4)),
    "more heads than warps": (
        dataclasses.replace(BASE, heads=6, groups=1),
        TileConfig(heads_per_cta=6, head_split=4, ring="whole"),
    ),
    "two at a time": (FOUR, PAIRS),
    "two at a time in two turns, a tail": (
        ONE_GROUP,
        TileConfig(heads_per_cta=4, parallel_heads=2, stages=2, tail_rows=2),
    ),
    "two at a time, split, two tiles": (
        FOUR,
        TileConfig(heads_per_cta=2, parallel_heads=2, head_split=2, tiles_per_warp=2),
    ),
    "two tiles": (BASE, TileConfig(tiles_per_warp=2)),
    "two tiles, whole, two turns": (FOUR, TileConfig(heads_per_cta=2, tiles_per_warp=2, ring="whole")),
    "four tiles, two turns": (FOUR, TileConfig(heads_per_cta=2, stages=2, tiles_per_warp=4)),
    "T = W = 16": (FULL, TileConfig()),
    "T = W = 16, whole": (FULL, WHOLE),
    "T = W = 16, two turns": (dataclasses.replace(FULL, heads=4), TileConfig(heads_per_cta=2, stages=2)),
    "T = W = 1": (dataclasses.replace(BASE, tokens=1, window=1), TileConfig()),
    "T = W = 1, two turns": (dataclasses.replace(FOUR, tokens=1, window=1), TileConfig(heads_per_cta=2, stages=2)),
    "T = W = 1, whole": (dataclasses.replace(BASE, tokens=1, window=1), WHOLE),
    "W 32": (dataclasses.replace(BASE, window=32), TileConfig()),
    "B from L2": (dataclasses.replace(BASE, d_state=128), L2),
    "B from L2, whole, two turns": (FOUR, TileConfig(heads_per_cta=2, stages=2, ring="whole", keep_b=False)),
    "B from L2, W 32, two turns": (dataclasses.replace(FOUR, window=32), TileConfig(2, tiles_per_warp=2, keep_b=False)),
    "B from L2, T 9, W 64 bf16, gaps": (
        dataclasses.replace(BASE, tokens=9, window=64, state_dtype="bf16", compact=False),
        L2,
    ),
    "T = W = 32, two turns": (
        dataclasses.replace(FOUR, tokens=32, window=32),
        TileConfig(heads_per_cta=2, stages=2),
    ),
    "T 32, W 64": (dataclasses.replace(BASE, tokens=32, window=64), TileConfig()),
    "T 17, W 33, two turns, two tiles": (
        dataclasses.replace(FOUR, tokens=17, window=33, state_dtype="bf16"),
        TileConfig(heads_per_cta=2, tiles_per_warp=2),
    ),
    "T 1, W 64 f16": (dataclasses.replace(F16, tokens=1, window=64), TileConfig()),
    "T 3, W 20": (dataclasses.replace(BASE, tokens=3, window=20), TileConfig(head_split=2)),
    "T 25, W 48": (dataclasses.replace(BASE, tokens=25, window=48, has_z=False), TileConfig()),
    "T 9, W 11": (ODD, TileConfig()),
    "T 9, W 11, whole, two turns": (
        dataclasses.replace(ODD, heads=4),
        TileConfig(heads_per_cta=2, stages=2, ring="whole"),
    ),
    "head_dim 80, five tiles": (
        dataclasses.replace(BASE, heads=2, groups=1, head_dim=80),
        TileConfig(heads_per_cta=2, tiles_per_warp=5),
    ),
    "head_dim 80, five CTAs a head": (dataclasses.replace(BASE, head_dim=80), TileConfig(head_split=5)),
    "128 x 256 bf16": (dataclasses.replace(BF16, heads=1, groups=1, head_dim=128, d_state=256), TileConfig()),
    "d_state 256, two turns": (
        dataclasses.replace(BASE, groups=1, d_state=256),
        TileConfig(heads_per_cta=2, stages=2),
    ),
    "bf16, two turns": (dataclasses.replace(BF16, heads=4), TileConfig(heads_per_cta=2, stages=2)),
    "bf16, two at a time in two turns": (
        dataclasses.replace(BF16, heads=4, groups=1, d_state=128),
        TileConfig(heads_per_cta=4, stages=2, parallel_heads=2),
    ),
    "bf16, T = W = 16, two tiles, whole": (
        dataclasses.replace(BF16, tokens=16),
        TileConfig(tiles_per_warp=2, ring="whole"),
    ),
    "f16": (F16, TileConfig()),
    "f16 state, bf16 inputs, two turns": (
        dataclasses.replace(BASE, heads=4, state_dtype="f16"),
        TileConfig(heads_per_cta=2, stages=2),
    ),
    "bf16 state, f16 inputs": (dataclasses.replace(F16, state_dtype="bf16"), TileConfig(tiles_per_warp=2)),
    "f32 state, f16 inputs": (dataclasses.replace(F16, state_dtype="f32"), WHOLE),
    "gaps everywhere": (dataclasses.replace(FOUR, compact=False), TileConfig(heads_per_cta=2, tiles_per_warp=2)),
    "gaps everywhere, bf16": (dataclasses.replace(BF16, compact=False), WHOLE),
    "nothing optional": (
        dataclasses.replace(
            BASE, has_z=False, d_dtype=None, dt_bias_dtype=None, dt_softplus=False, index_dtype=None, dt_dtype="f32"
        ),
        TileConfig(),
    ),
    "no z, two turns, two tiles": (
        dataclasses.replace(FOUR, has_z=False, index_dtype="i64"),
        TileConfig(heads_per_cta=2, tiles_per_warp=2),
    ),
    "behind another kernel": (dataclasses.replace(BASE, pdl=True), TileConfig()),
    "behind another kernel, two turns": (
        dataclasses.replace(FOUR, pdl=True),
        TileConfig(heads_per_cta=2, stages=2),
    ),
}

# Rows with lengths of their own; see `ragged_call`.
RAGGED: dict[str, tuple[Problem, TileConfig]] = {
    name: (dataclasses.replace(problem, ragged=True), config)
    for name, (problem, config) in {
        "ragged": (BASE, TileConfig()),
        "ragged, two turns, a tail": (
            dataclasses.replace(ONE_GROUP, state_dtype="bf16"),
            TileConfig(heads_per_cta=2, stages=2, tail_rows=2),
        ),
        "ragged, two at a time": (FOUR, PAIRS),
        "ragged, whole, two tiles": (BF16, TileConfig(ring="whole", tiles_per_warp=2)),
        "ragged, T 1": (dataclasses.replace(F16, tokens=1), TileConfig(head_split=2)),
        "ragged, gaps everywhere": (dataclasses.replace(FOUR, compact=False), TileConfig(heads_per_cta=2)),
        "ragged, T 32, W 64": (dataclasses.replace(BASE, tokens=32, window=64), TileConfig()),
        "ragged, T 17, W 40, two turns": (
            dataclasses.replace(FOUR, tokens=17, window=40, state_dtype="bf16"),
            TileConfig(heads_per_cta=2),
        ),
    }.items()
}
FAR_SLOT = 1 << 28  # of padding rows: whatever reads it is far outside every cache


def cursors(problem: Problem) -> list[tuple[int, int]]:
    """(ring start, live rows): the fewest and the most that flush and that do not, wrapped around and not."""
    last = problem.window - problem.tokens  # the most that do not flush
    wrapped = problem.ring_rows - 1
    found = [(0, last), (wrapped, 0), (wrapped, problem.window), (problem.ring_rows // 2, last + 1)]
    assert [ring.flushes(pnat, problem.tokens, problem.window) for _, pnat in found] == [False, False, True, True]
    return found


def wide(t: torch.Tensor, *dims: int, fill: float = float("nan")) -> torch.Tensor:
    """A copy with gaps of 16 bytes, 8 elements at least, after each entry of the dimensions `dims`."""
    strides, reach = [1], t.shape[-1]
    for d in range(t.dim() - 2, -1, -1):
        reach += max(8, 16 // t.element_size()) if d in dims else 0
        strides.insert(0, reach)
        reach *= t.shape[d]
    flat = torch.full((reach,), 0.0 if t.dtype == torch.int8 else fill).to(t.dtype)
    return flat.as_strided(t.shape, strides).copy_(t)


def example_call(problem: Problem) -> tuple[Call, int | None]:
    """A call on these cursors with a padding row among them (None without slot indices), and gaps where allowed."""
    found = cursors(problem)
    padding = None if problem.index_dtype is None else 2
    if padding is not None:
        found.insert(padding, (0, 0))
    call = random_call(
        problem,
        len(found),
        slots=len(found) + 1,
        ring_start=[start for start, _ in found],
        pnat=[pnat for _, pnat in found],
        padding=() if padding is None else (padding,),
    )
    inner = () if problem.compact else (1, 2)
    for name in ("state", "x_cache", "B_cache", "dt_cache", "state_scale", "state_copy"):
        t = getattr(call, name)
        if t is None:
            continue
        setattr(call, name, wide(t, 0, *(d for d in inner if d < t.dim() - 1)))
    for name in ("x", "B", "C", "out", "z"):
        if (t := getattr(call, name)) is not None:
            setattr(call, name, wide(t, 0, 1, *(() if problem.compact else (2,))))
    call.dt = wide(call.dt[..., 0].contiguous(), 0, 1)[..., None].expand(call.dt.shape)
    return call, padding


def ragged_call(problem: Problem) -> Call:
    """Rows of all, no, some and one token; full windows and empty ones; padding that names `FAR_SLOT`; a tail."""
    T, W = problem.tokens, problem.window
    rows = [(T, 0), (0, W), (T // 2, W), (T, 3), (1, W - T // 2), (1, W), (T, W - T + 1)]
    lengths, pnat = zip(*rows, strict=True)
    starts = [7 * n % problem.ring_rows for n in range(len(rows))]
    call = random_call(
        problem, len(rows), lengths=lengths, pnat=pnat, ring_start=starts, padding=(3,), pad_slot_id=FAR_SLOT, tail=2
    )
    if not problem.compact:
        for name in ("state", "x_cache", "B_cache"):
            setattr(call, name, wide(getattr(call, name), 0, 1))
        for name in ("x", "B", "C", "out", "z"):
            if (t := getattr(call, name)) is not None:
                setattr(call, name, wide(t, 1, 2))
    return call


def every_pnat_call(problem: Problem) -> Call:
    """A row for every number of live rows, from none to a full window, from starts all over the ring."""
    live = range(problem.window + 1)
    starts = [7 * pnat % problem.ring_rows for pnat in live]
    return random_call(problem, len(live), ring_start=starts, pnat=list(live))
