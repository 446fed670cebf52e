"""The step kernel on a GPU against the float64 recurrence, through the public call.

All kernels of this module are compiled in parallel first. `REPLAYSSM_TEST_REPORT=path` writes every measured error to
a JSON file, with the GPU and the kernel fingerprint.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_matrix
import pytest
import torch
from bad_inputs import PROBLEM as BAD_PROBLEM
from bad_inputs import RAGGED as RAGGED_BAD
from bad_inputs import Bad, bad_inputs, bad_packing, good_call, good_ragged_call
from gpu_matrix import AXES, OTHER_GEOMETRIES, Case, tile_config

import replayssm_cute
from replayssm_cute import compare, compiler, fingerprint, packing, target
from replayssm_cute.calls import WRITTEN, Call, random_call
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

CUDA = torch.device("cuda")
CACHES = ("state", "x_cache", "B_cache", "dt_cache")

SMALL = Problem(heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=16, has_z=True)
ONE_TOKEN = dataclasses.replace(SMALL, tokens=1, state_dtype="bf16")
LARGE_SLOTS = (
    Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16, state_dtype="f32"),
    Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16, state_dtype="f16"),
)
NONE_INDEX = dataclasses.replace(SMALL, index_dtype=None)
LONG_INDEX = dataclasses.replace(SMALL, index_dtype="i64")
PDL = dataclasses.replace(SMALL, pdl=True)
SPREAD = dataclasses.replace(SMALL, groups=2, compact=False)
RAGGED = dataclasses.replace(SMALL, ragged=True)
RAGGED_ONE = dataclasses.replace(ONE_TOKEN, ragged=True)
RAGGED_SPREAD = dataclasses.replace(SPREAD, ragged=True)
RAGGED_PDL = dataclasses.replace(PDL, ragged=True)
TILES = AXES["tile"]

MATRIX = gpu_matrix.cases()
KERNELS = [
    *((c.problem, c.tile) for c in MATRIX),
    *((p, t) for p in (SMALL, ONE_TOKEN) for t in TILES),
    *((p, "one") for p in (*LARGE_SLOTS, NONE_INDEX, LONG_INDEX, PDL, BAD_PROBLEM)),
    *((SPREAD, t) for t in ("one", "several whole")),
    *((RAGGED, t) for t in TILES),
    *((p, "one") for p in (RAGGED_ONE, RAGGED_SPREAD, RAGGED_PDL, RAGGED_BAD)),
]
RECORD: list[dict[str, Any]] = []


@pytest.fixture(scope="module")
def gpu() -> target.Target:
    return target.of_device(torch.cuda.current_device())


@pytest.fixture(scope="module", autouse=True)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile everything in parallel, and write the record at the end. A kernel that fails fails its own tests."""
    if not torch.cuda.is_available():
        yield
        return
    selected = [item for item in request.session.items if item.path == request.path]
    before = os.environ.get("REPLAYSSM_SELFCHECK")
    os.environ["REPLAYSSM_SELFCHECK"] = "0"  # each kernel is held to more here, and some seventy checks take minutes
    where = target.of_device(torch.cuda.current_device())
    if not all(item.get_closest_marker("two_gpus") for item in selected):  # these need one kernel, which they name
        compiler.compile_many([(p, tile_config(t, p, where), where) for p, t in KERNELS])
    yield
    if before is None:
        del os.environ["REPLAYSSM_SELFCHECK"]
    else:
        os.environ["REPLAYSSM_SELFCHECK"] = before
    if path := os.environ.get("REPLAYSSM_TEST_REPORT"):
        report = {
            "gpu": where.name,
            "arch": where.arch,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "toolchain": fingerprint.toolchain(),
            "kernel_fingerprint": fingerprint.kernels(),
            "cases": RECORD,
        }
        Path(path).write_text(json.dumps(report, indent=1) + "\n")


def step(call: Call, config: TileConfig | None) -> Call:
    replayssm_cute.checkpointing_ssu(**call.kwargs(), config=config)
    torch.cuda.synchronize()
    return call


