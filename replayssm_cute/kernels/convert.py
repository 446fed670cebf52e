"""Operations on low-precision states: `ptx`'s text as the DSL's."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from . import ptx
from .primitives import _asm, _asm_memory


def _words(text: str, count: int, words: list[Any], floats: list[Any], loc: Any, ip: Any) -> list[Int32]:
    """Run a text that makes `count` words of f32 values and words, in this order."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in floats]
    operands += [Int32(w).ir_value(loc=loc, ip=ip) for w in words]
    constraints = ",".join(["=r"] * count + ["f"] * len(floats) + ["r"] * len(words))
    if count == 1:
        return [Int32(_asm(T.i32(), operands, text, constraints, loc, ip))]
    result = _asm(llvm.StructType.get_literal([T.i32()] * count), operands, text, constraints, loc, ip)
    return [Int32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip)) for i in range(count)]


@dsl_user_op
def philox(counter: list[Any], key: list[Any], rounds: int, *, loc: Any = None, ip: Any = None) -> list[Int32]:
    """Four random words of a counter (4) and a key (2)."""
    return _words(ptx.philox(rounds), 4, [*counter, *key], [], loc, ip)


@dsl_user_op
def decode_bytes(kind: str, io: str, word: Any, *, loc: Any = None, ip: Any = None) -> list[Int32]:
    """A word of four 8-bit values as two words of two `io` values, less `ptx.DECODE_GAIN`."""
    return _words(ptx.decode_bytes(kind, io), 2, [word], [], loc, ip)


@dsl_user_op
def encode_bytes(
    kind: str, values: list[Any], random: list[Any], hardware: bool, *, loc: Any = None, ip: Any = None
) -> Int32:
    """Four f32 as a word of 8-bit values: to nearest, or by one random word (f8e4m3) or two (i8)."""
    if not random:
        text = ptx.encode_nearest(kind)
    elif hardware and kind in ptx.HARDWARE:
        text = ptx.HARDWARE[kind]
    else:
        text = ptx.encode_stochastic(kind)
    return _words(text, 1, random, values, loc, ip)[0]


@dsl_user_op
def encode_pair(
    kind: str, low: Any, high: Any, random: Any, hardware: bool, *, loc: Any = None, ip: Any = None
) -> Int32:
    """Two f32 as a word of two bf16 or f16, by a random word."""
    return _words(ptx.HARDWARE[kind] if hardware else ptx.pair_stochastic(kind), 1, [random], [low, high], loc, ip)[0]


@dsl_user_op
def max_abs(most: Any, value: Any, *, loc: Any = None, ip: Any = None) -> Float32:
    """The larger of `most` and |value|; NaN if either is."""
    operands = [Float32(v).ir_value(loc=loc, ip=ip) for v in (most, value)]
    return Float32(_asm(T.f32(), operands, ptx.MAX_ABS, "=f,f,f", loc, ip))


@dsl_user_op
def prefetch_row(address: Any, size: int, *, loc: Any = None, ip: Any = None) -> None:
    """Ask for `size` bytes of global memory, a multiple of 16, to be put into L2; nothing waits for it."""
    operands = [Int64(address).ir_value(loc=loc, ip=ip), Int32(size).ir_value(loc=loc, ip=ip)]
    _asm_memory(None, operands, "cp.async.bulk.prefetch.L2.global [$0], $1;", "l,r", loc, ip)
