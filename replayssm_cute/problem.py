"""Problem: every compile-time fact of a call, built from its tensors in one place with every check.

Nothing below the public call looks at tensor metadata again: what a kernel is specialized on is in the
Problem; batch size, slot count and strides are run-time values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import dtypes, ring, rounding

MAX_WINDOW = 64
MAX_TOKENS = 32
OFFSET_LIMIT = 1 << 31  # elements that 32-bit offsets reach
ROW_ALIGN = 16  # bytes: rows of every tensor that kernels read in 16-byte pieces
HEAD_DIMS = (64, 80, 128)
D_STATES = (64, 128, 256)
PRECISIONS = ("default", "highest")


@dataclass(frozen=True, slots=True)
class Problem:
    """The static facts of one checkpointing_ssu call.

    heads, head_dim, d_state and groups are H, P, N and G; tokens is T (new tokens a row), window is W.
    The dtype fields are the short names of `replayssm_cute.dtypes`; None means that the tensor is absent.
    compact says that inside a slot, and over heads and groups, strides are those of contiguous tensors; slots,
    batch rows and tokens may have any. Such kernels compute fewer addresses.
    ragged says that rows have lengths of their own, at most `tokens`, packed one after the other (cu_seqlens).
    copy_dtype is that of the read copy beside an f32 checkpoint, None without one. philox_rounds says that a flush
    rounds stochastically, None that it rounds to nearest. precision is "default", or "highest" for an f32 state that
    is read with all its bits.
    """

    heads: int
    head_dim: int
    d_state: int
    groups: int
    tokens: int
    window: int
    state_dtype: str = "f32"
    io_dtype: str = "bf16"
    dt_dtype: str = "bf16"
    a_dtype: str = "f32"
    d_dtype: str | None = "bf16"
    dt_bias_dtype: str | None = "bf16"
    has_z: bool = False
    dt_softplus: bool = True
    index_dtype: str | None = "i32"
    pdl: bool = False
    compact: bool = True
    ragged: bool = False
    copy_dtype: str | None = None
    philox_rounds: int | None = None
    precision: str = "default"

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "d_state", "groups", "tokens", "window"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}: got {value!r}, expected a positive int")
        for name in ("has_z", "dt_softplus", "pdl", "compact", "ragged"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}: got {getattr(self, name)!r}, expected a bool")
        if self.heads % self.groups:
            raise ValueError(f"groups: {self.heads} heads do not divide into {self.groups} groups")
        if self.head_dim not in HEAD_DIMS:
            raise ValueError(f"head_dim: got {self.head_dim} (P of state), expected one of {HEAD_DIMS}")
        if self.d_state not in D_STATES:
            raise ValueError(f"d_state: got {self.d_state} (N of state), expected one of {D_STATES}")
        if self.tokens > self.window:
            raise ValueError(
                f"window: got W = {self.window} with T = {self.tokens}; R = W + T needs T <= W (R >= 2T), "
                f"since T rows may be live after a flush"
            )
        if self.window > MAX_WINDOW or self.tokens > MAX_TOKENS:
            raise NotImplementedError(
                f"window: W = {self.window}, T = {self.tokens} is not served yet; W <= {MAX_WINDOW} and "
                f"T <= {MAX_TOKENS} are"
            )
        allowed: tuple[tuple[str, tuple[str, ...], bool], ...] = (
            ("state_dtype", dtypes.STATE, False),
            ("io_dtype", dtypes.IO, False),
            ("dt_dtype", dtypes.WEIGHT, False),
            ("a_dtype", dtypes.WEIGHT, False),
            ("d_dtype", dtypes.WEIGHT, True),
            ("dt_bias_dtype", dtypes.WEIGHT, True),
            ("index_dtype", dtypes.INDEX, True),
            ("copy_dtype", dtypes.COPY, True),
            ("precision", PRECISIONS, False),
        )
        for name, names, optional in allowed:
            value = getattr(self, name)
            if value not in names and not (optional and value is None):
                raise TypeError(f"{name}: got {value!r}, expected one of {names}{' or None' if optional else ''}")
        if self.dt_dtype not in ("f32", self.io_dtype):
            raise TypeError(f"dt: got dtype {self.dt_dtype}, expected x's ({self.io_dtype}) or f32")
        if self.state_dtype != "f32" and self.copy_dtype is not None:
            raise ValueError(f"state_copy: got one beside a {self.state_dtype} state, expected None: only f32 has one")
        if self.precision == "highest" and (self.state_dtype != "f32" or self.copy_dtype is not None):
            raise ValueError(
                f'precision: got "highest" with {self.kinds}, expected "default": '
                f"only an f32 state without a copy has it"
            )
        if self.philox_rounds is not None:
            check_philox_rounds(self.philox_rounds)
            if self.state_dtype == "f32":
                raise ValueError("philox_rounds: got a number for an f32 state, expected None: it is not rounded")

    @property
    def kinds(self) -> str:
        """The state's dtype, and that of its read copy: 'f32', 'f32+bf16'."""
        return self.state_dtype + (f"+{self.copy_dtype}" if self.copy_dtype else "")

    @property
    def read_dtype(self) -> str:
        """What a step reads: the state, or its copy."""
        return self.copy_dtype or self.state_dtype

    @property
    def read_bytes(self) -> int:
        """Bytes of one element that a step reads."""
        return dtypes.BYTES[self.read_dtype]

    @property
    def scaled(self) -> bool:
        """Whether what a step reads is 8-bit and has scales."""
        return self.read_dtype in dtypes.EIGHT_BIT

    @property
    def rewrites(self) -> bool:
        """Whether a flush does more than to write the state as it was read, rounded to nearest."""
        return self.scaled or self.copy_dtype is not None or self.philox_rounds is not None

    @property
    def ring_rows(self) -> int:
        """R = W + T."""
        return ring.ring_rows(self.window, self.tokens)

    @property
    def heads_per_group(self) -> int:
        """H / G: heads that share one row of B and C."""
        return self.heads // self.groups

    @property
    def state_bytes(self) -> int:
        """Bytes of one state element."""
        return dtypes.BYTES[self.state_dtype]

    def state_traffic(self) -> tuple[int, int, int]:
        """Bytes of state and scales that a row moves: read by a step; read more than that, and written, by a flush."""
        elements = self.heads * self.head_dim * self.d_state
        scales = 4 * self.heads * self.head_dim if self.scaled else 0
        read = elements * self.read_bytes + scales
        if self.copy_dtype is None:
            return read, 0, read
        kept = elements * self.state_bytes  # a flush reads it in place of the copy
        return read, kept - read, kept + read

    def bytes_per_slot(self) -> int:
        """Bytes of one slot of one layer (state, ring, cursors)."""
        return ring.bytes_per_slot(
            self.heads,
            self.head_dim,
            self.d_state,
            self.groups,
            self.tokens,
            self.window,
            state_bytes=self.state_bytes,
            io_bytes=dtypes.BYTES[self.io_dtype],
            copy_bytes=dtypes.BYTES[self.copy_dtype] if self.copy_dtype else 0,
            scaled=self.scaled,
        )

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `from_json` gives the same Problem back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Problem:
        """The Problem of a `to_json` dict.

        Raises:
            ValueError, TypeError: for unknown, missing or invalid fields.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := set(data) - known:
            raise ValueError(f"problem: unknown fields {sorted(unknown)}")
        return cls(**data)

    def label(self) -> str:
        """Short and readable, for logs and plots: '128x64x128/8 f32 T4 W16', with 'ragged' at its end where it is.

        'f32+bf16' has a read copy, 'bf16~' is rounded stochastically, 'f32!' is of the highest precision.
        """
        geometry = f"{self.heads}x{self.head_dim}x{self.d_state}/{self.groups}"
        ragged = " ragged" if self.ragged else ""
        marks = ("~" if self.philox_rounds else "") + ("!" if self.precision == "highest" else "")
        return f"{geometry} {self.kinds}{marks} T{self.tokens} W{self.window}{ragged}"


def check_philox_rounds(rounds: object) -> None:
    """Refuse what is no number of Philox rounds.

    Raises:
        TypeError, ValueError: naming the value and what was expected.
    """
    expected = f"expected an int in 1..{rounding.MAX_ROUNDS}"
    if not isinstance(rounds, int) or isinstance(rounds, bool):
        raise TypeError(f"philox_rounds: got {type(rounds).__name__}, {expected}")
    if not 1 <= rounds <= rounding.MAX_ROUNDS:
        raise ValueError(f"philox_rounds: got {rounds}, {expected}")


# ---------------------------------------------------------------------------------------------------
# From tensors
# ---------------------------------------------------------------------------------------------------


def _tensor(name: str, value: object) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor")
    return value


def _shape(name: str, t: torch.Tensor, expected: Sequence[int], dims: str) -> None:
    if tuple(t.shape) != tuple(expected):
        raise ValueError(f"{name}: got shape {tuple(t.shape)}, expected {tuple(expected)} {dims}")


def _rank(name: str, t: torch.Tensor, dims: str) -> None:
    rank = dims.count(",") + (0 if dims.endswith(",)") else 1)
    if t.dim() != rank:
        raise ValueError(f"{name}: got {t.dim()} dimensions {tuple(t.shape)}, expected {rank} {dims}")


def _dtype(name: str, t: torch.Tensor, names: Sequence[str], why: str = "") -> str:
    short = dtypes.NAME.get(t.dtype)
    if short not in names:
        expected = " or ".join(str(dtypes.TORCH[n]) for n in names)
        raise TypeError(f"{name}: got {t.dtype}, expected {expected}{why}")
    return str(short)


def _rows(name: str, t: torch.Tensor, align: int, first: int = 0) -> None:
    """Last dimension contiguous, every row start a multiple of `align` bytes, no row twice; dimensions from `first` on.

    Strides of dimensions of size 1 count too: kernels check the alignment that they were promised, not its use. The
    first one of packed tokens, of size 1 in every call, has no stride for them.
    """
    if t.stride(-1) != 1:
        raise ValueError(f"{name}: got stride {t.stride(-1)} on its last dimension, expected 1 (contiguous rows)")
    size = t.element_size()
    for d in range(first, t.dim() - 1):
        if (t.stride(d) * size) % align:
            raise ValueError(
                f"{name}: got stride {t.stride(d)} ({t.stride(d) * size} bytes) on dimension {d}, "
                f"expected a multiple of {align} bytes"
            )
        if t.stride(d) == 0 and t.shape[d] > 1:
            raise ValueError(f"{name}: got stride 0 on dimension {d}, expected a positive one")
    if t.data_ptr() % align:
        raise ValueError(
            f"{name}: got a data pointer {t.data_ptr() % align} bytes past a multiple of {align}, expected 0"
        )


def _distinct(name: str, t: torch.Tensor) -> None:
    """No two elements of a tensor that is written share memory."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(t.stride(), t.shape, strict=True) if size > 1):
        if stride <= reach:
            raise ValueError(
                f"{name}: got strides {t.stride()} for shape {tuple(t.shape)}, expected no overlapping elements"
            )
        reach += stride * (size - 1)


