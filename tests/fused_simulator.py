"""The step with the conv in it on the host: its own source, on the simulator that runs the step kernel.

Beside the checks that all kernels get there, the ring of raw inputs is a tensor like others: its rows are counted.
"""

from __future__ import annotations

import ast
import collections
import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from simulator import instructions
from simulator.launch import Run
from simulator.memory import SPACE, Global
from simulator.source import Source
from simulator.values import NOW, POISON, branch, lanes, single
from simulator.values import Warp as SimulatedWarp

import replayssm_cute
from replayssm_cute.fused.shapes import StepConvShape

FOLDER = Path(replayssm_cute.__file__).parent / "fused" / "kernels"
ORDER = (
    "state", "x_cache", "B_cache", "dt_cache", "ring_start", "prev_num_accepted_tokens", "x", "dt", "A", "B", "C",
    "out", "D", "dt_bias", "state_batch_indices",
)  # fmt: skip
RINGS = ("conv_x", "conv_B", "conv_C", "conv_weight", "conv_bias")


def _unpack(kind: str, words: list[Any]) -> list[Any]:
    if kind == "f32":
        return [instructions.as_float(w) for w in words]
    return [half(kind, w) for w in words for half in (instructions.low_half, instructions.high_half)]


def _load_quads(tensor: Global, kind: str, first: Any, count: int) -> list[Any]:
    words = count * tensor.size // 4
    found: list[Any] = []
    for at in range(0, words, 4):
        found += tensor.load(tensor.base + first * tensor.size + 4 * at, min(4, words - at))
    return found


def _of_pair(words: list[Any], pair: int) -> list[Any]:
    each = len(words) // 4
    return words[each * pair : each * (pair + 1)]


def _load_at(address: Any) -> list[Any]:
    """Lanes may read different tensors."""
    address, active = lanes(address), NOW.warp.active.copy()
    words = np.full((4, 32), POISON)
    for space in set((address[active] // SPACE).tolist()):
        NOW.warp.active = active & (address // SPACE == space)
        found = np.array(NOW.run.spaces[space].load(address, 4))
        words[:, NOW.warp.active] = found[:, NOW.warp.active]
    NOW.warp.active = active
    return list(words)


def _silu(v: Any) -> Any:
    v = single(v)
    return (v / (np.float32(1) + np.exp(-v))).astype(np.float32)


VALUES = SimpleNamespace(load_at=_load_at, load_quads=_load_quads, of_pair=_of_pair, silu=_silu, unpack=_unpack)


class StepConvSource(Source):
    """The module of the step with the conv, on those of the step; `replace` names it as "step_conv"."""

    def _import(self, name: str, globals_: Any = None, locals_: Any = None, wanted: Any = (), level: int = 0) -> Any:
        where = (globals_ or {}).get("__name__", "")
        if where == "simulated.step_conv" and level:
            if level == 1:
                return VALUES
            if level == 2:
                return importlib.import_module(f"replayssm_cute.fused.{name}")
            return self.module(name.split(".")[1]) if name.startswith("kernels.") else importlib.import_module(
                f"replayssm_cute.{name}"
            )  # fmt: skip
        return super()._import(name, globals_, locals_, wanted, level)

    def module(self, name: str) -> Any:
        if name != "step_conv" or name in self.modules:
            return super().module(name)
        path = FOLDER / "step_conv.py"
        text = path.read_text()
        if self.replace and self.replace[0] == name:
            assert text.count(self.replace[1]) == 1, f"{self.replace[1]!r} is not in {path} exactly once"
            text = text.replace(*self.replace[1:])
        tree = ast.fix_missing_locations(self.transform(ast.parse(text)))
        found = ModuleType(f"simulated.{name}")
        builtins_ = vars(importlib.import_module("builtins"))
        vars(found).update(_branch=branch, __builtins__={**builtins_, "__import__": self._import})
        exec(compile(tree, str(path), "exec"), vars(found))
        self.modules[name] = found
        return found


SOURCE = StepConvSource()


class StepConvRun(Run):
    """A launch on the kernel's own arguments, and afterwards what it did."""

    def __init__(self, shape: StepConvShape, arguments: tuple[Any, ...], source: Source = SOURCE) -> None:
        self.problem, self.config = shape.problem, shape.config
        self.kernel = source.module("step_conv").StepConvKernel(shape)
        given = dict(zip((*ORDER, "pad_slot_id", *RINGS), arguments, strict=True))
        pad_slot_id = given.pop("pad_slot_id")
        # Views of one memory on a GPU; here tensors of their own, since a tensor owns its addresses.
        own = {name: None if t is None else _own(t) for name, t in given.items()}
        own["conv_weight"] = own["conv_weight"].view(1, -1)  # read in pieces of several rows
        inputs = ("x", "dt", "B", "C")
        self.tensors = {
            name: Global(name, t, number, name in inputs)
            for number, (name, t) in enumerate(own.items(), 1)
            if t is not None
        }
        self.spaces = {t.base >> 40: t for t in self.tensors.values()}
        self.ctas: list[Any] = []
        self.conflicts = collections.Counter()
        self.unfinished = []
        NOW.run, NOW.warp = self, SimulatedWarp(0, inputs_ready=False)
        found = [self.tensors.get(name) for name in own]
        self.kernel(*found[: len(ORDER)], pad_slot_id, *found[len(ORDER) :], None)
        for name in ("conv_x", "conv_B", "conv_C", "out"):
            given[name].copy_(own[name])


def _own(t: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where its memory begins before it; dimensions of stride 0 stay so."""
    if t.storage_offset() == 0 and not _is_part(t):
        return t
    if t.stride(-1) == 0:
        return t[..., 0].clone()[..., None].expand(t.shape)
    return t.clone(memory_format=torch.contiguous_format)


def _is_part(t: torch.Tensor) -> bool:
    """Whether rows of others lie between the tensor's."""
    return t.dim() == 4 and t.stride(-1) == 1 and t.stride(1) > t.shape[2] * t.shape[3] and t.stride(2) == t.shape[3]


def kernel(shape: StepConvShape) -> Any:
    """The kernel of a shape, as `compiler.load` gives it, for CPU tensors."""

    def launch(*arguments: Any) -> None:
        StepConvRun(shape, arguments)

    return launch
