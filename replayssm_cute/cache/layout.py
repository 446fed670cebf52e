"""From a CacheSpec to tensors: one buffer of one's own, or views into an engine's page pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..problem import ROW_ALIGN
from .shapes import TENSORS, ZERO_STATE
from .spec import CacheSpec


@dataclass(frozen=True, slots=True)
class LayerTensors:
    """One layer's caches: state (slots, H, P, N), x_cache (slots, H, R, P), B_cache (slots, G, R, N), dt_cache
    (slots, H, R); where the spec has them state_copy (slots, H, P, N) and state_scale (slots, H, P)."""

    state: torch.Tensor
    x_cache: torch.Tensor
    B_cache: torch.Tensor
    dt_cache: torch.Tensor
    state_copy: torch.Tensor | None = None
    state_scale: torch.Tensor | None = None

    def named(self) -> dict[str, torch.Tensor]:
        """The tensors that are there, by name."""
        return {name: t for name in TENSORS if (t := getattr(self, name)) is not None}

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """Those that hold the checkpoint: state, and its copy and scales where they are there."""
        return {name: t for name, t in self.named().items() if name in ZERO_STATE}


@dataclass(frozen=True, slots=True)
class Shared:
    """What the layers share: A (layers, H) f32; ring_start, pnat and last_tokens (slots,) int32."""

    A: torch.Tensor
    ring_start: torch.Tensor
    pnat: torch.Tensor
    last_tokens: torch.Tensor


def allocate(spec: CacheSpec, slots: int, device: torch.device) -> tuple[tuple[LayerTensors, ...], Shared]:
    """Zeroed tensors in one buffer of exactly `spec.total_bytes(slots)` bytes."""
    described = spec.tensors(slots)
    buffer = torch.zeros(spec.total_bytes(slots), dtype=torch.uint8, device=device)
    views = {(t.layer, t.name): t.of(buffer) for t in described}
    layers = tuple(LayerTensors(**{n: views[i, n] for n in spec.slot_shapes()}) for i in range(spec.layers))
    return layers, Shared(**{name: view for (layer, name), view in views.items() if layer is None})


def shared(spec: CacheSpec, slots: int, device: torch.device) -> Shared:
    """Zeroed shared tensors alone, each an allocation of its own."""
    described = [t for t in spec.tensors(slots) if t.layer is None]
    raw = {t.name: torch.zeros(t.nbytes, dtype=torch.uint8, device=device) for t in described}
    return Shared(**{t.name: raw[t.name].view(torch.float32 if t.dtype == "f32" else torch.int32).view(t.shape)
                     for t in described})  # fmt: skip


def from_pool(
    spec: CacheSpec, pool: torch.Tensor | Sequence[torch.Tensor], offsets: Mapping[str, int] | None
) -> tuple[LayerTensors, ...]:
    """Views into an engine's pages; see `ReplayCache.from_pool`. Nothing is written."""
    pages = list(pool)
    if len(pages) != spec.layers:
        raise ValueError(f"pool: got {len(pages)} layers, expected {spec.layers}")
    layers, spans = [], []
    for i, page in enumerate(pages):
        name = f"pool[{i}]"
        _check_page(name, page, pages[0])
        slots, width = page.shape
        stride = page.stride(0) if slots > 1 else -(-width // ROW_ALIGN) * ROW_ALIGN
        try:
            described = spec.page_tensors(slots, stride, offsets, layer=i)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        used = max(t.offset + t.nbytes // slots for t in described)
        if used > width:
            raise ValueError(f"{name}: got {width} bytes a slot, expected at least {used}")
        raw = page.view(torch.uint8).as_strided(((slots - 1) * stride + width,), (1,))
        layers.append(LayerTensors(**{t.name: t.of(raw) for t in described}))
        spans.append((page.data_ptr(), stride, used))
    if pages[0].device.type != "meta":
        _check_disjoint(spans, pages[0].shape[0])
    return tuple(layers)


def _check_page(name: str, page: object, first: torch.Tensor) -> None:
    if not isinstance(page, torch.Tensor):
        raise TypeError(f"{name}: got {type(page).__name__}, expected a torch.Tensor")
    if page.dtype not in (torch.uint8, torch.int8):
        raise TypeError(f"{name}: got {page.dtype}, expected torch.uint8 or torch.int8 (bytes)")
    if page.dim() != 2 or page.shape[0] < 1:
        raise ValueError(f"{name}: got shape {tuple(page.shape)}, expected (slots, bytes)")
    if page.shape[0] != first.shape[0]:
        raise ValueError(f"{name}: got {page.shape[0]} slots, expected {first.shape[0]} as in pool[0]")
    if page.device != first.device:
        raise ValueError(f"{name}: on device {page.device}, expected {first.device} as pool[0]")
    if page.stride(1) != 1:
        raise ValueError(f"{name}: got stride {page.stride(1)} between bytes, expected 1")
    if page.shape[0] > 1 and page.stride(0) < page.shape[1]:
        raise ValueError(
            f"{name}: got a slot stride of {page.stride(0)} bytes, expected at least the {page.shape[1]} of a slot"
        )
    if page.data_ptr() % ROW_ALIGN:
        raise ValueError(
            f"{name}: starts {page.data_ptr() % ROW_ALIGN} bytes past a multiple of {ROW_ALIGN}, expected 0"
        )


def _check_disjoint(spans: list[tuple[int, int, int]], slots: int) -> None:
    """Layers that lie interleaved in one pool must not share a byte."""
    order = sorted(range(len(spans)), key=lambda i: spans[i])
    for at, i in enumerate(order):
        start, stride, used = spans[i]
        for j in order[at + 1 :]:
            other, other_stride, other_used = spans[j]
            if other >= start + (slots - 1) * stride + used:
                break  # sorted by address: the rest begins later still
            gap = (other - start) % stride
            if stride != other_stride or gap < used or stride - gap < other_used:
                raise ValueError(f"pool[{j}]: shares bytes with pool[{i}], expected layers apart from each other")
