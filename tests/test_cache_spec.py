"""Bytes: what a CacheSpec says is what is allocated, for every model; and what it refuses."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import pytest
import torch
from cache_runs import LOW
from hypothesis import given, settings
from hypothesis import strategies as st

import replayssm_cute.cache
from replayssm_cute import dtypes, ring
from replayssm_cute.cache import CacheSpec, ReplayCache, shapes, slots_that_fit
from replayssm_cute.cache.layout import LayerTensors

# layers, heads, head_dim, d_state, groups of released Mamba2 models
MODELS = {
    "Nemotron-3 Nano 4B": (21, 96, 80, 128, 8),
    "Nemotron-3 Nano 30B": (23, 64, 64, 128, 8),
    "Nemotron-3 Super 120B": (40, 128, 64, 128, 8),
    "Nemotron-3 Ultra 550B": (48, 256, 64, 128, 8),
    "Nemotron-H 4B": (24, 112, 64, 128, 8),
    "Nemotron-H 8B": (24, 128, 64, 128, 8),
    "Nemotron-H 47B": (45, 256, 64, 256, 8),
    "Nemotron-H 56B": (54, 256, 64, 256, 8),
    "Nemotron Nano v2 9B": (27, 128, 80, 128, 8),
    "Nemotron Nano v2 12B": (28, 128, 80, 128, 8),
    "Mamba2 130M": (24, 24, 64, 128, 1),
    "Mamba2 370M": (48, 32, 64, 128, 1),
    "Mamba2 780M": (48, 48, 64, 128, 1),
    "Mamba2 1.3B": (48, 64, 64, 128, 1),
    "Mamba2 2.7B": (64, 80, 64, 128, 1),
    "Codestral Mamba 7B": (64, 128, 64, 128, 8),
    "Bamba 9B": (29, 128, 64, 128, 1),
    "Granite 4.0-H micro": (36, 64, 64, 128, 1),
    "Granite 4.0-H tiny": (36, 48, 64, 128, 1),
    "Granite 4.0-H small": (36, 128, 64, 128, 1),
    "Falcon-H1 0.5B": (36, 24, 64, 128, 1),
    "Falcon-H1 1.5B": (24, 48, 64, 256, 1),
    "Falcon-H1 3B": (32, 32, 128, 256, 1),
    "Falcon-H1 7B": (44, 24, 128, 256, 1),
    "Falcon-H1 34B": (72, 32, 128, 256, 2),
    "Zamba2 1.2B": (38, 64, 64, 128, 1),
    "Zamba2 2.7B": (54, 80, 64, 64, 1),
    "Zamba2 7B": (81, 112, 64, 64, 2),
}
ODD = CacheSpec(layers=3, heads=15, head_dim=64, d_state=64, groups=3, tokens=3, window=8)


def spec_of(model: str, **kwargs: Any) -> CacheSpec:
    layers, heads, head_dim, d_state, groups = MODELS[model]
    return CacheSpec(layers, heads, head_dim, d_state, groups, **{"tokens": 4, "window": 16, **kwargs})


def storage_bytes(cache: ReplayCache) -> int:
    """Bytes of the distinct storages behind a cache's tensors."""
    tensors = [t for layer in cache.layers for t in layer.named().values()]
    tensors += [cache.A, cache.ring_start, cache.pnat, cache.last_tokens]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def element_bytes(cache: ReplayCache) -> int:
    """Bytes of all elements of all tensors."""
    tensors = [t for layer in cache.layers for t in layer.named().values()]
    return (
        sum(t.numel() * t.element_size() for t in (*tensors, cache.A, cache.ring_start, cache.pnat)) + cache.slots * 4
    )


@pytest.mark.fault(26)
@pytest.mark.parametrize(
    "kind",
    [{}, {"state_dtype": "bf16"}, {"state_dtype": "f16", "io_dtype": "f16"}, *LOW],
    ids=lambda k: "-".join(k.values()) or "f32",
)
@pytest.mark.parametrize("model", MODELS)
def test_the_planner_is_the_allocation(model: str, kind: dict[str, str]) -> None:
    """60 GiB hold exactly the slots that are planned: allocated, byte for byte, and not one slot more."""
    spec = spec_of(model, **kind)
    free = 60 * 2**30 + 12345
    slots = slots_that_fit(free, spec)
    cache = ReplayCache.allocate(spec, slots, "meta")
    assert storage_bytes(cache) == element_bytes(cache) == spec.total_bytes(slots) <= free
    more = ReplayCache.allocate(spec, slots + 1, "meta")
    assert storage_bytes(more) > free
    assert storage_bytes(more) - storage_bytes(cache) == spec.bytes_per_slot()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 40), st.integers(1, 9), st.integers(0, 10**7))
