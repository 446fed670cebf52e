"""The fastest chain of a decode step, found one dimension at a time: what overlaps, the step's config, the cuts.

The dimensions do not act alone (a conv that ends earlier may want another step config), so that what overlaps is asked
again at the end; still this finds a good chain, not the best of all products, and says so by its final race beside the
chains that the rules give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from replayssm_cute import compiler, tables
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import shapes
from replayssm_cute.fused.chains import Chain, ConvCut, NormCut, Overlap
from replayssm_cute.fused.problem import LayerProblem
from replayssm_cute.fused.recipes import LayerRecipe
from replayssm_cute.target import Target

MARGIN = 0.003  # what a change has to gain, of a call's time, to be kept
FEW, MANY = 16, 64  # rows up to which, and from which on, cuts for few and for many rows are tried
CARVEOUT = 100  # as the step kernels ask for

# Step configs, and the batch sizes that each is tried for.
CONFIGS: tuple[tuple[TileConfig, int, int], ...] = (
    (TileConfig(), 1, 16),
    (TileConfig(head_split=2), 1, 4),
    (TileConfig(tiles_per_warp=2), 1, 256),
    (TileConfig(heads_per_cta=2, tail_rows=8), 4, 256),
    (TileConfig(heads_per_cta=2, tail_rows=8, tiles_per_warp=2), 4, 256),
    (TileConfig(heads_per_cta=4, tail_rows=8), 16, 256),
    (TileConfig(heads_per_cta=4, stages=2, tail_rows=8), 64, 256),
)
# (channels of a thread, threads, batch rows of a thread, tokens of a thread)
FEW_CONVS: tuple[tuple[int, int, int, int | None], ...] = (
    (2, 64, 1, None), (4, 64, 1, None), (8, 64, 1, None), (2, 64, 1, 1), (4, 64, 1, 1), (8, 32, 1, 1), (4, 64, 1, 2),
)  # fmt: skip
MANY_CONVS: tuple[tuple[int, int, int, int | None], ...] = (
    (8, 128, 1, None), (8, 64, 1, None), (4, 128, 1, None), (8, 128, 2, None), (4, 128, 2, None), (4, 128, 4, None),
    (8, 128, 1, 2), (8, 128, 1, 1),
)  # fmt: skip
# (warps, tokens of a CTA)
NORMS = ((4, 1), (2, 1), (1, 1), (4, 2), (2, 2), (4, 4), (2, 4))

Race = Callable[[Sequence[Chain]], Mapping[Chain, float]]


def ruled(problem: LayerProblem, batch: int, target: Target, overlap: Overlap) -> Chain:
    """The chain of the rules, in full."""
    config = tables.choose(problem.step, batch, target).config
    norm = shapes.norm_shape(problem, chained=overlap.chained)
    return Chain(overlap, config, _ruled_conv(problem, batch, overlap), NormCut(norm.warps))


def _ruled_conv(problem: LayerProblem, batch: int, overlap: Overlap) -> ConvCut:
    conv = shapes.conv_shape(problem, batch, chained=True, pdl=True, with_x=not overlap.x_in_step)
    return ConvCut(conv.vector, conv.threads)


def overlaps(problem: LayerProblem, batch: int, chain: Chain, promised: bool) -> list[Chain]:
    """The chain with every overlap; a conv of other channels is cut as it was, and by the rules."""
    found = []
    for kind in Overlap:
        if promised or not kind.first:
            found.append(dataclasses.replace(chain, overlap=kind, early=chain.early and kind.x_in_step))
            if chain.conv is not None and kind.x_in_step != chain.overlap.x_in_step:
                rule = _ruled_conv(problem, batch, kind)
                conv = dataclasses.replace(rule, carveout=chain.conv.carveout, late=chain.conv.late)
                found.append(dataclasses.replace(found[-1], conv=conv))
    return found


def configs(batch: int, chain: Chain) -> list[Chain]:
    """The chain with every config of the step that is tried at this batch size."""
    return [dataclasses.replace(chain, config=c) for c, least, most in CONFIGS if least <= batch <= most]


def carveouts(chain: Chain) -> list[Chain]:
    """The chain with conv and norm that leave the multiprocessors divided as the step wants them, or do not."""
    assert chain.conv is not None and chain.norm is not None
    return [
        dataclasses.replace(
            chain,
            conv=dataclasses.replace(chain.conv, carveout=conv),
            norm=dataclasses.replace(chain.norm, carveout=norm),
        )
        for conv, norm in ((None, None), (CARVEOUT, None), (CARVEOUT, CARVEOUT))
    ]


def late(chain: Chain) -> list[Chain]:
    """The chain whose step starts as the conv's CTAs end, or before."""
    assert chain.conv is not None
    if not chain.overlap.chained:
        return [chain]
    return [dataclasses.replace(chain, conv=dataclasses.replace(chain.conv, late=b)) for b in (False, True)]


