"""How a state lies in a slot: rounded, as codes with scales, or beside a copy of fewer bits. Plain torch, no syncs."""

from __future__ import annotations

import torch

from .. import dtypes, rounding
from .layout import LayerTensors
from .spec import CacheSpec

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def as_bits(t: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: a copy of a NaN as a float need not keep its payload."""
    return t.view(_BITS[t.element_size()])


def encode(spec: CacheSpec, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """States as a slot keeps them, by the names of `LayerTensors.checkpoint`: `rounding.encode`, to nearest.

    Args:
        values: (..., H, P, N) of any float dtype; those beyond f32 are rounded once, and to f32 first where rows get
            scales. A read copy is one of the f32 state.
    """
    state, scale = _encode(spec.state_dtype, values)
    made = {"state": state}
    if spec.copy_dtype is not None:
        made["state_copy"], scale = _encode(spec.copy_dtype, state)
    return made if scale is None else made | {"state_scale": scale}


def decode(layer: LayerTensors, slot: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The checkpoints of `slot`, (b,) int64, as values: (b, H, P, N) in `dtype`. Read copies are not looked at."""
    codes = as_bits(layer.state)[slot].view(layer.state.dtype)  # not all devices index fp8
    scaled = layer.state_copy is None and layer.state_scale is not None
    return rounding.decode(codes, layer.state_scale[slot] if scaled else None, dtype)  # type: ignore[index]


def _encode(kind: str, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    if kind in dtypes.EIGHT_BIT:
        values = values.float()
    elif values.dtype == torch.float64 and kind != "f32":
        values = _to_odd(values)
    return rounding.encode(kind, values)


def _to_odd(values: torch.Tensor) -> torch.Tensor:
    """float64 as f32 that rounds further to fewer bits as the float64 would: what is inexact gets an odd last bit.

    torch rounds float64 to 16 bits by way of f32, which makes ties of values that are none. (Boldo and Melquiond, 2008,
    "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd".)
    """
    near = values.float()
    word = near.view(torch.int32)
    back = near.double()
    toward_zero = word - (back.abs() > values.abs()).int()
    odd = torch.where((back == values) | ~values.isfinite(), word, toward_zero | 1)
    return odd.view(torch.float32)
