"""The ring of the conv's raw inputs: a slot's state of the conv, under the cursors of its other rings.

`conv_cache` is (slots, R, channels): row `(ring_start + pnat + t) mod R` gets the raw (not yet convolved) x, B and C of
a step's token t, as `x_cache` gets the convolved x. So rejected tokens cost nothing here either: the next step writes
over their rows. What a conv of four taps needs lies in the three rows before `ring_start + pnat`. They are the last
inputs that were accepted, whether a step has flushed or not, since a flush moves `ring_start` by just as much as it
takes from pnat. A step touches T + 3 <= R rows, hence W >= 3; there are no more rows than other rings have. Before a
request's first token the three rows are zeros.

The functions here are for between steps: fixed shapes, nothing read by the host, so that CUDA graphs can hold them.
"""

from __future__ import annotations

import torch

from .. import ring
from ..cache.rows import rows_of
from .problem import HISTORY


def bytes_per_slot(channels: int, window: int, tokens: int, io_bytes: int = 2) -> int:
    """Bytes of one slot's ring of one layer, beside those of `ring.bytes_per_slot`."""
    return ring.ring_rows(window, tokens) * channels * io_bytes


def history_rows(start: torch.Tensor, position: torch.Tensor, rows: int, depth: int = HISTORY) -> torch.Tensor:
    """(b, depth) int64: the ring rows of the `depth` inputs before live row `position`, oldest first."""
    before = torch.arange(-depth, 0, device=start.device)
    return (start.long()[:, None] + position.long()[:, None] + before) % rows


def history(
    conv_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    slots: torch.Tensor,
    count: torch.Tensor | None = None,
    pad_slot_id: int = -1,
) -> torch.Tensor:
    """The last three raw inputs of each slot: what `set_history` takes, and what engines call the conv state.

    Args:
        conv_cache: (slots, R, channels), or (layers, slots, R, channels) for all layers at once.
        ring_start, prev_num_accepted_tokens: (slots,) cursors.
        slots: (b,) int32 or int64; padding rows give those of another row, or of slot 0.
        count: (b,) live rows to count, as in `ReplayCache.materialize`; None counts all. With T tokens a step, rows
            before the third of a fold of less than 3 - T rows may be overwritten already: count >= 3 - T.

    Returns:
        (b, 3, channels), oldest first, in conv_cache's dtype; (layers, b, 3, channels) of all layers.
    """
    safe = rows_of(pad_slot_id, slots).slots(slots)
    position = prev_num_accepted_tokens[safe] if count is None else count
    return conv_cache[..., safe[:, None], history_rows(ring_start[safe], position, conv_cache.shape[-2]), :]


def set_history(
    conv_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    slots: torch.Tensor,
    inputs: torch.Tensor | None = None,
    pad_slot_id: int = -1,
) -> None:
    """Write the three raw inputs before each slot's next token, after its cursors were set.

    Call it after `ReplayCache.reset` (inputs None: zeros, the start of a request), after a prefill handoff, after
    `materialize` and after an import, with what `history` gave for the source.

    Args:
        conv_cache, ring_start, prev_num_accepted_tokens, slots, pad_slot_id: as in `history`; live slots are distinct,
            and padding rows change nothing.
        inputs: (b, n, channels), or with a dimension of layers before, oldest first; zeros stand for tokens before the
            first one. n is 3, or more where live rows go along, at most R.
    """
    rows = rows_of(pad_slot_id, slots)
    safe = rows.slots(slots)
    depth = HISTORY if inputs is None else inputs.shape[-2]
    at = history_rows(ring_start[safe], prev_num_accepted_tokens[safe], conv_cache.shape[-2], depth)
    place = (..., safe[:, None], at, slice(None))
    values = conv_cache.new_zeros(()) if inputs is None else inputs.to(conv_cache.dtype)[..., rows.index, :, :]
    conv_cache[place] = torch.where(rows.any_live, values, conv_cache[place])
