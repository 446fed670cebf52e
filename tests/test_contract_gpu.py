"""The rest of the step's contract on a GPU: large batches and pools, odd head counts, long rollbacks, graphs.

`test_step_gpu.py` has the matrix of problems and tiles, `test_property.py` random ones. All kernels here are compiled
in parallel first; configs are those that a call gets.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpu_kernels import of_problem

import replayssm_cute
from replayssm_cute import DecodeGraphs, GraphInput, compare, packing, plan
from replayssm_cute.cache import CacheSpec, ReplayCache
from replayssm_cute.calls import Call, random_call, spread
from replayssm_cute.problem import Problem

CUDA = torch.device("cuda")
CACHES = ("state", "x_cache", "B_cache", "dt_cache")
TOKENS = ("x", "z", "B", "C", "out")  # of a call's tensors, those that lie by token, and dt
GIB = 1 << 30

SMALL = Problem(heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=16, has_z=True)
HALF = dataclasses.replace(SMALL, state_dtype="f16", io_dtype="f16", dt_dtype="f16")
ONE_TOKEN = dataclasses.replace(SMALL, tokens=1, state_dtype="bf16")
RAGGED = dataclasses.replace(SMALL, ragged=True)
RAGGED_BF16 = dataclasses.replace(RAGGED, state_dtype="bf16")
# Of few heads, since calls are drawn on the CPU.
LARGE_BATCH = [dataclasses.replace(p, heads=4) for p in (SMALL, HALF, RAGGED)]
FAR = dataclasses.replace(SMALL, compact=False)
RAGGED_FAR = dataclasses.replace(RAGGED, compact=False)
WIDE = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
RAGGED_WIDE = dataclasses.replace(WIDE, ragged=True)
# A model of 112 heads and 8 groups over 1, 2 and 4 ranks, and 15 heads in 3 groups of every head's shape.
ODD_HEADS = [
    *(dataclasses.replace(SMALL, heads=112 // ranks, groups=8 // ranks) for ranks in (1, 2, 4)),
    *(
        dataclasses.replace(SMALL, heads=15, groups=3, head_dim=P, d_state=N)
        for P, N in ((64, 64), (64, 128), (64, 256), (128, 128), (128, 256))
    ),
]
SERVED = CacheSpec(layers=1, heads=16, head_dim=64, d_state=128, groups=1, tokens=1, window=16)
SERVED_PROBLEM = SERVED.problem(dt_dtype="f32", d_dtype=None, dt_bias_dtype=None, dt_softplus=False)


@pytest.fixture(scope="module", autouse=True)
def _unchecked() -> Iterator[None]:
    """Each kernel is held to more here than in its self-check."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLAYSSM_SELFCHECK", "0")
        yield


def step(call: Call) -> Call:
    replayssm_cute.checkpointing_ssu(**call.kwargs())
    torch.cuda.synchronize()
    return call


def hold(problem: Problem, before: Call, after: Call, what: str) -> None:
    found = compare.errors(before, after)
    violation = compare.bounds(problem).violation(found)
    assert violation is None, f"{what}: {violation}; {found}"


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def needs_memory(nbytes: int) -> None:
    if torch.cuda.mem_get_info()[0] < 1.2 * nbytes:
        pytest.skip(f"needs {1.2 * nbytes / GIB:.0f} GiB of free GPU memory")


# ---------------------------------------------------------------------------------------------------
# Batches and heads
# ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.fault(1, 3)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 3e4])
@of_problem
@pytest.mark.parametrize("problem", LARGE_BATCH, ids=["f32", "f16", "ragged"])
def test_dead_rows_and_the_null_slot_change_no_bit_of_a_large_batch(problem: Problem, garbage: float) -> None:
    """512 rows with every pnat, five of them padding that all name slot 0, which is poisoned as dead rows are."""
    batch, padding = 512, (3, 100, 101, 400, 511)
    counts = [i % (problem.window + 1) for i in range(batch)]
    options: dict[str, Any] = {"lengths": [i % 5 for i in range(batch)], "tail": 9} if problem.ragged else {}
    clean, dirty = (
        random_call(
            problem, batch, pnat=counts, padding=padding, pad_slot_id=0, dead=dead, seed=1, device=CUDA, **options
        )
        for dead in (0.0, garbage)
    )
    null = [getattr(dirty, name)[0].clone() for name in CACHES]
    before = dirty.clone()
    step(clean)
    step(dirty)
    assert same_bits(clean.out, dirty.out)
    assert clean.state_batch_indices is not None
    live = clean.state_batch_indices[clean.state_batch_indices != 0].long()
    assert same_bits(clean.state[live], dirty.state[live])
    assert all(same_bits(getattr(dirty, name)[0], kept) for name, kept in zip(CACHES, null, strict=True))
    hold(problem, before, dirty, f"batch {batch}, {garbage} in dead rows")


