"""A cache of 8-bit states, and of read copies beside f32 ones: scales and copies go through a slot's life with it."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import fakes
import numpy as np
import pytest
import test_warmup
import torch
from cache_lanes import MODULES, EmulatedLaunches, emulated
from cache_runs import LOW, SPEC, Request, Run, assert_unchanged, decays, make, poison, snapshot
from low_precision_caches import (
    COPIES,
    ERROR,
    SMALL,
    SPECS,
    TINY,
    Model,
    check_materialize,
    graph_inputs,
    graph_values,
    is_encoding,
    kinds,
    scramble,
    step_problem,
    tolerance,
)
from oracle import History, as_array
from test_cache_materialize import CYCLES, SLOTS, expected_moves, filled
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from replayssm_cute import DecodeGraphs, api, dtypes, problem, warmup
from replayssm_cute.cache import CacheSpec, LogicalState, ReplayCache, launches, proof, recipes, replay_cache, stored
from replayssm_cute.cache.shapes import ZERO_STATE
from replayssm_cute.calls import random_call
from replayssm_cute.problem import Problem

fake_compiler = fakes.fake_compiler
cpu_as_gpu = fakes.cpu_as_gpu
warm = test_warmup.warm


# ---------------------------------------------------------------------------------------------------
# A slot's life
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooled", [False, True], ids=["own", "pool"])
@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_a_whole_life(spec: CacheSpec, pooled: bool) -> None:
    """Every operation, NaN in what was not written: outputs as close to float64 as the kind of state allows."""
    cache = make(spec, 4)
    gaps = None
    if pooled:
        pool = torch.full((4, spec.layers * (spec.page_bytes + 64)), 0xFF, dtype=torch.uint8)
        pages = [pool[:, i * (spec.page_bytes + 64) :][:, : spec.page_bytes] for i in range(spec.layers)]
        cache = ReplayCache.from_pool(spec, pages, A=decays(spec))
        assert bool((pool == 0xFF).all()), "making it writes nothing"
        poison(cache)
        gaps = [pool[:, i * (spec.page_bytes + 64) :][:, spec.page_bytes :][:, :64] for i in range(spec.layers)]
    run = Run(cache, rtol=tolerance(spec))
    cache.reset([3, -1])
    request = Request(spec)
    run.decode([3], [request], 10)
    twin = request.fork()
    cache.copy([3, -1], [1, -1])
    backup = cache.export_slots([1])
    cache.materialize([3], [2], [spec.window])
    folded_twin = request.fork()
    cache.import_slots([0], backup)
    run.decode([3, 0, 2, 1], [request, twin, folded_twin, twin.fork()], 8)
    states = torch.randn(spec.layers, 1, spec.heads, spec.head_dim, spec.d_state, generator=run.gen)
    cache.prefill_handoff([2], states)
    entered = Request(spec, [as_array(s[0]) for s in states])
    run.decode([2], [entered], 8)
    cache.begin_step([2], [0], [0])
    cache.settle([2], [0])
    assert run.flushed > 8
    if gaps is not None:
        assert all(bool((gap == 0xFF).all()) for gap in gaps)


@pytest.mark.parametrize("spec", COPIES, ids=kinds)
def test_a_copy_does_not_wear_the_recurrence(spec: CacheSpec) -> None:
    """After many flushes the f32 state is still that of float64, and the copy its rounding."""
    cache = make(spec, 1)
    run = Run(cache, rtol=tolerance(spec))
    cache.reset([0])
    request = Request(spec)
    run.decode([0], [request], 40)
    cache.materialize([0], [0], [spec.window])
    for i, layer in enumerate(cache.layers):
        truth = request.layers[i].state
        np.testing.assert_allclose(as_array(layer.state[0]), truth, rtol=0, atol=2e-6 * np.abs(truth).max())
        assert is_encoding(cache, i, 0, layer.state[0])


@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_the_step_takes_what_the_cache_gives(spec: CacheSpec) -> None:
    """By step_args the call is one of the spec's problem, also with stochastic rounding, in pools too."""
    pool = torch.zeros(spec.layers, 4, spec.page_bytes + 48, dtype=torch.uint8)
    for cache in (ReplayCache.allocate(spec, 4, "cpu"), ReplayCache.from_pool(spec, pool)):
        for rounds in (None, 7) if spec.copy_dtype is None else (None,):
            wanted = spec.problem(philox_rounds=rounds)
            call = dataclasses.replace(random_call(wanted, 2, slots=4), **cache.step_args(spec.layers - 1))
            kwargs = {k: v for k, v in call.kwargs().items() if k != "pad_slot_id"}
            assert problem.from_tensors(**kwargs, enable_pdl=False) == wanted


