"""What the ring adds to a tile of the state in a flush: (w_j x_j) (outer) B_j, in tf32 terms.

A k-step has eight positions; a lane has positions 2t and 2t + 1 of rows g and g + 8, and PART columns of B of its own.
"""

from __future__ import annotations

from .bundles import Shared, Thread
from .primitives import as_float, bits, high_half, low_half, mma_tf32, to_tf32
from .spec import StepSpec

PART = 4  # columns of a lane that a flush works on at a time


def x_fragment(words, spec: StepSpec):
    """x of a k-step as an A-fragment: (row g, row g + 8) of position 2t, then of 2t + 1; exact in tf32."""
    return [side(spec.io_kind, word) for side in (low_half, high_half) for word in words]


def positions_of(step, thread: Thread):
    """This lane's two positions of a k-step, which is a number or known at trace time."""
    return [8 * step + 2 * thread.t + half for half in range(2)]


class FlushTerms:
    """Weighted x of a k-step as A-fragments: a high term, and before it a low one where tf32's 11 bits are too few."""

    def __init__(self, spec: StepSpec, low: bool) -> None:
        self.spec = spec
        self.low = low

    def of_step(self, shared: Shared, at, words, positions):
        """The terms of one k-step, from its words of x and the positions they are of."""
        weights = [shared.vectors[at.weights + position] for position in positions]
        scaled = [v * weights[k // 2] for k, v in enumerate(x_fragment(words, self.spec))]
        high = [to_tf32(v) for v in scaled]
        if not self.low:
            return [high]
        return [[to_tf32(v - as_float(h)) for v, h in zip(scaled, high, strict=True)], high]

    def add(self, results, terms, b_words):
        """Add a k-step's terms to PART accumulators; `b_words` are PART columns of B of its two positions.

        Term by term over all accumulators: neighbouring MMAs do not wait for each other.
        """
        kind = self.spec.io_kind
        fragments = [
            [bits((low_half, high_half)[e % 2](kind, words[e // 2])) for words in b_words] for e in range(PART)
        ]
        for term in terms:
            results = [mma_tf32(results[e], term, fragments[e]) for e in range(PART)]
        return results


__all__ = ["PART", "FlushTerms", "positions_of", "x_fragment"]
