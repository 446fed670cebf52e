"""Loads the kernel's modules from their source, with stand-ins for what they import from the DSL.

In functions that the DSL would trace, an `if` may differ from lane to lane: it becomes a loop over the sides that are
taken (`values.branch`). The kernel itself, and methods of its own that wait for all the CTA's warps, become generators
that yield where they wait.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import replayssm_cute

from . import conversions, dsl, instructions
from .values import branch

FOLDER = Path(replayssm_cute.__file__).parent / "kernels"


class _Sides(ast.NodeTransformer):
    def visit_If(self, node: ast.If) -> ast.For:
        self.generic_visit(node)
        side = ast.Name("_side", ast.Store())
        test = ast.Call(ast.Name("_branch", ast.Load()), [node.test], [])
        inner = ast.If(ast.Name("_side", ast.Load()), node.body, node.orelse)
        return ast.For(side, test, [inner], [])


class _Waits(ast.NodeTransformer):
    """What a warp waits for is given to the scheduler, and so are the calls of methods that wait."""

    def __init__(self, source: Source, methods: set[str]) -> None:
        self.source = source
        self.methods = methods

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        if self.source.is_wait(node):
            return ast.Expr(ast.Yield(self.source.awaited(node)))
        if _own_method(node) in self.methods:
            return ast.Expr(ast.YieldFrom(node.value))
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        if _own_method(node) in self.methods:
            return ast.Assign(node.targets, ast.YieldFrom(node.value))
        return node


class _Traced(ast.NodeTransformer):
    def __init__(self, source: Source, tree: ast.Module) -> None:
        self.source = source
        self.methods = waiting_methods(tree, source) | source.inherited

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        decorators = [ast.unparse(d) for d in node.decorator_list]
        if {"cute.jit", "cute.kernel"} & set(decorators):
            node = _Sides().generic_visit(node)  # type: ignore[assignment]
        if "cute.kernel" in decorators or node.name in self.methods:
            node = _Waits(self.source, self.methods).generic_visit(node)  # type: ignore[assignment]
        return node


def _own_method(node: ast.AST) -> str | None:
    """The method that a statement `self.method(...)` calls, or `name = self.method(...)`."""
    match node:
        case ast.Expr(value) | ast.Assign(_, value):
            match value:
                case ast.Call(ast.Attribute(ast.Name("self"), name)):
                    return name
    return None


def waiting_methods(tree: ast.Module, source: Source) -> set[str]:
    """The kernel's methods that wait, themselves or by calling one that does; without the kernel, no methods do."""
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    functions = {f.name: f for c in classes for f in c.body if isinstance(f, ast.FunctionDef)}
    kernels = [f for f in functions.values() if "cute.kernel" in [ast.unparse(d) for d in f.decorator_list]]
    calls = {name: {m for n in ast.walk(f) if (m := _own_method(n)) in functions} for name, f in functions.items()}
    reached: set[str] = set()
    ahead = {m for f in kernels for m in calls[f.name]}
    while ahead:
        reached |= ahead
        ahead = set().union(*(calls[m] for m in ahead)) - reached
    found = {m for m in reached if any(source.is_wait(n) for n in ast.walk(functions[m]))}
    while more := {m for m in reached - found if calls[m] & found}:
        found |= more
    return found


class Source:
    """One set of the kernel's modules; `replace` swaps a piece of source text first, to see that it is missed."""

    inherited: frozenset[str] = frozenset()  # methods that wait, and that a kernel has from another module

    def __init__(self, replace: tuple[str, str, str] | None = None) -> None:
        self.replace = replace
        self.modules: dict[str, Any] = {
            "primitives": instructions,
            "convert": conversions,
            "signature": SimpleNamespace(fake_arguments=None, compile_options=None),
        }

    def _import(self, name: str, globals_: Any = None, locals_: Any = None, wanted: Any = (), level: int = 0) -> Any:
        if level == 1:
            return self.module(name) if name else SimpleNamespace(**{n: self.module(n) for n in wanted})
        if level == 2:
            return importlib.import_module(f"replayssm_cute.{name}")
        if name.split(".")[0] == "cutlass":
            return dsl.MODULES[name]
        return builtins.__import__(name, globals_, locals_, wanted, level)

    def is_wait(self, node: ast.AST) -> bool:
        """Whether a statement waits for other warps."""
        return isinstance(node, ast.Expr) and ast.unparse(node) == "cute.arch.sync_threads()"

    def awaited(self, node: ast.Expr) -> ast.expr | None:
        """What the scheduler gets to know of a wait."""
        return None

    def path(self, name: str) -> Path:
        """Where a module's source is."""
        return FOLDER / f"{name}.py"

    def importer(self, name: str) -> Any:
        """What a module's imports call."""
        return self._import

    def module(self, name: str) -> Any:
        """A module of `replayssm_cute.kernels`, loaded once."""
        if name not in self.modules:
            path = self.path(name)
            text = path.read_text()
            if self.replace and self.replace[0] == name:
                if text.count(self.replace[1]) != 1:  # not an AssertionError, which would pass for a slip that is seen
                    raise ValueError(f"{self.replace[1]!r} is not in {path} exactly once")
                text = text.replace(*self.replace[1:])
            tree = ast.parse(text)
            tree = ast.fix_missing_locations(_Traced(self, tree).visit(tree))
            found = ModuleType(f"simulated.{name}")
            sys.modules[found.__name__] = found  # dataclasses look their annotations up there
            vars(found).update(_branch=branch, __builtins__={**vars(builtins), "__import__": self.importer(name)})
            exec(compile(tree, str(path), "exec"), vars(found))
            self.modules[name] = found
        return self.modules[name]


KERNELS = Source()