@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_a_plan_launches_on_what_the_cache_gives(spec: CacheSpec) -> None:
    """prepare, launch and bind take step_args too, of any layer, and do what the call does."""
    caches = [filled(spec, 1, live={0: (2, 5)}) for _ in range(3)]
    given = random_call(spec.problem(), 1, slots=SLOTS, seed=3)
    given = dataclasses.replace(given, state_batch_indices=torch.tensor([0], dtype=torch.int32))
    calls = [dataclasses.replace(given, **cache.step_args(1), out=given.out.clone()) for cache in caches]
    api.checkpointing_ssu(**calls[0].kwargs())
    first = dataclasses.replace(given, **caches[1].step_args(0)).kwargs()
    prepared = api.prepare(**{k: v for k, v in first.items() if k != "pad_slot_id"})
    options = ("dt_softplus", "max_seqlen", "philox_rounds", "precision")
    for call, launch in zip(calls[1:], (prepared.launch, lambda **k: prepared.bind(**k)()), strict=True):
        launch(**{k: v for k, v in call.kwargs().items() if k not in options})
        assert torch.equal(call.out, calls[0].out) and bool(torch.isfinite(call.out).all())
    for cache in caches[1:]:
        assert_unchanged(cache, snapshot(caches[0]))
    flushed = snapshot(filled(spec, 1, live={0: (2, 5)}))
    assert not torch.equal(snapshot(caches[0])["state[1]"], flushed["state[1]"])


@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_reset_is_the_encoding_of_zero(spec: CacheSpec) -> None:
    """Codes 0 under scales 1, a copy of zeros; other slots, and without zero_state all, keep every bit."""
    cache = make(spec, 3)
    before = snapshot(cache)
    cache.reset([1, -1], zero_state=False)
    cache.reset([-1])
    assert_unchanged(cache, before)
    cache.reset([1, -1])
    zeros = torch.zeros(spec.heads, spec.head_dim, spec.d_state)
    assert all(is_encoding(cache, i, 1, zeros) for i in range(spec.layers))
    assert_unchanged(cache, before, [0, 2])


# ---------------------------------------------------------------------------------------------------
# Handoff
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_a_prefills_states_enter_by_encode(spec: CacheSpec, dtype: torch.dtype) -> None:
    """Codes, scales and copies bit for bit, rows of zeros and of NaN among them; nothing else is touched."""
    cache = make(spec, 4)
    before = snapshot(cache)
    gen = torch.Generator().manual_seed(1)
    states = torch.randn(spec.layers, 3, spec.heads, spec.head_dim, spec.d_state, generator=gen)
    states *= torch.exp(2 * torch.randn(states.shape[:-1], generator=gen))[..., None]
    states = states.to(dtype)
    states[:, :, 0, 3] = 0.0
    states[:, 0, 1, 5, 7] = float("nan")
    cache.prefill_handoff([2, -1, 0], states)
    for i in range(spec.layers):
        assert is_encoding(cache, i, 2, states[i, 0]) and is_encoding(cache, i, 0, states[i, 2])
    assert_unchanged(cache, before, [1, 3])
    zero = stored.decode(cache.layers[0], torch.tensor([2, 0]))[:, 0, 3]
    assert not bool(zero.any()), "a row of zeros reads as zeros"


def test_one_layers_states_enter_alone() -> None:
    for spec in SPECS:
        cache = make(spec, 2)
        before = snapshot(cache)
        states = torch.randn(1, spec.heads, spec.head_dim, spec.d_state)
        cache.prefill_handoff([1], states, layer=1)
        assert is_encoding(cache, 1, 1, states[0])
        now = snapshot(cache)
        assert all(torch.equal(now[name], old) for name, old in before.items() if name.endswith("[0]"))


