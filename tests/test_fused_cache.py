"""LayerCache: the conv's rings go through a slot's life with everything else."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
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
    held = sum(t.nbytes for each in cache.cache.layers for t in (each.state, each.x_cache, each.B_cache, each.dt_cache))
    assert bytes_per_slot(SPEC) == (held + cache.conv.nbytes) // 6 + 12
    total = 6 * bytes_per_slot(SPEC) + SPEC.fixed_bytes()
    assert slots_that_fit(total, SPEC) == 6 and slots_that_fit(total - 1, SPEC) == 5 and slots_that_fit(0, SPEC) == 0


def test_bad_input_is_refused_by_name() -> None:
    cache = made()
    cache.reset(range(6))
    inner = cache.cache
    state = cache.export_slots([1])
    short = made(dataclasses.replace(SPEC, tokens=1))
    short.reset(range(6))
    short.cache.pnat[2] = 5
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: LayerCache(inner, cache.conv[:1]), ValueError, "conv: got shape"),
        (lambda: LayerCache(inner, cache.conv.float()), TypeError, "conv: got torch.float32"),
        (lambda: LayerCache(inner, None), TypeError, "conv: got NoneType"),
        (lambda: LayerCache(inner, cache.conv.mT.contiguous().mT), ValueError, "conv: got strides"),
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
        (lambda: cache.materialize([1], [2, 3], [0]), ValueError, "dst_slots: got shape"),
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
