"""Caches of 8-bit states and of read copies on a GPU: kernels beside the torch operations, graphs, warmup."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from cache_runs import LOW, bits, decays, snapshot
from low_precision_caches import (
    SMALL,
    SPECS,
    TINY,
    Model,
    check_materialize,
    graph_inputs,
    graph_values,
    tolerance,
)
from test_cache_materialize import CYCLES, SLOTS, filled

from replayssm_cute import DecodeGraphs, warmup
from replayssm_cute.cache import CacheSpec, ReplayCache, stored
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

GPU_SPECS = [
    *SPECS,
    dataclasses.replace(SMALL, heads=6, head_dim=80, d_state=128, groups=2, tokens=4, window=16, state_dtype="f8e4m3"),
    dataclasses.replace(SMALL, heads=4, head_dim=128, d_state=256, tokens=3, window=7, state_dtype="i8"),
    dataclasses.replace(SMALL, heads=4, d_state=128, tokens=4, window=32, copy_dtype="f8e4m3"),
    dataclasses.replace(SMALL, heads=4, head_dim=80, d_state=64, tokens=1, window=9, copy_dtype="bf16"),
]


def on_gpu(cache: ReplayCache) -> ReplayCache:
    """A cache of the same contents on the GPU, bit for bit."""
    A = [cache.A[i] for i in range(cache.spec.layers)]
    other = ReplayCache.allocate(cache.spec, cache.slots, "cuda", A=A, pad_slot_id=cache.pad_slot_id)
    for here, there in zip(cache.layers, other.layers, strict=True):
        for name, t in here.named().items():
            stored.as_bits(getattr(there, name)).copy_(stored.as_bits(t))
    for name in ("ring_start", "pnat", "last_tokens"):
        getattr(other, name).copy_(getattr(cache, name))
    return other


def assert_same(cache: ReplayCache, model: ReplayCache) -> None:
    expected = snapshot(model)
    for name, now in snapshot(cache).items():
        assert torch.equal(now.cpu(), expected[name].cpu()), name


@pytest.mark.gpu
@pytest.mark.kernels(lambda where, spec: [spec])
@pytest.mark.parametrize("spec", GPU_SPECS, ids=lambda s: s.problem().label())
def test_gpu_materialize_follows_the_scalar_model(spec: CacheSpec) -> None:
    for seed, rows in enumerate(CYCLES):
        cache, before = on_gpu(filled(spec, seed)), filled(spec, seed)
        cache.materialize(*(torch.tensor([row[k] for row in rows], device="cuda") for k in range(3)))
        check_materialize(cache, before, rows)


@pytest.mark.gpu
@pytest.mark.kernels(lambda where, spec: [spec])
@pytest.mark.parametrize("spec", GPU_SPECS, ids=lambda s: s.problem().label())
def test_gpu_copy_reset_and_handoff_are_the_torch_path_bit_for_bit(spec: CacheSpec) -> None:
    for seed, rows in enumerate(CYCLES):
        model = filled(spec, seed, open_windows=True)
        cache = on_gpu(model)
        src, dst = (torch.tensor([row[k] for row in rows]) for k in range(2))
        for c in (model, cache):
            c.copy(src.to(c.device), dst.to(c.device))
        assert_same(cache, model)
        for c in (model, cache):
            c.reset(torch.tensor([3, -1, 4, 1], device=c.device))
        assert_same(cache, model)
        # Rows whose scale is 1, so that it is the same to the bit on every device, whatever its division is.
        gen = torch.Generator().manual_seed(seed)
        shape = (spec.layers, 2, spec.heads, spec.head_dim, spec.d_state)
        states = torch.randint(-127, 128, shape, generator=gen).float()
        states[..., 0] = 127.0 if "i8" in (spec.state_dtype, spec.copy_dtype) else 448.0
        for c in (model, cache):
            c.prefill_handoff(torch.tensor([2, -1], device=c.device), states.to(c.device))
        assert_same(cache, model)


@pytest.mark.gpu
@pytest.mark.kernels(lambda where, spec: [spec])
@pytest.mark.parametrize("spec", GPU_SPECS, ids=lambda s: s.problem().label())
def test_gpu_operations_under_a_graph(spec: CacheSpec) -> None:
    """Captured once, replayed on other contents: reset, materialize, copy and handoff of every tensor."""
    model = filled(spec, 3)
    cache = on_gpu(model)
    slots = torch.tensor([1, 0], dtype=torch.int32, device="cuda")
    others = torch.tensor([2, 1], dtype=torch.int32, device="cuda")
    states = torch.ones(spec.layers, 2, spec.heads, spec.head_dim, spec.d_state, device="cuda")
    first = torch.tensor([3, -1], device="cuda", dtype=torch.int32)

    def work(c: ReplayCache) -> None:
        to = [t.to(c.device) for t in (slots, others, states, first)]
        c.materialize(to[0], to[1], torch.ones_like(to[0]))
        c.copy(to[1], to[0])
        c.reset(to[3])
        c.prefill_handoff(to[3], to[2])

    cache.prepare()
    work(on_gpu(model))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        c = cache
        c.materialize(slots, others, torch.ones_like(slots))
        c.copy(others, slots)
        c.reset(first)
        c.prefill_handoff(first, states)
    assert_same(cache, model)
    graph.replay()
    torch.cuda.synchronize()
    work(model)
    for i, (here, there) in enumerate(zip(cache.layers, model.layers, strict=True)):
        index = torch.arange(SLOTS)
        got, wanted = stored.decode(here, index.cuda()).cpu(), stored.decode(there, index)
        error = (got - wanted).abs().max() / wanted.abs().max()
        assert float(error) <= tolerance(spec), f"layer {i}: {float(error)}"
        for name in ("x_cache", "B_cache", "dt_cache"):
            assert torch.equal(bits(getattr(here, name)).cpu(), bits(getattr(there, name))), name
    assert torch.equal(cache.pnat.cpu(), model.pnat)


@pytest.mark.gpu
@pytest.mark.kernels(lambda where, spec: [spec])
@pytest.mark.parametrize("spec", GPU_SPECS, ids=lambda s: s.problem().label())
def test_gpu_states_move_between_devices(spec: CacheSpec) -> None:
    """Exported on the GPU and on the CPU: the same values, which enter again as the same codes."""
    model = filled(spec, 3)
    cache = on_gpu(model)
    here, there = cache.export_slots([1, 2]), model.export_slots([1, 2])
    for name in ("count", "state", "x", "B", "dt"):
        assert torch.equal(getattr(here, name), getattr(there, name)), name
    for c in (cache, model):
        c.import_slots([3, 0], here)
    assert_same(cache, model)


def graph_spec(kind: dict[str, str]) -> CacheSpec:
    return dataclasses.replace(TINY, heads=16, d_state=128, layers=3, **kind)


def graph_kernels(where: Target, kind: dict[str, str], rounds: int | None) -> list[CacheSpec | Problem]:
    """The cache's kernels and the steps, of what the test does not skip."""
    if "copy_dtype" in kind and rounds:
        return []
    spec = graph_spec(kind)
    return [spec, spec.problem(philox_rounds=rounds, d_dtype=None, dt_bias_dtype=None)]


