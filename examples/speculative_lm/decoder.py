"""What every way to decode shares: windows of T tokens of each request in CUDA graphs, and the conv's own rollback."""

from __future__ import annotations

import abc

import torch

from replayssm_cute import DecodeGraphs, GraphInput
from replayssm_cute.graphs import Captured

from .model import Block, Model

PAD = 0  # the null slot


class Decoder(abc.ABC):
    """A model with slots for some requests, that runs windows of T tokens. Subclasses keep the states of its layers.

    Args:
        model: in any float dtype; on the CPU the state update runs in it too.
        requests: most of them at a time; requests take slots 1..requests.
        tokens: T, 1 for plain decoding, drafts + 1 for verification.
        buckets: batch sizes that graphs are captured for; default powers of two up to `requests`.

    Attributes:
        update: which state update this decoder runs, in words.
        captured: what was captured. A subclass calls `capture` when its states are there.
    """

    update: str
    captured: Captured

    def __init__(self, model: Model, requests: int, tokens: int, buckets: list[int] | None = None) -> None:
        self.model, self.tokens = model, tokens
        weight, s = model.embedding.weight, model.shape
        self.device, self.dtype = weight.device, weight.dtype
        # The step takes 16-bit inputs; raw dt and the weights beside them as they are, or in f32.
        self.narrow = self.dtype if self.dtype == torch.bfloat16 else torch.float32
        self.A = [-torch.exp(block.A_log.detach().float()) for block in model.blocks]
        # For each slot the conv's inputs around the window that is open: those of the last K - 1 committed tokens, then
        # those of the open window, of which some may yet be rejected.
        self.history = torch.zeros(
            s.layers, requests + 1, s.conv - 1 + tokens, s.mixed, dtype=self.dtype, device=self.device
        )
        self.graphs = DecodeGraphs(
            self._step,
            {
                "slots": GraphInput((), torch.int32, pad=PAD),
                "tokens": GraphInput((tokens,), torch.int64),
                "accepted": GraphInput((), torch.int32),
            },
            buckets or sorted({min(2**k, requests) for k in range(requests.bit_length() + 1)}),
            device=self.device,
        )

    def capture(self) -> None:
        """Capture the graphs."""
        with torch.inference_mode():
            self.captured = self.graphs.capture()

    @torch.inference_mode()
    def prefill(self, slots: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
        """Run prompts (b, L) into slots (b,); gives the tokens (b,) that follow."""
        logits, states, tails = self.model(prompts)
        self._enter(slots, states)
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
        moved = self._begin(slots, accepted)
        h = self.model.embedding(tokens)
        for layer, block in enumerate(self.model.blocks):
            z, mixed, dt = block.project(h)
            x, B, C = block.convolve(self._history(layer, slots.clamp(min=0).long(), moved, mixed))
            x, B, C = (t.to(torch.bfloat16).contiguous() for t in (x, B, C))
            y = self._update(layer, block, slots, x, dt.to(self.narrow).contiguous(), B, C)
            h = h + block.finish(y.to(self.dtype), z)
        return self.model.logits(h).argmax(-1)

    def _history(self, layer: int, index: torch.Tensor, moved: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        """The conv's inputs of this window and the K - 1 tokens before it; they stay in the slots for the next one.

        Padding rows all use the null slot, whose content nobody reads.
        """
        before = torch.arange(self.model.shape.conv - 1, device=mixed.device) + moved[:, None]
        inputs = torch.cat((self.history[layer, index[:, None], before], mixed), dim=1)
        self.history[layer, index] = inputs
        return inputs

    @abc.abstractmethod
    def _enter(self, slots: torch.Tensor, states: list[torch.Tensor]) -> None:
        """Put each layer's final states (b, H, P, N) of a prefill into slots."""

    @abc.abstractmethod
    def _begin(self, slots: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        """Close the windows before; gives (b,) tokens that the conv's history moves on by, 0 right after a prefill."""

    @abc.abstractmethod
    def _update(
        self, layer: int, block: Block, slots: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor,
        C: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        """The state update of a layer: x (b, T, H, P), raw dt (b, T, H), B and C (b, T, G, N) -> (b, T, H, P)."""
