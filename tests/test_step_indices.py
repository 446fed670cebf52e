"""The step kernel on the host, by its own code: every address and every number of whole steps.

The simulator (tests/simulator) refuses accesses that are out of bounds, not aligned, out of order or, for ldmatrix, in
conflict. Here the results are held to the float64 recurrence, and every element must be touched as often as it should.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from simulated_cases import BASE, CASES, RAGGED, cursors, every_pnat_call, example_call, ragged_call
from simulator.launch import Cta, Run
from simulator.source import KERNELS, Source

from replayssm_cute import compare, ring
from replayssm_cute.calls import Call
from replayssm_cute.config import SKIPPED, TileConfig
from replayssm_cute.problem import Problem

StepKernel = KERNELS.module("step").StepKernel
# Functions that go through the banks twice, once per CTA, and B of long flushes of 2-byte states, by half pieces;
# everything else does so once.
TWO_WAYS = {"readout_c.piece", "tokens.append_x", "products.partial_sums", "products.dot", "ring_b.put", "ring_b.get"}


class Rows:
    """What each row of a call should do: its slot (None: padding), live and new ring rows, whether it flushes."""

    def __init__(self, problem: Problem, call: Call, padding: int | None) -> None:
        slots = call.state_batch_indices
        self.slots: list[int | None] = list(range(len(call.x))) if slots is None else slots.tolist()
        if padding is not None:
            self.slots[padding] = None
        self.live, self.new, self.flushes = {}, {}, set()
        R = problem.ring_rows
        for row, slot in enumerate(self.slots):
            if slot is not None:
                start, pnat = int(call.ring_start[slot]), int(call.prev_num_accepted_tokens[slot])
                self.live[row] = [(start + j) % R for j in range(pnat)]
                self.new[row] = [(start + pnat + t) % R for t in range(problem.tokens)]
                if ring.flushes(pnat, problem.tokens, problem.window):
                    self.flushes.add(row)


def filled(shape: tuple[int, ...], *entries: tuple[Any, Any]) -> np.ndarray:
    """Zeros, with 1 at the (slot, ring rows) pairs."""
    found = np.zeros(shape, int)
    for slot, rows in entries:
        found[slot, :, rows] = 1
    return found


def check_global(run: Run, rows: Rows) -> None:
    """Every element of every tensor is read and written as often as it should be."""
    p, whole = run.problem, run.config.ring == "whole"
    read = {name: t.counts("read") for name, t in run.tensors.items()}
    written = {name: t.counts("written") for name, t in run.tensors.items()}
    named = [(row, slot) for row, slot in enumerate(rows.slots) if slot is not None]
    assert (written["out"] == 1).all() and not read["out"].any()
    state = np.zeros(read["state"].shape, int)
    state[[slot for _, slot in named]] = 1
    assert (read["state"] == state).all(), "state: elements left out, or read twice"
    state[[slot for row, slot in named if row not in rows.flushes]] = 0
    assert (written["state"] == state).all(), "state: elements left out, or written twice"
    for name in ("x_cache", "B_cache", "dt_cache"):
        shape = read[name].shape
        appended = filled(shape, *((slot, rows.new[row]) for row, slot in named))
        assert (written[name] == appended).all(), name
        live = filled(shape, *((slot, rows.live[row]) for row, slot in named))
        every = filled(shape, *((slot, range(p.ring_rows)) for _, slot in named))
        if name == "x_cache":
            assert (read[name] == (every if whole else live)).all(), name
        else:  # without live rows the oldest one's place is read instead, for a valid address
            instead = [(slot, [rows.new[row][0]]) for row, slot in named if not rows.live[row]]
            assert ((read[name] > 0) >= live).all(), f"{name}: live rows are left out"
            assert ((read[name] > 0) <= (every if whole else live + filled(shape, *instead))).all(), name
    on = [row for row, _ in named]
    assert (read["x"][on] == (2 if run.config.turns == 1 else 1)).all(), "appended from registers or shared memory"
    assert not p.has_z or (read["z"][on] == 1).all()
    assert all((read[name][on] > 0).all() for name in ("B", "C", "dt"))
    for name in set(written) - {"out", "state", "x_cache", "B_cache", "dt_cache"}:
        assert not written[name].any(), f"{name} is written"


def check_shared(run: Run, cta: Cta, rows: Rows) -> None:
    """Every word of shared memory is written and read as often as it should be."""
    spec, config, p = run.kernel.spec, run.config, run.problem
    at, shared = spec.shared, cta.shared
    row, _, _, count = run.kernel.grid.place(cta.block, len(rows.slots))
    if rows.slots[row] is None:
        return
    turns = count // config.parallel_heads

    def uses(stages: int) -> np.ndarray:
        """Turns that each of some stages serves."""
        return np.array([len(range(stage, turns, stages)) for stage in range(stages)])

    def region(name: str, *shape: int, counts: np.ndarray = shared.written) -> np.ndarray:
        return counts[shared.span(name)][: int(np.prod(shape))].reshape(shape)

    state = (config.stages, at.stage_bytes // 4)
    served = uses(config.stages)[:, None]
    flushed = served * (row in rows.flushes)
    assert (region("state", *state) == served + flushed).all()
    assert (region("state", *state, counts=shared.read_matrices) == served).all()
    assert (region("state", *state, counts=shared.read_words) == flushed).all()

    tile_words = at.input_tile_bytes // 4
    inputs = region("inputs", config.heads_per_cta, spec.head_warps, spec.tiles, tile_words // 8, 8)
    # of long windows, positions from the 17th on are worked on where a row of the same 16 is live
    live_count = len(rows.live[row])
    idle = np.arange(spec.ring_positions) >= max(SKIPPED, -(-live_count // SKIPPED) * SKIPPED)
    idle &= spec.skips
    once = np.zeros(tile_words // 8, int)
    once[: spec.ring_positions + p.tokens * (2 if p.has_z else 1)] = 1
    once[: spec.ring_positions][idle] = 0
    if spec.whole:  # zeros over what the cursors do not count
        live = {*rows.live[row]}
        once[[position for position in range(spec.ring_positions) if position not in live]] += 1
    assert (inputs[:count] == once[:, None]).all() and not inputs[count:].any()

    c = region("c", p.tokens, at.c_stride // 4)
    assert (c[:, : p.d_state // 2] == 1).all() and not c[:, p.d_state // 2 :].any()
    products = region("products", at.slices, 8 * spec.steps, at.product_stride)
    worked = np.ones(8 * spec.steps, int)
    worked[: spec.ring_positions][idle] = 0
    assert (products[..., : spec.tokens_pad] == worked[:, None]).all() and not products[..., spec.tokens_pad :].any()
    if config.keep_b:
        kept = region("b", spec.ring_positions, at.b_stride // 4)
        wanted = spec.skips or row in rows.flushes  # of short windows only for a flush
        assert (kept[:, : p.d_state // 2] == wanted * ~idle[:, None]).all(), "B of the ring"
        assert not kept[:, p.d_state // 2 :].any()
    if config.turns > 1:
        weights = region("weights", config.heads_per_cta, p.tokens, at.weight_stride)
        assert (weights[:count, :, : 8 * spec.steps] == worked).all()
        assert weights.sum() == count * p.tokens * worked.sum()
    vectors = region("vectors", config.heads_per_cta, at.vector_floats)
    used = spec.ring_positions + 4 * spec.tokens_pad + 2
    assert (vectors[:count, :used] == 1).all() and vectors.sum() == count * used


@pytest.mark.parametrize("name", CASES)
def test_a_whole_step(name: str) -> None:
    """Numbers within the bounds that the GPU's are held to, and every element touched as often as it should be."""
    problem, config = CASES[name]
    call, padding = example_call(problem)
    before = call.clone()
    run = Run(problem, config, call)
    rows = Rows(problem, before, padding)
    errors = compare.errors(before, call)
    assert compare.bounds(problem).violation(errors) is None, errors
    check_global(run, rows)
    for cta in run.ctas:
        check_shared(run, cta, rows)
    assert len(run.ctas) == config.ctas(problem, len(rows.slots))
    assert {where: ways for where, ways in run.conflicts.items() if ways > (2 if where in TWO_WAYS else 1)} == {}
    assert run.unfinished == [], "a CTA ended while copies were on their way"


