"""decode_step on a GPU against float64, in graphs, behind producers, and over many steps of random acceptance."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fused_bounds import ALIKE, APPENDED, EXACT, RowErrors, error
from fused_calls import copied, kwargs, layer, random_layer_call, random_steps
from gpu_kernels import of_layers
from gpu_matrix import GEOMETRIES, tile_config
from test_fused_reference import WIDE, RoundedHistory, fresh

import replayssm_cute
from replayssm_cute import plan, target
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import launches, shapes
from replayssm_cute.fused.chains import Chain, ConvCut, NormCut, Overlap
from replayssm_cute.fused.problem import LayerCall, LayerProblem, layer_problem
from replayssm_cute.fused.reference import decode_step_reference
from replayssm_cute.problem import Problem
from replayssm_cute.ring import flushes

pytestmark = pytest.mark.gpu

CACHES = ("state", "x_cache", "B_cache", "dt_cache", "conv_cache")


def _problems() -> Iterator[LayerProblem]:
    """Every promised geometry, T from 1 to 16, both input types, each option absent once."""
    kinds = itertools.cycle(("bf16", "f16"))
    weights = itertools.cycle(("bf16", "f32", "f16"))
    windows = itertools.cycle((16, 16, 11, 32))
    tokens = (4, 1, 16, 2, 6, 8)
    for number, ((H, P, N, G), T) in enumerate(zip(GEOMETRIES, tokens, strict=True)):
        io = next(kinds)
        step = Problem(
            heads=H, head_dim=P, d_state=N, groups=G, tokens=T, window=max(T, next(windows)), io_dtype=io,
            dt_dtype=io, state_dtype=("f32", "bf16", "f16")[number % 3], d_dtype=None if number == 3 else "f32",
            dt_bias_dtype=None if number == 4 else next(weights), index_dtype=("i32", "i64", None)[number % 3],
            dt_softplus=number != 5,
        )  # fmt: skip
        yield layer(
            step, conv_dtype=next(weights), conv_bias_dtype=(next(weights), None)[number % 2],
            norm_dtype=next(weights), norm_groups=(G, 1, 2 * G)[number // 2],
        )  # fmt: skip
    small = Problem(heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=16)
    for T, W in ((1, 3), (3, 3), (5, 7), (12, 16), (16, 16), (32, 64)):
        yield layer(dataclasses.replace(small, tokens=T, window=W), norm_groups=1)


PROBLEMS = list(_problems())


STEP = Problem(heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=8)
HUNDRED = {tokens: layer(dataclasses.replace(STEP, heads=8, tokens=tokens), norm_groups=2) for tokens in (1, 4)}
LARGE = layer(dataclasses.replace(STEP, heads=128, groups=8, window=16), norm_groups=8)
SEVEN = layer(dataclasses.replace(STEP, tokens=7), norm_groups=4)
BATCHES, X_BATCHES, OVERLAP_BATCHES, CUT_BATCHES = (1, 3, 40), (3, 40), (1, 17, 64), (1, 7, 64)


def one(problem: LayerProblem, where: target.Target) -> TileConfig:
    """The plain config of a problem's step."""
    return tile_config("one", dataclasses.replace(problem.step, pdl=True), where)


def with_x(problem: LayerProblem, where: target.Target) -> tuple[Chain, ...]:
    """Chains whose step convolves x: configs of one head a CTA and of several."""
    heads = 2 if problem.step.heads_per_group % 2 == 0 else 1
    several = TileConfig(heads_per_cta=heads, tail_rows=8 * (heads - 1))
    return (
        Chain(Overlap.INNER_X, one(problem, where)),
        Chain(Overlap.ALL_X, early=True),
        Chain(Overlap.ALL_X, several),
    )


def shaped() -> Iterator[dict[str, Any]]:
    """Cuts of the conv and the norm, as `launches.make` takes them."""
    conv = shapes.conv_shape(LARGE, 64, chained=True, pdl=False)
    norm = shapes.norm_shape(LARGE, chained=True)
    for vector, rows, together in ((8, 1, 1), (8, 2, 2), (4, 2, 4), (4, 4, 1)):
        conv_of, norm_of = (
            dataclasses.replace(conv, vector=vector, rows=rows),
            dataclasses.replace(norm, together=together),
        )
        yield {"overlap": Overlap.INNER, "conv": conv_of, "norm": norm_of}


def cut() -> Iterator[Chain]:
    """The same as chains, x in the step or not; every second one with a config of its own."""
    cuts = (ConvCut(4, 64, each=1, carveout=100), ConvCut(8, 32, each=2, late=True), ConvCut(4, 128, 2, carveout=100))
    for number, kind in enumerate((Overlap.ALL_X, Overlap.INNER_X, Overlap.ALL, Overlap.INNER_X, Overlap.ALL_X)):
        config = (None, TileConfig(heads_per_cta=4, tail_rows=8))[number % 2]
        yield Chain(kind, config, cuts[number % 3], NormCut(4, (1, 4)[number % 2], 100), kind.x_in_step and number > 1)


def on_gpu(call: LayerCall) -> LayerCall:
    return copied(call, "cuda")