def check(problem: Problem, before: Call, after: Call, what: str) -> compare.Errors:
    """Hold a finished step to the bounds, and record its errors."""
    errors = compare.errors(before, after)
    RECORD.append({"case": what, "problem": problem.to_json(), "errors": dataclasses.asdict(errors)})
    violation = compare.bounds(problem).violation(errors)
    assert violation is None, f"{what}: {violation}; {errors}"
    return errors


def mixed(problem: Problem, *, pad: int = -1, seed: int = 0, dead: float | None = float("nan"), **kwargs: Any) -> Call:
    """Every pnat in 0..W in some order of slots, random ring phases, and two padding rows where slots are named.

    Of a ragged problem every pnat twice, at full length and at a random one, and tokens that no row has.
    """
    counts = [*range(problem.window + 1)]
    if problem.ragged:
        drawn = torch.randint(0, problem.tokens + 1, (len(counts),), generator=torch.Generator().manual_seed(seed))
        lengths = [*[problem.tokens] * len(counts), *drawn.tolist()]
        lengths += [] if problem.index_dtype is None else [problem.tokens, 1]
        kwargs = {"tail": 3, "lengths": lengths} | kwargs
        counts *= 2
    padding: tuple[int, ...] = ()
    if problem.index_dtype is not None:
        counts, padding = [*counts, 0, 0], (len(counts), len(counts) + 1)
    return random_call(
        problem,
        len(counts),
        slots=len(counts) + 5,
        pnat=counts,
        padding=padding,
        pad_slot_id=pad,
        dead=dead,
        seed=seed,
        device=CUDA,
        **kwargs,
    )


# ---------------------------------------------------------------------------------------------------
# The matrix
# ---------------------------------------------------------------------------------------------------


def test_the_matrix_covers_what_it_promises() -> None:
    """Needs no GPU: every value, every pair that counts, every configuration valid, few enough kernels."""
    covered = {pair for row in gpu_matrix.rows() for pair in gpu_matrix.pairs(row)}
    assert gpu_matrix.needed() <= covered
    h200 = target.named("h200")
    assert len({(p, tile_config(t, p, h200)) for p, t in KERNELS}) <= 100
    for case in MATRIX:
        assert case.config(h200).is_valid(case.problem, h200)
    assert {(c.problem.window > 16, c.problem.tokens > 16, c.problem.ragged, c.tile) for c in MATRIX} >= {
        (True, True, ragged, tile) for ragged in (False, True) for tile in ("one", "tail")
    }
    shapes = {(c.problem.head_dim, c.problem.d_state) for c in MATRIX}
    assert shapes >= {g[1:3] for g in (*gpu_matrix.GEOMETRIES, *OTHER_GEOMETRIES)}


@pytest.mark.gpu
@pytest.mark.parametrize("number,case", list(enumerate(MATRIX)), ids=[str(c) for c in MATRIX])
def test_against_float64(number: int, case: Case, gpu: target.Target) -> None:
    """Flush and other rows, NaN in everything dead, poisoned outputs, padding by -1, 0 or a slot in the middle."""
    before = mixed(case.problem, pad=(-1, 0, 3)[number % 3], seed=number)
    after = step(before.clone(), case.config(gpu))
    check(case.problem, before, after, str(case))


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 3, 33, 131])
@pytest.mark.parametrize("tile", TILES)
def test_batch_sizes(batch: int, tile: str, gpu: target.Target) -> None:
    """One kernel serves every batch size."""
    before = random_call(SMALL, batch, seed=batch, device=CUDA)
    after = step(before.clone(), tile_config(tile, SMALL, gpu))
    check(SMALL, before, after, f"batch {batch} {tile}")


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [SMALL, ONE_TOKEN], ids=["T4 f32", "T1 bf16"])
@pytest.mark.parametrize("tile", TILES)
def test_every_cursor_position(problem: Problem, tile: str, gpu: target.Target) -> None:
    """Every (ring_start, pnat), so every way that live and new rows wrap."""
    positions = list(itertools.product(range(problem.ring_rows), range(problem.window + 1)))
    starts, counts = zip(*positions, strict=True)
    before = random_call(problem, len(positions), ring_start=starts, pnat=counts, seed=1, device=CUDA)
    after = step(before.clone(), tile_config(tile, problem, gpu))
    check(problem, before, after, f"cursor positions {problem.label()} {tile}")


