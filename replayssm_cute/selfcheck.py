"""Trust on first use: a kernel serves on a GPU only after its numbers were right on that GPU, under that driver.

A self-check runs a kernel on small adversarial calls and holds it to `compare.bounds`. The rule is the same for every
GPU, also for those that kernels were developed on: once per kernel, GPU name, compute capability and driver version.
The verdict lies beside the compiled kernel in the compile cache; another GPU, driver, kernel or check has no verdict
there yet. A kernel that fails is left out with one warning, and `plan` takes the next of `substitutes`.

REPLAYSSM_SELFCHECK=0 switches all of this off, for people who profile. The Blackwell kernel (`sm100`), which has run
on no GPU yet, then does not serve.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import compare, compiler, fingerprint
from .calls import Call, random_call
from .config import P_TILE, RINGS, TileConfig
from .default_rule import default_config, default_configs
from .problem import Problem
from .sm100 import Sm100Config
from .target import Target

log = logging.getLogger("replayssm_cute")

FORMAT = 1  # of a verdict's file
OUTCOMES = ("passed", "failed", "crashed")
ROWS = 6  # live rows of a trial, and as many again in the tail of a config that has one
# CTAs of the trial that has more than a GPU of at most 160 multiprocessors holds at a time: twice two for each, or
# twice as many as a config asks room for.
PLACES, PLACES_A_CTA = 640, 320
HANG_SECONDS = 60.0  # a trial takes microseconds; the rest is for a GPU that others keep busy

_PACKAGE = Path(__file__).resolve().parent
_CHECK_SOURCES = (
    "selfcheck.py",
    "compare.py",
    "calls.py",
    "reference.py",
    "checks.py",
    "packing.py",
    "ring.py",
    "rounding.py",
)
_PROC = Path("/proc/driver/nvidia/version")
# Errors that a launch can meet without the kernel being wrong: they say nothing about it and are not kept.
_NOT_THE_KERNEL = re.compile(r"out.of.memory|captur", re.I)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a self-check found.

    Attributes:
        outcome: "passed", "failed" (wrong numbers) or "crashed" (raised, or never finished).
        detail: the violated bound or the error; empty if it passed.
    """

    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a verdict holds for; `driver` is None where its version cannot be told, and then nothing is kept on disk."""

    name: str
    capability: str
    driver: str | None

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability}, driver {self.driver or 'unknown'})"


_verdicts: dict[tuple[Problem, TileConfig, int], Verdict] = {}
_lock = threading.RLock()
_ran = 0


def count() -> int:
    """How many self-checks this process has run; verdicts that were read do not count."""
    return _ran


def enabled() -> bool:
    """Whether kernels are self-checked: unless REPLAYSSM_SELFCHECK=0, which is logged once."""
    if os.environ.get("REPLAYSSM_SELFCHECK") != "0":
        return True
    _say("self-check: off (REPLAYSSM_SELFCHECK=0); kernels serve without their numbers having been checked on this GPU")
    return False


@functools.cache
def _say(message: str) -> None:
    """Log a warning once per process."""
    log.warning(message)


# ---------------------------------------------------------------------------------------------------
# Verdicts
# ---------------------------------------------------------------------------------------------------


def passed(problem: Problem, config: TileConfig, index: int) -> bool:
    """Whether a kernel may serve on CUDA device `index`: by the verdict in memory or on disk, else by a check now.

    Raises:
        RuntimeError: during a graph capture, if there is no verdict in memory; or if the kernel took the CUDA context
            down with it.
    """
    if not enabled():
        return not isinstance(config, Sm100Config)
    return _verdict(problem, config, index).outcome == "passed"


def excluded(problem: Problem, config: TileConfig, index: int) -> Verdict | None:
    """The verdict against a kernel if this process knows one; looks nothing up and runs nothing."""
    verdict = _verdicts.get((problem, config, index))
    return verdict if verdict and verdict.outcome != "passed" and enabled() else None


def substitutes(problem: Problem, batch: int, target: Target) -> list[TileConfig]:
    """What may serve in place of a failed config, in this order: the default rule's configs, then plain ones."""
    rule = [default_config(problem, target, batch), *default_configs(problem, target)]
    splits = range(1, problem.head_dim // P_TILE + 1)
    plain = [TileConfig(head_split=split, ring=ring) for ring in RINGS for split in splits]
    return list(dict.fromkeys((*rule, *(c for c in plain if c.is_valid(problem, target)))))


def refusal(problem: Problem, configs: list[TileConfig], index: int) -> RuntimeError:
    """The error of a call that no kernel may serve: each of `configs` has failed."""
    found = {config: _verdicts.get((problem, config, index)) for config in configs}
    reasons = "; ".join(f"config {c.label()} {v.outcome}: {v.detail}" for c, v in found.items() if v)
    if not enabled():
        reasons = "REPLAYSSM_SELFCHECK=0, and the sm100 kernel does not serve without one"
    return RuntimeError(
        f"no kernel for problem {problem.label()} has passed its self-check on {gpu(index)}: {reasons}. "
        f"Tensors on the CPU run the reference."
    )


def _verdict(problem: Problem, config: TileConfig, index: int) -> Verdict:
    global _ran
    name = (problem, config, index)
    if (known := _verdicts.get(name)) is not None:
        return known
    if compiler.capturing():
        raise compiler.capture_error(problem, config, None)
    from . import plan  # which imports this module

    with _lock:
        if name in _verdicts:  # another thread was faster
            return _verdicts[name]
        where, device = gpu(index), plan.tensor_device(index)
        identity = _identity(compiler.key(problem, config, plan.device_target(index).arch), where)
        verdict, lost = _read(identity), False
        if verdict is None:
            kernel = compiler.get(problem, config, plan.device_target(index))
            start = time.perf_counter()
            with plan.on_device(index), _plain_torch():
                verdict, lost = _examine(problem, config, kernel, device)
                _write(identity, verdict)  # at once: after a lost context even leaving the device may raise
            _ran += 1
            if verdict.outcome == "passed":
                seconds = time.perf_counter() - start
                log.info("self-check: %s, config %s, passed in %.2f s", problem.label(), config.label(), seconds)
        _verdicts[name] = verdict
        if verdict.outcome != "passed":
            log.warning(
                "self-check: the kernel for problem %s, config %s, %s on %s: %s; it is left out. Verdict: %s",
                problem.label(), config.label(), verdict.outcome, where, verdict.detail,
                _path(identity) or "kept for this process alone",
            )  # fmt: skip
        if lost:
            raise RuntimeError(
                f"self-check: the kernel for problem {problem.label()}, config {config.label()}, left the CUDA context "
                f"of {where} unusable: {verdict.detail}. Start the process again: it will leave this kernel out."
            )
        return verdict


# ---------------------------------------------------------------------------------------------------
# On disk
# ---------------------------------------------------------------------------------------------------


@functools.cache
def gpu(index: int) -> Gpu:
    """What verdicts on CUDA device `index` hold for."""
    properties = torch.cuda.get_device_properties(index)
    return Gpu(properties.name, f"{properties.major}.{properties.minor}", driver_version())


def driver_version() -> str | None:
    """The NVIDIA driver's version, for example "580.95.05", or None if it cannot be told.

    The kernel module says it in a file, which costs microseconds. Where that is hidden (WSL, some containers) NVML is
    asked, the library that comes with every driver, without a package for it. Both give the same text.
    """
    with contextlib.suppress(OSError):
        if found := re.search(r"Kernel Module\s+(?:for \S+\s+)?(\d[\d.]*\d)", _PROC.read_text()):
            return found[1]
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            try:
                text = ctypes.create_string_buffer(96)
                if nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))) == 0:
                    return text.value.decode() or None
            finally:
                nvml.nvmlShutdown()
    return None


