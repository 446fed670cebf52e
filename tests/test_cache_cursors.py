"""Commits, uniform, ragged and deferred, against a scalar model over random sequences; and no host reads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from replayssm_cute import ring
from replayssm_cute.cache import CacheSpec, ReplayCache

GEOMETRY: dict[str, Any] = {"layers": 1, "heads": 1, "head_dim": 64, "d_state": 64, "groups": 1}


class Scalar:
    """One slot's cursors, from the definition."""

    def __init__(self, T: int, W: int) -> None:
        self.T, self.W = T, W
        self.start = self.pnat = self.last = 0

    def commit(self, accepted: int, ran: int) -> None:
        self.close(accepted, ran)
        self.last = 0

    def begin(self, accepted: int, runs: int) -> None:
        self.close(accepted, self.last)
        self.last = runs

    def close(self, accepted: int, ran: int) -> None:
        if ran == 0:
            return
        accepted = min(max(accepted, 0), ran)
        if self.pnat + ran > self.W:
            self.start, self.pnat = (self.start + self.pnat) % (self.W + self.T), accepted
        else:
            self.pnat += accepted

    def reset(self) -> None:
        self.start = self.pnat = self.last = 0


@st.composite
def sequences(draw: st.DrawFn) -> tuple[int, int, int, int, list[tuple[str, list[tuple[int, int, int]]]]]:
    W = draw(st.integers(1, 16))
    T = draw(st.integers(1, W))
    slots = draw(st.integers(1, 5))
    pad = draw(st.sampled_from([-1, 0, slots + 3]))
    ops = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["commit", "ragged", "begin", "begin_ragged", "settle", "reset"]))
        live = draw(st.lists(st.integers(0, slots - 1), unique=True))
        named = [*live, *draw(st.lists(st.sampled_from([pad, -1, -4]), max_size=3))]
        rows = [(s, draw(st.integers(-1, T + 2)), draw(st.integers(0, T))) for s in draw(st.permutations(named))]
        ops.append((kind, rows))
    return T, W, slots, pad, ops


@settings(max_examples=150, deadline=None)
@given(sequences(), st.sampled_from([torch.int32, torch.int64]))
def test_cursors_are_the_scalar_model(case: tuple[Any, ...], index: torch.dtype) -> None:
    T, W, slots, pad, ops = case
    cache = ReplayCache.allocate(CacheSpec(**GEOMETRY, tokens=T, window=W), slots, "cpu", pad_slot_id=pad)
    model = [Scalar(T, W) for _ in range(slots)]
    for kind, rows in ops:
        named, accepted, lens = (torch.tensor([row[k] for row in rows], dtype=index) for k in range(3))
        if kind == "commit":
            cache.commit(named, accepted)
        elif kind == "ragged":
            cache.commit(named, accepted, lens)
        elif kind == "begin":
            cache.begin_step(named, accepted)
        elif kind == "begin_ragged":
            cache.begin_step(named, accepted, lens)
        elif kind == "settle":
            cache.settle(named, accepted)
        else:
            cache.reset(named, zero_state=False)
        for slot, a, n in rows:
            if slot == pad or slot < 0:
                continue
            one = model[slot]
            {
                "commit": lambda one=one, a=a: one.commit(a, T),
                "ragged": lambda one=one, a=a, n=n: one.commit(a, n),
                "begin": lambda one=one, a=a: one.begin(a, T),
                "begin_ragged": lambda one=one, a=a, n=n: one.begin(a, n),
                "settle": lambda one=one, a=a: one.begin(a, 0),
                "reset": lambda one=one: one.reset(),
            }[kind]()
        got = list(zip(cache.ring_start.tolist(), cache.pnat.tolist(), cache.last_tokens.tolist(), strict=True))
        assert got == [(m.start, m.pnat, m.last) for m in model], (kind, rows)
    assert cache.pnat.dtype == torch.int32


def test_ragged_and_uniform_commits_agree_with_ring_commit() -> None:
    """Full-length windows through the ragged form move cursors exactly as `ring.commit`, for every pnat and count."""
    T, W = 3, 7
    spec = CacheSpec(**GEOMETRY, tokens=T, window=W)
    cases = [(s, p, a) for s in range(W + T) for p in range(W + 1) for a in range(T + 1)]
    slots = torch.arange(len(cases))
    caches = [ReplayCache.allocate(spec, len(cases), "cpu") for _ in range(3)]
    accepted = torch.tensor([a for _, _, a in cases])
    for cache in caches:
        cache.ring_start.copy_(torch.tensor([s for s, _, _ in cases]))
        cache.pnat.copy_(torch.tensor([p for _, p, _ in cases]))
    ring.commit(caches[0].ring_start, caches[0].pnat, slots, accepted, tokens=T, window=W)
    caches[1].commit(slots, accepted)
    caches[2].commit(slots, accepted, torch.full((len(cases),), T))
    for cache in caches[1:]:
        assert torch.equal(cache.ring_start, caches[0].ring_start)
        assert torch.equal(cache.pnat, caches[0].pnat)


