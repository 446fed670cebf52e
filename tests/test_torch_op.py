"""torch.compile: the call is one node of the graph, and what it writes is what the eager call writes."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
from typing import Any

import pytest
import torch
from fakes import SMALL

import replayssm_cute
from replayssm_cute import plan, torch_op
from replayssm_cute.calls import Call, random_call
from replayssm_cute.problem import Problem

LARGE = Problem(heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=16)


def positional(call: Call) -> tuple[Any, ...]:
    """In the operator's order: kernels' arguments, with dt_softplus, max_seqlen and enable_pdl between."""
    *tensors, slots, cu_seqlens, pad_slot_id = plan.kernel_args(call)[:18]
    low = (call.state_scale, call.rand_seed, call.philox_rounds, call.state_copy, call.precision)
    return (*tensors, call.dt_softplus, slots, cu_seqlens, pad_slot_id, call.max_seqlen, False, *low)


def layer(call: Call, scale: torch.Tensor) -> torch.Tensor:
    """A step between two ordinary operations, as in a model."""
    call.x = call.x * scale
    return replayssm_cute.checkpointing_ssu(**call.kwargs()) + 1


LOW = ({}, {"state_dtype": "f8e4m3", "philox_rounds": 10}, {"copy_dtype": "i8"})


@pytest.mark.parametrize("padding", [(), (1,)])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("low", LOW, ids=str)
def test_a_compiled_layer_equals_the_eager_one(padding: tuple[int, ...], ragged: bool, low: dict[str, Any]) -> None:
    problem = dataclasses.replace(SMALL, ragged=ragged, **low)
    call = random_call(problem, 3, padding=padding, lengths=(2, 1, 0) if ragged else None, tail=int(ragged))
    eager, compiled = call.clone(), call.clone()
    scale = torch.tensor(0.5, dtype=torch.bfloat16)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    expected = layer(eager, scale)
    torch._dynamo.reset()
    got = torch.compile(layer, fullgraph=True, backend=backend)(compiled, scale)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    for name in eager.written():
        a, b = (getattr(c, name).contiguous().view(torch.uint8) for c in (compiled, eager))
        assert torch.equal(a, b), name
    (graph,) = graphs
    nodes = [n for n in graph.graph.nodes if "checkpointing_ssu" in str(n.target)]
    assert len(nodes) == 1, "one node, no graph break"


def test_other_batch_sizes_need_no_other_graph() -> None:
    """Compiled with dynamic shapes once, for every batch and every number of packed tokens."""
    for ragged in (False, True):
        problem = dataclasses.replace(SMALL, ragged=ragged)
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, inputs: Any, graphs: list[Any] = graphs) -> Any:
            graphs.append(graph)
            return graph.forward

        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
        scale = torch.tensor(0.5, dtype=torch.bfloat16)
        for batch in (9, 3, 7):  # the first one, and one more, are no other size of the call
            call = random_call(problem, batch, slots=12, lengths=1 if ragged else None, seed=batch)
            expected = layer(call.clone(), scale)
            torch.testing.assert_close(compiled(call, scale), expected, rtol=0, atol=0, equal_nan=True)
        assert len(graphs) == 1


def missing_for_inductor() -> str | None:
    """Why torch's own compiler cannot run for a GPU here."""
    if importlib.util.find_spec("triton") is None:
        return "torch's inductor needs triton"
    if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
        return "torch's inductor needs a C compiler"
    return None


