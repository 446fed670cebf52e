"""Ring arithmetic, the flush rule and the cursor commit, against a scalar model."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replayssm_cute import ring
from replayssm_cute.calls import random_call
from replayssm_cute.problem import Problem


def model_commit(start: int, pnat: int, accepted: int, T: int, W: int) -> tuple[int, int]:
    """One slot's commit in scalars, from the definition: a flush empties the ring, whatever was accepted."""
    accepted = min(max(accepted, 0), T)
    if pnat + 2 * T > W + T:
        return (start + pnat) % (W + T), accepted
    return start, pnat + accepted


@pytest.mark.parametrize("W", [1, 2, 4, 15, 16])
def test_flush_rule_is_the_ring_running_out(W: int) -> None:
    """A step flushes iff the next step might not find room: pnat + T accepted + T new rows exceed R."""
    for T in range(1, W + 1):
        R = ring.ring_rows(W, T)
        assert R == W + T
        for pnat in range(W + 1):
            assert ring.flushes(pnat, T, W) == (pnat + T + T > R)
        assert pnat + T <= R, "even at the fullest the new rows do not overwrite live ones"


def test_flush_rule_takes_tensors() -> None:
    pnat = torch.arange(17)
    assert ring.flushes(pnat, 4, 16).tolist() == [p + 4 > 16 for p in range(17)]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_commit_of_rows_with_lengths_of_their_own(data: st.DataObject) -> None:
    """The row's length decides flush and clamp, R stays W + T, and a row of length 0 keeps its cursors."""
    W = data.draw(st.integers(1, 64))
    T = data.draw(st.integers(1, min(W, 32)))
    rows = data.draw(
        st.lists(
            st.tuples(st.integers(0, W + T - 1), st.integers(0, W), st.integers(-1, T + 2), st.integers(0, T)),
            min_size=1,
            max_size=6,
        )
    )
    start, pnat = (torch.tensor([row[i] for row in rows], dtype=torch.int32) for i in range(2))
    accepted, lengths = (torch.tensor([row[i] for row in rows]) for i in (2, 3))
    ring.commit(start, pnat, torch.arange(len(rows)), accepted, tokens=T, window=W, lengths=lengths)
    for i, (begin, live, taken, length) in enumerate(rows):
        taken = min(max(taken, 0), length)
        flushed = live + length > W
        expected = ((begin + live) % (W + T), taken) if flushed else (begin, live + taken)
        assert (int(start[i]), int(pnat[i])) == expected
        assert length or expected == (begin, live)


@st.composite
def commits(draw: st.DrawFn) -> tuple[int, int, list[tuple[int, int]], list[tuple[int, int]], int]:
    W = draw(st.integers(1, 16))
    T = draw(st.integers(1, W))
    slots = draw(st.integers(1, 8))
    cursors = [(draw(st.integers(0, W + T - 1)), draw(st.integers(0, W))) for _ in range(slots)]
    live = draw(st.lists(st.integers(0, slots - 1), unique=True))
    pad = draw(st.sampled_from([-1, 0, slots + 5]))
    rows = [(s, draw(st.integers(-1, T + 2))) for s in live]
    rows += [(draw(st.sampled_from([pad, -1, -9])), draw(st.integers(0, T))) for _ in range(draw(st.integers(0, 4)))]
    return T, W, cursors, draw(st.permutations(rows)), pad


@settings(max_examples=200, deadline=None)
@given(commits(), st.sampled_from([torch.int32, torch.int64]), st.booleans())
def test_commit_is_the_scalar_model(
    case: tuple[int, int, list[tuple[int, int]], list[tuple[int, int]], int], index: torch.dtype, strided: bool
) -> None:
    """Every slot named once moves as the model says; padding (also repeated) and unnamed slots stay."""
    T, W, cursors, rows, pad = case
    table = torch.tensor(cursors, dtype=torch.int32)
    start, pnat = (table[:, 0], table[:, 1]) if strided else table.t().contiguous().unbind(0)
    addresses = start.data_ptr(), pnat.data_ptr()
    ring.commit(
        start,
        pnat,
        torch.tensor([s for s, _ in rows], dtype=index),
        torch.tensor([a for _, a in rows], dtype=torch.int32),
        tokens=T,
        window=W,
        pad_slot_id=pad,
    )
    expected = list(cursors)
    for slot, accepted in rows:
        if slot != pad and slot >= 0:
            expected[slot] = model_commit(*cursors[slot], accepted, T, W)
    assert list(zip(start.tolist(), pnat.tolist(), strict=True)) == expected
    assert (start.data_ptr(), pnat.data_ptr()) == addresses
    assert all(0 <= s < W + T and 0 <= p <= W for s, p in zip(start.tolist(), pnat.tolist(), strict=True))


def test_commit_takes_int64_counts_and_keeps_the_cursor_type() -> None:
    start, pnat = torch.tensor([13], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    ring.commit(start, pnat, torch.tensor([0]), torch.tensor([3], dtype=torch.int64), tokens=4, window=16)
    assert (start.tolist(), pnat.tolist(), start.dtype, pnat.dtype) == ([13], [10], torch.int32, torch.int32)


@pytest.mark.parametrize("state,io", [("f32", "bf16"), ("bf16", "bf16"), ("f16", "f16")])
def test_bytes_per_slot_is_what_a_slot_occupies(state: str, io: str) -> None:
    """The published number is the sum of what is allocated for one slot, cursors included."""
    problem = Problem(8, 64, 128, 2, tokens=3, window=9, state_dtype=state, io_dtype=io, dt_dtype=io)
    call = random_call(problem, 1, slots=5)
    caches = (call.state, call.x_cache, call.B_cache, call.dt_cache, call.ring_start, call.prev_num_accepted_tokens)
    assert sum(t.numel() * t.element_size() for t in caches) == 5 * problem.bytes_per_slot()
    wider = dataclasses.replace(problem, window=10)
    assert wider.bytes_per_slot() - problem.bytes_per_slot() == 8 * 64 * 2 + 2 * 128 * 2 + 8 * 4
