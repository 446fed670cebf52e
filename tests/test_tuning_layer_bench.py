"""The layer benchmark without a GPU: its calls, its bytes, its table."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fused_calls import kwargs
from replayssm_tuning import acceptance, layer_bench, layer_report, layer_search
from replayssm_tuning.kernel_pool import KernelPool
from replayssm_tuning.policy import Policy
from replayssm_tuning.slots import make_cell

import replayssm_cute
from replayssm_cute import compiler, plan, tables, target
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import launches, overlap, shapes
from replayssm_cute.fused.chains import Chain, ConvCut, NormCut, Overlap
from replayssm_cute.fused.problem import layer_problem
from replayssm_cute.fused.recipes import LayerRecipe
from replayssm_cute.problem import Problem


def test_its_calls_are_decode_steps_on_the_cells_slots() -> None:
    step = Problem(16, 64, 64, 1, 2, 8)
    problem = dataclasses.replace(layer_bench.layer_problem(2, 8, "f32"), step=step, norm_groups=2)
    mix = acceptance.stationary([0.5, 0.5], 8)
    cell = make_cell(step, 3, mix, Policy(), torch.device("cpu"), 2)
    made = layer_bench.layer_calls(problem, cell, 0)
    assert [layer_problem(dataclasses.replace(c, norm_groups=2)) for c in made] == [problem] * 2
    for call, own in zip(cell.calls, made, strict=True):
        assert call.state_batch_indices is own.state_batch_indices and own.state is call.state
        replayssm_cute.decode_step(**kwargs(own))
        assert torch.isfinite(call.out).all() and call.out.abs().max() > 0
    assert made[0].projected.data_ptr() != made[1].projected.data_ptr()


def test_bytes_of_conv_and_norm() -> None:
    problem = layer_bench.layer_problem(4, 16, "f32")
    assert layer_bench.conv_bytes(problem, 2) == 2 * 10240 * (2 * 15) + 4 * 10240 * 2
    assert layer_bench.norm_bytes(problem, 2) == 3 * 2 * 4 * 8192 * 2


def test_its_kernels_are_those_that_its_entrants_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What --compile-for fills the cache with is what a bench on the GPU loads."""
    where, asked = target.named("h200"), set()
    monkeypatch.setattr(launches, "ready", lambda recipe, device: asked.add(recipe) or print)
    monkeypatch.setattr(
        plan, "make", lambda p, b, device, config: asked.add(compiler.StepRecipe(p, config)) or Made(config)
    )
    bench = layer_bench.Bench.__new__(layer_bench.Bench)
    bench.cuts, bench.target, bench.device = True, where, torch.device("cuda", 0)
    config = tables.choose(layer_bench.layer_problem(4, 16, "f32").step, 4, where).config
    assert isinstance(config, TileConfig)
    for tokens, batch, norms in ((1, 1, 3), (4, 256, 6)):
        asked.clear()
        problem = layer_bench.layer_problem(tokens, 16, "f32")
        assert len(list(bench.entrants(problem, batch))) == 8 + 2 * 10 + 2 * norms
        assert asked == set(layer_bench.kernels(problem, batch, where, True))


class Made:
    """Stands in for a step's plan."""

    kernel = print

    def __init__(self, config: TileConfig) -> None:
        self.choice = tables.Choice(config, "forced", "")


def test_its_table() -> None:
    names = [*layer_bench.PARTS, *Overlap, "conv 2 x 64"]
    times: dict[str, Any] = {name: {"time_us": 1.5 + k} for k, name in enumerate(names)}
    text = layer_bench.table([{"tokens": 4, "batch": 16, "config": "h1", "times": times}])
    assert text.splitlines()[1].split() == ["4", "16", *(f"{1.5 + k:.2f}" for k in range(8)), "h1"]
    assert text.splitlines()[2].strip() == "conv 2 x 64: 9.50"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert layer_bench.main(["--tokens", "1"]) == 1
    assert "no CUDA GPU" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_small_bench(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    assert layer_bench.main(["--batches", "1", "--tokens", "1", "--cuts", "--out", str(tmp_path / "times.json")]) == 0
    assert "norm 4 warps" in capsys.readouterr().out and (tmp_path / "times.json").exists()


def test_a_cell_with_a_search_as_far_as_times_are_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chains are captured once each, raced in turns, and what was found is timed beside the rules' chains."""
    step = Problem(16, 64, 64, 1, 2, 8)
    problem = dataclasses.replace(layer_bench.layer_problem(2, 8, "f32"), step=step, norm_groups=2)
    captured: list[int] = []
    made: list[Any] = []

    def make(p: Any, batch: int, device: int, *, config: Any, overlap: Any, **_: Any) -> launches.LayerPlan:
        made.append(overlap)
        inner = plan.Plan(p.step, batch, tables.Choice(config, "forced", ""), None, print)
        kind = overlap if isinstance(overlap, Overlap) else overlap.overlap
        return launches.LayerPlan(p, kind, inner, print, print, print if kind.x_in_step else None)

    def capture(run: Any, cell: Any, policy: Policy, *, writes_outputs: bool) -> int:
        captured.append(len(captured))
        return captured[-1]

    monkeypatch.setattr(launches, "make", make)
    monkeypatch.setattr(layer_bench, "capture", capture)
    monkeypatch.setattr(
        layer_bench, "interleave", lambda field, rounds, replays: [[10.0 + 7 * k % 11] * 3 for k in field]
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1 << 16))
    bench = layer_bench.Bench.__new__(layer_bench.Bench)
    bench.policy, bench.cuts, bench.search = Policy(min_rows=4), False, True
    bench.device, bench.target = torch.device("cpu"), target.named("h200")
    filled: set[compiler.Recipe] = set()
    bench.pool = SimpleNamespace(fill=lambda recipes, what: filled.update(recipes))  # type: ignore[assignment]
    cell = bench.cell(problem, 2)
    chains = [m for m in made if isinstance(m, Chain)]
    assert all(set(layer_search.recipes(problem, c, 2)) <= filled for c in chains), "compiled before they are captured"
    assert len(set(chains)) > 15 and len(chains) - len(set(chains)) == 2, "captured once, and again for the final race"
    found = {name: Chain.from_json(chain) for name, chain in cell["found"].items()}
    assert set(found) == {"plain", "promised"} and not found["plain"].overlap.first
    assert set(cell["times"]) == {*layer_bench.PARTS, *Overlap, "found, plain", "found, promised"}
    assert "promised: " + found["promised"].label() in layer_bench.table([cell])
    assert TileConfig.from_json(cell["step"]).label() == cell["config"]
    assert cell["searched"] and not bench.cell(problem, 2, until=0.0)["searched"]


