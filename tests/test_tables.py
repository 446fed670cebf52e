"""Tables: schema, hostile files, merging, concurrent writers, look-up."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import math
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import H200, SMALL

from replayssm_cute import explain, fingerprint, tables
from replayssm_cute.config import TileConfig
from replayssm_cute.default_rule import default_config
from replayssm_cute.problem import Problem
from replayssm_cute.tables import Cell, Manifest, Table, TableError, Tables, files
from replayssm_cute.target import Target, named

WIDE = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
ONE, TWO, FOUR, SPLIT = TileConfig(), TileConfig(2, 2), TileConfig(4, 2), TileConfig(head_split=2)


def manifest(**change: Any) -> Manifest:
    fields = {
        "gpu_name": H200.name, "arch": H200.arch, "sms": H200.sms, "provenance": "measured",
        "kernel_fingerprint": fingerprint.kernels(), "date": "2026-11-29T00:00:00Z", "driver": "580.1",
        "versions": {"torch": "2.13.0"}, "policy": {"repeats": 5}, "acceptance": {"uniform": 4},
    }  # fmt: skip
    return Manifest(**{**fields, **change})


def cell(batch: int, config: TileConfig, **change: Any) -> Cell:
    return Cell(batch, config, **{"time_us": 10.0, "bytes": 1e6, "gb_s": 100.0, "limit_fraction": 0.02, **change})


def table(entries: dict[Problem, list[Cell]], **change: Any) -> Table:
    return Table(manifest(**change), {p: tuple(c) for p, c in entries.items()})


FULL = table(
    {
        WIDE: [
            cell(1, SPLIT, runner_up=ONE, runner_up_us=11.0, margin=0.1, peers={"flashinfer": 12.5}),
            cell(64, FOUR),
        ],
        SMALL: [cell(8, ONE, default_us=10.5)],
    }
)


# ---- schema and files ------------------------------------------------------------------------------


def test_round_trip_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "t.json"
    tables.write(path, FULL)
    assert tables.read(path) == FULL
    first = path.read_text()
    tables.write(path, Table(FULL.manifest, dict(reversed(FULL.entries.items()))))
    assert path.read_text() == first, "the order of entries changes the file"
    assert [p.name for p in path.parent.iterdir()] == ["t.json"]


def _drop(data: Any, *path: Any) -> Any:
    for key in path[:-1]:
        data = data[key]
    del data[path[-1]]


def _put(data: Any, value: Any, *path: Any) -> Any:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


BUCKET = ("entries", 0, "buckets", 0)
HOSTILE: dict[str, Any] = {
    "older schema": lambda d: _put(d, 0, "schema"),
    "newer schema": lambda d: _put(d, 2, "schema"),
    "no schema": lambda d: _drop(d, "schema"),
    "no manifest": lambda d: _drop(d, "manifest"),
    "manifest without arch": lambda d: _drop(d, "manifest", "arch"),
    "unknown provenance": lambda d: _put(d, "guessed", "manifest", "provenance"),
    "sms is a bool": lambda d: _put(d, True, "manifest", "sms"),
    "versions is a list": lambda d: _put(d, [], "manifest", "versions"),
    "entries is an object": lambda d: _put(d, {}, "entries"),
    "entry is null": lambda d: _put(d, None, "entries", 0),
    "problem is text": lambda d: _put(d, "x", "entries", 0, "problem"),
    "problem has an unknown field": lambda d: _put(d, 1, "entries", 0, "problem", "hidden"),
    "problem is not served": lambda d: _put(d, 4096, "entries", 0, "problem", "window"),
    "problem with a text size": lambda d: _put(d, "64", "entries", 0, "problem", "heads"),
    "two entries for one problem": lambda d: d["entries"].append(copy.deepcopy(d["entries"][0])),
    "no buckets": lambda d: _put(d, [], "entries", 0, "buckets"),
    "buckets out of order": lambda d: [e["buckets"].reverse() for e in d["entries"]],
    "bucket without time": lambda d: _drop(d, *BUCKET, "time_us"),
    "bucket with an extra field": lambda d: _put(d, 1, *BUCKET, "extra"),
    "batch zero": lambda d: _put(d, 0, *BUCKET, "batch"),
    "batch is a float": lambda d: _put(d, 1.5, *BUCKET, "batch"),
    "negative time": lambda d: _put(d, -1, *BUCKET, "time_us"),
    "time is NaN": lambda d: _put(d, float("nan"), *BUCKET, "time_us"),
    "time is an int beyond floats": lambda d: _put(d, 10**400, *BUCKET, "time_us"),
    "peer's time is an int beyond floats": lambda d: _put(d, {"peer": 10**400}, *BUCKET, "peers"),
    "last batch beyond int32": lambda d: _put(d, 1 << 31, *BUCKET[:-1], -1, "batch"),
    "tail beyond int32": lambda d: _put(d, {"heads_per_cta": 4, "tail_rows": 1 << 31}, *BUCKET, "config"),
    "heads beyond int32": lambda d: d["entries"][0]["problem"].update(heads=1 << 31, groups=1 << 27),
    "config is null": lambda d: _put(d, None, *BUCKET, "config"),
    "config is a list of pairs": lambda d: _put(d, [["stages", 1]], *BUCKET, "config"),
    "config with an unknown field": lambda d: _put(d, {"warps": 4}, *BUCKET, "config"),
    "config out of range": lambda d: _put(d, {"stages": 0}, *BUCKET, "config"),
    "peers is a list": lambda d: _put(d, [1], *BUCKET, "peers"),
}
RAW = {
    "empty": b"", "truncated": json.dumps(FULL.to_json()).encode()[:-100], "binary": bytes(range(256)),
    "deep": b"[" * 200_000, "a number": b"3", "null": b"null", "a list": b"[]",
}  # fmt: skip


def hostile_bytes(name: str) -> bytes:
    if name in RAW:
        return RAW[name]
    data = json.loads(json.dumps(FULL.to_json()))
    HOSTILE[name](data)
    return json.dumps(data).encode()


@pytest.mark.fault(33)
@pytest.mark.parametrize("name", [*HOSTILE, *RAW])
def test_hostile_file_is_a_miss_with_one_line(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(hostile_bytes(name))
    with pytest.raises(TableError):
        tables.read(path)
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        found = Tables.of(H200, [path])
    assert str(path) not in [n for n, _ in found.tables]
    (line,) = [m for m in caplog.messages if str(path) in m]  # others may be of shipped tables
    assert line.startswith(f"table {path} is not used: ") and line.isprintable()


@pytest.mark.parametrize("value", [10**400, -1, math.nan, math.inf, None, True, "x", [], {}, [[]], 1.5, 1 << 63, 0])
def test_any_value_in_any_place_is_refused_or_harmless(value: Any, tmp_path: Path) -> None:
    """Look-ups answer at run time: whatever a file holds, they must not raise."""
    path = tmp_path / "t.json"

    def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            yield (*at, key)
            yield from places(node[key], (*at, key))

    full = json.loads(json.dumps(FULL.to_json()))
    refused = 0
    for place in places(full):
        data = copy.deepcopy(full)
        _put(data, value, *place)
        path.write_text(json.dumps(data))
        found = Tables.of(H200, [path])
        refused += str(path) not in [n for n, _ in found.tables]
        for batch in (1, 10**6):
            assert found.choose(WIDE, batch).config.is_valid(WIDE, H200)
        found.candidates(WIDE)
    assert refused


def test_a_path_of_a_user_that_does_not_exist_is_a_miss(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("REPLAYSSM_TABLES", "~no-such-user/t.json")
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        Tables.of(H200)
    assert [m for m in caplog.messages if "~no-such-user/t.json is not used: it cannot be read" in m]


@pytest.mark.parametrize("one", ["t.json", Path("t.json")])
def test_one_path_is_no_list_of_paths(one: Any) -> None:
    """Text is a sequence too: of one-letter paths."""
    with pytest.raises(TypeError, match=r"paths: got (str|PosixPath), expected a list of paths"):
        Tables.of(H200, one)
    with pytest.raises(TypeError, match=r"paths: got (str|PosixPath), expected a list of paths"):
        tables.use(one)


@pytest.mark.parametrize("wrong", [[5], [None], [b"x"], 5, {"a": 1}])
def test_what_is_no_path_is_refused_when_it_is_named(wrong: Any) -> None:
    for named_in in (tables.use, lambda paths: Tables.of(H200, paths)):
        with pytest.raises(TypeError, match=r"paths: got (int|NoneType|bytes|dict)"):
            named_in(wrong)


def test_missing_directory_and_oversized_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TableError, match="cannot be read"):
        tables.read(tmp_path / "none.json")
    with pytest.raises(TableError, match="cannot be read"):
        tables.read(tmp_path)
    monkeypatch.setattr(tables.fields, "MAX_BYTES", 100)
    tables.write(tmp_path / "t.json", FULL)
    with pytest.raises(TableError, match="larger than 100 bytes"):
        tables.read(tmp_path / "t.json")


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"gpu_name": "NVIDIA H100 80GB HBM3"}, "it is for NVIDIA H100"),
        ({"arch": "sm_100a"}, r"\(sm_100a\), this is NVIDIA H200"),
        ({"kernel_fingerprint": "0" * 64}, "kernel fingerprint 000000000000 is stale"),
    ],
)
def test_foreign_and_stale_tables_are_not_used(
    change: dict[str, str], why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "t.json"
    tables.write(path, table({WIDE: [cell(64, SPLIT)]}, **change))
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        choice = Tables.of(H200, [path]).choose(WIDE, 1)
    assert choice.table != str(path)
    (message,) = [m for m in caplog.messages if str(path) in m]
    assert re.search(why, message), message


def test_merge_keeps_both_and_prefers_the_new(tmp_path: Path) -> None:
    new = table({WIDE: [cell(64, TWO), cell(256, FOUR)]})
    merged = tables.merge(FULL, new)
    assert [(c.batch, c.config) for c in merged.entries[WIDE]] == [(1, SPLIT), (64, TWO), (256, FOUR)]
    assert merged.entries[SMALL] == FULL.entries[SMALL]
    for change in ({"gpu_name": "x"}, {"provenance": "estimated"}, {"kernel_fingerprint": "x"}):
        with pytest.raises(TableError, match="cannot merge"):
            tables.merge(FULL, table({}, **change))


def test_update_replaces_what_cannot_be_merged_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "t.json"
    path.write_text("{")
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        assert tables.update(path, FULL) == FULL
    assert "is replaced: it is no JSON" in caplog.text and "the old file is now t.json.replaced" in caplog.text
    assert (tmp_path / "t.json.replaced").read_text() == "{"
    assert tables.update(path, table({WIDE: [cell(2, TWO)]})).entries[SMALL] == FULL.entries[SMALL]
    assert tables.read(path).entries[WIDE][1] == cell(2, TWO)
    measured, old = path.read_bytes(), table({SMALL: [cell(4, ONE)]}, kernel_fingerprint="0" * 64)
    assert tables.update(path, old) == old and (tmp_path / "t.json.replaced-2").read_bytes() == measured


@pytest.mark.fault(30)
def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    code = f"""
        import sys
        from test_tables import SMALL, ONE, cell, table
        from replayssm_cute import tables
        for batch in range(int(sys.argv[1]), 61, 3):
            tables.update({str(tmp_path / "t.json")!r}, table({{SMALL: [cell(batch, ONE)]}}))
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    writers = [
        subprocess.Popen([sys.executable, "-c", textwrap.dedent(code), str(k)], env=environment) for k in (1, 2, 3)
    ]
    assert [w.wait(timeout=120) for w in writers] == [0, 0, 0]
    assert [c.batch for c in tables.read(tmp_path / "t.json").entries[SMALL]] == list(range(1, 61))


