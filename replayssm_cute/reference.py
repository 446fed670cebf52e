"""The step in plain torch, token by token: what the operation means, on any device and in any precision.

Mamba2's recurrence (Dao and Gu, 2024, "Transformers are SSMs", section 6), one token of head h:
    S <- exp(A_h dt) S + dt x (outer) B,   y = S C + D_h x,   optionally y *= z sigmoid(z),
with dt = softplus(dt_raw + dt_bias_h). Checkpointing SSU keeps S once per slot and replays a ring of
recent inputs; here that replay is the recurrence itself, applied to the live rows and then to the new tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import checks, ring


def checkpointing_ssu_reference(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One checkpointing step, in place, with shapes and meanings as in `checkpointing_ssu`.

    `state`, the rings and `out` may be wider types than the kernels take (a float64 `state` and `out`
    keep float64 results). Arithmetic runs in `compute_dtype`.

    Returns:
        `out`, (batch, T, H, P); zero for padding rows (slot == pad_slot_id or slot < 0).
    """
    batch, tokens, heads, _ = x.shape
    slots = state_batch_indices if state_batch_indices is not None else torch.arange(batch, device=x.device)
    live_row = checks.live_rows(slots, pad_slot_id)
    out[~live_row] = 0
    index = slots[live_row].long()
    if index.numel() == 0:
        return out
    groups, rows = B_cache.shape[1], x_cache.shape[2]
    window = rows - tokens
    repeat = heads // groups

    def wide(t: torch.Tensor) -> torch.Tensor:
        return t.to(compute_dtype)

    def per_head(t: torch.Tensor) -> torch.Tensor:
        return wide(t).repeat_interleave(repeat, dim=1)

    start, pnat = ring_start[index].long(), prev_num_accepted_tokens[index].long()
    rate = wide(A[:, 0, 0])
    dt_new = wide(dt[live_row][..., 0])  # (rows, T, H)
    if dt_bias is not None:
        dt_new = dt_new + wide(dt_bias[:, 0])
    if dt_softplus:
        dt_new = F.softplus(dt_new)  # linear above 20, so a large raw dt cannot overflow

    def advance(s: torch.Tensor, dt_row: torch.Tensor, x_row: torch.Tensor, b_row: torch.Tensor) -> torch.Tensor:
        decay = torch.exp(rate * dt_row)[..., None, None]
        return decay * s + (dt_row[..., None] * x_row)[..., None] * b_row[..., None, :]

    logical = wide(state[index])
    for j in range(window):
        row = (start + j) % rows
        stepped = advance(
            logical,
            wide(dt_cache[index, :, row]),
            wide(x_cache[index, :, row]),
            per_head(B_cache[index, :, row]),
        )
        # Selecting, not multiplying by a mask: a dead row may hold NaN or Inf.
        logical = torch.where((j < pnat)[:, None, None, None], stepped, logical)

    flush = ring.flushes(pnat, tokens, window)
    flushed = index[flush]
    state[flushed] = logical[flush].to(state.dtype)

    x_new, b_new, c_new = x[live_row], B[live_row], C[live_row]
    result = torch.empty(x_new.shape, dtype=compute_dtype, device=x.device)
    for t in range(tokens):
        logical = advance(logical, dt_new[:, t], wide(x_new[:, t]), per_head(b_new[:, t]))
        y = (logical @ per_head(c_new[:, t])[..., None])[..., 0]
        if D is not None:
            y = y + wide(D[:, :1]) * wide(x_new[:, t])
        if z is not None:
            gate = wide(z[live_row][:, t])
            y = y * gate * torch.sigmoid(gate)
        result[:, t] = y
        row = (start + pnat + t) % rows
        x_cache[index, :, row] = x_new[:, t].to(x_cache.dtype)
        B_cache[index, :, row] = b_new[:, t].to(B_cache.dtype)
        dt_cache[index, :, row] = dt_new[:, t].to(dt_cache.dtype)
    out[live_row] = result.to(out.dtype)
    return out