def test_machine_code_of_what_a_search_found() -> None:
    """Beside the rules' kernels: the step that convolves x, and each kernel of the chain."""
    problem = layer_bench.layer_problem(1, 16, "f32")
    chain = Chain(Overlap.INNER_X, TileConfig(), ConvCut(4, 64, carveout=100), NormCut(2))
    cell = {"tokens": 1, "batch": 4, "step": TileConfig().to_json(), "found": {"plain": chain.to_json()}}
    where = target.named("h200")
    plain, more = (layer_bench.machine_code([problem], [4], where, cells) for cells in ((), (cell,)))
    added = set(more) - set(plain)
    assert {name.split()[0] for name in added} == {"conv", "norm", "step"} and len(added) == 4
    assert more["step T 1 h1 s1 p1 live c1"] == more[f"step T 1, batch 4, {chain.label()}"]
    assert set(plain.items()) <= set(more.items())


def fake_cell(problem: Any, batch: int) -> dict[str, Any]:
    """A cell's result with made-up times."""
    chain = layer_search.start(problem, batch, target.named("h200"))
    plain = layer_search.plain_starts(problem, batch, chain)[0]
    names = [*layer_bench.PARTS, *Overlap, "found, plain", "found, promised"]
    return {
        "tokens": problem.step.tokens, "batch": batch, "flush": 0.1, "sets": 1, "searched": True,
        "config": TileConfig().label(), "step": TileConfig().to_json(),
        "times": {name: {"time_us": 20.0 - k, "spread": 0.01, "gb_s": 1.0} for k, name in enumerate(names)},
        "found": {"plain": plain.to_json(), "promised": chain.to_json()},
    }  # fmt: skip


def test_a_bench_that_is_cut_off_leaves_what_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is whole after every cell, the report and the table that calls read are made of it."""
    out, until = tmp_path / "layer.json", []

    def cell(self: Any, problem: Any, batch: int, limit: float) -> dict[str, Any]:
        until.append(limit)
        if len(until) == 3:
            raise KeyboardInterrupt
        return fake_cell(problem, batch)

    where = target.named("h200")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(plan, "device_target", lambda index: where)
    monkeypatch.setattr(layer_bench.Bench, "cell", cell)
    monkeypatch.setattr(KernelPool, "fill", lambda self, recipes, what: None)
    monkeypatch.setattr(layer_bench, "_code", lambda recipe, target: str(hash(recipe)))
    arguments = ["--tokens", "4", "1", "--batches", "1", "16", "--search", "--out", str(out)]
    assert layer_bench.main([*arguments, "--budget", "80s"]) == 130
    now = time.perf_counter()
    assert 10 < until[0] - now < 20 < until[1] - now < 80 / 3, "an equal share of what is left"
    data = json.loads(out.read_bytes())
    assert [(c["tokens"], c["batch"]) for c in data["cells"]] == [(4, 1), (4, 16)]
    assert layer_report.stale_reason(data) is None
    assert [len(e["buckets"]) for e in layer_report.overlap_table(data)["entries"]] == [2]
    assert layer_report.main([str(out), "--table", str(tmp_path / "table.json")]) == 0
    assert [c.promised is not None for c in overlap.read(tmp_path / "table.json").entries.popitem()[1].values()] == [
        True,
        True,
    ]
    until.clear()
    monkeypatch.setattr(time, "perf_counter", iter(range(0, 10**6, 30)).__next__)
    assert layer_bench.main([*arguments, "--budget", "80s"]) == 3
    assert "cells are left out" in capsys.readouterr().err


def test_a_pool_compiles_what_the_cache_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    problem, where, said = layer_bench.layer_problem(1, 16, "f32"), target.named("h200"), []
    recipes = [LayerRecipe(shapes.norm_shape(problem, chained=chained)) for chained in (False, True)]
    with KernelPool(where, 1, said.append) as pool:
        pool.fill(recipes[:1] * 2, "first")
        assert pool.compiled == 1 and compiler.stored(recipes[0], where) and not compiler.stored(recipes[1], where)
        pool.fill(recipes, "then")
        assert pool.compiled == 2 and compiler.stored(recipes[1], where)
        before = len(said)
        pool.fill(recipes, "again")
        assert len(said) == before and any("compiling 1 kernels in 1 processes" in line for line in said)
        unfit = compiler.StepRecipe(problem.step, TileConfig(heads_per_cta=8, parallel_heads=8))
        with pytest.raises(ValueError, match="shared memory"):
            pool.fill([unfit], "unfit")
