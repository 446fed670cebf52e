"""The search for a decode step's chain: on made-up times it finds the best, and it asks for nothing that cannot run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pytest
from replayssm_tuning import layer_bench, layer_search

from replayssm_cute import compiler, target
from replayssm_cute.fused import shapes
from replayssm_cute.fused.chains import Chain, ConvCut, NormCut, Overlap

H200 = target.named("h200")


def made_up(chain: Chain) -> float:
    """Times in which every dimension adds its own part; x in the step pays with one config alone."""
    conv, norm, config = chain.conv, chain.norm, chain.config
    assert conv is not None and norm is not None and config is not None
    time = 10.0 + 2.0 * (not chain.overlap.chained) - 1.0 * chain.overlap.first
    time += 0.5 * (conv.carveout is None) + 0.25 * (norm.carveout is None) + 0.5 * conv.late
    time += 0.1 * abs(conv.vector - 4) + 0.3 * (conv.each is None) + 0.2 * abs(norm.together - 2)
    time += 0.4 * (config.heads_per_cta != 2)
    return time + (0.2 - 0.6 * (config.heads_per_cta == 2)) * chain.overlap.x_in_step


@pytest.mark.parametrize("batch", [4, 64])
def test_it_finds_the_best_of_made_up_times(batch: int) -> None:
    asked: list[Chain] = []

    def race(field: Sequence[Chain]) -> Mapping[Chain, float]:
        assert len(set(field)) == len(field) > 0
        asked.extend(field)
        return {chain: made_up(chain) for chain in field}

    problem = layer_bench.layer_problem(4, 16, "f32")
    plain, promised = layer_search.search(problem, batch, H200, race)
    assert promised.overlap is Overlap.ALL_X and plain.overlap is Overlap.INNER_X
    for chain in (plain, promised):
        assert chain.config is not None and chain.config.heads_per_cta == 2
        assert chain.norm is not None and (chain.norm.together, chain.norm.carveout) == (2, 100)
        assert chain.conv is not None and chain.conv.carveout == 100 and not chain.conv.late
    for chain in set(asked):  # each is a chain that can run
        for recipe in layer_search.recipes(problem, chain, batch):
            recipe.check(H200)
    assert not [c for c in asked[-3:] if c.overlap.first], "a call without the promise must not start its conv early"


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


def test_a_search_finds_most_kernels_compiled() -> None:
    """Everything that the first field of each dimension launches is among what --compile-for compiles."""
    for tokens, batch in ((1, 16), (4, 64)):
        problem = layer_bench.layer_problem(tokens, 16, "f32")
        known = set(layer_search.likely(problem, batch, H200))
        assert len(known) < 100 and known <= set(layer_bench.kernels(problem, batch, H200, False, True))
        base = layer_search.ruled(problem, batch, H200, Overlap.ALL_X)
        fields = [
            layer_search.overlaps(problem, batch, base, True), layer_search.configs(batch, base),
            layer_search.carveouts(base)[::2], layer_search.late(base), layer_search.convs(problem, batch, base),
            layer_search.norms(problem, base),
        ]  # fmt: skip
        wanted: set[compiler.Recipe] = set()
        for chain in (c for field in fields for c in field):
            wanted |= set(layer_search.recipes(problem, chain, batch))
        assert wanted <= known