def test_failing_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    tables.write(path, FULL)
    with pytest.raises(ValueError):
        tables.write(path, table({SMALL: [cell(1, ONE, time_us=float("inf"))]}))
    assert tables.read(path) == FULL
    assert len(list(tmp_path.iterdir())) == 1


def check_shipped() -> None:
    """Shipped tables, however many, are valid and decide each of their cells; a table of other kernels is not used."""
    for path in tables.files.shipped():
        found = tables.read(path)
        assert found.manifest.provenance == "measured"
        assert found.manifest.kernel_fingerprint == fingerprint.kernels()
        target = named(found.manifest.arch)
        serving = Tables.of(target, [])
        for problem, cells in found.entries.items():
            for c in cells:
                assert c.config.invalid_reason(problem, target) is None
                choice = serving.choose(problem, c.batch)
                assert (choice.source, choice.table, choice.cell) == ("table", f"shipped {path.name}", c)


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Table], None]]:
    """Lets a table be shipped beside those of the package, as `made.json`."""
    monkeypatch.delenv("REPLAYSSM_TABLES", raising=False)
    in_the_tree = tables.shipped()

    def put(given: Table) -> None:
        tables.write(tmp_path / "made.json", given)
        monkeypatch.setattr(tables.files, "shipped", lambda: [tmp_path / "made.json", *in_the_tree])
        tables.forget()

    yield put
    monkeypatch.undo()
    tables.forget()


