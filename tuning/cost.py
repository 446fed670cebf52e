"""A cost model: what one call moves, and how long a config should need for it.

The model sees each multiprocessor as a closed system. Its resident CTAs take their pieces (heads, or the parts of them
that `head_split` makes) one after the other. The time per piece can be below none of four limits:
  bandwidth  S, a piece's bytes at the multiprocessor's share of the read limit;
  latency    (S + a refill's round trip + dependent work) / pieces in flight (Little's law);
  chain      a piece's dependent work and its part of a CTA's start / resident CTAs;
  issue      the issue time of a piece's warps, of spills and B read again, and of its part of a CTA's start.
They are joined by a p-norm. A start waits for cursors, ring and B·C, behind first states: its CTA's own, and where
there are more stages than one, the other CTAs' too. Fewer registers than the kernel wants lengthen chain and issue:
loads can no longer be asked for ahead. Work grows with the ring rows that a piece contracts over and a flush folds in;
where B is not kept for flushes, they wait for a trip to L2. To the pieces' time come the starts of the first waves,
while CTAs still go in step and nothing hides them; slots that get more pieces than others; the flush that the last CTAs
may still have to do; and a fixed launch term.

The constants (`Constants`) are fitted to timings by `fit.py` and kept in `data/`, with what they were fitted to and how
well they fit, also to a batch size that the fit has not seen. No GPU but that one has been fitted: for the others only
the target's own facts change. PDL is not modelled. So its answers are estimates: good for choosing what to compile
first and for a start on a GPU that nobody has measured.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from replayssm_cute import dtypes
from replayssm_cute.config import P_TILE, SHARED_RESERVED, SKIPPED, TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

from .acceptance import Mix

DATA = Path(__file__).resolve().parent / "data" / "cost_h200.json"
ROUND_TRIP_US = 0.5  # a state load's way in idle memory (not fitted)
SM_PEAK_GBS = 80.0  # what one multiprocessor alone can draw (from the floor kernel, not fitted)
LOCAL_GBS = 110.0  # spills of one multiprocessor, and B that flushes read again, through its L1 (not fitted)
MAX_CTAS_PER_SM = 32
_WARPS = 4  # that `piece_issue_us` is for
_PARTITIONS = 4  # of a multiprocessor: each has a part of the registers and every fourth warp
_USUAL_SPILLS = 56  # stack bytes of kernels capped well below the registers they want: 8 to 96
_REGISTER_UNIT = 256  # registers are given to warps in pieces of this many


@dataclass(frozen=True, slots=True)
class Constants:
    """What is fitted.

    Attributes:
        launch_us: launch and drain of an empty kernel.
        start_us: a CTA's dependent work before its first piece: cursors, ring, B·C.
        products_us: its part that fewer warps do slower, at four warps.
        trip_us: one more round of decay vectors, where a CTA has more heads than warps.
        queue: share of the time of the first states that a start waits behind them.
        several_us: what a start takes longer in kernels of several heads a CTA: the next head's inputs.
        piece_us: dependent work of one piece, once its state is there.
        piece_issue_us: issue time of one piece of four warps.
        start_issue_us: issue time of a CTA's start.
        row_work: work of 16 ring rows beyond the first 16 over that of a piece with these.
        flush_work: work of a flush of 16 ring rows over that of a piece without.
        reload_us: a flush's trip to L2 for B, where it is not kept in shared memory.
        short_chain: how much longer the chain would be with no registers, in parts of itself.
        short_issue: the same of the issue time.
        write_factor: read bytes that a written one costs (read-write turnaround).
        ring_trip_us: what reading the whole ring saves a CTA's start: a trip to memory in a row.
        wave: share of the pieces that the fullest slot has more which is lost: meanwhile the others' bandwidth is free.
        in_step: share of a wave's starts that nothing hides, over that of the wave before.
        last: of the time that the last pieces' flushes take on their own.
        norm: how softly the limits join.
    """

    launch_us: float
    start_us: float
    products_us: float
    trip_us: float
    queue: float
    several_us: float
    piece_us: float
    piece_issue_us: float
    start_issue_us: float
    row_work: float
    flush_work: float
    reload_us: float
    short_chain: float
    short_issue: float
    write_factor: float
    ring_trip_us: float
    wave: float
    in_step: float
    last: float
    norm: float


@functools.cache
def fitted() -> Constants:
    """The constants of the data file."""
    found = json.loads(DATA.read_text(encoding="utf-8"))["constants"]
    return Constants(**{f.name: float(found[f.name]) for f in fields(Constants)})


def version() -> str:
    """A short hash of the data file: which cost model an estimate comes from."""
    return hashlib.sha256(DATA.read_bytes()).hexdigest()[:8]


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
    """Resources assumed before compilation: usual registers and spills, the config's own shared memory."""

    registers: int
    shared_bytes: int
    stack_bytes: int = 0


