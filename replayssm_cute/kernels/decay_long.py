"""Decays of windows above 16 or T above 16: a warp scans the ring, 32 rows at a time, then the tokens."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32

from ..config import WARP
from .bundles import NewTokens, Row, Share, Shared, Tensors, Thread
from .decay import Decay, Vectors
from .spec import StepSpec


class LongDecay(Decay):
    """The decay phase for W up to 64 and T up to 32, in "live" mode."""

    def __init__(self, spec: StepSpec) -> None:
        super().__init__(spec)
        self.chunks = -(-spec.problem.window // WARP)

    def _position(self, chunk, lane):
        """The live row that a lane scans in a chunk: from the newest to the oldest."""
        return WARP * self.chunks - 1 - (WARP * chunk + lane)

    def load_new(self, tensors: Tensors, new: NewTokens, head, thread: Thread):
        """What a head's vectors need of the new tokens: this lane's token's raw dt, A, D and dt_bias."""
        skip = Float32(0.0) if tensors.d is None else Float32(tensors.d[head, 0])
        bias = None if tensors.dt_bias is None else Float32(tensors.dt_bias[head, 0])
        outer, index = self.spec.new_token(new, thread.lane)
        return Float32(tensors.dt[outer, index, head, 0]), Float32(tensors.a[head, 0, 0]), skip, bias

    def load_ring(self, tensors: Tensors, row: Row, head, thread: Thread):
        """What a head's vectors need of the ring: dt of this lane's row of each chunk."""
        return [
            Float32(tensors.dt_cache[row.slot, head, self.spec.read_row(row, self._position(chunk, thread.lane))])
            for chunk in range(self.chunks)
        ]

    def _scan(self, value, lane, count: int = WARP):
        """Inclusive prefix sum over the warp's first `count` lanes."""
        for k in range((count - 1).bit_length()):
            other = cute.arch.shuffle_sync_up(value, 1 << k, mask_and_clamp=0)
            value = value + Float32(cutlass.select_(lane >= 1 << k, other, Float32(0.0)))
        return value

    @cute.jit
    def make_vectors(
        self, tensors: Tensors, shared: Shared, index, head, new_values, ring_dt, row: Row, share: Share, thread: Thread
    ):
        """One head's vectors, by one warp; appends the new tokens' dt to the ring. Sums run as in `Decay`."""
        at = Vectors(self.spec, index)
        vectors, lane, length = shared.vectors, thread.lane, row.new.length
        new_dt, rate, skip, bias = new_values
        later = Float32(0.0)  # A·dt of all rows newer than the chunk
        for chunk in cutlass.range_constexpr(self.chunks):
            j = self._position(chunk, lane)
            # a dead row's dt may be NaN: select, never multiply
            step = Float32(cutlass.select_(j < row.pnat, ring_dt[chunk], Float32(0.0)))
            inclusive = self._scan(rate * step, lane)
            before = cute.arch.shuffle_sync_up(inclusive, 1, mask_and_clamp=0)
            newer = later + Float32(cutlass.select_(lane == 0, Float32(0.0), before))
            if j < self.spec.ring_positions:
                vectors[at.weights + j] = cute.math.exp(newer) * step
            later = later + cute.arch.shuffle_sync(inclusive, WARP - 1)
        total = cute.math.exp(later)
        token_dt = Float32(cutlass.select_(lane < length, self.processed(new_dt, bias), Float32(0.0)))
        log_decay = rate * token_dt
        decayed = cute.math.exp(self._scan(log_decay, lane, self.spec.problem.tokens))
        if lane < self.spec.tokens_pad:
            vectors[at.token_decay + lane] = decayed
            vectors[at.factors + lane] = decayed * total * Float32(self.gain)
            vectors[at.dt + lane] = token_dt
            vectors[at.log_decay + lane] = log_decay
        if (lane < length) & (share.rows.split == 0):
            tensors.dt_cache[row.slot, head, self.spec.ring_row(row.start, row.pnat + lane)] = token_dt
        if lane == 0:
            vectors[at.total] = total
            vectors[at.skip] = skip
