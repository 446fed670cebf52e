"""The decode step in plain torch: what it means, on any device and in any precision.

Per new token: raw x, B and C through a causal depthwise conv of four taps and SiLU; checkpointing SSU (see
`replayssm_cute.reference`); then the gated RMSNorm of Mamba2 (Dao and Gu, 2024, "Transformers are SSMs", section 7, and
the norm-after-gate form that its models use): u = y·z·sigmoid(z), u / sqrt(mean(u²) + eps) · weight, the mean over each
group of d_inner / groups values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .. import checks
from ..reference import checkpointing_ssu_reference
from .conv_ring import history_rows
from .problem import CONV_WIDTH, LayerCall


def conv_reference(
    inputs: torch.Tensor,
    conv_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    state_batch_indices: torch.Tensor | None,
    pad_slot_id: int,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Convolve T raw inputs a row (b, T, channels) into `out`, and append them to the ring, in place.

    Padding rows change neither.
    """
    batch, tokens, _ = inputs.shape
    slots = torch.arange(batch, device=inputs.device) if state_batch_indices is None else state_batch_indices
    live = checks.live_rows(slots, pad_slot_id)
    index = slots[live].long()
    start, pnat = ring_start[index].long(), prev_num_accepted_tokens[index].long()
    rows = conv_cache.shape[1]
    before = conv_cache[index[:, None], history_rows(start, pnat, rows)]
    new = inputs[live]
    series = torch.cat((before.to(compute_dtype), new.to(compute_dtype)), 1)
    taps = weight.to(compute_dtype)
    total = torch.zeros(new.shape, dtype=compute_dtype, device=new.device)
    if bias is not None:
        total = total + bias.to(compute_dtype)
    for k in range(CONV_WIDTH):
        total = total + taps[:, k] * series[:, k : k + tokens]
    out[live] = F.silu(total).to(out.dtype)
    at = (start[:, None] + pnat[:, None] + torch.arange(tokens, device=index.device)) % rows
    conv_cache[index[:, None], at] = new.to(conv_cache.dtype)


def norm_reference(
    y: torch.Tensor,
    z: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    groups: int,
    eps: float,
    state_batch_indices: torch.Tensor | None,
    pad_slot_id: int,
    compute_dtype: torch.dtype = torch.float32,
) -> None:
    """Gate and normalize y (b, T, d_inner) by z into `out`; zeros for padding rows."""
    batch = y.shape[0]
    slots = torch.arange(batch, device=y.device) if state_batch_indices is None else state_batch_indices
    live = checks.live_rows(slots, pad_slot_id)
    u = y[live].to(compute_dtype) * F.silu(z[live].to(compute_dtype))
    grouped = u.unflatten(-1, (groups, -1))
    scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + eps)
    result = (grouped * scale).flatten(-2) * weight.to(compute_dtype)
    out[~live] = 0
    out[live] = result.to(out.dtype)


def decode_step_reference(
    call: LayerCall, norm_groups: int, *, compute_dtype: torch.dtype = torch.float32, between: torch.dtype | None = None
) -> torch.Tensor:
    """One decode step, in place, with shapes and meanings as in `decode_step`.

    The caches and `out` may be of wider types than kernels take.

    Args:
        call: its scratch may be None.
        norm_groups: groups of the norm.
        compute_dtype: of the arithmetic.
        between: dtype of what the conv gives the step and the step gives the norm; None: projected's, as the kernels
            do. A wide one keeps the error of these roundings out.

    Returns:
        `call.out`.
    """
    kind = call.projected.dtype if between is None else between
    inputs = call.conv_inputs()
    convolved = torch.zeros(inputs.shape, dtype=kind, device=inputs.device)
    conv_reference(
        inputs, call.conv_cache, call.ring_start, call.prev_num_accepted_tokens, call.conv_weight, call.conv_bias,
        convolved, call.state_batch_indices, call.pad_slot_id, compute_dtype,
    )  # fmt: skip
    y = torch.empty(call.out.shape, dtype=kind, device=inputs.device)
    checkpointing_ssu_reference(**call.step_call(convolved, y).kwargs(), compute_dtype=compute_dtype)
    norm_reference(
        y, call.gate(), call.norm_weight, call.out, norm_groups, call.eps, call.state_batch_indices, call.pad_slot_id,
        compute_dtype,
    )  # fmt: skip
    return call.out
