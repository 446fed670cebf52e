"""From what a kernel is specialized on to the kernel: a memory cache before a disk cache before the DSL.

Needs neither tensors nor a GPU. What can be compiled is a `Recipe`; step kernels, which a problem and a config name,
have functions of their own (`get`, `entry`, `key`). `kernel_files` says how kernels lie on disk.

`python -m replayssm_cute.compiler --target sm_103a --problem '{...}'` fills a cache on a build host.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import filelock
import torch

from . import fingerprint, kernel_files, resources
from .config import TileConfig
from .kernel_files import Entry, cache_dir
from .problem import Problem
from .sm100 import Sm100Config
from .target import Target

log = logging.getLogger("replayssm_cute")

Kernel = Callable[..., None]

FORMAT = 1  # of the files of an entry
_SYMBOL = "replayssm_step"  # of every kernel, whatever it does: each has a library of its own
_LOCK_SECONDS = 600.0


# ---------------------------------------------------------------------------------------------------
# Counters
# ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Counters:
    """Where kernels came from since the last `reset_counters`, in this process."""

    compiled: int = 0
    disk: int = 0
    memory: int = 0


_counts = {"compiled": 0, "disk": 0, "memory": 0}


def counters() -> Counters:
    """A snapshot of the counters."""
    return Counters(**_counts)


def reset_counters() -> None:
    """Set all counters to zero."""
    for name in _counts:
        _counts[name] = 0


# ---------------------------------------------------------------------------------------------------
# What can be compiled
# ---------------------------------------------------------------------------------------------------


class Recipe(Protocol):
    """One kernel before it is compiled: hashable, and importing it does not import the DSL."""

    def label(self) -> str:
        """What the kernel is, for people."""
        ...

    def facts(self) -> dict[str, Any]:
        """What it is specialized on, as JSON data: its share of the key."""
        ...

    def sources(self) -> str:
        """Fingerprint of its sources."""
        ...

    def shared_bytes(self) -> int:
        """Dynamic shared memory of its launch."""
        ...

    def check(self, target: Target) -> None:
        """Refuse a target that the kernel cannot run on, by ValueError."""
        ...

    def remedy(self) -> str:
        """What to call before a graph capture so that the kernel is ready then."""
        ...

    def build(self, arch: str) -> Any:
        """Compile; the result can be exported and gives a cubin with one kernel."""
        ...


@dataclass(frozen=True, slots=True)
class StepRecipe:
    """The step kernel of a problem and a config."""

    problem: Problem
    config: TileConfig

    def label(self) -> str:
        """See `Recipe`."""
        return f"problem {self.problem.label()}, config {self.config.label()}"

    def facts(self) -> dict[str, Any]:
        """See `Recipe`."""
        return {"problem": self.problem.to_json(), "config": self.config.to_json()}

    def sources(self) -> str:
        """See `Recipe`."""
        shared = fingerprint.kernels()
        return shared + fingerprint.kernels("sm100") if isinstance(self.config, Sm100Config) else shared

    def shared_bytes(self) -> int:
        """See `Recipe`."""
        return self.config.shared_bytes(self.problem)

    def check(self, target: Target) -> None:
        """See `Recipe`."""
        if reason := self.config.invalid_reason(self.problem, target):
            raise ValueError(
                f"config: {self.config.label()} cannot run {self.problem.label()} on {target.name}: {reason}"
            )

    def remedy(self) -> str:
        """See `Recipe`."""
        return "replayssm_cute.warmup(problems, batches) with this problem and batch among them"

    def build(self, arch: str) -> Any:
        """See `Recipe`."""
        return _build(self.problem, self.config, arch)


def key_parts(recipe: Recipe, arch: str) -> dict[str, Any]:
    """Everything that a kernel's GPU code depends on, as JSON data."""
    return {
        "format": FORMAT,
        "arch": arch,
        **fingerprint.toolchain(),
        "kernels": recipe.sources(),
        "environment": fingerprint.codegen_environment(),
        **recipe.facts(),
    }


