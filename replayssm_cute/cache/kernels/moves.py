"""The plan of a batch of moves from slot to slot: which rows are independent, and an order for the others.

Every source is to be read before anything is written, but a row whose source is another row's destination may run
in another CTA. So one CTA looks at the whole batch first. Rows that share no slot with a write of another row stay
*free*: any CTA may do them at any time. The others are put into one chain, in which a slot is written only after all
rows that read it. In a cycle no such order exists: its first row is *held*, its result kept aside until the row that
reads its destination has run. Each part of a slot is moved by one CTA, which follows the chain from row to row; so
the order is kept without any CTA waiting for another.

Records, eight int32 each (see `Record`): row r of the batch starts at record r, and a chain lies in records b...2b-1.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.memory import SmemAllocator

from ...kernels.primitives import load_words, store_words
from . import index
from .index import Vector

THREADS = 256
WORDS = 8  # of a record


class Record(NamedTuple):
    """One move.

    Attributes:
        src, dst: slots; src is -1 where there is nothing to move (padding, or a row that lies in the chain).
        start, count: oldest live row of the source, and rows to fold.
        link: the record to follow this one in the same CTA, -1 for none.
        held: 1 if the result is to be kept aside.
        release: the slot that what was kept aside enters after this move, -1 for none.
        open: tokens of the source's open window.
    """

    src: Int32
    dst: Int32
    start: Int32
    count: Int32
    link: Int32
    held: Int32
    release: Int32
    open: Int32


SRC, DST, START, COUNT, LINK, HELD, RELEASE, OPEN = range(WORDS)


def load_record(records: cute.Tensor, at: Int32) -> Record:
    """The record at a position, in two 16-byte loads."""
    pointer = records.iterator + cute.assume(at * WORDS, divby=WORDS)
    return Record(*load_words(pointer, 4), *load_words(pointer + 4, 4))


def store_record(records: cute.Tensor, at: Int32, record: Record) -> None:
    """Write a whole record."""
    pointer = records.iterator + cute.assume(at * WORDS, divby=WORDS)
    store_words(pointer, list(record[:4]))
    store_words(pointer + 4, list(record[4:]))


class MovePlanKernel:
    """One CTA: reads slots, counts and cursors, plans, and sets the destinations' cursors."""

    @cute.jit
    def __call__(
        self,
        ring_start: cute.Tensor,
        pnat: cute.Tensor,
        last_tokens: cute.Tensor,
        records: cute.Tensor,
        sources: Int64,
        sources_step: Int32,
        sources_wide: Int32,
        destinations: Int64,
        destinations_step: Int32,
        destinations_wide: Int32,
        counts: Int64,
        counts_step: Int32,
        counts_wide: Int32,
        batch: Int32,
        pad_slot_id: Int64,
        whole: Int32,
        stream,
    ):
        self.kernel(
            ring_start, pnat, last_tokens, records, Vector(sources, sources_step, sources_wide),
            Vector(destinations, destinations_step, destinations_wide), Vector(counts, counts_step, counts_wide), batch,
            pad_slot_id, whole,
        ).launch(grid=[1, 1, 1], block=[THREADS, 1, 1], stream=stream)  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        ring_start: cute.Tensor,
        pnat_of: cute.Tensor,
        last_tokens: cute.Tensor,
        records: cute.Tensor,
        sources: Vector,
        destinations: Vector,
        counts: Vector,
        batch: Int32,
        pad_slot_id: Int64,
        whole: Int32,
    ):
        thread = cute.arch.thread_idx()[0]
        for r in cutlass.range(thread, batch, THREADS, unroll=1):
            src, dst = index.read(sources, r), index.read(destinations, r)
            count = index.read(counts, r)
            nothing = Int32(-1)
            record = Record(nothing, nothing, Int32(0), Int32(0), nothing, Int32(0), nothing, Int32(0))
            store_record(records, r, record)
            if index.is_live(src, pad_slot_id) & index.is_live(dst, pad_slot_id):
                live = Int32(pnat_of[src])
                folds = Int32(cutlass.select_(whole != 0, live, index.clamped(count, live)))
                start, open_tokens = Int32(ring_start[src]), Int32(last_tokens[src])
                found = Record(Int32(src), Int32(dst), start, folds, nothing, Int32(0), nothing, open_tokens)
                store_record(records, r, found)
        flag = cute.make_tensor(cute.recast_ptr(SmemAllocator().allocate(4, byte_alignment=4), dtype=Int32), 1)
        if thread == 0:
            flag[0] = Int32(0)
        cute.arch.sync_threads()
        for r in cutlass.range(thread, batch, THREADS, unroll=1):
            if records[r, SRC] >= 0:
                self.relate(records, r, batch)
                if (records[r, RELEASE] >= 0) | (records[r, HELD] > 0):
                    flag[0] = Int32(1)
                elif (records[r, SRC] == records[r, DST]) & ((records[r, COUNT] == 0) | (whole != 0)):
                    records[r, SRC] = Int32(-1)  # it is there already
        cute.arch.sync_threads()
        if (thread == 0) & (flag[0] != 0):
            self.chain(records, batch)
        cute.arch.sync_threads()
        for r in cutlass.range(thread, batch, THREADS, unroll=1):
            dst = records[r, DST]
            if dst >= 0:
                ring_start[dst] = Int32(cutlass.select_(whole != 0, records[r, START], 0))
                pnat_of[dst] = Int32(cutlass.select_(whole != 0, records[r, COUNT], 0))
                last_tokens[dst] = Int32(cutlass.select_(whole != 0, records[r, OPEN], 0))

    @cute.jit
    def relate(self, records, r, batch):
        """Note of row r: in RELEASE the other row that writes its source, in HELD how many others read its destination.

        For a row that stays free these are -1 and 0, which is what its record has there.
        """
        src, dst = Int32(records[r, SRC]), Int32(records[r, DST])
        writer, readers = Int32(-1), Int32(0)
        for i in cutlass.range(batch, unroll=4):
            # A row that another thread has found to have nothing to move is free: it reads and writes no other's slot.
            other = Int32(cutlass.select_(i == r, -1, records[i, SRC]))
            writes = (other >= 0) & (records[i, DST] == src)
            writer = Int32(cutlass.select_(writes, i, writer))
            readers = readers + Int32(cutlass.select_((other >= 0) & (other == dst), 1, 0))
        records[r, RELEASE] = writer
        records[r, HELD] = readers

    @cute.jit
    def chain(self, records, batch):
        """Put the rows that are not free into one chain, by one thread.

        Destinations are distinct, so that a row's source has one writer at most: from row to writer, rows form trees
        and cycles. From the leaves of the trees inward each row runs when all readers of its destination have; what
        is left are cycles without branches. If destinations are not distinct, the order is arbitrary, but it ends.
        """
        first, tail = Int32(-1), Int32(batch)
        for r in cutlass.range(batch, unroll=1):
            src, writer = Int32(records[r, SRC]), Int32(records[r, RELEASE])
            readers = Int32(records[r, HELD])
            if (src >= 0) & ((writer >= 0) | (readers > 0)) & (first < 0):
                first = Int32(r)
            at = Int32(cutlass.select_((src >= 0) & (writer >= 0) & (readers == 0), r, -1))
            while (at >= 0) & (tail < 2 * batch):
                following = self.append(records, at, tail)
                tail = tail + 1
                at = Int32(-1)
                if following >= 0:
                    waiting = Int32(records[following, HELD]) - 1
                    if waiting >= 0:
                        records[following, HELD] = waiting
                    if waiting == 0:
                        at = following
        for r in cutlass.range(batch, unroll=1):
            begin, dst = Int32(tail), Int32(records[r, DST])
            at = Int32(cutlass.select_((records[r, SRC] >= 0) & (records[r, HELD] > 0), r, -1))
            while (at >= 0) & (tail < 2 * batch):
                following = self.append(records, at, tail)
                tail = tail + 1
                at = Int32(cutlass.select_(following == r, -1, following))
            if (records[r, RELEASE] >= 0) | (records[r, HELD] > 0):
                records[r, SRC] = Int32(-1)  # what found no room, where destinations are not distinct, is not moved
            if tail > begin:
                records[begin, HELD] = Int32(1)
                records[tail - 1, RELEASE] = dst
        records[tail - 1, LINK] = Int32(-1)
        records[first, LINK] = Int32(batch)

    @cute.jit
    def append(self, records, r, tail):
        """Copy row r to the end of the chain, take it out of its own place, and give the row that waits for it."""
        following = Int32(records[r, RELEASE])
        for field in cutlass.range_constexpr(WORDS):
            records[tail, field] = Int32(records[r, field])
        records[tail, LINK] = Int32(tail + 1)
        records[tail, HELD] = Int32(0)
        records[tail, RELEASE] = Int32(-1)
        records[r, SRC] = Int32(-1)
        records[r, HELD] = Int32(-1)
        return following


def compile_move_plan(arch: str):
    """Compile for `arch`; needs no GPU.

    Returns:
        A callable of `MovePlanKernel.__call__`'s arguments less the stream. ring_start, pnat and last_tokens are
        (slots,) int32, records (2 batch, 8) int32, contiguous; sources, destinations and counts are addresses of
        `batch` integers each, with step and width as in `index.Vector`. `whole` moves whole slots: destinations take
        the sources' cursors; else the first `count` live rows are folded, and destinations' cursors are zero.
    """

    def cursor():
        return cute.runtime.make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=4)

    records = cute.runtime.make_fake_tensor(Int32, (cute.sym_int(), WORDS), (WORDS, 1), assumed_align=16)
    numbers = [Int64(0), Int32(0), Int32(0)] * 3 + [Int32(0), Int64(0), Int32(0)]
    return cute.compile(
        MovePlanKernel(), cursor(), cursor(), cursor(), records, *numbers,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )  # fmt: skip