def test_shipped_tables_are_valid_and_decide_every_one_of_their_cells() -> None:
    check_shipped()


# So many heads a group that no table in the tree has a cell that answers, however near.
LONE = dataclasses.replace(WIDE, heads=1024, groups=8)


def test_what_may_be_shipped(ship: Callable[[Table], None]) -> None:
    ship(table({LONE: [cell(1, SPLIT), cell(64, TWO)]}))
    check_shipped()
    for bad in (
        table({LONE: [cell(64, TWO)]}, provenance="estimated"),
        table({LONE: [cell(64, TWO)]}, kernel_fingerprint="0" * 64),
        table({LONE: [cell(64, TileConfig(3))]}),  # does not divide a group's heads
        table({LONE: [cell(64, TWO)]}, gpu_name="NVIDIA H100 80GB HBM3"),  # serves no target that has a name
    ):
        ship(bad)
        with pytest.raises(AssertionError):
            check_shipped()


def test_explain_says_that_a_shipped_table_decides(ship: Callable[[Table], None]) -> None:
    one = dataclasses.replace(LONE, tokens=1)
    rule = str(explain(problem=LONE, batch=64, target="h200"))
    assert "default rule" in rule and TWO.label() not in rule
    ship(table({LONE: [cell(64, TWO)], one: [cell(16, SPLIT)]}))
    for problem, batch, config in ((LONE, 64, TWO), (one, 16, SPLIT)):
        found = explain(problem=problem, batch=batch, target="h200")
        assert found.config == config
        assert f"measured table for this problem, bucket {batch}" in str(found)
        assert "shipped made.json" in str(found)


