"""Plans: memoized look-up, what a signature covers, the kernel's own argument checks, captures, devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bad_inputs
import fakes
import pytest
import torch
from fakes import H200, SMALL
from pretend_cuda import Pretend

from replayssm_cute import api, compare, compiler, plan, tables
from replayssm_cute.calls import Call, random_call
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

fake_compiler = fakes.fake_compiler
cpu_as_gpu = fakes.cpu_as_gpu


def run(call: Call, *, pdl: bool = False, config: TileConfig | None = None) -> torch.Tensor:
    return plan.run(plan.kernel_args(call), call.dt_softplus, pdl, config, call.max_seqlen)


def strided(call: Call) -> Call:
    """The same call with A's heads two elements apart: no longer compact."""
    call.A = call.A.repeat_interleave(2, 0)[::2, :1, :1].expand(call.A.shape)
    return call


def plans() -> list[plan.Plan]:
    return [p for p in plan._plans.values() if p is not None]


@pytest.fixture
def checking(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fake kernels refuse the calls of other problems, as `TestKernelChecks` sees it of real ones."""
    real = fakes.FakeKernel.__call__

    def checked(self: fakes.FakeKernel, *args: Any) -> None:
        got = plan.problem_of(plan.call_of(self.problem, args), self.problem.pdl)
        if got not in (self.problem, dataclasses.replace(self.problem, compact=True)):
            raise ValueError("Mismatched Tensor on argument #3")
        real(self, *args)  # a kernel that is not compact takes what a compact one does

    monkeypatch.setattr(fakes.FakeKernel, "__call__", checked)


def launches() -> int:
    return sum(kernel.launches for kernel in compiler._memory.values())  # type: ignore[attr-defined]


# ---- memo ------------------------------------------------------------------------------------------


def test_run_gives_the_references_result(cpu_as_gpu: None) -> None:
    call = random_call(SMALL, 3, padding=[1])
    expected = call.clone()
    checkpointing_ssu_reference(**expected.kwargs())
    assert run(call) is call.out
    for name in ("out", "state", "x_cache", "B_cache", "dt_cache"):
        torch.testing.assert_close(getattr(call, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)


def test_known_signature_is_not_checked_or_planned_again(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    run(random_call(SMALL, 3))

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("a warm call went down the slow path")

    before = launches()
    monkeypatch.setattr(plan, "problem_of", never)
    monkeypatch.setattr(plan, "make", never)
    monkeypatch.setattr(compiler, "get", never)
    run(random_call(SMALL, 3, seed=1))  # other tensors, the same signature
    assert launches() == before + 1


def test_first_call_prepares_every_config_of_the_tables(cpu_as_gpu: None) -> None:
    run(random_call(SMALL, 2))
    candidates = tables.candidates(SMALL, H200)
    assert {r.config for r, _ in compiler._memory} == set(candidates)
    compiled = compiler.counters().compiled
    run(random_call(SMALL, 5))
    assert compiler.counters().compiled == compiled == len(candidates)


@pytest.mark.fault(29)
def test_other_problem_flags_get_plans_of_their_own(checking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[dict[str, Any]] = [
        {"has_z": True}, {"dt_softplus": False}, {"d_dtype": None}, {"dt_bias_dtype": None}, {"index_dtype": "i64"},
        {"index_dtype": None}, {"state_dtype": "bf16"}, {"dt_dtype": "f32"}, {"a_dtype": "bf16"}, {"pdl": True},
        {"d_dtype": "f32"}, {"dt_bias_dtype": "f32"}, {"io_dtype": "f16", "dt_dtype": "f16"}, {"window": 6},
        {"tokens": 1}, {"groups": 4}, {"heads": 8}, {"d_state": 128}, {"head_dim": 128}, {"ragged": True},
        {"ragged": True, "tokens": 1}, {"ragged": True, "has_z": True}, {"ragged": True, "index_dtype": None},
        {"ragged": True, "dt_softplus": False}, {"ragged": True, "d_dtype": "f32"}, {"ragged": True, "window": 6},
        {"ragged": True, "index_dtype": "i64"}, {"ragged": True, "pdl": True}, {"ragged": True, "heads": 8},
    ]  # fmt: skip
    problems = [SMALL, *(dataclasses.replace(SMALL, **change) for change in changes)]
    problems += [dataclasses.replace(SMALL, compact=False, ragged=ragged) for ragged in (False, True)]
    served: list[Problem] = []
    real = fakes.FakeKernel.__call__

    def noted(self: fakes.FakeKernel, *args: Any) -> None:
        real(self, *args)
        served.append(self.problem)

    monkeypatch.setattr(fakes.FakeKernel, "__call__", noted)
    for _ in range(2):
        for problem in problems:
            call = random_call(problem, 2)
            run(call if problem.compact else strided(call), pdl=problem.pdl)
            assert served[-1] == problem
    before = len(plan._plans)
    monkeypatch.setattr(plan, "make", lambda *_: pytest.fail("a plan was made again"))
    for problem in problems:  # of those that share a signature too, each has its plan by now
        call = random_call(problem, 2)
        run(call if problem.compact else strided(call), pdl=problem.pdl)
        assert served[-1] == problem
    assert len(plan._plans) == before


def test_problems_that_share_a_signature_get_their_own_kernels(checking: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page pool can hide a ring length: the same strides, another R. The kernel's own checks tell them apart."""
    calls = []
    for problem in (SMALL, dataclasses.replace(SMALL, window=5), dataclasses.replace(SMALL, window=6)):
        call = random_call(problem, 2)
        for name, rows in (("x_cache", 2), ("B_cache", 2), ("dt_cache", 2)):
            t = getattr(call, name)
            pool = torch.zeros(*t.shape[:rows], 16, *t.shape[rows + 1 :], dtype=t.dtype)
            setattr(call, name, pool[:, :, : t.shape[2]])
        calls.append(call)
    for call in (*calls, *calls):
        expected = call.clone()
        checkpointing_ssu_reference(**expected.kwargs())
        run(call)
        assert torch.equal(call.x_cache, expected.x_cache)
    assert list(plan._plans.values()).count(None) == 1
    monkeypatch.setattr(plan, "make", lambda *_: pytest.fail("a plan was made again"))
    for call in calls:
        run(call)


WIDE_STRIDES: dict[str, tuple[int, ...]] = {
    # heads and groups as if contiguous; the second token begins one stride further
    "x": (64, 1 << 31, 64, 1),
    "B": (1 << 33, (1 << 31) - 64, 64, 1),
    "C": (64, 1 << 32, 64, 1),
    "z": (64, 1 << 40, 64, 1),
    "out": (256, 1 << 31, 64, 1),
}


def on_meta(call: Call) -> Call:
    tensors = {k: v for k, v in call.kwargs().items() if isinstance(v, torch.Tensor)}
    return dataclasses.replace(
        call,
        **{k: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for k, t in tensors.items()},
    )


@pytest.mark.parametrize("name", WIDE_STRIDES)
def test_tokens_too_far_apart_for_32_bit_offsets_get_the_general_kernel(name: str) -> None:
    """Kernels of compact problems would wrap around, to an address before the tensor."""
    call = on_meta(random_call(dataclasses.replace(SMALL, has_z=True), 2))
    assert plan.problem_of(call, False).compact
    t, strides = getattr(call, name), WIDE_STRIDES[name]
    setattr(call, name, torch.empty_strided(t.shape, strides, dtype=t.dtype, device="meta"))
    assert not plan.problem_of(call, False).compact
    near = (strides[0], (1 << 31) - t.shape[2] * 64, *strides[2:])  # the last offset is 2^31 - 64
    setattr(call, name, torch.empty_strided(t.shape, near, dtype=t.dtype, device="meta"))
    assert plan.problem_of(call, False).compact


def test_a_slot_too_large_for_32_bit_offsets_gets_the_general_kernel() -> None:
    for heads, compact in ((131072, True), (131080, False)):  # of 128 x 128 elements
        problem = dataclasses.replace(SMALL, heads=heads, groups=8, head_dim=128, d_state=128)
        call = plan.scratch_call(problem, torch.device("meta"))
        assert plan.problem_of(call, False).compact is compact


def test_a_call_with_tokens_far_apart_runs(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayssm_cute.problem.OFFSET_LIMIT", 1000)  # elements
    problem = dataclasses.replace(SMALL, compact=False)
    call = random_call(SMALL, 3)
    expected = call.clone()
    checkpointing_ssu_reference(**expected.kwargs())
    again = call.clone()
    for given in (call, again):  # cold, warm
        run(given)
        assert torch.equal(given.out, expected.out)
        assert [p.problem for p in plans()] == [problem]
    assert api.explain(**call.kwargs(), target=H200).problem == problem


# ---- ragged calls ----------------------------------------------------------------------------------

RAGGED = dataclasses.replace(SMALL, ragged=True)


def test_a_ragged_call_of_any_total_and_lengths_runs_the_plan_of_its_batch(
    checking: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number of packed tokens differs from step to step: it must cost neither a check nor a plan."""
    run(random_call(RAGGED, 3, lengths=2))
    monkeypatch.setattr(plan, "make", lambda *_: pytest.fail("a plan was made again"))
    monkeypatch.setattr(plan, "_find", lambda *_: pytest.fail("a call went down the slow path"))
    for lengths, tail in (((2, 1, 0), 0), ((0, 2, 0), 1), ((0, 0, 0), 2), ((2, 2, 2), 5)):
        call = random_call(RAGGED, 3, padding=[1], lengths=lengths, tail=tail, seed=tail)
        expected = call.clone()
        checkpointing_ssu_reference(**expected.kwargs())
        assert run(call) is call.out
        for name in ("out", "state", "x_cache", "B_cache", "dt_cache"):
            torch.testing.assert_close(getattr(call, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)
    (made,) = plans()
    assert (made.problem, made.batch) == (RAGGED, 3)


def test_wrong_packing_after_a_right_call_raises_the_same_errors(checking: None) -> None:
    call = bad_inputs.good_ragged_call()
    run(call)
    for bad in (
        *bad_inputs.bad_packing(),
        *(b for b in bad_inputs.bad_inputs() if b.name not in bad_inputs.DENSE_ONLY),
    ):
        given = call.kwargs()
        bad.change(given)
        before = launches()
        with pytest.raises(bad.error) as caught:
            run(Call(**given))
        assert all(word in str(caught.value) for word in bad.words), (bad.name, str(caught.value))
        assert launches() == before, bad.name
        run(call)
        assert launches() == before + 1, bad.name


def test_true_is_no_max_seqlen_on_a_warm_signature_either(cpu_as_gpu: None) -> None:
    call = random_call(dataclasses.replace(RAGGED, tokens=1), 2, lengths=1)
    run(call)
    for value, kind in ((True, "bool"), (1.0, "float")):
        call.max_seqlen = value  # type: ignore[assignment]
        with pytest.raises(TypeError, match=f"max_seqlen: got {kind}, expected an int"):
            run(call)


def test_a_ragged_batch_of_another_size_than_its_slots_is_refused_warm_too(cpu_as_gpu: None) -> None:
    """No kernel can check it: the sizes of the two tensors differ by one."""
    call, smaller = random_call(RAGGED, 3), random_call(RAGGED, 2)
    run(call)
    run(smaller)
    call.state_batch_indices = smaller.state_batch_indices
    before = launches()
    with pytest.raises(ValueError, match=r"state_batch_indices: got shape \(2,\), expected \(3,\)"):
        run(call)
    assert launches() == before
    bare = dataclasses.replace(RAGGED, index_dtype=None)
    run(random_call(bare, 3, slots=3))
    before = launches()
    few = random_call(bare, 3, slots=3)
    for name in (*bad_inputs.WRITTEN[:4], "ring_start", "prev_num_accepted_tokens"):
        setattr(few, name, getattr(few, name)[:2])
    with pytest.raises(ValueError, match="state: got 2 slots for 3 rows"):
        run(few)
    assert launches() == before


@pytest.mark.parametrize("name", ["x", "B", "C", "out", "z"])
def test_packed_tokens_that_share_memory_are_refused_after_a_call_of_one(name: str, cpu_as_gpu: None) -> None:
    """A single token may have any stride; more than one may not, and the total is not in the signature."""
    problem = dataclasses.replace(RAGGED, has_z=True)
    for total in (1, 2):
        call = random_call(problem, 2, lengths=(1, 0), tail=total - 1)
        t = getattr(call, name)
        setattr(call, name, t.as_strided(t.shape, (t.stride(0), 0, *t.stride()[2:])))
        if total == 1:
            run(call)
            continue
        with pytest.raises(ValueError, match=f"^{name}: got stride"):
            run(call)


def test_packed_outputs_with_heads_further_apart_than_tokens_are_told_apart_by_their_total(cpu_as_gpu: None) -> None:
    """Heads lie three tokens apart: three tokens fit between them, the fourth would overlap the next head."""
    buffer = torch.zeros(1 << 12, dtype=torch.bfloat16)
    for total in (3, 4):
        call = random_call(RAGGED, 2, lengths=(1, 0), tail=total - 1)
        call.out = buffer.as_strided(call.out.shape, (1 << 11, 64, 3 * 64, 1))
        if total == 3:
            run(call)
            continue
        with pytest.raises(ValueError, match=r"out: got strides .* expected no overlapping elements"):
            run(call)


def test_a_ragged_call_whose_tokens_lie_far_apart_runs_the_general_kernel(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = 2 * 8 * 4 * 64  # of x, 4 heads of 64: eight tokens reach half of it
    monkeypatch.setattr("replayssm_cute.problem.OFFSET_LIMIT", limit)
    monkeypatch.setattr("replayssm_cute.problem._reach", lambda t: 0)
    served: list[bool] = []
    real = fakes.FakeKernel.__call__

    def noted(self: fakes.FakeKernel, *args: Any) -> None:
        real(self, *args)
        served.append(self.problem.compact)

    monkeypatch.setattr(fakes.FakeKernel, "__call__", noted)
    for _ in range(2):
        for total, compact in ((7, True), (8, False), (9, False), (7, True)):
            run(random_call(RAGGED, 4, lengths=(1, 0, 2, 0), tail=total - 3))
            assert served[-1] is compact, total


def test_memory_of_signatures_is_bounded(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_LIMIT", 3)
    for batch in range(1, 9):
        run(random_call(SMALL, batch))
        assert len(plan._plans) <= 3


@pytest.mark.parametrize("name", ["state", "x_cache", "B_cache", "dt_cache", "x", "B", "C", "out"])
def test_stride_zero_rows_are_refused_warm_too(name: str, cpu_as_gpu: None) -> None:
    """The kernel's checks take any multiple of the alignment for a stride, zero too; the signature does not."""
    problem = dataclasses.replace(SMALL, index_dtype=None)
    run(random_call(problem, 2, slots=2))
    call = random_call(problem, 2, slots=2)
    t = getattr(call, name)
    setattr(call, name, t[:1].expand(t.shape))
    before = launches()
    with pytest.raises(ValueError, match=f"{name}: got stride 0 on dimension 0"):
        run(call)
    assert launches() == before


@pytest.mark.parametrize("name", bad_inputs.WRITTEN)
def test_overlapping_rows_are_refused_warm_too(name: str, cpu_as_gpu: None) -> None:
    run(random_call(SMALL, 3))
    call = random_call(SMALL, 3)
    t = getattr(call, name)
    half = (t.stride(0) // 2, *t.stride()[1:])
    setattr(call, name, torch.zeros(t.numel(), dtype=t.dtype).as_strided(t.shape, half))
    before = launches()
    with pytest.raises(ValueError, match=f"{name}: got strides .* expected no overlapping elements"):
        run(call)
    assert launches() == before


def test_wrong_arguments_after_a_right_call_raise_the_same_errors(checking: None) -> None:
    call = bad_inputs.good_call()
    run(call)
    for bad in bad_inputs.bad_inputs():
        given = call.kwargs()
        bad.change(given)
        before = launches()
        with pytest.raises(bad.error) as caught:
            run(Call(**given))
        assert all(word in str(caught.value) for word in bad.words), (bad.name, str(caught.value))
        assert launches() == before, bad.name
        run(call)  # the right one still runs
        assert launches() == before + 1, bad.name


def test_what_the_kernel_refuses_is_explained_in_the_callers_terms(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = random_call(SMALL, 2)
    run(call)
    call.dt_cache = call.dt_cache.double()  # not in the signature: the kernel's own checks are asked

    def refuse(*_: Any) -> None:
        raise ValueError("Mismatched Tensor on argument #3")

    for signature, known in plan._plans.items():
        plan._plans[signature] = known and dataclasses.replace(known, kernel=refuse)
    monkeypatch.setattr(plan, "_last", (None, None))
    with pytest.raises(TypeError, match=r"dt_cache: got torch\.float64, expected torch\.float32"):
        run(call)
    call.dt_cache = call.dt_cache.float()
    with pytest.raises(ValueError, match="Mismatched Tensor"):  # nothing wrong in our terms: the original error
        run(call)


def test_arguments_that_are_no_tensors(cpu_as_gpu: None) -> None:
    for name in ("x", "dt_cache", "out", "D"):
        call = random_call(SMALL, 2)
        setattr(call, name, [1.0])
        with pytest.raises(TypeError, match=f"{name}: got list, expected a torch.Tensor"):
            run(call)


@pytest.mark.parametrize("pad", [0.0, None, True, "0", 1 << 63, -(1 << 63) - 1])
def test_pad_slot_id_is_an_int64(pad: Any, cpu_as_gpu: None) -> None:
    call = random_call(SMALL, 2)
    call.pad_slot_id = pad
    with pytest.raises((TypeError, ValueError), match="pad_slot_id: got"):
        run(call)


# ---- configs, captures, devices --------------------------------------------------------------------


def test_forced_config_runs_and_an_invalid_one_says_why(cpu_as_gpu: None) -> None:
    call = random_call(SMALL, 2)
    run(call, config=TileConfig(head_split=2))
    (made,) = plans()
    assert made.choice == tables.Choice(TileConfig(head_split=2), "forced", "the caller's config argument")
    with pytest.raises(ValueError, match="head_split 3 x tiles_per_warp 1 does not divide 4 tiles"):
        run(call, config=TileConfig(head_split=3))
    with pytest.raises(TypeError, match="config: got dict"):
        run(call, config={"head_split": 2})  # type: ignore[arg-type]


@pytest.mark.fault(20)
def test_capture_without_preparation_is_refused_and_names_the_fix(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = random_call(SMALL, 6)
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "capturing", lambda: True)
        with pytest.raises(RuntimeError) as caught:
            run(call)
        for part in (SMALL.label(), "batch 6", "replayssm_cute.warmup"):
            assert part in str(caught.value)
        assert compiler.counters() == compiler.Counters()
    run(random_call(SMALL, 1))
    monkeypatch.setattr(compiler, "capturing", lambda: True)
    run(call)  # another batch of a prepared problem


def test_capture_refuses_a_kernel_that_is_loaded_but_not_on_the_device(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for config in tables.candidates(SMALL, H200):
        compiler.get(SMALL, config, H200)
    monkeypatch.setattr(compiler, "capturing", lambda: True)
    with pytest.raises(RuntimeError, match="not ready"):
        run(random_call(SMALL, 1))


def test_operands_device_is_made_current_only_when_it_is_not(cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[int] = []

    @contextlib.contextmanager
    def on_device(index: int) -> Iterator[None]:
        entered.append(index)
        yield

    call = random_call(SMALL, 2)
    run(call)
    monkeypatch.setattr(plan, "on_device", on_device)
    run(call)
    assert entered == []
    monkeypatch.setattr(plan, "current_device", lambda: 3)
    run(call)
    assert entered == [-1]


# ---- refusals on a warm signature ------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dt_softplus", "enable_pdl"])
def test_an_int_is_no_bool_on_a_warm_signature_either(cpu_as_gpu: None, name: str) -> None:
    """1 == True in Python, so a signature that holds the value alone would let it pass."""
    call = random_call(SMALL, 3)
    flags: dict[str, Any] = {"dt_softplus": True, "enable_pdl": True}
    plan.run(plan.kernel_args(call), **flags, config=None)
    before = launches()
    with pytest.raises(TypeError, match=f"{name}: got int, expected bool"):
        plan.run(plan.kernel_args(call), **flags | {name: 1}, config=None)
    assert launches() == before


def test_a_tensor_without_memory_is_named_on_a_warm_signature(
    cpu_as_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch refuses to hand a "meta" tensor to a kernel with a RuntimeError that names nothing."""
    call = random_call(SMALL, 3)
    run(call)
    (warm,) = plans()

    def refuse(*_: Any) -> None:
        raise RuntimeError("Cannot pack tensors on meta")

    monkeypatch.setattr(type(warm.kernel), "__call__", refuse)
    call.x = call.x.to("meta")
    with pytest.raises(ValueError, match="x: on device meta, expected state's device cpu"):
        run(call)


# ---- the kernel's own argument checks --------------------------------------------------------------

RICH = dataclasses.replace(SMALL, has_z=True)
NAMES = list(inspect.signature(plan.Plan.launch).parameters)[1:19]  # the rest is that of low-precision states
ALIGNED = ("state", "x_cache", "B_cache", "x", "B", "C", "out", "z")


KINDS = {
    "compact": RICH,
    "strided": dataclasses.replace(RICH, compact=False),
    "ragged": dataclasses.replace(RICH, ragged=True),
    "ragged strided": dataclasses.replace(RICH, ragged=True, compact=False),
}
# What kernels of ragged problems cannot check, and the signature does: cu_seqlens has one entry more than the slots.
BATCHES = {
    f"{name} dimension 0 is {n}"
    for name, size in (("cu_seqlens", 4), ("state_batch_indices", 3))
    for n in (size - 1, size + 1)
}


@functools.cache
def real_kernel(kind: str) -> compiler.Kernel:
    with tempfile.TemporaryDirectory() as scratch:
        compiler._export(compiler._build(KINDS[kind], TileConfig(), "sm_90a"), Path(scratch) / "step.o")
        return compiler._load(Path(scratch) / "step.o")


def good(kind: str = "compact") -> dict[str, Any]:
    problem = dataclasses.replace(KINDS[kind], compact=True)
    args = dict(zip(NAMES, plan.kernel_args(plan.scratch_call(problem, torch.device("cpu"), 3)), strict=True))
    return {k: Pretend.like(v) if isinstance(v, torch.Tensor) else v for k, v in args.items()}


def bad_variants(kind: str) -> dict[str, tuple[str, Any]]:
    """Every way in which one argument alone can be wrong, and that `from_tensors` refuses: (argument, value)."""
    found: dict[str, tuple[str, Any]] = {}

    def add(name: str, what: str, value: Any) -> None:
        found[f"{name} {what}"] = (name, value)

    for name, t in good(kind).items():
        if not isinstance(t, Pretend):
            continue
        size = t.dtype.itemsize
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int16, torch.int64):
            if dtype != t.dtype:
                add(name, f"is {dtype}", t.but(dtype=dtype))
        add(name, "lacks a dimension", t.but(shape=t.shape[1:], strides=t.strides[1:]))
        add(name, "has one dimension more", t.but(shape=(1, *t.shape), strides=(0, *t.strides)))
        for d in range(len(t.shape)):
            for n in (t.shape[d] + 1, t.shape[d] - 1):
                add(name, f"dimension {d} is {n}", t.but(shape=(*t.shape[:d], n, *t.shape[d + 1 :])))
            bumped = t.but(strides=(*t.strides[:d], t.strides[d] + 1, *t.strides[d + 1 :]))
            last = d == len(t.shape) - 1 and (len(t.shape) > 1 or name == "cu_seqlens")
            unused = d == 0 and t.shape[0] == 1  # packed tokens: no kernel has a use for that stride
            if (name in ALIGNED and not unused) or t.strides[d] == 0 or last:
                add(name, f"stride {d} is {bumped.strides[d]}", bumped)
        for offset in (1, 2, 8, 15) if name in ALIGNED else (1,) if size > 1 else ():
            add(name, f"starts {offset} bytes off", t.but(address=t.address + offset))
        add(name, "is on another GPU", t.but(device=1))
        add(name, "is None", None)
        add(name, "is an int", 7)
    add("z", "is on the CPU", torch.zeros(good(kind)["z"].shape, dtype=torch.bfloat16))
    for value in (1.0, None, "1", 1 << 63):
        add("pad_slot_id", f"is {value!r}", value)
    if not KINDS[kind].ragged:
        add("cu_seqlens", "is given", good("ragged")["cu_seqlens"])
        return found
    assert set(found) > BATCHES
    return {what: change for what, change in found.items() if what not in BATCHES}


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretended addresses must not reach a GPU")
class TestKernelChecks:
    """A warm launch relies on the checks that the DSL generates; here each of them is seen to refuse."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_right_arguments_get_as_far_as_the_missing_driver(self, kind: str) -> None:
        with pytest.raises(RuntimeError, match="Cuda"):
            real_kernel(kind)(*[v.tensor() if isinstance(v, Pretend) else v for v in good(kind).values()])

    @pytest.mark.parametrize("kind,variant", [(kind, variant) for kind in KINDS for variant in bad_variants(kind)])
    def test_wrong_argument_is_refused_before_the_launch(self, kind: str, variant: str) -> None:
        name, value = bad_variants(kind)[variant]
        args = {**good(kind), name: value}
        with pytest.raises((ValueError, TypeError, OverflowError)):
            real_kernel(kind)(*[v.tensor() if isinstance(v, Pretend) else v for v in args.values()])

    @pytest.mark.parametrize("total", [1, 7])
    def test_a_ragged_kernel_takes_any_total(self, total: int) -> None:
        """And none that the tensors do not agree on, as the test above shows."""
        args = good("ragged")
        for name in ("x", "dt", "B", "C", "out", "z"):
            t = args[name]
            args[name] = t.but(shape=(1, total, *t.shape[2:]), strides=(total * t.strides[1], *t.strides[1:]))
        with pytest.raises(RuntimeError, match="Cuda"):
            real_kernel("ragged")(*[v.tensor() if isinstance(v, Pretend) else v for v in args.values()])

    def test_absent_tensor_must_be_absent(self, tmp_path: Path) -> None:
        path = tmp_path / "step.o"
        compiler._export(compiler._build(dataclasses.replace(RICH, has_z=False), TileConfig(), "sm_90a"), path)
        kernel = compiler._load(path)
        with pytest.raises((ValueError, TypeError)):
            kernel(*[v.tensor() if isinstance(v, Pretend) else v for v in good().values()])


# ---- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.kernels(RICH)
def test_bad_tensors_on_a_warm_signature_raise_named_errors_and_leave_the_gpu_usable() -> None:
    problem = dataclasses.replace(SMALL, has_z=True)
    call = random_call(problem, 3, device="cuda")
    api.checkpointing_ssu(**call.kwargs())
    wide = torch.zeros(3 * 2 * 4 * 64 + 8, dtype=torch.bfloat16, device="cuda")
    off = wide[1 : 1 + 3 * 2 * 4 * 64].view(3, 2, 4, 64)
    changes: dict[str, Any] = {
        "z": off, "out": off, "dt_cache": call.dt_cache.double(), "ring_start": call.ring_start.long(),
        "A": call.A.contiguous(), "C": call.C.cpu(), "prev_num_accepted_tokens": call.prev_num_accepted_tokens[:-1],
    }  # fmt: skip
    for name, value in changes.items():
        with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
            api.checkpointing_ssu(**{**call.kwargs(), name: value})
    torch.cuda.synchronize()
    api.checkpointing_ssu(**call.kwargs())
    torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.kernels(RAGGED)
def test_bad_ragged_tensors_on_a_warm_signature_raise_named_errors_and_leave_the_gpu_usable() -> None:
    call = random_call(RAGGED, 3, lengths=(2, 0, 1), tail=1, device="cuda")
    assert call.cu_seqlens is not None
    api.checkpointing_ssu(**call.kwargs())
    changes: dict[str, Any] = {
        "cu_seqlens": call.cu_seqlens.long(), "out": call.out[:, :-1], "x": call.x.repeat(2, 1, 1, 1),
        "B": call.B.cpu(), "state_batch_indices": call.cu_seqlens, "dt": call.dt[:, 1:], "max_seqlen": 33,
    }  # fmt: skip
    for name, value in changes.items():
        with pytest.raises((ValueError, TypeError), match=f"^{name}: "):
            api.checkpointing_ssu(**{**call.kwargs(), name: value})
    torch.cuda.synchronize()
    for seed in range(4):  # other totals, the same plan
        fresh = random_call(RAGGED, 3, seed=seed, tail=seed, device="cuda")
        before = fresh.clone()
        api.checkpointing_ssu(**fresh.kwargs())
        assert compare.bounds(RAGGED).violation(compare.errors(before, fresh)) is None


@pytest.mark.gpu
@pytest.mark.kernels(SMALL)
@pytest.mark.two_gpus
@pytest.mark.fault(25)
def test_operands_on_another_gpu_than_the_current_one() -> None:
    with torch.cuda.device(0):
        here, there = random_call(SMALL, 3, device="cuda:0"), random_call(SMALL, 3, device="cuda:1")
        api.checkpointing_ssu(**there.kwargs())
        api.checkpointing_ssu(**here.kwargs())
        torch.cuda.synchronize(1)
        assert torch.equal(here.out.cpu(), there.out.cpu())
        assert torch.cuda.current_device() == 0
