"""PTX of what has no instruction of its own: Philox, 8-bit states as MMA operands, rounding by random bits.

Text only, operands `$0`, `$1`, ... outputs first: `convert` makes DSL operations of it, and the tests' simulator runs
it. `rounding` says in torch what each of them means.
"""

from __future__ import annotations

import functools

from ..rounding import FORMATS

# What a decoded value has to be multiplied with: e4m3 becomes bf16 by moving its bits, with an exponent 120 too small.
DECODE_GAIN = {("f8e4m3", "bf16"): 2.0**120}


@functools.cache
def philox(rounds: int) -> str:
    """Four words $0..$3 of counter $4..$7 and key $8, $9."""
    body = "mov.b32 c0,$4; mov.b32 c1,$5; mov.b32 c2,$6; mov.b32 c3,$7; mov.b32 k0,$8; mov.b32 k1,$9; "
    body += rounds * (
        "mul.lo.u32 l0,c0,0xD2511F53; mul.hi.u32 h0,c0,0xD2511F53; "
        "mul.lo.u32 l1,c2,0xCD9E8D57; mul.hi.u32 h1,c2,0xCD9E8D57; "
        "xor.b32 c0,h1,c1; xor.b32 c0,c0,k0; xor.b32 c2,h0,c3; xor.b32 c2,c2,k1; mov.b32 c1,l1; mov.b32 c3,l0; "
        "add.u32 k0,k0,0x9E3779B9; add.u32 k1,k1,0xBB67AE85; "
    )
    ends = " ".join(f"mov.b32 ${i},c{i};" for i in range(4))
    return "{ .reg .b32 c0,c1,c2,c3,k0,k1,l0,l1,h0,h1; " + body + ends + " }"


def decode_bytes(kind: str, io: str) -> str:
    """Four 8-bit values of the word $2 as two words $0, $1 of two `io` values, to be multiplied with `DECODE_GAIN`."""
    if kind == "f8e4m3" and io == "f16":
        return (
            "{ .reg .b16 lo,hi; mov.b32 {lo,hi},$2; "
            "cvt.rn.f16x2.e4m3x2 $0,lo; cvt.rn.f16x2.e4m3x2 $1,hi; }"
        )  # fmt: skip
    pairs = []
    for out, (below, above) in enumerate(((0x4140, 0x1404), (0x4342, 0x3424))):
        if kind == "f8e4m3":  # each byte above 8 zeros: its sign stays, the rest goes down by the 4 bits of exponent
            pairs.append(
                f"prmt.b32 v,$2,0,{above:#x}; shr.u32 m,v,4; and.b32 m,m,0x07f007f0; and.b32 v,v,0x80008000; "
                f"or.b32 ${out},v,m; "
            )
        elif io == "f16":  # 1024 + 128 + value by its bits, less 1152
            flipped = "xor.b32 x,$2,0x80808080; " if out == 0 else ""
            pairs.append(
                f"{flipped}prmt.b32 v,x,0x64646464,{below:#x}; mov.b32 m,0x64806480; sub.rn.f16x2 ${out},v,m; "
            )
        else:  # 128 + its low bits, less 128, or 256 where it is negative
            pairs.append(
                f"prmt.b32 v,$2,0,{below:#x}; and.b32 m,v,0x00800080; and.b32 v,v,0x007f007f; "
                f"or.b32 v,v,0x43004300; or.b32 m,m,0x43004300; sub.rn.bf16x2 ${out},v,m; "
            )
    return "{ .reg .b32 v,m,x; " + "".join(pairs) + "}"


def encode_nearest(kind: str) -> str:
    """Four f32 $1..$4 as the 8-bit values of the word $0, to nearest."""
    if kind == "f8e4m3":
        return (
            "{ .reg .b16 lo,hi; cvt.rn.satfinite.e4m3x2.f32 lo,$2,$1; cvt.rn.satfinite.e4m3x2.f32 hi,$4,$3; "
            "mov.b32 $0,{lo,hi}; }"
        )
    return _packed_integers("".join(f"cvt.rni.s32.f32 i{k},${k + 1}; " for k in range(4)))


