"""What every part of a sweep needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console

from .journal import Journal
from .plan import TuningPlan
from .progress import Budget
from .ranks import GRACE_S, Ranks

T = TypeVar("T")


@dataclass(slots=True)
class Context:
    """What every part of a sweep needs.

    Attributes:
        plan: what is tuned.
        out: folder of journal, results and tables.
        journal: results so far.
        budget: time that may be spent.
        console: for progress.
        workers: compile processes.
        retry: try again what the journal says has failed.
        ranks: this process among those that share the work.
    """

    plan: TuningPlan
    out: Path
    journal: Journal
    budget: Budget
    console: Console
    workers: int
    retry: bool = False
    ranks: Ranks = field(default_factory=Ranks)

    def known(self, key: dict[str, Any]) -> dict[str, Any] | None:
        """The journal's result for these facts; a failure counts as unknown where it is to be retried."""
        found = self.journal.get(key)
        return None if found is not None and self.retry and "failed" in found else found

    def gather(self, what: str, make: Callable[[], T]) -> list[T]:
        """`Ranks.gather` that waits as long as the others may still work within the budget."""
        return self.ranks.gather(what, make, lambda: self.budget.left + GRACE_S)

    def only_first(self, what: str, make: Callable[[], T]) -> T:
        """What `make` gives on rank 0, on every rank."""
        of_first = self.gather(what, lambda: [make()] if self.ranks.first else [])[0]
        return of_first[0]
