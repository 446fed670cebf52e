"""B·C of every position with every new token, once per CTA: all its heads share a group.

Work is cut into 16-position tiles (M of the MMA) and, where warps are left over, into slices of N. Each part
goes to one warp; slices of the same tile are added when they are read back from shared memory.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from .primitives import load_words, mma_16bit
from .spec import StepSpec


class Products:
    """The B·C phase of a step kernel."""

    def __init__(self, spec: StepSpec) -> None:
        self.spec = spec

    def _column(self, warp: Int32, step: int, t: Int32) -> Int32:
        """First of the 8 columns that a lane reads in the `step`-th 32-column unit of its warp's slice.

        Warps left over read what the last slice reads: within the row, and from L1.
        """
        shared = self.spec.shared
        mine = cutlass.min(warp // shared.tile_warps, shared.slices - 1)
        return (mine + step * shared.slices) * 32 + 8 * t

    def load_new(self, b, c, row, group, warp, g, t):
        """This warp's operands that need no slot: C of the tokens, B of the new tokens, as words."""
        spec = self.spec
        columns = [self._column(warp, k, t) for k in range(spec.units // spec.shared.slices)]

        def words(tensor):
            return [
                [
                    load_words(spec.pointer(tensor, row, (spec.token(g + 8 * n), group), column, 8), 4)
                    for n in range(spec.token_tiles)
                ]
                for column in columns
            ]

        return words(c), words(b)

    @cute.jit
    def partial_sums(self, b_cache, new_words, products, slot, group, start, pnat, warp, g, t):
        """Multiply this warp's tile and slice and leave the sums, (position, token), in its part of `products`."""
        c_words, b_words = new_words
        slice_index = warp // self.spec.shared.tile_warps
        for tile in cutlass.range_constexpr(self.spec.shared.tiles):
            if (warp % self.spec.shared.tile_warps == tile % self.spec.shared.tile_warps) & (
                slice_index < self.spec.shared.slices
            ):
                sums = [[Float32(0.0)] * 4 for _ in range(self.spec.token_tiles)]
                for k in cutlass.range_constexpr(self.spec.units // self.spec.shared.slices):
                    column = self._column(warp, k, t)
                    halves = []
                    for unit in cutlass.range_constexpr(2 * tile, 2 * tile + 2):
                        if cutlass.const_expr(unit < self.spec.ring_steps):
                            ring = self.spec.read_row(start, pnat, g + 8 * unit)
                            halves.append(load_words(self.spec.pointer(b_cache, slot, (group, ring), column, 8), 4))
                        elif cutlass.const_expr(unit < self.spec.steps):
                            halves.append(b_words[k][unit - self.spec.ring_steps])
                        else:
                            halves.append([Int32(0)] * 4)
                    for n in cutlass.range_constexpr(self.spec.token_tiles):
                        for q in cutlass.range_constexpr(2):
                            a_frag = tuple(halves[half][2 * q + e] for e in range(2) for half in range(2))
                            b_frag = (c_words[k][n][2 * q], c_words[k][n][2 * q + 1])
                            sums[n] = mma_16bit(self.spec.io_kind, sums[n], a_frag, b_frag)
                base = slice_index * self.spec.shared.product_floats
                for n in cutlass.range_constexpr(self.spec.token_tiles):
                    for half in cutlass.range_constexpr(2):
                        if cutlass.const_expr(2 * tile + half < self.spec.steps):
                            at = base + (16 * tile + 8 * half + g) * self.spec.shared.product_stride + 8 * n + 2 * t
                            products[at] = sums[n][2 * half]
                            products[at + 1] = sums[n][2 * half + 1]

    def fragment(self, products, step, n, g, t):
        """B·C as a B-fragment: positions t and t + 4 of k-step `step` with token 8n + g."""
        shared = self.spec.shared
        pair = []
        for half in range(2):
            at = (8 * step + 4 * half + t) * shared.product_stride + 8 * n + g
            value = products[at]
            for part in range(1, shared.slices):
                value = value + products[at + part * shared.product_floats]
            pair.append(value)
        return pair
