"""precision="highest": an f32 state is read as two tf32 terms, which together hold all but its last two bits.

C is exact in tf32. Of what a term loses, 2^-22 of the value, nothing shows beside the sums' own rounding.
"""

from __future__ import annotations

from .primitives import as_float, bits, mma_tf32, to_tf32
from .state_tile import StateTile


class ExactStateTile(StateTile):
    """The phases that read a warp's tile of an f32 state, without loss."""

    def _multiply(self, chain, which, rows, operands):
        """Add two chunks of columns: `rows` are words of (row g, g + 8) of the first, then of the second."""
        high, low = split(rows)
        chain[which] = mma_tf32(chain[which], low, operands[0])
        chain[which] = mma_tf32(chain[which], high, operands[0])


def split(words):
    """f32 bits as two lists of tf32 bits: the rounded values, and what they lack."""
    high = [to_tf32(as_float(word)) for word in words]
    return high, [bits(as_float(word) - as_float(h)) for word, h in zip(words, high, strict=True)]