def _is_compact(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    ragged: bool,
) -> bool:
    """Whether strides inside a slot, and over heads and groups, are the contiguous ones, and 32-bit offsets suffice.

    Kernels of compact problems reach everything inside a slot or batch row by 32-bit offsets. Where a slot or a stride
    of tokens is too large for that, the general kernel, with 64-bit addresses, serves; also where packed tokens are
    `packed_wide`.
    """
    wide = (state, x_cache, B_cache, x, B, C, out, z)
    if any(t is not None and _reach(t) >= OFFSET_LIMIT for t in wide):
        return False
    if ragged and packed_wide(x.shape[1], *(t.stride(1) for t in (x, B, C, out, z) if t is not None)):
        return False
    caches = all(
        t.stride()[1:] == torch.empty(t.shape[1:], device="meta").stride() for t in (state, x_cache, B_cache, dt_cache)
    )
    heads = all(t is None or t.stride(2) == t.shape[3] for t in (x, B, C, out, z))
    scalars = all(t is None or t.stride(0) == 1 for t in (A, D, dt_bias))
    return caches and heads and scalars and dt.stride(2) == 1


def packed_wide(total: int, *strides: int) -> bool:
    """Whether packed tokens may lie too far apart for 32-bit offsets, told from their number and strides alone.

    So a call that is known by its strides needs nothing but its total to be known as compact. Half of the reach is
    left for the heads of the last token.
    """
    return total * max(strides) >= OFFSET_LIMIT // 2


