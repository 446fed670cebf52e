"""CacheSpec: what a cache group consists of, to the byte, before anything is allocated."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from .. import dtypes, ring
from ..problem import ROW_ALIGN, Problem

_RING_CURSORS = 8  # the two int32 cursors that ring.bytes_per_slot counts for a layer; here layers share them
CURSOR_BYTES = 12  # ring_start, pnat and last_tokens of one slot, int32 each

Lifetime = Literal["request", "model"]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a cache group.

    Attributes:
        name: "state", "state_copy" (the read copy beside an f32 state), "x_cache", "B_cache", "state_scale" (of 8-bit
            states or copies), "dt_cache", "A", "ring_start", "pnat" or "last_tokens".
        layer: the layer, None for a tensor that all layers share.
        shape, stride: in elements.
        dtype: short name, see `replayssm_cute.dtypes`.
        alignment: bytes that the address of every row (last dimension) is a multiple of.
        offset: bytes from the start of the buffer, or of the layer's first page.
        lifetime: "request", a slot's content lives from its reset to its next reset; "model", constant.
    """

    name: str
    layer: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    alignment: int
    offset: int
    lifetime: Lifetime = "request"

    @property
    def nbytes(self) -> int:
        """Bytes of the elements (gaps between slots not counted)."""
        return math.prod(self.shape) * dtypes.BYTES[self.dtype]

    def of(self, raw: torch.Tensor) -> torch.Tensor:
        """This tensor as a view into `raw`, uint8 of one dimension and stride 1, at least as long as needed."""
        size = dtypes.BYTES[self.dtype]
        reach = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        typed = raw[self.offset : self.offset + reach * size].view(dtypes.TORCH[self.dtype])
        return typed.as_strided(self.shape, self.stride, typed.storage_offset())


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """The layers of a cache group that share slots and cursors, and one slot's tensors in each of them.

    layers counts them; heads, head_dim, d_state and groups are H, P, N and G of every layer; tokens is T, the most new
    tokens of a row in a step, and window is W, so that a ring has R = W + T rows. state_dtype ("f32", "bf16", "f16",
    "f8e4m3", "i8"), io_dtype ("bf16", "f16", of the rings of x and B) and copy_dtype ("bf16", "f8e4m3", "i8", of a read
    copy beside an f32 state, or None) are short names; the ring of dt is f32, and so are the scales of 8-bit states.

    Raises:
        ValueError, TypeError, NotImplementedError: for what `Problem` refuses too, or a bad number of layers.
    """

    layers: int
    heads: int
    head_dim: int
    d_state: int
    groups: int
    tokens: int
    window: int
    state_dtype: str = "f32"
    io_dtype: str = "bf16"
    copy_dtype: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layers, int) or isinstance(self.layers, bool) or self.layers < 1:
            raise ValueError(f"layers: got {self.layers!r}, expected a positive int")
        self.problem()

    def problem(self, **options: Any) -> Problem:
        """The Problem of a step on this cache; `options` are the Problem's other fields (dt_dtype, has_z, pdl, ...)."""
        options.setdefault("dt_dtype", self.io_dtype)
        return Problem(**self.geometry(), **options)

    def geometry(self) -> dict[str, Any]:
        """The fields that a Problem has as well (all but layers)."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "layers"}

    @property
    def plain(self) -> bool:
        """Whether the state is of floats alone: no 8-bit codes with scales, no read copy."""
        return self.copy_dtype is None and not self.problem().scaled

    @property
    def ring_rows(self) -> int:
        """R = W + T."""
        return ring.ring_rows(self.window, self.tokens)

    # -----------------------------------------------------------------------------------------------
    # Bytes
    # -----------------------------------------------------------------------------------------------

    @property
    def layer_bytes(self) -> int:
        """Bytes of one slot of one layer: checkpoint and ring, without the cursors."""
        return self.problem().bytes_per_slot() - _RING_CURSORS

    @property
    def page_bytes(self) -> int:
        """Bytes that one slot of one layer takes in a page pool: `layer_bytes` rounded up to 16."""
        return -(-self.layer_bytes // ROW_ALIGN) * ROW_ALIGN

    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers, cursors included: what each slot more adds to an allocation."""
        return self.layers * self.layer_bytes + CURSOR_BYTES

    def fixed_bytes(self) -> int:
        """Bytes that do not depend on the number of slots: A of every layer, (layers, H) f32."""
        return self.layers * self.heads * 4

    def total_bytes(self, slots: int) -> int:
        """Bytes of the one buffer that `ReplayCache.allocate` makes for `slots` slots."""
        return self.fixed_bytes() + slots * self.bytes_per_slot()

    def pool_bytes(self, slots: int, slot_stride: int | None = None) -> int:
        """Bytes that `slots` slots take where `ReplayCache.from_pool` makes the cache: pages, and what is beside them.

        Args:
            slots: how many.
            slot_stride: bytes from a slot of a layer to the next that this layer pays for; default `page_bytes`. Where
                layers share a page, each pays its share of it.

        Raises:
            ValueError: for a stride that is no multiple of 16 or less than `page_bytes`.
            TypeError: for one that is no int.
        """
        _positive("slots", slots)
        return self.fixed_bytes() + slots * self.pool_bytes_per_slot(slot_stride)

    def pool_bytes_per_slot(self, slot_stride: int | None = None) -> int:
        """What each slot more adds to `pool_bytes`; arguments and errors as there."""
        stride = self.page_bytes if slot_stride is None else slot_stride
        _aligned("slot_stride", stride)
        if stride < self.page_bytes:
            raise ValueError(f"slot_stride: got {stride} bytes, expected at least the {self.page_bytes} of a page")
        return self.layers * stride + CURSOR_BYTES

    # -----------------------------------------------------------------------------------------------
    # Tensors
    # -----------------------------------------------------------------------------------------------

    def slot_shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of one slot's tensors in a layer, by name, in the order in which they lie in a page."""
        h, p, n, g, r = self.heads, self.head_dim, self.d_state, self.groups, self.ring_rows
        copy = {} if self.copy_dtype is None else {"state_copy": ((h, p, n), self.copy_dtype)}
        scale = {"state_scale": ((h, p), "f32")} if self.problem().scaled else {}
        return {
            "state": ((h, p, n), self.state_dtype),
            **copy,
            "x_cache": ((h, r, p), self.io_dtype),
            "B_cache": ((g, r, n), self.io_dtype),
            **scale,
            "dt_cache": ((h, r), "f32"),
        }

    def tensors(self, slots: int) -> tuple[TensorSpec, ...]:
        """Every tensor of an own allocation of `slots` slots; they fill one buffer of `total_bytes(slots)` densely."""
        _positive("slots", slots)
        specs, offset = [], 0

        def add(name: str, layer: int | None, shape: tuple[int, ...], dtype: str, lifetime: Lifetime) -> None:
            nonlocal offset
            align = _alignment(name)
            specs.append(TensorSpec(name, layer, shape, _dense(shape), dtype, align, offset, lifetime))
            offset += specs[-1].nbytes

        # Names whose rows are multiples of 16 bytes come first, so that nothing needs a gap.
        for name, (shape, dtype) in self.slot_shapes().items():
            for layer in range(self.layers):
                add(name, layer, (slots, *shape), dtype, "request")
        add("A", None, (self.layers, self.heads), "f32", "model")
        for name in ("ring_start", "pnat", "last_tokens"):
            add(name, None, (slots,), "i32", "request")
        return tuple(specs)

    def page_offsets(self) -> dict[str, int]:
        """Bytes from the start of a layer's page to each of its tensors, packed."""
        offsets, offset = {}, 0
        for name, (shape, dtype) in self.slot_shapes().items():
            offsets[name] = offset
            offset += math.prod(shape) * dtypes.BYTES[dtype]
        return offsets

    def page_tensors(
        self, slots: int, slot_stride: int, offsets: Mapping[str, int] | None = None, layer: int = 0
    ) -> tuple[TensorSpec, ...]:
        """A layer's tensors in a pool whose slots are `slot_stride` bytes apart.

        Args:
            slots, slot_stride: number of slots, and bytes from one to the next, a multiple of 16.
            offsets: bytes from the start of a slot to each tensor, multiples of 16; default `page_offsets()`.
            layer: what the descriptions carry as their layer.

        Raises:
            ValueError: for strides or offsets that are no multiples of 16, overlap, or exceed the stride.
            TypeError: for strides or offsets that are no ints.
        """
        _positive("slots", slots)
        shapes = self.slot_shapes()
        offsets = self.page_offsets() if offsets is None else offsets
        if set(offsets) != set(shapes):
            raise ValueError(f"offsets: got names {sorted(offsets)}, expected {sorted(shapes)}")
        _aligned("slot_stride", slot_stride)
        specs, end, before = [], 0, "the slot's start"
        for name in sorted(offsets, key=lambda n: offsets[n]):
            shape, dtype = shapes[name]
            _aligned(f"offsets[{name!r}]", offsets[name])
            if offsets[name] < end:
                raise ValueError(f"offsets: {name!r} at {offsets[name]} overlaps {before}, which ends at {end}")
            stride = (slot_stride // dtypes.BYTES[dtype], *_dense(shape))
            specs.append(TensorSpec(name, layer, (slots, *shape), stride, dtype, _alignment(name), offsets[name]))
            end, before = offsets[name] + math.prod(shape) * dtypes.BYTES[dtype], repr(name)
        if end > slot_stride:
            raise ValueError(f"slot_stride: got {slot_stride} bytes, expected at least {end}, where {before} ends")
        return tuple(specs)


def slots_that_fit(free_bytes: int, *specs: CacheSpec, slot_stride: int | None = None) -> int:
    """The most slots that can be allocated for all the given cache groups together in `free_bytes` bytes.

    Exact: `sum(spec.total_bytes(n) for spec in specs)` is within `free_bytes` for the result n and not for n + 1. A
    null slot, where an engine keeps one, is among them. Each group is one allocation; a GPU allocator may round each
    up (torch's to 2 MiB), which the caller keeps back.

    With `slot_stride` the slots are pages of an engine's pool, so many bytes apart in every layer (see
    `ReplayCache.from_pool`), and `spec.pool_bytes(n, slot_stride)` takes the place of `total_bytes`.

    Raises:
        ValueError: without any spec, if `free_bytes` is negative, or for a `slot_stride` that is no multiple of 16 or
            less than a spec's `page_bytes`.
        TypeError: if `free_bytes` or `slot_stride` is no int, or a spec no CacheSpec.
    """
    if not specs:
        raise ValueError("specs: got none, expected at least one CacheSpec")
    for spec in specs:
        check_spec("specs", spec)
    check_free_bytes(free_bytes)
    rest = free_bytes - sum(spec.fixed_bytes() for spec in specs)
    if slot_stride is None:
        each = sum(spec.bytes_per_slot() for spec in specs)
    else:
        each = sum(spec.pool_bytes_per_slot(slot_stride) for spec in specs)
    return max(0, rest // each)


def check_spec(name: str, spec: object) -> None:
    """Refuse what is no CacheSpec.

    Raises:
        TypeError: naming it.
    """
    if not isinstance(spec, CacheSpec):
        raise TypeError(f"{name}: got {type(spec).__name__}, expected CacheSpec")


def check_free_bytes(free_bytes: object) -> None:
    """Refuse what is no number of bytes.

    Raises:
        TypeError, ValueError: naming what came.
    """
    if not isinstance(free_bytes, int) or isinstance(free_bytes, bool):
        raise TypeError(f"free_bytes: got {type(free_bytes).__name__}, expected int")
    if free_bytes < 0:
        raise ValueError(f"free_bytes: got {free_bytes}, expected at least 0")


def _alignment(name: str) -> int:
    return ROW_ALIGN if name in ("state", "state_copy", "x_cache", "B_cache") else 4


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _positive(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: got {value!r}, expected a positive int")


def _aligned(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: got {type(value).__name__}, expected an int, bytes")
    if value < 0 or value % ROW_ALIGN:
        raise ValueError(f"{name}: got {value} bytes, expected a multiple of {ROW_ALIGN}")
