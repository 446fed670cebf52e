"""The step that compiles all shipped configs: what it collects, and what it complains of."""

from __future__ import annotations

import dataclasses

import compile_shipped
import pytest
from fakes import H200, RESOURCES, SMALL

from replayssm_cute import compiler
from replayssm_cute.config import TileConfig
from replayssm_cute.tables import files

PLAIN = TileConfig()
ITEM = (SMALL, PLAIN, H200)
GOOD = dataclasses.replace(RESOURCES, shared_bytes=PLAIN.shared_bytes(SMALL), stack_bytes=0)


def test_every_table_is_in_it_and_no_kernel_twice() -> None:
    items = compile_shipped.shipped()
    names = {(p, c, t.arch) for p, c, t in items}
    assert len(names) == len(items) > 20
    for path in files.shipped():
        table = files.read(path)
        for problem, cells in table.entries.items():
            assert {(problem, cell.config, table.manifest.arch) for cell in cells} <= names


@pytest.mark.parametrize(
    ("done", "text"),
    [
        (compiler.Done(ITEM, "compiled", 1.0, GOOD), None),
        (compiler.Done(ITEM, "compiled", 1.0, None, "ptxas said no"), "ptxas said no"),
        (compiler.Done(ITEM, "compiled", 1.0, dataclasses.replace(GOOD, stack_bytes=8)), "8 bytes of local memory"),
        (compiler.Done(ITEM, "compiled", 1.0, dataclasses.replace(GOOD, shared_bytes=1)), "1 bytes of shared memory"),
    ],
    ids=["good", "error", "spills", "shared memory"],
)
def test_what_is_wrong_is_told(done: compiler.Done, text: str | None) -> None:
    found = compile_shipped.complaint(done)
    assert found is None if text is None else text in (found or "")


def test_what_was_measured_may_spill() -> None:
    spills = compiler.Done(ITEM, "compiled", 1.0, dataclasses.replace(GOOD, stack_bytes=8))
    assert compile_shipped.complaint(spills, {(SMALL, PLAIN, H200.arch)}) is None
    assert compile_shipped.complaint(spills, {(SMALL, TileConfig(2), H200.arch)}) is not None
    names = {(p, c, t.arch) for p, c, t in compile_shipped.shipped()}
    assert compile_shipped.measured() < names


def test_its_exit_status_and_its_limit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    bad = compiler.Done(ITEM, "compiled", 1.0, None, "ptxas said no")

    def compile_many(items: list[compiler.Item], workers: int, progress: object) -> None:
        progress(bad, 1, len(items))  # type: ignore[operator]

    monkeypatch.setattr(compiler, "compile_many", compile_many)
    assert compile_shipped.main([]) == 1 and "ptxas said no" in capsys.readouterr().err
    assert compile_shipped.main(["--minutes", "0"]) == 1 and "were left out" in capsys.readouterr().out
