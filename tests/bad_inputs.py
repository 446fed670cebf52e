"""Wrong calls, one fault each, with what the message must say: for `problem.from_tensors` and for the public call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from replayssm_cute.calls import Call, random_call
from replayssm_cute.problem import Problem

PROBLEM = Problem(heads=8, head_dim=64, d_state=128, groups=2, tokens=3, window=7, has_z=True)
RAGGED = dataclasses.replace(PROBLEM, ragged=True)
BATCH, SLOTS = 3, 6

WRITTEN = ("state", "x_cache", "B_cache", "dt_cache", "out")
IO = ("x_cache", "B_cache", "B", "C", "out", "z")
ROWS = ("state", "x_cache", "B_cache", "x", "B", "C", "out", "z")
REQUIRED = (*WRITTEN, "ring_start", "prev_num_accepted_tokens", "x", "dt", "A", "B", "C")
OPTIONAL = ("D", "z", "dt_bias", "state_batch_indices")


@dataclass(frozen=True)
class Bad:
    """One fault: how to make it, what is raised, the name that the message begins with, and other words in order."""

    name: str
    change: Callable[[dict[str, Any]], None]
    error: type[Exception]
    words: tuple[str, ...]


def good_call(**kwargs: Any) -> Call:
    """A call that passes every check."""
    return random_call(PROBLEM, BATCH, slots=SLOTS, **kwargs)


def good_ragged_call(**kwargs: Any) -> Call:
    """The same with rows of 3, 0 and 2 tokens, and one token that no row has."""
    return random_call(RAGGED, BATCH, slots=SLOTS, **{"lengths": (3, 0, 2), "tail": 1} | kwargs)


def _set(name: str, make: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], None]:
    def change(k: dict[str, Any]) -> None:
        k[name] = make(k[name])

    return change


def _pad_last(t: torch.Tensor, extra: int) -> torch.Tensor:
    """The same values with `extra` unused elements after each row."""
    wide = torch.zeros(*t.shape[:-1], t.shape[-1] + extra, dtype=t.dtype, device=t.device)
    wide[..., : t.shape[-1]] = t
    return wide[..., : t.shape[-1]]


def _every_other(t: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(*t.shape, 2, dtype=t.dtype, device=t.device)
    wide[..., 0] = t
    return wide[..., 0]


def _shifted(t: torch.Tensor) -> torch.Tensor:
    """The same values one element past an aligned address, strides kept."""
    flat = torch.zeros(t.numel() + 8, dtype=t.dtype, device=t.device)
    moved = flat[1 : 1 + t.numel()].view(t.shape)
    moved.copy_(t)
    return moved


def _overlapping(t: torch.Tensor) -> torch.Tensor:
    """Rows of dimension 0 half a slot apart."""
    half = t.stride(0) // 2 // 8 * 8
    return torch.zeros(t.numel(), dtype=t.dtype, device=t.device).as_strided(t.shape, (half, *t.stride()[1:]))


def _grow(t: torch.Tensor, dim: int) -> torch.Tensor:
    """One more entry along `dim`; stride-0 dimensions stay so."""
    shape = list(t.shape)
    shape[dim] += 1
    base = torch.zeros(
        [1 if s == 0 else n for n, s in zip(shape, t.stride(), strict=True)], dtype=t.dtype, device=t.device
    )
    return base.expand(shape)


def bad_inputs() -> Iterator[Bad]:
    """Every argument in every way that the contract names."""
    for name in REQUIRED:
        yield Bad(f"{name} None", _set(name, lambda t: None), TypeError, (name, "NoneType", "torch.Tensor"))
    for name in (*REQUIRED, *OPTIONAL):
        yield Bad(f"{name} list", _set(name, lambda t: t.tolist()), TypeError, (name, "list", "torch.Tensor"))
        yield Bad(f"{name} rank+1", _set(name, lambda t: t[None]), ValueError, (name, "dimensions", "expected", "("))
        yield Bad(f"{name} rank-1", _set(name, lambda t: t[0]), ValueError, (name, "dimensions", "expected", "("))
        if name != "state":
            words = (name, "meta", "expected", "cpu")
            yield Bad(f"{name} device", _set(name, lambda t: t.to("meta")), ValueError, words)
        words = (name, "torch.float64", "expected", "torch.")
        yield Bad(f"{name} float64", _set(name, lambda t: t.double()), TypeError, words)
    for name in ("x", "x_cache", "B_cache", "B", "C", "out", "z", "dt"):
        words = (name, "torch.float16", "expected", "torch.bfloat16")
        if name == "x":  # the others then disagree with x
            words = ("x_cache", "torch.bfloat16", "expected", "torch.float16")
        yield Bad(f"{name} f16 among bf16", _set(name, lambda t: t.half()), TypeError, words)
    for name in ("ring_start", "prev_num_accepted_tokens"):
        yield Bad(f"{name} i64", _set(name, lambda t: t.long()), TypeError, (name, "torch.int64", "torch.int32"))
    yield Bad(
        "indices i16", _set("state_batch_indices", lambda t: t.short()), TypeError, ("state_batch_indices", "int16")
    )
    yield Bad("dt_cache bf16", _set("dt_cache", lambda t: t.bfloat16()), TypeError, ("dt_cache", "bfloat16", "float32"))
    yield Bad("A int", _set("A", lambda t: t.int()), TypeError, ("A", "torch.int32", "torch.float32"))

    # Shapes: each dimension of each tensor one larger, where the call then disagrees with itself.
    dims = {
        "x_cache": (0, 1, 3),
        "B_cache": (0, 2, 3),
        "dt_cache": (0, 1, 2),
        "ring_start": (0,),
        "prev_num_accepted_tokens": (0,),
        "x": (2, 3),
        "dt": (0, 1, 2, 3),
        "A": (0, 1, 2),
        "B": (0, 1, 2, 3),
        "C": (0, 1, 2, 3),
        "out": (0, 1, 2, 3),
        "z": (0, 1, 2, 3),
        "D": (0, 1),
        "dt_bias": (0, 1),
        "state_batch_indices": (0,),
    }
    for name, which in dims.items():
        for dim in which:
            change = _set(name, lambda t, dim=dim: _grow(t, dim))
            yield Bad(f"{name} shape {dim}", change, ValueError, (name, "shape", "expected", "("))
    disagreeing = (("x_cache", "shape"), ("B_cache", "9 heads"), ("x", "shape"), ("B_cache", "shape"))
    for dim, words in enumerate(disagreeing):
        yield Bad(f"state shape {dim}", _set("state", lambda t, dim=dim: _grow(t, dim)), ValueError, words)
    yield Bad("no slots", _set("state", lambda t: t[:0]), ValueError, ("state", "shape", "at least one slot"))
    yield Bad("no rows", _set("x", lambda t: t[:0]), ValueError, ("x", "shape", "at least one row"))
    yield Bad("no tokens", _set("x", lambda t: t[:, :0]), ValueError, ("x", "shape", "one token"))
    yield Bad("groups", _set("B_cache", lambda t: _grow(t, 1)), ValueError, ("B_cache", "8 heads", "3 groups"))
    yield Bad("R < 2T", _set("x_cache", lambda t: t[:, :, :5]), ValueError, ("x_cache", "R = 5", "T = 3", "R >= 2T"))
    yield Bad(
        "too few slots without indices",
        lambda k: k.update(
            {n: k[n][:2] for n in (*WRITTEN[:4], "ring_start", "prev_num_accepted_tokens")}, state_batch_indices=None
        ),
        ValueError,
        ("state", "2 slots", "3 rows", "at least 3"),
    )

    # Strides and alignment.
    for name in ROWS:
        row = (name, "stride", "last dimension", "expected 1")
        yield Bad(f"{name} last stride", _set(name, _every_other), ValueError, row)
        words = (name, "stride", "bytes", "multiple of 16 bytes")
        yield Bad(f"{name} odd rows", _set(name, lambda t: _pad_last(t, 1)), ValueError, words)
        yield Bad(f"{name} pointer", _set(name, _shifted), ValueError, (name, "data pointer", "multiple of 16"))
        words = (name, "stride 0", "dimension 0")
        yield Bad(f"{name} expanded", _set(name, lambda t: t[:1].expand(t.shape)), ValueError, words)
    yield Bad("dt_cache last stride", _set("dt_cache", _every_other), ValueError, ("dt_cache", "stride", "expected 1"))
    for name in WRITTEN:
        yield Bad(f"{name} overlaps", _set(name, _overlapping), ValueError, (name, "strides", "overlapping"))
    for name in ("dt", "A", "D", "dt_bias"):
        words = (name, "stride", "expected 0")
        yield Bad(f"{name} not broadcast", _set(name, lambda t: t.contiguous()), ValueError, words)
    yield Bad(
        "A broadcast over P only",
        _set("A", lambda t: t[:, :1].contiguous().expand(t.shape)),
        ValueError,
        ("A", "dimension 2", "expected 0"),
    )

    # 8-bit states need scales.
    for dtype, short in ((torch.int8, "i8"), (torch.float8_e4m3fn, "f8e4m3")):
        words = ("state_scale", "None", short, "8-bit")
        yield Bad(f"state {short}", _set("state", lambda t, d=dtype: t.nan_to_num().to(d)), ValueError, words)

    def wide_window(k: dict[str, Any]) -> None:
        for name in ("x_cache", "B_cache"):
            k[name] = k[name].new_zeros(*k[name].shape[:2], 68, k[name].shape[3])
        k["dt_cache"] = k["dt_cache"].new_zeros(*k["dt_cache"].shape[:2], 68)

    yield Bad("W = 65", wide_window, NotImplementedError, ("window", "W = 65", "not served", "W <= 64"))

    def narrow_heads(k: dict[str, Any]) -> None:
        for name in ("state", "A"):
            k[name] = k[name].new_zeros(*k[name].shape[:-2], 1, 1).expand(*k[name].shape[:-2], 32, 128)
        k["state"] = k["state"].contiguous()
        for name in ("x_cache", "x", "out", "z"):
            k[name] = k[name].new_zeros(*k[name].shape[:-1], 32)
        for name in ("dt", "D", "dt_bias"):
            k[name] = k[name][..., :32]

    yield Bad("head_dim 32", narrow_heads, ValueError, ("head_dim", "32", "(64, 80, 128)"))

    yield Bad("dt_softplus int", lambda k: k.update(dt_softplus=1), TypeError, ("dt_softplus", "int", "bool"))


# Faults of `bad_inputs` that are none in a ragged call, where dimension 0 of the tokens' tensors has one entry.
DENSE_ONLY = {f"{name} expanded" for name in ("x", "B", "C", "out", "z")} | {"out overlaps"}


def bad_packing() -> Iterator[Bad]:
    """What a ragged call adds: its two arguments in every wrong way, and tokens that do not agree with them."""
    cu, both = "cu_seqlens", "expected both or neither of cu_seqlens and max_seqlen"
    yield Bad("cu list", _set(cu, lambda t: t.tolist()), TypeError, (cu, "list", "torch.Tensor"))
    yield Bad("cu rank+1", _set(cu, lambda t: t[None]), ValueError, (cu, "2 dimensions", "expected 1", "(batch + 1,)"))
    yield Bad("cu rank-1", _set(cu, lambda t: t[0]), ValueError, (cu, "0 dimensions", "expected 1", "(batch + 1,)"))
    yield Bad("cu device", _set(cu, lambda t: t.to("meta")), ValueError, (cu, "meta", "expected", "cpu"))
    for dtype in (torch.int64, torch.float32):
        words = (cu, str(dtype), "expected torch.int32")
        yield Bad(f"cu {dtype}", _set(cu, lambda t, d=dtype: t.to(d)), TypeError, words)
    words = (cu, "stride 2", "expected 1 (contiguous)")
    yield Bad("cu strided", _set(cu, lambda t: t.repeat_interleave(2)[::2]), ValueError, words)
    words = (cu, "stride 0", "expected 1 (contiguous)")
    yield Bad("cu expanded", _set(cu, lambda t: t[:1].expand(t.shape)), ValueError, words)
    words = (cu, "shape (1,)", "expected (batch + 1,)", "at least one row")
    yield Bad("cu of no row", _set(cu, lambda t: t[:1]), ValueError, words)
    words = ("state_batch_indices", "shape (3,)", "expected (4,)")
    yield Bad("cu of another batch", _set(cu, lambda t: _grow(t, 0)), ValueError, words)
    yield Bad(
        "cu alone", lambda k: k.update(max_seqlen=None), ValueError, ("max_seqlen", "None beside cu_seqlens", both)
    )
    yield Bad("max alone", lambda k: k.update(cu_seqlens=None), ValueError, (cu, "None beside max_seqlen", both))
    for value in (3.0, True, "3", torch.tensor(3)):
        words = ("max_seqlen", type(value).__name__, "expected an int in 1..32")
        yield Bad(f"max {value!r}", lambda k, v=value: k.update(max_seqlen=v), TypeError, words)
    for number in (-1, 0, 33):
        words = ("max_seqlen", f"got {number}", "expected 1..32")
        yield Bad(f"max {number}", lambda k, n=number: k.update(max_seqlen=n), ValueError, words)
    words = ("x_cache", "R = 10", "T = 6", "R >= 2T")
    yield Bad("max beyond the ring", lambda k: k.update(max_seqlen=6), ValueError, words)
    words = ("x", "shape (2, 6, 8, 64)", "expected (1, 6, 8, 64) (1, total, H, P)")
    yield Bad("two long rows", _set("x", lambda t: t.repeat(2, 1, 1, 1)), ValueError, words)
    yield Bad(
        "rows apart", _set("x", lambda t: t[0, :, None]), ValueError, ("x", "shape (6, 1, 8, 64)", "total, H, P)")
    )
    for name in ("dt", "B", "C", "out", "z"):
        words = (name, "shape (1, 7, ", "expected (1, 6, ", "(1, total, ")
        yield Bad(f"{name} of another total", _set(name, lambda t: _grow(t, 1)), ValueError, words)
