"""Plans: TOML files that say what is tuned, for whom, and how long."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayssm_cute import target as targets_module
from replayssm_cute.problem import Problem

from .acceptance import Acceptance, Mix, read_histogram, stationary

DEFAULT_TARGETS = ("sm_100a", "sm_90a")
SHIPPED = Path(__file__).parent / "plans"
REALISTIC = "mixed-batch"  # lengths that were published (its CSV says where): a workload's that names none
_PROBLEM_FIELDS = {f.name for f in dataclasses.fields(Problem)}
_TOP = {
    *("name", "title", "source", "targets", "batches", "budget", "budget_per_workload", "tp"),
    *("problem", "acceptance", "rows", "workload"),
}
_WORKLOAD = {"label", "acceptance", "rows"} | _PROBLEM_FIELDS
_ONE_TOKEN = Acceptance("one-token", "T = 1 keeps the guaranteed token alone.", shares=(1.0,))


class PlanError(ValueError):
    """A plan file that cannot be used; the message names the file, the key and what was expected."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One problem of a plan, and the load it is served with.

    Attributes:
        label: of the plan.
        acceptance: lengths that are accepted of a row's new tokens.
        rows: of ragged rows, how many new tokens a row has (no acceptance, but a distribution over 1..T all the same).
    """

    label: str
    problem: Problem
    acceptance: Acceptance
    rows: Acceptance | None = None

    @property
    def lengths(self) -> tuple[float, ...]:
        """P(length = 1..T)."""
        return self.acceptance.lengths(self.problem.tokens)

    @property
    def mix(self) -> Mix:
        """The stationary mix of its rows."""
        return stationary(self.lengths, self.problem.window, self.tokens)

    @property
    def tokens(self) -> tuple[float, ...] | None:
        """P(a row has 1..T new tokens) of ragged rows; None where all have T."""
        return None if self.rows is None else self.rows.lengths(self.problem.tokens)

    @property
    def load(self) -> dict[str, list[float]]:
        """What a job needs to know of the load: lengths, and of ragged rows tokens."""
        shares = {"lengths": self.lengths, "tokens": self.tokens}
        return {name: [round(s, 9) for s in values] for name, values in shares.items() if values is not None}


@dataclass(frozen=True, slots=True)
class TuningPlan:
    """A loaded plan.

    Attributes:
        name, title, source: of the file; the name is also the folder of its results.
        targets: architectures (or catalogue names) that estimates are made for where no GPU is used.
        batches: ascending batch buckets.
        budget_s: seconds that a sweep may compile and measure; a plan states it as a whole, or for each workload
            (after the split over tensor-parallel sizes, and of those that are kept).
        workloads: at least one.
        tp: tensor-parallel sizes that the workloads are for.
    """

    name: str
    title: str
    source: str
    targets: tuple[str, ...]
    batches: tuple[int, ...]
    budget_s: float
    workloads: tuple[Workload, ...]
    tp: tuple[int, ...] = (1,)


def seconds(text: str | int | float) -> float:
    """Seconds of "90s", "3m", "1.5h" or a bare number.

    Raises:
        ValueError: for anything else, or a duration that is not positive.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([smh]?)\s*", str(text))
    value = float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if value <= 0:
        raise ValueError(f"got {text!r}, expected a positive duration such as '90s', '3m' or '1h'")
    return value


def find(name_or_path: str) -> Path:
    """The plan file of a path, or of the name of a shipped plan.

    Raises:
        PlanError: if there is none, listing the shipped ones.
    """
    path = Path(name_or_path)
    if path.is_file():
        return path
    shipped = SHIPPED / f"{path.name.removesuffix('.toml')}.toml"
    if shipped.is_file() and path.parent == Path("."):
        return shipped
    names = ", ".join(sorted(p.stem for p in SHIPPED.glob("*.toml"))) or "none"
    raise PlanError(f"no plan {name_or_path!r}: no such file; shipped plans: {names}")


def load(
    name_or_path: str,
    *,
    acceptance: str | None = None,
    tp: tuple[int, ...] | None = None,
    states: tuple[str, ...] | None = None,
    tokens: tuple[int, ...] | None = None,
) -> TuningPlan:
    """Read a plan.

    Args:
        name_or_path: a TOML file, or the name of a shipped plan.
        acceptance: use this distribution of the plan for every workload.
        tp: tensor-parallel sizes that replace the plan's.
        states, tokens: keep only the workloads with one of these state dtypes, and one of these T.

    Raises:
        PlanError: if none is kept, and for anything in the file that cannot be used, naming file and key.
    """
    path = find(name_or_path)
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as e:
        raise PlanError(f"{path}: not readable as TOML: {e}") from e
    try:
        return _build(data, path, acceptance, tp, lambda p: _chosen(p, states, tokens))
    except PlanError:
        raise
    except (ValueError, TypeError, NotImplementedError) as e:
        raise PlanError(f"{path}: {e}") from e


