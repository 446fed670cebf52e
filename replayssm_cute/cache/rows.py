"""Rows of a batch of slots: checks, and padding that index operations can carry without masks or syncs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .. import checks

Slots = torch.Tensor | Sequence[int]


@dataclass(frozen=True, slots=True)
class Rows:
    """A batch whose padding rows repeat a live one.

    Index operations of fixed shape have no place to leave a padding row out, and a pool has no spare slot to send it
    to. So each padding row does over again what one live row does: equal values go to one place, and their order does
    not matter. Where no row is live, all name slot 0, and `any_live` tells the caller to write what is there.

    Attributes:
        index: (b,) int64, the row from which to take per-row values.
        any_live: () bool.
    """

    index: torch.Tensor
    any_live: torch.Tensor

    def slots(self, slots: torch.Tensor) -> torch.Tensor:
        """(b,) int64 slots that may be indexed with."""
        return torch.where(self.any_live, slots[self.index], 0).long()


def rows_of(pad_slot_id: int, *slots: torch.Tensor) -> Rows:
    """The rows of one batch; with several slots to a row, one that is padding makes the row padding. b >= 1."""
    live = torch.ones_like(slots[0], dtype=torch.bool)
    for each in slots:
        live &= checks.live_rows(each, pad_slot_id)
    own = torch.arange(live.shape[0], device=live.device)
    return Rows(torch.where(live, own, live.int().argmax()), live.any())


def as_slots(name: str, slots: Slots, device: torch.device, batch: int | None = None) -> torch.Tensor:
    """`slots` as a (b,) int32 or int64 tensor on `device`; ints are copied there (not for use in a graph).

    Raises:
        TypeError, ValueError: a wrong type, dtype, rank, length or device, by name.
    """
    return _vector(name, slots, device, batch, "slots")


def as_counts(name: str, counts: Slots, device: torch.device, batch: int) -> torch.Tensor:
    """Like `as_slots`, for one count a row."""
    return _vector(name, counts, device, batch, "counts")


def _vector(name: str, value: Slots, device: torch.device, batch: int | None, what: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        if not isinstance(value, Iterable):
            raise TypeError(f"{name}: got {type(value).__name__}, expected ints or a tensor of {what}")
        ints = list(value)
        if bad := [v for v in ints if not isinstance(v, int) or isinstance(v, bool)]:
            raise TypeError(f"{name}: got {bad[0]!r}, expected ints or a tensor of {what}")
        value = torch.tensor(ints, dtype=torch.int64, device=device)
    if value.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: got {value.dtype}, expected torch.int32 or torch.int64")
    if value.dim() != 1 or (batch is not None and value.shape[0] != batch):
        expected = "(batch,)" if batch is None else f"({batch},), one for each row"
        raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected {expected}")
    if value.device != device:
        raise ValueError(f"{name}: on device {value.device}, expected the cache's device {device}")
    return value


def values_checked(device: torch.device) -> bool:
    """Whether values may and shall be looked at: on the CPU; with REPLAYSSM_CHECK=1 also on a GPU."""
    if device.type != "cuda":
        return device.type == "cpu"
    from ..compiler import capturing

    return checks.enabled() and not capturing()


def check_range(name: str, values: torch.Tensor, low: int, high: int, rows: torch.Tensor | None = None) -> None:
    """Refuse the first value (of the given rows) outside low..high. Looks at values: see `values_checked`."""
    bad = (values < low) | (values > high)
    if rows is not None:
        bad &= rows
    if bool(bad.any()):
        at = int(torch.nonzero(bad)[0])
        raise ValueError(f"{name}: got {int(values[at])} for row {at}, expected {low}..{high}")


def check_slots(name: str, slots: torch.Tensor, limit: int, live: torch.Tensor, *, distinct: bool = True) -> None:
    """Refuse live slots outside 0..limit-1 and, where they are written, live slots named twice."""
    check_range(name, slots, 0, limit - 1, live)
    if distinct:
        unique, count = torch.unique(slots[live], return_counts=True)
        if bool((count > 1).any()):
            twice = int(unique[count > 1][0])
            raise ValueError(f"{name}: got slot {twice} more than once, expected distinct live slots")


def check_settled(name: str, slots: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """Refuse slots of the cache with an open window: their step may have flushed, and its count is not known yet."""
    lengths = last_tokens[slots.long()]
    if bool((lengths != 0).any()):
        at = int(torch.nonzero(lengths)[0])
        raise ValueError(
            f"{name}: slot {int(slots[at])} has an open window of {int(lengths[at])} tokens, so that its logical "
            f"state is not settled; first call settle(slots, num_accepted)"
        )
