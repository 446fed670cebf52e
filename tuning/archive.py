"""A folder of results as one file, so that a run on another machine is brought home whole."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

from .errors import UsageError

SUFFIXES = (".tar.gz", ".tgz")


def check_name(path: Path) -> None:
    """Refuse a name that does not say what the file will be, before any work is done for it.

    Raises:
        UsageError: for another suffix, or a folder.
    """
    if not path.name.endswith(SUFFIXES) or path.is_dir():
        raise UsageError(f"--archive: got {path}, expected the name of a file that ends in {' or '.join(SUFFIXES)}")


def pack(folder: Path, path: Path) -> int:
    """Write every file under `folder` (journals, logs and plots too) to a gzipped tar, under the folder's own name.

    Hidden files (locks, parts of files) and earlier archives are left out. The file is replaced at once.

    Returns:
        How many files are in it.

    Raises:
        OSError: if something cannot be read or written.
    """
    files = [
        file
        for file in sorted(folder.rglob("*"))
        if file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and not file.name.endswith(SUFFIXES)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    top = folder.resolve().name
    part = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with tarfile.open(part, "w:gz") as archive:
            for file in files:
                archive.add(file, f"{top}/{file.relative_to(folder).as_posix()}", recursive=False)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return len(files)
