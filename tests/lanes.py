"""Runs the step kernel's own phases lane by lane in plain Python, to see every address that they form.

The phases are traced code: their integers are Python's here, their loads and stores look up who owns an address,
and their arithmetic hands one operand on, so that a stored word can be traced back to the word it came from.
"""

from __future__ import annotations

import collections
import importlib
import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

PHASES = ("decay", "products", "spec", "state_tile", "step", "tokens")


def _untraced() -> tuple[ModuleType, ...]:
    """Copies of the kernel modules of this harness's own: compiling rewrites traced functions where they are."""
    package = "replayssm_cute.kernels"
    compiled = {name: sys.modules.pop(name) for name in list(sys.modules) if f"{name}.".startswith(f"{package}.")}
    try:
        return tuple(importlib.import_module(f"{package}.{name}") for name in PHASES)
    finally:
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
            del sys.modules[name]
        sys.modules.update(compiled)
        if package in compiled:
            sys.modules["replayssm_cute"].kernels = compiled[package]  # type: ignore[attr-defined]


MODULES = _untraced()
step = MODULES[PHASES.index("step")]
Place = tuple[Any, ...]


class Word:
    """A loaded word, or what arithmetic made of it: it stays where it came from."""

    def __init__(self, places: tuple[Place, ...]) -> None:
        self.places = places

    def _same(self, *_: Any) -> Word:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = _same

    def halves(self) -> tuple[Word, Word]:
        middle = len(self.places) // 2
        return Word(self.places[:middle]), Word(self.places[middle:])


