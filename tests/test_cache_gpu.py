"""The cache on a GPU: its kernels against the torch operations, under graphs, in pools, and against float64."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from cache_runs import SPEC, cache_tensors, decays, snapshot
from oracle import as_array
from test_cache_kernels import CURSOR_OPS
from test_cache_materialize import CYCLES, expected_moves, folded
from test_cache_materialize import filled as filled_on_cpu

from replayssm_cute.cache import CacheSpec, ReplayCache, launches
from replayssm_cute.cache.recipes import CURSORS

SLOTS, BATCH = 12, 6
MANY = dataclasses.replace(SPEC, heads=2, layers=2)
FAR = CacheSpec(layers=1, heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16, state_dtype="bf16")
OPERATIONS: dict[str, Callable[..., object]] = {
    "commit": lambda c, v: c.commit(v["slots"], v["counts"]),
    "commit_ragged": lambda c, v: c.commit(v["slots"], v["counts"], v["lens"]),
    "begin_step": lambda c, v: c.begin_step(v["slots"], v["counts"]),
    "begin_step_ragged": lambda c, v: c.begin_step(v["slots"], v["counts"], v["lens"]),
    "settle": lambda c, v: c.settle(v["slots"], v["counts"]),
    "reset": lambda c, v: c.reset(v["slots"]),
    "materialize": lambda c, v: (c.last_tokens.zero_(), c.materialize(v["sources"], v["slots"], v["counts"])),
    "copy": lambda c, v: c.copy(v["sources"], v["slots"]),
    "prefill_handoff": lambda c, v: c.prefill_handoff(v["slots"], v["states"]),
}


def filled(device: str) -> ReplayCache:
    """The same random contents on every device; slot 0 is the null slot."""
    cache = ReplayCache.allocate(SPEC, SLOTS, device, A=decays(SPEC), pad_slot_id=0)
    gen = torch.Generator().manual_seed(1)
    for t in cache_tensors(cache).values():
        content = torch.rand(t.shape, generator=gen)
        t.copy_((content * 5).int() if t.dtype == torch.int32 else content * 0.1)
    return cache


def values(live: int, device: str, seed: int) -> dict[str, torch.Tensor]:
    """A batch of `live` rows, then padding of both kinds, in any order."""
    gen = torch.Generator().manual_seed(seed)
    slots = torch.randperm(SLOTS - 1, generator=gen)[:BATCH] + 1
    slots[live:] = torch.tensor([0, -1, 0, -1, 0, -1])[: BATCH - live]
    order = torch.randperm(BATCH, generator=gen)
    made = {
        "slots": slots[order].int(),
        "sources": (torch.randint(1, SLOTS, (BATCH,), generator=gen)).int(),
        "counts": torch.randint(0, SPEC.tokens + 1, (BATCH,), generator=gen).int(),
        "lens": torch.randint(0, SPEC.tokens + 1, (BATCH,), generator=gen).int(),
        "states": torch.randn(SPEC.layers, BATCH, SPEC.heads, SPEC.head_dim, SPEC.d_state, generator=gen),
    }
    return {name: t.to(device) for name, t in made.items()}


def assert_alike(cache: ReplayCache, expected: ReplayCache, what: str) -> None:
    for (name, t), other in zip(cache_tensors(cache).items(), cache_tensors(expected).values(), strict=True):
        torch.testing.assert_close(
            t.cpu(), other, rtol=1e-6, atol=1e-7, msg=lambda m, name=name: f"{what}: {name}: {m}"
        )


@pytest.mark.gpu
@pytest.mark.kernels(SPEC)
@pytest.mark.parametrize("name", OPERATIONS)
def test_captured_once_and_replayed_for_fewer_rows(name: str) -> None:
    """A graph captured with full rows serves any slots, counts and padding, as the CPU has it."""
    operation = OPERATIONS[name]
    cache, model = filled("cuda"), filled("cpu")
    given = values(BATCH, "cuda", 2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        operation(filled("cuda"), given)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        operation(cache, given)
    assert_alike(cache, model, "capturing runs nothing")
    for seed, live in enumerate((BATCH, 3, 1, 0, 5)):
        fresh, model = values(live, "cpu", 10 + seed), filled("cpu")
        for t, content in zip(cache_tensors(cache).values(), cache_tensors(model).values(), strict=True):
            t.copy_(content)
        for key, t in fresh.items():
            given[key].copy_(t)
        graph.replay()
        torch.cuda.synchronize()
        operation(model, fresh)
        assert_alike(cache, model, f"{name}, {live} live rows")


@pytest.mark.gpu
@pytest.mark.kernels(SPEC)
def test_states_move_between_devices() -> None:
    """Exported from a GPU, imported on the CPU and back: the same bits."""
    cache, other = filled("cuda"), filled("cpu")
    for c in (cache, other):
        c.last_tokens.zero_()
    backup = cache.export_slots([3, 7])
    assert all(t.device.type == "cpu" for t in (backup.state, backup.x, backup.B, backup.dt, backup.count))
    other.import_slots([1, 2], backup)
    cache.import_slots([5, 4], other.export_slots([1, 2]))
    again = cache.export_slots([5, 4])
    for name in ("state", "x", "B", "dt", "count"):
        assert torch.equal(getattr(again, name), getattr(backup, name)), name


# ---------------------------------------------------------------------------------------------------
# Kernels and torch operations
# ---------------------------------------------------------------------------------------------------


def on_gpu(cache: ReplayCache) -> ReplayCache:
    """A cache of the same contents on the GPU, bit for bit."""
    A = [cache.A[i] for i in range(cache.spec.layers)]
    other = ReplayCache.allocate(cache.spec, cache.slots, "cuda", A=A, pad_slot_id=cache.pad_slot_id)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    for t, content in zip(cache_tensors(other).values(), cache_tensors(cache).values(), strict=True):
        t.view(bits[t.element_size()]).copy_(content.view(bits[t.element_size()]))
    return other


def same_bits(cache: ReplayCache, before: dict[str, torch.Tensor]) -> None:
    for name, now in snapshot(cache).items():
        assert torch.equal(now.cpu(), before[name]), name


@pytest.mark.gpu
@pytest.mark.kernels(CURSORS)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize("pad", [-1, 3])
@pytest.mark.parametrize("size", [(4, 9), (32, 64)])
def test_cursors_are_the_torch_path_bit_for_bit(kind: torch.dtype, pad: int, size: tuple[int, int]) -> None:
    """Long random sequences of every operation, more rows than a CTA has threads, from views with gaps."""
    rng = random.Random(5)
    slots, batch = 700, 600
    spec = CacheSpec(layers=1, heads=1, head_dim=64, d_state=64, groups=1, tokens=size[0], window=size[1])
    model = ReplayCache.allocate(spec, slots, "cpu", pad_slot_id=pad)
    cache = on_gpu(model)
    for _ in range(40):
        named = rng.sample([s for s in range(slots) if s != pad], batch)
        for row in rng.sample(range(batch), 100):
            named[row] = rng.choice([-1, -7, pad])
        accepted = [rng.choice([-9, 0, 1, 2, 3, 4, 5, 31, 32, 2**31 - 1]) for _ in named]
        lens = [rng.randint(0, spec.tokens) for _ in named]
        vectors = [torch.tensor([v for each in x for v in (each, -3)], dtype=kind) for x in (named, accepted, lens)]
        operation = CURSOR_OPS[rng.choice(list(CURSOR_OPS))]
        operation(model, *(v[::2] for v in vectors))
        operation(cache, *(v.cuda()[::2] for v in vectors))
        for name in ("ring_start", "pnat", "last_tokens"):
            assert torch.equal(getattr(cache, name).cpu(), getattr(model, name)), name


GEOMETRIES = [
    CacheSpec(layers=3, heads=8, head_dim=64, d_state=128, groups=2, tokens=4, window=16),
    CacheSpec(layers=2, heads=4, head_dim=64, d_state=128, groups=1, tokens=4, window=16, state_dtype="bf16"),
    CacheSpec(layers=2, heads=6, head_dim=80, d_state=128, groups=2, tokens=2, window=7),
    CacheSpec(layers=1, heads=3, head_dim=80, d_state=64, groups=3, tokens=1, window=16, state_dtype="bf16"),
    CacheSpec(layers=1, heads=2, head_dim=128, d_state=256, groups=1, tokens=3, window=5, state_dtype="f16"),
    CacheSpec(layers=1, heads=4, head_dim=128, d_state=64, groups=4, tokens=16, window=16, io_dtype="f16"),
    CacheSpec(layers=1, heads=2, head_dim=64, d_state=256, groups=2, tokens=1, window=1),
    CacheSpec(layers=2, heads=4, head_dim=64, d_state=128, groups=2, tokens=32, window=64),
    CacheSpec(layers=1, heads=2, head_dim=64, d_state=256, groups=1, tokens=7, window=64),
    CacheSpec(layers=1, heads=2, head_dim=128, d_state=256, groups=1, tokens=20, window=57, state_dtype="bf16"),
    CacheSpec(layers=1, heads=2, head_dim=128, d_state=256, groups=1, tokens=2, window=64, io_dtype="f16"),
    CacheSpec(
        layers=1, heads=2, head_dim=80, d_state=128, groups=1, tokens=2, window=16, state_dtype="f16", io_dtype="f16"
    ),
]


def check_against_float64(cache: ReplayCache, before: ReplayCache, rows: list[tuple[int, int, int]]) -> None:
    """A materialized GPU cache beside the CPU cache that it began as."""
    old, now, live = snapshot(before), {k: v.cpu() for k, v in snapshot(cache).items()}, expected_moves(rows)
    unit = {"f32": 0.0, "bf16": 2**-8, "f16": 2**-11}[cache.spec.state_dtype]
    for name in now:
        for slot in range(cache.slots):
            if slot not in live or ("[" in name and not name.startswith("state")):
                assert torch.equal(now[name][slot], old[name][slot]), (name, slot)
            elif "[" not in name:
                assert int(now[name][slot]) == 0, name
            else:
                source, count = live[slot]
                layer = int(name[6:-1])
                if min(count, int(before.pnat[source])) <= 0:
                    assert torch.equal(now[name][slot], old[name][source]), "count 0 is a copy of the bits"
                    continue
                model = folded(before, layer, source, count)
                got = as_array(cache.layers[layer].state[slot].cpu())
                worst = np.abs(got - model) - unit * np.abs(model)
                scale = np.abs(model).max()
                assert worst.max() <= 1e-6 * scale, f"{worst.max() / scale:.2e} relative, slot {slot}"


@pytest.mark.gpu
@pytest.mark.kernels(lambda where, spec: [spec])
@pytest.mark.parametrize("spec", GEOMETRIES, ids=lambda s: f"{s.head_dim}x{s.d_state}-{s.state_dtype}-{s.window}")
def test_materialize_against_float64(spec: CacheSpec) -> None:
    """NaN in dead rows, poisoned destinations, cycles, every count; 1e-6 of the largest element beside rounding."""
    batches = [*CYCLES, [(0, 1, 99), (0, 2, 1), (3, 3, -4), (-1, 0, 2)]]
    for seed, rows in enumerate(batches):
        before = filled_on_cpu(spec, seed)
        for layer in before.layers:
            for slot in set(range(4)) - {s for s, _, _ in rows}:
                layer.state[slot] = float("nan")
        for kind in (torch.int32, torch.int64):
            cache = on_gpu(before)
            cache.materialize(*(torch.tensor([row[k] for row in rows], dtype=kind, device="cuda") for k in range(3)))
            check_against_float64(cache, before, rows)


@pytest.mark.gpu
@pytest.mark.kernels(MANY)
def test_a_large_random_batch_is_as_if_all_were_read_first() -> None:
    """Rows in long chains and cycles, more than the planning CTA has threads; exact copies, so that bits tell."""
    spec, slots = MANY, 600
    gen = torch.Generator().manual_seed(8)
    model = ReplayCache.allocate(spec, slots, "cpu", A=decays(spec))
    for t in cache_tensors(model).values():
        t.copy_((torch.rand(t.shape, generator=gen) * 4).int() if t.dtype == torch.int32 else torch.rand(t.shape))
    model.last_tokens.zero_()
    for src in (
        torch.randint(0, slots, (slots,), generator=gen),
        torch.arange(1, slots + 1) % slots,
        torch.randperm(slots, generator=gen),
    ):
        dst = torch.randperm(slots, generator=gen)
        count = torch.zeros(slots, dtype=torch.int64)
        cache, before = on_gpu(model), snapshot(model)
        cache.materialize(src.cuda(), dst.cuda(), count.cuda())
        now = snapshot(cache)
        for name in ("state[0]", "state[1]"):
            assert torch.equal(now[name].cpu()[dst], before[name][src]), name
        cache = on_gpu(model)
        cache.copy(src.cuda(), dst.cuda())
        for name, t in snapshot(cache).items():
            assert torch.equal(t.cpu()[dst], before[name][src]), name


@pytest.mark.gpu
@pytest.mark.kernels(lambda where, spec: [spec])
@pytest.mark.parametrize("spec", GEOMETRIES, ids=lambda s: f"{s.head_dim}x{s.d_state}-{s.state_dtype}-{s.window}")
def test_copy_and_reset_are_the_torch_path_bit_for_bit(spec: CacheSpec) -> None:
    for seed, rows in enumerate(CYCLES):
        model = filled_on_cpu(spec, seed, open_windows=True)
        cache = on_gpu(model)
        src, dst = (torch.tensor([row[k] for row in rows]) for k in range(2))
        model.copy(src, dst)
        cache.copy(src.cuda(), dst.cuda())
        same_bits(cache, snapshot(model))
        slots = torch.tensor([3, -1, 4, 1])
        model.reset(slots)
        cache.reset(slots.cuda())
        same_bits(cache, snapshot(model))


@pytest.mark.gpu
@pytest.mark.kernels(GEOMETRIES[0])
def test_a_page_pool_with_gaps() -> None:
    """Layers interleaved in an engine's pages: the same results, and not a byte of a gap touched."""
    spec = dataclasses.replace(GEOMETRIES[0], layers=3)
    slots, page = 6, spec.page_bytes
    pool = torch.full((slots, 3, page + 80), 0x5A, dtype=torch.uint8, device="cuda")
    cache = ReplayCache.from_pool(spec, [pool[:, i, :page] for i in range(3)], A=decays(spec))
    own = ReplayCache.allocate(spec, slots, "cuda", A=decays(spec))
    for t, other in zip(cache_tensors(cache).values(), cache_tensors(own).values(), strict=True):
        t.copy_(torch.rand(t.shape) * 0.1 if t.is_floating_point() else torch.randint(0, 5, t.shape))
        other.copy_(t)
    for c in (cache, own):
        c.last_tokens.zero_()
        c.materialize([0, 1, 5], [1, 2, 4], [4, 0, 2])
        c.copy([2, 3], [3, 2])
        c.reset([5])
    same_bits(cache, {name: t.cpu() for name, t in snapshot(own).items()})
    assert bool((pool[:, :, page:] == 0x5A).all())


