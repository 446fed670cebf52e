"""Ring arithmetic and the flush rule: the one place that hosts, kernels and tests take them from.

A slot holds a checkpoint state and a ring of R = W + T rows of inputs. `ring_start` names the oldest
live row, `pnat` (prev_num_accepted_tokens) counts the live rows. The functions below use nothing but
`+`, `>`, `-` and `%`, so they serve Python ints, torch tensors and CuTe DSL integers alike.
"""

from __future__ import annotations

from typing import Any

import torch


def ring_rows(window: int, tokens: int) -> int:
    """R = W + T: a step may start with W live rows and still needs T free ones for its own tokens."""
    return window + tokens


def flushes(pnat: Any, tokens: Any, window: Any) -> Any:
    """Whether a step on `tokens` new tokens writes the logical state back (equivalently pnat + 2T > R)."""
    return pnat + tokens > window


def commit(
    ring_start: torch.Tensor,
    pnat: torch.Tensor,
    slots: torch.Tensor,
    num_accepted: torch.Tensor,
    *,
    tokens: int,
    window: int,
    pad_slot_id: int = -1,
    lengths: torch.Tensor | None = None,
) -> None:
    """Advance the cursors of `slots` after a step of `tokens` tokens, in place, without a host sync.

    Args:
        ring_start, pnat: (slots,) int32 cursors, updated in place.
        slots: (batch,) int32 or int64 distinct slot indices; `pad_slot_id` and negative ones are skipped.
        num_accepted: (batch,) accepted tokens per row; clamped to 0..tokens. 0 is legal, also on a flush.
        tokens, window: T and W of the step.
        lengths: (batch,) int32 or int64, the tokens that each row ran in a ragged step, 0..T; None means T. Flush rule
            and clamp are then the row's own, and a row of length 0 keeps its cursors.
    """
    rows = ring_rows(window, tokens)
    slots = slots.long()  # pad_slot_id may be any int64
    live = (slots != pad_slot_id) & (slots >= 0)
    # Padding rows all alias one harmless slot; they write back what they read, so they may collide
    # with each other but never with a live row: they are routed to an extra scratch entry instead.
    size = ring_start.shape[0]
    safe = torch.where(live, slots, 0)
    start, old = ring_start[safe], pnat[safe]
    accepted = num_accepted.clamp(0, tokens).to(old.dtype)
    ran: torch.Tensor | int = tokens
    if lengths is not None:
        ran = lengths.to(old.dtype)
        accepted = torch.minimum(accepted, ran)
    flushed = flushes(old, ran, window)
    new_start = torch.where(flushed, (start + old) % rows, start)
    new_old = torch.where(flushed, accepted, old + accepted)
    target = torch.where(live, slots, size)
    for cursor, value in ((ring_start, new_start), (pnat, new_old)):
        extended = torch.cat((cursor, cursor.new_zeros(1)))
        extended[target] = value
        cursor.copy_(extended[:-1])


def bytes_per_slot(
    heads: int,
    head_dim: int,
    d_state: int,
    groups: int,
    tokens: int,
    window: int,
    *,
    state_bytes: int = 4,
    io_bytes: int = 2,
    copy_bytes: int = 0,
    scaled: bool = False,
) -> int:
    """Bytes of one slot of one layer: checkpoint, ring of x, B (input dtype) and dt (f32), two cursors.

    `state_bytes` and `copy_bytes` are those of an element of the checkpoint and of its read copy (0: none); `scaled`
    adds the f32 scales of whichever of them is 8-bit, one for each row of head_dim.
    """
    rows = ring_rows(window, tokens)
    checkpoint = heads * head_dim * (d_state * (state_bytes + copy_bytes) + (4 if scaled else 0))
    ring = rows * (heads * head_dim * io_bytes + groups * d_state * io_bytes + heads * 4)
    return checkpoint + ring + 8