@pytest.mark.parametrize("config", [TileConfig(tiles_per_warp=2), TileConfig(2, ring="whole")], ids=TileConfig.label)
def test_every_number_of_live_rows(config: TileConfig) -> None:
    """From none to a full window, from starts all over the ring; numbers and counts as above."""
    problem = dataclasses.replace(BASE, groups=1, tokens=5)
    call = every_pnat_call(problem)
    before = call.clone()
    run = Run(problem, config, call)
    violation = compare.bounds(problem).violation(compare.errors(before, call))
    assert violation is None, violation
    check_global(run, Rows(problem, before, None))


# One slip each: (module, its text, what it becomes, what is said about it). The simulator must not let it pass.
CONFLICT = "bank conflict in ldmatrix"
SLIPS = {
    "x rows without the swap": ("tokens", "(half ^ remainder(quotient(row, 4), 2))", "half", CONFLICT),
    "a state row's wrong chunk": ("state_tile", "((side ^ remainder(row, 8)) * 16)", "(side * 16)", CONFLICT),
    "one live row too many": ("spec", "return position < row.pnat", "return position <= row.pnat", "error inf"),
    "dead rows copied": ("tokens", "exists = position < row.pnat", "exists = position <= row.pnat", "x_cache"),
    "no wait for x": ("tokens", "        cute.arch.cp_async_wait_group(0)\n", "", "a copy to it is on its way"),
    "flushed rows stored without a fence": (
        "state_copies",
        '        cute.arch.fence_proxy("async.shared", space="cta")\n',
        "",
        "stored without a fence",
    ),
    "a stage filled while it is stored": (
        "step",
        "                    self.copies.drain()\n",
        "",
        "while a store may still read it",
    ),
    "an end before what is stored was read": (
        "step",
        "            self.copies.drain()  # shared",
        "            pass  # shared",
        "ended while its stores",
    ),
    "a total decay of the wrong lane": ("decay", "(inclusive, SEGMENT - 1)", "(inclusive, SEGMENT)", "error"),
    "another stage stored": ("state_copies", "stage], boxes.to_g", "1 - stage], boxes.to_g", "error|on its"),
    "outputs of a neighbour": ("tokens", "side + g - odd", "side + g", "promised to be a multiple of 2"),
    "a row beyond the ring": ("spec", "index >= rows", "index > rows", "shape"),
    "B appended by every split": ("phases", "& (share.rows.split == 0)", "& (share.rows.split >= 0)", "B_cache"),
    "no wait for B of the ring": (
        "phases",
        "            cute.arch.cp_async_wait_group(1)  # x may still be on its way\n",
        "            pass\n",
        "a copy to it is on its way",
    ),
    "B of the ring in x's group": (
        "products",
        "            cute.arch.cp_async_commit_group()\n",
        "",
        "a copy to it is on its way",
    ),
}  # fmt: skip
ONE_STAGE = {"a stage filled while it is stored"}
LONG = {"no wait for B of the ring", "B of the ring in x's group"}  # by copies in long windows alone


