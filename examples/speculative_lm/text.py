"""Text that comes with Python, as ASCII tokens, and a minute of training on it."""

from __future__ import annotations

import math
import pydoc_data.topics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from .model import Model


def corpus() -> torch.Tensor:
    """The reference texts behind Python's `help()`, one ASCII code a token, int64."""
    text = "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    return torch.tensor([code for code in text.encode() if code < 128], dtype=torch.int64)


def prompts(data: torch.Tensor, count: int, length: int, seed: int = 0) -> torch.Tensor:
    """(count, length) pieces of the text."""
    starts = torch.randint(0, len(data) - length, (count,), generator=torch.Generator().manual_seed(seed))
    return torch.stack([data[s : s + length] for s in starts.tolist()])


def train(model: Model, seconds: float, say: Callable[[str], None] = print) -> float:
    """Train on the corpus for a while; gives the last loss, nats a token."""
    data, device = corpus(), model.embedding.weight.device
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 * math.sqrt(64 / model.shape.width))
    start, step, loss = time.perf_counter(), 0, torch.tensor(float("nan"))
    while (elapsed := time.perf_counter() - start) < seconds:
        batch = prompts(data, 16, 97, seed=step).to(device)
        loss = F.cross_entropy(model(batch[:, :-1])[0].flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            say(f"  step {step}, {elapsed:.0f} s: {loss:.3f} nats a token")
        step += 1
    return loss.item()
