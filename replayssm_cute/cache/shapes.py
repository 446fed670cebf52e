"""How the kernels between steps cut a slot into parts, one a CTA; known without the DSL."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .. import dtypes
from .spec import CacheSpec


@dataclass(frozen=True, slots=True)
class FoldShape:
    """A CTA of the folding kernel: `tile` rows of P of one head, whole rows of N, held in registers.

    A thread has 16 bytes each of `rows` consecutive rows.

    Attributes:
        spec: of the cache; its number of layers does not matter.
        threads: of a CTA.
        chunk: elements of state in 16 bytes.
        columns: threads along N.
        rows: of P, a thread.
        tile: rows of P, a CTA.
        ctas_per_sm: CTAs that shall share a multiprocessor; what bounds a thread's registers.
    """

    spec: CacheSpec
    threads: int
    chunk: int
    columns: int
    rows: int
    tile: int
    ctas_per_sm: int

    @classmethod
    def of(cls, spec: CacheSpec) -> FoldShape:
        """The shape that serves a cache: the most bytes in flight that no register has to be spilled for.

        On their way to shared memory a thread's share of the ring's rows is in registers, beside its part of the tile:
        windows of more than 32 rows leave room for fewer CTAs.
        """
        long = spec.window > 32
        if spec.state_dtype != "f32":
            return cls.cut(spec, threads=128, accumulators=40, ctas_per_sm=4 if long else 5)
        ctas = 4 if not long else 3 if spec.d_state < 256 else 2
        return cls.cut(spec, threads=128, accumulators=64, ctas_per_sm=ctas)

    @classmethod
    def cut(cls, spec: CacheSpec, *, threads: int, accumulators: int, ctas_per_sm: int) -> FoldShape:
        """The shape of that many threads with as many rows as fit into `accumulators` elements a thread.

        Raises:
            ValueError: if there is none.
        """
        chunk = 16 // dtypes.BYTES[spec.state_dtype]
        columns = spec.d_state // chunk
        groups = threads // columns
        # x comes in 16-byte pieces of 8 rows of P
        fits = [
            rows
            for rows in range(1, accumulators // chunk + 1)
            if spec.head_dim % (rows * groups) == 0 and rows * groups % 8 == 0
        ]
        if not fits:
            raise ValueError(f"no shape of {threads} threads and {accumulators} accumulators fits {spec}")
        return cls(spec, threads, chunk, columns, max(fits), max(fits) * groups, ctas_per_sm)

    @property
    def positions(self) -> int:
        """Rows of the ring that shared memory has room for: W, in fours to keep what follows aligned."""
        return -(-self.spec.window // 4) * 4

    # Shared memory: weights and the total decay; x (position, tile) f32; B (position, N); a tile that is kept aside.

    @property
    def x_at(self) -> int:
        """Bytes from the start of shared memory to x."""
        return 4 * (self.positions + 4)

    @property
    def b_at(self) -> int:
        """Bytes to B."""
        return self.x_at + 4 * self.positions * self.tile

    @property
    def kept_at(self) -> int:
        """Bytes to the tile that is kept aside."""
        return self.b_at + 2 * self.positions * self.spec.d_state

    def shared_bytes(self) -> int:
        """Shared memory of a CTA."""
        return self.kept_at + 16 * self.threads * self.rows


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer's slot, as bytes that are moved.

    Attributes:
        tensor: its place in `kernels.layers.TENSORS`.
        nbytes: of one slot.
        unit: bytes of an access, 16 where addresses and size allow it, else 4.
        first: number of its first piece among the layer's.
        pieces: CTAs that it takes, the last of which may be partly used.
    """

    tensor: int
    nbytes: int
    unit: int
    first: int
    pieces: int


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
        for place, (name, (shape, dtype)) in enumerate(spec.slot_shapes().items()):
            if name not in tensors:
                continue
            nbytes = math.prod(shape) * dtypes.BYTES[dtype]
            # In an allocation of its own a tensor's slots follow each other without gaps, from a multiple of 16 on
            # where their size is one.
            unit = 16 if nbytes % 16 == 0 else 4
            pieces = -(-nbytes // (threads * accesses * unit))
            parts.append(Part(place, nbytes, unit, first, pieces))
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
