"""Long generations, decoded with any kind of state: what the studies of errors share.

`Steps` say in which order a sequence of tokens is run: T a step, some accepted, the others wrong drafts; a `Stream` is
such steps with their inputs. All that does not depend on the kind of state is made once: each step's inputs, the
cursors (`ring.commit`, for each window), and the outputs of the token-by-token recurrence. A step is then one launch,
with nothing between it and the next one; errors are added up afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from replayssm_cute import compiler, plan, ring, target
from replayssm_cute.calls import Call, spread
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """What a layer's SSU is given, n tokens of b requests, in the dtypes that the step takes.

    Attributes:
        x: (n, b, H, P).
        dt: (n, b, H), raw.
        B, C: (n, b, G, N).
        rate, bias: (H,) A and dt_bias; dt goes through softplus.
    """

    x: torch.Tensor
    dt: torch.Tensor
    B: torch.Tensor
    C: torch.Tensor
    rate: torch.Tensor
    bias: torch.Tensor

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.x.device


def acceptance(count: int, tokens: int, generator: torch.Generator) -> list[int]:
    """How many tokens each step accepts, uniform in 1..tokens, until `count` are; the last step takes what is left."""
    drawn = torch.randint(1, tokens + 1, (count,), generator=generator)  # no step accepts none: more than enough
    ends = drawn.cumsum(0)
    steps = int((ends < count).sum()) + 1
    drawn[steps - 1] -= ends[steps - 1] - count
    return [int(a) for a in drawn[:steps]]


class Steps:
    """The steps that decode n tokens.

    Attributes:
        count, tokens: n, and T.
        accepted: tokens accepted in each step; all requests accept alike, so that a span holds the same tokens of each.
        rows: (steps, T) int64, the token at each place of a step: the next ones where it is accepted; a wrong draft is
            a token from elsewhere in the sequence.
        first: (steps,) int64, the first token of each step.
        at: the step, and the place in it, that decoded each token: two (n,) int64.

    Tensors are on the CPU.
    """

    def __init__(self, count: int, tokens: int, generator: torch.Generator) -> None:
        self.count, self.tokens = count, tokens
        self.accepted = acceptance(count, tokens, generator)
        counts = torch.tensor(self.accepted)
        self.first = counts.cumsum(0) - counts
        place = torch.arange(tokens)
        right = place < counts[:, None]
        wrong = torch.randint(0, count, right.shape, generator=generator)
        self.rows = torch.where(right, self.first[:, None] + place, wrong)
        self.at = right.nonzero(as_tuple=True)
        self._cursors: dict[Any, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def cursors(self, window: int, requests: int, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(ring_start, pnat) of every step, each (b,) int32: `ring.commit` of the steps before, from an empty ring."""
        key = window, requests, device
        if key not in self._cursors:
            start, pnat = torch.zeros(2, requests, dtype=torch.int32)
            slots, seen = torch.arange(requests), []
            for accepted in self.accepted:
                seen.append(torch.stack((start, pnat)))
                taken = torch.full((requests,), accepted)
                ring.commit(start, pnat, slots, taken, tokens=self.tokens, window=window)
            moved = torch.stack(seen).to(device)
            self._cursors[key] = list(zip(moved[:, 0].unbind(0), moved[:, 1].unbind(0), strict=True))
        return self._cursors[key]


class Stream:
    """Steps and what they are given: the same for every kind of state.

    Attributes:
        inputs: the accepted tokens, in order.
        steps: how they are run.
    """

    def __init__(self, inputs: Inputs, steps: Steps) -> None:
        self.inputs, self.steps = inputs, steps
        rows = steps.rows.to(inputs.device)

        def by_step(t: torch.Tensor) -> tuple[torch.Tensor, ...]:
            """Views (b, T, ...), one a step."""
            return t[rows].transpose(1, 2).contiguous().unbind(0)

        self._x, self._B, self._C = (by_step(t) for t in (inputs.x, inputs.B, inputs.C))
        self._dt = tuple(spread(t, inputs.x.shape[3]) for t in by_step(inputs.dt))

    def calls(self, cache: Call, out: torch.Tensor, seeds: torch.Tensor | None) -> Iterator[Call]:
        """The call of each step on a cache's tensors, one object anew; out (steps, b, T, H, P), seeds (steps, 1)."""
        given = self.inputs
        requests, P, N = given.x.shape[1], given.x.shape[3], given.B.shape[3]
        rate, bias = spread(given.rate, P, N), spread(given.bias, P)
        every_seed: Sequence[torch.Tensor | None] = [None] * len(self._x) if seeds is None else seeds.unbind(0)
        cursors = self.steps.cursors(cache.x_cache.shape[2] - self.steps.tokens, requests, given.device)
        per_step = (cursors, self._x, self._dt, self._B, self._C, out.unbind(0), every_seed)
        call = dataclasses.replace(cache, A=rate, dt_bias=bias)
        for (start, pnat), x, dt, B, C, y, seed in zip(*per_step, strict=True):
            call.ring_start, call.prev_num_accepted_tokens, call.rand_seed = start, pnat, seed
            call.x, call.dt, call.B, call.C, call.out = x, dt, B, C, y
            yield call


