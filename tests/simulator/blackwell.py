"""Runs the Blackwell step kernel: its modules beside the portable kernel's, warps that wait for each other anywhere."""

from __future__ import annotations

import ast
import collections
import contextlib
import importlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np

from replayssm_cute.calls import Call
from replayssm_cute.config import shared_layout
from replayssm_cute.problem import Problem
from replayssm_cute.sm100 import Sm100Config, tensor_layout

from . import dsl, tensor
from .launch import END, INPUTS, ORDER, REGIONS, Run
from .memory import Global, Pointer
from .ordered import ClockedShared, ClockedWarp, MBarrier
from .source import Source
from .tensor import TensorMemory
from .values import LANES, NOW, uniform

WAITS = ("cute.arch.sync_threads(", "cute.arch.barrier(", "cute.arch.mbarrier_wait(")


@contextlib.contextmanager
def _elect_one() -> Iterator[None]:
    warp = NOW.warp
    warp.converged("an election")
    warp.active = LANES == 0
    yield
    warp.active = np.ones(32, bool)


def _init(pointer: Pointer, count: int) -> None:
    cta = NOW.cta
    assert int(NOW.warp.active.sum()) == 1 and pointer.at not in cta.barriers and pointer.size == 8
    cta.shared.index(np.array([pointer.at]), 2, cta.shared.names.index("barriers"))
    cta.barriers[pointer.at] = MBarrier(count, 8 + len(cta.barriers))


def _arrive(pointer: Pointer) -> None:
    assert int(NOW.warp.active.sum()) == 1
    NOW.cta.barriers[pointer.at].arrive(NOW.warp)


def _expect(pointer: Pointer, bytes_: int) -> None:
    NOW.cta.barriers[pointer.at].bytes += bytes_
    _arrive(pointer)


def _copy(atom: Any, source: Any, target: Any, tma_bar_ptr: Pointer) -> None:
    """A TMA load of one box: source (None, a tile of each of its modes, slot), target (None, stage)."""
    NOW.warp.converged("a TMA copy")
    (view, (_, *tiles, slot)), (box, (_, stage)) = source, target
    size, per_word = view.pointer.size, 4 // view.pointer.size
    assert view.tile[0] * size == 128 and all(side <= 256 for side in view.tile), "a box's sides"
    assert not any(s * size % 16 for s in view.stride[1:]), "TMA strides"
    steps = [np.arange(0, n, per_word if k == 0 else 1) for k, n in enumerate(view.tile)]
    inside = np.meshgrid(*steps, indexing="ij")
    where = [at + tile * n for at, tile, n in zip(inside, tiles, view.tile, strict=True)] + [np.asarray(slot)]
    for at, n in zip(where, view.shape, strict=True):
        assert (at >= 0).all() and (at < n).all(), "a TMA box beyond its tensor"
    addresses = view.pointer.at + size * sum(at * s for at, s in zip(where, view.stride, strict=True))
    bytes_ = box.pointer.at + size * sum(at * s for at, s in zip([*inside, stage], box.stride, strict=True))
    bits, base, shift = box.pointer.swizzle
    bytes_ = bytes_ ^ ((bytes_ >> (base + shift) & ((1 << bits) - 1)) << base)
    shared, barrier = NOW.cta.shared, NOW.cta.barriers[tma_bar_ptr.at]
    index = shared.index(bytes_.ravel(), 1, shared.names.index("state"))
    shared.claim(index, None)
    shared.in_flight[index] = True

    def land() -> int:
        shared.land(index, view.pointer.memory.read_block(addresses.ravel())[:, None], barrier)
        return 4 * index.size

    barrier.pending.append(land)


def _let_dependents_start() -> None:
    NOW.cta.tensor.wanted_by_others = True


arch = SimpleNamespace(
    **vars(dsl.arch)
    | {
        "elect_one": _elect_one,
        "griddepcontrol_launch_dependents": _let_dependents_start,
        "mbarrier_init": _init,
        "mbarrier_arrive": _arrive,
        "mbarrier_arrive_and_expect_tx": _expect,
        "mbarrier_wait": lambda pointer, phase: ("mbarrier", pointer.at, phase),
        "barrier": lambda barrier_id, number_of_threads: ("barrier", barrier_id, number_of_threads),
        "sync_threads": lambda: ("barrier", 0, NOW.run.threads),
    }
)
cute = SimpleNamespace(**vars(dsl.cute) | {"arch": arch, "copy": _copy})
cutlass = SimpleNamespace(**vars(dsl.cutlass) | {"cute": cute})
MODULES = dsl.MODULES | {"cutlass": cutlass, "cutlass.cute": cutlass}


class BlackwellSource(Source):
    """The modules of `kernels/sm100`, on the portable kernel's; `replace` names one as "sm100/step" or "tokens"."""

    def __init__(self, replace: tuple[str, str, str] | None = None) -> None:
        super().__init__(replace)
        self.modules["sm100/instructions"] = tensor

    def _import(self, name: str, globals_: Any = None, locals_: Any = None, wanted: Any = (), level: int = 0) -> Any:
        if name.split(".")[0] == "cutlass":
            return MODULES[name]
        where = (globals_ or {}).get("__name__", "")
        if where.startswith("simulated.sm100/") and level:
            if level == 3:
                return importlib.import_module(f"replayssm_cute.{name}")
            return self.module(f"sm100/{name}" if level == 1 else name)
        return super()._import(name, globals_, locals_, wanted, level)

    def is_wait(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Expr) and ast.unparse(node).startswith(WAITS)

    def awaited(self, node: ast.Expr) -> ast.expr | None:
        return node.value


