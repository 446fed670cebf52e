"""Stand-ins for the peers command's measurements, so that it is tested without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from replayssm_tuning.bench_results import Bench, BenchCell
from replayssm_tuning.policy import Policy
from tuning_fakes import H200

from replayssm_cute import tables
from replayssm_cute.problem import Problem

MANIFEST = tables.Manifest(
    gpu_name=H200.name,
    arch=H200.arch,
    sms=H200.sms,
    provenance="measured",
    kernel_fingerprint="0123456789abcdef",
    date="2026-11-29T00:00:00+00:00",
    versions={"torch": "2.11", "flashinfer": "0.7.4"},
    policy={"cpu": "a CPU"},
)
PROBLEMS = (Problem(128, 64, 128, 8, 4, 16), Problem(128, 64, 128, 8, 1, 16, state_dtype="bf16"))
BATCHES = (1, 4, 16, 64, 256)


def measured(problem: Problem, batch: int) -> dict[str, Any]:
    """What `BenchRunner.cell` would answer: made-up times in the order of what a GPU needs."""
    scale = 1.0 if problem.state_dtype == "f32" else 0.55
    floor = 3.0 + batch * 1.22 * scale
    default = {"peer": "flashinfer", "variant": "default (auto, scratch given)", "default": True}
    best = {"peer": "flashinfer", "variant": "monolith, d_split 2", "default": False}
    variants = [
        {**default, "time_us": floor * 1.45 + 1, "out_error": 2e-3},
        {**best, "time_us": floor * 1.22 + 1, "out_error": 2e-3},
        {**best, "variant": "two-kernel", "failed": "RuntimeError: no"},
    ]
    found = {
        "ours": {"time_us": floor * 1.04 + 0.9, "spread": 0.01, "samples": 21, "variant": "h1 s1 p1"},
        "flashinfer default": {"time_us": floor * 1.45 + 1, "spread": 0.02, "samples": 21, "variant": "default"},
        "flashinfer best": {"time_us": floor * 1.22 + 1, "spread": 0.02, "samples": 21, "variant": "monolith"},
        "floor": {"time_us": floor, "kernel_us": floor - 1, "spread": 0.0, "samples": 21, "variant": "2 heads a CTA"},
    }
    if problem.tokens == 1:
        standard = {"peer": "flashinfer-standard", "variant": "default", "default": True, "time_us": floor * 2 + 1}
        variants.append(standard)
        found["flashinfer-standard"] = {**found["ours"], "time_us": floor * 2 + 1, "variant": "default"}
    config = {"label": "h1 s1 p1", "source": "default", "reason": "no table"}
    facts = {"bytes": 1_000_000 * batch, "flush": 0.18, "sets": 9}
    return {**facts, "config": config, "times": found, "variants": tuple(variants)}


def evolved(batch: int, steps: int, seed: int) -> dict[str, Any]:
    def of(us: float) -> dict[str, Any]:
        return {"p50_us": us, "p99_us": us * 1.2, "mean_us": us * 1.02, "counted": steps - 1, "late": 1}

    names = {"ours": 6.0 + batch, "flashinfer default": 9.0 + 1.4 * batch, "flashinfer best": 8.0 + 1.2 * batch}
    facts = {"batch": batch, "steps": steps, "sets": 9, "seed": seed, "flush": 0.18, "wait_us": 60.0, "empty_us": 2.1}
    return {**facts, "entrants": {name: of(us) for name, us in names.items()}}


def behind_a_producer(batch: int) -> dict[str, Any]:
    times = {"producer alone": 3.0, "ours": 9.0 + batch, "ours, PDL": 7.5 + batch, "flashinfer best": 12.0 + batch}
    found: dict[str, Any] = {
        n: {"time_us": us, "spread": 0.01, "samples": 21, "variant": ""} for n, us in times.items()
    }
    found["flashinfer best, PDL"] = {"failed": "RuntimeError: not built"}
    return {"batch": batch, "sets": 9, "times": found}


def canned() -> Bench:
    """Results of two workloads at five batches, with everything beside."""
    cells = tuple(BenchCell(f"T {p.tokens}", p, b, **measured(p, b)) for p in PROBLEMS for b in BATCHES)
    host = [{"what": w, "problem": "p", "batch": 1, "host_us": 9.0, "least_us": 8.9, "spread": 0.03} for w in "ab"]
    return Bench(
        plan="made-up",
        title="A made-up model",
        source="tests",
        manifest=MANIFEST,
        read_gbs=4600.0,
        read_gbs_method="made up",
        notes=("one thing to know",),
        cells=cells,
        evolved=tuple(
            {"label": f"T {c.problem.tokens}", "problem": c.problem.label()} | evolved(c.batch, 1000, 0) for c in cells
        ),
        pdl=tuple({"label": "T 4", "problem": "p"} | behind_a_producer(b) for b in (1, 4)),
        host=(*host, {"what": "c", "problem": "p", "batch": 1, "failed": "RuntimeError: no"}),
    )


class Runner:
    """Stands in for `BenchRunner`: made-up times; batches in `broken` raise."""

    def __init__(self, device: int, policy: dict[str, Any]) -> None:
        self.device = torch.device("cpu")
        self.target = H200
        self.policy = Policy(**policy)
        self.broken: dict[int, Exception] = {}
        self.evolving: list[tuple[int, int, int]] = []

    def describe(self) -> dict[str, Any]:
        return {"target": dataclasses.asdict(H200), "driver": "580.1", "peers": {"flashinfer": "0.7.4"}}

    def limit(self) -> dict[str, Any]:
        return {"read_gbs": 4600.0, "method": "made up"}

    def cell(
        self, problem: Problem, batch: int, load: Mapping[str, Sequence[float]], read_gbs: float
    ) -> dict[str, Any]:
        assert read_gbs == 4600.0
        assert set(load) == ({"lengths", "tokens"} if problem.ragged else {"lengths"})
        assert all(len(shares) == problem.tokens for shares in load.values())
        if batch in self.broken:
            raise self.broken[batch]
        return measured(problem, batch)

    def evolve(
        self, problem: Problem, batch: int, lengths: Sequence[float], variants: Any, steps: int, seed: int
    ) -> dict[str, Any]:
        self.evolving.append((problem.tokens, batch, steps))
        return evolved(batch, steps, seed)

    def pdl(self, problem: Problem, batch: int, lengths: Sequence[float], variants: Any) -> dict[str, Any]:
        return behind_a_producer(batch)
