"""What a compiled kernel asks of a multiprocessor, read from its code without a GPU.

An exported kernel carries its GPU code as a cubin, an ELF file inside the object file. Registers, stack and
static shared memory stand in the cubin's tables; `sass_counts` disassembles it when nvdisasm is installed.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import shutil
import struct
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .config import SHARED_RESERVED, TileConfig
from .problem import Problem
from .target import Target

_EM_CUDA = 190
_SHT_NOBITS = 8
# Attributes of .nv.info that are read here; each is (function symbol, value) or, for threads, three words.
_REGCOUNT, _FRAME_SIZE, _MAX_THREADS, _REQUIRED_THREADS = 0x2F, 0x11, 0x05, 0x10
_FORM_SIZED = 4  # the attribute's payload follows, its size in the header's last two bytes


@dataclass(frozen=True, slots=True)
class Resources:
    """One kernel's demands.

    Attributes:
        kernel: symbol of the kernel in its cubin.
        registers: 32-bit registers a thread.
        stack_bytes: local memory a thread (stack frame); 0 means that nothing is spilled.
        static_shared_bytes: shared memory that the code itself declares.
        shared_bytes: shared memory a CTA, static and dynamic together, without the driver's own
            (`config.SHARED_RESERVED`).
        threads: threads a CTA, 0 when the code does not say.
        code_bytes: size of the machine code.
    """

    kernel: str
    registers: int
    stack_bytes: int
    static_shared_bytes: int
    shared_bytes: int
    threads: int
    code_bytes: int

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `from_json` gives the same Resources back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Resources:
        """The Resources of a `to_json` dict.

        Raises:
            ValueError: for missing, unknown or mistyped fields.
        """
        names = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(data, dict) or sorted(data) != sorted(names):
            raise ValueError(f"resources: expected exactly the fields {names}")
        for name, value in data.items():
            if name == "kernel" and not isinstance(value, str):
                raise ValueError(f"resources: kernel is {value!r}, expected a str")
            if name != "kernel" and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise ValueError(f"resources: {name} is {value!r}, expected an int >= 0")
        return cls(**data)


def inspect(problem: Problem, config: TileConfig, target: Target) -> Resources:
    """Resources of the kernel of (problem, config) compiled for `target`, from the cache if it is there.

    Raises:
        ValueError: if the config is not valid for the problem on the target.
    """
    from . import compiler

    return compiler.entry(problem, config, target).resources


def sass_counts(problem: Problem, config: TileConfig, target: Target) -> dict[str, int] | None:
    """Instruction counts by SASS opcode without modifiers ("LDL": local loads), or None without nvdisasm."""
    from . import compiler

    if nvdisasm() is None:
        return None
    return count_opcodes(disassemble(cubin(compiler.entry(problem, config, target).object_bytes())))


# ---------------------------------------------------------------------------------------------------
# Cubin
# ---------------------------------------------------------------------------------------------------


def cubin(object_bytes: bytes) -> bytes:
    """The cubin inside an exported object file (or `object_bytes` itself, if it is one).

    Raises:
        ValueError: if there is none, or more than one.
    """
    found = []
    for match in re.finditer(b"\x7fELF\x02\x01", object_bytes):
        start = match.start()
        header = object_bytes[start : start + 64]
        if len(header) == 64 and struct.unpack_from("<H", header, 18)[0] == _EM_CUDA:
            found.append(object_bytes[start : start + _elf_size(object_bytes, start)])
    if len(found) != 1:
        raise ValueError(f"object file: found {len(found)} cubins, expected 1")
    return found[0]


def _elf_size(data: bytes, start: int) -> int:
    """Bytes up to the end of the last table or section of the ELF file that begins at `start`."""
    phoff, shoff = struct.unpack_from("<QQ", data, start + 32)
    phentsize, phnum, shentsize, shnum = struct.unpack_from("<HHHH", data, start + 54)
    end = max(phoff + phentsize * phnum, shoff + shentsize * shnum)
    for i in range(shnum):
        at = start + shoff + i * shentsize
        if at + 40 > len(data):
            raise ValueError("cubin: its section table lies outside the file")
        kind, offset, size = struct.unpack_from("<4xI16xQQ", data, at)
        if kind != _SHT_NOBITS:
            end = max(end, offset + size)
    if start + end > len(data):
        raise ValueError("cubin: truncated")
    return int(end)


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    size: int
    data: bytes


def _sections(elf: bytes) -> list[_Section]:
    (shoff,) = struct.unpack_from("<Q", elf, 40)
    shentsize, shnum, shstrndx = struct.unpack_from("<HHH", elf, 58)
    raw = []
    for i in range(shnum):
        name, kind, offset, size = struct.unpack_from("<II16xQQ", elf, shoff + i * shentsize)
        raw.append((name, size, b"" if kind == _SHT_NOBITS else elf[offset : offset + size]))
    names = raw[shstrndx][2]
    return [_Section(names[n : names.index(b"\0", n)].decode(), size, data) for n, size, data in raw]


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, payload) of an .nv.info section."""
    at = 0
    while at + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if form == _FORM_SIZED:
            yield attribute, info[at : at + size]
            at += size


