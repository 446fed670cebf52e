"""The public call on CPU tensors, what it refuses, explain, and what importing costs."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import fakes
import pytest
import torch
from fakes import H200, SMALL
from test_tables import cell, table

import replayssm_cute
from replayssm_cute import TileConfig, api, calls, checks, plan, tables
from replayssm_cute.calls import random_call
from replayssm_cute.reference import checkpointing_ssu_reference
from replayssm_cute.target import named

RAGGED = dataclasses.replace(SMALL, ragged=True)
fake_compiler = fakes.fake_compiler
cpu_as_gpu = fakes.cpu_as_gpu


def test_cpu_tensors_run_the_reference_in_place() -> None:
    call = random_call(SMALL, 4, padding=[2])
    call.A.requires_grad_(False)
    expected = call.clone()
    checkpointing_ssu_reference(**expected.kwargs())
    assert replayssm_cute.checkpointing_ssu(**call.kwargs()) is call.out
    for name in calls.WRITTEN:
        torch.testing.assert_close(getattr(call, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)


def test_weights_that_require_gradients_are_no_obstacle() -> None:
    call = random_call(SMALL, 2)
    assert call.D is not None
    call.D = torch.nn.Parameter(call.D[:, 0].clone())[:, None].expand(call.D.shape)
    assert not replayssm_cute.checkpointing_ssu(**call.kwargs()).requires_grad


@pytest.mark.parametrize("inside", [True, False])
def test_tensors_made_in_inference_mode_are_served_in_and_out_of_it(inside: bool) -> None:
    with torch.inference_mode():
        call = random_call(SMALL, 4, padding=[2])
    expected = random_call(SMALL, 4, padding=[2])
    checkpointing_ssu_reference(**expected.kwargs())
    with torch.inference_mode(inside):
        replayssm_cute.checkpointing_ssu(**call.kwargs())
    for name in calls.WRITTEN:
        torch.testing.assert_close(getattr(call, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("beyond", [1 << 32, -(1 << 32)])
def test_a_pad_slot_id_beyond_the_indices_type_names_no_slot(beyond: int) -> None:
    """torch compares in the tensor's type, where 2^32 is 0; kernels compare in int64."""
    call = random_call(SMALL, 3)
    expected = call.clone()
    checkpointing_ssu_reference(**expected.kwargs())
    assert call.state_batch_indices is not None
    call.pad_slot_id = beyond + int(call.state_batch_indices[0])
    replayssm_cute.checkpointing_ssu(**call.kwargs())
    assert torch.equal(call.out, expected.out)


def test_a_padding_row_without_indices_is_not_checked() -> None:
    """Row i uses slot i; where that is the padding slot, its cursors may hold anything."""
    call = random_call(dataclasses.replace(SMALL, index_dtype=None), 3, pad_slot_id=1)
    call.ring_start[1], call.prev_num_accepted_tokens[1] = 99, -5
    replayssm_cute.checkpointing_ssu(**call.kwargs())
    assert not call.out[1].any() and call.out[0].any() and call.out[2].any()
    call.prev_num_accepted_tokens[2] = 99
    with pytest.raises(ValueError, match="prev_num_accepted_tokens: got 99 for batch row 2"):
        replayssm_cute.checkpointing_ssu(**call.kwargs())


def corrupt(name: str, row: int, value: int) -> calls.Call:
    call = random_call(SMALL, 3, pnat=[1, 2, 4])
    assert call.state_batch_indices is not None
    if name == "state_batch_indices":
        call.state_batch_indices[row] = value
    else:
        getattr(call, name)[call.state_batch_indices[row].long()] = value
    return call


BAD_VALUES = [
    ("state_batch_indices", 6, "got 6 for batch row 1, expected a slot below 6"),
    ("ring_start", 6, "got 6 for batch row 1, expected 0..5"),
    ("ring_start", -1, "got -1 for batch row 1, expected 0..5"),
    ("prev_num_accepted_tokens", 5, "got 5 for batch row 1, expected 0..4"),
    ("prev_num_accepted_tokens", -1, "got -1 for batch row 1, expected 0..4"),
]


@pytest.mark.parametrize(("name", "value", "expected"), BAD_VALUES)
def test_bad_values_are_refused_before_anything_is_written(name: str, value: int, expected: str) -> None:
    call = corrupt(name, 1, value)
    before = call.clone()
    with pytest.raises(ValueError, match=f"^{name}: {expected}"):
        replayssm_cute.checkpointing_ssu(**call.kwargs())
    for written in calls.WRITTEN:
        got, kept = getattr(call, written), getattr(before, written)
        torch.testing.assert_close(got, kept, rtol=0, atol=0, equal_nan=True)


