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
from replayssm_cute.default_rule import default_config
from replayssm_cute.fused import shapes
from replayssm_cute.fused.chains import Chain, ConvCut, NormCut, Overlap
from replayssm_cute.fused.problem import LayerProblem
from replayssm_cute.fused.recipes import LayerRecipe
from replayssm_cute.sm100 import Sm100Config
from replayssm_cute.target import Target

MARGIN = 0.003  # what a change has to gain, of a call's time, to be kept
FEW, MANY = 16, 64  # rows up to which, and from which on, cuts for few and for many rows are tried

# What a search leaves out, by a search at T 1 on an H200: a carveout for conv and norm (0.1% at most), x convolved
# before the step's wait (0.5% to 4% slower), configs of two tiles a warp or two stages (1% to 9% slower), norms of
# fewer warps than pieces (0.2% to 5% slower), 4 rows a thread of the conv (0.1% to 3% slower).

# Step configs beside the table's, and the batch sizes that each is tried for.
CONFIGS: tuple[tuple[TileConfig, int, int], ...] = (
    (TileConfig(), 1, 16),
    (TileConfig(head_split=2), 1, 4),
    (TileConfig(heads_per_cta=2, head_split=2), 4, 4),
    (TileConfig(heads_per_cta=2, tail_rows=8), 16, 256),
    (TileConfig(heads_per_cta=2, ctas_per_sm=4, tail_rows=8), 64, 256),
    (TileConfig(heads_per_cta=4, tail_rows=8), 16, 256),
)
# (channels of a thread, threads) that a search starts with: of B and C alone, of x too
FEW_START, MANY_START = ((8, 64), (4, 64)), ((8, 128), (8, 128))
# (channels of a thread, threads, batch rows of a thread, tokens of a thread)
FEW_CONVS: tuple[tuple[int, int, int, int | None], ...] = (
    (2, 64, 1, None), (4, 64, 1, None), (8, 64, 1, None), (8, 128, 1, None), (4, 64, 1, 1), (8, 64, 1, 1),
)  # fmt: skip
MANY_CONVS: tuple[tuple[int, int, int, int | None], ...] = (
    (8, 128, 1, None), (4, 128, 1, None), (4, 128, 2, None), (8, 128, 1, 2),
)  # fmt: skip
FEW_NORMS, MANY_NORMS = ((4, 1),), ((4, 1), (4, 2), (4, 4))  # (warps, tokens of a CTA)
# When a conv that starts early lets the step start, and whether it brings its inputs to L2: fields of `ConvCut`
STARTS = tuple(
    {"late": late, "soon": soon, "ahead": ahead}
    for late, soon in ((False, False), (True, False), (False, True))
    for ahead in (False, True)
)

Race = Callable[[Sequence[Chain]], Mapping[Chain, float]]


def step_config(problem: LayerProblem, batch: int, target: Target) -> TileConfig:
    """The table's config of the step; the default rule's where that is the Blackwell kernel's, which takes no conv."""
    config = tables.choose(problem.step, batch, target).config
    return default_config(problem.step, target, batch) if isinstance(config, Sm100Config) else config


def ruled(problem: LayerProblem, batch: int, target: Target, overlap: Overlap) -> Chain:
    """The chain of the rules, in full."""
    config = step_config(problem, batch, target)
    norm = shapes.norm_shape(problem, chained=overlap.chained)
    return Chain(overlap, config, _ruled_conv(problem, batch, overlap), NormCut(norm.warps))


def _ruled_conv(problem: LayerProblem, batch: int, overlap: Overlap) -> ConvCut:
    conv = shapes.conv_shape(problem, batch, chained=True, pdl=True, with_x=not overlap.x_in_step)
    return ConvCut(conv.vector, conv.threads)


def start(problem: LayerProblem, batch: int, target: Target, overlap: Overlap = Overlap.ALL_X) -> Chain:
    """The chain with the table's config, and cuts that were good at T 1 on an H200."""
    chain = ruled(problem, batch, target, overlap)
    return dataclasses.replace(chain, conv=_first_cut(problem, batch, overlap))


def firsts(problem: LayerProblem, batch: int, target: Target) -> list[Chain]:
    """Where a search starts: with the table's config of the step, and with the default rule's, if that is another."""
    first = start(problem, batch, target)
    rule = dataclasses.replace(first, config=default_config(problem.step, target, batch))
    return list(dict.fromkeys((first, rule)))