# ---- look-up ---------------------------------------------------------------------------------------


def lookup(*given: Table, target: Target = H200) -> Tables:
    return Tables(target, tuple((f"t{i}", t) for i, t in enumerate(given)))


@pytest.mark.parametrize(
    ("batch", "bucket"), [(1, 1), (16, 16), (17, 16), (31, 16), (32, 64), (63, 64), (64, 64), (65, 128), (128, 128)]
)
def test_exact_problem_takes_the_bucket_at_or_above_within_twice_the_batch_else_the_nearest(
    batch: int, bucket: int
) -> None:
    found = lookup(table({WIDE: [cell(1, SPLIT), cell(16, ONE), cell(64, FOUR), cell(128, TWO)]}))
    choice = found.choose(WIDE, batch)
    assert (choice.source, choice.provenance, choice.table) == ("table", "measured", "t0")
    assert choice.cell is not None and choice.cell.batch == bucket
    assert choice.config == {1: SPLIT, 16: ONE, 64: FOUR, 128: TWO}[bucket]


def test_between_two_buckets_that_are_both_within_reach_a_tie_goes_up() -> None:
    found = lookup(table({WIDE: [cell(4, ONE), cell(36, FOUR)]}))  # 12 is three times the one, a third of the other
    assert [found.choose(WIDE, b).config for b in (11, 12, 13)] == [ONE, FOUR, FOUR]


