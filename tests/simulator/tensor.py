"""What `kernels/sm100/instructions.py` compiles to, done on numbers: tensor memory, MMAs, cluster launch control.

Descriptors are taken apart bit by bit, as PTX defines them, and every word that they address is looked up in shared
memory: a wrong start, stride or swizzle gives wrong numbers or is refused. An MMA runs when its barrier is waited for,
not before. What an MMA reads beyond the rows of a turn may be anything, and makes NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .instructions import TF32, G, T, _decode
from .memory import SHARED_BASE
from .ordered import TENSOR_CORES
from .values import LANES, NOW, lanes, uniform

TENSOR_LANES, TENSOR_COLUMNS = 128, 512
K_BYTES = 32  # of K that one MMA contracts over
KINDS = {"tf32": {2: "f32"}, "f16": {0: "f16", 1: "bf16"}}


@dataclass(eq=False)
class Mma:
    """An MMA that was started: where its words lie, and where its sums go."""

    kind: str
    a: np.ndarray
    b: np.ndarray
    column: int
    adds: bool
    clock: np.ndarray  # what the warp that started it knew of others: of that, too, a barrier tells
    tick: int = 0  # of the tensor cores, once it is done


class TensorMemory:
    """A CTA's columns of tensor memory."""

    def __init__(self) -> None:
        self.columns = 0
        self.base = -1
        self.values = np.full((TENSOR_LANES, TENSOR_COLUMNS), np.nan, np.float32)
        self.done = 0  # MMAs
        self.tick = np.full(TENSOR_COLUMNS, -1, np.int64)  # of the last MMA that is done
        self.pending = np.zeros(TENSOR_COLUMNS, bool)
        self.read_clock = np.zeros(8, np.int64)
        self.reads = np.zeros((TENSOR_LANES, TENSOR_COLUMNS), np.int32)
        self.started: list[Mma] = []
        self.wanted_by_others = False  # dependents may be there, hold columns, and wait for this grid

    def check(self, column: int, count: int) -> None:
        inside = self.base <= column and column + count <= self.base + self.columns
        assert self.columns and inside, f"columns {column}.. of tensor memory are not allocated"


def field(value: int, first: int, last: int) -> int:
    """Bits first..last of a descriptor."""
    return value >> first & (1 << last - first + 1) - 1


def addresses(descriptor: int, rows: int) -> np.ndarray:
    """Byte addresses of the words (row, k) of a K-major matrix of 32 bytes a row."""
    assert field(descriptor, 46, 48) == 1, "a descriptor's version"
    assert field(descriptor, 49, 51) == 0 and field(descriptor, 52, 60) == 0, "a descriptor's reserved bits"
    assert field(descriptor, 61, 63) == 2, "the 128-byte swizzle"
    start, stride = field(descriptor, 0, 13) * 16, field(descriptor, 32, 45) * 16
    r, k = np.meshgrid(np.arange(rows), np.arange(0, K_BYTES, 4), indexing="ij")
    at = start + r // 8 * stride + r % 8 * 128 + k
    return at ^ (at >> 7 & 7) << 4


def matrix(kind: str, words: np.ndarray) -> np.ndarray:
    """Numbers of the words (row, k)."""
    if kind == "f32":
        return (words & TF32).view(np.float32).astype(np.float64)
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1).reshape(len(words), -1)
    return _decode(kind, halves).astype(np.float64)


def allocate(to: Any, columns: int) -> None:
    NOW.warp.converged("an allocation")
    memory = NOW.cta.tensor
    assert memory.base < 0, "allocated twice"
    assert not memory.wanted_by_others, "allocated when dependents may hold what is left"
    assert 32 <= columns <= TENSOR_COLUMNS and columns & (columns - 1) == 0, columns
    memory.base, memory.columns = 0 if columns == TENSOR_COLUMNS else 32 * (NOW.cta.block % 4), columns
    assert memory.base + columns <= TENSOR_COLUMNS
    warp = NOW.warp
    warp.active = LANES == 0
    NOW.cta.shared.store(lanes(to), [np.full(32, memory.base, np.uint32)])
    warp.active = np.ones(32, bool)


def release(base: Any, columns: int) -> None:
    NOW.warp.converged("a release")
    memory = NOW.cta.tensor
    assert (uniform(base), columns) == (memory.base, memory.columns), "not what was allocated"
    assert not memory.started and not memory.pending.any(), "released while MMAs are under way"
    assert (memory.read_clock <= NOW.warp.clock[:8]).all(), "released while others may read it"
    memory.columns = 0


