"""The step kernel for data-centre Blackwell: what it covers, its configs, where it keeps what, and when it may serve.

Its tensor cores read the state from shared memory, 128 rows at a time (two heads of 64 rows, one of 128, or one of 80
and 48 rows that nobody looks at), and leave S·C in tensor memory. It has been compiled and simulated, and never run on
a GPU: it serves only where it is asked for (`REPLAYSSM_SM100=1`, a call's config, a measured table) and has passed its
self-check. Nothing here imports the DSL.
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
ROWS = 128  # M of the MMA: what it takes of the state at a time, or more
HEADS_AT_A_TIME = {64: 2, 80: 1, 128: 1}  # by head_dim
COLUMNS = 16  # N of the MMA comes in steps of it beside M = 128
MANY = 48  # heads a multiprocessor from which CTAs take turns
LANES = 32  # of tensor memory's 128, which a warp can read: a quarter, by its number modulo 4
ANSWERS = 2  # of cluster launch control that a CTA has room for: the next is asked for while warps take the last
ANSWER_BYTES = 16
TENSOR_COLUMNS = 512  # of tensor memory, for all CTAs of a multiprocessor
LEAST_COLUMNS = 32  # of an allocation, which is a power of two
ALIGNMENT = 1024  # bytes: period of the 128-byte swizzle


def uncovered(problem: Problem) -> str | None:
    """Why this kernel cannot run a problem on any GPU, or None if it can."""
    if problem.rewrites or problem.precision != "default":
        return "8-bit states, read copies, stochastic rounding and the highest precision are the portable kernel's"
    if problem.head_dim not in HEADS_AT_A_TIME:
        return f"head_dim {problem.head_dim} is none of {sorted(HEADS_AT_A_TIME)}"
    if problem.heads_per_group % HEADS_AT_A_TIME[problem.head_dim]:
        return f"{problem.heads_per_group} heads a group are not pairs, and heads of {problem.head_dim} rows are paired"
    if problem.state_dtype not in ("f32", problem.io_dtype):
        return f"{problem.state_dtype} state with {problem.io_dtype} inputs: the MMA takes operands of one type"
    return None


def covers(problem: Problem) -> bool:
    """Whether this kernel can run a problem; the portable one serves the others."""
    return uncovered(problem) is None


@dataclass(frozen=True, slots=True)
class Sm100Config(TileConfig):
    """A tile config of this kernel: never equal to one of the portable kernel.

    parallel_heads, tiles_per_warp and head_split follow from head_dim (`shape`); `of` fills them in. The other fields
    mean what they mean in `TileConfig`; a stage holds the heads of a turn.

    Attributes:
        launch_control: whether a CTA that is done goes on with the work of one that has not started yet, which the
            hardware then starts no more (cluster launch control), and asks for its states while it still works on what
            it has. Without, each CTA does its own part of the grid and ends.
    """

    launch_control: bool = False

    def __post_init__(self) -> None:
        TileConfig.__post_init__(self)
        if self.opt_level != 3:
            raise ValueError(f"config: opt_level is {self.opt_level!r}, expected 3: this kernel has no other")
        if not isinstance(self.launch_control, bool):
            raise ValueError(f"config: launch_control is {self.launch_control!r}, expected a bool")

    @classmethod
    def of(
        cls,
        problem: Problem,
        turns: int = 1,
        stages: int = 1,
        ring: str = "live",
        ctas_per_sm: int = 1,
        tail_rows: int = 0,
        launch_control: bool = False,
    ) -> Sm100Config:
        """The config whose CTAs take `turns` times the heads of an MMA.

        Raises:
            ValueError: if the kernel does not cover the problem.
        """
        if reason := uncovered(problem):
            raise ValueError(f"problem: {problem.label()} has no sm_100a kernel: {reason}")
        heads, tiles, split = shape(problem)
        return cls(
            heads * turns, stages, split, ring, ctas_per_sm, tail_rows, heads, tiles, launch_control=launch_control
        )

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
        """Short and readable: 'sm100 h4/2 s2 p1 r32 live c1 t8', with cluster launch control 'clc' at the end."""
        return f"sm100 {TileConfig.label(self)}" + (" clc" if self.launch_control else "")

    def threads(self, problem: Problem) -> int:
        """Threads of a CTA: the epilogue's, a warp for MMAs and copies, with `launch_control` one for each of these."""
        return (self.warps(problem) + (2 if self.launch_control else 1)) * WARP

    def shared_bytes(self, problem: Problem) -> int:
        """Bytes of shared memory a CTA asks for."""
        return tensor_layout(problem, self).total

    def invalid_reason(self, problem: Problem, target: Target) -> str | None:
        """Why this config cannot run this problem on this target, or None if it can."""
        if target.arch not in ARCHES:
            return f"the kernel needs {' or '.join(ARCHES)}, {target.name} is {target.arch}"
        if reason := uncovered(problem):
            return reason
        found = (self.parallel_heads, self.tiles_per_warp, self.head_split)
        if found != shape(problem):
            return f"parallel_heads, tiles_per_warp and head_split are {found}, expected {shape(problem)}"
        if reason := TileConfig.invalid_reason(self, problem, target):  # its shared memory is asked of this class
            return reason
        threads = self.ctas_per_sm * self.threads(problem)
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
        return max(1, min(by_memory, target.threads_per_sm // self.threads(problem)))


def config_from_json(data: dict[str, Any]) -> TileConfig:
    """The config of the `to_json` dict of either step kernel's.

    Raises:
        ValueError: for unknown fields or values that no config may have.
    """
    return (Sm100Config if "kernel" in data else TileConfig).from_json(data)


def shape(problem: Problem) -> tuple[int, int, int]:
    """parallel_heads, tiles_per_warp and head_split: two tiles for each of four warps, or five tiles for as many.

    A warp can read a quarter of tensor memory's lanes alone, two tiles of 16 rows. Those of an 80-row head are two, two
    and one, for two, two and one warp.
    """
    heads = HEADS_AT_A_TIME[problem.head_dim]
    return heads, 2 if heads * problem.head_dim == ROWS else 1, 1


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
        answers: what the hardware says of the next work, `ANSWERS` times `ANSWER_BYTES`; with launch control alone.
        full, done, empty, read: barriers, 8 bytes each: a stage's state has arrived; a turn's MMAs are done; a stage
            may be filled again (without launch control: after a flush); tensor memory has been read.
        known, taken: with launch control, barriers of an answer: it is there; all warps have it.
        base: where the hardware leaves the address of the allocated tensor memory.
        columns: columns of tensor memory.
        total: bytes of shared memory in all.
    """

    c: int
    c_block: int
    answers: int
    full: int
    done: int
    empty: int
    read: int
    known: int
    taken: int
    base: int
    columns: int
    total: int


@functools.cache
def tensor_layout(problem: Problem, config: Sm100Config) -> TensorLayout:
    """Where this kernel keeps what its MMAs need."""
    shared = shared_layout(problem, config)
    # An MMA reads 128 rows of the last block too, also where heads have fewer: what lies behind it must be ours.
    beyond = (ROWS - config.parallel_heads * problem.head_dim) * 128
    behind = max(shared.total, config.stages * shared.stage_bytes + beyond)
    c = -(-behind // ALIGNMENT) * ALIGNMENT
    blocks = problem.d_state * problem.state_bytes // 128
    c_block = token_columns(problem) * 128
    answers = c + blocks * c_block
    held = ANSWERS if config.launch_control else 0
    full = answers + held * ANSWER_BYTES
    done = full + 8 * config.stages
    empty = done + 8 * config.turns
    read = empty + 8 * config.stages
    known = read + 8
    taken = known + 8 * held
    base = taken + 8 * held
    total = -(-(base + 4) // 128) * 128
    return TensorLayout(
        c, c_block, answers, full, done, empty, read, known, taken, base, tensor_columns(problem, config), total
    )


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
    at_a_time = problem.heads_per_group // HEADS_AT_A_TIME[problem.head_dim]
    large = [Sm100Config.of(problem, turns=turns, tail_rows=tail) for turns in (4, 2) if at_a_time % turns == 0]
    small = Sm100Config.of(problem)
    return [config for config in (small, *large[:1]) if config.is_valid(problem, target)]


def preferred(problem: Problem, batch: int, target: Target) -> Sm100Config | None:
    """This kernel's config for `batch` rows where it is asked for and there is one; it must still be self-checked."""
    configs = default_sm100_configs(problem, target) if asked_for() else []
    if not configs:
        return None
    return configs[-1] if batch * problem.heads >= MANY * target.sms else configs[0]
