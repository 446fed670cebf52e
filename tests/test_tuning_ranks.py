"""Sweeps over several processes: real torchrun, real process groups, stand-ins for compiler and GPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from rank_sweep import Pretended
from replayssm_tuning import cli, on_device, ranks
from replayssm_tuning.errors import SweepError, UsageError
from replayssm_tuning.journal import Journal
from replayssm_tuning.ranks import Ranks
from replayssm_tuning.results import Results
from replayssm_tuning.stability import STABILITY_SUFFIX, Stability
from tuning_fakes import PLAN, Compiler

from replayssm_cute import compiler, tables

SCRIPT = str(Path(__file__).with_name("rank_sweep.py"))
H200 = "nvidia-h200-sm_90a"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.toml").write_text(PLAN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def environment(wish: dict[str, Any], **more: Any) -> dict[str, str]:
    return {
        **os.environ,
        "RANK_SWEEP": json.dumps(wish),
        "OMP_NUM_THREADS": "1",
        **{k: str(v) for k, v in more.items()},
    }


def torchrun(wish: dict[str, Any], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", SCRIPT, "sweep", *arguments]
    return subprocess.run(command, env=environment(wish), capture_output=True, text=True, timeout=60)


def by_hand(wish: dict[str, Any], *arguments: list[str]) -> list[subprocess.Popen[str]]:
    """One process for each argument list, told in the environment what torchrun would tell them; nobody watches."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    size = len(arguments)
    common = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [
        subprocess.Popen(
            [sys.executable, SCRIPT, "sweep", *arguments[n]],
            env=environment(wish, RANK=n, LOCAL_RANK=n, **common),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(size)
    ]


def alone(monkeypatch: pytest.MonkeyPatch, *arguments: str, gpus: int = 0) -> Compiler:
    """The same command in this process, without torchrun; returns its stand-in compiler."""
    stand_in = Compiler()
    monkeypatch.setattr(compiler, "compile_many", stand_in)
    monkeypatch.setattr(on_device, "Worker", Pretended)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert cli.main(["sweep", *arguments]) == 0
    assert not dist.is_initialized()
    return stand_in


def keys(path: Path, kind: str) -> list[str]:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [json.dumps(r["key"], sort_keys=True) for r in records if r["key"]["kind"] == kind]


ESTIMATE = ("--plan", "small.toml", "--targets", "sm_90a,sm_120a")


@pytest.mark.fault(30)
def test_two_ranks_estimate_what_one_does(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = torchrun({}, *ESTIMATE, "--out", "two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("no GPU used") == 1  # rank 0 alone speaks
    compiled = [keys(folder / "two" / f"journal.rank{n}.jsonl", "compile") for n in range(2)]
    asked = alone(monkeypatch, *ESTIMATE, "--out", "one").asked
    assert abs(len(compiled[0]) - len(compiled[1])) <= 1
    assert not set(compiled[0]) & set(compiled[1])
    assert len(compiled[0] + compiled[1]) == len(asked)
    for name in (H200, "nvidia-rtx-pro-6000-blackwell-sm_120a"):
        one, two = (Results.load(folder / out / f"{name}-estimated.results.json") for out in ("one", "two"))
        assert one.cells == two.cells
        assert one.notes == two.notes
        ours, theirs = (tables.read(folder / out / f"{name}-estimated.table.json") for out in ("one", "two"))
        assert ours.entries == theirs.entries
    # one process goes on from the journals of two
    assert alone(monkeypatch, *ESTIMATE, "--out", "two").asked == []


def test_a_killed_rank_ends_the_run_and_one_process_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    death = {"rank": 1, "after": 7, "how": "kill", "once": "out/journal.rank0.jsonl"}
    wish = {"fail": death, "seconds": {"0": 0.05}}  # rank 0 is amid its work
    done = torchrun(wish, *ESTIMATE, "--out", "out")
    assert done.returncode != 0
    assert "error: rank 0: told to end (SIGTERM)" in done.stderr
    assert "the same command goes on from there" in done.stderr
    assert not list(folder.glob("out/*.table.json"))
    saved = [keys(folder / "out" / f"journal.rank{n}.jsonl", "compile") for n in range(2)]
    assert len(saved[1]) == 7
    assert len(saved[0]) > 0
    again = alone(monkeypatch, *ESTIMATE, "--out", "out").asked
    everything = alone(monkeypatch, *ESTIMATE, "--out", "fresh").asked
    assert len(again) == len(everything) - len(saved[0]) - len(saved[1])
    ours, theirs = (tables.read(folder / out / f"{H200}-estimated.table.json") for out in ("out", "fresh"))
    assert ours.entries == theirs.entries


@pytest.mark.parametrize(
    ("how", "words", "code"),
    [
        ("kill", "error: rank 0: a rank was lost before the end of compilation", -9),
        ("sleep", "Ranks 1 failed to pass", None),
        ("raise", "error: rank 1: RuntimeError: the disk is on fire", 1),
    ],
)
def test_nobody_waits_for_ever(folder: Path, how: str, words: str, code: int | None) -> None:
    wish = {"fail": {"rank": 1, "after": 3, "how": how}, "grace": -100}
    first, second = by_hand(wish, *[[*ESTIMATE, "--out", "out"]] * 2)
    try:
        error = first.communicate(timeout=40)[1]
        assert first.returncode == 1
        assert words in error
        if code is not None:
            second.wait(timeout=20)
        assert second.poll() == code
    finally:
        second.kill()
        second.communicate()


def test_ranks_that_want_different_things_do_not_start(folder: Path) -> None:
    processes = by_hand({}, [*ESTIMATE, "--out", "out"], [*ESTIMATE, "--out", "out", "--batches", "2"])
    errors = [p.communicate(timeout=40)[1] for p in processes]
    assert [p.returncode for p in processes] == [1, 1], errors
    assert "rank 1 differs from rank 0 in its plan" in errors[0]
    assert not list(folder.glob("out/*"))


def test_two_ranks_measure_every_cell_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ("--plan", "small.toml", "--batches", "1,8,64", "--repeat", "2", "--out")
    done = torchrun({"gpus": 2}, *arguments, "two")
    assert done.returncode == 0, done.stderr
    alone(monkeypatch, *arguments, "one", gpus=2)
    one, two = (tables.read(folder / out / f"{H200}-measured.table.json") for out in ("one", "two"))
    assert one.entries == two.entries
    assert (one.manifest.policy["ranks"], two.manifest.policy["ranks"]) == (1, 2)
    assert sum(len(cells) for cells in two.entries.values()) == 6
    for kind in ("time", "race", "floor", "peers"):
        shared = [keys(folder / "two" / f"journal.rank{n}.jsonl", kind) for n in range(2)]
        whole = keys(folder / "one" / "journal.jsonl", kind)
        assert all(shared)
        assert sorted(shared[0] + shared[1]) == sorted(whole)
        repeats = {json.loads(k)["policy"]["seed"] for k in whole}
        assert repeats == ({0, 1} if kind in ("time", "race") else {0})
    limits = [keys(folder / "two" / f"journal.rank{n}.jsonl", "limit") for n in range(2)]
    assert (len(limits[0]), len(limits[1])) == (2, 0)  # rank 0's, once a repeat
    stabilities = [Stability.load(folder / out / f"{H200}-measured{STABILITY_SUFFIX}") for out in ("one", "two")]
    assert stabilities[0] == stabilities[1]


# ---------------------------------------------------------------------------------------------------
# Without processes
# ---------------------------------------------------------------------------------------------------


def set_ranks(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **values}.items():
        monkeypatch.setenv(name, value)


def test_the_environment_says_who_we_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Ranks.of_environment() == Ranks(0, 1, 0, 1)
    set_ranks(monkeypatch, RANK="5", WORLD_SIZE="8")
    assert Ranks.of_environment() == Ranks()  # a cluster's variables alone are not torchrun's
    set_ranks(monkeypatch, LOCAL_RANK="1", LOCAL_WORLD_SIZE="4")
    assert Ranks.of_environment() == Ranks(5, 8, 1, 4)
    assert [Ranks(r, 3).share(range(7)) for r in range(3)] == [[0, 3, 6], [1, 4], [2, 5]]


def test_ranks_take_their_own_gpus(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_ranks(monkeypatch, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert cli.main(["sweep", "--plan", "small.toml"]) == 2
    assert "got 2 processes on this node, expected at most 1" in capsys.readouterr().err
    assert cli.main(["sweep", "--plan", "small.toml", "--device", "0"]) == 2
    assert "--device" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [{"RANK": "8"}, {"RANK": "-1"}, {"LOCAL_RANK": "x"}, {"LOCAL_RANK": "4"}])
def test_an_environment_without_sense_is_refused(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str]) -> None:
    set_ranks(monkeypatch, **{"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", **wrong})
    with pytest.raises(UsageError, match=f"got .*{next(iter(wrong.values()))}"):
        Ranks.of_environment()


def test_one_rank_meets_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *_: pytest.fail("no group is wanted"))
    with Ranks().joined():
        assert Ranks().gather("a thing", lambda: 3) == [3]
        with pytest.raises(ZeroDivisionError):  # as it is, not in another's words
            Ranks().gather("a thing", lambda: 1 // 0)
        Ranks().agree({"plan": 1})
    assert issubclass(ranks.RankLost, SweepError)


def test_the_latest_result_counts_whoever_wrote_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1, 100))
    monkeypatch.setattr("time.time", lambda: float(next(clock)))
    (tmp_path / "journal.jsonl").write_text('{"key": {"n": 1}, "result": {"from": "an old version"}}\n')
    with Journal.of(tmp_path, Ranks(1, 2)) as second:
        second.add({"n": 1}, {"from": "rank 1"})
        second.add({"n": 2}, {"from": "rank 1"})
    with Journal.of(tmp_path, Ranks(0, 2)) as first:
        assert first.get({"n": 1}) == {"from": "rank 1"}
        first.add({"n": 2}, {"from": "rank 0"})
    with (tmp_path / "journal.rank1.jsonl").open("a") as f:
        f.write('{"key": {"n": 3}, "resu')  # being written, or cut short: not this process's to cut off
    with Journal.of(tmp_path, Ranks()) as single:
        assert single.path.name == "journal.jsonl"
        assert [single.get({"n": n}) for n in (1, 2, 3)] == [{"from": "rank 1"}, {"from": "rank 0"}, None]
        assert len(single.damaged) == 1
    assert (tmp_path / "journal.rank1.jsonl").read_text().endswith('"resu')
