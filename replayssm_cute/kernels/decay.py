"""Per-head decays: weights of ring rows and new tokens, by scans that only ever add terms of one sign.

A head's vectors in shared memory, in this order: `weights` of the ring positions, exp(C_tot - c_j) dt_j (0 where
dead); per new token exp(n_t), dt_t and A·dt_t; and the total decay exp(C_tot).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .spec import StepSpec

SEGMENT = 16  # lanes 0..15 scan the ring, lanes 16..31 the new tokens: W <= 16 and T <= 16
WITHIN_SEGMENT = 0x1000  # shfl's mask-and-clamp operand for segments of 16 lanes


class Decay:
    """The decay phase of a step kernel."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec

    def offsets(self, head_index: Int32) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """Float offsets of a head's weights, token decays, token dt, token A·dt and total decay."""
        weights = head_index * self.spec.shared.vector_floats
        token_decay = weights + self.spec.ring_positions
        pad = self.spec.tokens_pad
        return weights, token_decay, token_decay + pad, token_decay + 2 * pad, token_decay + 3 * pad

    def load_new(self, dt, a, dt_bias, row, head, lane):
        """What a head's vectors need of the new tokens: this lane's token's raw dt, A and dt_bias."""
        bias = None if dt_bias is None else Float32(dt_bias[head, 0])
        return Float32(dt[row, self.spec.token(lane % SEGMENT), head, 0]), Float32(a[head, 0, 0]), bias

    def load_ring(self, dt_cache, slot, head, start, pnat, lane):
        """What a head's vectors need of the ring: dt of this lane's live row, or in "whole" mode of ring row `lane`."""
        if self.spec.whole:
            return Float32(dt_cache[slot, head, cutlass.min(lane, self.spec.problem.ring_rows - 1)])
        return Float32(dt_cache[slot, head, self.spec.read_row(start, pnat, SEGMENT - 1 - lane % SEGMENT)])

    @cute.jit
    def make_vectors(self, dt_cache, new_values, ring_dt, vectors, head_index, slot, head, start, pnat, split, lane):
        """One head's vectors, by one warp; appends the new tokens' dt to the ring.

        The ring half runs from the newest row to the oldest, so that the sum over later rows is a prefix sum too:
        no decay is a difference of two long sums.
        """
        weights_at, decay_at, dt_at, log_decay_at, total_at = self.offsets(head_index)
        place = lane % SEGMENT
        is_new = lane >= SEGMENT
        j = SEGMENT - 1 - place
        old_dt = ring_dt
        if cutlass.const_expr(self.spec.whole):
            mine = self.spec.ring_row(start, cutlass.min(j, self.spec.problem.ring_rows - 1))
            old_dt = cute.arch.shuffle_sync(ring_dt, mine)
        new_dt, rate, bias = new_values
        if cutlass.const_expr(bias is not None):
            new_dt = new_dt + bias
        if cutlass.const_expr(self.spec.problem.dt_softplus):
            # linear above 20, where log1p(exp(v)) equals v in f32: exp must not overflow
            bounded = cutlass.min(new_dt, Float32(20.0))
            new_dt = Float32(cutlass.select_(new_dt > 20.0, new_dt, cute.math.log1p(cute.math.exp(bounded))))
        # a dead row's dt may be NaN: select, never multiply
        step = Float32(cutlass.select_(is_new, new_dt, old_dt))
        counts = ((lane < SEGMENT) & (j < pnat)) | (is_new & (place < self.spec.problem.tokens))
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
        if cutlass.const_expr(self.spec.whole):
            age = lane - start
            age = Int32(cutlass.select_(age < 0, age + self.spec.problem.ring_rows, age))
            weight_by_row = cute.arch.shuffle_sync(weight, (SEGMENT - 1 - age) & (SEGMENT - 1))
            if lane < self.spec.ring_positions:
                vectors[weights_at + lane] = Float32(
                    cutlass.select_(self.spec.is_live(start, pnat, lane), weight_by_row, Float32(0.0))
                )
        if is_new:
            if place < self.spec.tokens_pad:
                vectors[decay_at + place] = decayed
                vectors[dt_at + place] = step
                vectors[log_decay_at + place] = log_decay
            if (place < self.spec.problem.tokens) & (split == 0):
                dt_cache[slot, head, self.spec.ring_row(start, pnat + place)] = step
        else:
            if (j < self.spec.ring_positions) & cutlass.const_expr(not self.spec.whole):
                vectors[weights_at + j] = weight
            if j == 0:
                vectors[total_at] = cute.math.exp(inclusive)

    def weight_fragment(self, dots, vectors, offsets, skip, start, pnat, step, n, g, t):
        """The weights of k-step `step` in token tile `n` as an f32 B-fragment: positions t, t + 4 with token 8n + g.

        For the ring exp(C_tot - c_j + n_t) dt_j (B_j·C_t); for new token s exp(n_t - n_s) dt_s (B_s·C_t), plus D where
        s = t, 0 where s > t.
        """
        spec = self.spec
        weights_at, decay_at, dt_at, log_decay_at, _ = offsets
        mine = 8 * n + g
        fragment = []
        for half in range(2):
            dot = dots[half]
            if step < spec.ring_steps:
                position = 8 * step + 4 * half + t
                weight = dot * (vectors[weights_at + position] * vectors[decay_at + mine])
                # a dead row's product may be NaN: select, never multiply
                live = spec.is_live(start, pnat, position)
                fragment.append(Float32(cutlass.select_(live, weight, Float32(0.0))))
                continue
            first = 8 * (step - spec.ring_steps)
            s = first + 4 * half + t
            between = Float32(0.0)
            for later in range(first + 1, min(8 * n + 8, spec.problem.tokens)):
                inside = (s < later) & (later <= mine)
                between = between + Float32(cutlass.select_(inside, vectors[log_decay_at + later], Float32(0.0)))
            weight = cute.math.exp(between) * (vectors[dt_at + s] * dot)
            weight = Float32(cutlass.select_(s == mine, weight + skip, weight))
            fragment.append(Float32(cutlass.select_(s <= mine, weight, Float32(0.0))))
        return fragment
