"""Cursors after sampling: commits of uniform, ragged and deferred windows. Torch operations without host syncs."""

from __future__ import annotations

import torch

from .. import ring
from .layout import Shared
from .rows import Rows
from .spec import CacheSpec


def advance(shared: Shared, spec: CacheSpec, slot: torch.Tensor, num_accepted: torch.Tensor, ran: torch.Tensor) -> None:
    """Commit `num_accepted` tokens of windows that ran `ran` tokens each (0 changes nothing), in place.

    `ring.commit` with a length of its own for every row: R is the cache's, the flush rule the row's.
    All are (b,) of `Rows`: padding rows repeat a live one, and where none is live every length is 0. num_accepted may
    be int64, and is clamped to 0..ran before it is narrowed.
    """
    start, old = shared.ring_start[slot], shared.pnat[slot]
    accepted = torch.minimum(num_accepted.clamp(0, spec.tokens).to(old.dtype), ran)
    flushed = ring.flushes(old, ran, spec.window)
    shared.ring_start.index_copy_(0, slot, torch.where(flushed, (start + old) % spec.ring_rows, start))
    shared.pnat.index_copy_(0, slot, torch.where(flushed, accepted, old + accepted))


def track(shared: Shared, rows: Rows, slot: torch.Tensor, lens: torch.Tensor | int) -> None:
    """Note how long the open windows of the slots are; 0 means that none is open."""
    put(shared.last_tokens, rows, slot, lens)


def clear(shared: Shared, rows: Rows, slot: torch.Tensor) -> None:
    """An empty ring and no open window."""
    for cursor in (shared.ring_start, shared.pnat, shared.last_tokens):
        put(cursor, rows, slot, 0)


def put(cursor: torch.Tensor, rows: Rows, slot: torch.Tensor, value: torch.Tensor | int) -> None:
    """cursor[slot] = value for the live rows."""
    if isinstance(value, torch.Tensor):
        value = value.to(cursor.dtype)
    cursor.index_copy_(0, slot, torch.where(rows.any_live, value, cursor[slot]))
