"""What the packages import: the run time stays light, the tuner stays out of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNTIME = sorted((ROOT / "replayssm_cute").rglob("*.py"))
TUNING = sorted((ROOT / "tuning").rglob("*.py"))
# Distribution name -> import name, for what the run time may import beside the standard library.
RUNTIME_DEPENDENCIES = {
    "torch": "torch",
    "nvidia-cutlass-dsl": "cutlass",
    "apache-tvm-ffi": "tvm_ffi",
    "filelock": "filelock",
}


def imported(path: Path) -> set[str]:
    """Top-level names of absolute imports anywhere in a file, type checking and functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def modules_after(code: str) -> set[str]:
    """Top-level modules loaded by a fresh interpreter that runs `code`."""
    script = f"import sys\n{code}\nprint('\\n'.join({{m.partition('.')[0] for m in sys.modules}}))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


@pytest.mark.parametrize("path", RUNTIME, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_run_time_imports_its_dependencies_only(path: Path) -> None:
    allowed = set(sys.stdlib_module_names) | set(RUNTIME_DEPENDENCIES.values()) | {"replayssm_cute"}
    if path.parent.name == "integrations":  # an integration may look at the package that it integrates with
        allowed |= {"flashinfer", "vllm", "transformers"}
    assert imported(path) <= allowed


def test_declared_dependencies_are_those_of_the_run_time() -> None:
    """pyproject.toml declares exactly what the run time may import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[\[<>=~! ]", text)[0] for text in project["dependencies"]}
    assert declared == set(RUNTIME_DEPENDENCIES)


def test_every_package_folder_is_in_the_wheel() -> None:
    """A folder with Python files that setuptools does not know would work in a checkout only."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    moved = {folder: package for package, folder in setuptools["package-dir"].items()}
    found = set()
    for path in (*RUNTIME, *TUNING):
        parts = path.relative_to(ROOT).parent.parts
        found.add(".".join((moved.get(parts[0], parts[0]), *parts[1:])))
    assert found == set(setuptools["packages"])


@pytest.mark.parametrize("path", TUNING, ids=lambda p: str(p.relative_to(ROOT)))
def test_the_tuner_imports_itself_relatively(path: Path) -> None:
    """Its folder has another name than its package, so an absolute import of either would break one of them."""
    assert not imported(path) & {"tuning", "replayssm_tuning"}


def test_importing_the_package_loads_no_compiler_and_no_tuner() -> None:
    loaded = modules_after("import replayssm_cute")
    assert not loaded & {"cutlass", "tvm_ffi", "pandas", "matplotlib", "rich", "flashinfer", "replayssm_tuning"}


def test_a_call_on_the_cpu_needs_no_compiler() -> None:
    """The reference runs where the DSL cannot even be imported."""
    code = """
sys.modules['cutlass'] = None
import replayssm_cute
from replayssm_cute.calls import random_call
from replayssm_cute.problem import Problem
call = random_call(Problem(heads=2, head_dim=64, d_state=64, groups=1, tokens=1, window=2), 2)
replayssm_cute.checkpointing_ssu(**call.kwargs())
"""
    assert "replayssm_tuning" not in modules_after(code)


def test_public_names_exist() -> None:
    import replayssm_cute

    for name in replayssm_cute.__all__:
        assert getattr(replayssm_cute, name) is not None
    assert set(replayssm_cute.__all__) <= set(dir(replayssm_cute))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        replayssm_cute.nothing  # noqa: B018
