"""How the kernels between steps cut a slot into parts, one a CTA; known without the DSL."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from .. import dtypes
from ..config import WARP
from .spec import CacheSpec

GROUP, STEP = 8, 16  # rows of P and of the ring that one matrix product takes
# Bytes of shared memory: of a CTA, on every target; of a multiprocessor of sm_90 and sm_100, where each CTA takes 1 KiB
# more for the driver.
OF_A_CTA, OF_ALL_CTAS = 99 * 1024, 228 * 1024
# What a layer's slot may consist of, in the order of the kernels' table of addresses.
TENSORS = ("state", "x_cache", "B_cache", "dt_cache", "state_copy", "state_scale")
# The words that stand for a logical state of zero, as `rounding.encode` gives them: a row of zeros has the scale 1.
ZERO_STATE = {"state": 0, "state_copy": 0, "state_scale": 0x3F800000}


@dataclass(frozen=True, slots=True)
class FoldShape:
    """A CTA of the folding kernel: `tile` rows of P of one head, whole rows of N, held in registers.

    A warp has `groups` times 8 rows of P; a thread's part of them is `accesses` pieces of 16 bytes.

    Attributes:
        spec: of the cache; its number of layers does not matter.
        warps: of a CTA.
        groups: of 8 rows of P, a warp.
        ctas_per_sm: CTAs that shall share a multiprocessor; what bounds a thread's registers.
    """

    spec: CacheSpec
    warps: int
    groups: int
    ctas_per_sm: int

    @classmethod
    def of(cls, spec: CacheSpec) -> FoldShape:
        """The shape that serves a cache: the most bytes in flight that no register has to be spilled for.

        On their way to shared memory a thread's share of the ring's rows is in registers, beside its part of the tile:
        longer windows leave room for fewer CTAs.
        """
        f32 = spec.state_dtype == "f32"
        # To a multiprocessor's registers:
        claims = f32, spec.window > 32, spec.io_dtype == "f16", spec.window > STEP and spec.d_state == 256
        resident = max(8, 20 - 4 * sum(claims))  # warps
        for warps in (4, 5, 2):
            if spec.head_dim // GROUP % warps == 0:
                shape = cls.cut(spec, warps=warps, accesses=16 if f32 else 8)
                if shape.shared_bytes() <= OF_A_CTA:
                    break
        ctas = min(resident // warps, OF_ALL_CTAS // (shape.shared_bytes() + 1024))
        return dataclasses.replace(shape, ctas_per_sm=ctas)

    @classmethod
    def cut(cls, spec: CacheSpec, *, warps: int, accesses: int, ctas_per_sm: int = 1) -> FoldShape:
        """The shape of that many warps with as many rows as a thread has at most `accesses` pieces of.

        Raises:
            ValueError: if there is none.
        """
        for groups in range(spec.head_dim // GROUP // warps, 0, -1):
            shape = cls(spec, warps, groups, ctas_per_sm)
            if spec.head_dim % shape.tile == 0 and shape.accesses <= accesses:
                return shape
        raise ValueError(f"no shape of {warps} warps and {accesses} accesses a thread fits {spec}")

    @property
    def threads(self) -> int:
        """Of a CTA."""
        return self.warps * WARP

    @property
    def tile(self) -> int:
        """Rows of P, a CTA."""
        return GROUP * self.groups * self.warps

    @property
    def chunk(self) -> int:
        """Elements of state in 16 bytes."""
        return 16 // dtypes.BYTES[self.spec.state_dtype]

    @property
    def lines(self) -> int:
        """Parts of 128 bytes of a row of N, of which 8 threads have a piece each."""
        return self.spec.d_state // self.chunk // 8

    @property
    def accesses(self) -> int:
        """Pieces of 16 bytes, a thread."""
        return self.groups * 2 * self.lines

    @property
    def positions(self) -> int:
        """Rows of the ring that shared memory has room for: W, in steps of the products."""
        return -(-self.spec.window // STEP) * STEP

    @property
    def b_terms(self) -> int:
        """bf16 values that add up to one of B."""
        return 1 if self.spec.io_dtype == "bf16" else 2

    # Shared memory: weights and the total decay; x (position, row of P) f32; B as words of two positions; a tile that
    # is kept aside.

    @property
    def weights(self) -> int:
        """Number of the weights, of a whole number of warps; the total decay follows them."""
        return -(-self.positions // WARP) * WARP

    @property
    def x_at(self) -> int:
        """Bytes from the start of shared memory to x."""
        return 4 * (self.weights + 4)

    @property
    def x_stride(self) -> int:
        """Words from a position of x to the next."""
        return self.tile + 2  # so that the lanes of a warp, 8 rows of every fourth position, find every bank once

    @property
    def b_at(self) -> int:
        """Bytes to B."""
        return self.x_at + 4 * self.positions * self.x_stride

    @property
    def kept_at(self) -> int:
        """Bytes to the tile that is kept aside."""
        return self.b_at + 2 * self.b_terms * self.positions * self.spec.d_state

    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.kept_at + 16 * self.threads * self.accesses


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer's slot, as bytes that are moved.

    Attributes:
        tensor: its place in `TENSORS`.
        nbytes: of one slot.
        unit: bytes of an access, 16 where addresses and size allow it, else 4.
        first: number of its first piece among the layer's.
        pieces: CTAs that it takes, the last of which may be partly used.
        zero: the 32-bit word that a reset fills it with.
    """

    tensor: int
    nbytes: int
    unit: int
    first: int
    pieces: int
    zero: int


@dataclass(frozen=True, slots=True)
class BytesShape:
    """CTAs that move a slot's bytes, whatever they mean: `threads` threads with `accesses` accesses each in flight.

    Attributes:
        parts: the tensors, cut into pieces.
        threads, accesses: of a CTA, and of a thread.
        ctas_per_sm: CTAs that shall share a multiprocessor; what bounds a thread's registers.
    """

    parts: tuple[Part, ...]
    threads: int
    accesses: int
    ctas_per_sm: int

    @classmethod
    def of(
        cls, spec: CacheSpec, *tensors: str, threads: int = 128, accesses: int = 8, ctas_per_sm: int = 4
    ) -> BytesShape:
        """The shape for the named tensors of a cache's slots."""
        parts, first = [], 0
        for name, (shape, dtype) in spec.slot_shapes().items():
            if name not in tensors:
                continue
            nbytes = math.prod(shape) * dtypes.BYTES[dtype]
            # In an allocation of its own a tensor's slots follow each other without gaps, from a multiple of 16 on
            # where their size is one.
            unit = 16 if nbytes % 16 == 0 else 4
            pieces = -(-nbytes // (threads * accesses * unit))
            parts.append(Part(TENSORS.index(name), nbytes, unit, first, pieces, ZERO_STATE.get(name, 0)))
            first += pieces
        return cls(tuple(parts), threads, accesses, ctas_per_sm)

    @property
    def units(self) -> tuple[int, ...]:
        """Bytes of the accesses that its parts take."""
        return tuple(sorted({part.unit for part in self.parts}))

    @property
    def pieces(self) -> int:
        """CTAs that a slot of a layer takes."""
        return sum(part.pieces for part in self.parts)

    def shared_bytes(self) -> int:
        """Shared memory of a CTA that keeps a piece aside."""
        return 16 * self.threads * self.accesses
