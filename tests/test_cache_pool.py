"""Views into an engine's pages: the same life as in an own allocation, and not a byte of the gaps touched."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cache_runs import SPEC, Request, Run, decays, poison, started

from replayssm_cute import problem as problems
from replayssm_cute.cache import CacheSpec, ReplayCache
from replayssm_cute.calls import random_call

SMALL = dataclasses.replace(SPEC, tokens=2, window=5)
SLOTS = 4
GAP = 0xFF  # bytes of a NaN in every float type


def interleaved(spec: CacheSpec, lead: int = 48, between: int = 4096, tail: int = 112) -> tuple[torch.Tensor, list]:
    """A pool of pages that hold, for a slot, both layers with other bytes before, between and after them."""
    width = lead + spec.layers * (spec.page_bytes + between) + tail
    pool = torch.full((SLOTS, width), GAP, dtype=torch.uint8)
    starts = [lead + i * (spec.page_bytes + between) for i in range(spec.layers)]
    return pool, [pool[:, at : at + spec.page_bytes] for at in starts]


def owned(cache: ReplayCache, pool: torch.Tensor) -> torch.Tensor:
    """Which bytes of the pool belong to the cache's tensors."""
    mask = torch.zeros(pool.numel(), dtype=torch.bool)
    for layer in cache.layers:
        for t in layer.named().values():
            size = t.element_size()
            for slot in range(SLOTS):
                at = t[slot].data_ptr() - pool.data_ptr()
                assert not bool(mask[at : at + t[slot].numel() * size].any()), "tensors share no byte"
                mask[at : at + t[slot].numel() * size] = True
    return mask


SCATTERED = {"dt_cache": 0, "B_cache": 1024, "state": 8192, "x_cache": 8192 + 2 * 64 * 64 * 4 + 32}


@pytest.mark.fault(10)
@pytest.mark.parametrize("offsets", [None, SCATTERED], ids=["packed", "scattered"])
def test_a_whole_life_leaves_the_gaps_untouched(offsets: dict[str, int] | None) -> None:
    """Every operation on a pool with NaN everywhere: right outputs, and each byte between the tensors as it was."""
    if offsets is None:
        pool, pages = interleaved(SMALL)
    else:
        end = offsets["x_cache"] + 2 * 7 * 64 * 2
        pool = torch.full((SLOTS, 2 * end + 160), GAP, dtype=torch.uint8)
        pages = [pool[:, :end], pool[:, end + 64 :]]
    cache = ReplayCache.from_pool(SMALL, pages, offsets=offsets, A=decays(SMALL))
    assert bool((pool == GAP).all()), "making it writes nothing"
    gaps = ~owned(cache, pool)
    assert 0 < int(gaps.sum()) < pool.numel()
    poison(cache)
    run = Run(cache)
    request = started(run, 3, ring_start=5, pending=4)
    twin = request.fork()
    cache.copy([3, -1], [1, -1])
    backup = cache.export_slots([1])
    cache.materialize([3, 3], [0, 2], [0, 3])
    cache.import_slots([0], backup)
    cache.begin_step([2], [1])
    cache.settle([2], [1])
    cache.prefill_handoff([2], torch.zeros(2, 1, 2, 64, 64))
    cache.reset([2, -1])
    run.decode([3, 0, 2], [request, twin, Request(SMALL)], 12)
    assert bool((pool.view(-1)[gaps] == GAP).all())


def test_the_step_accepts_the_views() -> None:
    """What from_pool makes passes the step's own checks of strides and alignment, for odd sizes too."""
    spec = CacheSpec(layers=2, heads=15, head_dim=64, d_state=64, groups=3, tokens=3, window=8, state_dtype="bf16")
    for dtype in (torch.uint8, torch.int8):
        pool, pages = interleaved(spec)
        cache = ReplayCache.from_pool(spec, [page.view(dtype) for page in pages])
        call = dataclasses.replace(random_call(spec.problem(), 2, slots=SLOTS), **cache.step_args(1))
        kwargs = {k: v for k, v in call.kwargs().items() if k != "pad_slot_id"}
        assert problems.from_tensors(**kwargs, enable_pdl=False) == spec.problem()
        assert cache.layers[1].state.stride(0) * 2 == pool.stride(0)


def test_one_tensor_of_pages() -> None:
    """(layers, slots, bytes), also with one slot, whose stride means nothing."""
    for slots in (3, 1):
        pool = torch.zeros(2, slots, SMALL.page_bytes + 32, dtype=torch.uint8)
        cache = ReplayCache.from_pool(SMALL, pool)
        assert cache.slots == slots and cache.layers[1].state.data_ptr() == pool[1].data_ptr()
        cache.layers[1].dt_cache.fill_(1.0)
        assert not bool(pool[0].any()) and bool(pool[1].any())


