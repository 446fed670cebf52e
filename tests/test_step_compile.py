"""The step kernel compiles for every target without a GPU, spills nothing, and fits."""

from __future__ import annotations

import dataclasses

import pytest

from replayssm_cute import resources, target
from replayssm_cute.config import WITHOUT_TMA, TileConfig
from replayssm_cute.kernels import signature
from replayssm_cute.problem import Problem

SUPER = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
ONE, FOUR = TileConfig(), TileConfig(heads_per_cta=4, stages=2)

# Every geometry family, dtype and option at least once; each is compiled for all four targets (about a second each).
CASES = [
    (SUPER, ONE),
    (SUPER, FOUR),
    (SUPER, TileConfig(head_split=2)),
    (SUPER, TileConfig(heads_per_cta=4, stages=1, ring="whole")),
    (SUPER, TileConfig(ctas_per_sm=2)),
    (SUPER, TileConfig(2, opt_level=2)),
    (SUPER, TileConfig(heads_per_cta=2, parallel_heads=2, tiles_per_warp=2)),
    (SUPER, TileConfig(tiles_per_warp=2, ring="whole")),
    (dataclasses.replace(SUPER, state_dtype="bf16"), TileConfig(heads_per_cta=8, stages=2, parallel_heads=2)),
    (dataclasses.replace(SUPER, state_dtype="bf16", has_z=True), FOUR),
    (dataclasses.replace(SUPER, state_dtype="f16", io_dtype="f16", dt_dtype="f16", d_dtype="f32"), FOUR),
    (dataclasses.replace(SUPER, tokens=16, has_z=True, dt_dtype="f32", index_dtype="i64"), TileConfig(4, 1)),
    (dataclasses.replace(SUPER, tokens=1, d_dtype=None, dt_bias_dtype=None, dt_softplus=False, index_dtype=None), ONE),
    (dataclasses.replace(SUPER, heads=112, tokens=6, pdl=True), TileConfig(heads_per_cta=2, stages=2)),
    (dataclasses.replace(SUPER, heads=96, head_dim=80), TileConfig(heads_per_cta=4)),
    (dataclasses.replace(SUPER, heads=96, head_dim=80), TileConfig(tiles_per_warp=5)),
    (dataclasses.replace(SUPER, heads=24, head_dim=128, d_state=256, groups=1, state_dtype="bf16"), ONE),
    (dataclasses.replace(SUPER, heads=80, d_state=64, groups=1, tokens=2, window=7), TileConfig(2, 1)),
    (dataclasses.replace(SUPER, state_dtype="f8e4m3"), FOUR),
    (dataclasses.replace(SUPER, state_dtype="i8", window=32), TileConfig(2, tiles_per_warp=2, opt_level=2)),
    (dataclasses.replace(SUPER, state_dtype="i8", philox_rounds=10), ONE),
    (
        dataclasses.replace(SUPER, state_dtype="f8e4m3", philox_rounds=10, d_state=64, io_dtype="f16", dt_dtype="f16"),
        ONE,
    ),
    (dataclasses.replace(SUPER, state_dtype="bf16", philox_rounds=10), FOUR),
    (
        dataclasses.replace(SUPER, state_dtype="f16", philox_rounds=10, heads=24, head_dim=128, d_state=256, groups=1),
        ONE,
    ),
    (dataclasses.replace(SUPER, copy_dtype="bf16", window=32), FOUR),
    (dataclasses.replace(SUPER, copy_dtype="f8e4m3", heads=96, head_dim=80, ragged=True), TileConfig(tiles_per_warp=5)),
    (dataclasses.replace(SUPER, precision="highest", has_z=True), FOUR),
]


def case_id(case: tuple[Problem, TileConfig]) -> str:
    return f"{case[0].label()} {case[0].io_dtype} {case[1].label()}"


@pytest.mark.parametrize("arch", [a for a in target.ARCHES if a not in WITHOUT_TMA])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_compiles_without_spills(case: tuple[Problem, TileConfig], arch: str) -> None:
    """Zero bytes of stack, no local memory in the code where a disassembler is there, within a block's limits."""
    from replayssm_cute import resources

    problem, config = case
    where = target.named(arch)
    assert config.invalid_reason(problem, where) is None
    found = resources.inspect(problem, config, where)
    assert found.stack_bytes == 0, f"{found.stack_bytes} bytes spilled a thread, {found.registers} registers"
    assert found.threads == 32 * config.warps(problem)
    assert 0 < found.registers <= 255 and found.registers * found.threads <= where.registers_per_sm
    assert found.shared_bytes <= where.shared_per_block
    counts = resources.sass_counts(problem, config, where)
    if counts is None:
        pytest.skip("resources are fine; nvdisasm is not installed, so the code itself was not looked at")
    assert counts.get("LDL", 0) == counts.get("STL", 0) == 0
    assert counts["HMMA"] > 0, "products run on the tensor cores"
    assert counts["UTMALDG"] > 0, "the state comes through TMA"
    by_tma = not problem.rewrites or problem.copy_dtype is not None
    assert (counts.get("UTMASTG", 0) > 0) == by_tma, "it goes by TMA unless a flush makes other bits of it"


def test_ptxas_gets_the_level() -> None:
    """At level 2 memory's descriptors stay in uniform registers, which spares most moves to them (R2UR)."""
    high, low = (signature.compile_options("sm_90a", TileConfig(2, opt_level=n)) for n in (3, 2))
    assert "ptxas" not in high and low == f"{high} --ptxas-options '-O2'"
    moves = [resources.sass_counts(SUPER, TileConfig(2, opt_level=n), target.named("h200"))["R2UR"] for n in (3, 2)]  # type: ignore[index]
    assert moves[1] < moves[0] / 4
