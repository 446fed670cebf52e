"""Fingerprints that compile cache, tables and reports share: of kernel sources, toolchain and host CPU."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import io
import os
import platform
import re
import tokenize
from collections.abc import Mapping
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
# What shapes the generated code of each group of kernels: its own folder, and sources elsewhere.
_GROUPS = {
    "step": ("kernels", ("ring.py", "config.py", "problem.py", "dtypes.py", "rounding.py")),
    "sm100": ("kernels/sm100", ("sm100.py",)),
    "cache": ("cache/kernels", ("ring.py", "dtypes.py", "kernels/primitives.py", "cache/shapes.py")),
    "fused": ("fused/kernels", ("fused/shapes.py", "dtypes.py", "config.py", "kernels/primitives.py")),
}
_DSL_WHEELS = (
    "nvidia-cutlass-dsl",
    "nvidia-cutlass-dsl-libs-base",
    "nvidia-cutlass-dsl-libs-core",
    "nvidia-cutlass-dsl-libs-cu12",
    "nvidia-cutlass-dsl-libs-cu13",
)
# Settings of the DSL that choose where things are written, printed or cached, not what is generated.
_NOT_CODEGEN = re.compile(
    r"CUTE_DSL_(LOG|PRINT|DUMP|KEEP|CACHE|JIT_|NO_CACHE|DISABLE_FILE_CACHING|LIBS|ARCH|SHOW_STACKTRACE|FILTER_STACKTRACE"
    r"|WARNINGS_IGNORE)"
)
# CPU features that a compiler may emit instructions for; kernels add others that say nothing about code.
_ISA = re.compile(
    r"(sse|ssse|avx|fma|f16c|bmi|abm|adx|aes|vaes|pclmul|vpclmul|sha|gfni|movbe|movdir|popcnt|lzcnt|cx16|amx|apx|xop|tbm"
    r"|asimd|sve|sme(?!p)|fphp|neon|crc32|atomics|lrcpc|dotprod|bf16|i8mm|pmull|dcpop)"
)


def without_comments(source: bytes) -> bytes:
    """Python source less its comments and the blank lines and trailing spaces around them; newlines normalized.

    Found by position, so that the result does not depend on how a Python version tokenizes the rest.
    """
    lines = source.replace(b"\r\n", b"\n").decode().split("\n")
    for token in tokenize.generate_tokens(io.StringIO("\n".join(lines)).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    kept = (line.rstrip() for line in lines)
    return "\n".join(line for line in kept if line).encode()


def of_sources(sources: Mapping[str, bytes]) -> str:
    """SHA-256 (hex) over `sources`, a map from relative path to Python source; comments do not count."""
    digest = hashlib.sha256()
    for name in sorted(sources):
        text = without_comments(sources[name])
        digest.update(f"{name}\0{len(text)}\0".encode())
        digest.update(text)
    return digest.hexdigest()


def kernel_sources(group: str = "step") -> dict[str, bytes]:
    """The sources that shape a group's generated code, by path relative to the package, with forward slashes.

    Groups: "step", the kernels of a decode step, which tuned tables are measured with; "sm100", what the Blackwell
    step kernel adds to them; "cache", those between steps; "fused", the conv and the norm of a decode step.
    """
    folder, others = _GROUPS[group]
    paths = [_PACKAGE / name for name in others] + sorted((_PACKAGE / folder).glob("*.py"))
    return {p.relative_to(_PACKAGE).as_posix(): p.read_bytes() for p in paths}


@functools.cache
def kernels(group: str = "step") -> str:
    """Fingerprint of a group's sources as this process first saw them; the same in every process and machine."""
    return of_sources(kernel_sources(group))


@functools.cache
def toolchain() -> dict[str, str]:
    """Versions of the DSL and of tvm-ffi, and a hash over the file hashes that the DSL's wheels record."""
    digest = hashlib.sha256()
    version = ""
    for wheel in _DSL_WHEELS:
        try:
            dist = importlib.metadata.distribution(wheel)
        except importlib.metadata.PackageNotFoundError:
            continue
        version = version or dist.version
        record = dist.read_text("RECORD") or ""
        # Installers write their own files into dist-info; the wheel's content is what matters.
        lines = sorted(x for x in record.splitlines() if "sha256=" in x and ".dist-info/" not in x and "../" not in x)
        digest.update("\n".join([wheel, dist.version, *lines]).encode())
    return {
        "dsl": version,
        "dsl_wheels": digest.hexdigest()[:16],
        "tvm_ffi": importlib.metadata.version("apache-tvm-ffi"),
    }


def codegen_environment() -> dict[str, str]:
    """The set environment variables of the DSL that may change generated code."""
    found = {k: v for k, v in os.environ.items() if k.startswith("CUTE_DSL_") and not _NOT_CODEGEN.match(k)}
    return dict(sorted(found.items()))


@functools.cache
def host_isa() -> frozenset[str]:
    """Machine and instruction-set features of this CPU: host code of a kernel is generated for all of them."""
    features = {platform.machine()}
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset(features | {f"host:{platform.node()}"})
    for line in lines:
        if line.startswith(("flags", "Features")):
            features |= {w for w in line.partition(":")[2].split() if _ISA.match(w)}
            break
    return frozenset(features)
