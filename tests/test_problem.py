"""Problem: made from tensors with every check, JSON round trip, hashing, and messages that say what to do."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bad_inputs import DENSE_ONLY, PROBLEM, RAGGED, Bad, bad_inputs, bad_packing, good_call, good_ragged_call

from replayssm_cute import problem
from replayssm_cute.calls import Call
from replayssm_cute.problem import Problem

DENSE, PACKED = list(bad_inputs()), list(bad_packing())
BAD = [
    *((good_call, bad) for bad in DENSE),
    *((good_ragged_call, bad) for bad in (*(b for b in DENSE if b.name not in DENSE_ONLY), *PACKED)),
]
NAMES = [f"{'ragged ' if good is good_ragged_call else ''}{bad.name}" for good, bad in BAD]


def arguments(call: Call) -> dict[str, Any]:
    """The arguments of from_tensors."""
    kwargs = call.kwargs()
    del kwargs["pad_slot_id"]
    return kwargs | {"enable_pdl": False}


def test_the_unchanged_call_is_good() -> None:
    assert problem.from_tensors(**arguments(good_call())) == PROBLEM
    assert problem.from_tensors(**arguments(good_ragged_call())) == RAGGED


def test_the_table_is_large_and_names_are_unique() -> None:
    assert len(DENSE) > 150 and len(PACKED) > 20
    assert len(set(NAMES)) == len(BAD)
    assert {b.name for b in DENSE} > DENSE_ONLY


@pytest.mark.parametrize("good,bad", BAD, ids=NAMES)
def test_bad_input_is_refused_by_name(good: Callable[[], Call], bad: Bad) -> None:
    """The right exception, and the argument, what came and what was expected, in the message, in that order."""
    kwargs = arguments(good())
    bad.change(kwargs)
    with pytest.raises(bad.error) as caught:
        problem.from_tensors(**kwargs)
    assert type(caught.value) is bad.error
    name, *words = bad.words
    pattern = ".*".join((f"{name}: ", *map(re.escape, words)))
    assert re.match(pattern, str(caught.value)), f"{caught.value} does not say {bad.words}"


@pytest.mark.parametrize("good,bad", BAD, ids=NAMES)
def test_a_refused_call_writes_nothing(good: Callable[[], Call], bad: Bad) -> None:
    """The public call refuses the same, with the same exception, and not a byte of any operand changes."""
    from replayssm_cute import checkpointing_ssu

    kwargs = good().kwargs()
    bad.change(kwargs)
    tensors = {k: v for k, v in kwargs.items() if isinstance(v, torch.Tensor) and v.device.type == "cpu"}
    before = {k: v.clone() for k, v in tensors.items()}
    with pytest.raises(bad.error):
        checkpointing_ssu(**kwargs)
    for name, value in tensors.items():
        as_bytes = tuple(flat.contiguous().reshape(-1).view(torch.uint8) for flat in (value, before[name]))
        assert torch.equal(*as_bytes), name


@pytest.mark.parametrize("name", sorted(DENSE_ONLY))
def test_what_is_no_fault_of_a_ragged_call_is_none(name: str) -> None:
    (bad,) = (b for b in DENSE if b.name == name)
    kwargs = arguments(good_ragged_call())
    bad.change(kwargs)
    assert problem.from_tensors(**kwargs) == RAGGED


@pytest.mark.parametrize("name", ["x", "dt", "B", "C", "out", "z"])
@pytest.mark.parametrize("stride", [0, 1, 1 << 40])
def test_the_first_stride_of_packed_tokens_does_not_matter(name: str, stride: int) -> None:
    kwargs = arguments(good_ragged_call())
    t = kwargs[name]
    kwargs[name] = t.as_strided(t.shape, (stride, *t.stride()[1:]))
    assert problem.from_tensors(**kwargs) == RAGGED


@pytest.mark.parametrize("given,absent", [("cu_seqlens", "max_seqlen"), ("max_seqlen", "cu_seqlens")])
def test_a_dense_call_takes_neither_argument_alone(given: str, absent: str) -> None:
    value = getattr(good_ragged_call(), given)
    with pytest.raises(ValueError, match=f"^{absent}: got None beside {given}, expected both or neither"):
        problem.from_tensors(**arguments(good_call()) | {given: value})


@pytest.mark.parametrize("total", [1, 9, 40])
def test_a_ragged_call_may_have_any_number_of_tokens(total: int) -> None:
    """Fewer than rows times max_seqlen, as many, more: the total is no fact of the problem."""
    call = good_ragged_call(lengths=0, tail=total)
    assert call.x.shape[1] == total and problem.from_tensors(**arguments(call)) == RAGGED


def test_packed_tokens_too_far_apart_for_32_bit_offsets_get_the_general_kernel() -> None:
    """The general kernel serves from half of the reach on, so that strides and total tell, and heads have room."""
    compact = {}
    for name in ("x", "B", "C", "z", "out"):
        for stride in ((1 << 27) - 64, 1 << 27):  # eight tokens reach 2^30 elements
            call = good_ragged_call(tail=3)
            t = getattr(call, name)
            meta = {k: v.to("meta") for k, v in call.kwargs().items() if isinstance(v, torch.Tensor)}
            for k, v in meta.items():
                setattr(call, k, torch.empty_strided(v.shape, getattr(call, k).stride(), dtype=v.dtype, device="meta"))
            far = torch.empty_strided(t.shape, (8 * stride, stride, t.stride(2), 1), dtype=t.dtype, device="meta")
            setattr(call, name, far)
            compact[name, stride] = problem.from_tensors(**arguments(call)).compact
    assert compact == {(name, stride): stride < 1 << 27 for name, stride in compact}


def test_the_unchanged_call_does_write() -> None:
    """The test above means something: the good call changes every tensor that a step writes."""
    from replayssm_cute import checkpointing_ssu

    call = good_call(pnat=PROBLEM.window)
    before = call.clone()
    checkpointing_ssu(**call.kwargs())
    for name in ("state", "x_cache", "B_cache", "dt_cache", "out"):
        assert not torch.equal(torch.nan_to_num(getattr(call, name)), torch.nan_to_num(getattr(before, name))), name


@pytest.mark.parametrize("name", ["dt_softplus", "enable_pdl"])
def test_flags_are_bools(name: str) -> None:
    with pytest.raises(TypeError, match=f"{name}: got int, expected bool"):
        problem.from_tensors(**arguments(good_call()) | {name: 1})


def test_valid_layouts_are_accepted() -> None:
    """Slices of one wide projection, slots in a page pool, strided cursors and indices: the contract allows them."""
    call = good_call()
    batch, T, H, P = call.x.shape
    G, N = call.B.shape[2:]
    wide = torch.zeros(batch, T, 2 * H * P + 2 * G * N, dtype=call.x.dtype)
    z, x, B, C = wide.split([H * P, H * P, G * N, G * N], dim=-1)
    call.z, call.x = z.unflatten(-1, (H, P)), x.unflatten(-1, (H, P))
    call.B, call.C = B.unflatten(-1, (G, N)), C.unflatten(-1, (G, N))
    pool = torch.zeros(call.state.shape[0], call.state[0].numel() + 4)
    call.state = pool[:, :-4].unflatten(-1, call.state.shape[1:])
    cursors = torch.zeros(call.state.shape[0], 2, dtype=torch.int32)
    call.ring_start, call.prev_num_accepted_tokens = cursors.unbind(1)
    call.state_batch_indices = torch.arange(2 * batch, dtype=torch.int32)[::2]
    projection = torch.zeros(batch, T, 3_000_000 // T + H)
    call.dt = projection[..., 1 : 1 + H].bfloat16()[..., None].expand(batch, T, H, P)
    assert problem.from_tensors(**arguments(call)) == PROBLEM


def _apart(t: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values, twice as far apart along `dim` (zero strides stay)."""
    shape = [1 if stride == 0 else size for size, stride in zip(t.shape, t.stride(), strict=True)]
    wide = torch.zeros(*shape[:dim], 2 * shape[dim], *shape[dim + 1 :], dtype=t.dtype)
    values = wide.unflatten(dim, (shape[dim], 2)).select(dim + 1, 0)
    return values.copy_(t[tuple(slice(None) if n > 1 else slice(1) for n in shape)]).expand(t.shape)


