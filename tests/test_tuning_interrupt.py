"""What is left of a sweep that ends early, by Ctrl-C or a failure: its table, and its folder in one archive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from replayssm_tuning import archive, cli, interrupt, on_device
from replayssm_tuning.errors import UsageError
from replayssm_tuning.progress import Budget
from replayssm_tuning.worker import Answer
from tuning_fakes import PLAN, Compiler, Device

from replayssm_cute import compiler, tables

TABLE = "nvidia-h200-sm_90a-measured.table.json"


@pytest.fixture(autouse=True)
def _interrupts_are_heard() -> Iterator[None]:
    """A shell that runs something in the background lets it ignore SIGINT, and what that starts too."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Pressed(Device):
    """The device of a sweep at whose terminal Ctrl-C is pressed during the timings that `at` numbers."""

    at: ClassVar[tuple[int, ...]] = ()
    timed: ClassVar[list[tuple[int, int]]] = []  # T and batch of each

    def __init__(self, *_: object, **__: object) -> None:
        super().__init__()

    def __enter__(self) -> Pressed:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Answer:
        if name == "time":
            self.timed.append((kwargs["problem"]["tokens"], kwargs["batch"]))
            if len(self.timed) in self.at:
                os.kill(os.getpid(), signal.SIGINT)
        return super().call(name, timeout_s=timeout_s, **kwargs)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.toml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compiler, "compile_many", Compiler())
    monkeypatch.setattr(on_device, "Worker", Pressed)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr(Pressed, "at", ())
    monkeypatch.setattr(Pressed, "timed", [])
    return tmp_path


SWEEP = ["sweep", "--plan", "small.toml", "--out", "out"]


def cells(folder: Path) -> list[tuple[int, int]]:
    return [(p.tokens, c.batch) for p, found in tables.read(folder / "out" / TABLE).entries.items() for c in found]


def test_ctrl_c_leaves_the_table_of_what_was_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(SWEEP) == 0
    whole, order = cells(folder), list(dict.fromkeys(Pressed.timed))
    third = Pressed.timed.index(order[2])  # the timings of the first two cells
    for file in (folder / "out").iterdir():
        file.unlink()
    Pressed.timed.clear()
    monkeypatch.setattr(Pressed, "at", (third,))  # the last of the second cell
    capsys.readouterr()
    assert cli.main([*SWEEP, "--archive", "home.tar.gz"]) == 130
    said = capsys.readouterr()
    assert "interrupted: writing what there is; Ctrl-C again stops at once\n" in said.err
    assert f"interrupted: {Path('out') / TABLE} has what was done; the same command goes on from there\n" in said.err
    assert sorted(cells(folder)) == sorted(order[:2])
    assert "2 of 4 cells have no time" in said.out
    with tarfile.open("home.tar.gz") as packed:
        assert f"out/{TABLE}" in packed.getnames()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    Pressed.timed.clear()
    monkeypatch.setattr(Pressed, "at", ())
    assert cli.main(SWEEP) == 0
    assert set(Pressed.timed) == set(order[2:])  # nothing is timed twice
    assert cells(folder) == whole


def test_a_second_ctrl_c_stops_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Twice(Pressed):
        def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Answer:
            if name == "heat":
                os.kill(os.getpid(), signal.SIGINT)
            return super().call(name, timeout_s=timeout_s, **kwargs)

    monkeypatch.setattr(on_device, "Worker", Twice)
    monkeypatch.setattr(Pressed, "at", (30,))
    assert cli.main(SWEEP) == 130
    assert "interrupted; the same command goes on where it stopped" in capsys.readouterr().err
    assert not (folder / "out" / TABLE).exists()
    assert len((folder / "out" / "journal.jsonl").read_text().splitlines()) > 30


