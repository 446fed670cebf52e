"""Values of a warp: a numpy array of 32 where lanes may differ, a plain number where they may not.

f32 values are float32, registers of raw bits ("words") uint32, other integers int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

LANES = np.arange(32)
POISON = np.uint32(0x7FC0DEAD)  # what a lane that takes no part in a load is left with: a NaN


class Warp:
    """One warp of the running CTA: its active lanes, its place in the order of things, its asynchronous copies."""

    def __init__(self, index: int, inputs_ready: bool) -> None:
        self.index = index
        self.inputs_ready = inputs_ready  # False: a predecessor may still be writing them
        self.threads = index * 32 + LANES
        self.active = np.ones(32, bool)
        self.epoch = 0  # counts barriers of the warp, CTA-wide ones included
        self.uncommitted: list[Any] = []
        self.groups: list[list[Any]] = []
        self.stores_open: list[Any] = []  # bulk stores before their commit, then until they are waited for
        self.stores: list[Any] = []

    def converged(self, what: str) -> None:
        """Collective operations need all lanes."""
        assert self.active.all(), f"{what} by a part of a warp"


class Now:
    """What runs at the moment: filled in by `launch`."""

    warp: Warp
    cta: Any
    run: Any


NOW = Now()


def branch(condition: Any) -> Iterator[bool]:
    """The sides of an `if` that some lane takes, each with the other lanes switched off."""
    if not isinstance(condition, np.ndarray):
        yield bool(condition)
        return
    warp = NOW.warp
    before = warp.active
    for side in (True, False):
        taken = before & (condition == side)
        if taken.any():
            warp.active = taken
            yield side
            warp.active = before


def uniform(value: Any) -> Any:
    """The one value of all lanes."""
    if not isinstance(value, np.ndarray):
        return value
    assert (value == value[0]).all(), f"promised to be the same in a warp: {value}"
    return value[0].item()


def lanes(value: Any) -> np.ndarray:
    """The value of each lane."""
    if isinstance(value, np.ndarray) and value.shape == (32,):
        return value
    return np.full(32, value)


def select(condition: Any, a: Any, b: Any) -> Any:
    if isinstance(condition, np.ndarray):
        return np.where(condition, a, b)
    return a if condition else b


def minimum(a: Any, b: Any) -> Any:
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b)


def maximum(a: Any, b: Any) -> Any:
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)


def integer(bits: int) -> type:
    """A DSL integer type: conversions keep the value, which must fit; words stay words."""

    class Integer:
        width = bits

        def __new__(cls, value: Any) -> Any:
            if isinstance(value, (np.ndarray, np.generic)) and value.dtype == np.uint32:
                return value
            limit = 1 << (bits - 1)
            if isinstance(value, np.ndarray):
                assert value.dtype.kind in "ib" and (np.abs(value[NOW.warp.active]) < limit).all()
                return value.astype(np.int64)
            assert -limit <= int(value) == value < limit, value
            return int(value)

    return Integer


class Float32:
    """The DSL's f32."""

    width = 32

    def __new__(cls, value: Any) -> Any:
        return value.astype(np.float32) if isinstance(value, np.ndarray) else np.float32(value)


class Half:
    """A 16-bit type: only its width is ever asked for."""

    width = 16


Int32, Int64 = integer(32), integer(64)


class Byte:
    """An 8-bit type."""

    width = 8


TYPES = {"f32": Float32, "bf16": Half, "f16": Half, "i32": Int32, "i64": Int64, "f8e4m3": Byte, "i8": Byte}


class Fragment:
    """A register tensor: lanes that are switched off keep what they have."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count

    def __getitem__(self, k: int) -> Any:
        value = self.values[k]
        assert value is not None, f"register {k} is read and was never written"
        return value

    def __setitem__(self, k: int, value: Any) -> None:
        active = NOW.warp.active
        if not active.all():
            value, old = lanes(value), self.values[k]
            if old is None:
                old = np.full(32, POISON if value.dtype == np.uint32 else np.nan, value.dtype)
            value = np.where(active, value, old)
        self.values[k] = value


def word(value: Any) -> np.ndarray:
    """A register of bits, in every lane."""
    if isinstance(value, np.ndarray):
        assert value.dtype == np.uint32, value.dtype
        return value
    return np.full(32, value, np.uint32)


def single(value: Any) -> np.ndarray:
    """An f32 register, in every lane."""
    value = lanes(value)
    assert value.dtype == np.float32, value.dtype
    return value
