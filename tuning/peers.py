"""Other implementations of the same step, timed beside ours where they are installed. Reported, never dispatched."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from replayssm_cute import calls, dtypes
from replayssm_cute.config import P_TILE
from replayssm_cute.problem import Problem

REFINED_VERSION = "0.7.4"
_CTAS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to call a peer.

    Attributes:
        peer: "flashinfer" (checkpointing_ssu), or "flashinfer-standard" (its ordinary state update).
        name: the variant's arguments in words.
        default: whether this is what a caller gets who chooses nothing.
        replays: whether it computes the same step, ring included, so that its numbers can be compared.
        bind: a call without arguments that launches it on the given tensors, with nothing left to prepare.
        choice: the arguments that make it this variant.
    """

    peer: str
    name: str
    default: bool
    replays: bool
    bind: Callable[[calls.Call], Callable[[], object]]
    choice: Mapping[str, Any] = field(default_factory=dict)

    def run(self, call: calls.Call) -> None:
        """Launch it on a call's tensors."""
        self.bind(call)()


def installed() -> dict[str, str]:
    """Versions of the installed peers, by name."""
    spec = importlib.util.find_spec("flashinfer")
    if spec is None:
        return {}
    from importlib.metadata import PackageNotFoundError, version

    try:
        return {"flashinfer": version("flashinfer-python")}
    except PackageNotFoundError:  # a copy of the package alone
        return {"flashinfer": _recorded_version(Path(spec.origin or "")) or "unknown version"}


def _recorded_version(init: Path) -> str | None:
    """The version in the file that FlashInfer's build writes into its package."""
    try:
        text = (init.parent / "_build_meta.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r'^__version__ = "([^"]+)"', text, re.M)
    return found[1] if found else None


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

    scratch = _scratch(problem, batch, device)

    def bind(**choice: Any) -> Callable[[calls.Call], Callable[[], object]]:
        def bound(call: calls.Call) -> Callable[[], object]:
            rows = call.batch
            extra = {k: v[:rows] for k, v in scratch.items()} if choice.get("algorithm") != "monolith" else {}
            return functools.partial(checkpointing_ssu, **call.kwargs(), enable_pdl=problem.pdl, **extra, **choice)

        return bound

    yield Variant("flashinfer", "default (auto, scratch given)", True, True, bind())
    for split in (1, 2):
        name = f"monolith, d_split {split}"
        choice: dict[str, Any] = {"algorithm": "monolith", "d_split": split}
        yield Variant("flashinfer", name, False, True, bind(**choice), choice)
    for split in (1, 2):
        heads = problem.heads_per_group
        while heads:
            name = f"two-kernel, d_split {split}, {heads} heads a CTA"
            choice = {"algorithm": "two-kernel", "d_split": split, "precompute_heads_per_cta": heads}
            yield Variant("flashinfer", name, False, True, bind(**choice), choice)
            heads //= 2


def refined(problem: Problem, batch: int, device: torch.device, choice: Mapping[str, Any]) -> Iterator[Variant]:
    """FlashInfer's two-kernel launch of `choice` over what its public call leaves to its own tuner.

    These are the main kernel's stages and its CTAs a multiprocessor. Asked of FlashInfer's tuner classes, in the one
    version that they are known of; of others there are none.

    Args:
        choice: of a two-kernel variant of `variants`.
    """
    if installed().get("flashinfer") != REFINED_VERSION:
        return
    # the package's attribute of this name is the function
    module = importlib.import_module("flashinfer.mamba.checkpointing_ssu")
    scratch = _scratch(problem, batch, device)
    split, heads = choice["d_split"], choice["precompute_heads_per_cta"]
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    grids = {min(ctas * sms, split * batch * problem.heads): ctas for ctas in reversed(_CTAS)}

    def bind(tactic: tuple[int, int, int, int]) -> Callable[[calls.Call], Callable[[], object]]:
        def bound(call: calls.Call) -> Callable[[], object]:
            runner = module.CheckpointingSSURunner(
                _specialization(problem, call),
                dt_softplus=call.dt_softplus,
                pad_slot_id=call.pad_slot_id,
                requested_algorithm=module._ALGORITHM_TWO_KERNEL,
                requested_d_split=split,
                precompute_heads_per_cta=heads,
                heads_per_group=problem.heads_per_group,
                optional_tensor_presence=(),
            )
            c, rows = call, call.batch
            inputs: list[Any] = [c.state, c.x, c.dt, c.A, c.B, c.C, c.out, c.x_cache, c.B_cache, c.dt_cache]
            inputs += [
                c.ring_start,
                c.prev_num_accepted_tokens,
                c.D,
                c.z,
                c.dt_bias,
                c.state_batch_indices,
                None,
                None,
                None,
            ]
            return functools.partial(runner.forward, [*inputs, *(t[:rows] for t in scratch.values())], tactic)

        return bound

    for stages in (1, 2):
        for ctas in sorted(grids.values()):
            name = f"two-kernel, d_split {split}, {heads} heads a CTA, {stages} stages, {ctas} CTAs/SM"
            more = {**choice, "stages": stages, "ctas_per_sm": ctas}
            yield Variant("flashinfer", name, False, True, bind((stages, ctas, heads, split)), more)


def _specialization(problem: Problem, call: calls.Call) -> tuple[Any, ...]:
    """What FlashInfer compiles a module for, in its order."""
    p = problem
    weight = call.D if call.D is not None else call.dt_bias if call.dt_bias is not None else call.dt
    index = torch.int32 if call.state_batch_indices is None else call.state_batch_indices.dtype
    kinds = (call.state.dtype, call.x.dtype, call.dt.dtype, weight.dtype, call.A.dtype, index, None)
    return (*kinds, p.head_dim, p.d_state, p.tokens, p.window, p.heads_per_group, p.groups, 0, p.pdl)


def _scratch(problem: Problem, batch: int, device: torch.device) -> dict[str, torch.Tensor]:
    """What the two-kernel way works in, by the names and in the order of FlashInfer's arguments."""
    p, rows = problem, batch_rows(batch)
    new, old = -(-p.tokens // P_TILE) * P_TILE, -(-p.window // 8) * 8
    io = dtypes.TORCH[p.io_dtype]
    return {
        "cb_scaled": torch.empty(rows, p.heads, 32, new // 2, dtype=io, device=device),
        "cumAdt_vec": torch.empty(rows, p.heads, new, dtype=torch.float32, device=device),
        "cb_old": torch.empty(rows, p.heads, 32, old // 2, dtype=io, device=device),
    }


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