def multiply(kind: str, to: Any, a: int, b: int, shape: int, adds: bool) -> None:
    assert int(NOW.warp.active.sum()) == 1, "an MMA by more than one thread"
    shared, memory = NOW.cta.shared, NOW.cta.tensor
    assert field(shape, 0, 3) == field(shape, 6, 6) == field(shape, 13, 16) == field(shape, 23, 23) == 0
    assert field(shape, 29, 31) == 0 and field(shape, 4, 5) == 1, "f32 sums, dense, nothing transposed"
    there = NOW.run.kernel.spec.rows  # of A's; the others lie behind the block, whatever is there
    operand = KINDS[kind][field(shape, 7, 9)]
    assert field(shape, 10, 12) == field(shape, 7, 9), "operands of two types"
    rows, columns = 16 * field(shape, 24, 28), 8 * field(shape, 17, 22)
    assert rows == 128 and columns % 16 == 0 and 16 <= columns <= 256, (rows, columns)
    to = uniform(to)
    assert to >> 16 == 0, "M = 128 uses every lane"
    memory.check(to, columns)
    places = [(addresses(d, n) - SHARED_BASE) // 4 for d, n in ((a, rows), (b, columns))]
    assert all(((index >= 0) & (index < len(shared.words))).all() for index in places), "outside of shared memory"
    places[0] = places[0][:there]
    for index, region, unwritten in zip(places, ("state", "operand"), (False, True), strict=True):
        assert (shared.region[index] == shared.names.index(region)).all(), f"outside of {region}"
        shared.lend(index.ravel(), unwritten)
    if adds:
        assert memory.pending[to : to + columns].all(), "adds to sums that no MMA of this chain has made"
    memory.pending[to : to + columns] = True
    clock = NOW.warp.clock.copy()
    clock[NOW.warp.index] -= 1
    memory.started.append(Mma(operand, *places, to, adds, clock))


def commit(barrier: Any) -> None:
    assert int(NOW.warp.active.sum()) == 1, "a commit by more than one thread"
    mbarrier = NOW.cta.barriers[int(barrier)]
    cta = NOW.cta
    memory, told = cta.tensor, list(cta.tensor.started)  # several barriers may be told of one MMA
    before = memory.done

    def done() -> int:
        while told and not told[-1].tick:  # MMAs are done in the order that they were started in
            _run(cta, memory.started.pop(0))
        mbarrier.clock[TENSOR_CORES] = max(mbarrier.clock[TENSOR_CORES], told[-1].tick if told else before)
        for mma in told:
            mbarrier.clock = np.maximum(mbarrier.clock, mma.clock)
        return -1

    mbarrier.pending.append(done)


def _run(cta: Any, mma: Mma) -> None:
    memory, columns = cta.tensor, slice(mma.column, mma.column + len(mma.b))
    memory.done += 1
    mma.tick = memory.done
    a, b = (matrix(mma.kind, cta.shared.take(index.ravel(), mma.tick).reshape(index.shape)) for index in (mma.a, mma.b))
    product = np.full((TENSOR_LANES, len(b)), np.nan, np.float32)
    product[: len(a)] = a @ b.T
    memory.values[:, columns] = memory.values[:, columns] + product if mma.adds else product
    memory.tick[columns] = mma.tick
    memory.pending[columns] = any(other.column == mma.column for other in memory.started)


def load_accumulators(addresses_: list[Any]) -> list[tuple[np.ndarray, ...]]:
    warp, memory = NOW.warp, NOW.cta.tensor
    warp.converged("a load from tensor memory")
    found = []
    for address in addresses_:
        place = uniform(address)
        lane, column = place >> 16, place & 0xFFFF
        assert lane % 16 == 0 and lane // 32 == warp.index % 4, f"warp {warp.index} reads lane {lane}"
        memory.check(column, 8)
        columns = slice(column, column + 8)
        assert not memory.pending[columns].any(), "sums are read while MMAs are under way"
        ticks = memory.tick[columns]
        assert (ticks > 0).all() and (warp.clock[TENSOR_CORES] >= ticks).all(), "sums are read, not awaited"
        memory.reads[lane : lane + 16, columns] += 1
        tile = memory.values[lane : lane + 16, columns]
        found.append((tile[G, 2 * T], tile[G, 2 * T + 1], tile[G + 8, 2 * T], tile[G + 8, 2 * T + 1]))
    memory.read_clock[warp.index] = warp.clock[warp.index]
    return found


def ask_for_work(answer: Any, barrier: Any) -> None:
    """The answer comes when its barrier is waited for; `run.give_away` says what it is."""
    assert int(NOW.warp.active.sum()) == 1, "asked by more than one thread"
    cta, mbarrier = NOW.cta, NOW.cta.barriers[int(barrier)]
    assert not cta.refused, "asked again after there was none"
    assert not cta.asked, "asked before the last answer came"
    cta.asked = True
    at = int(answer)
    assert at % 16 == 0, "an answer's address"
    index = cta.shared.index(np.array([at]), 4, cta.shared.names.index("answers"))
    assert not cta.unfenced_reads[index].any(), "an answer where another was read without a fence"
    cta.shared.claim(index, None)
    cta.shared.in_flight[index] = True

    def land() -> int:
        given = NOW.run.give_away()
        cta.asked, cta.refused = False, given is None
        if given is not None:
            cta.blocks.append(given)
        words = np.array([[0, 0xDEAD, 0, 0] if given is None else [1, given, 0, 0]], np.uint32)
        cta.shared.land(index, words, mbarrier)
        return 16

    mbarrier.pending.append(land)


def given_work(answer: Any) -> int:
    shared = NOW.cta.shared
    at = lanes(answer)
    words = shared.load(at, 4, shared.names.index("answers"))
    NOW.cta.unfenced_reads[shared.index(at[:1], 4), NOW.warp.index] = True
    return uniform(words[1]) if uniform(words[0]) else -1


def fence_writes() -> None:
    """It orders reads before later bulk copies as well."""
    NOW.cta.shared.fence()
    NOW.cta.unfenced_reads[:, NOW.warp.index] = False


def fence_before_sync() -> None:
    """Orders what has no order of its own here."""


fence_after_sync = fence_before_sync
