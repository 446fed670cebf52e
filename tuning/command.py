"""How the commands beside `replayssm-tune` end: with one line for what the caller can mend, and an exit code.

2: wrong usage, an input that is missing or none, a place that cannot be written; nothing was done. 1: nothing came of
it. 130: interrupted.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from .errors import UsageError
from .plan import PlanError

Main = Callable[[Sequence[str] | None], int]


def command(main: Main) -> Callable[..., int]:
    """A command line's `main` that prints errors as one line, and returns their exit code."""

    @functools.wraps(main)
    def guarded(argv: Sequence[str] | None = None) -> int:
        try:
            return main(argv)
        except (UsageError, PlanError) as e:
            print(f"error: {_line(e)}", file=sys.stderr)
            return 2
        except BrokenPipeError:  # who read the output has read enough, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
            return 128 + signal.SIGPIPE
        except OSError as e:
            print(f"error: {_line(e)}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("interrupted; what was written by then stays", file=sys.stderr)
            return 130

    return guarded


@contextlib.contextmanager
def usage(what: str = "", *errors: type[Exception]) -> Iterator[None]:
    """Errors in here are the caller's: of values that make no problem, of files that are not what was asked for.

    Args:
        what: said before the error, such as the file's name.
        errors: kinds that count beside ValueError, TypeError, NotImplementedError and OSError.

    Raises:
        UsageError: in their place.
    """
    kinds: tuple[type[Exception], ...] = (ValueError, TypeError, NotImplementedError, OSError, *errors)
    try:
        yield
    except UsageError:
        raise
    except kinds as e:
        said = e.strerror or str(e) if isinstance(e, OSError) else str(e)
        said = f"{type(e).__name__}: {said}" if isinstance(e, KeyError | AttributeError | IndexError) else said
        raise UsageError(f"{what}: {said}" if what else said) from e


def check_folder(name: str, folder: Path) -> None:
    """Make a folder of results, and see that it can be written, before any work is done for it.

    Raises:
        UsageError: naming the argument.
    """
    with usage(f"{name}: got {folder}, expected a folder that can be written"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def check_file(name: str, path: Path) -> None:
    """See that a file can be written, before any work is done for it; its folder is made.

    Raises:
        UsageError: naming the argument.
    """
    if path.is_dir():
        raise UsageError(f"{name}: got {path}, expected the name of a file; it is a folder")
    check_folder(name, path.parent)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())