def _reach(t: torch.Tensor) -> int:
    """The largest offset, in elements, inside one entry of dimension 0."""
    return sum((n - 1) * stride for n, stride in zip(t.shape[1:], t.stride()[1:], strict=True))


def _broadcast(name: str, t: torch.Tensor, dims: Sequence[int], how: str) -> None:
    for d in dims:
        if t.stride(d) != 0 and t.shape[d] > 1:
            raise ValueError(f"{name}: got stride {t.stride(d)} on dimension {d}, expected 0: {how}")


def _packing(cu_seqlens: object, max_seqlen: object) -> bool:
    """Whether a call is ragged, after the checks that concern its two arguments alone."""
    if (cu_seqlens is None) != (max_seqlen is None):
        given, absent = ("cu_seqlens", "max_seqlen") if max_seqlen is None else ("max_seqlen", "cu_seqlens")
        raise ValueError(f"{absent}: got None beside {given}, expected both or neither of cu_seqlens and max_seqlen")
    if max_seqlen is None:
        return False
    if not isinstance(max_seqlen, int) or isinstance(max_seqlen, bool):
        raise TypeError(f"max_seqlen: got {type(max_seqlen).__name__}, expected an int in 1..{MAX_TOKENS}")
    if not 1 <= max_seqlen <= MAX_TOKENS:
        raise ValueError(f"max_seqlen: got {max_seqlen}, expected 1..{MAX_TOKENS}")
    return True


