"""The step kernels' arguments as the compiler sees them: no tensors, only what is promised about them."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import Int64

from ..config import TileConfig
from ..problem import ROW_ALIGN, Problem
from .primitives import CUTLASS_TYPE

FREE = "free"  # a stride that is known at run time only


def compile_options(arch: str, config: TileConfig) -> str:
    """Options of `cute.compile` for a step kernel."""
    level = "" if config.opt_level == 3 else f" --ptxas-options '-O{config.opt_level}'"
    return f"--enable-tvm-ffi --gpu-arch {arch}{level}"


def fake_arguments(problem: Problem) -> list[Any]:
    """Arguments of a step kernel for `cute.compile`: symbolic slot count, batch and strides.

    What only low-precision states have (scales, seed, read copy) comes after the stream, where there is any of it. With
    `problem.compact` the strides inside a slot, and of heads and groups, are constants.
    """
    p = problem
    slots, batch = cute.sym_int64(), cute.sym_int()
    rows, io = p.ring_rows, p.io_dtype

    def tensor(kind: str, shape: tuple[Any, ...], align: int, *strides: Any) -> Any:
        dtype = CUTLASS_TYPE[kind]
        size = dtype.width // 8
        divisor = max(1, align // size)
        given = tuple(cute.sym_int64(divisibility=divisor) if s is FREE else s for s in strides)
        return cute.runtime.make_fake_tensor(dtype, shape, given, assumed_align=max(align, size))

    def inner(stride: int) -> Any:
        return stride if p.compact else FREE

    def states(kind: str) -> Any:
        shape = (slots, p.heads, p.head_dim, p.d_state)
        return tensor(kind, shape, ROW_ALIGN, FREE, inner(p.head_dim * p.d_state), inner(p.d_state), 1)

    packed = (1, cute.sym_int()) if p.ragged else (batch, p.tokens)

    def per_token(heads: int, width: int) -> Any:
        return tensor(io, (*packed, heads, width), ROW_ALIGN, FREE, FREE, inner(width), 1)

    def per_head(kind: str | None, *sizes: int) -> Any:
        return None if kind is None else tensor(kind, (p.heads, *sizes), 1, inner(1), *(0 for _ in sizes))

    return [
        states(p.state_dtype),
        tensor(io, (slots, p.heads, rows, p.head_dim), ROW_ALIGN, FREE, inner(rows * p.head_dim), inner(p.head_dim), 1),
        tensor(io, (slots, p.groups, rows, p.d_state), ROW_ALIGN, FREE, inner(rows * p.d_state), inner(p.d_state), 1),
        tensor("f32", (slots, p.heads, rows), 4, FREE, inner(rows), 1),
        tensor("i32", (slots,), 4, FREE),
        tensor("i32", (slots,), 4, FREE),
        per_token(p.heads, p.head_dim),
        tensor(p.dt_dtype, (*packed, p.heads, p.head_dim), 1, FREE, FREE, inner(1), 0),
        per_head(p.a_dtype, p.head_dim, p.d_state),
        per_token(p.groups, p.d_state),
        per_token(p.groups, p.d_state),
        per_token(p.heads, p.head_dim),
        per_head(p.d_dtype, p.head_dim),
        per_token(p.heads, p.head_dim) if p.has_z else None,
        per_head(p.dt_bias_dtype, p.head_dim),
        None if p.index_dtype is None else tensor(p.index_dtype, (batch,), 1, FREE),
        tensor("i32", (cute.sym_int(),), 4, 1) if p.ragged else None,
        Int64(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        *(
            [
                tensor("f32", (slots, p.heads, p.head_dim), 4, FREE, inner(p.head_dim), 1) if p.scaled else None,
                None if p.philox_rounds is None else tensor("i64", (1,), 8, 1),
                None if p.copy_dtype is None else states(p.copy_dtype),
            ]
            if p.rewrites
            else []
        ),
    ]
