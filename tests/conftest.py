"""Shared by all tests: an own kernel cache per run, the rules for tests that need GPUs, and their kernels."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from replayssm_cute import compiler, target
from replayssm_cute.compiler import Recipe


def gpu_skip_reason() -> str | None:
    """Why tests marked gpu cannot run here, or None if they can."""
    if not torch.cuda.is_available():
        return "no CUDA GPU available to torch"
    try:
        target.of_device(torch.cuda.current_device())
    except RuntimeError as error:
        return str(error)
    return None


def pytest_configure(config: pytest.Config) -> None:
    """Keep tests away from the user's kernel cache; a directory set by hand is respected (to keep it warm).

    Tensors here are small: one thread is ten times faster than several that wait for each other on a busy machine.
    """
    torch.set_num_threads(1)
    if "REPLAYSSM_TEST_CACHE_DIR" in os.environ:
        os.environ["REPLAYSSM_CACHE_DIR"] = os.environ["REPLAYSSM_TEST_CACHE_DIR"]
        return
    scratch = tempfile.TemporaryDirectory(prefix="replayssm-test-cache-")
    os.environ["REPLAYSSM_CACHE_DIR"] = scratch.name
    config.add_cleanup(scratch.cleanup)


# Files whose tests start processes and hold them to real seconds: `make test` runs nothing beside them.
ALONE = {
    "test_compiler.py",
    "test_tuning_interrupt.py",
    "test_tuning_journal.py",
    "test_tuning_progress.py",
    "test_tuning_ranks.py",
    "test_tuning_sweep.py",
}


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the files of `ALONE`; skip tests whose GPUs are not there, with the reason in the summary."""
    for item in items:
        if item.path.name in ALONE:
            item.add_marker(pytest.mark.alone)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := gpu_skip_reason()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {reason}"))
    elif marked and torch.cuda.device_count() < 2:
        for item in marked:
            if item.get_closest_marker("two_gpus"):
                item.add_marker(pytest.mark.skip(reason="needs two GPUs"))


LATE: list[tuple[str, str, float]] = []  # kernels compiled one by one: test, label, seconds


@pytest.fixture(scope="session", autouse=True)
def _kernels_of_gpu_tests(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compile in parallel what the selected GPU tests name by their marks `kernels`, and note what they forgot."""
    wanted = [i for i in request.session.items if i.get_closest_marker("gpu") and not i.get_closest_marker("skip")]
    if not wanted:
        yield
        return
    import gpu_kernels

    gpu_kernels.compile_all(gpu_kernels.named(wanted, target.of_device(torch.cuda.current_device())))
    build = compiler._timed_build

    def noted(recipe: Recipe, arch: str) -> Any:
        start = time.perf_counter()
        try:
            return build(recipe, arch)
        finally:
            test = os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0]
            LATE.append((test, recipe.label(), time.perf_counter() - start))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "_timed_build", noted)
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what GPU tests had to wait for."""
    if LATE:
        seconds = sum(s for _, _, s in LATE)
        terminalreporter.write_sep("-", f"{len(LATE)} kernels compiled one by one, {seconds:.0f} s")
        for test, label, s in LATE:
            terminalreporter.write_line(f"{s:5.1f} s  {test}: {label}")


@pytest.fixture(autouse=True)
def _no_cache_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A test that moves the cache or sets switches does so through monkeypatch; nothing leaks to the next one."""
    before = {k: v for k, v in os.environ.items() if k.startswith("REPLAYSSM_")}
    yield
    monkeypatch.undo()
    after = {k: v for k, v in os.environ.items() if k.startswith("REPLAYSSM_")}
    assert after == before, f"the test changed the environment: {before} became {after}"
