"""A first cost model: what one call moves, and how long a config should need for it.

The model sees each multiprocessor as a closed system. Its resident CTAs take their heads one after the other and keep
`stages` head states in flight each. The time per head can be below none of four limits:
  bandwidth  S, a head's bytes at the multiprocessor's share of the read limit;
  latency    (S + round trip) / heads in flight (Little's law: bytes in flight against latency x bandwidth);
  chain      a head's dependent arithmetic / resident CTAs;
  issue      the issue time of a head's warps and its part of the CTA's own work.
They are joined by a p-norm. To that come the wave count with its tail and a fixed launch-and-latency term.

The constants are fitted to 20 timings of the design's feasibility study on one H200 (128 heads, T = 4, W = 16; one head
and one stage, four heads and two stages; f32 and bf16 state; batch 1, 16, 64, 256): root mean square error 4.8%,
largest 11%. Two configs cannot tell a model everything, and no other GPU has been fitted: for the others only the
target's own facts change. PDL is not modelled. So its answers are estimates: good for choosing what to compile first
and for a start on a GPU that nobody has measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from replayssm_cute import dtypes
from replayssm_cute.config import SHARED_RESERVED, TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

from .acceptance import Mix

LAUNCH_US = 2.58  # empty graph node, slot look-up, first bytes, drain
ROUND_TRIP_US = 0.50  # a state load's way in idle memory
HEAD_US = 0.45  # dependent arithmetic of one head, once its state is there
HEAD_ISSUE_US = 0.125  # issue time of one head of 4 warps on a multiprocessor
CTA_ISSUE_US = 0.16  # issue time of a CTA's own work: start, B·C products, loads
NORM = 1.62  # how softly the limits join
WRITE_FACTOR = 1.3  # a written byte costs this many read ones (read-write turnaround; from the floor kernel)
SM_PEAK_GBS = 80.0  # what one multiprocessor alone can draw
LOCAL_GBS = 110.0  # spills of one multiprocessor, through its L1
RING_TRIP_US = 0.5  # what reading the whole ring saves: a trip to memory in a row (assumed, not fitted)
MAX_CTAS_PER_SM = 32
_WARPS_OF_FIT = 4
_REGISTER_UNIT = 256  # registers are given to warps in pieces of this many


class HasResources(Protocol):
    """What the model needs to know about a compiled kernel."""

    @property
    def registers(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def stack_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Guess:
    """Resources assumed before compilation: usual registers, the config's own shared memory, no spills."""

    registers: int
    shared_bytes: int
    stack_bytes: int = 0


def guess(problem: Problem, config: TileConfig, registers_per_sm: int = 65536) -> Guess:
    """Resources of a kernel that has not been compiled: registers as most compiled ones have them, or the cap."""
    usual = 120 if config.heads_per_cta == 1 else 155
    threads = config.ctas_per_sm * config.warps(problem) * 32
    cap = registers_per_sm // threads // 8 * 8 if config.ctas_per_sm > 1 else usual
    return Guess(min(usual, cap), config.shared_bytes(problem))


@dataclass(frozen=True, slots=True)
class Traffic:
    """The fewest bytes one call must move."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def traffic(problem: Problem, batch: int, *, flush: float, mean_live: float) -> Traffic:
    """Bytes of one call: state, live ring rows and new tokens read; flushed states, appended rows and output written.

    Args:
        flush: share of rows that flush.
        mean_live: mean live rows (pnat).
    """
    p, io = problem, dtypes.BYTES[problem.io_dtype]
    state = p.heads * p.head_dim * p.d_state * p.state_bytes
    values = p.heads * p.head_dim * io
    ring_row = values + p.groups * p.d_state * io + p.heads * 4
    new_token = values * (2 if p.has_z else 1) + 2 * p.groups * p.d_state * io + p.heads * dtypes.BYTES[p.dt_dtype]
    read = batch * (state + mean_live * ring_row + p.tokens * new_token)
    written = batch * (flush * state + p.tokens * (ring_row + values))
    return Traffic(round(read), round(written))


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the model says of one (problem, batch, config) on one target.

    Attributes:
        time_us: of one call.
        bytes: that it must move.
        gbs: bytes over time, in GB/s.
        ctas_per_sm: resident CTAs a multiprocessor has room for.
        occupancy_limit: "shared memory", "registers", "threads" or "blocks".
        in_flight: bytes of state in flight per multiprocessor.
        needed_in_flight: latency x bandwidth per multiprocessor, that Little's law asks for.
        waves: CTAs per multiprocessor over resident ones.
        bound: the largest of the limits: "bandwidth", "latency", "chain" or "issue".
    """

    time_us: float
    bytes: int
    gbs: float
    ctas_per_sm: int
    occupancy_limit: str
    in_flight: int
    needed_in_flight: int
    waves: float
    bound: str


