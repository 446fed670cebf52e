"""ReplayCache: the caches and cursors of a group of layers, and everything that happens to a slot between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from .. import checks, dtypes
from . import layout, migrate
from .layout import LayerTensors, Shared
from .logical import LogicalState
from .rows import Slots, as_counts, as_slots, check_range, check_settled, check_slots, rows_of, values_checked
from .spec import CacheSpec, check_spec
from .stored import as_bits, encode
from .torch_ops import TorchOps

if TYPE_CHECKING:
    from .launches import Launches


class ReplayCache:
    """Caches and cursors of the layers that share slots; made by `allocate` or `from_pool`.

    `slots` arguments are (b,) int32 or int64 tensors on the cache's device, or plain ints (copied there; not in a
    graph). A negative slot, or `pad_slot_id`, is padding: nothing of it is read or written. Live slots of a call are
    distinct where they are written. On the CPU, and on a GPU with REPLAYSSM_CHECK=1 outside captures, slots are
    checked; elsewhere a slot outside the cache is undefined, as in every kernel.

    reset, commit, begin_step, settle, materialize, copy and prefill_handoff run on the current stream without a host
    sync, with cursors and caches at fixed addresses, so that they can be captured in a CUDA graph (temporaries then
    come from the graph's own memory). On a GPU the first six are kernels: one launch for the batch, whatever the
    number of layers, and a second, small one before a materialize or copy. They are compiled at their first use, which
    must not be a capture: see `prepare`. Elsewhere, for prefill_handoff, and for materialize of 8-bit states and of
    states with a read copy, they are torch operations. export_slots, import_slots and set_decay are host operations.

    A slot's checkpoint is its state, and where the spec says so the f32 scales of an 8-bit state's rows, or a read copy
    beside an f32 state (and the scales of an 8-bit one). All of it is reset, copied, restored and made anew together;
    states that enter are rounded to nearest by `replayssm_cute.rounding.encode`. A step that rounds stochastically
    takes its `rand_seed` beside `step_args`.

    Two ways to commit, per slot one at a time: `commit` after sampling; or `begin_step` before each step, which
    commits the window before (its length is kept per slot until then: the window is *open*). Between a step and its
    commit a slot has no settled state, since the step may have flushed: copy, materialize and export slots after
    `commit` or `settle` only. (`copy` may also take a slot with an open window of `begin_step`, and copies that.)

    Attributes:
        spec: the CacheSpec.
        slots: number of slots.
        device: where the tensors are.
        pad_slot_id: the slot that stands for padding beside negative ones.
        layers: the tensors of each layer.
        ring_start, pnat: (slots,) int32 cursors.
        last_tokens: (slots,) int32, tokens of each slot's open window, 0 for none.
        A: (layers, H) f32.
    """

    def __init__(
        self, spec: CacheSpec, layers: tuple[LayerTensors, ...], shared: Shared, pad_slot_id: int = -1
    ) -> None:
        from ..plan import check_pad_slot_id  # which imports the compile cache

        check_pad_slot_id(pad_slot_id)
        self.spec = spec
        self.layers = layers
        self.pad_slot_id = pad_slot_id
        self.slots: int = shared.pnat.shape[0]
        self.device = shared.pnat.device
        self.ring_start, self.pnat, self.last_tokens, self.A = (
            shared.ring_start, shared.pnat, shared.last_tokens, shared.A
        )  # fmt: skip
        self._shared = shared
        self._decays: set[int] = set()
        self._ops: TorchOps | Launches
        if self.device.type == "cuda":
            from .launches import Launches  # which imports the compile cache; the CPU does without

            self._ops = Launches(spec, layers, shared, pad_slot_id)
        else:
            self._ops = TorchOps(spec, layers, shared, pad_slot_id)

    # -----------------------------------------------------------------------------------------------
    # Making
    # -----------------------------------------------------------------------------------------------

    @classmethod
    def allocate(
        cls,
        spec: CacheSpec,
        slots: int,
        device: torch.device | str = "cuda",
        *,
        A: Sequence[torch.Tensor] | None = None,
        pad_slot_id: int = -1,
    ) -> ReplayCache:
        """A cache in one zeroed allocation of exactly `spec.total_bytes(slots)` bytes.

        Args:
            spec, slots: what, and for how many slots (a null slot counted).
            device: where.
            A: of each layer, see `set_decay`.
            pad_slot_id: the slot that stands for padding beside negative ones.

        Raises:
            ValueError, TypeError: for bad arguments.
        """
        check_spec("spec", spec)
        layers, shared = layout.allocate(spec, slots, torch.device(device))
        return cls(spec, layers, shared, pad_slot_id)._with(A)

    @classmethod
    def from_pool(
        cls,
        spec: CacheSpec,
        pool: torch.Tensor | Sequence[torch.Tensor],
        *,
        offsets: Mapping[str, int] | None = None,
        A: Sequence[torch.Tensor] | None = None,
        pad_slot_id: int = -1,
    ) -> ReplayCache:
        """A cache whose layers are views into pages that an engine owns; cursors and A are allocated here, zeroed.

        Nothing in the pool is written: reset a slot before its first use. Bytes between the tensors are never touched.

        Args:
            spec: what a slot of a layer holds.
            pool: for each layer, (slots, bytes) uint8 or int8 with stride 1 on bytes and any slot stride that is a
                multiple of 16; or one (layers, slots, bytes) tensor. A slot's tensors start at multiples of 16 bytes.
            offsets: bytes from the start of a slot to each of its tensors, `spec.slot_shapes()`: "state", "x_cache",
                "B_cache", "dt_cache", and where there are such "state_copy" and "state_scale"; multiples of 16. Default
                packed in the order of `slot_shapes` (`spec.page_offsets()`, `spec.page_bytes` in all).
            A, pad_slot_id: as in `allocate`.

        Raises:
            TypeError: a page that is no tensor of bytes.
            ValueError: a number of layers or slots, rank, device, stride, alignment, offset or size that does not
                fit, or layers that share bytes; naming the page, what came and what was expected.
        """
        check_spec("spec", spec)
        if not isinstance(pool, (torch.Tensor, Sequence)):
            raise TypeError(f"pool: got {type(pool).__name__}, expected tensors of bytes")
        layers = layout.from_pool(spec, pool, offsets)
        state = layers[0].state
        return cls(spec, layers, layout.shared(spec, state.shape[0], state.device), pad_slot_id)._with(A)

    def _with(self, A: Sequence[torch.Tensor] | None) -> ReplayCache:
        if A is not None:
            if not isinstance(A, (torch.Tensor, Sequence)):
                raise TypeError(f"A: got {type(A).__name__}, expected a tensor for each layer")
            if len(A) != self.spec.layers:
                raise ValueError(f"A: got {len(A)} layers, expected {self.spec.layers}")
            for layer, each in enumerate(A):
                self.set_decay(layer, each)
        return self

    def set_decay(self, layer: int, A: torch.Tensor) -> None:
        """Give a layer's A, which folding live rows needs: (H,), or (H, P, N) with strides 0 as the step takes it.

        Raises:
            TypeError, ValueError, IndexError: for a wrong dtype, shape, stride or layer.
        """
        spec = self.spec
        self._layer(layer)
        if not isinstance(A, torch.Tensor) or dtypes.NAME.get(A.dtype) not in dtypes.WEIGHT:
            got = A.dtype if isinstance(A, torch.Tensor) else type(A).__name__
            raise TypeError(f"A: got {got}, expected a tensor of {', '.join(dtypes.WEIGHT)}")
        if tuple(A.shape) == (spec.heads, spec.head_dim, spec.d_state):
            if A.stride(1) or A.stride(2):
                raise ValueError(f"A: got strides {A.stride()}, expected 0 on P and N: one value a head")
            A = A[:, 0, 0]
        if tuple(A.shape) != (spec.heads,):
            raise ValueError(
                f"A: got shape {tuple(A.shape)}, expected {(spec.heads,)} or "
                f"{(spec.heads, spec.head_dim, spec.d_state)}"
            )
        self.A[layer].copy_(A.detach())  # a parameter must not make the cache part of its graph
        self._decays.add(layer)

    @property
    def has_decays(self) -> bool:
        """Whether A of every layer was given, which materialize needs."""
        return len(self._decays) == self.spec.layers

    def prepare(self) -> None:
        """Make every kernel of this cache's operations ready, before a graph capture; `warmup` does it too.

        Compiles or loads them and puts their code on the device. No slot is touched. Does nothing on the CPU.
        """
        self._ops.prepare()

    def prove(self) -> int:
        """Compare this cache's kernels with the torch operations on this GPU, once per process and shape.

        On a small cache of random content, so that no slot is touched. Does nothing on the CPU.

        Returns:
            The number of kernels that were compared now.

        Raises:
            RuntimeError: if one is wrong, naming the operation and the tensor.
        """
        return self._ops.prove()

    # -----------------------------------------------------------------------------------------------
    # A step
    # -----------------------------------------------------------------------------------------------

    def step_args(self, layer: int) -> dict[str, torch.Tensor]:
        """The arguments of `checkpointing_ssu` that the cache holds, for a layer, by name; its T is `spec.tokens`.

        The first six, and state_scale and state_copy where there are such.

        Raises:
            IndexError: for a layer that is not there.
        """
        t = self.layers[self._layer(layer)]
        return {
            "state": t.state,
            "x_cache": t.x_cache,
            "B_cache": t.B_cache,
            "dt_cache": t.dt_cache,
            "ring_start": self.ring_start,
            "prev_num_accepted_tokens": self.pnat,
            **{name: each for name, each in t.checkpoint().items() if name != "state"},
        }

    def commit(self, slots: Slots, num_accepted: Slots, query_lens: Slots | None = None) -> None:
        """Advance the cursors after sampling, once per model step for all layers. Graph-safe.

        If the step flushed a row (pnat + T_i > W), its ring starts anew with the accepted tokens; else they are added
        to its live rows. A window that `begin_step` opened is closed by this.

        Args:
            slots: (b,) the step's slots.
            num_accepted: (b,) int32 or int64 accepted tokens, clamped to 0..T_i. 0 is legal, also on a flush.
            query_lens: (b,) int32 or int64, the tokens T_i <= T that each row ran; a row with 0 keeps its cursors.
                None: every row ran T.

        Raises:
            TypeError, ValueError: wrong arguments, by name.
        """
        slots = self._written(slots)
        accepted = as_counts("num_accepted", num_accepted, self.device, len(slots))
        lens = self._lens(query_lens, slots)
        if len(slots):
            self._ops.commit(slots, accepted, lens)

    def begin_step(self, slots: Slots, num_accepted: Slots, query_lens: Slots | None = None) -> None:
        """The deferred form of `commit`: at the start of a step, close each slot's window before and open this one.

        A slot without an open window (after a reset, import, copy of such a slot, ...) ignores its count, so that a
        stale one does no harm. Graph-safe.

        Args:
            slots: (b,) the slots of the step that begins.
            num_accepted: (b,) tokens accepted of each slot's window before, clamped to 0..its length.
            query_lens: (b,) tokens T_i <= T that each row runs in this step; None: T. 0 leaves no window open.

        Raises:
            TypeError, ValueError: wrong arguments, by name.
        """
        slots = self._written(slots)
        accepted = as_counts("num_accepted", num_accepted, self.device, len(slots))
        lens = self._lens(query_lens, slots)
        if len(slots):
            self._ops.begin_step(slots, accepted, lens)

    def settle(self, slots: Slots, num_accepted: Slots) -> None:
        """Close the open windows of slots without a step to follow: before export, copy or materialize. Graph-safe.

        Args and errors as in `begin_step`.
        """
        slots = self._written(slots)
        accepted = as_counts("num_accepted", num_accepted, self.device, len(slots))
        if len(slots):
            self._ops.settle(slots, accepted)

    # -----------------------------------------------------------------------------------------------
    # Between steps
    # -----------------------------------------------------------------------------------------------

    def reset(self, slots: Slots, *, zero_state: bool = True) -> None:
        """Make slots new: empty ring, no open window, and a logical state of zero. Graph-safe.

        Args:
            slots: (b,) slots, at admission and after preemption.
            zero_state: False leaves the checkpoints as they are, for a caller that writes all of them next.

        Raises:
            TypeError, ValueError: wrong slots.
        """
        slots = self._written(slots)
        if len(slots):
            self._ops.reset(slots, zero_state)

    def materialize(self, src_slots: Slots, dst_slots: Slots, count: Slots) -> None:
        """Fold the first `count` live rows of each source into its checkpoint and put that into a destination slot.

        Afterwards a destination holds the folded state in all layers, an empty ring and no open window. It is as if
        every source were read before anything is written: sources may be destinations, in any permutation, and one
        source may serve several destinations. Sources that are no destinations do not change. Where a source is its
        own destination, its rows beyond `count` are given up. Sources have no open window (`settle`); one is refused
        where values are checked, elsewhere undefined. Count 0 copies the checkpoint bit for bit, codes, scales and read
        copies as they are. Arithmetic is f32, rounded once to the state's dtype, to nearest; scales and read copies are
        made anew. Graph-safe.

        On a GPU rows whose source is another row's destination go one after the other, so that a batch of them takes
        longer; a cycle among them is no obstacle. 8-bit states and states with a read copy have no kernel for it: torch
        operations do the same there, a few for each row of W and layer, which takes longer, and the log says so once.
        Where torch operations do it, temporaries take a few times the batch's states of one layer, in f32.

        Args:
            src_slots, dst_slots: (b,) slots; a row is padding if either is.
            count: (b,) int32 or int64, clamped to 0..the live rows of the source.

        Raises:
            RuntimeError: if a layer's A was not given (`set_decay`).
            TypeError, ValueError: wrong arguments, by name.
        """
        self._need_decays()
        src, dst, live = self._pair(src_slots, dst_slots)
        wanted = as_counts("count", count, self.device, len(src))
        if live is not None:
            check_settled("src_slots", src[live], self.last_tokens)
        if len(src):
            self._ops.materialize(src, dst, wanted)

    def copy(self, src_slots: Slots, dst_slots: Slots) -> None:
        """Copy whole slots bit for bit: checkpoint (scales and read copy too), ring with its phase, cursors and open
        window. Graph-safe.

        As if every source were read before anything is written (see `materialize`).

        Args:
            src_slots, dst_slots: (b,) slots; a row is padding if either is.

        Raises:
            TypeError, ValueError: wrong arguments, by name.
        """
        src, dst, _ = self._pair(src_slots, dst_slots)
        if len(src):
            self._ops.copy(src, dst)

    def prefill_handoff(
        self, slots: Slots, states: torch.Tensor | Sequence[torch.Tensor], *, layer: int | None = None
    ) -> None:
        """Put the final states of a prefill scan into slots, with an empty ring and no open window. Graph-safe.

        Args:
            slots: (b,) slots.
            states: (b, H, P, N) of any float dtype for each layer, rounded to the state's, as 8-bit codes with new
                scales, and to a read copy, by `rounding.encode`; a sequence, or one (layers, b, H, P, N) tensor.
            layer: hand over this layer alone; `states` is then its (b, H, P, N). Call it for every layer.

        Raises:
            TypeError, ValueError, IndexError: wrong arguments, by name.
        """
        slots = self._written(slots)
        indices = range(self.spec.layers) if layer is None else [self._layer(layer)]
        if not isinstance(states, (torch.Tensor, Sequence)):
            raise TypeError(f"states: got {type(states).__name__}, expected tensors")
        given: list[torch.Tensor] = [states] if layer is not None else list(states)  # type: ignore[list-item]
        if len(given) != len(indices):
            raise ValueError(f"states: got {len(given)} layers, expected {len(indices)}")
        shape = (len(slots), self.spec.heads, self.spec.head_dim, self.spec.d_state)
        for i, each in zip(indices, given, strict=True):
            if not isinstance(each, torch.Tensor) or not each.is_floating_point():
                got = each.dtype if isinstance(each, torch.Tensor) else type(each).__name__
                raise TypeError(f"states: got {got} for layer {i}, expected a float tensor")
            if tuple(each.shape) != shape or each.device != self.device:
                raise ValueError(
                    f"states: got shape {tuple(each.shape)} on {each.device} for layer {i}, expected {shape} on "
                    f"{self.device}"
                )
        if len(slots) == 0:
            return
        rows = rows_of(self.pad_slot_id, slots)
        slot = rows.slots(slots)
        for i, each in zip(indices, given, strict=True):
            for name, entering in encode(self.spec, each.detach()[rows.index]).items():
                bits = as_bits(getattr(self.layers[i], name))
                bits.index_copy_(0, slot, torch.where(rows.any_live, as_bits(entering), bits[slot]))
        self._ops.reset(slots, False)

    # -----------------------------------------------------------------------------------------------
    # To and from elsewhere
    # -----------------------------------------------------------------------------------------------

    def export_slots(self, slots: Slots) -> LogicalState:
        """The logical states of slots as CPU tensors. Synchronizes; the cache is unchanged.

        They hold values: 8-bit states as the f32 values that codes and scales stand for.

        Args:
            slots: (n,) slots, no padding.

        Raises:
            ValueError: a slot outside the cache, or with an open window (`settle` it first).
            TypeError: a wrong type or dtype.
        """
        slots = as_slots("slots", slots, self.device)
        check_range("slots", slots, 0, self.slots - 1)
        return migrate.export(self.spec, self.layers, self._shared, slots.long())

    def import_slots(self, slots: Slots, state: LogicalState) -> None:
        """Put exported logical states into slots. Synchronizes.

        The state may come from another W, T, ring phase or kind of state. Live rows beyond this cache's W are folded
        into the checkpoint, the oldest ones, exactly so many that the rest fits, in float64 and rounded once; rows that
        stay, and checkpoints that need neither fold nor rounding, keep their values exactly. 8-bit states and read
        copies are made anew by `rounding.encode`, to nearest: codes that were rounded to nearest come back the same,
        with scales within a unit in the last place, while those of stochastic rounding may be rounded once more.
        Afterwards rings start at 0 and no window is open.

        Args:
            slots: (n,) distinct slots, no padding, one for each slot of `state`.
            state: from `export_slots` or `LogicalState.from_dict`.

        Raises:
            ValueError: a damaged or mismatched state, or wrong slots; nothing is written then.
            TypeError: a wrong type or dtype.
            RuntimeError: rows must be folded and a layer's A was not given (`set_decay`); nothing is written.
        """
        self._import(slots, state)

    def _import(self, slots: Slots, state: LogicalState, at_least: torch.Tensor | None = None) -> None:
        """`import_slots`, with at least so many of the oldest rows folded, (n,) int64 within 0..count."""
        if not isinstance(state, LogicalState):
            raise TypeError(f"state: got {type(state).__name__}, expected LogicalState")
        state.check()
        if why := migrate.mismatch(self.spec, state.spec):
            raise ValueError(why)
        slots = as_slots("slots", slots, self.device, len(state))
        check_slots("slots", slots, self.slots, torch.ones_like(slots, dtype=torch.bool))
        folded = migrate.surplus(self.spec, state)
        folded = folded if at_least is None else torch.maximum(folded, at_least)
        if bool(folded.any()):
            self._need_decays()
        migrate.enter(self.spec, self.layers, self._shared, slots.long(), state, folded)

    # -----------------------------------------------------------------------------------------------
    # Checks
    # -----------------------------------------------------------------------------------------------

    def _layer(self, layer: int) -> int:
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < self.spec.layers:
            raise IndexError(f"layer: got {layer!r}, expected 0..{self.spec.layers - 1}")
        return layer

    def _need_decays(self) -> None:
        missing = sorted(set(range(self.spec.layers)) - self._decays)
        if missing:
            raise RuntimeError(f"A of layer {missing[0]} was not given, and folding live rows needs it: set_decay")

    def _live(self, slots: torch.Tensor) -> torch.Tensor:
        return checks.live_rows(slots, self.pad_slot_id)

    def _written(self, slots: Slots) -> torch.Tensor:
        """Checked slots that are to be written."""
        slots = as_slots("slots", slots, self.device)
        if values_checked(self.device):
            check_slots("slots", slots, self.slots, self._live(slots))
        return slots

    def _pair(self, src: Slots, dst: Slots) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Checked sources and destinations, and which rows are live where values are checked."""
        src = as_slots("src_slots", src, self.device)
        dst = as_slots("dst_slots", dst, self.device, len(src))
        live = None
        if values_checked(self.device):
            live = self._live(src) & self._live(dst)
            check_slots("src_slots", src, self.slots, live, distinct=False)
            check_slots("dst_slots", dst, self.slots, live)
        return src, dst, live

    def _lens(self, query_lens: Slots | None, slots: torch.Tensor) -> torch.Tensor | None:
        if query_lens is None:
            return None
        lens = as_counts("query_lens", query_lens, self.device, len(slots))
        if values_checked(self.device):
            check_range("query_lens", lens, 0, self.spec.tokens, self._live(slots))
        return lens
