"""TileConfig: how a step kernel is tiled, and the one predicate that says where a config may run."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from .problem import Problem
from .target import Target

P_TILE = 16  # rows of head_dim that one warp owns: the M of mma.m16n8
SHARED_RESERVED = 1024  # bytes a resident block costs beside its own shared memory


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The tunable shape of one step kernel.

    Attributes:
        heads_per_cta: heads of one group that a CTA takes one after the other; they share B, C and B·C.
        stages: head states in flight per CTA (shared-memory buffers), 1..heads_per_cta.
        head_split: CTAs that share one head's rows of P; more CTAs for small batches.
    """

    heads_per_cta: int = 1
    stages: int = 1
    head_split: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config: {field.name} is {value!r}, expected a positive int")

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `from_json` gives the same config back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TileConfig:
        """The config of a `to_json` dict.

        Raises:
            ValueError: for unknown fields or values that are no positive ints.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := set(data) - known:
            raise ValueError(f"config: unknown fields {sorted(unknown)}")
        return cls(**data)

    def label(self) -> str:
        """Short and readable: 'h4 s2 p1'."""
        return f"h{self.heads_per_cta} s{self.stages} p{self.head_split}"

    def warps(self, problem: Problem) -> int:
        """Warps per CTA: one for each 16 rows of P that the CTA owns."""
        return problem.head_dim // P_TILE // self.head_split

    def ctas(self, problem: Problem, batch: int) -> int:
        """CTAs of the grid for `batch` rows."""
        return batch * (problem.heads // self.heads_per_cta) * self.head_split

    def shared_bytes(self, problem: Problem) -> int:
        """Bytes of shared memory a CTA asks for; `shared_layout` in the kernel allocates the same."""
        return shared_layout(problem, self).total

    def invalid_reason(self, problem: Problem, target: Target) -> str | None:
        """Why this config cannot run this problem on this target, or None if it can."""
        if problem.heads_per_group % self.heads_per_cta:
            return f"heads_per_cta {self.heads_per_cta} does not divide {problem.heads_per_group} heads per group"
        if not 1 <= self.stages <= self.heads_per_cta:
            return f"stages {self.stages} is outside 1..heads_per_cta ({self.heads_per_cta})"
        if (problem.head_dim // P_TILE) % self.head_split:
            return f"head_split {self.head_split} does not divide {problem.head_dim // P_TILE} tiles of {P_TILE} rows"
        shared = self.shared_bytes(problem)
        if shared > target.shared_per_block:
            return f"needs {shared} bytes of shared memory, {target.name} allows {target.shared_per_block} a block"
        return None

    def is_valid(self, problem: Problem, target: Target) -> bool:
        """Whether this config can run this problem on this target."""
        return self.invalid_reason(problem, target) is None


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Byte offsets of a step CTA's shared memory; states first, for their 1,024-byte alignment."""

    stage_bytes: int
    warp_bytes: int
    products: int
    units: int
    product_stride: int
    product_floats: int
    vectors: int
    vector_floats: int
    barriers: int
    total: int


def _up(n: int, k: int) -> int:
    return -(-n // k) * k


@functools.cache
def shared_layout(problem: Problem, config: TileConfig) -> SharedLayout:
    """Where a step kernel keeps what: state stages, partial B·C products, per-head decay vectors, barriers."""
    warps = config.warps(problem)
    warp_bytes = P_TILE * problem.d_state * problem.state_bytes
    stage_bytes = warps * warp_bytes
    tokens_pad = _up(problem.tokens, 8)
    window_pad = _up(problem.window, 8)
    # B·C is split over N in units of 32 columns, dealt to the warps; each unit's owner keeps one partial sum.
    units = min(warps, problem.d_state // 32)
    product_stride = tokens_pad if tokens_pad == 8 else 24  # rows t and t + 2 of a fragment read must not share banks
    product_floats = (window_pad + tokens_pad) * product_stride
    # weight of each old row, exp(n_t), dt_t and A*dt_t of each new token, exp(C_tot)
    vector_floats = _up(window_pad + 3 * tokens_pad + 1, 4)
    offset = config.stages * stage_bytes
    products, offset = offset, offset + units * product_floats * 4
    vectors, offset = offset, offset + config.heads_per_cta * vector_floats * 4
    barriers, offset = _up(offset, 8), _up(offset, 8) + warps * config.stages * 8
    return SharedLayout(
        stage_bytes=stage_bytes,
        warp_bytes=warp_bytes,
        products=products,
        units=units,
        product_stride=product_stride,
        product_floats=product_floats,
        vectors=vectors,
        vector_floats=vector_floats,
        barriers=barriers,
        total=_up(offset, 128),
    )


def default_config(problem: Problem, target: Target, batch: int) -> TileConfig:
    """The rule that serves where no table does: one head a CTA for small batches, several for large ones.

    Measured on one H200 (design, section 4): the crossover between one and four heads lies near
    batch 48-64 of 128 heads, that is near 50 CTAs a multiprocessor. A head whose state is larger than the target's
    shared memory is split over the fewest CTAs that hold it.

    Raises:
        ValueError: if nothing fits.
    """
    enough = 48 * target.sms
    for heads, stages in ((4, 2), (2, 2)):
        config = TileConfig(heads_per_cta=heads, stages=stages)
        if config.is_valid(problem, target) and batch * problem.heads >= enough:
            return config
    for split in range(1, problem.head_dim // P_TILE + 1):
        config = TileConfig(head_split=split)
        if config.is_valid(problem, target):
            return config
    raise ValueError(
        f"config: no tile config of {problem.label()} fits {target.name}: {config.invalid_reason(problem, target)}"
    )
