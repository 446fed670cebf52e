"""Times of a cache's operations on this GPU: `python -m replayssm_cute.cache.bench`.

Prints what a warmup takes, the time of the cursors' operations inside a CUDA graph, and the bandwidth of materialize,
copy and reset beside that of a plain device-to-device copy of as many bytes; every byte read or written counts once.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from .. import compiler, target, warmup
from .fold import fold
from .launches import Launches
from .recipes import CacheRecipe
from .replay_cache import ReplayCache
from .shapes import FoldShape
from .spec import CacheSpec

REPEATS = 9
# (warps, 16-byte pieces a thread, CTAs a multiprocessor) tried beside the shape that serves.
CUTS = [(4, 8, 4), (4, 8, 6), (4, 4, 6), (4, 4, 8), (2, 8, 10), (8, 8, 2), (4, 16, 3), (4, 16, 4)]
STATES = ("f32", "bf16")


def elapsed_us(work: Callable[[], object], times: int = 1) -> float:
    """Median time of `work` on the GPU in microseconds, a graph of `times` calls replayed `REPEATS` times."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            work()
    graph.replay()
    samples = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(1000 * begin.elapsed_time(end) / times)
    return statistics.median(samples)


def cursors(slots: int = 1024) -> None:
    """Commits, deferred commits and resets of cursors: time of one among 200 in a graph, so that launches overlap."""
    spec = CacheSpec(layers=1, heads=1, head_dim=64, d_state=64, groups=1, tokens=4, window=16)
    cache = ReplayCache.allocate(spec, slots, "cuda")
    print("cursors, us a call in a graph of 200 (batch 1 / 16 / 64 / 256 / 1024):")
    for name, kind in (("int32", torch.int32), ("int64", torch.int64)):
        for label in ("commit", "ragged commit", "begin_step", "reset"):
            times = []
            for batch in (1, 16, 64, 256, 1024):
                rows = torch.randperm(slots, device="cuda")[:batch].to(kind)
                counts = torch.full((batch,), 2, dtype=torch.int32, device="cuda")
                calls: dict[str, Callable[[], object]] = {
                    "commit": partial(cache.commit, rows, counts),
                    "ragged commit": partial(cache.commit, rows, counts, counts),
                    "begin_step": partial(cache.begin_step, rows, counts),
                    "reset": partial(cache.reset, rows, zero_state=False),
                }
                times.append(elapsed_us(calls[label], 200))
            print(f"  {label:14} {name}: " + " / ".join(f"{t:.2f}" for t in times), flush=True)


