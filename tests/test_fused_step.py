"""The step kernel that convolves its x, by its own source on the host (see test_step_indices)."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from simulated_cases import CASES as STEP_CASES
from simulated_cases import example_call, wide
from simulator.launch import Run
from simulator.layer import LAYER, ConvRun, LayerSource
from test_step_indices import TWO_WAYS as STEP_TWO_WAYS

from replayssm_cute import compiler, dtypes, plan, resources, target
from replayssm_cute.calls import Call
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import proof
from replayssm_cute.fused.recipes import LayerRecipe
from replayssm_cute.fused.reference import conv_reference
from replayssm_cute.fused.shapes import StepShape
from replayssm_cute.problem import Problem

TWO_WAYS = {*STEP_TWO_WAYS, "conv_step.store"}  # once per CTA
KINDS = ("bf16", "f32", "f16")
NAMES = (
    "plain", "two turns, one stage", "four turns, two stages, whole", "three turns, two stages, a tail",
    "split in four", "two at a time in two turns, a tail", "two tiles, whole, two turns", "T = W = 16, two turns",
    "T 17, W 33, two turns, two tiles", "head_dim 80, five tiles", "bf16 state, f16 inputs", "gaps everywhere",
    "nothing optional", "behind another kernel", "behind another kernel, two turns", "T 3, W 20",
)  # fmt: skip


def _shape(problem: Problem, config: TileConfig, number: int) -> StepShape:
    problem = dataclasses.replace(problem, has_z=False, window=max(problem.window, 3))
    return StepShape(problem, config, KINDS[number % 3], (*KINDS, None)[number % 4])


CASES = {name: _shape(*STEP_CASES[name], number) for number, name in enumerate(NAMES)}
CASES["T 1"] = _shape(dataclasses.replace(STEP_CASES["plain"][0], tokens=1), TileConfig(), 2)
CASES["T 1, two turns"] = _shape(
    dataclasses.replace(STEP_CASES["two turns, one stage"][0], tokens=1, window=3), TileConfig(heads_per_cta=2), 0
)
CASES["early"] = dataclasses.replace(CASES["behind another kernel"], early=True)
CASES["early, two turns"] = dataclasses.replace(CASES["behind another kernel, two turns"], early=True)
CASES["early, T 1, split"] = StepShape(
    dataclasses.replace(CASES["early"].problem, tokens=1, window=3), TileConfig(head_split=2), "f16", None, early=True
)
CASES["T 2"] = _shape(dataclasses.replace(STEP_CASES["plain"][0], tokens=2, window=5), TileConfig(), 3)


def conv_of(shape: StepShape, call: Call) -> dict[str, torch.Tensor | None]:
    """What the conv of a call's x takes: NaN in all rows of the ring but those that it may read."""
    p = shape.problem
    gen = torch.Generator().manual_seed(5)

    def randn(kind: str, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=gen).to(dtypes.TORCH[kind])

    ring = randn(p.io_dtype, len(call.state), p.ring_rows, p.heads, p.head_dim)
    age = (torch.arange(p.ring_rows) - call.ring_start[:, None] - call.prev_num_accepted_tokens[:, None]) % p.ring_rows
    ring[age < p.ring_rows - 3] = float("nan")
    channels = p.heads * p.head_dim
    return {
        "conv_cache": wide(ring, 0, 1),
        "conv_weight": randn(shape.weight_dtype, 4 * channels) * 0.5,
        "conv_bias": None if shape.bias_dtype is None else randn(shape.bias_dtype, channels),
    }


def run(shape: StepShape, source: LayerSource = LAYER) -> tuple[Call, ConvRun]:
    """Run an example and hold it to the reference's conv, and to the step kernel on what came out of it."""
    p = shape.problem
    call, padding = example_call(p)
    conv = conv_of(shape, call)
    before, ring = call.clone(), conv["conv_cache"]
    assert ring is not None
    rounded, exact = (ring.clone().flatten(-2), ring.double().flatten(-2))
    done = ConvRun(shape, call, conv, source)

    slots = torch.arange(call.batch) if call.state_batch_indices is None else call.state_batch_indices
    live = [row for row in range(call.batch) if row != padding]
    expected = torch.full((call.batch, p.tokens, p.heads * p.head_dim), float("nan"), dtype=torch.float64)
    weight, bias = conv["conv_weight"], conv["conv_bias"]
    assert weight is not None
    for cache, out in ((exact, expected), (rounded, expected.to(ring.dtype))):
        conv_reference(
            before.x.flatten(-2).to(cache.dtype), cache, before.ring_start, before.prev_num_accepted_tokens,
            weight.view(-1, 4), bias, out, call.state_batch_indices, call.pad_slot_id, torch.float64,
        )  # fmt: skip
    assert proof.same(ring.flatten(-2), rounded), "the ring of raw inputs"
    # x as the kernel appended it: near the truth, and what the plain step makes the same outputs of
    at = slots[live].long()
    rows = before.ring_start[at].long()[:, None] + before.prev_num_accepted_tokens[at].long()[:, None]
    rows = (rows + torch.arange(p.tokens)) % p.ring_rows
    appended = call.x_cache.transpose(1, 2)[at[:, None], rows]
    assert proof.close(appended.flatten(-2), expected[live]), "x"
    model = before.clone()
    model.x[live] = appended
    Run(p, shape.config, model)
    for name in ("out", "state", "x_cache", "B_cache", "dt_cache"):
        got, wanted = getattr(call, name), getattr(model, name)
        assert torch.equal(proof.as_bits(got.contiguous()), proof.as_bits(wanted.contiguous())), name
    return call, done


