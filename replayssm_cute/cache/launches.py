"""A cache's operations on a GPU: one launch for the cursors of a batch, one for the slots of all layers.

The torch operations of `cursors` and `ReplayCache` are what these kernels mean; the tests hold them to each other.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import Any

import torch

from .. import compiler, target
from . import recipes
from .layout import LayerTensors, Shared
from .recipes import CacheRecipe
from .shapes import TENSORS
from .spec import CacheSpec
from .torch_ops import TorchOps

RECORD_WORDS = 8  # int32 of a planned move: see kernels.moves.Record
MOST_ROWS = 65535  # of a batch whose rows are a dimension of the grid

_log = logging.getLogger("replayssm_cute")

# Kernels whose code is on a device. It gets there with the first launch, which a graph capture cannot hold.
_touched: set[tuple[CacheRecipe, int]] = set()


class Launches:
    """Launches a cache's kernels; the arguments have been checked. No host sync; all of it can be captured.

    Attributes:
        table: (layers, 12) int64, addresses of slot 0 and bytes from slot to slot of a layer's tensors, in the order
            of `shapes.TENSORS`; zeros for those that are not there.
    """

    def __init__(self, spec: CacheSpec, layers: tuple[LayerTensors, ...], shared: Shared, pad_slot_id: int) -> None:
        self.spec = spec
        self.pad_slot_id = pad_slot_id
        self.device = shared.pnat.device
        self._cursors = (shared.ring_start, shared.pnat, shared.last_tokens)
        self._rates = shared.A
        self._kernels: dict[CacheRecipe, compiler.Kernel] = {}
        self._copy, self._reset = recipes.copy(spec), recipes.reset(spec)
        self._fold = recipes.fold(spec) if spec.plain else None
        self._by_torch = TorchOps(spec, layers, shared, pad_slot_id)
        rows = []
        for layer in layers:
            tensors = [getattr(layer, name) for name in TENSORS]
            addresses = [0 if t is None else t.data_ptr() for t in tensors]
            rows.append([*addresses, *(0 if t is None else t.stride(0) * t.element_size() for t in tensors)])
        self.table = torch.tensor(rows, dtype=torch.int64).to(self.device)

    def reset(self, slots: torch.Tensor, zero_state: bool) -> None:
        """Empty rings and no open windows; with `zero_state` checkpoints of zero too. One launch."""
        if zero_state:
            _check_rows("slots", slots)
            self._launch(self._reset, self.table, *self._cursors, *_vector(slots), len(slots), self.pad_slot_id)
        else:
            self._advance(slots, slots, None, emptied=1)

    def commit(self, slots: torch.Tensor, accepted: torch.Tensor, lens: torch.Tensor | None) -> None:
        """Commit windows of T or `lens` tokens. One launch."""
        self._advance(slots, accepted, lens)

    def begin_step(self, slots: torch.Tensor, accepted: torch.Tensor, lens: torch.Tensor | None) -> None:
        """Commit the open windows and open ones of T or `lens` tokens. One launch."""
        self._advance(slots, accepted, lens, deferred=1, opened=1)

    def settle(self, slots: torch.Tensor, accepted: torch.Tensor) -> None:
        """Commit the open windows and leave none open. One launch."""
        self._advance(slots, accepted, None, deferred=1)

    def materialize(self, src: torch.Tensor, dst: torch.Tensor, count: torch.Tensor) -> None:
        """Fold live rows into other slots: a plan of the batch, then one launch for all layers.

        Where the state is not plain (see `CacheSpec.plain`), torch operations do it, layer by layer.
        """
        if self._fold is None:
            _say_slow(self.spec)
            self._by_torch.materialize(src, dst, count)
            return
        records = self._plan(src, dst, count, whole=0)
        self._launch(self._fold, self.table, self._rates, records, len(src))

    def copy(self, src: torch.Tensor, dst: torch.Tensor) -> None:
        """Copy whole slots: a plan of the batch, then one launch for all layers."""
        records = self._plan(src, dst, src, whole=1)
        self._launch(self._copy, self.table, records, len(src))

    def prepare(self) -> None:
        """Compile or load every kernel and put its code on the device, by launches on a padding row."""
        padding = torch.full((1,), -1, dtype=torch.int32, device=self.device)
        self.reset(padding, True)
        self.reset(padding, False)
        self.materialize(padding, padding, padding)
        self.copy(padding, padding)

    def prove(self) -> int:
        """Compare the kernels with the torch operations; see `proof.prove`."""
        from .proof import prove

        return prove(self.spec, self.device)

    # -----------------------------------------------------------------------------------------------

    def _advance(
        self,
        slots: torch.Tensor,
        accepted: torch.Tensor,
        lens: torch.Tensor | None,
        *,
        deferred: int = 0,
        opened: int = 0,
        emptied: int = 0,
    ) -> None:
        given = slots if lens is None else lens
        self._launch(
            recipes.CURSORS, *self._cursors, *_vector(slots), *_vector(accepted), *_vector(given), len(slots),
            self.spec.tokens, self.spec.window, self.pad_slot_id, int(lens is not None), deferred, opened, emptied,
        )  # fmt: skip

    def _plan(self, src: torch.Tensor, dst: torch.Tensor, count: torch.Tensor, whole: int) -> torch.Tensor:
        """Order a batch of moves, and set the destinations' cursors; see kernels.moves."""
        _check_rows("src_slots", src)
        records = torch.empty((2 * len(src), RECORD_WORDS), dtype=torch.int32, device=self.device)
        self._launch(
            recipes.MOVE_PLAN, *self._cursors, records, *_vector(src), *_vector(dst), *_vector(count), len(src),
            self.pad_slot_id, whole,
        )  # fmt: skip
        return records

    def _launch(self, recipe: CacheRecipe, *args: Any) -> None:
        """Launch on the current stream of the cache's device."""
        kernel = self._kernels.get(recipe) or self._ready(recipe)
        if self.device.index == torch.cuda.current_device():
            kernel(*args)
        else:
            with torch.cuda.device(self.device):
                kernel(*args)

    def _ready(self, recipe: CacheRecipe) -> compiler.Kernel:
        """The kernel of a recipe before this cache's first launch of it."""
        name = (recipe, self.device.index)
        if name not in _touched and compiler.capturing():
            raise compiler.not_ready(recipe)
        with torch.cuda.device(self.device) if self.device.type == "cuda" else contextlib.nullcontext():
            kernel = compiler.load(recipe, target.of_device(self.device.index))
        self._kernels[recipe] = kernel
        _touched.add(name)
        return kernel


@functools.cache
def _say(kinds: str) -> None:
    _log.warning(
        "materialize of %s states runs as torch operations, layer by layer, which takes longer than the kernel that "
        "f32, bf16 and f16 states have",
        kinds,
    )


def _say_slow(spec: CacheSpec) -> None:
    """Say once a process and kind of state that no kernel folds it."""
    _say(spec.problem().kinds)


def _check_rows(name: str, slots: torch.Tensor) -> None:
    if len(slots) > MOST_ROWS:
        raise ValueError(f"{name}: got {len(slots)} rows, expected at most {MOST_ROWS} in one call on a GPU")


def _vector(t: torch.Tensor) -> tuple[int, int, int]:
    """Address, 4-byte words from one integer to the next, and whether they are int64: see kernels.index.Vector."""
    wide = t.element_size() // 8
    return t.data_ptr(), t.stride(0) * (1 + wide), wide