# ---------------------------------------------------------------------------------------------------
# Ragged rows
# ---------------------------------------------------------------------------------------------------


def packed(call: Call) -> Call:
    """A dense call in ragged form: every row with all its tokens."""
    dense = call.clone()
    for name in ("x", "dt", "B", "C", "out", "z"):
        if (t := getattr(dense, name)) is not None:
            flat = (t[..., :1] if t.stride(-1) == 0 else t).flatten(0, 1)[None]
            setattr(dense, name, flat.expand(*flat.shape[:-1], t.shape[-1]))
    dense.cu_seqlens = packing.uniform(call.batch, call.tokens, CUDA)
    dense.max_seqlen = call.tokens
    return dense


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_every_ragged_cursor_position_and_length(tile: str, gpu: target.Target) -> None:
    """Every (ring_start, pnat, T_i): a row's own length decides what flushes and what is appended."""
    sizes = (RAGGED.ring_rows, RAGGED.window + 1, RAGGED.tokens + 1)
    starts, counts, lengths = zip(*itertools.product(*map(range, sizes)), strict=True)
    before = random_call(
        RAGGED, len(starts), ring_start=starts, pnat=counts, lengths=lengths, tail=5, seed=2, device=CUDA
    )
    after = step(before.clone(), tile_config(tile, RAGGED, gpu))
    check(RAGGED, before, after, f"ragged cursor positions {tile}")


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("batch", [1, 2, 33, 131])
def test_ragged_batch_sizes(batch: int, tile: str, gpu: target.Target) -> None:
    """Also with many more tokens than rows have."""
    for tail in (0, 700):
        before = random_call(RAGGED, batch, tail=tail, seed=batch, device=CUDA)
        after = step(before.clone(), tile_config(tile, RAGGED, gpu))
        check(RAGGED, before, after, f"ragged batch {batch} tail {tail} {tile}")


@pytest.mark.gpu
@pytest.mark.parametrize("problem", [RAGGED, RAGGED_ONE, RAGGED_PDL], ids=["T4 f32", "T1 bf16", "PDL"])
def test_ragged_rows_of_no_tokens(problem: Problem) -> None:
    """Among others, and a batch of nothing else: nothing is read, flushed or appended, whatever pnat is."""
    for lengths in ([0, problem.tokens, 0, 0, 1, 0], [0] * 6):
        before = random_call(
            problem, 6, pnat=[16, 16, 0, 13, 2, 15], lengths=lengths, padding=(4,), tail=2, seed=3, device=CUDA
        )
        after = before.clone()
        replayssm_cute.checkpointing_ssu(**after.kwargs(), enable_pdl=problem.pdl, config=TileConfig())
        torch.cuda.synchronize()
        check(problem, before, after, f"ragged rows of no tokens {problem.label()} {lengths}")


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_full_ragged_rows_give_the_dense_calls_bits(tile: str, gpu: target.Target) -> None:
    dense = mixed(SMALL, seed=16)
    ragged = packed(dense)
    step(dense, tile_config(tile, SMALL, gpu))
    step(ragged, tile_config(tile, RAGGED, gpu))
    for name in WRITTEN:
        got, expected = getattr(ragged, name), getattr(dense, name)
        kind = {2: torch.int16, 4: torch.int32}[got.element_size()]
        assert torch.equal(got.reshape(expected.shape).view(kind), expected.contiguous().view(kind)), name


@pytest.mark.gpu
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3e4])
@pytest.mark.parametrize("tile", TILES)
def test_tokens_without_a_live_row_change_no_bit(tile: str, garbage: float, gpu: target.Target) -> None:
    """What padding rows' tokens and the tail hold, and dead ring rows beside."""
    config = tile_config(tile, RAGGED, gpu)
    clean, dirty = (step(mixed(RAGGED, dead=value, seed=17), config) for value in (0.0, garbage))
    assert torch.equal(clean.out.view(torch.int16), dirty.out.view(torch.int16))
    slots = clean.state_batch_indices
    assert slots is not None
    live = slots[slots >= 0].long()
    assert torch.equal(clean.state[live], dirty.state[live])