def test_the_planner_is_exact_for_several_groups(W: int, T: int, heads: int, layers: int, free: int) -> None:
    specs = [
        CacheSpec(layers, heads, 64, 64, 1, min(T, W), W),
        CacheSpec(1, heads, 80, 128, heads, min(T, W), W, "bf16"),
    ]
    n = slots_that_fit(free, *specs)
    total = [sum(s.total_bytes(k) for s in specs) for k in (n, n + 1)]
    assert total[1] > free and (n == 0 or total[0] <= free)
    if n:
        assert slots_that_fit(total[0], *specs) == n == slots_that_fit(total[0] - 1, *specs) + 1


@pytest.mark.parametrize("gap", [0, 16, 4096])
@pytest.mark.parametrize(
    "spec",
    [ODD, spec_of("Bamba 9B", tokens=32, window=64), *(dataclasses.replace(ODD, **kind) for kind in LOW)],
    ids=lambda s: s.problem().label(),
)
def test_the_planner_of_pages_is_the_pool(spec: CacheSpec, gap: int) -> None:
    """Pages of any stride, cursors and A beside them: byte for byte what is there, and not one page more."""
    stride, free = spec.page_bytes + gap, 2**30 + 77
    slots = slots_that_fit(free, spec, slot_stride=stride)
    for n in (slots, slots + 1):
        pool = torch.empty(spec.layers, n, stride, dtype=torch.uint8, device="meta")
        cache = ReplayCache.from_pool(spec, pool)
        assert storage_bytes(cache) == spec.pool_bytes(n, stride)
    assert spec.pool_bytes(slots, stride) <= free < spec.pool_bytes(slots + 1, stride)
    assert spec.pool_bytes(slots) == spec.pool_bytes(slots, spec.page_bytes)
    assert slots_that_fit(2 * free, spec, spec, slot_stride=stride) == slots


@pytest.mark.fault(26)
def test_bytes_are_a_function_of_window_and_tokens() -> None:
    """The published number: checkpoint and ring of `ring.bytes_per_slot` in each layer, cursors once."""
    spec = spec_of("Nemotron-3 Super 120B")
    one_layer = ring.bytes_per_slot(128, 64, 128, 8, 4, 16)
    assert spec.bytes_per_slot() == 40 * (one_layer - 8) + 12 == spec.problem().bytes_per_slot() * 40 - 40 * 8 + 12
    wider = dataclasses.replace(spec, window=15, tokens=5)
    assert wider.bytes_per_slot() == spec.bytes_per_slot(), "only R counts"
    row = 128 * 64 * 2 + 8 * 128 * 2 + 128 * 4
    assert spec.bytes_per_slot() - dataclasses.replace(spec, window=15).bytes_per_slot() == 40 * row


@pytest.mark.parametrize(
    "spec",
    [ODD, spec_of("Mamba2 130M", tokens=1, window=1), *(dataclasses.replace(ODD, **kind) for kind in LOW)],
    ids=lambda s: s.problem().label(),
)
def test_the_description_is_what_is_made(spec: CacheSpec) -> None:
    """Names, shapes, strides, dtypes, alignment and addresses of a real allocation; no two tensors share a byte."""
    cache = ReplayCache.allocate(spec, 3, "cpu")
    made = {(i, n): getattr(layer, n) for i, layer in enumerate(cache.layers) for n in layer.named()}
    made |= {(None, n): getattr(cache, n) for n in ("A", "ring_start", "pnat", "last_tokens")}
    described = spec.tensors(3)
    assert {(d.layer, d.name) for d in described} == set(made) and len(described) == len(made)
    base = made[0, "state"].untyped_storage().data_ptr()
    covered = torch.zeros(spec.total_bytes(3), dtype=torch.int32)
    for d in described:
        t = made[d.layer, d.name]
        assert (tuple(t.shape), t.stride(), t.dtype) == (d.shape, d.stride, dtypes.TORCH[d.dtype])
        assert t.data_ptr() == base + d.offset
        assert not any(s * t.element_size() % d.alignment for s in t.stride()[:-1]) and d.offset % d.alignment == 0
        assert d.lifetime == ("model" if d.name == "A" else "request")
        covered[d.offset : d.offset + d.nbytes] += 1
        assert not bool(t.view(torch.uint8).any()), "zeroed"
    assert bool((covered == 1).all())


