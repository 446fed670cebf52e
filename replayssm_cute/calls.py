"""One call's tensors, and random ones: what tests, tuner, warmup and self-checks feed the kernels with."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import dtypes, packing, rounding
from .problem import Problem


@dataclass(slots=True)
class Call:
    """The arguments of `checkpointing_ssu`, by name (shapes as documented there)."""

    state: torch.Tensor
    x_cache: torch.Tensor
    B_cache: torch.Tensor
    dt_cache: torch.Tensor
    ring_start: torch.Tensor
    prev_num_accepted_tokens: torch.Tensor
    x: torch.Tensor
    dt: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    out: torch.Tensor
    D: torch.Tensor | None = None
    z: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None
    dt_softplus: bool = False
    state_batch_indices: torch.Tensor | None = None
    pad_slot_id: int = -1
    cu_seqlens: torch.Tensor | None = None
    max_seqlen: int | None = None
    state_scale: torch.Tensor | None = None
    rand_seed: torch.Tensor | None = None
    philox_rounds: int = rounding.ROUNDS
    state_copy: torch.Tensor | None = None
    precision: str = "default"

    @property
    def batch(self) -> int:
        """Rows of the batch."""
        return self.x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def tokens(self) -> int:
        """T: new tokens of a row, of a ragged call the most that a row may have."""
        return self.x.shape[1] if self.max_seqlen is None else self.max_seqlen

    def lengths(self) -> torch.Tensor:
        """(batch,) int64: new tokens of each row."""
        if self.cu_seqlens is None:
            return torch.full((self.batch,), self.tokens, device=self.x.device)
        return packing.lengths(self.cu_seqlens)

    def written(self) -> list[str]:
        """Names of the tensors that a step may write."""
        return [name for name in MAY_BE_WRITTEN if getattr(self, name) is not None]

    def kwargs(self) -> dict[str, Any]:
        """As keyword arguments."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors among its arguments, by name."""
        return {k: v for k, v in self.kwargs().items() if isinstance(v, torch.Tensor)}

    def clone(self) -> Call:
        """A deep copy that keeps every tensor's strides (stride-0 views stay views)."""
        return self.to(None)

    def to(self, device: torch.device | str | None) -> Call:
        """The same call on another device (None: a copy on its own), strides kept."""
        copies: dict[str, Any] = {k: _clone(v, device) for k, v in self.tensors().items()}
        return dataclasses.replace(self, **copies)


WRITTEN = ("state", "x_cache", "B_cache", "dt_cache", "out")  # by every step
MAY_BE_WRITTEN = (*WRITTEN, "state_scale", "state_copy")  # where there are such


def _clone(t: torch.Tensor, device: torch.device | str | None = None) -> torch.Tensor:
    device = device or t.device
    size = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    flat = torch.empty(size, dtype=t.dtype, device=device)
    source = t.as_strided((size,), (1,), t.storage_offset())
    flat.copy_(source)
    return flat.as_strided(t.shape, t.stride())


