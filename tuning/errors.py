"""How sweeps fail."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class UsageError(ValueError):
    """A sweep that was asked for something that does not go together; nothing has been done."""


class Interrupted(RuntimeError):
    """A sweep that was told to end early, after it has written what it had; the message says what that is.

    Attributes:
        tables: the tables that were written.
    """

    def __init__(self, message: str, tables: Sequence[Path] = ()) -> None:
        super().__init__(message)
        self.tables = list(tables)


class SweepError(RuntimeError):
    """A sweep that cannot go on; the message says why and what to do."""
