"""Requests decoding on a ReplayCache beside the float64 truth: what the lifecycle tests are made of."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch
from oracle import History, as_array

from replayssm_cute.cache import CacheSpec, ReplayCache
from replayssm_cute.reference import checkpointing_ssu_reference

SPEC = CacheSpec(layers=2, heads=2, head_dim=64, d_state=64, groups=1, tokens=4, window=16)
# Kinds of state beside plain ones: 8-bit codes with scales, and read copies of an f32 state, of which 8-bit ones have
# scales too.
LOW = [{"state_dtype": "f8e4m3"}, {"state_dtype": "i8"}, *({"copy_dtype": kind} for kind in ("bf16", "f8e4m3", "i8"))]


def decays(spec: CacheSpec, seed: int = 100) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    return [-(torch.rand(spec.heads, generator=gen) * 15 + 1) for _ in range(spec.layers)]


def make(spec: CacheSpec, slots: int, pad_slot_id: int = -1) -> ReplayCache:
    """A cache whose every byte of state and ring is NaN, so that nothing that was not written can be read unseen."""
    cache = ReplayCache.allocate(spec, slots, "cpu", A=decays(spec), pad_slot_id=pad_slot_id)
    poison(cache)
    return cache


def poison(cache: ReplayCache) -> None:
    """NaN everywhere; codes of int8, which has none, are its largest, under scales of NaN."""
    for layer in cache.layers:
        for t in layer.named().values():
            if t.element_size() == 1:
                t.view(torch.uint8).fill_(0x7F)
            else:
                t.fill_(float("nan"))


def cache_tensors(cache: ReplayCache) -> dict[str, torch.Tensor]:
    """Every tensor of the cache by name, the layers' with their number."""
    named = {name: getattr(cache, name) for name in ("ring_start", "pnat", "last_tokens")}
    for i, layer in enumerate(cache.layers):
        named |= {f"{name}[{i}]": t for name, t in layer.named().items()}
    return named


def bits(t: torch.Tensor) -> torch.Tensor:
    """A copy as integers, in which equal bits are equal, NaN or not."""
    return t.clone().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()])


def snapshot(cache: ReplayCache) -> dict[str, torch.Tensor]:
    return {name: bits(t) for name, t in cache_tensors(cache).items()}


def assert_unchanged(cache: ReplayCache, before: dict[str, torch.Tensor], slots: Sequence[int] | None = None) -> None:
    """No bit of the slots (default: all) differs from a snapshot."""
    index = list(range(cache.slots)) if slots is None else list(slots)
    for name, now in snapshot(cache).items():
        assert torch.equal(now[index], before[name][index]), name


class Request:
    """One request's truth in every layer, and the tokens it accepted."""

    def __init__(self, spec: CacheSpec, states: Sequence[np.ndarray] | None = None) -> None:
        shape = (spec.heads, spec.head_dim, spec.d_state)
        self.layers = [History(s) for s in (states or [np.zeros(shape)] * spec.layers)]
        self.tokens: list[list[tuple[torch.Tensor, ...]]] = []  # one entry a token: per layer x, dt, B, C

    def fork(self) -> Request:
        return copy.deepcopy(self)


class Run:
    """Steps on a cache, each output compared with the truth."""

    def __init__(self, cache: ReplayCache, seed: int = 0, rtol: float = 2e-6) -> None:
        self.cache, self.rtol = cache, rtol
        self.gen = torch.Generator().manual_seed(seed)
        self.A = [a[:, None, None].expand(-1, cache.spec.head_dim, cache.spec.d_state) for a in decays(cache.spec)]
        self.flushed = 0

    def draw(self) -> list[tuple[torch.Tensor, ...]]:
        """One token: x (H, P), dt (H,), B and C (G, N) for each layer."""
        s, io = self.cache.spec, torch.bfloat16
        return [
            (
                torch.randn(s.heads, s.head_dim, generator=self.gen).to(io),
                torch.rand(s.heads, generator=self.gen) * 0.1 + 0.001,
                torch.randn(s.groups, s.d_state, generator=self.gen).to(io),
                torch.randn(s.groups, s.d_state, generator=self.gen).to(io),
            )
            for _ in range(s.layers)
        ]

    def model(
        self, slots: Sequence[int], requests: Sequence[Request], accepted: Sequence[int],
        given: Sequence[Sequence[list[tuple[torch.Tensor, ...]]]] | None = None,
    ) -> None:  # fmt: skip
        """One model step over all layers without a commit; `given` are tokens for each row in place of drawn ones."""
        spec = self.cache.spec
        windows = [[self.draw() for _ in range(spec.tokens)] for _ in slots]
        for window, start in zip(windows, given or [], strict=False):
            window[: len(start)] = start
        self.flushed += sum(int(self.cache.pnat[s]) + spec.tokens > spec.window for s in slots)
        for layer in range(spec.layers):
            x, dt, B, C = (
                torch.stack([torch.stack([token[layer][k] for token in window]) for window in windows])
                for k in range(4)
            )
            out = torch.full(x.shape, float("nan"), dtype=torch.float64)
            checkpointing_ssu_reference(
                **self.cache.step_args(layer), x=x, dt=dt[..., None].expand(x.shape), A=self.A[layer], B=B, C=C,
                out=out, state_batch_indices=torch.tensor(slots), compute_dtype=torch.float64,
            )  # fmt: skip
            rate = as_array(self.A[layer])[:, 0, 0]
            for row, request in enumerate(requests):
                expected = request.layers[layer].run(
                    rate, *(as_array(t[row]) for t in (dt, x, B, C)), accepted[row]
                )  # fmt: skip
                scale = np.abs(expected).max()
                np.testing.assert_allclose(as_array(out[row]), expected, rtol=0, atol=self.rtol * scale)
        for request, window, count in zip(requests, windows, accepted, strict=True):
            request.tokens += window[:count]

    def step(
        self, slots: Sequence[int], requests: Sequence[Request], accepted: Sequence[int],
        given: Sequence[Sequence[list[tuple[torch.Tensor, ...]]]] | None = None,
    ) -> None:  # fmt: skip
        """A model step and its commit."""
        self.model(slots, requests, accepted, given)
        self.cache.commit(torch.tensor(slots), torch.tensor(accepted))

    def decode(self, slots: Sequence[int], requests: Sequence[Request], steps: int) -> None:
        """Steps with random acceptance, 0 included."""
        for _ in range(steps):
            accepted = torch.randint(0, self.cache.spec.tokens + 1, (len(slots),), generator=self.gen)
            self.step(slots, requests, accepted.tolist())


def started(run: Run, slot: int, *, ring_start: int, pending: int, steps: int = 6) -> Request:
    """A request that has decoded in `slot` and now has `pending` live rows, the oldest at `ring_start`.

    Its first tokens are folded by real flushes; then the ring is turned, empty, to where it is wanted.
    """
    cache = run.cache
    cache.reset([slot])
    request = Request(cache.spec)
    run.decode([slot], [request], steps)
    cache.materialize([slot], [slot], [cache.spec.window])
    cache.ring_start[slot] = ring_start
    while (live := int(cache.pnat[slot])) < pending:
        run.step([slot], [request], [min(pending - live, cache.spec.tokens)])
    assert (int(cache.ring_start[slot]), int(cache.pnat[slot])) == (ring_start, pending)
    return request
