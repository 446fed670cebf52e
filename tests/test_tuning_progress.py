"""Progress shows the budget, which ends a sweep, and not a guess at how long all of the steps would take."""

from __future__ import annotations

import io

import pytest
from replayssm_tuning.progress import Budget, Steps
from rich.console import Console


@pytest.mark.parametrize(("spent", "words"), [(12.0, "budget left 0:48"), (300.0, "budget left 0:00")])
def test_a_terminal_shows_the_budget_that_is_left(monkeypatch: pytest.MonkeyPatch, spent: float, words: str) -> None:
    said = io.StringIO()
    budget = Budget(60.0)
    with Steps(Console(file=said, force_terminal=True, width=120), "compile", 3336, budget) as steps:
        steps.step("one", count=10)
        with monkeypatch.context() as patch:
            patch.setattr(Budget, "spent", property(lambda _: spent))
            assert steps._bar is not None
            steps._bar.refresh()
    shown = said.getvalue()
    assert words in shown
    assert "10/3336" in shown
    assert "-:--:--" not in shown  # rich's own guess


@pytest.mark.fault(35)
def test_lines_elsewhere_show_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    monkeypatch.setattr("replayssm_tuning.progress._LINE_EVERY_S", 0.0)
    monkeypatch.setattr(Budget, "spent", property(lambda _: 12.0))
    with Steps(Console(file=said, width=40), "compile", 3336, Budget(60.0)) as steps:
        steps.step("a long name of what is being done here")
    assert said.getvalue().splitlines() == [
        "compile: 1 of 3336, budget left 48 s  a long name of what is being done here",
        "compile: 1 of 3336, 12 s since the start",
    ]
