"""A producer for steps with programmatic dependent launch: what a layer's convolution is to its step.

It writes x, B, C and dt, reads as many bytes as it writes, and lets its dependents start at its own start: a step that
waits for it at the right place has its slots, cursors and state under way by then. It copies, so that a step behind it
must give the very outputs of a step on the originals; one that reads too early does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
import torch
from cutlass import Int32

from replayssm_cute import calls, dtypes
from replayssm_cute.kernels.primitives import CUTLASS_TYPE, load_words, store_words
from replayssm_cute.problem import Problem

THREADS = 256
_WORDS = 4  # of a thread's access

Produce = Callable[..., None]


def _size(t: Any) -> Any:
    return t.shape[0]


class ProducerKernel:
    """Copies three tensors of 16-byte rows, and one of single values; a thread an access."""

    @cute.jit
    def __call__(
        self,
        x_from: cute.Tensor,
        x: cute.Tensor,
        B_from: cute.Tensor,
        B: cute.Tensor,
        C_from: cute.Tensor,
        C: cute.Tensor,
        dt_from: cute.Tensor,
        dt: cute.Tensor,
        stream: Any,
    ) -> None:
        accesses = (_size(x) + _size(B) + _size(C)) // _WORDS + _size(dt)
        self.kernel(x_from, x, B_from, B, C_from, C, dt_from, dt).launch(
            grid=[cute.ceil_div(accesses, THREADS), 1, 1], block=[THREADS, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        x_from: cute.Tensor,
        x: cute.Tensor,
        B_from: cute.Tensor,
        B: cute.Tensor,
        C_from: cute.Tensor,
        C: cute.Tensor,
        dt_from: cute.Tensor,
        dt: cute.Tensor,
    ) -> None:
        cute.arch.griddepcontrol_launch_dependents()
        i = Int32(cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0])
        of_x, of_b, of_c = _size(x) // _WORDS, _size(B) // _WORDS, _size(C) // _WORDS
        if i < of_x:
            self.copy(x_from, x, i)
        elif i < of_x + of_b:
            self.copy(B_from, B, i - of_x)
        elif i < of_x + of_b + of_c:
            self.copy(C_from, C, i - of_x - of_b)
        elif i < of_x + of_b + of_c + _size(dt):
            j = i - of_x - of_b - of_c
            dt[j] = dt_from[j]

    @cute.jit
    def copy(self, source: cute.Tensor, target: cute.Tensor, i: Int32) -> None:
        """One access of `_WORDS` words."""
        at = cute.assume(i * _WORDS, divby=_WORDS)
        store_words(target.iterator + at, load_words(source.iterator + at, _WORDS))


def compile_producer(problem: Problem, arch: str) -> Produce:
    """Compile for `arch`; the result takes the eight flat tensors of `flat`, sources before targets."""
    fake = cute.runtime.make_fake_tensor

    def pair(kind: str, align: int) -> list[Any]:
        size = cute.sym_int(divisibility=_WORDS) if kind == "i32" else cute.sym_int()
        return [fake(CUTLASS_TYPE[kind], (size,), (1,), assumed_align=align) for _ in range(2)]

    dt_bytes = dtypes.BYTES[problem.dt_dtype]
    compiled: Produce = cute.compile(
        ProducerKernel(),
        *pair("i32", 16),
        *pair("i32", 16),
        *pair("i32", 16),
        *pair(problem.dt_dtype, dt_bytes),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )
    return compiled


def flat(call: calls.Call) -> list[torch.Tensor]:
    """A call's x, B, C as words and its dt as values, flat views.

    Raises:
        ValueError: if one of them is not contiguous.
    """
    dt = call.dt[..., 0]
    for name, t in (("x", call.x), ("B", call.B), ("C", call.C), ("dt", dt)):
        if not t.is_contiguous():
            raise ValueError(f"{name}: got strides {t.stride()}, expected a contiguous tensor")
    return [*(t.view(torch.int32).view(-1) for t in (call.x, call.B, call.C)), dt.view(-1)]


def bind(produce: Produce, source: calls.Call, target: calls.Call) -> Callable[[], None]:
    """A call without arguments that copies the inputs of `source` to those of `target`."""
    pairs = [t for pair in zip(flat(source), flat(target), strict=True) for t in pair]
    return lambda: produce(*pairs)
