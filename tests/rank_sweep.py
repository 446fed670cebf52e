"""A rank of a sweep for the tests, started by torchrun: the command line with stand-ins for compiler and GPU.

RANK_SWEEP is JSON: "fail" {rank, after, how} makes one rank die ("kill"), hang ("sleep") or raise ("raise") once it has
compiled `after` candidates and, where it names a journal as "once", that one holds a compilation; "seconds" {rank:
seconds} slows a rank's compiler down; "gpus" is the number of pretended GPUs; "grace" shortens the wait for others.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from replayssm_tuning import cli, context, on_device
from tuning_fakes import Compiler, Device

from replayssm_cute import compiler

WISH: dict[str, Any] = json.loads(os.environ.get("RANK_SWEEP", "{}"))


def wait_for(journal: Path) -> None:
    """Until another rank's journal holds a compilation."""
    deadline = time.monotonic() + 60
    while not journal.exists() or '"compile"' not in journal.read_text():
        assert time.monotonic() < deadline, f"{journal} stays without a compilation"
        time.sleep(0.01)


class Failing(Compiler):
    """Compiles like `Compiler`, and lets its rank come to grief."""

    def __call__(
        self, items: list[compiler.Item], workers: int, progress: Callable[[compiler.Done, int, int], None]
    ) -> list[compiler.Done]:
        fail = WISH.get("fail", {})
        self.seconds = WISH.get("seconds", {}).get(os.environ.get("RANK"), 0.0)

        def watched(done: compiler.Done, count: int, total: int) -> None:
            progress(done, count, total)
            if str(fail.get("rank")) == os.environ.get("RANK") and count == fail["after"]:
                if "once" in fail:
                    wait_for(Path(fail["once"]))
                if fail["how"] == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fail["how"] == "sleep":
                    time.sleep(600)
                raise RuntimeError("the disk is on fire")

        return super().__call__(items, workers, watched)


class Pretended(Device):
    """The measuring process of one rank: it must get the device of its own."""

    def __init__(self, make: object, args: tuple[int, dict[str, Any]], **_: object) -> None:
        super().__init__()
        assert args[0] == int(os.environ.get("LOCAL_RANK", "0"))

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    compiler.compile_many = Failing()
    on_device.Worker = Pretended  # type: ignore[assignment, misc]
    context.GRACE_S = WISH.get("grace", context.GRACE_S)
    if gpus := WISH.get("gpus", 0):
        torch.cuda.is_available = lambda: True  # type: ignore[method-assign]
        torch.cuda.device_count = lambda: gpus
    sys.exit(cli.main(sys.argv[1:]))