@pytest.mark.parametrize(
    "name,dim,compact",
    [
        *((name, 0, True) for name in ("state", "x_cache", "B_cache", "dt_cache", "x", "dt", "B", "C", "out", "z")),
        *((name, 1, True) for name in ("x", "dt", "B", "C", "out", "z")),
        *((name, 1, False) for name in ("state", "x_cache", "B_cache", "dt_cache")),
        *((name, 2, False) for name in ("state", "x_cache", "B_cache", "x", "dt", "B", "C", "out", "z")),
        *((name, 0, False) for name in ("A", "D", "dt_bias")),
        *((name, 0, True) for name in ("ring_start", "prev_num_accepted_tokens", "state_batch_indices")),
    ],
)
def test_strides_that_a_kernel_is_specialized_on(name: str, dim: int, compact: bool) -> None:
    """Gaps between slots, rows and tokens are run-time values; gaps between heads or inside a slot are not."""
    kwargs = arguments(good_call())
    value = kwargs[name]
    kwargs[name] = _apart(value, dim)
    assert kwargs[name].stride(dim) == 2 * value.stride(dim) and torch.equal(kwargs[name].isnan(), value.isnan())
    assert problem.from_tensors(**kwargs) == dataclasses.replace(PROBLEM, compact=compact)


@pytest.mark.parametrize("name", ["D", "z", "dt_bias", "state_batch_indices"])
def test_optional_tensors_are_recorded(name: str) -> None:
    made = problem.from_tensors(**arguments(good_call()) | {name: None})
    field = {"D": "d_dtype", "z": "has_z", "dt_bias": "dt_bias_dtype", "state_batch_indices": "index_dtype"}[name]
    assert made == dataclasses.replace(PROBLEM, **{field: False if name == "z" else None})


