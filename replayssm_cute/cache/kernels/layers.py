"""Where the slots of every layer are: a table of addresses, so that one launch serves all layers wherever they lie."""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int64

from ..shapes import TENSORS

COLUMNS = 2 * len(TENSORS)  # addresses of slot 0, then bytes from slot to slot; zeros for tensors that a cache has not


def fake_table():
    """The table as the compiler sees it: (layers, COLUMNS) int64, contiguous."""
    return cute.runtime.make_fake_tensor(Int64, (cute.sym_int(), COLUMNS), (COLUMNS, 1), assumed_align=8)


class Slots(NamedTuple):
    """A tensor of one layer: address of slot 0, and bytes from slot to slot."""

    first: Int64
    step: Int64

    def place(self, slot) -> Int64:
        """Address of a slot."""
        return self.first + Int64(slot) * self.step


def load(table: cute.Tensor, layer, tensor) -> Slots:
    """One of a layer's tensors, by its place in `TENSORS`."""
    return Slots(Int64(table[layer, tensor]), Int64(table[layer, len(TENSORS) + tensor]))


def at(address: Int64, offset, dtype, align: int) -> cute.Pointer:
    """A pointer `offset` bytes after an address, known to be a multiple of `align`."""
    return cute.make_ptr(dtype, address + Int64(offset), cute.AddressSpace.gmem, assumed_align=align)
