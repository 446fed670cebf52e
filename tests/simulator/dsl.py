"""The part of CuTe DSL that the step kernel uses, done on the host: `cutlass`, `cutlass.cute` and their modules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from .memory import SHARED_BASE, Barrier, Pointer, Shared
from .values import LANES, NOW, Float32, Fragment, Half, Int32, Int64, lanes, maximum, minimum, select, uniform

LOAD, STORE = "load", "store"  # TMA copies


class Layout:
    """Shape and strides."""

    def __init__(self, shape: Any, stride: Any = None) -> None:
        self.shape = shape
        self.stride = stride


class Floats:
    """Floats in one region of shared memory, by their number."""

    def __init__(self, pointer: Pointer) -> None:
        self.memory, self.at = pointer.memory, pointer.at
        self.region = int(self.memory.region[(self.at - SHARED_BASE) // 4])

    def __getitem__(self, k: Any) -> np.ndarray:
        return self.memory.load(self.at + 4 * k, 1, self.region)[0].view(np.float32)

    def __setitem__(self, k: Any, value: Any) -> None:
        value = np.ascontiguousarray(lanes(np.asarray(value, np.float32)))
        self.memory.store(lanes(self.at + 4 * k), [value.view(np.uint32)], self.region)


class View:
    """A pointer with a layout of several modes."""

    def __init__(self, pointer: Pointer, layout: Layout) -> None:
        self.pointer, self.shape, self.stride = pointer, layout.shape, layout.stride
        self.tile: Any = None

    def __getitem__(self, coordinates: tuple[Any, ...]) -> tuple[View, tuple[Any, ...]]:
        return self, coordinates


def make_tensor(pointer: Pointer, layout: Layout) -> Any:
    return Floats(pointer) if isinstance(layout.shape, int) else View(pointer, layout)


def local_tile(view: View, tile: tuple[int, ...], coordinates: tuple[None, ...]) -> View:
    assert coordinates == (None,) * len(view.shape)
    view.tile = tile
    return view


def recast_ptr(pointer: Pointer, swizzle: Any = None, dtype: Any = None) -> Pointer:
    return Pointer(pointer.memory, pointer.at, dtype.width // 8, swizzle)


def assume(value: Any, divby: int) -> Any:
    found = lanes(value)[NOW.warp.active]
    assert not (found % divby).any(), f"{found} was promised to be a multiple of {divby}"
    return value


def _box(pool: Any, staged: Any) -> tuple[Any, np.ndarray, np.ndarray]:
    """A TMA copy's tensor in memory, its addresses of words there, and the same words of shared memory.

    The pool is indexed (None, 0, row tile, 0, head, slot), the staged state (None, warp, stage).
    """
    NOW.warp.converged("a TMA copy")
    (view, (_, column, row_tile, block, head, slot)), (box, (_, warp, stage)) = pool, staged
    assert column == block == 0 and warp == NOW.warp.index
    columns, rows, blocks = view.tile
    size, per_word = view.pointer.size, 4 // view.pointer.size
    assert columns * size == 16 << box.pointer.swizzle[0], "a row of the swizzle"
    assert rows <= 256 and blocks <= 256, "a box's sides"
    assert not any(s * size % 16 for s in view.stride[1:]), "TMA strides"
    c, r, b = np.meshgrid(np.arange(0, columns, per_word), np.arange(rows), np.arange(blocks), indexing="ij")
    where = (c, row_tile * rows + r, b, head, slot)
    for at, n in zip(where, view.shape, strict=True):
        assert (np.asarray(at) >= 0).all() and (np.asarray(at) < n).all(), "a TMA box beyond its tensor"
    addresses = view.pointer.at + size * sum(at * s for at, s in zip(where, view.stride, strict=True))
    places = (c, r, b, warp, stage)
    bytes_ = box.pointer.at + size * sum(at * s for at, s in zip(places, box.stride, strict=True))
    bits, base, shift = box.pointer.swizzle
    bytes_ = bytes_ ^ ((bytes_ >> (base + shift) & ((1 << bits) - 1)) << base)
    shared: Shared = NOW.cta.shared
    return view, addresses.ravel(), shared.index(bytes_.ravel(), 1, shared.names.index("state"))


def copy(atom: str, source: Any, target: Any, tma_bar_ptr: Any = None) -> None:
    """A TMA load, which lands when its barrier is waited for, or a store, which reads when it is waited for."""
    shared: Shared = NOW.cta.shared
    if atom == STORE:
        view, addresses, index = _box(target, source)
        shared.lend(index)
        NOW.warp.stores_open.append((view.pointer.memory, addresses, index))
        return
    view, addresses, index = _box(source, target)
    shared.claim(index, None)
    shared.in_flight[index] = True

    def land() -> int:
        shared.in_flight[index] = False
        shared.put(index, view.pointer.memory.read_block(addresses)[:, None], -2)
        return 4 * index.size

    _barrier(tma_bar_ptr).copies.append(land)


def _barrier(pointer: Pointer) -> Barrier:
    assert pointer.size == 8 and pointer.at % 8 == 0
    return NOW.cta.barriers[pointer.at]


def _init_barrier(pointer: Pointer, count: int) -> None:
    shared = NOW.cta.shared
    assert int(NOW.warp.active.sum()) == 1 and pointer.at not in NOW.cta.barriers
    shared.index(np.array([pointer.at]), 2, shared.names.index("barriers"))
    NOW.cta.barriers[pointer.at] = Barrier(count)


def _expect(pointer: Pointer, bytes_: int) -> None:
    assert int(NOW.warp.active.sum()) == 1
    _barrier(pointer).expect(bytes_)


def _wait(pointer: Pointer, phase: int) -> None:
    NOW.warp.converged("a wait for a barrier")
    _barrier(pointer).wait(phase)


def _sync_warp() -> None:
    NOW.warp.converged("a warp's barrier")
    NOW.warp.epoch += 1


def _commit() -> None:
    NOW.warp.converged("a commit")
    NOW.warp.groups.append(NOW.warp.uncommitted)
    NOW.warp.uncommitted = []


def _wait_group(pending: int) -> None:
    """Only groups that were committed are waited for."""
    warp, shared = NOW.warp, NOW.cta.shared
    warp.converged("a wait for copies")
    done = warp.groups[: len(warp.groups) - pending]
    warp.groups = warp.groups[len(done) :]
    for index, words, threads in (copied for group in done for copied in group):
        shared.in_flight[index] = False
        shared.put(index, words, threads)


def _commit_stores() -> None:
    NOW.warp.converged("a commit of stores")
    NOW.warp.stores += NOW.warp.stores_open
    NOW.warp.stores_open = []


def _wait_stores(pending: int, read: bool) -> None:
    """Stores read shared memory now, at the latest."""
    assert pending == 0 and read
    NOW.warp.converged("a wait for stores")
    for memory, addresses, index in NOW.warp.stores:
        memory.write_block(addresses, NOW.cta.shared.take_back(index))
    NOW.warp.stores = []


def _fence_proxy(kind: str, space: str) -> None:
    assert (kind, space) == ("async.shared", "cta")
    NOW.cta.shared.fence()


def _from_lanes(value: Any, sources: np.ndarray) -> Any:
    NOW.warp.converged("a shuffle")
    return value[sources] if isinstance(value, np.ndarray) else value


def _shuffle(value: Any, lane: Any) -> Any:
    lane = lanes(lane)
    assert (lane >= 0).all() and (lane < 32).all(), lane
    return _from_lanes(value, lane)


def _shuffle_up(value: Any, distance: int, mask_and_clamp: int) -> Any:
    segment, clamp = mask_and_clamp >> 8 & 31, mask_and_clamp & 31
    lowest = LANES & segment | clamp & ~segment
    return _from_lanes(value, np.where(LANES - distance >= lowest, LANES - distance, LANES))


def _launched_only(*_: Any) -> None:
    raise AssertionError("only the kernel itself may wait for the CTA")


def _allocate(total: int, byte_alignment: int) -> Pointer:
    assert total == len(NOW.cta.shared.words) * 4 and SHARED_BASE % byte_alignment == 0
    return Pointer(NOW.cta.shared, SHARED_BASE, 1)


def _thread() -> tuple[np.ndarray, int, int]:
    return NOW.warp.threads, 0, 0


def _kernel(body: Any) -> Any:
    def bind(self: Any, *args: Any) -> Any:
        return SimpleNamespace(launch=lambda **how: NOW.run.launch(lambda: body(self, *args), **how))

    return bind


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _inputs_ready() -> None:
    NOW.warp.inputs_ready = True


arch = SimpleNamespace(
    block_idx=lambda: (NOW.cta.block, 0, 0),
    warp_idx=lambda: NOW.warp.index,
    lane_idx=lambda: LANES,
    thread_idx=_thread,
    make_warp_uniform=uniform,
    mbarrier_init=_init_barrier,
    mbarrier_init_fence=_nothing,
    mbarrier_arrive_and_expect_tx=_expect,
    mbarrier_wait=_wait,
    sync_warp=_sync_warp,
    sync_threads=_launched_only,
    cp_async_commit_group=_commit,
    cp_async_wait_group=_wait_group,
    cp_async_bulk_commit_group=_commit_stores,
    cp_async_bulk_wait_group=_wait_stores,
    fence_proxy=_fence_proxy,
    shuffle_sync=_shuffle,
    shuffle_sync_bfly=lambda value, distance: _from_lanes(value, LANES ^ distance),
    shuffle_sync_up=_shuffle_up,
    griddepcontrol_wait=_inputs_ready,
    griddepcontrol_launch_dependents=_nothing,
    rcp_approx=lambda v: np.float32(1) / v,
)
cute = SimpleNamespace(
    jit=lambda f: f,
    kernel=_kernel,
    arch=arch,
    math=SimpleNamespace(exp=lambda v, fastmath=False: np.exp(v), log1p=np.log1p),
    assume=assume,
    make_layout=Layout,
    make_swizzle=lambda bits, base, shift: (bits, base, shift),
    make_composed_layout=lambda inner, offset, outer: SimpleNamespace(inner=inner, outer=outer),
    make_rmem_tensor=lambda layout, dtype: Fragment(layout.shape),
    make_tensor=make_tensor,
    local_tile=local_tile,
    group_modes=lambda view, first, last: view,
    select=lambda layout, mode: layout,
    recast_ptr=recast_ptr,
    copy=copy,
)
cpasync = SimpleNamespace(
    CopyBulkTensorTileG2SOp=lambda: LOAD,
    CopyBulkTensorTileS2GOp=lambda: STORE,
    make_tiled_tma_atom=lambda op, view, layout, tile: (op, view),
    tma_partition=lambda atom, cta, layout, staged, pool: (staged, pool),
    prefetch_descriptor=_nothing,
)
cutlass = SimpleNamespace(
    cute=cute,
    min=minimum,
    max=maximum,
    select_=select,
    range=lambda *bounds, unroll: range(*bounds),
    range_constexpr=range,
    const_expr=lambda value: value,
    Boolean=bool,
    Float32=Float32,
    Half=Half,
    Int32=Int32,
    Int64=Int64,
)
MODULES = {
    "cutlass": cutlass,
    "cutlass.cute": cutlass,  # `import cutlass.cute as cute` takes the name from the package
    "cutlass.cute.nvgpu": SimpleNamespace(cpasync=cpasync),
    "cutlass.memory": SimpleNamespace(SmemAllocator=lambda: SimpleNamespace(allocate=_allocate)),
}
