"""Low-precision states on a GPU: the cases that the host simulates, seeds inside graphs, and many steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import pytest
import torch
from low_precision_cases import CASES, excess, least_share
from simulated_cases import BASE, FOUR

import replayssm_cute
from replayssm_cute import compare, compiler, selfcheck, target
from replayssm_cute.calls import Call, random_call
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

CUDA = torch.device("cuda")
WIDE = dataclasses.replace(BASE, heads=16, groups=1, d_state=128)
LAUNCHED: dict[str, Problem] = {
    "f8": dataclasses.replace(WIDE, state_dtype="f8e4m3"),
    "i8": dataclasses.replace(WIDE, state_dtype="i8"),
    "i8 ragged": dataclasses.replace(WIDE, state_dtype="i8", ragged=True),
    "f8 copy": dataclasses.replace(WIDE, copy_dtype="f8e4m3"),
    "bf16 copy": dataclasses.replace(WIDE, copy_dtype="bf16"),
    "bf16 stochastic": dataclasses.replace(WIDE, state_dtype="bf16", philox_rounds=10),
    "i8 stochastic": dataclasses.replace(WIDE, state_dtype="i8", philox_rounds=10),
}
CONFIGS = (TileConfig(), TileConfig(heads_per_cta=4, stages=2, tail_rows=3))


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    """Compile everything in parallel first."""
    if not torch.cuda.is_available():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "REPLAYSSM_SELFCHECK", "0")  # each kernel is held to more here
        where = target.of_device(torch.cuda.current_device())
        wanted = [*CASES.values(), *((p, c) for p in LAUNCHED.values() for c in CONFIGS)]
        compiler.compile_many([(p, c, where) for p, c in wanted])
        yield


def mixed(problem: Problem, seed: int = 0) -> Call:
    """Every number of live rows, some padding, NaN in everything dead."""
    counts = [*range(problem.window + 1)]
    padding = () if problem.index_dtype is None else (len(counts), len(counts) + 1)
    counts += [0] * len(padding)
    return random_call(
        problem, len(counts), slots=len(counts) + 5, pnat=counts, padding=padding, seed=seed, device=CUDA
    )


def step(call: Call, config: TileConfig | None, pdl: bool = False) -> Call:
    replayssm_cute.checkpointing_ssu(**call.kwargs(), config=config, enable_pdl=pdl)
    torch.cuda.synchronize()
    return call


def check(problem: Problem, before: Call, after: Call) -> None:
    errors = compare.errors(before, after)
    violation = compare.bounds(problem).violation(errors)
    assert violation is None, f"{violation}; {errors}"
    if problem.rewrites:
        assert compare.same_codes(before.to("cpu"), after.to("cpu")) >= least_share(problem)


@pytest.mark.gpu
@pytest.mark.parametrize("number,name", list(enumerate(CASES)), ids=list(CASES))
def test_a_whole_step(number: int, name: str) -> None:
    """Numbers within bounds, and nearly every code the reference's: stochastic ones too, by hardware or by hand."""
    problem, config = CASES[name]
    before = mixed(problem, seed=number)
    after = step(before.clone(), config, problem.pdl)
    check(problem, before, after)
    if problem.precision == "highest":
        assert excess(before, after) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAUNCHED)
@pytest.mark.parametrize("batch", [1, 3, 131])
def test_batch_sizes(name: str, batch: int) -> None:
    problem = LAUNCHED[name]
    for config in CONFIGS:
        before = random_call(problem, batch, seed=batch, device=CUDA)
        check(problem, before, step(before.clone(), config))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAUNCHED)
def test_launches_and_configs_agree_to_the_bit(name: str) -> None:
    """What is rounded depends on seed, slot, head and element alone."""
    before = mixed(LAUNCHED[name], seed=5)
    first, again, other = (step(before.clone(), config) for config in (CONFIGS[0], *CONFIGS))
    assert torch.equal(compare.codes(first), compare.codes(again)) and torch.equal(
        compare.codes(first), compare.codes(other)
    )


@pytest.mark.gpu
@pytest.mark.fault(21)
def test_a_seed_renewed_inside_a_graph_rounds_anew_in_every_replay() -> None:
    """A captured randint before the step, as engines do it; the seed itself is never written by the step."""
    problem = LAUNCHED["bf16 stochastic"]
    start = mixed(problem, seed=7)
    call, seeds = start.clone(), torch.zeros(1, dtype=torch.int64, device=CUDA)
    call.rand_seed = seeds
    step(call.clone(), CONFIGS[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seeds.random_()
        replayssm_cute.checkpointing_ssu(**call.kwargs(), config=CONFIGS[0])
    found, used = [], []
    for _ in range(2):
        call.state.copy_(start.state)
        graph.replay()
        torch.cuda.synchronize()
        found.append(compare.codes(call).clone())
        used.append(int(seeds))
    assert used[0] != used[1] and not torch.equal(found[0], found[1])
    for seed, bits in zip(used, found, strict=True):  # eagerly, with the seed that the replay drew
        alone = start.clone()
        alone.rand_seed = torch.tensor([seed], device=CUDA)
        assert torch.equal(compare.codes(step(alone, CONFIGS[0])), bits)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAUNCHED)
def test_self_checks_pass(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "1")
    problem = LAUNCHED[name]
    assert selfcheck.passed(problem, CONFIGS[0], torch.cuda.current_device())


@pytest.mark.gpu
@pytest.mark.parametrize("copy", ["bf16", "f8e4m3", "i8"])
def test_a_dual_state_keeps_the_recurrence_of_f32(copy: str) -> None:
    """Forty steps: the checkpoint beside a copy stays that of a plain f32 state, the copy near it."""
    plain = dataclasses.replace(FOUR, has_z=False)
    first = random_call(plain, 4, slots=4, pnat=[0] * 4, dead=0.0, device=CUDA)
    second = random_call(dataclasses.replace(plain, copy_dtype=copy), 4, slots=4, pnat=[0] * 4, dead=0.0, device=CUDA)
    slots = first.state_batch_indices
    assert slots is not None and second.state_copy is not None
    for call in (first, second):
        call.state.zero_()
        call.ring_start.zero_()
    second.state_copy.view(torch.uint8).zero_()
    for number in range(40):
        new = random_call(plain, 4, slots=4, seed=100 + number, device=CUDA)
        accepted = torch.randint(0, plain.tokens + 1, (4,), generator=torch.Generator().manual_seed(number)).to(CUDA)
        for call in (first, second):
            given = call.kwargs() | {n: getattr(new, n) for n in ("x", "dt", "A", "B", "C", "D", "dt_bias", "out")}
            given["state_batch_indices"] = slots
            replayssm_cute.checkpointing_ssu(**given, config=CONFIGS[0])
            replayssm_cute.commit(
                call.ring_start, call.prev_num_accepted_tokens, slots, accepted, tokens=4, window=plain.window
            )
    assert float((first.state - second.state).norm() / first.state.norm()) < 2e-6
