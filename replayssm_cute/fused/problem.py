"""The fused decode step's problem: the facts of a layer that its kernels are specialized on, and every check of a call.

A layer's projection holds, token by token, [z | x | B | C | dt]: the gate (d_inner = H·P), the conv's channels
(d_inner + 2·G·N) and one dt a head, as Mamba2's in_proj writes them.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass

import torch

from .. import aliasing, calls, dtypes, plan, torch_op
from ..problem import (
    OFFSET_LIMIT,
    ROW_ALIGN,
    Problem,
    _distinct,
    _dtype,
    _rank,
    _reach,
    _rows,
    _shape,
    _tensor,
    from_tensors,
)

CONV_WIDTH = 4  # taps of the conv; every Mamba2 model has four
HISTORY = CONV_WIDTH - 1  # raw inputs before a token that its conv needs
LARGEST = sys.float_info.max  # a Python int may be larger than any float


@dataclass(frozen=True, slots=True)
class LayerProblem:
    """The static facts of one decode step.

    Attributes:
        step: the checkpointing SSU's problem; its z is None, since the gate belongs to the norm here.
        conv_dtype, conv_bias_dtype, norm_dtype: short dtype names of the weights; None where the conv has no bias.
        norm_groups: groups of the norm, each of d_inner / norm_groups values.
    """

    step: Problem
    conv_dtype: str
    conv_bias_dtype: str | None
    norm_dtype: str
    norm_groups: int

    def __post_init__(self) -> None:
        if self.step.window < HISTORY:
            raise ValueError(
                f"window: got W = {self.step.window}, expected at least {HISTORY}: the ring of the conv's inputs keeps "
                f"the {HISTORY} inputs before a step beside the step's own (T + {HISTORY} <= R = W + T)"
            )
        if self.step.ragged:
            raise NotImplementedError("cu_seqlens: ragged rows are not served by decode_step yet")
        if self.step.rewrites:
            raise NotImplementedError(
                f"state: got {self.step.kinds}, rounded anew or with a copy; decode_step does not serve that yet"
            )
        if self.step.has_z:
            raise ValueError("has_z: got True, expected False: decode_step's gate belongs to its norm")
        if self.step.dt_dtype != self.step.io_dtype:
            raise TypeError(f"dt_dtype: got {self.step.dt_dtype}, expected {self.step.io_dtype}: dt is in projected")
        for name, value in (("conv_dtype", self.conv_dtype), ("norm_dtype", self.norm_dtype)):
            if value not in dtypes.WEIGHT:
                raise TypeError(f"{name}: got {value!r}, expected one of {dtypes.WEIGHT}")
        if self.conv_bias_dtype not in (None, *dtypes.WEIGHT):
            raise TypeError(f"conv_bias_dtype: got {self.conv_bias_dtype!r}, expected one of {dtypes.WEIGHT} or None")
        groups = self.norm_groups
        if not isinstance(groups, int) or isinstance(groups, bool):
            raise TypeError(f"norm_groups: got {type(groups).__name__}, expected int or None")
        if groups < 1 or self.d_inner % groups or self.d_inner // groups % 8:
            raise ValueError(
                f"norm_groups: got {groups}, expected a divisor of d_inner = {self.d_inner} that leaves groups of a "
                f"multiple of 8 values"
            )

    @property
    def d_inner(self) -> int:
        """H·P: the width of z, of x and of the outputs."""
        return self.step.heads * self.step.head_dim

    @property
    def channels(self) -> int:
        """Channels of the conv: x, B and C."""
        return channels_of(self.step)

    @property
    def width(self) -> int:
        """Width of the projection."""
        return self.d_inner + self.channels + self.step.heads

    def label(self) -> str:
        """Short and readable, for logs."""
        return f"{self.step.label()}, conv {self.channels}, norm {self.norm_groups}"


def channels_of(step: Problem) -> int:
    """d_inner + 2·G·N."""
    return step.heads * step.head_dim + 2 * step.groups * step.d_state


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of one `decode_step`, by name (shapes as documented there)."""

    projected: torch.Tensor
    state: torch.Tensor
    x_cache: torch.Tensor
    B_cache: torch.Tensor
    dt_cache: torch.Tensor
    conv_cache: torch.Tensor
    ring_start: torch.Tensor
    prev_num_accepted_tokens: torch.Tensor
    conv_weight: torch.Tensor
    conv_bias: torch.Tensor | None
    A: torch.Tensor
    D: torch.Tensor | None
    dt_bias: torch.Tensor | None
    norm_weight: torch.Tensor
    out: torch.Tensor
    state_batch_indices: torch.Tensor | None = None
    pad_slot_id: int = -1
    norm_groups: int | None = None
    eps: float = 1e-5
    dt_softplus: bool = True
    scratch: torch.Tensor | None = None

    def gate(self) -> torch.Tensor:
        """z, (b, T, H·P)."""
        return self.projected[..., : self.out.shape[-1]]

    def conv_inputs(self) -> torch.Tensor:
        """Raw x, B and C, (b, T, channels)."""
        first = self.out.shape[-1]
        return self.projected[..., first : first + self.conv_cache.shape[-1]]

    def step_call(self, convolved: torch.Tensor, out: torch.Tensor, with_x: bool = True) -> calls.Call:
        """The checkpointing SSU's call on the conv's outputs (b, T, channels); its own go to `out` (b, T, H·P).

        Args:
            with_x: False: `convolved` holds B and C alone, and x is the raw one, for a step that convolves it.
        """
        heads, head_dim, d_state = self.state.shape[1:]
        groups = self.B_cache.shape[1]
        x = (convolved if with_x else self.conv_inputs())[..., : heads * head_dim]
        B, C = convolved[..., -2 * groups * d_state :].split(groups * d_state, -1)
        return calls.Call(
            state=self.state,
            x_cache=self.x_cache,
            B_cache=self.B_cache,
            dt_cache=self.dt_cache,
            ring_start=self.ring_start,
            prev_num_accepted_tokens=self.prev_num_accepted_tokens,
            x=x.unflatten(-1, (heads, head_dim)),
            dt=calls.spread(self.projected[..., -heads:], head_dim),
            A=calls.spread(self.A, head_dim, d_state),
            B=B.unflatten(-1, (groups, d_state)),
            C=C.unflatten(-1, (groups, d_state)),
            out=out.unflatten(-1, (heads, head_dim)),
            D=None if self.D is None else calls.spread(self.D, head_dim),
            dt_bias=None if self.dt_bias is None else calls.spread(self.dt_bias, head_dim),
            dt_softplus=self.dt_softplus,
            state_batch_indices=self.state_batch_indices,
            pad_slot_id=self.pad_slot_id,
        )

    def conv_of_x(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """What a step that convolves x takes beside its own: its ring (slots, R, H, P), taps (4·H·P,) and biases."""
        heads, head_dim = self.state.shape[1:3]
        width = heads * head_dim
        ring = self.conv_cache[..., :width].unflatten(-1, (heads, head_dim))
        bias = None if self.conv_bias is None else self.conv_bias[:width]
        return ring, self.conv_weight.view(-1)[: CONV_WIDTH * width], bias


def layer_problem(call: LayerCall, pdl: bool = False) -> LayerProblem:
    """Check one call's tensors against the contract and give its problem. Nothing is written.

    Args:
        pdl: of the step's own problem, whether its kernel starts while the conv still runs.

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument, what came and what was expected; what
            checkpointing_ssu itself refuses, in its words.
    """
    required = {
        "projected": (call.projected, "(batch, T, 2·H·P + 2·G·N + H)"),
        "state": (call.state, "(slots, H, P, N)"),
        "x_cache": (call.x_cache, "(slots, H, R, P)"),
        "B_cache": (call.B_cache, "(slots, G, R, N)"),
        "dt_cache": (call.dt_cache, "(slots, H, R)"),
        "conv_cache": (call.conv_cache, "(slots, R, channels)"),
        "conv_weight": (call.conv_weight, "(channels, 4)"),
        "A": (call.A, "(H,)"),
        "norm_weight": (call.norm_weight, "(H·P,)"),
        "out": (call.out, "(batch, T, H·P)"),
    }
    optional = {
        "conv_bias": (call.conv_bias, "(channels,)"),
        "D": (call.D, "(H,)"),
        "dt_bias": (call.dt_bias, "(H,)"),
        "scratch": (call.scratch, "(batch, T, channels)"),
    }
    given = required | {k: v for k, v in optional.items() if v[0] is not None}
    for name, (t, dims) in given.items():
        _rank(name, _tensor(name, t), dims)
    for name, (t, _) in given.items():
        if t.device != call.state.device:  # type: ignore[union-attr]
            raise ValueError(f"{name}: on device {t.device}, expected state's device {call.state.device}")  # type: ignore[union-attr]
    if call.state.dtype in [dtypes.TORCH[kind] for kind in dtypes.EIGHT_BIT]:
        raise NotImplementedError(f"state: got {call.state.dtype}; decode_step does not serve an 8-bit state yet")
    if not isinstance(call.eps, float | int) or isinstance(call.eps, bool):
        raise TypeError(f"eps: got {type(call.eps).__name__}, expected float")
    if not 0 <= call.eps <= LARGEST:
        raise ValueError(f"eps: got {_short(call.eps)}, expected a float that is not negative")

    batch, tokens, width = call.projected.shape
    slots, heads, head_dim, d_state = call.state.shape
    groups, rows = call.B_cache.shape[1], call.x_cache.shape[2]
    d_inner = heads * head_dim
    channels = d_inner + 2 * groups * d_state
    if batch < 1 or tokens < 1:
        raise ValueError(f"projected: got shape {tuple(call.projected.shape)}, expected at least one row and one token")
    if width != d_inner + channels + heads:
        raise ValueError(
            f"projected: got width {width}, expected {d_inner + channels + heads} = z {d_inner} + x, B, C {channels} + "
            f"dt {heads}, from state's {heads} heads of {head_dim} by {d_state} and B_cache's {groups} groups"
        )
    io = _dtype("projected", call.projected, dtypes.IO)
    _shape("conv_cache", call.conv_cache, (slots, rows, channels), "(slots, R, channels = H·P + 2·G·N)")
    _shape("conv_weight", call.conv_weight, (channels, CONV_WIDTH), "(channels, 4)")
    _shape("A", call.A, (heads,), "(H,)")
    _shape("norm_weight", call.norm_weight, (d_inner,), "(H·P,)")
    _shape("out", call.out, (batch, tokens, d_inner), "(batch, T, H·P)")
    for name, t, shape, dims in (
        ("conv_bias", call.conv_bias, (channels,), "(channels,)"),
        ("D", call.D, (heads,), "(H,)"),
        ("dt_bias", call.dt_bias, (heads,), "(H,)"),
        ("scratch", call.scratch, (batch, tokens, channels), "(batch, T, channels)"),
    ):
        if t is not None:
            _shape(name, t, shape, dims)
    for name, t in (("conv_cache", call.conv_cache), ("out", call.out), ("scratch", call.scratch)):
        if t is not None:
            _dtype(name, t, (io,), " (projected's dtype)")
            _rows(name, t, ROW_ALIGN)
            _distinct(name, t)
    _rows("projected", call.projected, ROW_ALIGN)
    if d_inner * dtypes.BYTES[io] % ROW_ALIGN:
        raise ValueError(f"state: {heads} heads of {head_dim} are no multiple of {ROW_ALIGN} bytes")
    conv_dtype = _dtype("conv_weight", call.conv_weight, dtypes.WEIGHT)
    norm_dtype = _dtype("norm_weight", call.norm_weight, dtypes.WEIGHT)
    bias_dtype = None if call.conv_bias is None else _dtype("conv_bias", call.conv_bias, dtypes.WEIGHT)
    for name, t in (
        ("conv_weight", call.conv_weight),
        ("conv_bias", call.conv_bias),
        ("norm_weight", call.norm_weight),
    ):
        if t is not None and not t.is_contiguous():
            raise ValueError(f"{name}: got strides {t.stride()} for shape {tuple(t.shape)}, expected a contiguous one")
        if t is not None and t.data_ptr() % ROW_ALIGN:
            raise ValueError(
                f"{name}: got a data pointer {t.data_ptr() % ROW_ALIGN} bytes past a multiple of {ROW_ALIGN}, "
                f"expected 0"
            )

    # What the step reads is what the conv writes: `scratch`, or memory that is laid out alike.
    convolved = call.projected.new_empty((batch, tokens, channels)) if call.scratch is None else call.scratch
    given_to_step = call.step_call(convolved, call.out).kwargs()
    plan.check_pad_slot_id(given_to_step.pop("pad_slot_id"))
    step = from_tensors(**given_to_step, enable_pdl=pdl)
    # A step that convolves x reaches the raw inputs and their ring as it reaches the rest.
    if max(_reach(call.projected), _reach(call.conv_cache)) >= OFFSET_LIMIT:
        step = dataclasses.replace(step, compact=False)
    tensors = {f.name: getattr(call, f.name) for f in dataclasses.fields(call)}
    aliasing.check({k: v for k, v in tensors.items() if isinstance(v, torch.Tensor)}, torch_op.LAYER_WRITTEN)
    norm_groups = groups if call.norm_groups is None else call.norm_groups
    return LayerProblem(step, conv_dtype, bias_dtype, norm_dtype, norm_groups)


def _short(number: float) -> str:
    """A number for a message, without hundreds of digits."""
    return f"an int of {number.bit_length()} bits" if isinstance(number, int) else str(number)
