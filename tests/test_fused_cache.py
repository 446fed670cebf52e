"""LayerCache: the conv's rings go through a slot's life with everything else."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
from cache_runs import LOW
from fused_calls import layer, random_layer_call

import replayssm_cute
from replayssm_cute.cache import CacheSpec, ReplayCache
from replayssm_cute.fused import conv_ring
from replayssm_cute.fused.cache import LayerCache, LayerState, bytes_per_slot, slots_that_fit
from replayssm_cute.problem import Problem

SPEC = CacheSpec(layers=2, heads=2, head_dim=64, d_state=64, groups=1, tokens=4, window=8)
CHANNELS = 256


def made(spec: CacheSpec = SPEC, slots: int = 6) -> LayerCache:
    """A cache full of NaN, as pages of an engine may be."""
    cache = LayerCache.allocate(spec, slots, "cpu", A=[torch.full((2,), -1.0)] * 2)
    cache.conv.fill_(float("nan"))
    return cache


class Requests:
    """Decodes on every layer of a cache, and remembers what each slot's accepted inputs were."""

    def __init__(self, cache: LayerCache, seed: int) -> None:
        spec = cache.cache.spec
        step = Problem(2, 64, 64, 1, spec.tokens, spec.window)
        self.problem = layer(step)
        self.cache, self.rng, self.gen = cache, random.Random(seed), torch.Generator().manual_seed(seed)
        self.weights = random_layer_call(self.problem, 1, seed=7)
        self.seen: dict[int, list[torch.Tensor]] = {}

    def step(self, slots: list[int], accepted: list[int], projected: torch.Tensor | None = None) -> torch.Tensor:
        """Outputs of layer 1 (b, T, d_inner)."""
        T, b = self.problem.step.tokens, len(slots)
        if projected is None:
            projected = torch.randn(b, T, self.problem.width + 6, generator=self.gen).to(torch.bfloat16)[..., :-6]
        for at in range(2):
            call = dataclasses.replace(
                self.weights, **self.cache.step_args(at), projected=projected, state_batch_indices=torch.tensor(slots),
                out=torch.empty(b, T, self.problem.d_inner, dtype=torch.bfloat16),
            )  # fmt: skip
            given = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
            replayssm_cute.decode_step(**given)
        self.cache.cache.commit(slots, accepted)
        for row, slot in enumerate(slots):
            self.seen[slot] += list(call.conv_inputs()[row, : accepted[row]])
        return call.out

    def check(self) -> None:
        cache = self.cache.cache
        for slot, inputs in self.seen.items():
            found = conv_ring.history(self.cache.conv, cache.ring_start, cache.pnat, torch.tensor([slot]))
            zeros = [torch.zeros(CHANNELS, dtype=torch.bfloat16)] * 3
            for at in range(2):
                assert torch.equal(found[at, 0], torch.stack([*zeros, *inputs][-3:])), slot


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_a_hundred_operations(tokens: int) -> None:
    """Resets, handoffs, steps, copies (chains and cycles), folds and transfers: the conv sees accepted inputs alone."""
    cache = made(dataclasses.replace(SPEC, tokens=tokens))
    requests = Requests(cache, tokens)
    rng = requests.rng
    cache.reset(range(6))
    requests.seen = {slot: [] for slot in range(6)}
    for _ in range(100):
        slots = rng.sample(range(6), 3)
        kind = rng.choice(["reset", "handoff", "copy", "fold", "move", "step", "step", "step"])
        if kind == "reset":
            cache.reset([slots[0], -1])
            requests.seen[slots[0]] = []
        elif kind == "handoff":
            inputs = torch.randn(2, 2, 3, CHANNELS, generator=requests.gen).to(torch.bfloat16)
            inputs[1] = inputs[0]
            cache.prefill_handoff([-1, slots[0]], torch.zeros(2, 2, 2, 64, 64), inputs)
            requests.seen[slots[0]] = list(inputs[0, 1])
        elif kind == "copy":
            a, b, c = slots
            cache.copy([a, b, 3, -1], [b, a, -1, c])
            requests.seen[a], requests.seen[b] = list(requests.seen[b]), list(requests.seen[a])
        elif kind == "fold":
            a, b, c = slots
            live = cache.cache.pnat[torch.tensor([a, b])].tolist()
            counts = [rng.randint(min(max(0, 3 - tokens), n), n) for n in live]
            cache.materialize([a, b, 3, -1], [b, c, -1, 0], [*counts, 0, 0])
            kept = [
                requests.seen[s][: len(requests.seen[s]) - n + k] for s, n, k in zip((a, b), live, counts, strict=True)
            ]
            requests.seen[b], requests.seen[c] = kept
        elif kind == "move":
            state = cache.export_slots(slots[:2])
            cache.import_slots([slots[1], slots[2]], state)
            a, b, c = slots
            requests.seen[b], requests.seen[c] = list(requests.seen[a]), list(requests.seen[b])
        else:
            requests.step(slots, [rng.randint(0, tokens) for _ in slots])
        requests.check()