@pytest.mark.gpu
@pytest.mark.kernels.with_args(graph_kernels)
@pytest.mark.parametrize("rounds", [None, 10])
@pytest.mark.parametrize("kind", LOW, ids=lambda k: "-".join(k.values()))
def test_gpu_warmup_and_graphs(kind: dict[str, str], rounds: int | None) -> None:
    """Warmup changes no byte; replays are the eager steps bit for bit, also with a seed renewed inside the graph."""
    if "copy_dtype" in kind and rounds:
        pytest.skip("an f32 state is not rounded stochastically")
    spec = graph_spec(kind)
    cache = ReplayCache.allocate(spec, 5, "cuda", A=decays(spec))
    model = ReplayCache.allocate(spec, 5, "cuda", A=decays(spec))
    before = {k: v.cpu() for k, v in snapshot(cache).items()}
    problem = spec.problem(philox_rounds=rounds, d_dtype=None, dt_bias_dtype=None)
    coverage = warmup([problem], [2, 4], cache=cache)
    assert coverage.cache is not None and all(torch.equal(v.cpu(), before[k]) for k, v in snapshot(cache).items())
    seeds = [None if rounds is None else torch.zeros(1, dtype=torch.int64, device="cuda") for _ in range(2)]
    for c in (cache, model):
        c.reset(range(5))
    graphs = DecodeGraphs(Model(cache, seeds[0]), graph_inputs(spec), [2, 4])
    graphs.capture()
    eager = Model(model, seeds[1], renew=False)
    drawn = set()
    for step in range(12):
        given = {k: v.cuda() for k, v in graph_values(spec, 1 + step % 4, step).items()}
        got = graphs(**given).clone()
        if seeds[0] is None:
            rows = len(given["slots"])
            padded = {k: t[: graphs.bucket(rows)] for k, t in graphs.buffers.items()}
            assert torch.equal(got, eager(**padded)[:rows])
        else:
            drawn.add(int(seeds[0]))
    if seeds[0] is None:
        assert_same(cache, model)
    else:
        assert len(drawn) == 12, "every replay draws a seed of its own"
        assert all(
            math.isfinite(float(layer.state_scale.max())) for layer in cache.layers if layer.state_scale is not None
        )
