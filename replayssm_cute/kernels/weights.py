"""The weight of every position in every new token's output, once per head: the B-operand of the outputs' MMAs.

For the ring exp(C_tot - c_j + n_t) dt_j (B_j·C_t); for new token s exp(n_t - n_s) dt_s (B_s·C_t), plus D where s = t,
0 where s > t. Rounded to tf32 (not for the highest precision), a row of positions for each token.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .bundles import Row, Shared, Thread
from .decay import Vectors
from .primitives import bits, load_words, store_words, to_tf32
from .products import Products
from .spec import StepSpec


class Weights:
    """The weights phase of a step kernel, and what reads its result."""

    def __init__(self, spec: StepSpec, products: Products) -> None:
        self.spec = spec
        self.products = products
        self.rounded = bits if spec.highest else to_tf32

    def _at(self, index, step, n, thread):
        """Byte offset of this lane's two weights in a k-step: positions 2t and 2t + 1 of token 8n + g."""
        shared = self.spec.shared
        token = self.spec.token(8 * n + thread.g)
        floats = index * shared.weight_floats + token * shared.weight_stride + 8 * step + 2 * thread.t
        return cute.assume(shared.weights + 4 * floats, divby=8)

    def _of_ring(self, shared, at, step, n, row, thread):
        token, pair = 8 * n + thread.g, []
        for half in range(2):
            position = 8 * step + 2 * thread.t + half
            dot = self.products.dot(shared.products, position, token)
            weight = dot * (shared.vectors[at.weights + position] * shared.vectors[at.token_decay + token])
            # a dead row's product may be NaN: select, never multiply
            live = self.spec.is_live(row, position)
            pair.append(self.rounded(Float32(cutlass.select_(live, weight, Float32(0.0)))))
        return pair

    def _of_tokens(self, shared, at, step, n, thread):
        token, pair = 8 * n + thread.g, []
        for half in range(2):
            s = 8 * (step - self.spec.ring_steps) + 2 * thread.t + half
            dot = self.products.dot(shared.products, 8 * step + 2 * thread.t + half, token)
            between = Float32(0.0)
            for later in range(1, min(8 * n + 8, self.spec.problem.tokens)):
                inside = (s < later) & (later <= token)
                log_decay = shared.vectors[at.log_decay + later]
                between = between + Float32(cutlass.select_(inside, log_decay, Float32(0.0)))
            weight = cute.math.exp(between) * (shared.vectors[at.dt + s] * dot)
            weight = Float32(cutlass.select_(s == token, weight + shared.vectors[at.skip], weight))
            pair.append(self.rounded(Float32(cutlass.select_(s <= token, weight, Float32(0.0)))))
        return pair

    @cute.jit
    def make(self, shared: Shared, index, step, row: Row, thread: Thread):
        """One k-step of one head's weights, into shared memory; `step` is the same in all lanes."""
        if cutlass.const_expr(self.spec.skips):
            if (step >= self.spec.ring_steps) | self.spec.has_live(row, step) | (step < self.spec.always_steps):
                self._make(shared, index, step, row, thread)
        else:
            self._make(shared, index, step, row, thread)

    @cute.jit
    def _make(self, shared: Shared, index, step, row: Row, thread: Thread):
        at = Vectors(self.spec, index)
        for n in cutlass.range_constexpr(self.spec.token_tiles):
            pair = cute.make_rmem_tensor(cute.make_layout(2), Int32)
            if step < self.spec.ring_steps:
                pair[0], pair[1] = self._of_ring(shared, at, step, n, row, thread)
            else:
                pair[0], pair[1] = self._of_tokens(shared, at, step, n, thread)
            if 8 * n + thread.g < self.spec.problem.tokens:
                store_words(shared.raw + self._at(index, step, n, thread), [pair[0], pair[1]])

    def fragments(self, shared: Shared, index, row: Row, thread: Thread):
        """How to get a head's B-fragments: fragment(step, n) holds positions 2t, 2t + 1 of a k-step with token 8n + g.

        As `make` left them in shared memory, or for a CTA's only turn made in registers by every warp for itself: that
        is quicker than a barrier.
        """
        at = Vectors(self.spec, index)

        def fragment(step, n):
            if self.spec.config.turns > 1:
                return load_words(shared.raw + self._at(index, step, n, thread), 2)
            if step < self.spec.ring_steps:
                return self._of_ring(shared, at, step, n, row, thread)
            return self._of_tokens(shared, at, step, n, thread)

        return fragment
