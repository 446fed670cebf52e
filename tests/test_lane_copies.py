"""The step kernel without TMA, for sm_80 and sm_89: simulated, compiled, and its copies run on what GPU there is."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from low_precision_cases import CASES as LOW_CASES
from low_precision_cases import RAGGED_COPIES
from simulated_cases import CASES, example_call, ragged_call
from simulator.launch import Run
from simulator.source import Source

from replayssm_cute import compare, resources, target
from replayssm_cute.config import WITHOUT_TMA, TileConfig
from replayssm_cute.default_rule import default_config
from replayssm_cute.fused import overlap
from replayssm_cute.kernels import spec, step
from replayssm_cute.kernels.lane_copies import LaneCopies
from replayssm_cute.plan import kernel_args
from replayssm_cute.problem import Problem

SUPER = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
SIMULATED = {
    **{name: CASES[name] for name in ("four turns, two stages", "W 32", "bf16, two at a time in two turns")},
    **{
        name: CASES[name]
        for name in ("head_dim 80, five tiles", "gaps everywhere", "T 32, W 64", "two tiles, whole, two turns")
    },
    **{name: LOW_CASES[name] for name in ("i8, rows of 64 bytes, two tiles, one stage", "i8, stochastic")},
    **{name: LOW_CASES[name] for name in ("bf16 copy, one turn of two tiles", "highest, two turns, T 9")},
    "packed rows beside a copy": RAGGED_COPIES["i8, T = W = 32"],
}


@pytest.mark.parametrize("name", SIMULATED)
def test_a_whole_step(name: str) -> None:
    problem, config = SIMULATED[name]
    call = ragged_call(problem) if problem.ragged else example_call(problem)[0]
    before = call.clone()
    run = Run(problem, config, call, arch="sm_80")
    assert compare.bounds(problem).violation(compare.errors(before, call)) is None
    assert run.unfinished == []
    assert {where: n for where, n in run.conflicts.items() if where.startswith("lane_copies") and n > 1} == {}


def test_it_leaves_what_tma_leaves() -> None:
    """Bit for bit: only the way of the state differs."""
    problem, config = SIMULATED["four turns, two stages"]
    first, _ = example_call(problem)
    second = first.clone()
    Run(problem, config, first)
    Run(problem, config, second, arch="sm_89")
    for name in first.written():
        ours, theirs = (getattr(call, name).contiguous().view(torch.uint8) for call in (first, second))
        assert torch.equal(ours, theirs), name


@pytest.mark.gpu
@pytest.mark.parametrize("name", SIMULATED)
def test_on_a_gpu_that_has_tma(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lanes' copies in a kernel for the GPU that is there: only the target of the code differs."""
    where = target.of_device(torch.cuda.current_device())
    monkeypatch.setattr(spec, "WITHOUT_TMA", (where.arch,))
    problem, config = SIMULATED[name]
    call = (ragged_call(problem) if problem.ragged else example_call(problem)[0]).to("cuda")
    before = call.clone()
    assert isinstance(step.step_kernel(problem, config, where.arch).copies, LaneCopies)
    step.compile_step(problem, config, where.arch)(*kernel_args(call))
    torch.cuda.synchronize()
    assert compare.bounds(problem).violation(compare.errors(before, call)) is None


SLIPS = {
    "no swizzle": ("remainder(row, 8) if wide == 8 else", "0 if wide == 8 else"),
    "a stage of a neighbour": ("thread.warp * layout.warp_bytes", "(thread.warp ^ 1) * layout.warp_bytes"),
    "nothing is waited for": ("cute.arch.cp_async_wait_group(0)", "pass"),
    "stored before others have written": ("        cute.arch.sync_warp()\n        for row", "        for row"),
    "tiles of one row": ("tile * self.rows + row", "tile + row"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_are_seen(slip: str) -> None:
    problem, config = SIMULATED["four turns, two stages"]
    call, _ = example_call(problem)
    before = call.clone()
    try:
        Run(problem, config, call, Source(("lane_copies", *SLIPS[slip])), arch="sm_80")
    except AssertionError:  # the simulator refuses an access
        return
    assert compare.bounds(problem).violation(compare.errors(before, call)) is not None


@pytest.mark.parametrize("arch", WITHOUT_TMA)
@pytest.mark.parametrize(
    "change",
    [{}, {"state_dtype": "bf16", "ragged": True}, {"copy_dtype": "bf16"}, {"state_dtype": "i8", "philox_rounds": 10}],
    ids=str,
)
def test_it_compiles_without_spills_and_without_tma(change: dict[str, object], arch: str) -> None:
    problem, where = dataclasses.replace(SUPER, **change), target.named(arch)  # type: ignore[arg-type]
    config = TileConfig(2, tail_rows=8)
    assert config.invalid_reason(problem, where) is None
    found = resources.inspect(problem, config, where)
    assert found.stack_bytes == 0 and found.shared_bytes == config.shared_bytes(problem)
    counts = resources.sass_counts(problem, config, where)
    if counts is None:
        pytest.skip("resources are fine; nvdisasm is not installed, so the code itself was not looked at")
    assert counts["LDGSTS"] > 0 and counts["HMMA"] > 0
    assert not [name for name in counts if name.startswith(("UTMA", "UBLK", "SYNCS"))]


def test_what_such_gpus_cannot_do_is_said() -> None:
    a100, l40s = (target.named(arch) for arch in WITHOUT_TMA)
    behind, fp8 = dataclasses.replace(SUPER, pdl=True), dataclasses.replace(SUPER, state_dtype="f8e4m3")
    for where in (a100, l40s):
        assert "enable_pdl needs compute capability 9" in str(TileConfig().invalid_reason(behind, where))
        with pytest.raises(ValueError, match="enable_pdl needs compute capability 9"):
            default_config(behind, where, 16)
    assert "float8_e4m3fn needs compute capability 8.9" in str(TileConfig().invalid_reason(fp8, a100))
    assert TileConfig().is_valid(fp8, l40s)


def test_nothing_of_a_decode_step_overlaps_there() -> None:
    for arch in WITHOUT_TMA:
        for promised in (False, True):
            chain = overlap.choose(SUPER, 4, target.named(arch), promised=promised)
            assert chain == overlap.Chain(overlap.Overlap.NONE)
            assert overlap.candidates(SUPER, target.named(arch), promised=promised) == (chain,)


def test_a_device_is_known_by_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    props = SimpleNamespace(name="NVIDIA A100-PCIE-40GB", major=8, minor=0, multi_processor_count=108)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: props)
    target.of_device.cache_clear()
    try:
        assert (found := target.of_device(0)).arch == "sm_80" and found.shared_per_block == 163 * 1024
    finally:
        target.of_device.cache_clear()
