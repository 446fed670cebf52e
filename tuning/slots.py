"""The tensors of a cell: its slot sets, filled so that a rotation over them meets the stationary mix with a cold L2.

Slots are permuted over the whole cache, ring starts are random, pnat and ragged rows' tokens come by quota
(acceptance.deal).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from replayssm_cute import calls, dtypes, ring
from replayssm_cute.problem import Problem

from . import acceptance, cost
from .policy import GIB, Policy


def slot_sets(problem: Problem, batch: int, mix: acceptance.Mix, policy: Policy, *, l2: int, free: int) -> int:
    """Slot sets of a cell.

    Args:
        l2, free: bytes of L2, and of device memory that may be used.

    Raises:
        ValueError: if memory has no room for one set, or for too little to leave the L2 cold.
    """
    touched = cost.of_mix(problem, batch, mix).total
    held = batch * (problem.bytes_per_slot() + _input_bytes(problem))
    wanted = max(math.ceil(policy.l2_factor * l2 / touched), math.ceil(policy.min_rows / batch), 2)
    room = min(policy.max_bytes, free) // held
    sets = min(wanted, room, policy.max_nodes)
    if sets < 1 or sets * touched < 2 * l2:
        raise ValueError(
            f"batch {batch}: {wanted} slot sets of {held / GIB:.2f} GiB do not fit in "
            f"{min(policy.max_bytes, free) / GIB:.1f} GiB; a cold-L2 time needs {math.ceil(2 * l2 / touched)} at least"
        )
    return sets


def _input_bytes(p: Problem) -> int:
    """Bytes of one row's x, dt, B, C, z and out, at most."""
    io = dtypes.BYTES[p.io_dtype]
    values = p.heads * p.head_dim * io
    return p.tokens * (
        values * (3 if p.has_z else 2) + 2 * p.groups * p.d_state * io + p.heads * dtypes.BYTES[p.dt_dtype]
    )


@dataclass(slots=True)
class Cell:
    """The tensors of one (problem, batch, mix): `calls[i]` is the call on slot set i.

    Attributes:
        out: every call's outputs.
        flushing: (slots,) int32: W for slots whose row flushes, 0 for others: what a kernel that knows pnat and T alone
            needs to see the same rows flush.
        flush, mean_live, mean_tokens: of the rows, as the quotas gave them.
    """

    problem: Problem
    batch: int
    calls: list[calls.Call]
    out: torch.Tensor
    flushing: torch.Tensor
    flush: float
    mean_live: float
    mean_tokens: float

    @property
    def bytes(self) -> int:
        """Bytes that one call moves, averaged over the sets, with the flush share that the quotas gave."""
        facts = {"flush": self.flush, "mean_live": self.mean_live, "mean_tokens": self.mean_tokens}
        return cost.traffic(self.problem, self.batch, **facts).total


def make_cell(
    problem: Problem, batch: int, mix: acceptance.Mix, policy: Policy, device: torch.device, sets: int
) -> Cell:
    """Allocate and fill the caches and inputs of `sets` slot sets on the device."""
    p = problem
    slots, rows, io = sets * batch, p.ring_rows, dtypes.TORCH[p.io_dtype]
    gen = torch.Generator(device).manual_seed(policy.seed)

    def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device).normal_(generator=gen)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device).uniform_(low, high, generator=gen)

    def weight(name: str | None, low: float, high: float) -> torch.Tensor | None:
        return None if name is None else calls.spread(uniform(low, high, p.heads).to(dtypes.TORCH[name]), p.head_dim)

    cpu = torch.Generator().manual_seed(policy.seed)
    pnat, new = acceptance.deal(mix, sets, batch, seed=policy.seed)
    flushes = ring.flushes(pnat, new, p.window)
    if p.index_dtype is None:  # rows are slots: each set is a window of the cache
        named = torch.arange(slots).view(sets, batch)
    else:
        named = torch.randperm(slots, generator=cpu).view(sets, batch)
    live = torch.zeros(slots, dtype=torch.int32)
    live[named] = pnat
    flushing = torch.zeros(slots, dtype=torch.int32)
    flushing[named] = flushes.to(torch.int32) * p.window
    start = torch.randint(0, rows, (slots,), generator=cpu, dtype=torch.int32)

    cache: dict[str, Any] = {
        "state": normal(slots, p.heads, p.head_dim, p.d_state, dtype=dtypes.TORCH[p.state_dtype]),
        "x_cache": normal(slots, p.heads, rows, p.head_dim, dtype=io),
        "B_cache": normal(slots, p.groups, rows, p.d_state, dtype=io),
        "dt_cache": torch.exp(uniform(-6.9, -2.3, slots, p.heads, rows)),
        "ring_start": start.to(device),
        "prev_num_accepted_tokens": live.to(device),
    }
    raw_dt = (-5.0, 0.0) if p.dt_softplus else (0.001, 0.1)
    shared: dict[str, Any] = {
        "A": calls.spread(-uniform(1.0, 16.0, p.heads).to(dtypes.TORCH[p.a_dtype]), p.head_dim, p.d_state),
        "D": weight(p.d_dtype, -1.0, 1.0),
        "dt_bias": weight(p.dt_bias_dtype, *((-2.0, 0.0) if p.dt_softplus else (0.0, 0.01))),
        "dt_softplus": p.dt_softplus,
    }
    # dense rows: a set's tensors are (batch, T, ...); ragged ones lie packed: (1, its tokens, ...)
    ends = [0, *new.sum(1).cumsum(0).tolist()]
    shape = (ends[-1],) if p.ragged else (sets, batch, p.tokens)
    x = normal(*shape, p.heads, p.head_dim, dtype=io)
    dt = calls.spread(uniform(*raw_dt, *shape, p.heads).to(dtypes.TORCH[p.dt_dtype]), p.head_dim)
    b = normal(*shape, p.groups, p.d_state, dtype=io)
    c = normal(*shape, p.groups, p.d_state, dtype=io)
    z = normal(*shape, p.heads, p.head_dim, dtype=io) if p.has_z else None
    out = torch.empty_like(x)
    packed = torch.zeros(sets, batch + 1, dtype=torch.int32)
    packed[:, 1:] = new.cumsum(1)
    packed = packed.to(device)

    def of_set(t: torch.Tensor, i: int) -> torch.Tensor:
        return t[ends[i] : ends[i + 1]][None] if p.ragged else t[i]

    index = None if p.index_dtype is None else named.to(device, dtypes.TORCH[p.index_dtype])
    made = []
    for i in range(sets):
        own = cache if index is not None else {k: v[i * batch : (i + 1) * batch] for k, v in cache.items()}
        made.append(
            calls.Call(
                **own,
                **shared,
                x=of_set(x, i),
                dt=of_set(dt, i),
                B=of_set(b, i),
                C=of_set(c, i),
                out=of_set(out, i),
                z=None if z is None else of_set(z, i),
                state_batch_indices=None if index is None else index[i],
                cu_seqlens=packed[i] if p.ragged else None,
                max_seqlen=p.tokens if p.ragged else None,
            )
        )
    means = [float(v.float().mean()) for v in (flushes, pnat, new)]
    return Cell(p, batch, made, out, flushing.to(device), *means)