@pytest.mark.gpu
def test_ragged_heads_apart() -> None:
    before = mixed(RAGGED_SPREAD, seed=18)
    after = before.clone()
    for name, dim in HEAD_DIMENSIONS.items():
        setattr(after, name, apart(getattr(after, name), dim))
    step(after, TileConfig())
    check(RAGGED_SPREAD, before, after, "ragged heads apart")


@pytest.mark.gpu
def test_ragged_projection_slices_and_page_pool() -> None:
    before = mixed(RAGGED, pad=2, seed=19)
    after = before.clone()
    as_projection(after)
    pool, gaps = in_pages(after)
    step(after, TileConfig())
    check(RAGGED, before, after, "ragged projection and pages")
    assert bool((pool[:, gaps] == 0x5A).all()), "bytes between the caches"


@pytest.mark.gpu
def test_ragged_graph_replays_with_other_lengths(gpu: target.Target) -> None:
    """The total stays; lengths, cursors, slots and the number of padding rows are others in each replay."""
    config = tile_config("several", RAGGED, gpu)

    def fresh(seed: int, padding: tuple[int, ...] = ()) -> Call:
        gen = torch.Generator().manual_seed(seed)
        lengths = torch.randint(0, RAGGED.tokens + 1, (8,), generator=gen)
        tail = 8 * RAGGED.tokens - int(lengths.sum())
        return random_call(RAGGED, 8, slots=12, lengths=lengths, tail=tail, padding=padding, seed=seed, device=CUDA)

    static = fresh(0)
    step(static.clone(), config)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayssm_cute.checkpointing_ssu(**static.kwargs(), config=config)
    for replay in range(1, 7):
        call = fresh(replay, (3, 4, 5, 6, 7) if replay == 3 else ())
        for name, value in call.kwargs().items():
            if isinstance(value, torch.Tensor):
                destination = getattr(static, name)
                index = tuple(slice(0, 1) if s == 0 else slice(None) for s in destination.stride())
                destination[index].copy_(value[index])
        graph.replay()
        torch.cuda.synchronize()
        check(RAGGED, call, static, f"ragged graph replay {replay}")


# ---------------------------------------------------------------------------------------------------
# What must not matter
# ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.fault(1)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf"), 3e4])
@pytest.mark.parametrize("problem", [SMALL, ONE_TOKEN], ids=["T4 f32", "T1 bf16"])
@pytest.mark.parametrize("tile", TILES)
def test_dead_rows_change_no_bit(problem: Problem, tile: str, garbage: float, gpu: target.Target) -> None:
    """Garbage outside the live window gives the very bits that zeros there give."""
    config = tile_config(tile, problem, gpu)
    clean, dirty = (step(mixed(problem, dead=value), config) for value in (0.0, garbage))
    slots = clean.state_batch_indices
    assert slots is not None
    live = slots[slots >= 0].long()
    assert torch.equal(clean.out.view(torch.int16), dirty.out.view(torch.int16))
    assert torch.equal(clean.state[live], dirty.state[live])
    rows = (clean.ring_start[live, None] + torch.arange(problem.ring_rows, device=CUDA)) % problem.ring_rows
    used = clean.prev_num_accepted_tokens[live] + problem.tokens
    for slot, order, count in zip(live.tolist(), rows.long(), used.tolist(), strict=True):
        for name in CACHES[1:]:
            assert torch.equal(
                getattr(clean, name)[slot][:, order[:count]], getattr(dirty, name)[slot][:, order[:count]]
            )


@pytest.mark.gpu
@pytest.mark.fault(3, 17, 19)
@pytest.mark.parametrize("pad", [-1, 0, 5, 1_000_000])
@pytest.mark.parametrize("problem", [SMALL, LONG_INDEX], ids=["i32", "i64"])
def test_padding_rows(problem: Problem, pad: int, gpu: target.Target) -> None:
    """Five live rows and three pads that all alias one slot, which holds NaN; also another negative slot."""
    before = random_call(problem, 8, slots=11, padding=(5, 6, 7), pad_slot_id=pad, device=CUDA)
    assert before.state_batch_indices is not None
    before.state_batch_indices[6] = -3
    after = step(before.clone(), TileConfig())
    check(problem, before, after, f"padding {pad}")
    assert not bool(after.out[5:].any())


