"""Packed ragged windows: row i of the batch owns tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1 of one long row."""

from __future__ import annotations

import torch


def lengths(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """(batch,) int64: T_i, the tokens of each row."""
    return cu_seqlens.long().diff()


def uniform(batch: int, tokens: int, device: torch.device) -> torch.Tensor:
    """(batch + 1,) int32: cu_seqlens of rows that all have `tokens` tokens."""
    return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device)


def places(cu_seqlens: torch.Tensor, max_seqlen: int, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens of each row lie.

    Returns:
        (batch, max_seqlen) int64 positions in 0..total-1, and (batch, max_seqlen) bool: whether the row has a token
        there. Positions of tokens that a row has not are valid ones without meaning.
    """
    token = torch.arange(max_seqlen, device=cu_seqlens.device)
    place = cu_seqlens[:-1, None].long() + token
    return place.clamp(max=total - 1), token < lengths(cu_seqlens)[:, None]