@pytest.mark.parametrize("slip", SLIPS)
def test_slips_are_seen(slip: str) -> None:
    module, text, wrong, said = SLIPS[slip]
    problem = dataclasses.replace(BASE, heads=4, window=32 if slip in LONG else BASE.window)
    config = TileConfig(heads_per_cta=2, stages=1 if slip in ONE_STAGE else 2, head_split=2)
    call, padding = example_call(problem)
    before = call.clone()
    with pytest.raises(AssertionError, match=said):
        run = Run(problem, config, call, Source((module, text, wrong)))
        check_global(run, Rows(problem, before, padding))
        violation = compare.bounds(problem).violation(compare.errors(before, call))
        assert violation is None, violation


def check_ragged(run: Run, before: Call, after: Call) -> None:
    """Numbers, and what each row touches: its own tokens alone, its own length's share of the ring."""
    violation = compare.bounds(run.problem).violation(compare.errors(before, after))
    assert violation is None, violation
    assert before.state_batch_indices is not None and before.cu_seqlens is not None
    written = {name: run.tensors[name].counts("written") for name in ("out", "state", "x_cache", "B_cache", "dt_cache")}
    assert (written["out"] == 1).all(), "out: a token left out or written twice, the tail among them"
    R = run.problem.ring_rows
    read, state = (np.zeros(len(before.state), int) for _ in range(2))
    appended = np.zeros((len(before.state), R), int)
    for slot, length in zip(before.state_batch_indices.tolist(), before.lengths().tolist(), strict=True):
        if slot != before.pad_slot_id and length:
            start, pnat = int(before.ring_start[slot]), int(before.prev_num_accepted_tokens[slot])
            read[slot], state[slot] = 1, ring.flushes(pnat, length, run.problem.window)
            appended[slot, [(start + pnat + t) % R for t in range(length)]] = 1
    assert (run.tensors["state"].counts("read") == read[:, None, None, None]).all(), "state: of a row without tokens"
    assert (written["state"] == state[:, None, None, None]).all(), "state"
    assert (written["dt_cache"] == appended[:, None]).all(), "dt_cache"
    for name in ("x_cache", "B_cache"):
        assert (written[name] == appended[:, None, :, None]).all(), name
    assert run.unfinished == [], "a CTA ended while copies were on their way"


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_rows(name: str) -> None:
    """The padding row names a slot far outside: the simulator refuses whatever reads it."""
    problem, config = RAGGED[name]
    call = ragged_call(problem)
    before = call.clone()
    check_ragged(Run(problem, config, call), before, call)


