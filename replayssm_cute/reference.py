"""The step in plain torch, token by token: what the operation means, on any device and in any precision.

Mamba2's recurrence (Dao and Gu, 2024, "Transformers are SSMs", section 6), one token of head h:
    S <- exp(A_h dt) S + dt x (outer) B,   y = S C + D_h x,   optionally y *= z sigmoid(z),
with dt = softplus(dt_raw + dt_bias_h). Checkpointing SSU keeps S once per slot and replays a ring of
recent inputs; here that replay is the recurrence itself, applied to the live rows and then to the new tokens.
Packed ragged windows are first laid out as rows of equal length; tokens that a row has not change nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from . import checks, dtypes, packing, ring, rounding


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
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    state_scale: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = rounding.ROUNDS,
    state_copy: torch.Tensor | None = None,
    precision: str = "default",
    *,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """One checkpointing step, in place, with shapes and meanings as in `checkpointing_ssu`.

    `state`, `state_copy`, the rings and `out` may be wider types than the kernels take (a float64 `state` and `out`
    keep float64 results, and an 8-bit state's values go into them without scales). Arithmetic runs in
    `compute_dtype`, so that `precision` changes nothing.

    Returns:
        `out`, (batch, T, H, P), or (1, total, H, P) with cu_seqlens; zero for padding rows (slot == pad_slot_id or
        slot < 0) and for packed tokens that no row has.
    """
    batch, tokens, heads, _ = x.shape
    if cu_seqlens is not None and max_seqlen is not None:
        batch, tokens = cu_seqlens.shape[0] - 1, max_seqlen
        place, has = packing.places(cu_seqlens, max_seqlen, x.shape[1])
    else:
        place, has = None, torch.ones(batch, tokens, dtype=torch.bool, device=x.device)

    def by_row(t: torch.Tensor) -> torch.Tensor:
        """(live rows, T, ...)."""
        return t[live_row] if place is None else t[0, place[live_row]]

    slots = state_batch_indices if state_batch_indices is not None else torch.arange(batch, device=x.device)
    live_row = checks.live_rows(slots, pad_slot_id)
    if place is None:
        out[~live_row] = 0
    else:
        out.zero_()
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
    has = has[live_row]
    dt_new = wide(by_row(dt[..., 0]))  # (rows, T, H)
    if dt_bias is not None:
        dt_new = dt_new + wide(dt_bias[:, 0])
    if dt_softplus:
        dt_new = F.softplus(dt_new)  # linear above 20, so a large raw dt cannot overflow

    def advance(s: torch.Tensor, dt_row: torch.Tensor, x_row: torch.Tensor, b_row: torch.Tensor) -> torch.Tensor:
        decay = torch.exp(rate * dt_row)[..., None, None]
        return decay * s + (dt_row[..., None] * x_row)[..., None] * b_row[..., None, :]

    def replayed(s: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """States of the rows `which`, advanced through their live ring rows."""
        at, begin, count = index[which], start[which], pnat[which]
        for j in range(window):
            row = (begin + j) % rows
            stepped = advance(s, wide(dt_cache[at, :, row]), wide(x_cache[at, :, row]), per_head(B_cache[at, :, row]))
            # Selecting, not multiplying by a mask: a dead row may hold NaN or Inf.
            s = torch.where((j < count)[:, None, None, None], stepped, s)
        return s

    def kept(t: torch.Tensor) -> torch.Tensor:
        return rounding.decode(t[index], None if state_scale is None else state_scale[index], compute_dtype)

    flush = ring.flushes(pnat, has.sum(1), window)
    flushed = index[flush]
    every = torch.ones_like(flush)
    if state_copy is None:
        logical = replayed(kept(state), every)
        _write(state, state_scale, flushed, logical[flush], rand_seed, philox_rounds)
    else:  # steps read the copy; those that flush read the checkpoint instead, and write both
        logical = replayed(kept(state_copy), every)
        checkpoint = replayed(wide(state[flushed]), flush)
        logical[flush] = checkpoint
        state[flushed] = checkpoint.to(state.dtype)
        _write(state_copy, state_scale, flushed, checkpoint, None, philox_rounds)

    x_new, b_new, c_new = by_row(x), by_row(B), by_row(C)
    gate_new = None if z is None else by_row(z)
    result = torch.empty(x_new.shape, dtype=compute_dtype, device=x.device)
    for t in range(tokens):
        logical = advance(logical, dt_new[:, t], wide(x_new[:, t]), per_head(b_new[:, t]))
        y = (logical @ per_head(c_new[:, t])[..., None])[..., 0]
        if D is not None:
            y = y + wide(D[:, :1]) * wide(x_new[:, t])
        if gate_new is not None:
            gate = wide(gate_new[:, t])
            y = y * gate * torch.sigmoid(gate)
        result[:, t] = y
        row, new = (start + pnat + t) % rows, has[:, t]
        at = index[new], slice(None), row[new]
        x_cache[at] = x_new[new, t].to(x_cache.dtype)
        B_cache[at] = b_new[new, t].to(B_cache.dtype)
        dt_cache[at] = dt_new[new, t].to(dt_cache.dtype)
    if place is None:
        out[live_row] = result.to(out.dtype)
    else:
        out[0, place[live_row][has]] = result[has].to(out.dtype)
    return out


def _write(
    target: torch.Tensor,
    scale: torch.Tensor | None,
    slots: torch.Tensor,
    values: torch.Tensor,
    seed: torch.Tensor | None,
    rounds: int,
) -> None:
    """Round the values of some slots to what `target` holds, with their scales where it has some."""
    kind = dtypes.NAME.get(target.dtype)
    if kind is None or (kind in dtypes.EIGHT_BIT) != (scale is not None) or kind == "f32":
        target[slots] = values.to(target.dtype)
        return
    bits = None
    if seed is not None:
        heads, size = values.shape[1], values.shape[2] * values.shape[3]
        bits = rounding.random_bits(kind, seed, slots, heads, size, rounds).reshape(values.shape)
    codes, scales = rounding.encode(kind, values, bits)
    # torch cannot assign 8-bit floats by index; their bits it can.
    raw = {1: torch.uint8, 2: torch.int16}[target.element_size()]
    target.view(raw)[slots] = codes.view(raw)
    if scale is not None and scales is not None:
        scale[slots] = scales
