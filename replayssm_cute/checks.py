"""Checks of values that live in tensors: slots, cursors, row lengths. On a GPU they cost a synchronization."""

from __future__ import annotations

import os

import torch

from .packing import lengths


def enabled() -> bool:
    """Whether REPLAYSSM_CHECK asks for these checks on CUDA tensors."""
    return os.environ.get("REPLAYSSM_CHECK", "0") not in ("", "0")


def live_rows(slots: torch.Tensor, pad_slot_id: int) -> torch.Tensor:
    """(batch,) bool: which rows are no padding. Compared as int64: torch wraps the id into the indices' type."""
    slots = slots.long()
    return (slots != pad_slot_id) & (slots >= 0)


def check_values(
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    state_batch_indices: torch.Tensor | None,
    pad_slot_id: int,
    *,
    batch: int,
    tokens: int,
    window: int,
    cu_seqlens: torch.Tensor | None = None,
    total: int = 0,
) -> None:
    """Refuse slots outside the cache, live slots named twice, and cursors and row lengths outside their ranges.

    Args:
        cu_seqlens, total: of a ragged call, and the number of packed tokens that it has.

    Raises:
        ValueError: naming the argument, the first bad row, its value and what was expected.
    """
    if cu_seqlens is not None:
        _check_packing(cu_seqlens, tokens, total)
    slots = ring_start.shape[0]
    if state_batch_indices is None:
        live = torch.arange(batch, device=ring_start.device)
        live = rows = live[live_rows(live, pad_slot_id)]
    else:
        rows = torch.nonzero(live_rows(state_batch_indices, pad_slot_id)).flatten()
        live = state_batch_indices[rows].long()
        _refuse(
            "state_batch_indices", live, rows, live >= slots, f"a slot below {slots}, a negative one or pad_slot_id"
        )
        unique, count = torch.unique(live, return_counts=True)
        if bool((count > 1).any()):
            twice = int(unique[count > 1][0])
            first, second = rows[live == twice][:2].tolist()
            raise ValueError(
                f"state_batch_indices: got slot {twice} more than once, for batch rows {first} and "
                f"{second}, expected distinct live slots"
            )
    start, pnat = ring_start[live], prev_num_accepted_tokens[live]
    rings = window + tokens
    _refuse("ring_start", start, rows, (start < 0) | (start >= rings), f"0..{rings - 1}")
    _refuse("prev_num_accepted_tokens", pnat, rows, (pnat < 0) | (pnat > window), f"0..{window}")


def _check_packing(cu_seqlens: torch.Tensor, tokens: int, total: int) -> None:
    rows = torch.arange(cu_seqlens.shape[0] - 1, device=cu_seqlens.device)
    _refuse("cu_seqlens", cu_seqlens[:1], rows, cu_seqlens[:1] != 0, "0, the first token")
    given = lengths(cu_seqlens)
    expected = f"0..{tokens} (max_seqlen), that is, entries that never decrease"
    _refuse("cu_seqlens", given, rows, (given < 0) | (given > tokens), expected, "a length of ")
    ends = cu_seqlens[1:]
    _refuse("cu_seqlens", ends, rows, ends > total, f"at most {total}, the tokens of x", "an end of ")


def _refuse(
    name: str, values: torch.Tensor, rows: torch.Tensor, bad: torch.Tensor, expected: str, what: str = ""
) -> None:
    if bool(bad.any()):
        at = int(torch.nonzero(bad)[0])
        raise ValueError(f"{name}: got {what}{int(values[at])} for batch row {int(rows[at])}, expected {expected}")
