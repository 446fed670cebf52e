"""The cache's kernels without a GPU: thread by thread against the torch operations, and compiled for every target."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pretend_cuda
import pytest
import torch
from cache_lanes import MODULES, REPLACED, EmulatedLaunches, Memory, Tensor, emulated
from cache_runs import LOW, assert_unchanged, snapshot
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import as_array
from test_cache_materialize import CYCLES, SPECS, expected_moves, filled, folded

from replayssm_cute import compile_cli, compiler, fingerprint, resources, target
from replayssm_cute.cache import CacheSpec, ReplayCache, proof, recipes
from replayssm_cute.cache.launches import Launches, _vector
from replayssm_cute.cache.recipes import CacheRecipe
from replayssm_cute.cache.shapes import BytesShape, FoldShape
from replayssm_cute.config import WITHOUT_TMA

WIDE = torch.iinfo(torch.int32).max + 5  # an int64 that no int32 holds

# ---------------------------------------------------------------------------------------------------
# Cursors
# ---------------------------------------------------------------------------------------------------

CURSOR_OPS: dict[str, Callable[[ReplayCache, torch.Tensor, torch.Tensor, torch.Tensor], None]] = {
    "commit": lambda c, s, a, n: c.commit(s, a),
    "ragged": lambda c, s, a, n: c.commit(s, a, n),
    "begin": lambda c, s, a, n: c.begin_step(s, a),
    "begin_ragged": lambda c, s, a, n: c.begin_step(s, a, n),
    "settle": lambda c, s, a, n: c.settle(s, a),
    "reset": lambda c, s, a, n: c.reset(s, zero_state=False),
}


@pytest.mark.parametrize("pad", [-1, 0, WIDE])
@pytest.mark.parametrize("kinds", [(torch.int32,) * 3, (torch.int64,) * 3, (torch.int64, torch.int32, torch.int64)])
def test_cursor_kernel_is_the_torch_path_bit_for_bit(kinds: tuple[torch.dtype, ...], pad: int) -> None:
    """Random sequences; more rows than a CTA has threads; strided vectors; counts far out of range."""
    rng = random.Random(1)
    slots, batch = 170, 150
    spec = CacheSpec(layers=1, heads=1, head_dim=64, d_state=64, groups=1, tokens=3, window=7)
    real, model = (ReplayCache.allocate(spec, slots, "cpu", pad_slot_id=pad) for _ in range(2))
    for cache in (real, model):
        gen = torch.Generator().manual_seed(2)
        cache.ring_start.copy_(torch.randint(0, spec.ring_rows, (slots,), generator=gen))
        cache.pnat.copy_(torch.randint(0, spec.window + 1, (slots,), generator=gen))
        cache.last_tokens.copy_(torch.randint(0, spec.tokens + 1, (slots,), generator=gen))
    for _ in range(8):
        named = rng.sample([s for s in range(slots) if s != pad], batch)
        for row in rng.sample(range(batch), 40):
            named[row] = rng.choice([-1, -7, *([pad] if pad < slots or kinds[0] is torch.int64 else [])])
        accepted = [rng.choice([-9, 0, 1, 2, 3, 4, *([WIDE, -WIDE] if kinds[1] is torch.int64 else [])]) for _ in named]
        lens = [rng.randint(0, spec.tokens) for _ in named]
        vectors = [
            torch.tensor([v for each in values for v in (each, -3)], dtype=kind)[::2]
            for values, kind in zip((named, accepted, lens), kinds, strict=True)
        ]
        name = rng.choice(list(CURSOR_OPS))
        CURSOR_OPS[name](model, *vectors)
        with emulated(real) as launches:
            CURSOR_OPS[name](real, *vectors)
        assert launches.launched == ["cursors"]
        assert_unchanged(real, snapshot(model))


def test_reset_zeroes_live_checkpoints_and_cursors_alone() -> None:
    cache = filled(SPECS[0], 3, open_windows=True)
    model = filled(SPECS[0], 3, open_windows=True)
    slots = torch.tensor([2, -1, 4, 0])
    model.reset(slots)
    with emulated(cache) as launches:
        cache.reset(slots)
    assert launches.launched == ["reset"]
    assert_unchanged(cache, snapshot(model))


# ---------------------------------------------------------------------------------------------------
# The order of moves
# ---------------------------------------------------------------------------------------------------

FIELDS = MODULES["moves"].Record._fields


def planned(rows: list[tuple[int, int]]) -> list[dict[str, int]]:
    """The records of a batch of (source, destination), from the kernel's own functions, one thread after the other."""
    moves = MODULES["moves"]
    batch = len(rows)
    data = torch.full((2 * batch, moves.WORDS), 77, dtype=torch.int32)
    for r, (src, dst) in enumerate(rows):
        live = src >= 0 and dst >= 0
        data[r] = torch.tensor([src if live else -1, dst if live else -1, 0, 1, -1, 0, -1, 0])
    records, kernel = Tensor(data, Memory([data])), moves.MovePlanKernel()
    entangled = False
    for r in range(batch):
        if data[r, moves.SRC] >= 0:
            kernel.relate(records, r, batch)
            entangled |= bool(data[r, moves.RELEASE] >= 0 or data[r, moves.HELD] > 0)
    if entangled:
        kernel.chain(records, batch)
    return [dict(zip(FIELDS, row, strict=True)) for row in data.tolist()]


