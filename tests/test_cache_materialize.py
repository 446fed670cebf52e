"""Materialize and copy against a scalar model: any source, destination, count, permutation and cycle."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from cache_runs import SPEC, assert_unchanged, decays, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import as_array, token

from replayssm_cute.cache import CacheSpec, ReplayCache, stored

SPECS = [
    dataclasses.replace(SPEC, tokens=2, window=5),
    dataclasses.replace(SPEC, tokens=1, window=3, heads=4, groups=2, state_dtype="bf16", layers=1),
    dataclasses.replace(SPEC, tokens=3, window=3, state_dtype="f16", io_dtype="f16", layers=1),
]
SLOTS = 5


def filled(
    spec: CacheSpec, seed: int, *, open_windows: bool = False, live: dict[int, tuple[int, int]] | None = None
) -> ReplayCache:
    """Random checkpoints, rings and cursors, those of `live` (ring_start, pnat) as given; NaN in every dead row."""
    cache = ReplayCache.allocate(spec, SLOTS, "cpu", A=decays(spec), pad_slot_id=4)
    gen = torch.Generator().manual_seed(seed)
    cache.ring_start.copy_(torch.randint(0, spec.ring_rows, (SLOTS,), generator=gen))
    cache.pnat.copy_(torch.randint(0, spec.window + 1, (SLOTS,), generator=gen))
    for slot, cursors in (live or {}).items():
        cache.ring_start[slot], cache.pnat[slot] = cursors
    if open_windows:
        cache.last_tokens.copy_(torch.randint(0, spec.tokens + 1, (SLOTS,), generator=gen))
    offset = (torch.arange(spec.ring_rows)[None] - cache.ring_start[:, None]) % spec.ring_rows
    dead = offset >= cache.pnat[:, None]
    for layer in cache.layers:
        for name, made in stored.encode(spec, torch.randn(layer.state.shape, generator=gen)).items():
            stored.as_bits(getattr(layer, name)).copy_(stored.as_bits(made))
        layer.x_cache.copy_(torch.randn(layer.x_cache.shape, generator=gen))
        layer.B_cache.copy_(torch.randn(layer.B_cache.shape, generator=gen))
        layer.dt_cache.copy_(torch.rand(layer.dt_cache.shape, generator=gen) * 0.1)
        for t in (layer.x_cache, layer.B_cache, layer.dt_cache):
            t.transpose(1, 2)[dead] = float("nan")
    return cache


def folded(cache: ReplayCache, layer: int, slot: int, count: int) -> np.ndarray:
    """The scalar model: the checkpoint of a slot advanced through its first `count` live rows, float64."""
    t, spec = cache.layers[layer], cache.spec
    S = as_array(stored.decode(t, torch.tensor([slot]))[0])
    for j in range(min(max(count, 0), int(cache.pnat[slot]))):
        row = (int(cache.ring_start[slot]) + j) % spec.ring_rows
        for h in range(spec.heads):
            g = h // (spec.heads // spec.groups)
            S[h], _ = token(
                S[h], float(decays(spec)[layer][h]), float(t.dt_cache[slot, h, row]), as_array(t.x_cache[slot, h, row]),
                as_array(t.B_cache[slot, g, row]),
            )  # fmt: skip
    return S


@st.composite
def moves(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(source, destination, count): destinations distinct where live; padding (-1 or slot 4) on either side."""
    destinations = draw(st.permutations(range(4)))[: draw(st.integers(0, 4))]
    rows = [(draw(st.sampled_from([0, 1, 2, 3, 0, 1, 2, 3, -1, 4])), d) for d in destinations]
    rows += [(draw(st.integers(0, 3)), draw(st.sampled_from([-1, 4, -3]))) for _ in range(draw(st.integers(0, 2)))]
    return [(s, d, draw(st.integers(-1, 7))) for s, d in draw(st.permutations(rows))]


CYCLES = [
    [(0, 1, 2), (1, 2, 1), (2, 0, 3)],
    [(0, 1, 0), (1, 0, 0)],
    [(3, 3, 2), (-1, 3, 1), (3, 1, 5)],
    [(2, 0, 1), (2, 1, 2), (2, 2, 3), (2, 3, 0)],
]


def expected_moves(rows: list[tuple[int, int, int]]) -> dict[int, tuple[int, int]]:
    return {d: (s, n) for s, d, n in rows if s not in (-1, 4) and d in range(4)}


