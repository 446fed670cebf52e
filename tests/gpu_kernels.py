"""Kernels of a GPU test, compiled in parallel before it: a first call would compile them one after the other."""

from __future__ import annotations

import torch

from replayssm_cute import compiler, tables, target
from replayssm_cute.problem import Problem


def ready(*problems: Problem, batches: tuple[int, ...] = ()) -> None:
    """Compile every config that a call of these problems can get, of batches that no table names those given too."""
    where = target.of_device(torch.cuda.current_device())
    items = [(p, c, where) for p in problems for c in tables.candidates(p, where)]
    items += [(p, tables.choose(p, b, where).config, where) for p in problems for b in batches]
    compiler.compile_many(list(dict.fromkeys(items)))
