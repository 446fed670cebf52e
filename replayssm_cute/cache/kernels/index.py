"""Slots and counts as the cache kernels read them: int32 or int64, at any stride, from one compiled kernel."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...kernels.primitives import load_words


class Vector(NamedTuple):
    """One integer a row, in memory.

    Attributes:
        address: of row 0.
        step: 4-byte words from one row to the next.
        wide: 1 for int64, 0 for int32.
    """

    address: Int64
    step: Int32
    wide: Int32


def read(vector: Vector, row: Int32) -> Int64:
    """The integer of a row."""
    words = cute.make_ptr(Int32, vector.address, cute.AddressSpace.gmem, assumed_align=4)
    first = Int64(row) * Int64(vector.step)
    low = load_words(words + first, 1)[0]
    # For int32 this is the same word again: no branch, and no address beyond the vector.
    high = load_words(words + (first + Int64(vector.wide)), 1)[0]
    high = Int32(cutlass.select_(vector.wide != 0, high, low >> 31))
    return (Int64(high) << 32) | (Int64(low) & Int64(0xFFFFFFFF))


def is_live(slot: Int64, pad_slot_id: Int64) -> Boolean:
    """Whether a slot is no padding."""
    return (slot != pad_slot_id) & (slot >= 0)


def clamped(value: Int64, most: Int32) -> Int32:
    """The value within 0..most; as int64, so that nothing wraps first."""
    return Int32(cutlass.max(cutlass.min(value, Int64(most)), Int64(0)))