@pytest.mark.gpu
def test_all_rows_padding() -> None:
    before = random_call(SMALL, 4, padding=range(4), device=CUDA)
    after = step(before.clone(), TileConfig())
    check(SMALL, before, after, "all padding")


@pytest.mark.gpu
@pytest.mark.parametrize("pad", [-1, 0])
def test_without_indices(pad: int) -> None:
    """Row i uses slot i; a pad_slot_id that is a slot makes that row padding here too."""
    before = random_call(NONE_INDEX, 7, pad_slot_id=pad, device=CUDA)
    after = step(before.clone(), TileConfig())
    check(NONE_INDEX, before, after, f"no indices, pad {pad}")


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_launches_agree_to_the_bit(tile: str, gpu: target.Target) -> None:
    """The same inputs give the same bits, every time."""
    before = mixed(SMALL, seed=3)
    first, *others = [step(before.clone(), tile_config(tile, SMALL, gpu)) for _ in range(4)]
    for other in others:
        for name in WRITTEN:
            kind = {2: torch.int16, 4: torch.int32}[getattr(first, name).element_size()]
            assert torch.equal(getattr(first, name).view(kind), getattr(other, name).view(kind)), name


# ---------------------------------------------------------------------------------------------------
# Layouts
# ---------------------------------------------------------------------------------------------------


def as_projection(call: Call) -> None:
    """x, B, C, z and dt become slices of one wide projection, and out a slice of a wide buffer."""
    batch, T, H, P = call.x.shape
    G, N = call.B.shape[2:]
    assert call.z is not None
    widths = [H * P, H * P, G * N, G * N, H]
    extra = -sum(widths) % 8 + 24
    wide = torch.full((batch, T, sum(widths) + extra), float("nan"), dtype=call.x.dtype, device=CUDA)
    for name, part in zip(("z", "x", "B", "C", "dt"), wide.split([*widths, extra], dim=-1), strict=False):
        old = getattr(call, name)
        if name == "dt":
            new = part[..., None].expand(batch, T, H, P)
            part.copy_(old[..., 0])
        else:
            new = part.unflatten(-1, old.shape[2:])
            new.copy_(old)
        setattr(call, name, new)
    buffer = torch.full((batch, T, 3, H * P), 7.0, dtype=call.out.dtype, device=CUDA)
    call.out = buffer[:, :, 1].unflatten(-1, (H, P))


