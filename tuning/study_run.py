"""A study of many variants: kernels compiled in parallel first, results on disk as they come, an end by a budget."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd  # type: ignore[import-untyped, unused-ignore]
import torch

from replayssm_cute import atomic, compiler, fingerprint, target
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

from .argument_kinds import duration
from .progress import Budget


def add_budget(parser: argparse.ArgumentParser) -> None:
    """The option `--budget`."""
    parser.add_argument(
        "--budget",
        type=duration,
        default=math.inf,
        help="time that no variant starts after, such as 60s (default: none)",
    )


class StudyRun:
    """Variants of a study, run one after the other while the budget lasts.

    Args:
        folder, name: NAME.csv, rewritten after each variant, and NAME.json, which says what is missing.
        facts: of the manifest, what the study is.
        device: what it runs on.
        budget: seconds.
    """

    def __init__(
        self, folder: Path, name: str, facts: dict[str, Any], device: torch.device, budget: float = math.inf
    ) -> None:
        self.folder, self.name, self.device, self.budget = folder, name, device, Budget(budget)
        self.where = torch.cuda.get_device_name(device) if device.type == "cuda" else "reference on the CPU"
        self.facts = {
            "gpu": self.where,
            "kernel_fingerprint": fingerprint.kernels(),
            "torch": torch.__version__,
            **facts,
        }
        self.frames: list[pd.DataFrame] = []
        self.failed: dict[str, str] = {}
        self.missing: list[str] = []

    def compile(self, kernels: Mapping[str, tuple[Problem, TileConfig]]) -> None:
        """Bring the kernels of variants into the disk cache, as many at once as there are CPUs, until the budget ends.

        One that does not compile costs its variant alone: `run` passes it by.
        """
        where = target.of_device(torch.cuda.current_device())
        items = {name: (*kernel, where) for name, kernel in kernels.items()}

        class Ended(Exception):
            pass

        def progress(done: compiler.Done, count: int, total: int) -> None:
            self.say(f"compiled {count} of {total}")
            if not self.budget.left and count < total:
                raise Ended

        try:
            done = {d.item: d for d in compiler.compile_many(items.values(), progress=progress)}
        except Ended:
            return  # no time is left for a variant either
        self.failed |= {name: error for name, item in items.items() if (error := done[item].error) is not None}

    def run(self, variants: Mapping[str, Callable[[], pd.DataFrame]]) -> pd.DataFrame:
        """Rows of all variants that ran; on disk after each."""
        self.missing = list(variants)
        self._write()
        for name, variant in variants.items():
            if not self.budget.left:
                break
            if name not in self.failed:
                self.frames.append(variant())
                self.missing.remove(name)
                self._write()
                self.say(name)
        return self.found()

    def found(self) -> pd.DataFrame:
        """What there is."""
        return pd.concat(self.frames, ignore_index=True) if self.frames else pd.DataFrame()

    def finish(self) -> int:
        """Say what is missing, and give the exit status: 1 if anything is."""
        for name in self.missing:
            print(f"missing: {name}: {self.failed.get(name, 'the budget ended')}", file=sys.stderr)
        return 1 if self.missing else 0

    def say(self, what: str) -> None:
        """A line of progress on stderr."""
        print(f"{self.budget.spent:6.1f} s  {what}", file=sys.stderr, flush=True)

    def _write(self) -> None:
        facts = {"complete": not self.missing, "missing": self.missing, "failed": self.failed, **self.facts}
        facts["seconds"] = round(self.budget.spent, 1)
        atomic.write_text(self.folder / f"{self.name}.json", json.dumps(facts, indent=1) + "\n")
        table = self.folder / f"{self.name}.csv"
        if self.frames:
            atomic.write_text(table, self.found().to_csv(index=False, float_format="%.4g"))
        else:
            table.unlink(missing_ok=True)  # an earlier run's would lie beside this one's manifest
