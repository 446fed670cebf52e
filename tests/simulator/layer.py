"""Runs the step kernel that convolves its x: its modules beside the portable kernel's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

import replayssm_cute
from replayssm_cute.calls import Call
from replayssm_cute.fused.shapes import StepShape

from .launch import ORDER, Run
from .memory import SPACE
from .source import Source
from .values import NOW, POISON, lanes

FOLDER = Path(replayssm_cute.__file__).parent / "fused" / "kernels"
MODULES = ("conv_step", "values")
CONV = ("conv_cache", "conv_weight", "conv_bias")
_DSL = {
    "cutlass._mlir.dialects": SimpleNamespace(llvm=None),
    "cutlass.cutlass_dsl": SimpleNamespace(T=None, dsl_user_op=lambda f: f),
}


def _load_at(address: Any) -> list[np.ndarray]:
    """Four words a lane, from whichever tensors the addresses are in."""
    warp, at = NOW.warp, lanes(address)
    words, active = np.full((4, 32), POISON), warp.active
    for space in set(at[active] // SPACE):
        warp.active = active & (at // SPACE == space)
        words[:, warp.active] = np.array(NOW.run.spaces[space].load(at, 4))[:, warp.active]
    warp.active = active
    return list(words)


def _prefetch(address: Any) -> None:
    """Changes nothing, and may be early; still it names memory of a tensor."""
    at = lanes(address)[NOW.warp.active]
    for space in set(at // SPACE):
        tensor = NOW.run.spaces[space]
        found = (at[at // SPACE == space] - tensor.base) // tensor.size
        assert (found >= 0).all() and (tensor.row[found] >= 0).all(), f"{tensor.name}: a prefetch of no row"


class LayerSource(Source):
    """The modules of both folders; see `Source`."""

    inherited = frozenset({"work"})

    def path(self, name: str) -> Path:
        return FOLDER / f"{name}.py" if name in MODULES else super().path(name)

    def importer(self, name: str) -> Callable[..., Any]:
        return self._import_here if name in MODULES else self._import

    def _import_here(
        self, name: str, globals_: Any = None, locals_: Any = None, wanted: Any = (), level: int = 0
    ) -> Any:
        if level == 2:
            return importlib.import_module(f"replayssm_cute.fused.{name}")
        if level == 3:
            kernels, _, module = name.rpartition(".")
            return self.module(module) if kernels else importlib.import_module(f"replayssm_cute.{name}")
        return _DSL.get(name) or self._import(name, globals_, locals_, wanted, level)

    def module(self, name: str) -> Any:
        found = super().module(name)
        if name == "values":
            found.load_at, found.prefetch = _load_at, _prefetch
        return found


LAYER = LayerSource()


class ConvRun(Run):
    """A launch of the step that convolves its x, which is raw in the call."""

    def __init__(
        self, shape: StepShape, call: Call, conv: dict[str, torch.Tensor | None], source: Source = LAYER
    ) -> None:
        kernel = source.module("conv_step").ConvStepKernel(shape)
        given = {name: getattr(call, name) for name in ORDER} | {name: conv[name] for name in CONV}
        self.early = ("x",) if shape.early else ()  # written before the predecessor began
        self._run(shape.problem, shape.config, kernel, given, call.pad_slot_id, CONV)
