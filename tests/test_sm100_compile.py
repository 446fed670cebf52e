"""The Blackwell step kernel compiles for sm_100a and sm_103a, and what it compiles to is what was meant.

Layouts, descriptors and instruction names are held to those of a small kernel by the DSL's own operations.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulator import tensor
from simulator.blackwell import BLACKWELL

from replayssm_cute import compiler, resources
from replayssm_cute.config import SHARED_RESERVED, TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.sm100 import ARCHES, COLUMNS, ROWS, Sm100Config, tensor_layout
from replayssm_cute.target import named

SUPER = Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16)
BF16 = dataclasses.replace(SUPER, state_dtype="bf16", has_z=True, pdl=True)
LARGE = dataclasses.replace(SUPER, heads=24, head_dim=128, d_state=256, groups=1)
F16 = dataclasses.replace(
    SUPER, state_dtype="f16", io_dtype="f16", dt_dtype="f16", d_dtype=None, d_state=64, compact=False
)
RAGGED = dataclasses.replace(SUPER, ragged=True, window=32)
LONG = dataclasses.replace(SUPER, tokens=32, window=64, state_dtype="bf16")
NARROW = dataclasses.replace(SUPER, heads=96, head_dim=80)
NARROW_BF16 = dataclasses.replace(NARROW, state_dtype="bf16", ragged=True, has_z=True, tokens=6)
NARROW_F16 = dataclasses.replace(F16, heads=112, head_dim=80, d_state=128)
# (problem, config, CTAs that a multiprocessor is meant to hold)
CASES = [
    (SUPER, Sm100Config.of(SUPER), 2),
    (SUPER, Sm100Config.of(SUPER, turns=2, stages=2, tail_rows=9), 1),
    (dataclasses.replace(SUPER, tokens=16), Sm100Config.of(SUPER, turns=2, ring="whole"), 1),
    (BF16, Sm100Config.of(BF16, turns=2, stages=2), 2),
    (LARGE, Sm100Config.of(LARGE), 1),
    (F16, Sm100Config.of(F16, turns=4, stages=2), 2),
    (RAGGED, Sm100Config.of(RAGGED, turns=2), 1),
    (LONG, Sm100Config.of(LONG), 1),
    (NARROW, Sm100Config.of(NARROW), 3),
    (SUPER, Sm100Config.of(SUPER, ctas_per_sm=2, launch_control=True), 2),
]
ONCE = [  # for one architecture each
    (NARROW, Sm100Config.of(NARROW, turns=4, tail_rows=12), 1),
    (BF16, Sm100Config.of(BF16, turns=2, stages=2, launch_control=True), 2),
    (NARROW_BF16, Sm100Config.of(NARROW_BF16, turns=2, stages=2), 1),
    (NARROW, Sm100Config.of(NARROW, ctas_per_sm=3, launch_control=True), 3),
    (NARROW_F16, Sm100Config.of(NARROW_F16), 2),
    (RAGGED, Sm100Config.of(RAGGED, turns=2, tail_rows=9, launch_control=True), 1),
]
NAMES = {
    "UTCHMMA": "tcgen05.mma",
    "UTCBAR": "tcgen05.commit",
    "UTMALDG": "a TMA load",
    "LDTM": "tcgen05.ld",
    "UTCATOMSWS": "tcgen05.alloc and dealloc",
    "UGETNEXTWORKID": "clusterlaunchcontrol.try_cancel",
}


def case_id(case: tuple[Problem, Sm100Config, int]) -> str:
    return f"{case[0].label()} {case[1].label()}"


@functools.cache
def operands(kind: str, d_state: int = 128) -> Any:
    """The kernel's own operands, from its source."""
    problem = dataclasses.replace(SUPER, d_state=d_state, state_dtype=kind)
    if kind == "f16":
        problem = dataclasses.replace(problem, io_dtype="f16", dt_dtype="f16")
    return BLACKWELL.module("sm100/step").Sm100StepKernel(problem, Sm100Config.of(problem)).operands


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The known kernel, compiled: (kind, arch) -> (layouts, PTX, object file)."""
    folder = tmp_path_factory.mktemp("known")
    script = Path(__file__).with_name("known_kernel.py")
    subprocess.run([sys.executable, str(script)], cwd=folder, check=True, capture_output=True)
    found = json.loads((folder / "known.json").read_text())

    def get(kind: str, arch: str) -> tuple[dict[str, str], str, Path]:
        name = f"{kind}-{arch}"
        return found[name]["layouts"], found[name]["ptx"], folder / f"{name}.o"

    return get


def needs_nvdisasm() -> None:
    if resources.nvdisasm() is None:
        pytest.skip("nvdisasm is not installed, so the code itself was not looked at")


# ---- against the DSL's own kernel ------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_names_of_instructions(known: Any, kind: str, arch: str) -> None:
    """The known kernel has all of them; the portable kernel has none but the TMA load."""
    needs_nvdisasm()
    steps = 128 * (4 if kind == "f32" else 2) // 32
    counts = resources.count_opcodes(resources.disassemble(resources.cubin(known(kind, arch)[2].read_bytes())))
    assert set(NAMES) <= set(counts) and counts["LDTM"] == 4 and counts["UGETNEXTWORKID"] == 1
    assert counts["UTCHMMA"] in (steps, steps // 2)  # unrolled, or a loop over the two halves of each block
    portable = resources.sass_counts(SUPER, TileConfig(), named(arch))
    assert portable is not None and set(NAMES) & set(portable) == {"UTMALDG"}


def parsed(text: str) -> tuple[tuple[int, int, int], list[int]]:
    """A layout's swizzle, and its values in the order of its coordinates, the first one fastest."""
    swizzle = re.match(r"S<(\d),(\d),(\d)> o 0 o ", text)
    shape, stride = (ast.literal_eval(part) for part in text.split(" o ")[-1].split(":"))

    def flat(tree: Any) -> list[int]:
        return [leaf for branch in tree for leaf in flat(branch)] if isinstance(tree, tuple) else [tree]

    sizes, steps = flat(shape), flat(stride)
    values = [
        sum(i * s for i, s in zip(reversed(where), steps, strict=True))
        for where in itertools.product(*(range(n) for n in reversed(sizes)))
    ]
    bits = tuple(map(int, swizzle.groups())) if swizzle else (0, 0, 0)
    return bits, values  # type: ignore[return-value]


