"""The commit in a manifest is the checkout's own, or none."""

from __future__ import annotations

import subprocess
from pathlib import Path

from replayssm_tuning.manifest import commit


def git(folder: Path, *args: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
    done = subprocess.run(["git", *name, *args], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_repository_around_an_installed_package_is_not_named(tmp_path: Path) -> None:
    installed = tmp_path / "venv" / "site-packages" / "replayssm_tuning" / "manifest.py"
    installed.parent.mkdir(parents=True)
    installed.write_text("")
    assert commit(installed) == ""  # no repository at all
    git(tmp_path, "init", "-q")
    (tmp_path / "other.py").write_text("")
    git(tmp_path, "add", "other.py")
    git(tmp_path, "commit", "-q", "-m", "another project")
    assert commit(installed) == ""
    (tmp_path / ".gitignore").write_text("venv\n")
    assert commit(installed) == ""


def test_a_checkout_is_named_with_its_changes(tmp_path: Path) -> None:
    source = tmp_path / "tuning" / "manifest.py"
    source.parent.mkdir()
    source.write_text("")
    (tmp_path / "replayssm_cute").mkdir()
    (tmp_path / "replayssm_cute" / "a.py").write_text("")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    head = git(tmp_path, "rev-parse", "--short=12", "HEAD")
    assert commit(source) == head
    (tmp_path / "README.md").write_text("not a source")
    assert commit(source) == head
    (tmp_path / "replayssm_cute" / "a.py").write_text("x = 1\n")
    assert commit(source) == f"{head}+changes"
