"""torch.compile of decode_step: one node of the graph, which writes what the eager call writes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fused_calls import copied, kwargs, layer, random_layer_call
from gpu_kernels import of_layers
from test_torch_op import missing_for_inductor

import replayssm_cute
from replayssm_cute import torch_op
from replayssm_cute.fused.problem import LayerCall
from replayssm_cute.problem import Problem

STEP = Problem(heads=8, head_dim=64, d_state=64, groups=1, tokens=3, window=5)
LARGE = dataclasses.replace(STEP, heads=16, d_state=128, tokens=4, window=16)


def model(call: LayerCall, scale: torch.Tensor) -> torch.Tensor:
    """A step between two ordinary operations, as in a model."""
    call = dataclasses.replace(call, projected=call.projected * scale)
    return replayssm_cute.decode_step(**kwargs(call)) + 1


def positional(call: LayerCall) -> tuple[Any, ...]:
    """In the operator's order."""
    given = kwargs(call)
    return tuple({"enable_pdl": False, **given}[a.name] for a in schema().arguments)


def schema() -> Any:
    return torch.ops.replayssm_cute.decode_step.default._schema


def recorded(graphs: list[Any], aot: bool) -> Any:
    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs) if aot else graph.forward

    return backend


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("bias", ["f32", None])
def test_a_compiled_layer_equals_the_eager_one(bias: str | None, scratch: bool) -> None:
    problem = layer(STEP, norm_groups=2, conv_bias_dtype=bias)
    call = random_layer_call(problem, 3, padding=(1,), wide=8)
    if scratch:
        call = dataclasses.replace(call, scratch=torch.zeros(3, 3, problem.channels, dtype=torch.bfloat16))
    eager, compiled = copied(call), copied(call)
    scale = torch.tensor(0.5, dtype=torch.bfloat16)
    graphs: list[torch.fx.GraphModule] = []
    expected = model(eager, scale)
    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True, backend=recorded(graphs, True))(compiled, scale)
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)
    for name in torch_op.LAYER_WRITTEN:
        if (own := getattr(compiled, name)) is not None:
            torch.testing.assert_close(own, getattr(eager, name), rtol=0, atol=0, equal_nan=True)
    (graph,) = graphs
    nodes = [n for n in graph.graph.nodes if "decode_step" in str(n.target)]
    assert len(nodes) == 1, "one node, no graph break"


def test_other_batch_sizes_need_no_other_graph() -> None:
    graphs: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=recorded(graphs, False), dynamic=True)
    scale = torch.tensor(0.5, dtype=torch.bfloat16)
    for batch in (9, 3, 7):  # the first one, and one more, are no other size of the call
        call = random_layer_call(layer(STEP), batch, slots=12, seed=batch)
        expected = model(copied(call), scale)
        torch.testing.assert_close(compiled(call, scale), expected, rtol=0, atol=0, equal_nan=True)
    assert len(graphs) == 1


def test_the_operator_holds_what_it_promises() -> None:
    declared = {a.name for a in schema().arguments if a.alias_info is not None and a.alias_info.is_write}
    assert declared == set(torch_op.LAYER_WRITTEN) and not schema().returns
    problem = layer(STEP)
    call = random_layer_call(problem, 3, padding=(1,), dead=0.0)
    before = copied(call)
    torch_op.layer(*positional(call))
    changed = {
        name
        for name, value in kwargs(call).items()
        if isinstance(value, torch.Tensor) and not torch.equal(value.nan_to_num(), getattr(before, name).nan_to_num())
    }
    assert changed <= set(torch_op.LAYER_WRITTEN)
    assert {"out", "x_cache", "B_cache", "dt_cache", "conv_cache"} <= changed


def test_bad_input_is_named_there_too() -> None:
    """By the operator, and through torch.compile, with nothing written."""
    call = random_layer_call(layer(STEP), 3, dead=0.0)
    before = copied(call)
    for changes, kind, said in (
        ({"norm_weight": call.norm_weight[1:]}, ValueError, r"norm_weight: got shape"),
        ({"A": call.A.int()}, TypeError, r"A: got torch.int32"),
        ({"eps": -1.0}, ValueError, r"eps: got -1.0"),
        ({"norm_groups": 5}, ValueError, r"norm_groups: got 5"),
        ({"conv_cache": call.conv_cache[:, 1:]}, ValueError, r"conv_cache: got shape"),
        ({"scratch": call.out}, ValueError, r"scratch: got shape"),
    ):
        odd = dataclasses.replace(call, **changes)
        with pytest.raises(kind, match=said):
            torch_op.layer(*positional(odd))
        torch._dynamo.reset()
        with pytest.raises(Exception, match=said):
            torch.compile(model, backend="eager")(odd, torch.tensor(1.0, dtype=torch.bfloat16))
    for name in torch_op.LAYER_WRITTEN:
        if (own := getattr(call, name)) is not None:
            assert torch.equal(own.nan_to_num(), getattr(before, name).nan_to_num()), name


def test_a_forced_config_is_refused_under_compile() -> None:
    call = random_layer_call(layer(STEP), 3)

    def run() -> torch.Tensor:
        return replayssm_cute.decode_step(**kwargs(call), config=replayssm_cute.TileConfig())

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"config: got a TileConfig under torch\.compile"):
        torch.compile(run, fullgraph=True, backend="eager")()


@pytest.mark.gpu
@pytest.mark.kernels(lambda where: of_layers(where, {"problem": layer(LARGE), "batch": 5}))
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_on_a_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager and compiled alike, bit for bit, and then in a graph."""
    if backend == "inductor" and (reason := missing_for_inductor()):
        pytest.skip(reason)
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    call = copied(random_layer_call(layer(LARGE), 5, padding=(3,), pnat=3, dead=0.0), "cuda")
    eager, compiled = copied(call), copied(call)
    scale = torch.tensor(0.5, dtype=torch.bfloat16, device="cuda")
    expected = model(eager, scale)
    torch._dynamo.reset()
    built = torch.compile(model, fullgraph=True, backend=backend)
    with torch.inference_mode():
        torch.testing.assert_close(built(compiled, scale), expected, rtol=0, atol=0)
        for name in torch_op.LAYER_WRITTEN:
            if (own := getattr(compiled, name)) is not None:
                torch.testing.assert_close(own, getattr(eager, name), rtol=0, atol=0)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # cursors stay: the same step once more
            got = built(compiled, scale)
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(got, expected)
