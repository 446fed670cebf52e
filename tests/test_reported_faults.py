"""What went wrong for people who ran systems like this one, by number, and that some test holds each to be prevented.

A test says `@pytest.mark.fault(8)`; `pytest -m fault` runs them all. Numbers and meaning are those below.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

FAULTS = {
    # State, ring and cursors
    1: "garbage in dead ring rows enters a product that only masks it afterwards",
    2: "softplus of a large raw dt overflows",
    3: "padding rows read a state that nobody wrote",
    4: "a reused slot keeps the cursors of its last request",
    5: "a prompt of one token decodes wrongly under graphs",
    6: "a backup leaves out the accepted tokens that are in the ring alone",
    7: "a copy for the prefix cache leaves out the ring",
    8: "offsets of high slots overflow 32 bits",
    9: "offsets in a wide parent tensor overflow 32 bits",
    10: "the stride of pages is ignored",
    11: "strided inputs were tested only after they were made contiguous",
    12: "a kernel serves another number of groups than it was compiled for",
    13: "outputs drift over long generations",
    14: "a preempted request leaves stale cursors",
    # Graphs, padding, launches
    15: "a capture reads metadata that nobody prepared",
    16: "a graph that is replayed for fewer rows uses the rest of an older batch",
    17: "padding rows name the slot of a live one",
    18: "warmup leaves its traces in slots that are handed out later",
    19: "outputs of padding rows hold garbage",
    20: "compiling or loading during a capture fails obscurely",
    21: "a seed is frozen into a graph (stochastic rounding is not served: a seed is refused by name)",
    22: "a batch is captured that has more rows than there are slots",
    # Shapes and devices
    23: "odd numbers of heads and groups, and heads of other shapes",
    24: "a config needs more shared memory than the chip has",
    25: "operands lie on another device than the current one",
    26: "a planner of memory forgets the ring",
    # Tuner, caches, start-up
    27: "every process compiles again",
    28: "a key holds an address, and never hits",
    29: "a key leaves out a flag, and the wrong kernel runs",
    30: "ranks find different tables, or lose each other's",
    31: "winners flip from run to run",
    32: "what is tuned is slower than the default",
    33: "a file that is cut short, foreign, old or incomplete is used, or crashes",
    34: "warmup misses shapes that are served later",
    35: "a long silent search looks like a hang, and starts over when it is killed",
    36: "a candidate that crashes the GPU ends the whole sweep",
}


def marked(source: str) -> Iterator[tuple[str, int]]:
    """(test, fault) for every number that a test of this source is marked with."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
                    yield from ((node.name, ast.literal_eval(argument)) for argument in decorator.args)


def test_marks_are_found() -> None:
    source = "@pytest.mark.gpu\n@pytest.mark.fault(3, 17)\ndef test_a() -> None: ...\n\ndef test_b() -> None: ...\n"
    assert list(marked(source)) == [("test_a", 3), ("test_a", 17)]
    assert list(marked(source.replace("def test_a", "def helper"))) == []


def test_every_fault_is_held_by_a_test() -> None:
    found: dict[int, list[str]] = {number: [] for number in FAULTS}
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        for test, number in marked(path.read_text()):
            assert number in FAULTS, f"{path.name}: {test}: no fault {number}"
            found[number].append(f"{path.stem}.{test}")
    missing = [f"{number}: {FAULTS[number]}" for number, tests in found.items() if not tests]
    assert not missing, missing
    assert list(FAULTS) == [*range(1, 37)]


@pytest.mark.parametrize("number", [5, 8, 9, 15, 16, 23, 25])
def test_faults_of_the_device_are_tried_on_one(number: int) -> None:
    """These are nothing that the reference could have: some test that is marked gpu has to hold them."""
    on_gpu = 0
    for path in Path(__file__).parent.glob("test_*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                marks = [ast.unparse(d) for d in node.decorator_list]
                numbers = [n for _, n in marked(ast.unparse(node))]
                on_gpu += number in numbers and "pytest.mark.gpu" in marks
    assert on_gpu
