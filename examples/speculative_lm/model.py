"""A small Mamba2 language model: embedding, blocks of conv, SSU and gated norm, and a head tied to the embedding.

`forward` runs whole sequences, for training and prefill; `decoder` runs the same blocks on a ReplayCache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    """Sizes of a model: V tokens, width D, heads H of P in G groups, state N, conv over K tokens."""

    vocabulary: int = 128
    width: int = 64
    layers: int = 3
    heads: int = 2
    head_dim: int = 64
    d_state: int = 64
    conv: int = 4
    groups: int = 1

    @property
    def inner(self) -> int:
        """H P, the width of x."""
        return self.heads * self.head_dim

    @property
    def mixed(self) -> int:
        """Channels of the conv: x, and B and C of every group."""
        return self.inner + 2 * self.groups * self.d_state


class Block(nn.Module):
    """One Mamba2 block, without the residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.norm = nn.RMSNorm(shape.width)
        self.in_proj = nn.Linear(shape.width, shape.inner + shape.mixed + shape.heads, bias=False)
        self.conv_weight = nn.Parameter(torch.randn(shape.mixed, shape.conv) / math.sqrt(shape.conv))
        self.conv_bias = nn.Parameter(torch.zeros(shape.mixed))
        self.A_log = nn.Parameter(torch.log(torch.linspace(1, 16, shape.heads)))
        self.D = nn.Parameter(torch.ones(shape.heads))
        self.dt_bias = nn.Parameter(torch.linspace(-4.0, -2.0, shape.heads))
        self.gate_norm = nn.RMSNorm(shape.inner)
        self.out_proj = nn.Linear(shape.inner, shape.width, bias=False)

    def project(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(b, T, D) -> z (b, T, H P), the conv's input (b, T, mixed) and raw dt (b, T, H)."""
        s = self.shape
        z, mixed, dt = self.in_proj(self.norm(h)).split([s.inner, s.mixed, s.heads], dim=-1)
        return z, mixed, dt

    def convolve(self, mixed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(b, K - 1 + T, mixed), the K - 1 tokens before the window first -> x (b, T, H, P), B and C (b, T, G, N)."""
        s = self.shape
        tokens = mixed.shape[1] - (s.conv - 1)
        out = sum((mixed[:, k : k + tokens] * self.conv_weight[:, k] for k in range(s.conv)), self.conv_bias)
        shared = s.groups * s.d_state
        x, B, C = F.silu(out).split([s.inner, shared, shared], dim=-1)
        B, C = (t.unflatten(-1, (s.groups, s.d_state)) for t in (B, C))
        return x.unflatten(-1, (s.heads, s.head_dim)), B, C

    def finish(self, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        """(b, T, H, P) and the gates -> (b, T, D)."""
        return self.out_proj(self.gate_norm(y.flatten(2) * F.silu(z)))

    def sequence(self, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """A whole sequence from an empty state: outputs, final states (b, H, P, N), and the conv's last K - 1 inputs.

        y_t = sum over s <= t of exp(sum of A dt over s < i <= t) dt_s (B_s·C_t) x_s + D x_t, as one masked product, in
        f32 or wider, as is the state.
        """
        s, wide = self.shape, torch.promote_types(h.dtype, torch.float32)
        z, mixed, dt = self.project(h)
        mixed = F.pad(mixed, (0, 0, s.conv - 1, 0))
        x, B, C = (t.to(wide) for t in self.convolve(mixed))
        dt = F.softplus(dt.to(wide) + self.dt_bias.to(wide))  # (b, T, H)
        log_decay = (-torch.exp(self.A_log.to(wide)) * dt).cumsum(1).transpose(1, 2)  # (b, H, T)
        between = log_decay[..., :, None] - log_decay[..., None, :]
        between = between.masked_fill(~torch.ones(h.shape[1], h.shape[1], device=h.device).tril().bool(), -torch.inf)
        together = torch.einsum("btgn,bsgn->bgts", C, B).repeat_interleave(s.heads // s.groups, dim=1)
        scores = torch.exp(between) * together * dt.transpose(1, 2)[..., None, :]
        y = torch.einsum("bhts,bshp->bthp", scores, x) + self.D.to(wide)[:, None] * x
        last = torch.exp(between[..., -1, :]) * dt.transpose(1, 2)  # (b, H, T)
        weighted = (last.transpose(1, 2)[..., None] * x).unflatten(2, (s.groups, -1))  # (b, T, G, H / G, P)
        state = torch.einsum("btghp,btgn->bghpn", weighted, B).flatten(1, 2)
        return self.finish(y.to(h.dtype), z), state, mixed[:, mixed.shape[1] - (s.conv - 1) :]


class Model(nn.Module):
    """The language model."""

    def __init__(self, shape: Shape, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width)

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        """(b, T, D) -> (b, T, V), through the tied head."""
        return self.norm(h) @ self.embedding.weight.T

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Sequences (b, L) -> logits (b, L, V), and for each layer the final state and the conv's last inputs."""
        h = self.embedding(tokens)
        states, tails = [], []
        for block in self.blocks:
            out, state, tail = block.sequence(h)
            h = h + out
            states.append(state)
            tails.append(tail)
        return self.logits(h), states, tails