def usual_registers(problem: Problem, config: TileConfig) -> int:
    """Registers that compiled kernels take where nothing caps them.

    Read from 590 kernels for sm_90a, of which six in seven are within 15% of it.
    """
    if problem.ragged and problem.read_bytes == 4:  # 111 for 95, 150 for 128; of 2-byte states about as many
        return round(1.17 * usual_registers(dataclasses.replace(problem, ragged=False), config))
    tiles, whole = config.tiles_per_warp, config.ring == "whole"
    if tiles > 2:
        return 200
    if config.turns == 1:
        return 124 if tiles == 2 else 112 if whole else 96
    if tiles == 2:
        return 154
    if problem.d_state > 128:
        return 104
    narrow = 138 if problem.state_dtype == "f16" else 112 if problem.state_dtype == "bf16" else 0
    if whole:
        return 156
    return narrow or (126 if config.head_split == 1 else 150)


def guess(problem: Problem, config: TileConfig, registers_per_sm: int = 65536) -> Guess:
    """Resources of a kernel that has not been compiled: as most compiled ones have them."""
    usual = cap = usual_registers(problem, config)
    if config.ctas_per_sm > 1:
        warps = -(-config.ctas_per_sm * config.warps(problem) // _PARTITIONS)
        cap = registers_per_sm // _PARTITIONS // warps // _REGISTER_UNIT * _REGISTER_UNIT // 32
    return Guess(min(usual, cap), config.shared_bytes(problem), _USUAL_SPILLS if cap < 0.7 * usual else 0)


@dataclass(frozen=True, slots=True)
class Traffic:
    """The fewest bytes one call must move."""

    read: int
    written: int

    @property
    def total(self) -> int:
        return self.read + self.written


def traffic(
    problem: Problem, batch: int, *, flush: float, mean_live: float, mean_tokens: float | None = None
) -> Traffic:
    """Bytes of one call: state, live ring rows and new tokens read; flushed states, appended rows and output written.

    Args:
        flush: share of rows that flush.
        mean_live: mean live rows (pnat).
        mean_tokens: mean new tokens of a row; None for T.
    """
    tokens = problem.tokens if mean_tokens is None else mean_tokens
    p, io = problem, dtypes.BYTES[problem.io_dtype]
    state, flush_read, flush_written = p.state_traffic()
    values = p.heads * p.head_dim * io
    ring_row = values + p.groups * p.d_state * io + p.heads * 4
    new_token = values * (2 if p.has_z else 1) + 2 * p.groups * p.d_state * io + p.heads * dtypes.BYTES[p.dt_dtype]
    read = batch * (state + flush * flush_read + mean_live * ring_row + tokens * new_token)
    written = batch * (flush * flush_written + tokens * (ring_row + values))
    return Traffic(round(read), round(written))


def of_mix(problem: Problem, batch: int, mix: Mix) -> Traffic:
    """The fewest bytes of one call whose rows are those of a mix."""
    return traffic(problem, batch, flush=mix.flush, mean_live=mix.mean_live, mean_tokens=mix.mean_tokens)


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
        "registers": target.registers_per_sm // _PARTITIONS // per_warp * _PARTITIONS // warps,
        "threads": target.threads_per_sm // (32 * warps),
        "blocks": MAX_CTAS_PER_SM,
    }
    name = min(limits, key=lambda n: limits[n])
    return limits[name], name


