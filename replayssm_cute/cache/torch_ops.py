"""A cache's operations in plain torch: what they mean, on any device. Fixed shapes, no host syncs."""

from __future__ import annotations

import torch

from . import cursors
from .fold import fold
from .layout import LayerTensors, Shared
from .rows import Rows, rows_of
from .shapes import ZERO_STATE
from .spec import CacheSpec
from .stored import as_bits, encode


class TorchOps:
    """The operations of `Launches`; arguments have been checked, and batches have at least one row."""

    def __init__(self, spec: CacheSpec, layers: tuple[LayerTensors, ...], shared: Shared, pad_slot_id: int) -> None:
        self.spec = spec
        self.layers = layers
        self.shared = shared
        self.pad_slot_id = pad_slot_id
        self._bits = [{name: as_bits(t) for name, t in layer.named().items()} for layer in layers]

    def reset(self, slots: torch.Tensor, zero_state: bool) -> None:
        """Empty rings and no open windows; with `zero_state` zeroed checkpoints too."""
        rows, slot = self._rows(slots)
        cursors.clear(self.shared, rows, slot)
        if zero_state:
            for bits in self._bits:
                for name in bits.keys() & ZERO_STATE:
                    old = bits[name][slot]
                    bits[name].index_copy_(0, slot, torch.where(rows.any_live, ZERO_STATE[name], old))

    def commit(self, slots: torch.Tensor, accepted: torch.Tensor, lens: torch.Tensor | None) -> None:
        """Commit windows of T or `lens` tokens."""
        rows, slot = self._rows(slots)
        ran = torch.where(rows.any_live, self._lengths(rows, lens), 0)
        cursors.advance(self.shared, self.spec, slot, accepted[rows.index], ran)
        cursors.track(self.shared, rows, slot, 0)

    def begin_step(self, slots: torch.Tensor, accepted: torch.Tensor, lens: torch.Tensor | None) -> None:
        """Commit the open windows and open ones of T or `lens` tokens."""
        rows, slot = self._rows(slots)
        self._close(rows, slot, accepted)
        cursors.track(self.shared, rows, slot, self._lengths(rows, lens))

    def settle(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        """Commit the open windows and leave none open."""
        rows, slot = self._rows(slots)
        self._close(rows, slot, accepted)
        cursors.track(self.shared, rows, slot, 0)

    def materialize(self, src: torch.Tensor, dst: torch.Tensor, count: torch.Tensor) -> None:
        """Fold live rows into other slots, in f32, rounded once; scales and read copies are made anew.

        Where nothing is folded, bits are copied. Temporaries: a few times the batch's states of one layer, in f32.
        """
        rows, src, dst = self._pair(src, dst)
        start, live = self.shared.ring_start[src], self.shared.pnat[src]
        wanted = torch.minimum(count[rows.index].clamp(min=0), live.to(count.dtype)).to(live.dtype)
        folds = torch.where(rows.any_live, wanted, 0)
        for i, layer in enumerate(self.layers):
            folded = fold(layer, self.shared.A[i], src, start, folds, self.spec.window)
            for name, made in encode(self.spec, folded).items():
                bits = self._bits[i][name]
                exact = (folds == 0).view(-1, *(1 for _ in made.shape[1:]))
                bits.index_copy_(0, dst, torch.where(exact, bits[src], as_bits(made)))
        cursors.clear(self.shared, rows, dst)

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole slots. A batch without live rows copies slot 0 to itself."""
        _, src, dst = self._pair(src, dst)
        shared = (self.shared.ring_start, self.shared.pnat, self.shared.last_tokens)
        for t in (*(t for layer in self._bits for t in layer.values()), *shared):
            t.index_copy_(0, dst, t[src])

    def prepare(self) -> None:
        """Torch operations need no preparation."""

    def prove(self) -> int:
        """They are what kernels are compared with."""
        return 0

    # -----------------------------------------------------------------------------------------------

    def _rows(self, slots: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        rows = rows_of(self.pad_slot_id, slots)
        return rows, rows.slots(slots)

    def _pair(self, src: torch.Tensor, dst: torch.Tensor) -> tuple[Rows, torch.Tensor, torch.Tensor]:
        rows = rows_of(self.pad_slot_id, src, dst)
        return rows, rows.slots(src), rows.slots(dst)

    def _lengths(self, rows: Rows, lens: torch.Tensor | None) -> torch.Tensor:
        """(b,) int32 lengths of the rows' windows: T, or `lens` within 0..T."""
        if lens is None:
            return torch.full_like(rows.index, self.spec.tokens, dtype=torch.int32)
        return lens[rows.index].clamp(0, self.spec.tokens).int()

    def _close(self, rows: Rows, slot: torch.Tensor, accepted: torch.Tensor) -> None:
        """Commit the open windows."""
        last = torch.where(rows.any_live, self.shared.last_tokens[slot], 0)
        cursors.advance(self.shared, self.spec, slot, accepted[rows.index], last)
