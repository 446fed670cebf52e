"""LayerCache: a ReplayCache and the rings of its layers' convs, taken through a slot's life together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import checks, dtypes, ring
from ..cache import CacheSpec, LogicalState, ReplayCache
from ..cache.rows import Slots, as_counts, as_slots, rows_of, values_checked
from ..cache.spec import check_free_bytes, check_spec
from ..problem import ROW_ALIGN, _distinct, _rows
from . import conv_ring
from .problem import HISTORY


@dataclass(frozen=True, slots=True)
class LayerState:
    """What slots hold, free of window, ring phase and device.

    Attributes:
        logical: checkpoints and live rows.
        inputs: (layers, n, m, channels) on the CPU: the last raw inputs of the convs up to the last live row, oldest
            first; m >= 3. Those before the three that the conv needs at the oldest live row are zeros, and with T of 1
            or 2 those of its three that a step may have written over.
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
        if not isinstance(cache, ReplayCache):
            raise TypeError(f"cache: got {type(cache).__name__}, expected ReplayCache")
        spec = cache.spec
        _check_served(spec)
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
        _rows("conv", conv, ROW_ALIGN)
        _distinct("conv", conv)
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
        """A zeroed cache; arguments as in `ReplayCache.allocate`. A slot takes `bytes_per_slot(spec)` bytes.

        Raises:
            ValueError, TypeError: for bad arguments, or W < 3.
            NotImplementedError: for 8-bit states and read copies, which `decode_step` does not serve.
        """
        _check_served(spec)
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
            inputs: (layers, b, 3, channels), the cache's input dtype, oldest first; zeros stand before the first token
                of a short prompt.
        """
        slots = self._slots("slots", slots)
        shape = (self.cache.spec.layers, len(slots), HISTORY, self.conv.shape[-1])
        if not isinstance(inputs, torch.Tensor):
            raise TypeError(f"inputs: got {type(inputs).__name__}, expected a torch.Tensor")
        if tuple(inputs.shape) != shape or inputs.device != self.cache.device:
            raise ValueError(
                f"inputs: got shape {tuple(inputs.shape)} on {inputs.device}, expected {shape} on {self.cache.device}"
            )
        if inputs.dtype != self.conv.dtype:
            raise TypeError(f"inputs: got {inputs.dtype}, expected {self.conv.dtype}, the cache's input dtype")
        self.cache.prefill_handoff(slots, states)
        if len(slots):
            self._set(slots, inputs)

    def materialize(self, src_slots: Slots, dst_slots: Slots, count: Slots) -> None:
        """Fold the first `count` live rows of each source into a destination, whose conv goes on from there.

        The conv needs the three inputs before that point, and with T of 1 or 2 a step may have written over the older
        ones: count is at least 3 - T, or all live rows. A smaller one is refused where values are checked, elsewhere
        undefined.
        """
        cache = self.cache
        cache._need_decays()
        src, dst, _ = cache._pair(src_slots, dst_slots)
        wanted = as_counts("count", count, cache.device, len(src))
        pad, live = cache.pad_slot_id, cache.pnat
        both = self._both(src, dst)
        inputs = None
        if len(src):
            # Slots outside the cache have been refused, or are not looked at and undefined; but no index is wild.
            safe = rows_of(pad, src, dst).slots(src).clamp(0, cache.slots - 1)
            clamped = torch.minimum(wanted.clamp(min=0), live[safe])
            if values_checked(cache.device):
                self._check_counts(clamped, live[safe], both(src))
            inputs = conv_ring.history(self.conv, cache.ring_start, live, safe, clamped, pad_slot_id=-1)
        cache.materialize(src, dst, wanted)
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
        index, count = slots.long(), logical.count.long()
        depth = max(HISTORY, _before(self.cache.spec) + (int(count.max()) if len(count) else 0))
        at = conv_ring.history_rows(self.cache.ring_start[index], self.cache.pnat[index], self.conv.shape[-2], depth)
        inputs = self.conv[:, index[:, None], at].cpu()
        # Older rows are those of another request, or drafts that were not accepted.
        known = count[:, None] - depth + torch.arange(depth) >= _oldest(self.cache.spec, count)[:, None]
        return LayerState(logical, torch.where(known[..., None], inputs, 0))

    def import_slots(self, slots: Slots, state: LayerState) -> None:
        """Put exported states into slots, of another W, T, ring phase or state dtype too. Synchronizes.

        Where the state comes from a smaller T than this cache's, and T is 1 or 2, or brings few inputs, the inputs
        before its oldest live rows are not known, which `materialize` to a point among them would need. So many of
        these rows are folded into the checkpoint, at most two where all inputs came, that no such point is left.
        """
        if not isinstance(state, LayerState):
            raise TypeError(f"state: got {type(state).__name__}, expected LayerState")
        if not isinstance(state.logical, LogicalState):
            raise TypeError(f"state: got a logical state of {type(state.logical).__name__}, expected LogicalState")
        state.logical.check()
        if not isinstance(state.inputs, torch.Tensor):
            raise TypeError(f"state: got inputs of {type(state.inputs).__name__}, expected a torch.Tensor")
        expected = (self.cache.spec.layers, len(state.logical), self.conv.shape[-1])
        given = state.inputs.shape
        if len(given) != 4 or (given[0], given[1], given[3]) != expected or given[2] < HISTORY:
            raise ValueError(f"state: got inputs of shape {tuple(given)}, expected (layers, n, m >= 3, channels) with "
                             f"(layers, n, channels) = {expected}")  # fmt: skip
        if state.inputs.dtype != self.conv.dtype:
            raise TypeError(f"state: got inputs of {state.inputs.dtype}, expected {self.conv.dtype}")
        slots = self._slots("slots", slots)
        count, rows = state.logical.count.long(), self.conv.shape[-2]
        first = torch.maximum(count - given[2], _oldest(state.logical.spec, count))
        unknown = torch.minimum((first + _before(self.cache.spec)).clamp(min=0), count)
        self.cache._import(slots, state.logical, unknown)
        if len(slots):
            # The whole ring, so that nothing is left of the request that had the slot before.
            inputs = state.inputs[..., -rows:, :].to(self.cache.device)
            missing = inputs.new_zeros((*inputs.shape[:2], rows - inputs.shape[2], inputs.shape[3]))
            self._set(slots, torch.cat((missing, inputs), 2))

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


def _check_served(spec: CacheSpec) -> None:
    check_spec("spec", spec)
    if not spec.plain:
        raise NotImplementedError(
            f"spec: got {spec.problem().kinds} states, expected f32, bf16 or f16 ones without a copy: decode_step does "
            f"not serve others yet"
        )
    if spec.window < HISTORY:
        raise ValueError(f"window: got W = {spec.window}, expected at least {HISTORY}, which the conv needs")


def _before(spec: CacheSpec) -> int:
    """How many inputs before a slot's oldest live row are surely there: a step may write over what is T + 1 back."""
    return min(HISTORY, spec.tokens)


def _oldest(spec: CacheSpec, count: torch.Tensor) -> torch.Tensor:
    """(n,) the oldest position, counted from the oldest live row, whose input is there, where `count` rows are live:
    the three inputs before the next token always are."""
    return (count - HISTORY).clamp(max=-_before(spec))


def channels_of(spec: CacheSpec) -> int:
    """Channels of the conv: x, B and C."""
    return spec.heads * spec.head_dim + 2 * spec.groups * spec.d_state


def bytes_per_slot(spec: CacheSpec) -> int:
    """Bytes of a slot in all layers: the ReplayCache's and the conv's rings."""
    one = conv_ring.bytes_per_slot(channels_of(spec), spec.window, spec.tokens, dtypes.BYTES[spec.io_dtype])
    return spec.bytes_per_slot() + spec.layers * one


def slots_that_fit(free_bytes: int, spec: CacheSpec) -> int:
    """The most slots that `LayerCache.allocate` has room for in `free_bytes` bytes.

    Raises:
        ValueError, TypeError: for `free_bytes` that are negative or no int, or a spec that is no CacheSpec.
    """
    check_spec("spec", spec)
    check_free_bytes(free_bytes)
    return max(0, (free_bytes - spec.fixed_bytes()) // bytes_per_slot(spec))
