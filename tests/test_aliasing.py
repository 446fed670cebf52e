"""Memory that is written and shared: refused by both names, while tensors that interleave in one storage pass."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import fakes
import pytest
import torch
from fused_calls import TENSORS, layer, random_layer_call

from replayssm_cute import CacheSpec, ReplayCache, aliasing, api, checkpointing_ssu, decode_step, explain, plan, prepare
from replayssm_cute.calls import MAY_BE_WRITTEN, Call, random_call
from replayssm_cute.fused import api as fused_api
from replayssm_cute.fused import launches
from replayssm_cute.problem import Problem
from replayssm_cute.torch_op import LAYER_WRITTEN

fake_compiler = fakes.fake_compiler
cpu_as_gpu = fakes.cpu_as_gpu

STEP = Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=6, has_z=True)
COPY = Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=6, copy_dtype="i8")


def addresses(t: torch.Tensor) -> set[int]:
    offsets = torch.tensor([0])
    for stride, count in zip(t.stride(), t.shape, strict=True):
        offsets = (offsets[:, None] + stride * torch.arange(count)).flatten()
    return {t.data_ptr() + int(o) * t.element_size() + byte for o in offsets for byte in range(t.element_size())}


def test_views_meet_exactly_where_their_bytes_do() -> None:
    """Random views of one storage, expanded, interleaved and overlapping ones too, against sets of their bytes."""
    draw, pool = random.Random(0), torch.zeros(4096, dtype=torch.uint8)

    def view() -> torch.Tensor:
        typed = pool.view(draw.choice((torch.uint8, torch.float16, torch.float32)))
        rank = draw.randint(1, 4)
        shape = [draw.randint(1, 4) for _ in range(rank)]
        strides = [draw.choice((0, 1, 2, 3, 4, 5, 8, 13, 16, 40, 64, 100)) for _ in range(rank)]
        return typed.as_strided(shape, strides, draw.randint(0, 300 // typed.element_size()))

    met = 0
    for _ in range(4000):
        one, other = view(), view()
        expected = bool(addresses(one) & addresses(other))
        assert aliasing.share_memory(one, other) == aliasing.share_memory(other, one) == expected
        met += expected
    assert 400 < met < 3600


def test_many_pages_are_compared_at_once() -> None:
    """Two views into many pages, apart or in one byte of each: the number of pages costs nothing."""
    pages = torch.empty(1 << 28, dtype=torch.uint8).view(1 << 18, 1 << 10)  # never touched
    assert not aliasing.share_memory(pages[:, :512], pages[:, 512:])
    assert aliasing.share_memory(pages[:, :513], pages[:, 512:])
    assert not aliasing.share_memory(pages[::2], pages[1::2])
    assert not aliasing.share_memory(pages[: 1 << 17], pages[1 << 17 :])
    assert aliasing.share_memory(pages[: 1 + (1 << 17)], pages[1 << 17 :])


def test_nothing_and_none_share_nothing() -> None:
    t, meta = torch.zeros(8), torch.zeros(8, device="meta")
    assert not aliasing.share_memory(t[:0], t) and not aliasing.share_memory(t, t[:0])
    aliasing.check({"a": t[:0], "b": t, "c": None, "d": meta, "e": meta}, ("a", "b", "c", "d"))
    aliasing.check({"a": t, "b": t, "c": torch.zeros(8)}, ("c",))  # what is only read may be the same
    with pytest.raises(ValueError, match=r"^b: shares memory with a, expected memory of its own$"):
        aliasing.check({"a": t, "b": t[3:]}, ("b",))


def pooled(problem: Problem, batch: int) -> Call:
    """A call whose caches are views into pages, and whose x, z, B and C are parts of one projection."""
    p, call = problem, random_call(problem, batch)
    spec = CacheSpec(layers=1, heads=p.heads, head_dim=p.head_dim, d_state=p.d_state, groups=p.groups, tokens=p.tokens,
        window=p.window)  # fmt: skip
    slots = call.state.shape[0]
    cache = ReplayCache.from_pool(spec, [torch.zeros(slots, spec.page_bytes + 512, dtype=torch.uint8)])
    found = cache.step_args(0)
    widths = [p.heads * p.head_dim] * 3 + [p.groups * p.d_state] * 2  # out too is a part of it
    whole = torch.zeros(batch, p.tokens, sum(widths), dtype=torch.bfloat16)
    x, z, out, B, C = (part.unflatten(-1, (-1, n)) for part, n in zip(
        whole.split(widths, -1), (p.head_dim, p.head_dim, p.head_dim, p.d_state, p.d_state), strict=True))  # fmt: skip
    for name in ("state", "x_cache", "B_cache", "dt_cache"):
        assert found[name].shape == getattr(call, name).shape
        setattr(call, name, found[name])
    call.x, call.out, call.B, call.C, call.z = x, out, B, C, z if p.has_z else None
    return call


def test_interleaved_views_are_served() -> None:
    """Pages of a pool and parts of one projection, the output among them."""
    call = pooled(STEP, 3)
    apart = call.clone()
    assert checkpointing_ssu(**call.kwargs()) is call.out
    checkpointing_ssu(**apart.kwargs())
    for name in call.written():
        assert torch.equal(getattr(call, name), getattr(apart, name)), name


def wrong_steps() -> dict[str, tuple[Problem, Callable[[Call], dict[str, Any]], tuple[str, str]]]:
    def into(name: str, like: str) -> Callable[[Call], dict[str, Any]]:
        """`name` laid out in the memory of `like`."""

        def change(call: Call) -> dict[str, Any]:
            t, room = getattr(call, name), getattr(call, like)
            flat = room.as_strided((room.numel(),), (1,)).view(t.dtype)
            return {name: flat[: t.numel()].view(t.shape)}

        return change

    def crossing(call: Call) -> dict[str, Any]:
        last = call.out.numel()
        room = torch.zeros(last - 8 + call.C.numel(), dtype=call.out.dtype)
        return {"out": room[:last].view(call.out.shape), "C": room[last - 8 :].view(call.C.shape)}

    return {
        "out is x": (STEP, lambda c: {"out": c.x}, ("out", "x")),
        "out is z": (STEP, lambda c: {"out": c.z}, ("out", "z")),
        "out in x_cache": (STEP, into("out", "x_cache"), ("out", "x_cache")),
        "out in state": (STEP, into("out", "state"), ("out", "state")),
        "B_cache in x_cache": (STEP, into("B_cache", "x_cache"), ("B_cache", "x_cache")),
        "dt_cache in B_cache": (STEP, into("dt_cache", "B_cache"), ("dt_cache", "B_cache")),
        "cursors in dt_cache": (STEP, into("ring_start", "dt_cache"), ("dt_cache", "ring_start")),
        "state_copy in state": (COPY, into("state_copy", "state"), ("state_copy", "state")),
        "state_scale in state": (COPY, into("state_scale", "state"), ("state_scale", "state")),
        "C begins in the last piece of out": (STEP, crossing, ("out", "C")),
    }


WRONG = wrong_steps()


@pytest.mark.parametrize("name", WRONG)
def test_a_step_into_shared_memory_is_refused_by_both_names(name: str, cpu_as_gpu: None) -> None:
    """By the call on the CPU, by `prepare`, by `bind`, and by a first call on a GPU; nothing is written."""
    problem, change, (one, other) = WRONG[name]
    call = random_call(problem, 2)
    good = call.clone()
    kwargs = call.kwargs() | change(call)
    bad = Call(**kwargs)
    before = {n: t.clone().view(torch.uint8) for n, t in bad.tensors().items() if n in MAY_BE_WRITTEN}
    prepared = prepare(**good.kwargs())
    arguments, options = plan.kernel_args(bad), (bad.philox_rounds, bad.precision)
    for attempt in (
        lambda: checkpointing_ssu(**kwargs),
        lambda: prepare(**kwargs),
        lambda: prepared.bind(*arguments),
        lambda: plan.run(arguments, bad.dt_softplus, False, None, None, options),
    ):
        with pytest.raises(ValueError) as e:
            attempt()
        assert {one, other} == {str(e.value).split(":")[0], str(e.value).split(" with ")[1].split(",")[0]}, e.value
        assert str(e.value).split(":")[0] in MAY_BE_WRITTEN
    for n, t in before.items():
        assert torch.equal(getattr(bad, n).clone().view(torch.uint8), t), n


def test_check_mode_sees_shared_addresses_in_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known signature is not looked at again, except with REPLAYSSM_CHECK=1."""
    call = random_call(STEP, 2)
    seen: list[str] = []
    monkeypatch.setattr(aliasing, "check", lambda tensors, written: seen.extend(tensors))
    monkeypatch.setattr(api, "_CHECK", True)
    monkeypatch.setattr(plan, "run", lambda *a: None)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    for count in (1, 2):
        checkpointing_ssu(**call.kwargs())
        assert seen.count("out") == count
    lay = random_layer_call(layer(Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=6)), 2)
    monkeypatch.setattr(fused_api, "_CHECK", True)
    monkeypatch.setattr(launches, "run", lambda *a: None)
    decode_step(**{n: getattr(lay, n) for n in TENSORS})
    assert seen.count("projected") == 1


