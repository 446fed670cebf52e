"""The flush of checkpoints that are not simply written as they were read.

Three kinds: an 8-bit state, whose rows get new scales; a state that is rounded stochastically; and an f32 checkpoint,
read and written in global memory, with a read copy of fewer bits. A lane's columns are `unit` in a row, twice, of rows
g and g + 8 of a tile: the two columns of an accumulator pair, as in `state_tile`. A row belongs to the four lanes of a
quad, so that its largest value takes two shuffles.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..rounding import GROUP, LIMIT, TINY
from .bundles import Row, Share, Shared, Tensors, Thread, Turn
from .convert import decode_bytes, encode_bytes, encode_pair, max_abs, philox, prefetch_row
from .decay import Vectors
from .flush_long import ROWS, LongFlush
from .primitives import as_float, bits, high_half, load_words, low_half, pack, store_words
from .spec import P_TILE, StepSpec
from .state_tile import PART, StateTile, unpack


@dataclass(frozen=True, eq=False)
class Block:
    """A lane's part of a tile, one block of columns wide: of rows p and p + 8 of a head, the columns that t names."""

    slot: Int64
    head: Int32
    p: Int32
    number: Int32
    t: Int32


class Rewrite:
    """The flush phase where `Problem.rewrites`."""

    def __init__(self, spec: StepSpec, state_tile: StateTile) -> None:
        self.spec = spec
        self.state_tile = state_tile
        p = spec.problem
        self.dual = p.copy_dtype is not None
        self.kind = p.read_dtype  # what is rounded to
        self.scaled = p.scaled
        # An f32 checkpoint is best read and written 32 bytes a lane; the others in the units that shared memory has.
        self.unit = PART if self.dual else spec.unit
        self.block = 8 * self.unit
        self.parts = self.unit // PART
        self.blocks = p.d_state // self.block
        self.rows = LongFlush(spec, state_tile, self.unit, low_terms=self.dual or p.state_dtype == "f16")

    @cute.jit
    def flush(self, tensors: Tensors, shared: Shared, tile, inputs, turn: Turn, p0, row: Row, thread: Thread):
        """Write a tile of the logical state back; `tile` is what was read, in shared memory, `inputs` its inputs."""
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

        for number in cutlass.range(self.blocks, unroll=1):
            block = Block(slot, head, p, number, t)
            done = [[[] for _ in range(2)] for _ in range(2)]
            random = self._no_words()
            for part in cutlass.range_constexpr(self.parts):
                results = self._old(state, tile, block, part, factors, thread)
                self._add(results, tensors, shared, at, inputs, number, part, row, thread)
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
            for number in cutlass.range(self.blocks, unroll=1):
                coded_block = Block(slot, head, p, number, t)
                coded = [[[] for _ in range(2)] for _ in range(2)]
                random_words = self._no_words()
                for part in cutlass.range_constexpr(self.parts):
                    again = self._old(state, tile, coded_block, part, factors, thread, self.dual)
                    if cutlass.const_expr(not self.dual):  # the checkpoint has the sums already
                        self._add(again, tensors, shared, at, inputs, number, part, row, thread)
                    self._round(coded, random_words, again, inverse, key, coded_block, part)
                self._store(target, coded, coded_block)

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

    def _old(self, state, tile, block: Block, part, factors, thread, finished=False):
        """A part of the decayed state, as accumulators; `finished` reads what has been written, as it is."""
        results = cute.make_rmem_tensor(cute.make_layout(4 * PART), Float32)
        for side in range(2):
            chunks = [] if self.dual else self.state_tile.chunks(tile, block.number, side, thread)
            for which in range(2):
                if self.dual:
                    words = load_words(self._place(state, block, side, which, part), PART)
                    olds = [as_float(w) for w in words]
                elif self.scaled:
                    halves = decode_bytes(self.kind, "f16", chunks[which][part])
                    olds = [side_of("f16", w) for w in halves for side_of in (low_half, high_half)]
                else:
                    words = PART // 2
                    olds = unpack(chunks[which][words * part :][:words], self.spec)
                for e in range(PART):
                    results[4 * e + 2 * side + which] = olds[e] if finished else olds[e] * factors[side]
        return results

    @cute.jit
    def _add(self, results, tensors, shared, at, inputs, block, part, row, thread):
        """Add the ring's terms to a part."""
        column = block * self.block + part * PART
        for rows in cutlass.range((row.pnat + (ROWS - 1)) // ROWS, unroll=1):
            self.rows.add_rows(results, tensors, shared, at, inputs, rows * ROWS, column, row, thread)

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
