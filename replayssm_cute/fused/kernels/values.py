"""What conv and norm share: values of any float type as f32, SiLU, a conv's arithmetic, and loads that see what another
multiprocessor has written.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ...kernels.primitives import as_float, high_half, load_words, low_half

BYTES = {"f32": 4, "bf16": 2, "f16": 2}
WORDS = 4  # 32-bit words in the widest access
TAPS = 4


def carved(carveout: int | None) -> dict[str, int]:
    """How a launch asks for its share of shared memory: see `ConvShape.carveout`."""
    return {} if carveout is None else {"preferred_smem_carveout": carveout}


def unpack(kind: str, words):
    """The values in words of f32 or of two 16-bit floats, as f32."""
    if kind == "f32":
        return [as_float(w) for w in words]
    return [half(kind, w) for w in words for half in (low_half, high_half)]


def load_values(tensor, kind: str, first, count: int):
    """`count` values from element `first` on, which is a multiple of `count`, of a contiguous vector, as f32."""
    pointer = tensor.iterator + cute.assume(first, divby=count)
    words = count * BYTES[kind] // 4
    each = min(words, WORDS)
    found = []
    for at in range(0, words, each):
        found += load_words(pointer + at * 4 // BYTES[kind], each)
    return unpack(kind, found)


def silu(v):
    """v / (1 + exp(-v)), a few units of f32's last place off; -0 where exp(-v) is too large for f32."""
    return v * cute.arch.rcp_approx(Float32(1.0) + cute.math.exp(Float32(0.0) - v, fastmath=True))


def convolved(inputs, taps, bases):
    """Some channels of one token: silu(bias + sum over k of taps_k inputs_k), in this order.

    Args:
        inputs: of each tap, oldest first, the channels' raw inputs as f32.
        taps: `TAPS` of each channel, one channel after the other.
        bases: the channels' biases, or None.
    """
    result = []
    for e in range(len(inputs[0])):
        total = Float32(0.0) if bases is None else bases[e]
        for k in range(TAPS):
            total = total + taps[TAPS * e + k] * inputs[k][e]
        result.append(silu(total))
    return result


def load_shared_by_all(pointer: cute.Pointer) -> list[Int32]:
    """Four words straight from L2: see `load_at`."""
    return load_at(Int64(pointer.toint()))


def bring_to_l2(pointer: cute.Pointer) -> None:
    """Ask for the memory at a pointer to be brought to L2."""
    prefetch(Int64(pointer.toint()))


@dsl_user_op
def load_at(address: Int64, *, loc=None, ip=None) -> list[Int32]:
    """Four words at an address in global memory, straight from L2.

    For memory that an earlier kernel has written and that is read before this one's wait for its predecessor: the L1
    cache might still hold what was there before.
    """
    words = [T.i32()] * WORDS
    result = llvm.inline_asm(
        llvm.StructType.get_literal(words),
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "ld.global.cg.v4.b32 {$0, $1, $2, $3}, [$4];",
        "=r,=r,=r,=r,l,~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
    return [Int32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip)) for i in range(WORDS)]


@dsl_user_op
def prefetch(address: Int64, *, loc=None, ip=None) -> None:
    """Ask for the memory at an address to be brought to L2."""
    llvm.inline_asm(
        None,
        [Int64(address).ir_value(loc=loc, ip=ip)],
        "prefetch.global.L2 [$0];",
        "l",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )
