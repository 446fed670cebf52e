"""The comparison that every kernel is held to: errors of one step against the float64 recurrence."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from . import checks, dtypes, packing, ring, rounding
from .calls import MAY_BE_WRITTEN, Call
from .problem import Problem
from .reference import checkpointing_ssu_reference


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of one step; NaN or Inf anywhere that matters counts as infinite.

    Attributes:
        out: ||y - ref|| / ||ref|| over the whole output.
        out_worst: the largest such ratio over (row, token, head).
        state: the same norm ratio over the slots that flushed (0 when none did), of 8-bit states row by row: the
            squares of each row are divided by those of the row first.
        copy: that of the read copy (0 without one).
        scale: largest relative error of the scales of rows that flushed (0 where there are none).
        dt: largest relative error of the appended dt rows.
        rings_exact: x and B rings equal bit for bit, everywhere.
        untouched_exact: states of slots that did not flush, other dt rows, cursors, every input, and the zeros of
            padding rows and of packed tokens that no row has are bitwise right.
    """

    out: float
    out_worst: float
    state: float
    dt: float
    rings_exact: bool
    untouched_exact: bool
    copy: float = 0.0
    scale: float = 0.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """What `Errors` may be at most."""

    out: float
    out_worst: float
    state: float
    dt: float = 1e-6
    copy: float = 0.0
    scale: float = 1e-5

    def violation(self, e: Errors) -> str | None:
        """The first bound that is broken, in words, or None."""
        for name in ("out", "out_worst", "state", "dt", "copy", "scale"):
            got, limit = getattr(e, name), getattr(self, name)
            if not got <= limit:
                return f"{name} error {got:.3g} exceeds {limit:.3g}"
        if not e.rings_exact:
            return "x or B ring rows differ from the reference's"
        if not e.untouched_exact:
            return "memory that the step must not touch, an input, or the zeros of padding or of a packed tail differ"
        return None


def bounds(problem: Problem) -> Bounds:
    """The bounds of a problem: rounding of its own output and state types plus the tf32 read of f32 state.

    bf16 outputs alone cost 1.65e-3 for random values (unit roundoff 2^-9, uniform mantissas), f16 2.1e-4. Stochastic
    rounding has twice the variance of rounding to nearest.
    """
    state = STATE_BOUNDS[problem.state_dtype] * (1.5 if problem.philox_rounds else 1.0)
    copy = STATE_BOUNDS[problem.copy_dtype] if problem.copy_dtype else 0.0
    # A flush into few bits adds the ring's terms with tf32's 11 bits.
    scale = 1e-3 if problem.state_dtype in dtypes.EIGHT_BIT else 1e-5
    # Rows of 8-bit test states have sizes of their own: fewer outputs decide, and their rounding averages out less.
    more = 1.25 if problem.scaled else 1.0
    if problem.io_dtype == "f16":
        return Bounds(out=more * 7e-4, out_worst=2e-3, state=state, copy=copy, scale=scale)
    return Bounds(out=more * 2e-3, out_worst=5e-3, state=state, copy=copy, scale=scale)


# Relative errors of a state by its rounding alone: unit roundoffs 2^-9, 2^-12 and 2^-4; of i8 the 254 steps of a row of
# normal values.
STATE_BOUNDS = {"f32": 1e-6, "bf16": 2.5e-3, "f16": 3.2e-4, "f8e4m3": 3.2e-2, "i8": 8e-3}


_EIGHT_BIT = tuple(dtypes.TORCH[kind] for kind in dtypes.EIGHT_BIT)