def follow(records: list[dict[str, int]], row: int, contents: dict[int, Any]) -> int:
    """Do what the CTA of a row does; gives the number of moves."""
    at, kept, done = row, None, 0
    while at >= 0:
        move = records[at]
        if move["src"] >= 0:
            done += 1
            if move["held"]:
                assert kept is None, "there is room for one slot alone"
                kept = contents[move["src"]]
            else:
                contents[move["dst"]] = contents[move["src"]]
            if move["release"] >= 0:
                contents[move["release"]], kept = kept, None
        at = move["link"]
    assert kept is None
    return done


@st.composite
def batches(draw: st.DrawFn) -> list[tuple[int, int]]:
    slots = draw(st.integers(1, 9))
    destinations = draw(st.permutations(range(slots)))[: draw(st.integers(0, slots))]
    rows = [(draw(st.integers(-1, slots - 1)), d) for d in destinations]
    rows += [(draw(st.integers(0, slots - 1)), -1) for _ in range(draw(st.integers(0, 2)))]
    return draw(st.permutations(rows))


@settings(max_examples=400, deadline=None)
@given(batches(), st.randoms(use_true_random=False))
def test_any_order_of_the_rows_gives_what_reading_first_would(rows: list[tuple[int, int]], rng: random.Random) -> None:
    """CTAs of rows may run in any order, since only one follows the chain; every move is done once."""
    records = planned(rows)
    contents: dict[int, Any] = {s: f"slot {s}" for s in range(9)}
    expected = {**contents, **{d: contents[s] for s, d in rows if s >= 0 and d >= 0}}
    order = list(range(len(rows)))
    rng.shuffle(order)
    done = sum(follow(records, row, contents) for row in order)
    assert contents == expected
    assert done == sum(s >= 0 and d >= 0 for s, d in rows)


def test_rows_that_share_nothing_stay_apart() -> None:
    """One source for many, and a slot moved onto itself, need no order."""
    records = planned([(0, 1), (0, 2), (3, 3), (-1, 0)])
    assert [r["link"] for r in records[:4]] == [-1] * 4
    assert [r["src"] for r in records[:4]] == [0, 0, 3, -1]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(-1, 4)), min_size=1, max_size=7))
def test_equal_destinations_are_undefined_but_end_within_bounds(rows: list[tuple[int, int]]) -> None:
    records = planned(rows)
    for row in range(len(rows)):
        at, steps = row, 0
        while at >= 0:
            assert at < len(records) and steps <= len(records)
            if records[at]["src"] >= 0:  # the others do nothing
                assert all(-1 <= records[at][field] <= 4 for field in ("src", "dst", "release"))
            at, steps = records[at]["link"], steps + 1


# ---------------------------------------------------------------------------------------------------
# Moves
# ---------------------------------------------------------------------------------------------------


