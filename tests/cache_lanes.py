"""Runs the cache's kernels thread by thread in plain Python, on the memory of CPU tensors.

The kernels' functions are traced code; here their integers are Python's, their floats numpy's, their pointers real
addresses that must lie in a tensor that the launch was given, and their barriers and shuffles those of Python threads.
So a launch on a cache of CPU tensors does what it would do on a GPU, word for word, if slowly.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

from replayssm_cute.cache.launches import Launches
from replayssm_cute.cache.recipes import CacheRecipe

PACKAGE = "replayssm_cute.cache.kernels"
NAMES = ("index", "layers", "moves", "cursors", "folded_rows", "products", "fold", "slots")


def untraced(package: str, names: tuple[str, ...]) -> dict[str, ModuleType]:
    """Copies of a package's kernel modules of our own: compiling rewrites traced functions where they are."""
    compiled = {n: sys.modules.pop(n) for n in list(sys.modules) if f"{n}.".startswith(f"{package}.")}
    try:
        return {name: importlib.import_module(f"{package}.{name}") for name in names}
    finally:
        for n in [n for n in sys.modules if f"{n}.".startswith(f"{package}.")]:
            del sys.modules[n]
        sys.modules.update(compiled)
        if package in compiled:
            parent, _, name = package.rpartition(".")
            setattr(sys.modules[parent], name, compiled[package])


MODULES = untraced(PACKAGE, NAMES)


# ---------------------------------------------------------------------------------------------------
# Memory
# ---------------------------------------------------------------------------------------------------


class Memory:
    """The ranges of addresses that a launch may touch."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
        self.ranges = [(start, start + storage.nbytes()) for start, storage in storages.items()]

    def check(self, address: int, size: int) -> None:
        assert any(low <= address and address + size <= high for low, high in self.ranges), (
            f"{size} bytes at {address:#x} belong to no tensor of the launch"
        )


class Pointer:
    """An address, and the size of what it points to."""

    def __init__(self, memory: Memory, address: int, size: int, align: int = 1) -> None:
        assert address % align == 0, f"{address:#x} was promised to be a multiple of {align}"
        self.memory, self.address, self.size = memory, address, size

    def __add__(self, count: int) -> Pointer:
        return Pointer(self.memory, self.address + int(count) * self.size, self.size)


class View:
    """Memory as a tensor of one dimension, of f32 or int32."""

    def __init__(self, pointer: Pointer, kind: str) -> None:
        self.pointer, self.kind = pointer, kind

    def _at(self, i: int) -> Any:
        address = self.pointer.address + 4 * int(i)
        self.pointer.memory.check(address, 4)
        return (ctypes.c_float if self.kind == "f" else ctypes.c_int32).from_address(address)

    def __getitem__(self, i: int) -> Any:
        value = self._at(i).value
        return np.float32(value) if self.kind == "f" else value

    def __setitem__(self, i: int, value: Any) -> None:
        self._at(i).value = float(value) if self.kind == "f" else int(value)


class Tensor:
    """A tensor argument."""

    def __init__(self, t: torch.Tensor, memory: Memory) -> None:
        self.t, self.shape = t, t.shape
        self.iterator = Pointer(memory, t.data_ptr(), t.element_size())

    def _index(self, index: Any) -> tuple[int, ...]:
        index = tuple(int(i) for i in (index if isinstance(index, tuple) else (index,)))
        assert all(0 <= i < n for i, n in zip(index, self.shape, strict=True)), f"{index}, shape {tuple(self.shape)}"
        return index

    def __getitem__(self, index: Any) -> Any:
        value = self.t[self._index(index)].item()
        return np.float32(value) if self.t.is_floating_point() else value

    def __setitem__(self, index: Any, value: Any) -> None:
        self.t[self._index(index)] = value


class Registers(list[Any]):
    """A thread's own array."""

    def fill(self, value: Any) -> None:
        self[:] = [value] * len(self)


def _load_words(pointer: Pointer, count: int) -> list[int]:
    assert pointer.address % (4 * count) == 0, f"{4 * count} bytes at {pointer.address:#x}"
    pointer.memory.check(pointer.address, 4 * count)
    return list((ctypes.c_int32 * count).from_address(pointer.address))


def _store_words(pointer: Pointer, words: list[int]) -> None:
    assert pointer.address % (4 * len(words)) == 0, f"{4 * len(words)} bytes at {pointer.address:#x}"
    pointer.memory.check(pointer.address, 4 * len(words))
    (ctypes.c_int32 * len(words)).from_address(pointer.address)[:] = [int(w) for w in words]


# ---------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------


def _int32(v: Any) -> int:
    assert -(2**31) <= int(v) < 2**31, f"{v} does not fit into 32 bits"
    return int(v)


def _bits(v: Any) -> int:
    return struct.unpack("<i", struct.pack("<f", float(v)))[0] if not np.isnan(v) else int(np.float32(v).view(np.int32))


def _as_float(word: int) -> Any:
    return np.int32(word).view(np.float32)


