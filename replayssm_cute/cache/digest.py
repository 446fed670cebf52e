"""A fingerprint of every byte that a cache holds, computed where the bytes are."""

from __future__ import annotations

import hashlib

import torch

from .layout import LayerTensors, Shared
from .torch_ops import as_bits

_CHUNK = 1 << 24  # elements at a time; each takes 16 bytes meanwhile
_FACTOR = -0x61C8864680B583EB  # odd, as an int64: 2^64 over the golden ratio


def digest(layers: tuple[LayerTensors, ...], shared: Shared) -> str:
    """SHA-256 (hex) over a 64-bit hash of every tensor of every slot. Synchronizes; reads everything a few times."""
    total = hashlib.sha256()
    tensors = [t for x in layers for t in x.named().values()]
    for t in (*tensors, shared.ring_start, shared.pnat, shared.last_tokens):
        total.update(_slot_hashes(as_bits(t)).cpu().numpy().tobytes())
    return total.hexdigest()


def _slot_hashes(bits: torch.Tensor) -> torch.Tensor:
    """(slots,) int64: sums of a slot's elements, each times an odd number of its own, modulo 2^64."""
    slots = bits.shape[0]
    size = bits[0].numel()
    weights = torch.arange(1, size + 1, device=bits.device) * _FACTOR | 1
    step = max(1, _CHUNK // size)
    return torch.cat([(bits[i : i + step].reshape(-1, size) * weights).sum(1) for i in range(0, slots, step)])
