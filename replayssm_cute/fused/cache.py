"""LayerCache: a ReplayCache and the rings of its layers' convs, taken through a slot's life together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import checks, dtypes, ring
from ..cache import CacheSpec, LogicalState, ReplayCache
from ..cache.rows import Slots, as_counts, as_slots, rows_of, values_checked
from ..problem import ROW_ALIGN
from . import conv_ring
from .problem import HISTORY


@dataclass(frozen=True, slots=True)
class LayerState:
    """What slots hold, free of window, ring phase and device.

    Attributes:
        logical: checkpoints and live rows.
        inputs: (layers, n, m, channels) on the CPU: the last raw inputs of the convs up to the last live row, oldest
            first; m >= 3.
    """

    logical: LogicalState
    inputs: torch.Tensor


class LayerCache:
    """All that `decode_step` keeps for the layers that share slots; made by `allocate`, or around a ReplayCache.

    Cursors are the ReplayCache's, and so commit, begin_step and settle are called on it. What moves or empties slots
    goes through here, and does to the conv's rings what it does to the others. Arguments and errors are those of the
    ReplayCache's operations of the same names, which can be captured in CUDA graphs where those can: the rings' part is
    in torch operations of fixed shapes, for all layers at once.

    Attributes:
        cache: the ReplayCache.
        conv: (layers, slots, R, channels), the cache's input dtype.
    """

    def __init__(self, cache: ReplayCache, conv: torch.Tensor) -> None:
        spec = cache.spec
        shape = (spec.layers, cache.slots, ring.ring_rows(spec.window, spec.tokens), channels_of(spec))
        if not isinstance(conv, torch.Tensor):
            raise TypeError(f"conv: got {type(conv).__name__}, expected a torch.Tensor")
        if tuple(conv.shape) != shape or conv.device != cache.device:
            raise ValueError(
                f"conv: got shape {tuple(conv.shape)} on {conv.device}, expected {shape} (layers, slots, R, channels) "
                f"on {cache.device}"
            )
        if conv.dtype != dtypes.TORCH[spec.io_dtype]:
            raise TypeError(f"conv: got {conv.dtype}, expected {dtypes.TORCH[spec.io_dtype]}, the cache's input dtype")
        size = conv.element_size()
        if conv.stride(-1) != 1 or any(s * size % ROW_ALIGN for s in (*conv.stride()[:-1], conv.data_ptr() // size)):
            raise ValueError(
                f"conv: got strides {conv.stride()}, expected contiguous rows aligned to {ROW_ALIGN} bytes"
            )
        if spec.window < HISTORY:
            raise ValueError(f"window: got W = {spec.window}, expected at least {HISTORY}, which the conv needs")
        self.cache, self.conv = cache, conv

    @classmethod
    def allocate(
        cls,
        spec: CacheSpec,
        slots: int,
        device: torch.device | str = "cuda",
        *,
        A: Sequence[torch.Tensor] | None = None,
        pad_slot_id: int = -1,
    ) -> LayerCache:
        """A zeroed cache; arguments as in `ReplayCache.allocate`. A slot takes `bytes_per_slot(spec)` bytes."""
        cache = ReplayCache.allocate(spec, slots, device, A=A, pad_slot_id=pad_slot_id)
        shape = (spec.layers, slots, spec.ring_rows, channels_of(spec))
        return cls(cache, torch.zeros(shape, dtype=dtypes.TORCH[spec.io_dtype], device=cache.device))

    def step_args(self, layer: int) -> dict[str, torch.Tensor]:
        """The caches and cursors of a layer, by `decode_step`'s names."""
        return {**self.cache.step_args(layer), "conv_cache": self.conv[layer]}

    def reset(self, slots: Slots, *, zero_state: bool = True) -> None:
        """Make slots new: no live rows, a logical state of zero, and zeros before the conv's first input."""
        slots = self._slots("slots", slots)
        self.cache.reset(slots, zero_state=zero_state)
        if len(slots):
            self._set(slots, None)

    def prefill_handoff(
        self, slots: Slots, states: torch.Tensor | Sequence[torch.Tensor], inputs: torch.Tensor
    ) -> None:
        """Put a prefill's final states and last raw conv inputs into slots.

        Args:
            slots, states: as in `ReplayCache.prefill_handoff`.
            inputs: (layers, b, 3, channels), oldest first; zeros stand before the first token of a short prompt.
        """
        slots = self._slots("slots", slots)
        shape = (self.cache.spec.layers, len(slots), HISTORY, self.conv.shape[-1])
        if not isinstance(inputs, torch.Tensor):
            raise TypeError(f"inputs: got {type(inputs).__name__}, expected a torch.Tensor")
        if tuple(inputs.shape) != shape or inputs.device != self.cache.device:
            raise ValueError(
                f"inputs: got shape {tuple(inputs.shape)} on {inputs.device}, expected {shape} on {self.cache.device}"
            )
        self.cache.prefill_handoff(slots, states)
        if len(slots):
            self._set(slots, inputs)

    def materialize(self, src_slots: Slots, dst_slots: Slots, count: Slots) -> None:
        """Fold the first `count` live rows of each source into a destination, whose conv goes on from there.

        The conv needs the three inputs before that point, and with T of 1 or 2 a step may have written over the older
        ones: count is at least 3 - T, or all live rows. A smaller one is refused where values are checked, elsewhere
        undefined.
        """
        src, dst = self._slots("src_slots", src_slots), self._slots("dst_slots", dst_slots)
        wanted = as_counts("count", count, self.cache.device, len(src))
        pad, live = self.cache.pad_slot_id, self.cache.pnat
        both = self._both(src, dst)
        inputs = None
        if len(src) and len(src) == len(dst):
            safe = rows_of(pad, src, dst).slots(src).clamp(0, self.cache.slots - 1)
            clamped = torch.minimum(wanted.clamp(min=0), live[safe])
            if values_checked(self.cache.device):
                self._check_counts(clamped, live[safe], both(src))
            inputs = conv_ring.history(self.conv, self.cache.ring_start, live, both(src), clamped, pad)
        self.cache.materialize(src, dst, wanted)
        if inputs is not None:
            self._set(both(dst), inputs)

    def copy(self, src_slots: Slots, dst_slots: Slots) -> None:
        """Copy whole slots bit for bit."""
        src, dst = self._slots("src_slots", src_slots), self._slots("dst_slots", dst_slots)
        self.cache.copy(src, dst)
        if not len(src):
            return
        rows = rows_of(self.cache.pad_slot_id, src, dst)
        source, target = rows.slots(src), rows.slots(dst)
        self.conv[:, target] = torch.where(rows.any_live, self.conv[:, source], self.conv[:, target])

    def export_slots(self, slots: Slots) -> LayerState:
        """The states of slots as CPU tensors. Synchronizes; the cache is unchanged."""
        slots = self._slots("slots", slots)
        logical = self.cache.export_slots(slots)
        rows = self.conv.shape[-2]
        index = slots.long()
        depth = min(rows, HISTORY + self.cache.spec.window)
        at = conv_ring.history_rows(self.cache.ring_start[index], self.cache.pnat[index], rows, depth)
        return LayerState(logical, self.conv[:, index[:, None], at].cpu())

    def import_slots(self, slots: Slots, state: LayerState) -> None:
        """Put exported states into slots, of another W, T, ring phase or state dtype too. Synchronizes."""
        if not isinstance(state, LayerState):
            raise TypeError(f"state: got {type(state).__name__}, expected LayerState")
        expected = (self.cache.spec.layers, len(state.logical), self.conv.shape[-1])
        given = state.inputs.shape
        if len(given) != 4 or (given[0], given[1], given[3]) != expected or given[2] < HISTORY:
            raise ValueError(f"state: got inputs of shape {tuple(given)}, expected (layers, n, m >= 3, channels) with "
                             f"(layers, n, channels) = {expected}")  # fmt: skip
        if state.inputs.dtype != self.conv.dtype:
            raise TypeError(f"state: got inputs of {state.inputs.dtype}, expected {self.conv.dtype}")
        slots = self._slots("slots", slots)
        self.cache.import_slots(slots, state.logical)
        if len(slots):
            self._set(slots, state.inputs[..., -self.conv.shape[-2] :, :].to(self.cache.device))

    def _slots(self, name: str, slots: Slots) -> torch.Tensor:
        return as_slots(name, slots, self.cache.device)

    def _check_counts(self, count: torch.Tensor, live: torch.Tensor, slots: torch.Tensor) -> None:
        least = HISTORY - self.cache.spec.tokens
        bad = (count < least) & (count < live) & (slots >= 0)
        if bool(bad.any()):
            at = int(torch.nonzero(bad)[0])
            raise ValueError(
                f"count: got {int(count[at])} of {int(live[at])} live rows for row {at}, expected at least {least} or "
                f"all: the conv's inputs before them may be overwritten"
            )

    def _both(self, src: torch.Tensor, dst: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """Makes a row padding if either of its slots is."""
        pad = self.cache.pad_slot_id

        def masked(slots: torch.Tensor) -> torch.Tensor:
            return torch.where(checks.live_rows(src, pad) & checks.live_rows(dst, pad), slots.long(), -1)

        return masked

    def _set(self, slots: torch.Tensor, inputs: torch.Tensor | None) -> None:
        cache = self.cache
        conv_ring.set_history(self.conv, cache.ring_start, cache.pnat, slots, inputs, cache.pad_slot_id)


def channels_of(spec: CacheSpec) -> int:
    """Channels of the conv: x, B and C."""
    return spec.heads * spec.head_dim + 2 * spec.groups * spec.d_state


def bytes_per_slot(spec: CacheSpec) -> int:
    """Bytes of a slot in all layers: the ReplayCache's and the conv's rings."""
    one = conv_ring.bytes_per_slot(channels_of(spec), spec.window, spec.tokens, dtypes.BYTES[spec.io_dtype])
    return spec.bytes_per_slot() + spec.layers * one


def slots_that_fit(free_bytes: int, spec: CacheSpec) -> int:
    """The most slots that `LayerCache.allocate` has room for in `free_bytes` bytes."""
    return max(0, (free_bytes - spec.fixed_bytes()) // bytes_per_slot(spec))
