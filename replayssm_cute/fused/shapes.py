"""How the conv and the norm are cut into CTAs: static facts of their kernels, and the rules that choose them."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import WARP, TileConfig
from ..problem import Problem
from .problem import LayerProblem

PIECE = 8  # 16-bit values in 16 bytes
MOST_THREADS = 1024
SPREAD_VECTORS = 1 << 14  # 8-channel vectors of a launch below which narrower ones keep more lanes busy; unmeasured


def _check_carveout(carveout: int | None) -> None:
    if carveout is not None and not 0 <= carveout <= 100:
        raise ValueError(f"carveout: got {carveout}, expected 0..100 or None")


@dataclass(frozen=True, slots=True)
class ConvShape:
    """One conv kernel. A thread takes `vector` channels of `rows` batch rows through all their tokens, or `each`.

    Attributes:
        channels, tokens, ring_rows: of the problem.
        io_dtype, weight_dtype, bias_dtype, index_dtype: short dtype names; None where the tensor is absent.
        vector: 2, 4 or 8.
        rows: batch rows of a thread, which read the weights once: 1, 2 or 4. Unmeasured: no rule takes more than one.
        threads: of a CTA.
        triggers: whether the next kernel may start before this one ends.
        pdl: whether this one may start before its predecessor ends.
        each: tokens of a thread, a divisor of `tokens`; None: all. Unmeasured: no rule takes fewer.
        soon: the next kernel may start before this one's wait, and so while its predecessor runs; under PDL alone.
        ahead: new inputs are brought to L2 before the wait; under PDL alone. In_proj may still be writing them: L2 is
            where it writes to, so that what the loads after the wait find there is right.
        carveout: percent of a multiprocessor's L1 to be shared memory while the kernel runs; None leaves it to the
            driver. Step kernels ask for 100, and a multiprocessor that has to be divided anew has to be idle first.
    """

    channels: int
    tokens: int
    ring_rows: int
    io_dtype: str
    weight_dtype: str
    bias_dtype: str | None
    index_dtype: str | None
    vector: int = 8
    threads: int = 128
    triggers: bool = True
    pdl: bool = False
    rows: int = 1
    each: int | None = None
    carveout: int | None = None
    soon: bool = False
    ahead: bool = False

    def __post_init__(self) -> None:
        _check_carveout(self.carveout)
        if self.soon and not (self.pdl and self.triggers):
            raise ValueError("soon: got True, expected False of a conv without PDL, or that lets no kernel start early")
        if self.ahead and not self.pdl:
            raise ValueError("ahead: got True, expected False without PDL")
        if self.each is not None and (self.each < 1 or self.tokens % self.each):
            raise ValueError(f"each: got {self.each}, expected a divisor of {self.tokens} tokens or None")
        if self.rows not in (1, 2, 4):
            raise ValueError(f"rows: got {self.rows}, expected 1, 2 or 4")
        if self.vector not in (2, 4, 8):
            raise ValueError(f"vector: got {self.vector}, expected 2, 4 or 8")
        if self.threads % WARP or not 0 < self.threads <= MOST_THREADS:
            raise ValueError(f"threads: got {self.threads}, expected a multiple of {WARP} up to {MOST_THREADS}")

    @property
    def ctas_per_row(self) -> int:
        """CTAs that share one batch row's channels."""
        return -(-self.channels // (self.vector * self.threads))

    @property
    def chunk(self) -> int:
        """Tokens of a thread."""
        return self.each or self.tokens


@dataclass(frozen=True, slots=True)
class NormShape:
    """One norm kernel. A CTA normalizes one group of some tokens of a row.

    Attributes:
        d_inner, groups, tokens: of the problem; groups are the norm's.
        io_dtype, weight_dtype, index_dtype: short dtype names; None where the tensor is absent.
        warps: of a CTA.
        triggers, pdl: as in `ConvShape`.
        together: tokens of a CTA, which read the weights once; a divisor of `tokens`. No rule takes more than one yet:
            unmeasured.
        carveout: as in `ConvShape`.
    """

    d_inner: int
    groups: int
    tokens: int
    io_dtype: str
    weight_dtype: str
    index_dtype: str | None
    warps: int
    triggers: bool = True
    pdl: bool = True
    together: int = 1
    carveout: int | None = None

    def __post_init__(self) -> None:
        _check_carveout(self.carveout)
        if self.together < 1 or self.tokens % self.together:
            raise ValueError(f"together: got {self.together}, expected a divisor of {self.tokens} tokens")
        if not 0 < self.warps <= MOST_THREADS // WARP:
            raise ValueError(f"warps: got {self.warps}, expected 1..{MOST_THREADS // WARP}")

    @property
    def group(self) -> int:
        """Values of a group."""
        return self.d_inner // self.groups

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.warps * WARP

    @property
    def pieces(self) -> int:
        """16-byte pieces of a group that a thread takes."""
        return -(-self.group // (PIECE * self.threads))


@dataclass(frozen=True, slots=True)
class StepShape:
    """One step kernel that convolves its x.

    Attributes:
        problem, config: of the step; x is raw there.
        weight_dtype, bias_dtype: of the conv; None where it has no bias.
        early: whether x is convolved before the wait for the kernel before; under PDL alone. For launches whose CTAs
            all start at once: they wait anyway. Unmeasured: no rule asks for it.
    """

    problem: Problem
    config: TileConfig
    weight_dtype: str
    bias_dtype: str | None
    early: bool = False

    def __post_init__(self) -> None:
        if self.early and not self.problem.pdl:
            raise ValueError("early: got True, expected False without PDL")


def conv_shape(problem: LayerProblem, batch: int, *, chained: bool, pdl: bool, with_x: bool = True) -> ConvShape:
    """The conv kernel for a batch size.

    Args:
        chained: whether the step starts while the conv runs.
        pdl: whether the conv starts while its predecessor runs.
        with_x: False: of B and C alone.
    """
    channels = problem.channels if with_x else problem.channels - problem.d_inner
    vector, threads = _conv_cuts(problem)[batch * channels >= SPREAD_VECTORS * PIECE]
    step = problem.step
    return ConvShape(
        channels=channels,
        tokens=step.tokens,
        ring_rows=step.ring_rows,
        io_dtype=step.io_dtype,
        weight_dtype=problem.conv_dtype,
        bias_dtype=problem.conv_bias_dtype,
        index_dtype=step.index_dtype,
        vector=vector,
        threads=threads,
        triggers=chained,
        pdl=pdl,
    )


def _conv_cuts(problem: LayerProblem) -> tuple[tuple[int, int], tuple[int, int]]:
    """(vector, threads) for few and for many rows. Of long windows a thread holds fewer channels, for its registers."""
    return (2, 64), (8 if problem.step.tokens <= 8 else 4, 128)


def conv_shapes(problem: LayerProblem, *, chained: bool, pdl: bool, with_x: bool = True) -> tuple[ConvShape, ...]:
    """Every conv kernel that some batch size asks for."""
    return tuple(conv_shape(problem, batch, chained=chained, pdl=pdl, with_x=with_x) for batch in (1, 1 << 24))


def step_shape(problem: LayerProblem, config: TileConfig, early: bool = False) -> StepShape:
    """The step kernel that convolves x."""
    return StepShape(problem.step, config, problem.conv_dtype, problem.conv_bias_dtype, early)


def norm_shape(problem: LayerProblem, *, chained: bool) -> NormShape:
    """The norm kernel: a piece a thread, as far as CTAs of 16 warps reach."""
    step = problem.step
    pieces = -(-problem.d_inner // problem.norm_groups // (PIECE * WARP))
    return NormShape(
        d_inner=problem.d_inner,
        groups=problem.norm_groups,
        tokens=step.tokens,
        io_dtype=step.io_dtype,
        weight_dtype=problem.norm_dtype,
        index_dtype=step.index_dtype,
        warps=min(pieces, 16),
        pdl=chained,
    )
