"""Checkpointing SSU (ReplaySSM) decode for Mamba2 in CuTe DSL.

Most names are imported on first use, so that importing the package costs little beside torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# At once, since the function must win over the module of the same name; the module itself is light.
from .warmup import warmup

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .api import checkpointing_ssu, explain, prepare, use_tables
    from .cache import CacheSpec, LogicalState, ReplayCache, slots_that_fit
    from .config import TileConfig
    from .fused.api import decode_step
    from .graphs import DecodeGraphs, GraphInput, NotCaptured
    from .plan import Plan
    from .problem import Problem
    from .ring import commit

_HOME = {
    "CacheSpec": "cache",
    "DecodeGraphs": "graphs",
    "GraphInput": "graphs",
    "LogicalState": "cache",
    "NotCaptured": "graphs",
    "Plan": "plan",
    "Problem": "problem",
    "ReplayCache": "cache",
    "TileConfig": "config",
    "checkpointing_ssu": "api",
    "commit": "ring",
    "decode_step": "fused.api",
    "explain": "api",
    "prepare": "api",
    "slots_that_fit": "cache",
    "use_tables": "api",
}

__all__ = [
    "CacheSpec",
    "DecodeGraphs",
    "GraphInput",
    "LogicalState",
    "NotCaptured",
    "Plan",
    "Problem",
    "ReplayCache",
    "TileConfig",
    "__version__",
    "checkpointing_ssu",
    "commit",
    "decode_step",
    "explain",
    "prepare",
    "slots_that_fit",
    "use_tables",
    "warmup",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
