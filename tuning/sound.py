"""Whether a journal's result is what its job gives: a journal is a file, and files may be damaged or made up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from replayssm_cute.resources import Resources


def sound(name: str, value: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a sweep can use `value` as the result of the job `name` with these arguments."""
    if isinstance(value, dict) and "failed" in value:
        return isinstance(value["failed"], str) and isinstance(value.get("reason", ""), str)
    if name == "compile":
        return _resources(value)
    if name == "time":
        return _timed(value)
    if name == "floor":
        return isinstance(value, dict) and _number(value.get("time_us"), 1e-3)
    if name in ("heat", "race"):
        return isinstance(value, list) and len(value) == len(arguments["configs"]) and all(map(_timed, value))
    if name == "check":
        return isinstance(value, dict) and all(_number(value.get(k)) for k in ("out", "out_worst", "state"))
    if name == "limit":
        return isinstance(value, dict) and _number(value.get("read_gbs"), 1.0) and isinstance(value.get("method"), str)
    if name == "peers":
        return isinstance(value, list) and all(map(_peer, value))
    return True


def _number(value: Any, least: float = 0.0) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value < math.inf


def _resources(value: Any) -> bool:
    try:
        Resources.from_json({"kernel": "", **value})
    except (TypeError, ValueError):
        return False
    return True


def _timed(value: Any) -> bool:
    """The time of a call, with what the cell was."""
    return (
        isinstance(value, dict)
        and _number(value.get("time_us"), 1e-3)
        and _number(value.get("spread"))
        and _number(value.get("bytes"), 1.0)
        and _number(value.get("flush"))
        and value["flush"] <= 1
    )


def _peer(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("peer"), str):
        return False
    named = isinstance(value.get("variant"), str) and isinstance(value.get("default"), bool)
    return named and (isinstance(value.get("failed"), str) or _number(value.get("time_us"), 1e-3))