def check_materialize(spec: CacheSpec, rows: list[tuple[int, int, int]], seed: int) -> None:
    cache, before = filled(spec, seed), filled(spec, seed)
    old = snapshot(cache)
    cache.materialize(*(torch.tensor([row[k] for row in rows], dtype=torch.int32) for k in range(3)))
    live = expected_moves(rows)
    tolerance = {"f32": 1e-6, "bf16": 2**-8, "f16": 2**-11}[spec.state_dtype]
    now = snapshot(cache)
    for name in now:
        for slot in range(SLOTS):
            if slot in live and name.startswith("state"):
                layer = int(name[6:-1])
                source, count = live[slot]
                model = folded(before, layer, source, count)
                got = cache.layers[layer].state[slot]
                if min(count, int(before.pnat[source])) <= 0:
                    assert torch.equal(now[name][slot], old[name][source]), "count 0 is a copy of the bits"
                else:
                    np.testing.assert_allclose(as_array(got), model, rtol=tolerance, atol=tolerance)
            elif slot in live and "[" not in name:
                assert int(now[name][slot]) == 0, name
            else:
                assert torch.equal(now[name][slot], old[name][slot]), (name, slot)


@pytest.mark.parametrize("rows", CYCLES)
@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.state_dtype)
def test_cycles(spec: CacheSpec, rows: list[tuple[int, int, int]]) -> None:
    """Sources that are destinations: every one is read before any is written."""
    for seed in (1, 2, 3):
        check_materialize(spec, rows, seed)


@settings(max_examples=40, deadline=None)
@given(moves(), st.integers(0, 2), st.integers(0, 10**6))
def test_any_moves(rows: list[tuple[int, int, int]], which: int, seed: int) -> None:
    check_materialize(SPECS[which], rows, seed)


@settings(max_examples=30, deadline=None)
@given(moves(), st.integers(0, 10**6))
def test_copy_moves_whole_slots(rows: list[tuple[int, int, int]], seed: int) -> None:
    """Every bit of a slot, dead rows and open window too; all other slots keep theirs."""
    cache = filled(SPECS[0], seed, open_windows=True)
    old = snapshot(cache)
    cache.copy([s for s, _, _ in rows], [d for _, d, _ in rows])
    live = expected_moves(rows)
    for name, now in snapshot(cache).items():
        for slot in range(SLOTS):
            source = live.get(slot, (slot, 0))[0]
            assert torch.equal(now[slot], old[name][source]), (name, slot)


def test_nan_payloads_are_copied_and_kept() -> None:
    """Checkpoints that hold NaNs of any payload move bit for bit, padding's stand-in too."""
    for dtype, pattern in (("f32", 0x7F812345), ("bf16", 0x7F83)):
        spec = dataclasses.replace(SPECS[0], state_dtype=dtype)
        cache = filled(spec, 1)
        integers = torch.int32 if dtype == "f32" else torch.int16
        for t in (layer.state.view(integers) for layer in cache.layers):
            t.fill_(pattern)
        cache.materialize([0, -1], [1, -1], [0, 0])
        cache.materialize([-1], [-1], [3])
        cache.copy([1], [2])
        for layer in cache.layers:
            assert bool((layer.state.view(integers) == pattern).all())


def test_a_source_that_is_no_destination_is_unchanged_and_may_serve_many() -> None:
    spec = SPECS[0]
    cache = filled(spec, 5)
    cache.pnat[2] = 5
    before = snapshot(cache)
    cache.materialize([2, 2], [0, 1], [2, 2])
    assert_unchanged(cache, before, [2, 3, 4])
    for layer in cache.layers:
        assert torch.equal(layer.state[0], layer.state[1])


def test_an_open_window_is_no_source_but_may_be_a_destination() -> None:
    """A step that flushed has folded rows that the cursors still count: folding them again would be wrong."""
    cache = filled(SPECS[0], 6)
    cache.begin_step([2, 1], [0, 0])
    before = snapshot(cache)
    with pytest.raises(ValueError, match="src_slots: slot 2 has an open window of 2 tokens"):
        cache.materialize([0, 2], [3, 1], [1, 1])
    assert_unchanged(cache, before)
    cache.materialize([0, 2], [1, -1], [1, 1])
    assert cache.last_tokens.tolist() == [0, 0, 2, 0, 0]
