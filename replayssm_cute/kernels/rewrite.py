"""The flush of checkpoints that are not simply written as they were read.

Three kinds: an 8-bit state, whose rows get new scales; a state that is rounded stochastically; and an f32 checkpoint,
read and written in global memory, with a read copy of fewer bits. A lane's columns are `unit` in a row, twice, of rows
g and g + 8 of a tile: the two columns of an accumulator pair, as in `state_tile`. A row belongs to the four lanes of a
quad, so that its largest value takes two shuffles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..rounding import GROUP, LIMIT, TINY
from .bundles import Row, Share, Shared, Tensors, Thread, Turn
from .convert import decode_bytes, encode_bytes, encode_pair, max_abs, philox, prefetch_row
from .decay import Vectors
from .flush_long import ROWS, LongFlush
from .flush_terms import PART, FlushTerms, positions_of
from .primitives import as_float, bits, high_half, load_matrices, load_words, low_half, mma_tf32, pack, store_words
from .ring_b import RingB
from .spec import P_TILE, StepSpec
from .state_tile import StateTile, unpack
from .tokens import place

HELD = 16  # registers of a lane that a tile's terms may take; more are made anew for every part
HELD_BESIDE_BITS = 8  # the same beside random bits


@dataclass(frozen=True, eq=False)
class Block:
    """A lane's part of a tile, one block of columns wide: of rows p and p + 8 of a head, the columns that t names."""

    slot: Int64
    head: Int32
    p: Int32
    number: Int32
    t: Int32


@dataclass(frozen=True, eq=False)
class Ring:
    """Where a flush finds the ring: its terms, if a lane holds them, and what it takes to make them."""

    tensors: Tensors
    shared: Shared
    at: Vectors
    inputs: Any
    terms: list[Any]
    row: Row
    thread: Thread


