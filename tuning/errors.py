"""How sweeps fail."""

from __future__ import annotations


class UsageError(ValueError):
    """A sweep that was asked for something that does not go together; nothing has been done."""


class Interrupted(RuntimeError):
    """A sweep that was told to end early, after it has written what it had; the message says what that is."""


class SweepError(RuntimeError):
    """A sweep that cannot go on; the message says why and what to do."""
