"""What a reader of a report sees, on results that are made up here."""

from __future__ import annotations

import base64
import dataclasses
import io
import re
import struct
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.colors import to_rgb
from replayssm_tuning import cli, plots, report, theme
from replayssm_tuning.results import Candidate, CellResult, Results
from tuning_fakes import BEST, POLICY, SLOW

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
    manifest = tables.Manifest(
        "NVIDIA H200", "sm_90a", 132, provenance, "k" * 64, "2026-01-01", policy=POLICY.to_json()
    )
    return Results("p", "P", "s", manifest, 4600.0, "m", 0.02, (), cells)


def width(png: Path) -> int:
    return int(struct.unpack(">I", png.read_bytes()[16:20])[0])


def test_plots_are_two_panels_wide_whatever_the_number_of_workloads(tmp_path: Path) -> None:
    problems = [dataclasses.replace(PROBLEM, heads=h) for h in (2, 4, 8, 16, 32)]
    many = results_of(*(cell(p, b) for p in problems for b in (1, 8)))
    two = dataclasses.replace(many, cells=many.cells[:4])
    made, fewer = (plots.draw_all(r, tmp_path / n, "x") for r, n in ((many, "many"), (two, "two")))
    for kind, drawn in made.items():
        assert width(drawn.path) == pytest.approx(width(fewer[kind].path), abs=60), kind  # tight boxes follow labels
        assert width(drawn.path) < 1700, kind


@pytest.mark.parametrize(
    "winner",
    [
        TileConfig(4, 2, parallel_heads=2, tail_rows=8),
        TileConfig(tiles_per_warp=4, head_split=1),
        TileConfig(2, 1, 2, "whole", ctas_per_sm=3),
    ],
    ids=TileConfig.label,
)
def test_every_kind_of_winner_can_be_drawn(winner: TileConfig, tmp_path: Path) -> None:
    timed = (Candidate(winner, 9.0), Candidate(DEFAULT, 10.0))
    cells = [cell(batch=1), dataclasses.replace(cell(batch=8), candidates=timed)]
    drawn = plots.draw_all(results_of(*cells), tmp_path, "x")
    assert all(d.path.is_file() for d in drawn.values())


@pytest.mark.parametrize("number", [1, 2, 3])
def test_every_workload_has_a_panel_and_speed_ups_share_their_scale(number: int) -> None:
    # one label for all: what tells workloads apart is the problem
    cells = [cell(dataclasses.replace(PROBLEM, heads=8 * n), 4, gain=n / 2) for n in range(1, number + 1)]
    results = results_of(*cells)
    with plt.rc_context(plots.LIGHT):
        figure, _ = plots._speedup(results, plots.frame(results))
    axes = figure.get_axes()
    assert [ax.get_title(loc="left") for ax in axes] == [f"verify\n{c.problem.label()}" for c in cells]
    assert len({ax.get_ylim() for ax in axes}) == 1
    assert axes[0].get_ylim()[1] > 1 + number / 2
    plt.close(figure)


@pytest.mark.parametrize("times", [(5.9, 10.5), (6.1, 6.3), (1.1, 1.9), (4.5, 640.0), (7.0, 7.0), (0.3, 2e5)])
def test_an_axis_of_times_has_numbers_whatever_they_span(times: tuple[float, float]) -> None:
    figure, ax = plt.subplots()
    ax.plot([1, 4], times)
    plots.microseconds_axis(ax, "µs a call")
    figure.canvas.draw()
    low, high = ax.get_ylim()
    numbers = [t.get_text() for t in ax.get_yticklabels() if low <= t.get_position()[1] <= high and t.get_text()]
    plt.close(figure)
    assert 2 <= len(numbers) <= 9 and len(set(numbers)) == len(numbers)
    assert ax.get_yscale() == "log"


def test_the_map_of_configs_has_the_fastest_of_every_batch() -> None:
    """A config that is best at one batch and bad, or not timed, at others is still on the map."""
    usual = [TileConfig(1, 1, ctas_per_sm=n) for n in range(1, 31)]
    cells = []
    for batch, best in ((1, TileConfig(8, 1)), (4, TileConfig(8, 2)), (16, TileConfig(8, 4))):
        timed = [(best, 10.0), *((c, 11.0 + n / 100) for n, c in enumerate(usual))]
        candidates = tuple(Candidate(c, t, stage="raced") for c, t in timed)
        cells.append(dataclasses.replace(cell(batch=batch), candidates=candidates))
    with plt.rc_context(plots.LIGHT):
        figure, _ = plots._configs(results_of(*cells))
    shown = [text.get_text() for text in figure.get_axes()[0].get_yticklabels()]
    plt.close(figure)
    assert len(shown) == 24
    assert {TileConfig(8, n).label() for n in (1, 2, 4)} <= set(shown)


