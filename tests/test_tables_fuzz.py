"""Damaged table files of both kinds, thousands of them: each is refused with one line, or what it says can run."""

from __future__ import annotations

import copy
import json
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import H200, SMALL

from replayssm_cute import fingerprint, tables
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import overlap
from replayssm_cute.fused.chains import Chain, ConvCut, NormCut, Overlap
from replayssm_cute.fused.problem import LayerProblem
from replayssm_cute.fused.shapes import conv_shape, norm_shape
from replayssm_cute.problem import Problem
from replayssm_cute.tables import Cell, Manifest, Table, TableError, Tables

WIDE = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
BATCHES = (1, 7, 64, 5000, 1 << 30)
COUNT = 3000
# What JSON can hold where something else is expected.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 1.0, 0.5, -0.0, 1e308, 1e-320, 2**31 - 1, 2**31, 2**63, -(2**63), 10**400,
    10**4000, float("nan"), float("inf"), -float("inf"), "", "x", "1", "chain", "a\nb", "\ud800", "\x1b[31m",
    "é" * 5000, [], [1], [[]], {}, {"a": 1}, {"batch": 1}, [None] * 3,
)  # fmt: skip


def step_table() -> dict[str, Any]:
    manifest = Manifest(
        H200.name, H200.arch, H200.sms, "measured", fingerprint.kernels(), "2026-11-29T00:00:00Z", "580.1",
        {"torch": "2.13.0"}, {"repeats": 5}, {"uniform": 4},
    )  # fmt: skip
    one = Cell(1, TileConfig(head_split=2), 10.0, 1e6, 100.0, 0.02, TileConfig(), 11.0, 0.1, 12.0, {"flashinfer": 12.5})
    many = Cell(64, TileConfig(4, 2, tail_rows=8, parallel_heads=2), 90.0, 1e8, 4000.0, 0.9)
    return Table(manifest, {WIDE: (one, many), SMALL: (one,)}).to_json()


def layer_table() -> dict[str, Any]:
    plain = Chain(Overlap.INNER_X, TileConfig(heads_per_cta=2, tail_rows=8), ConvCut(4, 64, each=2), NormCut(4, 2, 100))
    promised = Chain(Overlap.ALL_X, None, ConvCut(4, 64, soon=True, ahead=True), None)
    times = {str(kind): 10.0 + i for i, kind in enumerate(Overlap)}
    chains = {"plain": plain.to_json(), "promised": promised.to_json()}
    return {
        "schema": overlap.SCHEMA, "gpu_name": H200.name, "arch": H200.arch, "kernel_fingerprint": fingerprint.kernels(),
        "layer_kernel_fingerprint": fingerprint.kernels("fused"),
        "entries": [{"problem": WIDE.to_json(), "buckets": [
            {"batch": 4, "times_us": times, "chains": chains}, {"batch": 64, "times_us": times},
        ]}],
    }  # fmt: skip


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
        yield (*at, key)
        yield from places(node[key], (*at, key))


def damaged(whole: dict[str, Any], draw: random.Random) -> bytes:
    """A file with one to three slips in its values, or with bytes that went wrong."""
    data = copy.deepcopy(whole)
    for _ in range(draw.choice((1, 1, 2, 3))):
        if not (at := list(places(data))):
            break
        *path, key = draw.choice(at)
        node = data
        for step in path:
            node = node[step]
        match draw.randrange(6):
            case 0:
                del node[key]
            case 1 if isinstance(node, dict):
                node[draw.choice(("extra", "schema", "batch", "é", "a\nb"))] = draw.choice(VALUES)
            case 2 if isinstance(node, list):
                node.insert(draw.randrange(len(node) + 1), copy.deepcopy(node[key]))
            case 3:
                _, *other = draw.choice(at), *draw.choice(at)  # a value from elsewhere in the table
                found: Any = whole
                for step in other:
                    try:
                        found = found[step]
                    except (KeyError, IndexError, TypeError):
                        break
                node[key] = copy.deepcopy(found)
            case _:
                node[key] = draw.choice(VALUES)
    text = bytearray(json.dumps(data).encode())
    match draw.randrange(12):
        case 0:
            del text[draw.randrange(len(text)) :]
        case 1:
            text[draw.randrange(len(text))] = draw.randrange(256)
        case 2:
            at_byte = draw.randrange(len(text))
            text[at_byte:at_byte] = draw.choice((b"[" * 20_000, b'{"a":' * 20_000, b"9" * 5000, b"\0", b'"schema":1,'))
    return bytes(text)


