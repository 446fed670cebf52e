"""The two calls as registered torch operators, for torch.compile: a graph sees one node and what it writes.

Eager calls never come here: entering a registered operator costs several times the launch.
"""

from __future__ import annotations

import torch

LAYER_WRITTEN = ("state", "x_cache", "B_cache", "dt_cache", "conv_cache", "out", "scratch")
WRITTEN = ("state", "x_cache", "B_cache", "dt_cache", "out", "state_scale", "state_copy")


@torch.library.custom_op(
    "replayssm_cute::checkpointing_ssu",
    mutates_args=WRITTEN,
    # A, D, dt and dt_bias are stride-0 views, and slots may be views into a pool: copies would not be the same call.
    tags=(torch.Tag.needs_exact_strides,),
)
def step(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None,
    z: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
    dt_softplus: bool,
    state_batch_indices: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    pad_slot_id: int,
    max_seqlen: int | None,
    enable_pdl: bool,
    state_scale: torch.Tensor | None,
    rand_seed: torch.Tensor | None,
    philox_rounds: int,
    state_copy: torch.Tensor | None,
    precision: str,
) -> None:
    """`replayssm_cute.checkpointing_ssu` in positional form, without its return value (`out` is an argument)."""
    from .api import checkpointing_ssu

    checkpointing_ssu(
        state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out, D, z, dt_bias,
        dt_softplus, state_batch_indices, pad_slot_id, state_scale, rand_seed, philox_rounds, cu_seqlens=cu_seqlens,
        max_seqlen=max_seqlen, enable_pdl=enable_pdl, state_copy=state_copy, precision=precision,
    )  # fmt: skip


@step.register_fake
def _(*args: object) -> None:
    """Nothing is returned, so a trace has nothing to shape; arguments are checked when the step runs."""


@torch.library.custom_op(
    "replayssm_cute::decode_step",
    mutates_args=LAYER_WRITTEN,
    # Rows are strided views of in_proj's output and of a pool's pages: copies would not be the same call.
    tags=(torch.Tag.needs_exact_strides,),
)
def layer(
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
    state_batch_indices: torch.Tensor | None,
    pad_slot_id: int,
    norm_groups: int | None,
    eps: float,
    dt_softplus: bool,
    scratch: torch.Tensor | None,
    enable_pdl: bool,
) -> None:
    """`replayssm_cute.decode_step` in positional form, without its return value (`out` is an argument)."""
    from .fused.api import decode_step

    decode_step(
        projected, state, x_cache, B_cache, dt_cache, conv_cache, ring_start, prev_num_accepted_tokens, conv_weight,
        conv_bias, A, D, dt_bias, norm_weight, out, state_batch_indices, pad_slot_id, norm_groups=norm_groups, eps=eps,
        dt_softplus=dt_softplus, scratch=scratch, enable_pdl=enable_pdl,
    )  # fmt: skip


@layer.register_fake
def _(*args: object) -> None:
    """As that of `step`."""