def test_the_step_takes_them_as_compact() -> None:
    """Kernels of an own allocation are those for compact caches, and the spec names their problem."""
    from replayssm_cute import problem as problems
    from replayssm_cute.calls import random_call

    low = [dataclasses.replace(ODD, **kind) for kind in LOW]
    for spec in (ODD, spec_of("Falcon-H1 0.5B", tokens=2, window=4, state_dtype="f16"), *low):
        cache = ReplayCache.allocate(spec, 4, "cpu")
        call = random_call(spec.problem(), 2, slots=4)
        call = dataclasses.replace(call, **cache.step_args(spec.layers - 1))
        kwargs = {k: v for k, v in call.kwargs().items() if k != "pad_slot_id"}
        found = problems.from_tensors(**kwargs, enable_pdl=False)
        assert found == spec.problem() and found.compact


@pytest.mark.parametrize(
    "kwargs,error,message",
    [
        ({"layers": 0}, ValueError, "layers: got 0, expected a positive int"),
        ({"layers": True}, ValueError, "layers: got True"),
        ({"groups": 4}, ValueError, "groups: 15 heads do not divide into 4 groups"),
        ({"head_dim": 96}, ValueError, "head_dim: got 96"),
        ({"tokens": 9}, ValueError, "window: got W = 8 with T = 9"),
        ({"window": 65}, NotImplementedError, "W = 65"),
        ({"state_dtype": "bf16", "copy_dtype": "i8"}, ValueError, "state_copy: got one beside a bf16 state"),
        ({"state_dtype": "f64"}, TypeError, "state_dtype: got 'f64'"),
        ({"io_dtype": "f32"}, TypeError, "io_dtype: got 'f32'"),
    ],
)
def test_bad_specs_are_refused(kwargs: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        dataclasses.replace(ODD, **kwargs)


def test_bad_plans_and_allocations_are_refused() -> None:
    for slots in (0, -1, True, 2.0):
        with pytest.raises(ValueError, match=r"slots: got .*, expected a positive int"):
            ReplayCache.allocate(ODD, slots, "cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="A: got 2 layers, expected 3"):
        ReplayCache.allocate(ODD, 1, "cpu", A=[torch.zeros(15)] * 2)
    with pytest.raises(TypeError, match="pad_slot_id: got NoneType, expected int"):
        ReplayCache.allocate(ODD, 1, "cpu", pad_slot_id=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="specs: got none"):
        slots_that_fit(1)
    with pytest.raises(ValueError, match="free_bytes: got -1"):
        slots_that_fit(-1, ODD)
    with pytest.raises(TypeError, match="free_bytes: got float, expected int"):
        slots_that_fit(1e9, ODD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"slot_stride: got \d+ bytes, expected a multiple of 16"):
        slots_that_fit(1, ODD, slot_stride=ODD.page_bytes + 8)
    with pytest.raises(ValueError, match=r"slot_stride: got \d+ bytes, expected at least the \d+ of a page"):
        ODD.pool_bytes(3, ODD.page_bytes - 16)
    with pytest.raises(TypeError, match="slot_stride: got float, expected an int, bytes"):
        ODD.pool_bytes(3, 1e6)  # type: ignore[arg-type]
    for work, message in (
        (lambda: slots_that_fit(1, None), "specs: got NoneType, expected CacheSpec"),
        (lambda: ReplayCache.allocate(None, 1, "cpu"), "spec: got NoneType, expected CacheSpec"),
        (lambda: ReplayCache.allocate(ODD, 1, "cpu", A=5), "A: got int, expected a tensor for each layer"),
        (lambda: ReplayCache.from_pool(None, []), "spec: got NoneType, expected CacheSpec"),
        (lambda: ReplayCache.from_pool(ODD, None), "pool: got NoneType, expected tensors of bytes"),
        (
            lambda: ReplayCache.allocate(ODD, 1, "cpu").prefill_handoff([0], None),
            "states: got NoneType, expected tensors",
        ),
    ):
        with pytest.raises(TypeError, match=message):
            work()  # type: ignore[no-untyped-call]
    assert slots_that_fit(0, ODD) == 0 == slots_that_fit(ODD.total_bytes(1) - 1, ODD)


def test_the_example_of_the_docstring_runs() -> None:
    doc = replayssm_cute.cache.__doc__
    assert doc is not None
    code = textwrap.dedent("\n".join(line for line in doc.splitlines() if line.startswith("    ") or not line))
    assert "begin_step" not in code and "cache.commit(slots, accepted)" in code
    exec(compile(code, "replayssm_cute.cache", "exec"), {})


def test_layers_hold_what_the_kernels_table_names() -> None:
    assert tuple(f.name for f in dataclasses.fields(LayerTensors)) == shapes.TENSORS
    assert (
        tuple(ODD.slot_shapes()) == shapes.TENSORS[:4] == tuple(ReplayCache.allocate(ODD, 1, "cpu").layers[0].named())
    )
    for change in LOW:
        spec = dataclasses.replace(ODD, **change)
        assert set(ReplayCache.allocate(spec, 1, "cpu").layers[0].named()) == set(spec.slot_shapes())