@pytest.mark.kernels(
    lambda where, problem, batch: of_layers(where, {"problem": problem, "batch": batch, "config": one(problem, where)})
)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("problem", PROBLEMS, ids=LayerProblem.label)
def test_against_float64(problem: LayerProblem, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, rings, flushed states, and that nothing else changes, over strided rows, padding and poisoned memory."""
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")  # the kernels are held to more here
    check_step(problem, batch, None)


@pytest.mark.kernels(
    lambda where, problem, batch: of_layers(
        where, *({"problem": problem, "batch": batch, "overlap": chain} for chain in with_x(problem, where))
    )
)
@pytest.mark.parametrize("batch", X_BATCHES)
@pytest.mark.parametrize("problem", PROBLEMS[::2], ids=LayerProblem.label)
def test_a_step_that_convolves_x_against_float64(
    problem: LayerProblem, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, where the conv has B and C alone; configs of one head a CTA and of several."""
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    for chain in with_x(problem, plan.device_target(torch.cuda.current_device())):
        check_step(problem, batch, chain)


def check_step(problem: LayerProblem, batch: int, chain: Chain | None) -> None:
    """Run a call, by a plan with this chain where one is given, and hold it to the reference in float64."""
    p = problem.step
    padding = (1,) if p.index_dtype is not None and batch > 1 else ()
    call = on_gpu(random_layer_call(problem, batch, padding=padding, wide=16 if batch == 3 else 0, seed=batch))
    before, exact, model = copied(call), copied(call, **WIDE), copied(call)
    if chain is None:
        config = one(problem, plan.device_target(torch.cuda.current_device()))
        assert replayssm_cute.decode_step(**kwargs(call), config=config) is call.out
    else:
        launches.make(layer_problem(call), batch, torch.cuda.current_device(), overlap=chain).launch(call)
    groups = problem.norm_groups
    decode_step_reference(exact, groups, compute_dtype=torch.float64, between=torch.float64)
    decode_step_reference(model, groups, compute_dtype=torch.float64)
    assert error(call.out, exact.out) < EXACT[p.io_dtype]
    assert error(call.out, model.out) < ALIKE[p.io_dtype]
    assert not call.out[list(padding)].any()
    for name, old in kwargs(before).items():
        if isinstance(old, torch.Tensor) and name not in (*CACHES, "out"):
            assert torch.equal(getattr(call, name).nan_to_num(), old.nan_to_num()), name
    live = [row for row in range(batch) if row not in padding]
    slots = torch.arange(batch, device="cuda") if call.state_batch_indices is None else call.state_batch_indices
    slots = slots[live].long()
    start, pnat = call.ring_start[slots].long(), call.prev_num_accepted_tokens[slots].long()
    flushed = slots[flushes(pnat, p.tokens, p.window)]
    assert torch.equal(call.conv_cache.nan_to_num(), model.conv_cache.nan_to_num())
    kept = torch.ones(len(call.state), dtype=torch.bool, device="cuda")
    kept[flushed] = False
    assert torch.equal(call.state[kept].nan_to_num(), before.state[kept].nan_to_num())
    if len(flushed):
        assert error(call.state[flushed], exact.state[flushed]) < (APPENDED | {"f32": 1e-6})[p.state_dtype]
    rows = (start[:, None] + pnat[:, None] + torch.arange(p.tokens, device="cuda")) % p.ring_rows
    for name in ("x_cache", "B_cache", "dt_cache"):
        got, expected, old = (getattr(c, name).transpose(1, 2) for c in (call, exact, before))
        new = slots[:, None], rows
        bound = 1e-6 if name == "dt_cache" else APPENDED[p.io_dtype]
        assert error(got[new], expected[new]) < bound, name
        untouched = torch.ones(got.shape[:2], dtype=torch.bool, device="cuda")
        untouched[new] = False
        assert torch.equal(got[untouched].nan_to_num(), old[untouched].nan_to_num()), name


@pytest.mark.kernels(lambda where, tokens: of_layers(where, {"problem": HUNDRED[tokens], "batch": 3}))
@pytest.mark.parametrize("tokens", HUNDRED)
def test_a_hundred_steps_of_random_acceptance_in_a_graph(tokens: int) -> None:
    """One captured step and commit, replayed; outputs are those of a recurrence that saw accepted tokens alone."""
    problem = HUNDRED[tokens]
    rounded = fresh(problem, 6)
    base = on_gpu(rounded)
    width = -(-problem.width // 8) * 8
    held = {
        "projected": torch.zeros(3, tokens, width, dtype=torch.bfloat16, device="cuda")[..., : problem.width],
        "out": torch.zeros(3, tokens, problem.d_inner, dtype=torch.bfloat16, device="cuda"),
        "state_batch_indices": torch.tensor([-1, -1, -1], dtype=torch.int32, device="cuda"),
    }
    accepted = torch.zeros(3, dtype=torch.int32, device="cuda")
    call = dataclasses.replace(base, **held)

    def step() -> None:
        replayssm_cute.decode_step(**kwargs(call))
        replayssm_cute.commit(
            base.ring_start, base.prev_num_accepted_tokens, call.state_batch_indices, accepted, tokens=tokens, window=8
        )

    step()  # nothing but padding
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    history = RoundedHistory(rounded, 2)
    errors = RowErrors()
    for rows, projected, counts in random_steps(problem, 100):
        held["projected"].copy_(projected)
        held["state_batch_indices"].copy_(torch.tensor(rows))
        accepted.copy_(torch.tensor(counts))
        graph.replay()
        out = held["out"].cpu()
        for row, found in enumerate(history.run(rows, projected, counts)):
            if found is None:  # padding
                assert not out[row].any()
            else:
                errors.add(out[row], *found)
    assert errors.whole() < EXACT["bf16"]


@pytest.mark.kernels(
    lambda where, batch: of_layers(where, *({"problem": LARGE, "batch": batch, "overlap": o} for o in Overlap))
)
@pytest.mark.parametrize("batch", OVERLAP_BATCHES)
def test_kernels_that_overlap_give_the_bits_of_those_that_do_not(batch: int) -> None:
    """Many steps back to back in one graph, each on inputs that a kernel before it has just written."""
    live = torch.arange(batch) % 12  # none flushes, so that a step may be run again and again
    start = on_gpu(random_layer_call(LARGE, batch, pnat=live, dead=0.0, wide=8))
    outs = []
    for overlap in Overlap:
        call = copied(start)
        plan = launches.make(layer_problem(call), batch, torch.cuda.current_device(), overlap=overlap)
        source = call.projected.clone()
        plan.launch(call)
        torch.cuda.synchronize()
        graph, kept = torch.cuda.CUDAGraph(), []
        with torch.cuda.graph(graph):
            for k in range(12):
                torch.mul(source, 1.0 + k / 8, out=call.projected)
                kept.append(plan.launch(call).clone())
        for _ in range(5):
            graph.replay()
        torch.cuda.synchronize()
        outs.append([t.clone() for t in kept])
        assert all(torch.isfinite(t).all() for t in kept)
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


@pytest.mark.kernels(
    lambda where, batch: of_layers(
        where, *({"problem": LARGE, "batch": batch, **how} for how in (*shaped(), *({"overlap": c} for c in cut())))
    )
)
@pytest.mark.parametrize("batch", CUT_BATCHES)
def test_other_cuts_give_the_same_bits(batch: int) -> None:
    """Convs of several rows a thread or some tokens of one, norms of several tokens a CTA, x in the step or not."""
    call = on_gpu(random_layer_call(LARGE, batch, padding=(3,) if batch > 3 else (), wide=8))
    outs = []
    for how in shaped():
        own = copied(call)
        launches.make(LARGE, batch, torch.cuda.current_device(), **how).launch(own)
        outs.append((own.out, own.conv_cache.nan_to_num(), own.state.nan_to_num()))
    for chain in cut():
        own = copied(call)
        launches.make(LARGE, batch, torch.cuda.current_device(), overlap=chain).launch(own)
        if chain.config is None:  # another config adds up in another order
            outs.append((own.out, own.conv_cache.nan_to_num(), own.state.nan_to_num()))
        assert torch.equal(own.conv_cache.nan_to_num(), outs[0][1]) and error(own.out, outs[0][0]) < ALIKE["bf16"]
    for other in outs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))


