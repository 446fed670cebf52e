"""Kernels of GPU tests, compiled in parallel before them: a first call would compile them one after the other.

Tests name theirs by the mark `kernels`, and tests/conftest.py compiles what the selected ones name; `recipes_of` says
how. Files whose tests share a matrix of kernels have a fixture of their own. What a run compiled one by one all the
same, its summary says.
"""

from __future__ import annotations

import contextlib
import inspect
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from replayssm_tuning.kernel_pool import KernelPool

from replayssm_cute import compiler, plan, selfcheck, target
from replayssm_cute.cache.recipes import all_of
from replayssm_cute.cache.spec import CacheSpec
from replayssm_cute.compiler import Recipe, StepRecipe
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import launches
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target

Named = Any  # see `recipes_of`
of_problem = pytest.mark.kernels(lambda where, problem: [problem])
"""Names the parameter `problem` of a test."""


def recipes_of(what: Named, where: Target, params: Mapping[str, Any]) -> Iterator[Recipe]:
    """The kernels that an argument of the mark `kernels` names.

    Args:
        what: a Problem: every config that its calls may get; a CacheSpec: its cache's kernels; a (Problem, TileConfig)
            or a recipe: this one; a function: those that it gives for a target and for what it takes of the parameters.
        params: of the test.
    """
    if isinstance(what, Problem):
        with rehearsal(where) as seen:
            for batch in (1, 512):
                plan.make(what, batch, 0)
        yield from seen
    elif isinstance(what, CacheSpec):
        yield from all_of(what)
    elif isinstance(what, tuple):
        yield StepRecipe(*what)
    elif inspect.isfunction(what):
        taken = {name: params[name] for name in list(inspect.signature(what).parameters)[1:]}
        for each in what(where, **taken):
            yield from recipes_of(each, where, params)
    else:
        yield what


def named(items: Iterable[pytest.Item], where: Target) -> list[Recipe]:
    """The kernels that the GPU tests among `items` name, of those that are not skipped."""
    found: dict[Recipe, None] = {}
    for item in items:
        if item.get_closest_marker("gpu") and not item.get_closest_marker("skip"):
            params = item.callspec.params if hasattr(item, "callspec") else {}
            try:
                for mark in item.iter_markers("kernels"):
                    for what in mark.args:
                        found |= dict.fromkeys(recipes_of(what, where, params))
            except Exception as error:  # such as a problem that no config fits on this GPU: the test itself is to fail
                warnings.warn(f"{item.nodeid}: what it names is not compiled before it: {error!r}", stacklevel=2)
    return list(found)


def compile_all(recipes: Iterable[Recipe]) -> None:
    """Bring kernels of any kind into the disk cache. One that does not compile is told: its own tests are to fail."""
    with KernelPool(target.of_device(torch.cuda.current_device()), say=lambda _: None) as pool:
        try:
            pool.fill(recipes, "tests")
        except Exception as error:
            warnings.warn(f"kernels are compiled one by one, since one does not compile: {error}", stacklevel=2)


def copy_stored(recipes: Iterable[Recipe], where: Target, folder: Path) -> None:
    """Put kernels that the cache holds, not their verdicts, into another one: for a test that must have its own."""
    for recipe in recipes:
        stored = compiler._directory(recipe, where.arch)
        if stored.is_dir():
            ignored = shutil.ignore_patterns("*.verdict")
            shutil.copytree(stored, folder / stored.name, ignore=ignored, dirs_exist_ok=True)


@contextlib.contextmanager
def rehearsal(where: Target) -> Iterator[list[Recipe]]:
    """While this is open `plan.make` and `fused.launches.make` list the kernels that they would load, in what it gives.

    Nothing is compiled, launched, or known afterwards; no GPU is needed.
    """
    seen: list[Recipe] = []

    def load(recipe: Recipe, target: Target, **_: Any) -> Callable[..., None]:
        seen.append(recipe)
        return lambda *_: None

    def get(problem: Problem, config: TileConfig, target: Target, **_: Any) -> Callable[..., None]:
        return load(StepRecipe(problem, config), target)

    def touch(problem: Problem, config: TileConfig, device: int) -> bool:
        seen.append(StepRecipe(problem, config))
        return True

    with pytest.MonkeyPatch.context() as patch:
        for module, name, stand_in in (
            (compiler, "load", load), (compiler, "get", get), (compiler, "capturing", lambda: False),
            (plan, "touch", touch), (plan, "device_target", lambda device: where),
            (plan, "on_device", lambda device: contextlib.nullcontext()), (plan, "_prepared", set()),
            (plan, "_touched", set()), (plan, "_plans", {}), (launches, "_plans", {}), (launches, "_kernels", {}),
            (launches.proof, "prove", lambda *_: None), (plan, "tensor_device", lambda index: None),
            (selfcheck, "passed", lambda *_: True),
        ):  # fmt: skip
            patch.setattr(module, name, stand_in)
        yield seen


def of_layers(where: Target, *made: dict[str, Any]) -> list[Recipe]:
    """The kernels that `fused.launches.make` readies for these of its keyword arguments, but the device."""
    with rehearsal(where) as seen:
        for arguments in made:
            launches.make(device=0, **arguments)
    return list(dict.fromkeys(seen))