def early(batch: int, chain: Chain) -> list[Chain]:
    """For few rows: the chain whose step convolves x before its wait, or after."""
    if batch > FEW or not chain.overlap.x_in_step:
        return [chain]
    return [dataclasses.replace(chain, early=b) for b in (False, True)]


def convs(problem: LayerProblem, batch: int, chain: Chain) -> list[Chain]:
    """The chain with other cuts of the conv."""
    assert chain.conv is not None
    cuts = (FEW_CONVS if batch <= FEW else ()) + (MANY_CONVS if batch >= FEW else ())
    tokens = problem.step.tokens
    return [
        dataclasses.replace(
            chain, conv=dataclasses.replace(chain.conv, vector=v, threads=threads, rows=rows, each=each)
        )
        for v, threads, rows, each in dict.fromkeys(cuts)
        if each is None or (each < tokens and tokens % each == 0)
    ]


def norms(problem: LayerProblem, chain: Chain) -> list[Chain]:
    """The chain with other cuts of the norm."""
    assert chain.norm is not None
    return [
        dataclasses.replace(chain, norm=dataclasses.replace(chain.norm, warps=warps, together=together))
        for warps, together in NORMS
        if problem.step.tokens % together == 0
    ]


def climb(chain: Chain, steps: Iterable[Callable[[Chain], list[Chain]]], race: Race) -> Chain:
    """Take the fastest of each step's field in turn, where it gains by more than MARGIN."""
    for step in steps:
        times = race(list(dict.fromkeys([chain, *step(chain)])))
        fastest = min(times, key=times.__getitem__)
        if times[chain] > (1 + MARGIN) * times[fastest]:
            chain = fastest
    return chain


def search(problem: LayerProblem, batch: int, target: Target, race: Race) -> tuple[Chain, Chain]:
    """The chains found for calls without and with the promise that the conv may start early."""
    steps: list[Callable[[Chain], list[Chain]]] = [
        lambda c: overlaps(problem, batch, c, True),
        lambda c: early(batch, c),
        carveouts,
        lambda c: configs(batch, c),
        late,
        lambda c: convs(problem, batch, c),
        lambda c: norms(problem, c),
        lambda c: overlaps(problem, batch, c, True),
        lambda c: early(batch, c),
    ]
    promised = climb(ruled(problem, batch, target, Overlap.ALL), steps, race)
    plain = promised
    if plain.overlap.first:
        kind = Overlap.INNER_X if plain.overlap.x_in_step else Overlap.INNER
        plain = dataclasses.replace(plain, overlap=kind)  # x stays where it is, and `early` with it
        plain = climb(plain, [lambda c: overlaps(problem, batch, c, False), late, lambda c: configs(batch, c)], race)
    return plain, promised


def recipes(problem: LayerProblem, chain: Chain, batch: int) -> list[compiler.Recipe]:
    """The kernels that a chain with a config launches."""
    assert chain.config is not None
    overlap = chain.overlap
    step = dataclasses.replace(problem, step=dataclasses.replace(problem.step, pdl=overlap.chained))
    how = {"chained": overlap.chained, "pdl": overlap.first, "with_x": not overlap.x_in_step}
    conv = shapes.conv_shape(problem, batch, **how)
    norm = shapes.norm_shape(problem, chained=overlap.chained)
    found: list[compiler.Recipe] = [
        LayerRecipe(conv if chain.conv is None else chain.conv.of(conv)),
        compiler.StepRecipe(step.step, chain.config),
        LayerRecipe(norm if chain.norm is None else chain.norm.of(norm)),
    ]
    if overlap.x_in_step:
        found.append(LayerRecipe(shapes.step_shape(step, chain.config, chain.early)))
    return found


def likely(problem: LayerProblem, batch: int, target: Target) -> list[compiler.Recipe]:
    """Kernels that a search of this cell is likely to launch; it compiles others when it meets them."""
    found: dict[compiler.Recipe, None] = {}
    for kind in Overlap:
        base = ruled(problem, batch, target, kind)
        fields = [[base], overlaps(problem, batch, base, True), configs(batch, base)]
        fields += [early(batch, chain) for chain in configs(batch, base)]
        if kind.first:
            for shared in carveouts(base):
                fields += [[shared], late(shared)]
                if (
                    shared.conv is not None
                    and shared.norm is not None
                    and (shared.conv.carveout == shared.norm.carveout)
                ):
                    fields += [convs(problem, batch, shared), norms(problem, shared)]
        for chain in (c for field in fields for c in field):
            found |= dict.fromkeys(recipes(problem, chain, batch))
    return list(found)
