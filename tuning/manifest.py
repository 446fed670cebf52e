"""The manifest of a table: which GPU, kernels, versions, policy and acceptance lengths its numbers belong to."""

from __future__ import annotations

import datetime
import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from replayssm_cute import tables
from replayssm_cute.target import Target

from .plan import TuningPlan, Workload
from .progress import Budget


def manifest(
    plan: TuningPlan,
    budget: Budget | None,
    target: Target,
    *,
    provenance: str,
    driver: str,
    policy: dict[str, Any],
    versions: dict[str, str],
) -> tables.Manifest:
    """The manifest of a table made now; `budget` is what it took its time from, None if it had all it needed."""
    spent = {} if budget is None else {"budget_s": budget.seconds, "spent_s": round(budget.spent, 1)}
    return tables.Manifest(
        gpu_name=target.name,
        arch=target.arch,
        sms=target.sms,
        provenance=provenance,
        kernel_fingerprint=tables.kernels_named(target.arch, provenance),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        driver=driver,
        versions={**_versions(), **versions},
        policy={**policy, "commit": commit(), **spent},
        acceptance={
            w.label: {
                "problem": w.problem.label(),
                "name": w.acceptance.name,
                "source": w.acceptance.source,
                "lengths": [round(s, 6) for s in w.lengths],
                "mean": round(w.mix.mean_length, 4),
                "flush": round(w.mix.flush, 6),
                "mean_live": round(w.mix.mean_live, 4),
            }
            | _rows(w)
            for w in plan.workloads
        },
    )


def _rows(workload: Workload) -> dict[str, Any]:
    """Of ragged rows, where their numbers of tokens come from, and what they are."""
    if workload.rows is None:
        return {}
    rows, tokens = workload.rows, workload.tokens or ()
    return {"rows": rows.name, "rows_source": rows.source, "tokens": [round(s, 6) for s in tokens]}


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("nvidia-cutlass-dsl", "apache-tvm-ffi"):
        found[name] = importlib.metadata.version(name)
    return found


def commit(source: Path = Path(__file__)) -> str:
    """The checkout's commit, with "+changes" if kernel or tuner sources differ from it; empty outside a checkout.

    A repository around an installed package (a virtual environment in another project) is not its checkout: it is
    only where `source`, this file, is tracked.
    """
    source = source.resolve()
    here = source.parent.parent

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=here, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        git("ls-files", "--error-unmatch", "--", str(source))
        head = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "replayssm_cute", "tuning")
    except (OSError, subprocess.SubprocessError):
        return ""
    return head + ("+changes" if changed else "")