class NoHostReads(TorchDispatchMode):
    """Fails on what a graph capture cannot hold: values read by the host, and tensors that live there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        assert not any(bad in name for bad in ("_local_scalar_dense", "nonzero", "masked_select", "unique")), name
        for t in (*args, result):
            assert not isinstance(t, torch.Tensor) or t.device.type == "meta", f"{name} has a tensor on {t.device}"
        return result


def test_no_operation_reads_a_value_on_the_host() -> None:
    """On tensors without values every operation meant for graphs runs, so none depends on what a host would read."""
    spec = CacheSpec(layers=2, heads=2, head_dim=64, d_state=64, groups=1, tokens=2, window=4, state_dtype="bf16")
    cache = ReplayCache.allocate(spec, 9, "meta", A=[torch.empty(2, device="meta")] * 2)
    slots = torch.empty(5, dtype=torch.int32, device="meta")
    counts = torch.empty(5, dtype=torch.int32, device="meta")
    states = torch.empty(2, 5, 2, 64, 64, device="meta")
    operations: list[Callable[[], None]] = [
        lambda: cache.commit(slots, counts),
        lambda: cache.commit(slots, counts, counts),
        lambda: cache.begin_step(slots, counts),
        lambda: cache.begin_step(slots, counts, counts),
        lambda: cache.settle(slots, counts),
        lambda: cache.reset(slots),
        lambda: cache.materialize(slots, slots, counts),
        lambda: cache.copy(slots, slots),
        lambda: cache.prefill_handoff(slots, states),
    ]
    for operation in operations:
        with NoHostReads():
            operation()
    for reads in (lambda: bool(slots[0]), lambda: states[0, slots > 0]):  # the test can fail
        with pytest.raises(Exception, match=r"[Mm]eta|nonzero|_local_scalar_dense"), NoHostReads():
            reads()


@pytest.mark.parametrize(
    "act,error,message",
    [
        (lambda c: c.commit([0, 1], [1]), ValueError, r"num_accepted: got shape \(1,\), expected \(2,\)"),
        (lambda c: c.commit([0, 4], [1, 1]), ValueError, r"slots: got 4 for row 1, expected 0\.\.3"),
        (lambda c: c.commit([2, -1, 2], [1, 1, 1]), ValueError, "slots: got slot 2 more than once"),
        (lambda c: c.commit([0], [1], [3]), ValueError, r"query_lens: got 3 for row 0, expected 0\.\.2"),
        (lambda c: c.begin_step([0], [1], [-1]), ValueError, r"query_lens: got -1 for row 0"),
        (lambda c: c.begin_step([0], [1], [1, 1]), ValueError, r"query_lens: got shape \(2,\)"),
        (lambda c: c.reset(torch.tensor([0.0])), TypeError, "slots: got torch.float32, expected torch.int32 or"),
        (lambda c: c.reset(torch.tensor([[0]])), ValueError, r"slots: got shape \(1, 1\), expected \(batch,\)"),
        (lambda c: c.reset([True]), TypeError, "slots: got True"),
        (lambda c: c.reset(2), TypeError, "slots: got int, expected ints or a tensor of slots"),
        (lambda c: c.reset(torch.empty(1, dtype=torch.int32, device="meta")), ValueError, "slots: on device meta"),
        (lambda c: c.copy([0], [0, 1]), ValueError, r"dst_slots: got shape \(2,\), expected \(1,\)"),
        (lambda c: c.copy([0, 1], [2, 2]), ValueError, "dst_slots: got slot 2 more than once"),
        (lambda c: c.copy([9], [2]), ValueError, "src_slots: got 9 for row 0"),
        (lambda c: c.materialize([0], [1], [0]), RuntimeError, "A of layer 0 was not given"),
        (lambda c: c.set_decay(0, torch.zeros(2)), ValueError, r"A: got shape \(2,\), expected \(1,\) or"),
        (lambda c: c.set_decay(0, torch.zeros(1, 64, 64)), ValueError, "A: got strides .* expected 0 on P and N"),
        (lambda c: c.set_decay(0, torch.zeros(1).int()), TypeError, "A: got torch.int32"),
        (lambda c: c.set_decay(1, torch.zeros(1)), IndexError, "layer: got 1"),
        (lambda c: c.prefill_handoff([0], torch.zeros(1, 2, 1, 64, 64)), ValueError, r"states: got shape \(2, 1,"),
        (lambda c: c.prefill_handoff([0], [torch.zeros(1)] * 2), ValueError, "states: got 2 layers, expected 1"),
        (lambda c: c.prefill_handoff([0], [torch.zeros(1).int()]), TypeError, "states: got torch.int32 for layer 0"),
    ],
)
def test_bad_arguments_are_named(act: Callable[[ReplayCache], None], error: type[Exception], message: str) -> None:
    """Refused by name, with nothing written."""
    cache = ReplayCache.allocate(CacheSpec(**GEOMETRY, tokens=2, window=4), 4, "cpu")
    cache.pnat.fill_(3)
    cache.layers[0].state.fill_(1.0)
    with pytest.raises(error, match=message):
        act(cache)
    assert cache.pnat.tolist() == [3] * 4 and bool((cache.layers[0].state == 1.0).all())
    assert cache.ring_start.tolist() == cache.last_tokens.tolist() == [0] * 4
