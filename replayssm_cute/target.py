"""What a kernel is compiled for and tuned on: one description per GPU, from a device or by name."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Target:
    """A GPU as the compiler, the validity predicate and the cost model see it.

    Attributes:
        name: GPU name, as `torch.cuda.get_device_name` gives it, or the catalogue's own.
        arch: compilation target, for example "sm_90a".
        sms: number of streaming multiprocessors.
        shared_per_block, shared_per_sm: bytes of shared memory (opt-in limit of a block; whole SM).
        registers_per_sm: 32-bit registers.
        threads_per_sm: resident threads.
        read_gbs: sustained streaming read limit in GB/s (1e9 bytes).
        read_gbs_source: "measured" or "datasheet": only measured ones back a claim.
    """

    name: str
    arch: str
    sms: int
    shared_per_block: int
    shared_per_sm: int
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048
    read_gbs: float = 0.0
    read_gbs_source: str = "datasheet"


KIB = 1024
# Streaming limits: the H200's is the median of four measured runs (4,557-4,667 GB/s); the others are
# the vendor's datasheet bandwidths times 0.95, the H200's own measured share of its datasheet's 4.8 TB/s (8 TB/s for
# all four of B200, GB200, B300, GB300). None of those four has been seen by this project. Their names are those that
# torch reports to others: B300 in vLLM's issue 30441, GB200 in its issue 33543, GB300 in SGLang's tuned MoE configs,
# which are named after torch's device name. GB200 and GB300 are the B200's and the B300's chips with four SMs more in
# use: 152 in VeOmni's pull request 986 (GB200) and in timings published with FlashInfer (GB300).
_CATALOGUE: dict[str, Target] = {
    "h200": Target("NVIDIA H200", "sm_90a", 132, 227 * KIB, 228 * KIB, read_gbs=4600.0, read_gbs_source="measured"),
    "h100": Target("NVIDIA H100 80GB HBM3", "sm_90a", 132, 227 * KIB, 228 * KIB, read_gbs=3180.0),
    "b200": Target("NVIDIA B200", "sm_100a", 148, 227 * KIB, 228 * KIB, read_gbs=7600.0),
    "gb200": Target("NVIDIA GB200", "sm_100a", 152, 227 * KIB, 228 * KIB, read_gbs=7600.0),
    "b300": Target("NVIDIA B300 SXM6 AC", "sm_103a", 148, 227 * KIB, 228 * KIB, read_gbs=7600.0),
    "gb300": Target("NVIDIA GB300", "sm_103a", 152, 227 * KIB, 228 * KIB, read_gbs=7600.0),
    "a100": Target("NVIDIA A100-SXM4-80GB", "sm_80", 108, 163 * KIB, 164 * KIB, read_gbs=1940.0),
    "l40s": Target("NVIDIA L40S", "sm_89", 142, 99 * KIB, 100 * KIB, threads_per_sm=1536, read_gbs=820.0),
    "rtx-pro-6000": Target(
        "NVIDIA RTX PRO 6000 Blackwell", "sm_120a", 188, 99 * KIB, 100 * KIB, threads_per_sm=1536, read_gbs=1700.0
    ),
}
_DEFAULT_OF_ARCH = {
    "sm_90a": "h200", "sm_100a": "b200", "sm_103a": "b300", "sm_120a": "rtx-pro-6000", "sm_80": "a100", "sm_89": "l40s",
}  # fmt: skip
ARCHES = tuple(_DEFAULT_OF_ARCH)


def named(name: str) -> Target:
    """The catalogue's target of that name ("h200", "b300") or architecture ("sm_100a").

    Raises:
        TypeError: if `name` is no str.
        ValueError: if neither is known, listing what is.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: got {type(name).__name__}, expected the str of a target")
    key = _DEFAULT_OF_ARCH.get(name, name).lower()
    if key not in _CATALOGUE:
        known = ", ".join((*_CATALOGUE, *_DEFAULT_OF_ARCH))
        raise ValueError(f"unknown target {name!r}; known: {known}")
    return _CATALOGUE[key]


@functools.cache
def of_device(index: int) -> Target:
    """The target of CUDA device `index`, with the catalogue's bandwidth where the name is known.

    Raises:
        RuntimeError: if the device's compute capability is one that no kernel here is written for.
    """
    props = torch.cuda.get_device_properties(index)
    arch = f"sm_{props.major}{props.minor}" + ("a" if props.major >= 9 else "")
    if arch not in _DEFAULT_OF_ARCH:
        raise RuntimeError(
            f"GPU {props.name!r} has compute capability {props.major}.{props.minor}; "
            f"kernels exist for {', '.join(ARCHES)}. Move the tensors to the CPU to run the reference."
        )
    known = next((t for t in _CATALOGUE.values() if t.name == props.name), named(arch))
    return Target(
        name=props.name,
        arch=arch,
        sms=props.multi_processor_count,
        shared_per_block=getattr(props, "shared_memory_per_block_optin", known.shared_per_block),
        shared_per_sm=getattr(props, "shared_memory_per_multiprocessor", known.shared_per_sm),
        registers_per_sm=getattr(props, "regs_per_multiprocessor", known.registers_per_sm),
        threads_per_sm=getattr(props, "max_threads_per_multi_processor", known.threads_per_sm),
        read_gbs=known.read_gbs,
        read_gbs_source=known.read_gbs_source if known.name == props.name else "datasheet",
    )