def check_materialize(
    spec: CacheSpec, rows: list[tuple[int, int, int]], live: dict[int, tuple[int, int]] | None = None
) -> None:
    """Against float64: half a unit in the last place of the state's dtype, and nothing else touched.

    `live` gives the cursors (ring_start, pnat) of slots, in place of random ones.
    """
    cache, before = filled(spec, 3, live=live), filled(spec, 3, live=live)
    for slot in set(range(4)) - {s for s, _, _ in rows}:
        for layer in cache.layers:
            layer.state[slot] = float("nan")  # destinations that are no sources
    old = snapshot(cache)
    vectors = [torch.tensor([row[k] for row in rows], dtype=torch.int64) for k in range(3)]
    with emulated(cache) as launches:
        cache.materialize(*vectors)
    assert launches.launched == ["move plan", "fold"]
    moved, now = expected_moves(rows), snapshot(cache)
    unit = {"f32": 2e-7, "bf16": 2**-8, "f16": 2**-11}[spec.state_dtype]
    for name in now:
        for slot in range(cache.slots):
            if slot not in moved or ("[" in name and not name.startswith("state")):
                assert torch.equal(now[name][slot], old[name][slot]), (name, slot)
            elif "[" not in name:
                assert int(now[name][slot]) == 0, name
            else:
                source, count = moved[slot]
                layer = int(name[6:-1])
                if min(count, int(before.pnat[source])) <= 0:
                    assert torch.equal(now[name][slot], old[name][source]), "count 0 is a copy of the bits"
                    continue
                model = folded(before, layer, source, count)
                got = as_array(cache.layers[layer].state[slot])
                np.testing.assert_allclose(got, model, rtol=unit, atol=3e-7 * np.abs(model).max())


@pytest.mark.parametrize("rows", CYCLES)
def test_materialize_kernel(rows: list[tuple[int, int, int]]) -> None:
    check_materialize(SPECS[0], rows)


@pytest.mark.parametrize("spec", SPECS[1:], ids=lambda s: s.state_dtype)
def test_materialize_kernel_of_short_states(spec: CacheSpec) -> None:
    check_materialize(spec, CYCLES[0])


@pytest.mark.parametrize(
    "spec",
    [
        CacheSpec(layers=1, heads=1, head_dim=80, d_state=128, groups=1, tokens=2, window=5),
        CacheSpec(layers=1, heads=1, head_dim=80, d_state=64, groups=1, tokens=1, window=4, state_dtype="bf16"),
    ],
    ids=lambda s: f"{s.head_dim}x{s.d_state}-{s.state_dtype}",
)
def test_materialize_kernel_of_other_shapes(spec: CacheSpec) -> None:
    check_materialize(spec, [(0, 1, 9), (2, 2, 3)])


@pytest.mark.parametrize("state_dtype", ["f32", "bf16"])
def test_materialize_kernel_of_windows_longer_than_a_warp(state_dtype: str) -> None:
    """Weights of 61 rows: two parts of a warp, the second carried on from the first; a ring that wraps around."""
    spec = dataclasses.replace(SPECS[0], layers=1, heads=1, tokens=32, window=64, state_dtype=state_dtype)
    check_materialize(spec, [(0, 1, 61), (2, 2, 33), (3, 0, 99)], live={0: (70, 64), 2: (0, 50), 3: (95, 64)})


def test_materialize_kernel_of_the_most_shared_memory() -> None:
    """B of f16 in two terms each, and CTAs of two warps."""
    spec = CacheSpec(layers=1, heads=1, head_dim=128, d_state=256, groups=1, tokens=1, window=64, io_dtype="f16")
    shape = FoldShape.of(spec)
    assert (shape.warps, shape.b_terms) == (2, 2)
    assert FoldShape.cut(spec, warps=4, accesses=16).shared_bytes() > target.named("sm_120a").shared_per_block
    check_materialize(spec, [(0, 1, 99)], live={0: (60, 9)})


