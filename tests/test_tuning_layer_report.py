"""The layer benchmark's report: its tables, its plot, the overlaps that calls read, and what is stale."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from replayssm_tuning import layer_bench, layer_report

from replayssm_cute import fingerprint, target
from replayssm_cute.fused import overlap
from replayssm_cute.fused.chains import Chain, Overlap

ROOT = Path(__file__).resolve().parent.parent
MEASURED = ROOT / "reports" / "h200" / "layer" / "layer.json"


def entry(time_us: float) -> dict[str, Any]:
    return {"time_us": float(time_us), "spread": 0.01, "samples": 21}


def made(**changes: Any) -> dict[str, Any]:
    """Two cells; without the promise the first is faster without overlap."""
    times = {
        name: entry(t)
        for name, t in zip([*layer_bench.PARTS, *Overlap], (2, 6, 2, 10, 10.5, 9, 10.6, 9.5), strict=True)
    }
    other = times | {str(Overlap.INNER): entry(8.5)}
    cells = [
        {"tokens": 1, "batch": batch, "flush": 0.1, "sets": 4, "config": "h1", "times": found}
        for batch, found in ((4, times), (64, other))
    ]
    problems = [layer_bench.layer_problem(1, 16, "f32")]
    return {
        "gpu": "NVIDIA H200", "arch": "sm_90a", "kernel_fingerprint": fingerprint.kernels(),
        "layer_kernel_fingerprint": fingerprint.kernels("fused"), "toolchain": fingerprint.toolchain(),
        "machine_code": layer_bench.machine_code(problems, [4, 64], target.named("h200")), "window": 16, "state": "f32",
        "cells": cells,
    } | changes  # fmt: skip


def test_tables_plot_and_choices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, beside, table = tmp_path / "layer.json", tmp_path / "goals.csv", tmp_path / "overlaps.json"
    file.write_text(json.dumps(made()))
    beside.write_text("tokens,batch,goal_us,other_us\n1,4,9.5,18\n1,64,8,17\n")
    assert layer_report.main([str(file), "--beside", str(beside), "--table", str(table)]) == 0
    said = capsys.readouterr().out
    assert "| 1 | 4 | 2.00 | 6.00 | 2.00 | 10.00 | 10.50 | 9.00 | 10.60 | 9.50 | h1 |" in said
    assert "| 1 | 4 | 9.5 | 9.00 | **10.00** | 18 | 2.00 | 1.80 |" in said
    assert "| 1 | 64 | 8 | **8.50** | **8.50** | 17 | 2.00 | 2.00 |" in said
    rows = (tmp_path / "layer.csv").read_text().splitlines()
    assert len(rows) == 3 and rows[0].startswith("tokens,batch,flush,config,conv_us") and ",chain,10," in rows[1]
    assert (tmp_path / "layer.png").read_bytes()[:4] == b"\x89PNG"
    step = layer_bench.layer_problem(1, 16, "f32").step
    cells = overlap.read(table).entries[overlap.key_of(step)]
    assert cells[4].times[Overlap.NONE] == 10 and [c.chain(False).overlap for c in cells.values()] == [
        "chain",
        "chain, PDL",
    ]


def test_chains_of_another_run_are_taken_instead(tmp_path: Path) -> None:
    chain = Chain(Overlap.INNER).to_json()
    cells = [{"tokens": 1, "batch": 64, "chains": {"plain": chain}}]
    instead = {"kernel_fingerprint": fingerprint.kernels(), "cells": cells}
    first, second = layer_report.overlap_table(made(), instead)["entries"][0]["buckets"]
    assert "chains" not in first and second["chains"] == {"plain": chain}
    with pytest.raises(ValueError, match="the chains to take instead are of kernels 0000"):
        layer_report.overlap_table(made(), {"kernel_fingerprint": "0" * 64, "cells": []})
    file, other = tmp_path / "layer.json", tmp_path / "instead.json"
    file.write_text(json.dumps(made()))
    other.write_text(json.dumps(instead))
    assert layer_report.main([str(file), "--instead", str(other), "--table", str(tmp_path / "table.json")]) == 0
    assert json.loads((tmp_path / "table.json").read_text()) == layer_report.overlap_table(made(), instead)


def test_times_of_other_kernels_are_stale(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert layer_report.stale_reason(made()) is None
    other = {"layer_kernel_fingerprint": "0" * 64}  # sources that compile to the same code
    assert layer_report.stale_reason(made(**other)) is None
    code = made()["machine_code"]
    changed = made(**other, machine_code=code | {"norm T 1, chain": "0"})
    assert "which compile to other code for ['norm T 1, chain']" in str(layer_report.stale_reason(changed))
    assert "another toolchain" in str(layer_report.stale_reason(made(**other, toolchain={})))
    assert "its step was of kernels 0000" in str(layer_report.stale_reason(made(kernel_fingerprint="0" * 64)))
    (tmp_path / "a.json").write_text(json.dumps(changed))
    assert layer_report.main([str(tmp_path / "a.json"), "--table", str(tmp_path / "t.json")]) == 1
    assert "not those of the kernels in the tree" in capsys.readouterr().err and not (tmp_path / "t.json").exists()


def test_the_shipped_choices_are_those_that_were_measured() -> None:
    shipped = overlap.FOLDER / "nvidia-h200-nemotron3-super-f32.json"
    if json.loads(MEASURED.read_text()).get("historical"):
        assert not shipped.exists(), "made from the times of kernels that are no more"
        pytest.skip("no choices are shipped: the step kernel has not been timed in a layer yet")
    instead = json.loads((MEASURED.parent / "instead.json").read_text())
    assert json.loads(shipped.read_text()) == layer_report.overlap_table(json.loads(MEASURED.read_text()), instead)
    better = {(c["tokens"], c["batch"]): c["chains"] for c in instead["cells"]}
    where = target.named("h200")
    overlap.forget()
    for _, row in layer_report.frame(json.loads(MEASURED.read_text())).iterrows():
        step = layer_bench.layer_problem(row["tokens"], 16, "f32").step
        for promised, name in ((False, "plain"), (True, "promised")):
            chain = overlap.choose(step, row["batch"], where, promised=promised)
            found = better.get((row["tokens"], row["batch"]), {}).get(name)
            assert chain.label() == (row[f"{name}_choice"] if found is None else Chain.from_json(found).label())


@pytest.mark.parametrize("name", ["README.md", "reports/h200/README.md"])
def test_the_tables_in_the_text_are_made_from_the_measurement(name: str) -> None:
    goals = layer_report.pd.read_csv(MEASURED.parent / "goals.csv")
    text = layer_report.markdown(layer_report.frame(json.loads(MEASURED.read_text()), goals))
    for table in text.split("\n\n") if name.startswith("reports") else [text.split("\n\n")[-1]]:
        for line in table.splitlines()[2:]:
            assert line in (ROOT / name).read_text(), line
