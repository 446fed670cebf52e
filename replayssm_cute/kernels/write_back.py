"""The flush of a turn: the checkpoint in a stage becomes the logical state, and goes back to memory."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .bundles import Row, Share, Shared, Tensors, Thread, Turn
from .decay import TRUNCATION_GAIN
from .flush_long import LongFlush
from .rewrite import Rewrite
from .spec import P_TILE, StepSpec
from .state_copies import Pipe, StateCopies
from .state_tile import StateTile
from .tokens import Tokens


class WriteBack:
    """The flush phase of a step kernel, whichever way its problem flushes."""

    def __init__(self, spec: StepSpec, state_tile: StateTile, tokens: Tokens, copies: StateCopies) -> None:
        self.spec = spec
        self.state_tile = state_tile
        self.long_flush = LongFlush(spec, state_tile)
        self.rewrite = Rewrite(spec, state_tile) if spec.problem.rewrites else None
        self.tokens = tokens
        self.copies = copies
        self.dual = spec.problem.copy_dtype is not None

    @cute.jit
    def flush(
        self, tensors: Tensors, shared: Shared, pipe: Pipe, turn: Turn, share: Share, row: Row, thread: Thread, sums
    ):
        """Flush the head of a turn; beside a read copy that is the read-out too, of the checkpoint, into `sums`."""
        if cutlass.const_expr(self.dual):
            self._beside_copy(tensors, shared, pipe, turn, share, row, thread, sums)
        elif cutlass.const_expr(self.spec.problem.rewrites):
            for tile in cutlass.range(self.spec.tiles, unroll=1):
                words, inputs = self._tile(shared, turn, tile, thread)
                p0 = share.rows.p0 + P_TILE * tile
                job = self.rewrite.job(tensors, shared, words, inputs, turn, p0, row, thread)
                self.rewrite.advance(job)
                if cutlass.const_expr(self.rewrite.scaled):
                    self.rewrite.encode(job)
        else:
            self._in_place(tensors, shared, turn, row, thread)
            self.copies.store(pipe, turn, share, row, thread)

    @cute.jit
    def _beside_copy(
        self, tensors: Tensors, shared: Shared, pipe: Pipe, turn: Turn, share: Share, row: Row, thread: Thread, sums
    ):
        """Flush a checkpoint tile by tile, as they come, and make its copy."""
        each, layout = 4 * self.spec.token_tiles, self.spec.shared
        for k in cutlass.range_constexpr(each * self.spec.tiles):
            sums[k] = Float32(0.0)
        offset = turn.stage * layout.stage_bytes + thread.warp * layout.warp_bytes
        words = cute.recast_ptr(shared.raw + cute.assume(offset, divby=1024), dtype=Int32)
        for tile in cutlass.range(self.spec.tiles, unroll=1):
            inputs = shared.address + (turn.inputs + tile * layout.input_tile_bytes)
            p0 = share.rows.p0 + P_TILE * tile
            job = self.rewrite.job(tensors, shared, words, inputs, turn, p0, row, thread)
            self.copies.await_tile(pipe, turn, tile)
            self.rewrite.advance(job)
            self.copies.store_tile(pipe, turn, tile, share, row, thread)
            if cutlass.const_expr(self.rewrite.scaled):
                self.rewrite.encode(job)
            self.copies.load_next_tile(pipe, turn, tile, share, row, thread)
            for k in cutlass.range_constexpr(each * self.spec.tiles):  # registers have fixed numbers
                mine = tile == k // each
                read_out = job.read_out[k % each] * Float32(TRUNCATION_GAIN)
                sums[k] = Float32(cutlass.select_(mine, read_out, sums[k]))

    def _tile(self, shared, turn, tile, thread):
        """A tile's state in the turn's stage, as words, and the address of its inputs."""
        layout = self.spec.shared
        offset = (
            turn.stage * layout.stage_bytes + thread.warp * layout.warp_bytes + tile * (P_TILE * self.spec.row_bytes)
        )
        words = cute.recast_ptr(shared.raw + cute.assume(offset, divby=1024), dtype=Int32)
        return words, shared.address + (turn.inputs + tile * layout.input_tile_bytes)

    @cute.jit
    def _in_place(self, tensors, shared, turn, row, thread):
        """Turn the checkpoint in a stage into the logical state."""
        cute.arch.sync_warp()  # results go where other lanes may still be reading
        for tile in cutlass.range(self.spec.tiles, unroll=1):
            words, inputs = self._tile(shared, turn, tile, thread)
            if cutlass.const_expr(self.spec.long_flush):
                self.long_flush.flush(tensors, shared, words, inputs, turn.index, row, thread)
            else:
                x_words = self.tokens.x_words(inputs, thread.lane)
                self.state_tile.flush(tensors, shared, words, x_words, turn.index, row, thread)
