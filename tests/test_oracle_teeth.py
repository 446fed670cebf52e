"""The comparison bites: wrong steps are all caught by the very bounds that kernels are held to.

`step` below is the operation once more, in torch, with a switch for each way to get it wrong. With no fault
it must pass for every dtype combination; with any fault it must fail, both on a mixed batch and (where the fault
concerns only some rows) when a single row of many is wrong.
"""

from __future__ import annotations

import dataclasses
import inspect
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from replayssm_cute import compare
from replayssm_cute.calls import Call, random_call
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

BASE = Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=6, has_z=True)

# A fault's name and what it does wrong; `step` asks for it by name.
FAULTS = {
    "flush-never": "the checkpoint is never written",
    "flush-always": "the checkpoint is written on every step",
    "flush-early": "flushes when pnat + T >= W",
    "flush-late": "flushes when pnat + T > W + 1",
    "flush-by-rows": "flushes when pnat + T > R",
    "flush-by-live": "flushes when pnat > W - 1, forgetting the new tokens",
    "flush-folds-new": "the new tokens are folded into the checkpoint",
    "flush-keeps-first-row": "the oldest live row is left out of the checkpoint",
    "flush-no-decay": "the checkpoint is not decayed before rows are added",
    "flush-truncates": "the checkpoint is rounded towards zero",
    "flush-tf32": "the checkpoint passes through tf32",
    "flush-bf16-pair": "the checkpoint passes through a bf16 pair (hi + lo)",
    "no-decay-live": "live rows do not decay the state",
    "no-decay-new": "new tokens do not decay the state",
    "decay-late": "a row's own decay is applied after its input instead of before",
    "ring-row-plus-one": "live rows are read one row late",
    "ring-row-minus-one": "live rows are read one row early",
    "ring-no-wrap": "live rows past the end of the ring are clamped to its last row",
    "live-one-short": "the newest live row is skipped",
    "live-all-window": "rows beyond pnat are replayed too",
    "dead-by-product": "dead rows are masked by multiplying with zero",
    "append-at-start": "new rows go to ring_start + t",
    "append-at-zero": "new rows go to rows t",
    "append-off-by-one": "new rows go one row further",
    "append-no-wrap": "new rows past the end of the ring are dropped",
    "append-last-lost": "the last token is not appended",
    "append-raw-dt": "the raw dt is appended instead of the processed one",
    "append-x-rounded": "x passes through a coarser type on its way to the ring",
    "no-D": "D is left out",
    "D-other-head": "D of the next head",
    "no-z": "the gate is left out",
    "z-sigmoid": "the gate is sigmoid(z) instead of z * sigmoid(z)",
    "z-before-D": "D is added after the gate",
    "no-softplus": "softplus is left out",
    "no-bias": "dt_bias is left out",
    "bias-after-softplus": "dt_bias is added after softplus",
    "softplus-overflow": "softplus as log(1 + exp(dt)) without a guard",
    "group-modulo": "head h reads group h % G",
    "not-causal": "a token sees the next one",
    "own-token-missing": "y_t is read before token t enters",
    "output-from-checkpoint": "outputs start from the checkpoint, not from the logical state",
    "slot-is-row": "the row number is used as slot",
    "padding-computed": "padding rows are computed like others",
    "padding-left": "padding rows leave the output as it was",
    "padding-poisons": "padding rows write their slot",
    "cursors-moved": "the step commits its own cursors",
    "state-read-bf16": "the state is read through bf16",
    "out-truncated": "outputs are rounded towards zero",
    "one-output": "one element of one head's output is off by a hundredth of that head's norm",
    "one-nan": "one output is NaN",
    "one-state": "one element of a kept checkpoint changes by one unit in the last place",
    "stray-write": "one ring element of a slot that no row names is overwritten",
}
# What can go wrong in ragged calls alone.
RAGGED_FAULTS = {
    "flush-by-max": "flushes when pnat + max_seqlen > W",
    "empty-flushes": "a row of length 0 flushes when its ring is full",
    "append-to-max": "max_seqlen rows are appended, whatever the row's length",
    "empty-appends": "a row of length 0 appends the token that follows",
    "length-minus-one": "the last token of a row is left out",
    "max-apart": "row i's tokens begin at i * max_seqlen",
    "tail-left": "tokens that no row has keep the output they had",
    "tail-computed": "tokens that no row has are computed like others",
    "cursors-by-max": "new rows go where those of a full window would end",
}
# Faults that are none for some types: (state dtypes, io dtypes) in which they are one. The f16 output bound leaves
# room for a tf32 read of the state, which is as coarse as a truncated f16.
VISIBLE = {
    "flush-tf32": (("f32",), ("bf16", "f16")),
    "flush-bf16-pair": (("f32",), ("bf16", "f16")),
    "state-read-bf16": (("f32", "f16"), ("bf16", "f16")),
    "flush-truncates": (("bf16", "f16"), ("bf16", "f16")),
    "out-truncated": (("f32", "bf16", "f16"), ("bf16",)),
}
NEEDS_LARGE_DT = {"softplus-overflow"}
DTYPES = (("f32", "bf16"), ("bf16", "bf16"), ("f16", "f16"))
CASES = [
    (fault, state, io)
    for fault in FAULTS
    for state, io in DTYPES
    if fault not in VISIBLE or (state in VISIBLE[fault][0] and io in VISIBLE[fault][1])
]
RAGGED_CASES = [
    *(case for case in CASES if case[1:] == ("f32", "bf16")),
    *((fault, state, io) for fault in RAGGED_FAULTS for state, io in DTYPES),
]