def test_ctrl_c_before_any_time_says_that_there_is_no_table(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compile_many(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        raise KeyboardInterrupt  # of a compile process: the terminal tells all of them

    monkeypatch.setattr(compiler, "compile_many", compile_many)
    assert cli.main(SWEEP) == 130
    assert "interrupted: no table was written: no kernel compiled" in capsys.readouterr().err


def test_ctrl_c_ends_the_repeats(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(SWEEP) == 0
    count = len(Pressed.timed)
    for file in (folder / "out").iterdir():
        file.unlink()
    Pressed.timed.clear()
    monkeypatch.setattr(Pressed, "at", (count + 5,))  # in the second of three
    assert cli.main([*SWEEP, "--repeat", "3"]) == 130
    assert len(Pressed.timed) == count + 5
    assert len(cells(folder)) == 4  # the table is the first repeat's


def test_another_thread_leaves_signals_alone() -> None:
    before, found = signal.getsignal(signal.SIGINT), []

    def inside() -> None:
        with interrupt.ends(Budget(1.0)):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_process_that_is_interrupted_writes_its_estimates(tmp_path: Path) -> None:
    """A real process with a real compiler, told by a real signal."""
    (tmp_path / "small.toml").write_text(PLAN)
    command = [sys.executable, "-m", "replayssm_tuning", "sweep", "--plan", "small.toml", "--targets", "sm_90a"]
    process = subprocess.Popen(
        [*command, "--out", "out", "--workers", "1", "--budget", "10m"],
        cwd=tmp_path,
        env={**os.environ, "REPLAYSSM_CACHE_DIR": str(tmp_path / "cache")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    try:
        journal, deadline = tmp_path / "out" / "journal.jsonl", time.monotonic() + 120
        while time.monotonic() < deadline and (not journal.exists() or journal.read_text().count("\n") < 3):
            assert process.poll() is None
            time.sleep(0.2)
        os.killpg(process.pid, signal.SIGINT)  # the whole group, as a terminal does
        out, error = process.communicate(timeout=90)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 130, error
    table = tables.read(tmp_path / "out" / "nvidia-h200-sm_90a-estimated.table.json")
    assert len(table.entries) >= 1
    said = out + error.split("interrupted: writing")[0]
    # a compile process that the signal met while it started may say so; the command itself may not
    assert said.count("Traceback") <= said.count("spawn_main"), said


# ---- archives --------------------------------------------------------------------------------------


def test_an_archive_holds_the_folder_byte_for_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SWEEP, "--archive", "out/all.tar.gz"]) == 0
    assert cli.main(["report", "out"]) == 0
    assert cli.main([*SWEEP, "--archive", "out/all.tar.gz"]) == 0  # not into itself
    said = capsys.readouterr().out
    with tarfile.open("out/all.tar.gz") as packed:
        packed.extractall(folder / "home", filter="data")
    files = [p for p in (folder / "out").rglob("*") if p.is_file() and p.suffix != ".gz" and p.name[0] != "."]
    names = {p.relative_to(folder / "out") for p in files}
    assert {Path(TABLE), Path("journal.jsonl"), Path("report.html")} <= names
    home = folder / "home" / "out"
    assert {p.relative_to(home) for p in home.rglob("*") if p.is_file()} == names
    assert all((home / name).read_bytes() == (folder / "out" / name).read_bytes() for name in names)
    assert f"archive out/all.tar.gz: {len(names)} files of out" in said
    # what came home goes on as if it had been measured here
    Pressed.timed.clear()
    assert cli.main(["sweep", "--plan", "small.toml", "--out", "home/out"]) == 0
    assert Pressed.timed == []


def test_a_failed_sweep_is_packed_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Dead(Pressed):
        def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Answer:
            return Answer(False, None, "error", "RuntimeError: no device")

    monkeypatch.setattr(on_device, "Worker", Dead)
    assert cli.main([*SWEEP, "--archive", "home.tgz"]) == 1
    assert "no device" in capsys.readouterr().err
    with tarfile.open("home.tgz") as packed:
        assert packed.getnames() == ["out/journal.jsonl"]


@pytest.mark.parametrize("name", ["home.zip", "home", "there.tgz"])
def test_a_wrong_archive_name_is_refused_before_any_work(
    folder: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (folder / "there.tgz").mkdir()
    assert cli.main([*SWEEP, "--archive", name]) == 2
    assert f"--archive: got {name}, expected" in capsys.readouterr().err
    assert not (folder / "out").exists()
    with pytest.raises(UsageError):
        archive.check_name(Path(name))


def test_an_archive_is_replaced_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "in").mkdir()
    (folder / "in" / "a").write_text("a")
    (folder / "x.tgz").write_text("before")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tarfile.TarFile, "add", full)
    with pytest.raises(OSError, match="No space"):
        archive.pack(folder / "in", folder / "x.tgz")
    assert (folder / "x.tgz").read_text() == "before"
    assert sorted(p.name for p in folder.iterdir()) == ["in", "small.toml", "x.tgz"]