@dataclass(frozen=True, slots=True)
class Load:
    """What the constants act on: one call as one multiprocessor sees it.

    Attributes:
        busy: CTAs at work at once.
        stages: pieces of a CTA whose states are in flight or being read.
        read_us, written_us: bytes of a piece at the multiprocessor's share of the read limit.
        spill_us: of a piece.
        flush_us: of a piece's flush, if its multiprocessor writes alone.
        warps: of a CTA.
        flush: share of rows that flush.
        sixteens, flushed_sixteens: ring rows that a piece works on (at least 1), and one that flushes, by 16.
        reloads: whether flushes read B from L2.
        reload_us: of B's way into a piece's warps, if all of them did.
        starts, rounds: starts of CTAs, and of those of several heads, per piece.
        trips: further rounds of decay vectors of the latter.
        several: whether the kernel is one of several heads a CTA.
        longest: pieces of the largest CTAs, which start first.
        one_wave: whether all CTAs are resident at once.
        shortage: registers that the kernel lacks, in parts of those it wants.
        whole: whether the whole ring is read.
        fair: pieces of a slot (place of a resident CTA) if all took the same.
        uneven: pieces that the fullest slot has more.
        last: pieces of the largest CTAs that flush, where the batch has a row that does.
        waves: of the largest CTAs.
    """

    busy: int
    stages: float
    read_us: float
    written_us: float
    spill_us: float
    flush_us: float
    warps: int
    flush: float
    sixteens: float
    flushed_sixteens: float
    reloads: bool
    reload_us: float
    starts: float
    rounds: float
    trips: int
    several: bool
    longest: int
    one_wave: bool
    shortage: float
    whole: bool
    fair: float
    uneven: float
    last: float
    waves: int