@pytest.mark.gpu
@pytest.mark.kernels(SPEC)
def test_nan_payloads_move_unchanged() -> None:
    cache = filled("cuda")
    for layer in cache.layers:
        layer.state.view(torch.int32).fill_(0x7F812345)
    cache.last_tokens.zero_()
    cache.materialize([1, 2], [2, 1], [0, 0])
    cache.copy([3], [4])
    for layer in cache.layers:
        assert bool((layer.state.view(torch.int32) == 0x7F812345).all())


@pytest.mark.gpu
@pytest.mark.kernels(SPEC)
def test_a_capture_before_the_first_use_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code of a kernel reaches a device with its first launch; afterwards any cache of that shape may capture."""
    slots = torch.tensor([1, 2], device="cuda", dtype=torch.int32)
    monkeypatch.setattr(launches, "_touched", set())
    for operation in (lambda c: c.commit(slots, slots), lambda c: c.copy(slots, slots)):
        cache = filled("cuda")
        with (
            pytest.raises(RuntimeError, match=r"the cache's .* is not ready.*warmup"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            operation(cache)
    filled("cuda").prepare()
    cache = filled("cuda")
    cache.last_tokens.zero_()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        cache.commit(slots, slots)
        cache.begin_step(slots, slots)
        cache.materialize(slots, slots, slots)
        cache.copy(slots, slots)
        cache.reset(slots)


@pytest.mark.gpu
@pytest.mark.kernels(FAR)
@pytest.mark.fault(8)
def test_slots_beyond_2_to_the_31_elements() -> None:
    """64-bit addresses: the far end of a cache of more than 2^31 state elements."""
    spec = FAR
    slots = 2**31 // (128 * 64 * 128) + 3
    if torch.cuda.mem_get_info()[0] < spec.total_bytes(slots) + 2**30:
        pytest.skip("not enough free GPU memory")
    cache = ReplayCache.allocate(spec, slots, "cuda", A=[-torch.ones(128)])
    last = slots - 1
    cache.layers[0].state[last] = 3.0
    cache.layers[0].x_cache[last] = 1.0
    cache.materialize([last], [last - 1], [0])
    cache.copy([last], [0])
    cache.reset([last])
    assert bool((cache.layers[0].state[last - 1] == 3.0).all()) and bool((cache.layers[0].state[0] == 3.0).all())
    assert bool((cache.layers[0].x_cache[0] == 1.0).all()) and not bool(cache.layers[0].state[last].any())
    assert not bool(cache.layers[0].state[1 : last - 1].any())


@pytest.mark.gpu
@pytest.mark.kernels(SPEC)
@pytest.mark.two_gpus
@pytest.mark.fault(25)
def test_a_cache_on_another_device_than_the_current_one() -> None:
    cache = ReplayCache.allocate(SPEC, 4, "cuda:1", A=decays(SPEC))
    cache.pnat.fill_(2)
    cache.commit([1, 3], [4, 1])
    cache.materialize([1], [0], [2])
    assert cache.pnat.tolist() == [0, 6, 2, 3]
