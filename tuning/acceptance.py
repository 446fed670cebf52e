"""Acceptance lengths -> what a serving step meets: the stationary mix of pnat, its flush share, exact quotas.

An acceptance length is the number of tokens a step keeps, the guaranteed one counted: 1..T. The cursor rule
(replayssm_cute.ring) makes pnat a Markov chain on 0..W; its stationary distribution is what rows of a busy batch look
like (reports/notes/acceptance_mix.md shows the maths). Rows get their pnat by quota, never by sampling: chance alone
moves the flush share of small batches by a third.
"""

from __future__ import annotations

import csv
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from replayssm_cute import ring

_GOLDEN, _SILVER = (math.sqrt(5) - 1) / 2, math.sqrt(2) - 1
_SUM_TOLERANCE = 0.02  # published shares are rounded; they are renormalized within this


@dataclass(frozen=True, slots=True)
class Acceptance:
    """A named distribution of acceptance lengths, before it is fitted to a T.

    Exactly one of the three is given.

    Attributes:
        name: as the plan calls it.
        source: where the numbers come from, in words.
        shares: P(length = 1), P(length = 2), ...; lengths beyond T are counted as T.
        mean: mean length; each draft is accepted with one chance a, given that the one before was:
            mean = 1 + a + ... + a^(T-1).
        uniform: every length of 1..T equally likely.
    """

    name: str
    source: str = ""
    shares: tuple[float, ...] | None = None
    mean: float | None = None
    uniform: bool = False

    def __post_init__(self) -> None:
        given = [n for n, v in (("shares", self.shares), ("mean", self.mean), ("uniform", self.uniform or None)) if v]
        if len(given) != 1:
            raise ValueError(
                f"acceptance {self.name!r}: got {' and '.join(given) or 'nothing'}, expected exactly one of "
                f"a histogram, a mean, or uniform"
            )
        if self.shares is not None:
            if any(not math.isfinite(s) or s < 0 for s in self.shares):
                raise ValueError(f"acceptance {self.name!r}: histogram has a negative or non-finite share")
            total = sum(self.shares)
            if total <= 0:
                raise ValueError(f"acceptance {self.name!r}: histogram sums to {total:g}, expected more than 0")
            if all(abs(total - unit) > _SUM_TOLERANCE * unit for unit in (1.0, 100.0)) and any(
                s != int(s) for s in self.shares
            ):
                raise ValueError(
                    f"acceptance {self.name!r}: histogram sums to {total:g}, expected about 1, about 100, or counts"
                )

    def lengths(self, tokens: int) -> tuple[float, ...]:
        """P(length = 1..T), summing to 1.

        Raises:
            ValueError: if a mean lies outside 1..T, or a histogram is shorter than T.
        """
        if tokens == 1:
            return (1.0,)  # the guaranteed token alone
        if self.uniform:
            return (1.0 / tokens,) * tokens
        if self.shares is not None:
            if len(self.shares) < tokens:
                raise ValueError(
                    f"acceptance {self.name!r}: histogram covers lengths 1..{len(self.shares)}, T is {tokens}; "
                    f"give a share for every length, 0 where it never happens"
                )
            total = sum(self.shares)
            head = [s / total for s in self.shares[: tokens - 1]]
            return (*head, sum(self.shares[tokens - 1 :]) / total)
        assert self.mean is not None  # by __post_init__
        return _constant_chance(self.mean, tokens, self.name)


def _constant_chance(mean: float, tokens: int, name: str) -> tuple[float, ...]:
    """The lengths whose every draft passes with the same chance, at the given mean."""
    if not 1.0 <= mean <= tokens:
        raise ValueError(f"acceptance {name!r}: mean {mean} is outside 1..{tokens} (T)")
    low, high = 0.0, 1.0
    for _ in range(80):
        middle = (low + high) / 2
        if sum(middle**k for k in range(tokens)) < mean:
            low = middle
        else:
            high = middle
    chance = (low + high) / 2
    return (*(chance**k * (1 - chance) for k in range(tokens - 1)), chance ** (tokens - 1))


def read_histogram(path: Path) -> tuple[float, ...]:
    """Shares of a CSV with two columns, length and share (or count); a header line is allowed.

    Raises:
        ValueError: for missing or repeated lengths, or rows that are not numbers, naming the line.
    """
    found: dict[int, float] = {}
    with path.open(newline="") as f:
        for number, row in enumerate(csv.reader(f), 1):
            if not row or not row[0].strip() or row[0].lstrip().startswith("#"):
                continue
            try:
                length, share = int(row[0]), float(row[1])
            except (ValueError, IndexError):
                if not found and number == 1:
                    continue  # the header
                raise ValueError(f"{path}:{number}: got {','.join(row)!r}, expected 'length,share'") from None
            if length in found or length < 1:
                raise ValueError(f"{path}:{number}: length {length} is repeated or below 1")
            found[length] = share
    if not found or sorted(found) != list(range(1, len(found) + 1)):
        raise ValueError(f"{path}: lengths {sorted(found)} are not 1..n without gaps")
    return tuple(found[k] for k in sorted(found))