# ---------------------------------------------------------------------------------------------------
# Materialize
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", CYCLES)
@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_materialize_follows_the_scalar_model(spec: CacheSpec, rows: list[tuple[int, int, int]]) -> None:
    """Cycles, one source of many, padding: as if every source were read before any write, in every tensor."""
    for seed in (1, 2):
        cache, before = filled(spec, seed), filled(spec, seed)
        cache.materialize(*([row[k] for row in rows] for k in range(3)))
        check_materialize(cache, before, rows)


@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_count_zero_copies_codes_that_no_encode_would_give(spec: CacheSpec) -> None:
    """What stochastic rounding left behind, and NaNs of any payload: every bit of state, scales and copy."""
    cache = filled(spec, 1)
    scramble(t for layer in cache.layers for t in layer.checkpoint().values())
    before = snapshot(cache)
    cache.materialize([0, 1, -1], [1, 0, 3], [0, -2, 1])
    for name, now in snapshot(cache).items():
        if name.startswith("state"):
            assert torch.equal(now[[0, 1]], before[name][[1, 0]]) and torch.equal(now[2:], before[name][2:])


@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_a_long_window_folds_as_the_step_flushes(spec: CacheSpec) -> None:
    """A materialize of all live rows gives the codes that a flushing step writes, but for roundings of f32."""
    spec = dataclasses.replace(spec, tokens=4, window=16, layers=1)
    cache = filled(spec, 4, live={0: (7, 16)})
    given = random_call(spec.problem(), 1, slots=SLOTS, seed=5)
    A = decays(spec)[0][:, None, None].expand(-1, spec.head_dim, spec.d_state)
    cache.copy([0], [1])
    call = dataclasses.replace(given, **cache.step_args(0), A=A, state_batch_indices=torch.tensor([1]))
    api.checkpointing_ssu(**call.kwargs())
    cache.materialize([0], [0], [16])
    values = stored.decode(cache.layers[0], torch.tensor([0, 1]))
    codes = {
        name: t[[0, 1]].float() for name, t in ((n, stored.as_bits(t)) for n, t in cache.layers[0].checkpoint().items())
    }
    assert float((values[0] - values[1]).abs().max()) <= 2 * ERROR[spec.problem().read_dtype] * float(
        values.abs().max()
    )
    for name in {"state", "state_copy"} & codes.keys():
        if name == "state_copy" or spec.copy_dtype is None:
            assert float((codes[name][0] != codes[name][1]).double().mean()) < 1e-3, name


