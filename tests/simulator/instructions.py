"""What `kernels/primitives.py` compiles to, done on numbers, fragments as in PTX: MMAs, ldmatrix, cp.async, packing."""

from __future__ import annotations

from typing import Any

import numpy as np

from .memory import SPACE, Pointer, active_addresses, site
from .values import LANES, NOW, POISON, TYPES, lanes, single, word

CUTLASS_TYPE = TYPES
LOW_HALVES, HIGH_HALVES = 0x5410, 0x7632
G, T = LANES // 4, LANES % 4
TF32 = np.uint32(0xFFFFE000)


def quotient(n: Any, k: int) -> Any:
    """n // k, and n in no active lane negative: the kernel's takes it as unsigned."""
    assert _not_negative(n)
    return n // k


def remainder(n: Any, k: int) -> Any:
    """n % k, likewise."""
    assert _not_negative(n)
    return n % k


def _not_negative(n: Any) -> bool:
    """Whether no active lane's is negative; tests may ask where no warp runs."""
    warp = getattr(NOW, "warp", None)
    return bool((lanes(n) >= 0)[warp.active if warp else slice(None)].all())


def _decode(kind: str, halves: np.ndarray) -> np.ndarray:
    if kind == "bf16":
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return halves.astype(np.uint16).view(np.float16).astype(np.float32)


def _encode(kind: str, value: np.ndarray) -> np.ndarray:
    """16 bits of each f32, rounded to nearest even."""
    if kind == "f16":
        return value.astype(np.float16).view(np.uint16).astype(np.uint32)
    bits_ = np.ascontiguousarray(value).view(np.uint32)
    rounded = (bits_ + np.uint32(0x7FFF) + ((bits_ >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), rounded)


def _accumulate(c: Any, product: np.ndarray) -> tuple[np.ndarray, ...]:
    sums = product[G, 2 * T], product[G, 2 * T + 1], product[G + 8, 2 * T], product[G + 8, 2 * T + 1]
    return tuple((single(old) + new).astype(np.float32) for old, new in zip(c, sums, strict=True))


def mma_tf32(c: Any, a: Any, b: Any) -> tuple[np.ndarray, ...]:
    NOW.warp.converged("mma")
    left, right = np.empty((16, 8)), np.empty((8, 8))
    for k, value in enumerate(a):
        left[G + 8 * (k % 2), T + 4 * (k // 2)] = (word(value) & TF32).view(np.float32)
    for k, value in enumerate(b):
        right[T + 4 * k, G] = (word(value) & TF32).view(np.float32)
    return _accumulate(c, left @ right)


def mma_16bit(kind: str, c: Any, a: Any, b: Any) -> tuple[np.ndarray, ...]:
    NOW.warp.converged("mma")
    left, right = np.empty((16, 16)), np.empty((16, 8))
    for side, half in enumerate((low_half, high_half)):
        for k, value in enumerate(a):
            left[G + 8 * (k % 2), 2 * T + 8 * (k // 2) + side] = half(kind, value)
        for k, value in enumerate(b):
            right[2 * T + 8 * k + side, G] = half(kind, value)
    return _accumulate(c, left @ right)


def to_tf32(v: Any) -> np.ndarray:
    value = single(v)
    found = bits(value)
    return np.where(np.isfinite(value), (found + np.uint32(0x1000)) & TF32, found)


def low_half(kind: str, w: Any) -> np.ndarray:
    return _decode(kind, word(w) & np.uint32(0xFFFF))


def high_half(kind: str, w: Any) -> np.ndarray:
    return _decode(kind, word(w) >> np.uint32(16))


def pack(kind: str, low: Any, high: Any) -> np.ndarray:
    return _encode(kind, single(low)) | _encode(kind, single(high)) << np.uint32(16)


def permute(low: Any, high: Any, selector: Any) -> np.ndarray:
    eight = word(low).astype(np.uint64) | word(high).astype(np.uint64) << np.uint64(32)
    chosen = lanes(selector).astype(np.uint64)
    found = np.zeros(32, np.uint64)
    for k in range(4):
        nibble = chosen >> np.uint64(4 * k) & np.uint64(15)
        assert (nibble < 8).all()
        found |= (eight >> (np.uint64(8) * nibble) & np.uint64(255)) << np.uint64(8 * k)
    return found.astype(np.uint32)


def bits(v: Any) -> np.ndarray:
    return np.ascontiguousarray(single(v)).view(np.uint32)


def as_float(w: Any) -> np.ndarray:
    return np.ascontiguousarray(word(w)).view(np.float32)


def load_matrices(address: Any, count: int, transpose: bool = False) -> tuple[np.ndarray, ...]:
    """ldmatrix: lane 8 i + r names row r of matrix i; each lane gets a word of every matrix."""
    NOW.warp.converged("ldmatrix")
    rows = NOW.cta.shared.load_rows(lanes(address)[: 8 * count]).reshape(count, 8, 4)
    if not transpose:
        return tuple(matrix[G, T] for matrix in rows)
    halves = [np.ascontiguousarray(matrix).view(np.uint16).astype(np.uint32) for matrix in rows]
    return tuple(matrix[2 * T, G] | matrix[2 * T + 1, G] << np.uint32(16) for matrix in halves)


def copy_async(to: Any, source: Any, wanted: Any) -> None:
    """cp.async: the words are in flight until their group is waited for."""
    warp, shared = NOW.warp, NOW.cta.shared
    active = warp.active.copy()
    index = shared.index(active_addresses(to, 16, site()), 4)
    shared.claim(index, warp.threads[active])
    shared.in_flight[index] = True
    sizes = lanes(wanted)
    assert set(sizes[active]) <= {0, 16}, "cp.async of a part"
    source = lanes(source)
    spaces = set(source[active] // SPACE)
    assert len(spaces) == 1
    tensor = NOW.run.spaces[spaces.pop()]
    tensor.check(source, 16)
    words = np.zeros((len(index), 4), np.uint32)
    read = active & (sizes == 16)
    if read.any():
        warp.active = read
        words[sizes[active] == 16] = np.array(tensor.load(source, 4))[:, read].T
        warp.active = active
    warp.uncommitted.append((index, words, warp.threads[active]))


def load_words(pointer: Pointer, count: int) -> list[np.ndarray]:
    if NOW.run.config.turns == 1 and site() == "weights.stored":
        # A CTA's only turn makes its weights in registers instead; the compiler drops these loads. NaN if it may not.
        return [np.full(32, POISON)] * count
    return pointer.memory.load(pointer.at, count)


def store_words(pointer: Pointer, words: list[Any]) -> None:
    assert pointer.size in (1, 2, 4)
    pointer.memory.store(pointer.at, [word(w) for w in words])