@functools.cache
def _check_fingerprint() -> str:
    """Of what a verdict rests on: a stricter check must not trust the verdicts of an older one."""
    return fingerprint.of_sources({name: (_PACKAGE / name).read_bytes() for name in _CHECK_SOURCES})


def _identity(key: str, where: Gpu) -> dict[str, Any]:
    return {"format": FORMAT, "check": _check_fingerprint(), "key": key, **dataclasses.asdict(where)}


def _path(identity: dict[str, Any]) -> Path | None:
    """A verdict's file, in the directory of its kernel; None if it must not be kept."""
    if identity["driver"] is None:
        return None
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return compiler.cache_dir() / identity["key"] / f"{digest}.verdict"


def _read(identity: dict[str, Any]) -> Verdict | None:
    """The verdict on disk, None if there is none or it is damaged."""
    path = _path(identity)
    if path is None:
        return None
    try:
        data = json.loads(path.read_bytes())
        outcome, detail = data.pop("outcome"), data.pop("detail")
        if data != identity or outcome not in OUTCOMES or not isinstance(detail, str):
            raise ValueError("its content is not what is written for this kernel, GPU and driver")
        return Verdict(outcome, detail)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        _say(f"self-check: {path} is damaged ({type(error).__name__}: {error}); checking the kernel anew")
        return None


