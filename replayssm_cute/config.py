"""TileConfig: how a step kernel is tiled, and the one predicate that says where a config may run."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

from .problem import Problem
from .target import Target

P_TILE = 16  # rows of head_dim that one warp owns: the M of mma.m16n8
WARP = 32
MIN_REGISTERS = 64  # below, step kernels spill
MAX_THREADS = 512  # a CTA; the kernels need more than 64 registers a thread
RINGS = ("live", "whole")
SHORT_WINDOW = 24  # up to which a flush holds its terms of all live rows in registers
SKIPPED = 16  # ring positions of a long window that are left out together where none of them is live
WHOLE_LIMIT = 16  # window and tokens up to which ring = "whole" is served
SHARED_RESERVED = 1024  # bytes a resident block costs beside its own shared memory
WITHOUT_TMA = ("sm_80", "sm_89")  # nor programmatic dependent launch; here, since it shapes what is compiled
OPT_LEVELS = (2, 3)  # of ptxas


@dataclass(frozen=True, slots=True)
class TileConfig:
    """The tunable shape of one step kernel.

    Attributes:
        heads_per_cta: heads of one group that a CTA takes; they share B, C and B·C.
        stages: states in flight per warp (shared-memory buffers), 1..turns.
        head_split: CTAs that share one head's rows of P; more CTAs for small batches.
        ring: "live" reads the live ring rows once the cursors are known; "whole" reads all R rows without
            waiting for them: more bytes, one trip to memory less in a row.
        ctas_per_sm: CTAs that must fit a multiprocessor: the compiler caps the registers accordingly. 1 leaves
            it free.
        tail_rows: batch rows at the end of the grid that are cut into single heads: small CTAs, started last, fill
            the multiprocessors while the large ones finish.
        parallel_heads: heads that a CTA takes at the same time, each with warps of its own; the others wait their turn.
        tiles_per_warp: 16-row tiles of a head's P that one warp owns: more bytes in flight and fewer instructions a
            byte, fewer warps.
        keep_b: whether B of the ring stays in shared memory, where flushes find it. Without, they read it from L2
            again, and a long window leaves room for more CTAs.
        opt_level: of ptxas. At 2 memory's descriptors stay in uniform registers, a twentieth fewer instructions than at
            3, and loads are scheduled otherwise: up to 6% faster in some kernels, 7% slower in others (one H200).
    """

    heads_per_cta: int = 1
    stages: int = 1
    head_split: int = 1
    ring: str = "live"
    ctas_per_sm: int = 1
    tail_rows: int = 0
    parallel_heads: int = 1
    tiles_per_warp: int = 1
    keep_b: bool = True
    opt_level: int = 3

    def __post_init__(self) -> None:
        for name in ("heads_per_cta", "stages", "head_split", "ctas_per_sm", "parallel_heads", "tiles_per_warp"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config: {name} is {value!r}, expected a positive int")
        rows = self.tail_rows
        if not isinstance(rows, int) or isinstance(rows, bool) or not 0 <= rows < 2**31:
            raise ValueError(f"config: tail_rows is {rows!r}, expected 0 or a positive int below 2^31")
        if not isinstance(self.keep_b, bool):
            raise ValueError(f"config: keep_b is {self.keep_b!r}, expected a bool")
        if self.opt_level not in OPT_LEVELS or isinstance(self.opt_level, bool):
            raise ValueError(f"config: opt_level is {self.opt_level!r}, expected one of {OPT_LEVELS}")
        if self.ring not in RINGS:
            raise ValueError(f"config: ring is {self.ring!r}, expected one of {RINGS}")

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `from_json` gives the same config back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TileConfig:
        """The config of a `to_json` dict.

        Raises:
            ValueError: for unknown fields or values that no config may have.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := set(data) - known:
            raise ValueError(f"config: unknown fields {sorted(unknown)}")
        return cls(**data)

    def label(self) -> str:
        """Short and readable: 'h4 s2 p1 live c3 t8', two heads at a time 'h4/2 ...'; 'O2' and 'l2' at the end."""
        at_a_time = f"/{self.parallel_heads}" if self.parallel_heads > 1 else ""
        rows = f" r{P_TILE * self.tiles_per_warp}" if self.tiles_per_warp > 1 else ""
        text = (
            f"h{self.heads_per_cta}{at_a_time} s{self.stages} p{self.head_split}{rows} {self.ring} c{self.ctas_per_sm}"
        )
        text += f" t{self.tail_rows}" if self.tail_rows else ""
        text += f" O{self.opt_level}" if self.opt_level != 3 else ""
        return text + ("" if self.keep_b else " l2")

    def warps(self, problem: Problem) -> int:
        """Warps per CTA: one for each `tiles_per_warp` x 16 rows of P of each head that it takes at a time."""
        return problem.head_dim // P_TILE // self.head_split // self.tiles_per_warp * self.parallel_heads

    @property
    def turns(self) -> int:
        """Heads that a warp takes one after the other."""
        return self.heads_per_cta // self.parallel_heads

    def ctas(self, problem: Problem, batch: int) -> int:
        """CTAs of the grid for `batch` rows."""
        tail = min(batch, self.tail_rows)
        return (batch - tail) * self.ctas_per_row(problem) + tail * self.ctas_per_tail_row(problem)

    def ctas_per_tail_row(self, problem: Problem) -> int:
        """CTAs of a batch row in the tail."""
        return problem.heads // self.parallel_heads * self.head_split

    def ctas_per_row(self, problem: Problem) -> int:
        """CTAs of a batch row outside the tail."""
        return problem.heads // self.heads_per_cta * self.head_split

    def ring_positions(self, problem: Problem) -> int:
        """Ring rows that a CTA contracts over, padded to the 8 of an MMA's K, and for long windows to two of these."""
        if self.ring == "whole":
            return _up(problem.ring_rows, 8)
        return _up(problem.window, 8 if problem.window <= SHORT_WINDOW and not problem.rewrites else 16)

    def skips(self, problem: Problem) -> bool:
        """Whether ring positions from the 17th on are worked on only where they are live, 16 at a time."""
        return self.ring == "live" and self.ring_positions(problem) >= 2 * SKIPPED

    def shared_bytes(self, problem: Problem) -> int:
        """Bytes of shared memory a CTA asks for; `shared_layout` in the kernel allocates the same."""
        return shared_layout(problem, self).total

    def invalid_reason(self, problem: Problem, target: Target) -> str | None:
        """Why this config cannot run this problem on this target, or None if it can."""
        if problem.heads_per_group % self.heads_per_cta:
            return f"heads_per_cta {self.heads_per_cta} does not divide {problem.heads_per_group} heads per group"
        if self.heads_per_cta % self.parallel_heads:
            return f"parallel_heads {self.parallel_heads} does not divide heads_per_cta ({self.heads_per_cta})"
        if not 1 <= self.stages <= self.turns:
            return f"stages {self.stages} is outside 1..heads_per_cta / parallel_heads ({self.turns})"
        if self.tail_rows and self.turns == 1:
            return "tail_rows needs CTAs that take heads in turn: it cuts rows into the smallest CTAs"
        if (problem.head_dim // P_TILE) % (self.head_split * self.tiles_per_warp):
            return (
                f"head_split {self.head_split} x tiles_per_warp {self.tiles_per_warp} does not divide "
                f"{problem.head_dim // P_TILE} tiles of {P_TILE} rows"
            )
        if self.ring == "whole" and problem.rewrites:
            return 'ring "whole" does not serve 8-bit states, read copies and stochastic rounding'
        if self.ring == "whole" and max(problem.window, problem.tokens) > WHOLE_LIMIT:
            return f'ring "whole" serves windows and T of at most {WHOLE_LIMIT}'
        if target.arch in WITHOUT_TMA and problem.pdl:
            return f"enable_pdl needs compute capability 9 or later, {target.name} is {target.arch}"
        if target.arch == "sm_80" and problem.read_dtype == "f8e4m3":
            return f"float8_e4m3fn needs compute capability 8.9 or later, {target.name} is {target.arch}"
        shared = self.shared_bytes(problem)
        if shared > target.shared_per_block:
            return f"needs {shared} bytes of shared memory, {target.name} allows {target.shared_per_block} a block"
        if self.ctas_per_sm * (shared + SHARED_RESERVED) > target.shared_per_sm:
            return (
                f"ctas_per_sm {self.ctas_per_sm} needs {self.ctas_per_sm * (shared + SHARED_RESERVED)} bytes of shared "
                f"memory, {target.name} has {target.shared_per_sm} a multiprocessor"
            )
        threads = self.ctas_per_sm * self.warps(problem) * WARP
        if threads > target.threads_per_sm:
            return (
                f"ctas_per_sm {self.ctas_per_sm} needs {threads} threads, {target.name} holds {target.threads_per_sm}"
            )
        registers = target.registers_per_sm // threads
        if self.warps(problem) * WARP > MAX_THREADS:
            return f"needs {self.warps(problem) * WARP} threads a CTA, more than {MAX_THREADS}"
        if registers < MIN_REGISTERS:
            return f"ctas_per_sm {self.ctas_per_sm} leaves {registers} registers a thread, fewer than {MIN_REGISTERS}"
        return None

    def is_valid(self, problem: Problem, target: Target) -> bool:
        """Whether this config can run this problem on this target."""
        return self.invalid_reason(problem, target) is None


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """Byte offsets of a step CTA's shared memory; states come first, for their 1,024-byte alignment.

    Attributes:
        stage_bytes, warp_bytes: one stage of the state, and one warp's tile in it.
        inputs: offset of the heads' inputs, one head after the other, `input_bytes` for each of a head's warps.
        input_tile_bytes: of these, what belongs to one tile of 16 rows of P: x of the ring, x of the new tokens, z.
        c: offset of the new tokens' C, rows of `c_stride` bytes.
        b: offset of B of the ring positions, if it is kept for flushes; rows of `b_stride` bytes.
        products: offset of the partial sums of B·C: `slices` parts of `product_floats`, rows of `product_stride`.
        tiles, tile_warps, slices: how B·C is cut: 16-position tiles, warps that share them out, parts of N;
            tile_warps * slices warps work on it.
        weights: offset of the heads' weights of positions for tokens; `weight_floats` each, rows of `weight_stride`.
        vectors: offset of the heads' decay vectors, `vector_floats` each.
        barriers: offset of the stages' barriers, 8 bytes per warp and stage.
        total: bytes in all.
    """

    stage_bytes: int
    warp_bytes: int
    inputs: int
    input_bytes: int
    input_tile_bytes: int
    c: int
    c_stride: int
    b: int
    b_stride: int
    products: int
    product_stride: int
    product_floats: int
    tiles: int
    tile_warps: int
    slices: int
    weights: int
    weight_stride: int
    weight_floats: int
    vectors: int
    vector_floats: int
    barriers: int
    total: int


def _up(n: int, k: int) -> int:
    return -(-n // k) * k


def first_tiles(problem: Problem, config: TileConfig) -> int:
    """Tiles of B·C that warps are dealt first: those that are always there; where some are skipped, they come later."""
    tokens_pad = _up(problem.tokens, 8)
    if config.skips(problem):
        return 1 + _up(tokens_pad, 16) // 16
    return _up(config.ring_positions(problem) + tokens_pad, 16) // 16


@functools.cache
def shared_layout(problem: Problem, config: TileConfig) -> SharedLayout:
    """Where a step kernel keeps what."""
    warps = config.warps(problem)
    warp_bytes = config.tiles_per_warp * P_TILE * problem.d_state * problem.read_bytes
    if problem.copy_dtype is not None:  # a row that flushes brings its checkpoint to the same place, tile by tile
        warp_bytes = max(warp_bytes, P_TILE * problem.d_state * problem.state_bytes)
    stage_bytes = warps * warp_bytes
    tokens_pad = _up(problem.tokens, 8)
    positions = config.ring_positions(problem) + tokens_pad
    # Four rows of 32 bytes fill the banks once; the two halves of a row change places every four rows. One row more,
    # and a row's pieces in four tiles fill the banks too.
    input_rows = _up(config.ring_positions(problem) + (2 if problem.has_z else 1) * problem.tokens, 4) + 1
    input_tile_bytes = input_rows * 2 * P_TILE
    input_bytes = config.tiles_per_warp * input_tile_bytes
    c_stride = 2 * problem.d_state + 16  # eight rows at one column are in eight different bank quads
    b_stride = 2 * problem.d_state + 16  # so are four rows, two apart, at two neighbouring pieces
    tiles = _up(positions, 16) // 16
    tile_warps = min(warps, first_tiles(problem, config))
    units = problem.d_state // 32
    # Slices of four units keep a warp's operands within 32 registers, and leave warps to make the decay vectors of few
    # heads meanwhile. With a head for every warp no warp is left, and half the slice halves the wait.
    least = 2 if config.heads_per_cta >= warps else 4
    slices = max(s for s in range(1, max(1, min(warps // tile_warps, units // least)) + 1) if units % s == 0)
    few = _up(problem.tokens, 4)  # of up to four tokens nothing is kept for the others that an MMA's column pads to
    product_stride = few if tokens_pad == 8 else tokens_pad + 4
    product_floats = positions * product_stride
    weight_stride = positions if positions % 32 in (8, 24) else positions + 8  # 8 bytes a lane, no bank twice
    weight_floats = problem.tokens * weight_stride
    # of the ring: weights; of each new token: exp(n_t), the read-out's factor, dt_t, A·dt_t; and exp(C_tot), D
    vector_floats = _up(positions - tokens_pad + 4 * tokens_pad + 2, 4)

    sizes = {
        "inputs": config.turns * warps * input_bytes,
        "c": problem.tokens * c_stride,
        "b": config.ring_positions(problem) * b_stride if config.keep_b else 0,
        "products": slices * product_floats * 4,
        "weights": config.heads_per_cta * weight_floats * 4 if config.turns > 1 else 0,  # else made in registers
        "vectors": config.heads_per_cta * vector_floats * 4,
        "barriers": warps * config.stages * 8,
    }
    offsets, end = {}, config.stages * stage_bytes
    for name, size in sizes.items():
        offsets[name] = end
        end = _up(end + size, 16)
    return SharedLayout(
        stage_bytes=stage_bytes,
        warp_bytes=warp_bytes,
        input_bytes=input_bytes,
        input_tile_bytes=input_tile_bytes,
        c_stride=c_stride,
        b_stride=b_stride,
        product_stride=product_stride,
        product_floats=product_floats,
        tiles=tiles,
        tile_warps=tile_warps,
        slices=slices,
        weight_stride=weight_stride,
        weight_floats=weight_floats,
        vector_floats=vector_floats,
        total=_up(end, 128),
        **offsets,
    )
