"""The flush of a turn: the checkpoint in a stage becomes the logical state, and goes back to memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..bundles import Row, Share, Shared, Tensors, Thread, Turn
from ..flush_long import LongFlush
from ..primitives import load_words, quotient, remainder, store_words
from ..spec import P_TILE
from ..state_tile import StateTile
from ..tokens import Tokens
from .spec import Sm100Spec


class WriteBack:
    """The flush phase of the Blackwell step kernel."""

    def __init__(self, spec: Sm100Spec, state_tile: StateTile, tokens: Tokens) -> None:
        self.spec = spec
        self.state_tile = state_tile
        self.long_flush = LongFlush(spec, state_tile)
        self.tokens = tokens

    @cute.jit
    def flush(self, tensors: Tensors, shared: Shared, turn: Turn, share: Share, row: Row, thread: Thread):
        """Flush the head of a turn."""
        spec, lane = self.spec, thread.lane
        for tile in cutlass.range(spec.tiles, unroll=1):
            offset = turn.stage * spec.shared.stage_bytes + (thread.warp * spec.warp_rows + tile * P_TILE) * 128
            words = cute.recast_ptr(shared.raw + cute.assume(offset, divby=1024), dtype=Int32)
            inputs = shared.address + (turn.inputs + tile * spec.shared.input_tile_bytes)
            if cutlass.const_expr(spec.long_flush):
                self.long_flush.flush(tensors, shared, words, inputs, turn.index, row, thread)
            else:
                x_words = self.tokens.x_words(inputs, lane)
                self.state_tile.flush(tensors, shared, words, x_words, turn.index, row, thread)
            cute.arch.sync_warp()
            for block in cutlass.range_constexpr(spec.blocks):
                for first in cutlass.range_constexpr(0, P_TILE, 4):
                    p, chunk = first + quotient(lane, 8), remainder(lane, 8)  # eight lanes have a row's 128 bytes
                    place = block * (spec.rows * 32) + p * 32 + ((chunk ^ remainder(p, 8)) * 4)
                    found = load_words(words + cute.assume(place, divby=4), 4)
                    column = block * spec.block + chunk * spec.chunk
                    where = (turn.head, share.rows.p0 + P_TILE * tile + p)
                    store_words(self.spec.pointer(tensors.state, row.slot, where, column, spec.chunk), found)