def from_tensors(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor | None,
    enable_pdl: bool,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    state_scale: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = rounding.ROUNDS,
    state_copy: torch.Tensor | None = None,
    precision: str = "default",
) -> Problem:
    """Check one call's tensors against the contract and give its Problem. Nothing is written.

    Slots, cursors and the values of cu_seqlens lie on the device: `checks.check_values` looks at them.

    Raises:
        TypeError: an argument that is no tensor, or has a wrong dtype.
        ValueError: a wrong rank, shape, device, stride or alignment, or one of cu_seqlens and max_seqlen without the
            other, naming argument, value and expectation.
        NotImplementedError: W or T beyond what is served.
    """
    ragged = _packing(cu_seqlens, max_seqlen)
    per_token = "1, total" if ragged else "batch, T"
    x_dims, b_dims = f"({per_token}, H, P)", f"({per_token}, G, N)"
    required = {
        "state": (state, "(slots, H, P, N)"),
        "x_cache": (x_cache, "(slots, H, R, P)"),
        "B_cache": (B_cache, "(slots, G, R, N)"),
        "dt_cache": (dt_cache, "(slots, H, R)"),
        "ring_start": (ring_start, "(slots,)"),
        "prev_num_accepted_tokens": (prev_num_accepted_tokens, "(slots,)"),
        "x": (x, x_dims),
        "dt": (dt, x_dims),
        "A": (A, "(H, P, N)"),
        "B": (B, b_dims),
        "C": (C, b_dims),
        "out": (out, x_dims),
    }
    optional = {
        "D": (D, "(H, P)"),
        "z": (z, x_dims),
        "dt_bias": (dt_bias, "(H, P)"),
        "state_batch_indices": (state_batch_indices, "(batch,)"),
        "cu_seqlens": (cu_seqlens, "(batch + 1,)"),
        "state_scale": (state_scale, "(slots, H, P)"),
        "state_copy": (state_copy, "(slots, H, P, N)"),
    }
    given = required | {k: v for k, v in optional.items() if v[0] is not None}
    for name, (t, dims) in given.items():
        _rank(name, _tensor(name, t), dims)
    for name, (t, _) in given.items():
        if t.device != state.device:  # type: ignore[union-attr]
            raise ValueError(f"{name}: on device {t.device}, expected state's device {state.device}")  # type: ignore[union-attr]
    for name, flag in (("dt_softplus", dt_softplus), ("enable_pdl", enable_pdl)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: got {type(flag).__name__}, expected bool")

    slots, heads, head_dim, d_state = state.shape
    batch, tokens = x.shape[:2]
    groups, rows = B_cache.shape[1], x_cache.shape[2]
    if slots < 1:
        raise ValueError(f"state: got shape {tuple(state.shape)}, expected at least one slot")
    if batch < 1 or tokens < 1:
        raise ValueError(f"x: got shape {tuple(x.shape)}, expected at least one row and one token")
    tokens_shape = (batch, tokens, heads, head_dim)
    if cu_seqlens is not None and max_seqlen is not None:
        tokens_shape = (1, *tokens_shape[1:])
        batch, tokens = cu_seqlens.shape[0] - 1, max_seqlen
        if batch < 1:
            raise ValueError(
                f"cu_seqlens: got shape {tuple(cu_seqlens.shape)}, expected (batch + 1,) with at least one row"
            )
    if groups < 1 or heads % groups:
        raise ValueError(f"B_cache: {heads} heads of state do not divide into its {groups} groups")
    if rows < 2 * tokens:
        raise ValueError(
            f"x_cache: got R = {rows} ring rows with T = {tokens}, expected R >= 2T (that is, T <= W = R - T)"
        )

    state_dtype = _dtype("state", state, dtypes.STATE)
    io = _dtype("x", x, dtypes.IO)
    groups_shape = (*tokens_shape[:2], groups, d_state)
    _shape("x", x, tokens_shape, x_dims)
    _shape("x_cache", x_cache, (slots, heads, rows, head_dim), "(slots, H, R, P)")
    _shape("B_cache", B_cache, (slots, groups, rows, d_state), "(slots, G, R, N)")
    _shape("dt_cache", dt_cache, (slots, heads, rows), "(slots, H, R)")
    _shape("ring_start", ring_start, (slots,), "(slots,)")
    _shape("prev_num_accepted_tokens", prev_num_accepted_tokens, (slots,), "(slots,)")
    _shape("dt", dt, tokens_shape, x_dims)
    _shape("A", A, (heads, head_dim, d_state), "(H, P, N)")
    _shape("B", B, groups_shape, b_dims)
    _shape("C", C, groups_shape, b_dims)
    _shape("out", out, tokens_shape, x_dims)
    for name, t in (("x_cache", x_cache), ("B_cache", B_cache), ("B", B), ("C", C), ("out", out)):
        _dtype(name, t, (io,), " (x's dtype)")
    _dtype("dt_cache", dt_cache, ("f32",))
    for name, t in (("ring_start", ring_start), ("prev_num_accepted_tokens", prev_num_accepted_tokens)):
        _dtype(name, t, ("i32",))
    dt_dtype = _dtype("dt", dt, tuple(dict.fromkeys((io, "f32"))))
    a_dtype = _dtype("A", A, dtypes.WEIGHT)
    d_dtype = bias_dtype = index_dtype = None
    if D is not None:
        _shape("D", D, (heads, head_dim), "(H, P)")
        d_dtype = _dtype("D", D, dtypes.WEIGHT)
        _broadcast("D", D, (1,), "one value a head, expanded over P")
    if dt_bias is not None:
        _shape("dt_bias", dt_bias, (heads, head_dim), "(H, P)")
        bias_dtype = _dtype("dt_bias", dt_bias, dtypes.WEIGHT)
        _broadcast("dt_bias", dt_bias, (1,), "one value a head, expanded over P")
    if z is not None:
        _shape("z", z, tokens_shape, x_dims)
        _dtype("z", z, (io,), " (x's dtype)")
        _rows("z", z, ROW_ALIGN, int(ragged))
    if state_batch_indices is not None:
        _shape("state_batch_indices", state_batch_indices, (batch,), "(batch,)")
        index_dtype = _dtype("state_batch_indices", state_batch_indices, dtypes.INDEX)
    elif slots < batch:
        raise ValueError(
            f"state: got {slots} slots for {batch} rows without state_batch_indices, expected at least {batch}"
        )

    if cu_seqlens is not None:
        _dtype("cu_seqlens", cu_seqlens, ("i32",))
        if cu_seqlens.stride(0) != 1:
            raise ValueError(f"cu_seqlens: got stride {cu_seqlens.stride(0)}, expected 1 (contiguous)")

    copy_dtype = None
    if state_copy is not None:
        _shape("state_copy", state_copy, tuple(state.shape), "(slots, H, P, N)")
        copy_dtype = _dtype("state_copy", state_copy, dtypes.COPY)
        _rows("state_copy", state_copy, ROW_ALIGN)
        _distinct("state_copy", state_copy)
    _scale(state_scale, copy_dtype or state_dtype, state)
    seeded = check_seed(rand_seed, state.device)
    check_philox_rounds(philox_rounds)
    if not isinstance(precision, str):
        raise TypeError(f"precision: got {type(precision).__name__}, expected one of {PRECISIONS}")
    if precision not in PRECISIONS:
        raise ValueError(f"precision: got {precision!r}, expected one of {PRECISIONS}")

    for name, t in (("state", state), ("x_cache", x_cache), ("B_cache", B_cache)):
        _rows(name, t, ROW_ALIGN)
    for name, t in (("x", x), ("B", B), ("C", C), ("out", out)):
        _rows(name, t, ROW_ALIGN, int(ragged))
    _rows("dt_cache", dt_cache, 4)
    for name, t in (("state", state), ("x_cache", x_cache), ("B_cache", B_cache), ("dt_cache", dt_cache), ("out", out)):
        _distinct(name, t)
    _broadcast("dt", dt, (3,), "one value a head, expanded over P")
    _broadcast("A", A, (1, 2), "one value a head, expanded over P and N")

    return Problem(
        heads=heads,
        head_dim=head_dim,
        d_state=d_state,
        groups=groups,
        tokens=tokens,
        window=rows - tokens,
        state_dtype=state_dtype,
        io_dtype=io,
        dt_dtype=dt_dtype,
        a_dtype=a_dtype,
        d_dtype=d_dtype,
        dt_bias_dtype=bias_dtype,
        has_z=z is not None,
        dt_softplus=dt_softplus,
        index_dtype=index_dtype,
        pdl=enable_pdl,
        compact=_is_compact(state, x_cache, B_cache, dt_cache, x, dt, A, B, C, out, D, z, dt_bias, ragged)
        and all(t is None or _inside_slot(t) for t in (state_scale, state_copy)),
        ragged=ragged,
        copy_dtype=copy_dtype,
        philox_rounds=philox_rounds if seeded and state_dtype != "f32" else None,
        precision=precision,
    )


def _scale(scale: torch.Tensor | None, kind: str, state: torch.Tensor) -> None:
    """Check the scales: given exactly where what a step reads, of dtype `kind`, is 8-bit."""
    if (scale is None) == (kind in dtypes.EIGHT_BIT):
        got, expected = ("None", "(slots, H, P) f32 scales") if scale is None else ("a tensor", "None")
        raise ValueError(f"state_scale: got {got} with {kind} to read, expected {expected}: 8-bit states have scales")
    if scale is not None:
        _shape("state_scale", scale, tuple(state.shape[:3]), "(slots, H, P)")
        _dtype("state_scale", scale, ("f32",))
        _rows("state_scale", scale, 4)
        _distinct("state_scale", scale)


def check_seed(seed: object, device: torch.device) -> bool:
    """Check the seed of a call on `device`; whether there is one.

    Raises:
        TypeError, ValueError: naming what came and what was expected.
    """
    if seed is None:
        return False
    t = _tensor("rand_seed", seed)
    if t.numel() != 1 or t.dim() > 1:
        raise ValueError(f"rand_seed: got shape {tuple(t.shape)}, expected (1,) or ()")
    _dtype("rand_seed", t, ("i64",))
    if t.device != device:
        raise ValueError(f"rand_seed: on device {t.device}, expected state's device {device}")
    return True


def _inside_slot(t: torch.Tensor) -> bool:
    """Whether a cache's strides inside a slot are the contiguous ones and 32-bit offsets reach all of it."""
    return t.stride()[1:] == torch.empty(t.shape[1:], device="meta").stride() and _reach(t) < OFFSET_LIMIT
