"""Self-checks: what they try, what they catch, what serves instead, and how long a verdict lasts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from fakes import GPU, H200, FakeKernel
from pretend_cuda import Pretend
from test_oracle_teeth import CASES, RAGGED_CASES, step

from replayssm_cute import api, compiler, plan, ring, selfcheck, tables, warmup
from replayssm_cute.calls import Call, random_call
from replayssm_cute.config import TileConfig
from replayssm_cute.default_rule import default_configs
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference
from replayssm_cute.sm100 import Sm100Config

fake_compiler = fakes.fake_compiler
cpu_as_gpu = fakes.cpu_as_gpu

PLAIN = TileConfig()
SMALL = dataclasses.replace(fakes.SMALL, heads=8)  # enough a group for all that the default rule knows
WIDE, LARGE = default_configs(SMALL, H200)[1:]
CPU = torch.device("cpu")
Change = Callable[[FakeKernel, tuple[Any, ...]], None]


def run(call: Call, config: TileConfig | None = None) -> torch.Tensor:
    return plan.run(plan.kernel_args(call), call.dt_softplus, False, config, call.max_seqlen)


def break_kernels(monkeypatch: pytest.MonkeyPatch, change: Change, *configs: TileConfig) -> list[TileConfig]:
    """After its step, a kernel of these configs (of all without any) goes wrong; gives the configs that launch."""
    real = FakeKernel.__call__
    launched: list[TileConfig] = []

    def call(self: FakeKernel, *args: Any) -> None:
        launched.append(self.config)
        real(self, *args)
        if not configs or self.config in configs:
            change(self, args)

    monkeypatch.setattr(FakeKernel, "__call__", call)
    return launched


def one_percent(kernel: FakeKernel, args: tuple[Any, ...]) -> None:
    args[11].mul_(1.01)


def crash(kernel: FakeKernel, args: tuple[Any, ...]) -> None:
    raise ValueError("bad descriptor\nand more")


def next_process() -> None:
    """Forget what a process remembers; what is on disk stays."""
    compiler.clear_memory()
    selfcheck._verdicts.clear()
    selfcheck._say.cache_clear()
    plan._touched.clear()
    plan.forget()


def verdicts(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.verdict"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and "self-check" in r.getMessage()]


# ---- what is tried ---------------------------------------------------------------------------------

TAILS = (0, 1, 2, 5, 8, 264)


def live_rows(call: Call) -> list[tuple[int, int, int]]:
    """(row, pnat, ring_start) of the live rows."""
    slots = range(call.batch) if call.state_batch_indices is None else call.state_batch_indices.tolist()
    return [
        (row, int(call.prev_num_accepted_tokens[slot]), int(call.ring_start[slot]))
        for row, slot in enumerate(slots)
        if slot >= 0 and slot != call.pad_slot_id
    ]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    "tokens,window", [(1, 1), (1, 2), (2, 4), (3, 3), (4, 16), (16, 16), (2, 5), (1, 16), (4, 64), (32, 32)]
)
def test_trials_hold_every_pnat_on_both_sides_of_the_tail(tail: int, ragged: bool, tokens: int, window: int) -> None:
    problem = dataclasses.replace(SMALL, tokens=tokens, window=window, ragged=ragged)
    config = TileConfig(heads_per_cta=2, tail_rows=tail)
    trials = list(selfcheck.trials(problem, config))
    main: set[int] = set()
    cut: set[int] = set()
    for call in trials:
        first = call.batch - tail
        assert first >= selfcheck.ROWS
        main |= {pnat for row, pnat, _ in live_rows(call) if row < first}
        cut |= {pnat for row, pnat, _ in live_rows(call) if row >= first}
    assert main == set(range(window + 1))
    assert cut == (set(range(window + 1)) if tail else set())


@pytest.mark.parametrize("problem", [SMALL, dataclasses.replace(SMALL, tokens=4, window=16)], ids=str)
def test_trials_are_adversarial(problem: Problem) -> None:
    R, T, W = problem.ring_rows, problem.tokens, problem.window
    seen: set[str] = set()
    for call in selfcheck.trials(problem, PLAIN):
        assert call.out.isnan().all()
        assert call.state_batch_indices is not None
        slots = call.state_batch_indices.tolist()
        seen |= {f"pad {s}" for s in slots if s < 0 or s == call.pad_slot_id}
        rows = live_rows(call)
        used = {slots[row] for row, _, _ in rows}
        foreign = [s for s in range(call.state.shape[0]) if s not in used]
        assert foreign and call.state[foreign].isnan().all() and call.x_cache[foreign].isnan().all()
        for row, pnat, start in rows:
            flush = "flush" if ring.flushes(pnat, T, W) else "keep"
            wraps = "live" if start + pnat > R else "new" if start + pnat + T > R else "none"
            seen.add(f"{flush} wraps {wraps}")
            dead = [(start + j) % R for j in range(pnat, R)]
            assert call.x_cache[slots[row]][:, dead].isnan().all()
    ways = {f"{flush} wraps {wraps}" for flush in ("flush", "keep") for wraps in ("live", "new", "none")}
    assert seen == ways | {"pad -1", "pad 0", "pad -3"}


@pytest.mark.parametrize("index", ["i32", None])
@pytest.mark.parametrize("tail", [0, 5])
@pytest.mark.parametrize("tokens,window", [(1, 1), (2, 4), (3, 3), (4, 16), (32, 64)])
def test_ragged_trials_tell_a_rows_own_length_from_the_longest(
    tokens: int, window: int, tail: int, index: str | None
) -> None:
    problem = dataclasses.replace(SMALL, tokens=tokens, window=window, ragged=True, index_dtype=index, has_z=True)
    full, seen = 0, set()
    for call in selfcheck.trials(problem, TileConfig(heads_per_cta=2, tail_rows=tail)):
        assert plan.problem_of(call, False) == problem
        api._check_values(call, problem)
        assert call.cu_seqlens is not None and call.z is not None
        begins, lengths, rows = call.cu_seqlens.tolist(), call.lengths().tolist(), live_rows(call)
        tokens_of = (call.x, call.dt, call.B, call.C, call.z)
        used = [i for row, _, _ in rows for i in range(begins[row], begins[row + 1])]
        assert all(t[0, used].isfinite().all() and t[0, begins[-1] :].isnan().all() for t in tokens_of)
        if call.x.shape[1] == begins[-1]:
            assert set(lengths) == {tokens}
            full += 1
            continue
        for row, pnat, _ in rows:
            by_length, by_longest = (ring.flushes(pnat, n, window) for n in (lengths[row], tokens))
            seen.add((by_length, by_longest, lengths[row] == 0))
    assert full >= 3, "dense calls in ragged form"
    wanted = {(False, False, False), (False, True, True), (True, True, False)}
    assert seen >= wanted | ({(False, True, False)} if tokens > 1 else set())


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("tail", [0, 3])
def test_more_work_than_a_gpu_holds_where_ctas_take_over_others(tail: int, ragged: bool) -> None:
    problem = dataclasses.replace(SMALL, heads=64, ragged=ragged)
    config = Sm100Config.of(problem, turns=2, tail_rows=tail, launch_control=True)
    *small, large = selfcheck.trials(problem, config)
    others = list(selfcheck.trials(problem, dataclasses.replace(config, launch_control=False)))
    assert len(small) == len(others) and all(call.batch < 20 for call in small)
    assert config.ctas(problem, large.batch) >= selfcheck.PLACES > 4 * 148
    rows = live_rows(large)
    assert {pnat for _, pnat, _ in rows} == set(range(problem.window + 1))
    padding = set(range(large.batch)) - {row for row, _, _ in rows}
    front = large.batch - tail
    assert all(padding & set(range(first, first + 10)) for first in range(front - 10)), "padding throughout"


def test_trials_of_a_problem_without_indices_and_of_one_that_is_not_compact() -> None:
    calls = list(selfcheck.trials(dataclasses.replace(SMALL, index_dtype=None), TileConfig(2, tail_rows=9)))
    assert {call.pad_slot_id for call in calls} == {-1, 0}
    assert all(call.x.shape[0] >= 9 + selfcheck.ROWS for call in calls)
    ragged = dataclasses.replace(SMALL, compact=False, has_z=True, ragged=True)
    for call in selfcheck.trials(ragged, TileConfig(2, tail_rows=3)):
        assert plan.problem_of(call, False) == ragged and call.x.stride(2) == 2 * 64
    spread = dataclasses.replace(SMALL, compact=False, has_z=True)
    for call in selfcheck.trials(spread, PLAIN):
        assert plan.problem_of(call, False) == spread
        assert call.state.stride(1) == 2 * 64 * 64 and call.x.stride(2) == 2 * 64 and call.dt.stride(3) == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretended addresses must not reach a GPU")
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"compact": False, "has_z": True},
        {"index_dtype": None},
        {"pdl": True},
        {"ragged": True},
        {"ragged": True, "compact": False, "has_z": True},
        {"ragged": True, "index_dtype": None},
        {"state_dtype": "f8e4m3", "philox_rounds": 10},
        {"state_dtype": "i8", "compact": False},
        {"copy_dtype": "f8e4m3", "ragged": True},
        {"state_dtype": "bf16", "philox_rounds": 10},
        {"precision": "highest"},
    ],
    ids=str,
)
def test_real_kernels_take_the_trials(change: dict[str, Any], tmp_path: Path) -> None:
    """What the kernel's own argument checks refuse would look like a crash: they must get as far as the driver."""
    problem, config = dataclasses.replace(SMALL, **change), TileConfig(heads_per_cta=2, tail_rows=9)
    compiler._export(compiler._build(problem, config, "sm_90a"), tmp_path / "step.o")
    kernel = compiler._load(tmp_path / "step.o")
    for call in selfcheck.trials(problem, config):
        args = plan.kernel_args(call.to(CPU))
        with pytest.raises(RuntimeError, match="Cuda"):
            kernel(*[Pretend.like(a).tensor() if isinstance(a, torch.Tensor) else a for a in args])


