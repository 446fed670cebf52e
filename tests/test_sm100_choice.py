"""When the Blackwell kernel serves: where it is asked for, covers the problem, and has passed its self-check."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from fakes import SMALL, FakeKernel
from test_oracle_teeth import step

from replayssm_cute import compiler, fingerprint, plan, selfcheck
from replayssm_cute.calls import random_call
from replayssm_cute.config import TileConfig, shared_layout
from replayssm_cute.problem import Problem
from replayssm_cute.sm100 import (
    ARCHES,
    Sm100Config,
    config_from_json,
    default_sm100_configs,
    preferred,
    tensor_columns,
    tensor_layout,
)
from replayssm_cute.tables import Cell, Manifest, Table, kernels_named, lookup, write
from replayssm_cute.target import named

fake_compiler = fakes.fake_compiler
cpu_as_gpu = fakes.cpu_as_gpu

B200 = named("b200")
ONE = Sm100Config.of(SMALL)
SUPER = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)


class EitherKernel(FakeKernel):
    """A fake kernel of either family; those of `wrong` are one percent off. Launches are noted by config."""

    wrong: type[TileConfig] | None = None
    launched: list[TileConfig] = []  # noqa: RUF012

    def __init__(self, path: Path) -> None:
        data = json.loads(path.read_text())
        self.problem = Problem.from_json(data["problem"])
        family = Sm100Config if "kernel" in data["config"] else TileConfig
        self.config = family.from_json(data["config"])
        self.launches = 0

    def __call__(self, *args: Any) -> None:
        super().__call__(*args)
        self.launched.append(self.config)
        if type(self.config) is self.wrong:
            args[11].mul_(1.01)


@pytest.fixture
def blackwell(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> type[EitherKernel]:
    """CPU tensors in a B200's place, whose owner asks for the Blackwell kernel; gives the kernels' class."""
    monkeypatch.setattr(plan, "device_target", lambda index: B200)
    monkeypatch.setattr(compiler, "_load", EitherKernel)
    monkeypatch.setattr(EitherKernel, "wrong", None)
    monkeypatch.setattr(EitherKernel, "launched", [])
    monkeypatch.setenv("REPLAYSSM_SM100", "1")
    monkeypatch.delenv("REPLAYSSM_SELFCHECK", raising=False)
    return EitherKernel


def served(config: TileConfig | None = None) -> plan.Plan:
    """The plan of a call, which is run and must be right."""
    call = random_call(SMALL, 2)
    expected = call.clone()
    step(expected)
    found = plan.make(SMALL, 2, -1, config)
    found.launch(*plan.kernel_args(call))
    torch.testing.assert_close(call.out, expected.out, rtol=2**-7, atol=1e-4, equal_nan=True)
    return found


def test_it_serves_where_it_is_asked_for(blackwell: type[EitherKernel]) -> None:
    choice = served().choice
    assert choice is not None and choice.config == ONE and type(choice.config) is Sm100Config
    assert choice.source == "forced" and "REPLAYSSM_SM100=1" in choice.reason
    assert selfcheck.passed(SMALL, ONE, -1)


def test_it_is_not_even_compiled_where_it_is_not(
    blackwell: type[EitherKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("REPLAYSSM_SM100")
    choice = served().choice
    assert choice is not None and type(choice.config) is TileConfig
    assert blackwell.launched and not any(isinstance(config, Sm100Config) for config in blackwell.launched)


def test_a_wrong_one_is_left_out_and_the_portable_one_serves(
    blackwell: type[EitherKernel], caplog: pytest.LogCaptureFixture, fake_compiler: Path
) -> None:
    blackwell.wrong = Sm100Config
    with caplog.at_level(logging.WARNING):
        choice = served().choice
        assert choice is not None and type(choice.config) is TileConfig
        served()
    said = [r.getMessage() for r in caplog.records if "self-check" in r.getMessage()]
    assert len(said) == 1 and "sm100 h2/2" in said[0] and "it is left out" in said[0]
    found = selfcheck.excluded(SMALL, ONE, -1)
    assert found is not None and found.outcome == "failed"
    with pytest.raises(RuntimeError, match=r"sm100 h2/2 .* failed"):
        plan.make(SMALL, 2, -1, ONE)
    # the next process reads the verdict and launches it never
    compiler.clear_memory()
    selfcheck._verdicts.clear()
    plan._touched.clear()
    plan.forget()
    blackwell.launched.clear()
    choice = served().choice
    assert choice is not None and type(choice.config) is TileConfig
    assert not any(isinstance(config, Sm100Config) for config in blackwell.launched)


def test_it_does_not_serve_unchecked(blackwell: type[EitherKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    choice = served().choice
    assert choice is not None and type(choice.config) is TileConfig
    with pytest.raises(RuntimeError, match="REPLAYSSM_SELFCHECK=0, and the sm100 kernel does not serve without one"):
        plan.make(SMALL, 2, -1, ONE)
    assert not any(isinstance(config, Sm100Config) for config in blackwell.launched)
    assert type(plan.expected(SMALL, 2, choice, -1).config) is TileConfig


def test_a_config_of_it_can_be_forced(blackwell: type[EitherKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPLAYSSM_SM100")
    whole = Sm100Config.of(SMALL, ring="whole")
    assert served(whole).kernel.config == whole  # type: ignore[attr-defined]
    call = random_call(SMALL, 2)
    plan.run(plan.kernel_args(call), SMALL.dt_softplus, False, ONE)
    assert blackwell.launched[-1] == ONE
    monkeypatch.setattr(plan, "device_target", lambda index: named("h200"))
    with pytest.raises(ValueError, match="needs sm_100a or sm_103a"):
        plan.make(SMALL, 2, -1, ONE)


def test_a_capture_finds_it_prepared(blackwell: type[EitherKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    many = dataclasses.replace(SMALL, heads=8)
    small, large = default_sm100_configs(many, B200)
    assert (small.turns, large.turns) == (1, 2)
    plan.prepare(many, -1)
    monkeypatch.setattr(compiler, "capturing", lambda: True)
    for batch, config in ((1, small), (1 << 20, large)):
        choice = plan.make(many, batch, -1).choice
        assert choice is not None and choice.config == config


def test_only_what_it_covers(blackwell: type[EitherKernel], monkeypatch: pytest.MonkeyPatch) -> None:
    for fields in (
        {"precision": "highest"},
        {"heads": 2},
        {"state_dtype": "bf16", "io_dtype": "f16", "dt_dtype": "f16"},
    ):
        problem = dataclasses.replace(SMALL, **fields)
        assert preferred(problem, 1, B200) is None
        with pytest.raises(ValueError, match=r"has no sm_100a kernel"):
            Sm100Config.of(problem)
    for arch in ("sm_90a", "sm_120a"):
        assert preferred(SMALL, 1, named(arch)) is None
        assert arch in (ONE.invalid_reason(SMALL, named(arch)) or "")
    for arch in ARCHES:
        assert preferred(SMALL, 1, named(arch)) == ONE
    narrow = dataclasses.replace(SMALL, head_dim=80, heads=3, groups=3)
    assert (
        preferred(narrow, 1, B200) == Sm100Config.of(narrow)
        and Sm100Config.of(narrow).label() == "sm100 h1 s1 p1 live c1"
    )


def test_configs_of_the_two_kernels_are_told_apart() -> None:
    portable = TileConfig(**{f.name: getattr(ONE, f.name) for f in dataclasses.fields(TileConfig)})
    assert portable != ONE and portable != ONE and len({portable, ONE}) == 2
    assert compiler.key(SMALL, portable, "sm_100a") != compiler.key(SMALL, ONE, "sm_100a")
    assert Sm100Config.from_json(ONE.to_json()) == ONE and ONE.label() == "sm100 h2/2 s1 p1 r32 live c1"
    with pytest.raises(ValueError, match="kernel None"):
        Sm100Config.from_json(portable.to_json())
    with pytest.raises(ValueError, match="unknown fields"):
        TileConfig.from_json(ONE.to_json())
    with pytest.raises(ValueError, match="unknown fields"):
        Sm100Config.from_json({**ONE.to_json(), "colour": 1})


def test_launch_control_is_told_apart_and_only_for_blackwell() -> None:
    control = Sm100Config.of(SUPER, turns=2, tail_rows=9, launch_control=True)
    without = dataclasses.replace(control, launch_control=False)
    assert control != without and compiler.key(SUPER, control, "sm_100a") != compiler.key(SUPER, without, "sm_100a")
    assert control.label() == f"{without.label()} clc" == "sm100 h4/2 s1 p1 r32 live c1 t9 clc"
    for config in (control, without, TileConfig(2, tail_rows=3)):
        assert config_from_json(json.loads(json.dumps(config.to_json()))) == config
    old = without.to_json()
    del old["launch_control"]  # what was written before there was a choice
    assert Sm100Config.from_json(old) == without
    with pytest.raises(ValueError, match="launch_control is 1, expected a bool"):
        dataclasses.replace(control, launch_control=1)
    with pytest.raises(ValueError, match=r"unknown fields \['launch_control'\]"):
        TileConfig.from_json({"launch_control": True})
    for target in ("h200", "sm_120a"):
        assert "needs sm_100a or sm_103a" in (control.invalid_reason(SUPER, named(target)) or "")
    assert all(control.is_valid(SUPER, named(arch)) for arch in ARCHES)
    for problem in (SUPER, dataclasses.replace(SUPER, heads=96, head_dim=80)):
        assert not any(c.launch_control for c in default_sm100_configs(problem, B200)), "nobody has measured it"


def test_a_measured_table_may_name_it(
    blackwell: type[EitherKernel], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Then it serves unasked, once it has passed its self-check; and not where it has not."""
    monkeypatch.delenv("REPLAYSSM_SM100")
    control = dataclasses.replace(ONE, launch_control=True)
    cell = Cell(2, control, time_us=9.0, bytes=1e6, gb_s=111.0, limit_fraction=0.02, runner_up=ONE, runner_up_us=10.0)
    now = kernels_named(B200.arch, "measured")
    manifest = Manifest(B200.name, B200.arch, B200.sms, "measured", now, "2026-11-30T00:00:00Z", "580.1")
    write(tmp_path / "t.json", Table(manifest, {SMALL: (cell,)}))
    monkeypatch.setattr(lookup, "_paths", (tmp_path / "t.json",))
    lookup.forget()
    choice = served().choice
    assert choice is not None and (choice.config, choice.source) == (control, "table")
    assert selfcheck.passed(SMALL, control, -1)
    plan.forget()
    selfcheck._verdicts[SMALL, control, -1] = selfcheck.Verdict("failed", "out error")
    plan._touched.clear()
    choice = served().choice
    assert choice is not None and type(choice.config) is TileConfig and choice.source == "fallback"