def test_a_page_explains_its_labels_once(tmp_path: Path) -> None:
    path = tmp_path / "x.results.json"
    results_of(cell()).save(path)
    text = report.draw([path])[0][0].read_text()
    for words in ("h = heads a CTA", "(1: no cap)", "heads x head_dim x d_state / groups"):
        assert text.count(words) == 1
        assert text.index(words) < text.index("## ")


def test_a_page_says_what_was_tried_and_why_a_default_was_kept(tmp_path: Path) -> None:
    cells = [cell(batch=b, gain=g) for b, g in ((1, 0.2), (8, 0.01), (16, -0.1))]
    old = results_of(*cells)
    new = dataclasses.replace(
        old,
        manifest=dataclasses.replace(old.manifest, policy=POLICY.to_json() | {"spent_s": 224.6}),
        cells=tuple(dataclasses.replace(c, space=670) for c in cells),
    )
    for name, results in (("old", old), ("new", new)):
        results.save(tmp_path / name / "x.results.json")
    page_of_old, page = (report.draw([tmp_path / n / "x.results.json"])[0][0].read_text() for n in ("old", "new"))
    assert "\n3 of 670 configs tried in 225 s; 1 of 3 cells choose another" in page
    assert "\n3 configs tried; 1 of 3 cells choose another" in page_of_old
    assert "in 1 the default is kept though another is faster: its lead is under 2%" in page
    rows = {line.split(" | ")[1]: line for line in page.splitlines() if line.startswith("| verify")}
    assert "default kept: lead under 2%" in rows["8"]
    assert "1.200x" in rows["1"]
    assert "1.000x" in rows["16"]
    assert page.count("default kept") == 1


def test_a_page_stands_alone_in_light_and_dark(tmp_path: Path) -> None:
    path = tmp_path / "x.results.json"
    results_of(cell()).save(path)
    page = report.draw([path])[0][1].read_text()
    images = re.findall(r'(?:src|srcset)="([^"]*)"', page)
    assert len(images) == 10 and all(i.startswith("data:image/png;base64,") for i in images)  # five plots, both ways
    assert not re.search(r'(?:src|srcset|href)="(?!data:)|@import|url\(', page)
    assert page.count('<source media="(prefers-color-scheme: dark)"') == 5
    corners = {}
    for name, image in zip(("dark", "light"), images[:2], strict=True):
        pixels = plt.imread(io.BytesIO(base64.b64decode(image.split(",")[1])))
        corners[name] = tuple(round(255 * float(v)) for v in pixels[0, 0, :3])
    assert corners == {"dark": (0x15, 0x18, 0x1E), "light": (255, 255, 255)}
    assert all(f"--paper: {paper}" in page for paper in ("#ffffff", "#15181e"))  # the page is as its plots are