def test_a_decode_step_into_shared_memory_is_refused_by_both_names() -> None:
    call = random_layer_call(layer(Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=6)), 2)
    kwargs = {n: getattr(call, n) for n in TENSORS}

    def within(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        t = kwargs[name]
        flat = t.as_strided((t.numel(),), (1,))
        count = torch.Size(shape).numel()
        return flat[:count].view(shape)

    scratch = (*call.projected.shape[:2], call.conv_cache.shape[-1])
    for name, t, other in (
        ("out", within("conv_cache", tuple(call.out.shape)), "conv_cache"),
        ("out", within("x_cache", tuple(call.out.shape)), "x_cache"),
        ("scratch", within("conv_cache", scratch), "conv_cache"),
        ("B_cache", within("x_cache", tuple(call.B_cache.shape)), "x_cache"),
    ):
        with pytest.raises(ValueError) as e:
            decode_step(**(kwargs | {name: t}))
        assert {name, other} <= set(str(e.value).replace(":", "").replace(",", "").split())
        assert str(e.value).split(":")[0] in LAYER_WRITTEN


def test_out_may_lie_beside_the_projection_in_one_buffer() -> None:
    """Rows of one allocation, [projected | out]: address ranges that cross, and no byte in common."""
    call = random_layer_call(layer(Problem(heads=8, head_dim=64, d_state=64, groups=2, tokens=2, window=6)), 2)
    kwargs = {n: getattr(call, n) for n in TENSORS}
    width, own = call.projected.shape[-1], call.out.shape[-1]
    expected = decode_step(**{n: v.clone() if n in LAYER_WRITTEN and v is not None else v for n, v in kwargs.items()})
    whole = torch.zeros(*call.projected.shape[:2], -(-width // 8) * 8 + own, dtype=call.projected.dtype)
    whole[..., :width] = call.projected
    kwargs |= {"projected": whole[..., :width], "out": whole[..., -own:]}
    assert torch.equal(decode_step(**kwargs), expected)
    assert torch.equal(whole[..., :width], call.projected)


def test_explain_refuses_what_the_call_refuses() -> None:
    call = random_call(Problem(heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=4), 2)
    with pytest.raises(ValueError, match="out"):
        explain(**dataclasses.replace(call, out=call.x).kwargs())
