"""Who is timed beside whom."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from replayssm_cute import calls


@dataclass(frozen=True, slots=True)
class Entrant:
    """One that is timed.

    Attributes:
        name: "ours", a peer's, or "floor".
        variant: its config or arguments in words.
        bind: a call without arguments that launches it on the given tensors, with nothing left to prepare.
        writes_outputs: False for a kernel that is no step and leaves `out` alone.
    """

    name: str
    variant: str
    bind: Callable[[calls.Call], Callable[[], object]]
    writes_outputs: bool = True

    def run(self, call: calls.Call) -> None:
        """Launch it on a call's tensors."""
        self.bind(call)()
