"""Logical states out of a cache and into one of another window, ring phase or kind of state. Host operations."""

from __future__ import annotations

import dataclasses

import torch

from .. import dtypes
from . import stored
from .fold import fold
from .layout import LayerTensors, Shared
from .logical import LogicalState
from .rows import check_settled
from .spec import CacheSpec


def export(spec: CacheSpec, layers: tuple[LayerTensors, ...], shared: Shared, slot: torch.Tensor) -> LogicalState:
    """Copies of the logical states of `slot`, (n,) int64 on the cache's device, in order."""
    check_settled("slots", slot, shared.last_tokens)
    count = shared.pnat[slot].cpu()
    most = int(count.max()) if len(slot) else 0
    row = (shared.ring_start[slot].long()[:, None] + torch.arange(most, device=slot.device)) % spec.ring_rows
    live = (torch.arange(most) < count[:, None])[:, None]  # (n, 1, m)

    def rows(cache: torch.Tensor) -> torch.Tensor:
        picked = cache[slot[:, None], :, row].transpose(1, 2).cpu()  # (n, H or G, m, ...)
        return torch.where(live if picked.dim() == 3 else live[..., None], picked, 0)

    # Codes become the values that they stand for; what is read beside an f32 state is made anew on import.
    kind = "f32" if spec.state_dtype in dtypes.EIGHT_BIT else spec.state_dtype
    return LogicalState(
        dataclasses.replace(spec, state_dtype=kind, copy_dtype=None),
        count,
        torch.stack([stored.decode(layer, slot, dtypes.TORCH[kind]).cpu() for layer in layers]),
        torch.stack([rows(layer.x_cache) for layer in layers]),
        torch.stack([rows(layer.B_cache) for layer in layers]),
        torch.stack([rows(layer.dt_cache) for layer in layers]),
    )


def mismatch(spec: CacheSpec, given: CacheSpec) -> str | None:
    """Why a logical state of `given` cannot enter a cache of `spec`, or None."""
    for name in ("layers", "heads", "head_dim", "d_state", "groups", "io_dtype"):
        if getattr(spec, name) != getattr(given, name):
            return (
                f"logical state: {name}: got {getattr(given, name)!r}, expected {getattr(spec, name)!r} of this cache"
            )
    return None


def surplus(spec: CacheSpec, logical: LogicalState) -> torch.Tensor:
    """(n,) int64: the oldest rows of each slot that have to be folded so that the rest fits into W of `spec`."""
    return (logical.count.long() - spec.window).clamp(min=0)


def enter(
    spec: CacheSpec,
    layers: tuple[LayerTensors, ...],
    shared: Shared,
    slot: torch.Tensor,
    logical: LogicalState,
    folded: torch.Tensor,
) -> None:
    """Write checked logical states into slots, the oldest rows of each folded into its checkpoint.

    Args:
        slot: (n,) int64 on the cache's device.
        folded: (n,) int64, how many rows; at least the `surplus`.
    """
    n, most = len(logical), logical.x.shape[3]
    if n == 0:
        return
    kept = logical.count.long() - folded
    rates = shared.A.cpu()
    zero, each = torch.zeros(n, dtype=torch.int64), torch.arange(n)
    # Rows of a slot move down by what is folded; rows beyond the kept ones are dead, whatever is in them.
    row = (folded[:, None] + torch.arange(min(most, spec.window))).clamp(max=max(most - 1, 0))
    for i, layer in enumerate(layers):
        source = LayerTensors(*(t[i].detach() for t in (logical.state, logical.x, logical.B, logical.dt)))
        state = source.state
        if int(folded.max()):
            # In float64 and rounded once, so that moving a state costs no more than the flush that it anticipates.
            state = fold(source, rates[i], each, zero, folded, int(folded.max()), torch.float64)
        for name, made in stored.encode(spec, state).items():
            stored.as_bits(getattr(layer, name))[slot] = stored.as_bits(made).to(slot.device)
        for cache, rows in ((layer.x_cache, source.x_cache), (layer.B_cache, source.B_cache),
                            (layer.dt_cache, source.dt_cache)):  # fmt: skip
            moved = rows[each[:, None], :, row].transpose(1, 2)
            cache[slot, :, : moved.shape[2]] = moved.to(slot.device)
    shared.ring_start[slot] = 0
    shared.pnat[slot] = kept.int().to(slot.device)
    shared.last_tokens[slot] = 0
