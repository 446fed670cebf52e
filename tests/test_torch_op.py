"""torch.compile: the call is one node of the graph, and what it writes is what the eager call writes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from fakes import SMALL

import replayssm_cute
from replayssm_cute import plan, torch_op
from replayssm_cute.calls import Call, random_call


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
