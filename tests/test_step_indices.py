"""Every address of the step kernel, formed by its own code on the host: in bounds, aligned, complete, no one twice."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import lanes
import pytest
from lanes import Launch, Place, Tensor, step

from replayssm_cute import ring
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

BASE = Problem(heads=2, head_dim=64, d_state=128, groups=2, tokens=4, window=16, has_z=True)
FOUR = dataclasses.replace(BASE, heads=4)
CASES: dict[str, tuple[Problem, TileConfig]] = {
    "plain": (BASE, TileConfig()),
    "whole": (BASE, TileConfig(ring="whole")),
    "two heads, one stage": (FOUR, TileConfig(heads_per_cta=2)),
    "split": (BASE, TileConfig(head_split=4)),
    "one group, a tail": (dataclasses.replace(FOUR, groups=1), TileConfig(heads_per_cta=4, stages=2, tail_rows=1)),
    "more heads than warps": (
        dataclasses.replace(BASE, heads=6, groups=1),
        TileConfig(heads_per_cta=6, stages=1, head_split=4, ring="whole"),
    ),
    "T = W = 16": (dataclasses.replace(BASE, tokens=16), TileConfig()),
    "T = W = 16, whole": (dataclasses.replace(BASE, tokens=16), TileConfig(ring="whole")),
    "T = W = 1": (dataclasses.replace(BASE, tokens=1, window=1), TileConfig()),
    "T 9, W 11, whole": (dataclasses.replace(BASE, tokens=9, window=11), TileConfig(ring="whole")),
    "head_dim 80": (dataclasses.replace(BASE, head_dim=80), TileConfig()),
    "head_dim 80, d_state 256": (
        dataclasses.replace(BASE, head_dim=80, d_state=256, state_dtype="bf16"),
        TileConfig(),
    ),
    "head_dim 80, five CTAs a head": (dataclasses.replace(BASE, head_dim=80), TileConfig(head_split=5)),
    "128 x 256 f16": (
        dataclasses.replace(BASE, head_dim=128, d_state=256, heads=1, groups=1, state_dtype="f16", io_dtype="f16",
                            dt_dtype="f16"),
        TileConfig(ring="whole"),
    ),
    "128 x 64": (dataclasses.replace(BASE, head_dim=128, d_state=64), TileConfig()),
    "64 x 64 bf16": (dataclasses.replace(FOUR, d_state=64, state_dtype="bf16"), TileConfig(heads_per_cta=2, stages=2)),
    "gaps everywhere": (dataclasses.replace(FOUR, compact=False), TileConfig(heads_per_cta=2)),
    "gaps everywhere, bf16": (dataclasses.replace(BASE, compact=False, state_dtype="bf16"), TileConfig()),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes.patch(monkeypatch)


def all_of(t: Tensor, *fixed: object) -> collections.Counter[Place]:
    """Every element, each once; `fixed` are the indices allowed per dimension, None for all."""
    allowed = [range(n) if f is None else f for f, n in itertools.zip_longest(fixed, t.shape)]
    return collections.Counter(itertools.product(*allowed))  # type: ignore[arg-type]


def cursor_pairs(problem: Problem, flushing: bool) -> list[tuple[int, int]]:
    """Ring start and live rows that wrap around and that do not; the fewest and the most of each kind of step."""
    first = problem.window - problem.tokens
    few, many = (first + 1, problem.window) if flushing else (0, first)
    return [(0, many), (problem.ring_rows - 1, few)]


@pytest.mark.parametrize("flushing", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_every_element_once(name: str, flushing: bool) -> None:
    problem, config = CASES[name]
    cursors = cursor_pairs(problem, flushing)
    assert all(ring.flushes(pnat, problem.tokens, problem.window) is flushing for _, pnat in cursors)
    launch = Launch(problem, config, cursors, flushing)
    launch.run()
    assert launch.out.written == all_of(launch.out)
    assert launch.state.written == (all_of(launch.state) if flushing else collections.Counter())
    for place, source in launch.state.source.items():
        assert (place[2] % 16, place[3]) == source, "a state element was written elsewhere than it was read"
    rows = problem.ring_rows
    for row, (start, pnat) in enumerate(cursors):
        new = [(start + pnat + t) % rows for t in range(problem.tokens)]
        live = {(start + j) % rows for j in range(pnat)} or {start}
        for cache in (launch.x_cache, launch.b_cache, launch.dt_cache):
            written = collections.Counter({p: n for p, n in cache.written.items() if p[0] == row})
            assert written == all_of(cache, [row], None, new), cache.name
            read = {p[2] for p in cache.read if p[0] == row}
            assert read == (set(range(rows)) if config.ring == "whole" else live), cache.name
            assert pnat == 0 or config.ring == "whole" or not read & set(new), "a row is read while it is written"
        for cache, inputs in ((launch.x_cache, launch.x), (launch.b_cache, launch.b)):
            assert set(cache.read) >= set(all_of(cache, [row], None, live)), f"{cache.name}: live rows are left out"
            for place, source in cache.source.items():
                if place[0] == row:
                    assert source == (row, new.index(place[2]), place[1], place[3]), cache.name
            assert set(inputs.read) == set(all_of(inputs)), inputs.name
    assert set(launch.c.read) == set(all_of(launch.c)) and set(launch.z.read) == set(all_of(launch.z))


@pytest.mark.parametrize("tokens", [1, 8, 9, 16])
def test_products_are_read_without_bank_conflicts(tokens: int) -> None:
    problem = dataclasses.replace(BASE, tokens=tokens)
    kernel = step.StepKernel(problem, TileConfig())
    shared, spec = kernel.spec.shared, kernel.spec
    for k, n in itertools.product(range(spec.steps), range(spec.token_tiles)):
        reads = []
        for lane in range(32):
            sums = lanes.Floats(shared.product_floats)
            sums.written.update(range(shared.product_floats))
            kernel.products.fragment(sums, k, n, lane // 4, lane % 4)
            reads.append(sums.reads)
        for half in range(2):
            assert len({r[half] % 32 for r in reads}) == 32


@pytest.mark.parametrize(("tokens", "window"), [(1, 1), (1, 7), (5, 7), (1, 16), (2, 16), (5, 16), (16, 16)])
def test_liveness_and_rows_for_every_cursor(tokens: int, window: int) -> None:
    """A position is dead or stands for one live row, whatever the cursors, and its address is a row's."""
    problem = dataclasses.replace(BASE, tokens=tokens, window=window)
    for mode in ("live", "whole"):
        spec = step.StepKernel(problem, TileConfig(ring=mode)).spec
        for start, pnat in itertools.product(range(problem.ring_rows), range(window + 1)):
            live = [j for j in range(spec.ring_positions) if spec.is_live(start, pnat, j)]
            read = [spec.read_row(start, pnat, j) for j in live]
            assert sorted(read) == sorted((start + j) % problem.ring_rows for j in range(pnat))
            assert all(0 <= spec.read_row(start, pnat, j) < problem.ring_rows for j in range(spec.ring_positions))


