"""The drop-in has FlashInfer 0.7.4's parameters, and passes each on or ignores it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import inspect
from typing import Any

import pytest
import torch
from fakes import SMALL

from replayssm_cute import api
from replayssm_cute.calls import random_call
from replayssm_cute.integrations import flashinfer as drop_in

VERSION = "0.7.4"
IGNORED = ("d_split", "cb_scaled", "cumAdt_vec", "cb_old", "precompute_heads_per_cta", "algorithm")
# Parameters and defaults of flashinfer.mamba.checkpointing_ssu 0.7.4, in order.
REQUIRED = (
    "state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens", "x", "dt", "A", "B", "C",
    "out",
)  # fmt: skip
OPTIONAL: dict[str, Any] = {
    "D": None, "z": None, "dt_bias": None, "dt_softplus": False, "state_batch_indices": None, "pad_slot_id": -1,
    "state_scale": None, "rand_seed": None, "philox_rounds": 10, "d_split": None, "cu_seqlens": None,
    "max_seqlen": None, "enable_pdl": False, "cb_scaled": None, "cumAdt_vec": None, "cb_old": None,
    "precompute_heads_per_cta": 0, "algorithm": "auto",
}  # fmt: skip


def parameters(function: Any) -> dict[str, Any]:
    return {n: (p.default, p.kind) for n, p in inspect.signature(function).parameters.items()}


def test_drop_in_has_the_recorded_signature() -> None:
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    expected = dict.fromkeys(REQUIRED, (inspect.Parameter.empty, kind)) | {n: (d, kind) for n, d in OPTIONAL.items()}
    found = parameters(drop_in.checkpointing_ssu)
    assert list(found.items()) == list(expected.items())


def test_public_call_has_the_same_order_and_defaults_through_philox_rounds() -> None:
    ours, theirs = list(parameters(api.checkpointing_ssu).items()), list(parameters(drop_in.checkpointing_ssu).items())
    last = [n for n, _ in theirs].index("philox_rounds") + 1
    assert ours[:last] == theirs[:last]


def test_drop_in_has_the_installed_flashinfers_signature() -> None:
    try:
        version = importlib.metadata.version("flashinfer-python")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"flashinfer-python {VERSION} is not installed")
    if version != VERSION:
        pytest.skip(f"flashinfer-python {version} is installed, the drop-in follows {VERSION}")
    try:
        from flashinfer.mamba import checkpointing_ssu
    except ImportError as error:
        pytest.skip(f"flashinfer-python {version} cannot be imported: {error}")
    assert list(parameters(drop_in.checkpointing_ssu).items()) == list(parameters(checkpointing_ssu).items())


def test_drop_in_passes_every_parameter_on(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*REQUIRED, *OPTIONAL]
    values = {n: object() for n in names}
    seen: dict[str, Any] = {}
    signature = inspect.signature(api.checkpointing_ssu)

    def record(*args: Any, **kwargs: Any) -> Any:
        seen.update(signature.bind(*args, **kwargs).arguments)
        return values["out"]

    monkeypatch.setattr(api, "checkpointing_ssu", record)
    assert drop_in.checkpointing_ssu(*values.values()) is values["out"]
    assert seen == {n: v for n, v in values.items() if n not in IGNORED}


@pytest.mark.parametrize("ragged", [False, True])
def test_drop_in_runs_positionally_and_ignores_scratch_and_tuning(ragged: bool) -> None:
    problem = dataclasses.replace(SMALL, ragged=ragged)
    call, again = (random_call(problem, 3, lengths=(1, 0, 2) if ragged else None) for _ in range(2))
    scratch = torch.full((4,), 7.0)
    *shared, cu_seqlens, max_seqlen = [*call.kwargs().values()][:20]
    result = drop_in.checkpointing_ssu(
        *shared, None, None, 10, 2, cu_seqlens, max_seqlen, False, scratch, scratch, scratch, 3, "two-kernel"
    )
    assert result is call.out
    assert torch.equal(call.out, api.checkpointing_ssu(**again.kwargs()))
    assert torch.equal(scratch, torch.full((4,), 7.0))