class Tensor:
    """A global tensor: strides, who owns each element, and how often each was read and written."""

    def __init__(self, name: str, shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> None:
        self.name, self.shape, self.stride, self.size = name, shape, strides, size
        self.owner = {
            sum(i * s for i, s in zip(place, strides, strict=True)): place
            for place in itertools.product(*(range(1 if s == 0 else n) for n, s in zip(shape, strides, strict=True)))
        }
        self.read: collections.Counter[Place] = collections.Counter()
        self.written: collections.Counter[Place] = collections.Counter()
        self.source: dict[Place, Place] = {}

    def _flat(self, index: tuple[int, ...]) -> int:
        for i, n in zip(index, self.shape, strict=True):
            assert 0 <= i < n, f"{self.name}{index}, shape {self.shape}"
        return sum(i * s for i, s in zip(index, self.stride, strict=True))

    def __getitem__(self, index: Any) -> Any:
        index = index if isinstance(index, tuple) else (index,)
        if index[-1] is None:
            return SimpleNamespace(iterator=Pointer(self, self._flat((*index[:-1], 0))))
        self.read[self.owner[self._flat(index)]] += 1
        return 1.0

    def __setitem__(self, index: tuple[int, ...], value: Any) -> None:
        self.written[self.owner[self._flat(index)]] += 1

    def places(self, at: int, count: int) -> list[Place]:
        bytes_ = 4 * count
        assert at * self.size % bytes_ == 0, f"{self.name}: {bytes_} bytes at element {at} are not aligned"
        found = [self.owner.get(at + k) for k in range(bytes_ // self.size)]
        assert None not in found, f"{self.name}: element {at} and what follows belong to no row"
        assert len({p[:-1] for p in found if p}) == 1, f"{self.name}: one access runs from row to row, {found}"
        return [p for p in found if p is not None]


class Pointer:
    """An address in a tensor, in elements."""

    def __init__(self, tensor: Any, at: int) -> None:
        self.tensor, self.at = tensor, at

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.tensor, self.at + offset)


class Tile:
    """A warp's state tile in shared memory, under the 128-byte swizzle; addresses are words."""

    def __init__(self, state_bytes: int) -> None:
        self.state_bytes = state_bytes
        self.read: collections.Counter[int] = collections.Counter()
        self.loads: list[int] = []

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self, offset)

    def places(self, at: int) -> list[tuple[int, int]]:
        """(row, column) of the state elements in one word."""
        block, within = divmod(at, 16 * 32)
        row, word = divmod(within, 32)
        column = (word // 4 ^ row % 8) * 4 + word % 4
        per_word = 4 // self.state_bytes
        return [(row, (block * 32 + column) * per_word + e) for e in range(per_word)]


class Floats:
    """Shared memory of floats: in bounds, and nothing is read that was not written."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.written: collections.Counter[int] = collections.Counter()
        self.reads: list[int] = []

    def __getitem__(self, at: int) -> float:
        assert self.written[at], f"float {at} is read and was never written"
        self.reads.append(at)
        return 1.0

    def __setitem__(self, at: int, value: Any) -> None:
        assert 0 <= at < self.size, f"float {at} of {self.size}"
        self.written[at] += 1


def _load_words(pointer: Pointer, count: int) -> list[Word]:
    if isinstance(pointer.tensor, Tile):
        assert pointer.at % count == 0
        pointer.tensor.loads.append(pointer.at)
        pointer.tensor.read.update(range(pointer.at, pointer.at + count))
        return [Word(tuple(pointer.tensor.places(pointer.at + k))) for k in range(count)]
    places = pointer.tensor.places(pointer.at, count)
    pointer.tensor.read.update(places)
    each = len(places) // count
    return [Word(tuple(places[k * each : (k + 1) * each])) for k in range(count)]


def _store_words(pointer: Pointer, words: list[Any]) -> None:
    places = pointer.tensor.places(pointer.at, len(words))
    pointer.tensor.written.update(places)
    sources = [p for w in words if isinstance(w, Word) for p in w.places]
    if sources:
        pointer.tensor.source.update(zip(places, sources, strict=True))


def _pack(kind: str, low: Any, high: Any) -> Any:
    return Word(low.places + high.places) if isinstance(low, Word) and isinstance(high, Word) else 0


def _half(which: int) -> Callable[[str, Any], Any]:
    return lambda kind, word: word.halves()[which] if isinstance(word, Word) else 1.0


def _lane(value: Any, lane: int, **_: Any) -> Any:
    assert 0 <= lane < 32
    return value


def _assume(value: int, divby: int) -> int:
    assert value % divby == 0, f"{value} was promised to be a multiple of {divby}"
    return value


def _same(value: Any, *_: Any) -> Any:
    return value


CUTLASS = SimpleNamespace(
    min=min,
    max=max,
    select_=lambda condition, a, b: a if condition else b,
    range=lambda *bounds, unroll=1: range(*bounds),
    range_constexpr=range,
    const_expr=_same,
)
CUTE = SimpleNamespace(
    assume=_assume,
    make_layout=_same,
    make_rmem_tensor=lambda count, dtype: [None] * count,
    math=SimpleNamespace(exp=lambda v: 1.0, log1p=lambda v: 1.0),
)
REPLACED: dict[str, Any] = {
    "cutlass": CUTLASS,
    "Int32": lambda v: v if isinstance(v, Word) else int(v),
    "Float32": lambda v: v if isinstance(v, Word) else float(v),
    "Boolean": bool,
    "load_words": _load_words,
    "store_words": _store_words,
    "mma_16bit": lambda kind, acc, a, b: tuple(acc),
    "mma_tf32": lambda acc, a, b: tuple(acc),
    "to_tf32": _same,
    "bits": _same,
    "as_float": _same,
    "low_half": _half(0),
    "high_half": _half(1),
    "pack": _pack,
}


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the kernel's modules run in plain Python."""
    for module in MODULES:
        for name, value in REPLACED.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
        monkeypatch.setattr(module, "cute", CUTE)
        for _, owner in inspect.getmembers(module, inspect.isclass):
            for name, method in list(vars(owner).items()):
                if inspect.isfunction(method) and hasattr(method, "__wrapped__"):
                    monkeypatch.setattr(owner, name, inspect.unwrap(method))


class Launch:
    """A launch on one slot a row, its cursors given; `run` goes through every lane of every CTA."""

    def __init__(self, problem: Problem, config: TileConfig, cursors: list[tuple[int, int]], flushing: bool) -> None:
        p = self.problem = problem
        self.config, self.cursors = config, cursors
        self.kernel = step.StepKernel(problem, config)
        self.batch = len(cursors)
        self.flushing = flushing
        b, rows, io, state = self.batch, p.ring_rows, 2, p.state_bytes
        gap = 0 if p.compact else 8

        def tensor(name: str, size: int, *shape: int, wide: tuple[int, ...]) -> Tensor:
            """Contiguous, but for gaps of 8 elements after each entry of the dimensions in `wide`."""
            strides, reach = [1], shape[-1]
            for d in range(len(shape) - 2, -1, -1):
                reach += 8 if d in wide or (gap and d == len(shape) - 2) else 0
                strides.insert(0, reach)
                reach *= shape[d]
            return Tensor(name, shape, tuple(strides), size)

        self.state = tensor("state", state, b, p.heads, p.head_dim, p.d_state, wide=(0,))
        self.x_cache = tensor("x_cache", io, b, p.heads, rows, p.head_dim, wide=(0,))
        self.b_cache = tensor("B_cache", io, b, p.groups, rows, p.d_state, wide=(0,))
        self.dt_cache = tensor("dt_cache", 4, b, p.heads, rows, wide=(0,))
        token = (b, p.tokens, p.heads, p.head_dim)
        self.x, self.out, self.z = (tensor(n, io, *token, wide=(0, 1)) for n in ("x", "out", "z"))
        group = (b, p.tokens, p.groups, p.d_state)
        self.b, self.c = (tensor(n, io, *group, wide=(0, 1)) for n in ("B", "C"))
        self.dt = Tensor("dt", token, (p.tokens * p.heads + 8, p.heads, 1, 0), io)
        self.a = Tensor("A", (p.heads, p.head_dim, p.d_state), (1, 0, 0), 4)
        self.d, self.dt_bias = (Tensor(n, (p.heads, p.head_dim), (1, 0), 4) for n in ("D", "dt_bias"))

    def lanes(self) -> Iterator[tuple[int, int]]:
        return itertools.product(range(self.kernel.spec.warps), range(32))

    def run(self) -> None:
        for block in range(self.kernel.grid_size(self.batch)):
            self.block(*self.kernel.place(block, self.batch))

    def block(self, row: int, split: int, head0: int, count: int) -> None:
        """The phases in the kernel's order; barriers stand between the loops over lanes."""
        k, s, p = self.kernel, self.kernel.spec, self.problem
        start, pnat = self.cursors[row]
        group = head0 // p.heads_per_group
        sums = Floats(s.shared.slices * s.shared.product_floats)
        vectors = Floats(self.config.heads_per_cta * s.shared.vector_floats)
        held: dict[tuple[int, int], Any] = {}
        for warp, lane in self.lanes():
            g, t = lane // 4, lane % 4
            p0 = (split * s.warps + warp) * 16
            scan = s.warps - 1 - warp
            scan_head = head0 + min(scan, count - 1)
            words = k.products.load_new(self.b, self.c, row, group, warp, g, t)
            new = k.decay.load_new(self.dt, self.a, self.dt_bias, row, scan_head, lane)
            inputs = k.tokens.load_new(self.x, self.z, self.d, row, head0, p0, g, t)
            ring_dt = k.decay.load_ring(self.dt_cache, row, scan_head, start, pnat, lane)
            ring_x = k.tokens.load_ring_x(self.x_cache, row, head0, p0, start, pnat, g, t)
            k.products.partial_sums(self.b_cache, words, sums, row, group, start, pnat, warp, g, t)
            for i in range(scan, count, s.warps):
                k.decay.make_vectors(
                    self.dt_cache, new, ring_dt, vectors, i, row, head0 + i, start, pnat, split, lane
                )  # fmt: skip
            held[warp, lane] = (ring_x, *inputs)
        assert set(sums.written.values()) | set(vectors.written.values()) == {1}, "a shared float is written twice"
        for i in range(count):
            tiles = {warp: Tile(p.state_bytes) for warp in range(s.warps)}
            flushed = {warp: Tile(p.state_bytes) for warp in range(s.warps)}
            for warp, lane in self.lanes():
                g, t = lane // 4, lane % 4
                p0 = (split * s.warps + warp) * 16
                ring_x, new_x, gates, skip = held[warp, lane]
                if i + 1 < count:
                    ahead = k.tokens.load_ring_x(self.x_cache, row, head0 + i + 1, p0, start, pnat, g, t)
                    held[warp, lane] = (
                        ahead, *k.tokens.load_new(self.x, self.z, self.d, row, head0 + i + 1, p0, g, t)
                    )  # fmt: skip
                x_words = k.tokens.mask_x(ring_x, new_x, start, pnat, t)
                c_words = k.state_tile.load_c(self.c, row, group, g, t)
                parts, factors = k.tokens.contributions(x_words, sums, vectors, i, skip, start, pnat, g, t)
                k.tokens.append_x(self.x_cache, x_words, row, head0 + i, p0, start, pnat, g, t)
                read_out = k.state_tile.read_out(tiles[warp], c_words, g, t)
                k.tokens.store_outputs(self.out, read_out, parts, factors, gates, row, head0 + i, p0, g, t)
                if self.flushing:
                    k.state_tile.flush(
                        self.state, self.b_cache, vectors, flushed[warp], x_words, i, row, group, head0 + i, p0, start,
                        pnat, g, t,
                    )  # fmt: skip
            for tile in (*tiles.values(), *(flushed.values() if self.flushing else ())):
                assert tile.read == collections.Counter(range(16 * p.d_state * p.state_bytes // 4)), "state elements"
                self.conflict_free(tile)
        if head0 % p.heads_per_group == 0 and split == 0:
            with pytest.MonkeyPatch.context() as patched:
                for thread in range(s.threads):
                    patched.setattr(CUTE.arch, "thread_idx", lambda thread=thread: (thread, 0, 0), raising=False)
                    k.tokens.append_b(self.b_cache, self.b, row, row, group, start, pnat)

    @staticmethod
    def conflict_free(tile: Tile) -> None:
        """16-byte loads go by quarters of a warp, 8 lanes at a time: their 32 words must be in 32 banks."""
        per_lane = len(tile.loads) // 32
        for quarter in range(4):
            for load in range(per_lane):
                banks = {tile.loads[lane * per_lane + load] % 32 for lane in range(8 * quarter, 8 * quarter + 8)}
                assert len(banks) == 8, f"load {load} of lanes {8 * quarter}..: banks {sorted(banks)}"


CUTE.arch = SimpleNamespace(shuffle_sync=_lane, shuffle_sync_up=lambda value, distance, **_: value)