def test_above_the_last_bucket_the_problems_own_last_cell_is_nearest() -> None:
    choice = lookup(FULL).choose(WIDE, 65)
    assert (choice.source, choice.config, choice.problem) == ("nearest", FOUR, WIDE)
    assert "bucket 64" in choice.reason


def test_a_problems_own_cell_within_reach_goes_before_others_nearer_in_work() -> None:
    with_z = dataclasses.replace(WIDE, has_z=True)
    found = lookup(table({WIDE: [cell(64, FOUR)], with_z: [cell(128, TWO)]}))
    assert [found.choose(WIDE, b).config for b in (64, 100, 256)] == [FOUR, FOUR, FOUR]
    assert found.choose(WIDE, 257).config == TWO, "beyond four times its work another one's answers"


def test_the_packages_estimates_answer_only_where_no_other_table_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured cells of other batches go before a problem's estimates, and these before other problems' cells."""
    other, third = (dataclasses.replace(WIDE, has_z=z, tokens=t) for z, t in ((True, WIDE.tokens), (False, 3)))
    measured = tmp_path / "measured.json"
    files.write(measured, table({WIDE: [cell(64, FOUR)]}))
    estimates = tmp_path / "estimated" / files.slug(H200.name) / "estimates.json"
    estimates.parent.mkdir(parents=True)
    files.write(estimates, table({WIDE: [cell(100, TWO)], other: [cell(64, TWO)]}, provenance="estimated"))
    monkeypatch.setattr(files, "estimated_folder", lambda: tmp_path / "estimated")
    monkeypatch.setattr(files, "shipped", list)
    found = Tables.of(H200, [measured, files.ESTIMATED])
    assert [found.choose(WIDE, b).config for b in (64, 100)] == [FOUR, FOUR]
    assert found.choose(WIDE, 300).config == TWO
    assert found.choose(other, 64).config == TWO
    assert found.choose(third, 64).config == FOUR, "which no table knows"


@pytest.mark.parametrize(
    ("batch", "source"),
    [(2, "table"), (4, "table"), (5, "default"), (15, "default"), (16, "table"), (257, "default")],
)
def test_a_cell_answers_only_near_its_own_batch(batch: int, source: str) -> None:
    """Buckets 1 and 64: between 4 and 16, and above 256, neither says anything, and the default rule knows better."""
    choice = lookup(FULL).choose(WIDE, batch)
    assert choice.source == source
    if source == "default":
        assert choice.config == default_config(WIDE, H200, batch)
        assert "no table has a cell within 4x of this work" in choice.reason


def test_another_problems_cell_reaches_as_far_in_work() -> None:
    half = dataclasses.replace(WIDE, heads=64, groups=4)
    found = lookup(table({half: [cell(64, TWO)]}))  # the work of 32 rows
    sources = {batch: found.choose(WIDE, batch).source for batch in (7, 8, 32, 128, 129)}
    assert sources == {7: "default", 8: "nearest", 32: "nearest", 128: "nearest", 129: "default"}


def test_earlier_tables_override_later_ones() -> None:
    user = table({WIDE: [cell(4, TWO)]})
    assert lookup(user, FULL).choose(WIDE, 1).config == TWO
    assert lookup(FULL, user).choose(WIDE, 1).config == SPLIT


def test_nearest_is_by_batch_times_heads_then_tokens_then_window_then_the_rest() -> None:
    half = dataclasses.replace(WIDE, heads=64, groups=4)  # the same heads per group
    t3 = dataclasses.replace(WIDE, tokens=3)
    w15 = dataclasses.replace(WIDE, window=15)
    with_z = dataclasses.replace(WIDE, has_z=True)
    # 128 heads x batch 32 = 64 heads x batch 64
    assert lookup(table({half: [cell(64, TWO)], t3: [cell(16, ONE)]})).choose(WIDE, 32).config == TWO
    assert lookup(table({t3: [cell(32, TWO)], w15: [cell(32, ONE)]})).choose(WIDE, 32).config == ONE
    assert lookup(table({w15: [cell(32, TWO)], with_z: [cell(32, ONE)]})).choose(WIDE, 32).config == ONE
    # of one problem, the bucket that would answer for itself
    both = lookup(table({with_z: [cell(16, TWO), cell(64, FOUR)]}))
    assert [both.choose(WIDE, batch).config for batch in (20, 31, 32, 40)] == [TWO, TWO, FOUR, FOUR]


def test_a_state_that_is_rounded_to_nearest_answers_for_one_that_is_rounded_by_chance() -> None:
    nearest = dataclasses.replace(WIDE, state_dtype="f16")
    choice = lookup(table({nearest: [cell(32, FOUR)]})).choose(dataclasses.replace(nearest, philox_rounds=5), 32)
    assert (choice.source, choice.config, choice.problem) == ("nearest", FOUR, nearest)


@pytest.mark.parametrize(
    "change",
    [
        {"state_dtype": "bf16"},
        {"io_dtype": "f16", "dt_dtype": "f16"},
        {"head_dim": 128},
        {"d_state": 64},
        {"groups": 4},
    ],
)
def test_incomparable_problems_do_not_answer(change: dict[str, Any]) -> None:
    other = dataclasses.replace(WIDE, **change)
    choice = lookup(table({other: [cell(32, SPLIT)]})).choose(WIDE, 32)
    assert (choice.source, choice.config) == ("default", default_config(WIDE, H200, 32))
    assert "no table knows a comparable problem" in choice.reason


@pytest.mark.parametrize(
    ("known", "asked", "answers"),
    [
        ((4, 16), (1, 16), True),
        ((1, 16), (8, 16), True),
        ((8, 16), (9, 16), False),  # one more tile of tokens
        ((16, 16), (9, 16), True),
        ((1, 16), (32, 64), False),
        ((4, 16), (4, 8), True),
        ((4, 16), (4, 7), False),  # more than twice as long
        ((4, 8), (4, 17), False),
        ((4, 16), (4, 20), True),
        ((4, 16), (4, 24), False),  # more than a quarter longer
        ((4, 16), (4, 25), False),  # a long window
        ((4, 24), (4, 16), True),
        ((4, 32), (4, 48), True),
        ((4, 32), (4, 49), False),  # more than one and a half times as long
        ((4, 64), (4, 32), False),
        ((4, 32), (4, 24), False),
    ],
)
def test_a_cell_answers_for_no_problem_whose_tokens_or_window_are_far(
    known: tuple[int, int], asked: tuple[int, int], answers: bool
) -> None:
    """The default rule serves instead, says so, and is what such a problem is prepared for."""
    have, want = (dataclasses.replace(WIDE, tokens=t, window=w) for t, w in (known, asked))
    found = lookup(table({have: [cell(64, SPLIT)]}))
    choice = found.choose(want, 64)
    assert (choice.source == "nearest") is answers
    assert (SPLIT in found.candidates(want)) is (
        answers or SPLIT in {default_config(want, H200, b) for b in range(600)}
    )
    if not answers:
        assert (choice.source, choice.provenance, choice.table) == ("default", None, None)
        assert choice.config == default_config(want, H200, 64)
        assert (
            choice.reason == f"no table knows this geometry with a T and W near {asked[0]} and {asked[1]}; default rule"
        )


def test_cells_whose_config_is_invalid_here_are_passed_over() -> None:
    small = dataclasses.replace(H200, shared_per_block=TWO.shared_bytes(WIDE) - 1)
    cells = table({WIDE: [cell(8, TWO), cell(16, ONE)]})
    assert lookup(cells).choose(WIDE, 4).config == TWO
    assert lookup(cells, target=small).choose(WIDE, 4).config == ONE
    assert lookup(table({WIDE: [cell(8, TWO)]}), target=small).choose(WIDE, 4).source == "default"


def test_candidates_are_all_answers_up_to_batch_256() -> None:
    found = lookup(table({WIDE: [cell(1, SPLIT), cell(7, TWO)], dataclasses.replace(WIDE, tokens=3): [cell(300, ONE)]}))
    answers = {found.choose(WIDE, b).config for b in range(1, 1500)}
    assert answers <= set(found.candidates(WIDE))
    # between two buckets above the grid's fine part, one batch alone may go to another cell
    far = lookup(table({WIDE: [cell(1000, SPLIT), cell(2003, TWO)], SMALL: [cell(8, ONE)]}))
    assert far.choose(WIDE, 1001).config == SPLIT and far.choose(WIDE, 1002).config == TWO
    assert {SPLIT, TWO} <= set(far.candidates(WIDE))
    assert {SPLIT, TWO, ONE} <= set(found.candidates(WIDE))
    default = {default_config(SMALL, H200, b) for b in (1, 10, 100, 1000, 10_000)}
    assert default <= set(lookup().candidates(SMALL))


def test_measured_tables_come_before_estimated_ones_and_user_before_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    estimated, measured, ship = tmp_path / "e.json", tmp_path / "m.json", tmp_path / "s.json"
    tables.write(estimated, table({WIDE: [cell(64, ONE)]}, provenance="estimated"))
    tables.write(measured, table({WIDE: [cell(64, TWO)]}))
    tables.write(ship, table({WIDE: [cell(64, FOUR)]}))
    monkeypatch.setattr(tables.files, "shipped", lambda: [ship])
    found = Tables.of(H200, [estimated, measured])
    assert [n for n, _ in found.tables] == [str(measured), str(estimated), "shipped s.json"]
    only = Tables.of(H200, [estimated]).choose(WIDE, 64)
    assert (only.config, only.provenance) == (ONE, "estimated")


def test_environment_names_user_tables_and_use_overrides_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    tables.write(first, table({WIDE: [cell(64, TWO)]}))
    tables.write(second, table({WIDE: [cell(64, ONE)]}))
    monkeypatch.setenv("REPLAYSSM_TABLES", f"{first}{os.pathsep}{second}")
    tables.forget()
    try:
        assert tables.choose(WIDE, 64, H200).config == TWO
        tables.use([second])
        assert tables.choose(WIDE, 64, H200).config == ONE
    finally:
        monkeypatch.delenv("REPLAYSSM_TABLES")
        tables.use(None)


def test_answers_are_remembered_and_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    tables.write(first, table({WIDE: [cell(64, TWO)]}))
    tables.write(second, table({WIDE: [cell(64, ONE)]}))
    monkeypatch.setattr(tables.files, "shipped", list)
    found: list[tuple[Problem, int]] = []
    look_up = Tables._found
    monkeypatch.setattr(Tables, "_found", lambda self, p, b: found.append((p, b)) or look_up(self, p, b))  # type: ignore[func-returns-value]
    try:
        tables.use([first])
        same, other = Problem.from_json(WIDE.to_json()), dataclasses.replace(WIDE, state_dtype="f16")
        assert same is not WIDE
        for problem in (WIDE, WIDE, same, other, WIDE):
            expected = TWO if problem == WIDE else default_config(other, H200, 64)
            assert tables.choose(problem, 64, H200).config == expected
        assert tables.choose(WIDE, 65, H200).source == "nearest"
        assert tables.choose(WIDE, 64, named("b200")).source == "default"  # another GPU has answers of its own
        assert found[:3] == [(WIDE, 64), (other, 64), (WIDE, 65)]
        tables.use([second])
        assert tables.choose(WIDE, 64, H200).config == ONE
    finally:
        tables.use(None)


def test_not_more_is_remembered_than_a_server_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables.lookup, "_KEPT", 5)
    few = lookup(table({WIDE: [cell(64, TWO)]}))
    for batch in range(1, 40):
        for problem in (WIDE, *(dataclasses.replace(WIDE, heads=WIDE.heads * n) for n in range(2, 9))):
            assert few.choose(problem, batch) == few._found(problem, batch)
    assert len(few._answers) <= 5 and all(len(answers) <= 5 for answers in few._answers.values())


@pytest.mark.fault(34)
def test_each_inexact_answer_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    tables.forget()
    monkeypatch.setattr(tables.lookup, "_loaded", {H200: lookup()})
    with caplog.at_level(logging.INFO, "replayssm_cute"):
        for batch in (1, 1, 2, 3):
            tables.choose(WIDE, batch, H200)
    tables.forget()
    assert len(caplog.records) == 1
    assert "default rule" in caplog.records[0].message