BAD_LENGTHS = [
    ([1, 2, 4, 4], "got 1 for batch row 0, expected 0, the first token"),
    ([-1, 2, 4, 4], "got -1 for batch row 0, expected 0, the first token"),
    ([0, 2, 1, 3], "got a length of -1 for batch row 1, expected 0..2 (max_seqlen), that is, entries that never"),
    ([0, 1, 2, 5], "got a length of 3 for batch row 2, expected 0..2 (max_seqlen)"),
    ([0, 1, 3, 5], "got an end of 5 for batch row 2, expected at most 4, the tokens of x"),
    ([0, 2, 4, 5], "got an end of 5 for batch row 2, expected at most 4, the tokens of x"),
]


@pytest.mark.parametrize(("cu_seqlens", "expected"), BAD_LENGTHS)
@pytest.mark.parametrize("index", ["i32", None])
def test_bad_row_lengths_are_refused_before_anything_is_written(
    cu_seqlens: list[int], expected: str, index: str | None
) -> None:
    call = random_call(dataclasses.replace(RAGGED, index_dtype=index), 3, lengths=(2, 1, 0), tail=1)
    call.cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
    before = call.clone()
    with pytest.raises(ValueError, match=f"^cu_seqlens: {re.escape(expected)}"):
        replayssm_cute.checkpointing_ssu(**call.kwargs())
    for written in calls.WRITTEN:
        got, kept = getattr(call, written), getattr(before, written)
        torch.testing.assert_close(got, kept, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("cu_seqlens", [[0, 2, 4, 4], [0, 0, 0, 0], [0, 0, 2, 4], [0, 1, 2, 3]])
def test_right_row_lengths_are_taken(cu_seqlens: list[int]) -> None:
    call = random_call(RAGGED, 3, lengths=(2, 1, 0), tail=1, dead=None)
    call.cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
    replayssm_cute.checkpointing_ssu(**call.kwargs())
    assert [bool(call.out[0, t].any()) for t in range(4)] == [t < cu_seqlens[-1] for t in range(4)]


def test_ragged_cpu_tensors_run_the_reference_in_place() -> None:
    call = random_call(RAGGED, 4, padding=[2], lengths=(2, 0, 2, 1), tail=2)
    expected = call.clone()
    checkpointing_ssu_reference(**expected.kwargs())
    assert replayssm_cute.checkpointing_ssu(**call.kwargs()) is call.out
    assert call.out[0, :2].any() and call.out[0, 4].any() and not call.out[0, 2:4].any() and not call.out[0, 5:].any()
    for name in calls.WRITTEN:
        torch.testing.assert_close(getattr(call, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)


def test_a_ragged_call_of_full_rows_is_the_dense_call() -> None:
    dense = random_call(SMALL, 3, pnat=[0, 2, 4])
    packed = dense.clone()
    for name in ("x", "dt", "B", "C", "out"):
        t = getattr(packed, name)
        flat = (t[..., :1] if t.stride(-1) == 0 else t).flatten(0, 1)[None]
        setattr(packed, name, flat.expand(*flat.shape[:-1], t.shape[-1]))
    packed.cu_seqlens, packed.max_seqlen = torch.tensor([0, 2, 4, 6], dtype=torch.int32), 2
    replayssm_cute.checkpointing_ssu(**dense.kwargs())
    replayssm_cute.checkpointing_ssu(**packed.kwargs())
    assert torch.equal(packed.out.view(dense.out.shape), dense.out)
    for name in calls.WRITTEN[:4]:
        got, expected = getattr(packed, name), getattr(dense, name)
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_explain_takes_ragged_calls() -> None:
    found = replayssm_cute.explain(**random_call(RAGGED, 3).kwargs(), target="h200")
    assert (found.problem, found.batch) == (RAGGED, 3)
    assert str(found).startswith(f"{SMALL.label()} ragged, batch 3 on ")
    assert replayssm_cute.explain(**random_call(RAGGED, 3).kwargs()).source == "reference"


def test_a_live_slot_named_twice_is_refused_and_padding_may_repeat() -> None:
    call = random_call(SMALL, 3, pnat=[1, 1, 1])
    assert call.state_batch_indices is not None
    call.state_batch_indices[2] = call.state_batch_indices[0]
    with pytest.raises(
        ValueError, match=r"^state_batch_indices: got slot \d more than once, for batch rows 0 and 2, exp"
    ):
        replayssm_cute.checkpointing_ssu(**call.kwargs())
    call.pad_slot_id = int(call.state_batch_indices[0])
    replayssm_cute.checkpointing_ssu(**call.kwargs())
    assert not call.out[0].any()


def test_values_of_cuda_tensors_are_checked_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("REPLAYSSM_CHECK", value)
        assert checks.enabled() is expected


def bad_calls() -> Iterator[tuple[calls.Call, str]]:
    """Calls with a wrong value on the device, each with what is said of it."""
    for name, value, expected in BAD_VALUES:
        yield corrupt(name, 1, value), f"{name}: {expected}"
    for cu_seqlens, expected in BAD_LENGTHS:
        ragged = random_call(RAGGED, 3, lengths=(2, 1, 0), tail=1)
        ragged.cu_seqlens = torch.tensor(cu_seqlens, dtype=torch.int32)
        yield ragged, f"cu_seqlens: {expected}"
    beyond = random_call(dataclasses.replace(SMALL, index_dtype="i64"), 3)
    twice = random_call(SMALL, 3, pnat=[1, 1, 1])
    assert beyond.state_batch_indices is not None and twice.state_batch_indices is not None
    beyond.state_batch_indices[2] = 1 << 40
    yield beyond, f"state_batch_indices: got {1 << 40} for batch row 2, expected a slot below 6"
    twice.state_batch_indices[2] = twice.state_batch_indices[1]
    yield (
        twice,
        f"state_batch_indices: got slot {int(twice.state_batch_indices[1])} more than once, for batch rows 1 and 2",
    )


@pytest.mark.gpu
@pytest.mark.kernels(SMALL, RAGGED)
def test_values_of_cuda_tensors_are_refused_before_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every value that lives on the device: with REPLAYSSM_CHECK=1 nothing is written, and good calls still run."""
    monkeypatch.setattr(api, "_CHECK", True)
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    for bad, expected in bad_calls():
        call = bad.to("cuda")
        before = call.clone()
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}"):
            replayssm_cute.checkpointing_ssu(**call.kwargs())
        torch.cuda.synchronize()
        for name in calls.WRITTEN:
            got, kept = getattr(call, name), getattr(before, name)
            torch.testing.assert_close(got, kept, rtol=0, atol=0, equal_nan=True)
    for problem in (SMALL, RAGGED):
        good = random_call(problem, 3, padding=(1,), dead=0.0).to("cuda")
        good.out.fill_(float("nan"))
        replayssm_cute.checkpointing_ssu(**good.kwargs())
        assert bool(torch.isfinite(good.out).all())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # in which nothing may synchronize: the checks stand back
            replayssm_cute.checkpointing_ssu(**good.kwargs())
        good.out.fill_(float("nan"))
        graph.replay()
        assert bool(torch.isfinite(good.out).all())


def test_every_wrong_value_is_refused_on_the_cpu_in_the_same_words() -> None:
    for bad, expected in bad_calls():
        with pytest.raises(ValueError, match=f"^{re.escape(expected)}"):
            replayssm_cute.checkpointing_ssu(**bad.kwargs())


def test_other_devices_and_types_are_refused() -> None:
    call = random_call(SMALL, 2)
    meta = {k: v.to("meta") if isinstance(v, torch.Tensor) else v for k, v in call.kwargs().items()}
    for name in ("D", "dt_bias", "A", "dt"):  # keep their stride-0 views
        t = call.kwargs()[name]
        meta[name] = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    with pytest.raises(ValueError, match="state: on device meta, expected a CUDA device or the CPU"):
        replayssm_cute.checkpointing_ssu(**meta)
    with pytest.raises(TypeError, match="state: got NoneType"):
        replayssm_cute.checkpointing_ssu(**{**call.kwargs(), "state": None})
    with pytest.raises(TypeError, match="config: got str"):
        replayssm_cute.checkpointing_ssu(**call.kwargs(), config="fast")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="pad_slot_id: got float"):
        replayssm_cute.checkpointing_ssu(**{**call.kwargs(), "pad_slot_id": 0.5})


# ---- explain ---------------------------------------------------------------------------------------


def test_explain_cpu_tensors() -> None:
    found = replayssm_cute.explain(**random_call(SMALL, 2).kwargs())
    assert (found.source, found.config, found.batch) == ("reference", None, 2)
    assert "CPU tensors run the reference" in str(found)


def test_explain_for_a_named_target_tensors_or_problem_alike(cpu_as_gpu: None) -> None:
    by_tensors = replayssm_cute.explain(**random_call(SMALL, 2).kwargs(), target="b300")
    by_problem = replayssm_cute.explain(problem=SMALL, batch=2, target=named("b300"))
    assert by_tensors == by_problem
    assert by_tensors.source == "default"
    assert "NVIDIA B300 SXM6 AC (sm_103a)" in str(by_tensors)
    assert "default rule" in str(by_tensors)


def test_explain_names_table_runner_up_and_peers(cpu_as_gpu: None, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    split = TileConfig(head_split=2)
    winner = cell(16, split, time_us=5.2, runner_up=TileConfig(), margin=0.125, default_us=5.9, peers={"other": 7.5})
    tables.write(path, table({SMALL: [winner]}))
    found = replayssm_cute.explain(problem=SMALL, batch=9, target=H200, table_paths=[path])
    assert (found.source, found.config) == ("table", split)
    text = str(found)
    for part in (str(path), "measured", "bucket 16", "5.2 us", "12.5% slower", "5.9 us", "other: 7.5 us", "p2"):
        assert part in text, part
    assert "estimated" not in text


@pytest.mark.parametrize(
    ("runner_up_us", "said"),
    [
        (10.5, "5.0% slower\n"),
        (9.9, "1.0% faster but not by enough to replace the default rule's config"),
        (None, "0.0% slower"),
    ],
)
def test_explain_says_that_a_default_was_kept_though_the_next_is_faster(
    cpu_as_gpu: None, tmp_path: Path, runner_up_us: float | None, said: str
) -> None:
    path = tmp_path / "mine.json"
    kept = cell(
        16, TileConfig(), runner_up=TileConfig(head_split=2), runner_up_us=runner_up_us, margin=0.0, default_us=10.0
    )
    tables.write(path, table({SMALL: [kept]}))
    text = str(replayssm_cute.explain(problem=SMALL, batch=16, target=H200, table_paths=[path]))
    assert said in text


def test_explain_says_estimated(cpu_as_gpu: None, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    tables.write(path, table({SMALL: [cell(16, TileConfig())]}, provenance="estimated"))
    text = str(replayssm_cute.explain(problem=SMALL, batch=9, target=H200, table_paths=[path]))
    assert "never measured on this GPU" in text
    assert "measured table" not in text


def test_explain_forced_config(cpu_as_gpu: None) -> None:
    found = replayssm_cute.explain(problem=SMALL, batch=1, target=H200, config=TileConfig(head_split=2))
    assert found.source == "forced"
    with pytest.raises(ValueError, match="head_split 3"):
        replayssm_cute.explain(problem=SMALL, batch=1, target=H200, config=TileConfig(head_split=3))


def test_explain_refuses_half_a_question() -> None:
    with pytest.raises(ValueError, match="batch: got None"):
        replayssm_cute.explain(problem=SMALL, target="h200")
    with pytest.raises(ValueError, match="unknown target 'h900'"):
        replayssm_cute.explain(problem=SMALL, batch=1, target="h900")
    with pytest.raises(TypeError, match="problem: got dict, expected Problem or None"):
        replayssm_cute.explain(problem={}, batch=1, target="h200")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="target: got int, expected Target, str or None"):
        replayssm_cute.explain(problem=SMALL, batch=1, target=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not both"):
        replayssm_cute.explain(problem=SMALL, batch=1, target="h200", **random_call(SMALL, 2).kwargs())
    with pytest.raises(TypeError, match="missing a required argument"):
        replayssm_cute.explain()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="target: got None without a GPU"):
            replayssm_cute.explain(problem=SMALL, batch=1)


def test_use_tables_changes_what_runs(cpu_as_gpu: None, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    tables.write(path, table({SMALL: [cell(8, TileConfig(head_split=2))]}))
    call = random_call(SMALL, 2)
    for paths, config in (([], TileConfig()), ([path], TileConfig(head_split=2)), ([], TileConfig())):
        replayssm_cute.use_tables(paths)
        plan.run(plan.kernel_args(call), call.dt_softplus, False, None)
        assert [p.choice and p.choice.config for p in plan._plans.values() if p] == [config]


# ---- the package -----------------------------------------------------------------------------------


def test_public_names() -> None:
    for name in replayssm_cute.__all__:
        assert getattr(replayssm_cute, name) is not None
    assert callable(replayssm_cute.warmup), "the module must not hide the function"
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        replayssm_cute.nothing  # noqa: B018


def test_importing_the_api_imports_no_dsl_and_starts_no_cuda() -> None:
    code = (
        "import sys, replayssm_cute, replayssm_cute.api, torch;"
        "assert 'cutlass' not in sys.modules and 'tvm_ffi' not in sys.modules;"
        "assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_signature_is_the_contracts() -> None:
    import inspect

    parameters = inspect.signature(api.checkpointing_ssu).parameters
    keyword_only = [n for n, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY]
    assert keyword_only == ["cu_seqlens", "max_seqlen", "enable_pdl", "state_copy", "precision", "config"]
    low = ["state_scale", "rand_seed", "philox_rounds", "state_copy", "precision"]
    names = [*list(parameters)[:18], "cu_seqlens", "max_seqlen", *low]
    assert names == [f.name for f in dataclasses.fields(calls.Call)]
    assert list(parameters)[18:21] == ["state_scale", "rand_seed", "philox_rounds"]