def key(problem: Problem, config: TileConfig, arch: str) -> str:
    """The step kernel's cache key (hex), the same in every process and on every machine with the same toolchain."""
    return kernel_files.key_of(key_parts(StepRecipe(problem, config), arch))


def _directory(recipe: Recipe, arch: str, root: Path | None = None) -> Path:
    return (root or cache_dir()) / kernel_files.key_of(key_parts(recipe, arch))


# ---------------------------------------------------------------------------------------------------
# The DSL, behind three seams
# ---------------------------------------------------------------------------------------------------


def _build(problem: Problem, config: TileConfig, arch: str) -> Any:
    # Importing the DSL takes about a second, so that it is done only when something is compiled.
    if isinstance(config, Sm100Config):
        from .kernels.sm100.step import compile_sm100_step

        return compile_sm100_step(problem, config, arch)
    from .kernels.step import compile_step

    return compile_step(problem, config, arch)


def _export(compiled: Any, path: Path) -> None:
    compiled.export_to_c(str(path), function_name=_SYMBOL)


def _load(path: Path) -> Kernel:
    """The kernel in an object file, as a plain tvm-ffi function. Needs no GPU; its first launch does."""
    import cutlass.cute as cute

    function: Kernel = cute.runtime.load_module(str(path), enable_tvm_ffi=True)[_SYMBOL]
    return function


def capturing() -> bool:
    """Whether the current stream is capturing a CUDA graph."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def capture_error(problem: Problem, config: TileConfig, batch: int | None) -> RuntimeError:
    """The error of a call that would need a step kernel prepared while a graph is captured."""
    return not_ready(StepRecipe(problem, config), batch)


def not_ready(recipe: Recipe, batch: int | None = None) -> RuntimeError:
    """The error of a call that would need a kernel prepared while a graph is captured."""
    rows = "" if batch is None else f", batch {batch}"
    return RuntimeError(
        f"the kernel for {recipe.label()}{rows} is not ready, and a CUDA graph is being captured: nothing can be "
        f"compiled or loaded now. Before the capture, call {recipe.remedy()}."
    )


# ---------------------------------------------------------------------------------------------------
# Cache
# ---------------------------------------------------------------------------------------------------

_memory: dict[tuple[Recipe, str], Kernel] = {}
_unsaved: dict[tuple[Recipe, str], Entry] = {}
_lock = threading.RLock()  # compilation is not thread-safe
_said: set[str] = set()
_private: tempfile.TemporaryDirectory[str] | None = None


def _once(what: str, message: str) -> None:
    if what not in _said:
        _said.add(what)
        log.warning(message)


def clear_memory() -> None:
    """Forget the kernels that this process holds; those on disk stay."""
    with _lock:
        _memory.clear()
        _unsaved.clear()


def get(problem: Problem, config: TileConfig, target: Target, *, batch: int | None = None) -> Kernel:
    """The step kernel of (problem, config) for `target`: see `load`, whose errors it raises.

    Returns:
        A function of (state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out,
        D, z, dt_bias, state_batch_indices, cu_seqlens, pad_slot_id) that launches on torch's current stream.
    """
    return load(StepRecipe(problem, config), target, batch=batch)


def load(recipe: Recipe, target: Target, *, batch: int | None = None) -> Kernel:
    """A kernel for `target`: from memory, else from disk, else compiled and stored.

    Args:
        batch: rows of the call that asks, for error messages alone.

    Raises:
        ValueError: if the kernel cannot run on the target.
        RuntimeError: if the current stream is capturing a CUDA graph and the kernel is not in memory.
    """
    name = (recipe, target.arch)
    kernel = _memory.get(name)
    if kernel is not None:
        _counts["memory"] += 1
        return kernel
    if capturing():
        raise not_ready(recipe, batch)
    with _lock:
        if name in _memory:  # another thread was faster
            _counts["memory"] += 1
        else:
            found = entry_of(recipe, target)
            try:
                _memory[name] = _load(found.path)
            except Exception as error:  # whatever the loader raises, the entry is a miss
                _once(f"damaged:{found.path}", f"kernel cache: {found.path} does not load ({error}); compiling it anew")
                found = _compile(recipe, target.arch, replace=found)
                _memory[name] = _load(found.path)
        return _memory[name]


def entry(problem: Problem, config: TileConfig, target: Target) -> Entry:
    """The disk entry of a step kernel; see `entry_of`."""
    return entry_of(StepRecipe(problem, config), target)


def entry_of(recipe: Recipe, target: Target) -> Entry:
    """The disk entry of a kernel for `target`, compiled first if there is none. Loads nothing.

    Raises:
        ValueError: if the kernel cannot run on the target.
    """
    recipe.check(target)
    with _lock:
        if unsaved := _unsaved.get((recipe, target.arch)):
            _counts["memory"] += 1
            return unsaved
        found = _find(_directory(recipe, target.arch))
        if found is not None:
            _counts["disk"] += 1
            return found
        return _compile(recipe, target.arch)


def stored(recipe: Recipe, target: Target) -> bool:
    """Whether the disk cache holds a kernel."""
    return _find(_directory(recipe, target.arch)) is not None


def _find(directory: Path) -> Entry | None:
    def say(path: Path, error: kernel_files.DamagedEntry) -> None:
        _once(f"damaged:{path}", f"kernel cache: {path} is damaged ({error}); compiling it anew")

    return kernel_files.find(directory, say)


def _store(directory: Path, compiled: Any, recipe: Recipe, arch: str) -> Entry:
    return kernel_files.store(
        directory, lambda path: _export(compiled, path), recipe.shared_bytes(), key_parts(recipe, arch)
    )


def _compile(recipe: Recipe, arch: str, replace: Entry | None = None) -> Entry:
    """Compile under the key's lock unless another process did so meanwhile; `replace` is an entry found useless."""
    directory = _directory(recipe, arch)
    lock = filelock.FileLock(directory.with_suffix(".lock"), timeout=_LOCK_SECONDS)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError, filelock.Timeout) as error:
        return _keep_unsaved(_timed_build(recipe, arch), recipe, arch, error)
    try:
        if replace is None:
            found = _find(directory)
            if found is not None:
                _counts["disk"] += 1
                return found
        elif replace.path.is_relative_to(directory):
            with contextlib.suppress(OSError):
                replace.path.with_suffix(".json").unlink(missing_ok=True)
        compiled = _timed_build(recipe, arch)
        try:
            return _store(directory, compiled, recipe, arch)
        except OSError as error:
            return _keep_unsaved(compiled, recipe, arch, error)
    finally:
        lock.release()


