"""Drop-in for `flashinfer.mamba.checkpointing_ssu` 0.7.4: the same parameters in the same order."""

from __future__ import annotations

import torch

from .. import api


def checkpointing_ssu(
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
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    d_split: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    cb_scaled: torch.Tensor | None = None,
    cumAdt_vec: torch.Tensor | None = None,
    cb_old: torch.Tensor | None = None,
    precompute_heads_per_cta: int = 0,
    algorithm: str = "auto",
) -> torch.Tensor:
    """`replayssm_cute.checkpointing_ssu` under FlashInfer's signature; shapes, dtypes and errors as there.

    `d_split`, `precompute_heads_per_cta` and `algorithm` tune FlashInfer's kernels, `cb_scaled`, `cumAdt_vec` and
    `cb_old` are their scratch: accepted, ignored, never written.

    Returns:
        `out`.
    """
    return api.checkpointing_ssu(
        state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out, D, z, dt_bias,
        dt_softplus, state_batch_indices, pad_slot_id, state_scale, rand_seed, philox_rounds,
        cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, enable_pdl=enable_pdl,
    )  # fmt: skip