def _truncate(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round towards zero: what dropping mantissa bits does."""
    rounded = t.to(dtype)
    too_far = rounded.float().abs() > t.float().abs()
    towards_zero = torch.nextafter(rounded, torch.zeros_like(rounded))
    return torch.where(too_far, towards_zero, rounded)


def _tf32(t: torch.Tensor) -> torch.Tensor:
    return (t.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)


def _pair(t: torch.Tensor) -> torch.Tensor:
    high = t.bfloat16().float()
    return high + (t - high).bfloat16().float()


def step(call: Call, fault: str | None = None) -> None:
    """One step in place, row by row in float32, wrong in the way that `fault` names."""
    most, H = call.tokens, call.x.shape[2]
    begins = None if call.cu_seqlens is None else call.cu_seqlens.tolist()
    G, R = call.B_cache.shape[1], call.B_cache.shape[2]
    W = R - most
    lengths = call.lengths().tolist()
    marked = None
    heads = torch.arange(H)
    group = heads % G if fault == "group-modulo" else heads // (H // G)
    rate = call.A[:, 0, 0].float()
    skip = None if call.D is None else call.D[:, :1].float()
    if skip is not None and fault == "D-other-head":
        skip = skip.roll(-1, 0)
    bias = torch.zeros(H) if call.dt_bias is None or fault == "no-bias" else call.dt_bias[:, 0].float()

    def softplus(v: torch.Tensor) -> torch.Tensor:
        if not call.dt_softplus or fault == "no-softplus":
            return v
        return torch.log(1 + torch.exp(v)) if fault == "softplus-overflow" else F.softplus(v)

    def advance(S: torch.Tensor, dt: torch.Tensor, x: torch.Tensor, B: torch.Tensor, live: bool) -> torch.Tensor:
        decay = torch.exp(rate * dt)[:, None, None]
        if fault == ("no-decay-live" if live else "no-decay-new"):
            decay = torch.ones_like(decay)
        term = (dt[:, None] * x)[..., None] * B[group][:, None]
        return decay * (S + term) if fault == "decay-late" else decay * S + term

    for row, T in enumerate(lengths):
        if begins is None:
            at = [(row, t) for t in range(most)]
        else:
            first = row * most if fault == "max-apart" else begins[row]
            at = [(0, min(first + t, call.x.shape[1] - 1)) for t in range(most)]
        slot = row if call.state_batch_indices is None else int(call.state_batch_indices[row])
        if slot < 0 or slot == call.pad_slot_id:
            if fault == "padding-left":
                continue
            for i in at[:T]:
                call.out[i] = 0
                if fault == "padding-computed":
                    call.out[i] = call.x[i]
            if fault == "padding-poisons":
                call.x_cache[max(slot, 0)] = 0
            continue
        if fault == "slot-is-row":
            slot = row
        if fault == "length-minus-one":
            T = max(T - 1, 0)
        start, pnat = int(call.ring_start[slot]), int(call.prev_num_accepted_tokens[slot])
        shift = {"ring-row-plus-one": 1, "ring-row-minus-one": -1}.get(fault or "", 0)
        reads = W if fault in ("live-all-window", "dead-by-product") else pnat - (fault == "live-one-short")
        S = call.state[slot].float()
        if fault == "state-read-bf16":
            S = S.bfloat16().float()
        for j in range(reads):
            r = min(start + j, R - 1) if fault == "ring-no-wrap" else (start + j + shift) % R
            dt, x, B = call.dt_cache[slot, :, r], call.x_cache[slot, :, r].float(), call.B_cache[slot, :, r].float()
            if fault == "dead-by-product" and j >= pnat:
                dt = dt * 0.0
            S = advance(S, dt, x, B, live=True)
            if fault == "flush-keeps-first-row" and j == 0:
                missing = (dt[:, None] * x)[..., None] * B[group][:, None]
            elif fault == "flush-keeps-first-row":
                missing = torch.exp(rate * dt)[:, None, None] * missing
        logical = S
        if fault == "output-from-checkpoint":
            S = call.state[slot].float()
        flush = {
            "flush-never": False,
            "flush-always": True,
            "flush-early": pnat + T >= W,
            "flush-late": pnat + T > W + 1,
            "flush-by-rows": pnat + T > R,
            "flush-by-live": pnat > W - 1,
            "flush-by-max": pnat + most > W,
            "empty-flushes": pnat + (T or most) > W,
        }.get(fault or "", pnat + T > W)

        new_dt = []
        for t, i in enumerate(at):
            raw = call.dt[i][:, 0].float()
            dt = softplus(raw) + bias if fault == "bias-after-softplus" else softplus(raw + bias)
            new_dt.append(raw if fault == "append-raw-dt" else dt)
            if t >= T:
                continue
            x = call.x[i].float()
            before = S
            S = advance(S, dt, x, call.B[i].float(), live=False)
            seen = before if fault == "own-token-missing" else S
            if fault == "not-causal" and t + 1 < T:
                after = at[t + 1]
                seen = S + (dt[:, None] * call.x[after].float())[..., None] * call.B[after].float()[group][:, None]
            y = (seen @ call.C[i].float()[group][..., None])[..., 0]
            through = 0.0 if skip is None or fault == "no-D" else skip * x
            if fault != "z-before-D":
                y = y + through
            if call.z is not None and fault != "no-z":
                z = call.z[i].float()
                y = y * torch.sigmoid(z) * (1.0 if fault == "z-sigmoid" else z)
            if fault == "z-before-D":
                y = y + through
            call.out[i] = _truncate(y, call.out.dtype) if fault == "out-truncated" else y.to(call.out.dtype)
            if row >= 3 and marked is None and t + 1 == T:
                marked = i

        if flush:
            value = S if fault == "flush-folds-new" else logical
            if fault == "flush-keeps-first-row" and reads:
                value = value - missing
            if fault == "flush-no-decay":
                decay = torch.exp(rate * call.dt_cache[slot, :, [(start + j) % R for j in range(pnat)]].sum(-1))
                value = value + (1 - decay)[:, None, None] * call.state[slot].float()
            if fault == "flush-tf32":
                value = _tf32(value)
            if fault == "flush-bf16-pair":
                value = _pair(value)
            rounded = _truncate(value, call.state.dtype) if fault == "flush-truncates" else value.to(call.state.dtype)
            call.state[slot] = rounded
        appended = most if fault == "append-to-max" else T - (fault == "append-last-lost" and T > 0)
        if fault == "empty-appends" and T == 0:
            appended = 1
        for t, i in enumerate(at[:appended]):
            position = start + pnat + t + (most - T if fault == "cursors-by-max" else 0)
            if fault == "append-at-start":
                position = start + t
            elif fault == "append-at-zero":
                position = t
            elif fault == "append-off-by-one":
                position += 1
            if fault == "append-no-wrap" and position >= R:
                continue
            r = position % R
            x = call.x[i]
            call.x_cache[slot, :, r] = x.to(torch.float8_e4m3fn).to(x.dtype) if fault == "append-x-rounded" else x
            call.B_cache[slot, :, r] = call.B[i]
            call.dt_cache[slot, :, r] = new_dt[t]
        if fault == "cursors-moved":
            call.prev_num_accepted_tokens[slot] += T

    if begins is not None and fault != "tail-left":
        call.out[0, begins[-1] :] = call.x[0, begins[-1] :] if fault == "tail-computed" else 0
    if fault == "one-output":
        assert marked is not None
        y = call.out[marked][-1].float()
        y[5] += y.norm() / 100
        call.out[marked][-1] = y.to(call.out.dtype)
    if fault == "one-nan":
        assert marked is not None
        call.out[marked][-1, 7] = float("nan")
    slots = set(range(call.state.shape[0]))
    named = set(call.state_batch_indices.tolist()) if call.state_batch_indices is not None else set()
    if fault == "one-state":
        live = sorted(s for s in named if s >= 0 and s != call.pad_slot_id)
        kept = next(s for s in live if int(call.prev_num_accepted_tokens[s]) + most <= W)
        element = call.state[kept, 0, 0, :1]
        call.state[kept, 0, 0, 0] = torch.nextafter(element, torch.full_like(element, torch.inf))[0]
    if fault == "stray-write":
        call.B_cache[min(slots - named), 0, 0, 0] = 1.0


def mixed(problem: Problem, *, seed: int = 0, dead: float | None = float("nan"), large_dt: bool = False) -> Call:
    """Every pnat in 0..W twice at random ring positions, two padding rows, a padding slot that exists.

    Of a ragged problem every pnat at every length, in no order of rows, and tokens that no row has.
    """
    counts, lengths = [*range(problem.window + 1)] * 2, None
    if problem.ragged:
        cases = [(n, t) for n in range(problem.window + 1) for t in range(problem.tokens + 1)]
        random.Random(seed).shuffle(cases)
        counts = [n for n, _ in cases]
        lengths = [*(t for _, t in cases), problem.tokens, 1]
    counts = [*counts, 0, 0]
    batch = len(counts)
    call = random_call(
        problem,
        batch,
        slots=batch + 4,
        pnat=counts,
        padding=(batch - 2, batch - 1),
        pad_slot_id=1,
        dead=dead,
        seed=seed,
        lengths=lengths,
        tail=2 if problem.ragged else 0,
    )
    if large_dt:
        call.dt = torch.full(call.dt.shape[:3], 100.0).to(call.dt.dtype)[..., None].expand(call.dt.shape)
    return call


def violation(problem: Problem, call: Call, run: Callable[[Call], object]) -> str | None:
    after = call.clone()
    run(after)
    return compare.bounds(problem).violation(compare.errors(call, after))


@pytest.mark.parametrize("dt", ["io", "f32"])
@pytest.mark.parametrize("io", ["bf16", "f16"])
@pytest.mark.parametrize("state", ["f32", "bf16", "f16"])
def test_the_right_step_passes_for_every_dtype(state: str, io: str, dt: str) -> None:
    """Both the step of this file without a fault and the float32 reference are within bounds."""
    problem = dataclasses.replace(BASE, state_dtype=state, io_dtype=io, dt_dtype=io if dt == "io" else dt)
    for seed in range(3):
        assert violation(problem, mixed(problem, seed=seed), step) is None
        assert (
            violation(problem, mixed(problem, seed=seed), lambda c: checkpointing_ssu_reference(**c.kwargs())) is None
        )


@pytest.mark.parametrize("tokens,window", [(1, 1), (1, 16), (4, 16), (8, 8)])
@pytest.mark.parametrize("option", ["no z", "no D", "no bias", "no softplus"])
def test_the_right_step_passes_for_every_option(tokens: int, window: int, option: str) -> None:
    changes = {
        "no z": {"has_z": False},
        "no D": {"d_dtype": None},
        "no bias": {"dt_bias_dtype": None},
        "no softplus": {"dt_softplus": False},
    }
    problem = dataclasses.replace(BASE, tokens=tokens, window=window, **changes[option])  # type: ignore[arg-type]
    assert violation(problem, mixed(problem), step) is None


@pytest.mark.parametrize("fault,state,io", CASES)
def test_every_wrong_step_is_caught(fault: str, state: str, io: str) -> None:
    problem = dataclasses.replace(BASE, state_dtype=state, io_dtype=io, dt_dtype=io)
    call = mixed(problem, large_dt=fault in NEEDS_LARGE_DT)
    found = violation(problem, call, lambda c: step(c, fault))
    assert found is not None, f"not caught: {FAULTS[fault]}"


@pytest.mark.parametrize("io", ["bf16", "f16"])
@pytest.mark.parametrize("state", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("tokens,window", [(1, 1), (2, 6), (4, 4), (3, 16)])
def test_the_right_ragged_step_passes(state: str, io: str, tokens: int, window: int) -> None:
    problem = dataclasses.replace(
        BASE, ragged=True, state_dtype=state, io_dtype=io, dt_dtype=io, tokens=tokens, window=window
    )
    for right in (step, lambda c: checkpointing_ssu_reference(**c.kwargs())):
        assert violation(problem, mixed(problem, seed=tokens), right) is None


@pytest.mark.parametrize("fault,state,io", RAGGED_CASES)
def test_every_wrong_ragged_step_is_caught(fault: str, state: str, io: str) -> None:
    """The faults of dense calls too."""
    problem = dataclasses.replace(BASE, ragged=True, state_dtype=state, io_dtype=io, dt_dtype=io)
    call = mixed(problem, large_dt=fault in NEEDS_LARGE_DT)
    assert violation(problem, call, step) is None
    found = violation(problem, call, lambda c: step(c, fault))
    assert found is not None, f"not caught: {(FAULTS | RAGGED_FAULTS)[fault]}"


@pytest.mark.parametrize("fault", RAGGED_FAULTS)
def test_a_wrong_ragged_step_is_caught_when_dead_rows_and_tokens_look_harmless(fault: str) -> None:
    problem = dataclasses.replace(BASE, ragged=True)
    call = mixed(problem, dead=None)
    assert violation(problem, call, step) is None
    assert violation(problem, call, lambda c: step(c, fault)) is not None


@pytest.mark.parametrize("fault", ["live-all-window", "live-one-short", "ring-no-wrap", "flush-late", "append-no-wrap"])
def test_a_wrong_step_is_caught_when_dead_rows_look_harmless(fault: str) -> None:
    """With plausible values instead of NaN in dead rows the numbers alone must give a fault away."""
    call = mixed(BASE, dead=None)
    assert violation(BASE, call, step) is None
    assert violation(BASE, call, lambda c: step(c, fault)) is not None


@pytest.mark.parametrize("fault", ["no-decay-live", "ring-row-plus-one", "no-D", "group-modulo", "no-bias"])
def test_one_wrong_row_among_many_is_caught(fault: str) -> None:
    """A fault in one row of 64 hardly shows in the norm of the whole output; the worst row shows it."""
    problem = dataclasses.replace(BASE, tokens=1, window=4, has_z=False)
    call = random_call(problem, 64, pnat=3, seed=1)
    after, wrong = call.clone(), call.clone()
    step(after)
    assert compare.bounds(problem).violation(compare.errors(call, after)) is None
    step(wrong, fault)
    after.out[17] = wrong.out[17]
    assert compare.bounds(problem).violation(compare.errors(call, after)) is not None


def test_every_fault_is_one_that_step_knows() -> None:
    """A misspelt name would make a fault a right step; each name must occur in the code of `step`."""
    source = inspect.getsource(step)
    assert [fault for fault in (*FAULTS, *RAGGED_FAULTS) if f'"{fault}"' not in source] == []
