"""Ctrl-C ends a sweep early instead of throwing away what it has: the budget ends, and the table is written."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from .progress import Budget


@contextlib.contextmanager
def ends(budget: Budget) -> Iterator[None]:
    """While this is open, the first SIGINT ends the budget; from then on it is Python's own again.

    Only in the main thread, which alone gets signals; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def told(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        budget.end()
        print("interrupted: writing what there is; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    before = signal.signal(signal.SIGINT, told)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
