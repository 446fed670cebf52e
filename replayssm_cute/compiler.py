"""(problem, config, target) -> kernel, through a memory cache and a disk cache; needs neither tensors nor a GPU.

An entry is two files in a directory named after its key: the exported object, and a JSON file that commits it
(its hash, what it was compiled from, the kernel's resources). The key holds everything that shapes the GPU
code. The host code in the object is generated for the CPU that compiled it, so an entry also names that CPU's
instruction sets, and is used where all of them exist; hosts that differ keep entries side by side.

`python -m replayssm_cute.compiler --target sm_103a --problem '{...}'` fills a cache on a build host.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import json
import logging
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
import torch

from . import fingerprint, resources
from .config import TileConfig, default_config
from .problem import Problem
from .target import Target, named

log = logging.getLogger("replayssm_cute")

Kernel = Callable[..., None]

FORMAT = 1  # of the files of an entry
_SYMBOL = "replayssm_step"
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
# Keys and files
# ---------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    """Where compiled kernels are kept: $REPLAYSSM_CACHE_DIR, else ~/.cache/replayssm_cute."""
    chosen = os.environ.get("REPLAYSSM_CACHE_DIR")
    try:
        return Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "replayssm_cute"
    except RuntimeError:  # no home: a path that nobody can create, which ends in the documented fallback
        return Path(os.devnull) / (chosen or "replayssm_cute")


def key_parts(problem: Problem, config: TileConfig, arch: str) -> dict[str, Any]:
    """Everything that a kernel's GPU code depends on, as JSON data."""
    return {
        "format": FORMAT,
        "arch": arch,
        **fingerprint.toolchain(),
        "kernels": fingerprint.kernels(),
        "environment": fingerprint.codegen_environment(),
        "problem": problem.to_json(),
        "config": config.to_json(),
    }


def key(problem: Problem, config: TileConfig, arch: str) -> str:
    """The cache key (hex), the same in every process and on every machine with the same toolchain."""
    return _hash(key_parts(problem, config, arch))


