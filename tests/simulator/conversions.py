"""What `kernels/convert.py` compiles to: its own PTX, run by `ptx`."""

from __future__ import annotations

from typing import Any

import numpy as np

from replayssm_cute.kernels import ptx as texts

from . import ptx
from .memory import SPACE
from .values import NOW, lanes, single


def _word(value: Any) -> np.ndarray:
    """A register of bits; integers of the simulator keep their low 32."""
    value = lanes(value)
    return np.ascontiguousarray(value if value.dtype == np.uint32 else (value & 0xFFFFFFFF).astype(np.uint32))


def _floats(values: Any) -> list[np.ndarray]:
    return [np.ascontiguousarray(single(v)) for v in values]


def philox(counter: list[Any], key: list[Any], rounds: int) -> list[np.ndarray]:
    return ptx.run(texts.philox(rounds), 4, [_word(v) for v in (*counter, *key)])


def decode_bytes(kind: str, io: str, word: Any) -> list[np.ndarray]:
    return ptx.run(texts.decode_bytes(kind, io), 2, [_word(word)])


def encode_bytes(kind: str, values: list[Any], random: list[Any], hardware: bool) -> np.ndarray:
    assert not hardware
    text = texts.encode_stochastic(kind) if random else texts.encode_nearest(kind)
    return ptx.run(text, 1, [*_floats(values), *(_word(w) for w in random)])[0]


def encode_pair(kind: str, low: Any, high: Any, random: Any, hardware: bool) -> np.ndarray:
    assert not hardware
    return ptx.run(texts.pair_stochastic(kind), 1, [*_floats((low, high)), _word(random)])[0]


def prefetch_row(address: Any, size: int) -> None:
    """Nothing but a check that all of it is there."""
    first = lanes(address)
    tensor = NOW.run.spaces[int(first[NOW.warp.active][0]) // SPACE]
    assert size % 16 == 0
    for offset in (0, size - 16):
        tensor.check(first + offset, 16)


def max_abs(most: Any, value: Any) -> np.ndarray:
    return ptx.run(texts.MAX_ABS, 1, _floats((most, value)))[0]
