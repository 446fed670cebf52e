"""Timing on the device: cold L2, CUDA graph, slot sets in rotation, the stationary mix by quota.

A cell is one (problem, batch, mix). Its rows live in several *slot sets*, enough of them that a rotation touches
several times the L2; one graph holds one launch per set (several rotations, where a launch is short), and the time of a
call is the replay's time over its launches. Slots are permuted over the whole cache, ring starts are random, pnat
comes by quota (acceptance.deal). Cursors never change, so every replay meets the same rows: ring rows are rewritten
with what they hold, and flushed states stay finite, since A < 0 contracts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from replayssm_cute import calls, compare, dtypes
from replayssm_cute import target as targets
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

from . import acceptance, cost, floor_kernel
from .worker import Poisoned

GIB = 1 << 30
CHECK_ROWS = 6
_STREAMED = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=1, window=16)


@dataclass(frozen=True, slots=True)
class Policy:
    """How a sweep measures; part of every journal key and of the table.

    Attributes:
        replays, warmups: timed replays of a first measurement, and untimed ones before (clocks must come up).
        l2_factor: a rotation touches at least this many times the L2.
        min_rows: and at least this many rows, so that quotas come out near the mix.
        graph_us: a graph is filled with rotations up to about this time.
        max_nodes: launches of a graph at most.
        max_bytes: of a cell's caches and inputs at most.
        race_within: configs this close to the fastest race again.
        race_rounds: interleaved rounds of the race, `race_replays` replays each.
        margin: the default is kept unless the fastest beats it by this share.
        seed: of every random choice.
    """

    replays: int = 9
    warmups: int = 8
    l2_factor: float = 4.0
    min_rows: int = 64
    graph_us: float = 2000.0
    max_nodes: int = 1024
    max_bytes: int = 32 * GIB
    race_within: float = 0.05
    race_rounds: int = 7
    race_replays: int = 3
    margin: float = 0.02
    seed: int = 0

    def to_json(self) -> dict[str, Any]:
        """A plain dict."""
        return dataclasses.asdict(self)


def slot_sets(problem: Problem, batch: int, mix: acceptance.Mix, policy: Policy, *, l2: int, free: int) -> int:
    """Slot sets of a cell.

    Args:
        l2, free: bytes of L2, and of device memory that may be used.

    Raises:
        ValueError: if memory has no room for one set, or for too little to leave the L2 cold.
    """
    touched = cost.traffic(problem, batch, flush=mix.flush, mean_live=mix.mean_live).total
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
    """Bytes of one row's x, dt, B, C, z and out."""
    io = dtypes.BYTES[p.io_dtype]
    values = p.heads * p.head_dim * io
    return p.tokens * (
        values * (3 if p.has_z else 2) + 2 * p.groups * p.d_state * io + p.heads * dtypes.BYTES[p.dt_dtype]
    )


