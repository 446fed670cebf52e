"""Dummy decodes and moves on a cache's own slots, every byte restored: the part of `warmup` that needs a cache."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import calls, dtypes, packing
from ..problem import Problem
from .digest import digest
from .replay_cache import ReplayCache
from .shapes import ZERO_STATE
from .stored import as_bits

ROWS = 8  # live rows of a dummy step; more would prove nothing and have to be saved


@dataclass(slots=True)
class CacheCoverage:
    """What a warmup did on a cache.

    Attributes:
        slots: real slots that were used, none of them the null slot.
        layers: how many layers were decoded on.
        operations: how often each operation of the cache ran.
        verified: kernels of the cache that were compared with the torch operations in this call.
        digest: of every byte of the cache, the same before and after.
    """

    slots: tuple[int, ...]
    layers: int
    operations: collections.Counter[str] = field(default_factory=collections.Counter)
    verified: int = 0
    digest: str = ""

    def __str__(self) -> str:
        done = ", ".join(f"{n} {name}" for name, n in sorted(self.operations.items()))
        return (
            f"  cache: {self.verified} kernels verified; slots {', '.join(map(str, self.slots))} of {self.layers} "
            f"layers, {done}; every byte as before (digest {self.digest[:12]})"
        )


def fits(cache: ReplayCache, problem: Problem) -> str | None:
    """Why steps of a problem cannot run on a cache, or None."""
    for name, expected in cache.spec.geometry().items():
        if (got := getattr(problem, name)) != expected:
            return f"{name}: got {got!r}, expected {expected!r} of the cache"
    return None


class Exercise:
    """Exercises one cache; use as a context, which compares the cache's digests.

    Raises (on exit):
        RuntimeError: if a byte of the cache changed.
    """

    def __init__(self, cache: ReplayCache) -> None:
        real = [s for s in reversed(range(cache.slots)) if s != cache.pad_slot_id][:ROWS]
        if not real:
            raise ValueError(f"cache: got {cache.slots} slots, expected one beside the null slot {cache.pad_slot_id}")
        self.cache = cache
        self.coverage = CacheCoverage(tuple(real), cache.spec.layers)

    def __enter__(self) -> Exercise:
        self.coverage.digest = digest(self.cache.layers, self.cache._shared)
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        after = digest(self.cache.layers, self.cache._shared)
        if after != self.coverage.digest and kind is None:
            raise RuntimeError(f"warmup changed the cache: digest {self.coverage.digest} before, {after} after")

    def decode(self, problem: Problem, batch: int) -> int:
        """Resets, steps and commits on every layer at this batch size, until a step has flushed; gives the steps.

        At most `ROWS` rows are live and the rest padding, so that launches are as large as in serving. Problems without
        slot indices need a slot for every row, all of which are saved.
        """
        if problem.index_dtype is None:
            if batch > self.cache.slots:
                raise ValueError(f"batches: got {batch} rows without slot indices, expected at most {self.cache.slots}")
            slots = torch.arange(batch, device=self.cache.device)
            touched: Sequence[int] = range(batch)
        else:
            slots = torch.full((batch,), -1, dtype=dtypes.TORCH[problem.index_dtype], device=self.cache.device)
            touched = self.coverage.slots[:batch]
            slots[: len(touched)] = torch.tensor(touched, device=self.cache.device)
        inputs = _inputs(problem, batch, self.cache.device)
        accepted = torch.full((batch,), problem.tokens, dtype=torch.int32, device=self.cache.device)
        steps = 0
        for layer in range(self.cache.spec.layers):
            with self._restored(touched, [layer]):
                self._run("reset", slots, zero_state=False)
                index = torch.tensor(touched, device=self.cache.device)
                for name, t in self.cache.layers[layer].checkpoint().items():
                    as_bits(t)[index] = ZERO_STATE[name]
                for deferred in (False, True) if layer == 0 else (False,):
                    steps += self._steps(problem, layer, slots, accepted, inputs, deferred)
        return steps

    def move(self) -> None:
        """Every operation on whole slots, on all layers at once."""
        first, last = self.coverage.slots[0], self.coverage.slots[min(1, len(self.coverage.slots) - 1)]
        with self._restored([first, last], range(self.cache.spec.layers)):
            slots = [torch.tensor([s, -1], dtype=torch.int32, device=self.cache.device) for s in (first, last)]
            self._run("reset", slots[0])
            if self.cache.has_decays:
                self._run("materialize", slots[0], slots[1], torch.zeros_like(slots[0]))
            self._run("copy", slots[1], slots[0])

    def _steps(
        self, problem: Problem, layer: int, slots: torch.Tensor, accepted: torch.Tensor, inputs: dict[str, Any],
        deferred: bool,
    ) -> int:  # fmt: skip
        from ..api import checkpointing_ssu

        steps = problem.window // problem.tokens + 1
        if deferred:
            self._run("reset", slots, zero_state=False)
        for _ in range(steps):
            if deferred:
                self._run("begin_step", slots, accepted)
            arguments: dict[str, Any] = {**self.cache.step_args(layer), **inputs}
            checkpointing_ssu(
                **arguments,
                state_batch_indices=None if problem.index_dtype is None else slots,
                pad_slot_id=self.cache.pad_slot_id,
                enable_pdl=problem.pdl,
            )
            if not deferred:
                self._run("commit", slots, accepted)
        if deferred:
            self._run("settle", slots, accepted)
        return steps

    def _run(self, operation: str, *args: Any, **kwargs: Any) -> None:
        getattr(self.cache, operation)(*args, **kwargs)
        self.coverage.operations[operation] += 1

    @contextlib.contextmanager
    def _restored(self, slots: Sequence[int], layers: Sequence[int]) -> Iterator[None]:
        """Afterwards these slots of these layers, and their cursors, hold the same bits as before."""
        cache, index = self.cache, torch.tensor(sorted(set(slots)), device=self.cache.device)
        tensors = [cache.ring_start, cache.pnat, cache.last_tokens]
        for each in (cache.layers[layer] for layer in layers):
            tensors += [as_bits(t) for t in each.named().values()]
        saved = [t[index] for t in tensors]
        try:
            yield
        finally:
            for t, content in zip(tensors, saved, strict=True):
                t[index] = content


def _inputs(problem: Problem, batch: int, device: torch.device) -> dict[str, Any]:
    """A step's inputs and options by name, all tensors zero."""
    from .. import plan

    call = plan.scratch_call(problem, device)

    def wide(t: torch.Tensor) -> torch.Tensor:
        shape = (1, batch * t.shape[1]) if problem.ragged else (batch, t.shape[1])
        return t.new_zeros((*shape, *t.shape[2:]))

    return {
        "x": wide(call.x),
        "dt": calls.spread(wide(call.dt[..., 0]), problem.head_dim),
        "A": call.A,
        "B": wide(call.B),
        "C": wide(call.C),
        "out": wide(call.out),
        "D": call.D,
        "z": None if call.z is None else wide(call.z),
        "dt_bias": call.dt_bias,
        "dt_softplus": call.dt_softplus,
        "cu_seqlens": packing.uniform(batch, problem.tokens, device) if problem.ragged else None,
        "max_seqlen": call.max_seqlen,
        "rand_seed": call.rand_seed,
        "philox_rounds": call.philox_rounds,
        "precision": call.precision,
    }