def _write(identity: dict[str, Any], verdict: Verdict) -> None:
    """Keep a verdict: written to a temporary name, then renamed."""
    path = _path(identity)
    if path is None:
        _say("self-check: the driver's version cannot be told; every process checks its kernels anew")
        return
    part = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
            part = Path(file.name)
            json.dump({**identity, **dataclasses.asdict(verdict)}, file, indent=1)
        os.replace(part, path)
    except OSError as error:
        # The same text for every kernel, so that it is said once.
        what = f"{compiler.cache_dir()} cannot be written ({type(error).__name__})"
        _say(f"self-check: {what}; every process checks its kernels anew")
    finally:
        if part is not None:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------------
# The check
# ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _plain_torch() -> Iterator[None]:
    """Torch's defaults, whatever the engine has set around the call: models are often built under others."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.device("cpu"), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(dtype)


def _examine(
    problem: Problem, config: TileConfig, kernel: compiler.Kernel, device: torch.device
) -> tuple[Verdict, bool]:
    """Run every trial until one goes wrong; also tells whether the CUDA context was lost with it."""
    from .plan import kernel_args

    for trial in trials(problem, config):
        before = trial.to(device)
        after = before.clone()
        _wait(device, None)  # errors of earlier work are raised here and not blamed on the kernel
        try:
            kernel(*kernel_args(after))
            _wait(device, HANG_SECONDS)
        except Exception as error:  # whatever a broken kernel raises
            first = (str(error).strip().splitlines() or [""])[0]  # the rest is general advice
            if _NOT_THE_KERNEL.search(first):
                raise
            return Verdict("crashed", f"{type(error).__name__}: {first}"), _lost(device, error)
        if violation := compare.bounds(problem).violation(compare.errors(before, after)):
            return Verdict("failed", violation), False
        if problem.philox_rounds is not None and (share := compare.same_codes(before, after)) < compare.LEAST_CODES:
            return Verdict("failed", f"{share:.2f} of the stochastically rounded codes are the reference's"), False
    return Verdict("passed"), False


def _wait(device: torch.device, seconds: float | None) -> None:
    """Wait for the current stream; a TimeoutError after `seconds`, since a barrier that never completes hangs."""
    if device.type != "cuda":
        return
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    if seconds is None:
        done.synchronize()
        return
    deadline = time.monotonic() + seconds
    while not done.query():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not finished after {seconds:.0f} s")
        time.sleep(1e-4)


def _lost(device: torch.device, error: Exception) -> bool:
    if device.type != "cuda":
        return False
    if isinstance(error, TimeoutError):
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def trials(problem: Problem, config: TileConfig) -> Iterator[Call]:
    """The calls of a self-check, as CPU tensors: together they hold every pnat in 0..W.

    Live rows wrap, new rows wrap, or nothing wraps; rows flush and others do not; padding is -1, then 0, then another
    negative slot; dead ring rows, foreign slots and the output hold NaN. Where the problem is not compact, heads are
    apart, with NaN between. A config with a tail gets batches that reach beyond it, and every pnat in either part.
    A ragged problem gets all of this three times: with every row at full length; then with lengths of 0..T, chosen so
    that no row flushes that would at full length; then with one token more, which makes just these flush. The last
    two have tokens, holding NaN, that no row has. Where CTAs take over the work of others that have not started
    (`Sm100Config.launch_control`), a last call has more of them than a GPU holds, with padding throughout.
    """
    in_tail = min(config.tail_rows, ROWS)  # live ones; padding fills the rest of a long tail
    step, period = in_tail or ROWS, problem.window + 1
    for more in (None, 0, 1) if problem.ragged else (None,):
        for number in range(max(3, -(-period // step))):  # three show short windows in every way to wrap
            yield _trial(problem, config, more, number, range(number * step, number * step + ROWS + in_tail))
    if isinstance(config, Sm100Config) and config.launch_control:
        places = max(PLACES, PLACES_A_CTA * config.ctas_per_sm)
        rows = max(ROWS, -(-places // config.ctas_per_row(problem)))
        yield _trial(problem, config, 1 if problem.ragged else None, 0, range(rows + in_tail), padded=8)


def _trial(
    problem: Problem, config: TileConfig, more: int | None, number: int, live: range, padded: int | None = None
) -> Call:
    """One call, with padding also after every `padded` rows in front of the tail."""
    period, tail = problem.window + 1, config.tail_rows
    in_tail = min(tail, ROWS)
    pad = (-1, 0)[number % 2]
    # Consecutive rows take turns at the ways to wrap, also where W + 1 is a multiple of their number.
    ways = [(i + (i // period if period % 3 == 0 else 0)) % 3 for i in live]
    pnat = [0, *(i % period for i in live)]
    start = [0, *(_start(problem, n, way) for n, way in zip(pnat[1:], ways, strict=True))]
    front = len(live) - in_tail // 2
    # Row 0 is padding, and so are its copies between the live rows at the two ends of the tail.
    before = [n for i in range(front + 1) for n in ((i, 0) if padded and i % padded == 0 else (i,))]
    order = [*before, *[0] * (tail - in_tail if tail else 1), *range(front + 1, len(pnat))]
    lengths = [problem.tokens if more is None else _length(problem, n, more) for n in pnat]
    lengths[0] = problem.tokens
    if problem.index_dtype is None:  # row i has slot i, so that each row needs its own; slot 0 may be padding
        pnat, start, lengths = ([values[i] for i in order] for values in (pnat, start, lengths))
    call = random_call(
        problem,
        len(pnat),
        slots=len(pnat) + 2,
        pnat=pnat,
        ring_start=start,
        padding=() if problem.index_dtype is None else (0,),
        pad_slot_id=pad,
        seed=number,
        lengths=lengths if problem.ragged else None,
        tail=0 if more is None else number + 1,
    )
    if call.state_batch_indices is not None:
        call = _take_rows(call, order)
        if pad == 0 and order.count(0) > 1 and call.state_batch_indices is not None:
            call.state_batch_indices[len(before)] = -3
    return call if problem.compact else _spread_heads(call)


def _take_rows(call: Call, order: list[int]) -> Call:
    """The same caches with batch rows in another order, some of them several times; strides of 0 stay."""
    taken: dict[str, Any] = {}
    if call.state_batch_indices is not None:
        taken["state_batch_indices"] = call.state_batch_indices[order]
    where: Any = order
    if call.cu_seqlens is not None:
        bounds = call.cu_seqlens.tolist()
        spans = [range(bounds[row], bounds[row + 1]) for row in order]
        taken["cu_seqlens"] = torch.tensor([0, *itertools.accumulate(map(len, spans))], dtype=torch.int32)
        where = 0, [*itertools.chain(*spans, range(bounds[-1], call.x.shape[1]))]
    for name in ("x", "dt", "B", "C", "out", "z"):
        t: torch.Tensor | None = getattr(call, name)
        if t is not None:
            rows = (t[..., :1] if t.stride(-1) == 0 else t)[where]
            rows = rows if call.cu_seqlens is None else rows[None]
            taken[name] = rows.expand(*rows.shape[:-1], t.shape[-1])
    return dataclasses.replace(call, **taken)


def _length(problem: Problem, pnat: int, more: int) -> int:
    """A ragged row's length: the most that does not flush, and `more` tokens, taken modulo T + 1."""
    return (problem.window - pnat + more) % (problem.tokens + 1)


