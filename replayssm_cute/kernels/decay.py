"""Per-head decays: weights of ring rows and new tokens, by scans that only ever add terms of one sign.

A head's vectors in shared memory, in this order: `weights` of the ring positions, exp(C_tot - c_j) dt_j (0 where
dead); per new token exp(n_t), the factor of its read-out exp(C_tot + n_t), dt_t and A·dt_t; and the total decay
exp(C_tot), and D.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .bundles import NewTokens, Row, Share, Shared, Tensors, Thread
from .primitives import remainder
from .spec import StepSpec

SEGMENT = 16  # lanes 0..15 scan the ring, lanes 16..31 the new tokens: W <= 16 and T <= 16, see decay_long
WITHIN_SEGMENT = 0x1000  # shfl's mask-and-clamp operand for segments of 16 lanes

# The MMA reads the upper 19 bits of an f32 operand. Cutting 13 bits off a mantissa m in [1, 2) lowers the value by
# the share 2^-10 u / m, u uniform in [0, 1): 2^-10 E[u] E[1/m] = 2^-11 / (2 ln 2) = 3.52e-4 on average for m
# log-uniform. Scaling the read-out by this factor removes the bias, which halves the error (2.2e-4 instead of
# 4.1e-4, as good as rounding each element) without an instruction more.
TRUNCATION_GAIN = 1.0 + 3.52e-4


class Vectors:
    """Float offsets of a head's vectors."""

    def __init__(self, spec: StepSpec, head_index: Int32) -> None:
        pad = spec.tokens_pad
        self.weights = head_index * spec.shared.vector_floats
        self.token_decay = self.weights + spec.ring_positions
        self.factors = self.token_decay + pad
        self.dt = self.factors + pad
        self.log_decay = self.dt + pad
        self.total = self.log_decay + pad
        self.skip = self.total + 1


class Decay:
    """The decay phase of a step kernel."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec
        self.gain = TRUNCATION_GAIN if spec.state_kind == "f32" and not spec.highest else 1.0

    def load_new(self, tensors: Tensors, new: NewTokens, head, thread: Thread):
        """What a head's vectors need of the new tokens: this lane's token's raw dt, A, D and dt_bias."""
        skip = Float32(0.0) if tensors.d is None else Float32(tensors.d[head, 0])
        bias = None if tensors.dt_bias is None else Float32(tensors.dt_bias[head, 0])
        outer, index = self.spec.new_token(new, remainder(thread.lane, SEGMENT))
        return Float32(tensors.dt[outer, index, head, 0]), Float32(tensors.a[head, 0, 0]), skip, bias

    def processed(self, dt, bias):
        """dt as the recurrence takes it: with its bias, through softplus where the problem says so."""
        if bias is not None:
            dt = dt + bias
        if not self.spec.problem.dt_softplus:
            return dt
        # linear above 20, where log1p(exp(v)) equals v in f32: exp must not overflow
        bounded = cutlass.min(dt, Float32(20.0))
        return Float32(cutlass.select_(dt > 20.0, dt, cute.math.log1p(cute.math.exp(bounded))))

    def load_ring(self, tensors: Tensors, row: Row, head, thread: Thread):
        """What a head's vectors need of the ring: dt of this lane's live row, or in "whole" mode of ring row `lane`."""
        if self.spec.whole:
            position = cutlass.min(thread.lane, self.spec.problem.ring_rows - 1)
        else:
            position = self.spec.read_row(row, SEGMENT - 1 - remainder(thread.lane, SEGMENT))
        return Float32(tensors.dt_cache[row.slot, head, position])

    @cute.jit
    def make_vectors(
        self, tensors: Tensors, shared: Shared, index, head, new_values, ring_dt, row: Row, share: Share, thread: Thread
    ):
        """One head's vectors, by one warp; appends the new tokens' dt to the ring.

        The ring half runs from the newest row to the oldest, so that the sum over later rows is a prefix sum too:
        no decay is a difference of two long sums.
        """
        at = Vectors(self.spec, index)
        vectors, lane, length = shared.vectors, thread.lane, row.new.length
        place = remainder(lane, SEGMENT)
        is_new = lane >= SEGMENT
        j = SEGMENT - 1 - place
        old_dt = ring_dt
        if cutlass.const_expr(self.spec.whole):
            mine = self.spec.ring_row(row.start, cutlass.min(j, self.spec.problem.ring_rows - 1))
            old_dt = cute.arch.shuffle_sync(ring_dt, mine)
        new_dt, rate, skip, bias = new_values
        new_dt = self.processed(new_dt, bias)
        # a dead row's dt may be NaN: select, never multiply
        step = Float32(cutlass.select_(is_new, new_dt, old_dt))
        counts = ((lane < SEGMENT) & (j < row.pnat)) | (is_new & (place < length))
        step = Float32(cutlass.select_(counts, step, Float32(0.0)))
        log_decay = rate * step
        inclusive = log_decay
        for k in cutlass.range_constexpr(4):
            distance = 1 << k
            other = cute.arch.shuffle_sync_up(inclusive, distance, mask_and_clamp=WITHIN_SEGMENT)
            inclusive = inclusive + Float32(cutlass.select_(place >= distance, other, Float32(0.0)))
        exclusive = cute.arch.shuffle_sync_up(inclusive, 1, mask_and_clamp=WITHIN_SEGMENT)
        exclusive = Float32(cutlass.select_(place == 0, Float32(0.0), exclusive))
        decayed = cute.math.exp(Float32(cutlass.select_(is_new, inclusive, exclusive)))
        weight = decayed * step
        total = cute.math.exp(cute.arch.shuffle_sync(inclusive, SEGMENT - 1))
        if cutlass.const_expr(self.spec.whole):
            age = lane - row.start
            age = Int32(cutlass.select_(age < 0, age + self.spec.problem.ring_rows, age))
            weight_by_row = cute.arch.shuffle_sync(weight, (SEGMENT - 1 - age) & (SEGMENT - 1))
            if lane < self.spec.ring_positions:
                vectors[at.weights + lane] = Float32(
                    cutlass.select_(self.spec.is_live(row, lane), weight_by_row, Float32(0.0))
                )
        if is_new:
            if place < self.spec.tokens_pad:
                vectors[at.token_decay + place] = decayed
                vectors[at.factors + place] = decayed * total * Float32(self.gain)
                vectors[at.dt + place] = step
                vectors[at.log_decay + place] = log_decay
            if (place < length) & (share.rows.split == 0):
                tensors.dt_cache[row.slot, head, self.spec.ring_row(row.start, row.pnat + place)] = step
        else:
            if (j < self.spec.ring_positions) & cutlass.const_expr(not self.spec.whole):
                vectors[at.weights + j] = weight
            if j == 0:
                vectors[at.total] = total
                vectors[at.skip] = skip
