"""The README's examples run as they stand, and what it names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_examples_run_in_order() -> None:
    """All Python blocks, one after the other in one namespace, like a reader who types them in."""
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(blocks) >= 3
    namespace: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def test_the_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for command in set(re.findall(r"make ([a-z][a-z-]+)", README)):
        assert re.search(rf"^{command}:", makefile, re.M), f"make {command}"


def test_the_files_exist() -> None:
    for path in set(re.findall(r"`([\w./]+\.(?:py|txt|toml)|\.ci/run)`", README)):
        assert (ROOT / path).exists(), path
    layout = README[README.index("## Layout") :]
    for path in re.findall(r"(?<![\w/])([a-z_]+\.py)\b", layout):
        assert (ROOT / "replayssm_cute" / path).exists(), path
    for path in re.findall(r"(?<![\w/])((?:[a-z_]+/)+[a-z_]+\.py)\b", layout):
        assert any((base / path).is_file() for base in (ROOT, ROOT / "replayssm_cute")), path
    made = {"reports/"}  # by make tune; absent from a clone as long as no report is committed
    for folder in set(re.findall(r"(?<![\w/])((?:[a-z_]+/)+)(?=\W)", layout)) - made:
        assert any((base / folder).is_dir() for base in (ROOT, ROOT / "replayssm_cute")), folder