def _start(problem: Problem, pnat: int, way: int) -> int:
    """A ring_start where live rows wrap (0), the new rows do (1), or none of them (2)."""
    rows = problem.ring_rows
    return ((rows - (pnat + 1) // 2) % rows, (rows - pnat - problem.tokens // 2) % rows, 0)[way]


_HEAD_DIMENSION = {
    **dict.fromkeys(("state", "x_cache", "B_cache", "dt_cache", "state_scale", "state_copy"), 1),
    **dict.fromkeys(("x", "dt", "B", "C", "out", "z"), 2),
    **dict.fromkeys(("A", "D", "dt_bias"), 0),
}


def _spread_heads(call: Call) -> Call:
    """The same call with heads and groups twice as far apart."""
    apart: dict[str, Any] = {}
    for name, dim in _HEAD_DIMENSION.items():
        t: torch.Tensor | None = getattr(call, name)
        if t is not None:
            small = t[tuple(slice(0, 1 if stride == 0 else None) for stride in t.stride())]
            between = 99 if t.dtype == torch.int8 else float("nan")
            wide = t.new_full((*small.shape[: dim + 1], 2, *small.shape[dim + 1 :]), between)
            wide.select(dim + 1, 0).copy_(small)
            apart[name] = wide.select(dim + 1, 0).expand(t.shape)
    return dataclasses.replace(call, **apart)