def read_cubin(elf: bytes, dynamic_shared_bytes: int = 0) -> Resources:
    """Resources of the one kernel in a cubin; `dynamic_shared_bytes` is what its launch adds.

    Raises:
        ValueError: if this is no cubin with exactly one kernel.
    """
    try:
        sections = {s.name: s for s in _sections(elf)}
        kernels = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
        if len(kernels) != 1:
            raise ValueError(f"cubin: found {len(kernels)} kernels, expected 1")
        kernel = kernels[0]
        values: dict[int, int] = {}
        for attribute, payload in _attributes(sections[".nv.info"].data):
            if attribute in (_REGCOUNT, _FRAME_SIZE):
                values[attribute] = struct.unpack("<II", payload)[1]
        threads = 0
        for attribute, payload in _attributes(sections[f".nv.info.{kernel}"].data):
            if attribute in (_MAX_THREADS, _REQUIRED_THREADS) and len(payload) == 12:
                x, y, z = struct.unpack("<III", payload)
                threads = x * y * z
        shared = sections.get(f".nv.shared.{kernel}")
        # A kernel that uses any shared memory begins with the block that the driver reserves for itself.
        static = max(0, shared.size - SHARED_RESERVED) if shared else 0
        return Resources(
            kernel=kernel,
            registers=values[_REGCOUNT],
            stack_bytes=values.get(_FRAME_SIZE, 0),
            static_shared_bytes=static,
            shared_bytes=static + dynamic_shared_bytes,
            threads=threads,
            code_bytes=sections[f".text.{kernel}"].size,
        )
    except (struct.error, KeyError, IndexError) as error:
        raise ValueError(f"cubin: damaged ({error!r})") from error


def code(elf: bytes) -> bytes:
    """The machine code of the one kernel in a cubin.

    Raises:
        ValueError: if this is no cubin with exactly one kernel.
    """
    found = [s.data for s in _sections(elf) if s.name.startswith(".text.")]
    if len(found) != 1:
        raise ValueError(f"cubin: found {len(found)} kernels, expected 1")
    return found[0]


# ---------------------------------------------------------------------------------------------------
# Disassembly
# ---------------------------------------------------------------------------------------------------


@functools.cache
def nvdisasm() -> str | None:
    """Path of nvdisasm, from the nvidia-cuda-nvdisasm package or PATH; None if neither has it."""
    packaged = Path(sysconfig.get_path("purelib")) / "nvidia"
    candidates = sorted(packaged.glob("*/bin/nvdisasm"), reverse=True)
    return str(candidates[0]) if candidates else shutil.which("nvdisasm")


def disassemble(elf: bytes) -> str:
    """SASS of a cubin.

    Raises:
        RuntimeError: if nvdisasm is not installed or fails.
    """
    tool = nvdisasm()
    if tool is None:
        raise RuntimeError("nvdisasm is not installed; pip install nvidia-cuda-nvdisasm")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(elf)
        file.flush()
        done = subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed: {done.stderr.strip()}")
    return done.stdout


_OPCODE = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)", re.MULTILINE)


def count_opcodes(sass: str) -> dict[str, int]:
    """How often each opcode (without modifiers) stands in a disassembly, most frequent first."""
    return dict(collections.Counter(_OPCODE.findall(sass)).most_common())