def _half(which: int) -> Callable[[str, int], Any]:
    def half(kind: str, word: int) -> Any:
        bits = (int(word) >> (16 * which)) & 0xFFFF
        if kind == "bf16":
            return np.uint32(bits << 16).view(np.float32)
        return np.float32(np.uint16(bits).view(np.float16))

    return half


def _pack(kind: str, low: Any, high: Any) -> int:
    pair = torch.tensor([low, high], dtype=torch.float32).to(torch.bfloat16 if kind == "bf16" else torch.float16)
    return int(pair.view(torch.int32))


def _permute(low: int, high: int, selector: int) -> int:
    eight = (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32
    chosen = sum((eight >> 8 * (selector >> 4 * k & 7) & 0xFF) << 8 * k for k in range(4))
    return chosen - (chosen >> 31 << 32)


def _assume(value: int, divby: int) -> int:
    assert int(value) % divby == 0, f"{value} was promised to be a multiple of {divby}"
    return value


# ---------------------------------------------------------------------------------------------------
# Threads
# ---------------------------------------------------------------------------------------------------

_here = threading.local()


class Block:
    """What the threads of a CTA share."""

    def __init__(self, threads: int) -> None:
        self.barrier = threading.Barrier(threads)
        self.warps = [threading.Barrier(min(32, threads)) for _ in range(-(-threads // 32))]
        self.exchange: list[list[Any]] = [[None] * 32 for _ in self.warps]
        self.product: list[Any] = [None for _ in self.warps]
        self.shared: torch.Tensor | None = None
        self.lock = threading.Lock()


def _shuffle(value: Any, source: Callable[[int], int]) -> Any:
    warp, lane = divmod(_here.thread, 32)
    block = _here.block
    block.exchange[warp][lane] = value
    block.warps[warp].wait()
    found = block.exchange[warp][source(lane)]
    block.warps[warp].wait()
    return found


def _mma_16bit(kind: str, c: list[Any], a: list[int], b: list[int]) -> list[Any]:
    """m16n8k16, fragments as in PTX; sums are cut off to f32, which is the most that tensor cores lose."""
    warp, lane = divmod(_here.thread, 32)
    block = _here.block
    block.exchange[warp][lane] = (a, b)
    if block.warps[warp].wait() == 0:  # one thread for all
        given = block.exchange[warp]
        halves = [
            np.array([each[side] for each in given], np.int64).astype(np.uint32).view(np.uint16) for side in (0, 1)
        ]
        values = [
            (h.astype(np.uint32) << 16).view(np.float32) if kind == "bf16" else h.view(np.float16).astype(np.float32)
            for h in halves
        ]
        left, right = np.empty((16, 16)), np.empty((16, 8))
        for one in range(32):
            for k in range(4):
                at = 2 * (one % 4) + 8 * (k // 2)
                left[one // 4 + 8 * (k % 2), at : at + 2] = values[0][one, 2 * k : 2 * k + 2]
            for k in range(2):
                at = 2 * (one % 4) + 8 * k
                right[at : at + 2, one // 4] = values[1][one, 2 * k : 2 * k + 2]
        block.product[warp] = left @ right
    block.warps[warp].wait()
    g, t = lane // 4, lane % 4
    places = (g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)
    sums = [float(old) + block.product[warp][place] for old, place in zip(c, places, strict=True)]
    return [_cut_off(v) for v in sums]


def _cut_off(value: float) -> Any:
    nearest = np.float32(value)
    return np.nextafter(nearest, np.float32(0)) if abs(float(nearest)) > abs(value) else nearest


class Allocator:
    """Shared memory: one allocation a CTA, whose ends are out of bounds."""

    def allocate(self, size: int, byte_alignment: int) -> Pointer:
        block = _here.block
        with block.lock:
            if block.shared is None:
                block.shared = torch.zeros(size + 64, dtype=torch.uint8)
        start = -(-block.shared.data_ptr() // 16) * 16
        memory = Memory([])
        memory.ranges = [(start, start + size)]
        return Pointer(memory, start, 1)


def _recast(pointer: Pointer, dtype: Any) -> Pointer:
    recast = Pointer(pointer.memory, pointer.address, 4)
    recast.kind = "f" if dtype is REPLACED["Float32"] else "i"  # type: ignore[attr-defined]
    return recast


CUTLASS = SimpleNamespace(
    min=min,
    max=max,
    select_=lambda condition, a, b: a if condition else b,
    range=lambda *bounds, unroll=1: range(*(int(b) for b in bounds)),
    range_constexpr=range,
    const_expr=lambda v: v,
)
CUTE = SimpleNamespace(
    AddressSpace=SimpleNamespace(gmem=None),
    assume=_assume,
    make_layout=lambda count: count,
    make_ptr=lambda dtype, address, space, assumed_align: Pointer(_here.memory, int(address), 4, assumed_align),
    make_rmem_tensor=lambda count, dtype: Registers([None] * count),
    make_tensor=lambda pointer, layout: View(pointer, pointer.kind),
    recast_ptr=_recast,
    math=SimpleNamespace(exp=np.exp),
    arch=SimpleNamespace(
        block_idx=lambda: _here.index,
        thread_idx=lambda: (_here.thread, 0, 0),
        lane_idx=lambda: _here.thread % 32,
        sync_threads=lambda: _here.block.barrier.wait(),
        sync_warp=lambda: None,
        shuffle_sync=lambda value, lane: _shuffle(value, lambda mine: lane),
        shuffle_sync_up=lambda value, distance, mask_and_clamp: _shuffle(value, lambda lane: max(lane - distance, 0)),
    ),
)
REPLACED: dict[str, Any] = {
    "cutlass": CUTLASS,
    "cute": CUTE,
    "Int32": _int32,
    "Int64": int,
    "Float32": np.float32,
    "Boolean": bool,
    "SmemAllocator": Allocator,
    "load_words": _load_words,
    "store_words": _store_words,
    "as_float": _as_float,
    "bits": _bits,
    "low_half": _half(0),
    "high_half": _half(1),
    "pack": _pack,
    "permute": _permute,
    "mma_16bit": _mma_16bit,
}


def patch(modules: dict[str, ModuleType], replacements: dict[str, Any]) -> None:
    """Put the host's operations in place of the DSL's, in every module and through every trace decorator."""
    for module in modules.values():
        for name, value in replacements.items():
            if hasattr(module, name):
                setattr(module, name, value)
        for _, owner in inspect.getmembers(module, inspect.isclass):
            for name, method in list(vars(owner).items()):
                if inspect.isfunction(method) and hasattr(method, "__wrapped__"):
                    setattr(owner, name, inspect.unwrap(method))


patch(MODULES, REPLACED)


class _Bound:
    """What `self.kernel(...)` gives in a launch function: `.launch` runs every thread of every CTA."""

    def __init__(self, body: Callable[..., None], args: tuple[Any, ...], memory: Memory) -> None:
        self.body, self.args, self.memory = body, args, memory

    def launch(self, grid: list[int], block: list[int], **_: Any) -> None:
        for y in range(grid[1]):
            for x in range(grid[0]):
                self._block((x, y, 0), block[0])

    def _block(self, index: tuple[int, int, int], threads: int) -> None:
        shared, failures = Block(threads), []

        def run(thread: int) -> None:
            _here.block, _here.index, _here.thread, _here.memory = shared, index, thread, self.memory
            try:
                with np.errstate(over="ignore", invalid="ignore"):
                    self.body(*self.args)
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                failures.append(error)
                for barrier in (shared.barrier, *shared.warps):
                    barrier.abort()

        lanes = [threading.Thread(target=run, args=(t,)) for t in range(threads)]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        if failures:
            raise failures[0]


def run_kernel(recipe: CacheRecipe, args: tuple[Any, ...], touched: list[torch.Tensor]) -> None:
    """Launch a kernel on CPU tensors; `touched` are those whose addresses it was given as numbers."""
    makers: dict[str, Callable[[], Any]] = {
        "cursors": lambda: MODULES["cursors"].CursorKernel(),
        "move plan": lambda: MODULES["moves"].MovePlanKernel(),
        "fold": lambda: MODULES["fold"].FoldKernel(recipe.shape),
        "copy": lambda: MODULES["slots"].CopyKernel(recipe.shape),
        "reset": lambda: MODULES["slots"].ResetKernel(recipe.shape),
    }
    memory = Memory([*touched, *(a for a in args if isinstance(a, torch.Tensor))])
    kernel = makers[recipe.kind]()
    body = kernel.kernel
    kernel.kernel = lambda *a: _Bound(body, a, memory)
    kernel(*(Tensor(a, memory) if isinstance(a, torch.Tensor) else a for a in args), None)


class EmulatedLaunches(Launches):
    """A cache's launches on CPU tensors; `launched` lists them."""

    def __init__(self, spec: Any, layers: Any, shared: Any, pad_slot_id: int) -> None:
        super().__init__(spec, layers, shared, pad_slot_id)
        self._owned = [t for each in layers for t in each.named().values()]
        self._given: list[torch.Tensor] = []  # whose addresses the kernels get as numbers
        self.launched: list[str] = []

    def reset(self, slots: torch.Tensor, zero_state: bool) -> None:
        self._given = [slots]
        super().reset(slots, zero_state)

    def _advance(self, slots: Any, accepted: Any, lens: Any, **flags: int) -> None:
        self._given = [slots, accepted, slots if lens is None else lens]
        super()._advance(slots, accepted, lens, **flags)

    def _plan(self, src: Any, dst: Any, count: Any, whole: int) -> torch.Tensor:
        self._given = [src, dst, count]
        return super()._plan(src, dst, count, whole)

    def _launch(self, recipe: CacheRecipe, *args: Any) -> None:
        self.launched.append(recipe.kind)
        run_kernel(recipe, args, [*self._owned, *self._given])


@contextlib.contextmanager
def emulated(cache: Any) -> Iterator[EmulatedLaunches]:
    """Give a CPU cache the kernels in place of its torch operations."""
    launches, before = EmulatedLaunches(cache.spec, cache.layers, cache._shared, cache.pad_slot_id), cache._ops
    cache._ops = launches
    try:
        yield launches
    finally:
        cache._ops = before
