"""Prepared plans: what `prepare` checks, what `launch` checks, and that it runs the step."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import bad_inputs
import fakes
import pytest
import torch
from fakes import SMALL

import replayssm_cute
from replayssm_cute import Plan, api, compiler, plan
from replayssm_cute.calls import Call, random_call
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

fake_compiler = fakes.fake_compiler
cpu_as_gpu = fakes.cpu_as_gpu

RICH = dataclasses.replace(SMALL, has_z=True)
RAGGED = dataclasses.replace(RICH, ragged=True)
FIXED = ("dt_softplus", "max_seqlen", "philox_rounds", "precision")  # of a call, when it is prepared


def launch(prepared: Plan, call: Call) -> torch.Tensor:
    return prepared.launch(*plan.kernel_args(call))


def on_gpu(call: Call, **options: Any) -> Plan:
    """A plan for CPU tensors in a GPU's place: `prepare` itself would give the reference."""
    problem = plan.checked_problem(call, options.get("enable_pdl", False))
    return plan.make(problem, call.batch, -1, options.get("config"))


def is_launched(given: dict[str, Any], call: Call) -> bool:
    """Whether a fault is in an argument of launch and bind; without cu_seqlens they take a ragged call as dense."""
    if call.cu_seqlens is not None and given["cu_seqlens"] is None:
        return False
    return all(given[name] is getattr(call, name) for name in ("dt_softplus", "max_seqlen"))


