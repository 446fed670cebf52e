"""Tensors that say they are on a GPU: shapes, strides and addresses without memory, for argument checks alone."""

from __future__ import annotations

import ctypes
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import tvm_ffi

_CUDA = 2  # DLPack's device type
_CODES = {
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.float16: (2, 16),
    torch.bfloat16: (4, 16),
    torch.float8_e4m3fn: (10, 8),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


class _Type(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int), ("dtype", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_alive: list[Any] = []  # DLPack's consumer keeps pointers into these


@dataclass(frozen=True)
class Pretend:
    """A tensor's metadata; `tensor()` makes it one."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    address: int = 0x7F00_0000_0000
    device: int = 0

    @classmethod
    def like(cls, t: torch.Tensor) -> Pretend:
        return cls(tuple(t.shape), tuple(t.stride()), t.dtype)

    def but(self, **change: Any) -> Pretend:
        return dataclasses.replace(self, **change)

    def tensor(self) -> Any:
        rank = len(self.shape)
        shape, strides = (ctypes.c_int64 * rank)(*self.shape), (ctypes.c_int64 * rank)(*self.strides)
        managed = _Managed(
            _Tensor(self.address, _Device(_CUDA, self.device), rank, _Type(*_CODES[self.dtype], 1), shape, strides, 0)
        )
        _alive.append((managed, shape, strides))
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        capsule, device = new(ctypes.addressof(managed), b"dltensor", None), self.device

        class Exporter:
            def __dlpack__(self, **_: Any) -> Any:
                return capsule

            def __dlpack_device__(self) -> tuple[int, int]:
                return _CUDA, device

        return tvm_ffi.from_dlpack(Exporter())