class Rewrite:
    """The flush phase where `Problem.rewrites`."""

    def __init__(self, spec: StepSpec, state_tile: StateTile) -> None:
        self.spec = spec
        self.state_tile = state_tile
        self.readout_c = state_tile.readout_c
        p = spec.problem
        self.dual = p.copy_dtype is not None
        self.kind = p.read_dtype  # what is rounded to
        self.scaled = p.scaled
        # An f32 checkpoint is best read and written 32 bytes a lane; the others in the units that shared memory has.
        self.unit = PART if self.dual else spec.unit
        self.block = 8 * self.unit
        self.parts = self.unit // PART
        self.blocks = p.d_state // self.block
        low = self.dual or p.state_dtype == "f16"
        self.rows = LongFlush(spec, state_tile, self.unit, low_terms=low)
        self.terms = FlushTerms(spec, low)
        self.ring_b = RingB(spec)
        # A row that flushes has more than W - T live rows: where these reach the last ROWS, no position is left out.
        reached = not spec.skips or p.window - p.tokens >= spec.ring_positions - ROWS
        room = HELD if p.philox_rounds is None else HELD_BESIDE_BITS
        self.holds = reached and 4 * spec.ring_steps * (2 if low else 1) <= room

    @cute.jit
    def flush(self, tensors: Tensors, shared: Shared, tile, inputs, turn: Turn, p0, row: Row, thread: Thread):
        """Write a tile of the logical state back; `tile` is what was read, in shared memory, `inputs` its inputs.

        Beside a read copy, S·C of the checkpoint as it was is returned: nothing else has read it.
        """
        state, scale, seed = tensors.state, tensors.scale, tensors.seed
        slot, head, g, t = row.slot, turn.head, thread.g, thread.t
        at = Vectors(self.spec, turn.index)
        total = shared.vectors[at.total]
        factors = [total] * 2
        if cutlass.const_expr(self.scaled and not self.dual):
            factors = [total * Float32(scale[slot, head, p0 + 8 * side + g]) for side in range(2)]
        key = [Int32(0)] * 2
        if cutlass.const_expr(seed is not None):
            key = load_words(seed[(None,)].iterator, 2)
        top = cute.make_rmem_tensor(cute.make_layout(2), Float32)
        top[0], top[1] = Float32(0.0), Float32(0.0)
        p = p0 + g
        target = tensors.copy if cutlass.const_expr(self.dual) else state
        ring = Ring(tensors, shared, at, inputs, self._held_terms(shared, at, inputs, thread), row, thread)

        found = cute.make_rmem_tensor(cute.make_layout(4 * self.spec.token_tiles), Float32)
        for k in cutlass.range_constexpr(4 * self.spec.token_tiles):
            found[k] = Float32(0.0)
        coming = self._ask_first(state, Block(slot, head, p, Int32(0), t))
        for number in cutlass.range(self.blocks, unroll=1):
            block = Block(slot, head, p, number, t)
            asked = self._take(coming, state, block)
            if cutlass.const_expr(self.dual):
                self._read_out(found, asked, shared, number, thread)
            done = [[[] for _ in range(2)] for _ in range(2)]
            random = self._no_words()
            for part in cutlass.range_constexpr(self.parts):
                results = self._old(asked, tile, block, part, factors, thread)
                self._add(results, ring, number, part)
                if cutlass.const_expr(self.scaled):
                    for k in cutlass.range_constexpr(4 * PART):
                        top[k % 4 // 2] = max_abs(top[k % 4 // 2], results[k])
                if cutlass.const_expr(self.dual):
                    for side in cutlass.range_constexpr(2):
                        for which in cutlass.range_constexpr(2):
                            words = [bits(v) for v in self._values(results, side, which)]
                            store_words(self._place(state, block, side, which, part), words)
                if cutlass.const_expr(not self.scaled):
                    self._round(done, random, results, [Float32(1.0)] * 2, key, block, part)
            if cutlass.const_expr(not self.scaled):
                self._store(target, done, block)

        if cutlass.const_expr(self.scaled):
            inverse = []
            for side in cutlass.range_constexpr(2):
                most = top[side]
                for distance in cutlass.range_constexpr(1, 3):
                    most = max_abs(most, cute.arch.shuffle_sync_bfly(most, distance))
                row_scale = Float32(cutlass.select_(most < TINY, Float32(1.0), most / Float32(LIMIT[self.kind])))
                if t == 0:
                    scale[slot, head, p0 + 8 * side + g] = row_scale
                inverse.append(Float32(cutlass.select_(most < TINY, Float32(0.0), Float32(1.0) / row_scale)))
            written = self._ask_first(state, Block(slot, head, p, Int32(0), t))
            for number in cutlass.range(self.blocks, unroll=1):
                coded_block = Block(slot, head, p, number, t)
                sums = self._take(written, state, coded_block)
                coded = [[[] for _ in range(2)] for _ in range(2)]
                random_words = self._no_words()
                for part in cutlass.range_constexpr(self.parts):
                    again = self._old(sums, tile, coded_block, part, factors, thread, self.dual)
                    if cutlass.const_expr(not self.dual):  # the checkpoint has the sums already
                        self._add(again, ring, number, part)
                    self._round(coded, random_words, again, inverse, key, coded_block, part)
                self._store(target, coded, coded_block)

        return found

    def _read_out(self, found, asked, shared: Shared, number, thread: Thread):
        """Add a block's S·C: a k-step's columns are the e-th of each lane's two runs of PART, in tf32."""
        for n in range(self.spec.token_tiles):
            sums = [found[4 * n + k] for k in range(4)]
            words = self.readout_c.piece(shared.raw, 8 * n + thread.g, number * self.block + 2 * PART * thread.t)
            for e in range(PART):
                rows = [asked[(2 * side + which) * PART + e] for which in range(2) for side in range(2)]
                half = (low_half, high_half)[e % 2]
                columns = [bits(half(self.spec.io_kind, words[which * PART // 2 + e // 2])) for which in range(2)]
                sums = mma_tf32(sums, rows, columns)
            for k in range(4):
                found[4 * n + k] = sums[k]

    @cute.jit
    def prefetch(self, tensors: Tensors, row: Row, share: Share, thread: Thread):
        """Ask for an f32 checkpoint's rows of all of a warp's heads: sent as soon as a flush is known of."""
        for i in cutlass.range(share.turns, unroll=1):
            head = share.first + i * self.spec.config.parallel_heads
            for tile in cutlass.range_constexpr(self.spec.tiles):
                if thread.lane < P_TILE:
                    p = share.rows.p0 + P_TILE * tile + thread.lane
                    pointer = self.spec.pointer(tensors.state, row.slot, (head, p), 0, PART)
                    prefetch_row(pointer.toint(), 4 * self.spec.problem.d_state)

    def _place(self, tensor, block: Block, side, which, part=0, divisor=PART):
        """Where a part of this lane's columns, or all of them, lie in a cache."""
        column = block.number * self.block + (2 * block.t + which) * self.unit + part * PART
        return self.spec.pointer(tensor, block.slot, (block.head, block.p + 8 * side), column, divisor)

    def _values(self, results, side, which):
        return [results[4 * e + 2 * side + which] for e in range(PART)]

    def _ask_first(self, state, block: Block):
        """Ask for an f32 checkpoint's words of the first block, and make room for them: `_take` has them."""
        if not self.dual:
            return None
        coming = cute.make_rmem_tensor(cute.make_layout(4 * PART), Int32)
        self._ask(coming, state, block)
        return coming

    def _ask(self, coming, state, block: Block):
        for side in range(2):
            for which in range(2):
                for e, word in enumerate(load_words(self._place(state, block, side, which), PART)):
                    coming[(2 * side + which) * PART + e] = word

    def _take(self, coming, state, block: Block):
        """A block's words, which were asked for; those of the next one are on their way meanwhile."""
        if not self.dual:
            return []
        words = [coming[k] for k in range(4 * PART)]
        self._ask_next(coming, state, block)
        return words

    @cute.jit
    def _ask_next(self, coming, state, block: Block):
        if block.number + 1 < self.blocks:
            self._ask(coming, state, Block(block.slot, block.head, block.p, block.number + 1, block.t))

    def _old(self, asked, tile, block: Block, part, factors, thread, finished=False):
        """A part of the decayed state, as accumulators; `finished` takes what has been written, as it is."""
        results = cute.make_rmem_tensor(cute.make_layout(4 * PART), Float32)
        for side in range(2):
            chunks = [] if self.dual else self.state_tile.chunks(tile, block.number, side, thread)
            for which in range(2):
                if self.dual:
                    olds = [as_float(w) for w in asked[(2 * side + which) * PART :][:PART]]
                elif self.scaled:
                    halves = decode_bytes(self.kind, "f16", chunks[which][part])
                    olds = [side_of("f16", w) for w in halves for side_of in (low_half, high_half)]
                else:
                    words = PART // 2
                    olds = unpack(chunks[which][words * part :][:words], self.spec)
                for e in range(PART):
                    results[4 * e + 2 * side + which] = olds[e] if finished else olds[e] * factors[side]
        return results

    def _held_terms(self, shared, at, inputs, thread: Thread):
        """The terms of all k-steps, where a lane can hold them."""
        if not self.holds:
            return []
        words, lane = [], thread.lane
        for first in range(0, self.spec.ring_positions, ROWS):
            words += load_matrices(inputs + place(first + lane % 8 + lane // 16 * 8, lane // 8 % 2), 4, True)
        return [
            self.terms.of_step(shared, at, words[2 * step : 2 * step + 2], positions_of(step, thread))
            for step in range(self.spec.ring_steps)
        ]

    def _add(self, results, ring: Ring, block, part):
        """Add the ring's terms to a part."""
        column = block * self.block + part * PART
        if not ring.terms:
            self._add_live(results, ring, column)
            return
        mine = column + ring.thread.g * self.unit
        sums = [[results[4 * e + k] for k in range(4)] for e in range(PART)]
        for step, terms in enumerate(ring.terms):
            b_words = [
                self.ring_b.get(ring.tensors, ring.shared, ring.row, position, mine, PART)
                for position in positions_of(step, ring.thread)
            ]
            sums = self.terms.add(sums, terms, b_words)
        for e in range(PART):
            for k in range(4):
                results[4 * e + k] = sums[e][k]

    @cute.jit
    def _add_live(self, results, ring: Ring, column):
        """The same, ROWS positions at a time, as many as there are."""
        for rows in cutlass.range((ring.row.pnat + (ROWS - 1)) // ROWS, unroll=1):
            self.rows.add_rows(
                results, ring.tensors, ring.shared, ring.at, ring.inputs, rows * ROWS, column, ring.row, ring.thread
            )

    def _round(self, done, random, results, inverse, key, block: Block, part):
        """Append a part's words to `done[side][which]`."""
        rounds = self.spec.problem.philox_rounds
        for side in range(2):
            for which in range(2):
                values = [v * inverse[side] for v in self._values(results, side, which)] if self.scaled else (
                    self._values(results, side, which)
                )  # fmt: skip
                words = []
                if rounds is not None:
                    words = self._random(random, key, block, side, which, part, rounds)
                if self.scaled:
                    done[side][which].append(encode_bytes(self.kind, values, words, self.spec.hardware_rounding))
                    continue
                for k in range(PART // 2):
                    pair = values[2 * k], values[2 * k + 1]
                    if words:
                        done[side][which].append(encode_pair(self.kind, *pair, words[k], self.spec.hardware_rounding))
                    else:
                        done[side][which].append(pack(self.kind, *pair))

    def _no_words(self):
        """Room for the random words of each group of a lane's columns in a row."""
        return [[None] * max(1, 2 * self.unit // GROUP.get(self.kind, 1)) for _ in range(2)]

    def _random(self, held, key, block: Block, side, which, part, rounds):
        """The random words of a part's four values: one for f8e4m3, else two; `held` keeps a group's from part to part.

        Which values share a group is `rounding`'s to say.
        """
        group = GROUP[self.kind]
        first = which * self.unit + part * PART  # of the lane's 2 * unit columns in a row
        if first % group == 0:
            row = (block.p + 8 * side) * self.spec.problem.d_state
            element = row + block.number * self.block + 2 * block.t * self.unit + first
            counter = [Int32(element) // group, Int32(block.head), Int32(block.slot), Int32(0)]
            held[side][first // group] = philox(counter, key, rounds)
        words = held[side][first // group]
        if self.kind == "f8e4m3":
            return [words[first % group // PART]]
        return words[first % group // 2 :][:2]

    def _store(self, target, done, block: Block):
        """Write a block's words: this lane's units of two rows, in pieces of at most 16 bytes."""
        size = self.spec.problem.read_bytes
        for side in range(2):
            if 2 * self.unit * size <= 16:
                words = [*done[side][0], *done[side][1]]
                store_words(self._place(target, block, side, 0, divisor=2 * self.unit), words)
            else:
                for which in range(2):
                    store_words(self._place(target, block, side, which, divisor=self.unit), done[side][which])