@pytest.mark.gpu
@of_problem
@pytest.mark.parametrize("problem", LARGE_BATCH, ids=["f32", "f16", "ragged"])
def test_launches_of_a_large_batch_agree_to_the_bit(problem: Problem) -> None:
    """The same inputs give the same bits, whatever else runs on the GPU and in whatever order CTAs come."""
    options: dict[str, Any] = {"lengths": [i % 5 for i in range(512)], "tail": 9} if problem.ragged else {}
    before = random_call(problem, 512, padding=(7, 300), seed=16, device=CUDA, **options)
    first, *others = [step(before.clone()) for _ in range(6)]
    for other in others:
        assert all(same_bits(getattr(first, name), getattr(other, name)) for name in (*CACHES, "out"))


@pytest.mark.gpu
@pytest.mark.fault(23)
@of_problem
@pytest.mark.parametrize("problem", ODD_HEADS, ids=Problem.label)
def test_odd_numbers_of_heads_and_groups(problem: Problem) -> None:
    counts = [*range(problem.window + 1), 0, 0]
    for padding in ((), (17, 18)):
        before = random_call(problem, len(counts), pnat=counts, padding=padding, seed=2, device=CUDA)
        hold(problem, before, step(before.clone()), problem.label())


# ---------------------------------------------------------------------------------------------------
# Rollback
# ---------------------------------------------------------------------------------------------------


def new_tokens(call: Call, gen: torch.Generator) -> None:
    """Fresh inputs in a call's own tensors."""
    for name in ("x", "B", "C", "z"):
        if (t := getattr(call, name)) is not None:
            t.normal_(generator=gen)
    call.dt[..., 0].uniform_(-5, 0, generator=gen)


