"""Each field of `compare.Errors` reacts to its own fault and to nothing else."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from replayssm_cute import compare
from replayssm_cute.calls import Call, random_call
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

PROBLEM = Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=4)


@pytest.fixture
def before() -> Call:
    """Rows with pnat 0..4 (the last two flush) and one padding row."""
    return random_call(PROBLEM, 6, slots=9, pnat=[0, 1, 2, 3, 4, 0], padding=(5,), seed=3)


@pytest.fixture
def after(before: Call) -> Call:
    call = before.clone()
    checkpointing_ssu_reference(**call.kwargs())
    return call


def slot(call: Call, row: int) -> int:
    assert call.state_batch_indices is not None
    return int(call.state_batch_indices[row])


def fields_beyond(before: Call, after: Call) -> set[str]:
    """Names of the fields that break their bound."""
    errors, bounds = compare.errors(before, after), compare.bounds(PROBLEM)
    found = {n for n in ("out", "out_worst", "state", "dt") if not getattr(errors, n) <= getattr(bounds, n)}
    return found | {n for n in ("rings_exact", "untouched_exact") if not getattr(errors, n)}


def test_a_right_step_has_small_but_real_errors(before: Call, after: Call) -> None:
    errors = compare.errors(before, after)
    assert 1e-3 < errors.out < 2e-3, "the rounding of bf16 outputs, seen"
    assert errors.out <= errors.out_worst < 5e-3
    assert 0 < errors.state < 1e-6
    assert errors.dt < 1e-6
    assert errors.rings_exact and errors.untouched_exact
    assert compare.bounds(PROBLEM).violation(errors) is None


def test_inputs_are_not_changed(before: Call, after: Call) -> None:
    copies = before.clone(), after.clone()
    compare.errors(before, after)
    for call, copy in zip((before, after), copies, strict=True):
        for name, value in call.kwargs().items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(getattr(copy, name))), name


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_output_that_is_no_number_is_an_infinite_error(before: Call, after: Call, value: float) -> None:
    after.out[2, 1, 3, 5] = value
    errors = compare.errors(before, after)
    assert math.isinf(errors.out) and math.isinf(errors.out_worst)


@pytest.mark.parametrize("value", [float("nan"), 3.0])
def test_flushed_state(before: Call, after: Call, value: float) -> None:
    after.state[slot(after, 4), 1, 2, 3] += value
    assert fields_beyond(before, after) == {"state"}


def test_flushed_state_not_written(before: Call, after: Call) -> None:
    after.state[slot(after, 4)] = before.state[slot(after, 4)]
    assert fields_beyond(before, after) == {"state"}


@pytest.mark.parametrize("row", [0, 1, 2])
def test_kept_state(before: Call, after: Call, row: int) -> None:
    """One unit in the last place of a checkpoint that no flush may write."""
    element = after.state[slot(after, row), 3, 63]
    element[63] = torch.nextafter(element[63], torch.tensor(9.0))
    assert fields_beyond(before, after) == {"untouched_exact"}


def test_kept_state_of_a_slot_that_no_row_names(before: Call, after: Call) -> None:
    unnamed = min(set(range(9)) - {slot(after, r) for r in range(5)})
    after.state[unnamed, 0, 0, 0] = 0.0
    assert fields_beyond(before, after) == {"untouched_exact"}


@pytest.mark.parametrize("cache", ["x_cache", "B_cache"])
@pytest.mark.parametrize("row,offset", [(0, 0), (1, 2), (3, 0), (3, 5)])
def test_ring_rows(before: Call, after: Call, cache: str, row: int, offset: int) -> None:
    """Any ring row, live, new or dead, that differs in one bit."""
    s = slot(after, row)
    ring = (int(after.ring_start[s]) + offset) % PROBLEM.ring_rows
    bits = getattr(after, cache).view(torch.int16)
    bits[s, 1, ring, 7] ^= 1
    assert fields_beyond(before, after) == {"rings_exact"}


def test_new_dt_rows(before: Call, after: Call) -> None:
    s = slot(after, 1)
    row = (int(after.ring_start[s]) + 1) % PROBLEM.ring_rows
    after.dt_cache[s, 2, row] *= 1 + 1e-5
    assert fields_beyond(before, after) == {"dt"}
    after.dt_cache[s, 2, row] = float("nan")
    assert fields_beyond(before, after) == {"dt"}


@pytest.mark.parametrize("offset", [0, 4])
def test_other_dt_rows(before: Call, after: Call, offset: int) -> None:
    """A live row (offset 0 of pnat 1) and a dead one (beyond the new rows)."""
    s = slot(after, 1)
    after.dt_cache[s, 2, (int(after.ring_start[s]) + offset) % PROBLEM.ring_rows] = 0.5
    assert fields_beyond(before, after) == {"untouched_exact"}


@pytest.mark.parametrize("value", [1e-30, float("nan")])
def test_padding_output(before: Call, after: Call, value: float) -> None:
    after.out[5, 0, 0, 0] = value
    assert fields_beyond(before, after) == {"untouched_exact"}


@pytest.mark.parametrize("cursor", ["ring_start", "prev_num_accepted_tokens"])
def test_cursors(before: Call, after: Call, cursor: str) -> None:
    getattr(after, cursor)[slot(after, 2)] += 1
    assert fields_beyond(before, after) == {"untouched_exact"}


@pytest.mark.parametrize("tensor", ["x", "dt", "A", "B", "C", "D", "dt_bias", "state_batch_indices"])
def test_inputs_that_a_step_overwrites(before: Call, after: Call, tensor: str) -> None:
    """A step that writes to what it may only read is not right, even if its results are."""
    values = getattr(after, tensor)
    values[(0,) * values.dim()] += 1
    assert "untouched_exact" in fields_beyond(before, after)


class TestRagged:
    """The same fields, where rows have lengths of their own: 2, 0, 1, 1, a padding row's 2, and a tail of 2."""

    PROBLEM = dataclasses.replace(PROBLEM, ragged=True)

    @pytest.fixture
    def before(self) -> Call:
        return random_call(
            self.PROBLEM, 5, slots=8, pnat=[3, 4, 3, 4, 0], padding=(4,), lengths=[2, 0, 1, 1, 2], tail=2, seed=3
        )

    def test_a_right_step_has_small_but_real_errors(self, before: Call, after: Call) -> None:
        errors = compare.errors(before, after)
        assert 1e-3 < errors.out < 2e-3 and errors.out <= errors.out_worst < 5e-3
        assert 0 < errors.state < 1e-6 and errors.dt < 1e-6
        assert errors.rings_exact and errors.untouched_exact

    @pytest.mark.parametrize("token", [0, 1, 2, 3])
    def test_live_tokens(self, before: Call, after: Call, token: int) -> None:
        after.out[0, token, 0, 0] += 1
        assert fields_beyond(before, after) == {"out", "out_worst"}

    @pytest.mark.parametrize("token", [4, 5, 6, 7], ids=["padding", "padding too", "tail", "tail too"])
    @pytest.mark.parametrize("value", [1e-30, float("nan")])
    def test_tokens_that_give_zeros(self, before: Call, after: Call, token: int, value: float) -> None:
        after.out[0, token, 3, 63] = value
        assert fields_beyond(before, after) == {"untouched_exact"}

    @pytest.mark.parametrize("row,field", [(0, "state"), (1, "untouched_exact"), (2, "untouched_exact"), (3, "state")])
    def test_a_row_flushes_by_its_own_length(self, before: Call, after: Call, row: int, field: str) -> None:
        """Rows 0 (3 + 2) and 3 (4 + 1) flush, W = 4; rows 1 (4 + 0) and 2 (3 + 1) must not be touched."""
        after.state[slot(after, row), 1, 2, 3] += 3.0
        assert fields_beyond(before, after) == {field}

    @pytest.mark.parametrize(
        "row,offset,field", [(0, 4, "dt"), (1, 4, "untouched_exact"), (2, 3, "dt"), (2, 4, "untouched_exact")]
    )
    def test_dt_rows_beyond_a_rows_length(self, before: Call, after: Call, row: int, offset: int, field: str) -> None:
        s = slot(after, row)
        after.dt_cache[s, 2, (int(after.ring_start[s]) + offset) % PROBLEM.ring_rows] = 0.5
        assert fields_beyond(before, after) == {field}

    @pytest.mark.parametrize("cache", ["x_cache", "B_cache"])
    @pytest.mark.parametrize("row,offset", [(0, 3), (1, 4), (2, 3), (2, 4)])
    def test_ring_rows(self, before: Call, after: Call, cache: str, row: int, offset: int) -> None:
        s = slot(after, row)
        bits = getattr(after, cache).view(torch.int16)
        bits[s, 1, (int(after.ring_start[s]) + offset) % PROBLEM.ring_rows, 7] ^= 1
        assert fields_beyond(before, after) == {"rings_exact"}

    def test_cu_seqlens(self, before: Call, after: Call) -> None:
        assert after.cu_seqlens is not None
        after.cu_seqlens[2] += 1
        assert "untouched_exact" in fields_beyond(before, after)