@pytest.mark.parametrize("style", [theme.LIGHT, theme.DARK], ids=["light", "dark"])
def test_colours_can_be_told_from_the_paper_and_lines_without_colour(style: dict[str, Any]) -> None:
    def luminance(colour: str) -> float:
        parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    def contrast(a: str, b: str) -> float:
        high, low = sorted((luminance(a), luminance(b)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    paper = style["figure.facecolor"]
    cycle = style["axes.prop_cycle"].by_key()["color"]
    named = dict(zip(("ours", "default", "limit", "muted", "ink", "empty"), cycle, strict=False))
    assert all(contrast(named[name], paper) >= 4.5 for name in ("ours", "limit", "muted", "ink"))
    assert all(contrast(colour, paper) >= 4.5 for colour in cycle[6:])
    assert contrast(named["default"], paper) >= 2.5  # a thick line, below the thin one of the winner
    assert len(set(theme.PEER_MARKERS)) == len(theme.PEER_COLOURS) == len(cycle[6:])


def test_bandwidth_leaves_out_peers_of_other_work() -> None:
    """The standard update writes every state: a call's bytes over its time are not what it moves."""
    entries = [
        {"peer": peer, "variant": "default", "default": True, "time_us": 20.0, **more}
        for peer, more in (("flashinfer", {}), ("flashinfer-standard", {}), ("new", {"replays": False}))
    ]
    results = results_of(dataclasses.replace(cell(), peers=tuple(entries)))
    table = plots.frame(results)
    with plt.rc_context(theme.LIGHT):
        drawn = {kind: getattr(plots, kind)(results, table)[0] for kind in ("_time", "_bandwidth")}
    labels = {kind: {line.get_label() for line in f.get_axes()[0].lines} for kind, f in drawn.items()}
    assert {"flashinfer", "flashinfer-standard", "new"} <= labels["_time"]
    assert "flashinfer" in labels["_bandwidth"]
    assert not {"flashinfer-standard", "new"} & labels["_bandwidth"]
    (share,) = [t for t in drawn["_bandwidth"].get_axes()[0].texts if t.get_text().endswith("%")]
    assert share.xyann[1] < 0  # below its point: above it might meet the limit
    for figure in drawn.values():
        plt.close(figure)


def test_several_gpus_have_a_page_each_and_one_together(tmp_path: Path) -> None:
    results = results_of(cell())
    other = dataclasses.replace(results, manifest=dataclasses.replace(results.manifest, gpu_name="NVIDIA B200"))
    for name, one in (("a", results), ("b", other)):
        one.save(tmp_path / f"{name}.results.json")
    pages = report.draw(sorted(tmp_path.glob("*.json")))[0]
    assert [p.name for p in pages] == ["report.md", "report.html", "report-a.html", "report-b.html"]
    text = {p.name: p.read_text() for p in pages}
    assert "NVIDIA H200" in text["report-a.html"] and "NVIDIA B200" not in text["report-a.html"]
    assert "NVIDIA B200" in text["report-b.html"] and "NVIDIA H200" not in text["report-b.html"]
    assert all(gpu in text["report.html"] for gpu in ("NVIDIA H200", "NVIDIA B200"))


def test_a_page_says_how_candidates_were_timed(tmp_path: Path) -> None:
    new = results_of(cell())
    before = {k: v for k, v in POLICY.to_json().items() if not k.startswith(("screen", "heat", "prune", "race_field"))}
    old = dataclasses.replace(new, manifest=dataclasses.replace(new.manifest, policy=before))
    pages = {}
    for name, results in (("old", old), ("new", new)):
        results.save(tmp_path / name / "x.results.json")
        pages[name] = report.draw([tmp_path / name / "x.results.json"])[0][0].read_text()
    race = "those within 5% of the fastest, at most 8 with the default, raced in 7 interleaved rounds of 3"
    assert f"a candidate's time is the median of 9 replays; {race}" in pages["old"]
    heat = "the fastest 24 and the default again in a heat of 2 interleaved rounds of 2"
    assert f"every candidate timed alone, the median of 3 replays; {heat}; {race}" in pages["new"]


def test_a_tie_is_no_lead() -> None:
    tie = dataclasses.replace(cell(), candidates=(Candidate(BEST, 10.0), Candidate(DEFAULT, 10.0)))
    assert plots.frame(results_of(tie))["default_kept"].tolist() == [""]


def test_one_broken_file_costs_only_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results_of(cell()).save(tmp_path / "a" / "good.results.json")
    for broken in ("a/bad.results.json", "b/worse.results.json"):
        (tmp_path / broken).parent.mkdir(exist_ok=True)
        (tmp_path / broken).write_text("{")
    assert cli.main(["report", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert f"report: {tmp_path / 'a' / 'report.md'}\n" in said.out  # piped paths are not folded
    assert [line.split(": ")[1] for line in said.err.splitlines()] == [
        str(tmp_path / "a" / "bad.results.json"),
        str(tmp_path / "b" / "worse.results.json"),
    ]
    assert not (tmp_path / "b" / "report.md").exists()
    assert (tmp_path / "a" / "plots" / "good-time.png").is_file()


def test_results_that_are_kept_for_the_record_have_a_report(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results_of(cell()).save(path)
    path.write_text(path.read_text().replace("{", '{\n "historical": true,', 1))
    assert cli.main(["report", str(tmp_path)]) == 0
    text = (tmp_path / "report.md").read_text()
    assert "Every candidate: `results.json`." in text
    assert "table.json" not in text  # there is none
    assert (tmp_path / "plots" / "results-time.png").is_file()
