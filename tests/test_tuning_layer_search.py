"""The search for a decode step's chain: on made-up times it finds the best, and it asks for nothing that cannot run."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import pytest
from replayssm_tuning import layer_bench, layer_search

from replayssm_cute import target
from replayssm_cute.fused import shapes
from replayssm_cute.fused.chains import Chain, ConvCut, NormCut, Overlap

H200 = target.named("h200")


def made_up(chain: Chain) -> float:
    """Times in which every dimension adds its own part; x in the step pays with one config alone."""
    conv, norm, config = chain.conv, chain.norm, chain.config
    assert conv is not None and norm is not None and config is not None
    time = 10.0 + 2.0 * (not chain.overlap.chained) - 1.0 * chain.overlap.first
    time += 0.5 * conv.late - 0.4 * conv.soon - 0.25 * conv.ahead
    time += 0.1 * abs(conv.vector - 4) + 0.2 * abs(norm.together - 2) + 0.4 * (config.heads_per_cta != 2)
    return time + (0.2 - 0.6 * (config.heads_per_cta == 2)) * chain.overlap.x_in_step


@pytest.mark.parametrize("batch", [4, 64])
def test_it_finds_the_best_of_made_up_times(batch: int) -> None:
    asked: list[list[Chain]] = []

    def race(field: Sequence[Chain]) -> Mapping[Chain, float]:
        assert len(set(field)) == len(field) > 1
        asked.append(list(field))
        return {chain: made_up(chain) for chain in field}

    problem = layer_bench.layer_problem(4, 16, "f32")
    plain, promised = layer_search.search(problem, batch, H200, race)
    assert promised.overlap is Overlap.ALL_X and plain.overlap is Overlap.INNER_X
    for chain in (plain, promised):
        assert chain.config is not None and chain.config.heads_per_cta == 2
        assert chain.norm is not None and chain.norm.together == (2 if batch == 64 else 1)
        assert chain.conv is not None and chain.conv.vector == 4 and not chain.conv.late
        assert chain.conv.soon == chain.conv.ahead == chain.overlap.first
    chains = {c for field in asked for c in field}
    assert len(chains) <= 60, "a cell's races are to take seconds"
    for chain in chains:  # each is a chain that can run
        for recipe in layer_search.recipes(problem, chain, batch):
            recipe.check(H200)
    assert not [c for c in asked[-1] if c.overlap.first], "a call without the promise must not start its conv early"


@pytest.mark.parametrize("races", [0, 1, 2])
def test_a_search_that_runs_out_of_time_keeps_what_it_has(races: int) -> None:
    asked: list[Sequence[Chain]] = []

    def race(field: Sequence[Chain]) -> Mapping[Chain, float]:
        asked.append(field)
        return {chain: made_up(chain) for chain in field}

    problem = layer_bench.layer_problem(4, 16, "f32")
    plain, promised = layer_search.search(problem, 4, H200, race, lambda: len(asked) >= races)
    assert len(asked) == races and not plain.overlap.first and promised.overlap.first
    if races == 0:
        assert promised == layer_search.start(problem, 4, H200)
    else:
        assert promised.conv is not None and promised.conv.soon and promised.conv.ahead


def test_what_starts_early_may_do_so() -> None:
    """All ways to start, once each, for calls with the promise; for those without nothing before the conv's wait."""
    problem = layer_bench.layer_problem(4, 16, "f32")
    first = layer_search.start(problem, 4, H200)
    promised, plain = (f(problem, 4, first) for f in (layer_search.starts, layer_search.plain_starts))
    assert len(set(promised)) == len(promised) == 12 and len(set(plain)) == len(plain) == 4
    ways = {(c.overlap, c.conv.late, c.conv.soon, c.conv.ahead) for c in promised if c.conv is not None}
    assert len(ways) == 12 and {c.overlap for c in promised} == {Overlap.ALL, Overlap.ALL_X}
    assert {c.overlap for c in plain} == {Overlap.INNER, Overlap.INNER_X}
    for other in layer_search.moved(problem, 4, promised[-1]):
        assert other.overlap is Overlap.ALL_X and other.conv is not None and other.conv.soon and other.conv.ahead


def test_a_gain_within_the_margin_changes_nothing() -> None:
    start = Chain(Overlap.ALL)
    other = dataclasses.replace(start, overlap=Overlap.INNER)
    for gain, kept in ((layer_search.MARGIN / 2, start), (2 * layer_search.MARGIN, other)):
        times = {start: 1.0 + gain, other: 1.0}
        assert layer_search.climb(start, [lambda c: [other]], lambda field, t=times: t) == kept  # type: ignore[misc]


def test_cuts_change_what_they_say_and_nothing_else() -> None:
    problem = layer_bench.layer_problem(4, 16, "f32")
    base = shapes.conv_shape(problem, 64, chained=True, pdl=True)
    assert ConvCut(base.vector, base.threads).of(base) == base
    cut = ConvCut(4, 64, 2, 1, 100, late=True).of(base)
    assert cut == dataclasses.replace(base, vector=4, threads=64, rows=2, each=1, carveout=100, triggers=False)
    assert not ConvCut(4, 64).of(dataclasses.replace(base, triggers=False)).triggers
    norm = shapes.norm_shape(problem, chained=True)
    assert NormCut(norm.warps).of(norm) == norm
    assert NormCut(2, 4, 100).of(norm) == dataclasses.replace(norm, warps=2, together=4, carveout=100)


@pytest.mark.parametrize("tokens, batch", [(1, 16), (4, 4), (4, 64)])
@pytest.mark.parametrize("seed", range(4))
def test_a_search_finds_its_kernels_compiled(tokens: int, batch: int, seed: int) -> None:
    """Whichever chain wins: all that its races launch was compiled before, but for x's conv moved with its cut."""
    problem = layer_bench.layer_problem(tokens, 16, "f32")
    known = set(layer_search.likely(problem, batch, H200))
    assert known <= set(layer_bench.kernels(problem, batch, H200, False, True))
    luck, asked = random.Random(seed), []

    def race(field: Sequence[Chain]) -> Mapping[Chain, float]:
        asked.append(field)
        return {chain: luck.random() for chain in field}

    layer_search.search(problem, batch, H200, race)
    assert len(asked) >= 5
    wanted = {r for field in asked[:-2] for c in field for r in layer_search.recipes(problem, c, batch)}
    assert wanted <= known