def in_pages(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Caches become views into pages of one byte pool, with gaps; gives the pool and the mask of its gap bytes."""
    slots = call.state.shape[0]
    gap, offset, places = 48, 16, {}
    for name in CACHES:
        size = getattr(call, name)[0].numel() * getattr(call, name).element_size()
        places[name] = (offset, size)
        offset += -(-size // 16) * 16 + gap
    pool = torch.full((slots, offset + 16), 0x5A, dtype=torch.uint8, device=CUDA)
    gaps = torch.ones(pool.shape[1], dtype=torch.bool, device=CUDA)
    for name, (start, size) in places.items():
        old = getattr(call, name)
        view = pool.view(old.dtype)[:, start // old.element_size() : (start + size) // old.element_size()]
        view = view.unflatten(1, old.shape[1:])
        view.copy_(old)
        gaps[start : start + size] = False
        setattr(call, name, view)
    cursors = torch.full((slots, 4), -9, dtype=torch.int32, device=CUDA)
    cursors[:, 1], cursors[:, 2] = call.ring_start, call.prev_num_accepted_tokens
    call.ring_start, call.prev_num_accepted_tokens = cursors[:, 1], cursors[:, 2]
    return pool, gaps


@pytest.mark.gpu
@pytest.mark.fault(10, 11)
@pytest.mark.parametrize("tile", TILES)
def test_projection_slices_and_page_pool(tile: str, gpu: target.Target) -> None:
    """Inputs and output sliced from wide buffers, caches and cursors in pages, strided indices: all in place."""
    before = mixed(SMALL, pad=2, seed=4)
    after = before.clone()
    as_projection(after)
    pool, gaps = in_pages(after)
    assert after.state_batch_indices is not None
    doubled = after.state_batch_indices.repeat_interleave(2)
    after.state_batch_indices = doubled[1::2]
    step(after, tile_config(tile, SMALL, gpu))
    check(SMALL, before, after, f"projection and pages {tile}")
    assert bool((pool[:, gaps] == 0x5A).all()), "bytes between the caches"
    whole = after.out.as_strided((after.out.shape[0], SMALL.tokens, 3, 16 * 64), _buffer_strides(after.out), 0)
    assert bool((whole[:, :, ::2] == 7.0).all()), "neighbours of the output"


def _buffer_strides(out: torch.Tensor) -> tuple[int, ...]:
    return out.stride(0), out.stride(1), out.stride(1) // 3, 1


def apart(t: torch.Tensor, dim: int) -> torch.Tensor:
    """The same values, twice as far apart along `dim`, NaN (or -9) between them; zero strides stay."""
    shape = [1 if stride == 0 else size for size, stride in zip(t.shape, t.stride(), strict=True)]
    wide = torch.full((*shape[:dim], shape[dim], 2, *shape[dim + 1 :]), float("nan"), dtype=t.dtype, device=t.device)
    values = wide.select(dim + 1, 0)
    values.copy_(t[tuple(slice(0, n) for n in shape)])
    return values.expand(t.shape)


# The dimension of heads (or groups) of each tensor; a gap there makes a problem that is not compact.
HEAD_DIMENSIONS = {
    **dict.fromkeys(CACHES, 1),
    **dict.fromkeys(("x", "dt", "B", "C", "z", "out"), 2),
    **dict.fromkeys(("A", "D", "dt_bias"), 0),
}


@pytest.mark.gpu
@pytest.mark.parametrize("tile", ["one", "several whole"])
@pytest.mark.parametrize("only", ["all", *HEAD_DIMENSIONS])
def test_heads_apart(only: str, tile: str, gpu: target.Target) -> None:
    """Gaps between heads and inside slots: everything at once, and each tensor by itself."""
    before = mixed(SPREAD, seed=5)
    after = before.clone()
    for name, dim in HEAD_DIMENSIONS.items():
        if only in ("all", name):
            setattr(after, name, apart(getattr(after, name), dim))
    step(after, tile_config(tile, SPREAD, gpu))
    check(SPREAD, before, after, f"heads apart {only} {tile}")


@pytest.mark.gpu
@pytest.mark.fault(8)
@pytest.mark.parametrize("problem", LARGE_SLOTS, ids=["f32", "f16"])
def test_large_slot_ids(problem: Problem) -> None:
    """2^20 state elements a slot: slots from 2,048 on lie beyond 2^31 elements, 4,096 beyond 2^32."""
    ids = [2047, 2048, 2049, 4096, 4100]
    size = 4101
    bytes_needed = size * problem.bytes_per_slot() * 1.3
    if torch.cuda.mem_get_info()[0] < bytes_needed:
        pytest.skip(f"needs {bytes_needed / 2**30:.0f} GiB of free GPU memory")
    before = random_call(problem, len(ids), slots=len(ids), pnat=[0, 3, 13, 14, 16], device=CUDA)
    assert before.state_batch_indices is not None
    before.state_batch_indices = torch.arange(len(ids), dtype=torch.int32, device=CUDA)
    big = before.clone()
    where = torch.tensor(ids, device=CUDA)
    for name in (*CACHES, "ring_start", "prev_num_accepted_tokens"):
        small = getattr(before, name)
        wide = torch.full((size, *small.shape[1:]), 5, dtype=small.dtype, device=CUDA)
        wide[where] = small
        setattr(big, name, wide)
    big.state_batch_indices = where.int()
    step(big, TileConfig())
    after = before.clone()
    after.out = big.out
    for name in CACHES:
        setattr(after, name, getattr(big, name)[where])
    check(problem, before, after, f"large slot ids {problem.state_dtype}")
    others = torch.ones(size, dtype=torch.bool, device=CUDA)
    others[where] = False
    for name in CACHES:
        for values, mask in zip(getattr(big, name).split(256), others.split(256), strict=True):
            assert bool((values[mask] == 5).all()), f"{name} of another slot"


@pytest.mark.gpu
@pytest.mark.fault(9)
def test_inputs_in_a_very_wide_parent() -> None:
    """A batch stride of 3,000,000 elements and 1,024 rows: the last rows lie beyond 2^31 elements."""
    batch, stride = 1024, 3_000_000
    if torch.cuda.mem_get_info()[0] < 2 * batch * stride * 1.5:
        pytest.skip("needs 9 GiB of free GPU memory")
    before = random_call(ONE_TOKEN, batch, seed=6, device=CUDA)
    after = before.clone()
    parent = torch.empty(batch, 1, stride, dtype=torch.bfloat16, device=CUDA)
    H, P = ONE_TOKEN.heads, ONE_TOKEN.head_dim
    x = parent[..., : H * P].unflatten(-1, (H, P))
    dt = parent[..., stride - H :]
    x.copy_(before.x)
    dt.copy_(before.dt[..., 0])
    after.x, after.dt = x, dt[..., None].expand(batch, 1, H, P)
    step(after, TileConfig())
    check(ONE_TOKEN, before, after, "very wide parent")


# ---------------------------------------------------------------------------------------------------
# Numbers at the edge
# ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.fault(2)
@pytest.mark.parametrize("raw", [20.0, 89.0, 200.0, -200.0])
def test_large_raw_dt(raw: float) -> None:
    """softplus neither overflows nor loses what is tiny."""
    before = mixed(SMALL, seed=7)
    before.dt = torch.full(before.dt.shape[:3], raw, dtype=before.dt.dtype, device=CUDA)[..., None].expand(
        before.dt.shape
    )
    after = step(before.clone(), TileConfig())
    check(SMALL, before, after, f"raw dt {raw}")
    assert bool(torch.isfinite(after.out).all())


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
def test_strong_early_decay_does_not_blur_the_rest(tile: str, gpu: target.Target) -> None:
    """Two oldest rows with A * dt = -320: differences of long prefix sums would cost the later rows 8e-5."""
    before = mixed(SMALL, seed=8)
    before.A = torch.full((SMALL.heads,), -16.0, device=CUDA)[:, None, None].expand(before.A.shape)
    rows = SMALL.ring_rows
    for slot in range(before.state.shape[0]):
        start, pnat = int(before.ring_start[slot]), int(before.prev_num_accepted_tokens[slot])
        for j in range(min(2, pnat)):
            before.dt_cache[slot, :, (start + j) % rows] = 20.0
    after = step(before.clone(), tile_config(tile, SMALL, gpu))
    check(SMALL, before, after, f"strong early decay {tile}")


# ---------------------------------------------------------------------------------------------------
# Launching
# ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.fault(16, 17)
def test_graph_replays_with_other_rows_and_cursors(gpu: target.Target) -> None:
    """Captured with eight live rows, replayed with other slots, cursors, inputs, and with three rows and five pads."""
    config = tile_config("several", SMALL, gpu)
    static = random_call(SMALL, 8, slots=12, seed=11, device=CUDA)
    assert static.state_batch_indices is not None
    step(static.clone(), config)  # loads the kernel
    graph = torch.cuda.CUDAGraph()
    pool = static.clone()
    with torch.cuda.graph(graph):
        replayssm_cute.checkpointing_ssu(**static.kwargs(), config=config)
    for name in WRITTEN:
        kind = {2: torch.int16, 4: torch.int32}[getattr(static, name).element_size()]
        assert torch.equal(getattr(static, name).view(kind), getattr(pool, name).view(kind)), "a capture runs nothing"
    for replay in range(6):
        padding = (3, 4, 5, 6, 7) if replay == 3 else ()
        fresh = random_call(SMALL, 8, slots=12, seed=20 + replay, padding=padding, device=CUDA)
        for name, value in fresh.kwargs().items():
            if isinstance(value, torch.Tensor):
                destination = getattr(static, name)
                index = tuple(slice(0, 1) if s == 0 else slice(None) for s in destination.stride())
                destination[index].copy_(value[index])
        graph.replay()
        torch.cuda.synchronize()
        check(SMALL, fresh, static, f"graph replay {replay}")


@pytest.mark.gpu
def test_runs_on_the_current_stream() -> None:
    """Inputs that another stream is late to write are read after that write, and only there."""
    before = random_call(SMALL, 8, seed=12, device=CUDA)
    after = before.clone()
    late = after.x.clone()
    after.x.fill_(float("nan"))
    step(before.clone(), TileConfig())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        after.x.copy_(late)
        replayssm_cute.checkpointing_ssu(**after.kwargs(), config=TileConfig())
    stream.synchronize()
    check(SMALL, before, after, "side stream")


@pytest.mark.gpu
def test_pdl_changes_no_bit() -> None:
    """With enable_pdl, right after a kernel that writes x, the same bits as without."""
    before = random_call(SMALL, 8, seed=13, device=CUDA)
    plain, early = before.clone(), before.clone()
    step(plain, TileConfig())
    for _ in range(20):
        early = before.clone()
        early.x.fill_(float("nan"))
        torch.cuda.synchronize()
        early.x.copy_(before.x)
        replayssm_cute.checkpointing_ssu(**early.kwargs(), enable_pdl=True, config=TileConfig())
        torch.cuda.synchronize()
        for name in ("out", "state"):
            kind = {2: torch.int16, 4: torch.int32}[getattr(plain, name).element_size()]
            assert torch.equal(getattr(plain, name).view(kind), getattr(early, name).view(kind)), name


@pytest.mark.gpu
@pytest.mark.kernels(SMALL)
@pytest.mark.parametrize("batch", [1, 64])
def test_without_a_config(batch: int) -> None:
    """What the tables or the default rule choose is as right as what is forced."""
    before = random_call(SMALL, batch, seed=14, device=CUDA)
    after = step(before.clone(), None)
    check(SMALL, before, after, f"chosen config, batch {batch}")


@pytest.mark.gpu
@pytest.mark.kernels((SMALL, TileConfig()))
@pytest.mark.two_gpus
@pytest.mark.fault(25)
def test_operands_on_another_device() -> None:
    """Operands decide the device, whatever the current one is."""
    before = random_call(SMALL, 8, seed=15, device="cuda:1")
    after = before.clone()
    with torch.cuda.device(0):
        replayssm_cute.checkpointing_ssu(**after.kwargs(), config=TileConfig())
        torch.cuda.synchronize(1)
        assert torch.cuda.current_device() == 0
    check(SMALL, before, after, "cuda:1 from cuda:0")


# ---------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "good,bad",
    [*((good_call, b) for b in bad_inputs()), *((good_ragged_call, b) for b in bad_packing())],
    ids=lambda v: getattr(v, "name", ""),
)
def test_a_refused_call_launches_nothing(good: Callable[..., Call], bad: Bad) -> None:
    """Also when the good call has just been planned: the same exceptions by name, and no operand changes."""
    step(good(device=CUDA), TileConfig())
    kwargs = good(device=CUDA).kwargs() | {"config": TileConfig()}
    bad.change(kwargs)
    tensors = {k: v for k, v in kwargs.items() if isinstance(v, torch.Tensor) and v.is_cuda}
    before = {k: v.clone() for k, v in tensors.items()}
    with pytest.raises(bad.error, match=f"{bad.words[0]}: "):
        replayssm_cute.checkpointing_ssu(**kwargs)
    torch.cuda.synchronize()
    for name, value in tensors.items():
        flat = tuple(t.contiguous().reshape(-1).view(torch.uint8) for t in (value, before[name]))
        assert torch.equal(*flat), name


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["x", "state_batch_indices", "A", "D"])
def test_mixed_devices_are_refused(name: str) -> None:
    kwargs = good_call(device=CUDA).kwargs()
    kwargs[name] = kwargs[name].cpu()
    with pytest.raises(ValueError, match=f"{name}: on device cpu, expected state's device cuda"):
        replayssm_cute.checkpointing_ssu(**kwargs)
