"""TileConfig: round trip, validity, the shared-memory layout, and a default rule that always offers what can run."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import pytest

from replayssm_cute import target
from replayssm_cute.config import MAX_THREADS, MIN_REGISTERS, P_TILE, RINGS, SHARED_RESERVED, TileConfig, shared_layout
from replayssm_cute.default_rule import default_config, usual_tail
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
    axes = (1, 2, 4, 7, 16), (1, 2, 4), (1, 2, 5), RINGS, (1, 3), (0, 3), (1, 2, 4), (1, 2, 5)
    return [TileConfig(*values) for values in itertools.product(*axes)]


def test_json_round_trip() -> None:
    config = TileConfig(4, 2, 1, "whole", 3, 5, parallel_heads=2, tiles_per_warp=2)
    again = TileConfig.from_json(json.loads(json.dumps(config.to_json())))
    assert again == config and hash(again) == hash(config)
    assert TileConfig.from_json({"heads_per_cta": 4}) == TileConfig(4), "missing fields take the default"


@pytest.mark.parametrize(
    "field", ["heads_per_cta", "stages", "head_split", "ctas_per_sm", "parallel_heads", "tiles_per_warp"]
)
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
    for one_turn in (TileConfig(tail_rows=1), TileConfig(4, parallel_heads=4, tail_rows=1)):
        assert "tail_rows needs CTAs that take heads in turn" in str(one_turn.invalid_reason(PROBLEM, H200))
    pairs = TileConfig(4, 2, parallel_heads=2, tail_rows=3)
    assert pairs.ctas(PROBLEM, 10) == 7 * (128 // 4) + 3 * 128 // 2, "the smallest CTA has a head for each of its sides"
    assert usual_tail(PROBLEM, H200) == 8
    assert usual_tail(dataclasses.replace(PROBLEM, heads=16, groups=1), H200) == 66


@pytest.mark.parametrize("value", ["dead", None, 1])
def test_the_ring_is_read_in_a_known_way(value: object) -> None:
    with pytest.raises(ValueError, match=f"config: ring is {value!r}, expected one of"):
        TileConfig.from_json({"ring": value})


@pytest.mark.parametrize("value", [1, 4, True, "2", None])
def test_ptxas_has_two_levels(value: object) -> None:
    with pytest.raises(ValueError, match=f"config: opt_level is {value!r}, expected one of"):
        TileConfig.from_json({"opt_level": value})


def test_heads_at_a_time_and_tiles_a_warp_make_the_warps() -> None:
    assert TileConfig(4, parallel_heads=2).turns == 2
    assert TileConfig(4).turns == 4
    assert TileConfig(4, parallel_heads=2).warps(PROBLEM) == 8
    assert TileConfig(4, parallel_heads=2, tiles_per_warp=2).warps(PROBLEM) == 4
    assert TileConfig(4, parallel_heads=2, head_split=2, tiles_per_warp=2).warps(PROBLEM) == 2
    assert TileConfig(tiles_per_warp=5).warps(dataclasses.replace(PROBLEM, head_dim=80)) == 1


def test_labels_are_short_and_say_what_is_unusual() -> None:
    assert TileConfig().label() == "h1 s1 p1 live c1"
    assert TileConfig(4, 2, ctas_per_sm=3, tail_rows=8).label() == "h4 s2 p1 live c3 t8"
    assert TileConfig(4, 2, parallel_heads=2).label() == "h4/2 s2 p1 live c1"
    assert TileConfig(tiles_per_warp=2, ring="whole").label() == "h1 s1 p1 r32 whole c1"
    assert TileConfig(2, 1, 2, "live", 2, 0, 2, 5).label() == "h2/2 s1 p2 r80 live c2"
    assert TileConfig(2, tail_rows=8, keep_b=False, opt_level=2).label() == "h2 s1 p1 live c1 t8 O2 l2"


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
        (TileConfig(4, parallel_heads=3), r"parallel_heads 3 does not divide heads_per_cta \(4\)"),
        (TileConfig(2, parallel_heads=4), r"parallel_heads 4 does not divide heads_per_cta \(2\)"),
        (TileConfig(2, 3), r"stages 3 is outside 1..heads_per_cta / parallel_heads \(2\)"),
        (TileConfig(4, 3, parallel_heads=2), r"stages 3 is outside 1..heads_per_cta / parallel_heads \(2\)"),
        (TileConfig(1, 1, 3), "head_split 3 x tiles_per_warp 1 does not divide 4 tiles of 16 rows"),
        (TileConfig(head_split=2, tiles_per_warp=4), "head_split 2 x tiles_per_warp 4 does not divide 4 tiles"),
        (TileConfig(tiles_per_warp=5), "head_split 1 x tiles_per_warp 5 does not divide 4 tiles"),
        (TileConfig(8, 8), "bytes of shared memory"),
        (TileConfig(ctas_per_sm=7), "ctas_per_sm 7 needs .* bytes of shared memory"),
        (TileConfig(head_split=4, ctas_per_sm=65), "ctas_per_sm 65 needs"),
        (TileConfig(8, parallel_heads=8), "bytes of shared memory"),
    ],
    ids=lambda v: v.label() if isinstance(v, TileConfig) else "",
)
def test_invalid_configs_say_why(config: TileConfig, reason: str) -> None:
    said = config.invalid_reason(PROBLEM, H200)
    assert said is not None and re.search(reason, said)
    assert not config.is_valid(PROBLEM, H200)


@pytest.mark.fault(24)
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
                    rows = config.warps(problem) * config.tiles_per_warp * P_TILE
                    assert rows * config.head_split == P * config.parallel_heads
                    assert 1 <= config.warps(problem) * 32 <= MAX_THREADS
                    at_a_time = config.parallel_heads if config.tail_rows else config.heads_per_cta
                    assert config.ctas(problem, 3) * at_a_time == 3 * H * config.head_split
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


@pytest.mark.parametrize("arch", target.ARCHES)
def test_the_default_rule_serves_the_whole_contract(arch: str) -> None:
    """Every shape of head, the longest windows and the shortest, any heads a group, dense and ragged."""
    where = target.named(arch)
    shapes = itertools.product(HEAD_DIMS, D_STATES, ("f32", "bf16"), ((1, 1), (16, 16), (8, 32), (32, 64)))
    for P, N, state, (tokens, window) in shapes:
        for (heads, groups), ragged in itertools.product(((14, 1), (4, 4), (128, 8)), (False, True)):
            problem = Problem(heads, P, N, groups, tokens, window, state_dtype=state, has_z=True, ragged=ragged)
            for batch in (1, 512):
                config = default_config(problem, where, batch)
                assert config.is_valid(problem, where), config.invalid_reason(problem, where)


def test_registers_and_threads_limit_the_ctas() -> None:
    """With shared memory to spare, threads and then registers say no."""
    roomy = dataclasses.replace(H200, shared_per_sm=1 << 20)
    assert "ctas_per_sm 17 needs 2176 threads" in str(TileConfig(ctas_per_sm=17).invalid_reason(PROBLEM, roomy))
    assert "leaves 56 registers a thread" in str(TileConfig(ctas_per_sm=9).invalid_reason(PROBLEM, roomy))
    assert TileConfig(ctas_per_sm=8).is_valid(PROBLEM, roomy)
    wide = dataclasses.replace(PROBLEM, head_dim=128, d_state=64, state_dtype="bf16")
    assert TileConfig(2, parallel_heads=2).is_valid(wide, roomy), "512 threads"
    said = TileConfig(4, parallel_heads=4).invalid_reason(wide, roomy)
    assert said == "needs 1024 threads a CTA, more than 512"


@pytest.mark.parametrize("state", ["f32", "bf16"])
def test_shared_regions_do_not_overlap(state: str) -> None:
    """States, inputs, C, products, weights, vectors and barriers follow each other, and `total` holds them all."""
    for H, P, N, G in GEOMETRIES:
        for config in configs():
            problem = Problem(H, P, N, G, tokens=5, window=11, state_dtype=state, has_z=config.stages == 2)
            if not config.is_valid(problem, H200):
                continue
            at, warps, heads = shared_layout(problem, config), config.warps(problem), config.heads_per_cta
            bytes_at_a_time = P * N * problem.state_bytes * config.parallel_heads // config.head_split
            assert at.stage_bytes == bytes_at_a_time == warps * at.warp_bytes
            assert at.warp_bytes % 1024 == 0, "the swizzle repeats every 1,024 bytes"
            assert at.input_bytes == config.tiles_per_warp * at.input_tile_bytes
            rows = config.ring_positions(problem) + problem.tokens * (2 if problem.has_z else 1)
            assert at.input_tile_bytes >= rows * 2 * P_TILE and at.input_tile_bytes % 128 == 32
            assert at.inputs >= config.stages * at.stage_bytes and at.inputs % 128 == 0
            assert at.c >= at.inputs + config.turns * warps * at.input_bytes
            assert at.products >= at.c + problem.tokens * at.c_stride
            assert at.c_stride >= 2 * N and at.c_stride % 128 == 16, (
                "rows of eight tokens in eight different bank quads"
            )
            assert at.weights >= at.products + at.slices * at.product_floats * 4
            weight_bytes = heads * at.weight_floats * 4 if config.turns > 1 else 0
            assert at.weight_floats == problem.tokens * at.weight_stride
            assert at.weight_stride >= config.ring_positions(problem) + 8 and at.weight_stride % 16 == 8
            assert at.vectors >= at.weights + weight_bytes
            assert at.barriers >= at.vectors + heads * at.vector_floats * 4
            assert at.total >= at.barriers + warps * config.stages * 8
            assert at.c % 16 == at.products % 16 == at.weights % 16 == at.vectors % 16 == at.barriers % 8 == 0
            assert at.total == config.shared_bytes(problem)