@pytest.mark.kernels(lambda where: of_layers(where, {"problem": SEVEN, "batch": 2}))
def test_a_capture_before_a_first_call_is_refused_by_name() -> None:
    call = on_gpu(random_layer_call(SEVEN, 2))
    replayssm_cute.decode_step(**kwargs(copied(call)))
    odd: dict[str, Any] = kwargs(call) | {"norm_groups": 8}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(RuntimeError, match=r"decode_step's norm .* is not ready"):
        replayssm_cute.decode_step(**odd)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayssm_cute.decode_step(**kwargs(call))


@pytest.mark.kernels(lambda where: of_layers(where, {"problem": layer(STEP), "batch": 2}))
def test_bad_input_is_refused_before_a_launch() -> None:
    call = on_gpu(random_layer_call(layer(STEP), 2))
    replayssm_cute.decode_step(**kwargs(call))
    before = copied(call)
    torch.cuda.synchronize()
    for changes, kind, message in (
        ({"out": call.out[:, :1]}, ValueError, "out: got shape"),
        ({"projected": call.projected.cpu()}, ValueError, "projected: on device cpu"),
        ({"conv_cache": call.conv_cache.half()}, TypeError, "conv_cache: got torch.float16"),
        ({"state": None}, TypeError, "state: got NoneType"),
        ({"config": 4}, TypeError, "config: got int"),
        ({"norm_groups": 3}, ValueError, "norm_groups: got 3"),
    ):
        with pytest.raises(kind, match=message):
            replayssm_cute.decode_step(**(kwargs(call) | changes))
    torch.cuda.synchronize()
    for name in (*CACHES, "out"):
        assert torch.equal(getattr(call, name).nan_to_num(), getattr(before, name).nan_to_num()), name