@pytest.mark.parametrize("dtype,short", [(torch.float32, "f32"), (torch.bfloat16, "bf16"), (torch.float16, "f16")])
@pytest.mark.parametrize("name,field", [("A", "a_dtype"), ("D", "d_dtype"), ("dt_bias", "dt_bias_dtype")])
def test_weight_dtypes_are_independent(name: str, field: str, dtype: torch.dtype, short: str) -> None:
    kwargs = arguments(good_call())
    value = kwargs[name]
    kwargs[name] = value[(slice(None), *(0,) * (value.dim() - 1))].to(dtype).view(-1, *(1,) * (value.dim() - 1))
    kwargs[name] = kwargs[name].expand(value.shape)
    assert problem.from_tensors(**kwargs) == dataclasses.replace(PROBLEM, **{field: short})


@pytest.mark.parametrize(
    "changes,error,message",
    [
        ({"heads": 0}, ValueError, "heads: got 0, expected a positive int"),
        ({"tokens": True}, ValueError, "tokens: got True, expected a positive int"),
        ({"window": 2.0}, ValueError, "window: got 2.0, expected a positive int"),
        ({"groups": 3}, ValueError, "groups: 8 heads do not divide into 3 groups"),
        ({"head_dim": 96}, ValueError, "head_dim: got 96 .*expected one of (64, 80, 128)"),
        ({"d_state": 16}, ValueError, "d_state: got 16 .*expected one of (64, 128, 256)"),
        ({"tokens": 8}, ValueError, "window: got W = 7 with T = 8"),
        ({"window": 65}, NotImplementedError, "window: W = 65, T = 3 is not served yet; W <= 64 and T <= 32 are"),
        ({"window": 33, "tokens": 33}, NotImplementedError, "window: W = 33, T = 33 is not served yet"),
        ({"copy_dtype": "f16"}, TypeError, "copy_dtype: got 'f16', expected one of"),
        ({"copy_dtype": "i8", "state_dtype": "bf16"}, ValueError, "state_copy: got one beside a bf16 state"),
        ({"precision": "high"}, TypeError, "precision: got 'high', expected one of"),
        ({"precision": "highest", "state_dtype": "i8"}, ValueError, 'precision: got "highest" with i8'),
        ({"precision": "highest", "copy_dtype": "bf16"}, ValueError, 'precision: got "highest" with f32+bf16'),
        ({"philox_rounds": 10}, ValueError, "philox_rounds: got a number for an f32 state"),
        ({"philox_rounds": 0, "state_dtype": "i8"}, ValueError, "philox_rounds: got 0, expected an int in 1..16"),
        ({"philox_rounds": True, "state_dtype": "i8"}, TypeError, "philox_rounds: got bool, expected an int in 1..16"),
        ({"state_dtype": "f64"}, TypeError, "state_dtype: got 'f64', expected one of"),
        ({"io_dtype": None}, TypeError, "io_dtype: got None"),
        ({"io_dtype": "f16"}, TypeError, "dt: got dtype bf16, expected x's (f16) or f32"),
        ({"index_dtype": "i16"}, TypeError, "index_dtype: got 'i16', expected one of .* or None"),
        ({"has_z": 1}, TypeError, "has_z: got 1, expected a bool"),
        ({"pdl": None}, TypeError, "pdl: got None, expected a bool"),
        ({"ragged": 1}, TypeError, "ragged: got 1, expected a bool"),
    ],
    ids=lambda v: str(v) if isinstance(v, dict) else "",
)
def test_fields_are_checked(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    pattern = re.escape(message).replace(r"\.\*", ".*").replace(r"\ ", " ")
    with pytest.raises(error, match=pattern):
        dataclasses.replace(PROBLEM, **changes)


def test_json_round_trip() -> None:
    text = json.dumps(PROBLEM.to_json())
    again = Problem.from_json(json.loads(text))
    assert again == PROBLEM and hash(again) == hash(PROBLEM)


def test_json_of_before_there_were_ragged_problems_is_read() -> None:
    data = PROBLEM.to_json()
    del data["ragged"]
    assert Problem.from_json(data) == PROBLEM


def test_json_with_unknown_or_missing_fields_is_refused() -> None:
    with pytest.raises(ValueError, match=r"problem: unknown fields \['colour'\]"):
        Problem.from_json(PROBLEM.to_json() | {"colour": 1})
    data = PROBLEM.to_json()
    del data["heads"]
    with pytest.raises(TypeError, match="heads"):
        Problem.from_json(data)


def test_every_field_tells_problems_apart() -> None:
    """No field is left out of equality: a kernel for one problem never serves another."""
    other = {
        "heads": 16,
        "head_dim": 128,
        "d_state": 64,
        "groups": 4,
        "tokens": 2,
        "window": 8,
        "state_dtype": "f16",
        "io_dtype": "f16",
        "dt_dtype": "f32",
        "a_dtype": "bf16",
        "d_dtype": None,
        "dt_bias_dtype": "f32",
        "has_z": False,
        "dt_softplus": False,
        "index_dtype": "i64",
        "pdl": True,
        "compact": False,
        "ragged": True,
        "copy_dtype": "bf16",
        "philox_rounds": 7,
        "precision": "highest",
    }
    assert set(other) == {f.name for f in dataclasses.fields(Problem)}
    base = dataclasses.replace(PROBLEM, dt_dtype="f32")
    for name, value in other.items():
        start = base if name == "io_dtype" else PROBLEM
        start = dataclasses.replace(PROBLEM, state_dtype="bf16") if name == "philox_rounds" else start
        assert dataclasses.replace(start, **{name: value}) != start, name


def test_derived_facts() -> None:
    assert (PROBLEM.ring_rows, PROBLEM.heads_per_group, PROBLEM.state_bytes) == (10, 4, 4)
    assert PROBLEM.label() == "8x64x128/2 f32 T3 W7"
    assert RAGGED.label() == "8x64x128/2 f32 T3 W7 ragged"
    low = dataclasses.replace(PROBLEM, state_dtype="f8e4m3", philox_rounds=10)
    dual = dataclasses.replace(PROBLEM, copy_dtype="bf16")
    assert (low.label(), dual.label()) == ("8x64x128/2 f8e4m3~ T3 W7", "8x64x128/2 f32+bf16 T3 W7")
    assert dataclasses.replace(PROBLEM, precision="highest").label() == "8x64x128/2 f32! T3 W7"
    assert (low.read_bytes, dual.read_bytes, low.scaled, dual.scaled) == (1, 2, True, False)
    assert low.bytes_per_slot() == PROBLEM.bytes_per_slot() - 8 * 64 * (128 * 3 - 4)
    assert dual.bytes_per_slot() == PROBLEM.bytes_per_slot() + 8 * 64 * 128 * 2
    assert dataclasses.replace(PROBLEM, tokens=32, window=64).ring_rows == 96
