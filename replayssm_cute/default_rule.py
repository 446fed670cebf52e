"""The tile config that serves where no table answers.

Not part of the kernels' fingerprint: it says which kernel runs, not what a kernel is.
"""

from __future__ import annotations

import itertools

from .config import P_TILE, SHARED_RESERVED, SHORT_WINDOW, SKIPPED, TileConfig, first_tiles
from .problem import Problem
from .target import Target

# Heads a multiprocessor from which states below 4 bytes take two tiles a warp; from which f32 states take two heads a
# CTA and bf16 ones four; from which all narrower ones take several, and f32 ones four.
WIDE, SOME, MANY, MOST = 3, 8, 30, 160
IN_FLIGHT = 80 << 10  # bytes of state that the CTAs of a multiprocessor should have asked for
TIMED = ("sm_90a",)  # where ptxas's level 2 was timed; elsewhere it would be a guess


def usual_tail(problem: Problem, target: Target) -> int:
    """`tail_rows` that give every multiprocessor about eight single heads, two to three waves of small CTAs.

    Measured on one H200, 128 heads, f32, T 4, with an earlier kernel: 8 rows beat 0 and 16 at batch 64 (87.4, 92.3 and
    89.5 us) and 256.
    """
    return max(1, round(8 * target.sms / problem.heads))


def resident(problem: Problem, config: TileConfig, target: Target) -> int:
    """CTAs that a multiprocessor's shared memory holds."""
    return target.shared_per_sm // (config.shared_bytes(problem) + SHARED_RESERVED)


