"""The kernels between steps, as the compile cache knows them; nothing here imports the DSL."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .. import fingerprint
from ..target import Target
from .shapes import ZERO_STATE, BytesShape, FoldShape
from .spec import CacheSpec

_CURSORS, _PLAN = "cursors", "move plan"


@dataclass(frozen=True, slots=True)
class CacheRecipe:
    """One kernel of a cache: see `compiler.Recipe`, whose methods it has.

    Attributes:
        kind: "cursors" and "move plan" serve every cache, "fold", "copy" and "reset" one shape each.
        shape: of its CTAs.
    """

    kind: str
    shape: FoldShape | BytesShape | None = None

    def label(self) -> str:
        """See `compiler.Recipe`."""
        what = f" of {self.shape.spec.problem().label()}" if isinstance(self.shape, FoldShape) else ""
        return f"the cache's {self.kind}{what}"

    def facts(self) -> dict[str, Any]:
        """See `compiler.Recipe`."""
        return {"cache_kernel": self.kind, "shape": None if self.shape is None else dataclasses.asdict(self.shape)}

    def sources(self) -> str:
        """See `compiler.Recipe`."""
        return fingerprint.kernels("cache")

    def shared_bytes(self) -> int:
        """See `compiler.Recipe`."""
        if self.kind == _PLAN:
            return 4
        return self.shape.shared_bytes() if self.kind in ("fold", "copy") and self.shape is not None else 0

    def check(self, target: Target) -> None:
        """See `compiler.Recipe`."""
        if self.shared_bytes() > target.shared_per_block:
            raise ValueError(
                f"{self.label()} needs {self.shared_bytes()} bytes of shared memory, and a block of {target.name} has "
                f"{target.shared_per_block}"
            )

    def remedy(self) -> str:
        """See `compiler.Recipe`."""
        return "replayssm_cute.warmup(problems, batches, cache=cache) with this cache"

    def build(self, arch: str) -> Any:
        """See `compiler.Recipe`."""
        if self.kind == _CURSORS:
            from .kernels.cursors import compile_cursors

            return compile_cursors(arch)
        if self.kind == _PLAN:
            from .kernels.moves import compile_move_plan

            return compile_move_plan(arch)
        if isinstance(self.shape, FoldShape):
            from .kernels.fold import compile_fold

            return compile_fold(self.shape, arch)
        from .kernels import slots

        assert self.shape is not None
        return (slots.compile_copy if self.kind == "copy" else slots.compile_reset)(self.shape, arch)


CURSORS, MOVE_PLAN = CacheRecipe(_CURSORS), CacheRecipe(_PLAN)


def fold(spec: CacheSpec) -> CacheRecipe:
    """Materialize, of a plain spec (see `CacheSpec.plain`)."""
    return CacheRecipe("fold", FoldShape.of(dataclasses.replace(spec, layers=1)))


def copy(spec: CacheSpec) -> CacheRecipe:
    """Copies of whole slots."""
    return CacheRecipe("copy", BytesShape.of(spec, *spec.slot_shapes()))


def reset(spec: CacheSpec) -> CacheRecipe:
    """Checkpoints of zero."""
    return CacheRecipe("reset", BytesShape.of(spec, *ZERO_STATE))


def all_of(spec: CacheSpec) -> tuple[CacheRecipe, ...]:
    """Every kernel that a cache may launch; those that are not plain fold by torch operations."""
    return CURSORS, MOVE_PLAN, *((fold(spec),) if spec.plain else ()), copy(spec), reset(spec)
