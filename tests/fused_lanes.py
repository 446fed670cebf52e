"""Runs the conv and norm kernels thread by thread in plain Python, on the memory of CPU tensors.

As `cache_lanes` does for the cache's kernels, whose memory, barriers and shuffles these are. Beside what is computed,
each access is held to programmatic dependent launch: before its wait a thread reads nothing that the predecessor may
still write, and writes nothing at all.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cache_lanes
import numpy as np
import torch
from cache_lanes import CUTE, CUTLASS, REPLACED, Block, Memory, Pointer, _here

from replayssm_cute.fused.recipes import LayerRecipe
from replayssm_cute.fused.shapes import ConvShape

PACKAGE = "replayssm_cute.fused.kernels"
NAMES = ("values", "conv", "norm")


MODULES = cache_lanes.untraced(PACKAGE, NAMES)


class Tensor:
    """A tensor argument."""

    def __init__(self, t: torch.Tensor, memory: Memory) -> None:
        self.t, self.shape, self.memory = t, t.shape, memory
        self.iterator = Pointer(memory, t.data_ptr(), t.element_size())

    def __getitem__(self, index: Any) -> Any:
        where = index if isinstance(index, tuple) else (index,)
        row = len(where) > 1 and where[-1] is None
        for i, n in zip(where[: len(where) - row], self.shape, strict=not row):
            assert 0 <= i < n, f"{where} of shape {tuple(self.shape)}"
        if row:
            return Tensor(self.t[tuple(int(i) for i in where[:-1])], self.memory)
        return self.t[tuple(int(i) for i in where)].item()


def _before_wait(address: int, size: int, through_l2: bool) -> None:
    launch = _here.launch
    if _here.waited:
        return
    for name, t in launch.awaited.items():
        begin = t.untyped_storage().data_ptr()
        inside = begin <= address and address + size <= begin + t.untyped_storage().nbytes()
        assert not inside or (through_l2 and name == "gate"), f"{name} is read before the wait for what writes it"


def _load_words(pointer: Pointer, count: int) -> list[int]:
    _before_wait(pointer.address, 4 * count, False)
    return cache_lanes._load_words(pointer, count)


def _store_words(pointer: Pointer, words: list[int]) -> None:
    assert _here.waited, "a store before the wait"
    for name, t in _here.launch.read_only.items():
        begin = t.untyped_storage().data_ptr()
        assert not begin <= pointer.address < begin + t.untyped_storage().nbytes(), f"{name} is written"
    cache_lanes._store_words(pointer, words)


def _load_shared(pointer: Pointer) -> list[int]:
    assert pointer.address % 16 == 0
    _before_wait(pointer.address, 16, True)
    pointer.memory.check(pointer.address, 16)
    return list((ctypes.c_int32 * 4).from_address(pointer.address))


def _wait() -> None:
    assert not _here.waited
    _here.waited = True


def _trigger() -> None:
    soon = getattr(_here.launch.recipe.shape, "soon", False)
    assert soon or _here.waited, "dependents start before this kernel's own wait: they would overlap its predecessor"
    assert not (soon and _here.waited), "dependents start after this kernel's wait, and should before"
    _here.launch.triggers += 1


def _prefetch(pointer: Pointer) -> None:
    """Changes nothing; still it is to come before the wait, and to name memory of the inputs."""
    launch, t = _here.launch, _here.launch.awaited["inputs"]
    assert launch.recipe.shape.ahead and not _here.waited, "a prefetch that is too late, or not asked for"
    begin = t.untyped_storage().data_ptr()
    assert begin <= pointer.address < begin + t.untyped_storage().nbytes(), "a prefetch of something else"
    launch.memory.check(pointer.address, 4)
    launch.prefetches += 1


def _f32(operation: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda v: np.float32(operation(np.float32(v)))


ARCH = SimpleNamespace(
    **vars(CUTE.arch)
    | {
        "griddepcontrol_wait": _wait,
        "griddepcontrol_launch_dependents": _trigger,
        "rcp_approx": _f32(np.reciprocal),
        "shuffle_sync_bfly": lambda v, mask: cache_lanes._shuffle(v, lambda lane: lane ^ mask),
    }
)
MATH = SimpleNamespace(rsqrt=_f32(lambda v: 1 / np.sqrt(v)), exp=lambda v, fastmath: np.exp(np.float32(v)))
REPLACEMENTS: dict[str, Any] = REPLACED | {
    "cutlass": CUTLASS,
    "cute": SimpleNamespace(**vars(CUTE) | {"arch": ARCH, "math": MATH}),
    "load_words": _load_words,
    "store_words": _store_words,
    "load_shared_by_all": _load_shared,
    "bring_to_l2": _prefetch,
}


cache_lanes.patch(MODULES, REPLACEMENTS)


class Launch:
    """One launch: what was launched how, and what its threads may touch when."""

    def __init__(self, recipe: LayerRecipe, args: tuple[Any, ...]) -> None:
        self.recipe, self.triggers, self.prefetches = recipe, 0, 0
        shape = recipe.shape
        conv = isinstance(shape, ConvShape)
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        self.memory = Memory(tensors)
        # What a predecessor may still write under PDL; the gate was written before it began.
        self.awaited = {"inputs": args[0]} if conv else {"y": args[0], "gate": args[1]}
        written = [args[1], args[6]] if conv else [args[0]]
        self.read_only = {
            f"argument {i}": a
            for i, a in enumerate(args)
            if isinstance(a, torch.Tensor) and not any(a is w for w in written)
        }
        kernel = MODULES["conv"].ConvKernel(shape) if conv else MODULES["norm"].NormKernel(shape)
        body = kernel.kernel
        kernel.kernel = lambda *given: SimpleNamespace(launch=lambda **how: self.run(body, given, **how))
        kernel(*(Tensor(a, self.memory) if isinstance(a, torch.Tensor) else a for a in args), None)

    def run(
        self, body: Callable[..., None], args: tuple[Any, ...], grid: list[int], block: list[int], use_pdl: bool,
        stream: Any, preferred_smem_carveout: int | None = None,
    ) -> None:  # fmt: skip
        shape = self.recipe.shape
        assert preferred_smem_carveout == shape.carveout
        assert use_pdl == shape.pdl and block[0] == shape.threads and block[1:] == grid[1:] == [1, 1]
        meets = not isinstance(shape, ConvShape)  # threads that meet at barriers and shuffles have to run at once
        for index in range(grid[0]):
            shared, failures = Block(block[0]), []

            def lane(thread: int, index: int = index, shared: Any = shared, failures: Any = failures) -> None:
                _here.block, _here.index, _here.thread = shared, (index, 0, 0), thread
                _here.memory, _here.launch, _here.waited = self.memory, self, not shape.pdl
                try:
                    with np.errstate(all="ignore"):
                        body(*args)
                    assert _here.waited, "a thread ends without a wait: the kernel may end before its predecessor"
                except threading.BrokenBarrierError:
                    pass
                except BaseException as error:
                    failures.append(error)
                    for barrier in (shared.barrier, *shared.warps):
                        barrier.abort()

            if meets:
                lanes = [threading.Thread(target=lane, args=(t,)) for t in range(block[0])]
                for each in lanes:
                    each.start()
                for each in lanes:
                    each.join()
            else:
                for t in range(block[0]):
                    lane(t)
            if failures:
                raise failures[0]
        assert self.triggers == shape.triggers * grid[0] * block[0]
        assert (self.prefetches > 0) == getattr(shape, "ahead", False)


def kernel(recipe: LayerRecipe) -> Callable[..., None]:
    """The kernel of a recipe, as `compiler.load` gives it, for CPU tensors."""
    return lambda *args: (Launch(recipe, args), None)[1]
