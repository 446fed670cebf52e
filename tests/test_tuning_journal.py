"""The journal survives kills, and the worker survives what its jobs do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from replayssm_tuning.journal import Journal, key_of
from replayssm_tuning.worker import Poisoned, Worker


def test_results_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "journal.jsonl"
    with Journal(path) as journal:
        journal.add({"b": 1, "a": [1, 2]}, {"time": 1.5})
        journal.add({"b": 2, "a": [1, 2]}, {"failed": "crash"})
        journal.add({"b": 1, "a": [1, 2]}, {"time": 1.25})
        # on disk at once: another reader sees it while the first still writes
        assert len(path.read_text().splitlines()) == 3
    with Journal(path) as again:
        assert again.get({"a": [1, 2], "b": 1}) == {"time": 1.25}
        assert again.get({"a": [1, 2], "b": 2}) == {"failed": "crash"}
        assert again.get({"a": [2, 1], "b": 1}) is None
        assert (len(again), again.damaged) == (2, [])


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_cut_short_costs_only_itself(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for n in range(3):
            journal.add({"n": n}, {"time": n, "padding": "x" * 40})
    os.truncate(path, path.stat().st_size - cut)
    with Journal(path) as again:
        assert again.damaged == ["journal.jsonl: its last line is cut short (as by a kill) and left out"]
        assert [again.get({"n": n}) is not None for n in range(3)] == [True, True, False]
        again.add({"n": 2}, {"time": 7})
    with Journal(path) as third:
        assert (third.damaged, len(third)) == ([], 3)
        assert third.get({"n": 2}) == {"time": 7}


def test_foreign_lines_are_named_and_kept_out(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_bytes(b'nonsense\n{"key": 3}\n{"key": {"n": 1}, "result": {"t": 1}}\n\xff\xfe\n')
    with Journal(path) as journal:
        assert len(journal) == 1
        assert journal.damaged == [f"journal.jsonl: line {n} is damaged and left out" for n in (1, 2, 4)]


@pytest.mark.parametrize("byte", [b"\r", b"\0", b"\xff", b"\x85", b"\x1c"])
def test_a_byte_that_went_wrong_costs_its_line_alone(tmp_path: Path, byte: bytes) -> None:
    """Wherever in the file, and the lines behind it stay on disk."""
    path = tmp_path / "journal.jsonl"
    with Journal(path) as journal:
        for batch in range(5):
            journal.add({"batch": batch}, {"time_us": 1.0})
    good = path.read_bytes()
    for at in range(0, good.rindex(b"\n", 0, -1), 7):
        if good[at] == ord("\n"):
            continue
        path.write_bytes(good[:at] + byte + good[at + 1 :])
        with Journal(path) as journal:
            assert len(journal) >= 4 and journal.get({"batch": 4}) == {"time_us": 1.0}
        assert len(path.read_bytes()) == len(good)


def test_keys_do_not_depend_on_order() -> None:
    assert key_of({"a": 1, "b": {"c": 2, "d": 3}}) == key_of({"b": {"d": 3, "c": 2}, "a": 1})
    assert key_of({"a": 1}) != key_of({"a": 2})


class Jobs:
    """What a worker's jobs may do to it."""

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting
        self.count = 0

    def hello(self, name: str) -> dict[str, object]:
        self.count += 1
        return {"text": f"{self.greeting} {name}", "count": self.count, "pid": os.getpid()}

    def fail(self) -> None:
        raise ValueError("this config is wrong")

    def poison(self) -> None:
        raise Poisoned("CUDA error: an illegal memory access")

    def crash(self) -> None:
        os.write(2, b"fatal: something broke\n")
        os.kill(os.getpid(), signal.SIGSEGV)

    def leave(self) -> None:
        os._exit(7)

    def hang(self) -> None:
        time.sleep(600)


class Unbuildable:
    def __init__(self) -> None:
        raise RuntimeError("no device")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Worker:
    return Worker(Jobs, ("hello",), log=tmp_path_factory.mktemp("worker") / "worker.log", startup_s=60)


def greet(worker: Worker, name: str) -> dict[str, object]:
    answer = worker.call("hello", timeout_s=30, name=name)
    assert answer.ok, answer.reason
    return answer.value


@pytest.mark.fault(36)
def test_a_worker_goes_on_after_everything(worker: Worker) -> None:
    with worker:
        first = greet(worker, "a")
        assert (first["text"], first["count"]) == ("hello a", 1)
        failed = worker.call("fail", timeout_s=30)
        assert (failed.ok, failed.kind, failed.reason) == (False, "error", "ValueError: this config is wrong")
        assert greet(worker, "b") == {"text": "hello b", "count": 2, "pid": first["pid"]}  # the same process

        crashed = worker.call("crash", timeout_s=30)
        assert (crashed.ok, crashed.kind) == (False, "crash")
        assert "SIGSEGV" in crashed.reason
        assert "something broke" in crashed.reason
        second = greet(worker, "c")
        assert second["count"] == 1
        assert second["pid"] != first["pid"]

        poisoned = worker.call("poison", timeout_s=30)
        assert (poisoned.kind, poisoned.reason) == ("poisoned", "CUDA error: an illegal memory access")
        third = greet(worker, "d")
        assert third["pid"] != second["pid"]

        start = time.monotonic()
        hung = worker.call("hang", timeout_s=0.3)
        assert (hung.ok, hung.kind) == (False, "hang")
        assert time.monotonic() - start < 20
        with pytest.raises(ProcessLookupError):
            os.kill(int(str(third["pid"])), 0)

        left = worker.call("leave", timeout_s=30)
        assert "exit code 7" in left.reason
        assert worker.starts == 4


_ORPHANS = """
import sys
from pathlib import Path
from replayssm_tuning.worker import Worker
from test_tuning_journal import Jobs

if __name__ == "__main__":
    worker = Worker(Jobs, ("hello",), log=Path(sys.argv[1]))
    print(worker.call("hello", timeout_s=60, name="a").value["pid"], flush=True)
    worker.call("hang", timeout_s=600)
"""


def test_a_hanging_job_ends_with_a_killed_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(_ORPHANS)
    paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(script), str(tmp_path / "log")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while _runs(child):
        assert time.monotonic() < deadline, "the child outlives its parent"
        time.sleep(0.1)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie has ended; only its parent has not asked for the exit code


def test_a_runner_that_cannot_be_built_says_so(tmp_path: Path) -> None:
    with Worker(Unbuildable, log=tmp_path / "log") as worker:
        answer = worker.call("anything", timeout_s=30)
        assert (answer.ok, answer.reason) == (False, "RuntimeError: no device")
