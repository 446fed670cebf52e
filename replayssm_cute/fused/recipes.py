"""The conv and the norm as the compile cache knows them; nothing here imports the DSL."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .. import fingerprint
from ..target import Target
from .shapes import ConvShape, NormShape, StepConvShape


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """One kernel of a decode step beside the SSU's: see `compiler.Recipe`, whose methods it has."""

    shape: ConvShape | NormShape | StepConvShape

    @property
    def kind(self) -> str:
        """ "conv", "norm" or "step with conv"."""
        return {ConvShape: "conv", NormShape: "norm", StepConvShape: "step with conv"}[type(self.shape)]

    def label(self) -> str:
        """See `compiler.Recipe`."""
        s = self.shape
        if isinstance(s, ConvShape):
            return f"decode_step's conv of {s.channels} channels, T {s.tokens}, R {s.ring_rows}"
        if isinstance(s, StepConvShape):
            return f"decode_step's step with conv of {s.problem.label()}, config {s.config.label()}"
        return f"decode_step's norm of {s.groups} groups of {s.group}, T {s.tokens}"

    def facts(self) -> dict[str, Any]:
        """See `compiler.Recipe`."""
        return {"layer_kernel": self.kind, "shape": dataclasses.asdict(self.shape)}

    def sources(self) -> str:
        """See `compiler.Recipe`."""
        own = fingerprint.kernels("fused")
        return own + fingerprint.kernels() if isinstance(self.shape, StepConvShape) else own

    def shared_bytes(self) -> int:
        """See `compiler.Recipe`."""
        if isinstance(self.shape, StepConvShape):
            return self.shape.config.shared_bytes(self.shape.problem)
        return 4 * self.shape.warps if isinstance(self.shape, NormShape) else 0

    def check(self, target: Target) -> None:
        """See `compiler.Recipe`: conv and norm run on every target."""
        s = self.shape
        if isinstance(s, StepConvShape) and (reason := s.config.invalid_reason(s.problem, target)):
            raise ValueError(f"{self.label()} cannot run on {target.name}: {reason}")

    def remedy(self) -> str:
        """See `compiler.Recipe`."""
        return "replayssm_cute.decode_step once with arguments like these"

    def build(self, arch: str) -> Any:
        """See `compiler.Recipe`."""
        if isinstance(self.shape, ConvShape):
            from .kernels.conv import compile_conv

            return compile_conv(self.shape, arch)
        if isinstance(self.shape, StepConvShape):
            from .kernels.step_conv import compile_step_conv

            return compile_step_conv(self.shape, arch)
        from .kernels.norm import compile_norm

        return compile_norm(self.shape, arch)