def recurrence(inputs: Inputs, dtype: torch.dtype, kept: torch.dtype | None = None) -> torch.Tensor:
    """Outputs (n, b, H, P) of the token-by-token update (`reference.py` has the formula), computed in `dtype`.

    Args:
        kept: what the state is rounded to after every token, as a layer that keeps it so does; default `dtype`.
    """
    n, repeat = len(inputs.x), inputs.x.shape[2] // inputs.B.shape[2]
    dt = F.softplus(inputs.dt.to(dtype) + inputs.bias.to(dtype))
    decay = torch.exp(inputs.rate.to(dtype) * dt)
    scaled = dt[..., None] * inputs.x.to(dtype)
    B, C = (t.to(dtype).repeat_interleave(repeat, 2) for t in (inputs.B, inputs.C))
    # one matrix a request and head, so that a token is three launches
    decay, scaled, B, C = (t.flatten(1, 2) for t in (decay, scaled, B, C))
    decays, columns = decay[..., None, None].unbind(0), scaled[..., None].unbind(0)
    rows, queries = B[..., None, :].unbind(0), C[..., None].unbind(0)
    state = torch.zeros((*scaled.shape[1:], B.shape[2]), dtype=dtype, device=inputs.device)
    out = torch.empty((*scaled.shape, 1), dtype=dtype, device=inputs.device)
    short = None if kept in (None, dtype) else torch.empty_like(state, dtype=kept)
    for token, y in enumerate(out.unbind(0)):
        state.mul_(decays[token]).addcmul_(columns[token], rows[token])
        torch.bmm(state, queries[token], out=y)
        if short is not None:
            state.copy_(short.copy_(state))
    return out.view(n, *inputs.x.shape[1:])


def decode(
    stream: Stream, problem: Problem, config: TileConfig | None, *, seed: int = 0, wide: torch.dtype | None = None
) -> torch.Tensor:
    """Outputs (n, b, H, P) of the accepted tokens, decoded by steps of `problem` from an empty state.

    On a GPU the kernel of `config` runs, which need not have passed its self-check: the study checks it. On the CPU the
    reference does.

    Args:
        seed: of the seeds of stochastic rounding, another one for each step.
        wide: what the CPU keeps outputs in, so that nothing hides the state's own error; default the step's own dtype.

    Raises:
        ValueError: if the stream's tensors are not of `problem`.
    """
    device, requests, steps = stream.inputs.device, stream.inputs.x.shape[1], len(stream.steps.accepted)
    cache = plan.scratch_call(problem, device, requests)
    seeds = None
    if problem.philox_rounds is not None:
        drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (steps, 1), generator=torch.Generator().manual_seed(seed))
        seeds = drawn.to(device)
    out = torch.empty((steps, *cache.out.shape), dtype=cache.out.dtype, device=device)
    calls = stream.calls(cache, out, seeds)
    if (found := plan.checked_problem(next(calls), problem.pdl)) != problem:
        raise ValueError(f"stream: its steps are of {found}, expected {problem}")
    if device.type == "cpu":
        out = out.to(wide or out.dtype)
        for call in stream.calls(cache, out, seeds):
            checkpointing_ssu_reference(**call.kwargs())
    else:
        assert config is not None  # only the CPU has none
        kernel = compiler.get(problem, config, target.of_device(torch.cuda.current_device()))
        for call in stream.calls(cache, out, seeds):
            kernel(*plan.kernel_args(call))
    step, place = (t.to(device) for t in stream.steps.at)
    return out[step, :, place]


def errors(steps: Steps, got: torch.Tensor, truth: torch.Tensor, span: int, by_step: bool = True) -> torch.Tensor:
    """(spans,) float64: the error of each `span` accepted tokens, relative, 2-norm over requests, heads, columns.

    A step's tokens go to the span of its first one (without `by_step`, for the token-by-token update, each to its own),
    and what is left after the last full span to that one.
    """
    number = torch.arange(steps.count) if not by_step else steps.first[steps.at[0]]
    number = (number // span).clamp(max=points(steps, span) - 1)
    sums = torch.zeros(2, points(steps, span), dtype=torch.float64)
    for total, each in zip(sums, ((got.double() - truth), truth), strict=True):
        total.index_add_(0, number, each.square().sum((1, 2, 3)).cpu())
    return (sums[0] / sums[1]).sqrt()


def points(steps: Steps, span: int) -> int:
    """Points of a curve."""
    return max(1, steps.count // span)


def ends(steps: Steps, span: int) -> list[int]:
    """The accepted token that each point of a curve ends with."""
    return [*(span * (k + 1) for k in range(points(steps, span) - 1)), steps.count]
