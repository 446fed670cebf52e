"""The config that serves where no table answers."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from replayssm_cute import fingerprint
from replayssm_cute.config import TileConfig
from replayssm_cute.default_rule import default_config, default_configs
from replayssm_cute.problem import Problem
from replayssm_cute.target import ARCHES, named

H200 = named("h200")
PROBLEM = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)


@pytest.mark.parametrize(
    ("change", "batch", "config"),
    [
        ({}, 1, TileConfig()),
        ({}, 4, TileConfig()),
        ({}, 16, TileConfig(2, tail_rows=8)),
        ({}, 128, TileConfig(2, tail_rows=8)),
        ({}, 256, TileConfig(4, tail_rows=8)),
        ({"heads": 16, "groups": 1, "tokens": 6}, 16, TileConfig()),
        ({"heads": 112}, 256, TileConfig(2, tail_rows=9)),  # 14 heads a group do not divide by 4
        ({"window": 32}, 256, TileConfig(4, tail_rows=8)),
        ({"window": 64}, 256, TileConfig(2, tail_rows=8)),  # four heads' x would leave room for two CTAs
        ({"state_dtype": "bf16"}, 1, TileConfig()),
        ({"state_dtype": "bf16"}, 4, TileConfig(tiles_per_warp=2)),
        ({"state_dtype": "bf16"}, 64, TileConfig(2, tail_rows=8, tiles_per_warp=2, ctas_per_sm=7)),
        ({"state_dtype": "bf16", "window": 32}, 16, TileConfig(tiles_per_warp=2)),
        ({"state_dtype": "bf16", "window": 32}, 64, TileConfig(2, opt_level=2)),
        ({"state_dtype": "bf16", "window": 48}, 256, TileConfig(2, opt_level=2)),
        ({"state_dtype": "bf16", "window": 24}, 16, TileConfig(tiles_per_warp=2, keep_b=False)),
        ({"state_dtype": "bf16", "window": 24}, 256, TileConfig(2, tiles_per_warp=2)),
        # one CTA of four heads would be left
        (
            {"state_dtype": "bf16", "tokens": 32, "window": 32},
            256,
            TileConfig(2, tail_rows=8, keep_b=False, opt_level=2),
        ),
        ({"state_dtype": "bf16"}, 16, TileConfig(4, 2, opt_level=2)),
        ({"state_dtype": "f16"}, 16, TileConfig(tiles_per_warp=2)),
        ({"state_dtype": "f16"}, 256, TileConfig(2, tail_rows=8, tiles_per_warp=2)),
        (
            {"state_dtype": "bf16", "io_dtype": "f16", "dt_dtype": "f16"},
            256,
            TileConfig(2, tail_rows=8, tiles_per_warp=2),
        ),
        ({"state_dtype": "bf16", "heads": 96, "head_dim": 80}, 256, TileConfig(4, 2, tail_rows=11)),
        ({"copy_dtype": "f8e4m3", "heads": 96, "head_dim": 80}, 256, TileConfig(2, tail_rows=11)),
        ({"ragged": True}, 16, TileConfig(2, tail_rows=8, ctas_per_sm=4)),
        ({"copy_dtype": "bf16"}, 256, TileConfig(2, tail_rows=8)),
        ({"copy_dtype": "f8e4m3"}, 256, TileConfig(tiles_per_warp=2, ctas_per_sm=8)),
        (
            {"copy_dtype": "f8e4m3", "window": 64},
            64,
            TileConfig(tiles_per_warp=2, ctas_per_sm=8, keep_b=False, opt_level=2),
        ),
        ({"state_dtype": "i8"}, 256, TileConfig(4, 2, tail_rows=8, ctas_per_sm=4)),
        ({"state_dtype": "i8", "window": 32}, 256, TileConfig(2, tail_rows=8, tiles_per_warp=2, opt_level=2)),
        ({"copy_dtype": "f8e4m3", "window": 32}, 256, TileConfig(2, tail_rows=8, tiles_per_warp=2, opt_level=2)),
        ({"copy_dtype": "bf16", "window": 32}, 256, TileConfig(2, tail_rows=8)),
        ({"copy_dtype": "bf16", "window": 64}, 256, TileConfig(2, tail_rows=8, tiles_per_warp=2, opt_level=2)),
        ({"state_dtype": "i8", "philox_rounds": 10}, 256, TileConfig(4, 2, tail_rows=8)),
        ({"state_dtype": "f8e4m3", "head_dim": 128}, 256, TileConfig(4, 2, tail_rows=8)),
        ({"state_dtype": "f8e4m3", "window": 64}, 64, TileConfig(2, tail_rows=8, ctas_per_sm=4, opt_level=2)),
        ({"state_dtype": "bf16", "window": 64}, 16, TileConfig(tiles_per_warp=2)),
        (
            {"state_dtype": "bf16", "window": 64},
            256,
            TileConfig(2, tail_rows=8, ctas_per_sm=4, keep_b=False, opt_level=2),
        ),
        ({"state_dtype": "bf16", "tokens": 17, "window": 24}, 16, TileConfig()),  # three tiles of B·C for two warps
    ],
)
def test_the_rule_follows_work_state_and_window(change: dict[str, object], batch: int, config: TileConfig) -> None:
    assert default_config(dataclasses.replace(PROBLEM, **change), H200, batch) == config  # type: ignore[arg-type]


def test_every_target_and_geometry_has_a_valid_config_and_the_list_has_them_all() -> None:
    states = [{}, {"state_dtype": "bf16"}, {"state_dtype": "i8"}, {"copy_dtype": "f8e4m3"}]
    for arch, state, (P, N), window in itertools.product(
        ARCHES, states, ((64, 64), (80, 128), (128, 256)), (5, 16, 32, 64)
    ):
        problem = Problem(16, P, N, 1, tokens=5, window=window, **state)  # type: ignore[arg-type]
        if arch == "sm_80" and problem.read_dtype == "f8e4m3":  # it has no such bytes
            continue
        target = named(arch)
        served = {default_config(problem, target, batch) for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096)}
        assert all(c.is_valid(problem, target) for c in served)
        assert served <= set(default_configs(problem, target))


def test_ptxas_lower_level_is_for_gpus_that_were_timed() -> None:
    bf16 = dataclasses.replace(PROBLEM, state_dtype="bf16")
    assert default_config(bf16, H200, 16).opt_level == 2
    assert all(default_config(bf16, named(arch), 16).opt_level == 3 for arch in ARCHES if arch != "sm_90a")


def test_it_says_when_nothing_fits() -> None:
    tiny = dataclasses.replace(H200, name="tiny", shared_per_block=4096)
    with pytest.raises(ValueError, match=r"no tile config of .* fits tiny: needs .* bytes of shared memory"):
        default_config(PROBLEM, tiny, 1)


def test_it_is_no_part_of_the_kernels() -> None:
    assert not [name for name in fingerprint.kernel_sources() if "default_rule" in name]