def test_fingerprints_are_apart() -> None:
    """A change of this kernel costs the portable one nothing; one of the portable kernel's is a change of both."""
    step, sm100 = fingerprint.kernel_sources(), fingerprint.kernel_sources("sm100")
    assert not set(step) & set(sm100)
    assert {"sm100.py", "kernels/sm100/step.py", "kernels/sm100/operands.py"} <= set(sm100)
    recipe = compiler.StepRecipe(SMALL, ONE)
    assert recipe.sources() == fingerprint.kernels() + fingerprint.kernels("sm100")
    assert compiler.StepRecipe(SMALL, TileConfig()).sources() == fingerprint.kernels()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Sm100Config(2, parallel_heads=1, tiles_per_warp=2), "expected"),
        (Sm100Config(2, parallel_heads=2, tiles_per_warp=1), "expected"),
        (Sm100Config(2, parallel_heads=2, tiles_per_warp=2, head_split=2), "expected"),
        (Sm100Config.of(SUPER, ctas_per_sm=3), "bytes of shared memory"),
        (Sm100Config.of(SUPER, turns=8, stages=4), "bytes of shared memory"),
        (Sm100Config.of(SUPER, tail_rows=3, launch_control=True), "tail_rows needs CTAs"),
    ],
)
def test_configs_that_cannot_run(config: Sm100Config, reason: str) -> None:
    assert reason in (config.invalid_reason(SUPER, B200) or "")