# ---- what is caught --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault,state,io", [(None, "f32", "bf16"), (None, "bf16", "f16"), *CASES])
def test_every_known_fault_is_caught(fault: str | None, state: str, io: str) -> None:
    problem = Problem(
        heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=6, has_z=True, state_dtype=state, io_dtype=io,
        dt_dtype=io,
    )  # fmt: skip
    verdict, _ = selfcheck._examine(problem, PLAIN, lambda *args: step(plan.as_call(args, True), fault), CPU)
    assert verdict.outcome == ("failed" if fault else "passed"), verdict


@pytest.mark.parametrize("fault,state,io", [(None, "f32", "bf16"), (None, "bf16", "f16"), *RAGGED_CASES])
def test_every_known_fault_of_a_ragged_kernel_is_caught(fault: str | None, state: str, io: str) -> None:
    problem = Problem(
        heads=4, head_dim=64, d_state=64, groups=2, tokens=2, window=6, has_z=True, state_dtype=state, io_dtype=io,
        dt_dtype=io, ragged=True,
    )  # fmt: skip
    verdict, _ = selfcheck._examine(problem, PLAIN, lambda *args: step(plan.call_of(problem, args), fault), CPU)
    assert verdict.outcome == ("failed" if fault else "passed"), verdict


@pytest.mark.parametrize(
    "config", [TileConfig(heads_per_cta=2, tail_rows=1), TileConfig(heads_per_cta=2, tail_rows=7)], ids=str
)
@pytest.mark.parametrize("part", ["main", "tail"])
def test_a_fault_of_one_part_of_the_grid_is_caught(config: TileConfig, part: str) -> None:
    def kernel(*args: Any) -> None:
        call = plan.as_call(args, True)
        checkpointing_ssu_reference(**call.kwargs())
        first = call.x.shape[0] - config.tail_rows
        (call.out[:first] if part == "main" else call.out[first:]).mul_(1.01)

    assert selfcheck._examine(SMALL, config, kernel, CPU)[0].outcome == "failed"