@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_nothing_is_read_by_the_host(spec: CacheSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without values, in place of a capture: an operation that asked for one would raise."""
    monkeypatch.setattr(replay_cache, "values_checked", lambda device: False)
    with FakeTensorMode():
        cache = ReplayCache.allocate(spec, 4, "cpu", A=[torch.zeros(spec.heads) for _ in range(spec.layers)])
        slots = torch.zeros(3, dtype=torch.int64)
        cache.reset(slots)
        cache.materialize(slots, slots, slots)
        cache.copy(slots, slots)
        cache.prefill_handoff(slots, torch.zeros(spec.layers, 3, spec.heads, spec.head_dim, spec.d_state))
        cache.commit(slots, slots)
        with pytest.raises(DataDependentOutputException):
            bool(slots.any())


def test_the_log_says_once_that_no_kernel_folds(caplog: pytest.LogCaptureFixture) -> None:
    launches._say.cache_clear()
    spec = SPECS[1]
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        for _ in range(2):
            cache = filled(spec, 1)
            with emulated(cache) as kernels:
                cache.materialize([0], [1], [1])
            assert kernels.launched == []
    assert [
        r.getMessage() for r in caplog.records if "materialize of i8 states runs as torch operations" in r.getMessage()
    ]
    assert len(caplog.records) == 1


# ---------------------------------------------------------------------------------------------------
# To and from elsewhere
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_an_export_holds_values_in_f32(spec: CacheSpec) -> None:
    cache = filled(spec, 3, live={0: (3, 5), 2: (1, 2)})
    state = cache.export_slots([2, 0])
    assert state.spec == dataclasses.replace(spec, state_dtype="f32", copy_dtype=None)
    assert state.state.dtype == torch.float32 and state.count.tolist() == [2, 5]
    for i, layer in enumerate(cache.layers):
        codes = layer.state[[2, 0]].float() if spec.copy_dtype is None else layer.state[[2, 0]]
        scale = layer.state_scale[[2, 0]][..., None] if spec.copy_dtype is None else 1.0
        assert torch.equal(state.state[i], codes * scale)
    again = LogicalState.from_dict(state.to_dict())
    assert again.spec == state.spec and torch.equal(again.state, state.state)


@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_codes_of_rounding_to_nearest_come_back_the_same(spec: CacheSpec) -> None:
    """Out and in again: codes and copies bit for bit, scales within a unit in the last place, f32 states exactly."""
    cache = filled(spec, 3)
    states = torch.randn(spec.layers, 2, spec.heads, spec.head_dim, spec.d_state, generator=torch.Generator())
    states[:, :, 1, 4] = 0.0
    cache.prefill_handoff([0, 1], states)
    before = snapshot(cache)
    cache.import_slots([2, 3], cache.export_slots([0, 1]))
    for name, now in snapshot(cache).items():
        if name.startswith("state_scale") and spec.copy_dtype is None:
            assert int((now[[2, 3]] - before[name][[0, 1]]).abs().max()) <= 1
        elif name.startswith("state"):
            assert torch.equal(now[[2, 3]], before[name][[0, 1]]), name


OTHERS = [SMALL, dataclasses.replace(SMALL, state_dtype="bf16"), dataclasses.replace(SMALL, state_dtype="f16"), *SPECS]


@pytest.mark.parametrize("target", OTHERS, ids=kinds)
@pytest.mark.parametrize("source", [OTHERS[0], OTHERS[1], *SPECS], ids=kinds)
def test_a_state_goes_on_in_a_cache_of_another_kind(source: CacheSpec, target: CacheSpec) -> None:
    """Any kind into any other, of another T and W, with rows to fold."""
    worst = max(ERROR.get(kind or "f32", 4e-3) for s in (source, target) for kind in (s.state_dtype, s.copy_dtype))
    cache, other = make(source, 2), make(dataclasses.replace(target, tokens=1, window=3), 2)
    run = Run(cache, rtol=worst)
    cache.reset([1])
    request = Request(source)
    run.decode([1], [request], 9)
    while int(cache.pnat[1]) < 4:
        run.step([1], [request], [1])
    other.import_slots([0], cache.export_slots([1]))
    assert int(other.pnat[0]) == 3
    Run(other, seed=4, rtol=1.5 * worst).decode([0], [request], 8)


@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_a_fold_on_import_is_encoded_once(spec: CacheSpec) -> None:
    """The float64 recurrence over the rows that do not fit, in f32, encoded: not one of codes once more."""
    cache = filled(dataclasses.replace(SPEC, layers=2), 3, live={0: (3, 9)})
    logical = cache.export_slots([0])
    narrow = make(dataclasses.replace(spec, tokens=1, window=3), 1)
    narrow.import_slots([0], logical)
    for i in range(2):
        history = History(as_array(logical.state[i, 0]))
        x, B, dt = (as_array(t[i, 0].transpose(0, 1)) for t in (logical.x, logical.B, logical.dt))
        history.run(decays(SPEC)[i].double().numpy(), dt[:6], x[:6], B[:6], B[:6], 6)
        assert is_encoding(narrow, i, 0, torch.tensor(history.state))


@pytest.mark.parametrize("kind", ["i8", "f8e4m3"])
def test_codes_without_scales_are_no_logical_state(kind: str) -> None:
    """Made by hand, or from a file: refused by name, nothing is written."""
    logical = filled(SMALL, 1).export_slots([0])
    spec = dataclasses.replace(logical.spec, state_dtype=kind)
    torn = dataclasses.replace(logical, spec=spec, state=logical.state.to(dtypes.TORCH[kind]))
    message = f"logical state: state_dtype: got '{kind}', expected 'f32', 'bf16' or 'f16'"
    caches = [make(dataclasses.replace(SMALL, state_dtype=kind), 1), make(SMALL, 1)]
    for cache in caches:
        before = snapshot(cache)
        with pytest.raises(ValueError, match=message):
            cache.import_slots([0], torn)
        assert_unchanged(cache, before)
    for work in (torn.check, torn.to_dict):
        with pytest.raises(ValueError, match=message):
            work()
    data = logical.to_dict() | {"state_dtype": kind, "state": torn.state}
    with pytest.raises(ValueError, match=message):
        LogicalState.from_dict(data)


# ---------------------------------------------------------------------------------------------------
# Kernels: copy and reset
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [CYCLES[1], CYCLES[2]])
@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_copy_kernel_moves_scales_and_copies(spec: CacheSpec, rows: list[tuple[int, int, int]]) -> None:
    spec = dataclasses.replace(spec, layers=1, heads=1)
    cache = filled(spec, 5, open_windows=True)
    old = snapshot(cache)
    with emulated(cache) as kernels:
        cache.copy(*([row[k] for row in rows] for k in range(2)))
    assert kernels.launched == ["move plan", "copy"]
    live = expected_moves(rows)
    for name, now in snapshot(cache).items():
        for slot in range(SLOTS):
            assert torch.equal(now[slot], old[name][live.get(slot, (slot, 0))[0]]), (name, slot)


@pytest.mark.parametrize("pooled", [False, True], ids=["own", "pool"])
@pytest.mark.parametrize("spec", SPECS, ids=kinds)
def test_reset_kernel_is_the_torch_path(spec: CacheSpec, pooled: bool) -> None:
    spec = dataclasses.replace(spec, heads=1)
    caches = []
    for _ in range(2):
        pool = torch.full((spec.layers, 4, spec.page_bytes + 16), 0x5A, dtype=torch.uint8)
        caches.append(ReplayCache.from_pool(spec, pool) if pooled else make(spec, 4))
        poison(caches[-1])
    with emulated(caches[0]) as kernels:
        caches[0].reset([2, -1, 0])
    caches[1].reset([2, -1, 0])
    assert kernels.launched == ["reset"]
    assert_unchanged(caches[0], snapshot(caches[1]))


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[4]], ids=kinds)
def test_kernels_are_proven_and_a_wrong_scale_is_found(spec: CacheSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = CacheSpec(1, 1, 64, 64, 1, 2, 3, spec.state_dtype, "bf16", spec.copy_dtype)
    monkeypatch.setattr(proof, "Launches", EmulatedLaunches)
    monkeypatch.setattr(proof, "_proven", set())
    assert {r.kind for r in recipes.all_of(spec)} == {"cursors", "move plan", "copy", "reset"}
    assert proof.prove(spec, torch.device("cpu")) == 4
    find = MODULES["slots"].Pieces.find
    monkeypatch.setattr(MODULES["slots"].Pieces, "find", lambda self, piece: find(self, piece)._replace(zero=0))
    monkeypatch.setattr(proof, "_proven", set())
    with pytest.raises(RuntimeError, match="self-check: the cache's reset gave wrong values in state_scale of layer 0"):
        proof.prove(spec, torch.device("cpu"))


# ---------------------------------------------------------------------------------------------------
# Warmup and graphs
# ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [None, 7])
@pytest.mark.parametrize("kind", [*LOW, {"state_dtype": "bf16"}], ids=lambda k: "-".join(k.values()))
def test_warmup_decodes_on_the_cache_and_restores_every_byte(
    warm: None, monkeypatch: pytest.MonkeyPatch, kind: dict[str, str], rounds: int | None
) -> None:
    if "copy_dtype" in kind and rounds:
        pytest.skip("an f32 state is not rounded stochastically")
    spec = dataclasses.replace(TINY, **kind)
    cache = make(spec, 5)
    scramble(t for layer in cache.layers for t in layer.named().values())
    before = snapshot(cache)
    seen: list[Problem] = []
    first: list[bool] = []
    real = fakes.FakeKernel.__call__

    def watched(self: fakes.FakeKernel, *args: Any) -> None:
        for layer in (each for each in cache.layers if args[0] is each.state):
            seen.append(self.problem)
            live = args[15][args[15] >= 0].long()
            if not bool(cache.pnat[live].any()):
                first.append(
                    all(bool((stored.as_bits(t)[live] == ZERO_STATE[n]).all()) for n, t in layer.checkpoint().items())
                )
        real(self, *args)

    monkeypatch.setattr(fakes.FakeKernel, "__call__", watched)
    wanted = step_problem(spec, rounds)
    coverage = warmup([wanted], [2, 7], cache=cache, device=-1)
    assert set(seen) == {wanted}, "the dummy decodes are those of the problem"
    assert first and first[0] and first.count(True) >= spec.layers, "they begin with states of zero"
    assert coverage.cache is not None and set(coverage.cache.operations) >= {"reset", "commit", "materialize", "copy"}
    assert_unchanged(cache, before)


def test_warmup_decodes_with_the_problems_precision(warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Problem] = []
    real = fakes.FakeKernel.__call__
    monkeypatch.setattr(
        fakes.FakeKernel, "__call__", lambda self, *args: (seen.append(self.problem), real(self, *args))
    )
    wanted = TINY.problem(precision="highest")
    cache = make(TINY, 3)
    cache.reset(range(3))
    warmup([wanted], [2], cache=cache, device=-1)
    assert set(seen) == {wanted}


@pytest.mark.parametrize("kind", LOW, ids=lambda k: "-".join(k.values()))
def test_warmup_restores_a_callers_scales_and_copies(warm: None, kind: dict[str, str]) -> None:
    """Tensors of one's own, without a ReplayCache: a flush writes scales and copies too."""
    wanted = dataclasses.replace(TINY, **kind).problem()
    call = random_call(wanted, 3, dead=None)
    before = test_warmup.bits(call)
    warmup([wanted], [3], device=-1, tensors=lambda problem, batch: call)
    test_warmup.assert_same_bits(before, call)


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("kind", LOW, ids=lambda k: "-".join(k.values()))
def test_padded_graph_steps_are_the_eager_ones(kind: dict[str, str], stochastic: bool) -> None:
    """DecodeGraphs on the CPU: buckets and padding change no bit of states, scales and copies."""
    spec = dataclasses.replace(TINY, **kind)
    caches = [make(dataclasses.replace(spec), 5) for _ in range(2)]
    for cache in caches:
        cache.reset(range(5))
    models = [Model(c, torch.tensor([9]) if stochastic else None, renew=False) for c in caches]
    graphs = DecodeGraphs(models[0], graph_inputs(spec), [2, 4], device="cpu")
    graphs.capture()
    for step in range(12):
        given = graph_values(spec, 1 + step % 4, step)
        assert torch.equal(graphs(**given), models[1](**given))
    assert_unchanged(caches[0], snapshot(caches[1]))
    assert any(bool(layer.state.float().abs().max() > 0) for layer in caches[0].layers), "some step has flushed"


# ---------------------------------------------------------------------------------------------------
# Encoding
# ---------------------------------------------------------------------------------------------------


def test_float64_is_rounded_once() -> None:
    """By way of f32, which torch takes, 1 + 2^-11 + 2^-40 would be a tie of f16."""
    gen = torch.Generator().manual_seed(0)
    values = torch.randn(1, 1, 1000, 64, generator=gen, dtype=torch.float64) * 2.0 ** torch.randint(
        -30, 20, (1, 1, 1000, 64), generator=gen
    )
    values[0, 0, 0, :4] = torch.tensor([1 + 2**-11 + 2**-40, -(1 + 2**-11 + 2**-40), 1 + 2**-11, 0.0])
    values[0, 0, 0, 4:7] = torch.tensor([float("inf"), float("nan"), -1e-320])
    half = stored.encode(dataclasses.replace(SMALL, state_dtype="f16"), values)["state"]
    with np.errstate(over="ignore"):
        assert np.array_equal(half.numpy(), values.numpy().astype(np.float16), equal_nan=True)
    values[0, 0, 0, :2] = torch.tensor([1 + 2**-8 + 2**-40, -(1 + 2**-8 + 2**-40)])
    values[0, 0, 0, 2:7] = 1.0
    brief = stored.encode(dataclasses.replace(SMALL, state_dtype="bf16"), values)["state"]
    error = (brief.double() - values).abs()
    for away in (1, -1):  # neither neighbour is nearer
        neighbour = (brief.view(torch.int16) + away).view(torch.bfloat16).double()
        assert (error <= (neighbour - values).abs()).all()