RAGGED_SLIPS = {
    "every row as long as the longest": ("spec", "end - first", "self.problem.tokens"),
    "a flush by the longest row": ("phases", "0), row.new.length, ", "0), self.spec.problem.tokens, "),
    "tokens beyond a row appended": (
        "tokens",
        "(token < row.new.length):\n                at =",
        "(token <= row.new.length):\n                at =",
    ),
    "rows of no tokens at work": ("phases", "works & (new.length > 0)", "works & (new.length >= 0)"),
    "a tail from the first token on": ("tokens", "new.used + number", "number"),
    "a tail that ends early": ("tokens", "new.used + number", "new.used + 1 + number"),
}


@pytest.mark.parametrize("slip", RAGGED_SLIPS)
def test_ragged_slips_are_seen(slip: str) -> None:
    problem, config = RAGGED["ragged, two turns, a tail"]
    call = ragged_call(problem)
    before = call.clone()
    with pytest.raises((AssertionError, IndexError)):
        check_ragged(Run(problem, config, call, Source(RAGGED_SLIPS[slip])), before, call)


@pytest.mark.parametrize(("tokens", "window"), [(1, 1), (1, 7), (5, 7), (1, 16), (2, 16), (5, 16), (16, 16)])
def test_liveness_and_rows_for_every_cursor(tokens: int, window: int) -> None:
    """A position is dead or stands for one live row, whatever the cursors, and its address is a row's."""
    problem = dataclasses.replace(BASE, tokens=tokens, window=window)
    for mode in ("live", "whole"):
        spec = StepKernel(problem, TileConfig(ring=mode)).spec
        for start, pnat in itertools.product(range(problem.ring_rows), range(window + 1)):
            row = SimpleNamespace(start=start, pnat=pnat)
            live = [j for j in range(spec.ring_positions) if spec.is_live(row, j)]
            read = [spec.read_row(row, j) for j in live]
            assert sorted(read) == sorted((start + j) % problem.ring_rows for j in range(pnat))
            assert all(0 <= spec.read_row(row, j) < problem.ring_rows for j in range(spec.ring_positions))


@pytest.mark.parametrize("tail", [0, 1, 3, 100])
@pytest.mark.parametrize(
    ("heads", "per_cta", "split", "parallel"), [(8, 1, 1, 1), (8, 4, 1, 1), (8, 2, 4, 1), (14, 7, 2, 1), (8, 4, 2, 2)]
)
def test_every_head_of_every_row_has_its_ctas(heads: int, per_cta: int, split: int, parallel: int, tail: int) -> None:
    problem = dataclasses.replace(BASE, heads=heads, groups=1)
    config = TileConfig(per_cta, head_split=split, tail_rows=tail if per_cta > 1 else 0, parallel_heads=parallel)
    kernel = StepKernel(problem, config)
    for batch in (1, 2, 3, 4, 7, 101):
        size = kernel.grid.size(batch)
        assert size == config.ctas(problem, batch)
        seen = collections.Counter(
            (row, part, head + i)
            for row, part, head, count in (kernel.grid.place(block, batch) for block in range(size))
            for i in range(count)
        )
        assert seen == collections.Counter(itertools.product(range(batch), range(split), range(heads)))


def test_the_cases_reach_every_kind_of_step() -> None:
    """Rings that wrap and that do not, both kinds of step, every field of the config, every pair of dtypes."""
    problems, configs = zip(*CASES.values(), strict=True)
    assert all(len(cursors(p)) == 4 for p in problems)
    for field in dataclasses.fields(TileConfig):
        if field.name not in ("ctas_per_sm", "opt_level"):  # the compiler's
            assert len({getattr(c, field.name) for c in configs}) > 1, field.name
    kinds = itertools.product(("f32", "bf16", "f16"), ("bf16", "f16"))
    assert {(p.state_dtype, p.io_dtype) for p in problems} == set(kinds)
