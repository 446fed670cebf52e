"""Kernels compiled in parallel before they are raced: a race on a GPU is not to wait for a compiler."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from types import TracebackType

from replayssm_cute import compiler
from replayssm_cute.target import Target


class KernelPool:
    """Brings kernels into the disk cache, in processes that stay for the next ones; for a `with` block.

    Args:
        target: what to compile for.
        jobs: processes; None: the CPUs that this process may use.
        say: is told how far it is.
    """

    def __init__(self, target: Target, jobs: int | None = None, say: Callable[[str], None] = print) -> None:
        self.target, self.jobs, self.say = target, jobs or len(os.sched_getaffinity(0)), say
        self.compiled = 0
        self._known: set[compiler.Recipe] = set()
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def __enter__(self) -> KernelPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=error is None, cancel_futures=True)

    def fill(self, recipes: Iterable[compiler.Recipe], what: str) -> None:
        """Compile those that the cache does not hold; returns when all are there.

        Raises:
            ValueError, RuntimeError: what a kernel's compilation raised.
        """
        new = [r for r in dict.fromkeys(recipes) if r not in self._known]
        missing = [r for r in new if not compiler.stored(r, self.target)]
        self._known.update(new)
        if not missing:
            return
        start = time.perf_counter()
        if self._pool is None:
            self._pool = concurrent.futures.ProcessPoolExecutor(
                self.jobs,
                mp_context=multiprocessing.get_context("spawn"),  # the compiler is not to be forked
                initializer=compiler.end_with_parent,
            )
        # step kernels take longest: they go first, so that none is left for the end
        missing.sort(key=lambda r: getattr(r, "kind", "step") != "step")
        self.say(f"{what}: compiling {len(missing)} kernels in {self.jobs} processes")
        waiting = {self._pool.submit(compiler.entry_of, recipe, self.target) for recipe in missing}
        while waiting:
            done, waiting = concurrent.futures.wait(waiting, 10.0, concurrent.futures.FIRST_EXCEPTION)
            for each in done:
                each.result()
            if waiting:
                self.say(f"{what}: {len(missing) - len(waiting)} of {len(missing)} compiled")
        self.compiled += len(missing)
        self.say(f"{what}: {len(missing)} compiled in {time.perf_counter() - start:.1f} s")