def occupancy(problem: Problem, config: TileConfig, target: Target, resources: HasResources) -> tuple[int, str]:
    """Resident CTAs per multiprocessor (0 if not even one fits), and what limits them."""
    warps = config.warps(problem)
    per_warp = -(-max(resources.registers, 1) * 32 // _REGISTER_UNIT) * _REGISTER_UNIT
    limits = {
        "shared memory": target.shared_per_sm // (resources.shared_bytes + SHARED_RESERVED),
        "registers": target.registers_per_sm // (per_warp * warps),
        "threads": target.threads_per_sm // (32 * warps),
        "blocks": MAX_CTAS_PER_SM,
    }
    name = min(limits, key=lambda n: limits[n])
    return limits[name], name


def estimate(
    problem: Problem, config: TileConfig, target: Target, batch: int, mix: Mix, resources: HasResources
) -> Estimate:
    """The time of one call, after the module's model.

    Raises:
        ValueError: if not even one CTA fits a multiprocessor, or the target has no read limit.
    """
    if target.read_gbs <= 0:
        raise ValueError(f"target {target.name}: no read limit (read_gbs) to model with")
    resident, limit = occupancy(problem, config, target, resources)
    if resident < 1:
        raise ValueError(f"{config.label()}: no CTA fits a multiprocessor of {target.name}: {limit}")
    moved = traffic(problem, batch, flush=mix.flush, mean_live=mix.mean_live)
    warps = config.warps(problem)
    ctas = config.ctas(problem, batch)
    per_sm = -(-ctas // target.sms)
    busy = min(resident, per_sm)
    n = busy * min(config.stages, config.heads_per_cta)
    read, launch_us = moved.read, LAUNCH_US
    if config.ring == "whole":  # all R rows are read, and nothing waits for the cursors
        everything = traffic(problem, batch, flush=mix.flush, mean_live=problem.ring_rows)
        read, launch_us = everything.read, LAUNCH_US - RING_TRIP_US
    # 1 GB/s is 1e3 bytes per microsecond
    share = 1e3 * min(target.read_gbs / min(target.sms, ctas), SM_PEAK_GBS)
    pieces = batch * problem.heads * config.head_split  # heads, or parts of them where they are split
    s = (read + WRITE_FACTOR * moved.written) / pieces / share
    spill = 2 * resources.stack_bytes * 32 * warps / (LOCAL_GBS * 1e3)
    issue = HEAD_ISSUE_US * warps / _WARPS_OF_FIT + CTA_ISSUE_US / config.heads_per_cta + spill
    limits = {
        "bandwidth": s,
        "latency": (s + ROUND_TRIP_US) / n,
        "chain": HEAD_US / busy,
        "issue": issue,
    }
    per_head = sum(v**NORM for v in limits.values()) ** (1 / NORM)
    # In one wave the fullest multiprocessor decides; over several, CTAs move to wherever one ends, and half of one
    # is the mean wait at the end: of a single head where the grid has a tail.
    last = 1 if config.tail_rows else config.heads_per_cta
    depth = per_sm * config.heads_per_cta if per_sm <= resident else pieces / target.sms + 0.5 * last
    time_us = launch_us + depth * per_head
    state_chunk = problem.head_dim // config.head_split * problem.d_state * problem.state_bytes
    return Estimate(
        time_us=time_us,
        bytes=moved.total,
        gbs=moved.total / time_us / 1e3,
        ctas_per_sm=resident,
        occupancy_limit=limit,
        in_flight=n * state_chunk,
        needed_in_flight=round(ROUND_TRIP_US * target.read_gbs / target.sms * 1e3),
        waves=per_sm / resident,
        bound=max(limits, key=lambda k: limits[k]),
    )