def test_values_are_cut_exactly() -> None:
    """Three bf16 terms are the f32 value itself, two an f16 one; NaN and Inf stay in some term."""
    products = MODULES["products"]
    gen = torch.Generator().manual_seed(1)
    values = torch.randn(300, generator=gen) * 10.0 ** torch.randint(-30, 38, (300,), generator=gen)
    largest = torch.finfo(torch.float32).max
    values = torch.cat((values, torch.tensor([0.0, -0.0, largest, -largest, 1 + 2**-23, 2.0**-100])))
    for kind, count in ((torch.float32, products.X_TERMS), (torch.float16, 2)):
        for value in values.clamp(-65504, 65504).to(kind).float() if kind is torch.float16 else values:
            pair = np.float32(value), np.float32(-value)
            words = products.cut(list(pair), count)
            for value_of, half in zip(pair, (REPLACED["low_half"], REPLACED["high_half"]), strict=True):
                assert sum(float(half("bf16", word)) for word in words) == float(value_of)
    for value in (np.float32("nan"), np.int32(0x7F800001).view(np.float32), np.float32("inf")):
        with np.errstate(invalid="ignore"):
            words = products.cut([value, np.float32(1)], products.X_TERMS)
        assert not np.isfinite(sum(float(REPLACED["low_half"]("bf16", word)) for word in words))


def test_fewer_terms_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULES["products"], "X_TERMS", 2)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check_materialize(dataclasses.replace(SPECS[0], layers=1, heads=1), [(0, 1, 5)], live={0: (2, 5)})


def test_cursors_beyond_a_window_stay_within_the_slots() -> None:
    """Undefined values, but no access outside the cache, and no slot but the destination is written."""
    spec = dataclasses.replace(SPECS[0], layers=1, heads=1)
    cache = filled(spec, 3, live={0: (4, spec.window)})
    cache.pnat[0] = spec.window + 40
    before = snapshot(cache)
    with emulated(cache):
        cache.materialize(torch.tensor([0]), torch.tensor([1]), torch.tensor([99]))
    assert_unchanged(cache, before, [0, 2, 3, 4])


@pytest.mark.parametrize("rows", [CYCLES[1], CYCLES[2]])
def test_copy_kernel_moves_whole_slots(rows: list[tuple[int, int, int]]) -> None:
    spec = dataclasses.replace(SPECS[0], layers=1, tokens=1, window=2)  # dt: 24 bytes, in 4-byte accesses
    cache = filled(spec, 5, open_windows=True)
    old = snapshot(cache)
    vectors = [torch.tensor([row[k] for row in rows], dtype=torch.int32) for k in range(2)]
    with emulated(cache) as launches:
        cache.copy(*vectors)
    assert launches.launched == ["move plan", "copy"]
    live = expected_moves(rows)
    for name, now in snapshot(cache).items():
        for slot in range(cache.slots):
            assert torch.equal(now[slot], old[name][live.get(slot, (slot, 0))[0]]), (name, slot)


def test_slots_in_a_page_pool_and_gaps_untouched() -> None:
    """The table of addresses: layers at any distance, slots with gaps."""
    spec = dataclasses.replace(SPECS[0], heads=1)
    page = spec.page_bytes
    pool = torch.full((3, 2, page + 48), 0x5A, dtype=torch.uint8)  # (slots, layers, bytes): layers interleaved
    pages = [pool[:, i, :page] for i in range(2)]
    cache = ReplayCache.from_pool(spec, pages, A=[-torch.ones(1)] * 2)
    own = ReplayCache.allocate(spec, 3, "cpu", A=[-torch.ones(1)] * 2)
    gen = torch.Generator().manual_seed(6)
    for layer, other in zip(cache.layers, own.layers, strict=True):
        for name in ("state", "x_cache", "B_cache", "dt_cache"):
            t = getattr(layer, name)
            t.copy_(torch.rand(t.shape, generator=gen) * 0.1)
            getattr(other, name).copy_(t)
    for c in (cache, own):
        c.pnat.copy_(torch.tensor([3, 5, 0]))
    vectors = [torch.tensor([1, 0]), torch.tensor([2, 1]), torch.tensor([4, 2])]
    own.materialize(*vectors)
    with emulated(cache):
        cache.materialize(*vectors)
    for layer, other in zip(cache.layers, own.layers, strict=True):
        torch.testing.assert_close(layer.state, other.state, rtol=1e-6, atol=1e-7)
        assert torch.equal(layer.x_cache, other.x_cache)
    assert bool((pool[:, :, page:] == 0x5A).all())


