"""Resources read from compiled code, and the parser's behaviour on what is no cubin."""

from __future__ import annotations

from pathlib import Path

import fakes
import pytest
from fakes import SMALL

from replayssm_cute import compiler, resources
from replayssm_cute.config import TileConfig
from replayssm_cute.target import named

CONFIG = TileConfig()


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Object files of one real kernel, for a Hopper and a Blackwell target."""
    directory = tmp_path_factory.mktemp("objects")
    found = {}
    for arch in ("sm_90a", "sm_100a"):
        path = directory / f"{arch}.o"
        compiler._export(compiler._build(SMALL, CONFIG, arch), path)
        found[arch] = path.read_bytes()
    return found


def test_real_kernels_resources(objects: dict[str, bytes]) -> None:
    for data in objects.values():
        found = resources.read_cubin(resources.cubin(data), CONFIG.shared_bytes(SMALL))
        assert 16 <= found.registers <= 255
        assert found.stack_bytes == 0, "the kernel spills"
        assert found.threads == 32 * CONFIG.warps(SMALL)
        assert found.static_shared_bytes == 0
        assert found.shared_bytes == CONFIG.shared_bytes(SMALL)
        assert found.code_bytes > 1000
        assert resources.Resources.from_json(found.to_json()) == found


def test_sass_counts_agree_with_the_cubins_own_word_on_spills(objects: dict[str, bytes]) -> None:
    if resources.nvdisasm() is None:
        pytest.skip("nvdisasm is not installed (pip install nvidia-cuda-nvdisasm)")
    counts = resources.count_opcodes(resources.disassemble(resources.cubin(objects["sm_90a"])))
    assert counts["HMMA"] > 0
    assert "LDL" not in counts and "STL" not in counts


def test_opcodes_are_counted_without_predicates_and_modifiers() -> None:
    sass = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/             @UP1  UIADD3 UR4, UR4, 0x1, URZ ;
        /*0030*/                   LDG.E R5, [R2] ;
        .L_x_1:
        /*0040*/                   EXIT ;
    """
    assert resources.count_opcodes(sass) == {"LDG": 2, "LDC": 1, "UIADD3": 1, "EXIT": 1}


def test_object_without_cubin_is_refused() -> None:
    with pytest.raises(ValueError, match="found 0 cubins"):
        resources.cubin(b"\x7fELF\x02\x01" + bytes(100))


def test_every_truncation_of_a_cubin_is_a_value_error(objects: dict[str, bytes]) -> None:
    whole = resources.cubin(objects["sm_90a"])
    for size in range(0, len(whole), max(1, len(whole) // 97)):
        with pytest.raises(ValueError, match="cubin"):
            resources.read_cubin(resources.cubin(whole[:size]))


@pytest.mark.parametrize("change", [{"registers": -1}, {"registers": True}, {"kernel": 3}, {"more": 1}])
def test_resources_from_bad_json(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="resources"):
        resources.Resources.from_json({**fakes.RESOURCES.to_json(), **change})


def test_inspect_refuses_an_invalid_config(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="head_split 3 x tiles_per_warp 1 does not divide"):
        resources.inspect(SMALL, TileConfig(head_split=3), named("sm_100a"))
