"""Prepare kernels before serving: compile or load, self-check, and decode once on the caller's own slots.

Afterwards a CUDA graph can be captured without anything being compiled or loaded.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from . import checks, ring
from .problem import Problem

if TYPE_CHECKING:  # the rest is imported when warmup runs: see the package's __init__
    from .cache import ReplayCache
    from .cache.exercise import CacheCoverage, Exercise
    from .calls import Call
    from .compiler import Counters
    from .config import TileConfig
    from .fused.problem import LayerProblem
    from .fused.warmup import LayerCovered

SCRATCH_ROWS = 8  # rows are independent, so that more of them would prove nothing and cost memory


@dataclass(frozen=True, slots=True)
class Covered:
    """One problem at one batch size: the config that serves it, and why ("table", "nearest", "default", "fallback")."""

    problem: Problem
    batch: int
    config: TileConfig
    source: str
    decoded: int


@dataclass(slots=True)
class Coverage:
    """What a warmup did.

    Attributes:
        device: name of the GPU.
        covered: every problem at every batch size; `decoded` counts the steps run there.
        kernels: every step kernel that is ready now, those of other batch sizes included.
        verified: self-checks run in this call; the other kernels had passed before, on this GPU and driver.
        layers: every decode step at every batch size; its kernels have been compared with the reference in this
            process.
        cache: what was done on the cache, if one was given.
        counters: where the kernels came from during this call.
        seconds: how long it took.
    """

    device: str
    covered: list[Covered] = field(default_factory=list)
    kernels: list[tuple[Problem, TileConfig]] = field(default_factory=list)
    verified: int = 0
    layers: list[LayerCovered] = field(default_factory=list)
    cache: CacheCoverage | None = None
    counters: Counters | None = None
    seconds: float = 0.0

    def __str__(self) -> str:
        c = self.counters
        decoded = sum(x.decoded for x in self.covered) + sum(x.decoded for x in self.layers)
        origin = f" ({c.compiled} compiled, {c.disk} from disk, {c.memory} from memory)" if c else ""
        lines = [
            f"warmup on {self.device}: {len(self.kernels)} kernels{origin}, {self.verified} verified, "
            f"{decoded} steps, {self.seconds:.1f} s"
        ]
        lines += [f"  {x.problem.label()} batch {x.batch}: {x.config.label()} ({x.source})" for x in self.covered]
        lines += [
            f"  decode_step {x.problem.label()} batch {x.batch}: {x.overlap}, {x.config.label()}" for x in self.layers
        ]
        if self.cache is not None:
            lines.append(str(self.cache))
        return "\n".join(lines)


def warmup(
    problems: Iterable[Problem | LayerProblem],
    batches: Iterable[int],
    *,
    enable_pdl: bool = False,
    cache: ReplayCache | None = None,
    device: torch.device | str | int | None = None,
    tensors: Callable[[Problem, int], Call] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Coverage:
    """Make every kernel ready that the given problems and batches can reach, and prove it.

    For each problem: every config that the tables can return, for the given batches and all others, is compiled or
    loaded, compared with the reference once per GPU and driver (see `selfcheck`; a kernel that fails is left out with
    a warning, and another serves), and its code put on the device; then, per batch, dummy decodes (reset, steps,
    commits, until a step has flushed) run through the public call. Call it outside a graph capture, before the cache
    holds live requests or between steps.

    Args:
        problems: what will be called (see `Problem`; `explain(...).problem` gives a call's own). A `LayerProblem` (of
            `replayssm_cute.fused.problem`) stands for calls of `decode_step`; its dummy decodes run on scratch tensors.
        batches: batch sizes, for example those that graphs are captured for.
        enable_pdl: as `decode_step` will be called; a Problem says it itself, by `pdl`.
        cache: a cache that steps of all these problems run on. Its own kernels are made ready too and compared with
            the torch operations once per process; the dummy decodes, and every operation of the cache, then run on real
            slots of it, not the null slot. Every byte is restored, and a digest of the whole cache compared before and
            after. Meanwhile 8 slots of a layer, or two of all layers, are kept aside.
        device: the CUDA device; default the cache's, or the current one.
        tensors: in place of a cache, gives the caller's own tensors for (problem, batch), a `Call` whose slots are
            real, distinct and not the null slot; everything touched is restored bit for bit, whatever happens. Cursors,
            state and rings of these slots and `out` are saved meanwhile. Without either, scratch tensors of a few rows.
        progress: called with a line of text as work proceeds.

    Raises:
        RuntimeError: if every kernel for a problem gives wrong numbers or a kernel of the cache does, if a byte of
            the cache changed, if a graph is being captured, or without a usable GPU.
        TypeError: for arguments of wrong types.
        ValueError: for an invalid batch, if a problem does not fit the cache, or if `tensors` gives a call of another
            problem, batch or device.
    """
    from . import compiler, plan, selfcheck, tables
    from .fused import warmup as fused
    from .fused.problem import LayerProblem

    index = _device_index(_cache_device(cache, device, tensors))
    if compiler.capturing():
        raise RuntimeError("warmup was called during a CUDA graph capture; call it before the capture")
    if not isinstance(enable_pdl, bool):
        raise TypeError(f"enable_pdl: got {type(enable_pdl).__name__}, expected bool")
    given, batches = _listed("problems", problems), _listed("batches", batches)
    for problem in given:
        if not isinstance(problem, (Problem, LayerProblem)):
            raise TypeError(f"problems: got {type(problem).__name__} among them, expected Problem or LayerProblem")
    for batch in batches:
        if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
            raise ValueError(f"batches: got {batch!r}, expected positive ints")
    given, batches = list(dict.fromkeys(given)), sorted(set(batches))
    steps = [problem for problem in given if isinstance(problem, Problem)]
    layers = [problem for problem in given if isinstance(problem, LayerProblem)]
    if cache is not None:
        _check_cache(cache, [*steps, *(layer.step for layer in layers)], index)
    try:
        target = plan.device_target(index)
    except (AssertionError, RuntimeError) as error:  # torch's own words name no way out
        raise _no_gpu(error) from error
    say = progress or (lambda _: None)
    coverage = Coverage(target.name)
    start, before, checked = time.perf_counter(), compiler.counters(), selfcheck.count()

    with plan.on_device(index), _exercised(cache, coverage, say) as exercise:
        for layer in layers:
            coverage.layers += fused.warm(layer, batches, SCRATCH_ROWS, index, enable_pdl, say)
        for problem in steps:
            say(f"{problem.label()}: preparing")
            plan.prepare(problem, index)
            choices = {b: plan.eligible(problem, b, tables.choose(problem, b, target), index) for b in batches}
            configs = dict.fromkeys((*tables.candidates(problem, target), *(c.config for c in choices.values())))
            coverage.kernels += [(problem, config) for config in configs if plan.touch(problem, config, index)]
            for batch, choice in choices.items():
                say(f"{problem.label()}: decoding at batch {batch}")
                if exercise is not None:
                    decoded = exercise.decode(problem, batch)
                elif tensors is None:
                    call = plan.scratch_call(problem, plan.tensor_device(index), min(batch, SCRATCH_ROWS))
                    decoded = _decode(call, problem, choice.config)
                else:
                    call = tensors(problem, batch)
                    _check_call(call, problem, batch, index)
                    decoded = _decode(call, problem, None)
                coverage.covered.append(Covered(problem, batch, choice.config, choice.source, decoded))

    after = compiler.counters()
    coverage.counters = compiler.Counters(
        after.compiled - before.compiled, after.disk - before.disk, after.memory - before.memory
    )
    coverage.verified = selfcheck.count() - checked
    coverage.seconds = time.perf_counter() - start
    return coverage


def _cache_device(
    cache: ReplayCache | None, device: torch.device | str | int | None, tensors: object
) -> torch.device | str | int | None:
    """The device to warm up: as given, else the cache's."""
    from .cache import ReplayCache

    if cache is None:
        return device
    if not isinstance(cache, ReplayCache):
        raise TypeError(f"cache: got {type(cache).__name__}, expected ReplayCache")
    if tensors is not None:
        raise ValueError("tensors: got some beside a cache, expected one of them: the cache has tensors of its own")
    return cache.device if device is None else device


