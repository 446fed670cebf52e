"""Loads the kernel's modules from their source, with stand-ins for what they import from the DSL.

In functions that the DSL would trace, an `if` may differ from lane to lane: it becomes a loop over the sides that are
taken (`values.branch`). The kernel itself becomes a generator that yields where the CTA waits for all its warps.
"""

from __future__ import annotations

import ast
import builtins
import importlib
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


class _Barriers(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        if ast.unparse(node) == "cute.arch.sync_threads()":
            return ast.Expr(ast.Yield(None))
        return node


class _Traced(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        decorators = [ast.unparse(d) for d in node.decorator_list]
        if {"cute.jit", "cute.kernel"} & set(decorators):
            node = _Sides().generic_visit(node)  # type: ignore[assignment]
        if "cute.kernel" in decorators:
            node = _Barriers().generic_visit(node)  # type: ignore[assignment]
        return node


class Source:
    """One set of the kernel's modules; `replace` swaps a piece of source text first, to see that it is missed."""

    def __init__(self, replace: tuple[str, str, str] | None = None) -> None:
        self.replace = replace
        self.modules: dict[str, Any] = {
            "primitives": instructions,
            "convert": conversions,
            "signature": SimpleNamespace(fake_arguments=None),
        }

    def _import(self, name: str, globals_: Any = None, locals_: Any = None, wanted: Any = (), level: int = 0) -> Any:
        if level == 1:
            return self.module(name) if name else SimpleNamespace(**{n: self.module(n) for n in wanted})
        if level == 2:
            return importlib.import_module(f"replayssm_cute.{name}")
        if name.split(".")[0] == "cutlass":
            return dsl.MODULES[name]
        return builtins.__import__(name, globals_, locals_, wanted, level)

    def transform(self, tree: ast.Module) -> ast.Module:
        """What becomes of a module's code."""
        found: ast.Module = _Traced().visit(tree)
        return found

    def module(self, name: str) -> Any:
        """A module of `replayssm_cute.kernels`, loaded once."""
        if name not in self.modules:
            path = FOLDER / f"{name}.py"
            text = path.read_text()
            if self.replace and self.replace[0] == name:
                assert text.count(self.replace[1]) == 1, f"{self.replace[1]!r} is not in {path} exactly once"
                text = text.replace(*self.replace[1:])
            tree = ast.fix_missing_locations(self.transform(ast.parse(text)))
            found = ModuleType(f"simulated.{name}")
            vars(found).update(_branch=branch, __builtins__={**vars(builtins), "__import__": self._import})
            exec(compile(tree, str(path), "exec"), vars(found))
            self.modules[name] = found
        return self.modules[name]


KERNELS = Source()
