"""A request goes on as if nothing had happened, whatever happened to its slot: against the float64 recurrence."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from cache_runs import SPEC, Request, Run, assert_unchanged, cache_tensors, decays, make, snapshot, started
from oracle import as_array, token

from replayssm_cute.cache import CacheSpec, ReplayCache

SMALL = dataclasses.replace(SPEC, tokens=2, window=5)
ONE = dataclasses.replace(SPEC, tokens=1, window=4)


def test_two_requests_decode_with_rollback() -> None:
    """The harness itself: 20 steps, slots in any order, flushes and rejections among them."""
    cache = make(SMALL, 4)
    run = Run(cache)
    cache.reset([3, 1])
    run.decode([3, 1], [Request(SMALL), Request(SMALL)], 20)
    assert run.flushed >= 6


def test_a_cache_that_lost_its_ring_is_caught() -> None:
    """The comparison bites: forgetting one live row fails it."""
    cache = make(SPEC, 2)
    run = Run(cache)
    request = started(run, 0, ring_start=3, pending=5)
    cache.pnat[0] = 4
    with pytest.raises(AssertionError, match="Not equal"):
        run.step([0], [request], [1])


@pytest.mark.fault(6)
@pytest.mark.parametrize("ring_start,pending", [(14, 7), (0, 0), (19, 16), (5, 1)])
def test_a_backup_carries_the_accepted_tokens_of_the_ring(ring_start: int, pending: int) -> None:
    """Exported (the first case wraps around the ring's end), the slot overwritten, imported elsewhere, continued."""
    cache = make(SPEC, 3)
    run = Run(cache)
    request = started(run, 1, ring_start=ring_start, pending=pending)
    before = snapshot(cache)
    backup = cache.export_slots([1])
    assert_unchanged(cache, before)
    cache.reset([1])
    run.decode([1], [Request(SPEC)], 3)  # someone else has the slot meanwhile
    cache.import_slots([2], backup)
    run.decode([2], [request], 12)


@pytest.mark.fault(4)
def test_a_reused_slot_knows_nothing_of_its_past() -> None:
    """A slot left at ring_start 13 with 7 pending rows, reset: the next request starts from zero."""
    cache = make(SPEC, 1)
    run = Run(cache)
    started(run, 0, ring_start=13, pending=7)
    cache.reset([0])
    run.decode([0], [Request(SPEC)], 12)


@pytest.mark.fault(7)
def test_a_prefix_copy_takes_the_ring_along() -> None:
    """A copy of a slot with 5 pending rows goes its own way, and so does the original."""
    cache = make(SPEC, 3)
    run = Run(cache)
    request = started(run, 0, ring_start=17, pending=5)
    twin = request.fork()
    cache.copy([0], [2])
    for name, t in snapshot(cache).items():
        assert torch.equal(t[0], t[2]), name
    run.decode([2], [twin], 8)
    run.decode([0, 2], [request, twin], 8)


@pytest.mark.fault(14)
def test_a_preempted_request_is_recomputed() -> None:
    """Preempted with 7 pending rows, its slot reset, its tokens run again: it goes on like an uninterrupted one."""
    cache = make(SPEC, 2)
    run = Run(cache)
    request = started(run, 0, ring_start=4, pending=7)
    cache.reset([0])
    again = Request(SPEC)
    for at in range(0, len(request.tokens), SPEC.tokens):
        chunk = request.tokens[at : at + SPEC.tokens]
        run.step([0], [again], [len(chunk)], given=[chunk])
    for one, other in zip(again.layers, request.layers, strict=True):
        np.testing.assert_array_equal(one.state, other.state)
    run.decode([0], [request], 8)


@pytest.mark.parametrize("count", [0, 3, 7, 99])
def test_a_materialized_prefix_continues(count: int) -> None:
    """A slot folded at the first `count` of its 7 live rows is the request as of that token; the source goes on."""
    cache = make(SPEC, 3)
    run = Run(cache)
    request = started(run, 0, ring_start=16, pending=7)
    earlier = Request(SPEC)
    for tokens in request.tokens[: len(request.tokens) - 7 + min(count, 7)]:
        for layer, (x, dt, B, C) in enumerate(tokens):
            rate = decays(SPEC)[layer].double().numpy()
            earlier.layers[layer].run(rate, *(as_array(t[None]) for t in (dt, x, B, C)), 1)
    cache.materialize([0], [2], [count])
    assert int(cache.pnat[2]) == 0
    run.decode([2, 0], [earlier, request], 10)


@pytest.mark.parametrize("state", ["f32", "bf16"])
def test_a_prefill_state_enters_a_used_slot(state: str) -> None:
    spec = dataclasses.replace(SPEC, state_dtype=state)
    cache = make(spec, 2)
    started(Run(cache, rtol=2e-2), 1, ring_start=13, pending=7)
    gen = torch.Generator().manual_seed(3)
    states = torch.randn(2, 1, 2, 64, 64, generator=gen)
    cache.begin_step([1], [0])  # even an open window does not survive
    cache.prefill_handoff([1], states)
    assert cache.last_tokens.tolist() == [0, 0]
    exact = states if state == "f32" else states.bfloat16()
    assert all(torch.equal(cache.layers[i].state[1], exact[i, 0].to(cache.layers[i].state.dtype)) for i in range(2))
    request = Request(spec, [as_array(exact[i, 0]) for i in range(2)])
    Run(cache, rtol=2e-6 if state == "f32" else 2e-2).decode([1], [request], 10)


def test_a_prefill_may_be_handed_over_layer_by_layer() -> None:
    cache, whole = make(SMALL, 3), make(SMALL, 3)
    states = torch.randn(2, 2, 2, 64, 64, generator=torch.Generator().manual_seed(4)).double()
    for layer in (1, 0):
        cache.prefill_handoff([2, 0], states[layer], layer=layer)
    whole.prefill_handoff(torch.tensor([2, 0], dtype=torch.int32), list(states))
    assert_unchanged(cache, snapshot(whole))
    assert torch.equal(cache.layers[1].state[0], states[1, 1].float())


@pytest.mark.fault(5)
@pytest.mark.parametrize("prefilled", [False, True])
def test_a_prompt_of_one_token(prefilled: bool) -> None:
    """Run as decode from the start, or as a prefill of one token, for W + 2 steps and more: the same request."""
    cache = make(ONE, 2)
    run = Run(cache)
    started(run, 1, ring_start=2, pending=3)
    request = Request(ONE)
    cache.reset([1])
    if prefilled:
        states = []
        for layer, (x, dt, B, C) in enumerate(run.draw()):
            rate = decays(ONE)[layer].double().numpy()
            heads = [
                token(np.zeros((64, 64)), rate[h], float(dt[h]), as_array(x[h]), as_array(B[0]))[0] for h in range(2)
            ]
            states.append(torch.tensor(np.stack(heads))[None])
            request.layers[layer].run(rate, *(as_array(t[None]) for t in (dt, x, B, C)), 1)
        cache.prefill_handoff([1], states)
    run.flushed = 0
    for _ in range(2 * ONE.window + 3):
        run.step([1], [request], [1])
    assert run.flushed == 2


def test_deferred_commits_decode_alike() -> None:
    """The window before is committed when a step begins; after a reset the count that is handed over is stale."""
    cache = make(SMALL, 4)
    run = Run(cache)
    cache.reset([0, 3])
    requests, last = [Request(SMALL), Request(SMALL)], [2, 1]  # counts of nothing: the slots were just reset
    resets = 0
    for step in range(30):
        slots = torch.tensor([3, 0, -1])
        if step in (7, 8, 20):
            cache.reset([3])
            requests[0] = Request(SMALL)
            resets += 1
        cache.begin_step(slots, torch.tensor([*last, 2]))
        assert cache.last_tokens.tolist() == [2, 0, 0, 2]
        last = torch.randint(0, 3, (2,), generator=run.gen).tolist()
        run.model([3, 0], requests, last)
    assert run.flushed >= 5 and resets == 3
    cache.settle([3, 0], last)
    assert cache.last_tokens.tolist() == [0, 0, 0, 0]
    backup = cache.export_slots([0, 3])
    cache.import_slots([1, 2], backup)
    run.decode([1, 2], requests[::-1], 6)


def test_ragged_windows_flush_by_their_own_length() -> None:
    """Rows that ran T_i <= T tokens, T_i = 0 too: the ring and the cursors keep to the history of accepted tokens."""
    spec = SMALL
    cache = make(spec, 3)
    cache.reset([0, 1, 2])
    run, gen = Run(cache), torch.Generator().manual_seed(5)
    requests = [Request(spec) for _ in range(3)]
    lengths, flushes = set(), 0
    for _ in range(40):
        lens = torch.randint(0, spec.tokens + 1, (3,), generator=gen)
        accepted = (torch.rand(3, generator=gen) * (lens + 1)).int()
        for slot, request in enumerate(requests):
            n, a = int(lens[slot]), int(accepted[slot])
            lengths.add(n)
            flushes += ragged_step(cache, slot, [run.draw() for _ in range(n)], request, a)
        cache.commit(torch.tensor([0, 1, 2]), accepted, lens)
        for slot, request in enumerate(requests):
            for layer, history in enumerate(request.layers):
                np.testing.assert_allclose(logical(cache, layer, slot), history.state, rtol=0, atol=1e-5)
    assert lengths == {0, 1, 2} and flushes >= 10


def ragged_step(cache: ReplayCache, slot: int, window: list, request: Request, accepted: int) -> bool:
    """What a ragged step does to one slot, from the definition: flush iff pnat + T_i > W, then append."""
    spec, n = cache.spec, len(window)
    start, pnat = int(cache.ring_start[slot]), int(cache.pnat[slot])
    flush = n > 0 and pnat + n > spec.window
    for layer, t in enumerate(cache.layers):
        if flush:
            t.state[slot] = torch.tensor(logical(cache, layer, slot))
        for i, tokens in enumerate(window):
            row = (start + pnat + i) % spec.ring_rows
            x, dt, B, C = tokens[layer]
            t.x_cache[slot, :, row], t.dt_cache[slot, :, row], t.B_cache[slot, :, row] = x, dt, B
            if i < accepted:
                rate = decays(spec)[layer].double().numpy()
                request.layers[layer].run(rate, *(as_array(v[None]) for v in (dt, x, B, C)), 1)
    return flush


def logical(cache: ReplayCache, layer: int, slot: int) -> np.ndarray:
    """The logical state of a slot (H, P, N), by the oracle."""
    t, spec = cache.layers[layer], cache.spec
    S = as_array(t.state[slot])
    for j in range(int(cache.pnat[slot])):
        row = (int(cache.ring_start[slot]) + j) % spec.ring_rows
        for h in range(spec.heads):
            g = h // (spec.heads // spec.groups)
            S[h], _ = token(
                S[h], float(decays(spec)[layer][h]), float(t.dt_cache[slot, h, row]), as_array(t.x_cache[slot, h, row]),
                as_array(t.B_cache[slot, g, row]),
            )  # fmt: skip
    return S


@pytest.mark.parametrize("pad", [-1, 0, 2])
def test_padding_touches_nothing(pad: int) -> None:
    """Repeated padding rows, all padding, and none at all leave every bit; beside a live row only that one moves."""
    cache = make(SMALL, 4, pad_slot_id=pad)
    run = Run(cache)
    for slot in sorted({0, 1, 2, 3} - {pad}):
        started(run, slot, ring_start=slot, pending=4)
    states = torch.randn(2, 3, 2, 64, 64)
    for slots in ([pad, -1, pad], [-7, -1, -2], []):
        before, n = snapshot(cache), len(slots)
        cache.reset(slots)
        cache.commit(slots, [1] * n)
        cache.commit(slots, [1] * n, [2] * n)
        cache.begin_step(slots, [1] * n)
        cache.begin_step(slots, [1] * n, [2] * n)
        cache.settle(slots, [1] * n)
        cache.materialize(slots, slots, [2] * n)
        cache.materialize(slots, [3, 1, 2][:n], [2] * n)
        cache.copy(slots, slots)
        cache.copy([3, 1, 2][:n], slots)
        cache.prefill_handoff(slots, states[:, :n])
        assert_unchanged(cache, before)
    for act in (
        lambda rows, lens, _: cache.commit(rows, [1] * len(rows), lens),
        lambda rows, _, __: cache.materialize(rows, rows, [2] * len(rows)),
        lambda rows, _, __: cache.copy([1 if pad != 1 else 2] * len(rows), rows),
        lambda rows, _, __: cache.reset(rows),
        lambda rows, _, states: cache.prefill_handoff(rows, states),
        lambda rows, lens, _: cache.begin_step(rows, [1] * len(rows), lens),
    ):
        before = snapshot(cache)
        act([pad, 3, -1], [2, 2, 2], states)
        padded = snapshot(cache)
        assert_unchanged(cache, before, [0, 1, 2])
        with pytest.raises(AssertionError):
            assert_unchanged(cache, before, [3])
        for t, old in zip(cache_tensors(cache).values(), before.values(), strict=True):
            t.view(old.dtype).copy_(old)
        act([3], [2], states[:, 1:2])
        assert_unchanged(cache, padded)  # the live row moved as it does alone


def test_fixed_addresses() -> None:
    """Nothing is reallocated by any operation."""
    cache = make(SMALL, 4)
    run = Run(cache)
    started(run, 0, ring_start=1, pending=3)
    addresses = {name: t.data_ptr() for name, t in cache_tensors(cache).items()}
    cache.copy([0], [1])
    cache.import_slots([2], cache.export_slots([1]))
    cache.prefill_handoff([3], torch.zeros(2, 1, 2, 64, 64))
    cache.commit([0], [1])
    cache.commit([0], [1], [1])
    cache.materialize([0], [3], [1])
    cache.reset([3])
    cache.begin_step([0], [1])
    cache.settle([0], [1])
    assert {name: t.data_ptr() for name, t in cache_tensors(cache).items()} == addresses


def test_the_step_takes_the_tensors_of_a_layer() -> None:
    """step_args gives the views themselves, for the step of a layer of a group with its shared cursors."""
    spec = CacheSpec(layers=3, heads=4, head_dim=80, d_state=128, groups=2, tokens=3, window=7, state_dtype="f16")
    cache = ReplayCache.allocate(spec, 2, "cpu")
    args = cache.step_args(2)
    assert list(args) == ["state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens"]
    assert args["state"].data_ptr() == cache.layers[2].state.data_ptr()
    assert args["prev_num_accepted_tokens"].data_ptr() == cache.step_args(0)["prev_num_accepted_tokens"].data_ptr()
    assert tuple(args["x_cache"].shape) == (2, 4, 10, 80)
    for layer in (-1, 3, True):
        with pytest.raises(IndexError, match=r"layer: got .*, expected 0\.\.2"):
            cache.step_args(layer)
