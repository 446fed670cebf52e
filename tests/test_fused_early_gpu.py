"""decode_step's chains that start early, behind kernels that let them: no value is read before it is written.

The producer lets its dependents start at its own start, before it has written anything: a conv that reads too early, or
a step behind it that does, finds the projection of the layer before.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fused_calls import copied, layer, random_layer_call
from replayssm_tuning import layer_search
from replayssm_tuning.kernel_pool import KernelPool
from replayssm_tuning.producer_kernel import Produce, compile_producer

from replayssm_cute import target
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import launches
from replayssm_cute.fused.chains import Chain, ConvCut, NormCut, Overlap
from replayssm_cute.fused.problem import LayerCall
from replayssm_cute.problem import Problem

pytestmark = pytest.mark.gpu

PROBLEM = layer(Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16), norm_groups=8)
LAYERS, STEPS, REPLAYS = 3, 12, 5
NORM = NormCut(4)
CHAINS = (
    Chain(Overlap.NONE, TileConfig(), ConvCut(8, 64), NORM),
    Chain(Overlap.ALL, TileConfig(), ConvCut(8, 64, ahead=True), NORM),
    Chain(Overlap.ALL, TileConfig(), ConvCut(4, 64, soon=True), NORM),
    Chain(Overlap.ALL_X, TileConfig(), ConvCut(8, 64, soon=True, ahead=True), NORM),
    Chain(Overlap.ALL_X, TileConfig(), ConvCut(2, 64, each=1, soon=True), NORM),
)


@pytest.fixture(scope="module")
def produce() -> Produce:
    """A copy that lets its dependents start at its own start; the chains' kernels are compiled in parallel."""
    where = target.of_device(torch.cuda.current_device())
    with KernelPool(where) as pool:
        pool.fill((r for chain in CHAINS for r in layer_search.recipes(PROBLEM, chain, 1)), "early starts")
    return compile_producer(PROBLEM.step, where.arch)


@pytest.mark.parametrize("batch", [1, 40])
def test_what_starts_early_reads_what_was_written(batch: int, produce: Produce) -> None:
    """Layers in one graph, behind the producer and then behind each other; the bits are those of kernels in a row."""
    live = torch.arange(batch) % 12  # none flushes, so that a graph may be replayed
    start = [random_layer_call(PROBLEM, batch, pnat=live, dead=0.0, seed=k) for k in range(LAYERS)]
    sources = [torch.randn(start[0].projected.shape, device="cuda").bfloat16() for _ in range(STEPS)]
    words = [torch.zeros(4, dtype=torch.int32, device="cuda") for _ in range(4)]  # what else a producer copies
    dt = [torch.zeros(4, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    found = []
    for chain in CHAINS:
        plan = launches.make(PROBLEM, batch, torch.cuda.current_device(), overlap=chain)
        projected = torch.zeros_like(sources[0])
        shared = {"projected": projected, "scratch": projected.new_empty((*projected.shape[:2], PROBLEM.channels))}
        calls = [dataclasses.replace(copied(call, "cuda"), **shared) for call in start]

        def step(number: int, calls: list[LayerCall] = calls, plan: launches.LayerPlan = plan) -> torch.Tensor:
            call = calls[number % LAYERS]
            return plan.launch(dataclasses.replace(call, out=torch.empty_like(call.out)))

        def behind_producer(number: int, projected: torch.Tensor = projected) -> None:
            produce(*(t.view(torch.int32).view(-1) for t in (sources[number], projected)), *words, *dt)

        step(0)
        behind_producer(0)
        torch.cuda.synchronize()
        graph, outs = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for number in range(STEPS):
                behind_producer(number)
                outs.append(step(number))
            outs += [step(number) for number in range(STEPS)]
        for _ in range(REPLAYS):
            graph.replay()
        torch.cuda.synchronize()
        rings = [t.nan_to_num() for call in calls for t in (call.conv_cache, call.x_cache, call.dt_cache)]
        found.append([*(t.clone() for t in outs), *rings])
        assert all(torch.isfinite(t).all() for t in outs)
    for chain, other in zip(CHAINS[1:], found[1:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True)), chain.label()