def default_config(problem: Problem, target: Target, batch: int) -> TileConfig:
    """One head a CTA for small batches, several for large ones.

    Measured on one H200, W 16 (heads a multiprocessor in brackets). f32, 128 heads, T 4 and T 1: one head a CTA is best
    up to batch 4 (3.9), two from 16 to 128, four from 256 (248) on; 96 heads of 80, batch 16 and 64, with the kernel
    before: two take 24.5 and 78.8 us, one 27.6 and 88.2. bf16, T 4: two tiles a warp 6.7 us at batch 4, one 7.0; four
    heads in two stages 15.5 at 16 (15.9 at ptxas's level 3), two tiles a warp 16.7 (f16 prefers the tiles); two
    heads of two tiles 47.4 at 64 and 174.7 at 256, four of one tile 49.5 and 178. A head whose state is larger than the
    target's shared memory is split over the fewest CTAs that hold it.

    Raises:
        ValueError: if nothing fits.
    """
    work, tail = batch * problem.heads / target.sms, usual_tail(problem, target)
    narrow, long = problem.read_bytes < 4, problem.window > SHORT_WINDOW
    lower = 2 if target.arch in TIMED else 3
    options: list[TileConfig] = []
    if narrow and work >= MANY and problem.rewrites:
        options = _rewriting(problem, target, tail, lower)
    elif narrow and work >= MANY and not long:
        # Other flushes take more registers than a cap at seven leaves: f16 states 1.25 of the time.
        spare = problem.state_dtype == problem.io_dtype == "bf16" and problem.compact
        caps: tuple[int, ...] = (7, 4, 1) if spare else (1,)
        if problem.window > SKIPPED:  # measured at W 24, bf16, batch 256: 172 us, 178 with four CTAs and a tail
            caps, tail = (1,), 0
        options = [TileConfig(2, tail_rows=tail, tiles_per_warp=2, ctas_per_sm=n) for n in caps]
        options = [c for c in options if c.is_valid(problem, target)]
        options = options or [TileConfig(n, 2, tail_rows=tail) for n in (4, 2)]  # heads of 80 have five tiles
    elif narrow and work >= MANY:
        # A long window's inputs take as much shared memory as 2-byte states. W 32 keeps B: two heads at ptxas's level 2
        # 51.0 us at batch 64 (52.3 at level 3) and 176 at 256, without a tail; W 48 too, 188 at 256. At W 64 B from L2
        # took 223 at 256 (228 at level 3); with the kernel before, B kept took 291 there.
        kept = TileConfig(2, opt_level=lower)
        spared = [
            TileConfig(n, tail_rows=tail, ctas_per_sm=c, keep_b=False, opt_level=lower) for n in (4, 2) for c in (4, 1)
        ]
        # These windows were timed with at least three CTAs a multiprocessor.
        fits = kept.is_valid(problem, target) and resident(problem, kept, target) >= 3
        options = [kept] if problem.window <= 3 * SKIPPED and fits else spared
    elif (
        problem.kinds == "bf16" and not problem.rewrites and work >= SOME
        and problem.window <= SKIPPED and problem.tokens <= 8
    ):  # fmt: skip
        options = [TileConfig(4, 2, opt_level=lower)]
    elif not narrow and work >= SOME:
        # Four CTAs of two heads fit a multiprocessor; ragged rows would take more registers than that, 150 for 128.
        caps = (4, 1) if problem.ragged and problem.window <= SKIPPED else (1,)
        two = [TileConfig(2, tail_rows=tail, ctas_per_sm=n) for n in caps]
        options = [TileConfig(4, tail_rows=tail), *two] if work >= MOST else two
    options = [c for c in options if c.is_valid(problem, target)]
    if options:  # fewer heads a CTA where a long window's x takes the room of CTAs
        state = problem.head_dim * problem.d_state * problem.read_bytes
        return max(options, key=lambda c: min(IN_FLIGHT, state * c.stages * resident(problem, c, target)))
    # B is kept: measured at batch 16, bf16: 21.9 us at W 48 and 23.9 at W 64, 22.7 and 24.3 with B from L2. But at W
    # 24, where it comes through registers, 18.6 us with B from L2, and four heads in two stages 20.1.
    wide = TileConfig(tiles_per_warp=2, keep_b=long or not narrow or problem.window <= SKIPPED)
    enough = work >= (WIDE if narrow else SOME)
    if enough and wide.is_valid(problem, target) and first_tiles(problem, wide) <= wide.warps(problem):
        return wide
    for split, keep_b in itertools.product(range(1, problem.head_dim // P_TILE + 1), (True, False)):
        config = TileConfig(head_split=split, keep_b=keep_b)
        if config.is_valid(problem, target):
            return config
    whole = TileConfig()
    raise ValueError(
        f"config: no tile config of {problem.label()} fits {target.name}: {whole.invalid_reason(problem, target)}"
    )


def _rewriting(problem: Problem, target: Target, tail: int, lower: int) -> list[TileConfig]:
    """The configs for large batches whose flushes rewrite a state; `lower`: ptxas's level where a lower one gains.

    Measured on one H200, 128 heads, T 4, batch 256. bf16 copy: two heads a CTA 259 and 219 us at W 16 and 32; at W 64
    241 for two tiles of one head with B from L2, 236 for two heads of two tiles at ptxas's level 2. fp8 copy: two tiles
    of one head with 128 registers a thread 209 us at W 16; at level 2 two heads of two tiles 192 at W 32 (194 for one
    with B from L2), one with B from L2 207 at W 64 (213 at level 3). 8-bit states: four heads, two stages and 128
    registers 139 us at W 16 (162 without a cap); at level 2 two heads of two tiles 139 and 145 at W 32 (153 for four
    heads in two stages), two heads with 128 registers 203 at W 64 (219 at level 3).
    """
    room, long = problem.window <= 2 * SKIPPED, problem.window > SHORT_WINDOW
    level = lower if problem.scaled and long else 3
    small = problem.philox_rounds is None and problem.head_dim * problem.d_state <= 64 * 128
    wide = TileConfig(2, tail_rows=tail, tiles_per_warp=2, opt_level=lower)
    timed = small and long and (room if problem.scaled else problem.copy_dtype is not None and not room)
    if lower < 3 and timed and wide.is_valid(problem, target):  # elsewhere what was best at level 3
        return [wide]
    if problem.copy_dtype is not None:
        one = [TileConfig(tiles_per_warp=2, ctas_per_sm=n, keep_b=not long, opt_level=level) for n in (8, 7, 1)]
        two = [TileConfig(2, tail_rows=tail)]
        return two if problem.read_bytes == 2 and room else [*one, *two]
    # Stochastic rounding, larger heads and N 256 would spill: no cap for them.
    capped = TileConfig(4, 2, tail_rows=tail, ctas_per_sm=4, opt_level=level)
    if problem.scaled and room and small and capped.is_valid(problem, target):
        return [capped]
    if problem.scaled and not room:
        caps = (4, 1) if small else (1,)
        return [TileConfig(2, tail_rows=tail, ctas_per_sm=n, opt_level=lower if n > 1 else 3) for n in caps]
    return [TileConfig(n, 2 if room else 1, tail_rows=tail, keep_b=room) for n in (4, 2)]


def default_configs(problem: Problem, target: Target) -> list[TileConfig]:
    """Every config that the default rule gives for some batch, for the smallest batches first."""
    starts = (1, *(int(-(-n * target.sms // problem.heads)) for n in (WIDE, SOME, MANY, MOST)))
    return list(dict.fromkeys(default_config(problem, target, max(batch, 1)) for batch in starts))
