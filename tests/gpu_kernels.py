"""Kernels of GPU tests, compiled in parallel before them: a first call would compile them one after the other."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from replayssm_tuning.kernel_pool import KernelPool

from replayssm_cute import compiler, plan, selfcheck, tables, target
from replayssm_cute.compiler import Recipe, StepRecipe
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import launches
from replayssm_cute.problem import Problem
from replayssm_cute.target import Target


def ready(*problems: Problem, batches: tuple[int, ...] = ()) -> None:
    """Compile every config that a call of these problems can get, of batches that no table names those given too."""
    where = target.of_device(torch.cuda.current_device())
    compile_all(
        [
            *(StepRecipe(p, c) for p in problems for c in tables.candidates(p, where)),
            *(StepRecipe(p, tables.choose(p, b, where).config) for p in problems for b in batches),
        ]
    )


def compile_all(recipes: Iterable[Recipe]) -> None:
    """Bring kernels of any kind into the disk cache. One that does not compile is told: its own tests are to fail."""
    with KernelPool(target.of_device(torch.cuda.current_device()), say=lambda _: None) as pool:
        try:
            pool.fill(recipes, "tests")
        except Exception as error:
            warnings.warn(f"kernels are compiled one by one, since one does not compile: {error}", stacklevel=2)


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


def of_layers(made: Iterable[dict[str, Any]], where: Target) -> list[Recipe]:
    """The kernels that `fused.launches.make` readies for these of its keyword arguments, but the device."""
    with rehearsal(where) as seen:
        for arguments in made:
            launches.make(device=0, **arguments)
    return list(dict.fromkeys(seen))
