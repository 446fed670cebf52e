"""The NVIDIA driver's version, part of what a verdict holds for: from the kernel module, else from NVML."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from replayssm_cute import selfcheck


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\nGCC version: 12",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  535.104.05  Release Build  (dvs@U16)  Tue 5\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  535.104.05  Release Build\n",
    ],
)
def test_the_driver_is_read_from_the_kernel_module(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(text)
    monkeypatch.setattr(selfcheck, "_PROC", tmp_path / "version")
    assert selfcheck.driver_version() == "535.104.05"


@pytest.mark.parametrize("status,expected", [(0, "580.95.05"), (9, None)])
def test_else_the_driver_is_asked_through_nvml(
    status: int, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []

    class Nvml:
        def nvmlInit_v2(self) -> int:
            return status

        def nvmlSystemGetDriverVersion(self, text: Any, size: ctypes.c_uint) -> int:
            text.value = b"580.95.05"
            return 0

        def nvmlShutdown(self) -> int:
            done.append("shutdown")
            return 0

    monkeypatch.setattr(selfcheck, "_PROC", tmp_path / "absent")
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Nvml())
    assert selfcheck.driver_version() == expected
    assert done == (["shutdown"] if status == 0 else [])


def test_without_either_the_driver_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(selfcheck, "_PROC", tmp_path / "absent")
    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert selfcheck.driver_version() is None