def _check_cache(cache: ReplayCache, problems: list[Problem], index: int) -> None:
    from . import plan
    from .cache.exercise import fits

    if cache.device != plan.tensor_device(index):
        raise ValueError(f"cache: on device {cache.device}, expected {plan.tensor_device(index)}")
    for problem in problems:
        if why := fits(cache, problem):
            raise ValueError(f"problems: {problem.label()} does not fit the cache: {why}")


@contextlib.contextmanager
def _exercised(cache: ReplayCache | None, coverage: Coverage, say: Callable[[str], None]) -> Iterator[Exercise | None]:
    """Prepare, prove and exercise a cache; between, its slots are there for decodes."""
    if cache is None:
        yield None
        return
    from .cache.exercise import Exercise

    say("cache: preparing")
    cache.prepare()
    with Exercise(cache) as exercise:
        coverage.cache = exercise.coverage
        coverage.cache.verified = cache.prove()
        yield exercise
        say("cache: moving slots")
        exercise.move()


def _listed(name: str, values: object) -> list[Any]:
    if not isinstance(values, Iterable):
        raise TypeError(f"{name}: got {type(values).__name__}, expected a list")
    return list(values)


def _no_gpu(error: Exception) -> RuntimeError:
    return RuntimeError(
        f"warmup needs a GPU that kernels exist for: {error}. On a host without one, python -m replayssm_cute.compiler "
        f"fills a cache; CPU tensors run the reference, without warmup"
    )


