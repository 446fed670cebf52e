"""The decode step's meaning: against a recurrence that never saw a rejected token, and its contract's edges."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from fused_bounds import EXACT, RowErrors, error
from fused_calls import LayerHistory, copied, kwargs, layer, random_layer_call, random_steps
from oracle import as_array

import replayssm_cute
from replayssm_cute.fused import conv_ring
from replayssm_cute.fused.problem import LayerCall, LayerProblem
from replayssm_cute.fused.reference import decode_step_reference
from replayssm_cute.problem import Problem

SMALL = layer(Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=4, window=8, pdl=False))
WIDE = {"state": torch.float64, "x_cache": torch.float64, "B_cache": torch.float64, "dt_cache": torch.float64,
        "out": torch.float64}  # fmt: skip


def fresh(problem: LayerProblem, slots: int, seed: int = 0) -> LayerCall:
    """A call of one row whose slots are all as after a reset; everything else in them is NaN."""
    call = random_layer_call(problem, 1, slots=slots, seed=seed)
    for t in (call.x_cache, call.B_cache, call.dt_cache, call.conv_cache):
        t.fill_(float("nan"))
    call.state.zero_()
    call.ring_start.zero_()
    call.prev_num_accepted_tokens.zero_()
    conv_ring.set_history(call.conv_cache, call.ring_start, call.prev_num_accepted_tokens, torch.arange(slots))
    return call


class RoundedHistory:
    """Requests of slots 0 to 3: in float64 without rejected tokens, and by the reference, rounded as kernels round."""

    def __init__(self, call: LayerCall, norm_groups: int) -> None:
        self.call = copied(call)
        self.truth = {slot: LayerHistory(self.call, norm_groups) for slot in range(4)}
        self.window = call.x_cache.shape[2] - call.projected.shape[1]

    def run(
        self, rows: list[int], projected: torch.Tensor, accepted: list[int]
    ) -> list[tuple[torch.Tensor, torch.Tensor] | None]:
        """Exact and rounded outputs of each row, None of padding; then the accepted tokens become history."""
        slots = torch.tensor(rows, dtype=torch.int32)
        tokens = projected.shape[1]
        out = torch.empty(len(rows), tokens, self.call.out.shape[-1], dtype=projected.dtype)
        replayssm_cute.decode_step(
            **kwargs(dataclasses.replace(self.call, projected=projected, out=out, state_batch_indices=slots))
        )
        replayssm_cute.commit(
            self.call.ring_start, self.call.prev_num_accepted_tokens, slots, torch.tensor(accepted), tokens=tokens,
            window=self.window,
        )  # fmt: skip
        return [
            None if slot < 0 else (torch.from_numpy(self.truth[slot].run(as_array(projected[row]), count)), out[row])
            for row, (slot, count) in enumerate(zip(rows, accepted, strict=True))
        ]


@pytest.mark.parametrize("tokens", [1, 4])
def test_roundings_alone_take_single_rows_beyond_the_bound_of_tensors(tokens: int) -> None:
    """Why rows have a bound of their own (see `fused_bounds`): on the steps of the GPU test."""
    step = Problem(heads=8, head_dim=64, d_state=128, groups=1, tokens=tokens, window=8)
    problem = layer(step, norm_groups=2)
    history, errors = RoundedHistory(fresh(problem, 6), 2), RowErrors()
    for rows, projected, counts in random_steps(problem, 100):
        for found in history.run(rows, projected, counts):
            if found is not None:
                errors.add(found[1], *found)
    with pytest.raises(AssertionError, match="its roundings allow"):
        errors.add(1.01 * errors.got[-1].float(), errors.exact[-1], errors.got[-1])
    assert 2.8e-3 < errors.whole() < 3.4e-3 < EXACT["bf16"] < errors.worst() < 1e-2


@pytest.mark.parametrize(
    ("tokens", "window"), [(1, 3), (1, 16), (2, 3), (4, 4), (4, 16), (5, 7), (16, 16)], ids=lambda v: str(v)
)
def test_a_hundred_steps_of_random_acceptance(tokens: int, window: int) -> None:
    """Three requests in float64; a slot is taken over twice, and rows change places."""
    step = dataclasses.replace(SMALL.step, heads=2, groups=1, tokens=tokens, window=window)
    problem = layer(step, norm_groups=2)
    rng, gen = random.Random(tokens), torch.Generator().manual_seed(window)
    base = copied(fresh(problem, 5), **WIDE)
    truth = {slot: LayerHistory(base, 2) for slot in (4, 0, 2)}
    for at in range(100):
        if at in (30, 60):  # a new request in a used slot
            slot = torch.tensor([2])
            base.ring_start[slot] = rng.randrange(step.ring_rows)
            base.prev_num_accepted_tokens[slot] = 0
            base.state[slot] = 0
            conv_ring.set_history(base.conv_cache, base.ring_start, base.prev_num_accepted_tokens, slot)
            truth[2] = LayerHistory(base, 2)
        rows = rng.sample([4, 0, 2, -1], 4)
        projected = (0.8 * torch.randn(4, tokens, problem.width, generator=gen)).to(torch.bfloat16)
        call = dataclasses.replace(
            base,
            projected=projected,
            out=torch.empty(4, tokens, problem.d_inner, dtype=torch.float64),
            state_batch_indices=torch.tensor(rows, dtype=torch.int32),
        )
        decode_step_reference(call, 2, compute_dtype=torch.float64, between=torch.float64)
        accepted = [rng.randint(0, tokens) for _ in rows]
        for row, slot in enumerate(rows):
            if slot < 0:
                assert not call.out[row].any()
            else:
                assert error(call.out[row], truth[slot].run(as_array(projected[row]), accepted[row])) < 1e-12
        replayssm_cute.commit(
            base.ring_start, base.prev_num_accepted_tokens, call.state_batch_indices, torch.tensor(accepted),
            tokens=tokens, window=window,
        )  # fmt: skip


def test_the_call_is_the_reference_with_its_roundings() -> None:
    call = random_layer_call(SMALL, 5, padding=(1,), wide=8)
    exact, model = copied(call, **WIDE), copied(call)
    decode_step_reference(exact, 2, compute_dtype=torch.float64, between=torch.float64)
    decode_step_reference(model, 2)
    given = copied(call)
    assert replayssm_cute.decode_step(**kwargs(given)) is given.out
    for name in ("out", "state", "x_cache", "B_cache", "dt_cache", "conv_cache"):
        assert torch.equal(getattr(given, name).nan_to_num(), getattr(model, name).nan_to_num())
    assert torch.isfinite(given.out).all() and not given.out[1].any()
    assert 5e-4 < error(given.out, exact.out) < 8e-3  # four roundings to bf16
    for name in ("projected", "ring_start", "prev_num_accepted_tokens"):
        assert torch.equal(getattr(given, name).nan_to_num(), getattr(call, name).nan_to_num())


def test_rejected_and_dead_rows_change_nothing() -> None:
    clean = random_layer_call(SMALL, 5, dead=0.0)
    dirty = random_layer_call(SMALL, 5, dead=float("inf"))
    assert torch.equal(replayssm_cute.decode_step(**kwargs(clean)), replayssm_cute.decode_step(**kwargs(dirty)))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_history_goes_with_a_slot(tokens: int) -> None:
    """What a prefix of the live rows is folded into another slot, its conv goes on there as here."""
    step = dataclasses.replace(SMALL.step, heads=2, groups=1, tokens=tokens, window=6)
    problem = layer(step)
    gen, rng = torch.Generator().manual_seed(3), random.Random(4)
    base = fresh(problem, 3)
    slot, seen = torch.tensor([1]), [torch.zeros(problem.channels)] * 3
    for _ in range(40):
        projected = torch.randn(1, tokens, problem.width + 6, generator=gen).to(torch.bfloat16)[..., :-6]
        call = dataclasses.replace(base, projected=projected, state_batch_indices=slot.int())
        replayssm_cute.decode_step(**kwargs(call))
        accepted = rng.randint(0, tokens)
        seen += list(call.conv_inputs()[0, :accepted].float())
        replayssm_cute.commit(
            base.ring_start, base.prev_num_accepted_tokens, slot, torch.tensor([accepted]), tokens=tokens, window=6
        )
        live = int(base.prev_num_accepted_tokens[1])
        cursors = (base.conv_cache, base.ring_start, base.prev_num_accepted_tokens)
        for count in range(min(max(0, 3 - tokens), live), live + 1):
            found = conv_ring.history(*cursors, torch.tensor([-1, 1]), torch.tensor([0, count]))
            end = len(seen) - live + count
            if end >= 3 and count >= 3 - tokens:
                assert torch.equal(found[1].float(), torch.stack(seen[end - 3 : end]))
        assert torch.equal(conv_ring.history(*cursors, slot)[0].float(), torch.stack(seen[-3:]))
    inputs = torch.randn(2, 3, problem.channels, generator=gen).to(torch.bfloat16)
    before = base.conv_cache.clone()
    conv_ring.set_history(*cursors, torch.tensor([-1, 2]), inputs)
    assert torch.equal(conv_ring.history(*cursors, torch.tensor([2]))[0], inputs[1])
    assert torch.equal(base.conv_cache[:2].nan_to_num(), before[:2].nan_to_num())
    conv_ring.set_history(*cursors, torch.tensor([-1, -1]), inputs)
    assert torch.equal(conv_ring.history(*cursors, torch.tensor([2]))[0], inputs[1])


def _bad(call: LayerCall) -> dict[str, tuple[dict[str, Any], type[Exception], str]]:
    p = call.projected
    return {
        "no tensor": ({"projected": None}, TypeError, "projected: got NoneType"),
        "no state": ({"state": None}, TypeError, "state: got NoneType"),
        "rank": ({"projected": p[0]}, ValueError, "projected: got 2 dimensions"),
        "width": ({"projected": p[..., :-8]}, ValueError, r"projected: got width \d+, expected \d+ = z 256"),
        "dtype": ({"projected": p.float()}, TypeError, "projected: got torch.float32"),
        "stride": ({"projected": p.mT.contiguous().mT}, ValueError, "projected: got stride"),
        "ring": ({"conv_cache": call.conv_cache[:, 1:]}, ValueError, "conv_cache: got shape"),
        "ring dtype": ({"conv_cache": call.conv_cache.half()}, TypeError, "conv_cache: got torch.float16"),
        "ring rows twice": (
            {"conv_cache": call.conv_cache[:1].expand(call.conv_cache.shape)}, ValueError, "conv_cache: got stride 0"
        ),
        "weight": ({"conv_weight": call.conv_weight[:, :3]}, ValueError, "conv_weight: got shape"),
        "weight strides": (
            {"conv_weight": call.conv_weight.t().contiguous().t()}, ValueError, "conv_weight: got strides"
        ),
        "bias": ({"conv_bias": call.conv_bias[1:]}, ValueError, "conv_bias: got shape"),
        "norm weight": ({"norm_weight": call.norm_weight[8:]}, ValueError, "norm_weight: got shape"),
        "norm weight dtype": ({"norm_weight": call.norm_weight.double()}, TypeError, "norm_weight: got torch.float64"),
        "out": ({"out": call.out[:, :1]}, ValueError, "out: got shape"),
        "out is input": ({"out": p[..., :256]}, ValueError, "out: shares memory with projected"),
        "scratch": ({"scratch": call.out}, ValueError, "scratch: got shape"),
        "scratch is input": ({"scratch": p[..., 256:768]}, ValueError, "scratch: shares memory with projected"),
        "groups": ({"norm_groups": 3}, ValueError, "norm_groups: got 3"),
        "groups type": ({"norm_groups": 2.0}, TypeError, "norm_groups: got float"),
        "eps": ({"eps": -1e-5}, ValueError, "eps: got"),
        "eps of a huge int": ({"eps": 10**400}, ValueError, "eps: got an int of 1329 bits, expected a float"),
        "eps of inf": ({"eps": float("inf")}, ValueError, "eps: got inf, expected a float that is not negative"),
        "eps type": ({"eps": "1"}, TypeError, "eps: got str"),
        "A": ({"A": call.A[:, None]}, ValueError, "A: got 2 dimensions"),
        "D dtype": ({"D": call.D.double()}, TypeError, "D: got torch.float64, expected torch.float32"),
        "D": ({"D": call.D[1:]}, ValueError, "D: got shape"),
        "pad": ({"pad_slot_id": 0.5}, TypeError, "pad_slot_id: got float"),
        "pdl": ({"enable_pdl": 1}, TypeError, "enable_pdl: got int"),
        "config": ({"config": "h4"}, TypeError, "config: got str"),
        "state": ({"state": call.state.char()}, NotImplementedError, "8-bit"),
        "slots": ({"state_batch_indices": call.state_batch_indices[:1]}, ValueError, "state_batch_indices: got shape"),
        "slot values": ({"state_batch_indices": call.state_batch_indices + 99}, ValueError, "state_batch_indices: got"),
        "device": ({"conv_weight": call.conv_weight.to("meta")}, ValueError, "conv_weight: on device meta"),
    }  # fmt: skip


@pytest.mark.parametrize("what", list(_bad(random_layer_call(SMALL, 2))))
def test_bad_input_is_refused_by_name_before_anything_is_written(what: str) -> None:
    call = random_layer_call(SMALL, 2)
    changes, kind, message = _bad(call)[what]
    before = copied(call)
    with pytest.raises(kind, match=message):
        replayssm_cute.decode_step(**(kwargs(call) | changes))
    for name, old in kwargs(before).items():
        if isinstance(old, torch.Tensor):
            assert torch.equal(getattr(call, name).nan_to_num(), old.nan_to_num()), name


def test_windows_too_short_for_the_conv_are_refused() -> None:
    step = dataclasses.replace(SMALL.step, tokens=1, window=2)
    with pytest.raises(ValueError, match=r"window: got W = 2, expected at least 3"):
        layer(step)
    with pytest.raises(NotImplementedError, match="ragged"):
        layer(dataclasses.replace(SMALL.step, ragged=True))


def test_bytes_of_a_slots_ring() -> None:
    call = random_layer_call(SMALL, 2)
    assert conv_ring.bytes_per_slot(SMALL.channels, 8, 4) == call.conv_cache[0].nbytes
