"""LogicalState: what slots hold, free of window, ring phase and device, in a form that can be stored and sent.

It holds values: of an 8-bit state those that codes and scales stand for, in f32, and of an f32 state with a read copy
the state alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import dtypes
from .spec import CacheSpec

FORMAT = "replayssm_cute.logical_state"
SCHEMA_VERSION = 1
_TENSORS = ("count", "state", "x", "B", "dt")
_HEADER = tuple(f.name for f in dataclasses.fields(CacheSpec) if f.name != "copy_dtype")  # a copy is made anew


@dataclass(frozen=True, slots=True)
class LogicalState:
    """The logical states of n slots over L layers: checkpoints and live rows, as plain contiguous CPU tensors.

    Attributes:
        spec: the cache it came from, with "f32" for an 8-bit state_dtype and without a copy_dtype. Geometry must be the
            same where it is imported; state_dtype, copy_dtype, T and W need not.
        count: (n,) int32, live rows of each slot, 0..W.
        state: (L, n, H, P, N) checkpoints, state_dtype: "f32", "bf16" or "f16".
        x: (L, n, H, m, P) live rows of x, the oldest first, zero beyond a slot's count; io_dtype. m = max of count.
        B: (L, n, G, m, N), io_dtype.
        dt: (L, n, H, m) processed dt, f32.
    """

    spec: CacheSpec
    count: torch.Tensor
    state: torch.Tensor
    x: torch.Tensor
    B: torch.Tensor
    dt: torch.Tensor

    def __len__(self) -> int:
        """n, the number of slots."""
        return self.count.shape[0]

    def take(self, rows: Sequence[int]) -> LogicalState:
        """A copy of some of the slots, by position, in the order given.

        Raises:
            TypeError: if `rows` is no sequence of integers.
            IndexError: for a position outside 0..n-1.
        """
        if not isinstance(rows, Sequence) or isinstance(rows, str):
            raise TypeError(f"rows: got {type(rows).__name__}, expected a sequence of ints")
        if wrong := [r for r in rows if not isinstance(r, int) or isinstance(r, bool)]:
            raise TypeError(f"rows: got {wrong[0]!r} among them, expected ints")
        if bad := [r for r in rows if not 0 <= r < len(self)]:
            raise IndexError(f"rows: got {bad[0]}, expected 0..{len(self) - 1}")
        index = torch.tensor(list(rows), dtype=torch.int64)
        count = self.count[index]
        most = int(count.max()) if len(index) else 0
        x, B, dt = (t[:, index, :, :most].contiguous() for t in (self.x, self.B, self.dt))
        return LogicalState(self.spec, count, self.state[:, index], x, B, dt)

    def check(self) -> None:
        """Refuse tensors that do not fit `spec` and each other.

        Raises:
            ValueError, TypeError: naming the part, what came and what was expected.
        """
        if not isinstance(self.spec, CacheSpec):
            raise TypeError(f"logical state: spec: got {type(self.spec).__name__}, expected CacheSpec")
        for name in _TENSORS:
            t = getattr(self, name)
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"logical state: {name}: got {type(t).__name__}, expected a torch.Tensor")
            if t.device.type != "cpu" or t.layout != torch.strided:
                raise ValueError(f"logical state: {name}: got a {t.layout} tensor on {t.device}, expected a CPU tensor")
        s = self.spec
        if s.state_dtype in dtypes.EIGHT_BIT:
            raise ValueError(
                f"logical state: state_dtype: got {s.state_dtype!r}, expected 'f32', 'bf16' or 'f16': it holds values, "
                f"and codes mean nothing without their scales"
            )
        if self.count.dtype != torch.int32 or self.count.dim() != 1:
            raise ValueError(
                f"logical state: count: got {self.count.dtype} of shape {tuple(self.count.shape)}, expected (n,) int32"
            )
        n = len(self)
        if bool(((self.count < 0) | (self.count > s.window)).any()):
            raise ValueError(f"logical state: count: got {self.count.tolist()}, expected 0..{s.window} (its W)")
        most = int(self.count.max()) if n else 0
        expected = {
            "state": ((s.layers, n, s.heads, s.head_dim, s.d_state), s.state_dtype),
            "x": ((s.layers, n, s.heads, most, s.head_dim), s.io_dtype),
            "B": ((s.layers, n, s.groups, most, s.d_state), s.io_dtype),
            "dt": ((s.layers, n, s.heads, most), "f32"),
        }
        for name, (shape, dtype) in expected.items():
            t = getattr(self, name)
            if tuple(t.shape) != shape or t.dtype != dtypes.TORCH[dtype]:
                raise ValueError(
                    f"logical state: {name}: got {t.dtype} of shape {tuple(t.shape)}, expected "
                    f"{dtypes.TORCH[dtype]} of shape {shape}"
                )

    def to_dict(self) -> dict[str, Any]:
        """Tensors, ints and strings only, with header and checksum; `torch.load(weights_only=True)` takes it.

        Tensors are shared with this object, not copied.
        """
        self.check()
        header = {name: getattr(self.spec, name) for name in _HEADER}
        data: dict[str, Any] = {"format": FORMAT, "version": SCHEMA_VERSION, **header}
        data |= {name: getattr(self, name).contiguous() for name in _TENSORS}
        return data | {"checksum": _checksum(data)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LogicalState:
        """The LogicalState of a `to_dict` dict.

        Raises:
            ValueError, TypeError: another format or version, missing or unknown fields, tensors that do not fit the
                header, or a checksum that does not match the content.
        """
        if not isinstance(data, Mapping):
            raise TypeError(f"logical state: got {type(data).__name__}, expected a dict")
        if not isinstance(kind := data.get("format"), str) or kind != FORMAT:
            raise ValueError(f"logical state: format: got {kind!r}, expected {FORMAT!r}")
        if not _is_int(version := data.get("version")) or version != SCHEMA_VERSION:
            raise ValueError(f"logical state: version: got {version!r}, expected {SCHEMA_VERSION}")
        known = {"format", "version", "checksum", *_HEADER, *_TENSORS}
        if missing := sorted(known - set(data)):
            raise ValueError(f"logical state: missing fields {missing}")
        if unknown := sorted(set(data) - known, key=str):
            raise ValueError(f"logical state: unknown fields {unknown}")
        try:
            spec = CacheSpec(**{name: data[name] for name in _HEADER})
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ValueError(f"logical state: header: {error}") from None
        result = cls(spec, *(data[name] for name in _TENSORS))
        result.check()
        found, told = _checksum(data), data["checksum"]
        if not _is_int(told) or found != told:
            raise ValueError(f"logical state: checksum: content has {found}, expected {told!r} (damaged)")
        return result


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _checksum(data: Mapping[str, Any]) -> int:
    """CRC-32 over header and tensor bytes."""
    header = {k: v for k, v in data.items() if k not in _TENSORS and k != "checksum"}
    crc = zlib.crc32(repr(sorted(header.items())).encode())
    for name in _TENSORS:
        t = data[name].contiguous()
        if t.numel():
            crc = zlib.crc32((ctypes.c_char * (t.numel() * t.element_size())).from_address(t.data_ptr()), crc)
    return crc