def recurrence(state: torch.Tensor, call: Call, rows: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Mamba2 token by token in float64: states (b, H, P, N) after 0..T tokens, and outputs (b, T, H, P).

    Args:
        rows: (b, T) places of each row's tokens in the packed ones, whatever lies there for tokens it has not.
    """
    repeat = call.x.shape[2] // call.B.shape[2]

    def of(t: torch.Tensor) -> torch.Tensor:
        return t.double().flatten(0, 1)[rows]

    x, dt = of(call.x), of(call.dt[..., 0])
    B, C = (of(t).repeat_interleave(repeat, 2) for t in (call.B, call.C))
    assert call.dt_bias is not None and call.D is not None and call.z is not None
    dt = torch.nn.functional.softplus(dt + call.dt_bias[:, 0].double())
    decay = torch.exp(call.A[:, 0, 0].double() * dt)
    states, outputs = [state], []
    for t in range(rows.shape[1]):
        added = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
        states.append(decay[:, t, :, None, None] * states[-1] + added)
        outputs.append((states[-1] @ C[:, t, :, :, None])[..., 0] + call.D[:, :1].double() * x[:, t])
    z = of(call.z)
    return states, torch.stack(outputs, 1) * z * torch.sigmoid(z)


@pytest.mark.gpu
@of_problem
@pytest.mark.parametrize("problem", [SMALL, ONE_TOKEN, RAGGED, RAGGED_BF16], ids=Problem.label)
def test_rollback_over_two_hundred_steps(problem: Problem) -> None:
    """Random acceptance, none to all, beside the recurrence in float64 that never saw a rejected token."""
    batch, T, W = 8, problem.tokens, problem.window
    options: dict[str, Any] = {"lengths": T} if problem.ragged else {}
    call = random_call(problem, batch, pnat=0, seed=3, device=CUDA, **options)
    assert call.state_batch_indices is not None
    truth = call.state[call.state_batch_indices.long()].double()
    draw = torch.Generator().manual_seed(4)
    gen = torch.Generator(CUDA).manual_seed(5)
    limit = 2.2e-3 if problem.state_dtype == "f32" else 6e-3
    flushes = rejected = 0
    for number in range(200):
        new_tokens(call, gen)
        lengths = torch.full((batch,), T)
        if call.cu_seqlens is not None:
            lengths = torch.randint(0, T + 1, (batch,), generator=draw)
            call.cu_seqlens[1:] = lengths.cumsum(0).to(call.cu_seqlens)
            rows = packing.places(call.cu_seqlens, T, call.x.shape[1])[0]
        else:
            rows = torch.arange(batch * T, device=CUDA).view(batch, T)
        accepted = (torch.rand(batch, generator=draw) * (lengths + 1)).long()
        states, expected = recurrence(truth, call, rows)
        step(call)
        has = (torch.arange(T) < lengths[:, None]).to(CUDA)
        got = call.out.double().flatten(0, 1)[rows]
        if bool(has.any()):
            error = float((got - expected)[has].norm() / expected[has].norm())
            assert error < limit, f"step {number}: {error:.3g}"
        truth = torch.stack(states)[accepted.to(CUDA), torch.arange(batch, device=CUDA)]
        pnat = call.prev_num_accepted_tokens[call.state_batch_indices.long()].cpu()
        flushes += int((pnat + lengths > W).sum())
        rejected += int((lengths - accepted).sum())
        replayssm_cute.commit(
            call.ring_start, call.prev_num_accepted_tokens, call.state_batch_indices, accepted.to(CUDA), tokens=T,
            window=W, lengths=lengths.to(CUDA) if problem.ragged else None,
        )  # fmt: skip
    assert flushes > 20 * batch * T / W and rejected > 50 * batch * T / W


# ---------------------------------------------------------------------------------------------------
# Graphs
# ---------------------------------------------------------------------------------------------------


def fill(static: Call, fresh: Call) -> None:
    """A call's contents into another's tensors; what is expanded with stride 0 has one value a head."""
    for name, value in fresh.kwargs().items():
        if isinstance(value, torch.Tensor):
            destination = getattr(static, name)
            index = tuple(slice(0, 1) if s == 0 else slice(None) for s in destination.stride())
            destination[index].copy_(value[index])


@pytest.mark.gpu
@pytest.mark.fault(15)
@of_problem
@pytest.mark.parametrize("problem", [SMALL, RAGGED], ids=["dense", "ragged"])
def test_a_capture_reads_no_metadata(problem: Problem) -> None:
    """Slots, cursors and row lengths that point anywhere at capture; a replay takes what is there by then."""
    options: dict[str, Any] = {"lengths": [4, 0, 3, 1, 2, 4, 4, 2], "tail": 12} if problem.ragged else {}
    fresh = random_call(problem, 8, seed=6, device=CUDA, **options)
    static = step(fresh.clone())  # the kernel is loaded
    for name in ("state_batch_indices", "ring_start", "prev_num_accepted_tokens", "cu_seqlens"):
        if (t := getattr(static, name)) is not None:
            t.fill_(1_234_567_890)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayssm_cute.checkpointing_ssu(**static.kwargs())
    torch.cuda.synchronize()
    fill(static, fresh)
    graph.replay()
    torch.cuda.synchronize()
    hold(problem, fresh, static, "a replay")


@pytest.mark.gpu
@pytest.mark.kernels(SMALL)
@pytest.mark.fault(16, 17)
def test_captured_for_64_and_replayed_for_3() -> None:
    """What 64 rows left in the buffers reaches neither slot nor output of three, nor do the 61 rows of padding."""
    bucket, slots = 64, 80
    caches = random_call(SMALL, 1, slots=slots, dead=None, seed=7, device=CUDA)
    shape, group = (4, 16, 64), (4, 1, 128)
    inputs = {
        "rows": GraphInput((), torch.int32, pad=-1),
        "x": GraphInput(shape, torch.bfloat16),
        "z": GraphInput(shape, torch.bfloat16),
        "B": GraphInput(group, torch.bfloat16),
        "C": GraphInput(group, torch.bfloat16),
        "dt": GraphInput((4, 16), torch.bfloat16),
    }

    def model(**given: torch.Tensor) -> torch.Tensor:
        dt = spread(given.pop("dt"), 64)
        out = torch.empty_like(given["x"])
        rows = given.pop("rows")
        held = dataclasses.replace(caches, **given, dt=dt, out=out, state_batch_indices=rows)
        return replayssm_cute.checkpointing_ssu(**held.kwargs())

    replayssm_cute.warmup([SMALL], [bucket])
    graphs = DecodeGraphs(model, inputs, [bucket], device=CUDA)
    graphs.capture()
    for batch, seed in ((bucket, 8), (3, 9), (1, 10), (bucket, 11)):
        fresh = random_call(SMALL, batch, slots=slots, dead=0.0, seed=seed, device=CUDA)
        for name in (*CACHES, "A", "D", "dt_bias"):
            setattr(fresh, name, getattr(caches, name))
        fresh.ring_start, fresh.prev_num_accepted_tokens = caches.ring_start, caches.prev_num_accepted_tokens
        before = fresh.clone()
        tokens = {name: getattr(fresh, name) for name in ("x", "z", "B", "C")}
        assert fresh.state_batch_indices is not None
        fresh.out = graphs(rows=fresh.state_batch_indices, dt=fresh.dt[..., 0].contiguous(), **tokens).clone()
        torch.cuda.synchronize()
        hold(SMALL, before, fresh, f"{batch} rows of {bucket}")


@pytest.mark.gpu
@pytest.mark.kernels(SERVED_PROBLEM, SERVED)
@pytest.mark.fault(4, 5)
def test_a_prompt_of_one_token_under_a_graph() -> None:
    """Slots left with ring_start 13 and pnat 7 are reset; then one token a step, commits in the graph, beyond W."""
    spec, batch = SERVED, 3
    rate = torch.linspace(1, 8, spec.heads)
    cache = ReplayCache.allocate(spec, 9, CUDA, A=[-rate])
    arguments = cache.step_args(0)
    for t in cache.layers[0].state, cache.layers[0].x_cache, cache.layers[0].B_cache, cache.layers[0].dt_cache:
        t.fill_(float("nan"))
    cache.ring_start.fill_(13)
    cache.pnat.fill_(7)
    slots = torch.tensor([5, 0, 7], dtype=torch.int32, device=CUDA)
    ones = torch.ones(batch, dtype=torch.int32, device=CUDA)
    gen = torch.Generator(CUDA).manual_seed(12)
    x = torch.empty(batch, 1, spec.heads, 64, dtype=torch.bfloat16, device=CUDA)
    B, C = (torch.empty(batch, 1, 1, 128, dtype=torch.bfloat16, device=CUDA) for _ in range(2))
    dt, out = torch.empty(batch, 1, spec.heads, device=CUDA), torch.empty_like(x)
    A = spread(-rate.to(CUDA), 64, 128)

    def decode() -> None:
        replayssm_cute.checkpointing_ssu(
            **arguments, x=x, dt=spread(dt, 64), A=A, B=B, C=C, out=out, state_batch_indices=slots
        )
        cache.commit(slots, ones)

    def draw() -> None:
        for t in (x, B, C):
            t.normal_(generator=gen)
        dt.uniform_(0.001, 0.1, generator=gen)

    draw()
    cache.reset(slots)
    decode()  # loads what is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    cache.reset(slots)
    truth = torch.zeros(batch, spec.heads, 64, 128, dtype=torch.float64, device=CUDA)
    for number in range(spec.window + 2):
        draw()
        graph.replay()
        torch.cuda.synchronize()
        weight = dt[:, 0].double()
        truth *= torch.exp(A[:, 0, 0].double() * weight)[..., None, None]
        truth += (weight[..., None] * x[:, 0].double())[..., None] * B[:, 0, :, None].double()
        expected = truth @ C[:, 0, 0, :, None].double()[:, None]
        error = float((out[:, 0].double() - expected[..., 0]).norm() / expected.norm())
        assert error < 2.2e-3, f"token {number}: {error:.3g}"
    assert cache.pnat[slots.long()].tolist() == [2] * batch, "one flush, and two tokens since"


# ---------------------------------------------------------------------------------------------------
# Far away
# ---------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.fault(8, 10)
@of_problem
@pytest.mark.parametrize("problem", [WIDE, RAGGED_WIDE], ids=["dense", "ragged"])
def test_a_page_pool_beyond_2_to_the_31_elements_of_every_cache(problem: Problem) -> None:
    """One page a slot with state and rings in it, 2,000 pages: every cache's last slots lie beyond 2^31 elements."""
    pages, named = 2000, [0, 455, 931, 1862, 1999]
    small = random_call(problem, len(named), slots=len(named), pnat=[0, 3, 13, 14, 16], seed=13, device=CUDA)
    offset, places = 64, {}
    for name in CACHES:
        size = getattr(small, name)[0].numel() * getattr(small, name).element_size()
        places[name] = (offset, size)
        offset += math.ceil(size / 16) * 16 + 48
    assert offset // 4 * named[-1] > 1 << 31
    needs_memory(pages * offset)
    pool = torch.empty(pages, offset, dtype=torch.uint8, device=CUDA)
    where = torch.tensor(named, device=CUDA)
    neighbours = torch.tensor([1, 454, 456, 930, 932, 1861, 1863, 1998], device=CUDA)
    for page in (*named, *neighbours.tolist()):
        pool[page].fill_(0x5A)
    big = small.clone()
    for name, (start, size) in places.items():
        t = getattr(small, name)
        view = pool.view(t.dtype)[:, start // t.element_size() : (start + size) // t.element_size()]
        view = view.unflatten(1, t.shape[1:])
        for page, content in zip(named, t, strict=True):
            view[page].copy_(content)
        setattr(big, name, view)
    for name in ("ring_start", "prev_num_accepted_tokens"):
        cursors = torch.zeros(pages, dtype=torch.int32, device=CUDA)
        cursors[where] = getattr(small, name)
        setattr(big, name, cursors)
    small.state_batch_indices = torch.arange(len(named), dtype=torch.int32, device=CUDA)
    big.state_batch_indices = where.int()
    step(big)
    after = small.clone()
    after.out = big.out
    for name in CACHES:
        setattr(after, name, torch.stack([getattr(big, name)[page] for page in named]))
    hold(problem, small, after, "pages beyond 2^31")
    assert bool((pool[neighbours] == 0x5A).all()), "another slot's page"
    ends = [*places.values(), (offset, 0)]
    for (start, size), (following, _) in itertools.pairwise(ends):
        assert bool((pool[where][:, start + size : following] == 0x5A).all()), "bytes between the caches"


@pytest.mark.gpu
@pytest.mark.fault(9, 11)
@of_problem
@pytest.mark.parametrize("problem", [FAR, RAGGED_FAR], ids=["dense", "ragged"])
def test_tokens_beyond_2_to_the_31_elements(problem: Problem) -> None:
    """All inputs and the output in one wide parent whose tokens lie so far apart that 32-bit offsets do not reach."""
    batch = 1 if not problem.ragged else 700
    options: dict[str, Any] = {"lengths": 1, "tail": 3} if problem.ragged else {}
    before = random_call(problem, batch, seed=14, device=CUDA, **options)
    rows, tokens = before.x.shape[:2]
    stride = ((1 << 31) // (tokens - 1) // 64 + 2) * 64
    assert stride * (tokens - 1) >= 1 << 31
    needs_memory(2 * rows * tokens * stride)
    parent = torch.empty(rows, tokens, stride, dtype=torch.bfloat16, device=CUDA)
    after, place = before.clone(), 64
    for name in TOKENS:
        t = getattr(before, name)
        width = t.shape[2] * t.shape[3]
        view = parent[..., place : place + width].unflatten(-1, t.shape[2:])
        view.copy_(t)
        setattr(after, name, view)
        place += width + 64
    dt = parent[..., stride - 16 :]
    dt.copy_(before.dt[..., 0])
    after.dt = spread(dt, 64)
    step(after)
    hold(problem, before, after, "tokens far apart")


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.fault(25)
@of_problem
@pytest.mark.parametrize("problem", [SMALL, RAGGED], ids=["dense", "ragged"])
def test_every_way_to_run_a_step_on_another_device_than_the_current_one(problem: Problem) -> None:
    """A call, a prepared and a bound launch, a captured and a compiled one: operands decide the device."""
    there = torch.device("cuda", 1)
    options: dict[str, Any] = {"lengths": [4, 0, 3, 2, 1], "tail": 2} if problem.ragged else {}
    before = random_call(problem, 5, pnat=[16, 0, 3, 13, 12], padding=(2,), seed=15, device=there, **options)

    def captured(call: Call) -> None:
        with torch.cuda.device(there):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayssm_cute.checkpointing_ssu(**call.kwargs())
        graph.replay()

    def compiled(call: Call) -> None:
        torch._dynamo.reset()
        torch.compile(lambda c: replayssm_cute.checkpointing_ssu(**c.kwargs()), backend="aot_eager")(call)

    ways: dict[str, Callable[[Call], object]] = {
        "call": lambda c: replayssm_cute.checkpointing_ssu(**c.kwargs()),
        "prepared": lambda c: replayssm_cute.prepare(**c.kwargs()).launch(*plan.kernel_args(c)),
        "bound": lambda c: replayssm_cute.prepare(**c.kwargs()).bind(*plan.kernel_args(c))(),
        "captured": captured,
        "compiled": compiled,
    }
    with torch.cuda.device(0):
        for name, run in ways.items():
            after = before.clone()
            torch.cuda.synchronize(there)  # the clone, on the other device's stream
            run(after)
            assert torch.cuda.current_device() == 0
            torch.cuda.synchronize(there)
            hold(problem, before, after, name)