def _timed_build(recipe: Recipe, arch: str) -> Any:
    start = time.perf_counter()
    compiled = recipe.build(arch)
    _counts["compiled"] += 1
    log.info("compiled %s, for %s in %.1f s", recipe.label(), arch, time.perf_counter() - start)
    return compiled


def _keep_unsaved(compiled: Any, recipe: Recipe, arch: str, error: BaseException) -> Entry:
    """Keep a kernel for this process alone, since the cache directory cannot be written."""
    global _private
    _once(
        f"unwritable:{cache_dir()}",
        f"kernel cache: {cache_dir()} cannot be written ({type(error).__name__}: {error}); kernels are kept in memory "
        f"and compiled again by every process. Set REPLAYSSM_CACHE_DIR to a writable directory.",
    )
    if _private is None:
        _private = tempfile.TemporaryDirectory(prefix="replayssm_cute_")
    found = _store(_directory(recipe, arch, Path(_private.name)), compiled, recipe, arch)
    _unsaved[(recipe, arch)] = found
    return found


# ---------------------------------------------------------------------------------------------------
# Many at once
# ---------------------------------------------------------------------------------------------------

Item = tuple[Problem, TileConfig, Target]


@dataclass(frozen=True, slots=True)
class Done:
    """One finished item of `compile_many`.

    Attributes:
        item: what was asked for.
        source: "compiled" or "disk".
        seconds: time in the worker.
        resources: the kernel's demands, None if it failed.
        error: why it failed, None if it did not.
        lasting: whether the error is the kernel's own, so that it would come again; False where the machine is at
            fault: a cache that cannot be written, a compiler that is not installed or was killed, a full disk.
    """

    item: Item
    source: str
    seconds: float
    resources: resources.Resources | None = None
    error: str | None = None
    lasting: bool = True


