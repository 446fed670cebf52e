"""Values that go together through the phases of a step kernel.

All are frozen: what a dynamic `if` or loop may change, the DSL carries out of it as a value, and of objects it takes
only frozen dataclasses for things that are read alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

# The arguments of a call that `Tensors` holds, in the order in which a call gives them; the last three only where there
# is one of them.
CALL = (
    "x_cache", "b_cache", "dt_cache", "ring_start", "pnat", "x", "dt", "a", "b", "c", "out", "d", "z", "dt_bias",
    "slots", "cu_seqlens", "pad_slot_id", "state", "scale", "seed", "copy",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Tensors:
    """A call's arguments, in the order in which a kernel needs them. What a problem does not have is None.

    Parameters come to a multiprocessor 64 bytes at a time, and a warp waits for each: what the first loads need lies
    together at their start.
    """

    slots: cute.Tensor | None
    cu_seqlens: cute.Tensor | None
    pad_slot_id: Int64
    a: cute.Tensor
    dt_bias: cute.Tensor | None
    d: cute.Tensor | None
    dt: cute.Tensor
    ring_start: cute.Tensor
    pnat: cute.Tensor
    c: cute.Tensor
    dt_cache: cute.Tensor
    b_cache: cute.Tensor
    x_cache: cute.Tensor
    b: cute.Tensor
    x: cute.Tensor
    z: cute.Tensor | None
    out: cute.Tensor
    state: cute.Tensor | None  # None in kernels that reach it by TMA alone
    scale: cute.Tensor | None = None
    seed: cute.Tensor | None = None
    copy: cute.Tensor | None = None

    @classmethod
    def of_call(cls, *given: Any, **more: Any) -> Any:
        """From what `CALL` names, in its order, and what a subclass adds."""
        return cls(**dict(zip(CALL, given, strict=False)), **more)

    @property
    def batch(self) -> Any:
        """Rows of the call."""
        if self.cu_seqlens is not None:
            return self.cu_seqlens.shape[0] - 1
        return (self.x if self.slots is None else self.slots).shape[0]


@dataclass(frozen=True, eq=False)
class Shared:
    """A CTA's shared memory: as bytes, as the address of its start, and two regions as floats."""

    raw: cute.Pointer
    address: Int32
    products: cute.Tensor
    vectors: cute.Tensor


@dataclass(frozen=True, eq=False)
class Thread:
    """A thread: its warp, its lane, and g = lane / 4, t = lane % 4, which fragments go by."""

    warp: Int32
    lane: Int32
    g: Int32
    t: Int32


@dataclass(frozen=True, eq=False)
class NewTokens:
    """Where a row's new tokens are; Python ints wherever they are known when the kernel is made.

    Attributes:
        outer: index of dimension 0.
        first: first token in dimension 1.
        length: tokens of the row.
        total: tokens of the tensor.
        used: of ragged rows, tokens of all of them; they are the tensor's first.
    """

    outer: Any
    first: Any
    length: Any
    total: Any
    used: Any = 0


@dataclass(frozen=True, eq=False)
class Row:
    """A batch row as one CTA sees it: slot, its group of heads, the ring's cursors, the new tokens."""

    slot: Int64
    slot32: Int32  # a coordinate of TMA
    group: Int32
    start: Int32
    pnat: Int32
    new: NewTokens


@dataclass(frozen=True, eq=False)
class Entry:
    """A batch row before its cursors are known; `live` says whether there is anything to do for it."""

    slot: Int64
    slot32: Int32
    group: Int32
    new: NewTokens
    live: Boolean

    def at(self, start: Int32, pnat: Int32) -> Row:
        """The row, with its cursors."""
        return Row(self.slot, self.slot32, self.group, start, pnat, self.new)


@dataclass(frozen=True, eq=False)
class Rows:
    """The rows of P that a CTA, and of these a warp, takes.

    Attributes:
        thread: the thread's number in the CTA, by which pieces of the rows are dealt.
        split: which part of P the CTA takes.
        cta_p0: its first row.
        side, head_warp: which of the heads taken at the same time, and which of its warps, a warp is.
        tile, p0: a warp's rows: their number in units of as many, and the first.
    """

    thread: Int32
    split: Int32
    cta_p0: Int32
    side: Int32
    head_warp: Int32
    tile: Int32
    p0: Int32


@dataclass(frozen=True, eq=False)
class Share:
    """What a CTA takes of a batch row, and a warp of that.

    Attributes:
        rows: rows of P.
        head0, count: the CTA's first head and number of heads.
        turns: heads that a warp takes one after the other.
        first: the first of these; the others follow `parallel_heads` apart.
        scan, scan_head: the head whose decay vectors a warp makes first: its number in the CTA, which may be beyond
            `count`, and the head to read for it.
    """

    rows: Rows
    head0: Int32
    count: Any
    turns: Any
    first: Int32
    scan: Int32
    scan_head: Int32


@dataclass(frozen=True, eq=False)
class Turn:
    """The head that a warp has its turn with.

    Attributes:
        index, head: in its CTA, in the tensors.
        inputs: offset of its inputs.
        stage, phase: of its state; how often the stage was filled before, modulo 2.
        number: of the turn.
    """

    index: Int32
    head: Int32
    inputs: Int32
    stage: Any
    phase: Any = 0
    number: Any = 0
