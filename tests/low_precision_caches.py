"""Caches of 8-bit states and of read copies that several tests make, and what is true of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from cache_runs import LOW, SPEC, bits, snapshot
from oracle import as_array
from test_cache_materialize import expected_moves, folded

from replayssm_cute import GraphInput, api, dtypes, rounding
from replayssm_cute.cache import CacheSpec, ReplayCache, stored
from replayssm_cute.problem import Problem

SMALL = dataclasses.replace(SPEC, tokens=2, window=5)
SPECS = [dataclasses.replace(SMALL, **kind) for kind in LOW]
CODES = [spec for spec in SPECS if spec.copy_dtype is None]
COPIES = [spec for spec in SPECS if spec.copy_dtype is not None]
# Of the outputs of tens of steps, of the largest one: what some roundings of the state, or of the copy, cost.
ERROR = {"f8e4m3": 0.15, "i8": 2e-2, "bf16": 6e-3}


def kinds(spec: CacheSpec) -> str:
    return spec.problem().kinds


def tolerance(spec: CacheSpec) -> float:
    return ERROR[spec.copy_dtype or spec.state_dtype]


def is_encoding(cache: ReplayCache, layer: int, slot: int, values: torch.Tensor) -> bool:
    """Whether a slot's checkpoint is `rounding.encode` of values (H, P, N), bit for bit: state, scales and copy."""
    t, spec = cache.layers[layer], cache.spec
    state, scale = rounding.encode(spec.state_dtype, values.float())
    expected = {"state": state}
    if spec.copy_dtype is not None:
        expected["state_copy"], scale = rounding.encode(spec.copy_dtype, values.float())
    if scale is not None:
        expected["state_scale"] = scale
    assert set(expected) == set(t.checkpoint())
    return all(torch.equal(bits(t.checkpoint()[name][slot]), bits(each)) for name, each in expected.items())


def check_materialize(cache: ReplayCache, before: ReplayCache, rows: list[tuple[int, int, int]]) -> None:
    """A materialized cache beside what it was: values of the scalar model, encoded; everything else as it was."""
    old, now, live, spec = snapshot(before), snapshot(cache), expected_moves(rows), cache.spec
    for slot in range(cache.slots):
        for name in now:
            checkpoint = name.startswith("state")
            if slot not in live or ("[" in name and not checkpoint):
                assert torch.equal(now[name][slot].cpu(), old[name][slot]), (name, slot)
            elif not checkpoint:
                assert int(now[name][slot]) == 0, name
        if slot not in live:
            continue
        source, count = live[slot]
        for i, layer in enumerate(cache.layers):
            names = [f"{name}[{i}]" for name in layer.checkpoint()]
            if min(count, int(before.pnat[source])) <= 0:
                for name in names:
                    assert torch.equal(now[name][slot].cpu(), old[name][source]), f"count 0 copies bits: {name}"
                continue
            model = folded(before, i, source, count)
            if spec.copy_dtype is not None:
                got = as_array(layer.state[slot].cpu())
                np.testing.assert_allclose(got, model, rtol=0, atol=1e-6 * np.abs(model).max())
                check_encoded(
                    spec.copy_dtype, layer.state_copy[slot], layer.state_scale, slot, as_array(layer.state[slot].cpu())
                )
            else:
                check_encoded(spec.state_dtype, layer.state[slot], layer.state_scale, slot, model)


def check_encoded(kind: str, codes: torch.Tensor, scales: torch.Tensor | None, slot: int, values: np.ndarray) -> None:
    """Codes of rows (..., N): scales to 1e-6 of the row's, values within half a step of the code, and 1e-6."""
    codes = codes.cpu()
    if scales is None:
        assert torch.equal(bits(codes), bits(torch.tensor(values).to(dtypes.TORCH[kind])))
        return
    scale = as_array(scales[slot].cpu())
    amax = np.abs(values).max(-1)
    np.testing.assert_allclose(scale, amax / {"f8e4m3": 448.0, "i8": 127.0}[kind], rtol=2e-6)
    got = as_array(codes.float()) * scale[..., None]
    # i8: half a code. e4m3: half a unit of the last of three bits, and half the smallest denormal's, 2^-9.
    step = 0.5 * scale[..., None] if kind == "i8" else np.maximum(np.abs(values) / 16, scale[..., None] * 2.0**-10)
    assert (np.abs(got - values) <= step + 2e-6 * amax[..., None]).all()


def scramble(tensors: Iterable[torch.Tensor]) -> None:
    """Put random bits into every element."""
    gen = torch.Generator().manual_seed(2)
    for t in tensors:
        words = stored.as_bits(t)
        words.copy_(torch.randint(-(2**31), 2**31, t.shape, generator=gen).to(words.dtype))


def step_problem(spec: CacheSpec, rounds: int | None = None) -> Problem:
    return spec.problem(philox_rounds=rounds)


TINY = CacheSpec(layers=2, heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=4)


def graph_inputs(spec: CacheSpec) -> dict[str, GraphInput]:
    t = spec.tokens
    return {
        "slots": GraphInput((), torch.int32, pad=-1),
        "accepted": GraphInput((), torch.int32),
        "x": GraphInput((t, spec.heads, spec.head_dim), torch.bfloat16),
        "B": GraphInput((t, spec.groups, spec.d_state), torch.bfloat16),
        "dt": GraphInput((t, spec.heads), torch.bfloat16),
    }


class Model:
    """A step over all layers of a cache; where it has a seed, states are rounded stochastically, anew in each step."""

    def __init__(self, cache: ReplayCache, seed: torch.Tensor | None, renew: bool = True) -> None:
        self.cache, self.seed, self.renew = cache, seed, renew

    def __call__(self, slots: torch.Tensor, accepted: torch.Tensor, x: Any, B: Any, dt: Any) -> torch.Tensor:
        spec, out = self.cache.spec, None
        self.cache.begin_step(slots, accepted)
        for i in range(spec.layers):
            if self.seed is not None and self.renew:
                self.seed.random_()
            arguments: dict[str, Any] = dict(self.cache.step_args(i))
            out = torch.empty_like(x)
            api.checkpointing_ssu(
                **arguments, x=x, dt=dt[..., None].expand(x.shape), B=B, C=B, out=out, dt_softplus=True,
                A=self.cache.A[i][:, None, None].expand(-1, spec.head_dim, spec.d_state), rand_seed=self.seed,
                state_batch_indices=slots, pad_slot_id=self.cache.pad_slot_id,
            )  # fmt: skip
        assert out is not None
        return out


def graph_values(spec: CacheSpec, rows: int, step: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(step)
    shapes = {k: v for k, v in graph_inputs(spec).items() if v.dtype == torch.bfloat16}
    drawn = {k: torch.randn(rows, *v.shape, generator=gen).bfloat16() for k, v in shapes.items()}
    drawn["dt"] -= 3
    return drawn | {
        "slots": torch.randperm(5, generator=gen)[:rows].int(),
        "accepted": torch.randint(0, spec.tokens + 1, (rows,), generator=gen).int(),
    }
