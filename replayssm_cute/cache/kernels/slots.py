"""Whole slots of all layers in one launch: copied bit for bit, or emptied. Bytes alone, whatever they mean."""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from ...kernels.primitives import load_words, store_words
from ..shapes import BytesShape
from . import index, layers, moves
from .index import Vector


class Found(NamedTuple):
    """The part that a piece is of, as numbers (see `shapes.Part`), so that all parts share one code.

    Attributes:
        wide: 1 where its accesses are of 16 bytes, 0 where of 4.
    """

    tensor: Int32
    first: Int32
    nbytes: Int32
    wide: Int32
    zero: Int32


class Pieces:
    """A thread's share of a piece: `accesses` accesses, `threads` apart."""

    def __init__(self, shape: BytesShape) -> None:
        self.shape = shape

    def find(self, piece) -> Found:
        """The part that a piece of a slot is of."""
        facts = [(part.tensor, part.first, part.nbytes, part.unit // 16, part.zero) for part in self.shape.parts]
        found = [Int32(fact) for fact in facts[0]]
        for fact in facts[1:]:
            mine = piece >= fact[1]
            found = [Int32(cutlass.select_(mine, new, old)) for new, old in zip(fact, found, strict=True)]
        return Found(*found)

    def pointer(self, unit: int, base, offset):
        """An access, at an offset from the start of the tensor."""
        return layers.at(base, cute.assume(offset, divby=unit), Int32, unit)

    def offset(self, unit: int, piece, i, thread):
        """Bytes from the start of the tensor to access `i`."""
        return ((piece * self.shape.accesses + i) * self.shape.threads + thread) * unit

    @cute.jit
    def load(self, words, unit, nbytes, base, piece, thread):
        """Ask for all accesses of a piece; those beyond the tensor repeat its last, since a branch would wait."""
        each = unit // 4
        for i in cutlass.range_constexpr(self.shape.accesses):
            offset = cutlass.min(self.offset(unit, piece, i, thread), nbytes - unit)
            found = load_words(self.pointer(unit, base, offset), each)
            for e in cutlass.range_constexpr(each):
                words[i * each + e] = found[e]

    @cute.jit
    def store(self, words, unit, nbytes, base, piece, thread):
        """Write all accesses of a piece."""
        each = unit // 4
        for i in cutlass.range_constexpr(self.shape.accesses):
            offset = self.offset(unit, piece, i, thread)
            if offset < nbytes:
                store_words(self.pointer(unit, base, offset), [words[i * each + e] for e in range(each)])


class CopyKernel:
    """Copies slots as `moves` planned it, one piece of one layer a CTA."""

    def __init__(self, shape: BytesShape) -> None:
        self.shape = shape
        self.pieces = Pieces(shape)

    @cute.jit
    def __call__(self, table: cute.Tensor, records: cute.Tensor, batch: Int32, stream):
        self.kernel(table, records).launch(
            grid=[table.shape[0] * self.shape.pieces, batch, 1],
            block=[self.shape.threads, 1, 1],
            stream=stream,
            min_blocks_per_mp=self.shape.ctas_per_sm,
            preferred_smem_carveout=100,  # percent; asking needs no GPU
        )

    @cute.kernel
    def kernel(self, table: cute.Tensor, records: cute.Tensor):
        block, at, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        layer, piece = block // self.shape.pieces, block % self.shape.pieces
        kept = SmemAllocator().allocate(self.shape.shared_bytes(), byte_alignment=16)
        part = self.pieces.find(piece)
        slots = layers.load(table, layer, part.tensor)
        at = Int32(at)
        while at >= 0:
            move = moves.load_record(records, at)
            if move.src >= 0:
                for unit in self.shape.units:
                    if part.wide == unit // 16:
                        self.move(slots, unit, part.nbytes, piece - part.first, move, kept, thread)
                cute.arch.sync_threads()
            at = move.link

    @cute.jit
    def move(self, slots, unit, nbytes, piece, move, kept, thread):
        """One piece from its source to its destination, or aside."""
        each = unit // 4
        count = self.shape.accesses * each
        words = cute.make_rmem_tensor(cute.make_layout(count), Int32)
        self.pieces.load(words, unit, nbytes, slots.place(move.src), piece, thread)
        # A thread keeps its words where no other does, in steps that are free of bank conflicts.
        mine = cute.recast_ptr(kept, dtype=Int32) + cute.assume(thread * each, divby=each)
        if move.held != 0:
            for i in cutlass.range_constexpr(self.shape.accesses):
                target = mine + i * self.shape.threads * each
                store_words(target, [words[i * each + e] for e in range(each)])
        else:
            self.pieces.store(words, unit, nbytes, slots.place(move.dst), piece, thread)
        if move.release >= 0:
            for i in cutlass.range_constexpr(self.shape.accesses):
                found = load_words(mine + i * self.shape.threads * each, each)
                for e in cutlass.range_constexpr(each):
                    words[i * each + e] = found[e]
            self.pieces.store(words, unit, nbytes, slots.place(move.release), piece, thread)


class ResetKernel:
    """Gives slots a checkpoint of zero, one piece of one layer a CTA, and zeroes their cursors."""

    def __init__(self, shape: BytesShape) -> None:
        self.shape = shape
        self.pieces = Pieces(shape)

    @cute.jit
    def __call__(
        self,
        table: cute.Tensor,
        ring_start: cute.Tensor,
        pnat: cute.Tensor,
        last_tokens: cute.Tensor,
        slots: Int64,
        slots_step: Int32,
        slots_wide: Int32,
        batch: Int32,
        pad_slot_id: Int64,
        stream,
    ):
        self.kernel(table, ring_start, pnat, last_tokens, Vector(slots, slots_step, slots_wide), pad_slot_id).launch(
            grid=[table.shape[0] * self.shape.pieces, batch, 1], block=[self.shape.threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        table: cute.Tensor,
        ring_start: cute.Tensor,
        pnat: cute.Tensor,
        last_tokens: cute.Tensor,
        slots: Vector,
        pad_slot_id: Int64,
    ):
        block, row, _ = cute.arch.block_idx()
        thread = cute.arch.thread_idx()[0]
        layer, piece = block // self.shape.pieces, block % self.shape.pieces
        part = self.pieces.find(piece)
        slot = index.read(slots, Int32(row))
        if index.is_live(slot, pad_slot_id):
            place = layers.load(table, layer, part.tensor).place(slot)
            for unit in self.shape.units:
                if part.wide == unit // 16:
                    words = cute.make_rmem_tensor(cute.make_layout(self.shape.accesses * (unit // 4)), Int32)
                    words.fill(part.zero)
                    self.pieces.store(words, unit, part.nbytes, place, piece - part.first, thread)
            if (block == 0) & (thread == 0):
                ring_start[slot] = Int32(0)
                pnat[slot] = Int32(0)
                last_tokens[slot] = Int32(0)


def compile_copy(shape: BytesShape, arch: str):
    """Compile for `arch`; needs no GPU.

    Returns:
        A callable of (table, records, batch): the table of `layers`, the records of `moves` (2 batch, 8) int32, and
        the number of rows.
    """
    records = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), moves.WORDS), (moves.WORDS, 1), assumed_align=16)
    return cute.compile(
        CopyKernel(shape), layers.fake_table(), records, Int32(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )  # fmt: skip


def compile_reset(shape: BytesShape, arch: str):
    """Compile for `arch`; needs no GPU.

    Returns:
        A callable of `ResetKernel.__call__`'s arguments less the stream: the table of `layers`, the three cursors
        (slots,) int32, the address of `batch` slots with step and width as in `index.Vector`, their number, and the id
        that is padding beside negative ones.
    """

    def cursor():
        return cute.runtime.make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=4)

    return cute.compile(
        ResetKernel(shape), layers.fake_table(), cursor(), cursor(), cursor(), Int64(0), Int32(0), Int32(0), Int32(0),
        Int64(0), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )  # fmt: skip