@dataclass(frozen=True, slots=True)
class Mix:
    """What the rows of a busy batch look like.

    Attributes:
        pnat: share of rows with 0, 1, ..., W live rows.
        flush: share of rows whose step flushes.
        mean_length: mean acceptance length.
        tokens: share of rows with 1, ..., T new tokens; all have T where rows are not ragged.
    """

    pnat: tuple[float, ...]
    flush: float
    mean_length: float
    tokens: tuple[float, ...]

    @property
    def mean_live(self) -> float:
        """Mean live rows."""
        return sum(n * share for n, share in enumerate(self.pnat))

    @property
    def mean_tokens(self) -> float:
        """Mean new tokens of a row."""
        return sum(n * share for n, share in enumerate(self.tokens, 1))


def stationary(lengths: Sequence[float], window: int, tokens: Sequence[float] | None = None) -> Mix:
    """The stationary mix of pnat under the cursor rule, for P(length = 1..T) given.

    Solved as a linear system: the chain may be periodic (T = 1 walks a cycle), so powers of it need not converge.

    Args:
        lengths: P(length = 1..T) of a row with T tokens; a shorter row keeps no more than it has.
        tokens: of ragged rows, P(a row has 1..T new tokens), each step anew; None gives every row T.

    Raises:
        ValueError: if there are no lengths, or more than W, or other numbers of tokens.
    """
    return _stationary(tuple(lengths), window, None if tokens is None else tuple(tokens))


@functools.lru_cache(maxsize=256)
def _stationary(lengths: tuple[float, ...], window: int, tokens: tuple[float, ...] | None) -> Mix:
    most = len(lengths)
    if not 1 <= most <= window:
        raise ValueError(f"lengths: got {most} of them with W = {window}, expected 1..W")
    tokens = (*(0.0,) * (most - 1), 1.0) if tokens is None else tokens
    if len(tokens) != most:
        raise ValueError(f"tokens: got shares of 1..{len(tokens)} tokens a row, expected 1..{most}, as of the lengths")
    rows = [(n, share) for n, share in enumerate(tokens, 1) if share]
    size = window + 1
    chain = torch.zeros(size, size, dtype=torch.float64)
    for pnat in range(size):
        for new, of_rows in rows:
            base = 0 if ring.flushes(pnat, new, window) else pnat
            for accepted, share in enumerate(lengths, 1):
                chain[pnat, base + min(accepted, new)] += of_rows * share
    # pi (P - 1) = 0 and sum(pi) = 1; every path flushes and restarts alike, so pi is unique.
    system = torch.cat((chain.T - torch.eye(size, dtype=torch.float64), torch.ones(1, size, dtype=torch.float64)))
    right = torch.zeros(size + 1, dtype=torch.float64)
    right[-1] = 1.0
    solution = torch.linalg.lstsq(system, right[:, None], driver="gelsd").solution[:, 0].clamp_min(0)
    solution /= solution.sum()
    pnat_shares = tuple(solution.tolist())
    return Mix(
        pnat=pnat_shares,
        flush=sum(s * t for n, s in enumerate(pnat_shares) for new, t in rows if ring.flushes(n, new, window)),
        mean_length=sum(min(k, new) * s * t for k, s in enumerate(lengths, 1) for new, t in rows),
        tokens=tokens,
    )


def quotas(shares: Iterable[float], rows: int) -> list[int]:
    """How many of `rows` get each value: exact shares rounded by largest remainder; they sum to `rows`."""
    wanted = [s * rows for s in shares]
    counts = [math.floor(w + 1e-9) for w in wanted]
    rest = rows - sum(counts)
    order = sorted(range(len(wanted)), key=lambda i: (counts[i] - wanted[i], i))
    for i in order[:rest]:
        counts[i] += 1
    return counts


def deal(mix: Mix, sets: int, batch: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """pnat and new tokens of every row of `sets` slot sets of `batch` rows, each (sets, batch) int32.

    The quotas are met over all rows together. The sorted pnat are dealt round-robin, so that each set holds every value
    within one of its share. Numbers of tokens follow multiples of two irrational numbers, along a set and across them:
    these fill every set, and every stretch of rows with the same pnat, evenly. Inside a set the order is random.
    """
    pnat = _in_order(quotas(mix.pnat, sets * batch))
    tokens = torch.empty_like(pnat)
    places = torch.arange(len(pnat), dtype=torch.float64)  # in its set, and of its set
    evenly = (places.div(sets, rounding_mode="floor") * _GOLDEN + places.remainder(sets) * _SILVER).frac().argsort()
    tokens[evenly] = _in_order(quotas(mix.tokens, sets * batch)) + 1
    gen = torch.Generator().manual_seed(seed)
    order = torch.rand(sets, batch, generator=gen).argsort(1)
    # Sets with more flush rows must not all come first in the rotation.
    turns = torch.randperm(sets, generator=gen)
    dealt = [v.view(batch, sets).T.gather(1, order)[turns].to(torch.int32) for v in (pnat, tokens)]
    return dealt[0], dealt[1]


def _in_order(counts: Sequence[int]) -> torch.Tensor:
    """0, 1, 2, ..., each as often as its count says."""
    return torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