@pytest.mark.parametrize("name", CASES)
def test_a_whole_step(name: str) -> None:
    """The conv's x, the step's results to the bit, and no element read or written more often than it should be."""
    shape = CASES[name]
    p = shape.problem
    _, done = run(shape)
    assert {where: n for where, n in done.conflicts.items() if n > (2 if where in TWO_WAYS else 1)} == {}
    assert done.unfinished == []
    ring, x = done.tensors["conv_cache"].counts("written"), done.tensors["x_cache"].counts("written")
    assert np.array_equal(ring, x.swapaxes(1, 2)) and set(np.unique(ring)) == {0, 1}
    reads = done.tensors["x"].counts("read")
    assert reads.max() <= min(4, p.tokens)
    assert not done.tensors["conv_weight"].counts("written").any()


SLIPS: dict[str, tuple[str, str, str]] = {
    "history of another row": ("conv_step", "cutlass.min(at, 0)\n", "cutlass.min(at + 1, 0)\n"),
    "history that does not wrap": ("conv_step", "before + rows, before", "0, before"),
    "the new tokens too early": ("conv_step", "token + (k - (TAPS - 1))", "token + (k - TAPS)"),
    "the ring gets an old input": ("conv_step", "words[TAPS - 1])", "words[0])"),
    "another head's taps": ("conv_step", "return head * self.spec.problem.head_dim + p", "return p"),
    "x is not appended": ("conv_step", "self.spec.config.turns == 1", "False"),
    "no gate": ("values", "result.append(silu(total))", "result.append(total)"),
    "x where z is": ("conv_step", "self.x_rows + token, column)", "self.x_rows - 1 + token, column)"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_are_seen(slip: str) -> None:
    step = dataclasses.replace(CASES["plain"].problem, d_state=64, tokens=2, window=3)  # so that history wraps
    shape = dataclasses.replace(CASES["plain"], problem=step)
    run(shape)
    with pytest.raises(AssertionError):
        run(shape, LayerSource(SLIPS[slip]))


def test_raw_inputs_wait_for_the_projection() -> None:
    """Under PDL x is read after the wait for the kernel before."""
    shape = CASES["behind another kernel"]
    early = ("conv_step", "            cute.arch.griddepcontrol_wait()\n", "")
    run(dataclasses.replace(shape, early=True))
    with pytest.raises(AssertionError, match="while the predecessor may still be writing it"):
        run(shape, LayerSource(early))


def test_the_self_check_is_that_of_every_step() -> None:
    """The proof before a kernel serves, on the simulator: right kernels pass, and one that is wrong does not."""
    shape = StepShape(
        Problem(heads=2, head_dim=64, d_state=64, groups=1, tokens=2, window=4), TileConfig(), "bf16", "f32"
    )

    def kernel(source: LayerSource) -> Any:
        def launch(*arguments: Any) -> None:
            *step, ring, weight, bias = arguments
            conv = {"conv_cache": ring, "conv_weight": weight, "conv_bias": bias}
            ConvRun(shape, plan.as_call(tuple(step), shape.problem.dt_softplus), conv, source)

        return launch

    proof.prove(LayerRecipe(shape), kernel(LAYER), torch.device("cpu"))
    for slip in ("no gate", "the ring gets an old input", "x is not appended"):
        with pytest.raises((RuntimeError, AssertionError), match="self-check: decode_step's step with x's conv"):
            proof.prove(LayerRecipe(shape), kernel(LayerSource(SLIPS[slip])), torch.device("cpu"))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_it_compiles_without_spills(arch: str) -> None:
    """The configs that a search tries, and each kind of problem once; at most a CTA a multiprocessor fewer."""
    where = target.named(arch)
    step = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16, pdl=True)
    shapes = [StepShape(step, c, "bf16", "bf16") for c in (
        TileConfig(), TileConfig(tiles_per_warp=2), TileConfig(heads_per_cta=2, tail_rows=8, tiles_per_warp=2),
        TileConfig(heads_per_cta=4, tail_rows=8), TileConfig(heads_per_cta=4, stages=2, tail_rows=8),
    )]  # fmt: skip
    shapes += [dataclasses.replace(shape, early=True) for shape in shapes[::3]]
    shapes += [
        StepShape(dataclasses.replace(step, tokens=1), shapes[3].config, "f32", None),
        StepShape(
            dataclasses.replace(step, tokens=32, window=64, io_dtype="f16", dt_dtype="f16"), TileConfig(), "f32", "f32"
        ),
        StepShape(dataclasses.replace(step, compact=False, state_dtype="bf16"), shapes[3].config, "bf16", "bf16"),
        StepShape(dataclasses.replace(step, head_dim=80, index_dtype=None, pdl=False), TileConfig(), "f16", None),
    ]
    for shape in shapes:
        found = compiler.entry_of(LayerRecipe(shape), where).resources
        assert found.stack_bytes == 0, shape
        plain = compiler.entry(shape.problem, shape.config, where).resources
        assert found.threads == plain.threads and found.shared_bytes == plain.shared_bytes
        if shape.config.turns > 1:
            assert fit(found, where) >= fit(plain, where) - 1, shape  # the plain step has registers for four f32 CTAs


def fit(found: resources.Resources, where: target.Target) -> int:
    """CTAs that a multiprocessor has registers for; a warp's come in multiples of 256."""
    warp = -(-found.registers * 32 // 256) * 256
    return where.registers_per_sm // (warp * found.threads // 32)
