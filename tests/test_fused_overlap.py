"""Which kernels of a decode step overlap: measured tables, the margin, and what is left out of them."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fused_calls import layer, random_layer_call

from replayssm_cute import fingerprint, target
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import launches, overlap
from replayssm_cute.fused.chains import Chain, ConvCut, NormCut, Overlap
from replayssm_cute.problem import Problem

H200 = target.named("h200")
STEP = Problem(heads=24, head_dim=64, d_state=128, groups=1, tokens=4, window=16)
FASTER_ALONE = {"chain": 10.0, "chain, PDL": 10.3, "chain, PDL, conv too": 10.1}
SLOWER_ALONE = {"chain": 10.0, "chain, PDL": 10.1, "chain, PDL, conv too": 9.0}


@pytest.fixture(autouse=True)
def _nothing_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(overlap, "FOLDER", tmp_path / "shipped")
    overlap.forget()
    yield
    overlap.forget()


def written(path: Path, cells: dict[int, Any], step: Problem = STEP, **changes: Any) -> Path:
    data = {
        "schema": overlap.SCHEMA, "gpu_name": H200.name, "arch": H200.arch, "kernel_fingerprint": fingerprint.kernels(),
        "layer_kernel_fingerprint": fingerprint.kernels("fused"),
        "entries": [{"problem": step.to_json(), "buckets": [{"batch": b, "times_us": t} for b, t in cells.items()]}],
    }  # fmt: skip
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data | changes))
    return path


def asked(batch: int, promised: bool = False, step: Problem = STEP) -> Overlap:
    found = overlap.choose(step, batch, H200, promised=promised)
    assert found == Chain(found.overlap)  # the rules' shapes
    return found.overlap


def test_without_a_table_all_overlap_that_may() -> None:
    assert asked(1) is Overlap.INNER and asked(1, promised=True) is Overlap.ALL
    assert overlap.candidates(STEP, H200, promised=False) == (Chain(Overlap.INNER),)
    assert not Overlap.NONE.chained and Overlap.INNER.chained and not Overlap.INNER.first and Overlap.ALL.first


def test_a_table_answers_near_its_batches_for_its_geometry(tmp_path: Path) -> None:
    written(tmp_path / "shipped" / "a.json", {64: SLOWER_ALONE, 4: FASTER_ALONE})
    assert [asked(b) is Overlap.NONE for b in (1, 2, 4, 15, 17, 64)] == [True, True, True, True, False, False]
    # 10.1 is within the margin of 10.0, 10.3 is not; without the promise the conv never starts early
    assert asked(4, promised=True) is Overlap.ALL and asked(64) is Overlap.INNER
    assert overlap.candidates(STEP, H200, promised=False) == (Chain(Overlap.INNER), Chain(Overlap.NONE))
    assert overlap.candidates(STEP, H200, promised=True) == (Chain(Overlap.ALL),)
    weights = dataclasses.replace(STEP, pdl=True, d_dtype=None, index_dtype="i64", dt_bias_dtype="bf16")
    assert asked(4, step=weights) is Overlap.NONE
    for change in ({"tokens": 3}, {"window": 32}, {"state_dtype": "bf16"}, {"heads": 48}):
        assert asked(4, step=dataclasses.replace(STEP, **change)) is Overlap.INNER


def test_the_users_tables_go_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "shipped" / "a.json", {4: FASTER_ALONE})
    monkeypatch.setenv("REPLAYSSM_LAYER_TABLES", str(written(tmp_path / "mine.json", {4: SLOWER_ALONE})))
    assert asked(4) is Overlap.INNER


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpu_name": "NVIDIA B200"}, "it is for NVIDIA B200"),
        ({"kernel_fingerprint": "0" * 64}, "its step kernels' fingerprint 000000000000 is stale"),
        ({"layer_kernel_fingerprint": "0" * 64}, "its fused kernels' fingerprint 000000000000 is stale"),
        ({"schema": 2}, "its schema is 2"),
        ({"entries": [{"problem": {}, "buckets": []}]}, "entry: Problem.__init__() missing 6 required"),
        ({"entries": 3}, "entries: got int, expected a list"),
    ],
)
def test_what_is_no_table_for_this_gpu_is_left_out_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, changes: Any, said: str
) -> None:
    monkeypatch.setenv("REPLAYSSM_LAYER_TABLES", str(written(tmp_path / "mine.json", {4: FASTER_ALONE}, **changes)))
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        assert asked(4) is Overlap.INNER and asked(4) is Overlap.INNER
    [record] = caplog.records
    assert said in record.getMessage()


@pytest.mark.parametrize("cells", [{0: FASTER_ALONE}, {4: FASTER_ALONE | {"chain": 0.0}}, {4: {"chain": 1.0}}])
def test_odd_cells_are_refused(tmp_path: Path, cells: dict[int, Any]) -> None:
    with pytest.raises(overlap.tables.TableError):
        overlap.read(written(tmp_path / "mine.json", cells))
    with pytest.raises(overlap.tables.TableError, match="cannot be read"):
        overlap.read(tmp_path / "none.json")


def test_what_a_search_found_serves_as_it_was_found(tmp_path: Path) -> None:
    """With the promise and without it, for its batch and those near it; every chain of a table is a candidate."""
    plain = Chain(Overlap.INNER_X, TileConfig(heads_per_cta=2, tail_rows=8), ConvCut(4, 64, each=2), NormCut(4, 2, 100))
    promised = dataclasses.replace(plain, overlap=Overlap.ALL_X, config=None, norm=None)
    path = written(tmp_path / "shipped" / "a.json", {4: FASTER_ALONE, 64: FASTER_ALONE})
    data = json.loads(path.read_text())
    data["entries"][0]["buckets"][1]["chains"] = {"plain": plain.to_json(), "promised": promised.to_json()}
    path.write_text(json.dumps(data))
    for batch, chain in ((64, plain), (40, plain), (4, Chain(Overlap.NONE))):
        assert overlap.choose(STEP, batch, H200, promised=False) == chain
    assert overlap.choose(STEP, 64, H200, promised=True) == promised
    found = overlap.candidates(STEP, H200, promised=False)
    assert found == (Chain(Overlap.INNER), Chain(Overlap.NONE), plain)
    assert "x in step; step h2 s1 p1 live c1 t8; conv 4 x 64, 2 each; norm 4 warps, 2 tokens" in plain.label()
    assert Chain.from_json(dataclasses.replace(plain, early=True).to_json()).early
    for odd in (
        promised.to_json(),
        plain.to_json() | {"overlap": "chain", "early": True},
        plain.to_json() | {"more": 1},
        plain.to_json() | {"conv": {"vector": 8, "odd": 1}},
    ):
        data["entries"][0]["buckets"][1]["chains"] = {"plain": odd}
        path.write_text(json.dumps(data))
        with pytest.raises(overlap.tables.TableError):
            overlap.read(path)


def test_a_wrong_eps_is_not_that_of_a_warm_call() -> None:
    """What a warm call matches is checked no further."""
    call = random_layer_call(layer(dataclasses.replace(STEP, heads=4)), 2)
    known = [launches._signature(dataclasses.replace(call, eps=eps), False, None) for eps in (1e-5, 1)]
    for wrong in (float("inf"), float("nan"), -1e-5, 10**400):
        assert launches._signature(dataclasses.replace(call, eps=wrong), False, None) not in known