def _states(call: Call, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a call's state and read copy stand for, without scales."""
    scale = call.state_scale
    if call.state_copy is None:
        return rounding.decode(call.state, scale, dtype), None
    return call.state.to(dtype), rounding.decode(call.state_copy, scale, dtype)


def _scale_error(after: Call, exact: torch.Tensor, flushed: torch.Tensor) -> float:
    """Largest relative error of the scales of some slots, whose values were to be `exact`."""
    if after.state_scale is None or not flushed.numel():
        return 0.0
    kind = dtypes.NAME[(after.state if after.state_copy is None else after.state_copy).dtype]
    expected = rounding.row_scales(kind, exact[flushed]).double()
    worst = float(((after.state_scale[flushed].double() - expected).abs() / expected).max())
    return worst if math.isfinite(worst) else math.inf


def _ratio(
    got: torch.Tensor,
    ref: torch.Tensor,
    dims: tuple[int, ...] | None = None,
    normal: tuple[int, ...] | None = None,
) -> float:
    """||got - ref|| / ||ref||, the worst one over `dims`; with `normal`, of values that have norm 1 over these."""
    difference = (got.double() - ref.double()).square()
    reference = ref.double().square()
    if normal is not None:
        size = reference.sum(normal, keepdim=True)
        size = torch.where(size == 0, 1.0, size)
        difference, reference = difference / size, reference / size
    if dims is None:
        num, den = difference.sum(), reference.sum()
    else:
        num, den = difference.sum(dims), reference.sum(dims)
    ratio = torch.where(num == 0, torch.zeros_like(num), (num / den).sqrt())
    worst = float(ratio.max()) if ratio.numel() else 0.0
    return worst if math.isfinite(worst) else math.inf


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    views = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = views[a.element_size()]
    return bool(torch.equal(a.contiguous().view(kind), b.contiguous().view(kind)))


def _read_only(call: Call) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in call.kwargs().items():
        if isinstance(value, torch.Tensor) and name not in MAY_BE_WRITTEN:
            yield name, value


def _live_tokens(call: Call, live: torch.Tensor) -> torch.Tensor:
    """(batch, T) bool, of a ragged call (1, total): the tokens of rows that are no padding; the others give zeros."""
    if call.cu_seqlens is None:
        return live[:, None].expand(call.batch, call.tokens)
    place, has = packing.places(call.cu_seqlens, call.tokens, call.x.shape[1])
    found = torch.zeros(call.x.shape[:2], dtype=torch.bool, device=call.x.device)
    found[0, place[live][has[live]]] = True
    return found


def errors(before: Call, after: Call) -> Errors:
    """Errors of `after`, the call's tensors after a step under test, given `before`, a clone from before it."""
    ref = before.clone()
    ref.state, ref.state_copy, ref.state_scale, ref.rand_seed = *_states(before, torch.float64), None, None
    ref.out = torch.empty(ref.out.shape, dtype=torch.float64, device=ref.out.device)
    ref.dt_cache = ref.dt_cache.double()
    checkpointing_ssu_reference(**ref.kwargs(), compute_dtype=torch.float64)

    device = before.x.device
    slots = before.state_batch_indices
    slots = torch.arange(before.batch, device=device) if slots is None else slots
    live = checks.live_rows(slots, before.pad_slot_id)
    index = slots[live].long()
    window, tokens = before.x_cache.shape[2] - before.tokens, before.tokens
    pnat, lengths = before.prev_num_accepted_tokens[index], before.lengths()[live]
    flushed = index[ring.flushes(pnat, lengths, window)]
    kept = torch.ones(before.state.shape[0], dtype=torch.bool, device=device)
    kept[flushed] = False

    appended = torch.zeros(before.dt_cache.shape[0], before.dt_cache.shape[2], dtype=torch.bool, device=device)
    start = before.ring_start[index]
    for t in range(tokens):
        row = ((start + pnat + t) % ring.ring_rows(window, tokens)).long()
        appended[index[t < lengths], row[t < lengths]] = True
    dt_new, dt_ref = after.dt_cache.transpose(1, 2)[appended], ref.dt_cache.transpose(1, 2)[appended]
    dt_error = (
        ((dt_new.double() - dt_ref).abs() / dt_ref.abs().clamp_min(1e-30)).max() if dt_ref.numel() else torch.zeros(())
    )
    live_tokens = _live_tokens(before, live)
    state, copy = _states(after, torch.float64)
    by_row = (-1,) if before.state.dtype in _EIGHT_BIT else None
    untouched = (
        all(_same_bits(getattr(after, n)[kept], getattr(before, n)[kept]) for n in before.written() if "state" in n)
        and _same_bits(after.dt_cache.transpose(1, 2)[~appended], before.dt_cache.transpose(1, 2)[~appended])
        and not bool(after.out[~live_tokens].any())
        and all(_same_bits(getattr(after, name), value) for name, value in _read_only(before))
    )
    dt_value = float(dt_error)
    return Errors(
        out=_ratio(after.out[live_tokens], ref.out[live_tokens]),
        out_worst=_ratio(after.out[live_tokens], ref.out[live_tokens], (-1,)),
        state=_ratio(state[flushed], ref.state[flushed], normal=by_row),
        copy=0.0 if copy is None else _ratio(copy[flushed], ref.state[flushed], normal=(-1,)),
        scale=_scale_error(after, ref.state, flushed),
        dt=dt_value if math.isfinite(dt_value) else math.inf,
        rings_exact=_same_bits(after.x_cache, ref.x_cache) and _same_bits(after.B_cache, ref.B_cache),
        untouched_exact=untouched,
    )


LEAST_CODES = 0.9  # of those that a right kernel shares with the reference; with other random bits two thirds are


def same_codes(before: Call, after: Call) -> float:
    """Of what rows that flushed left to be read, the share that has the bits of the reference in f32 (1 without any).

    It tells which random bits a stochastic rounding took, where `Errors` cannot. A right kernel's sums differ from the
    reference's in their last bits, which moves a few values over the edge between two codes.
    """
    expected = before.clone()
    checkpointing_ssu_reference(**expected.kwargs())
    slots = before.state_batch_indices
    slots = torch.arange(before.batch, device=before.x.device) if slots is None else slots
    live = checks.live_rows(slots, before.pad_slot_id)
    index, window = slots[live].long(), before.x_cache.shape[2] - before.tokens
    flushed = index[ring.flushes(before.prev_num_accepted_tokens[index], before.lengths()[live], window)]
    if not flushed.numel():
        return 1.0
    got, want = (codes(call)[flushed] for call in (after, expected))
    return float((got == want).double().mean())


def codes(call: Call) -> torch.Tensor:
    """The bits of what steps read: of the read copy, or of the state."""
    t = call.state if call.state_copy is None else call.state_copy
    return t.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])
