"""The step with the conv in it, on the host by its own code: numbers, and which rows of the rings it touches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from fused_calls import copied, layer, random_layer_call
from fused_simulator import StepConvRun, StepConvSource, kernel
from simulated_cases import cursors
from test_fused_reference import error

from replayssm_cute import compiler, target
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import launches, proof
from replayssm_cute.fused.problem import LayerCall
from replayssm_cute.fused.recipes import LayerRecipe
from replayssm_cute.fused.reference import conv_reference
from replayssm_cute.fused.shapes import StepConvShape
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference
from replayssm_cute.ring import flushes

BASE = Problem(heads=2, head_dim=64, d_state=64, groups=2, tokens=4, window=16)
CASES: dict[str, tuple[Problem, TileConfig]] = {
    "one head": (BASE, TileConfig()),
    "a group of four": (dataclasses.replace(BASE, heads=4, groups=1, d_state=128), TileConfig()),
    "one token": (dataclasses.replace(BASE, tokens=1, window=3), TileConfig()),
    "three tokens of W 3": (dataclasses.replace(BASE, tokens=3, window=3, index_dtype=None), TileConfig()),
    "two tiles, whole": (dataclasses.replace(BASE, tokens=2), TileConfig(tiles_per_warp=2, ring="whole")),
    "split": (dataclasses.replace(BASE, heads=2, groups=1), TileConfig(head_split=2)),
    "two at a time": (
        dataclasses.replace(BASE, heads=4, groups=2, state_dtype="bf16"),
        TileConfig(heads_per_cta=2, parallel_heads=2),
    ),
    "T 9, W 11, f16": (
        dataclasses.replace(BASE, tokens=9, window=11, io_dtype="f16", dt_dtype="f16", state_dtype="f16"), TileConfig(),
    ),
    "T 16, behind another kernel": (dataclasses.replace(BASE, tokens=16, pdl=True), TileConfig()),
    "T 17, W 33": (dataclasses.replace(BASE, tokens=17, window=33, index_dtype="i64"), TileConfig()),
    "head_dim 80": (dataclasses.replace(BASE, head_dim=80, d_dtype=None, dt_bias_dtype=None), TileConfig()),
    "d_state 256": (dataclasses.replace(BASE, groups=1, d_state=256, state_dtype="bf16"), TileConfig()),
}  # fmt: skip


def expected(call: LayerCall) -> LayerCall:
    """What a conv and a step leave behind."""
    model = copied(call)
    convolved = torch.zeros(model.conv_inputs().shape, dtype=model.projected.dtype)
    conv_reference(
        model.conv_inputs(), model.conv_cache, model.ring_start, model.prev_num_accepted_tokens, model.conv_weight,
        model.conv_bias, convolved, model.state_batch_indices, model.pad_slot_id, torch.float64,
    )  # fmt: skip
    step = model.step_call(convolved, model.out)
    checkpointing_ssu_reference(**step.kwargs(), compute_dtype=torch.float64)
    return model


def run(problem: Problem, config: TileConfig, source: StepConvSource | None = None) -> tuple[StepConvRun, LayerCall]:
    """Simulate, and compare all that a step leaves behind."""
    found = cursors(problem)
    padding = () if problem.index_dtype is None else (2,)
    if padding:
        found.insert(2, (0, 0))
    shape = StepConvShape(problem, config, "bf16", None if problem.tokens == 2 else "f32")
    call = random_layer_call(
        layer(problem, conv_bias_dtype=shape.bias_dtype), len(found), slots=len(found) + 1, padding=padding,
        ring_start=[start for start, _ in found], pnat=[pnat for _, pnat in found],
    )  # fmt: skip
    model = expected(call)
    parts = launches.LayerPlan(layer(problem), lambda *_: None, None, lambda *_: None).parts(call)
    done = StepConvRun(shape, parts[0][1], *([source] if source else []))
    bound = {"bf16": 3e-3, "f16": 1e-3}[problem.io_dtype]
    assert error(call.out, model.out) < bound, "out"
    assert not call.out[list(padding)].any()
    assert torch.equal(call.conv_cache.nan_to_num(), model.conv_cache.nan_to_num()), "conv_cache"
    for name in ("x_cache", "B_cache", "dt_cache", "state"):
        got, wanted = getattr(call, name), getattr(model, name)
        assert torch.equal(got.isnan(), wanted.isnan()), name
        assert error(got.nan_to_num(), wanted.nan_to_num()) < (bound if name == "state" else 1e-3), name
    assert sum(flushes(n, problem.tokens, problem.window) for _, n in found) == 2
    return done, call


@pytest.mark.parametrize("name", CASES)
def test_a_whole_step(name: str) -> None:
    problem, config = CASES[name]
    done, call = run(problem, config)
    assert done.unfinished == []
    slots = range(len(call.out)) if call.state_batch_indices is None else call.state_batch_indices.tolist()
    R = problem.ring_rows
    for ring in ("conv_x", "conv_B", "conv_C"):
        read, written = (done.tensors[ring].counts(what) for what in ("read", "written"))
        touched = torch.zeros(read.shape[:2], dtype=torch.bool)
        for slot in slots:
            if slot < 0:
                continue
            end = int(call.ring_start[slot] + call.prev_num_accepted_tokens[slot])
            new, before = [(end + k) % R for k in range(problem.tokens)], [(end - k) % R for k in (1, 2, 3)]
            assert (written[slot][new] == 1).all() and written[slot].sum() == written[slot][new].size, ring
            assert (read[slot][before] > 0).all(), ring
            touched[slot, before] = True
        assert not read[~touched.numpy()].any(), f"{ring}: rows that no conv needs are read"
        live = sum(slot >= 0 for slot in slots)
        assert written.sum() == live * problem.tokens * written[0, 0].size, f"{ring}: other rows are written"


SLIPS = {
    "a tap too early": ("at = token - (TAPS - 1) + k", "at = token - TAPS + k"),
    "history from the start": ("behind = self.spec.ring_row(end,", "behind = self.spec.ring_row(slot * 0,"),
    "C with B's channels": ("self.first_c + group", "self.first_b + group"),
    "every CTA appends": ("appends = (head0 % p.heads_per_group == 0) & (split == 0)", "appends = head0 >= 0"),
    "no raw x": ("self.keep(ring, raw_x[piece], slot, end, token, head, column)", "pass"),
}  # fmt: skip


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_are_seen(slip: str) -> None:
    problem, config = CASES["a group of four"]
    source = StepConvSource(("step_conv", *SLIPS[slip]))
    with pytest.raises(AssertionError):
        done, _ = run(problem, config, source)
        for ring in ("conv_x", "conv_B", "conv_C"):
            assert done.tensors[ring].counts("written").max() == 1


@pytest.mark.parametrize("name", ["one token", "T 9, W 11, f16", "three tokens of W 3"])
def test_the_self_check_passes_it(name: str) -> None:
    problem, config = CASES[name]
    shape = StepConvShape(problem, config, "bf16", "f32")
    proof.prove(LayerRecipe(shape), kernel(shape), torch.device("cpu"))


@pytest.mark.parametrize("what", ["out", "conv_B", "x_cache", "state", "dt_cache"])
def test_the_self_check_finds_a_wrong_one(what: str) -> None:
    shape = StepConvShape(CASES["one head"][0], TileConfig(), "bf16", None)
    order = ("state", "x_cache", "B_cache", "dt_cache", *[""] * 7, "out", *[""] * 4, "conv_x", "conv_B", "conv_C")

    def wrong(*arguments: object) -> None:
        kernel(shape)(*arguments)
        tensor = arguments[order.index(what)]
        assert isinstance(tensor, torch.Tensor)
        tensor[torch.isfinite(tensor)] *= 1.1

    with pytest.raises(RuntimeError, match=f"self-check: decode_step's step with conv .* wrong values in {what}"):
        proof.prove(LayerRecipe(shape), wrong, torch.device("cpu"))


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (dataclasses.replace(BASE, heads=4), TileConfig(heads_per_cta=2, stages=2)),
        (dataclasses.replace(BASE, has_z=True), TileConfig()),
        (dataclasses.replace(BASE, compact=False), TileConfig()),
        (dataclasses.replace(BASE, ragged=True), TileConfig()),
    ],
    ids=["turns", "z", "gaps", "ragged"],
)
def test_what_cannot_hold_the_conv_is_refused(problem: Problem, config: TileConfig) -> None:
    with pytest.raises(ValueError, match="cannot hold the conv"):
        StepConvShape(problem, config, "bf16", None)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("tokens", [1, 4])
def test_it_compiles(tokens: int, arch: str) -> None:
    """Without a cap on registers nothing is spilled."""
    problem = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=tokens, window=16, pdl=True)
    shape = StepConvShape(problem, TileConfig(), "bf16", "bf16")
    found = compiler.entry_of(LayerRecipe(shape), target.named(arch)).resources
    assert found.stack_bytes == 0 and found.registers <= 255 and found.threads == 128
    assert found.shared_bytes == shape.config.shared_bytes(problem)