def _work(item: Item) -> Done:
    """In a worker process: make sure that the entry is on disk."""
    start, before = time.perf_counter(), counters().compiled
    try:
        found = entry(*item)
        error = None if found.path.is_relative_to(cache_dir()) else f"{cache_dir()} cannot be written"
        source = "compiled" if counters().compiled > before else "disk"
        return Done(item, source, time.perf_counter() - start, found.resources, error, lasting=error is None)
    except Exception as problem:  # a failing item must cost only itself
        of_machine = isinstance(problem, (OSError, ImportError, MemoryError))
        text = f"{type(problem).__name__}: {problem}"
        return Done(item, "compiled", time.perf_counter() - start, None, text, lasting=not of_machine)


def compile_many(
    items: Iterable[Item],
    workers: int | None = None,
    progress: Callable[[Done, int, int], None] | None = None,
) -> list[Done]:
    """Bring every item into the disk cache, in `workers` separate processes.

    A failing item is reported in its `Done.error`, one whose compiler crashes too; the rest goes on. Processes
    are spawned, so a script that calls this needs the usual `if __name__ == "__main__":` guard.

    Args:
        items: (problem, config, target) triples.
        workers: processes; default the CPUs this process may use.
        progress: called as (done, number finished, number of items) after each item, never twice at once.
            What it raises ends the whole: items that run are finished, no other is started.

    Returns:
        One `Done` an item, in the order of `items`.
    """
    todo = list(dict.fromkeys(items))
    results: dict[Item, Done] = {}

    turn = threading.Lock()

    def finish(done: Done) -> None:
        with turn:
            results[done.item] = done
            if progress is not None:
                progress(done, len(results), len(todo))

    # What is on disk already needs no process; starting one costs seconds.
    for item in todo:
        start = time.perf_counter()
        found = _find(_directory(StepRecipe(item[0], item[1]), item[2].arch))
        if found is not None:
            finish(Done(item, "disk", time.perf_counter() - start, found.resources))
    missing: queue.SimpleQueue[Item] = queue.SimpleQueue()
    for item in todo:
        if item not in results:
            missing.put(item)
    count = min(missing.qsize(), workers or len(os.sched_getaffinity(0)))
    if count:
        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            feeders = [threads.submit(_feed, missing, finish) for _ in range(count)]
            try:
                for feeder in concurrent.futures.as_completed(feeders):
                    feeder.result()
            except BaseException:  # an interrupt, or what `progress` raised: start nothing more
                with contextlib.suppress(queue.Empty):
                    while True:
                        missing.get_nowait()
                raise
    return [results[item] for item in todo]


def end_with_parent() -> None:
    """In a child process of multiprocessing: end when the parent does, also when it is killed amid a job.

    A pool's worker would wait for its next item for ever otherwise, since it holds both ends of the queue's pipe.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def _feed(items: queue.SimpleQueue[Item], finish: Callable[[Done], None]) -> None:
    """Give items one by one to a worker process of this thread's own, so that a crash costs one item."""
    context = multiprocessing.get_context("spawn")
    pool: concurrent.futures.ProcessPoolExecutor | None = None
    try:
        while True:
            try:
                item = items.get_nowait()
            except queue.Empty:
                return
            pool = pool or concurrent.futures.ProcessPoolExecutor(1, mp_context=context, initializer=end_with_parent)
            try:
                done = pool.submit(_work, item).result()
            except BrokenProcessPool:
                pool = None
                # killed for memory, or by a fault in the compiler? it cannot be told, so that it is tried again
                done = Done(item, "compiled", 0.0, None, "the compiler process died", lasting=False)
            finish(done)
    finally:
        if pool is not None:
            pool.shutdown()


if __name__ == "__main__":
    # Run as a script, this file is a second module: workers and counters belong to the imported one.
    from replayssm_cute.compile_cli import main

    sys.exit(main())