def _first_cut(problem: LayerProblem, batch: int, overlap: Overlap) -> ConvCut:
    few = batch <= (FEW if overlap.x_in_step else FEW // 2)
    vector, threads = (FEW_START if few else MANY_START)[not overlap.x_in_step]
    return ConvCut(vector if problem.step.tokens <= 8 else min(vector, 4), threads)


def starts(problem: LayerProblem, batch: int, chain: Chain) -> list[Chain]:
    """The chain with x in either kernel, and with everything that starts early as early as it may, or later.

    A conv of other channels is cut as a search's first one.
    """
    ways: tuple[tuple[Overlap, tuple[dict[str, bool], ...]], ...]
    ways = ((Overlap.ALL_X, STARTS), (Overlap.ALL, STARTS))
    return [_started(problem, batch, chain, kind, how) for kind, every in ways for how in every]


def plain_starts(problem: LayerProblem, batch: int, chain: Chain) -> list[Chain]:
    """The same for calls without the promise that the conv may start early."""
    kinds = (Overlap.INNER_X, Overlap.INNER) if chain.overlap.x_in_step else (Overlap.INNER, Overlap.INNER_X)
    return [_started(problem, batch, chain, kind, {"late": late}) for kind in kinds for late in (False, True)]


def _started(problem: LayerProblem, batch: int, chain: Chain, kind: Overlap, how: dict[str, bool]) -> Chain:
    assert chain.conv is not None
    cut = chain.conv if kind.x_in_step == chain.overlap.x_in_step else _first_cut(problem, batch, kind)
    how = {"late": False, "soon": False, "ahead": False} | how
    return dataclasses.replace(chain, overlap=kind, conv=dataclasses.replace(cut, **how), early=False)


def moved(problem: LayerProblem, batch: int, chain: Chain) -> list[Chain]:
    """The chain with the conv of x in the other kernel, all else as it is, and with that conv's first cut.

    It is asked again when all else was found.
    """
    assert chain.conv is not None
    how = {name: getattr(chain.conv, name) for name in STARTS[0]}
    kind = Overlap.ALL if chain.overlap.x_in_step else Overlap.ALL_X
    other = _started(problem, batch, chain, kind, how)
    return [other, dataclasses.replace(other, conv=chain.conv)]


def configs(batch: int, chain: Chain) -> list[Chain]:
    """The chain with every config of the step that is tried at this batch size."""
    return [dataclasses.replace(chain, config=c) for c, least, most in CONFIGS if least <= batch <= most]


def convs(problem: LayerProblem, batch: int, chain: Chain) -> list[Chain]:
    """The chain with other cuts of the conv."""
    assert chain.conv is not None
    cuts = FEW_CONVS if batch <= FEW else MANY_CONVS
    tokens = problem.step.tokens
    return [
        dataclasses.replace(
            chain, conv=dataclasses.replace(chain.conv, vector=v, threads=threads, rows=rows, each=each)
        )
        for v, threads, rows, each in dict.fromkeys(cuts)
        if each is None or (each < tokens and tokens % each == 0)
    ]


def norms(problem: LayerProblem, batch: int, chain: Chain) -> list[Chain]:
    """The chain with other cuts of the norm."""
    assert chain.norm is not None
    return [
        dataclasses.replace(chain, norm=dataclasses.replace(chain.norm, warps=warps, together=together))
        for warps, together in (FEW_NORMS if batch < MANY else MANY_NORMS)
        if problem.step.tokens % together == 0
    ]


def climb(
    chain: Chain, steps: Iterable[Callable[[Chain], list[Chain]]], race: Race, over: Callable[[], bool] = lambda: False
) -> Chain:
    """Take the fastest of each step's field in turn, where it gains by more than MARGIN, until time is `over`."""
    for step in steps:
        field = list(dict.fromkeys([chain, *step(chain)]))
        if over():
            break
        if len(field) > 1:
            times = race(field)
            fastest = min(times, key=times.__getitem__)
            if times[chain] > (1 + MARGIN) * times[fastest]:
                chain = fastest
    return chain


def search(
    problem: LayerProblem, batch: int, target: Target, race: Race, over: Callable[[], bool] = lambda: False
) -> tuple[Chain, Chain]:
    """The chains found for calls without and with the promise that the conv may start early.

    From where the table's config and from where the rule's leads: the fastest step alone may lead to a chain that is
    not (batch 4 and 64 of T 4 on H200s: 11.8 and 91.6 us from the table's, 11.3 and 89.8 from the rule's).
    """
    first, *others = firsts(problem, batch, target)
    promised = climb(first, dimensions(problem, batch), race, over)
    for other in others:
        climbed = climb(other, dimensions(problem, batch), race, over)
        if climbed != promised and not over():
            times = race([promised, climbed])
            promised = min((promised, climbed), key=times.__getitem__)
    plain = plain_starts(problem, batch, promised)[0]
    return climb(plain, [lambda c: plain_starts(problem, batch, c)], race, over), promised


def dimensions(problem: LayerProblem, batch: int) -> list[Callable[[Chain], list[Chain]]]:
    """What a search of chains with the promise varies, in this order."""
    return [
        lambda c: starts(problem, batch, c),
        lambda c: configs(batch, c),
        lambda c: convs(problem, batch, c),
        lambda c: norms(problem, batch, c),
        lambda c: moved(problem, batch, c),
    ]


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
    """Kernels that a search of this cell may launch: every start, with every config, and with every cut."""
    field = []
    for first in firsts(problem, batch, target):
        for chain in (*starts(problem, batch, first), *plain_starts(problem, batch, first)):
            field += [chain, *configs(batch, chain), *convs(problem, batch, chain), *norms(problem, batch, chain)]
    return list(dict.fromkeys(recipe for chain in field for recipe in recipes(problem, chain, batch)))
