"""Is one of these kernels right on this GPU? It is compared with the reference before it first serves in a process."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from .. import checks, compare, compiler, dtypes, plan, selfcheck
from ..calls import Call
from .recipes import LayerRecipe
from .reference import conv_reference, norm_reference
from .shapes import ConvShape, NormShape, StepShape

SLOTS, PAD = 7, -1
HALF_ULP = {"bf16": 2.0**-8, "f16": 2.0**-11}  # relative, of a value just above a power of two


def prove(recipe: LayerRecipe, kernel: compiler.Kernel, device: torch.device) -> None:
    """Run a kernel on small tensors, so that its code is on the device, and compare what it wrote.

    REPLAYSSM_SELFCHECK=0 leaves out the comparison.

    Raises:
        RuntimeError: naming the kernel and the tensor that differs.
    """
    shape = recipe.shape
    if isinstance(shape, StepShape):
        _prove_step(recipe, shape, kernel, device)
        return
    call, expected = _conv_call(shape, device) if isinstance(shape, ConvShape) else _norm_call(shape, device)
    before = {name: call[name].clone() for name in call if isinstance(call[name], torch.Tensor)}
    kernel(*call.values())
    if not selfcheck.enabled():
        return
    for name, old in before.items():
        right = torch.equal(as_bits(call[name]), as_bits(old))
        if name in expected:
            right = (same if name == "conv_cache" else close)(call[name], expected[name])
        if not right:
            raise RuntimeError(f"self-check: {recipe.label()} gave wrong values in {name} on {device}")


def _prove_step(recipe: LayerRecipe, shape: StepShape, kernel: compiler.Kernel, device: torch.device) -> None:
    """A step kernel that convolves x, on the calls of every step's self-check."""
    if not selfcheck.enabled():  # its code has to reach the device all the same
        call = plan.scratch_call(shape.problem, device)
        kernel(*plan.kernel_args(call), *conv_of_x(shape, call))
        return
    for number, trial in enumerate(selfcheck.trials(shape.problem, shape.config)):
        before = trial.to(device)
        conv = conv_of_x(shape, before)
        after, ring = before.clone(), conv[0].clone()
        kernel(*plan.kernel_args(after), ring, *conv[1:])
        if reason := step_violation(shape, before, after, conv, ring):
            raise RuntimeError(
                f"self-check: {recipe.label()} gave wrong values on {device} in trial {number}: {reason}"
            )


def conv_of_x(shape: StepShape, call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A ring of raw inputs (slots, R, H, P), NaN but in the three rows that a call's conv reads, taps and biases."""
    p, device = shape.problem, call.state.device
    channels = p.heads * p.head_dim
    ring = _random(len(call.state), p.ring_rows, p.heads, p.head_dim, seed=5).to(dtypes.TORCH[p.io_dtype]).to(device)
    at = torch.arange(p.ring_rows, device=device)
    age = (at - call.ring_start[:, None] - call.prev_num_accepted_tokens[:, None]) % p.ring_rows
    ring[age < p.ring_rows - 3] = float("nan")
    weight = 0.5 * _random(4 * channels, seed=3)
    bias = None
    if shape.bias_dtype is not None:
        bias = _random(channels, seed=4).to(dtypes.TORCH[shape.bias_dtype]).to(device)
    return ring, weight.to(dtypes.TORCH[shape.weight_dtype]).to(device), bias


def step_violation(
    shape: StepShape,
    before: Call,
    after: Call,
    conv: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    ring: torch.Tensor,
) -> str | None:
    """What is wrong with a step that convolves x, or None.

    The x that it appended is held to the reference's conv, and all else to what a step makes of that x: one value in
    many rounds otherwise than the reference's.

    Args:
        before, after: the call before and after the step; x is raw in both.
        conv: the ring of raw inputs before, taps and biases.
        ring: that ring after the step.
    """
    p = shape.problem
    index = before.state_batch_indices
    index = torch.arange(before.batch, device=ring.device) if index is None else index
    live = checks.live_rows(index, before.pad_slot_id)
    slots = index[live].long()
    exact = conv[0].double().flatten(-2)
    wanted = torch.zeros(before.batch, p.tokens, p.heads * p.head_dim, dtype=torch.float64, device=ring.device)
    conv_reference(
        before.x.flatten(-2), exact, before.ring_start, before.prev_num_accepted_tokens, conv[1].view(-1, 4), conv[2],
        wanted, before.state_batch_indices, before.pad_slot_id, torch.float64,
    )  # fmt: skip
    if not same(ring.flatten(-2), exact):
        return "the ring of raw inputs differs from the reference's"
    at = before.ring_start[slots].long() + before.prev_num_accepted_tokens[slots].long()
    rows = (at[:, None] + torch.arange(p.tokens, device=ring.device)) % p.ring_rows
    x = before.clone().x
    x[live] = after.x_cache.transpose(1, 2)[slots[:, None], rows]
    if not close(x[live].flatten(-2), wanted[live]):
        return "x differs from the reference's conv"
    if not torch.equal(as_bits(after.x.contiguous()), as_bits(before.x.contiguous())):
        return "the raw inputs were written"
    found = compare.errors(dataclasses.replace(before, x=x), dataclasses.replace(after, x=x))
    return compare.bounds(p).violation(found)


def as_bits(t: torch.Tensor) -> torch.Tensor:
    """A tensor as integers, so that NaN equals NaN."""
    return t.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()])


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all values are equal, NaN to NaN."""
    return bool(((got == expected) | (got.isnan() & expected.isnan())).all())


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether 16-bit values are a float64 reference's, rounded once, from f32 sums a little off; NaN where it is."""
    half = HALF_ULP[dtypes.NAME[got.dtype]]
    scale = expected.abs().nan_to_num().amax(-1, keepdim=True)
    right = (got.double() - expected).abs() <= 1.02 * half * expected.abs() + 1e-5 * scale
    return bool((right | (expected.isnan() & got.isnan())).all())


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _rows(device: torch.device, index_dtype: str | None) -> tuple[torch.Tensor | None, int]:
    """Slots of a batch, with padding of both kinds where there are slots, and its size."""
    if index_dtype is None:
        return None, 3
    return torch.tensor([4, PAD, 0, -5, 6], dtype=dtypes.TORCH[index_dtype], device=device), 5


