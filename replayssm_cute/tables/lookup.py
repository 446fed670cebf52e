"""Which config serves a problem at a batch: from a table if one knows, from the nearest cell, from the default rule."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import logging
import math
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..config import SHORT_WINDOW, TileConfig
from ..default_rule import default_config
from ..problem import Problem
from ..target import Target
from . import files
from .fields import TableError
from .schema import Cell, Table

log = logging.getLogger("replayssm_cute")

# A config's speed depends on these; a cell of a problem that differs in one of them says nothing.
_SAME = ("state_dtype", "copy_dtype", "io_dtype", "head_dim", "d_state", "heads_per_group")
# A cell answers for at most so many times more or less work (batch x heads) than it was made at: what wins at one row
# can be several times slower than the default rule at a hundred.
REACH = 4
# The bucket at or above answers within so many times more work: a config that wins with more work does well with less,
# while one that wins below may need one more wave of CTAs. Where the next bucket is further off, the nearest answers.
UP = 2
# Another T or W is near enough if the work is cut alike: as many tiles of TOKEN_TILE tokens, and windows that are both
# short (`config.SHORT_WINDOW`) or both long. What wins for one token and 16 ring rows says nothing about 32 tokens and
# 64. A cell answers for windows down to half of its own, and up to LONGER times as long, of long ones LONG times.
# Measured, bf16: W 16's winners take 1.08 times the best at W 24, batch 16; W 32's takes 223 us at W 48, batch 256, and
# the default rule's 230, but 291 at W 64, where that takes 247.
TOKEN_TILE = 8  # the N of mma.m16n8: T is padded to it
SHORTER, LONGER, LONG = 2, 1.25, 1.5
_KEPT = 4096  # answers for a problem, and problems with answers, that are remembered; a server sees some hundred
# Batches that `candidates` asks the default rule about: all small ones, then a grid.
_BATCHES = (*range(1, 257), *(int(256 * 1.1**k) for k in range(1, 60)))


@dataclass(frozen=True, slots=True)
class Choice:
    """A config and where it comes from.

    Attributes:
        config: the tile config to run.
        source: "table" (this problem's own cell), "nearest" (another cell), "default" (`default_rule`),
            "forced" (by the caller) or "fallback" (in place of one whose kernel failed its self-check).
        reason: in words.
        table: name of the table's file, None for the default rule.
        provenance: "measured" or "estimated", None for the default rule.
        cell: the cell that answered.
        problem: the problem that the cell belongs to.
    """

    config: TileConfig
    source: str
    reason: str
    table: str | None = None
    provenance: str | None = None
    cell: Cell | None = None
    problem: Problem | None = None


@dataclass(frozen=True, slots=True)
class Tables:
    """The usable tables for one target, the ones that override others first: (name, table).

    The last `behind` of them answer for a problem, or for others near it, only where none before them does the same.
    """

    target: Target
    tables: tuple[tuple[str, Table], ...] = ()
    behind: int = 0
    _exact: dict[Problem, list[tuple[int, list[int], list[Choice]]]] = field(init=False, repr=False, compare=False)
    _answers: dict[Problem, dict[int, Choice]] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Answer every cell's own problem in advance, so that an exact look-up is a dictionary and a bisection."""
        exact: dict[Problem, list[tuple[int, list[int], list[Choice]]]] = {}
        for rank, (name, table) in enumerate(self.tables):
            for problem, cells in table.entries.items():
                choices = [
                    Choice(
                        cell.config,
                        "table",
                        f"{_kind(table)} for this problem, bucket {cell.batch}",
                        name,
                        table.manifest.provenance,
                        cell,
                        problem,
                    )
                    for cell in _valid(problem, self.target, cells)
                ]
                buckets = [choice.cell.batch for choice in choices if choice.cell is not None]
                exact.setdefault(problem, []).append((rank, buckets, choices))
        object.__setattr__(self, "_exact", exact)

    @classmethod
    def of(cls, target: Target, paths: Sequence[Path | str] | None = None) -> Tables:
        """Read the tables that may serve `target`: `paths` (or else REPLAYSSM_TABLES), then the shipped ones.

        Of the shipped ones those that were measured serve always, the estimated ones only where "estimated" is among
        `paths`. Every file that is not used costs one log line, never an exception; a shipped table of another GPU is
        no surprise and is logged at debug level. Measured tables come before estimated ones, within the user's and
        within the shipped ones.

        Raises:
            TypeError: if `paths` is no list of paths, such as one path.
        """
        if paths is not None:
            _check_paths(paths)
        named = list(files.user_paths() if paths is None else paths)
        user = [path for path in named if str(path) != files.ESTIMATED]
        shipped = files.shipped()
        if len(user) < len(named):
            estimates = files.estimated(target.name)
            if not estimates:
                log.warning("tables: no estimated ones are shipped for %s", target.name)
            shipped = [*shipped, *estimates]
        found: list[tuple[tuple[bool, bool], str, Table]] = []
        for path, is_shipped in [(p, False) for p in user] + [(p, True) for p in shipped]:
            try:
                table = files.read(path)
            except TableError as error:
                log.warning("table %s is not used: %s", path, error)
                continue
            if reason := table.manifest.unusable_reason(target):
                foreign = (table.manifest.gpu_name, table.manifest.arch) != (target.name, target.arch)
                level = logging.DEBUG if is_shipped and foreign else logging.WARNING
                log.log(level, "table %s is not used: %s", path, reason)
                continue
            name = str(path) if not is_shipped else f"shipped {_name(Path(path))}"
            found.append(((is_shipped, table.manifest.provenance == "estimated"), name, table))
        found.sort(key=lambda item: item[0])  # stable: keeps the user's order
        behind = sum(kind == (True, True) for kind, _, _ in found)  # the package's estimates
        return cls(target, tuple((name, table) for _, name, table in found), behind)

    def choose(self, problem: Problem, batch: int) -> Choice:
        """The config for `batch` rows of `problem`; never fails, at worst the default rule answers."""
        return self._answers.get(problem, {}).get(batch) or self._remembered(problem, batch)[batch]

    def _remembered(self, problem: Problem, batch: int) -> dict[int, Choice]:
        """The answers for a problem by batch, that for `batch` among them."""
        answers = self._answers.get(problem, {})
        if batch not in answers:
            if len(answers) >= _KEPT or len(self._answers) >= _KEPT:
                answers = {}
                self._answers.clear()
            answers[batch] = self._found(problem, batch)
            self._answers[problem] = answers
        return answers

    def _found(self, problem: Problem, batch: int) -> Choice:
        ahead = len(self.tables) - self.behind
        groups = range(ahead), range(ahead, len(self.tables))
        for ranks in groups:
            for rank, buckets, choices in self._exact.get(problem, ()):
                at = _answering(buckets, batch) if rank in ranks else None
                if at is not None and batch <= buckets[-1]:
                    return choices[at]
            if choice := self._nearest(problem, batch, ranks, own=True):
                return choice
        others = (self._nearest(problem, batch, ranks, own=False) for ranks in groups)
        return next((choice for choice in others if choice), None) or self._default(problem, batch)

    def _nearest(self, problem: Problem, batch: int, ranks: range, own: bool) -> Choice | None:
        """The cell nearest in batch x heads, then T, then W, then the remaining fields: the problem's own, or others'.

        Of problems with the same dtypes, P, N and heads a group whose T and W are near (see `_cut_alike`), in the
        tables with these ranks; earlier ones win ties. Each problem offers the cell that would answer for itself (see
        `_answering`). None if no such one has a cell within `REACH`.
        """
        best: tuple[tuple[float, ...], Choice] | None = None
        for rank in ranks:
            name, table = self.tables[rank]
            for other, cells in table.entries.items():
                if (other == problem) != own or not (_comparable(other, problem) and _cut_alike(other, problem)):
                    continue
                cell = _reaching(problem, self.target, cells, batch * problem.heads / other.heads)
                if cell is None:  # none of these is near enough, or valid here
                    continue
                work = abs(math.log2(cell.batch * other.heads / (batch * problem.heads)))
                others = sum(getattr(other, f.name) != getattr(problem, f.name) for f in dataclasses.fields(problem))
                distance = (
                    work,
                    abs(other.tokens - problem.tokens),
                    abs(other.window - problem.window),
                    others,
                    rank,
                )
                if best is None or distance < best[0]:
                    same = "this problem" if other == problem else other.label()
                    reason = (
                        f"no cell for this problem and batch; nearest is {same}, bucket {cell.batch} ({_kind(table)})"
                    )
                    choice = Choice(cell.config, "nearest", reason, name, table.manifest.provenance, cell, other)
                    best = (distance, choice)
        return best[1] if best else None

    def _default(self, problem: Problem, batch: int) -> Choice:
        why = "no table for this GPU and these kernels"
        if self.tables:
            known = [p for _, table in self.tables for p in table.entries if _comparable(p, problem)]
            if any(_cut_alike(p, problem) for p in known):
                why = f"no table has a cell within {REACH}x of this work"
            elif known:
                why = f"no table knows this geometry with a T and W near {problem.tokens} and {problem.window}"
            else:
                why = "no table knows a comparable problem"
        return Choice(default_config(problem, self.target, batch), "default", f"{why}; default rule")

    def candidates(self, problem: Problem) -> tuple[TileConfig, ...]:
        """Every config that `choose` returns for some batch of `problem`: exact up to batch 256, on a grid above."""
        edges: set[int] = set(_BATCHES)
        for _, table in self.tables:
            # Where a cell begins or ends to answer, in batch x heads: see `_answering`.
            for other, cells in table.entries.items():
                if not (_comparable(other, problem) and _cut_alike(other, problem)):
                    continue
                batches = [float(cell.batch) for cell in _valid(problem, self.target, cells)]
                turns = [b * f for b in batches for f in (1, 1 / UP, REACH, 1 / REACH)]
                turns += [math.sqrt(a * b) for a, b in itertools.pairwise(batches)]
                for turn in turns:
                    batch = int(turn * other.heads / problem.heads)
                    edges |= {batch - 1, batch, batch + 1, batch + 2}
        return tuple(dict.fromkeys(self.choose(problem, b).config for b in sorted(edges) if b >= 1))


def _name(path: Path) -> str:
    """A shipped table's file, and where it is estimated its folders."""
    folder = files.estimated_folder()
    return path.relative_to(folder.parent).as_posix() if path.is_relative_to(folder) else path.name


def _comparable(a: Problem, b: Problem) -> bool:
    return all(getattr(a, f) == getattr(b, f) for f in _SAME)


def _cut_alike(known: Problem, asked: Problem) -> bool:
    """Whether T and W are near enough for a cell of one problem to answer for another."""
    short = known.window <= SHORT_WINDOW
    return (
        -(-known.tokens // TOKEN_TILE) == -(-asked.tokens // TOKEN_TILE)
        and short == (asked.window <= SHORT_WINDOW)
        and known.window <= (SHORTER if short else LONG) * asked.window
        and asked.window <= (LONGER if short else LONG) * known.window
    )


def _kind(table: Table) -> str:
    return f"{table.manifest.provenance} table"


def _answering(buckets: Sequence[float], batch: float) -> int | None:
    """Which of the ascending buckets answers for `batch`, or None if none is within `REACH`.

    The first one at or above, if it is within `UP`; else the nearest in the logarithm.
    """
    at = bisect.bisect_left(buckets, batch)
    if at < len(buckets) and buckets[at] <= UP * batch:
        return at
    around = [i for i in (at, at - 1) if 0 <= i < len(buckets)]  # the one above wins a tie
    found = min(around, key=lambda i: max(buckets[i] / batch, batch / buckets[i]), default=None)
    if found is None or not batch / REACH <= buckets[found] <= REACH * batch:
        return None
    return found


def _reaching(problem: Problem, target: Target, cells: Iterable[Cell], batch: float) -> Cell | None:
    """The valid cell that answers for `batch`, or None."""
    valid = list(_valid(problem, target, cells))
    at = _answering([cell.batch for cell in valid], batch)
    return None if at is None else valid[at]


def _valid(problem: Problem, target: Target, cells: Iterable[Cell]) -> Iterator[Cell]:
    return (c for c in cells if c.config.is_valid(problem, target))


# ---------------------------------------------------------------------------------------------------
# The process's own tables
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Recent:
    """The last problem and target asked about, and the answers there."""

    problem: Problem | None = None
    target: Target | None = None
    answers: Mapping[int, Choice] = field(default_factory=dict)


_loaded: dict[Target, Tables] = {}
_paths: tuple[Path | str, ...] | None = None
_said: set[tuple[Problem, str, TileConfig]] = set()
_recent = _Recent()
_lock = threading.Lock()


def _of_process(target: Target) -> Tables:
    tables = _loaded.get(target)
    if tables is None:
        with _lock:
            tables = _loaded.setdefault(target, Tables.of(target, _paths))
    return tables


def forget() -> None:
    """Forget the tables that this process read, and what it said: the next call reads the files again."""
    global _recent
    with _lock:
        _loaded.clear()
        _said.clear()
        _recent = _Recent()


def use(paths: Sequence[Path | str] | None) -> None:
    """Take `paths` for this process's user tables, in place of REPLAYSSM_TABLES; None goes back to that.

    As there, "estimated" stands for the estimated tables that the package brings for the GPU at hand.

    Raises:
        TypeError: if `paths` is no list of paths, such as one path.
    """
    global _paths
    if paths is not None:
        _check_paths(paths)
    _paths = None if paths is None else tuple(paths)
    forget()


def _check_paths(paths: object) -> None:
    if not isinstance(paths, Sequence) or isinstance(paths, (str, bytes)):
        raise TypeError(f"paths: got {type(paths).__name__}, expected a list of paths")
    for path in paths:
        if not isinstance(path, (str, Path)):
            raise TypeError(f"paths: got {type(path).__name__} in the list, expected paths as str or Path")


def choose(problem: Problem, batch: int, target: Target) -> Choice:
    """`Tables.choose` on this process's tables (REPLAYSSM_TABLES and the shipped ones, read once).

    Each inexact answer is logged once per problem and config.
    """
    recent = _recent
    if recent.problem is problem and recent.target is target:  # objects that were hashed before are not hashed again
        choice = recent.answers.get(batch)
        if choice is not None:
            return choice
    return _choose(problem, batch, target)


def _choose(problem: Problem, batch: int, target: Target) -> Choice:
    global _recent
    tables = _of_process(target)
    answers = tables._remembered(problem, batch)
    choice = answers[batch]
    if choice.source != "table":
        said = (problem, target.arch, choice.config)
        if said not in _said:
            _said.add(said)
            log.info(
                "%s, batch %d on %s: config %s; %s",
                problem.label(),
                batch,
                target.name,
                choice.config.label(),
                choice.reason,
            )
    with _lock:
        if _loaded.get(target) is tables:  # not forgotten meanwhile
            _recent = _Recent(problem, target, answers)
    return choice


def candidates(problem: Problem, target: Target) -> tuple[TileConfig, ...]:
    """`Tables.candidates` on this process's tables."""
    return _of_process(target).candidates(problem)