def swizzled(at: np.ndarray, bits: tuple[int, int, int]) -> np.ndarray:
    count, base, shift = bits
    return at ^ (at >> shift & ((1 << count) - 1) << base)


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_descriptors_address_the_dsl_s_layouts(known: Any, kind: str) -> None:
    """Every byte that our descriptors reach is where the DSL's layout for the MMA has that element."""
    layouts = known(kind, "sm_100a")[0]
    size = 4 if kind == "f32" else 2
    per_step = 32 // size
    ours = operands(kind)
    descriptor = BLACKWELL.module("sm100/operands").descriptor
    start = 64 * 1024
    for name, rows, block in (("a", ROWS, ROWS * 128), ("b", COLUMNS, COLUMNS * 128)):
        bits, elements = parsed(layouts[name])
        theirs = start + swizzled(np.array(elements) * size, bits)
        # coordinates: row, element of an MMA's K, step
        theirs = theirs.reshape(ours.steps, per_step, rows).transpose(0, 2, 1)
        for step in range(ours.steps):
            words = tensor.addresses(descriptor(start + ours.offset(step, block)), rows)
            found = words[:, :, None] + np.arange(0, 4, size)
            assert (found.reshape(rows, per_step) == theirs[step]).all(), (name, step)


@pytest.mark.parametrize("kind", ["f32", "bf16", "f16"])
def test_constants_are_the_dsl_s(known: Any, kind: str) -> None:
    """Descriptors and the instruction's shape stand in the known kernel's PTX as in ours."""
    ptx = known(kind, "sm_100a")[1]
    ours = operands(kind)
    constants = {int(n) for n in re.findall(r"\b\d{8,20}\b", ptx)}
    base = BLACKWELL.module("sm100/operands").DESCRIPTOR
    assert ours.shape in constants
    for block in (ROWS * 128, COLUMNS * 128):
        assert {base + ours.offset(step, block) // 16 for step in range(ours.steps)} <= constants
    assert f"tcgen05.mma.cta_group::1.kind::{ours.kind}" in ptx
    assert "tcgen05.ld.sync.aligned.16x256b.x1.b32" in ptx


def test_fragments_are_the_dsl_s(known: Any) -> None:
    """Who gets which sum of a 16 x 8 tile: lanes and registers of the copy are those that the simulator gives."""
    layouts = known("f32", "sm_100a")[0]
    _, values = parsed(layouts["copy"])
    # coordinates: t, g, warp, register's two bits; values: row of the four warps (warp fastest) + 64 x column
    table = np.array(values).reshape(2, 2, 4, 8, 4)
    for second, first, warp, g, t in itertools.product(range(2), range(2), range(4), range(8), range(4)):
        row, column = table[second, first, warp, g, t] % 64, table[second, first, warp, g, t] // 64
        assert (row, column) == (4 * (g + 8 * second) + warp, 2 * t + first)
    # the second 16 rows of a warp are 16 lanes on, the next 8 columns 8 on
    assert layouts["source"].endswith(",1048576,8)") and 1048576 == 16 << 16
    assert layouts["target"].endswith(f",{16 * COLUMNS},8)")


# ---- index arithmetic by brute force ---------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("kind", "d_state"), list(itertools.product(["f32", "bf16"], [64, 128, 256])))
def test_the_state_lies_where_mma_and_flush_look_for_it(kind: str, d_state: int, head_dim: int) -> None:
    """TMA's place, the descriptors' and the flush's are one, for every element of a turn; no two share a byte.

    What an MMA reads beyond a turn's rows lies in the CTA's shared memory.
    """
    problem = dataclasses.replace(SUPER, head_dim=head_dim, d_state=d_state, state_dtype=kind)
    kernel = BLACKWELL.module("sm100/step").Sm100StepKernel(problem, Sm100Config.of(problem))
    spec, size = kernel.spec, problem.state_bytes
    rows = spec.config.parallel_heads * head_dim
    assert spec.rows == rows == (80 if head_dim == 80 else ROWS)
    composed = kernel.copies.staged_layout()
    assert composed.outer.shape[:4] == kernel.copies.box()
    column, p, head, block = np.meshgrid(*(np.arange(n) for n in kernel.copies.box()), indexing="ij")
    at = sum(i * s for i, s in zip((column, p, head, block), composed.outer.stride, strict=False))
    places = swizzled(at * size, (3, 4, 3))  # of element (column, p, head, block)
    assert len(np.unique(places)) == places.size and places.max() + size == spec.shared.stage_bytes
    by_row = places.transpose(2, 1, 3, 0).reshape(rows, d_state)  # (row of the turn, column of the state)
    # the MMA's
    descriptor = BLACKWELL.module("sm100/operands").descriptor
    ours = kernel.operands
    for step in range(ours.steps):
        words = tensor.addresses(descriptor(ours.offset(step, rows * 128)), ROWS)
        expected = by_row[:, step * (32 // size) :][:, : 32 // size : 4 // size]
        assert (words[:rows] == expected).all()
        assert words.max() + 4 <= spec.tensor.c, "it reads no C"
    # the flush's: warp, tile, side, g own a row; t and which a 16-byte chunk of a block
    seen = np.zeros((rows, d_state), int)
    for warp, tile, side, g, t, which, b in itertools.product(
        range(spec.warps), range(spec.tiles), range(2), range(8), range(4), range(2), range(spec.blocks)
    ):
        offset = (warp * spec.warp_rows + tile * 16) * 128
        chunk = offset + (b * (spec.rows * 32) + (g + 8 * side) * 32 + ((2 * t + which) ^ g) * 4) * 4
        row, first = warp * spec.warp_rows + 16 * tile + g + 8 * side, b * spec.block + (2 * t + which) * spec.chunk
        assert chunk == by_row[row, first]
        seen[row, first : first + spec.chunk] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("launch_control", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("tokens", [1, 4, 8, 9, 16, 17, 32])
def test_every_output_of_a_turn_has_one_owner(head_dim: int, tokens: int, launch_control: bool) -> None:
    """Row of the MMA -> lane of tensor memory -> warp and fragment -> (head, row of P, token), each of them once."""
    problem = dataclasses.replace(SUPER, head_dim=head_dim, tokens=tokens, window=32)
    config = Sm100Config.of(problem, launch_control=launch_control)
    spec = BLACKWELL.module("sm100/step").Sm100StepKernel(problem, config).spec
    warps = spec.all_threads // 32
    parts = {spec.part(hardware): hardware for hardware in range(warps)}
    assert set(parts) == {*range(spec.warps), spec.issuer, *([spec.loader] if launch_control else [])}
    assert len(parts) == warps, "every warp has a part of its own"
    owners = np.zeros((config.parallel_heads, head_dim, spec.tokens_pad), int)
    for warp, tile, n, lane, e in itertools.product(
        range(spec.warps), range(spec.tiles), range(spec.token_tiles), range(32), range(4)
    ):
        g, t = lane // 4, lane % 4
        tensor_lane = warp * spec.warp_rows + 16 * tile + g + 8 * (e // 2)
        column = 8 * n + 2 * t + e % 2
        assert tensor_lane // 32 == parts[warp] % 4, "a warp reaches its own quarter of the lanes alone"
        # as the epilogue counts: the warp's head, and its rows of P
        side, p0 = warp // spec.head_warps, warp % spec.head_warps * spec.warp_rows
        p = p0 + 16 * tile + g + 8 * (e // 2)
        assert (tensor_lane // head_dim, tensor_lane % head_dim) == (side, p), "the row that the MMA has there"
        owners[side, p, column] += 1
    assert (owners == 1).all() and spec.tokens_pad <= spec.columns == (COLUMNS if tokens <= COLUMNS else 2 * COLUMNS)


# ---- what our kernel compiles to -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "arch"),
    [*itertools.product(CASES, ARCHES), *zip(ONCE, itertools.cycle(ARCHES), strict=False)],
    ids=lambda given: given if isinstance(given, str) else case_id(given),
)
def test_compiles_to_what_was_meant(case: tuple[Problem, Sm100Config, int], arch: str) -> None:
    problem, config, resident = case
    where = named(arch)
    assert config.invalid_reason(problem, where) is None
    found = resources.inspect(problem, config, where)
    assert found.stack_bytes == 0, f"{found.stack_bytes} bytes spilled a thread, {found.registers} registers"
    warps = 5 if problem.head_dim == 80 else 4
    assert (
        found.threads == 32 * (warps + 1 + config.launch_control)
        and found.shared_bytes == tensor_layout(problem, config).total
    )
    assert resident * (found.shared_bytes + SHARED_RESERVED) <= where.shared_per_sm
    assert resident * found.threads * -(-found.registers // 8) * 8 <= where.registers_per_sm
    needs_nvdisasm()
    counts = resources.sass_counts(problem, config, where)
    assert counts is not None
    assert counts.get("LDL", 0) == counts.get("STL", 0) == 0
    steps = problem.d_state * problem.state_bytes // 32
    assert counts["UTCHMMA"] == steps, "an MMA for every 32 bytes of a row, and no loop around them"
    assert counts["LDTM"] == config.tiles_per_warp * -(-problem.tokens // 8)
    assert counts["UTCBAR"] == 1 + config.launch_control and counts["UTCATOMSWS"] >= 2
    assert counts.get("UGETNEXTWORKID", 0) == config.launch_control
    assert counts["UTMALDG"] >= 1 and counts["HMMA"] > 0


def test_another_target_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_CACHE_DIR", str(tmp_path))
    for arch in ("sm_90a", "sm_120a"):
        with pytest.raises(ValueError, match="needs sm_100a or sm_103a"):
            compiler.entry(SUPER, Sm100Config.of(SUPER), named(arch))
