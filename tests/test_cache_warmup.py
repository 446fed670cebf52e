"""Warmup on a cache: what it exercises, that every byte is as before, and the digest that says so."""

from __future__ import annotations

import dataclasses
from typing import Any

import fakes
import pytest
import test_warmup
import torch
from cache_runs import assert_unchanged, cache_tensors, snapshot
from fakes import SMALL, FakeKernel

from replayssm_cute import api, compiler, plan, ring, selfcheck, warmup
from replayssm_cute.cache import CacheSpec, ReplayCache, exercise
from replayssm_cute.cache.digest import digest
from replayssm_cute.calls import spread
from replayssm_cute.problem import Problem

fake_compiler = fakes.fake_compiler
cpu_as_gpu = fakes.cpu_as_gpu
warm = test_warmup.warm

SPEC = CacheSpec(
    layers=3, heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=4, state_dtype=SMALL.state_dtype
)


def full(slots: int = 12, device: str = "cpu", pad_slot_id: int = 0, spec: CacheSpec = SPEC) -> ReplayCache:
    """A cache in use: random bits everywhere, NaNs of any payload among them, and valid cursors."""
    A = [-torch.ones(spec.heads)] * spec.layers
    cache = ReplayCache.allocate(spec, slots, device, A=A, pad_slot_id=pad_slot_id)
    gen = torch.Generator().manual_seed(3)
    for name, t in cache_tensors(cache).items():
        if "[" in name:
            integers = {2: torch.int16, 4: torch.int32}[t.element_size()]
            t.view(integers).copy_(torch.randint(-(2**31), 2**31, t.shape, generator=gen).to(integers))
        else:
            t.copy_(torch.randint(0, 3, t.shape, generator=gen))
    return cache


def digest_of(cache: ReplayCache) -> str:
    return digest(cache.layers, cache._shared)