def test_only_padding_rows() -> None:
    before = random_call(PROBLEM, 2, padding=(0, 1))
    after = before.clone()
    checkpointing_ssu_reference(**after.kwargs())
    errors = compare.errors(before, after)
    assert errors == compare.Errors(0.0, 0.0, 0.0, 0.0, True, True)


def test_violation_names_the_bound() -> None:
    bounds = compare.Bounds(out=2e-3, out_worst=5e-3, state=1e-6)
    good = compare.Errors(1e-3, 3e-3, 1e-7, 1e-7, True, True)
    assert bounds.violation(good) is None
    for name, value in (("out", 3e-3), ("out_worst", math.inf), ("state", math.nan), ("dt", 1e-5)):
        message = bounds.violation(dataclasses.replace(good, **{name: value}))
        assert message is not None and message.startswith(f"{name} error")
    assert "ring rows" in str(bounds.violation(dataclasses.replace(good, rings_exact=False)))
    assert "must not touch" in str(bounds.violation(dataclasses.replace(good, untouched_exact=False)))


def test_bounds_are_those_of_the_contract() -> None:
    """f32 state with bf16 outputs: the numbers that the project promises; narrower types only add their rounding."""
    assert compare.bounds(PROBLEM) == compare.Bounds(out=2e-3, out_worst=5e-3, state=1e-6, dt=1e-6)
    for state, unit in (("bf16", 2.0**-8), ("f16", 2.0**-11)):
        assert compare.bounds(dataclasses.replace(PROBLEM, state_dtype=state)).state <= unit