@pytest.mark.parametrize(("tokens", "window"), [(4, 8), (1, 3), (2, 16)])
def test_a_request_goes_on_in_a_cache_of_another_window(tokens: int, window: int) -> None:
    source, target = made(), made(dataclasses.replace(SPEC, tokens=tokens, window=window))
    here = Requests(source, 1)
    source.reset([4])
    here.seen[4] = []
    for accepted in (4, 3, 2, 4, 1):
        here.step([4], [accepted])
    there = Requests(target, 1)
    there.weights = here.weights
    for at in range(2):
        target.cache.set_decay(at, here.weights.A)  # W of 3 has rows to fold
    target.import_slots([1], source.export_slots([4]))
    there.seen[1] = list(here.seen[4])
    there.check()
    projected = torch.randn(1, 4, here.problem.width + 6, generator=here.gen).to(torch.bfloat16)
    expected = here.step([4], [4], projected[..., :-6])
    given = projected[:, : there.problem.step.tokens, :-6]
    assert torch.allclose(there.step([1], [tokens], given).float(), expected[:, :tokens].float(), rtol=2e-2, atol=2e-2)


def test_bytes_are_those_that_are_allocated() -> None:
    cache = made()
    held = sum(t.nbytes for each in cache.cache.layers for t in each.named().values())
    assert bytes_per_slot(SPEC) == (held + cache.conv.nbytes) // 6 + 12
    total = 6 * bytes_per_slot(SPEC) + SPEC.fixed_bytes()
    assert slots_that_fit(total, SPEC) == 6 and slots_that_fit(total - 1, SPEC) == 5 and slots_that_fit(0, SPEC) == 0


@pytest.mark.parametrize(
    ("free", "error", "message"),
    [
        (-1, ValueError, "free_bytes: got -1, expected at least 0"),
        (2.0e9, TypeError, "free_bytes: got float, expected int"),
        (True, TypeError, "free_bytes: got bool, expected int"),
        (None, TypeError, "free_bytes: got NoneType, expected int"),
    ],
)
def test_bad_numbers_of_bytes_are_refused(free: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        slots_that_fit(free, SPEC)
    with pytest.raises(TypeError, match="spec: got NoneType, expected CacheSpec"):
        slots_that_fit(10**9, None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "window"), [(1, 8), (1, 3), (2, 5), (2, 9), (3, 4), (4, 8)])
@pytest.mark.parametrize("target_tokens", [1, 2, 3, 4])
def test_folds_after_an_import_see_no_earlier_request(tokens: int, window: int, target_tokens: int) -> None:
    """From a smaller T inputs before the oldest live rows are missing: every fold that is allowed still gets its own.

    The slots' rings are full of NaN, of what was there before.
    """
    for live in range(window + 1):
        source = made(dataclasses.replace(SPEC, tokens=tokens, window=window))
        requests = Requests(source, live)
        source.reset([4])
        requests.seen[4] = []
        while len(requests.seen[4]) < 2 * window or int(source.cache.pnat[4]) != live:
            # A flush keeps so many that whole windows lead to the rows that are wanted.
            flushes = int(source.cache.pnat[4]) + tokens > window
            requests.step([4], [(live - 1) % tokens + 1 if flushes and live else 0 if flushes else tokens])
        state = source.export_slots([4])
        assert bool(torch.isfinite(state.inputs).all()), "not a row of what was in the ring before"
        target = made(dataclasses.replace(SPEC, tokens=target_tokens, window=8))
        target.import_slots([1], state)
        assert bool(torch.isfinite(target.conv[:, 1]).all())
        kept = int(target.cache.pnat[1])
        folded = live - kept
        assert folded <= max(0, min(3, target_tokens) - tokens, live - 8), "no more than has to be"
        seen = [*[torch.zeros(CHANNELS, dtype=torch.bfloat16)] * 3, *requests.seen[4]]
        for count in range(min(max(0, 3 - target_tokens), kept), kept + 1):
            target.materialize([1], [2], [count])
            cache = target.cache
            found = conv_ring.history(target.conv, cache.ring_start, cache.pnat, torch.tensor([2]))
            end = len(seen) - kept + count
            for at in range(2):
                assert torch.equal(found[at, 0], torch.stack(seen[end - 3 : end])), (live, count)


