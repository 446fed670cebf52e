"""The standard update as a Triton kernel: each program reads and writes some rows of one head's state once."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from .decoder import PAD

ROWS = (8, 16, 32)  # of a state, a program: what `fastest` tries


@triton.jit  # type: ignore[misc, untyped-decorator, unused-ignore]
def _update(
    state, x, dt, A, B, C, D, dt_bias, out, slots,
    x_row, dt_row, b_row, c_row, heads, per_group,
    PADDING: tl.constexpr, P: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip  # type: ignore[no-untyped-def]
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = tl.load(slots + row).to(tl.int64)
    if (slot != PADDING) & (slot >= 0):
        p, n = part * ROWS + tl.arange(0, ROWS), tl.arange(0, N)
        tile = state + (slot * heads + head) * P * N + p[:, None] * N + n[None, :]
        S = tl.load(tile).to(tl.float32)
        raw = tl.load(dt + row * dt_row + head).to(tl.float32) + tl.load(dt_bias + head).to(tl.float32)
        step = tl.where(raw > 20.0, raw, tl.log(1.0 + tl.exp(tl.minimum(raw, 20.0))))
        xs = tl.load(x + row * x_row + head * P + p).to(tl.float32)
        group = head // per_group * N + n
        b = tl.load(B + row * b_row + group).to(tl.float32)
        c = tl.load(C + row * c_row + group).to(tl.float32)
        S = tl.exp(tl.load(A + head) * step) * S + (step * xs)[:, None] * b[None, :]
        tl.store(tile, S.to(state.dtype.element_ty))
        y = tl.sum(S * c[None, :], axis=1) + tl.load(D + head).to(tl.float32) * xs
        tl.store(out + (row * heads + head) * P + p, y.to(out.dtype.element_ty))


def _apply(
    rows: int, state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor,
    C: torch.Tensor, D: torch.Tensor, dt_bias: torch.Tensor, slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    heads, head_dim, d_state = state.shape[1:]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _update[(len(slots), heads, head_dim // rows)](
        state, x, dt, A, B, C, D, dt_bias, out, slots,
        x.stride(0), dt.stride(0), B.stride(0), C.stride(0), heads, heads // B.shape[1],
        PADDING=PAD, P=head_dim, N=d_state, ROWS=rows,
    )  # fmt: skip
    return out


def of(rows: int) -> Callable[..., torch.Tensor]:
    """The update with this many rows of a state a program. Rows of tensors are contiguous, slots too."""
    return functools.partial(_apply, rows)


def fastest(given: Mapping[str, torch.Tensor]) -> int:
    """The number of rows that takes these arguments in the shortest time, median of some launches."""
    times: dict[float, int] = {}
    for rows in ROWS:
        samples = []
        for _ in range(12):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            of(rows)(**given)
            end.record()
            end.synchronize()
            samples.append(begin.elapsed_time(end))
        times[statistics.median(samples[2:])] = rows
    return times[min(times)]
