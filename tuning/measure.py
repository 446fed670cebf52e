"""The jobs of a GPU worker: check a config's numbers, time it, race several, time the floor and the peers.

A cell is one (problem, batch, mix). A job names the mix by `lengths`, P(acceptance length = 1..T), and where rows are
ragged by `tokens`, P(a row has 1..T new tokens). A cell's rows live in several *slot sets* (see `slots`), enough of
them that a rotation touches several times the L2; one graph holds one launch per set (several rotations, where a launch
is short; see `timing`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from replayssm_cute import calls, compare
from replayssm_cute import target as targets
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.sm100 import config_from_json
from replayssm_cute.target import Target

from . import acceptance, floor_kernel
from .limit import read_limit
from .peers import Variant
from .policy import Policy
from .slots import Cell, make_cell, slot_sets
from .timing import Timed, capture, interleave, launch, summary
from .worker import Poisoned

CHECK_ROWS = 6


def _driver() -> str:
    """The driver's version as nvidia-smi gives it, or empty."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()


class DeviceRunner:
    """The jobs of a GPU worker; every argument and result is JSON-like, for the pipe and the journal."""

    def __init__(self, device_index: int, policy: dict[str, Any]) -> None:
        torch.cuda.set_device(device_index)
        self.device = torch.device("cuda", device_index)
        self.target: Target = targets.of_device(device_index)
        self.policy = Policy(**policy)
        self._cell: tuple[object, Cell] | None = None
        self._check_calls: dict[Problem, list[calls.Call]] = {}
        self._floors: dict[tuple[Problem, floor_kernel.FloorConfig], Callable[..., None]] = {}

    def describe(self) -> dict[str, Any]:
        """The device as a Target, its driver, and the peers installed beside."""
        from . import peers

        return {
            "target": dataclasses.asdict(self.target),
            "driver": _driver(),
            "peers": peers.installed(),
        }

    def limit(self) -> dict[str, Any]:
        """See `read_limit`."""
        self._cell = None
        with self._guard():
            return read_limit(self.device, self.target.arch)

    def check(self, problem: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
        """Errors of the kernel on small random calls: padding, NaN in dead rows and foreign slots, flush or not.

        Raises:
            RuntimeError: naming the bound that is broken.
        """
        p, c = Problem.from_json(problem), config_from_json(config)
        with self._guard():
            kernel = self._kernel(p, c)
            found = [self._errors(call, lambda x: launch(kernel, x)) for call in self._calls(p)]
            for e in found:
                if (broken := compare.bounds(p).violation(e)) is not None:
                    raise RuntimeError(f"wrong numbers: {broken}")
            worst = max(found, key=lambda e: e.out)
            return {"out": worst.out, "out_worst": worst.out_worst, "state": max(e.state for e in found)}

    def time(
        self,
        problem: dict[str, Any],
        batch: int,
        lengths: Sequence[float],
        config: dict[str, Any],
        tokens: Sequence[float] | None = None,
    ) -> dict[str, Any]:
        """Microseconds a call of one config on one cell, from few replays: which configs are worth a heat."""
        p, c = Problem.from_json(problem), config_from_json(config)
        policy = dataclasses.replace(self.policy, graph_us=self.policy.screen_graph_us)
        with self._guard():
            held = self._cell
            cell = self._cell_of(p, batch, lengths, tokens)
            kernel = self._kernel(p, c)
            timed = capture(lambda call: launch(kernel, call), cell, policy)
            timed.sample(policy.screen_warmups if self._cell is held else policy.warmups)
            return summary(timed.sample(policy.screen_replays)) | self._facts(cell, timed)

    def heat(
        self,
        problem: dict[str, Any],
        batch: int,
        lengths: Sequence[float],
        configs: list[dict[str, Any]],
        tokens: Sequence[float] | None = None,
    ) -> list[dict[str, Any]]:
        """Few interleaved rounds over many configs: which are worth a race."""
        rounds, replays = self.policy.heat_rounds, self.policy.heat_replays
        return self._interleaved(problem, batch, lengths, tokens, configs, rounds, replays)

    def race(
        self,
        problem: dict[str, Any],
        batch: int,
        lengths: Sequence[float],
        configs: list[dict[str, Any]],
        tokens: Sequence[float] | None = None,
    ) -> list[dict[str, Any]]:
        """Interleaved rounds over several configs: which one wins."""
        rounds, replays = self.policy.race_rounds, self.policy.race_replays
        return self._interleaved(problem, batch, lengths, tokens, configs, rounds, replays)

    def _interleaved(
        self,
        problem: dict[str, Any],
        batch: int,
        lengths: Sequence[float],
        tokens: Sequence[float] | None,
        configs: list[dict[str, Any]],
        rounds: int,
        replays: int,
    ) -> list[dict[str, Any]]:
        p = Problem.from_json(problem)
        with self._guard():
            cell = self._cell_of(p, batch, lengths, tokens)
            field = []
            for data in configs:
                kernel = self._kernel(p, config_from_json(data))
                field.append(capture(lambda call, kernel=kernel: launch(kernel, call), cell, self.policy))  # type: ignore[misc]
            samples = interleave(field, rounds, replays)
            return [summary(s) | self._facts(cell, t) for s, t in zip(samples, field, strict=True)]

    def floor(
        self,
        problem: dict[str, Any],
        batch: int,
        lengths: Sequence[float],
        read_gbs: float,
        tokens: Sequence[float] | None = None,
    ) -> dict[str, Any]:
        """The floor of one cell: the fastest floor kernel, plus the bytes that it does not move at `read_gbs`."""
        p = Problem.from_json(problem)
        with self._guard():
            cell = self._cell_of(p, batch, lengths, tokens)
            found = []
            for config in floor_kernel.configs(p, self.target.shared_per_block):
                timed = capture(self._floor_run(cell, config), cell, self.policy, writes_outputs=False)
                timed.sample(self.policy.warmups)
                found.append(summary(timed.sample(self.policy.replays)) | {"heads_per_cta": config.heads_per_cta})
            fastest = min(found, key=lambda f: f["time_us"])
            others_us = self._beyond_floor_us(cell, read_gbs)
            return fastest | {"kernel_us": fastest["time_us"], "time_us": fastest["time_us"] + others_us}

    def peers(
        self, problem: dict[str, Any], batch: int, lengths: Sequence[float], tokens: Sequence[float] | None = None
    ) -> list[dict[str, Any]]:
        """Every variant of every installed peer on one cell; one that fails is reported with its reason."""
        from . import peers

        p = Problem.from_json(problem)
        with self._guard():
            cell = self._cell_of(p, batch, lengths, tokens)
            return self._time_variants(cell, peers.variants(p, batch, self.device))

    def _time_variants(self, cell: Cell, variants: Iterable[Variant]) -> list[dict[str, Any]]:
        """Each variant's errors and time on a cell."""
        results = []
        # no peer has promised to survive NaN in rows that it must not use
        clean = calls.random_call(cell.problem, CHECK_ROWS, dead=0.0, seed=self.policy.seed, device=self.device)
        for variant in variants:
            entry: dict[str, Any] = {"peer": variant.peer, "variant": variant.name, "default": variant.default}
            entry["replays"] = variant.replays
            try:
                if variant.replays:
                    error = self._errors(clean, variant.run)
                    entry |= {"out_error": error.out, "state_error": error.state}
                timed = capture(variant.run, cell, self.policy)
                timed.sample(self.policy.warmups)
                entry |= summary(timed.sample(self.policy.replays)) | self._facts(cell, timed)
            except Exception as e:
                torch.cuda.synchronize()  # a sticky error ends this job; any other only this variant
                entry["failed"] = f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]
            results.append(entry)
        return results

    # -----------------------------------------------------------------------------------------------

    def _kernel(self, problem: Problem, config: TileConfig) -> Callable[..., Any]:
        from replayssm_cute import compiler

        return compiler.get(problem, config, self.target)

    def _floor_run(self, cell: Cell, config: floor_kernel.FloorConfig) -> Callable[[calls.Call], None]:
        kernel = self._floor_kernel(cell.problem, config)
        return lambda call: kernel(call.state, cell.flushing, call.state_batch_indices)

    def _beyond_floor_us(self, cell: Cell, read_gbs: float) -> float:
        """Microseconds of the bytes that the floor kernel does not move."""
        p = cell.problem
        state = p.heads * p.head_dim * p.d_state * p.state_bytes
        return (cell.bytes - cell.batch * state * (1 + cell.flush)) / read_gbs / 1e3

    def _floor_kernel(self, problem: Problem, config: floor_kernel.FloorConfig) -> Callable[..., None]:
        if (problem, config) not in self._floors:
            self._floors[problem, config] = floor_kernel.compile_floor(problem, config, self.target.arch)
        return self._floors[problem, config]

    def _cell_of(
        self, problem: Problem, batch: int, lengths: Sequence[float], tokens: Sequence[float] | None = None
    ) -> Cell:
        key = (problem, batch, tuple(lengths), None if tokens is None else tuple(tokens))
        if self._cell is None or self._cell[0] != key:
            self._cell = None  # free the old one first
            torch.cuda.empty_cache()
            mix = acceptance.stationary(lengths, problem.window, tokens)
            l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
            free = int(torch.cuda.mem_get_info(self.device)[0] * 0.9)
            sets = slot_sets(problem, batch, mix, self.policy, l2=l2, free=free)
            self._cell = (key, make_cell(problem, batch, mix, self.policy, self.device, sets))
        return self._cell[1]

    def _calls(self, problem: Problem) -> list[calls.Call]:
        if problem not in self._check_calls:
            w = problem.window
            padding = (2,) if problem.index_dtype is not None else ()
            self._check_calls = {
                problem: [
                    calls.random_call(
                        problem,
                        CHECK_ROWS,
                        pnat=[(w * i + shift) // (CHECK_ROWS - 1) for i in range(CHECK_ROWS)],
                        padding=padding,
                        pad_slot_id=pad,
                        seed=self.policy.seed + shift,
                        device=self.device,
                    )
                    for shift, pad in ((0, -1), (2, 0))
                ]
            }
        return self._check_calls[problem]

    def _errors(self, call: calls.Call, run: Callable[[calls.Call], None]) -> compare.Errors:
        after = call.clone()
        run(after)
        torch.cuda.synchronize()
        return compare.errors(call, after)

    def _facts(self, cell: Cell, timed: Timed) -> dict[str, Any]:
        return {"bytes": cell.bytes, "flush": cell.flush, "sets": len(cell.calls), "nodes": timed.nodes}

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        """Turn an error after which the CUDA context answers nothing more into Poisoned; free memory on others."""
        try:
            yield
        except Exception as e:
            self._cell = None
            try:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
            except Exception:
                raise Poisoned(f"{type(e).__name__}: {' '.join(str(e).split())}"[:600]) from e
            raise