def test_a_page_is_what_the_spec_says() -> None:
    """Packed tensors, each at a multiple of 16 bytes; the page is as long as they are, rounded up."""
    spec = CacheSpec(layers=1, heads=3, head_dim=64, d_state=64, groups=1, tokens=1, window=4)
    assert spec.layer_bytes == 3 * 64 * 64 * 4 + 5 * (3 * 64 * 2 + 64 * 2 + 3 * 4)
    assert spec.layer_bytes % 16 == 12 and spec.page_bytes == spec.layer_bytes + 4
    described = {t.name: t for t in spec.page_tensors(7, spec.page_bytes)}
    assert {n: t.offset for n, t in described.items()} == spec.page_offsets()
    assert all(t.offset % 16 == 0 for t in described.values())
    assert sum(t.nbytes for t in described.values()) == 7 * spec.layer_bytes


def pages_of(width: int, slots: int = SLOTS, lead: int = 0, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.zeros(slots, width, dtype=dtype)[:, lead:]


PAGE = SMALL.page_bytes


@pytest.mark.parametrize(
    "pool,offsets,error,message",
    [
        ([pages_of(PAGE)], None, ValueError, "pool: got 1 layers, expected 2"),
        ([pages_of(PAGE), None], None, TypeError, r"pool\[1\]: got NoneType, expected a torch.Tensor"),
        ([pages_of(PAGE, dtype=torch.int16)] * 2, None, TypeError, r"pool\[0\]: got torch.int16, expected torch.uint8"),
        ([pages_of(PAGE), pages_of(PAGE)[0]], None, ValueError, r"pool\[1\]: got shape .* expected \(slots, bytes\)"),
        ([pages_of(PAGE), pages_of(PAGE, 3)], None, ValueError, r"pool\[1\]: got 3 slots, expected 4"),
        ([pages_of(PAGE), pages_of(PAGE).to("meta")], None, ValueError, r"pool\[1\]: on device meta, expected cpu"),
        (
            [pages_of(PAGE + 8)] * 2,
            None,
            ValueError,
            r"pool\[0\]: slot_stride: got \d+ bytes, expected a multiple of 16",
        ),
        ([pages_of(PAGE + 16, lead=8)] * 2, None, ValueError, r"pool\[0\]: starts 8 bytes past a multiple of 16"),
        ([pages_of(PAGE - 16)] * 2, None, ValueError, r"pool\[0\]: slot_stride: got \d+ bytes, expected at least"),
        ([pages_of(PAGE + 64)[:, : PAGE - 16]] * 2, None, ValueError, r"pool\[0\]: got \d+ bytes a slot, expected at"),
        ([pages_of(2 * PAGE)[:, ::2]] * 2, None, ValueError, r"pool\[0\]: got stride 2 between bytes, expected 1"),
        ([pages_of(PAGE, 1).expand(4, -1)] * 2, None, ValueError, r"pool\[0\]: got a slot stride of 0 bytes"),
        ([pages_of(PAGE)] * 2, None, ValueError, r"pool\[1\]: shares bytes with pool\[0\]"),
        ([pages_of(2 * PAGE)] * 2, {"state": 0}, ValueError, r"pool\[0\]: offsets: got names \['state'\], expected"),
        (
            [pages_of(4 * PAGE)] * 2,
            {**SMALL.page_offsets(), "x_cache": PAGE + 8},
            ValueError,
            r"offsets\['x_cache'\]: got \d+ bytes, expected a multiple of 16",
        ),
        (
            [pages_of(4 * PAGE)] * 2,
            {**SMALL.page_offsets(), "x_cache": 16},
            ValueError,
            r"offsets: 'x_cache' at 16 overlaps 'state', which ends at 32768",
        ),
    ],
)
def test_bad_pools_are_named(pool: Any, offsets: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ReplayCache.from_pool(SMALL, pool, offsets=offsets)


def test_layers_that_share_bytes_are_found() -> None:
    """Interleaved layers may be as close as their bytes allow, and no closer; also across slots."""
    pool = torch.zeros(SLOTS, 2 * PAGE, dtype=torch.uint8)
    flat = pool.view(-1)
    ReplayCache.from_pool(SMALL, [pool[:, :PAGE], pool[:, PAGE:]])
    ReplayCache.from_pool(SMALL, [pool[:, PAGE:], pool[:, :PAGE]])

    def shifted(by: int) -> torch.Tensor:
        return flat.as_strided((SLOTS - 1, PAGE), (2 * PAGE, 1), by)

    ReplayCache.from_pool(SMALL, [shifted(0), shifted(PAGE)])
    for by in (16, PAGE - 16, PAGE + 16, 2 * PAGE, 2 * PAGE - 16):
        with pytest.raises(ValueError, match=r"pool\[1\]: shares bytes with pool\[0\]"):
            ReplayCache.from_pool(SMALL, [shifted(0), shifted(by)])
