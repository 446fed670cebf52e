"""Runs inline PTX on numbers, lane by lane: the part of PTX that `kernels/ptx.py` uses.

Registers are arrays of 32: f32 values float32, all others uint32. A 16-bit register is a uint32 below 2^16.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

U, F = np.uint32, np.float32


def run(text: str, outputs: int, operands: list[np.ndarray]) -> list[np.ndarray]:
    """The outputs $0, $1, ... of a text; `operands` are those that follow them."""
    registers: dict[str, np.ndarray] = {f"${outputs + i}": v for i, v in enumerate(operands)}
    for name, arguments in _parsed(text):
        if name == "mov.b32" and isinstance(arguments[0], tuple):
            word = _value(registers, arguments[1]).view(U)
            registers[arguments[0][0]], registers[arguments[0][1]] = word & U(0xFFFF), word >> U(16)
            continue
        if name == "mov.b32" and isinstance(arguments[1], tuple):
            low, high = (_value(registers, a) for a in arguments[1])
            registers[arguments[0]] = low | high << U(16)
            continue
        registers[arguments[0]] = OPERATIONS[name](*(_value(registers, a) for a in arguments[1:]))
    return [registers[f"${i}"] for i in range(outputs)]


@functools.cache
def _parsed(text: str) -> list[tuple[str, tuple[Any, ...]]]:
    found = []
    inner = text.strip()
    if inner.startswith("{ .reg"):
        inner = inner[1:-1]
    for statement in inner.split(";"):
        statement = statement.strip()
        if not statement or statement.startswith(".reg"):
            continue
        name, rest = statement.split(None, 1)
        arguments = [
            tuple(part[1:-1].split(",")) if part.startswith("{") else part
            for part in re.findall(r"\{[^}]*\}|[^,\s]+", rest)
        ]
        found.append((name, tuple(arguments)))
    return found


def _value(registers: dict[str, np.ndarray], name: str) -> np.ndarray:
    if name in registers:
        return registers[name]
    if name.startswith("0f"):
        return np.full(32, int(name[2:], 16), U).view(F)
    return np.full(32, int(name, 0) & 0xFFFFFFFF, U)


def _signed(a: np.ndarray) -> np.ndarray:
    return a.view(np.int32)


def _wide(a: np.ndarray) -> np.ndarray:
    return a.astype(np.uint64)


def _shift(by: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """PTX's shifts by 32 and more give 0."""
    return lambda a, n: np.where(n > 31, U(0), by(a, np.minimum(n, U(31)))).astype(U)


def _permute(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    eight, found = _wide(a) | _wide(b) << np.uint64(32), np.zeros(32, np.uint64)
    for k in range(4):
        nibble = _wide(selector) >> np.uint64(4 * k) & np.uint64(15)
        assert (nibble < 8).all()
        found |= (eight >> (np.uint64(8) * nibble) & np.uint64(255)) << np.uint64(8 * k)
    return found.astype(U)


def _reverse(a: np.ndarray) -> np.ndarray:
    return np.array([int(f"{int(v):032b}"[::-1], 2) for v in a], U)


def _halves(a: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(a).view(np.int16).copy()).view(dtype)


def _subtract(dtype: torch.dtype) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    return lambda a, b: (_halves(a, dtype) - _halves(b, dtype)).view(torch.int16).numpy().view(U)


def _from_e4m3(pair: np.ndarray) -> np.ndarray:
    codes = torch.from_numpy(np.ascontiguousarray(pair.astype(np.uint16)).view(np.uint8).copy())
    return codes.view(torch.float8_e4m3fn).to(torch.float16).view(torch.int16).numpy().view(U)


def _to_e4m3(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    pair = torch.from_numpy(np.stack((low, high), -1)).clamp(-448, 448)
    return pair.to(torch.float8_e4m3fn).view(torch.uint8).numpy().view(np.uint16)[:, 0].astype(U)


def _integer(how: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """f32 to s32: NaN gives 0, what is too large the limit."""

    def convert(a: np.ndarray) -> np.ndarray:
        found = np.nan_to_num(how(a.astype(np.float64)), nan=0.0)
        return np.clip(found, -(2**31), 2**31 - 1).astype(np.int64).astype(np.int32).view(U)

    return convert


def _pack_s8(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """cvt.pack: a above b in the low half, above them what was c's low half."""
    first, second = (np.clip(_signed(v), -128, 127).view(U) & U(255) for v in (a, b))
    return (c & U(0xFFFF)) << U(16) | first << U(8) | second


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(F)


OPERATIONS: dict[str, Callable[..., np.ndarray]] = {
    "mov.b32": lambda a: a.view(U),
    "and.b32": lambda a, b: a & b,
    "or.b32": lambda a, b: a | b,
    "xor.b32": lambda a, b: a ^ b,
    "shl.b32": _shift(lambda a, n: a << n),
    "shr.u32": _shift(lambda a, n: a >> n),
    "add.u32": lambda a, b: a + b,
    "add.s32": lambda a, b: a + b,
    "sub.u32": lambda a, b: a - b,
    "sub.s32": lambda a, b: a - b,
    "min.u32": np.minimum,
    "min.s32": lambda a, b: np.minimum(_signed(a), _signed(b)).view(U),
    "max.s32": lambda a, b: np.maximum(_signed(a), _signed(b)).view(U),
    "mul.lo.u32": lambda a, b: (_wide(a) * _wide(b)).astype(U),
    "mul.hi.u32": lambda a, b: (_wide(a) * _wide(b) >> np.uint64(32)).astype(U),
    "prmt.b32": _permute,
    "brev.b32": _reverse,
    "setp.eq.u32": lambda a, b: a == b,
    "setp.gt.u32": lambda a, b: a > b,
    "selp.b32": lambda a, b, p: np.where(p, a, b),
    "sub.rn.f16x2": _subtract(torch.float16),
    "sub.rn.bf16x2": _subtract(torch.bfloat16),
    "cvt.rn.f16x2.e4m3x2": _from_e4m3,
    "cvt.rn.satfinite.e4m3x2.f32": _to_e4m3,
    "cvt.rni.s32.f32": _integer(np.rint),
    "cvt.rmi.s32.f32": _integer(np.floor),
    "cvt.rn.f32.u32": lambda a: a.astype(F),
    "cvt.pack.sat.s8.s32.b32": _pack_s8,
    "fma.rn.f32": _fused,
    "abs.f32": np.abs,
    "max.NaN.f32": np.maximum,
}
