"""Order among warps that meet at named barriers and mbarriers: clocks, and shared memory that is checked by them.

Every warp, and every mbarrier for what is done asynchronously behind it, is an agent with a clock. A warp knows how far
the others have come from the barriers that it has passed; what another agent did is in order if the warp knows of it.
Lanes of one warp are in order, as in `memory`, where a barrier of the warp stands between them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .memory import ASYNC, MANY, NOBODY, Shared, site
from .values import NOW, POISON, Warp

AGENTS = 32
TENSOR_CORES = AGENTS - 1


class ClockedWarp(Warp):
    """A warp that knows of the others."""

    def __init__(self, index: int, inputs_ready: bool) -> None:
        super().__init__(index, inputs_ready)
        self.clock = np.zeros(AGENTS, np.int64)
        self.clock[index] = 1

    def learn(self, clock: np.ndarray) -> None:
        self.clock = np.maximum(self.clock, clock)

    def tell(self) -> np.ndarray:
        """What others learn of this warp now; what it does from here on is later."""
        told = self.clock.copy()
        self.clock[self.index] += 1
        return told


class MBarrier:
    """An mbarrier: pending arrivals and bytes of its phase, and what completes it by itself, at the last moment."""

    def __init__(self, count: int, agent: int) -> None:
        self.count = self.arrivals = count
        self.agent = agent
        self.bytes = self.phase = self.tick = 0
        self.pending: list[Callable[[], int]] = []  # each gives the bytes that it brought, -1 for an arrival
        self.clock = np.zeros(AGENTS, np.int64)

    def arrive(self, warp: ClockedWarp) -> None:
        self.clock = np.maximum(self.clock, warp.tell())
        self._count_down()

    def _count_down(self) -> None:
        self.arrivals -= 1
        assert self.arrivals >= 0, "more arrivals at a barrier than it counts"

    def passes(self, phase: int) -> bool:
        """Whether a warp that waits for the phase may go on; lets happen what is on its way."""
        assert phase in (0, 1)
        if self.phase & 1 != phase:
            return True
        for land in self.pending:
            self.tick += 1
            self.clock[self.agent] = self.tick
            brought = land()
            if brought < 0:
                self._count_down()
            else:
                self.bytes -= brought
        self.pending = []
        if self.arrivals or self.bytes:
            return False
        self.arrivals = self.count
        self.phase += 1
        return True


class ClockedShared(Shared):
    """Shared memory whose accesses are held to the agents' clocks."""

    def __init__(self, total: int, regions: dict[str, int]) -> None:
        super().__init__(total, regions)
        n = len(self.words)
        self.write_clock = np.zeros(n, np.int64)
        self.read_clock = np.zeros((n, AGENTS), np.int64)
        self.own_read_epoch = np.full((n, 8), -1, np.int64)
        self.busy = np.zeros(n, np.int32)  # MMAs under way that may still read the word

    def _written_before(self, index: np.ndarray, threads: np.ndarray | None) -> np.ndarray:
        """Whether the last write is in order before what the running warp does."""
        warp = NOW.warp
        agent = self.writer_warp[index]
        mine = self.write_epoch[index] < warp.epoch
        if threads is not None:
            mine |= self.writer[index] == threads[:, None]
        return np.where(agent == warp.index, mine, warp.clock[agent] >= self.write_clock[index])

    def _may_read(self, index: np.ndarray, threads: np.ndarray | None) -> None:
        assert not self.in_flight[index].any(), f"{site()}: a word is read while a copy to it is on its way"
        assert (self.writer[index] != NOBODY).all(), f"{site()}: a word is read and was never written"
        assert self._written_before(index, threads).all(), f"{site()}: no barrier after the write"

    def note_read(self, index: np.ndarray, threads: np.ndarray | None) -> None:
        warp = NOW.warp
        self._may_read(index, threads)
        thread = np.broadcast_to(MANY if threads is None else threads[:, None], index.shape)
        since = self.own_read_epoch[index, warp.index] == warp.epoch
        self.reader[index] = np.where(since & (self.reader[index] != thread), MANY, thread)
        self.read_clock[index, warp.index] = warp.clock[warp.index]
        self.own_read_epoch[index, warp.index] = warp.epoch

    def claim(self, index: np.ndarray, threads: np.ndarray | None) -> None:
        warp = NOW.warp
        assert not self.in_flight[index].any(), f"{site()}: a word is written while a copy to it is on its way"
        assert not self.busy[index].any(), f"{site()}: a word is written while an MMA may read it"
        assert threads is not None or not self.unfenced[index].any(), f"{site()}: a bulk copy over unfenced words"
        assert len(np.unique(index)) == index.size, f"{site()}: two lanes write one word"
        fresh = self.writer[index] == NOBODY
        assert (fresh | self._written_before(index, threads)).all(), f"{site()}: written over"
        reads = self.read_clock[index]
        reads[..., warp.index] = 0
        assert (reads <= warp.clock).all(), f"{site()}: written while others may read it"
        alone = False if threads is None else self.reader[index] == threads[:, None]
        own = self.own_read_epoch[index, warp.index]
        assert ((own < warp.epoch) | alone).all(), f"{site()}: written while others may read it"

    def put(self, index: np.ndarray, words: np.ndarray, threads: np.ndarray | int) -> None:
        super().put(index, words, threads)
        self.write_clock[index] = NOW.warp.clock[NOW.warp.index]

    def land(self, index: np.ndarray, words: np.ndarray, barrier: MBarrier) -> None:
        """A bulk copy's words arrive; warps that pass the barrier know of them."""
        self.in_flight[index] = False
        self.words[index] = words
        self.writer[index], self.writer_warp[index] = ASYNC, barrier.agent
        self.write_clock[index] = barrier.tick
        self.unfenced[index] = False
        self.written[index] += 1

    def lend(self, index: np.ndarray, may_be_unwritten: bool) -> None:
        """An MMA that the running warp starts will read words."""
        written = index[self.writer[index] != NOBODY] if may_be_unwritten else index
        self._may_read(written[:, None], None)
        assert not self.unfenced[written].any(), "an MMA reads what threads wrote, without a fence"
        self.busy[index] += 1

    def take(self, index: np.ndarray, tick: int) -> np.ndarray:
        """The MMA reads them; warps that pass a barrier which was told of it know that it has."""
        self.busy[index] -= 1
        self.read_clock[index, TENSOR_CORES] = tick
        return np.where(self.writer[index] == NOBODY, POISON, self.words[index])