def _hash(parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _host() -> str:
    return hashlib.sha256(" ".join(sorted(fingerprint.host_isa())).encode()).hexdigest()[:12]


class DamagedEntry(ValueError):
    """An entry on disk that must not be used."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A compiled kernel as it lies on disk.

    Attributes:
        path: the object file; its JSON file has the same name with another suffix.
        resources: what the kernel asks of a multiprocessor.
    """

    path: Path
    resources: resources.Resources

    def object_bytes(self) -> bytes:
        """The object file's content."""
        return self.path.read_bytes()


def _read(meta_path: Path) -> Entry | None:
    """The entry that `meta_path` commits; None if it was compiled for instruction sets that this CPU lacks.

    Raises:
        DamagedEntry: if anything about it is not as it was written.
    """
    try:
        meta = json.loads(meta_path.read_bytes())
        isa = meta["host_isa"]
        if not isinstance(isa, list) or not all(isinstance(x, str) for x in isa):
            raise DamagedEntry("host_isa is no list of names")
        if not fingerprint.host_isa().issuperset(isa):
            return None
        if _hash(meta["key"]) != meta_path.parent.name:
            raise DamagedEntry("it is the entry of another kernel")
        path = meta_path.with_suffix(".o")
        # A truncated object can crash the loader, so its hash is checked before it gets there.
        if hashlib.sha256(path.read_bytes()).hexdigest() != meta["sha256"]:
            raise DamagedEntry("the object's hash is not the one recorded")
        return Entry(path, resources.Resources.from_json(meta["resources"]))
    except DamagedEntry:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedEntry(f"{type(error).__name__}: {error}") from error


def _find(directory: Path) -> Entry | None:
    """A usable entry in `directory`: this CPU's own, else one whose instruction sets this CPU has."""
    own = f"{_host()}.json"
    committed: list[Path] = []
    with contextlib.suppress(OSError):  # no such directory, or none that this user may look into
        committed = sorted((p for p in directory.iterdir() if p.suffix == ".json"), key=lambda p: (p.name != own, p))
    for meta_path in committed:
        try:
            found = _read(meta_path)
        except DamagedEntry as error:
            _once(f"damaged:{meta_path}", f"kernel cache: {meta_path} is damaged ({error}); compiling it anew")
            continue
        if found is not None:
            return found
    return None


def _store(directory: Path, compiled: Any, problem: Problem, config: TileConfig, arch: str) -> Entry:
    """Export `compiled` into `directory`: each file to a temporary name, then renamed; the JSON file last."""
    path = directory / f"{_host()}.o"
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob(f"{_host()}.*.tmp*"):  # of writers that were killed: the key's lock is held
        with contextlib.suppress(OSError):
            leftover.unlink()
    # The exporter tells its format from the suffix.
    part = directory / f"{_host()}.{os.getpid()}.tmp.o"
    meta_part = part.with_suffix(".json.tmp")
    try:
        _export(compiled, part)
        data = part.read_bytes()
        found = resources.read_cubin(resources.cubin(data), config.shared_bytes(problem))
        meta = {
            "sha256": hashlib.sha256(data).hexdigest(),
            "host_isa": sorted(fingerprint.host_isa()),
            "resources": found.to_json(),
            "key": key_parts(problem, config, arch),
        }
        meta_part.write_text(json.dumps(meta, indent=1))
        os.replace(part, path)
        os.replace(meta_part, path.with_suffix(".json"))
    finally:
        for leftover in (part, meta_part):
            with contextlib.suppress(OSError):
                leftover.unlink(missing_ok=True)
    return Entry(path, found)


# ---------------------------------------------------------------------------------------------------
# The DSL, behind three seams
# ---------------------------------------------------------------------------------------------------


def _build(problem: Problem, config: TileConfig, arch: str) -> Any:
    from .kernels.step import compile_step  # imports the DSL: about a second, so only when something is compiled

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
    """The error of a call that would need a kernel prepared while a graph is captured."""
    rows = "" if batch is None else f", batch {batch}"
    return RuntimeError(
        f"the kernel for problem {problem.label()}, config {config.label()}{rows} is not ready, and a CUDA graph is "
        f"being captured: nothing can be compiled or loaded now. Before the capture, call "
        f"replayssm_cute.warmup(problems, batches) with this problem and batch among them."
    )


# ---------------------------------------------------------------------------------------------------
# Cache
# ---------------------------------------------------------------------------------------------------

_memory: dict[tuple[Problem, TileConfig, str], Kernel] = {}
_unsaved: dict[tuple[Problem, TileConfig, str], Entry] = {}
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


def loaded(problem: Problem, config: TileConfig, target: Target) -> bool:
    """Whether this process holds the kernel already."""
    return (problem, config, target.arch) in _memory


def get(problem: Problem, config: TileConfig, target: Target, *, batch: int | None = None) -> Kernel:
    """The kernel of (problem, config) for `target`: from memory, else from disk, else compiled and stored.

    Args:
        batch: rows of the call that asks, for error messages alone.

    Returns:
        A function of (state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out,
        D, z, dt_bias, state_batch_indices, pad_slot_id) that launches on torch's current stream.

    Raises:
        ValueError: if the config is not valid for the problem on the target.
        RuntimeError: if the current stream is capturing a CUDA graph and the kernel is not in memory.
    """
    name = (problem, config, target.arch)
    kernel = _memory.get(name)
    if kernel is not None:
        _counts["memory"] += 1
        return kernel
    if capturing():
        raise capture_error(problem, config, batch)
    with _lock:
        if name in _memory:  # another thread was faster
            _counts["memory"] += 1
        else:
            found = entry(problem, config, target)
            try:
                _memory[name] = _load(found.path)
            except Exception as error:  # whatever the loader raises, the entry is a miss
                _once(f"damaged:{found.path}", f"kernel cache: {found.path} does not load ({error}); compiling it anew")
                found = _compile(problem, config, target.arch, replace=found)
                _memory[name] = _load(found.path)
        return _memory[name]


def entry(problem: Problem, config: TileConfig, target: Target) -> Entry:
    """The disk entry of (problem, config) for `target`, compiled first if there is none. Loads nothing.

    Raises:
        ValueError: if the config is not valid for the problem on the target.
    """
    if reason := config.invalid_reason(problem, target):
        raise ValueError(f"config: {config.label()} cannot run {problem.label()} on {target.name}: {reason}")
    with _lock:
        if unsaved := _unsaved.get((problem, config, target.arch)):
            _counts["memory"] += 1
            return unsaved
        found = _find(cache_dir() / key(problem, config, target.arch))
        if found is not None:
            _counts["disk"] += 1
            return found
        return _compile(problem, config, target.arch)


def _compile(problem: Problem, config: TileConfig, arch: str, replace: Entry | None = None) -> Entry:
    """Compile under the key's lock unless another process did so meanwhile; `replace` is an entry found useless."""
    directory = cache_dir() / key(problem, config, arch)
    lock = filelock.FileLock(directory.with_suffix(".lock"), timeout=_LOCK_SECONDS)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError, filelock.Timeout) as error:
        return _compile_unsaved(problem, config, arch, error)
    try:
        if replace is None:
            found = _find(directory)
            if found is not None:
                _counts["disk"] += 1
                return found
        elif replace.path.is_relative_to(directory):
            with contextlib.suppress(OSError):
                replace.path.with_suffix(".json").unlink(missing_ok=True)
        compiled = _timed_build(problem, config, arch)
        try:
            return _store(directory, compiled, problem, config, arch)
        except OSError as error:
            return _keep_unsaved(compiled, problem, config, arch, error)
    finally:
        lock.release()


