"""The flush of checkpoints that are not simply written as they were read.

Three kinds: an 8-bit state, whose rows get new scales; a state that is rounded stochastically; and an f32 checkpoint
with a read copy of fewer bits, which a row that flushes reads in place of the copy. A lane's columns are `unit` in a
row, twice, of rows g and g + 8 of a tile: the two columns of an accumulator pair, as in `state_tile`. A row belongs to
the four lanes of a quad, so that its largest value takes two shuffles.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..rounding import GROUP, LIMIT, TINY
from .bundles import Row, Shared, Tensors, Thread, Turn
from .convert import decode_bytes, encode_bytes, encode_pair, max_abs, philox
from .decay import Vectors
from .flush_long import ROWS, LongFlush
from .flush_terms import PART, FlushTerms, positions_of
from .primitives import (
    as_float,
    bits,
    high_half,
    load_matrices,
    load_words,
    low_half,
    mma_tf32,
    pack,
    quotient,
    remainder,
    store_words,
)
from .ring_b import RingB
from .spec import StepSpec
from .state_tile import StateTile, unpack
from .tokens import place

HELD = 16  # registers of a lane that a tile's terms may take; more are made anew for every part
HELD_BESIDE_BITS = 8  # the same beside random bits


@dataclass(frozen=True, eq=False)
class Job:
    """A tile that is flushed.

    Attributes:
        tensors, shared, row, thread: as everywhere.
        tile: what was read, as words of shared memory; a checkpoint beside a copy is advanced there.
        inputs: address of the tile's inputs.
        head, p: its head, and of its rows this lane's first, g; the other is 8 further.
        at: where the head's vectors are.
        factors: what the old values of the two rows are multiplied with.
        key: of the random bits.
        terms: of all k-steps, if a lane holds them.
        most: takes the largest value of each of the two rows.
        read_out: takes S·C of a checkpoint beside a copy: nothing else reads it.
    """

    tensors: Tensors
    shared: Shared
    row: Row
    thread: Thread
    tile: Any
    inputs: Any
    head: Int32
    p: Int32
    at: Vectors
    factors: list[Any]
    key: list[Any]
    terms: list[Any]
    most: Any
    read_out: Any


class Rewrite:
    """The flush phase where `Problem.rewrites`: `advance` a tile, then `encode` it, where scales wait for all of it."""

    def __init__(self, spec: StepSpec, state_tile: StateTile) -> None:
        self.spec = spec
        self.state_tile = state_tile
        self.readout_c = state_tile.readout_c
        p = spec.problem
        self.dual = p.copy_dtype is not None
        self.kind = p.read_dtype  # what is rounded to
        self.scaled = p.scaled
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

    def job(self, tensors: Tensors, shared: Shared, tile, inputs, turn: Turn, p0, row: Row, thread: Thread) -> Job:
        """A tile to flush, rows `p0` to `p0` + 15 of a turn's head."""
        at = Vectors(self.spec, turn.index)
        total = shared.vectors[at.total]
        factors = [total] * 2
        if self.scaled and not self.dual:
            factors = [
                total * Float32(tensors.scale[row.slot, turn.head, p0 + 8 * side + thread.g]) for side in range(2)
            ]
        key = [Int32(0)] * 2
        if tensors.seed is not None:
            key = load_words(tensors.seed[(None,)].iterator, 2)
        return Job(
            tensors, shared, row, thread, tile, inputs, turn.head, p0 + thread.g, at, factors, key,
            self._held_terms(shared, at, inputs, thread), self._zeros(2), self._zeros(4 * self.spec.token_tiles),
        )  # fmt: skip

    @cute.jit
    def advance(self, job: Job):
        """Make the logical state of a tile, and write it where that does not wait for its scales."""
        most = job.most
        for number in cutlass.range(self.blocks, unroll=1):
            chunks = self._chunks(job, number)
            if cutlass.const_expr(self.dual):
                self._read_out(job, chunks, number)
            done, kept = self._no_units(), self._no_units()
            random = self._no_words()
            for part in cutlass.range_constexpr(self.parts):
                results = self._old(job, chunks, part, job.factors)
                self._add(results, job, number, part)
                for side in cutlass.range_constexpr(2):
                    for which in cutlass.range_constexpr(2):
                        kept[side][which] += [bits(v) for v in self._values(results, side, which)]
                if cutlass.const_expr(self.scaled):
                    for k in cutlass.range_constexpr(4 * PART):
                        most[k % 4 // 2] = max_abs(most[k % 4 // 2], results[k])
                else:
                    self._round(done, random, results, [Float32(1.0)] * 2, job, number, part)
            if cutlass.const_expr(self.dual):
                for side in cutlass.range_constexpr(2):
                    for which in cutlass.range_constexpr(2):
                        store_words(self._chunk(job, number, side, which), kept[side][which])
            if cutlass.const_expr(not self.scaled):
                self._store(done, job, number)

    @cute.jit
    def encode(self, job: Job):
        """Write an 8-bit state or copy, once the largest values of its rows are known."""
        scale, inverse = job.tensors.scale, []
        for side in cutlass.range_constexpr(2):
            most = job.most[side]
            for distance in cutlass.range_constexpr(1, 3):
                most = max_abs(most, cute.arch.shuffle_sync_bfly(most, distance))
            row_scale = Float32(cutlass.select_(most < TINY, Float32(1.0), most / Float32(LIMIT[self.kind])))
            if job.thread.t == 0:
                scale[job.row.slot, job.head, job.p + 8 * side] = row_scale
            inverse.append(Float32(cutlass.select_(most < TINY, Float32(0.0), Float32(1.0) / row_scale)))
        for number in cutlass.range(self.blocks, unroll=1):
            chunks = self._chunks(job, number)
            done = self._no_units()
            random = self._no_words()
            for part in cutlass.range_constexpr(self.parts):
                if cutlass.const_expr(self.dual):  # the tile has the sums already
                    results = self._old(job, chunks, part, [Float32(1.0)] * 2)
                else:
                    results = self._old(job, chunks, part, job.factors)
                    self._add(results, job, number, part)
                self._round(done, random, results, inverse, job, number, part)
            self._store(done, job, number)

    def _read_out(self, job: Job, chunks, number):
        """Add a block's S·C: a k-step's columns are the e-th of each lane's two runs of PART, in tf32."""
        for n in range(self.spec.token_tiles):
            sums = [job.read_out[4 * n + k] for k in range(4)]
            column = number * self.block + 2 * PART * job.thread.t
            words = self.readout_c.piece(job.shared.raw, 8 * n + job.thread.g, column)
            for e in range(PART):
                rows = [chunks[side][which][e] for which in range(2) for side in range(2)]
                half = (low_half, high_half)[e % 2]
                columns = [bits(half(self.spec.io_kind, words[which * PART // 2 + e // 2])) for which in range(2)]
                sums = mma_tf32(sums, rows, columns)
            for k in range(4):
                job.read_out[4 * n + k] = sums[k]

    def _chunk(self, job: Job, number, side, which):
        """One of this lane's two 16-byte chunks of a checkpoint beside a copy (undoing the 128-byte swizzle)."""
        g, t = job.thread.g, job.thread.t
        at = number * (16 * 32) + (g + 8 * side) * 32 + ((2 * t + which) ^ g) * 4
        return job.tile + cute.assume(at, divby=4)

    def _chunks(self, job: Job, number):
        """This lane's words of a block: of each of its rows, two units."""
        if self.dual:
            return [
                [load_words(self._chunk(job, number, side, which), PART) for which in range(2)] for side in range(2)
            ]
        return [self.state_tile.chunks(job.tile, number, side, job.thread) for side in range(2)]

    def _values(self, results, side, which):
        return [results[4 * e + 2 * side + which] for e in range(PART)]

    def _old(self, job: Job, chunks, part, factors):
        """A part of the decayed state, as accumulators."""
        results = cute.make_rmem_tensor(cute.make_layout(4 * PART), Float32)
        for side in range(2):
            for which in range(2):
                if self.dual:
                    olds = [as_float(w) for w in chunks[side][which]]
                elif self.scaled:
                    halves = decode_bytes(self.kind, "f16", chunks[side][which][part])
                    olds = [side_of("f16", w) for w in halves for side_of in (low_half, high_half)]
                else:
                    words = PART // 2
                    olds = unpack(chunks[side][which][words * part :][:words], self.spec)
                for e in range(PART):
                    results[4 * e + 2 * side + which] = olds[e] * factors[side]
        return results

    def _held_terms(self, shared, at, inputs, thread: Thread):
        """The terms of all k-steps, where a lane can hold them."""
        if not self.holds:
            return []
        words, lane = [], thread.lane
        for first in range(0, self.spec.ring_positions, ROWS):
            words += load_matrices(
                inputs + place(first + remainder(lane, 8) + quotient(lane, 16) * 8, remainder(quotient(lane, 8), 2)),
                4,
                True,
            )
        return [
            self.terms.of_step(shared, at, words[2 * step : 2 * step + 2], positions_of(step, thread))
            for step in range(self.spec.ring_steps)
        ]

    def _add(self, results, job: Job, block, part):
        """Add the ring's terms to a part."""
        column = block * self.block + part * PART
        if not job.terms:
            self._add_live(results, job, column)
            return
        mine = column + job.thread.g * self.unit
        sums = [[results[4 * e + k] for k in range(4)] for e in range(PART)]
        for step, terms in enumerate(job.terms):
            b_words = [
                self.ring_b.get(job.tensors, job.shared, job.row, position, mine, PART)
                for position in positions_of(step, job.thread)
            ]
            sums = self.terms.add(sums, terms, b_words)
        for e in range(PART):
            for k in range(4):
                results[4 * e + k] = sums[e][k]

    @cute.jit
    def _add_live(self, results, job: Job, column):
        """The same, ROWS positions at a time, as many as there are."""
        for rows in cutlass.range(quotient(job.row.pnat + (ROWS - 1), ROWS), unroll=1):
            self.rows.add_rows(
                results, job.tensors, job.shared, job.at, job.inputs, rows * ROWS, column, job.row, job.thread
            )

    def _round(self, done, random, results, inverse, job: Job, block, part):
        """Append a part's words to `done[side][which]`."""
        rounds = self.spec.problem.philox_rounds
        for side in range(2):
            for which in range(2):
                values = [v * inverse[side] for v in self._values(results, side, which)] if self.scaled else (
                    self._values(results, side, which)
                )  # fmt: skip
                words = []
                if rounds is not None:
                    words = self._random(random, job, block, side, which, part, rounds)
                if self.scaled:
                    done[side][which].append(encode_bytes(self.kind, values, words, self.spec.hardware_rounding))
                    continue
                for k in range(PART // 2):
                    pair = values[2 * k], values[2 * k + 1]
                    if words:
                        done[side][which].append(encode_pair(self.kind, *pair, words[k], self.spec.hardware_rounding))
                    else:
                        done[side][which].append(pack(self.kind, *pair))

    def _zeros(self, count):
        """Registers."""
        found = cute.make_rmem_tensor(cute.make_layout(count), Float32)
        for k in range(count):
            found[k] = Float32(0.0)
        return found

    def _no_units(self):
        """No words yet of a block's units, by side and which."""
        return [[[] for _ in range(2)] for _ in range(2)]

    def _no_words(self):
        """Room for the random words of each group of a lane's columns in a row."""
        return [[None] * max(1, 2 * self.unit // GROUP.get(self.kind, 1)) for _ in range(2)]

    def _random(self, held, job: Job, block, side, which, part, rounds):
        """The random words of a part's four values: one for f8e4m3, else two; `held` keeps a group's from part to part.

        Which values share a group is `rounding`'s to say.
        """
        group = GROUP[self.kind]
        first = which * self.unit + part * PART  # of the lane's 2 * unit columns in a row
        if first % group == 0:
            row = (job.p + 8 * side) * self.spec.problem.d_state
            element = row + block * self.block + 2 * job.thread.t * self.unit + first
            counter = [quotient(Int32(element), group), Int32(job.head), Int32(job.row.slot), Int32(0)]
            held[side][first // group] = philox(counter, job.key, rounds)
        words = held[side][first // group]
        if self.kind == "f8e4m3":
            return [words[first % group // PART]]
        return words[first % group // 2 :][:2]

    def _store(self, done, job: Job, number):
        """Write a block's words: this lane's units of two rows, in pieces of at most 16 bytes."""
        target = job.tensors.copy if self.dual else job.tensors.state

        def place_of(side, which, divisor):
            column = number * self.block + (2 * job.thread.t + which) * self.unit
            return self.spec.pointer(target, job.row.slot, (job.head, job.p + 8 * side), column, divisor)

        size = self.spec.problem.read_bytes
        for side in range(2):
            if 2 * self.unit * size <= 16:
                store_words(place_of(side, 0, 2 * self.unit), [*done[side][0], *done[side][1]])
            else:
                for which in range(2):
                    store_words(place_of(side, which, self.unit), done[side][which])