def random_call(
    problem: Problem,
    batch: int,
    *,
    slots: int | None = None,
    pnat: Sequence[int] | torch.Tensor | None = None,
    ring_start: Sequence[int] | torch.Tensor | None = None,
    padding: Sequence[int] = (),
    pad_slot_id: int = -1,
    dead: float | None = float("nan"),
    seed: int = 0,
    device: torch.device | str = "cpu",
    lengths: Sequence[int] | torch.Tensor | int | None = None,
    tail: int = 0,
) -> Call:
    """A random call of realistic statistics: dt after softplus in about 0.001..0.1, A in -16..-1.

    Args:
        batch, slots: rows, and cache slots (default: batch + 3), assigned to rows by a random permutation.
        pnat, ring_start: live rows and oldest live row of each batch row; default random in 0..W and 0..R-1.
        padding: batch rows that get `pad_slot_id`.
        dead: fills ring rows outside the live window and the slots that no row names, and of a ragged call the inputs
            of padding rows and of the tail; None keeps random values.
        pad_slot_id: never assigned to a live row; where it is a real slot, that slot is poisoned like unnamed ones.
        seed: of the generator; tensors are drawn on the CPU, so that every device sees the same ones.
        lengths: of a ragged problem's rows, default random in 0..T.
        tail: of a ragged problem, packed tokens that no row has; one where no row has any.
    """
    p = problem
    gen = torch.Generator().manual_seed(seed)
    shape, cu_seqlens = (batch, p.tokens), None
    if p.ragged:
        drawn = torch.randint(0, p.tokens + 1, (batch,), generator=gen) if lengths is None else torch.as_tensor(lengths)
        cu_seqlens = torch.zeros(batch + 1, dtype=torch.int32)
        cu_seqlens[1:] = drawn.expand(batch).cumsum(0)
        shape = (1, max(1, int(cu_seqlens[-1]) + tail))
    elif lengths is not None or tail:
        raise ValueError("lengths, tail: need a ragged problem")
    slots = batch + 3 if slots is None else slots
    io, rows = dtypes.TORCH[p.io_dtype], p.ring_rows

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen)

    def uniform(low: float, high: float, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=gen) * (high - low) + low

    order = torch.randperm(slots, generator=gen)
    order = order[order != pad_slot_id]  # no live row may name the padding slot
    if p.index_dtype is not None and len(order) < batch:
        raise ValueError(f"slots: got {slots}, expected at least {batch} beside the padding slot")
    named = order[:batch] if p.index_dtype is not None else torch.arange(batch)
    start = torch.randint(0, rows, (slots,), generator=gen, dtype=torch.int32)
    live = torch.randint(0, p.window + 1, (slots,), generator=gen, dtype=torch.int32)
    if pnat is not None:
        live[named] = torch.as_tensor(pnat, dtype=torch.int32).expand(batch)
    if ring_start is not None:
        start[named] = torch.as_tensor(ring_start, dtype=torch.int32).expand(batch)
    states = randn(slots, p.heads, p.head_dim, p.d_state)
    state, scale, copy, seeds = states.to(dtypes.TORCH[p.state_dtype]), None, None, None
    if p.rewrites:  # rows of many magnitudes: a scale that is taken for another's shows
        states = states * torch.exp(uniform(-0.7, 0.7, slots, p.heads, p.head_dim, 1)) if p.scaled else states
        state, scale = rounding.encode(p.state_dtype, states)
        if p.copy_dtype is not None:
            copy, scale = rounding.encode(p.copy_dtype, states)
        if p.philox_rounds is not None:
            seeds = torch.randint(-(1 << 63), (1 << 63) - 1, (1,), generator=gen)
    call = Call(
        state=state,
        x_cache=randn(slots, p.heads, rows, p.head_dim).to(io),
        B_cache=randn(slots, p.groups, rows, p.d_state).to(io),
        dt_cache=torch.exp(uniform(-6.9, -2.3, slots, p.heads, rows)),
        ring_start=start,
        prev_num_accepted_tokens=live,
        x=randn(*shape, p.heads, p.head_dim).to(io),
        dt=spread(uniform(-5.0, 0.0, *shape, p.heads).to(dtypes.TORCH[p.dt_dtype]), p.head_dim),
        A=spread(-uniform(1.0, 16.0, p.heads).to(dtypes.TORCH[p.a_dtype]), p.head_dim, p.d_state),
        B=randn(*shape, p.groups, p.d_state).to(io),
        C=randn(*shape, p.groups, p.d_state).to(io),
        out=torch.full((*shape, p.heads, p.head_dim), float("nan")).to(io),
        D=None if p.d_dtype is None else spread(randn(p.heads).to(dtypes.TORCH[p.d_dtype]), p.head_dim),
        z=randn(*shape, p.heads, p.head_dim).to(io) if p.has_z else None,
        dt_bias=None
        if p.dt_bias_dtype is None
        else spread(uniform(-2.0, 0.0, p.heads).to(dtypes.TORCH[p.dt_bias_dtype]), p.head_dim),
        dt_softplus=p.dt_softplus,
        state_batch_indices=None if p.index_dtype is None else named.to(dtypes.TORCH[p.index_dtype], copy=True),
        pad_slot_id=pad_slot_id,
        cu_seqlens=cu_seqlens,
        max_seqlen=p.tokens if p.ragged else None,
        state_scale=scale,
        rand_seed=seeds,
        philox_rounds=p.philox_rounds or rounding.ROUNDS,
        state_copy=copy,
        precision=p.precision,
    )
    if not p.dt_softplus:  # without softplus the raw dt is the step itself: keep it positive
        call.dt = spread(uniform(0.001, 0.1, *shape, p.heads).to(dtypes.TORCH[p.dt_dtype]), p.head_dim)
        if call.dt_bias is not None:
            bias = uniform(0.0, 0.01, p.heads).to(dtypes.TORCH[p.dt_bias_dtype or "f32"])
            call.dt_bias = spread(bias, p.head_dim)
    if padding:
        if call.state_batch_indices is None:
            raise ValueError("padding: needs a problem with slot indices")
        call.state_batch_indices[list(padding)] = pad_slot_id
    if dead is not None:
        live_rows = sorted(set(range(batch)) - set(padding))
        _poison(call, named[live_rows], dead)
        if cu_seqlens is not None:
            _poison_tokens(call, padding, dead)
    return call.to(device) if torch.device(device).type != "cpu" else call


def spread(t: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The same values with stride-0 dimensions of `sizes` appended: one value a head, expanded over P."""
    return t.reshape(*t.shape, *(1 for _ in sizes)).expand(*t.shape, *sizes)


def _poison(call: Call, named: torch.Tensor, value: float) -> None:
    """Fill everything that a correct step never uses: dead ring rows, and whole slots that no row names."""
    slots, rows = call.x_cache.shape[0], call.x_cache.shape[2]
    offset = (torch.arange(rows)[None] - call.ring_start[:, None]) % rows
    dead = offset >= call.prev_num_accepted_tokens[:, None]
    used = torch.zeros(slots, dtype=torch.bool)
    used[named] = True
    dead |= ~used[:, None]
    call.x_cache.transpose(1, 2)[dead] = value
    call.B_cache.transpose(1, 2)[dead] = value
    call.dt_cache.transpose(1, 2)[dead] = value
    for t in (call.state, call.state_scale, call.state_copy):
        if t is not None and t.dtype != torch.int8:
            t.view(torch.uint8 if t.element_size() == 1 else t.dtype)[~used] = 0x7F if t.element_size() == 1 else value


def _poison_tokens(call: Call, padding: Sequence[int], value: float) -> None:
    """Fill the inputs of packed tokens that a correct step never uses: those of padding rows and of the tail."""
    assert call.cu_seqlens is not None
    bounds = call.cu_seqlens.tolist()
    for first, end in (*((bounds[row], bounds[row + 1]) for row in padding), (bounds[-1], call.x.shape[1])):
        for t in (call.x, call.dt[..., 0], call.B, call.C, call.z):
            if t is not None:
                t[:, first:end] = value
