"""The model on a ReplayCache: prefill into slots, then steps on T tokens of every request, in CUDA graphs on a GPU."""

from __future__ import annotations

from typing import Any

import torch

from replayssm_cute import CacheSpec, DecodeGraphs, GraphInput, ReplayCache, checkpointing_ssu, warmup
from replayssm_cute.reference import checkpointing_ssu_reference

from .model import Block, Model

PAD = 0  # the null slot


class Decoder:
    """A model with slots for some requests, that runs windows of T tokens.

    Args:
        model: in any float dtype; on the CPU the state update runs in it too (the reference in float64 or float32).
        requests: most of them at a time; requests take slots 1..requests.
        tokens: T, 1 for plain decoding, drafts + 1 for verification.
        window: W of the cache.
        buckets: batch sizes that graphs are captured for; default powers of two up to `requests`.
    """

    def __init__(
        self, model: Model, requests: int, tokens: int, window: int = 16, buckets: list[int] | None = None
    ) -> None:
        self.model, self.tokens = model, tokens
        weight = model.embedding.weight
        self.device, self.dtype = weight.device, weight.dtype
        s = model.shape
        spec = CacheSpec(
            layers=s.layers, heads=s.heads, head_dim=s.head_dim, d_state=s.d_state, groups=1, tokens=tokens,
            window=window,
        )  # fmt: skip
        self.A = [-torch.exp(block.A_log.detach().float()) for block in model.blocks]
        self.cache = ReplayCache.allocate(spec, requests + 1, self.device, A=self.A, pad_slot_id=PAD)
        # Of each layer, for each slot: the conv's inputs of the last K - 1 committed tokens, then those of the open
        # window, of which some may yet be rejected.
        self.history = torch.zeros(
            s.layers, requests + 1, s.conv - 1 + tokens, s.mixed, dtype=self.dtype, device=self.device
        )
        sizes = buckets or sorted({min(2**k, requests) for k in range(requests.bit_length() + 1)})
        self.graphs = DecodeGraphs(
            self._step,
            {
                "slots": GraphInput((), torch.int32, pad=PAD),
                "tokens": GraphInput((tokens,), torch.int64),
                "accepted": GraphInput((), torch.int32),
            },
            sizes,
            device=self.device,
        )
        if self.device.type == "cuda":
            problem = spec.problem(dt_dtype="f32", d_dtype="f32", dt_bias_dtype="f32")
            self.coverage = warmup([problem], sizes, cache=self.cache)
        with torch.inference_mode():
            self.captured = self.graphs.capture()

    @torch.inference_mode()
    def prefill(self, slots: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        """Run prompts (b, L) into slots (b,); gives the tokens (b,) that follow."""
        logits, states, tails = self.model(prompts)
        self.cache.prefill_handoff(slots, states)
        for layer, tail in enumerate(tails):
            self.history[layer, slots.long(), : tail.shape[1]] = tail
        return logits[:, -1].argmax(-1)

    @torch.inference_mode()
    def step(self, slots: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """Close the window before, of which `accepted` (b,) tokens stay, and run `tokens` (b, T).

        Returns:
            (b, T) the model's choice after each of them.
        """
        return self.graphs(slots=slots, tokens=tokens, accepted=accepted)

    def _step(self, slots: torch.Tensor, tokens: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        # A slot whose window is not open, after a prefill, has nothing to move on by.
        index = slots.clamp(min=0).long()
        moved = torch.minimum(accepted, self.cache.last_tokens[index]).clamp(min=0)
        self.cache.begin_step(slots, accepted)
        h = self.model.embedding(tokens)
        for layer, block in enumerate(self.model.blocks):
            z, mixed, dt = block.project(h)
            x, B, C = block.convolve(self._history(layer, index, moved, mixed))
            h = h + block.finish(self._ssu(layer, block, slots, x, dt, B, C), z)
        return self.model.logits(h).argmax(-1)

    def _history(self, layer: int, index: torch.Tensor, moved: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The conv's inputs of this window and the K - 1 tokens before it; they stay in the slots for the next one.

        Padding rows all use the null slot, whose content nobody reads.
        """
        before = torch.arange(self.model.shape.conv - 1, device=mixed.device) + moved[:, None]
        inputs = torch.cat((self.history[layer, index[:, None], before], mixed), dim=1)
        self.history[layer, index] = inputs
        return inputs

    def _ssu(
        self, layer: int, block: Block, slots: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor,
        C: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """The state update of a layer: (b, T, H, P)."""
        s = self.model.shape
        gpu = self.device.type == "cuda"
        x, B, C = (t.to(torch.bfloat16).contiguous() for t in (x, B, C))
        out = torch.empty(x.shape, dtype=torch.bfloat16 if gpu else self.dtype, device=self.device)
        arguments: dict[str, Any] = {
            **self.cache.step_args(layer),
            "x": x,
            "dt": dt.float()[..., None].expand(x.shape),
            "A": self.A[layer][:, None, None].expand(s.heads, s.head_dim, s.d_state),
            "B": B,
            "C": C,
            "out": out,
            "D": block.D.float()[:, None].expand(s.heads, s.head_dim),
            "dt_bias": block.dt_bias.float()[:, None].expand(s.heads, s.head_dim),
            "dt_softplus": True,
            "state_batch_indices": slots,
            "pad_slot_id": PAD,
        }
        if gpu:
            checkpointing_ssu(**arguments)
        else:
            checkpointing_ssu_reference(**arguments, compute_dtype=self.dtype)
        return out.to(self.dtype)
