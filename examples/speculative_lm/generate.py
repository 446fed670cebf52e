"""Greedy decoding with a draft: requests of different lengths, each in its slot, as long as they need."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .decoder import Decoder

# (request, position of the token to guess) -> the guess
Draft = Callable[[int, int], int]


@dataclass
class Generated:
    """What a run gave.

    Attributes:
        tokens: of every request.
        steps: model steps.
        windows: windows that were verified, one a request and step.
        step_ms: wall time of each step, from its inputs on the host to its tokens there.
        batches: rows of each step.
        moved: of each step with all requests, the tokens that each had accepted of its window before.
    """

    tokens: list[list[int]]
    steps: int = 0
    windows: int = 0
    step_ms: list[float] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    moved: list[list[int]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Wall time of all steps."""
        return sum(self.step_ms) / 1000

    @property
    def full_ms(self) -> list[float]:
        """Wall times of the steps with all requests."""
        return [ms for ms, batch in zip(self.step_ms, self.batches, strict=True) if batch == len(self.tokens)]

    @property
    def accepted(self) -> float:
        """Tokens a window gave on average, the model's own included."""
        return (sum(map(len, self.tokens)) - len(self.tokens)) / self.windows if self.windows else 0.0


class RightWith:
    """A draft that knows the truth and tells it with probability p, independently at every position.

    The same position always gets the same guess, also when it is asked again after a rejection.
    """

    def __init__(self, truth: list[list[int]], p: float, vocabulary: int, seed: int = 0) -> None:
        gen = torch.Generator().manual_seed(seed)
        self.guesses = []
        for tokens in truth:
            right = torch.rand(len(tokens), generator=gen) < p
            other = (torch.tensor(tokens) + torch.randint(1, vocabulary, (len(tokens),), generator=gen)) % vocabulary
            self.guesses.append(torch.where(right, torch.tensor(tokens), other).tolist())

    def __call__(self, request: int, position: int) -> int:
        """The guess for a token; beyond the truth's end, anything."""
        guesses = self.guesses[request]
        return guesses[position] if position < len(guesses) else 0


def generate(decoder: Decoder, prompts: torch.Tensor, lengths: list[int], draft: Draft | None = None) -> Generated:
    """Decode `lengths[i]` tokens after each prompt of (b, L), greedily; without a draft, one token a step."""
    device, T = decoder.device, decoder.tokens
    slots = (torch.randperm(len(prompts), generator=torch.Generator().manual_seed(1)) + 1).int()
    first = decoder.prefill(slots.to(device), prompts.to(device)).tolist()
    done = Generated([[token] for token in first])
    accepted = [0] * len(prompts)
    while active := [i for i, tokens in enumerate(done.tokens) if len(tokens) < lengths[i]]:
        windows = [
            [done.tokens[i][-1], *(draft(i, len(done.tokens[i]) + k) for k in range(T - 1))] if draft else
            [done.tokens[i][-1]] for i in active
        ]  # fmt: skip
        if len(active) == len(prompts):
            done.moved.append(list(accepted))
        start = time.perf_counter()
        chosen = decoder.step(
            slots[active].to(device), torch.tensor(windows, device=device),
            torch.tensor([accepted[i] for i in active], dtype=torch.int32, device=device),
        ).tolist()  # fmt: skip
        done.step_ms.append(1000 * (time.perf_counter() - start))
        done.batches.append(len(active))
        for i, window, choice in zip(active, windows, chosen, strict=True):
            count = 1
            while count < T and window[count] == choice[count - 1]:
                count += 1
            accepted[i] = count
            done.tokens[i] += choice[:count]
        done.steps += 1
        done.windows += len(active)
    done.tokens = [tokens[:length] for tokens, length in zip(done.tokens, lengths, strict=True)]
    return done


def replay_us(decoder: Decoder, run: Generated, times: int = 50) -> float | None:
    """GPU time of a step with all requests in microseconds: its graph, with what this run had accepted.

    Without the host: nothing is copied in or out but the accepted counts, so that cursors move as they did in the run.
    None on the CPU. The slots' contents are lost.
    """
    batch = len(run.tokens)
    if decoder.device.type != "cuda" or not run.moved:
        return None
    buffers = decoder.graphs.buffers
    buffers["slots"][:batch] = torch.arange(1, batch + 1, device=decoder.device)
    buffers["tokens"][:batch] = 32
    moved = torch.tensor(run.moved, dtype=torch.int32, device=decoder.device)
    own = {name: buffer[:batch] for name, buffer in buffers.items()}
    samples = []
    for sample in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(times):
            buffers["accepted"][:batch].copy_(moved[(sample * times + i) % len(moved)])
            decoder.graphs(**own)
        end.record()
        end.synchronize()
        samples.append(1000 * begin.elapsed_time(end) / times)
    return statistics.median(samples[1:])  # the first warms up
