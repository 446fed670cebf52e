"""Runs a step kernel's whole grid on a call's CPU tensors, CTA by CTA, its warps in turn between barriers."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from replayssm_cute.calls import Call
from replayssm_cute.config import TileConfig, shared_layout
from replayssm_cute.problem import Problem

from .memory import Global, Shared
from .source import KERNELS, Source
from .values import NOW, Warp

INPUTS = ("x", "dt", "B", "C", "z")  # what a predecessor may still be writing when the kernel starts, under PDL
ORDER = (
    "state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens", "x", "dt", "A", "B", "C",
    "out", "D", "z", "dt_bias", "state_batch_indices", "cu_seqlens",
)  # fmt: skip
EXTRA = ("state_scale", "rand_seed", "state_copy")
END = object()
REGIONS = ("inputs", "c", "b", "products", "weights", "vectors", "barriers")


class Cta:
    """One CTA: its shared memory, barriers and how often all its warps met."""

    def __init__(self, block: int, problem: Problem, config: TileConfig) -> None:
        layout = shared_layout(problem, config)
        self.block, self.epoch = block, 0
        self.shared = Shared(layout.total, {"state": 0} | {name: getattr(layout, name) for name in REGIONS})
        self.barriers: dict[int, Any] = {}


class Run:
    """A launch, and afterwards what it did: tensors with counts, CTAs, bank conflicts by function."""

    early: tuple[str, ...] = ()  # inputs that are there before the wait for the predecessor

    def __init__(
        self, problem: Problem, config: TileConfig, call: Call, source: Source = KERNELS, arch: str | None = None
    ) -> None:
        extra = EXTRA if problem.rewrites else ()
        given = {name: getattr(call, name, None) for name in (*ORDER, *EXTRA)}
        kernel = source.module("step").step_kernel(problem, config, arch)
        self._run(problem, config, kernel, given, call.pad_slot_id, extra)

    def _run(
        self, problem: Problem, config: TileConfig, kernel: Any, given: dict[str, Any], pad_slot_id: int,
        extra: tuple[str, ...],
    ) -> None:  # fmt: skip
        """Launch a kernel on tensors by name; `extra` are those that it takes after the stream."""
        self.problem, self.config, self.kernel = problem, config, kernel
        self.tensors: dict[str, Global] = {}
        for name, t in given.items():
            if t is not None:
                self.tensors[name] = Global(name, t, len(self.tensors) + 1, name in INPUTS and name not in self.early)
        self.spaces = {t.base >> 40: t for t in self.tensors.values()}
        self.ctas: list[Cta] = []
        self.conflicts: collections.Counter[str] = collections.Counter()
        self.unfinished: list[tuple[int, int]] = []  # CTA and warp that ended with copies on their way
        NOW.run, NOW.warp = self, Warp(0, inputs_ready=False)
        arguments = [self.tensors.get(name) for name in ORDER]
        self.kernel(*arguments, pad_slot_id, None, *(self.tensors.get(name) for name in extra))

    def note_conflicts(self, where: str, ways: int) -> None:
        self.conflicts[where] = max(self.conflicts[where], ways)

    def launch(self, start: Callable[[], Iterator[None]], *, grid: list[int], block: list[int], **_: Any) -> None:
        with np.errstate(all="ignore"):
            for number in range(grid[0]):
                self._cta(start, number, block[0] // 32)

    def _cta(self, start: Callable[[], Iterator[None]], number: int, warps: int) -> None:
        cta = NOW.cta = Cta(number, self.problem, self.config)
        running = [(Warp(w, inputs_ready=not self.problem.pdl), start()) for w in range(warps)]
        order = random.Random(number)
        while running:
            order.shuffle(running)  # what the order of warps decides must not matter
            waiting = []
            for warp, body in running:
                NOW.warp = warp
                if next(body, END) is not END:
                    waiting.append((warp, body))
                elif any(map(len, (warp.uncommitted, *warp.groups))):
                    self.unfinished.append((number, warp.index))
                else:
                    assert not warp.stores + warp.stores_open, "a warp ended while its stores may read shared memory"
            assert len(waiting) in (0, len(running)), "a barrier that some warps never reach"
            running = waiting
            cta.epoch += 1
            for warp, _ in running:
                warp.converged("a CTA's barrier")
                warp.epoch += 1
        assert not any(barrier.copies for barrier in cta.barriers.values()), (
            "a CTA ended while its state was on its way"
        )
        self.ctas.append(cta)
