"""Building blocks: warp MMAs, 16-bit packing, word loads and stores, matrix loads, asynchronous copies.

Inline PTX that does arithmetic is declared free of side effects, so that the compiler may schedule and merge it.
Registers that hold two 16-bit values are Int32 "words": low half first in memory.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

CUTLASS_TYPE = {
    "f32": cutlass.Float32,
    "bf16": cutlass.BFloat16,
    "f16": cutlass.Float16,
    "i32": cutlass.Int32,
    "i64": cutlass.Int64,
    "f8e4m3": cutlass.Float8E4M3FN,
    "i8": cutlass.Int8,
}
PTX_TYPE = {"bf16": "bf16", "f16": "f16"}


def quotient(n: Any, k: int) -> Any:
    """n // k of n >= 0.

    The DSL's // rounds negative numbers down too, which takes so many instructions that step kernels had up to a fifth
    more of them.
    """
    if isinstance(n, int):
        return n // k
    return Int32(n) >> (k.bit_length() - 1) if k & (k - 1) == 0 else Int32(Uint32(n) // Uint32(k))


def remainder(n: Any, k: int) -> Any:
    """n % k of n >= 0."""
    if isinstance(n, int):
        return n % k
    return Int32(n) & (k - 1) if k & (k - 1) == 0 else n - quotient(n, k) * k


def _asm(result: Any, operands: list[Any], text: str, constraints: str, loc: Any, ip: Any) -> Any:
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints,
        has_side_effects=False,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


def _mma(shape_types: str, c: Any, a: Any, b: Any, loc: Any, ip: Any) -> tuple[Float32, ...]:
    operands = [Int32(v).ir_value(loc=loc, ip=ip) for v in (*a, *b)]
    operands += [Float32(v).ir_value(loc=loc, ip=ip) for v in c]
    struct = llvm.StructType.get_literal([T.f32()] * 4)
    result = _asm(
        struct,
        operands,
        f"mma.sync.aligned.{shape_types} {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f",
        loc,
        ip,
    )
    return tuple(Float32(llvm.extractvalue(T.f32(), result, [i], loc=loc, ip=ip)) for i in range(4))


@dsl_user_op
def mma_tf32(c: Any, a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """c + a·b for one m16n8k8 tile; a (4) and b (2) are f32 bit patterns, of which tf32's bits count."""
    return _mma("m16n8k8.row.col.f32.tf32.tf32.f32", c, a, b, loc, ip)


@dsl_user_op
def mma_16bit(kind: str, c: Any, a: Any, b: Any, *, loc: Any = None, ip: Any = None) -> tuple[Float32, ...]:
    """c + a·b for one m16n8k16 tile; a (4) and b (2) are words of two bf16 or f16 (`kind`)."""
    t = PTX_TYPE[kind]
    return _mma(f"m16n8k16.row.col.f32.{t}.{t}.f32", c, a, b, loc, ip)


@dsl_user_op
def to_tf32(v: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Bits of v rounded to the nearest tf32 (ties away); NaN stays NaN."""
    return Int32(_asm(T.i32(), [Float32(v).ir_value(loc=loc, ip=ip)], "cvt.rna.tf32.f32 $0, $1;", "=r,f", loc, ip))


@dsl_user_op
def low_half(kind: str, word: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The first of a word's two 16-bit values, as f32."""
    w = Int32(word).ir_value(loc=loc, ip=ip)
    if kind == "bf16":
        return Float32(_asm(T.f32(), [w], "shl.b32 $0, $1, 16;", "=f,r", loc, ip))
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, lo; }"
    return Float32(_asm(T.f32(), [w], text, "=f,r", loc, ip))


@dsl_user_op
def high_half(kind: str, word: Int32, *, loc: Any = None, ip: Any = None) -> Float32:
    """The second of a word's two 16-bit values, as f32."""
    w = Int32(word).ir_value(loc=loc, ip=ip)
    if kind == "bf16":
        return Float32(_asm(T.f32(), [w], "and.b32 $0, $1, 0xffff0000;", "=f,r", loc, ip))
    text = "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, $1; cvt.f32.f16 $0, hi; }"
    return Float32(_asm(T.f32(), [w], text, "=f,r", loc, ip))


