"""Is a conv or norm kernel right on this GPU? It is compared with the reference before it first serves in a process."""

from __future__ import annotations

from typing import Any

import torch

from .. import calls, compare, compiler, dtypes, selfcheck
from ..reference import checkpointing_ssu_reference
from .recipes import LayerRecipe
from .reference import conv_reference, norm_reference
from .shapes import ConvShape, NormShape, StepConvShape

SLOTS, PAD = 7, -1
HALF_ULP = {"bf16": 2.0**-8, "f16": 2.0**-11}  # relative, of a value just above a power of two


def prove(recipe: LayerRecipe, kernel: compiler.Kernel, device: torch.device) -> None:
    """Run a kernel on small tensors, so that its code is on the device, and compare what it wrote.

    REPLAYSSM_SELFCHECK=0 leaves out the comparison.

    Raises:
        RuntimeError: naming the kernel and the tensor that differs.
    """
    shape = recipe.shape
    if isinstance(shape, ConvShape):
        call, expected = _conv_call(shape, device)
    elif isinstance(shape, NormShape):
        call, expected = _norm_call(shape, device)
    else:
        call, expected = _step_conv_call(shape, device)
    before = {name: call[name].clone() for name in call if isinstance(call[name], torch.Tensor)}
    kernel(*call.values())
    if not selfcheck.enabled():
        return
    for name, old in before.items():
        right = torch.equal(as_bits(call[name]), as_bits(old))
        if name in expected:
            right = _right(recipe, name, call[name], expected[name])
        if not right:
            raise RuntimeError(f"self-check: {recipe.label()} gave wrong values in {name} on {device}")


def _right(recipe: LayerRecipe, name: str, got: torch.Tensor, expected: torch.Tensor) -> bool:
    if name.startswith("conv_"):
        return same(got, expected)
    if not isinstance(recipe.shape, StepConvShape) or name in ("x_cache", "B_cache"):
        return close(got, expected)
    # The step's own bounds; its outputs also feel that the conv's are rounded: x, B and C, so that errors may double.
    bounds = compare.bounds(recipe.shape.problem)
    limit = {"out": 2 * bounds.out, "state": bounds.state, "dt_cache": bounds.dt}[name]
    difference = (got.double() - expected).nan_to_num()
    return torch.equal(got.isnan(), expected.isnan()) and bool(
        difference.norm() <= limit * expected.nan_to_num().norm()
    )


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


def _step_conv_call(shape: StepConvShape, device: torch.device) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    p = shape.problem
    indexed = p.index_dtype is not None
    live = [0, p.window, p.window - p.tokens, p.window - p.tokens + 1, 0]
    own = calls.random_call(p, 5, slots=7, padding=(4,) if indexed else (), pnat=live, device=device)
    slots = own.state_batch_indices
    widths = {"conv_x": p.head_dim, "conv_B": p.d_state, "conv_C": p.d_state}
    sizes = [p.heads * p.head_dim, p.groups * p.d_state, p.groups * p.d_state]
    conv_cache = _random(7, p.ring_rows, sum(sizes), seed=2).to(dtypes.TORCH[p.io_dtype]).to(device)
    end = own.ring_start + own.prev_num_accepted_tokens
    age = (torch.arange(p.ring_rows, device=device) - end[:, None]) % p.ring_rows
    conv_cache[age < p.ring_rows - 3] = float("nan")
    given = own.kwargs()
    step = {name: t for name, t in given.items() if isinstance(t, torch.Tensor)}
    weight = (0.5 * _random(sum(sizes), 4, seed=3)).to(dtypes.TORCH[shape.weight_dtype]).to(device)
    bias = None
    if shape.bias_dtype is not None:
        bias = (0.2 * _random(sum(sizes), seed=4)).to(dtypes.TORCH[shape.bias_dtype]).to(device)

    def rings(cache: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = cache.split(sizes, -1)
        return {name: part.unflatten(-1, (-1, widths[name])) for name, part in zip(widths, parts, strict=True)}

    wide = {name: step[name].double() for name in ("state", "x_cache", "B_cache", "dt_cache", "out")}
    wide_conv = conv_cache.double()
    raw = torch.cat([step[name].flatten(2) for name in ("x", "B", "C")], -1)
    convolved = torch.zeros(raw.shape, dtype=torch.float64, device=device)
    conv_reference(
        raw, wide_conv, own.ring_start, own.prev_num_accepted_tokens, weight, bias, convolved, slots, -1, torch.float64
    )
    made = {
        name: part.unflatten(-1, (-1, width))
        for name, part, width in zip(("x", "B", "C"), convolved.split(sizes, -1), widths.values(), strict=True)
    }
    checkpointing_ssu_reference(**{**given, **wide, **made}, compute_dtype=torch.float64)
    order = (
        "state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens", "x", "dt", "A", "B", "C",
        "out", "D", "dt_bias", "state_batch_indices", "pad_slot_id",
    )  # fmt: skip
    call = {name: given[name] for name in order} | rings(conv_cache) | {"conv_weight": weight, "conv_bias": bias}
    return call, wide | rings(wide_conv)
