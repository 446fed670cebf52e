"""The public call: a Mamba2 layer's decode step between its two projections."""

from __future__ import annotations

import torch

from .. import checks, compiler, torch_op
from ..config import TileConfig
from . import launches
from .problem import LayerCall, LayerProblem, layer_problem
from .reference import decode_step_reference

_CHECK = checks.enabled()
_compiling = torch.compiler.is_compiling  # looked up once, as in `replayssm_cute.api`


def decode_step(
    projected: torch.Tensor,
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    conv_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    conv_weight: torch.Tensor,
    conv_bias: torch.Tensor | None,
    A: torch.Tensor,
    D: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    out: torch.Tensor,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    *,
    norm_groups: int | None = None,
    eps: float = 1e-5,
    dt_softplus: bool = True,
    scratch: torch.Tensor | None = None,
    enable_pdl: bool = False,
    config: TileConfig | None = None,
) -> torch.Tensor:
    """A Mamba2 layer's decode step on T new tokens a row, from in_proj's output to out_proj's input, in place.

    A causal conv of four taps and SiLU over x, B and C; checkpointing SSU with its D; the gated RMSNorm
    `u / sqrt(mean(u²) + eps) · norm_weight` of u = y·z·sigmoid(z), its mean over each of `norm_groups` groups. With b
    rows, H heads of P (head_dim) by N (d_state), G groups, R = W + T ring rows, d_inner = H·P and channels =
    d_inner + 2·G·N; limits and flush rule are those of `checkpointing_ssu`, and W >= 3:

    Args:
        projected: (b, T, 2·d_inner + 2·G·N + H) bf16 or f16, [z | x | B | C | dt] of each token; may be strided, rows
            aligned to 16 bytes. Read only.
        state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens: as in `checkpointing_ssu`, whose
            x_cache and B_cache hold x and B as they come out of the conv; `ReplayCache.step_args` gives them.
        conv_cache: (slots, R, channels), projected's dtype: ring of the conv's raw inputs, under the same cursors; see
            `fused.conv_ring`. The three rows before a request's first token are zeros.
        conv_weight: (channels, 4), f32, bf16 or f16, contiguous; the last tap is the newest token's.
        conv_bias: (channels,) f32, bf16 or f16, or None.
        A: (H,) f32, bf16 or f16; negative values.
        D, dt_bias: (H,) f32, bf16 or f16 each, or None.
        norm_weight: (d_inner,) f32, bf16 or f16.
        out: (b, T, d_inner), projected's dtype; written. Rows aligned to 16 bytes.
        state_batch_indices: (b,) int32 or int64 slots; None means row i uses slot i. Live slots are distinct.
        pad_slot_id: rows with this slot, or a negative one, are padding: output zero, caches untouched.
        norm_groups: of the norm; None: as many as B has. Each is a multiple of 8 values.
        eps: added to the mean square.
        dt_softplus: whether dt goes through softplus (after dt_bias).
        scratch: (b, T, channels), projected's dtype: memory for what the conv gives the step; None takes some from
            torch's allocator.
        enable_pdl: promises that the direct predecessor on the stream, and whatever runs beside it, writes nothing but
            `projected`, so that the conv, and the step behind it, may start while it runs. Whether the call's three
            kernels overlap each other does not depend on it: see `fused.overlap`.
        config: forces the step's tile config. No effect on the CPU.

    Arithmetic is f32. The conv's outputs and the SSU's are rounded to projected's dtype once each, as they are between
    the kernels that this call stands for, and the norm's result is rounded once, after its weight. The cursors are
    read; `commit` moves them as it does for `checkpointing_ssu`. What is written (state, the caches, out, scratch)
    shares no memory with another argument, which is checked as there. CPU tensors run the reference. REPLAYSSM_CHECK=1
    also checks slots and cursors on CUDA, which synchronizes; not while a graph is captured. The first call of a
    problem compiles or loads its kernels and checks their numbers, and so belongs before a graph capture; `warmup` does
    so too. Under torch.compile the call becomes one node, the operator `replayssm_cute::decode_step`.

    NaN and Inf in padding rows and dead ring rows change nothing.

    Returns:
        `out`.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong rank, shape, device, stride, alignment or value, shared memory, or a config that cannot run
            here.
        NotImplementedError: what is not served yet.
        RuntimeError: no kernels for this GPU, kernels that failed their self-check on it, or a kernel that is not ready
            during a graph capture.
    """
    if _compiling():
        if config is not None:
            raise ValueError("config: got a TileConfig under torch.compile, expected None; put it into a tuned table")
        torch_op.layer(
            projected, state, x_cache, B_cache, dt_cache, conv_cache, ring_start, prev_num_accepted_tokens,
            conv_weight, conv_bias, A, D, dt_bias, norm_weight, out, state_batch_indices, pad_slot_id, norm_groups, eps,
            dt_softplus, scratch, enable_pdl,
        )  # fmt: skip
        return out
    call = LayerCall(
        projected, state, x_cache, B_cache, dt_cache, conv_cache, ring_start, prev_num_accepted_tokens, conv_weight,
        conv_bias, A, D, dt_bias, norm_weight, out, state_batch_indices, pad_slot_id, norm_groups, eps, dt_softplus,
        scratch,
    )  # fmt: skip
    if not isinstance(enable_pdl, bool):
        raise TypeError(f"enable_pdl: got {type(enable_pdl).__name__}, expected bool")
    if isinstance(state, torch.Tensor) and state.is_cuda:
        if _CHECK and not compiler.capturing():
            _check_values(call, layer_problem(call))
        return launches.run(call, enable_pdl, config)
    problem = layer_problem(call)
    if state.device.type != "cpu":
        raise ValueError(f"state: on device {state.device}, expected a CUDA device or the CPU")
    if config is not None and not isinstance(config, TileConfig):
        raise TypeError(f"config: got {type(config).__name__}, expected TileConfig or None")
    _check_values(call, problem)
    with torch.inference_mode():  # the only mode in which torch writes tensors of any mode, as kernels do
        decode_step_reference(call, problem.norm_groups)
    return out


def _check_values(call: LayerCall, problem: LayerProblem) -> None:
    checks.check_values(
        call.ring_start,
        call.prev_num_accepted_tokens,
        call.state_batch_indices,
        call.pad_slot_id,
        batch=call.projected.shape[0],
        tokens=problem.step.tokens,
        window=problem.step.window,
    )