@dataclass(slots=True)
class Cell:
    """The tensors of one (problem, batch, mix): `calls[i]` is the call on slot set i."""

    problem: Problem
    batch: int
    calls: list[calls.Call]
    out: torch.Tensor
    flush: float
    mean_live: float

    @property
    def bytes(self) -> int:
        """Bytes that one call moves, averaged over the sets, with the flush share that the quotas gave."""
        return cost.traffic(self.problem, self.batch, flush=self.flush, mean_live=self.mean_live).total


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

    def spread(t: torch.Tensor, *sizes: int) -> torch.Tensor:
        return t.reshape(*t.shape, *(1 for _ in sizes)).expand(*t.shape, *sizes)

    def weight(name: str | None, low: float, high: float) -> torch.Tensor | None:
        return None if name is None else spread(uniform(low, high, p.heads).to(dtypes.TORCH[name]), p.head_dim)

    cpu = torch.Generator().manual_seed(policy.seed)
    pnat = acceptance.deal(mix, sets, batch, seed=policy.seed)
    if p.index_dtype is None:  # rows are slots: each set is a window of the cache
        named = torch.arange(slots).view(sets, batch)
    else:
        named = torch.randperm(slots, generator=cpu).view(sets, batch)
    live = torch.zeros(slots, dtype=torch.int32)
    live[named] = pnat
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
        "A": spread(-uniform(1.0, 16.0, p.heads).to(dtypes.TORCH[p.a_dtype]), p.head_dim, p.d_state),
        "D": weight(p.d_dtype, -1.0, 1.0),
        "dt_bias": weight(p.dt_bias_dtype, *((-2.0, 0.0) if p.dt_softplus else (0.0, 0.01))),
        "dt_softplus": p.dt_softplus,
    }
    shape = (sets, batch, p.tokens)
    x = normal(*shape, p.heads, p.head_dim, dtype=io)
    dt = spread(uniform(*raw_dt, *shape, p.heads).to(dtypes.TORCH[p.dt_dtype]), p.head_dim)
    b = normal(*shape, p.groups, p.d_state, dtype=io)
    c = normal(*shape, p.groups, p.d_state, dtype=io)
    z = normal(*shape, p.heads, p.head_dim, dtype=io) if p.has_z else None
    out = torch.empty_like(x)
    index = None if p.index_dtype is None else named.to(device, dtypes.TORCH[p.index_dtype])
    made = []
    for i in range(sets):
        own = cache if index is not None else {k: v[i * batch : (i + 1) * batch] for k, v in cache.items()}
        made.append(
            calls.Call(
                **own,
                **shared,
                x=x[i],
                dt=dt[i],
                B=b[i],
                C=c[i],
                out=out[i],
                z=None if z is None else z[i],
                state_batch_indices=None if index is None else index[i],
            )
        )
    flush = float(acceptance.flush_rows(pnat, p).float().mean())
    return Cell(p, batch, made, out, flush, float(pnat.float().mean()))


def launch(kernel: Callable[..., Any], call: calls.Call) -> None:
    """Launch a compiled step kernel on a call's tensors."""
    kernel(
        call.state,
        call.x_cache,
        call.B_cache,
        call.dt_cache,
        call.ring_start,
        call.prev_num_accepted_tokens,
        call.x,
        call.dt,
        call.A,
        call.B,
        call.C,
        call.out,
        call.D,
        call.z,
        call.dt_bias,
        call.state_batch_indices,
        call.pad_slot_id,
    )


@dataclass(slots=True)
class Timed:
    """A captured rotation."""

    graph: torch.cuda.CUDAGraph
    nodes: int

    def sample(self, replays: int) -> list[float]:
        """Microseconds a call of each of `replays` replays."""
        events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
        for start, stop in events:
            start.record()
            self.graph.replay()
            stop.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) * 1e3 / self.nodes for start, stop in events]


