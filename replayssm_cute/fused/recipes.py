"""The conv and the norm as the compile cache knows them; nothing here imports the DSL."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from .. import fingerprint
from ..target import Target
from .shapes import ConvShape, NormShape


@dataclass(frozen=True, slots=True)
class LayerRecipe:
    """One kernel of a decode step beside the SSU's: see `compiler.Recipe`, whose methods it has."""

    shape: ConvShape | NormShape

    @property
    def kind(self) -> str:
        """ "conv" or "norm"."""
        return "conv" if isinstance(self.shape, ConvShape) else "norm"

    def label(self) -> str:
        """See `compiler.Recipe`."""
        s = self.shape
        if isinstance(s, ConvShape):
            return f"decode_step's conv of {s.channels} channels, T {s.tokens}, R {s.ring_rows}"
        return f"decode_step's norm of {s.groups} groups of {s.group}, T {s.tokens}"

    def facts(self) -> dict[str, Any]:
        """See `compiler.Recipe`."""
        return {"layer_kernel": self.kind, "shape": dataclasses.asdict(self.shape)}

    def sources(self) -> str:
        """See `compiler.Recipe`."""
        return fingerprint.kernels("fused")

    def shared_bytes(self) -> int:
        """See `compiler.Recipe`."""
        s = self.shape
        return 4 * s.warps * s.together if isinstance(s, NormShape) else 0

    def check(self, target: Target) -> None:
        """See `compiler.Recipe`: these kernels run on every target."""

    def remedy(self) -> str:
        """See `compiler.Recipe`."""
        return "replayssm_cute.decode_step once with arguments like these"

    def build(self, arch: str) -> Any:
        """See `compiler.Recipe`."""
        if isinstance(self.shape, ConvShape):
            from .kernels.conv import compile_conv

            return compile_conv(self.shape, arch)
        from .kernels.norm import compile_norm

        return compile_norm(self.shape, arch)
