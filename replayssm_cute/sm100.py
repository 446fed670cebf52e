"""The step kernel for data-centre Blackwell: what it covers, its configs, where it keeps what, and when it may serve.

Its tensor cores read the state from shared memory, 128 rows at a time (two heads of 64 rows, or one of 128), and leave
S·C in tensor memory. It has been compiled and simulated, and never run on a GPU: it serves only where it is asked for
(`REPLAYSSM_SM100=1`, or a call's config) and has passed its self-check. Nothing here imports the DSL.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from dataclasses import dataclass
from typing import Any

from .config import SHARED_RESERVED, WARP, TileConfig, shared_layout
from .default_rule import usual_tail
from .problem import Problem
from .target import Target

ARCHES = ("sm_100a", "sm_103a")
ROWS = 128  # M of the MMA: rows of the state that a CTA takes at a time
COLUMNS = 16  # N of the MMA comes in steps of it beside M = 128
MANY = 48  # heads a multiprocessor from which CTAs take turns
WARPS = 4  # of the epilogue: a warp can read 32 of tensor memory's 128 lanes; one more warp issues copies and MMAs
TENSOR_COLUMNS = 512  # of tensor memory, for all CTAs of a multiprocessor
LEAST_COLUMNS = 32  # of an allocation, which is a power of two
ALIGNMENT = 1024  # bytes: period of the 128-byte swizzle


def uncovered(problem: Problem) -> str | None:
    """Why this kernel cannot run a problem on any GPU, or None if it can."""
    if problem.rewrites or problem.precision != "default":
        return "8-bit states, read copies, stochastic rounding and the highest precision are the portable kernel's"
    if ROWS % problem.head_dim:
        return f"head_dim {problem.head_dim} does not divide the {ROWS} rows of an MMA"
    if problem.heads_per_group % (ROWS // problem.head_dim):
        return f"{problem.heads_per_group} heads a group are not pairs, and heads of {problem.head_dim} rows are paired"
    if problem.state_dtype not in ("f32", problem.io_dtype):
        return f"{problem.state_dtype} state with {problem.io_dtype} inputs: the MMA takes operands of one type"
    return None


def covers(problem: Problem) -> bool:
    """Whether this kernel can run a problem; the portable one serves the others."""
    return uncovered(problem) is None


class Sm100Config(TileConfig):
    """A tile config of this kernel: never equal to one of the portable kernel.

    parallel_heads x head_dim is 128, tiles_per_warp 2, head_split 1; `of` fills these in. The other fields mean what
    they mean in `TileConfig`; a stage holds 128 rows.
    """

    __slots__ = ()

    @classmethod
    def of(
        cls,
        problem: Problem,
        turns: int = 1,
        stages: int = 1,
        ring: str = "live",
        ctas_per_sm: int = 1,
        tail_rows: int = 0,
    ) -> Sm100Config:
        """The config whose CTAs take `turns` times 128 rows.

        Raises:
            ValueError: if the kernel does not cover the problem.
        """
        if reason := uncovered(problem):
            raise ValueError(f"problem: {problem.label()} has no sm_100a kernel: {reason}")
        pair = ROWS // problem.head_dim
        return cls(pair * turns, stages, 1, ring, ctas_per_sm, tail_rows, pair, 2)

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `from_json` gives the same config back."""
        return {**dataclasses.asdict(self), "kernel": "sm100"}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sm100Config:
        """The config of a `to_json` dict.

        Raises:
            ValueError: for another kernel's config, unknown fields or values that no config may have.
        """
        fields = dict(data)
        if (kernel := fields.pop("kernel", None)) != "sm100":
            raise ValueError(f"config: got kernel {kernel!r}, expected 'sm100'")
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := set(fields) - known:
            raise ValueError(f"config: unknown fields {sorted(unknown)}")
        return cls(**fields)

    def label(self) -> str:
        """Short and readable: 'sm100 h4/2 s2 p1 r32 live c1 t8'."""
        return f"sm100 {TileConfig.label(self)}"

    def shared_bytes(self, problem: Problem) -> int:
        """Bytes of shared memory a CTA asks for."""
        return tensor_layout(problem, self).total

    def invalid_reason(self, problem: Problem, target: Target) -> str | None:
        """Why this config cannot run this problem on this target, or None if it can."""
        if target.arch not in ARCHES:
            return f"the kernel needs {' or '.join(ARCHES)}, {target.name} is {target.arch}"
        if reason := uncovered(problem):
            return reason
        shape = (self.parallel_heads * problem.head_dim, self.tiles_per_warp, self.head_split)
        if shape != (ROWS, 2, 1):
            return f"parallel_heads x head_dim, tiles_per_warp and head_split are {shape}, expected {(ROWS, 2, 1)}"
        if reason := TileConfig.invalid_reason(self, problem, target):  # its shared memory is asked of this class
            return reason
        threads = self.ctas_per_sm * (WARPS + 1) * WARP
        if threads > target.threads_per_sm:
            return (
                f"ctas_per_sm {self.ctas_per_sm} needs {threads} threads, {target.name} holds {target.threads_per_sm}"
            )
        columns = tensor_columns(problem, self) * self.resident(problem, target)
        if columns > TENSOR_COLUMNS:
            return f"resident CTAs need {columns} columns of tensor memory, a multiprocessor has {TENSOR_COLUMNS}"
        return None

    def resident(self, problem: Problem, target: Target) -> int:
        """CTAs that shared memory and threads let a multiprocessor hold: all of them must find tensor memory."""
        by_memory = target.shared_per_sm // (self.shared_bytes(problem) + SHARED_RESERVED)
        return max(1, min(by_memory, target.threads_per_sm // ((WARPS + 1) * WARP)))


def token_columns(problem: Problem) -> int:
    """Columns of a turn's accumulators, N of the MMA: the new tokens, padded."""
    return -(-problem.tokens // COLUMNS) * COLUMNS


def tensor_columns(problem: Problem, config: TileConfig) -> int:
    """Columns of tensor memory that a CTA allocates: accumulators of its own for each turn."""
    return max(LEAST_COLUMNS, 1 << (token_columns(problem) * config.turns - 1).bit_length())


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """What a CTA of this kernel keeps in shared memory beyond `config.SharedLayout`, as byte offsets.

    Attributes:
        c: C as the MMA reads it, blocks of 128-byte rows, `c_block` bytes each; its tokens are a block's rows.
        full, done, empty, read: barriers, 8 bytes each: a stage's state has arrived; a turn's MMAs are done; a stage
            may be filled again (after a flush); tensor memory has been read.
        base: where the hardware leaves the address of the allocated tensor memory.
        columns: columns of tensor memory.
        total: bytes of shared memory in all.
    """

    c: int
    c_block: int
    full: int
    done: int
    empty: int
    read: int
    base: int
    columns: int
    total: int


@functools.cache
def tensor_layout(problem: Problem, config: TileConfig) -> TensorLayout:
    """Where this kernel keeps what its MMAs need."""
    c = -(-shared_layout(problem, config).total // ALIGNMENT) * ALIGNMENT
    blocks = problem.d_state * problem.state_bytes // 128
    c_block = token_columns(problem) * 128
    full = c + blocks * c_block
    done = full + 8 * config.stages
    empty = done + 8 * config.turns
    read = empty + 8 * config.stages
    base = read + 8
    total = -(-(base + 4) // 128) * 128
    return TensorLayout(c, c_block, full, done, empty, read, base, tensor_columns(problem, config), total)


# ---------------------------------------------------------------------------------------------------
# When it serves
# ---------------------------------------------------------------------------------------------------


def asked_for() -> bool:
    """Whether `REPLAYSSM_SM100=1` asks for this kernel where it covers a problem."""
    return os.environ.get("REPLAYSSM_SM100") == "1"


def default_sm100_configs(problem: Problem, target: Target) -> list[Sm100Config]:
    """The valid configs of this kernel's default rule: for small batches, and for large ones where there is another.

    Nothing is measured. Large batches take several turns in one stage: MMAs free it long before a turn's outputs are
    done, so that the next state is on its way while two CTAs a multiprocessor work on those that came.
    """
    if target.arch not in ARCHES or not covers(problem):
        return []
    tail = usual_tail(problem, target)
    pairs = problem.heads_per_group * problem.head_dim // ROWS
    large = [Sm100Config.of(problem, turns=turns, tail_rows=tail) for turns in (4, 2) if pairs % turns == 0]
    small = Sm100Config.of(problem)
    return [config for config in (small, *large[:1]) if config.is_valid(problem, target)]


def preferred(problem: Problem, batch: int, target: Target) -> Sm100Config | None:
    """This kernel's config for `batch` rows where it is asked for and there is one; it must still be self-checked."""
    configs = default_sm100_configs(problem, target) if asked_for() else []
    if not configs:
        return None
    return configs[-1] if batch * problem.heads >= MANY * target.sms else configs[0]