@pytest.mark.parametrize("tail", [0, 1, 3, 100])
@pytest.mark.parametrize(("heads", "per_cta", "split"), [(8, 1, 1), (8, 4, 1), (8, 2, 4), (14, 7, 2)])
def test_every_head_of_every_row_has_its_ctas(heads: int, per_cta: int, split: int, tail: int) -> None:
    problem = dataclasses.replace(BASE, heads=heads, groups=1)
    config = TileConfig(heads_per_cta=per_cta, head_split=split, tail_rows=tail if per_cta > 1 else 0)
    kernel = step.StepKernel(problem, config)
    for batch in (1, 2, 3, 4, 7, 101):
        size = kernel.grid_size(batch)
        assert size == config.ctas(problem, batch)
        seen = collections.Counter(
            (row, part, head + i)
            for row, part, head, count in (kernel.place(block, batch) for block in range(size))
            for i in range(count)
        )
        assert seen == collections.Counter(itertools.product(range(batch), range(split), range(heads)))


def test_padding_rows_are_zeroed_once() -> None:
    for problem, config in CASES.values():
        launch = Launch(problem, config, [(0, 0)], False)
        kernel = launch.kernel
        for block in range(kernel.grid_size(1)):
            row, split, head0, count = kernel.place(block, 1)
            for warp, lane in launch.lanes():
                p0 = (split * kernel.spec.warps + warp) * 16
                kernel.tokens.store_zeros(launch.out, row, head0, count, p0, lane // 4, lane % 4)
        assert launch.out.written == all_of(launch.out)