def test_every_resident_cta_finds_tensor_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation that has to wait for another CTA's end would be slow; none that can be resident may have to."""
    small = dataclasses.replace(SUPER, d_state=64, state_dtype="bf16", heads=128, groups=1)
    for turns in (1, 2, 4, 8, 16, 32):
        config = Sm100Config.of(small, turns=turns)
        assert tensor_columns(small, config) >= 16 * turns and tensor_columns(small, config) in (32, 64, 128, 256, 512)
        fits = tensor_columns(small, config) * config.resident(small, B200) <= 512
        fits &= config.shared_bytes(small) <= B200.shared_per_block
        assert (config.invalid_reason(small, B200) is None) == fits
    monkeypatch.setattr(Sm100Config, "resident", lambda *_: 3)  # today shared memory lets none in that would wait
    assert "columns of tensor memory" in (Sm100Config.of(small, turns=16).invalid_reason(small, B200) or "")


@pytest.mark.parametrize(
    "problem",
    [SMALL, SUPER, *(dataclasses.replace(SUPER, head_dim=p, d_state=n) for p, n in ((128, 256), (80, 128), (80, 64)))],
)
@pytest.mark.parametrize("turns", [1, 2])
@pytest.mark.parametrize("launch_control", [False, True])
def test_shared_memory_beyond_the_portable_kernel_s(problem: Problem, turns: int, launch_control: bool) -> None:
    """C at the swizzle's period, behind what the shared phases use; then barriers that do not overlap."""
    config = Sm100Config.of(problem, turns=turns, launch_control=launch_control)
    layout = tensor_layout(problem, config)
    assert layout.c >= shared_layout(problem, config).total and layout.c % 1024 == 0
    starts = [layout.c, layout.answers, layout.full, layout.done, layout.empty, layout.read, layout.known, layout.taken]
    starts += [layout.base, layout.total]
    control = 2 * config.launch_control
    sizes = [
        16 * problem.d_state * problem.state_bytes,
        16 * control,
        8 * config.stages,
        8 * turns,
        8 * config.stages,
        8,
    ]
    sizes += [8 * control, 8 * control, 4]
    assert layout.answers % 16 == 0
    assert all(a + n <= b for a, n, b in zip(starts[:-1], sizes, starts[1:], strict=True))
    assert layout.full % 8 == 0 and config.shared_bytes(problem) == layout.total
