"""torch.compile: the call is one node of the graph, and what it writes is what the eager call writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import SMALL

import replayssm_cute
from replayssm_cute import torch_op
from replayssm_cute.calls import Call, random_call


def positional(call: Call) -> tuple[Any, ...]:
    return (*call.kwargs().values(), False)


def layer(call: Call, scale: torch.Tensor) -> torch.Tensor:
    """A step between two ordinary operations, as in a model."""
    call.x = call.x * scale
    return replayssm_cute.checkpointing_ssu(**call.kwargs()) + 1


@pytest.mark.parametrize("padding", [(), (1,)])
def test_a_compiled_layer_equals_the_eager_one(padding: tuple[int, ...]) -> None:
    call = random_call(SMALL, 3, padding=padding)
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
    for name in torch_op.WRITTEN:
        torch.testing.assert_close(getattr(compiled, name), getattr(eager, name), rtol=0, atol=0, equal_nan=True)
    (graph,) = graphs
    nodes = [n for n in graph.graph.nodes if "checkpointing_ssu" in str(n.target)]
    assert len(nodes) == 1, "one node, no graph break"


def test_the_operator_holds_what_it_promises() -> None:
    """Exactly the written tensors are declared as such (torch's own opcheck clones the stride-0 views away)."""
    schema = torch.ops.replayssm_cute.checkpointing_ssu.default._schema
    declared = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
    assert declared == set(torch_op.WRITTEN)
    assert not schema.returns


def test_only_the_declared_tensors_are_written() -> None:
    call = random_call(SMALL, 3, padding=(1,), dead=0.0)
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