@pytest.mark.gpu
@pytest.mark.kernels(lambda where, ragged: [dataclasses.replace(LARGE, ragged=ragged)])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("ragged", [False, True], ids=["dense", "ragged"])
def test_a_compiled_layer_on_a_gpu(backend: str, ragged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps with a commit between: outputs, caches and cursors are the eager ones, bit for bit."""
    if backend == "inductor" and (reason := missing_for_inductor()):
        pytest.skip(reason)
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    problem = dataclasses.replace(LARGE, ragged=ragged)
    options: dict[str, Any] = {"lengths": (4, 0, 3, 2, 1), "tail": 2} if ragged else {}
    call = random_call(problem, 5, padding=(3,), pnat=14, seed=3, device="cuda", **options)
    eager, compiled = call.clone(), call.clone()
    scale = torch.tensor(0.5, dtype=torch.bfloat16, device="cuda")
    accepted = torch.tensor([4, 0, 2, 1, 1], dtype=torch.int32, device="cuda")

    def two_steps(given: Call) -> torch.Tensor:
        first = layer(given, scale)
        slots = given.state_batch_indices
        assert slots is not None
        replayssm_cute.commit(
            given.ring_start, given.prev_num_accepted_tokens, slots, accepted, tokens=4, window=16,
            lengths=None if given.cu_seqlens is None else given.cu_seqlens.diff(),
        )  # fmt: skip
        return first + layer(given, scale)

    expected = two_steps(eager)
    torch._dynamo.reset()
    got = torch.compile(two_steps, fullgraph=True, backend=backend)(compiled)
    torch.cuda.synchronize()
    # inductor may keep the first step's sum in f32 until it adds the second's
    close = {"rtol": 0, "atol": 0} if backend == "aot_eager" else {"rtol": 2**-6, "atol": 2**-6}
    torch.testing.assert_close(got, expected, equal_nan=True, **close)
    for name in (*torch_op.WRITTEN, "ring_start", "prev_num_accepted_tokens"):
        torch.testing.assert_close(getattr(compiled, name), getattr(eager, name), rtol=0, atol=0, equal_nan=True)
    # commits went through: rows that flushed begin where they had ended
    assert not torch.equal(compiled.prev_num_accepted_tokens, call.prev_num_accepted_tokens)


@pytest.mark.gpu
@pytest.mark.kernels(LARGE)
def test_a_compiled_step_in_a_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch.compile makes of a layer can be captured, as engines do, and replayed on other contents."""
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    static = random_call(LARGE, 4, seed=4, device="cuda")
    scale = torch.tensor(0.5, dtype=torch.bfloat16, device="cuda")
    x = static.x

    def model(given: Call) -> torch.Tensor:
        return layer(dataclasses.replace(given, x=x), scale)

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = static.clone()
    with torch.inference_mode():
        compiled(static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = compiled(static)
        written = [name for name in torch_op.WRITTEN if getattr(static, name) is not None]
        for name in written:
            getattr(static, name).copy_(getattr(before, name))
        graph.replay()
        torch.cuda.synchronize()
        expected = layer(before, scale)
    assert torch.equal(got, expected)
    for name in written:
        torch.testing.assert_close(getattr(static, name), getattr(before, name), rtol=0, atol=0, equal_nan=True)


def test_the_operator_holds_what_it_promises() -> None:
    """Exactly the written tensors are declared as such (torch's own opcheck clones the stride-0 views away)."""
    schema = torch.ops.replayssm_cute.checkpointing_ssu.default._schema
    declared = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert declared == set(torch_op.WRITTEN)
    assert not schema.returns


@pytest.mark.parametrize("ragged", [False, True])
def test_only_the_declared_tensors_are_written(ragged: bool) -> None:
    lengths = (2, 1, 1) if ragged else None
    call = random_call(dataclasses.replace(SMALL, ragged=ragged), 3, padding=(1,), dead=0.0, lengths=lengths)
    before = call.clone()
    torch_op.step(*positional(call))
    changed = {
        name
        for name, value in call.kwargs().items()
        if isinstance(value, torch.Tensor) and not torch.equal(value.nan_to_num(), getattr(before, name).nan_to_num())
    }
    assert changed <= set(torch_op.WRITTEN) and {"out", "x_cache", "B_cache", "dt_cache"} <= changed


def test_bad_input_is_named_there_too() -> None:
    call = random_call(SMALL, 3)
    call.x = call.x[:, :, :, :8]
    with pytest.raises(ValueError, match=r"^x: got shape"):
        torch_op.step(*positional(call))


def test_a_forced_config_is_refused_under_compile() -> None:
    call = random_call(SMALL, 3)
    torch._dynamo.reset()

    def run() -> torch.Tensor:
        return replayssm_cute.checkpointing_ssu(**call.kwargs(), config=replayssm_cute.TileConfig())

    with pytest.raises(Exception, match=r"config: got a TileConfig under torch\.compile"):
        torch.compile(run, fullgraph=True, backend="eager")()