def capture(run: Callable[[calls.Call], None], cell: Cell, policy: Policy, *, writes_outputs: bool = True) -> Timed:
    """Capture rotations of `run` over the cell's calls, and see that a replay writes every output.

    Args:
        writes_outputs: False for a kernel that is no step and leaves `out` alone.

    Raises:
        RuntimeError: if an output is not finite after a replay.
    """
    for call in cell.calls[:2]:  # modules load, and lazy set-up happens, outside the capture
        run(call)
    torch.cuda.synchronize()
    # a guess at one call: its bytes at 3 TB/s and a few microseconds
    guess_us = cell.bytes / 3e6 + 4
    rotation_us = guess_us * len(cell.calls)
    rotations = max(1, min(round(policy.graph_us / rotation_us), policy.max_nodes // len(cell.calls)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rotations):
            for call in cell.calls:
                run(call)
    cell.out.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    if writes_outputs and not bool(torch.isfinite(cell.out).all()):
        raise RuntimeError("outputs are not finite after a graph replay: a launch is missing from the graph, or wrong")
    return Timed(graph, rotations * len(cell.calls))


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median and relative spread (largest minus smallest, over the median) of microseconds a call."""
    middle = statistics.median(samples)
    return {"time_us": middle, "spread": (max(samples) - min(samples)) / middle, "samples": len(samples)}


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


def _driver() -> str:
    """The driver's version as nvidia-smi gives it, or empty."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()


class DeviceRunner:
    """The jobs of a GPU worker; every argument and result is JSON-like, for the pipe and the journal."""

    def __init__(self, device_index: int, policy: dict[str, Any]) -> None:
        torch.cuda.set_device(device_index)
        self.device = torch.device("cuda", device_index)
        self.target: Target = targets.of_device(device_index)
        self.policy = Policy(**policy)
        self._cell: tuple[object, Cell] | None = None
        self._check_calls: dict[Problem, list[calls.Call]] = {}
        self._floors: dict[tuple[Problem, floor_kernel.FloorConfig], Callable[..., None]] = {}

    def describe(self) -> dict[str, Any]:
        """The device as a Target, its driver, and the peers installed beside."""
        from . import peers

        return {
            "target": dataclasses.asdict(self.target),
            "driver": _driver(),
            "peers": peers.installed(),
        }

    def limit(self) -> dict[str, Any]:
        """See `read_limit`."""
        self._cell = None
        with self._guard():
            return read_limit(self.device, self.target.arch)

    def check(self, problem: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        """Errors of the kernel on small random calls: padding, NaN in dead rows and foreign slots, flush or not.

        Raises:
            RuntimeError: naming the bound that is broken.
        """
        p, c = Problem.from_json(problem), TileConfig.from_json(config)
        with self._guard():
            kernel = self._kernel(p, c)
            found = [self._errors(call, lambda x: launch(kernel, x)) for call in self._calls(p)]
            for e in found:
                if (broken := compare.bounds(p).violation(e)) is not None:
                    raise RuntimeError(f"wrong numbers: {broken}")
            worst = max(found, key=lambda e: e.out)
            return {"out": worst.out, "out_worst": worst.out_worst, "state": max(e.state for e in found)}

    def time(
        self, problem: dict[str, Any], batch: int, lengths: Sequence[float], config: dict[str, Any]
    ) -> dict[str, Any]:
        """Microseconds a call of one config on one cell."""
        p, c = Problem.from_json(problem), TileConfig.from_json(config)
        with self._guard():
            cell = self._cell_of(p, batch, lengths)
            kernel = self._kernel(p, c)
            timed = capture(lambda call: launch(kernel, call), cell, self.policy)
            timed.sample(self.policy.warmups)
            return summary(timed.sample(self.policy.replays)) | self._facts(cell, timed)

    def race(
        self, problem: dict[str, Any], batch: int, lengths: Sequence[float], configs: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Interleaved rounds over several configs; the drift of clocks and memory meets all of them alike."""
        p = Problem.from_json(problem)
        with self._guard():
            cell = self._cell_of(p, batch, lengths)
            field = []
            for data in configs:
                kernel = self._kernel(p, TileConfig.from_json(data))
                field.append(capture(lambda call, kernel=kernel: launch(kernel, call), cell, self.policy))  # type: ignore[misc]
            samples: list[list[float]] = [[] for _ in field]
            for number in range(self.policy.race_rounds):
                order = range(len(field)) if number % 2 == 0 else range(len(field) - 1, -1, -1)
                for i in order:
                    field[i].sample(1)  # what the one before left in the caches is not this one's to pay for
                    samples[i] += field[i].sample(self.policy.race_replays)
            return [summary(s) | self._facts(cell, t) for s, t in zip(samples, field, strict=True)]

    def floor(self, problem: dict[str, Any], batch: int, lengths: Sequence[float], read_gbs: float) -> dict[str, Any]:
        """The floor of one cell: the fastest floor kernel, plus the bytes that it does not move at `read_gbs`."""
        p = Problem.from_json(problem)
        with self._guard():
            cell = self._cell_of(p, batch, lengths)
            found = []
            for config in floor_kernel.configs(p, self.target.shared_per_block):
                kernel = self._floor_kernel(p, config)
                timed = capture(
                    lambda c, kernel=kernel: kernel(c.state, c.prev_num_accepted_tokens, c.state_batch_indices),  # type: ignore[misc]
                    cell,
                    self.policy,
                    writes_outputs=False,
                )
                timed.sample(self.policy.warmups)
                found.append(summary(timed.sample(self.policy.replays)) | {"heads_per_cta": config.heads_per_cta})
            fastest = min(found, key=lambda f: f["time_us"])
            state = p.heads * p.head_dim * p.d_state * p.state_bytes
            others = cell.bytes - batch * state * (1 + cell.flush)
            return fastest | {"kernel_us": fastest["time_us"], "time_us": fastest["time_us"] + others / read_gbs / 1e3}

    def peers(self, problem: dict[str, Any], batch: int, lengths: Sequence[float]) -> list[dict[str, Any]]:
        """Every variant of every installed peer on one cell; one that fails is reported with its reason."""
        from . import peers

        p = Problem.from_json(problem)
        with self._guard():
            cell = self._cell_of(p, batch, lengths)
            results = []
            # no peer has promised to survive NaN in rows that it must not use
            clean = calls.random_call(p, CHECK_ROWS, dead=0.0, seed=self.policy.seed, device=self.device)
            for variant in peers.variants(p, batch, self.device):
                entry: dict[str, Any] = {"peer": variant.peer, "variant": variant.name, "default": variant.default}
                try:
                    if variant.replays:
                        error = self._errors(clean, variant.run)
                        entry |= {"out_error": error.out, "state_error": error.state}
                    timed = capture(variant.run, cell, self.policy)
                    timed.sample(self.policy.warmups)
                    entry |= summary(timed.sample(self.policy.replays)) | self._facts(cell, timed)
                except Exception as e:
                    torch.cuda.synchronize()  # a sticky error ends this job; any other only this variant
                    entry["failed"] = f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]
                results.append(entry)
            return results

    # -----------------------------------------------------------------------------------------------

    def _kernel(self, problem: Problem, config: TileConfig) -> Callable[..., Any]:
        from replayssm_cute import compiler

        return compiler.get(problem, config, self.target)

    def _floor_kernel(self, problem: Problem, config: floor_kernel.FloorConfig) -> Callable[..., None]:
        if (problem, config) not in self._floors:
            self._floors[problem, config] = floor_kernel.compile_floor(problem, config, self.target.arch)
        return self._floors[problem, config]

    def _cell_of(self, problem: Problem, batch: int, lengths: Sequence[float]) -> Cell:
        key = (problem, batch, tuple(lengths))
        if self._cell is None or self._cell[0] != key:
            self._cell = None  # free the old one first
            torch.cuda.empty_cache()
            mix = acceptance.stationary(lengths, problem.window)
            l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
            free = int(torch.cuda.mem_get_info(self.device)[0] * 0.9)
            sets = slot_sets(problem, batch, mix, self.policy, l2=l2, free=free)
            self._cell = (key, make_cell(problem, batch, mix, self.policy, self.device, sets))
        return self._cell[1]

    def _calls(self, problem: Problem) -> list[calls.Call]:
        if problem not in self._check_calls:
            w = problem.window
            padding = (2,) if problem.index_dtype is not None else ()
            self._check_calls = {
                problem: [
                    calls.random_call(
                        problem,
                        CHECK_ROWS,
                        pnat=[(w * i + shift) // (CHECK_ROWS - 1) for i in range(CHECK_ROWS)],
                        padding=padding,
                        pad_slot_id=pad,
                        seed=self.policy.seed + shift,
                        device=self.device,
                    )
                    for shift, pad in ((0, -1), (2, 0))
                ]
            }
        return self._check_calls[problem]

    def _errors(self, call: calls.Call, run: Callable[[calls.Call], None]) -> compare.Errors:
        after = call.clone()
        run(after)
        torch.cuda.synchronize()
        return compare.errors(call, after)

    def _facts(self, cell: Cell, timed: Timed) -> dict[str, Any]:
        return {"bytes": cell.bytes, "flush": cell.flush, "sets": len(cell.calls), "nodes": timed.nodes}

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Turn an error after which the CUDA context answers nothing more into Poisoned; free memory on others."""
        try:
            yield
        except Exception as e:
            self._cell = None
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception:
                raise Poisoned(f"{type(e).__name__}: {' '.join(str(e).split())}"[:600]) from e
            raise