def load(problem: Problem, config: TileConfig, target: Target, batch: int, mix: Mix, resources: HasResources) -> Load:
    """One call as one multiprocessor sees it.

    Raises:
        ValueError: if not even one CTA fits a multiprocessor, or the target has no read limit.
    """
    if target.read_gbs <= 0:
        raise ValueError(f"target {target.name}: no read limit (read_gbs) to model with")
    resident, limit = occupancy(problem, config, target, resources)
    if resident < 1:
        raise ValueError(f"{config.label()}: no CTA fits a multiprocessor of {target.name}: {limit}")
    live = problem.ring_rows if config.ring == "whole" else mix.mean_live
    moved = traffic(problem, batch, flush=mix.flush, mean_live=live, mean_tokens=mix.mean_tokens)
    warps, heads = config.warps(problem), config.turns
    pieces = batch * problem.heads // config.parallel_heads * config.head_split
    ctas = config.ctas(problem, batch)
    large = (batch - min(batch, config.tail_rows)) * config.ctas_per_row(problem)
    busy = min(resident, -(-ctas // target.sms))
    slots = busy * target.sms
    one_wave = ctas <= slots
    longest = heads if large else 1
    if one_wave:  # the largest CTA decides, and nothing evens out
        starts, rounds, fair, uneven = 1 / longest, 1 / longest, float(longest), 0.0
    else:
        starts, rounds, fair = ctas / pieces, large / pieces, pieces / slots
        uneven = fullest(slots, large, heads, ctas - large) - fair
    state_bytes = problem.head_dim * problem.d_state * problem.state_bytes
    b_bytes = 0 if config.keep_b else problem.window * problem.d_state * dtypes.BYTES[problem.io_dtype]
    positions = config.ring_positions(problem)
    # skipped ones aside, 16 at a time; of the last 16 of live rows, as often few as many, half are in vain
    worked_on = min(positions, mix.mean_live + SKIPPED / 2) if config.skips(problem) else positions
    # 1 GB/s is 1e3 bytes per microsecond
    share = 1e3 * min(target.read_gbs / min(target.sms, ctas), SM_PEAK_GBS)
    wanted = (
        max(usual_registers(problem, config), resources.registers) if config.ctas_per_sm > 1 else resources.registers
    )
    return Load(
        busy=busy,
        stages=min(config.stages, 1 / starts),
        read_us=moved.read / pieces / share,
        written_us=moved.written / pieces / share,
        spill_us=2 * resources.stack_bytes * 32 * warps / (LOCAL_GBS * 1e3),
        flush_us=state_bytes / config.head_split * config.parallel_heads / (SM_PEAK_GBS * 1e3),
        warps=warps,
        flush=mix.flush,
        sixteens=max(1.0, worked_on / 16),
        flushed_sixteens=positions / 16,
        reloads=not config.keep_b,
        reload_us=b_bytes * warps / (LOCAL_GBS * 1e3),
        starts=starts,
        trips=-(-longest // warps) - 1,
        rounds=rounds,
        several=heads > 1,
        longest=longest,
        one_wave=one_wave,
        shortage=1 - resources.registers / wanted,
        whole=config.ring == "whole",
        fair=fair,
        uneven=uneven,
        last=longest * min(1.0, batch * mix.flush),
        waves=-(-(large or ctas) // slots),
    )


def fullest(slots: int, large: int, heads: int, small: int) -> int:
    """Pieces of the slot that ends last: `large` CTAs of `heads` pieces, then `small` ones, each to the emptiest."""
    full, odd = divmod(large, slots)
    if odd:
        room = (slots - odd) * heads
        if small <= room:
            return (full + 1) * heads
        full, small = full + 1, small - room
    return full * heads - (-small // slots)


def _start_us(x: Load, k: Constants) -> tuple[float, float]:
    """Dependent work of a CTA's start, and of its further rounds."""
    s = x.read_us + k.write_factor * x.written_us
    first = k.start_us + k.products_us * _WARPS / x.warps - k.ring_trip_us * x.whole
    first += k.several_us * x.several + k.queue * (1 + (x.stages - 1) * x.busy) * s
    short = 1 + k.short_chain * x.shortage
    return first * short, x.trips * k.trip_us * short


def _work(x: Load, k: Constants) -> float:
    """Work of a piece, in those of one that has 16 ring rows and does not flush."""
    return 1 + k.row_work * (x.sixteens - 1) + k.flush_work * x.flush * x.flushed_sixteens


def limits(x: Load, k: Constants) -> dict[str, float]:
    """The least times of a piece, in microseconds. Of numbers, or, to fit many timings at once, of arrays."""
    s = x.read_us + k.write_factor * x.written_us
    work = _work(x, k)
    trip = ROUND_TRIP_US * (1 - x.stages * x.starts)  # the first ones' passes during the start
    first, rounds = _start_us(x, k)
    chain = k.piece_us * work * (1 + k.short_chain * x.shortage) + x.flush * x.reloads * k.reload_us
    chain += (1 - x.one_wave) * (x.starts * first + x.rounds * rounds)
    issue = k.piece_issue_us * work * x.warps / _WARPS + k.start_issue_us * x.starts
    return {
        "bandwidth": s,
        "latency": (s * (1 + x.one_wave * (x.busy - 1)) + trip + k.piece_us * work) / (x.busy * x.stages),
        "chain": chain / x.busy,
        "issue": issue * (1 + k.short_issue * x.shortage) + x.spill_us + x.flush * x.reload_us,
    }


def time_us(x: Load, k: Constants) -> float:
    """The time of one call, after the module's model."""
    per_piece = sum(v**k.norm for v in limits(x, k).values()) ** (1 / k.norm)
    depth = x.fair + k.wave * x.uneven
    end = k.last * x.last * (x.flush_us + k.piece_us + x.reloads * k.reload_us)
    first, rounds = _start_us(x, k)
    exposed = (1 - k.in_step**x.waves) / (1 - k.in_step)
    return k.launch_us + (first + rounds) * exposed + end + depth * x.busy * per_piece


def estimate(
    problem: Problem, config: TileConfig, target: Target, batch: int, mix: Mix, resources: HasResources
) -> Estimate:
    """The time of one call, after the module's model.

    Raises:
        ValueError: if not even one CTA fits a multiprocessor, or the target has no read limit.
    """
    x, k = load(problem, config, target, batch, mix, resources), fitted()
    resident, limit = occupancy(problem, config, target, resources)
    found, least = time_us(x, k), limits(x, k)
    moved = of_mix(problem, batch, mix)
    rows = config.warps(problem) * config.tiles_per_warp * P_TILE
    state_chunk = rows * problem.d_state * problem.read_bytes
    return Estimate(
        time_us=found,
        bytes=moved.total,
        gbs=moved.total / found / 1e3,
        ctas_per_sm=resident,
        occupancy_limit=limit,
        in_flight=round(x.busy * x.stages * state_chunk),
        needed_in_flight=round(ROUND_TRIP_US * target.read_gbs / target.sms * 1e3),
        waves=-(-config.ctas(problem, batch) // target.sms) / resident,
        bound=max(least, key=lambda n: least[n]),
    )
