"""Folding live rows into a state: Mamba2's recurrence over a prefix of a ring, in plain torch."""

from __future__ import annotations

import torch

from . import stored
from .layout import LayerTensors


def fold(
    layer: LayerTensors,
    rate: torch.Tensor,
    slot: torch.Tensor,
    start: torch.Tensor,
    count: torch.Tensor,
    most: int,
    compute_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """The states of `slot`, each advanced through its first `count` live rows; nothing is written.

    S <- exp(A_h dt) S + dt x (outer) B for every row, the oldest first, as in `replayssm_cute.reference`.

    Args:
        layer: the caches.
        rate: (H,) A of the layer.
        slot: (b,) int64.
        start, count: (b,) oldest live row and number of rows to fold, 0..most.
        most: bound on `count`, an int so that the number of operations does not depend on values.

    Returns:
        (b, H, P, N) in `compute_dtype`.
    """
    state = stored.decode(layer, slot, compute_dtype)
    ring_rows = layer.x_cache.shape[2]
    repeat = layer.x_cache.shape[1] // layer.B_cache.shape[1]
    rate = rate.to(compute_dtype)
    for j in range(most):
        row = (start.long() + j) % ring_rows
        live = (j < count)[:, None]
        # Selected, not multiplied by a mask: a dead row may hold NaN. dt = 0 leaves the state as it is.
        dt = torch.where(live, layer.dt_cache[slot, :, row], 0.0).to(compute_dtype)
        x = torch.where(live[..., None], layer.x_cache[slot, :, row], 0.0).to(compute_dtype)
        B = torch.where(live[..., None], layer.B_cache[slot, :, row], 0.0).to(compute_dtype)
        decay = torch.exp(rate * dt)[..., None, None]
        state.mul_(decay).addcmul_((dt[..., None] * x)[..., None], B.repeat_interleave(repeat, dim=1)[..., None, :])
    return state
