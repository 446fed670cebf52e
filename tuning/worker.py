"""A worker process that runs jobs one after another, so that a crash or a hang costs one job.

The parent sends (name, arguments) and waits for an answer with a deadline. A job that raises answers with its message;
one that kills the process, breaks its CUDA context, or overruns the deadline is reported as such, and the next job
gets a fresh process. Starting costs seconds (torch, CUDA, the DSL), so a process is kept for as long as it works.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replayssm_cute import compiler

_LOG_TAIL = 400  # characters of a dead worker's stderr that go into its reason


class Poisoned(RuntimeError):
    """Raised by a job whose process cannot be trusted any more (a sticky CUDA error): answer, then start afresh."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a job.

    Attributes:
        ok: whether `value` is the job's return value.
        value: JSON-like result.
        kind: "ok", "error" (raised), "poisoned", "crash" or "hang".
        reason: in words, where not ok.
    """

    ok: bool
    value: Any = None
    kind: str = "ok"
    reason: str = ""


def _serve(
    pipe: multiprocessing.connection.Connection, make: Callable[..., Any], args: tuple[Any, ...], log: str
) -> None:
    """The child's loop. Its stdout and stderr go to the log: compilers and drivers print there, also as they die."""
    if log:
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
    compiler.end_with_parent()  # else a job that hangs would keep the GPU from the next sweep
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    runner: Any = None
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        if job is None:
            return
        name, kwargs = job
        try:
            if runner is None:
                runner = make(*args)
            value = getattr(runner, name)(**kwargs)
            answer = Answer(True, value)
        except Poisoned as e:
            answer = Answer(False, None, "poisoned", str(e))
        except Exception as e:
            traceback.print_exc()
            sys.stderr.flush()
            text = " ".join(str(e).split())
            answer = Answer(False, None, "error", f"{type(e).__name__}: {text}"[:600])
        pipe.send(dataclasses.astuple(answer))
        if answer.kind == "poisoned":
            return


class Worker:
    """One child process that builds `make(*args)` once and calls its methods by name.

    Args:
        make: importable callable (a class) that the child builds its runner with.
        args: picklable arguments.
        log: file that gets the child's stdout and stderr.
        startup_s: seconds added to the deadline of the first job of each process.
    """

    def __init__(
        self, make: Callable[..., Any], args: tuple[Any, ...] = (), *, log: Path | None = None, startup_s: float = 60.0
    ) -> None:
        self._make, self._args, self._log, self._startup_s = make, args, log, startup_s
        self._process: Any = None
        self._pipe: Any = None
        self._fresh = True
        self.starts = 0

    def call(self, name: str, /, *, timeout_s: float, **kwargs: Any) -> Answer:
        """Run one job; never raises for what the job or its process does."""
        if self._process is None:
            self._start()
        deadline = timeout_s + (self._startup_s if self._fresh else 0.0)
        log_start = self._log_size()
        try:
            self._pipe.send((name, kwargs))
            if not self._pipe.poll(deadline):
                self._kill()
                return Answer(False, None, "hang", f"no answer within {deadline:.0f} s; the process was killed")
            answer = Answer(*self._pipe.recv())
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._process.join(5)
            code = self._process.exitcode
            self._kill()
            return Answer(False, None, "crash", f"{_died(code)}{self._tail(log_start)}")
        self._fresh = False
        if answer.kind == "poisoned":
            self._kill()
        return answer

    def close(self) -> None:
        """End the child: politely first."""
        if self._process is None:
            return
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(3)
        self._kill()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")  # a forked child cannot use CUDA
        self._pipe, child = context.Pipe()
        log = str(self._log) if self._log is not None else ""
        self._process = context.Process(target=_serve, args=(child, self._make, self._args, log), daemon=True)
        self._process.start()
        child.close()
        self._fresh = True
        self.starts += 1

    def _kill(self) -> None:
        if self._process.is_alive():
            self._process.kill()
            self._process.join(10)
        self._pipe.close()
        self._process = self._pipe = None

    def _log_size(self) -> int:
        return self._log.stat().st_size if self._log is not None and self._log.exists() else 0

    def _tail(self, start: int) -> str:
        if self._log is None or not self._log.exists():
            return ""
        with self._log.open("rb") as f:
            f.seek(start)
            text = " ".join(f.read().decode(errors="replace").split())
        return f": ...{text[-_LOG_TAIL:]}" if text else ""


def _died(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"