def _timed_build(problem: Problem, config: TileConfig, arch: str) -> Any:
    start = time.perf_counter()
    compiled = _build(problem, config, arch)
    _counts["compiled"] += 1
    seconds = time.perf_counter() - start
    log.info("compiled %s, config %s, for %s in %.1f s", problem.label(), config.label(), arch, seconds)
    return compiled


def _compile_unsaved(problem: Problem, config: TileConfig, arch: str, error: BaseException) -> Entry:
    return _keep_unsaved(_timed_build(problem, config, arch), problem, config, arch, error)


def _keep_unsaved(compiled: Any, problem: Problem, config: TileConfig, arch: str, error: BaseException) -> Entry:
    """Keep a kernel for this process alone, since the cache directory cannot be written."""
    global _private
    _once(
        f"unwritable:{cache_dir()}",
        f"kernel cache: {cache_dir()} cannot be written ({type(error).__name__}: {error}); kernels are kept in memory "
        f"and compiled again by every process. Set REPLAYSSM_CACHE_DIR to a writable directory.",
    )
    if _private is None:
        _private = tempfile.TemporaryDirectory(prefix="replayssm_cute_")
    found = _store(Path(_private.name) / key(problem, config, arch), compiled, problem, config, arch)
    _unsaved[(problem, config, arch)] = found
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
        found = _find(cache_dir() / key(item[0], item[1], item[2].arch))
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


# ---------------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------------


def _parse_problems(texts: Sequence[str], files: Sequence[str]) -> list[tuple[Problem, list[TileConfig]]]:
    """Problems (and their configs, if named) of --problem texts and --plan files.

    A plan file is JSON: a list of {"problem": {...}, "configs": [{...}, ...]}, configs optional, or a tuned table.
    """
    wanted: list[tuple[Problem, list[TileConfig]]] = []
    for text in texts:
        wanted.append((Problem.from_json(json.loads(text)), []))
    for file in files:
        data = json.loads(Path(file).read_text())
        if isinstance(data, dict) and "entries" in data:
            from .tables import Table

            table = Table.from_json(data)
            wanted += [(p, list(dict.fromkeys(c.config for c in cells))) for p, cells in table.entries.items()]
            continue
        if not isinstance(data, list):
            raise ValueError(f"--plan {file}: got a {type(data).__name__}, expected a list or a table")
        for one in data:
            configs = [TileConfig.from_json(c) for c in one.get("configs", [])]
            wanted.append((Problem.from_json(one["problem"]), configs))
    return wanted


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m replayssm_cute.compiler", description="Fill the kernel cache for a target, without a GPU."
    )
    parser.add_argument(
        "--target", action="append", required=True, help="GPU or architecture: b300, sm_103a; repeatable"
    )
    parser.add_argument("--problem", action="append", default=[], metavar="JSON", help="a problem's fields; repeatable")
    parser.add_argument("--plan", action="append", default=[], metavar="FILE", help="JSON list of problems, or a table")
    parser.add_argument("--config", action="append", default=[], metavar="JSON", help="configs for every problem")
    parser.add_argument("--batch", action="append", type=int, default=[], help="batches whose default config is wanted")
    parser.add_argument("--workers", type=int, default=None, help="processes (default: CPUs)")
    args = parser.parse_args(argv)
    try:
        wanted = _parse_problems(args.problem, args.plan)
        forced = [TileConfig.from_json(json.loads(text)) for text in args.config]
        targets = [named(name) for name in args.target]
    except (ValueError, TypeError, KeyError, AttributeError, OSError, NotImplementedError) as error:
        parser.error(str(error))
    if not wanted:
        parser.error("nothing to compile: give --problem or --plan")
    items: list[Item] = []
    for target in targets:
        for problem, configs in wanted:
            chosen = configs + forced
            if not chosen:
                # Both sides of the default rule, unless the batches are named.
                chosen = [default_config(problem, target, b) for b in args.batch or (1, 1 << 16)]
            items += [(problem, config, target) for config in dict.fromkeys(chosen)]

    def report(done: Done, count: int, total: int) -> None:
        problem, config, target = done.item
        outcome = f"FAILED: {done.error}" if done.error else f"{done.source}, {done.seconds:.1f} s"
        print(f"[{count}/{total}] {target.arch} {problem.label()} {config.label()}: {outcome}", flush=True)

    results = compile_many(items, args.workers, report)
    failed = sum(r.error is not None for r in results)
    print(f"{len(results) - failed} of {len(results)} kernels are in {cache_dir()}")
    return 1 if failed else 0


if __name__ == "__main__":
    # Run as a script, this file is a second module: workers and counters belong to the imported one.
    from replayssm_cute.compiler import main as imported_main

    sys.exit(imported_main())
