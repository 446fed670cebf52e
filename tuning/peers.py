"""Other implementations of the same step, timed beside ours where they are installed. Reported, never dispatched."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from replayssm_cute import calls, dtypes
from replayssm_cute.config import P_TILE
from replayssm_cute.problem import Problem


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to call a peer.

    Attributes:
        peer: "flashinfer" (checkpointing_ssu), or "flashinfer-standard" (its ordinary state update).
        name: the variant's arguments in words.
        default: whether this is what a caller gets who chooses nothing.
        replays: whether it computes the same step, ring included, so that its numbers can be compared.
        bind: a call without arguments that launches it on the given tensors, with nothing left to prepare.
    """

    peer: str
    name: str
    default: bool
    replays: bool
    bind: Callable[[calls.Call], Callable[[], object]]

    def run(self, call: calls.Call) -> None:
        """Launch it on a call's tensors."""
        self.bind(call)()


def installed() -> dict[str, str]:
    """Versions of the installed peers, by name."""
    if importlib.util.find_spec("flashinfer") is None:
        return {}
    from importlib.metadata import PackageNotFoundError, version

    try:
        return {"flashinfer": version("flashinfer-python")}
    except PackageNotFoundError:
        return {"flashinfer": "unknown version"}


def variants(problem: Problem, batch: int, device: torch.device) -> Iterator[Variant]:
    """Every variant of every installed peer that can be asked to serve this problem; none where none is installed."""
    if importlib.util.find_spec("flashinfer") is None:
        return
    yield from _checkpointing(problem, batch, device)
    if problem.tokens == 1:
        yield from _standard(problem)


def _checkpointing(problem: Problem, batch: int, device: torch.device) -> Iterator[Variant]:
    """FlashInfer's checkpointing_ssu over its public arguments: algorithm, d_split, heads of the first kernel."""
    from flashinfer.mamba import checkpointing_ssu  # type: ignore[import-not-found, unused-ignore]

    pad = -(-problem.tokens // P_TILE) * P_TILE
    old = -(-problem.window // 8) * 8
    io = dtypes.TORCH[problem.io_dtype]
    scratch = {
        "cb_scaled": torch.empty(batch_rows(batch), problem.heads, 32, pad // 2, dtype=io, device=device),
        "cumAdt_vec": torch.empty(batch_rows(batch), problem.heads, pad, dtype=torch.float32, device=device),
        "cb_old": torch.empty(batch_rows(batch), problem.heads, 32, old // 2, dtype=io, device=device),
    }

    def bind(**choice: Any) -> Callable[[calls.Call], Callable[[], object]]:
        def bound(call: calls.Call) -> Callable[[], object]:
            rows = call.x.shape[0]
            extra = {k: v[:rows] for k, v in scratch.items()} if choice.get("algorithm") != "monolith" else {}
            return functools.partial(checkpointing_ssu, **call.kwargs(), enable_pdl=problem.pdl, **extra, **choice)

        return bound

    yield Variant("flashinfer", "default (auto, scratch given)", True, True, bind())
    for split in (1, 2):
        name = f"monolith, d_split {split}"
        yield Variant("flashinfer", name, False, True, bind(algorithm="monolith", d_split=split))
    for split in (1, 2):
        heads = problem.heads_per_group
        while heads:
            name = f"two-kernel, d_split {split}, {heads} heads a CTA"
            choice = {"algorithm": "two-kernel", "d_split": split, "precompute_heads_per_cta": heads}
            yield Variant("flashinfer", name, False, True, bind(**choice))
            heads //= 2


def batch_rows(batch: int) -> int:
    """Rows of scratch: a cell's, and at least those of the numerical check."""
    return max(batch, 16)


def _standard(problem: Problem) -> Iterator[Variant]:
    """FlashInfer's ordinary one-token update, which reads and writes the whole state each time."""
    from flashinfer.mamba import selective_state_update  # type: ignore[import-not-found, unused-ignore]

    def bind(call: calls.Call) -> Callable[[], object]:
        return functools.partial(
            selective_state_update,
            call.state,
            call.x[:, 0],
            call.dt[:, 0],
            call.A,
            call.B[:, 0],
            call.C[:, 0],
            call.D,
            z=None if call.z is None else call.z[:, 0],
            dt_bias=call.dt_bias,
            dt_softplus=call.dt_softplus,
            state_batch_indices=call.state_batch_indices,
            pad_slot_id=call.pad_slot_id,
            out=call.out[:, 0],
        )

    yield Variant("flashinfer-standard", "default", True, False, bind)