def encode_stochastic(kind: str) -> str:
    """Four f32 $1..$4 as the 8-bit values of the word $0, by the random bits of $5, and for i8 of $6."""
    if kind == "f8e4m3":
        values = []
        for k in range(4):
            half = f"and.b32 r,$5,{0xFFFF << 16 * (k // 2):#x}; "  # of the word: as it is, or in the other order
            half += f"brev.b32 r,r; shr.u32 r,r,{16 * (1 - k // 2)}; " if k % 2 else f"shr.u32 r,r,{16 * (k // 2)}; "
            values.append(half + _by_bits(kind, f"${k + 1}", f"o{k}"))
        joined = "shl.b32 o1,o1,8; shl.b32 o2,o2,16; shl.b32 o3,o3,24; or.b32 o0,o0,o1; or.b32 o2,o2,o3; "
        return _BY_BITS + "".join(values) + joined + "or.b32 $0,o0,o2; }"
    noise = ""
    for k in range(4):
        word = f"${5 + k // 2}"
        noise += f"shr.u32 r,{word},16; " if k % 2 else f"and.b32 r,{word},0xffff; "
        noise += f"cvt.rn.f32.u32 f,r; fma.rn.f32 f,f,0f37800000,${k + 1}; cvt.rmi.s32.f32 i{k},f; "  # 2^-16
    return _packed_integers(noise)


def _packed_integers(body: str) -> str:
    """`body` leaves i0..i3, which become the bytes of $0, limited to what they hold."""
    return (
        "{ .reg .b32 i0,i1,i2,i3,r,t; .reg .f32 f; " + body + "mov.b32 t,0; cvt.pack.sat.s8.s32.b32 t,i3,i2,t; "
        "cvt.pack.sat.s8.s32.b32 $0,i1,i0,t; }"
    )


def pair_stochastic(kind: str) -> str:
    """f32 $1 and $2 as the low and high 16 bits of $0, `kind` bf16 or f16, by the random bits of $3."""
    if kind == "f16":
        low = "and.b32 r,$3,0x1fff; " + _by_bits(kind, "$1", "o0")
        high = "shr.u32 r,$3,16; and.b32 r,r,0x1fff; " + _by_bits(kind, "$2", "o1")
        return _BY_BITS + low + high + "shl.b32 o1,o1,16; or.b32 $0,o0,o1; }"
    body = ""
    for value, out, bits in (("$1", "x", "and.b32 r,$3,0xffff; "), ("$2", "y", "shr.u32 r,$3,16; ")):
        body += f"mov.b32 {out},{value}; " + bits  # nothing is added to Inf and NaN
        body += f"and.b32 t,{out},0x7f800000; setp.eq.u32 p,t,0x7f800000; selp.b32 r,0,r,p; add.u32 {out},{out},r; "
    return "{ .reg .b32 x,y,r,t; .reg .pred p; " + body + "prmt.b32 $0,x,y,0x7632; }"


_BY_BITS = "{ .reg .b32 x,g,e,m,d,s,r,t,o0,o1,o2,o3; .reg .pred p; "


def _by_bits(kind: str, value: str, out: str) -> str:
    """One value by the random bits of the register r, as `rounding.stochastic` does it; shifts by over 31 give 0."""
    mantissa, smallest, width, largest, nan = FORMATS[kind]
    sign = 7 if kind == "f8e4m3" else 15
    return (
        f"mov.b32 x,{value}; and.b32 g,x,0x7fffffff; shr.u32 e,g,23; and.b32 m,g,0x7fffff; or.b32 m,m,0x800000; "
        f"sub.s32 t,{smallest},e; max.s32 t,t,0; add.s32 d,t,{23 - mantissa}; "
        f"mov.b32 t,1; shl.b32 t,t,d; sub.u32 t,t,1; and.b32 s,m,t; sub.u32 t,d,{width}; shr.u32 s,s,t; "
        f"add.u32 s,s,r; shr.u32 s,s,{width}; shr.u32 m,m,d; add.u32 m,m,s; "
        f"sub.s32 e,e,{smallest}; max.s32 e,e,0; shl.b32 e,e,{mantissa}; add.u32 m,m,e; min.u32 m,m,{largest}; "
        f"setp.gt.u32 p,g,0x7f800000; selp.b32 m,{nan},m,p; shr.u32 x,x,31; shl.b32 x,x,{sign}; or.b32 {out},x,m; "
    )


HARDWARE = {  # of targets that round stochastically themselves: the same operands
    "f8e4m3": "cvt.rs.satfinite.e4m3x4.f32 $0,{$4,$3,$2,$1},$5;",
    "bf16": "cvt.rs.bf16x2.f32 $0,$2,$1,$3;",
    "f16": "cvt.rs.f16x2.f32 $0,$2,$1,$3;",
}
HARDWARE_ARCHES = ("sm_100a", "sm_103a")

MAX_ABS = "{ .reg .f32 a; abs.f32 a,$2; max.NaN.f32 $0,$1,a; }"