def _conv_call(shape: ConvShape, device: torch.device) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Arguments of the kernel by name, and what it shall have written: NaN where nothing."""
    io = dtypes.TORCH[shape.io_dtype]
    slots, batch = _rows(device, shape.index_dtype)
    window = shape.ring_rows - shape.tokens
    wide = _random(batch, shape.tokens, shape.channels + 16, seed=1).to(io).to(device)
    cache = _random(SLOTS, shape.ring_rows, shape.channels, seed=2).to(io)
    start = torch.arange(SLOTS) * 5 % shape.ring_rows
    pnat = torch.tensor([0, 3, 1, 2, window, 1, window // 2])
    pnat = torch.minimum(pnat, torch.tensor(window))
    age = (torch.arange(shape.ring_rows) - start[:, None] - pnat[:, None]) % shape.ring_rows
    cache[age < shape.ring_rows - 3] = float("nan")  # all but the three rows that a conv reads
    call: dict[str, Any] = {
        "projected": wide[..., 8:-8],
        "conv_cache": cache.to(device),
        "ring_start": start.int().to(device),
        "prev_num_accepted_tokens": pnat.int().to(device),
        "conv_weight": _random(shape.channels, 4, seed=3).to(dtypes.TORCH[shape.weight_dtype]).to(device),
        "conv_bias": None
        if shape.bias_dtype is None
        else _random(shape.channels, seed=4).to(dtypes.TORCH[shape.bias_dtype]).to(device),
        "scratch": torch.full((batch, shape.tokens, shape.channels), float("nan"), dtype=io, device=device),
        "state_batch_indices": slots,
        "pad_slot_id": PAD,
    }
    expected = {name: call[name].double() for name in ("conv_cache", "scratch")}
    conv_reference(
        call["projected"],
        expected["conv_cache"],
        call["ring_start"],
        call["prev_num_accepted_tokens"],
        call["conv_weight"],
        call["conv_bias"],
        expected["scratch"],
        slots,
        PAD,
        torch.float64,
    )
    return call, expected


def _norm_call(shape: NormShape, device: torch.device) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    io = dtypes.TORCH[shape.io_dtype]
    slots, batch = _rows(device, shape.index_dtype)
    wide = _random(batch, shape.tokens, shape.d_inner + 16, seed=1).to(io).to(device)
    call: dict[str, Any] = {
        "out": _random(batch, shape.tokens, shape.d_inner, seed=2).to(io).to(device),
        "projected": wide[..., 8:-8],
        "norm_weight": _random(shape.d_inner, seed=3).to(dtypes.TORCH[shape.weight_dtype]).to(device),
        "state_batch_indices": slots,
        "eps": 1e-5,
        "pad_slot_id": PAD,
    }
    if slots is not None:  # as the step leaves padding rows, whose gates may hold anything
        call["out"][slots < 0] = 0
        wide[slots < 0] = float("nan")
    expected = torch.empty(call["out"].shape, dtype=torch.float64, device=device)
    norm_reference(
        call["out"], call["projected"], call["norm_weight"], expected, shape.groups, 1e-5, slots, PAD, torch.float64
    )
    return call, {"out": expected}
