"""A decode step's own kernels as the compile cache knows them; nothing here imports the DSL."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .. import compiler, fingerprint
from ..target import Target
from .shapes import ConvShape, NormShape, StepShape


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """One kernel of a decode step beside the SSU's own: see `compiler.Recipe`, whose methods it has."""

    shape: ConvShape | NormShape | StepShape

    @property
    def kind(self) -> str:
        """ "conv", "norm" or "step"."""
        return {ConvShape: "conv", NormShape: "norm", StepShape: "step"}[type(self.shape)]

    def label(self) -> str:
        """See `compiler.Recipe`."""
        s = self.shape
        if isinstance(s, ConvShape):
            return f"decode_step's conv of {s.channels} channels, T {s.tokens}, R {s.ring_rows}"
        if isinstance(s, StepShape):
            return f"decode_step's step with x's conv, problem {s.problem.label()}, config {s.config.label()}"
        return f"decode_step's norm of {s.groups} groups of {s.group}, T {s.tokens}"

    def facts(self) -> dict[str, Any]:
        """See `compiler.Recipe`."""
        return {"layer_kernel": self.kind, "shape": dataclasses.asdict(self.shape)}

    def sources(self) -> str:
        """See `compiler.Recipe`."""
        own = fingerprint.kernels("fused")
        return own + fingerprint.kernels() if isinstance(self.shape, StepShape) else own

    def shared_bytes(self) -> int:
        """See `compiler.Recipe`."""
        s = self.shape
        if isinstance(s, StepShape):
            return s.config.shared_bytes(s.problem)
        return 4 * s.warps * s.together if isinstance(s, NormShape) else 0

    def check(self, target: Target) -> None:
        """See `compiler.Recipe`: conv and norm run on every target."""
        if isinstance(self.shape, StepShape):
            compiler.StepRecipe(self.shape.problem, self.shape.config).check(target)

    def remedy(self) -> str:
        """See `compiler.Recipe`."""
        return "replayssm_cute.decode_step once with arguments like these, or warmup with its LayerProblem"

    def build(self, arch: str) -> Any:
        """See `compiler.Recipe`."""
        if isinstance(self.shape, ConvShape):
            from .kernels.conv import compile_conv

            return compile_conv(self.shape, arch)
        if isinstance(self.shape, StepShape):
            from .kernels.conv_step import compile_conv_step

            return compile_conv_step(self.shape, arch)
        from .kernels.norm import compile_norm

        return compile_norm(self.shape, arch)
