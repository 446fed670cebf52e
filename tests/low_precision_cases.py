"""Problems of low-precision states and configs for them, and what their results are held to beyond the bounds."""

from __future__ import annotations

import dataclasses

import torch
from simulated_cases import BASE, FOUR, ONE_GROUP

from replayssm_cute.calls import Call
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

F8, I8 = ({"state_dtype": kind} for kind in ("f8e4m3", "i8"))
WIDE, F16 = {"d_state": 128}, {"io_dtype": "f16", "dt_dtype": "f16"}
BYTE_ONE, TWO_TURNS = TileConfig(), TileConfig(heads_per_cta=2, stages=2)
CASES: dict[str, tuple[Problem, TileConfig]] = {
    "f8, rows of 64 bytes": (dataclasses.replace(BASE, **F8), BYTE_ONE),
    "f8": (dataclasses.replace(BASE, **F8, **WIDE), BYTE_ONE),
    "f8, f16 inputs, two turns": (dataclasses.replace(FOUR, **F8, **WIDE, **F16), TWO_TURNS),
    "f8, d_state 256, head_dim 128, split": (
        dataclasses.replace(BASE, **F8, head_dim=128, d_state=256),
        TileConfig(head_split=4, tiles_per_warp=2),
    ),
    "f8, W 40": (dataclasses.replace(BASE, **F8, window=40), BYTE_ONE),
    "i8, rows of 64 bytes, two tiles, one stage": (
        dataclasses.replace(FOUR, **I8),
        TileConfig(heads_per_cta=2, tiles_per_warp=2),
    ),
    "i8, four turns, a tail": (
        dataclasses.replace(ONE_GROUP, **I8, **WIDE),
        TileConfig(heads_per_cta=4, stages=2, tail_rows=2),
    ),
    "i8, two at a time, f16 inputs": (
        dataclasses.replace(FOUR, **I8, **F16),
        TileConfig(heads_per_cta=2, parallel_heads=2),
    ),
    "i8, gaps everywhere": (dataclasses.replace(BASE, **I8, **WIDE, compact=False), BYTE_ONE),
    "i8, T = W = 1, head_dim 80": (dataclasses.replace(BASE, **I8, head_dim=80, tokens=1, window=1), BYTE_ONE),
    "i8, T 17, W 33": (dataclasses.replace(FOUR, **I8, tokens=17, window=33), TWO_TURNS),
    "f8, stochastic": (dataclasses.replace(BASE, **F8, **WIDE, philox_rounds=10), BYTE_ONE),
    "f8, stochastic, rows of 64 bytes": (dataclasses.replace(FOUR, **F8, philox_rounds=7), TWO_TURNS),
    "f8, B from L2": (dataclasses.replace(BASE, **F8, **WIDE), TileConfig(keep_b=False)),
    "i8, stochastic, W 32, B from L2, two turns": (
        dataclasses.replace(FOUR, **I8, philox_rounds=10, window=32),
        TileConfig(heads_per_cta=2, stages=2, keep_b=False),
    ),
    "bf16 copy, W 33, B from L2": (dataclasses.replace(BASE, copy_dtype="bf16", window=33), TileConfig(keep_b=False)),
    "i8, stochastic": (dataclasses.replace(BASE, **I8, **WIDE, philox_rounds=10), TileConfig(tiles_per_warp=2)),
    "i8, stochastic, rows of 64 bytes, gaps": (
        dataclasses.replace(BASE, **I8, philox_rounds=10, compact=False),
        TileConfig(head_split=2),
    ),
    "bf16, stochastic": (dataclasses.replace(BASE, state_dtype="bf16", philox_rounds=10), BYTE_ONE),
    "bf16, stochastic, f16 inputs, two turns": (
        dataclasses.replace(FOUR, state_dtype="bf16", philox_rounds=1, **F16),
        TWO_TURNS,
    ),
    "f16, stochastic": (dataclasses.replace(BASE, **WIDE, state_dtype="f16", philox_rounds=10), BYTE_ONE),
    "bf16 copy": (dataclasses.replace(BASE, copy_dtype="bf16"), BYTE_ONE),
    "bf16 copy, four turns, W 32": (
        dataclasses.replace(ONE_GROUP, copy_dtype="bf16", window=32),
        TileConfig(heads_per_cta=4, stages=2),
    ),
    "bf16 copy, f16 inputs, gaps": (dataclasses.replace(BASE, copy_dtype="bf16", compact=False, **F16), BYTE_ONE),
    "f8 copy, two tiles": (dataclasses.replace(FOUR, copy_dtype="f8e4m3"), TileConfig(2, tiles_per_warp=2)),
    "i8 copy, behind another kernel": (dataclasses.replace(BASE, copy_dtype="i8", **WIDE, pdl=True), BYTE_ONE),
    "bf16 copy, one turn of two tiles": (
        dataclasses.replace(BASE, copy_dtype="bf16", **WIDE),
        TileConfig(tiles_per_warp=2),
    ),
    "f8 copy, four turns of four tiles, three stages": (
        dataclasses.replace(ONE_GROUP, copy_dtype="f8e4m3", **WIDE),
        TileConfig(4, 3, tiles_per_warp=4),
    ),
    "i8 copy, one stage, a tail, head_dim 80": (
        dataclasses.replace(ONE_GROUP, copy_dtype="i8", head_dim=80, tokens=9),
        TileConfig(4, 1, tail_rows=2),
    ),
    "bf16 copy, two at a time": (
        dataclasses.replace(ONE_GROUP, copy_dtype="bf16", head_dim=128),
        TileConfig(4, 1, parallel_heads=2, tiles_per_warp=2, head_split=2),
    ),
    "bf16 copy, T 32, W 64, two turns of two tiles": (
        dataclasses.replace(ONE_GROUP, heads=2, copy_dtype="bf16", tokens=32, window=64),
        TileConfig(2, tiles_per_warp=2),
    ),
    "highest": (dataclasses.replace(BASE, precision="highest"), BYTE_ONE),
    "highest, two turns, T 9": (dataclasses.replace(FOUR, precision="highest", tokens=9), TWO_TURNS),
    "highest, whole": (dataclasses.replace(BASE, precision="highest", **WIDE), TileConfig(ring="whole")),
}
RAGGED_COPIES: dict[str, tuple[Problem, TileConfig]] = {
    "bf16, behind another kernel, four turns, three stages, two tiles, a tail": (
        dataclasses.replace(ONE_GROUP, copy_dtype="bf16", ragged=True, pdl=True),
        TileConfig(4, 3, tiles_per_warp=2, tail_rows=3),
    ),
    "i8, T = W = 32": (dataclasses.replace(BASE, copy_dtype="i8", tokens=32, window=32, ragged=True), BYTE_ONE),
}
# Of the codes that a flush writes, how many are those of the reference at least: sums differ by 2^-12 of what the ring
# adds where its terms are not split, which moves some values over the edge between two codes.
SAME = {"bf16~": 0.93, "f16~": 0.998, "f8e4m3": 0.98, "i8": 0.98, "f32+": 0.998}


def excess(before: Call, after: Call) -> float:
    """How far outputs are from the float64 result beyond their own rounding, relative to their row's norm, at most."""
    exact = before.clone()
    exact.state = exact.state.double()
    exact.out = torch.empty(exact.out.shape, dtype=torch.float64, device=exact.out.device)
    exact.dt_cache = exact.dt_cache.double()
    checkpointing_ssu_reference(**exact.kwargs(), compute_dtype=torch.float64)
    mantissa, exponent = torch.frexp(after.out.double())
    half = torch.ldexp(torch.ones_like(mantissa), exponent - 9)  # of a bf16's last bit
    beyond = ((after.out.double() - exact.out).abs() - half).clamp_min(0)
    return float((beyond / exact.out.norm(dim=-1, keepdim=True).clamp_min(1e-30)).max())


def least_share(problem: Problem) -> float:
    """What `compare.same_codes` is at least."""
    return SAME["f32+" if problem.copy_dtype else problem.state_dtype + ("~" if problem.state_bytes == 2 else "")]