def refusal(read: Callable[[Path], Any], path: Path) -> str | None:
    try:
        read(path)
    except TableError as error:
        return str(error)
    return None


def check_line(said: str) -> None:
    assert said and said.isprintable() and len(said) < 500, said


def survivors(
    read: Callable[[Path], Any], origin: Callable[[Any], Any], whole: Any, part: int, folder: Path
) -> tuple[int, list[Any]]:
    """How many damaged files are refused with a line, and the tables of those that are read and may serve.

    Args:
        origin: what of a table has `unusable_reason`.
        whole: the table before the damage.
    """
    draw, path = random.Random(part), folder / "t.json"
    refused, served = 0, []
    for _ in range(COUNT // 3):
        path.write_bytes(damaged(whole, draw))
        if (said := refusal(read, path)) is not None:
            check_line(said)
            refused += 1
            continue
        table = read(path)
        if why := origin(table).unusable_reason(H200):
            check_line(why)
        else:
            served.append(table)
    return refused, served


@pytest.mark.parametrize("part", range(3))
def test_a_damaged_table_of_the_step_is_refused_or_harmless(part: int, tmp_path: Path) -> None:
    refused, served = survivors(tables.read, lambda table: table.manifest, step_table(), part, tmp_path)
    for read in served:
        found = Tables(H200, (("t", read),))
        for problem in (WIDE, SMALL):
            for batch in BATCHES:
                choice = found.choose(problem, batch)
                assert choice.config.is_valid(problem, H200)
                check_line(choice.reason)
            assert found.candidates(problem)
    assert refused > 500 and len(served) > 20  # what is served has slips in numbers that only mean something else


@pytest.mark.parametrize("part", range(3))
def test_a_damaged_table_of_decode_steps_is_refused_or_harmless(part: int, tmp_path: Path) -> None:
    layer = LayerProblem(WIDE, "bf16", None, "bf16", 8)
    refused, served = survivors(overlap.read, lambda table: table, layer_table(), part, tmp_path)
    for read in served:
        for cell in (read.cell(WIDE, batch) for batch in BATCHES):
            for promised in (False, True) if cell is not None else ():
                assert cell is not None
                chain = cell.chain(promised)
                kind = chain.overlap
                assert promised or not kind.first
                assert chain.config is None or chain.config.is_valid(WIDE, H200)
                conv = conv_shape(layer, 4, chained=kind.chained, pdl=kind.first, with_x=not kind.x_in_step)
                assert chain.conv is None or chain.conv.of(conv).threads
                assert chain.norm is None or chain.norm.of(norm_shape(layer, chained=kind.chained)).pieces
                assert chain.label()
    assert refused > 500 and len(served) > 20


@pytest.mark.parametrize("read", [tables.read, overlap.read], ids=["step", "layer"])
@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"schema": 1, "schema": 1}', "a name comes twice: 'schema'"),
        (b'{"schema": NaN}', "NaN is no number"),
        (b'{"schema": -Infinity}', "-Infinity is no number"),
        (b"[" * 500_000, "it is no JSON"),
        (b'{"schema": ' + b"9" * 5000 + b"}", "it is no JSON"),
        (b'{"schema": "' + b"x" * 5000 + b'"}', "its schema is 'xxx"),
        (b"\xff\xfe\x00", "it is no JSON"),
        (b'{"schema": 1, "a\\nb": 1}', "fields "),
        (b"7", "got int, expected an object"),
    ],
)
def test_what_is_no_such_json(read: Callable[[Path], Any], text: bytes, said: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_bytes(text)
    found = refusal(read, tmp_path / "t.json")
    assert found is not None and said in found
    check_line(found)


@pytest.mark.parametrize("read", [tables.read, overlap.read], ids=["step", "layer"])
def test_what_is_no_file_or_too_large(read: Callable[[Path], Any], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer for ever
    for path, said in (
        (tmp_path / "pipe", "it is no regular file"),
        (Path("/dev/zero"), "it is no regular file"),
        (tmp_path, "it cannot be read"),
        (tmp_path / "none", "it cannot be read"),
        (Path("a\0b"), "it is no JSON"),
    ):
        assert said in str(refusal(read, path))
    with (tmp_path / "large").open("wb") as file:
        file.truncate(tables.fields.MAX_BYTES + 1)
    assert "it is larger than" in str(refusal(read, tmp_path / "large"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"conv": {"vector": -7}}, "vector: got -7, expected 2, 4 or 8"),
        ({"conv": {"vector": 4.0}}, "conv: vector is 4.0, expected an int"),
        ({"conv": {"threads": "x"}}, "conv: threads is 'x', expected an int"),
        ({"conv": {"threads": 96000}}, "threads: got 96000"),
        ({"conv": {"each": 3}}, "each: got 3, expected a divisor of 4 tokens"),
        ({"conv": {"carveout": True}}, "conv: carveout is True, expected an int or None"),
        ({"conv": {"late": 1}}, "conv: late is 1, expected a bool"),
        ({"conv": [1]}, "conv: got list, expected an object"),
        ({"conv": {"ahead": True}}, "expected neither soon nor ahead"),
        ({"norm": {"warps": 0}}, "warps: got 0, expected 1..32"),
        ({"norm": {"warps": [1]}}, r"norm: warps is [1], expected an int"),
        ({"norm": {"warps": 1, "together": 3}}, "together: got 3"),
        ({"norm": {"warps": 1, "carveout": 101}}, "carveout: got 101"),
        ({"early": "false"}, "chain: early is 'false', expected a bool"),
        ({"overlap": ["chain"]}, "is not a valid Overlap"),
        ({"overlap": str(Overlap.ALL)}, "whose conv may not start early"),
        ({"config": {"tail_rows": 2**40}}, "tail_rows is 1099511627776, expected less than 2^31"),
        ({"config": {"heads_per_cta": "3"}}, "heads_per_cta is '3'"),
        ({"config": {"heads_per_cta": 3}}, "heads_per_cta 3 does not divide 16 heads per group"),
        ({"config": {"heads_per_cta": 16, "stages": 16}}, "bytes of shared memory"),
        ({"hidden": 1}, "unknown fields ['hidden']"),
    ],
)
def test_a_chain_that_cannot_run_costs_its_table_and_one_line(
    change: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    data = layer_table()
    data["entries"][0]["buckets"][0]["chains"] = {"plain": {"overlap": str(Overlap.INNER_X)} | change}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    monkeypatch.setattr(overlap, "FOLDER", tmp_path / "shipped")
    monkeypatch.setenv("REPLAYSSM_LAYER_TABLES", str(path))
    overlap.forget()
    with caplog.at_level(logging.WARNING, "replayssm_cute"):
        assert overlap.choose(WIDE, 4, H200, promised=False) == Chain(Overlap.INNER)
        assert overlap.candidates(WIDE, H200, promised=True) == (Chain(Overlap.ALL),)
    overlap.forget()
    (line,) = caplog.messages
    assert line.startswith(f"table {path} is not used: ") and said in line and line.isprintable()


def test_two_buckets_or_entries_for_one_thing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    for name, said in (("buckets", "batch 4: two buckets"), ("entries", "two entries for one geometry")):
        data = layer_table()
        where = data if name == "entries" else data["entries"][0]
        where[name].append(copy.deepcopy(where[name][0]))
        path.write_text(json.dumps(data))
        assert said in str(refusal(overlap.read, path))
