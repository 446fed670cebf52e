"""Random decode steps, and an oracle of them that shares no code with the package."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from oracle import History, as_array, gate, softplus

from replayssm_cute import dtypes
from replayssm_cute.calls import _clone, random_call
from replayssm_cute.fused.problem import LayerCall, LayerProblem
from replayssm_cute.problem import Problem

TENSORS = [f.name for f in dataclasses.fields(LayerCall)]


def layer(step: Problem, **changes: Any) -> LayerProblem:
    """A layer problem around a step's."""
    kinds: dict[str, Any] = {"conv_dtype": "bf16", "conv_bias_dtype": "f32", "norm_dtype": "bf16"}
    return LayerProblem(step, **(kinds | {"norm_groups": step.groups} | changes))


def random_layer_call(
    problem: LayerProblem,
    batch: int,
    *,
    slots: int | None = None,
    padding: tuple[int, ...] = (),
    pad_slot_id: int = -1,
    pnat: Any = None,
    ring_start: Any = None,
    dead: float | None = float("nan"),
    seed: int = 0,
    wide: int = 0,
) -> LayerCall:
    """A random decode step on the CPU; `dead` fills what no step may use. `wide` strides rows further apart."""
    p = problem.step
    inner = random_call(
        p, batch, slots=slots, padding=padding, pad_slot_id=pad_slot_id, pnat=pnat, ring_start=ring_start, dead=dead,
        seed=seed,
    )  # fmt: skip
    gen = torch.Generator().manual_seed(seed + 1)
    io = dtypes.TORCH[p.io_dtype]

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen)

    projected = (0.8 * randn(batch, p.tokens, -(-problem.width // 8) * 8 + wide)).to(io)[..., : problem.width]
    projected[..., -p.heads :] = inner.dt[..., 0]
    conv_cache = (0.8 * randn(inner.state.shape[0], p.ring_rows, problem.channels + wide)).to(io)
    conv_cache = conv_cache[..., : problem.channels]
    if dead is not None:
        rows = torch.arange(p.ring_rows)
        age = (rows - inner.ring_start[:, None] - inner.prev_num_accepted_tokens[:, None]) % p.ring_rows
        conv_cache[age < p.ring_rows - 3] = dead
        projected[list(padding)] = dead
    bias = problem.conv_bias_dtype
    return LayerCall(
        projected=projected,
        state=inner.state,
        x_cache=inner.x_cache,
        B_cache=inner.B_cache,
        dt_cache=inner.dt_cache,
        conv_cache=conv_cache,
        ring_start=inner.ring_start,
        prev_num_accepted_tokens=inner.prev_num_accepted_tokens,
        conv_weight=(0.5 * randn(problem.channels, 4)).to(dtypes.TORCH[problem.conv_dtype]),
        conv_bias=None if bias is None else (0.2 * randn(problem.channels)).to(dtypes.TORCH[bias]),
        A=inner.A[:, 0, 0].clone(),
        D=None if inner.D is None else inner.D[:, 0].clone(),
        dt_bias=None if inner.dt_bias is None else inner.dt_bias[:, 0].clone(),
        norm_weight=(1 + 0.1 * randn(problem.d_inner)).to(dtypes.TORCH[problem.norm_dtype]),
        out=torch.full((batch, p.tokens, problem.d_inner + wide), float("nan"), dtype=io)[..., : problem.d_inner],
        state_batch_indices=inner.state_batch_indices,
        pad_slot_id=pad_slot_id,
        norm_groups=problem.norm_groups,
        dt_softplus=p.dt_softplus,
    )


def kwargs(call: LayerCall) -> dict[str, Any]:
    """As keyword arguments of `decode_step`."""
    return {name: getattr(call, name) for name in TENSORS}


def copied(call: LayerCall, device: str | None = None, **kinds: torch.dtype) -> LayerCall:
    """A deep copy that keeps strides, on a device; tensors named in `kinds` become another type."""
    made = {n: _clone(t, device) for n, t in kwargs(call).items() if isinstance(t, torch.Tensor)}
    made |= {n: made[n].to(kind) for n, kind in kinds.items()}
    return dataclasses.replace(call, **made)


def random_steps(problem: LayerProblem, count: int) -> Iterator[tuple[list[int], torch.Tensor, list[int]]]:
    """Slots of three rows (of 0 to 3, or padding), their projections, and how many of their tokens are accepted."""
    tokens = problem.step.tokens
    rng, gen = random.Random(tokens), torch.Generator().manual_seed(0)
    for _ in range(count):
        rows = rng.sample([0, 1, 2, 3, -1], 3)
        projected = (0.8 * torch.randn(3, tokens, problem.width, generator=gen)).to(torch.bfloat16)
        yield rows, projected, [rng.randint(0, tokens) for _ in rows]


class LayerHistory:
    """One request's truth, in float64: the conv inputs and the states after accepted tokens alone."""

    def __init__(self, call: LayerCall, norm_groups: int) -> None:
        heads, head_dim, d_state = call.state.shape[1:]
        self.sizes = (heads, head_dim, d_state, call.B_cache.shape[1])
        self.weight, self.rate, self.norm = map(as_array, (call.conv_weight, call.A, call.norm_weight))
        self.bias = np.zeros(len(self.weight)) if call.conv_bias is None else as_array(call.conv_bias)
        self.skip = np.zeros(heads) if call.D is None else as_array(call.D)
        self.dt_bias = np.zeros(heads) if call.dt_bias is None else as_array(call.dt_bias)
        self.softplus, self.eps, self.groups = call.dt_softplus, call.eps, norm_groups
        self.inputs: list[np.ndarray] = [np.zeros(len(self.weight))] * 3
        self.ssm = History(np.zeros((heads, head_dim, d_state)))

    def run(self, projected: np.ndarray, accepted: int) -> np.ndarray:
        """Outputs (T, d_inner) of T tokens (T, width), of which the first `accepted` become history."""
        H, P, N, G = self.sizes
        inner = H * P
        series = [*self.inputs, *(row[inner : inner + len(self.weight)] for row in projected)]
        after = len(self.inputs)
        convolved = []
        for t in range(len(projected)):
            total = self.bias.copy()
            for k in range(4):
                total = total + self.weight[:, k] * series[after + t - 3 + k]
            convolved.append(total / (1 + np.exp(-total)))
        xbc = np.stack(convolved)
        x = xbc[:, :inner].reshape(-1, H, P)
        B = xbc[:, inner : inner + G * N].reshape(-1, G, N)
        C = xbc[:, inner + G * N :].reshape(-1, G, N)
        dt = projected[:, -H:] + self.dt_bias
        if self.softplus:
            dt = np.vectorize(softplus)(dt)
        y = self.ssm.run(self.rate, dt, x, B, C, accepted) + self.skip[:, None] * x
        self.inputs = [*self.inputs, *series[after : after + accepted]][-3:]
        u = gate(y.reshape(len(y), inner), projected[:, :inner])
        out = np.empty_like(u)
        width = inner // self.groups
        for t in range(len(u)):
            for g in range(self.groups):
                part = slice(g * width, (g + 1) * width)
                out[t, part] = u[t, part] / np.sqrt(np.mean(u[t, part] ** 2) + self.eps) * self.norm[part]
        return out
