"""The reference against an oracle written separately, and the properties that make speculative decoding right."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from oracle import History, as_array, oracle_step

from replayssm_cute import ring
from replayssm_cute.calls import Call, random_call
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

SMALL = Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=5)
BF16 = torch.bfloat16

PROBLEMS = [
    SMALL,
    dataclasses.replace(SMALL, tokens=1, window=1),
    dataclasses.replace(SMALL, tokens=1, window=4, has_z=True),
    dataclasses.replace(SMALL, tokens=4, window=4, has_z=True, d_dtype=None),
    dataclasses.replace(SMALL, tokens=3, window=7, dt_bias_dtype=None),
    dataclasses.replace(SMALL, tokens=3, window=7, dt_softplus=False),
    dataclasses.replace(SMALL, dt_softplus=False, dt_bias_dtype=None, d_dtype=None),
    dataclasses.replace(SMALL, index_dtype="i64", groups=4, state_dtype="bf16"),
    dataclasses.replace(SMALL, index_dtype=None, groups=1, state_dtype="f16"),
    dataclasses.replace(SMALL, io_dtype="f16", dt_dtype="f32", a_dtype="bf16", d_dtype="f32", dt_bias_dtype="f32"),
    dataclasses.replace(SMALL, heads=3, head_dim=80, d_state=128, groups=3, window=16, tokens=4),
    dataclasses.replace(SMALL, heads=2, groups=1, window=64, tokens=32),
    *(dataclasses.replace(SMALL, ragged=True, tokens=t, window=w, has_z=t > 1) for t, w in ((1, 1), (2, 5), (4, 4))),
    dataclasses.replace(SMALL, ragged=True, tokens=3, window=16, index_dtype=None, d_dtype=None, state_dtype="bf16"),
    dataclasses.replace(SMALL, ragged=True, tokens=3, window=7, dt_softplus=False, dt_bias_dtype=None, dt_dtype="f32"),
    dataclasses.replace(SMALL, ragged=True, heads=2, groups=2, window=40, tokens=32, has_z=True),
]


def all_pnat(problem: Problem, **kwargs: object) -> Call:
    """One row for each pnat in 0..W: flushing and not, wrapping and not; of a ragged problem, at random lengths."""
    count = problem.window + 1
    return random_call(problem, count, pnat=range(count), tail=3 if problem.ragged else 0, **kwargs)  # type: ignore[arg-type]


def widen(call: Call) -> Call:
    """Float64 state, dt ring and output, so that nothing but the arithmetic can differ."""
    call.state, call.dt_cache, call.out = call.state.double(), call.dt_cache.double(), call.out.double()
    return call


def run(call: Call, dtype: torch.dtype = torch.float64) -> Call:
    checkpointing_ssu_reference(**call.kwargs(), compute_dtype=dtype)
    return call


def close(got: torch.Tensor, expected: np.ndarray, rtol: float, what: str) -> None:
    np.testing.assert_allclose(as_array(got), expected, rtol=rtol, atol=rtol, equal_nan=True, err_msg=what)


@pytest.mark.parametrize(
    "problem", PROBLEMS, ids=lambda p: f"{p.label()} z{p.has_z:d} sp{p.dt_softplus:d} {p.index_dtype} {p.d_dtype}"
)
def test_float64_reference_is_the_oracle(problem: Problem) -> None:
    """Equal to the oracle in every tensor that a step writes, in float64."""
    call = widen(all_pnat(problem, seed=1))
    expected = oracle_step(call)
    assert 0 < len(expected.flushed) < problem.window + 1 or problem.window == problem.tokens, "a mix of both kinds"
    run(call)
    for name in ("out", "state", "x_cache", "B_cache", "dt_cache"):
        close(getattr(call, name), getattr(expected, name), 1e-9, name)


@pytest.mark.parametrize("problem", [*PROBLEMS[:5], *PROBLEMS[-6:-3]], ids=lambda p: p.label())
def test_float32_reference_is_close_to_the_oracle(problem: Problem) -> None:
    """The float32 run, in the types the kernels write, agrees to the rounding of those types."""
    call = all_pnat(problem, seed=2)
    expected = oracle_step(call)
    run(call, torch.float32)
    close(call.out, expected.out, 2**-7, "out (bf16)")
    close(call.state, expected.state, 1e-5, "state (f32)")
    close(call.dt_cache, expected.dt_cache, 1e-6, "dt_cache")
    close(call.x_cache, expected.x_cache, 0, "x_cache")
    close(call.B_cache, expected.B_cache, 0, "B_cache")


RAGGED = dataclasses.replace(SMALL, ragged=True, tokens=3, has_z=True)
CACHES = ("state", "x_cache", "B_cache", "dt_cache")


def test_every_cursor_position_and_length() -> None:
    """Every (ring_start, pnat, T_i) in one ragged batch: its own length decides whether a row flushes."""
    cases = [(s, n, t) for s in range(RAGGED.ring_rows) for n in range(RAGGED.window + 1) for t in range(4)]
    starts, counts, lengths = zip(*cases, strict=True)
    call = widen(random_call(RAGGED, len(cases), ring_start=starts, pnat=counts, lengths=lengths, tail=2, seed=13))
    expected = oracle_step(call)
    assert len(expected.flushed) == sum(n + t > RAGGED.window for _, n, t in cases)
    run(call)
    for name in ("out", *CACHES):
        close(getattr(call, name), getattr(expected, name), 1e-9, name)
    assert not call.out[:, -2:].any()


def test_rows_of_no_tokens_change_no_bit() -> None:
    """Whatever their cursors say, a full ring too; and a batch of nothing else."""
    for lengths, tail in (([0, 2, 0, 0, 1, 0], 0), ([0] * 6, 4)):
        call = random_call(RAGGED, 6, pnat=range(6), lengths=lengths, tail=tail)
        before = call.clone()
        run(call)
        assert call.state_batch_indices is not None
        for row, length in enumerate(lengths):
            slot = int(call.state_batch_indices[row])
            for name in CACHES if length == 0 else ():
                got, kept = (getattr(c, name)[slot] for c in (call, before))
                torch.testing.assert_close(got, kept, rtol=0, atol=0, equal_nan=True)
        assert bool(call.out[0, : sum(lengths)].all()) and not call.out[0, sum(lengths) :].any()


def test_what_packed_tokens_without_a_live_row_hold_changes_no_bit() -> None:
    calls = [
        random_call(RAGGED, 5, lengths=[2, 3, 0, 1, 3], padding=(1, 2), tail=3, dead=d) for d in (0.0, float("nan"))
    ]
    clean, dirty = (run(c, torch.float32) for c in calls)
    assert torch.equal(clean.out, dirty.out)
    assert not clean.out[0, 2:5].any() and not clean.out[0, 9:].any() and clean.out[0, 5:9].any()


def test_a_ragged_generation_equals_the_one_that_never_saw_rejected_tokens() -> None:
    """Random windows of 0..T tokens, random acceptance, commits by length: outputs are those of the true history."""
    problem = dataclasses.replace(RAGGED, has_z=False, d_dtype=None, dt_bias_dtype=None, dt_softplus=False)
    rows, gen = 3, torch.Generator().manual_seed(3)
    call = widen(random_call(problem, rows, pnat=0, seed=14))
    indices = call.state_batch_indices
    assert indices is not None
    truth = [History(as_array(call.state[int(slot)])) for slot in indices]
    flushed = 0
    for step in range(40):
        fresh = widen(random_call(problem, rows, tail=1, seed=100 + step))
        lengths = fresh.lengths()
        call = dataclasses.replace(
            fresh, A=call.A, state=call.state, x_cache=call.x_cache, B_cache=call.B_cache, dt_cache=call.dt_cache,
            ring_start=call.ring_start, prev_num_accepted_tokens=call.prev_num_accepted_tokens,
            state_batch_indices=indices,
        )  # fmt: skip
        flushed += int(ring.flushes(call.prev_num_accepted_tokens[indices], lengths, problem.window).sum())
        run(call)
        accepted = torch.minimum(torch.randint(0, problem.tokens + 1, (rows,), generator=gen), lengths)
        assert call.cu_seqlens is not None
        begins = call.cu_seqlens.tolist()
        for row, history in enumerate(truth):
            at = slice(begins[row], begins[row + 1])
            rate, dt, x, B, C = (
                as_array(t)
                for t in (call.A[:, 0, 0], call.dt[0, at, :, 0], call.x[0, at], call.B[0, at], call.C[0, at])
            )
            close(call.out[0, at], history.run(rate, dt, x, B, C, int(accepted[row])), 1e-9, f"step {step} row {row}")
        ring.commit(
            call.ring_start, call.prev_num_accepted_tokens, indices, accepted, tokens=problem.tokens,
            window=problem.window, lengths=lengths,
        )  # fmt: skip
    assert flushed > 10


def test_every_cursor_position() -> None:
    """Every (ring_start, pnat): live rows that wrap, new rows that wrap, the last row, all in one batch."""
    positions = [(start, pnat) for start in range(SMALL.ring_rows) for pnat in range(SMALL.window + 1)]
    starts, counts = zip(*positions, strict=True)
    call = widen(random_call(SMALL, len(positions), ring_start=starts, pnat=counts, seed=12))
    expected = oracle_step(call)
    assert len(expected.flushed) == sum(pnat + SMALL.tokens > SMALL.window for pnat in counts)
    run(call)
    for name in ("out", "state", "x_cache", "B_cache", "dt_cache"):
        close(getattr(call, name), getattr(expected, name), 1e-9, name)


@pytest.mark.fault(1)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("tokens,window", [(1, 4), (4, 16)])
def test_dead_rows_change_no_bit(garbage: float, tokens: int, window: int) -> None:
    """Garbage in dead ring rows and unnamed slots gives the very bits that zeros there give."""
    problem = dataclasses.replace(SMALL, tokens=tokens, window=window)
    clean = run(all_pnat(problem, dead=0.0), torch.float32)
    dirty = run(all_pnat(problem, dead=garbage), torch.float32)
    slots = clean.state_batch_indices
    assert slots is not None
    slots = slots.long()
    assert torch.equal(dirty.out, clean.out)
    assert torch.equal(dirty.state[slots], clean.state[slots])
    assert bool(torch.isfinite(dirty.out).all())


@pytest.mark.fault(3, 17, 19)
@pytest.mark.parametrize("pad", [-1, 0, 3])
@pytest.mark.parametrize("index", ["i32", "i64"])
def test_padding_rows_are_zero_and_touch_nothing(pad: int, index: str) -> None:
    """Rows with pad_slot_id, and rows with any negative slot, give zeros; their slot keeps every bit."""
    problem = dataclasses.replace(SMALL, index_dtype=index)
    call = random_call(problem, 6, slots=12, seed=3, pad_slot_id=pad, padding=(1, 4), dead=None)
    assert call.state_batch_indices is not None
    call.state_batch_indices[5] = -7
    before, expected = call.clone(), oracle_step(widen(call.clone()))
    run(call)
    for row in (1, 4, 5):
        assert torch.equal(call.out[row], torch.zeros_like(call.out[row]))
    live = {int(s) for s in call.state_batch_indices if int(s) >= 0 and int(s) != pad}
    for slot in set(range(12)) - live:
        for name in ("state", "x_cache", "B_cache", "dt_cache"):
            assert torch.equal(getattr(call, name)[slot], getattr(before, name)[slot]), (name, slot)
    close(call.out, expected.out, 2**-7, "out")


def test_all_rows_padding() -> None:
    """A batch of padding only: zeros, and not a bit of any cache changes."""
    call = random_call(SMALL, 3, padding=(0, 1, 2), dead=None)
    before = call.clone()
    run(call)
    assert not bool(call.out.any())
    for name in ("state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens"):
        assert torch.equal(getattr(call, name), getattr(before, name)), name


@pytest.mark.fault(2)
@pytest.mark.parametrize("raw", [20.0, 89.0, 200.0, -200.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_large_raw_dt_stays_finite(raw: float, dtype: torch.dtype) -> None:
    """softplus must not overflow: exp(89) already exceeds float32."""
    call = all_pnat(SMALL, seed=4)
    call.dt = torch.full(call.dt.shape[:3], raw, dtype=BF16)[..., None].expand(call.dt.shape)
    expected = oracle_step(widen(call.clone()))
    run(call, dtype)
    slots = call.state_batch_indices
    assert slots is not None
    assert bool(torch.isfinite(call.out).all())
    close(call.out, expected.out, 2**-7, "out")
    close(call.dt_cache[slots.long()], expected.dt_cache[slots.long().numpy()], 1e-6, "dt rows")


def new_tokens(call: Call, gen: torch.Generator) -> None:
    """Fresh x, B, C and dt for the next step, drawn in place."""
    for name in ("x", "B", "C"):
        t = getattr(call, name)
        setattr(call, name, torch.randn(t.shape, generator=gen).to(t.dtype))
    raw = torch.rand(call.dt.shape[:3], generator=gen) * 5 - 5
    call.dt = raw.to(call.dt.dtype)[..., None].expand(call.dt.shape)


@pytest.mark.parametrize("tokens,window", [(1, 1), (1, 4), (4, 4), (4, 16), (3, 8)])
def test_rollback_never_sees_rejected_tokens(tokens: int, window: int) -> None:
    """40 steps of random acceptance on one slot equal the plain recurrence over the accepted tokens alone."""
    problem = dataclasses.replace(SMALL, tokens=tokens, window=window, d_dtype=None)
    call = widen(random_call(problem, 1, slots=3, pnat=[0], seed=5, dead=float("nan")))
    assert call.state_batch_indices is not None and call.dt_bias is not None
    slot = int(call.state_batch_indices[0])
    truth = History(as_array(call.state[slot]))
    rate, bias = as_array(call.A)[:, 0, 0], as_array(call.dt_bias)[:, 0]
    gen = torch.Generator().manual_seed(6)
    flushes = zeros_on_flush = rejected = 0
    for step in range(40):
        new_tokens(call, gen)
        accepted = int(torch.randint(0, tokens + 1, (1,), generator=gen))
        dt = np.logaddexp(as_array(call.dt)[0, :, :, 0] + bias, 0.0)
        expected = truth.run(rate, dt, as_array(call.x[0]), as_array(call.B[0]), as_array(call.C[0]), accepted)
        flush = int(call.prev_num_accepted_tokens[slot]) + tokens > window
        flushes, zeros_on_flush = flushes + flush, zeros_on_flush + (flush and accepted == 0)
        rejected += tokens - accepted
        run(call)
        close(call.out[0], expected, 1e-9, f"step {step}")
        ring.commit(
            call.ring_start,
            call.prev_num_accepted_tokens,
            call.state_batch_indices,
            torch.tensor([accepted]),
            tokens=tokens,
            window=window,
        )
        assert 0 <= int(call.prev_num_accepted_tokens[slot]) <= window
    assert flushes >= 3 and rejected > 0, "the run must flush and reject"
    assert zeros_on_flush >= 1, "and accept nothing on a flush at least once"


def test_nothing_accepted_on_a_flush_keeps_the_logical_state() -> None:
    """After a flush that accepts no token, the next step gives what it would have given without that step."""
    call = widen(random_call(SMALL, 1, slots=2, pnat=[SMALL.window], seed=7))
    assert call.state_batch_indices is not None
    direct = call.clone()
    gen = torch.Generator().manual_seed(8)
    run(call)  # flushes, all of its tokens are then rejected
    ring.commit(
        call.ring_start,
        call.prev_num_accepted_tokens,
        call.state_batch_indices,
        torch.tensor([0]),
        tokens=SMALL.tokens,
        window=SMALL.window,
    )
    slot = int(call.state_batch_indices[0])
    assert int(call.prev_num_accepted_tokens[slot]) == 0
    new_tokens(call, gen)
    for name in ("x", "B", "C", "dt"):
        setattr(direct, name, getattr(call, name))
    run(call)
    run(direct)
    torch.testing.assert_close(call.out, direct.out, rtol=1e-10, atol=1e-10)


@pytest.mark.fault(4)
def test_a_reused_slot_gives_the_bits_of_a_fresh_one() -> None:
    """A slot left at ring_start 13 with 7 live rows and a full ring, then reset: no trace of its past."""
    problem = dataclasses.replace(SMALL, tokens=4, window=16)
    used = random_call(problem, 1, slots=1, pnat=[7], seed=9, dead=None)
    used.ring_start[0] = 13
    run(used, torch.float32)
    fresh = random_call(problem, 1, slots=1, pnat=[0], seed=9, dead=0.0)
    for call in (used, fresh):  # a reset clears the checkpoint and the count; ring rows and phase may stay
        call.state.zero_()
        call.prev_num_accepted_tokens.zero_()
    fresh.ring_start.zero_()
    gen_a, gen_b = torch.Generator().manual_seed(10), torch.Generator().manual_seed(10)
    for _ in range(problem.window + 2):
        for call, gen in ((used, gen_a), (fresh, gen_b)):
            new_tokens(call, gen)
            run(call, torch.float32)
            indices = call.state_batch_indices
            assert indices is not None
            ring.commit(call.ring_start, call.prev_num_accepted_tokens, indices, torch.tensor([3]), tokens=4, window=16)
        assert torch.equal(used.out, fresh.out)
        assert torch.equal(used.state, fresh.state)


def test_float64_types_are_kept() -> None:
    """A float64 state and output stay float64: nothing passes through a narrower type."""
    call = widen(all_pnat(SMALL, seed=11))
    run(call)
    rounded = call.out.float().double()
    assert call.out.dtype == torch.float64
    assert not torch.equal(call.out, rounded)


def test_returns_out() -> None:
    call = all_pnat(SMALL)
    assert checkpointing_ssu_reference(**call.kwargs()) is call.out
