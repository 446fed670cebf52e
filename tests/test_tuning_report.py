"""What a reader of a report sees, on results that are made up here."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
from replayssm_tuning import plots
from replayssm_tuning.results import Candidate, CellResult, Results
from tuning_fakes import BEST, SLOW

from replayssm_cute import tables
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem

DEFAULT = TileConfig()
PROBLEM = Problem(16, 64, 128, 2, 4, 16)


def cell(problem: Problem = PROBLEM, batch: int = 1, gain: float = 0.2, label: str = "verify") -> CellResult:
    """A cell in which BEST beats the default by `gain`."""
    times = {DEFAULT: 10.0 * batch * (1 + gain), BEST: 10.0 * batch, SLOW: 30.0 * batch}
    return CellResult(
        label, problem, batch, 1000 * batch, 0.2, DEFAULT, tuple(Candidate(c, t) for c, t in times.items())
    )


def results_of(*cells: CellResult, provenance: str = "measured") -> Results:
    manifest = tables.Manifest("NVIDIA H200", "sm_90a", 132, provenance, "k" * 64, "2026-01-01")
    return Results("p", "P", "s", manifest, 4600.0, "m", 0.02, (), cells)


def width(png: Path) -> int:
    return int(struct.unpack(">I", png.read_bytes()[16:20])[0])


def test_plots_are_two_panels_wide_whatever_the_number_of_workloads(tmp_path: Path) -> None:
    problems = [dataclasses.replace(PROBLEM, heads=h) for h in (2, 4, 8, 16, 32)]
    many = results_of(*(cell(p, b) for p in problems for b in (1, 8)))
    two = dataclasses.replace(many, cells=many.cells[:4])
    made, fewer = (plots.draw_all(r, tmp_path / n, "x") for r, n in ((many, "many"), (two, "two")))
    for kind, png in made.items():
        assert width(png) == pytest.approx(width(fewer[kind]), abs=60), kind  # tight boxes follow their labels
        assert width(png) < 1700, kind


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_workload_has_a_panel_and_speed_ups_share_their_scale(number: int) -> None:
    # one label for all: what tells workloads apart is the problem
    cells = [cell(dataclasses.replace(PROBLEM, heads=8 * n), 4, gain=n / 2) for n in range(1, number + 1)]
    results = results_of(*cells)
    with plt.rc_context(plots._STYLE):
        figure, _ = plots._speedup(results, plots.frame(results))
    axes = figure.get_axes()
    assert [ax.get_title(loc="left") for ax in axes] == [f"verify\n{c.problem.label()}" for c in cells]
    assert len({ax.get_ylim() for ax in axes}) == 1
    assert axes[0].get_ylim()[1] > 1 + number / 2
    plt.close(figure)
