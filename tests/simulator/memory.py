"""Global tensors and shared memory: who may touch what, in which order, and how often it was done."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np
import torch

from .values import NOW, POISON, lanes

SHARED_BASE = 1024
SPACE = 1 << 40  # each global tensor has addresses of its own
NOBODY, ASYNC, MANY = -1, -2, -3


class Pointer:
    """Byte address(es) in a memory, counted on in elements of `size` bytes."""

    def __init__(self, memory: Any, at: Any, size: int, swizzle: Any = None) -> None:
        self.memory, self.at, self.size, self.swizzle = memory, at, size, swizzle

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset * self.size, self.size)

    def toint(self) -> Any:
        return self.at


def active_addresses(at: Any, bytes_: int, what: str) -> np.ndarray:
    """The addresses of the active lanes, aligned to the access."""
    found = lanes(at)[NOW.warp.active]
    assert not (found % bytes_).any(), f"{what}: {bytes_} bytes at {found} are not aligned"
    return found


class Global:
    """A torch tensor as the kernel sees it: shape, strides, who owns each element of its storage, and counts."""

    def __init__(self, name: str, t: torch.Tensor, number: int, is_input: bool) -> None:
        assert t.storage_offset() == 0
        self.name, self.is_input = name, is_input
        self.shape, self.stride, self.size = tuple(t.shape), t.stride(), t.element_size()
        self.dtype, self.base = t.dtype, number * SPACE
        length = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        self._own = [1 if s == 0 else n for n, s in zip(self.shape, self.stride, strict=True)]
        self.bytes = t.as_strided((length,), (1,)).view(torch.uint8).numpy()
        rows = torch.full((length,), -1)
        ids = torch.arange(int(np.prod(self._own[:-1]))).reshape(*self._own[:-1], 1)
        rows.as_strided(self._own, self.stride).copy_(ids.expand(self._own))
        self.row = rows.numpy()
        self._reads, self._writes = np.zeros(length, np.int64), np.zeros(length, np.int64)
        self.iterator = Pointer(self, self.base, self.size)

    def counts(self, what: str) -> np.ndarray:
        """How often each element was "read" or "written", in the tensor's shape (stride-0 dimensions as 1)."""
        flat = torch.from_numpy({"read": self._reads, "written": self._writes}[what])
        return flat.as_strided(self._own, self.stride).numpy()

    def _elements(self, at: Any, bytes_: int) -> np.ndarray:
        if self.is_input:
            assert NOW.warp.inputs_ready, f"{self.name} is read while the predecessor may still be writing it"
        found = active_addresses(at, bytes_, self.name) - self.base
        index = (found // self.size)[:, None] + np.arange(bytes_ // self.size)
        assert (index >= 0).all() and (index < len(self.row)).all(), f"{self.name}: outside of its storage"
        rows = self.row[index]
        assert (rows >= 0).all(), f"{self.name}: elements {index[(rows < 0).any(1)][0]} belong to no row"
        assert (rows == rows[:, :1]).all(), f"{self.name}: one access runs from row to row"
        return index

    def check(self, at: Any, bytes_: int) -> None:
        """That an access would be to a row."""
        self._elements(at, bytes_)

    def load(self, at: Any, count: int) -> list[np.ndarray]:
        """`count` words a lane."""
        np.add.at(self._reads, self._elements(at, 4 * count).ravel(), 1)
        active = NOW.warp.active
        words = np.full((count, 32), POISON)
        first = (lanes(at)[active] - self.base) // 4
        words[:, active] = self.bytes[: len(self.bytes) // 4 * 4].view(np.uint32)[first + np.arange(count)[:, None]]
        return list(words)

    def store(self, at: Any, words: list[np.ndarray]) -> None:
        np.add.at(self._writes, self._elements(at, 4 * len(words)).ravel(), 1)
        active = NOW.warp.active
        first = (lanes(at)[active] - self.base) // 4
        view = self.bytes[: len(self.bytes) // 4 * 4].view(np.uint32)
        view[first + np.arange(len(words))[:, None]] = np.array(words)[:, active]

    def read_block(self, at: np.ndarray) -> np.ndarray:
        """Words at any number of addresses, for a bulk copy."""
        first = (at - self.base) // self.size
        per_word = 4 // self.size
        index = first.reshape(-1, 1) + np.arange(per_word)
        assert (index >= 0).all() and (index < len(self.row)).all() and (self.row[index] >= 0).all(), self.name
        np.add.at(self._reads, index.ravel(), 1)
        return self.bytes[: len(self.bytes) // 4 * 4].view(np.uint32)[(at - self.base) // 4]

    def write_block(self, at: np.ndarray, words: np.ndarray) -> None:
        """Words to any number of addresses, by a bulk copy."""
        index = ((at - self.base) // self.size).reshape(-1, 1) + np.arange(4 // self.size)
        assert (index >= 0).all() and (index < len(self.row)).all() and (self.row[index] >= 0).all(), self.name
        np.add.at(self._writes, index.ravel(), 1)
        self.bytes[: len(self.bytes) // 4 * 4].view(np.uint32)[(at - self.base) // 4] = words

    def _flat(self, index: tuple[Any, ...]) -> Any:
        at: Any = 0
        for i, n, s in zip(index, self.shape, self.stride, strict=True):
            inside = lanes(i)[NOW.warp.active]
            assert ((inside >= 0) & (inside < n)).all(), f"{self.name}{index}, shape {self.shape}"
            at = at + i * s
        return at

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if index[-1] is None:
            row = self._flat((*index[:-1], 0))
            return type("Row", (), {"iterator": Pointer(self, self.base + row * self.size, self.size)})
        at = self._flat(index)
        elements = self._elements(self.base + at * self.size, self.size)
        np.add.at(self._reads, elements.ravel(), 1)
        safe = np.where(NOW.warp.active, at, elements[0, 0]) if isinstance(at, np.ndarray) else at
        kinds = {torch.int32: np.int32, torch.int64: np.int64, torch.float32: np.float32, torch.float16: np.float16}
        if self.dtype == torch.bfloat16:
            return (self.bytes.view(np.uint16)[safe].astype(np.uint32) << np.uint32(16)).view(np.float32)
        value = self.bytes.view(kinds[self.dtype])[safe]
        if self.dtype.is_floating_point:
            return value.astype(np.float32)
        return value.astype(np.int64) if isinstance(value, np.ndarray) else int(value)

    def __setitem__(self, index: tuple[Any, ...], value: Any) -> None:
        assert self.dtype == torch.float32
        at = lanes(self._flat(index))
        np.add.at(self._writes, self._elements(self.base + at * self.size, self.size).ravel(), 1)
        active = NOW.warp.active
        self.bytes.view(np.float32)[at[active]] = lanes(value)[active]


def site() -> str:
    """The kernel's function that is asking, as module.function."""
    frame = sys._getframe(1)
    while not frame.f_globals["__name__"].startswith("simulated.") or frame.f_code.co_name.startswith("<"):
        assert frame.f_back is not None
        frame = frame.f_back
    return f"{frame.f_globals['__name__'].removeprefix('simulated.')}.{frame.f_code.co_name}"


@functools.lru_cache(maxsize=1 << 16)
def _ways(addresses: bytes, active: bytes, bytes_: int) -> int:
    at, on = np.frombuffer(addresses, np.int64), np.frombuffer(active, bool)
    worst, per_phase = 1, 128 // bytes_
    for first in range(0, 32, per_phase):
        phase = slice(first, first + per_phase)
        words = np.unique((at[phase][on[phase]] // 4)[:, None] + np.arange(bytes_ // 4))
        if len(words):
            worst = max(worst, int(np.bincount(words % 32).max()))
    return worst


def ways(at: Any, bytes_: int) -> int:
    """How many times the banks are gone through at most: 32, 16 or 8 lanes of 4, 8 or 16 bytes are served at once."""
    at = np.ascontiguousarray(lanes(at), np.int64)
    return _ways(at.tobytes(), NOW.warp.active.tobytes(), bytes_)


class Shared:
    """A CTA's shared memory, word by word: contents, last writer, last reader, copies in flight, counts.

    An access is in order if a barrier stands between it and what other lanes did to the word: of the CTA if they are
    in other warps, of the warp at least if they are not. Lanes of a warp are never taken to run in step.
    """

    def __init__(self, total: int, regions: dict[str, int]) -> None:
        n = total // 4
        self.words = np.full(n, POISON)
        self.in_flight = np.zeros(n, bool)
        self.lent = np.zeros(n, bool)  # a bulk store may still read it
        self.unfenced = np.zeros(n, bool)  # written by threads, and not yet seen by bulk copies
        self.writer = np.full(n, NOBODY, np.int32)
        self.writer_warp, self.write_epoch, self.write_cta = (np.full(n, NOBODY, np.int32) for _ in range(3))
        self.reader_warp, self.read_epoch, self.read_cta = (np.full(n, NOBODY, np.int32) for _ in range(3))
        self.reader = np.full(n, NOBODY, np.int32)  # the thread, where one alone has read since the last barrier
        self.written, self.read_words, self.read_matrices = (np.zeros(n, np.int32) for _ in range(3))
        self.region = np.zeros(n, np.int64)
        self.names = list(regions)
        for k, start in enumerate(regions.values()):
            self.region[start // 4 :] = k
        self.starts = regions

    def span(self, name: str) -> slice:
        """The words of a region."""
        found = np.flatnonzero(self.region == self.names.index(name))
        return slice(int(found[0]), int(found[-1]) + 1) if len(found) else slice(0, 0)

    def index(self, at: np.ndarray, count: int, region: int | None = None) -> np.ndarray:
        index = ((at - SHARED_BASE) // 4)[:, None] + np.arange(count)
        assert (index >= 0).all() and (index < len(self.words)).all(), f"{site()}: outside of shared memory"
        regions = self.region[index]
        expected = regions[0, 0] if region is None else region
        assert (regions == expected).all(), f"{site()}: one access runs over regions {np.unique(regions)}"
        return index

    def note_read(self, index: np.ndarray, threads: np.ndarray | None) -> None:
        """Check and count a read; `threads` are those of each row of `index`, None where the warp reads as one."""
        warp, epoch = NOW.warp, NOW.cta.epoch
        assert not self.in_flight[index].any(), f"{site()}: a word is read while a copy to it is on its way"
        assert (self.writer[index] != NOBODY).all(), f"{site()}: a word is read and was never written"
        mine = self.writer_warp[index] == warp.index
        seen = self.write_epoch[index] < warp.epoch
        if threads is not None:
            seen |= self.writer[index] == threads[:, None]
        seen |= self.writer[index] == ASYNC
        assert ((self.write_cta[index] < epoch) | (mine & seen)).all(), f"{site()}: no barrier after the write"
        others = (self.read_cta[index] == epoch) & (self.reader_warp[index] != warp.index)
        self.note_reader(index, threads)
        self.reader_warp[index] = np.where(others, MANY, warp.index)
        self.read_epoch[index], self.read_cta[index] = warp.epoch, epoch

    def note_reader(self, index: np.ndarray, threads: np.ndarray | None) -> None:
        """Who may write over the words without a barrier: a thread that reads them alone."""
        since = (self.read_cta[index] == NOW.cta.epoch) & (self.read_epoch[index] == NOW.warp.epoch)
        thread = np.broadcast_to(MANY if threads is None else threads[:, None], index.shape)
        self.reader[index] = np.where(since & (self.reader[index] != thread), MANY, thread)

    def claim(self, index: np.ndarray, threads: np.ndarray | None) -> None:
        """Check a write against what came before."""
        warp, epoch = NOW.warp, NOW.cta.epoch
        assert not self.lent[index].any(), f"{site()}: a word is written while a store may still read it"
        assert threads is not None or not self.unfenced[index].any(), f"{site()}: a bulk copy over unfenced words"
        assert not self.in_flight[index].any(), f"{site()}: a word is written while a copy to it is on its way"
        assert len(np.unique(index)) == index.size, f"{site()}: two lanes write one word"
        mine, ordered = self.writer_warp[index] == warp.index, self.write_epoch[index] < warp.epoch
        if threads is not None:
            ordered |= self.writer[index] == threads[:, None]
        fresh = self.writer[index] == NOBODY
        assert (fresh | (self.write_cta[index] < epoch) | (mine & ordered)).all(), f"{site()}: written over"
        alone = False if threads is None else self.reader[index] == threads[:, None]
        read_mine = (self.reader_warp[index] == warp.index) & ((self.read_epoch[index] < warp.epoch) | alone)
        assert ((self.read_cta[index] < epoch) | read_mine).all(), f"{site()}: written while others may read it"

    def put(self, index: np.ndarray, words: np.ndarray, threads: np.ndarray | int) -> None:
        """Write; `threads` are those that may read it at once."""
        warp = NOW.warp
        self.words[index] = words
        self.writer[index] = threads[:, None] if isinstance(threads, np.ndarray) else threads
        self.writer_warp[index], self.write_epoch[index], self.write_cta[index] = warp.index, warp.epoch, NOW.cta.epoch
        self.written[index] += 1
        self.unfenced[index] = isinstance(threads, np.ndarray)

    def fence(self) -> None:
        """What this warp has written is seen by bulk copies and MMAs, once a barrier has told of it."""
        self.unfenced[self.writer_warp == NOW.warp.index] = False

    def lend(self, index: np.ndarray) -> None:
        """A bulk store starts to read."""
        assert not self.unfenced[index].any(), f"{site()}: stored without a fence"
        self.note_read(index, None)
        self.lent[index] = True

    def take_back(self, index: np.ndarray) -> np.ndarray:
        """What a bulk store has read."""
        self.lent[index] = False
        return self.words[index.ravel()]

    def load(self, at: Any, count: int, region: int | None = None) -> list[np.ndarray]:
        warp = NOW.warp
        found = active_addresses(at, 4 * count, site())
        index = self.index(found, count, region)
        NOW.run.note_conflicts(site(), ways(at, 4 * count))
        self.note_read(index, warp.threads[warp.active])
        np.add.at(self.read_words, index.ravel(), 1)
        words = np.full((count, 32), POISON)
        words[:, warp.active] = self.words[index].T
        return list(words)

    def store(self, at: Any, words: list[np.ndarray], region: int | None = None) -> None:
        warp = NOW.warp
        index = self.index(active_addresses(at, 4 * len(words), site()), len(words), region)
        threads = warp.threads[warp.active]
        NOW.run.note_conflicts(site(), ways(at, 4 * len(words)))
        self.claim(index, threads)
        self.put(index, np.array(words)[:, warp.active].T, threads)

    def load_rows(self, at: np.ndarray) -> np.ndarray:
        """16-byte rows for ldmatrix, eight a matrix: (rows, 4) words."""
        assert not (at % 16).any(), f"{site()}: ldmatrix rows at {at}"
        index = self.index(at, 4)
        for k in range(0, len(at), 8):
            rows = np.unique(at[k : k + 8])
            assert len(np.unique(rows // 16 % 8)) == len(rows), f"{site()}: bank conflict in ldmatrix, rows {rows}"
        self.note_read(index, None)
        np.add.at(self.read_matrices, np.unique(index), 1)
        return self.words[index]


class Barrier:
    """An mbarrier: arrivals and bytes that the current phase still waits for."""

    def __init__(self, count: int) -> None:
        self.count = self.arrivals = count
        self.bytes = 0
        self.phase = 0
        self.copies: list[Any] = []

    def expect(self, bytes_: int) -> None:
        self.bytes += bytes_
        self.arrivals -= 1
        assert self.arrivals >= 0, "more arrivals at a barrier than it counts"

    def wait(self, phase: int) -> None:
        """Let what is on its way land, now at the latest."""
        if self.phase & 1 != phase:
            return
        for land in self.copies:
            self.bytes -= land()
        self.copies = []
        assert self.arrivals == 0 and self.bytes == 0, f"a warp waits forever: {self.arrivals}, {self.bytes} bytes"
        self.arrivals = self.count
        self.phase += 1
