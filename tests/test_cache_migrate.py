"""Logical states: through torch.save, into caches of another window, phase and dtype, and refused when damaged."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from cache_runs import SPEC, Request, Run, assert_unchanged, decays, make, snapshot, started
from oracle import History, as_array

from replayssm_cute.cache import CacheSpec, LogicalState, ReplayCache


def exported(pending: int = 7, ring_start: int = 14, spec: CacheSpec = SPEC) -> tuple[LogicalState, Request]:
    cache = make(spec, 2)
    run = Run(cache, rtol=2e-6 if spec.state_dtype == "f32" else 2e-2)
    request = started(run, 1, ring_start=ring_start, pending=pending)
    return cache.export_slots([1]), request


@pytest.mark.parametrize(
    "tokens,window,state",
    [
        (4, 16, "f32"),
        (8, 16, "f32"),
        (2, 9, "f32"),
        (1, 7, "f32"),
        (2, 5, "f32"),
        (1, 1, "f32"),
        (4, 16, "bf16"),
        (3, 4, "f16"),
    ],
)
def test_a_state_goes_on_in_another_cache(tokens: int, window: int, state: str) -> None:
    """Another T, W, phase or state dtype: as many rows as fit stay rows, the oldest others are folded."""
    backup, request = exported()
    spec = dataclasses.replace(SPEC, tokens=tokens, window=window, state_dtype=state)
    cache = make(spec, 3)
    run = Run(cache, seed=9, rtol={"f32": 2e-6, "f16": 3e-3, "bf16": 2e-2}[state])
    started(run, 2, ring_start=min(3, window), pending=min(1, window))  # the slot has a past
    cache.import_slots([2], backup)
    kept = min(7, window)
    assert int(cache.pnat[2]) == kept
    for layer in range(2):
        t = cache.layers[layer]
        assert torch.equal(t.x_cache[2, :, :kept], backup.x[layer, 0, :, 7 - kept :])
        assert torch.equal(t.dt_cache[2, :, :kept], backup.dt[layer, 0, :, 7 - kept :])
        if kept == 7:
            assert torch.equal(t.state[2], backup.state[layer, 0].to(t.state.dtype))
    run.decode([2], [request], 10)


@pytest.mark.parametrize("state", ["f32", "bf16"])
def test_a_fold_on_import_is_rounded_once(state: str) -> None:
    """The folded checkpoint is the float64 recurrence over the oldest rows, rounded to the new dtype, bit for bit."""
    backup, _ = exported(pending=7)
    cache = make(dataclasses.replace(SPEC, tokens=1, window=3, state_dtype=state), 1)
    cache.import_slots([0], backup)
    for i, layer in enumerate(cache.layers):
        history = History(as_array(backup.state[i, 0]))
        x, B, dt = (as_array(t[i, 0].transpose(0, 1)) for t in (backup.x, backup.B, backup.dt))
        rate = decays(SPEC)[i].double().numpy()
        history.run(rate, dt[:4], x[:4], B[:4], B[:4], 4)
        assert torch.equal(layer.state[0], torch.tensor(history.state).to(layer.state.dtype))


def test_slots_of_different_lengths_travel_together() -> None:
    """One export of several slots, imported in parts and in another order; unused rows are zero, not garbage."""
    cache = make(SPEC, 4)
    run = Run(cache)
    requests = {s: started(run, s, ring_start=r, pending=p) for s, r, p in ((0, 14, 7), (1, 2, 0), (2, 18, 12))}
    backup = cache.export_slots(torch.tensor([2, 0, 1], dtype=torch.int32))
    assert backup.count.tolist() == [12, 7, 0] and len(backup) == 3
    assert tuple(backup.x.shape) == (2, 3, 2, 12, 64)
    assert not bool(backup.x[:, 1, :, 7:].any()) and not bool(backup.B[:, 2].any())
    other = make(dataclasses.replace(SPEC, window=8), 5)
    run = Run(other, seed=8)
    other.import_slots([4, 0], backup.take([2, 0]))
    other.import_slots([1], backup.take([1]))
    assert other.pnat[[4, 0, 1]].tolist() == [0, 8, 7]
    run.decode([4, 0, 1], [requests[1], requests[2], requests[0]], 8)
    with pytest.raises(IndexError, match=r"rows: got 3, expected 0\.\.2"):
        backup.take([3])
    wrongs: list[Any] = [[0.9, True], ["a"], "0", None, 1]
    for wrong in wrongs:
        with pytest.raises(TypeError, match="rows: got"):
            backup.take(wrong)


def test_nothing_to_export_and_empty_rings() -> None:
    cache = make(SPEC, 2)
    before = snapshot(cache)
    nothing = cache.export_slots([])
    assert len(nothing) == 0
    cache.import_slots([], LogicalState.from_dict(nothing.to_dict()))
    assert_unchanged(cache, before)


def test_a_file_of_tensors_ints_and_strings() -> None:
    """torch.load with weights_only takes it, and what comes back is the same to the bit."""
    backup, request = exported()
    data = backup.to_dict()
    assert all(isinstance(v, torch.Tensor | int | str) for v in data.values())
    file = io.BytesIO()
    torch.save(data, file)
    file.seek(0)
    loaded = LogicalState.from_dict(torch.load(file, weights_only=True))
    assert loaded.spec == backup.spec
    for name in ("count", "state", "x", "B", "dt"):
        assert torch.equal(getattr(loaded, name), getattr(backup, name)), name
    cache = make(SPEC, 2)
    cache.import_slots([0], loaded)
    Run(cache, seed=4).decode([0], [request], 6)


def drop(name: str) -> Callable[[dict[str, Any]], Any]:
    return lambda d: d.pop(name)


def change(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda d: d.update(values)


def flip(name: str) -> Callable[[dict[str, Any]], Any]:
    """One bit of one tensor."""

    def act(d: dict[str, Any]) -> None:
        d[name] = d[name].clone()
        d[name].view(torch.uint8).view(-1)[-1] ^= 1

    return act


@pytest.mark.parametrize(
    "damage,message",
    [
        (change(format="other"), "format: got 'other', expected 'replayssm_cute.logical_state'"),
        (change(version=2), "version: got 2, expected 1"),
        (change(version=True), "version: got True, expected 1"),
        (change(version=torch.ones(2)), r"version: got tensor\(.*, expected 1"),
        (change(format=torch.ones(2)), r"format: got tensor\(.*, expected 'replayssm_cute.logical_state'"),
        (change(checksum=torch.ones(2)), r"checksum: content has \d+, expected tensor\("),
        (drop("version"), "version: got None"),
        (drop("x"), r"missing fields \['x'\]"),
        (drop("checksum"), r"missing fields \['checksum'\]"),
        (change(extra=1), r"unknown fields \['extra'\]"),
        (change(heads="2"), "header: heads: got '2'"),
        (change(groups=3), "header: groups: 2 heads do not divide"),
        (change(layers=1), "state: got torch.float32 of shape"),
        (change(window=6), r"count: got \[7\], expected 0\.\.6"),
        (change(window=15), "checksum: content has"),
        (lambda d: d.update(x=d["x"][:, :, :, :-1]), "x: got torch.bfloat16 of shape .*, expected torch.bfloat16"),
        (lambda d: d.update(B=d["B"].half()), "B: got torch.float16"),
        (lambda d: d.update(dt=None), "dt: got NoneType, expected a torch.Tensor"),
        (lambda d: d.update(state=d["state"].to("meta")), "state: got a .* tensor on meta"),
        (lambda d: d.update(count=d["count"].long()), "count: got torch.int64"),
        (lambda d: d.update(count=-d["count"]), r"count: got \[-7\], expected 0\.\.16"),
        (flip("state"), r"checksum: content has .*damaged"),
        (flip("x"), "checksum"),
        (flip("dt"), "checksum"),
    ],
)
def test_damaged_files_are_refused(damage: Callable[[dict[str, Any]], Any], message: str) -> None:
    data = exported()[0].to_dict()
    LogicalState.from_dict(data)
    damage(data)
    with pytest.raises((ValueError, TypeError), match=message):
        LogicalState.from_dict(data)


def test_what_is_no_dict_is_refused() -> None:
    with pytest.raises(TypeError, match="logical state: got list, expected a dict"):
        LogicalState.from_dict([])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change_spec,message",
    [
        ({"layers": 1}, "logical state: layers: got 2, expected 1 of this cache"),
        ({"heads": 4}, "heads: got 2, expected 4"),
        ({"head_dim": 80}, "head_dim: got 64"),
        ({"d_state": 128}, "d_state: got 64"),
        ({"groups": 2}, "groups: got 1"),
        ({"io_dtype": "f16"}, "io_dtype: got 'bf16', expected 'f16'"),
    ],
)
def test_another_geometry_is_refused(change_spec: dict[str, Any], message: str) -> None:
    backup, _ = exported()
    cache = make(dataclasses.replace(SPEC, **change_spec), 2)
    before = snapshot(cache)
    with pytest.raises(ValueError, match=message):
        cache.import_slots([0], backup)
    assert_unchanged(cache, before)


def test_bad_imports_write_nothing() -> None:
    backup, _ = exported()
    narrow = dataclasses.replace(SPEC, tokens=1, window=3)
    cache, no_decay = make(narrow, 2), ReplayCache.allocate(narrow, 2, "cpu")
    before, before_no_decay = snapshot(cache), snapshot(no_decay)
    torn = dataclasses.replace(backup, x=backup.x[:, :, :, 1:])
    for slots, state, error, message in (
        ([0, 1], backup, ValueError, r"slots: got shape \(2,\), expected \(1,\)"),
        ([2], backup, ValueError, r"slots: got 2 for row 0, expected 0\.\.1"),
        ([-1], backup, ValueError, "slots: got -1"),
        ([0], backup.to_dict(), TypeError, "state: got dict, expected LogicalState"),
        ([0], torn, ValueError, "logical state: x: got"),
    ):
        with pytest.raises(error, match=message):
            cache.import_slots(slots, state)  # type: ignore[arg-type]
    assert_unchanged(cache, before)
    with pytest.raises(ValueError, match="slots: got slot 1 more than once"):
        cache.import_slots([1, 1], backup.take([0, 0]))
    with pytest.raises(RuntimeError, match="A of layer 0 was not given"):
        no_decay.import_slots([0], backup)
    assert_unchanged(cache, before)
    assert_unchanged(no_decay, before_no_decay)


def test_tensors_of_an_autograd_graph_leave_the_cache_out_of_it() -> None:
    """A's parameter and a state that was computed with gradients: kernels cannot take tensors that require them."""
    backup, _ = exported()
    cache = make(SPEC, 2)
    cache.import_slots([0], dataclasses.replace(backup, state=backup.state.clone().requires_grad_()))
    cache.prefill_handoff([1], torch.zeros(2, 1, 2, 64, 64, requires_grad=True) + 1)
    cache.set_decay(0, torch.nn.Parameter(-torch.ones(2)))
    assert not cache.A.requires_grad and not any(layer.state.requires_grad for layer in cache.layers)
    assert torch.equal(cache.layers[1].state[0], backup.state[1, 0]) and cache.A[0].tolist() == [-1, -1]


def test_an_open_window_is_not_exported() -> None:
    """What was accepted of it is not known yet, so its logical state is not."""
    cache = make(SPEC, 3)
    cache.reset([0, 1, 2])
    cache.begin_step([1], [0], [3])
    with pytest.raises(ValueError, match=r"slot 1 has an open window of 3 tokens.*settle"):
        cache.export_slots([0, 1])
    cache.settle([1], [2])
    assert cache.export_slots([0, 1]).count.tolist() == [0, 2]
    cache.begin_step([2], [0], [4])
    cache.import_slots([2], exported()[0])  # ends the window of whoever was there: its count is stale
    cache.begin_step([2], [3], [0])
    assert cache.pnat.tolist() == [0, 2, 7] and cache.last_tokens.tolist() == [0, 0, 0]
    with pytest.raises(ValueError, match=r"slots: got 3 for row 1, expected 0\.\.2"):
        cache.export_slots([0, 3])
