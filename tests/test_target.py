"""Targets by name and from a device's properties."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replayssm_cute import target


@pytest.mark.parametrize("arch", target.ARCHES)
def test_every_architecture_has_a_default(arch: str) -> None:
    assert target.named(arch).arch == arch


def test_names_ignore_case() -> None:
    assert target.named("H200") == target.named("h200") == target.named("sm_90a")


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"unknown target 'v100'; known: .*h200.*sm_100a"):
        target.named("v100")


@pytest.mark.parametrize("name", [None, 90, b"h200"])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(TypeError, match=r"name: got (NoneType|int|bytes), expected the str of a target"):
        target.named(name)


def test_only_measured_limits_are_called_measured() -> None:
    """The H200 is the one GPU that this project has measured; the rest are datasheet numbers and say so."""
    measured = {
        name
        for name in ("h200", "h100", "b200", "gb200", "b300", "gb300", "rtx-pro-6000")
        if target.named(name).read_gbs_source == "measured"
    }
    assert measured == {"h200"}


@pytest.mark.parametrize(("superchip", "board"), [("gb200", "b200"), ("gb300", "b300")])
def test_a_grace_blackwell_gpu_is_the_same_chip_under_another_name(superchip: str, board: str) -> None:
    found, like = target.named(superchip), target.named(board)
    assert found.name == f"NVIDIA {superchip.upper()}" != like.name
    assert dataclasses.replace(found, name=like.name, sms=like.sms) == like
    assert like.read_gbs == pytest.approx(0.95 * 8000) and target.named(like.arch) == like


def fake_device(monkeypatch: pytest.MonkeyPatch, **properties: object) -> target.Target:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))
    target.of_device.cache_clear()
    try:
        return target.of_device(0)
    finally:
        target.of_device.cache_clear()


def test_a_known_device_has_its_own_properties_and_the_measured_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake_device(
        monkeypatch,
        name="NVIDIA H200",
        major=9,
        minor=0,
        multi_processor_count=130,
        shared_memory_per_block_optin=200_000,
        shared_memory_per_multiprocessor=210_000,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
    )
    assert (found.arch, found.sms, found.shared_per_block, found.shared_per_sm) == ("sm_90a", 130, 200_000, 210_000)
    assert (found.read_gbs, found.read_gbs_source) == (4600.0, "measured")


def test_an_unknown_device_of_a_known_architecture_claims_nothing_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = fake_device(monkeypatch, name="NVIDIA GH200", major=9, minor=0, multi_processor_count=132)
    assert (found.name, found.arch, found.read_gbs_source) == ("NVIDIA GH200", "sm_90a", "datasheet")


def test_an_unserved_architecture_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"capability 8\.6; kernels exist for sm_90a.*Move the tensors to the CPU"):
        fake_device(monkeypatch, name="NVIDIA A10", major=8, minor=6, multi_processor_count=72)
