"""What readers of table files share: JSON within bounds, and checks of fields that give one line of complaint."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

MAX_BYTES = 32 << 20  # a table is some hundred KB; a larger file is none
_MAX_LINE = 400  # characters of a complaint: a damaged file may hold names of any length
_INT32 = 1 << 31


class TableError(ValueError):
    """A table that must not be used, and why, in one printable line."""

    def __init__(self, why: str) -> None:
        text = why if why.isprintable() else repr(why)[1:-1]
        super().__init__(text if len(text) <= _MAX_LINE else f"{text[:_MAX_LINE]}... ({len(text)} characters)")


def read_json(path: Path) -> Any:
    """What a JSON file of at most `MAX_BYTES` holds; NaN, infinities and repeated names are no JSON here.

    Raises:
        TableError: if it cannot be read, is no regular file, too large or no such JSON.
    """
    try:
        if not stat.S_ISREG(mode := path.stat().st_mode) and not stat.S_ISDIR(mode):
            raise TableError("it is no regular file")  # reading a pipe would wait for its writer
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise TableError(f"it is larger than {MAX_BYTES} bytes")
        return json.loads(data, parse_constant=_no_constant, object_pairs_hook=_named_once)
    except TableError:
        raise
    except OSError as error:
        raise TableError(f"it cannot be read ({error.strerror or error})") from error
    except (ValueError, RecursionError) as error:  # ValueError also for a path with a null character
        raise TableError(f"it is no JSON ({error})") from error


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"a name comes twice: {next(n for n in names if names.count(n) > 1)!r}")
    return found


def number(name: str, value: object, *, optional: bool = False) -> float | None:
    """A finite number that is not negative, as float; None where it is `optional`.

    Raises:
        TableError: for anything else.
    """
    if value is None and optional:
        return None
    try:
        if not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value) and value >= 0:
            return float(value)
    except OverflowError:  # JSON has integers that are no floats
        pass
    raise TableError(f"{name}: got {short(value)}, expected a finite number >= 0{' or null' if optional else ''}")


def text(name: str, value: object) -> str:
    """Printable text.

    Raises:
        TableError: for anything else.
    """
    if not isinstance(value, str) or not value.isprintable():
        raise TableError(f"{name} is {short(value)}, expected printable text")
    return value


def short(value: object) -> str:
    """A value's `repr`, of a long one its beginning."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def counts(name: str, values: Mapping[str, Any]) -> None:
    """Refuse integers that no kernel argument holds.

    Raises:
        TableError: naming it.
    """
    for key, value in values.items():
        if isinstance(value, int) and abs(value) >= _INT32:
            raise TableError(f"{name}: {key} is {short(value)}, expected less than 2^31")


def batch_size(name: str, value: object) -> int:
    """A number of batch rows: a positive int below 2^31.

    Raises:
        TableError: for anything else.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < _INT32:
        raise TableError(f"{name}: batch is {short(value)}, expected a positive int less than 2^31")
    return value


def fields_of(name: str, value: object, known: Iterable[str], required: Iterable[str]) -> dict[str, Any]:
    """An object with these fields.

    Raises:
        TableError: for anything else, with what is missing or unknown.
    """
    if not isinstance(value, dict):
        raise TableError(f"{name}: got {type(value).__name__}, expected an object")
    if missing := [k for k in required if k not in value]:
        raise TableError(f"{name}: fields {missing} are missing")
    if unknown := sorted(set(value) - set(known)):
        raise TableError(f"{name}: unknown fields {short(unknown)}")
    return value


def list_of(name: str, value: object) -> list[Any]:
    """A list.

    Raises:
        TableError: for anything else.
    """
    if not isinstance(value, list):
        raise TableError(f"{name}: got {type(value).__name__}, expected a list")
    return value