def plain_copy_us(nbytes: int) -> float:
    """Time of a device-to-device copy of contiguous bytes, in a graph or launched alone, whichever is faster.

    The driver copies in other ways in a graph, which on an H200 are much slower.
    """
    left = torch.empty(nbytes // 4, dtype=torch.float32, device="cuda")
    right = torch.empty_like(left)
    alone = []
    for _ in range(REPEATS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        right.copy_(left)
        end.record()
        end.synchronize()
        alone.append(1000 * begin.elapsed_time(end))
    return min(elapsed_us(partial(right.copy_, left)), statistics.median(alone))


def error(cache: ReplayCache, source: int, destination: int, rows: int) -> str:
    """How a slot of the first layer that was materialized differs from float64."""
    start, count, slots = (
        torch.tensor([value], device=cache.device) for value in (int(cache.ring_start[source]), rows, source)
    )
    exact = fold(cache.layers[0], cache.A[0], slots, start, count, rows, torch.float64)[0]
    found = cache.layers[0].state[destination]
    worst = float((found.double() - exact).abs().max() / exact.abs().max())
    other = float((found != exact.to(found.dtype)).double().mean())
    return f"error at most {worst:.1e} of the largest element; {100 * other:.2g}% are not the nearest value"


def moves(state_dtype: str, layers: int, batch: int, window: int, *, cuts: bool) -> None:
    """Materialize, copy and reset of `batch` slots of `layers` layers of a 128-head model, beside a plain copy."""
    spec = CacheSpec(layers=layers, heads=128, head_dim=64, d_state=128, groups=8, tokens=min(4, window),
                     window=window, state_dtype=state_dtype)  # fmt: skip
    A = [-torch.linspace(1, 16, 128)] * layers
    cache = ReplayCache.allocate(spec, 2 * batch, "cuda", A=A)
    for layer in cache.layers:
        layer.dt_cache.fill_(0.01)
        layer.x_cache.normal_()
        layer.B_cache.normal_()
    order = torch.randperm(2 * batch, device="cuda", dtype=torch.int32)
    src, dst = order[:batch].contiguous(), order[batch:].contiguous()
    state_bytes = layers * batch * cache.layers[0].state[0].numel() * cache.layers[0].state.element_size()
    plain = 2 * state_bytes / plain_copy_us(state_bytes) / 1000
    print(f"{state_dtype} state, W {window}, {batch} slots x {layers} layers, {state_bytes / 1e9:.2f} GB of states; "
          f"plain copy {plain:.0f} GB/s")  # fmt: skip

    def report(what: str, us: float, nbytes: int) -> None:
        rate = nbytes / us / 1000
        print(f"  {what:44} {us:9.1f} us {rate:6.0f} GB/s {100 * rate / plain:4.0f}% of copy", flush=True)

    ops = cache._ops
    assert isinstance(ops, Launches) and ops._fold is not None and isinstance(ops._fold.shape, FoldShape)
    geometry = ops._fold.shape.spec

    def materialized(count: torch.Tensor, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        cache.pnat.fill_(window)  # a materialize empties destinations' rings, and here slots take turns
        cache.materialize(sources, destinations, count)

    fill = elapsed_us(partial(cache.pnat.fill_, window))
    per_row = layers * batch * (128 * (64 * 2 + 4) + 8 * 128 * 2)  # bytes of a ring row of every slot
    for folds in sorted({0, min(4, window), window}):
        count = torch.full((batch,), folds, dtype=torch.int32, device="cuda")
        us = elapsed_us(partial(materialized, count, src, dst)) - fill
        report(f"materialize {folds} rows", us, 2 * state_bytes + folds * per_row)
    print(f"  {window} rows: {error(cache, int(src[0]), int(dst[0]), window)}", flush=True)
    count = torch.full((batch,), 4, dtype=torch.int32, device="cuda")
    us = elapsed_us(partial(materialized, count, src, src)) - fill
    report("materialize 4 rows in place", us, 2 * state_bytes + 4 * per_row)
    us = elapsed_us(partial(materialized, count, src, src.roll(1))) - fill
    report("materialize 4 rows in one cycle", us, 2 * state_bytes + 4 * per_row)
    slot_bytes = layers * batch * spec.layer_bytes
    report("copy", elapsed_us(partial(cache.copy, src, dst)), 2 * slot_bytes)
    report("reset", elapsed_us(partial(cache.reset, dst)), state_bytes)
    for warps, accesses, ctas in CUTS if cuts else ():
        try:
            shape = FoldShape.cut(geometry, warps=warps, accesses=accesses, ctas_per_sm=ctas)
        except ValueError:
            continue
        ops._fold = CacheRecipe("fold", shape)
        where = target.of_device(torch.cuda.current_device())
        found = compiler.entry_of(ops._fold, where).resources
        for folds in (0, window):
            count = torch.full((batch,), folds, dtype=torch.int32, device="cuda")
            us = elapsed_us(partial(materialized, count, src, dst)) - fill
            report(
                f"{folds} rows: {warps} warps, {shape.accesses} pieces, {ctas} CTAs, {found.registers} registers, "
                f"{found.stack_bytes} spilled", us, 2 * state_bytes + folds * per_row,
            )  # fmt: skip


def warm_up(layers: int) -> None:
    """A warmup of ten batches on a cache of a 128-head model; what it covered, and how long it took."""
    spec = CacheSpec(layers=layers, heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
    cache = ReplayCache.allocate(spec, 65, "cuda", A=[-torch.linspace(1, 16, 128)] * layers, pad_slot_id=0)
    print(warmup([spec.problem()], [2**k for k in range(10)], cache=cache))


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m replayssm_cute.cache.bench", description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--window", type=int, default=16, help="W of the caches whose slots are moved")
    parser.add_argument("--moves-only", action="store_true", help="time materialize, copy and reset, and nothing else")
    parser.add_argument(
        "--states", nargs="+", choices=STATES, default=STATES, help="dtypes of the states that are moved"
    )
    parser.add_argument("--cuts", action="store_true", help="also time other shapes of the folding kernel")
    parser.add_argument("--warmup-only", action="store_true", help="time a warmup in this process, and nothing else")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA GPU available to torch: nothing to time", file=sys.stderr)
        return 1
    if args.warmup_only:
        warm_up(args.layers)
        return 0
    print(torch.cuda.get_device_name())
    for what in () if args.moves_only else ("as the disk cache is", "again, from a warm disk cache"):
        print(f"warmup in a process of its own, {what}:", flush=True)
        command = [sys.executable, "-m", "replayssm_cute.cache.bench", "--warmup-only", "--layers", str(args.layers)]
        subprocess.run(command, check=True)
    if not args.moves_only:
        cursors()
    for state_dtype in args.states:
        moves(state_dtype, args.layers, args.batch, args.window, cuts=args.cuts)
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
