"""Decoding with checkpointing SSU: windows of T tokens on a ReplayCache."""

from __future__ import annotations

from typing import Any

import torch

from replayssm_cute import CacheSpec, ReplayCache, checkpointing_ssu, warmup
from replayssm_cute.reference import checkpointing_ssu_reference

from .decoder import PAD, Decoder
from .model import Block, Model


class ReplayDecoder(Decoder):
    """See `Decoder`; the CPU runs the reference in the model's dtype.

    Args:
        window: W of the cache.
    """

    update = "replayssm_cute.checkpointing_ssu"

    def __init__(
        self, model: Model, requests: int, tokens: int, window: int = 16, buckets: list[int] | None = None
    ) -> None:
        super().__init__(model, requests, tokens, buckets)
        s = model.shape
        spec = CacheSpec(
            layers=s.layers, heads=s.heads, head_dim=s.head_dim, d_state=s.d_state, groups=s.groups, tokens=tokens,
            window=window,
        )  # fmt: skip
        self.cache = ReplayCache.allocate(spec, requests + 1, self.device, A=self.A, pad_slot_id=PAD)
        if self.device.type == "cuda":
            given = "bf16" if self.narrow == torch.bfloat16 else "f32"
            problem = spec.problem(dt_dtype=given, d_dtype=given, dt_bias_dtype=given)
            self.coverage = warmup([problem], self.graphs.buckets, cache=self.cache)
        self.capture()

    def _enter(self, slots: torch.Tensor, states: list[torch.Tensor]) -> None:
        self.cache.prefill_handoff(slots, states)

    def _begin(self, slots: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        # A slot whose window is not open, after a prefill, has nothing to move on by.
        moved = torch.minimum(accepted, self.cache.last_tokens[slots.clamp(min=0).long()]).clamp(min=0)
        self.cache.begin_step(slots, accepted)
        return moved

    def _update(
        self, layer: int, block: Block, slots: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor,
        C: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        s = self.model.shape
        gpu = self.device.type == "cuda"
        out = torch.empty(x.shape, dtype=torch.bfloat16 if gpu else self.dtype, device=self.device)
        arguments: dict[str, Any] = {
            **self.cache.step_args(layer),
            "x": x,
            "dt": dt[..., None].expand(x.shape),
            "A": self.A[layer][:, None, None].expand(s.heads, s.head_dim, s.d_state),
            "B": B,
            "C": C,
            "out": out,
            "D": block.D.to(self.narrow)[:, None].expand(s.heads, s.head_dim),
            "dt_bias": block.dt_bias.to(self.narrow)[:, None].expand(s.heads, s.head_dim),
            "dt_softplus": True,
            "state_batch_indices": slots,
            "pad_slot_id": PAD,
        }
        if gpu:
            checkpointing_ssu(**arguments)
        else:
            checkpointing_ssu_reference(**arguments, compute_dtype=self.dtype)
        return out
