"""The device's streaming limit, which fractions are of."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from replayssm_cute import target as targets
from replayssm_cute.problem import Problem

from . import floor_kernel
from .policy import GIB

_STREAMED = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=1, window=16)


def read_limit(device: torch.device, arch: str) -> dict[str, Any]:
    """The streaming limit here: GB/s of plain torch's sum and copy (read + written), and of the floor kernel."""
    free = torch.cuda.mem_get_info(device)[0]
    count = min(4 * GIB, free // 4) // 4
    source = torch.ones(count, device=device)
    sink = torch.empty_like(source)

    def best(run: Callable[[], object], moved: int) -> float:
        times = []
        for _ in range(12):
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            stop.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(stop))
        return moved / statistics.median(times[2:]) / 1e6

    read = max(
        best(lambda: torch.sum(source), source.nbytes),
        best(lambda: torch.amax(source), source.nbytes),
    )
    copy = best(lambda: sink.copy_(source), 2 * source.nbytes)
    # The floor kernel on a cache whose rows never flush: nothing but TMA loads, of the same bytes.
    p = _STREAMED
    slots = source.numel() // (p.heads * p.head_dim * p.d_state)
    state = source[: slots * p.heads * p.head_dim * p.d_state].view(slots, p.heads, p.head_dim, p.d_state)
    pnat = torch.zeros(slots, dtype=torch.int32, device=device)
    order = torch.randperm(slots, device=device).to(torch.int32)
    stream = 0.0
    for config in floor_kernel.configs(p, targets.named(arch).shared_per_block):
        kernel = floor_kernel.compile_floor(p, config, arch)
        stream = max(stream, best(lambda kernel=kernel: kernel(state, pnat, order), state.nbytes))  # type: ignore[misc]
    return {
        "read_gbs": max(read, stream),
        "torch_read_gbs": read,
        "stream_gbs": stream,
        "copy_gbs": copy,
        "bytes": source.nbytes,
        "method": "the faster of torch.sum / amax and a kernel of TMA loads alone, over the same bytes",
    }
