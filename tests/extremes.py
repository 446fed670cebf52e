"""Calls whose numbers are as extreme as a contract allows, for any step problem; results stay finite in every dtype."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from replayssm_cute import compare
from replayssm_cute.calls import Call, random_call, spread
from replayssm_cute.problem import Problem

LARGE_X = 6e4  # of 65,504, the largest f16
RATE = -16.0


def every_pnat(problem: Problem, seed: int, device: torch.device | str) -> Call:
    """A row for every number of live rows, from ring starts all over the ring; full rows where they are ragged."""
    live = range(problem.window + 1)
    starts = [7 * pnat % problem.ring_rows for pnat in live]
    full = problem.tokens if problem.ragged else None
    return random_call(
        problem, len(live), ring_start=starts, pnat=list(live), lengths=full, seed=seed, device=torch.device(device)
    )


def raw_dt(dt: torch.Tensor) -> torch.Tensor:
    """What softplus makes `dt` of."""
    return torch.where(dt > 20, dt, torch.log(torch.expm1(dt.double().clamp(max=20))).to(dt.dtype))


def _draw(shape: torch.Size | tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed))


def _set_dt(call: Call, cached: torch.Tensor, new: torch.Tensor) -> None:
    """Put processed dt into the live ring rows, and raw dt into the new tokens; the bias becomes zero."""
    live = torch.isfinite(call.dt_cache)
    call.dt_cache = torch.where(live, cached.to(call.dt_cache), call.dt_cache)
    raw = raw_dt(new) if call.dt_softplus else new
    call.dt = spread(raw.to(call.dt), call.dt.shape[-1])
    if call.dt_bias is not None:
        call.dt_bias = spread(torch.zeros_like(call.dt_bias[:, 0]), call.dt_bias.shape[-1])


def weak_and_strong_decay(problem: Problem, seed: int = 0, device: torch.device | str = "cpu") -> Call:
    """A * dt from -1e-6 to -1e3, of any two neighbours in a window, and in any order."""
    call = every_pnat(problem, seed, device)
    call.A = spread(torch.full_like(call.A[:, 0, 0], RATE), *call.A.shape[1:])

    def dt(shape: torch.Size, seed: int) -> torch.Tensor:
        return 10 ** (9 * _draw(shape, seed) - 6) / -RATE

    _set_dt(call, dt(call.dt_cache.shape, seed + 1), dt(call.dt.shape[:3], seed + 2))
    return call


def large_x(problem: Problem, dt: float, seed: int = 0, device: torch.device | str = "cpu") -> Call:
    """x of plus and minus 6e4 in all live and new rows, dt up to `dt`; C, D and z small, so that outputs fit f16."""
    call = every_pnat(problem, seed, device)
    for number, name in enumerate(("x", "x_cache")):
        t = getattr(call, name)
        sign = torch.where(_draw(t.shape, seed + 1 + number) < 0.5, LARGE_X, -LARGE_X).to(t)
        setattr(call, name, torch.where(torch.isfinite(t), sign, t))
    _set_dt(
        call,
        dt * _draw(call.dt_cache.shape, seed + 3),
        torch.full(call.dt.shape[:3], dt),
    )
    call.C = (call.C.float() * (1e-6 / dt)).to(call.C.dtype)
    if call.D is not None:
        call.D = spread(call.D[:, 0].clamp(-0.25, 0.25), call.D.shape[-1])
    if call.z is not None:
        call.z = call.z.clamp(-2, 2)
    return call


def large_dt(problem: Problem, raw: float, seed: int = 0, device: torch.device | str = "cpu") -> Call:
    """Every new token's raw dt the same; softplus of it must neither overflow nor lose what is tiny."""
    call = every_pnat(problem, seed, device)
    call.dt = spread(torch.full_like(call.dt[..., 0], raw), call.dt.shape[-1])
    if problem.io_dtype == "f16":  # outputs of dt 200 would not fit
        call.C = call.C * 0.01
    return call


def kinds(problem: Problem) -> dict[str, Callable[..., Call]]:
    """What a problem can be asked; states of f16 hold dt * x only where dt is small."""
    found: dict[str, Callable[..., Call]] = {"weak and strong decay": weak_and_strong_decay}
    # Of hundreds of tokens some output is by chance the small difference of terms of hundreds: no measure of an error.
    if problem.dt_softplus and problem.tokens <= 4:
        for raw in (20.0, 89.0, 200.0, -200.0):
            found[f"raw dt {raw:g}"] = lambda p, *a, raw=raw, **k: large_dt(p, raw, *a, **k)
    if problem.io_dtype == "f16":
        for dt in (1e-3,) if problem.state_dtype == "f16" else (1e-3, 20.0):
            found[f"x 6e4, dt {dt:g}"] = lambda p, *a, dt=dt, **k: large_x(p, dt, *a, **k)
    return found


def bounds(problem: Problem) -> compare.Bounds:
    """As everywhere, but for a single row, token and head: there, terms of hundreds may leave a difference of few."""
    usual = compare.bounds(problem)
    return dataclasses.replace(usual, out_worst=2 * usual.out_worst)
