"""How a state is rounded to fewer bits: to nearest or stochastically, with or without a scale for each row.

This is the meaning of it, in plain torch; `kernels/convert.py` holds the instructions that do the same.

**8-bit values** (f8e4m3, i8) carry one f32 scale a row (the N values of a slot, head and row of head_dim): scale =
amax / 448 or amax / 127 over the row, value = code * scale. A row whose amax is below `TINY` counts as zero: its scale
is 1 and its codes are 0 (rounding what is left of it stochastically would make whole codes of it now and then). A row
with NaN has the scale NaN, and so reads as NaN.

**Stochastic rounding** goes to one of the two neighbours, to the upper one with the share of the way to it that the
value has gone: unbiased, to within the number of random bits (the mean of an i8 code is 2^-17 low). The bits come from
Philox 4x32 (Salmon et al., 2011, "Parallel random numbers: as easy as 1, 2, 3"): key = the seed's two halves, counter
= (group, head, slot, 0), where a group is `GROUP` neighbouring elements of a head's state, counted over p * N + n.
They depend on nothing else, so that no tile config and no batch changes a result. Within a group, words and halves go
to elements as PTX's `cvt.rs` takes them (f16x2: bits 0..12 and 16..28; bf16x2: the two halves; e4m3x4: each half as it
is, and bit-reversed); i8, which has no such instruction, takes a half each.
"""

from __future__ import annotations

import torch

from . import dtypes