@dsl_user_op
def pack(kind: str, low: Float32, high: Float32, *, loc: Any = None, ip: Any = None) -> Int32:
    """Two f32 rounded to the nearest bf16 or f16, as one word."""
    operands = [Float32(high).ir_value(loc=loc, ip=ip), Float32(low).ir_value(loc=loc, ip=ip)]
    return Int32(_asm(T.i32(), operands, f"cvt.rn.{PTX_TYPE[kind]}x2.f32 $0, $1, $2;", "=r,f,f", loc, ip))


def _asm_memory(result: Any, operands: list[Any], text: str, constraints: str, loc: Any, ip: Any) -> Any:
    """Inline PTX that reads or writes memory: kept, and kept in order with other accesses."""
    return llvm.inline_asm(
        result,
        operands,
        text,
        constraints + ",~{memory}" if constraints else "~{memory}",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
        loc=loc,
        ip=ip,
    )


@dsl_user_op
def load_matrices(
    address: Int32, count: int, transpose: bool = False, *, loc: Any = None, ip: Any = None
) -> tuple[Int32, ...]:
    """ldmatrix: `count` (2 or 4) 8 x 8 matrices of 16-bit values (or 8 x 4 of 32-bit ones), a word of each.

    Lane l passes the shared-memory address of row l % 8 of matrix l // 8, 16 bytes. Lane (g, t) = (l // 4, l % 4)
    receives word t of row g of each; with `transpose` the values 2t and 2t + 1 of column g.
    """
    words = ",".join(f"${i}" for i in range(count))
    result = _asm_memory(
        llvm.StructType.get_literal([T.i32()] * count),
        [Int32(address).ir_value(loc=loc, ip=ip)],
        f"ldmatrix.sync.aligned.m8n8.x{count}{'.trans' if transpose else ''}.shared.b16 {{{words}}}, [${count}];",
        ",".join(["=r"] * count + ["r"]),
        loc,
        ip,
    )
    return tuple(Int32(llvm.extractvalue(T.i32(), result, [i], loc=loc, ip=ip)) for i in range(count))


@dsl_user_op
def copy_async(to: Int32, source: Int64, wanted: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """cp.async of 16 bytes to shared memory; `wanted` 0 reads nothing and writes zeros."""
    operands = [
        Int32(to).ir_value(loc=loc, ip=ip),
        Int64(source).ir_value(loc=loc, ip=ip),
        Int32(wanted).ir_value(loc=loc, ip=ip),
    ]
    _asm_memory(None, operands, "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", "r,l,r", loc, ip)


@dsl_user_op
def permute(low: Int32, high: Int32, selector: Any, *, loc: Any = None, ip: Any = None) -> Int32:
    """Four of the eight bytes of (low, high), chosen by the selector's four hexadecimal digits (prmt)."""
    operands = [Int32(v).ir_value(loc=loc, ip=ip) for v in (low, high, selector)]
    return Int32(_asm(T.i32(), operands, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", loc, ip))


LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632  # selectors: the low halves of two words, first word first; the high ones


def bits(v: Any) -> Int32:
    """An f32 value's bits."""
    return Float32(v).bitcast(Int32)


def as_float(word: Any) -> Float32:
    """A word's bits as f32."""
    return Int32(word).bitcast(Float32)


def load_words(pointer: cute.Pointer, count: int) -> list[Int32]:
    """`count` consecutive 4-byte words in one access; the pointer's known alignment decides its width."""
    words = cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), cute.make_layout(count)).load()
    return [words[i] for i in range(count)]


def store_words(pointer: cute.Pointer, words: list[Int32]) -> None:
    """Consecutive 4-byte words in one access."""
    fragment = cute.make_rmem_tensor(cute.make_layout(len(words)), Int32)
    for i, word in enumerate(words):
        fragment[i] = word
    target = cute.make_tensor(cute.recast_ptr(pointer, dtype=Int32), cute.make_layout(len(words)))
    target.store(fragment.load())