def assert_same(call: Call, expected: Call) -> None:
    for name in ("out", "state", "x_cache", "B_cache", "dt_cache"):
        torch.testing.assert_close(getattr(call, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)


def test_takes_exactly_the_calls_arguments() -> None:
    call, prepare = (inspect.signature(f) for f in (api.checkpointing_ssu, api.prepare))
    assert call.parameters == prepare.parameters
    launched = inspect.signature(Plan.launch).parameters
    fixed = {
        "dt_softplus",
        "philox_rounds",
        "precision",
        "max_seqlen",
        "enable_pdl",
        "config",
    }
    assert set(launched) - {"self"} == set(call.parameters) - fixed
    assert list(launched)[1:16] == [n for n in call.parameters if n not in fixed][:15]
    last = ["state_batch_indices", "cu_seqlens", "pad_slot_id", "state_scale", "rand_seed", "state_copy"]
    assert list(launched)[16:] == last, "as kernels take them"
    assert set(launched) - {"self"} == {f.name for f in dataclasses.fields(Call)} - fixed
    for name, parameter in list(launched.items())[1:]:
        assert parameter.default == call.parameters[name].default


def test_on_the_cpu_a_launch_runs_the_reference_and_prepare_writes_nothing() -> None:
    call = random_call(RICH, 3, padding=[1])
    before, expected = call.clone(), call.clone()
    checkpointing_ssu_reference(**expected.kwargs())
    prepared = replayssm_cute.prepare(**call.kwargs())
    assert_same(call, before)
    assert (prepared.problem, prepared.batch, prepared.choice, prepared.device) == (RICH, 3, None, None)
    assert launch(prepared, call) is call.out
    assert_same(call, expected)
    other = random_call(RICH, 3, seed=1)
    expected = other.clone()
    checkpointing_ssu_reference(**expected.kwargs())
    given = {k: v for k, v in other.kwargs().items() if k not in FIXED}
    prepared.launch(**given)
    assert_same(other, expected)


def test_a_prepared_ragged_launch_takes_other_lengths_totals_and_batches() -> None:
    call = random_call(RAGGED, 3, padding=[1], lengths=(2, 1, 0))
    before, expected = call.clone(), call.clone()
    checkpointing_ssu_reference(**expected.kwargs())
    prepared = replayssm_cute.prepare(**call.kwargs())
    assert_same(call, before)
    assert (prepared.problem, prepared.batch, prepared.choice) == (RAGGED, 3, None)
    assert launch(prepared, call) is call.out
    assert_same(call, expected)
    for seed, batch in enumerate((1, 3, 5)):
        other = random_call(RAGGED, batch, tail=seed, seed=seed)
        expected = other.clone()
        checkpointing_ssu_reference(**expected.kwargs())
        launch(prepared, other)
        assert_same(other, expected)


@pytest.mark.parametrize(
    "ragged,bad",
    [*((False, b) for b in bad_inputs.bad_inputs()), *((True, b) for b in bad_inputs.bad_packing())],
    ids=lambda v: getattr(v, "name", str(v)),
)
def test_prepare_and_launch_refuse_what_the_call_refuses(ragged: bool, bad: bad_inputs.Bad) -> None:
    call = bad_inputs.good_ragged_call() if ragged else bad_inputs.good_call()
    prepared = replayssm_cute.prepare(**call.kwargs())
    given = call.kwargs()
    bad.change(given)
    with pytest.raises(bad.error) as caught:
        replayssm_cute.prepare(**given)
    for word in bad.words:
        assert word in str(caught.value)
    if is_launched(given, call):
        before = call.out.clone()
        with pytest.raises(bad.error) as caught:
            launch(prepared, Call(**given))
        for word in bad.words:
            assert word in str(caught.value)
        torch.testing.assert_close(call.out, before, rtol=0, atol=0, equal_nan=True)


def test_on_the_cpu_launch_checks_slots_and_cursors_too() -> None:
    call = random_call(SMALL, 3)
    prepared = replayssm_cute.prepare(**call.kwargs())
    assert call.state_batch_indices is not None
    call.state_batch_indices[1] = 99
    with pytest.raises(ValueError, match="state_batch_indices: got 99"):
        launch(prepared, call)


@pytest.mark.fault(12)
@pytest.mark.parametrize("make", [lambda c: replayssm_cute.prepare(**c.kwargs()), on_gpu], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    "change",
    [{"tokens": 1}, {"groups": 1}, {"has_z": True}, {"dt_dtype": "f32"}, {"index_dtype": "i64"}, {"ragged": True}],
)
def test_a_call_of_another_problem_is_refused_and_says_in_what(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch, make: Callable[[Call], Plan], change: dict[str, Any]
) -> None:
    real = fakes.FakeKernel.__call__

    def checked(self: fakes.FakeKernel, *args: Any) -> None:
        if plan.problem_of(plan.call_of(self.problem, args), self.problem.pdl) != self.problem:
            raise ValueError("Mismatched Tensor on argument #3")
        real(self, *args)

    monkeypatch.setattr(fakes.FakeKernel, "__call__", checked)
    prepared = make(random_call(SMALL, 2))
    ((name, value),) = change.items()
    expected = rf"another problem than the prepared one: .*{name} {value!r}, expected {getattr(SMALL, name)!r}"
    with pytest.raises(ValueError, match=expected):
        launch(prepared, random_call(dataclasses.replace(SMALL, **change), 2))


@pytest.mark.parametrize("make", [lambda c: replayssm_cute.prepare(**c.kwargs()), on_gpu], ids=["cpu", "gpu"])
def test_a_ragged_plan_refuses_dense_calls_and_other_windows(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch, make: Callable[[Call], Plan]
) -> None:
    real = fakes.FakeKernel.__call__

    def checked(self: fakes.FakeKernel, *args: Any) -> None:
        if args[16] is None or args[1].shape[2] != self.problem.ring_rows:
            raise ValueError("Mismatched Tensor on argument #16")
        real(self, *args)

    monkeypatch.setattr(fakes.FakeKernel, "__call__", checked)
    prepared = make(random_call(RAGGED, 2, lengths=(2, 1)))
    other = dataclasses.replace(RICH, tokens=3, window=3)
    with pytest.raises(ValueError, match="ragged False, expected True"):
        launch(prepared, random_call(other, 2))
    with pytest.raises(ValueError, match="window 5, expected 4"):
        launch(prepared, random_call(dataclasses.replace(RAGGED, window=5), 2))


def test_a_launch_is_one_launch_and_nothing_else(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(SMALL, 3)
    prepared = on_gpu(call)
    kernel = prepared.kernel
    assert isinstance(kernel, fakes.FakeKernel)
    before = kernel.launches
    monkeypatch.setattr(plan, "problem_of", lambda *_: pytest.fail("checked again"))
    monkeypatch.setattr(compiler, "get", lambda *_: pytest.fail("looked up again"))
    for _ in range(3):
        assert launch(prepared, call) is call.out
    assert kernel.launches == before + 3


def test_what_the_kernel_refuses_for_reasons_of_its_own_is_raised(cpu_as_gpu: None) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA error: launch failure")

    call = random_call(SMALL, 2)
    with pytest.raises(RuntimeError, match="launch failure"):
        launch(dataclasses.replace(on_gpu(call), kernel=broken), call)
    call.D = 3.0  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"D: got float, expected a torch\.Tensor"):
        launch(dataclasses.replace(on_gpu(random_call(SMALL, 2)), kernel=broken), call)


def test_the_prepared_config_and_device_are_kept(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    call = random_call(SMALL, 2)
    prepared = on_gpu(call, config=TileConfig(head_split=2))
    assert prepared.choice is not None and prepared.choice.config == TileConfig(head_split=2)
    plan.forget()  # as use_tables does
    entered: list[int] = []

    @contextlib.contextmanager
    def on_device(index: int) -> Iterator[None]:
        entered.append(index)
        yield

    monkeypatch.setattr(plan, "on_device", on_device)
    launch(prepared, call)
    assert entered == []
    monkeypatch.setattr(plan, "current_device", lambda: 3)
    launch(prepared, call)
    assert entered == [-1]
    elsewhere = dataclasses.replace(prepared, device=5)
    with pytest.raises(ValueError, match="state: on device cpu, expected the prepared one, cuda:5"):
        launch(elsewhere, call)
    assert entered == [-1]


@pytest.mark.parametrize("make", [lambda c: replayssm_cute.prepare(**c.kwargs()), on_gpu], ids=["cpu", "gpu"])
@pytest.mark.parametrize("ragged", [False, True])
def test_a_bound_launch_runs_the_step_on_what_its_tensors_hold_by_then(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch, make: Callable[[Call], Plan], ragged: bool
) -> None:
    monkeypatch.setattr(plan, "converted", lambda t: t)  # fake kernels compute with torch
    problem = dataclasses.replace(RICH, ragged=ragged)
    given: dict[str, Any] = {"padding": [1], "lengths": (2, 1, 1) if ragged else None, "tail": int(ragged)}
    call = random_call(problem, 3, **given)
    prepared = make(call)
    before = call.clone()
    run = prepared.bind(*plan.kernel_args(call))
    assert_same(call, before)
    for seed in (1, 2):
        fresh = random_call(problem, 3, seed=seed, **given)
        for name in ("x", "B", "C", "z", "state"):
            getattr(call, name).copy_(getattr(fresh, name))
        expected = call.clone()
        checkpointing_ssu_reference(**expected.kwargs())
        assert run() is call.out
        assert_same(call, expected)


def test_binding_checks_everything(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "converted", lambda t: pytest.fail("converted what is refused"))
    for ragged, faults in ((True, bad_inputs.bad_packing()), (False, bad_inputs.bad_inputs())):
        call = bad_inputs.good_ragged_call() if ragged else bad_inputs.good_call()
        prepared = on_gpu(call)
        for bad in faults:
            given = call.kwargs()
            bad.change(given)
            if not is_launched(given, call):
                continue
            for name in FIXED:
                del given[name]
            with pytest.raises(bad.error) as caught:
                prepared.bind(**given)
            assert all(word in str(caught.value) for word in bad.words), (bad.name, str(caught.value))
    other = random_call(dataclasses.replace(bad_inputs.PROBLEM, tokens=1), 2)
    with pytest.raises(ValueError, match=r"another problem than the prepared one: .*tokens 1, expected 3"):
        prepared.bind(*plan.kernel_args(other))
    with pytest.raises(ValueError, match="state: on device cpu, expected the prepared one, cuda:5"):
        dataclasses.replace(prepared, device=5).bind(*plan.kernel_args(call))


def test_a_bound_launch_hands_over_memory_and_one_tensor_of_torchs(cpu_as_gpu: None) -> None:
    """Torch's own tensor is what the current stream is learned from."""
    got: list[Any] = []
    call = random_call(SMALL, 3)
    call.D = torch.nn.Parameter(call.D)  # type: ignore[arg-type]  # as models hold it
    kept = dataclasses.replace(on_gpu(random_call(SMALL, 3)), kernel=lambda *args: got.extend(args))
    run = kept.bind(*plan.kernel_args(call))
    assert run() is call.out
    for given, held in zip(plan.kernel_args(call), got, strict=True):
        if isinstance(given, torch.Tensor):
            assert (held is given) == (given is call.out)
            again = torch.from_dlpack(held)
            assert (again.data_ptr(), again.shape, again.stride()) == (given.data_ptr(), given.shape, given.stride())
        else:
            assert held is given


def test_a_bound_launch_makes_its_device_current(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    @contextlib.contextmanager
    def on_device(index: int) -> Iterator[None]:
        entered.append(index)
        yield

    call = random_call(SMALL, 2)
    prepared = on_gpu(call)
    monkeypatch.setattr(plan, "on_device", on_device)
    monkeypatch.setattr(plan, "converted", lambda t: t)
    run = prepared.bind(*plan.kernel_args(call))
    run()
    assert entered == []
    monkeypatch.setattr(plan, "current_device", lambda: 3)
    run()
    assert entered == [-1]


@pytest.mark.gpu
@pytest.mark.kernels(lambda where, problem: [problem])
@pytest.mark.parametrize("problem", [RICH, RAGGED], ids=["dense", "ragged"])
def test_a_prepared_launch_gives_the_calls_result_bit_for_bit(problem: Problem) -> None:
    call = random_call(problem, 5, padding=[1], device="cuda")
    twin, bound = call.clone(), call.clone()
    prepared = replayssm_cute.prepare(**call.kwargs())
    api.checkpointing_ssu(**twin.kwargs())
    launch(prepared, call)
    prepared.bind(*plan.kernel_args(bound))()
    torch.cuda.synchronize()
    for same in (call, bound):
        assert_same(same.to("cpu"), twin.to("cpu"))


@pytest.mark.gpu
@pytest.mark.kernels(RICH)
@pytest.mark.parametrize("bound", [False, True], ids=["launch", "bind"])
def test_a_prepared_launch_on_a_gpu_refuses_and_goes_into_graphs_and_streams(bound: bool) -> None:
    call = random_call(RICH, 5, device="cuda")
    prepared = replayssm_cute.prepare(**call.kwargs())
    again = prepared.bind(*plan.kernel_args(call)) if bound else lambda: launch(prepared, call)
    for name, value in {"dt_cache": call.dt_cache.double(), "A": call.A.contiguous(), "C": call.C.cpu()}.items():
        with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
            launch(prepared, dataclasses.replace(call, **{name: value}))
    with pytest.raises(ValueError, match="tokens 1, expected 2"):
        launch(prepared, random_call(dataclasses.replace(RICH, tokens=1, window=5), 5, device="cuda"))
    expected = call.clone()
    api.checkpointing_ssu(**expected.kwargs())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again()
    graph.replay()
    torch.cuda.synchronize()
    assert_same(call.to("cpu"), expected.to("cpu"))
    side, x = torch.cuda.Stream(), torch.randn_like(call.x)
    expected = dataclasses.replace(call.clone(), x=x)
    api.checkpointing_ssu(**expected.kwargs())
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10_000_000)
        call.x.copy_(x)
        again()  # on another stream it would not wait for the new x
    side.synchronize()
    assert_same(call.to("cpu"), expected.to("cpu"))
