"""Random calls are what they claim: valid, reproducible, poisoned exactly where a step must not look."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from replayssm_cute import dtypes, problem
from replayssm_cute.calls import Call, random_call
from replayssm_cute.problem import Problem

BASE = Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=5)


def problem_of(call: Call) -> Problem:
    kwargs = call.kwargs()
    del kwargs["pad_slot_id"]
    return problem.from_tensors(**kwargs, enable_pdl=False)


@pytest.mark.parametrize(
    "wanted",
    [
        BASE,
        dataclasses.replace(BASE, state_dtype="bf16", io_dtype="f16", dt_dtype="f16", a_dtype="bf16"),
        dataclasses.replace(BASE, state_dtype="f16", dt_dtype="f32", d_dtype="f32", dt_bias_dtype="f16"),
        dataclasses.replace(BASE, d_dtype=None, dt_bias_dtype=None, has_z=True, dt_softplus=False),
        dataclasses.replace(BASE, index_dtype=None, tokens=5),
        dataclasses.replace(BASE, index_dtype="i64", head_dim=80, d_state=256, groups=1),
        dataclasses.replace(BASE, ragged=True, has_z=True),
        dataclasses.replace(BASE, ragged=True, dt_softplus=False, index_dtype=None, tokens=5, dt_dtype="f32"),
    ],
    ids=lambda p: p.label(),
)
def test_a_random_call_is_a_call_of_its_problem(wanted: Problem) -> None:
    assert problem_of(random_call(wanted, 3)) == wanted


def test_same_seed_same_bits_other_seed_other_bits() -> None:
    first, again, other = (random_call(BASE, 3, seed=s, dead=0.0) for s in (1, 1, 2))
    for name, value in first.kwargs().items():
        if isinstance(value, torch.Tensor) and name != "out":
            assert torch.equal(value, getattr(again, name)), name
    assert not torch.equal(first.state, other.state)


def test_dead_rows_and_unnamed_slots_are_poisoned_and_live_rows_are_not() -> None:
    call = random_call(BASE, 3, slots=5, pnat=[0, 3, 5], ring_start=[6, 6, 2])
    assert call.state_batch_indices is not None
    slots = call.state_batch_indices.tolist()
    for slot in range(5):
        start, pnat = int(call.ring_start[slot]), int(call.prev_num_accepted_tokens[slot])
        live = {(start + j) % BASE.ring_rows for j in range(pnat)} if slot in slots else set()
        for row in range(BASE.ring_rows):
            for cache in (call.x_cache, call.B_cache, call.dt_cache):
                values = cache[slot, :, row]
                assert bool(torch.isfinite(values).all() if row in live else torch.isnan(values).all())
        assert bool(torch.isfinite(call.state[slot]).all()) == (slot in slots)
    assert call.ring_start[slots].tolist() == [6, 6, 2]


RAGGED = dataclasses.replace(BASE, ragged=True, has_z=True)


def test_ragged_rows_have_the_lengths_that_are_asked_for() -> None:
    call = random_call(RAGGED, 4, lengths=[2, 0, 1, 2], tail=3)
    assert call.cu_seqlens is not None and call.cu_seqlens.dtype == torch.int32
    assert call.cu_seqlens.tolist() == [0, 2, 2, 3, 5] and call.lengths().tolist() == [2, 0, 1, 2]
    assert (call.batch, call.tokens, call.max_seqlen, call.x.shape[:2]) == (4, 2, 2, (1, 8))
    drawn = [random_call(RAGGED, 40, seed=seed).lengths() for seed in (1, 1, 2)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert set(drawn[0].tolist()) == {0, 1, 2}
    assert random_call(RAGGED, 3, lengths=0).x.shape[1] == 1, "a tensor of no tokens is no call's"
    dense = random_call(BASE, 3)
    assert (dense.batch, dense.tokens, dense.lengths().tolist()) == (3, 2, [2, 2, 2])


def test_lengths_and_a_tail_need_a_ragged_problem() -> None:
    for given in ({"lengths": (1, 2)}, {"tail": 1}):
        with pytest.raises(ValueError, match="lengths, tail: need a ragged problem"):
            random_call(BASE, 2, **given)  # type: ignore[arg-type]


def test_tokens_that_no_live_row_has_are_poisoned_and_others_are_not() -> None:
    call = random_call(RAGGED, 4, lengths=[2, 1, 0, 2], padding=(1, 2), tail=2)
    assert call.z is not None
    for name in ("x", "dt", "B", "C", "z"):
        dead = getattr(call, name)[0].flatten(1).isnan()
        assert torch.equal(dead.any(1), dead.all(1))
        assert dead[:, 0].tolist() == [False, False, True, False, False, True, True], name


def test_out_starts_poisoned() -> None:
    assert bool(torch.isnan(random_call(BASE, 2).out).all())


def test_padding_needs_indices() -> None:
    with pytest.raises(ValueError, match="padding: needs a problem with slot indices"):
        random_call(dataclasses.replace(BASE, index_dtype=None), 2, padding=(0,))


@pytest.mark.parametrize("index", ["i32", "i64"])
@pytest.mark.parametrize("pad", [-1, 0, 4])
def test_live_rows_never_name_the_padding_slot(pad: int, index: str) -> None:
    """Only the rows asked for are padding, and every slot that no row names holds poison, the padding slot too."""
    problem = dataclasses.replace(BASE, index_dtype=index)
    for seed in range(10):
        call = random_call(problem, 4, slots=5, seed=seed, pad_slot_id=pad, padding=(2,))
        assert call.state_batch_indices is not None
        assert [i for i, s in enumerate(call.state_batch_indices.tolist()) if s == pad] == [2]
        unnamed = set(range(5)) - {s for s in call.state_batch_indices.tolist() if s != pad}
        assert bool(torch.isnan(call.state[sorted(unnamed)]).all())
    with pytest.raises(ValueError, match="slots: got 4, expected at least 4 beside the padding slot"):
        random_call(BASE, 4, slots=4, pad_slot_id=0)


def test_clone_keeps_strides_and_shares_nothing() -> None:
    call = random_call(BASE, 3)
    wide = torch.zeros(3, 2, 4, 3 * 64, dtype=torch.bfloat16)
    wide[..., 64:128] = call.x
    call.x = wide[..., 64:128]
    copy = call.clone()
    for name, value in call.kwargs().items():
        other = getattr(copy, name)
        if isinstance(value, torch.Tensor):
            assert value.stride() == other.stride() and value.shape == other.shape, name
            assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(other)), name
            assert value.untyped_storage().data_ptr() != other.untyped_storage().data_ptr(), name
        else:
            assert value == other, name


def test_statistics_are_those_of_a_model() -> None:
    """Decays neither vanish nor stall: dt after softplus within about 1e-3..1, A within -16..-1."""
    call = random_call(dataclasses.replace(BASE, heads=64), 8, dead=None)
    assert call.dt_bias is not None
    dt = torch.nn.functional.softplus(call.dt.float() + call.dt_bias.float())
    assert float(dt.min()) > 5e-4 and float(dt.max()) < 1.0
    assert float(call.A.min()) >= -16.0 and float(call.A.max()) <= -1.0
    assert float(call.dt_cache.min()) >= 1e-3 and float(call.dt_cache.max()) <= 0.11


def test_dtype_names_round_trip() -> None:
    for name, dtype in dtypes.TORCH.items():
        assert dtypes.NAME[dtype] == name and dtypes.BYTES[name] == dtype.itemsize