# ---------------------------------------------------------------------------------------------------
# Compiled
# ---------------------------------------------------------------------------------------------------

SUPER = CacheSpec(layers=1, heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
COMPILED = [
    recipes.CURSORS,
    recipes.MOVE_PLAN,
    recipes.copy(SUPER),
    recipes.copy(dataclasses.replace(SUPER, heads=3, groups=1, window=2, tokens=1)),
    recipes.reset(SUPER),
    *(
        make(dataclasses.replace(SUPER, **kind))
        for make in (recipes.copy, recipes.reset)
        for kind in ({"state_dtype": "i8"}, {"copy_dtype": "f8e4m3"}, {"copy_dtype": "bf16", "head_dim": 80})
    ),
    *(
        recipes.fold(dataclasses.replace(SUPER, head_dim=p, d_state=n, state_dtype=s))
        for p, n, s in [
            (64, 128, "f32"), (64, 128, "bf16"), (80, 128, "f32"), (80, 128, "f16"), (128, 256, "f32"),
            (80, 64, "bf16"),
        ]
    ),
    *(  # a window's rows lie in registers for a while
        recipes.fold(dataclasses.replace(SUPER, head_dim=p, d_state=n, state_dtype=s, window=w, tokens=32))
        for p, n, s, w in [
            (64, 128, "f32", 64), (64, 256, "f32", 64), (128, 64, "f32", 64), (128, 256, "bf16", 64),
            (128, 256, "f32", 32),
        ]
    ),
    *(
        recipes.fold(dataclasses.replace(SUPER, head_dim=p, d_state=n, state_dtype=s, window=w, io_dtype="f16"))
        for p, n, s, w in [(64, 128, "f32", 16), (128, 256, "f32", 64), (64, 128, "bf16", 64)]
    ),
]  # fmt: skip


def recipe_id(recipe: CacheRecipe) -> str:
    s = recipe.shape
    if isinstance(s, FoldShape):
        return (
            f"{recipe.kind} {s.spec.head_dim}x{s.spec.d_state} {s.spec.state_dtype} {s.spec.io_dtype} W{s.spec.window}"
        )
    return recipe.kind if s is None else f"{recipe.kind} {s.pieces}"


@pytest.mark.parametrize("arch", [a for a in target.ARCHES if a not in WITHOUT_TMA])
@pytest.mark.parametrize("recipe", COMPILED, ids=recipe_id)
def test_compiles_without_spills(recipe: CacheRecipe, arch: str) -> None:
    where = target.named(arch)
    found = compiler.entry_of(recipe, where).resources
    assert found.stack_bytes == 0, f"{found.stack_bytes} bytes spilled a thread, {found.registers} registers"
    assert found.shared_bytes <= where.shared_per_block
    if isinstance(recipe.shape, FoldShape | BytesShape) and recipe.kind != "reset":
        ctas = recipe.shape.ctas_per_sm
        assert ctas * found.registers * recipe.shape.threads <= where.registers_per_sm
        if arch != "sm_120a":  # with its small shared memory
            assert ctas * (found.shared_bytes + 1024) <= where.shared_per_sm
    if resources.nvdisasm() is None:
        pytest.skip("resources are fine; nvdisasm is not installed, so the code itself was not looked at")
    code = resources.disassemble(resources.cubin(compiler.entry_of(recipe, where).object_bytes()))
    counts = resources.count_opcodes(code)
    assert counts.get("LDL", 0) == counts.get("STL", 0) == 0
    if recipe.kind == "fold":
        assert isinstance(recipe.shape, FoldShape)
        for opcode in ("LDG.E.128", "STG.E.128"):
            assert code.count(opcode) >= recipe.shape.accesses, "states move in 16-byte accesses"


@pytest.mark.parametrize("state_dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("d_state", [64, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_every_geometry_has_a_shape_that_covers_a_head_once(head_dim: int, d_state: int, state_dtype: str) -> None:
    spec = dataclasses.replace(SUPER, head_dim=head_dim, d_state=d_state, state_dtype=state_dtype)
    shape = FoldShape.of(spec)
    assert head_dim % shape.tile == 0 and shape.tile % 8 == 0
    assert shape.threads * shape.accesses * shape.chunk == shape.tile * d_state
    with pytest.raises(ValueError, match="no shape of 4 warps and 1 accesses a thread fits"):
        FoldShape.cut(spec, warps=4, accesses=1)


def test_pieces_cover_every_byte_of_a_slot_once() -> None:
    small = dataclasses.replace(SUPER, heads=3, groups=1, window=2, tokens=1)
    for spec in (SUPER, small, *(dataclasses.replace(small, **kind) for kind in LOW)):
        shape = BytesShape.of(spec, *spec.slot_shapes())
        assert sum(part.nbytes for part in shape.parts) == spec.layer_bytes
        for part, after in zip(shape.parts, [*(p.first for p in shape.parts[1:]), shape.pieces], strict=True):
            assert part.first + part.pieces == after and part.nbytes % part.unit == 0
            each = shape.threads * shape.accesses * part.unit
            assert (part.pieces - 1) * each < part.nbytes <= part.pieces * each


# ---------------------------------------------------------------------------------------------------
# In the compile cache
# ---------------------------------------------------------------------------------------------------


def test_keys_tell_kernels_apart_and_the_step_keeps_its_own() -> None:
    """A change to a cache kernel is none to the step: tuned tables stay."""
    assert len({compiler._directory(r, "sm_90a") for r in COMPILED}) == len(COMPILED)
    step, cache = fingerprint.kernel_sources(), fingerprint.kernel_sources("cache")
    assert not [name for name in step if name.startswith("cache/")]
    assert {"cache/kernels/fold.py", "cache/kernels/moves.py", "ring.py", "kernels/primitives.py"} <= set(cache)
    assert "cache/shapes.py" in cache, "kernels take the layout of shared memory from it"
    assert recipes.CURSORS.sources() == fingerprint.kernels("cache") != fingerprint.kernels()


def test_layers_and_slots_do_not_make_another_kernel() -> None:
    more = dataclasses.replace(SUPER, layers=24)
    assert recipes.all_of(more) == recipes.all_of(SUPER)


def test_a_capture_before_prepare_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(SPECS[0], 1)
    launches = Launches(cache.spec, cache.layers, cache._shared, -1)
    monkeypatch.setattr(compiler, "capturing", lambda: True)
    with pytest.raises(
        RuntimeError, match=r"the cache's cursors is not ready.*warmup\(problems, batches, cache=cache\)"
    ):
        launches.commit(torch.tensor([1]), torch.tensor([1]), None)
    with pytest.raises(RuntimeError, match=r"the cache's move plan is not ready"):
        launches.materialize(*[torch.tensor([1])] * 3)


def test_too_many_rows_for_a_grid_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = filled(SPECS[0], 1)
    launches = EmulatedLaunches(cache.spec, cache.layers, cache._shared, -1)
    many = torch.full((65536,), -1)
    for call in (lambda: launches.reset(many, True), lambda: launches.copy(many, many)):
        with pytest.raises(ValueError, match="got 65536 rows, expected at most 65535"):
            call()
    assert launches.launched == []


class _Pretending(Launches):
    """Launches of real kernels on tensors that say they are on a GPU: as far as the missing driver."""

    def _launch(self, recipe: CacheRecipe, *args: Any) -> None:
        kernel = compiler._load(compiler.entry_of(recipe, target.named("h200")).path)
        kernel(*(pretend_cuda.Pretend.like(a).tensor() if isinstance(a, torch.Tensor) else a for a in args))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a driver: addresses are made up")
@pytest.mark.parametrize("operation", ["reset", "forget", "commit", "materialize", "copy"])
def test_real_kernels_take_these_arguments_as_far_as_the_missing_driver(operation: str) -> None:
    cache = filled(SPECS[0], 1)
    launches = _Pretending(cache.spec, cache.layers, cache._shared, -1)
    slots = torch.tensor([1, 2])
    launches._plan = lambda src, dst, count, whole: torch.zeros(4, 8, dtype=torch.int32)  # type: ignore[method-assign]
    calls = {
        "reset": lambda: launches.reset(slots, True),
        "forget": lambda: launches.reset(slots, False),
        "commit": lambda: launches.commit(slots, slots, slots),
        "materialize": lambda: launches.materialize(slots, slots, slots),
        "copy": lambda: launches.copy(slots, slots),
    }
    with pytest.raises(RuntimeError, match=r"(?i)cuda|driver"):
        calls[operation]()


def test_vectors_are_addresses_in_words() -> None:
    narrow, wide = torch.zeros(8, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    assert _vector(narrow[1::2]) == (narrow.data_ptr() + 4, 2, 0)
    assert _vector(wide[1::3]) == (wide.data_ptr() + 8, 6, 1)
    assert _vector(wide[:1].expand(5)) == (wide.data_ptr(), 0, 1)


def test_exported_kernels_are_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    compiler.reset_counters()
    for _ in range(2):
        compiler.entry_of(recipes.CURSORS, target.named("h200"))
    assert compiler.counters() == compiler.Counters(compiled=1, disk=1)


@pytest.mark.parametrize("kind,count", [({}, 5), ({"state_dtype": "i8"}, 4), ({"copy_dtype": "bf16"}, 4)])
def test_a_build_host_compiles_a_caches_kernels(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    kind: dict[str, str],
    count: int,
) -> None:
    """Plain states' fold among them; other kinds have no kernel for it."""
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    spec = dataclasses.replace(SPECS[0], **kind)
    fields = {k: v for k, v in dataclasses.asdict(spec).items() if k != "layers"}
    assert compile_cli.main(["--target", "b300", "--cache", json.dumps(fields)]) == 0
    assert f"{count} of {count} kernels are in {tmp_path}" in capsys.readouterr().out
    compiler.reset_counters()
    for recipe in recipes.all_of(spec):
        compiler.entry_of(recipe, target.named("b300"))
    assert compiler.counters() == compiler.Counters(disk=count)
    for bad in ("[]", '{"headz": 1}'):
        with pytest.raises(SystemExit):
            compile_cli.main(["--target", "b300", "--cache", bad])
        assert "--cache: got" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------
# The self-check of these kernels
# ---------------------------------------------------------------------------------------------------

TINY = CacheSpec(layers=1, heads=1, head_dim=64, d_state=64, groups=1, tokens=2, window=3)


@pytest.fixture
def provable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "Launches", EmulatedLaunches)
    monkeypatch.setattr(proof, "_proven", set())


@pytest.mark.parametrize("state_dtype", ["f32", "bf16"])
def test_right_kernels_are_proven_once(provable: None, state_dtype: str) -> None:
    spec = dataclasses.replace(TINY, state_dtype=state_dtype)
    assert proof.prove(spec, torch.device("cpu")) == 5
    assert proof.prove(dataclasses.replace(spec, layers=9), torch.device("cpu")) == 0


def test_the_switch_of_self_checks_serves_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    assert proof.prove(TINY, torch.device("cpu")) == 0


WRONG: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "commit": lambda patch: patch.setattr(MODULES["cursors"], "flushes", lambda pnat, ran, W: pnat + ran >= W),
    "materialize": lambda patch: patch.setattr(
        MODULES["folded_rows"].FoldedRows, "ring_row", lambda self, move, at: min(at, move.count - 1)
    ),
    "copy": lambda patch: patch.setattr(
        MODULES["moves"].MovePlanKernel, "relate", lambda self, records, r, batch: None
    ),
}  # fmt: skip


@pytest.mark.parametrize("operation", ["commit", "materialize"])
def test_wrong_kernels_are_found(operation: str, provable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    WRONG[operation](monkeypatch)
    with pytest.raises(RuntimeError, match=rf"self-check: the cache's {operation}.* gave wrong values in "):
        proof.prove(TINY, torch.device("cpu"))


def test_a_plan_without_an_order_is_found(provable: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a cycle that are taken for free ones overwrite what is still to be read."""
    WRONG["copy"](monkeypatch)
    with pytest.raises(RuntimeError, match="self-check: the cache's materialize gave wrong values in state"):
        proof.prove(TINY, torch.device("cpu"))
