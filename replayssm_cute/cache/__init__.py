"""The caches that an engine keeps for checkpointing SSU, and the life of a slot in them.

A `CacheSpec` says what the layers of a cache group need, to the byte; a `ReplayCache` holds the tensors, its own or
views into an engine's pages, and moves slots through their life: reset or prefill handoff, steps and commits, prefix
copies, backup and migration. One pair of cursors serves all layers.

    import torch
    from replayssm_cute import CacheSpec, ReplayCache, checkpointing_ssu, slots_that_fit

    device = "cpu"
    H, P, N, G, T, W = 4, 64, 64, 1, 2, 4
    spec = CacheSpec(layers=2, heads=H, head_dim=P, d_state=N, groups=G, tokens=T, window=W)
    A = [torch.empty(H, device=device).uniform_(-16, -1) for _ in range(spec.layers)]
    cache = ReplayCache.allocate(spec, slots_that_fit(2**20, spec), device, A=A)
    assert spec.total_bytes(cache.slots) <= 2**20 < spec.total_bytes(cache.slots + 1)

    slots = torch.tensor([3, 1, -1], device=device)  # two requests, and a padding row
    cache.reset(slots)
    for _ in range(5):
        for layer in range(spec.layers):  # in a model, each layer makes its own inputs
            x = torch.randn(3, T, H, P, device=device).bfloat16()
            B, C = torch.randn(2, 3, T, G, N, device=device).bfloat16()
            dt = torch.rand(3, T, H, device=device)[..., None].expand(x.shape)
            out = torch.empty_like(x)
            checkpointing_ssu(
                **cache.step_args(layer),
                x=x, dt=dt, A=A[layer][:, None, None].expand(H, P, N), B=B, C=C, out=out,
                state_batch_indices=slots,
            )
        accepted = torch.tensor([2, 1, 0], device=device)  # after sampling
        cache.commit(slots, accepted)

    backup = cache.export_slots([3])  # preemption: CPU tensors, for any other cache of this geometry
    cache.reset([3])
    other = ReplayCache.allocate(
        CacheSpec(layers=2, heads=H, head_dim=P, d_state=N, groups=G, tokens=1, window=8, state_dtype="bf16"), 2, device
    )
    other.import_slots([0], backup)
    cache.materialize([1], [0], [1])  # slot 0: slot 1 as of its oldest live token, e.g. for a prefix cache
    assert cache.pnat[0] == 0

`CacheSpec(..., state_dtype="i8")` (or "f8e4m3") keeps 8-bit states with a scale for each row, and `copy_dtype="bf16"`
(or "f8e4m3", "i8") a read copy beside an f32 state: every operation takes scales and copies along.

An engine that learns of acceptance only when the next step begins uses `begin_step` in place of `commit`.
"""

from .logical import LogicalState
from .replay_cache import ReplayCache
from .spec import CacheSpec, TensorSpec, slots_that_fit

__all__ = ["CacheSpec", "LogicalState", "ReplayCache", "TensorSpec", "slots_that_fit"]