LIMIT = {"f8e4m3": 448.0, "i8": 127.0}  # the largest code
TINY = 2.0**-100
GROUP = {"bf16": 8, "f16": 8, "i8": 8, "f8e4m3": 16}  # elements that share a Philox counter
ROUNDS = 10  # of Philox, unless asked for otherwise
MAX_ROUNDS = 16
# Of the formats that are rounded by hand: mantissa bits, the f32 exponent field of the smallest normal value, random
# bits of an element, the largest code and that of NaN.
FORMATS = {"f16": (10, 113, 13, 0x7C00, 0x7FFF), "f8e4m3": (3, 121, 16, 0x7E, 0x7F)}

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor], rounds: int) -> torch.Tensor:
    """Philox 4x32: four random words of each counter.

    Args:
        counter: four int64 tensors of values in 0..2^32-1, which broadcast.
        key: two of them.
        rounds: 10 is the usual number.

    Returns:
        int64 of one dimension more, 4 words in the last one.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(*counter)
    k0, k1 = key
    for _ in range(rounds):
        # 64-bit products wrap around, but their bits are right; shifts fill with the sign, so that masks follow.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (second >> 32 & _MASK) ^ c1 ^ k0,
            second & _MASK,
            (first >> 32 & _MASK) ^ c3 ^ k1,
            first & _MASK,
        )
        k0, k1 = k0 + _WEYL[0] & _MASK, k1 + _WEYL[1] & _MASK
    return torch.stack((c0, c1, c2, c3), -1)


def random_bits(kind: str, seed: torch.Tensor, slots: torch.Tensor, heads: int, size: int, rounds: int) -> torch.Tensor:
    """The random bits of every element of some slots' states.

    Args:
        kind: what will be rounded to, a key of `GROUP`.
        seed: one int64.
        slots: (n,) slots.
        heads, size: H, and elements of a head's state (P * N).

    Returns:
        (n, H, P * N) int64: 13 bits for f16, 16 for the others.
    """
    device, group = slots.device, GROUP[kind]
    seed = seed.reshape(()).to(device=device, dtype=torch.int64)
    counter = (
        torch.arange(size // group, device=device),
        torch.arange(heads, device=device)[:, None],
        slots.long()[:, None, None] & _MASK,
        torch.zeros((), dtype=torch.int64, device=device),
    )
    words = philox(counter, (seed & _MASK, seed >> 32 & _MASK), rounds)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)  # (n, H, groups, 4, 2)
    if kind == "f8e4m3":  # of each half one element takes the bits as they are, the next one reversed
        halves = torch.stack((halves, _reversed(halves)), -1)
    elif kind == "f16":
        halves = halves & 0x1FFF
    return halves.reshape(*words.shape[:2], size)


def _reversed(half: torch.Tensor) -> torch.Tensor:
    """The 16 bits in the other order."""
    for shift, mask in ((1, 0x5555), (2, 0x3333), (4, 0x0F0F), (8, 0x00FF)):
        half = (half >> shift & mask) | (half & mask) << shift
    return half


def stochastic(kind: str, values: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """f32 values rounded to bf16, f16, f8e4m3 or i8 by random bits of the same shape (see `random_bits`).

    f8e4m3 and i8 end at their largest value, f16 and bf16 beyond theirs at Inf. NaN stays NaN (of i8: 0).
    """
    values = values.float()
    if kind == "i8":
        noisy = (values + bits.float() * 2.0**-16).floor().clamp(-128, 127)
        return torch.where(values.isnan(), 0.0, noisy).to(torch.int8)
    word = values.contiguous().view(torch.int32).long() & _MASK
    sign, magnitude = word >> 31, word & 0x7FFFFFFF
    finite = magnitude < 0x7F800000
    if kind == "bf16":
        code = torch.where(finite, magnitude + bits, magnitude) >> 16
        return _as_float(sign << 15 | code, torch.bfloat16)
    mantissa, smallest, width, largest, nan = FORMATS[kind]
    exponent = magnitude >> 23
    significand = (magnitude & 0x7FFFFF) | 0x800000
    # What is cut off below the last bit that is kept; the random bits are added to the first `width` bits of it.
    dropped = (23 - mantissa + (smallest - exponent).clamp_min(0)).clamp_max(60)
    rest = (significand & (1 << dropped) - 1) >> (dropped - width)
    units = (significand >> dropped) + (rest + bits >> width)
    code = ((exponent - smallest).clamp_min(0) << mantissa) + units
    code = torch.where(magnitude > 0x7F800000, nan, code.clamp_max(largest))
    if kind == "f16":
        return _as_float(sign << 15 | code, torch.float16)
    return (sign << 7 | code).to(torch.uint8).view(torch.float8_e4m3fn)


def _as_float(code: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(code >= 0x8000, code - 0x10000, code).to(torch.int16).view(dtype)


def row_scales(kind: str, values: torch.Tensor) -> torch.Tensor:
    """The scales of rows (the last dimension) that are to be kept as `kind`, f32."""
    amax = values.abs().amax(-1).float()
    return torch.where(amax < TINY, 1.0, amax / LIMIT[kind])


def nearest(kind: str, values: torch.Tensor) -> torch.Tensor:
    """Values rounded to the nearest one of a state dtype, ties to even; 8-bit ones end at their largest."""
    if kind == "i8":
        return torch.where(values.isnan(), 0.0, values.round().clamp(-128, 127)).to(torch.int8)
    if kind == "f8e4m3":
        values = values.clamp(-LIMIT[kind], LIMIT[kind])
    return values.to(dtypes.TORCH[kind])


def encode(
    kind: str, values: torch.Tensor, bits: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of values as they are kept: their codes, and for 8-bit kinds their scales.

    Args:
        kind: short name of the state dtype.
        values: (..., N).
        bits: random bits of the same shape, or None for rounding to nearest.
    """
    scale = None
    if kind in dtypes.EIGHT_BIT:
        scale = row_scales(kind, values)
        inverse = torch.where(values.abs().amax(-1) < TINY, 0.0, 1.0 / scale)
        values = values.float() * inverse[..., None]
    return (nearest(kind, values) if bits is None else stochastic(kind, values, bits)), scale


def decode(codes: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What codes stand for: (..., N) codes with (...) scales, or None where they have none."""
    values = codes.to(dtype)
    return values if scale is None else values * scale.to(dtype)[..., None]
