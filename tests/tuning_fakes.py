"""Stand-ins for the compiler and the measuring process, so that sweeps are tested without a GPU."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from replayssm_tuning.policy import Policy
from replayssm_tuning.worker import Answer

from replayssm_cute import compiler
from replayssm_cute import target as targets
from replayssm_cute.config import TileConfig
from replayssm_cute.resources import Resources
from replayssm_cute.sm100 import config_from_json

H200 = targets.named("h200")
PLAN = """
name = "small"
title = "A small model"
source = "made up for tests"
batches = [1, 64]
budget = "30s"
targets = ["sm_90a", "sm_120a"]
[problem]
heads = 16
head_dim = 64
d_state = 128
groups = 2
window = 16
[[workload]]
label = "verify"
tokens = 4
acceptance = "uniform"
[[workload]]
label = "one token"
tokens = 1
"""


class Compiler:
    """Stands in for compile_many: counts, may fail, and may take long."""

    def __init__(self) -> None:
        self.asked: list[compiler.Item] = []
        self.broken: set[TileConfig] = set()
        self.seconds = 0.0

    def __call__(
        self, items: list[compiler.Item], workers: int, progress: Callable[[compiler.Done, int, int], None]
    ) -> list[compiler.Done]:
        done = []
        for n, item in enumerate(items, 1):
            self.asked.append(item)
            time.sleep(self.seconds)
            problem, config, _ = item
            if config in self.broken:
                one = compiler.Done(item, "compiled", 1.0, None, "the compiler process died")
            else:
                shared = config.shared_bytes(problem)
                found = Resources("k", 96 if config.heads_per_cta == 1 else 128, 0, 0, shared, 128, 9000)
                one = compiler.Done(item, "compiled", 1.0, found)
            done.append(one)
            progress(one, n, len(items))
        return done


POLICY = Policy()
SLOW, CRASHING, WRONG, BEST = TileConfig(4, 1), TileConfig(8, 4), TileConfig(4, 4), TileConfig(2, 2)


class Device:
    """Stands in for the worker: times by a rule, and configs that crash or give wrong numbers."""

    starts = 1

    def __init__(self) -> None:
        self.jobs: list[tuple[str, dict[str, Any]]] = []
        self.gain = 0.10
        self.peer_us = 40.0

    def of(self, config: dict[str, Any], batch: int) -> float:
        c = config_from_json(config)
        base = 4 + batch / 2
        if c == BEST:
            return base * (1 - self.gain)
        return base * (2.0 if c == SLOW else 1.0 if c == TileConfig() else 1.2)

    def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Answer:
        self.jobs.append((name, kwargs))
        facts = {"bytes": 1_000_000 * kwargs.get("batch", 1), "flush": 0.18, "sets": 9, "nodes": 90}
        if name == "describe":
            peers = {"flashinfer": "0.7.4"}
            return Answer(True, {"target": dataclasses.asdict(H200), "driver": "580.1", "peers": peers})
        if name == "limit":
            return Answer(True, {"read_gbs": 4400.0, "copy_gbs": 4000.0, "bytes": 1 << 32, "method": "torch.sum"})
        if name == "check":
            c = config_from_json(kwargs["config"])
            if c == WRONG:
                return Answer(False, None, "error", "RuntimeError: wrong numbers: out error 0.3 exceeds 0.002")
            return Answer(True, {"out": 1e-3, "out_worst": 2e-3, "state": 1e-7})
        if name == "time":
            if config_from_json(kwargs["config"]) == CRASHING:
                return Answer(False, None, "crash", "the process died of SIGSEGV")
            us = self.of(kwargs["config"], kwargs["batch"])
            return Answer(True, {"time_us": us, "spread": 0.01, "samples": 9, **facts})
        if name in ("heat", "race"):
            return Answer(
                True,
                [
                    {"time_us": self.of(c, kwargs["batch"]), "spread": 0.005, "samples": 21, **facts}
                    for c in kwargs["configs"]
                ],
            )
        if name == "floor":
            assert kwargs["read_gbs"] > 4000
            return Answer(True, {"time_us": 3.0 + kwargs["batch"] / 4, "kernel_us": 2.5, "spread": 0.0, **facts})
        assert name == "peers"
        best = {"peer": "flashinfer", "variant": "monolith", "default": False, "time_us": self.peer_us, "spread": 0.0}
        default = {**best, "variant": "auto", "default": True, "time_us": self.peer_us * 1.25}
        broken = {"peer": "flashinfer", "variant": "two-kernel", "default": False, "failed": "RuntimeError: no"}
        return Answer(True, [default, best, broken])
