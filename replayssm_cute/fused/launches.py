"""From a call's tensors to three launches: the conv, the step and the norm, overlapping as `overlap` says.

A call is recognized by its tensors' shapes, strides and dtypes; a known one is launched without further checks but
those that kernels make of their arguments. A first one is checked, and readies every kernel that other batch sizes of
its problem may need: see `ready`.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from .. import compiler, plan, tables
from ..config import TileConfig
from ..sm100 import Sm100Config
from . import overlap as overlaps
from . import proof
from .chains import Chain, Overlap
from .problem import LARGEST, LayerCall, LayerProblem, layer_problem
from .recipes import LayerRecipe
from .shapes import ConvShape, NormShape, conv_shape, conv_shapes, norm_shape, step_shape

_LIMIT = 4096  # signatures kept

_plans: dict[Hashable, LayerPlan] = {}
_kernels: dict[tuple[LayerRecipe, int], compiler.Kernel] = {}
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """A decode step that is ready to run.

    Attributes:
        problem: what was asked; its step's `pdl` is `overlap.chained`.
        overlap: which kernels start early.
        step: the checkpointing SSU's plan.
        conv, norm: the kernels before and after it.
        x_step: the step kernel that convolves x, in place of the plan's own, and the conv B and C alone; or None.
    """

    problem: LayerProblem
    overlap: Overlap
    step: plan.Plan
    conv: compiler.Kernel
    norm: compiler.Kernel
    x_step: compiler.Kernel | None = None

    def launch(self, call: LayerCall) -> torch.Tensor:
        """Run the step on a call of this problem, on the current stream of its device."""
        for work in self.parts(call):
            work[0](*work[1])
        return call.out

    def parts(self, call: LayerCall) -> tuple[tuple[compiler.Kernel, tuple[Any, ...]], ...]:
        """Each launch of a call in order: a kernel and its arguments."""
        scratch, first = call.scratch, 0 if self.x_step is None else self.problem.d_inner
        if scratch is None:
            scratch = call.projected.new_empty((*call.projected.shape[:2], self.problem.channels - first))
        elif first:
            scratch = scratch[..., first:]
        slots, pad, bias = call.state_batch_indices, call.pad_slot_id, call.conv_bias
        inputs, cache, weight = call.conv_inputs(), call.conv_cache, call.conv_weight
        step: tuple[compiler.Kernel, tuple[Any, ...]]
        if self.x_step is None:
            step = self.step.kernel, plan.kernel_args(call.step_call(scratch, call.out))
        else:
            inputs, cache, weight = inputs[..., first:], cache[..., first:], weight[first:]
            bias = None if bias is None else bias[first:]
            of_x = call.step_call(scratch, call.out, with_x=False)
            step = self.x_step, (*plan.kernel_args(of_x), *call.conv_of_x())
        return (
            (
                self.conv,
                (inputs, cache, call.ring_start, call.prev_num_accepted_tokens, weight, bias, scratch, slots, pad),
            ),
            step,
            (self.norm, (call.out, call.gate(), call.norm_weight, slots, float(call.eps), pad)),
        )


def run(call: LayerCall, enable_pdl: bool, config: TileConfig | None) -> torch.Tensor:
    """Check and launch a decode step on CUDA tensors; arguments and errors as in `decode_step`."""
    try:
        signature = _signature(call, enable_pdl, config)
        found = _plans.get(signature)
    except (AttributeError, TypeError):  # some argument is no tensor, or cannot be a key; the checks say which
        found = signature = None
    device = call.state.get_device()
    if device == plan.current_device():
        return (found or _find(signature, call, enable_pdl, config)).launch(call)
    with plan.on_device(device):
        return (found or _find(signature, call, enable_pdl, config)).launch(call)


def _signature(call: LayerCall, enable_pdl: bool, config: TileConfig | None) -> Hashable:
    """What tells a checked call from one that has to be checked."""
    given = (
        call.projected, call.state, call.x_cache, call.B_cache, call.dt_cache, call.conv_cache, call.ring_start,
        call.prev_num_accepted_tokens, call.conv_weight, call.A, call.norm_weight, call.out,
    )  # fmt: skip
    optional = (call.conv_bias, call.D, call.dt_bias, call.scratch, call.state_batch_indices)
    there = [t for t in optional if t is not None]
    aligned = [t for t in (call.conv_bias, call.scratch) if t is not None]
    aligned += (*given[:4], given[5], given[8], *given[10:])
    address = 0
    for t in aligned:
        address |= t.data_ptr()
    return (
        tuple((t.shape, t.stride(), t.dtype, t.device) for t in (*given, *there)),
        tuple(t is None for t in optional),
        address % 16,
        # 1 equals True: only the class tells a bool
        *((value, value.__class__) for value in (call.norm_groups, call.dt_softplus, enable_pdl)),
        call.eps.__class__,
        0 <= call.eps <= LARGEST,
        call.pad_slot_id.__class__,
        config,
    )


def _find(signature: Hashable, call: LayerCall, enable_pdl: bool, config: TileConfig | None) -> LayerPlan:
    """The plan of a call that is not known, after every check of it."""
    problem = layer_problem(call)
    device = call.state.get_device()
    made = make(problem, call.projected.shape[0], device, config=config, enable_pdl=enable_pdl)
    with _lock:
        if len(_plans) >= _LIMIT:
            _plans.clear()
        if signature is not None:
            _plans[signature] = made
    return made


def forget() -> None:
    """Forget all plans, for example after the tables changed; kernels stay loaded."""
    with _lock:
        _plans.clear()


def make(
    problem: LayerProblem,
    batch: int,
    device: int,
    *,
    config: TileConfig | None = None,
    enable_pdl: bool = False,
    overlap: Overlap | Chain | None = None,
    conv: ConvShape | None = None,
    norm: NormShape | None = None,
) -> LayerPlan:
    """The plan for `batch` rows of a problem on a device.

    Outside a graph capture every kernel that other batch sizes may need is readied too.

    Args:
        config: forces the step's tile config.
        enable_pdl: whether the conv may start while its predecessor runs.
        overlap: forces which kernels start early and which convolves x, a `Chain` their shapes as well; None takes
            what `overlap` knows.
        conv, norm: force these kernels; None takes the chain's.

    Raises:
        ValueError, RuntimeError: as `decode_step`.
    """
    others: tuple[Chain, ...] = ()
    if overlap is None:
        target = plan.device_target(device)
        chain = overlaps.choose(problem.step, batch, target, promised=enable_pdl)
        if not compiler.capturing():
            others = overlaps.candidates(problem.step, target, promised=enable_pdl)
    else:
        chain = Chain(overlap) if isinstance(overlap, Overlap) else overlap
    for other in others:
        if other != chain:
            _made(problem, batch, device, config, other, conv, norm)
    return _made(problem, batch, device, config, chain, conv, norm)


def _made(
    problem: LayerProblem,
    batch: int,
    device: int,
    config: TileConfig | None,
    chain: Chain,
    conv: ConvShape | None,
    norm: NormShape | None,
) -> LayerPlan:
    """The plan with a given chain."""
    overlap, chained = chain.overlap, chain.overlap.chained
    problem = dataclasses.replace(problem, step=dataclasses.replace(problem.step, pdl=chained))
    if config is None and chain.config is not None and plan._ready(problem.step, chain.config, device, batch):
        config = chain.config  # else its kernel failed its self-check, and what stands in for it serves
    step = plan.make(problem.step, batch, device, config)
    x_step = None
    if overlap.x_in_step:
        assert step.choice is not None  # of a GPU's plan there is one
        if isinstance(step.choice.config, Sm100Config):  # that kernel has no conv in it
            overlap = Overlap.ALL if overlap.first else Overlap.INNER
        else:
            if config is None and not compiler.capturing():
                candidates = tables.candidates(problem.step, plan.device_target(device))
                for other in (c for c in candidates if not isinstance(c, Sm100Config)):
                    ready(LayerRecipe(step_shape(problem, other, chain.early)), device)
            x_step = ready(LayerRecipe(step_shape(problem, step.choice.config, chain.early)), device)
    how: dict[str, bool] = {"chained": chained, "pdl": overlap.first, "with_x": not overlap.x_in_step}
    if conv is None and chain.conv is not None:
        conv = chain.conv.of(conv_shape(problem, batch, **how))
    if norm is None:
        norm = norm_shape(problem, chained=chained)
        norm = norm if chain.norm is None else chain.norm.of(norm)
    for shape in conv_shapes(problem, **how) if conv is None else (conv,):
        if not compiler.capturing():
            ready(LayerRecipe(shape), device)
    chosen = conv_shape(problem, batch, **how) if conv is None else conv
    return LayerPlan(
        problem,
        overlap,
        step,
        ready(LayerRecipe(chosen), device),
        ready(LayerRecipe(norm), device),
        x_step,
    )


def ready(recipe: LayerRecipe, device: int) -> compiler.Kernel:
    """A kernel whose code is on the device, and which gave right numbers there.

    Raises:
        RuntimeError: if it gave wrong ones; during a graph capture, if it has not been readied before.
    """
    name = (recipe, device)
    kernel = _kernels.get(name)
    if kernel is None:
        if compiler.capturing():
            raise compiler.not_ready(recipe)
        with _lock, plan.on_device(device):
            kernel = compiler.load(recipe, plan.device_target(device))
            proof.prove(recipe, kernel, plan.tensor_device(device))
            _kernels[name] = kernel
    return kernel