def _device_index(device: torch.device | str | int | None) -> int:
    from . import plan

    if device is None:
        try:
            return plan.current_device()
        except (AssertionError, RuntimeError) as error:
            raise _no_gpu(error) from error
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"device: got {type(device).__name__}, expected a torch.device, str, int or None")
    device = torch.device(device)
    if device.type != "cuda":
        raise ValueError(f"device: got {device}, expected a CUDA device; CPU tensors run the reference, without warmup")
    return plan.current_device() if device.index is None else device.index


def _check_call(call: Call, problem: Problem, batch: int, index: int) -> None:
    from . import plan

    got = plan.problem_of(call, problem.pdl)
    if got != problem:
        raise ValueError(f"tensors: got a call of {got}, expected {problem}")
    if call.batch != batch:
        raise ValueError(f"tensors: got a call of {call.batch} rows, expected {batch}")
    if call.state.device != plan.tensor_device(index):
        raise ValueError(f"tensors: got a call on {call.state.device}, expected {plan.tensor_device(index)}")
    zeros = torch.zeros_like(call.ring_start)
    checks.check_values(
        zeros,
        zeros,
        call.state_batch_indices,
        call.pad_slot_id,
        batch=batch,
        tokens=problem.tokens,
        window=problem.window,
        cu_seqlens=call.cu_seqlens,
        total=call.x.shape[1],
    )


def _live_slots(call: Call) -> torch.Tensor:
    slots = _slots(call)
    return slots[checks.live_rows(slots, call.pad_slot_id)].long()


def _slots(call: Call) -> torch.Tensor:
    """(batch,) the slot of each row."""
    slots = call.state_batch_indices
    return torch.arange(call.batch, device=call.state.device) if slots is None else slots


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _as_bits(t: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: copies of NaNs as floats need not keep their payload."""
    return t.view(_BITS[t.element_size()])


@contextlib.contextmanager
def _restored(call: Call) -> Iterator[torch.Tensor]:
    """Gives the live slots of a call; afterwards they and `out` hold the same bits as before."""
    slots = _live_slots(call)
    per_slot = (
        call.state, call.x_cache, call.B_cache, call.dt_cache, call.ring_start, call.prev_num_accepted_tokens,
        call.state_scale, call.state_copy,
    )  # fmt: skip
    views = [_as_bits(t) for t in per_slot if t is not None]
    saved = [v[slots] for v in views]
    out = _as_bits(call.out)
    saved_out = out.clone()
    try:
        yield slots
    finally:
        for view, content in zip(views, saved, strict=True):
            view[slots] = content
        out.copy_(saved_out)


def _decode(call: Call, problem: Problem, config: TileConfig | None) -> int:
    """Reset, then steps and commits with every token accepted until one has flushed; returns the number of steps.

    Of a ragged call the longest row flushes first.
    """
    from .api import checkpointing_ssu

    lengths = call.lengths()[checks.live_rows(_slots(call), call.pad_slot_id)]
    longest = int(lengths.max()) if len(lengths) else 0
    steps = problem.window // (longest or problem.tokens) + 1
    with _restored(call) as slots:
        for t in (call.state, call.state_copy):
            if t is not None:
                _as_bits(t)[slots] = 0
        if call.state_scale is not None:
            call.state_scale[slots] = 1.0
        call.ring_start[slots] = 0
        call.prev_num_accepted_tokens[slots] = 0
        accepted = torch.full((len(slots),), problem.tokens, dtype=torch.int32, device=call.state.device)
        for _ in range(steps):
            checkpointing_ssu(**call.kwargs(), enable_pdl=problem.pdl, config=config)
            ring.commit(
                call.ring_start,
                call.prev_num_accepted_tokens,
                slots,
                accepted,
                tokens=problem.tokens,
                window=problem.window,
                lengths=lengths,
            )
    return steps