def _chosen(problem: Problem, states: tuple[str, ...] | None, tokens: tuple[int, ...] | None) -> bool:
    return (states is None or problem.state_dtype in states) and (tokens is None or problem.tokens in tokens)


def _build(
    data: dict[str, Any],
    path: Path,
    acceptance: str | None,
    tp: tuple[int, ...] | None,
    keep: Callable[[Problem], bool],
) -> TuningPlan:
    _known("plan", data, _TOP)
    batches = _ints("batches", data.get("batches"))
    sizes = _ints("tp", list(tp)) if tp is not None else _ints("tp", data.get("tp", [1]))
    names = data.get("targets", list(DEFAULT_TARGETS))
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise PlanError(f"{path}: targets: got {names!r}, expected a list of names such as {list(DEFAULT_TARGETS)}")
    for name in names:
        targets_module.named(name)
    budget_key, budget = _budget(data)

    table = data.get("acceptance", {})
    if not isinstance(table, dict) or not all(isinstance(v, dict) for v in table.values()):
        raise PlanError(f"{path}: acceptance: expected sections such as [acceptance.uniform]")
    known = {name: _acceptance(name, entry, path) for name, entry in table.items()}
    of_rows = data.get("rows", {})
    if not isinstance(of_rows, dict) or not all(isinstance(v, dict) for v in of_rows.values()):
        raise PlanError(f"{path}: rows: expected sections such as [rows.short]")
    known_rows = {name: _acceptance(name, entry, path, "rows") for name, entry in of_rows.items()}
    known_rows.setdefault("uniform", Acceptance("uniform", "Assumed: 1 to T equally likely.", uniform=True))
    known.setdefault("uniform", Acceptance("uniform", "Assumed: every length equally likely.", uniform=True))
    known.setdefault(REALISTIC, _acceptance(REALISTIC, {"histogram_file": f"{REALISTIC}.csv"}, SHIPPED / path.name))
    covered = len(known[REALISTIC].shares or ())
    shared = data.get("problem", {})
    if not isinstance(shared, dict):
        raise PlanError(f"{path}: problem: expected a section [problem]")
    _known("problem", shared, _PROBLEM_FIELDS)
    raw = data.get("workload")
    if not isinstance(raw, list) or not raw or not all(isinstance(w, dict) for w in raw):
        raise PlanError(f"{path}: workload: expected at least one [[workload]] section")

    workloads: list[Workload] = []
    for number, entry in enumerate(raw, 1):
        where = f"workload {number}"
        _known(where, entry, _WORKLOAD)
        facts = shared | {k: v for k, v in entry.items() if k in _PROBLEM_FIELDS}
        missing = {"heads", "head_dim", "d_state", "groups", "tokens", "window"} - set(facts)
        if missing:
            raise PlanError(f"{path}: {where}: {', '.join(sorted(missing))} missing (here or in [problem])")
        label = str(entry.get("label", f"T = {facts['tokens']}"))
        whole = Problem.from_json(facts)
        usual = REALISTIC if whole.tokens <= covered else "uniform"
        chosen = acceptance or entry.get("acceptance", usual)
        if chosen not in known:
            raise PlanError(f"{path}: {where}: acceptance {chosen!r} is unknown; known: {', '.join(sorted(known))}")
        distribution = _ONE_TOKEN if whole.tokens == 1 else known[chosen]
        rows = _rows(f"{path}: {where}", entry.get("rows"), whole, known_rows)
        for size in sizes:
            workload = Workload(
                label if size == 1 else f"{label}, TP {size}", tensor_parallel(whole, size), distribution, rows
            )
            workload.mix  # noqa: B018  a mean outside 1..T is found now, not after compiling
            if any(w.problem == workload.problem for w in workloads):
                raise PlanError(f"{path}: {where}: {workload.problem.label()} is named twice")
            workloads.append(workload)
    kept = tuple(w for w in workloads if keep(w.problem))
    if not kept:
        states, tokens = (sorted({getattr(w.problem, k) for w in workloads}) for k in ("state_dtype", "tokens"))
        raise PlanError(
            f"{path}: no workload is left with these states and tokens; the plan has states "
            f"{', '.join(states)} and T {', '.join(map(str, tokens))}"
        )
    return TuningPlan(
        name=str(data.get("name", path.stem)),
        title=str(data.get("title", data.get("name", path.stem))),
        source=" ".join(str(data.get("source", "")).split()),
        targets=tuple(names),
        batches=batches,
        budget_s=budget * (len(kept) if budget_key == "budget_per_workload" else 1),
        workloads=kept,
        tp=sizes,
    )