@pytest.mark.fault(18)
def test_every_layer_decodes_until_it_flushes_and_every_byte_is_restored(
    warm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = full()
    before, seen = snapshot(cache), digest_of(cache)
    used: list[tuple[int, int]] = []  # (layer, rows) of every launch, and whether one flushed
    flushed: dict[int, int] = dict.fromkeys(range(SPEC.layers), 0)
    real = FakeKernel.__call__

    def watched(self: FakeKernel, *args: Any) -> None:
        for i, layer in enumerate(cache.layers):
            if args[0] is layer.state:
                slots = args[15]
                live = slots[slots >= 0]
                assert 0 not in live.tolist(), "the null slot was used"
                used.append((i, len(slots)))
                flushed[i] += int(ring.flushes(cache.pnat[live.long()], SPEC.tokens, SPEC.window).sum())
        real(self, *args)

    monkeypatch.setattr(FakeKernel, "__call__", watched)
    coverage = warmup([SMALL], [2, 16], cache=cache, device=-1)
    assert {rows for _, rows in used} == {2, 16}, "launches are as large as the batches"
    assert set(flushed) == {i for i, n in flushed.items() if n}, "a layer never flushed"
    steps = SMALL.window // SMALL.tokens + 1
    assert [c.decoded for c in coverage.covered] == [(SPEC.layers + 1) * steps] * 2
    done = coverage.cache
    assert done is not None and 0 not in done.slots and len(done.slots) == exercise.ROWS
    assert set(done.operations) == {"reset", "commit", "begin_step", "settle", "materialize", "copy"}
    assert done.digest == seen and f"digest {seen[:12]}" in str(coverage)
    assert_unchanged(cache, before)


@pytest.mark.parametrize("index", ["i32", None])
def test_ragged_problems_decode_on_a_cache_too(warm: None, index: str | None) -> None:
    cache = full()
    before = snapshot(cache)
    ragged = dataclasses.replace(SMALL, ragged=True, index_dtype=index)
    coverage = warmup([SMALL, ragged], [2, 9], cache=cache, device=-1)
    assert [(c.problem, c.batch) for c in coverage.covered] == [(p, b) for p in (SMALL, ragged) for b in (2, 9)]
    assert len({c.decoded for c in coverage.covered}) == 1, "as many steps as a dense problem"
    assert_unchanged(cache, before)


def test_an_engines_pages_are_as_before_gaps_and_all(warm: None) -> None:
    """A long window in a pool whose layers lie interleaved, dense and ragged problems: not a byte has changed."""
    spec = dataclasses.replace(SPEC, tokens=6, window=33)
    width = spec.page_bytes + 48
    pool = torch.randint(
        0, 256, (7, spec.layers * width), dtype=torch.uint8, generator=torch.Generator().manual_seed(8)
    )
    before = pool.clone()
    pages = [pool[:, i * width : (i + 1) * width - 16] for i in range(spec.layers)]
    cache = ReplayCache.from_pool(spec, pages, A=[-torch.ones(spec.heads)] * spec.layers, pad_slot_id=0)
    problem = dataclasses.replace(SMALL, tokens=6, window=33)
    coverage = warmup([problem, dataclasses.replace(problem, ragged=True)], [3, 9], cache=cache, device=-1)
    assert coverage.cache is not None and coverage.cache.operations["materialize"] == 1
    assert torch.equal(pool, before)


def test_a_failing_step_leaves_every_byte_as_it_was(warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = full()
    warmup([SMALL], [4], cache=cache, device=-1)
    before = snapshot(cache)
    real = FakeKernel.__call__

    def failing(self: FakeKernel, *args: Any) -> None:
        real(self, *args)
        if args[0] is cache.layers[1].state:
            raise RuntimeError("launch failed")

    monkeypatch.setattr(FakeKernel, "__call__", failing)
    with pytest.raises(RuntimeError, match="launch failed"):
        warmup([SMALL], [4], cache=cache, device=-1)
    assert_unchanged(cache, before)


def test_a_byte_that_changed_is_an_error(warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = full()
    real = FakeKernel.__call__

    def wild(self: FakeKernel, *args: Any) -> None:
        real(self, *args)
        cache.layers[2].dt_cache[0, 0, 0] += 1.0  # the null slot

    cache.layers[2].dt_cache[0, 0, 0] = 0.0
    monkeypatch.setattr(FakeKernel, "__call__", wild)
    with pytest.raises(RuntimeError, match=r"warmup changed the cache: digest .* before"):
        warmup([SMALL], [1], cache=cache, device=-1)


def test_problems_without_indices_and_caches_without_decays_or_with_one_slot(warm: None) -> None:
    cache = full(5, pad_slot_id=-1)
    before = snapshot(cache)
    warmup([dataclasses.replace(SMALL, index_dtype=None)], [4], cache=cache, device=-1)
    assert_unchanged(cache, before)
    with pytest.raises(ValueError, match="batches: got 6 rows without slot indices, expected at most 5"):
        warmup([dataclasses.replace(SMALL, index_dtype=None)], [6], cache=cache, device=-1)
    bare = ReplayCache.allocate(SPEC, 2, "cpu", pad_slot_id=0)
    coverage = warmup([SMALL], [3], cache=bare, device=-1)
    assert coverage.cache is not None and coverage.cache.slots == (1,)
    assert "materialize" not in coverage.cache.operations and "copy" in coverage.cache.operations


@pytest.mark.fault(22)
def test_what_does_not_fit_is_refused_before_anything_runs(warm: None) -> None:
    cache = full()
    before = snapshot(cache)
    with pytest.raises(
        ValueError, match=r"problems: .* does not fit the cache: window: got 8, expected 4 of the cache"
    ):
        warmup([SMALL, dataclasses.replace(SMALL, window=8)], [1], cache=cache, device=-1)
    with pytest.raises(TypeError, match="cache: got str, expected ReplayCache"):
        warmup([SMALL], [1], cache="cache", device=-1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tensors: got some beside a cache"):
        warmup([SMALL], [1], cache=cache, tensors=lambda p, b: None, device=-1)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="cache: got 1 slots, expected one beside the null slot 0"):
        warmup([SMALL], [1], cache=ReplayCache.allocate(SPEC, 1, "cpu", pad_slot_id=0), device=-1)
    assert compiler.counters() == compiler.Counters()
    assert_unchanged(cache, before)


def test_a_cache_elsewhere_is_refused(warm: None) -> None:
    meta = ReplayCache.allocate(SPEC, 3, "meta")
    with pytest.raises(ValueError, match="cache: on device meta, expected cpu"):
        warmup([SMALL], [1], cache=meta, device=-1)


# ---- digest ----------------------------------------------------------------------------------------


def test_digests_are_equal_for_equal_bytes_and_differ_for_one_bit() -> None:
    one, other = full(), full()
    assert digest_of(one) == digest_of(other)
    seen = {digest_of(one)}
    for name, t in cache_tensors(one).items():
        integers = {2: torch.int16, 4: torch.int32}[t.element_size()]
        flat = t.view(integers).view(-1)
        flat[-1] ^= 1
        seen.add(digest_of(one))
        assert len(seen) == 1 + list(cache_tensors(one)).index(name) + 1, name
    assert len(seen) == 1 + len(cache_tensors(one))


def test_digests_tell_places_apart() -> None:
    """Equal content at other places: slots, rows, elements and layers that swapped."""
    cache = full()
    seen = {digest_of(cache)}
    state = cache.layers[0].state
    for pair in ([(1,), (2,)], [(1, 0), (1, 1)], [(3, 0, 0, 0), (3, 0, 0, 1)]):
        a, b = (state[where].clone() for where in pair)
        state[pair[0]], state[pair[1]] = b, a
        seen.add(digest_of(cache))
    first, second = cache.layers[0].B_cache, cache.layers[1].B_cache
    a, b = first.clone(), second.clone()
    first.copy_(b), second.copy_(a)
    seen.add(digest_of(cache))
    assert len(seen) == 5


def test_digests_of_pages_see_no_gap() -> None:
    spec = dataclasses.replace(SPEC, layers=1)
    pool = torch.zeros(4, spec.page_bytes + 64, dtype=torch.uint8)
    cache = ReplayCache.from_pool(spec, [pool[:, : spec.page_bytes]])
    before = digest_of(cache)
    pool[:, spec.page_bytes :] = 9
    assert digest_of(cache) == before
    pool[2, spec.page_bytes - 64] ^= 1
    assert digest_of(cache) != before


# ---- on a GPU --------------------------------------------------------------------------------------

GPU_SPEC = CacheSpec(layers=3, heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=16)
PROVEN = [dataclasses.replace(GPU_SPEC, state_dtype=kind) for kind in ("f32", "bf16", "f16")]


@pytest.mark.gpu
@pytest.mark.kernels(GPU_SPEC.problem(dt_dtype="bf16"), GPU_SPEC)
def test_gpu_warmup_covers_what_captures_need() -> None:
    """Afterwards every operation and every batch can be captured, nothing is compiled, and no byte has changed."""
    cache = full(40, "cuda", spec=GPU_SPEC)
    before, seen = {k: v.cpu() for k, v in snapshot(cache).items()}, digest_of(cache)
    problem = GPU_SPEC.problem(dt_dtype="bf16")
    coverage = warmup([problem], [1, 8, 64], cache=cache)
    print(coverage)
    assert coverage.cache is not None and coverage.cache.digest == seen == digest_of(cache)
    assert all(torch.equal(v.cpu(), before[k]) for k, v in snapshot(cache).items())
    assert all(selfcheck.passed(p, c, torch.cuda.current_device()) for p, c in coverage.kernels)
    compiler.reset_counters()
    for batch in (1, 8, 64):
        slots = torch.full((batch,), -1, dtype=torch.int32, device="cuda")
        counts = torch.zeros(batch, dtype=torch.int64, device="cuda")
        inputs = step_inputs(problem, batch)
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            cache.reset(slots)
            cache.begin_step(slots, counts, counts)
            for layer in range(GPU_SPEC.layers):
                arguments: dict[str, Any] = {**cache.step_args(layer), **inputs}
                api.checkpointing_ssu(**arguments, state_batch_indices=slots, pad_slot_id=cache.pad_slot_id)
            cache.commit(slots, counts)
            cache.materialize(slots, slots, counts)
            cache.copy(slots, slots)
    assert compiler.counters().compiled == compiler.counters().disk == 0


def step_inputs(problem: Problem, batch: int) -> dict[str, Any]:
    return exercise._inputs(problem, batch, torch.device("cuda", torch.cuda.current_device()))


@pytest.mark.gpu
@pytest.mark.kernels(*PROVEN)
def test_gpu_warmup_proves_the_caches_kernels() -> None:
    from replayssm_cute.cache import proof

    for spec in PROVEN:
        proof._proven.clear()
        assert proof.prove(spec, torch.device("cuda", torch.cuda.current_device())) == 5


def test_inputs_are_those_of_the_problem() -> None:
    """The dummy step's tensors, which `exercise` widens from a scratch call, make the problem that is asked for."""
    for problem in (
        SMALL,
        dataclasses.replace(SMALL, has_z=True, d_dtype=None, dt_bias_dtype=None, dt_softplus=False, dt_dtype="f32"),
    ):
        cache = full()
        inputs = exercise._inputs(problem, 7, torch.device("cpu"))
        assert inputs["x"].shape[0] == 7 and inputs["dt"].stride()[-1] == 0
        scratch = dataclasses.replace(
            plan.scratch_call(problem, torch.device("cpu")),
            **cache.step_args(0),
            **inputs,
            state_batch_indices=torch.zeros(7, dtype=torch.int32),
        )
        assert plan.checked_problem(scratch, problem.pdl) == problem
    assert spread(torch.zeros(2), 3).shape == (2, 3)
