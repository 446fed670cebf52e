"""TileConfig: round trip, validity, the shared-memory layout, and a default rule that always offers what can run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest

from replayssm_cute import target
from replayssm_cute.config import (
    MIN_REGISTERS,
    RINGS,
    SHARED_RESERVED,
    TileConfig,
    default_config,
    shared_layout,
    usual_tail,
)
from replayssm_cute.problem import D_STATES, HEAD_DIMS, Problem

PROBLEM = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
H200 = target.named("h200")
GEOMETRIES = [
    (128, 64, 128, 8),
    (16, 64, 128, 1),
    (64, 64, 128, 8),
    (112, 64, 128, 8),
    (96, 80, 128, 8),
    (256, 64, 128, 8),
    *((16, P, N, 2) for P, N in itertools.product(HEAD_DIMS, D_STATES)),
]


def configs() -> list[TileConfig]:
    axes = (1, 2, 3, 4, 7, 8, 16), (1, 2, 3, 4), (1, 2, 4, 5, 8), RINGS, (1, 3)
    return [TileConfig(*values) for values in itertools.product(*axes)]


def test_json_round_trip() -> None:
    config = TileConfig(4, 2, 1, "whole", 3)
    again = TileConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config and hash(again) == hash(config)
    assert TileConfig.from_json({"heads_per_cta": 4}) == TileConfig(4), "missing fields take the default"


@pytest.mark.parametrize("field", ["heads_per_cta", "stages", "head_split", "ctas_per_sm"])
@pytest.mark.parametrize("value", [0, -1, True, 1.0, "1", None])
def test_values_are_positive_ints(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"config: {field} is {value!r}, expected a positive int"):
        TileConfig.from_json({field: value})
    with pytest.raises(ValueError, match=f"config: {field}"):
        TileConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None])
def test_the_tail_is_zero_or_a_positive_int(value: object) -> None:
    with pytest.raises(ValueError, match=f"config: tail_rows is {value!r}, expected 0 or a positive int"):
        TileConfig.from_json({"tail_rows": value})


def test_the_tail_cuts_rows_into_single_heads() -> None:
    config = TileConfig(4, 2, 2, tail_rows=3)
    assert config.ctas(PROBLEM, 10) == 7 * (128 // 4) * 2 + 3 * 128 * 2
    assert config.ctas(PROBLEM, 2) == 2 * 128 * 2, "a batch smaller than the tail is all tail"
    assert "more than one head" in str(TileConfig(tail_rows=1).invalid_reason(PROBLEM, H200))
    assert usual_tail(PROBLEM, H200) == 8
    assert usual_tail(dataclasses.replace(PROBLEM, heads=16, groups=1), H200) == 66


@pytest.mark.parametrize("value", ["dead", None, 1])
def test_the_ring_is_read_in_a_known_way(value: object) -> None:
    with pytest.raises(ValueError, match=f"config: ring is {value!r}, expected one of"):
        TileConfig.from_json({"ring": value})


def test_labels_tell_configs_apart() -> None:
    assert len({c.label() for c in configs()}) == len(configs())


def test_unknown_fields_are_refused() -> None:
    with pytest.raises(ValueError, match=r"config: unknown fields \['warps'\]"):
        TileConfig.from_json({"warps": 4})


@pytest.mark.parametrize(
    "config,reason",
    [
        (TileConfig(3), "heads_per_cta 3 does not divide 16 heads per group"),
        (TileConfig(32), "heads_per_cta 32 does not divide 16"),
        (TileConfig(2, 3), "stages 3 is outside 1..heads_per_cta"),
        (TileConfig(1, 1, 3), "head_split 3 does not divide 4 tiles"),
        (TileConfig(8, 8), "bytes of shared memory"),
        (TileConfig(ctas_per_sm=7), "ctas_per_sm 7 needs .* bytes of shared memory"),
        (TileConfig(head_split=4, ctas_per_sm=65), "ctas_per_sm 65 needs"),
    ],
    ids=lambda v: v.label() if isinstance(v, TileConfig) else "",
)
def test_invalid_configs_say_why(config: TileConfig, reason: str) -> None:
    said = config.invalid_reason(PROBLEM, H200)
    assert said is not None and re.search(reason, said)
    assert not config.is_valid(PROBLEM, H200)


@pytest.mark.parametrize("arch", target.ARCHES)
def test_no_valid_config_exceeds_the_target(arch: str) -> None:
    """Shared memory of whatever the predicate offers fits a block, and one block fits a multiprocessor."""
    where = target.named(arch)
    offered = 0
    for H, P, N, G in GEOMETRIES:
        for state in ("f32", "bf16"):
            problem = Problem(H, P, N, G, tokens=4, window=16, state_dtype=state)
            for config in configs():
                if config.is_valid(problem, where):
                    offered += 1
                    needed = config.shared_bytes(problem)
                    assert needed <= where.shared_per_block
                    assert config.ctas_per_sm * (needed + SHARED_RESERVED) <= where.shared_per_sm
                    threads = config.ctas_per_sm * config.warps(problem) * 32
                    assert threads <= where.threads_per_sm
                    assert threads * MIN_REGISTERS <= where.registers_per_sm
                    assert config.warps(problem) * config.head_split * 16 == P
                    assert 1 <= config.warps(problem) <= 32
                    assert config.ctas(problem, 3) * config.heads_per_cta == 3 * H * config.head_split
    assert offered > 100


@pytest.mark.parametrize("arch", target.ARCHES)
@pytest.mark.parametrize("state", ["f32", "bf16", "f16"])
def test_the_default_rule_offers_what_can_run(arch: str, state: str) -> None:
    where = target.named(arch)
    for H, P, N, G in GEOMETRIES:
        for tokens, batch in itertools.product((1, 16), (1, 16, 64, 256, 1024)):
            problem = Problem(H, P, N, G, tokens=tokens, window=16, state_dtype=state)
            config = default_config(problem, where, batch)
            assert config.is_valid(problem, where), config.invalid_reason(problem, where)


def test_registers_and_threads_limit_the_ctas() -> None:
    """With shared memory to spare, threads and then registers say no."""
    roomy = dataclasses.replace(H200, shared_per_sm=1 << 20)
    assert "ctas_per_sm 17 needs 2176 threads" in str(TileConfig(ctas_per_sm=17).invalid_reason(PROBLEM, roomy))
    assert "leaves 56 registers a thread" in str(TileConfig(ctas_per_sm=9).invalid_reason(PROBLEM, roomy))
    assert TileConfig(ctas_per_sm=8).is_valid(PROBLEM, roomy)


def test_the_default_rule_follows_the_batch() -> None:
    assert default_config(PROBLEM, H200, 1) == TileConfig()
    assert default_config(PROBLEM, H200, 256) == TileConfig(4, 2, ctas_per_sm=3, tail_rows=8)
    fourteen = dataclasses.replace(PROBLEM, heads=112)
    assert default_config(fourteen, H200, 256).heads_per_cta == 2, "14 heads a group do not divide by 4"


def test_the_default_rule_says_when_nothing_fits() -> None:
    tiny = dataclasses.replace(H200, name="tiny", shared_per_block=4096)
    with pytest.raises(ValueError, match=r"no tile config of .* fits tiny: needs .* bytes of shared memory"):
        default_config(PROBLEM, tiny, 1)


@pytest.mark.parametrize("state", ["f32", "bf16"])
def test_shared_regions_do_not_overlap(state: str) -> None:
    """States, products, vectors and barriers follow each other, each at its alignment, and `total` holds them all."""
    for H, P, N, G in GEOMETRIES:
        for config in configs():
            problem = Problem(H, P, N, G, tokens=5, window=11, state_dtype=state)
            if not config.is_valid(problem, H200):
                continue
            at = shared_layout(problem, config)
            bytes_per_head = P * N * problem.state_bytes // config.head_split
            assert at.stage_bytes == bytes_per_head == config.warps(problem) * at.warp_bytes
            assert at.stage_bytes % 1024 == 0, "the swizzle repeats every 1,024 bytes"
            assert at.products >= config.stages * at.stage_bytes
            assert at.vectors >= at.products + at.slices * at.product_floats * 4
            assert at.barriers >= at.vectors + config.heads_per_cta * at.vector_floats * 4
            assert at.total >= at.barriers + config.warps(problem) * config.stages * 8
            assert at.products % 16 == at.vectors % 16 == at.barriers % 8 == 0
            assert at.total == config.shared_bytes(problem)