def _rows(where: str, name: Any, problem: Problem, known: dict[str, Acceptance]) -> Acceptance | None:
    """How many new tokens rows of a workload have, by the name in the plan; None where all have T."""
    if not problem.ragged:
        if name is not None:
            raise PlanError(f"{where}: rows: got {name!r} with ragged = false, expected ragged = true, or no rows")
        return None
    if (name or "uniform") not in known:
        raise PlanError(f"{where}: rows {name!r} is unknown; known: {', '.join(sorted(known))}")
    return known[name or "uniform"]


def _budget(data: dict[str, Any]) -> tuple[str, float]:
    """The key that states the budget, and its seconds."""
    if "budget" in data and "budget_per_workload" in data:
        raise ValueError("budget: got budget and budget_per_workload, expected one of them")
    key = "budget_per_workload" if "budget_per_workload" in data else "budget"
    try:
        return key, seconds(data.get(key, "4m"))
    except ValueError as e:
        raise ValueError(f"{key}: {e}") from e


def _known(where: str, entry: dict[str, Any], allowed: set[str]) -> None:
    if unknown := set(entry) - allowed:
        raise ValueError(f"{where}: unknown keys {sorted(unknown)}; known: {', '.join(sorted(allowed))}")


def _ints(key: str, value: Any) -> tuple[int, ...]:
    good = isinstance(value, list) and value and all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if not good or min(value) < 1 or len(set(value)) != len(value):
        raise ValueError(f"{key}: got {value!r}, expected a list of distinct positive ints")
    return tuple(sorted(value))


def _acceptance(name: str, entry: dict[str, Any], path: Path, section: str = "acceptance") -> Acceptance:
    _known(f"{section}.{name}", entry, {"source", "mean", "histogram", "histogram_file", "uniform"})
    shares: Any = entry.get("histogram")
    source = str(entry.get("source", ""))
    if shares is not None and not (isinstance(shares, list) and all(isinstance(s, int | float) for s in shares)):
        raise ValueError(f"{section}.{name}: histogram: got {shares!r}, expected a list of numbers")
    if "histogram_file" in entry:
        file = path.parent / str(entry["histogram_file"])
        if not file.is_file():
            raise ValueError(f"{section}.{name}: histogram_file: no file {file}")
        if shares is not None:
            raise ValueError(f"{section}.{name}: got histogram and histogram_file, expected one of them")
        shares = read_histogram(file)
        source = source or _comments(file)
    return Acceptance(
        name=name,
        source=" ".join(source.split()),
        shares=None if shares is None else tuple(float(s) for s in shares),
        mean=entry.get("mean"),
        uniform=bool(entry.get("uniform", False)),
    )


def _comments(file: Path) -> str:
    """The comment lines of a CSV: plans that share a histogram share the words on where it comes from."""
    lines = (line.strip() for line in file.read_text(encoding="utf-8").splitlines())
    return " ".join(line.lstrip("#").strip() for line in lines if line.startswith("#"))


def tensor_parallel(problem: Problem, size: int) -> Problem:
    """The problem of one tensor-parallel rank: heads and groups divided; a single group is replicated.

    Raises:
        ValueError: if heads, or two or more groups, do not divide by `size`, naming the sizes up to 64 that work.
    """
    replicated = problem.groups == 1

    def divides(ranks: int) -> bool:
        return problem.heads % ranks == 0 and (replicated or problem.groups % ranks == 0)

    if not divides(size):
        groups = "1 group (replicated)" if replicated else f"{problem.groups} groups"
        sizes = ", ".join(str(n) for n in range(1, 65) if divides(n))
        raise ValueError(
            f"tp: got {size}, which does not divide {problem.heads} heads and {groups} of {problem.label()}; "
            f"expected one of {sizes}"
        )
    groups_a_rank = 1 if replicated else problem.groups // size
    return dataclasses.replace(problem, heads=problem.heads // size, groups=groups_a_rank)
