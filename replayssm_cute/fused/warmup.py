"""The part of `replayssm_cute.warmup` that readies decode steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import dtypes, plan, ring
from ..config import TileConfig
from . import launches
from .chains import Overlap
from .problem import CONV_WIDTH, LayerCall, LayerProblem

ALIGNED = 8  # values in 16 bytes, to which rows of a projection are aligned


@dataclass(frozen=True, slots=True)
class LayerCovered:
    """One decode step at one batch size: which kernels overlap and which convolves x, the step's config, steps run."""

    problem: LayerProblem
    batch: int
    overlap: Overlap
    config: TileConfig
    decoded: int


def warm(
    problem: LayerProblem, batches: Sequence[int], rows: int, index: int, enable_pdl: bool, say: Callable[[str], None]
) -> list[LayerCovered]:
    """Ready every kernel that a decode step's calls may launch on device `index`, and decode until a step has flushed.

    Args:
        batches: batch sizes; kernels of others are readied too.
        rows: at most so many are decoded: they are independent.
        enable_pdl: as the calls will have it.

    Raises:
        RuntimeError: if a kernel gave wrong numbers, or no kernel serves here.
    """
    found = []
    for batch in batches:
        say(f"{problem.label()}: preparing decode_step at batch {batch}")
        made = launches.make(problem, batch, index, enable_pdl=enable_pdl)
        decoded = _decode(made, scratch_call(problem, plan.tensor_device(index), min(batch, rows)))
        assert made.step.choice is not None  # of a GPU's plan there is one
        found.append(LayerCovered(problem, batch, made.overlap, made.step.choice.config, decoded))
    return found


def scratch_call(problem: LayerProblem, device: torch.device, batch: int) -> LayerCall:
    """A decode step on all-zero tensors of its own: `batch` rows of T tokens, one slot each, empty rings."""
    p = problem.step
    inner = plan.scratch_call(p, device, batch)

    def zeros(kind: str, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtypes.TORCH[kind], device=device)

    def vector(kind: str | None, size: int) -> torch.Tensor | None:
        return None if kind is None else zeros(kind, size)

    width = -(-problem.width // ALIGNED) * ALIGNED
    return LayerCall(
        projected=zeros(p.io_dtype, batch, p.tokens, width)[..., : problem.width],
        state=inner.state,
        x_cache=inner.x_cache,
        B_cache=inner.B_cache,
        dt_cache=inner.dt_cache,
        conv_cache=zeros(p.io_dtype, batch, p.ring_rows, problem.channels),
        ring_start=inner.ring_start,
        prev_num_accepted_tokens=inner.prev_num_accepted_tokens,
        conv_weight=zeros(problem.conv_dtype, problem.channels, CONV_WIDTH),
        conv_bias=vector(problem.conv_bias_dtype, problem.channels),
        A=zeros(p.a_dtype, p.heads),
        D=vector(p.d_dtype, p.heads),
        dt_bias=vector(p.dt_bias_dtype, p.heads),
        norm_weight=zeros(problem.norm_dtype, problem.d_inner),
        out=zeros(p.io_dtype, batch, p.tokens, problem.d_inner),
        state_batch_indices=inner.state_batch_indices,
        norm_groups=problem.norm_groups,
        dt_softplus=p.dt_softplus,
    )


def _decode(made: launches.LayerPlan, call: LayerCall) -> int:
    """Steps and commits with every token accepted until one has flushed; returns the number of steps."""
    p = made.problem.step
    steps = p.window // p.tokens + 1
    rows = torch.arange(len(call.out), device=call.state.device)
    accepted = torch.full((len(rows),), p.tokens, dtype=torch.int32, device=call.state.device)
    for _ in range(steps):
        made.launch(call)
        ring.commit(call.ring_start, call.prev_num_accepted_tokens, rows, accepted, tokens=p.tokens, window=p.window)
    return steps