@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_an_export_tells_nothing_of_an_earlier_request(tokens: int) -> None:
    """A new request beside one with many live rows: what its slot's ring held before is not among its inputs."""
    cache = made(dataclasses.replace(SPEC, tokens=tokens))
    requests = Requests(cache, 4)
    cache.reset([1, 4])
    requests.seen = {1: [], 4: []}
    for _ in range(8 // tokens):
        requests.step([4], [tokens])
    state = cache.export_slots([1, 4])
    assert state.logical.count.tolist() == [0, 8]
    assert not bool(state.inputs[:, 0].any()) and bool(torch.isfinite(state.inputs).all())


def test_a_state_with_few_inputs_is_folded_as_far_as_they_reach() -> None:
    """Made by hand, with the last three inputs alone: only the newest point can go on."""
    source = made()
    requests = Requests(source, 3)
    source.reset([4])
    requests.seen[4] = []
    for accepted in (4, 2, 3, 2):
        requests.step([4], [accepted])
    state = source.export_slots([4])
    live = int(source.cache.pnat[4])
    assert live > 3
    for m, kept in ((3, 0), (4, 1), (live + 2, live - 1), (live + 3, live)):
        target = made()
        target.import_slots([0], LayerState(state.logical, state.inputs[..., -m:, :]))
        assert int(target.cache.pnat[0]) == kept
        assert bool(torch.isfinite(target.conv[:, 0]).all())
    bare = LayerCache.allocate(SPEC, 1, "cpu")
    before = bare.conv.clone()
    with pytest.raises(RuntimeError, match="A of layer 0 was not given"):
        bare.import_slots([0], LayerState(state.logical, state.inputs[..., -3:, :]))
    assert torch.equal(bare.conv, before) and int(bare.cache.pnat[0]) == 0


def test_bad_input_is_refused_by_name() -> None:
    cache = made()
    cache.reset(range(6))
    inner = cache.cache
    state = cache.export_slots([1])
    zeros = torch.zeros(2, 1, 3, CHANNELS, dtype=torch.bfloat16)
    short = made(dataclasses.replace(SPEC, tokens=1))
    short.reset(range(6))
    short.cache.pnat[2] = 5
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: LayerCache(inner, cache.conv[:1]), ValueError, "conv: got shape"),
        (lambda: LayerCache(inner, cache.conv.float()), TypeError, "conv: got torch.float32"),
        (lambda: LayerCache(inner, None), TypeError, "conv: got NoneType"),
        (lambda: LayerCache(inner, cache.conv.mT.contiguous().mT), ValueError, "conv: got stride 12 on its last"),
        (
            lambda: LayerCache(inner, cache.conv[:1].expand(2, -1, -1, -1)),
            ValueError,
            "conv: got stride 0 on dimension 0, expected a positive one",
        ),
        (
            lambda: LayerCache(inner, cache.conv[:, :1].expand(-1, 6, -1, -1)),
            ValueError,
            "conv: got stride 0 on dimension 1",
        ),
        (
            lambda: LayerCache(inner, cache.conv.as_strided(cache.conv.shape, (8, 3072, 256, 1))),
            ValueError,
            r"conv: got strides \(8, 3072, 256, 1\) .* expected no overlapping elements",
        ),
        (lambda: LayerCache(None, cache.conv), TypeError, "cache: got NoneType, expected ReplayCache"),
        (lambda: LayerCache.allocate(None, 2, "cpu"), TypeError, "spec: got NoneType, expected CacheSpec"),
        *(
            (
                lambda kind=kind: LayerCache.allocate(dataclasses.replace(SPEC, **kind), 2, "cpu"),
                NotImplementedError,
                "spec: got .* states, expected f32, bf16 or f16 ones without a copy",
            )
            for kind in LOW
        ),
        (
            lambda: LayerCache.allocate(dataclasses.replace(SPEC, tokens=1, window=2), 2, "cpu"),
            ValueError,
            "window: got W = 2",
        ),
        (lambda: cache.reset([9]), ValueError, "slots: got 9"),
        (lambda: cache.prefill_handoff([1], torch.zeros(2, 1, 2, 64, 64), None), TypeError, "inputs: got NoneType"),
        (
            lambda: cache.prefill_handoff([1], torch.zeros(2, 1, 2, 64, 64), torch.zeros(2, 1, 2, CHANNELS)),
            ValueError,
            "inputs: got shape",
        ),
        *(
            (
                lambda kind=kind: cache.prefill_handoff(
                    [1], torch.zeros(2, 1, 2, 64, 64), torch.zeros(2, 1, 3, CHANNELS, dtype=kind)
                ),
                TypeError,
                f"inputs: got {kind}, expected torch.bfloat16, the cache's input dtype",
            )
            for kind in (torch.float32, torch.float16, torch.int64, torch.bool)
        ),
        (
            lambda: cache.prefill_handoff([1], torch.zeros(2, 1, 2, 64, 64, dtype=torch.int32), zeros),
            TypeError,
            "states: got torch.int32 for layer 0, expected a float tensor",
        ),
        (lambda: cache.prefill_handoff([1], None, zeros), TypeError, "states: got NoneType, expected tensors"),
        (lambda: cache.prefill_handoff(None, None, zeros), TypeError, "slots: got NoneType"),
        (lambda: cache.materialize([1], [2, 3], [0]), ValueError, "dst_slots: got shape"),
        (lambda: cache.materialize([6], [2], [0]), ValueError, r"src_slots: got 6 for row 0, expected 0\.\.5"),
        (lambda: cache.materialize([1], [6], [0]), ValueError, r"dst_slots: got 6 for row 0, expected 0\.\.5"),
        (lambda: cache.materialize([1, 2], [3, 3], [0, 0]), ValueError, "dst_slots: got slot 3 more than once"),
        (lambda: cache.materialize(None, [3], [0]), TypeError, "src_slots: got NoneType"),
        (lambda: cache.materialize([1], None, [0]), TypeError, "dst_slots: got NoneType"),
        (lambda: cache.materialize([1], [3], None), TypeError, "count: got NoneType"),
        (lambda: cache.copy([9], [3]), ValueError, "src_slots: got 9 for row 0"),
        (lambda: cache.copy([1], [9]), ValueError, "dst_slots: got 9 for row 0"),
        (lambda: cache.copy(None, [3]), TypeError, "src_slots: got NoneType"),
        (lambda: cache.reset(None), TypeError, "slots: got NoneType"),
        (lambda: cache.export_slots(None), TypeError, "slots: got NoneType"),
        (lambda: cache.export_slots([9]), ValueError, "slots: got 9"),
        (lambda: cache.import_slots(None, state), TypeError, "slots: got NoneType"),
        (lambda: cache.import_slots([1], None), TypeError, "state: got NoneType, expected LayerState"),
        (
            lambda: cache.import_slots([1], LayerState(None, state.inputs)),
            TypeError,
            "state: got a logical state of NoneType, expected LogicalState",
        ),
        (
            lambda: cache.import_slots([1], LayerState(state.logical, None)),
            TypeError,
            "state: got inputs of NoneType, expected a torch.Tensor",
        ),
        (
            lambda: short.materialize([2], [3], [1]),
            ValueError,
            "count: got 1 of 5 live rows for row 0, expected at least 2",
        ),
        (lambda: cache.copy([1, 2], [3, 3]), ValueError, "dst_slots: got slot 3 more than once"),
        (lambda: cache.import_slots([1], state.logical), TypeError, "state: got LogicalState"),
        (
            lambda: cache.import_slots([1], LayerState(state.logical, state.inputs[..., :2, :])),
            ValueError,
            "state: got inputs of shape",
        ),
        (
            lambda: cache.import_slots([1], LayerState(state.logical, state.inputs.float())),
            TypeError,
            "state: got inputs of torch.float32",
        ),
    ]
    before = cache.conv.clone()
    for work, kind, message in cases:
        with pytest.raises(kind, match=message):
            work()
    assert torch.equal(cache.conv.nan_to_num(), before.nan_to_num())
    assert isinstance(inner, ReplayCache)
