"""The cache on a GPU: every operation meant for graphs is captured once and replayed on other values."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cache_runs import SPEC, cache_tensors, decays

from replayssm_cute.cache import ReplayCache

SLOTS, BATCH = 12, 6
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
