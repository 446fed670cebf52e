"""Several processes of one sweep, as torchrun starts them: who does what, and how they meet.

A rank measures whole cells on the CUDA device of its LOCAL_RANK, so that no decision compares times of two GPUs, and
compiles every size-th candidate. Nothing is handed out at run time: who does what follows from the plan and the number
of ranks. Ranks meet a few times (`Ranks.gather`), with a time limit, and fail together: what one of them raises, all
raise. A rank that is lost ends the run of the others; the journals keep what all of them had finished.

Several nodes: give `--out` a folder that all of them see, and REPLAYSSM_CACHE_DIR too (else a node compiles
what it measures itself, in its measuring process); start torchrun on each node as usual (`--nnodes`, `--rdzv-backend`,
`--rdzv-endpoint`). All ranks need the same plan, kernels and kind of GPU, and the sweep refuses to start otherwise.
Without torchrun there is one rank, which meets nobody, and no process group.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

from .errors import SweepError, UsageError

T = TypeVar("T")

GRACE_S = 600.0  # a rank may finish a cell, its race and its peers after the budget has ended
_EXCHANGE_S = 300.0  # for ranks that are known to be there
_ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_RERUN = "what was finished is in the journals, and the same command goes on from there"


class RankLost(SweepError):
    """Another rank is gone, or this one is being ended because of it."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among the processes of the sweep.

    Attributes:
        rank, size: of all processes.
        local_rank, local_size: of those on this node; `local_rank` is the CUDA device.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def of_environment(cls) -> Ranks:
        """What torchrun says in the environment; one rank where it did not start this process.

        Raises:
            UsageError: if the variables are there and make no sense.
        """
        if not all(name in os.environ for name in _ENVIRONMENT):
            return cls()
        size = os.environ["WORLD_SIZE"]
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        texts = [os.environ.get(name, size) for name in names]
        if not all(t.isdecimal() for t in texts):
            raise UsageError(f"{', '.join(names)}: got {', '.join(map(repr, texts))}, expected ints >= 0")
        found = cls(*map(int, texts))
        if not (found.rank < found.size and found.local_rank < found.local_size <= found.size):
            raise UsageError(f"{', '.join(names)}: got {', '.join(texts)}, expected ranks below their sizes")
        return found

    @property
    def several(self) -> bool:
        """Whether there is anybody to meet."""
        return self.size > 1

    @property
    def first(self) -> bool:
        """Whether this is the rank that prints and writes."""
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """Every size-th item, from this rank's number on."""
        return list(items[self.rank :: self.size])

    def gather(self, what: str, make: Callable[[], T], wait_s: Callable[[], float] | None = None) -> list[T]:
        """What `make` gives on every rank, by rank, on every rank.

        Args:
            what: names the meeting in messages.
            make: this rank's part; its value must pickle.
            wait_s: seconds to wait for the others, asked for when this rank is done.

        Raises:
            SweepError: on all ranks, if `make` raised on any (with one rank, whatever it raised).
            RankLost: if a rank does not come.
        """
        if not self.several:
            return [make()]
        import torch.distributed as dist

        mine: tuple[T | None, str | None] = (None, None)
        try:
            mine = (make(), None)
        except RankLost:
            raise
        except (SweepError, OSError) as e:
            mine = (None, str(e))
        except Exception as e:  # a fault of the program: the others need only know of it
            traceback.print_exc()
            mine = (None, f"{type(e).__name__}: {e}")
        found: list[Any] = [None] * self.size
        try:
            limit = datetime.timedelta(seconds=max(1.0, wait_s() if wait_s is not None else _EXCHANGE_S))
            dist.monitored_barrier(timeout=limit, wait_all_ranks=True)
            dist.all_gather_object(found, mine)
        except RuntimeError as e:
            raise RankLost(f"a rank was lost before the end of {what} ({_short(e)}); {_RERUN}") from e
        errors: dict[str, list[int]] = {}
        for rank, (_, error) in enumerate(found):
            if error is not None:
                errors.setdefault(error, []).append(rank)
        if errors:
            raise SweepError("; ".join(f"rank {', '.join(map(str, r))}: {text}" for text, r in errors.items()))
        return [value for value, _ in found]

    def agree(self, facts: Mapping[str, Any]) -> None:
        """See that every rank has the same facts.

        Raises:
            SweepError: naming the first rank and fact that differ.
        """
        first, *others = self.gather("the start", lambda: dict(facts))
        for rank, theirs in enumerate(others, 1):
            for name, value in first.items():
                if theirs.get(name) != value:
                    raise SweepError(
                        f"rank {rank} differs from rank 0 in its {name}: got {theirs.get(name)}, expected {value}"
                    )

    @contextlib.contextmanager
    def joined(self) -> Iterator[None]:
        """Be in touch with the other ranks; a process that is told to end says why it does.

        Raises:
            RankLost: if not all ranks come, or one is lost meanwhile.
        """
        if not self.several:
            yield
            return
        import torch.distributed as dist

        def told(number: int, frame: FrameType | None) -> None:
            raise RankLost(f"told to end (SIGTERM), as torchrun does when another rank has failed; {_RERUN}")

        before = signal.signal(signal.SIGTERM, told)
        try:
            try:
                dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_EXCHANGE_S))
            except RuntimeError as e:
                raise RankLost(f"not all {self.size} ranks came ({_short(e)})") from e
            yield
        finally:
            # explicitly, also after a failure: left to the interpreter's end, its threads may abort the process
            if dist.is_initialized():
                with contextlib.suppress(RuntimeError):
                    dist.destroy_process_group()
            signal.signal(signal.SIGTERM, before)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split()).split(" This is typically")[0][:300]