BLACKWELL = BlackwellSource()


class BlackwellCta:
    """One CTA: shared and tensor memory, barriers, places in the grid."""

    def __init__(self, block: int, problem: Problem, config: Sm100Config) -> None:
        layout, more = shared_layout(problem, config), tensor_layout(problem, config)
        regions = {"state": 0} | {name: getattr(layout, name) for name in REGIONS[:-1]}
        regions |= {"unused": layout.barriers, "operand": more.c, "answers": more.answers, "barriers": more.full}
        regions |= {"base": more.base}
        self.block, self.epoch = block, 0
        self.blocks = [block]  # all that it worked on
        self.asked = self.refused = False  # cluster launch control: an answer is on its way; there was none
        self.unfenced_reads = np.zeros((more.total // 4, 8), bool)  # of answers, by warp
        self.shared = ClockedShared(more.total, regions)
        self.tensor = TensorMemory()
        self.barriers: dict[int, MBarrier] = {}


class BlackwellRun(Run):
    """A launch, and afterwards what it did."""

    GIVEN = 0.8  # of the answers that could give something give it

    def __init__(self, problem: Problem, config: Sm100Config, call: Call, source: Source = BLACKWELL) -> None:
        self.problem, self.config = problem, config
        self.kernel = source.module("sm100/step").Sm100StepKernel(problem, config)
        self.tensors = {
            name: Global(name, t, number, name in INPUTS)
            for number, name in enumerate(ORDER, 1)
            if (t := getattr(call, name)) is not None
        }
        self.spaces = {t.base >> 40: t for t in self.tensors.values()}
        self.ctas: list[Any] = []
        self.conflicts = collections.Counter()
        self.unfinished = []
        NOW.run, NOW.warp = self, ClockedWarp(0, inputs_ready=False)
        self.kernel(*(self.tensors.get(name) for name in ORDER), call.pad_slot_id, None)

    def launch(self, start: Callable[[], Iterator[Any]], *, grid: list[int], block: list[int], **_: Any) -> None:
        """CTA by CTA, without those that were given away: some answers, by chance, say that none is left."""
        self.threads = block[0]
        self.waiting = list(range(grid[0]))
        self.chance = random.Random(grid[0])
        with np.errstate(all="ignore"):
            while self.waiting:
                self._cta(start, self.waiting.pop(0), block[0] // 32)

    def give_away(self) -> int | None:
        """The next CTA that has not started and will not; None if there is none, or others started sooner."""
        return self.waiting.pop(0) if self.waiting and self.chance.random() < self.GIVEN else None

    def _cta(self, start: Callable[[], Iterator[Any]], number: int, warps: int) -> None:
        cta = NOW.cta = BlackwellCta(number, self.problem, self.config)
        running = {w: start() for w in range(warps)}
        state = {w: ClockedWarp(w, inputs_ready=not self.problem.pdl) for w in range(warps)}
        waits: dict[int, Any] = dict.fromkeys(running)  # None: may go on
        order = random.Random(number)
        while running:
            moved = False
            for w in order.sample(sorted(running), len(running)):
                if not self._may_go_on(cta, state, waits, w):
                    continue
                moved = True
                NOW.warp = state[w]
                waits[w] = next(running[w], END)
                if waits[w] is END:
                    del running[w], waits[w]
                    if any(map(len, (state[w].uncommitted, *state[w].groups))):
                        self.unfinished.append((number, w))
                elif waits[w][0] == "barrier":
                    NOW.warp.converged("a barrier")
            assert moved, f"a CTA hangs: {waits}"
        assert not any(b.pending for b in cta.barriers.values()), "a CTA ended while its state was on its way"
        assert cta.refused or not self.config.launch_control, "a CTA ended before it knew that there is no more work"
        assert not cta.tensor.columns, "a CTA ended with tensor memory allocated"
        assert not cta.tensor.started, "a CTA ended with MMAs under way"
        self.ctas.append(cta)

    def _may_go_on(self, cta: BlackwellCta, state: dict[int, ClockedWarp], waits: dict[int, Any], w: int) -> bool:
        wait = waits[w]
        if wait is None:
            return True
        kind, which, what = wait
        if kind == "mbarrier":
            NOW.warp = state[w]
            NOW.warp.converged("a wait for a barrier")
            barrier = cta.barriers[which]
            if barrier.passes(uniform(what)):
                state[w].learn(barrier.clock)
                return True
            return False
        there = [v for v in waits if waits[v] is not None and waits[v][:2] == (kind, which)]
        assert all(waits[v] == wait for v in there), "a barrier with two numbers of threads"
        if 32 * len(there) < what:
            return False
        told = np.max([state[v].tell() for v in there], axis=0)
        for v in there:
            state[v].learn(told)
            state[v].epoch += 1
            waits[v] = None
        return True
