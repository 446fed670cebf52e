"""Kinds of arguments on command lines, as argparse's `type`: another value ends the command with exit code 2."""

from __future__ import annotations

import argparse
import math

from replayssm_cute import dtypes, target

from . import plan as plans


def sizes(text: str) -> tuple[int, ...]:
    """Positive ints, separated by commas: ascending, each once."""
    try:
        found = tuple(int(t) for t in text.split(","))
    except ValueError:
        found = ()
    if not found or min(found) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected positive ints such as 1,4,16")
    return tuple(sorted(set(found)))


def count(text: str) -> int:
    """A positive int."""
    try:
        found = int(text)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive int")
    return found


def words(text: str) -> tuple[str, ...]:
    """Names, separated by commas, each once."""
    found = tuple(dict.fromkeys(t.strip() for t in text.split(",") if t.strip()))
    if not found:
        raise argparse.ArgumentTypeError("expected names such as nemotron3-super,bamba-9b")
    return found


def gpu(text: str) -> str:
    """A GPU of the catalogue, or an architecture."""
    try:
        target.named(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None
    return text


def gpus(text: str) -> tuple[str, ...]:
    """Some of them, separated by commas."""
    names = tuple(gpu(t.strip()) for t in text.split(",") if t.strip())
    if not names:
        raise argparse.ArgumentTypeError("expected names such as sm_100a,sm_90a")
    return names


def states(text: str) -> tuple[str, ...]:
    """Short names of state dtypes, separated by commas."""
    names = tuple(t.strip() for t in text.split(","))
    if not set(names) <= set(dtypes.STATE):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected one or more of {','.join(dtypes.STATE)}")
    return names


def duration(text: str) -> float:
    """Seconds of a time such as 90s or 4m."""
    try:
        return plans.seconds(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def seconds(text: str) -> float:
    """A positive number of seconds, without a unit."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a positive number of seconds")
    return found


def share(text: str) -> float:
    """A share from 0 to less than 1, such as 2% or 0.02."""
    try:
        found = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        found = -1.0
    if not 0 <= found < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a share such as 2% or 0.02")
    return found