@pytest.mark.parametrize("index", [None, "i32", "i64"])
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("tail", [0, 1, 9])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_right_kernel_passes(index: str | None, compact: bool, tail: int, ragged: bool) -> None:
    problem = dataclasses.replace(SMALL, index_dtype=index, compact=compact, has_z=compact, ragged=ragged)
    config = TileConfig(heads_per_cta=2, tail_rows=tail)

    def kernel(*args: Any) -> None:
        checkpointing_ssu_reference(**plan.call_of(problem, args).kwargs())

    assert selfcheck._examine(problem, config, kernel, CPU) == (selfcheck.Verdict("passed"), False)


def test_the_engines_torch_defaults_do_not_matter(cpu_as_gpu: None) -> None:
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"), torch.inference_mode():
            assert selfcheck.passed(SMALL, PLAIN, -1)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(dtype)


# ---- what serves instead ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change,outcome", [(one_percent, "failed on .*: out error"), (crash, "crashed on .*: ValueError")]
)
def test_a_wrong_kernel_is_left_out_with_one_warning_and_another_serves(
    change: Change, outcome: str, cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched = break_kernels(monkeypatch, change, PLAIN)
    call = random_call(SMALL, 3, padding=[1])
    expected = call.clone()
    checkpointing_ssu_reference(**expected.kwargs())
    run(call)
    assert torch.equal(call.out, expected.out) and torch.equal(call.x_cache.isnan(), expected.x_cache.isnan())
    assert launched[-1] == WIDE
    (made,) = plan._plans.values()
    assert (made.choice.config, made.choice.source) == (WIDE, "fallback")
    assert PLAIN.label() in made.choice.reason
    run(random_call(SMALL, 5))
    warmup([SMALL], [1], device=-1)
    (warning,) = warnings(caplog)
    for part in (SMALL.label(), f"config {PLAIN.label()}, {outcome.partition(' ')[0]}", "NVIDIA H200", "580.1"):
        assert part in warning
    assert "and more" not in warning
    assert re.search(outcome, warning)


def test_warmup_reports_what_serves(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "checkpointing_ssu", lambda **k: k["out"])
    break_kernels(monkeypatch, one_percent, PLAIN)
    coverage = warmup([SMALL], [2], device=-1)
    assert coverage.kernels == [(SMALL, WIDE), (SMALL, LARGE)]
    assert [(c.config, c.source) for c in coverage.covered] == [(WIDE, "fallback")]
    assert coverage.verified == 3
    next_process()
    assert warmup([SMALL], [2], device=-1).verified == 0


def test_explain_knows_what_this_process_left_out(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert api.explain(problem=SMALL, batch=2).config == PLAIN
    break_kernels(monkeypatch, one_percent, PLAIN)
    run(random_call(SMALL, 2))
    explained = api.explain(problem=SMALL, batch=2)
    assert (explained.config, explained.source) == (WIDE, "fallback")
    assert f"config {PLAIN.label()} (default) failed its self-check" in str(explained)
    assert api.explain(problem=SMALL, batch=2, target="h200").config == PLAIN  # of an H200, not of this one


def test_substitutes_are_tried_in_order_until_one_passes(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    order = selfcheck.substitutes(SMALL, 2, H200)
    assert order[:3] == [PLAIN, WIDE, LARGE] and order[3] == TileConfig(head_split=2)
    assert TileConfig(ring="whole") in order and all(c.is_valid(SMALL, H200) for c in order)
    assert selfcheck.substitutes(SMALL, 1 << 20, H200)[:3] == [LARGE, PLAIN, WIDE]
    break_kernels(monkeypatch, one_percent, *order[:3])
    run(random_call(SMALL, 2))
    (made,) = plan._plans.values()
    assert made.choice.config == order[3]
    assert {c for _, c, _ in selfcheck._verdicts} == set(order[:4]), "configs were checked that nobody needed"


def test_if_all_fail_the_call_raises_and_touches_nothing(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernels(monkeypatch, one_percent)
    call = random_call(SMALL, 2)
    before = call.clone()
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            run(call)
        for part in (SMALL.label(), "NVIDIA H200", f"config {PLAIN.label()} failed: out error", WIDE.label(), "CPU"):
            assert part in str(caught.value)
    assert torch.equal(call.state.isnan(), before.state.isnan()) and call.out.isnan().all()
    assert not plan._plans and not plan._touched


def test_a_forced_config_that_fails_is_not_replaced(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    forced = TileConfig(head_split=2)
    break_kernels(monkeypatch, one_percent, forced)
    with pytest.raises(RuntimeError, match=rf"config {forced.label()} failed: out error.*"):
        run(random_call(SMALL, 2), config=forced)
    run(random_call(SMALL, 2), config=PLAIN)


def test_a_kernel_that_takes_the_context_along_ends_the_call_and_is_left_out_next_time(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = break_kernels(monkeypatch, crash, PLAIN)
    with monkeypatch.context() as patch:
        patch.setattr(selfcheck, "_lost", lambda device, error: True)
        with pytest.raises(RuntimeError, match=r"unusable: ValueError: bad descriptor\. Start the process again"):
            run(random_call(SMALL, 2))
    next_process()
    launched.clear()
    run(random_call(SMALL, 2))
    assert launched and PLAIN not in launched


@pytest.mark.parametrize("message", ["CUDA out of memory. Tried", "CUDA_ERROR_OUT_OF_MEMORY", "stream is capturing"])
def test_an_error_that_says_nothing_about_the_kernel_is_no_verdict(
    message: str, cpu_as_gpu: None, fake_compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(kernel: FakeKernel, args: tuple[Any, ...]) -> None:
        raise RuntimeError(message)

    with monkeypatch.context() as patch:
        break_kernels(patch, fail)
        with pytest.raises(RuntimeError, match=message):
            run(random_call(SMALL, 2))
    assert not selfcheck._verdicts and not verdicts(fake_compiler)
    run(random_call(SMALL, 2))


def test_an_earlier_error_on_the_stream_is_not_blamed_on_the_kernel(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wait(device: torch.device, seconds: float | None) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(selfcheck, "_wait", wait)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(random_call(SMALL, 2))
    assert not selfcheck._verdicts


def test_a_kernel_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def record(self, stream: object) -> None:
            pass

        def query(self) -> bool:
            return False

    monkeypatch.setattr(torch.cuda, "Event", Never)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    with pytest.raises(TimeoutError, match="not finished after 0 s") as caught:
        selfcheck._wait(torch.device("cuda"), 0.01)
    assert selfcheck._lost(torch.device("cuda"), caught.value), "a synchronization would hang too"


# ---- captures, switches, the hot path --------------------------------------------------------------


@contextlib.contextmanager
def capture(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "capturing", lambda: True)
        yield


def test_nothing_is_checked_inside_a_capture(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = break_kernels(monkeypatch, lambda kernel, args: None)
    compiler.get(SMALL, PLAIN, H200)  # loaded, but never proven
    with capture(monkeypatch):
        with pytest.raises(RuntimeError, match=r"not ready.*replayssm_cute\.warmup"):
            run(random_call(SMALL, 2))
        with pytest.raises(RuntimeError, match=r"not ready.*replayssm_cute\.warmup"):
            selfcheck.passed(SMALL, PLAIN, -1)
    assert not launched
    run(random_call(SMALL, 2))
    next_process()
    launched.clear()
    with capture(monkeypatch), pytest.raises(RuntimeError, match="not ready"):
        run(random_call(SMALL, 2))  # proven by another process, but not on the device in this one
    assert not launched


@pytest.mark.parametrize("broken", [[PLAIN], [LARGE], [PLAIN, LARGE]], ids=lambda cs: "+".join(c.label() for c in cs))
def test_captures_of_every_batch_find_a_substitute_ready(
    broken: list[TileConfig], cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_kernels(monkeypatch, one_percent, *broken)
    run(random_call(SMALL, 1))
    launched: list[TileConfig] = []
    monkeypatch.setattr(FakeKernel, "__call__", lambda self, *args: launched.append(self.config))
    with capture(monkeypatch):
        for batch in (2, 9, 2000):  # 2000 rows are on the far side of the default rule
            launched.clear()
            run(random_call(SMALL, batch, dead=None))
            assert len(launched) == 1 and launched[0] not in broken


def test_switched_off_by_environment(
    cpu_as_gpu: None, fake_compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched = break_kernels(monkeypatch, one_percent)
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    for batch in (2, 3):
        run(random_call(SMALL, batch))
    assert len(launched) == len(tables.candidates(SMALL, H200)) + 2  # one launch to load each, and the two calls
    assert not verdicts(fake_compiler)
    (line,) = warnings(caplog)
    assert "REPLAYSSM_SELFCHECK=0" in line


def test_warm_calls_do_not_come_near_it(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run(random_call(SMALL, 2))

    def never(*_: Any) -> None:
        raise AssertionError("a warm call asked for a verdict")

    for name in ("passed", "excluded", "enabled", "_verdict"):
        monkeypatch.setattr(selfcheck, name, never)
    run(random_call(SMALL, 2))
    run(random_call(SMALL, 3))  # nor does another batch of a prepared problem


# ---- how long a verdict lasts ----------------------------------------------------------------------


def test_a_verdict_is_kept_for_the_next_process(cpu_as_gpu: None, fake_compiler: Path) -> None:
    run(random_call(SMALL, 2))
    files = verdicts(fake_compiler)
    assert len(files) == 3 and not list(fake_compiler.rglob("*.tmp"))
    kernel_directory = fake_compiler / compiler.key(SMALL, PLAIN, "sm_90a")
    assert sum(file.parent == kernel_directory for file in files) == 1
    data = json.loads(files[0].read_text())
    assert (data["outcome"], data["name"], data["capability"], data["driver"]) == ("passed", *dataclasses.astuple(GPU))
    before = selfcheck.count()
    next_process()
    run(random_call(SMALL, 2))
    assert selfcheck.count() == before
    assert compiler.counters().compiled == 3


def test_a_failed_kernel_is_not_even_loaded_in_the_next_process(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched = break_kernels(monkeypatch, one_percent, PLAIN)
    run(random_call(SMALL, 2))
    next_process()
    caplog.clear()
    launched.clear()
    run(random_call(SMALL, 2))
    assert set(launched) == {WIDE, LARGE} and {r.config for r, _ in compiler._memory} == {WIDE, LARGE}
    assert len(warnings(caplog)) == 1, "each process says why a config is missing"


def test_a_verdicts_file_has_the_same_name_in_every_process(fake_compiler: Path) -> None:
    code = f"""
        import json
        from replayssm_cute import selfcheck
        print(selfcheck._path(selfcheck._identity("abc", selfcheck.Gpu(*{dataclasses.astuple(GPU)}))))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert done.stdout.strip() == str(selfcheck._path(selfcheck._identity("abc", GPU)))


@pytest.mark.parametrize(
    "change", [{"name": "NVIDIA H100"}, {"capability": "9.1"}, {"driver": "580.2"}, "check", "kernels"], ids=str
)
def test_another_gpu_driver_check_or_kernel_is_checked_anew(
    change: Any, cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(random_call(SMALL, 2))
    before = selfcheck.count()
    next_process()
    with monkeypatch.context() as patch:
        if change == "check":
            patch.setattr(selfcheck, "_check_fingerprint", lambda: "stricter")
        elif change == "kernels":
            patch.setattr(compiler.fingerprint, "kernels", lambda: "other sources")
        else:
            patch.setattr(selfcheck, "gpu", lambda index: dataclasses.replace(GPU, **change))
        run(random_call(SMALL, 2))
    assert selfcheck.count() == before + 3
    next_process()
    run(random_call(SMALL, 2))
    assert selfcheck.count() == before + 3, "the verdicts of before are still there"


def edited(**change: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps({**json.loads(data), **change}).encode()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "binary": lambda data: b"\xff\xfe\x00" * 9,
    "list": lambda data: b"[1, 2]",
    "deep": lambda data: b"[" * 100_000,
    "only the outcome": lambda data: b'{"outcome": "passed", "detail": ""}',
    "no outcome": lambda data: json.dumps({k: v for k, v in json.loads(data).items() if k != "outcome"}).encode(),
    "unknown outcome": edited(outcome="fine"),
    "outcome a list": edited(outcome=["passed"]),
    "detail no text": edited(detail=3),
    "another driver's": edited(driver="1.0"),
    "another format's": edited(format=selfcheck.FORMAT + 1),
    "one field more": edited(note="x"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_verdict_is_a_miss(
    damage: str,
    cpu_as_gpu: None,
    fake_compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch:
        break_kernels(patch, one_percent, PLAIN)
        assert not selfcheck.passed(SMALL, PLAIN, -1)
    (file,) = verdicts(fake_compiler)
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    next_process()
    caplog.clear()
    before = selfcheck.count()
    assert selfcheck.passed(SMALL, PLAIN, -1)
    assert selfcheck.count() == before + 1
    (line,) = warnings(caplog)
    assert f"{file} is damaged" in line
    next_process()
    assert selfcheck.passed(SMALL, PLAIN, -1) and selfcheck.count() == before + 1, "the file was not repaired"


def test_where_nothing_can_be_written_each_process_checks(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path / "file" / "cache"))
    before = selfcheck.count()
    for process in (1, 2):
        next_process()
        run(random_call(SMALL, 2))
        assert selfcheck.count() == before + 3 * process
    assert len([line for line in warnings(caplog) if "cannot be written" in line]) == 2  # one a process


def test_without_a_drivers_version_nothing_is_kept(
    cpu_as_gpu: None, fake_compiler: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(selfcheck, "gpu", lambda index: dataclasses.replace(GPU, driver=None))
    break_kernels(monkeypatch, one_percent, PLAIN)
    run(random_call(SMALL, 2))
    assert not verdicts(fake_compiler)
    unknown, failed = sorted(warnings(caplog), key=lambda line: "failed" in line)
    assert "version cannot be told" in unknown
    assert "driver unknown" in failed and "for this process alone" in failed
