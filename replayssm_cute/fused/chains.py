"""How a decode step is run: what starts early, where x is convolved, and how its three kernels are cut."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ..config import TileConfig
from .shapes import ConvShape, NormShape


class Overlap(StrEnum):
    """What starts early, and where x is convolved, by the names that measurements have."""

    NONE = "chain"
    INNER = "chain, PDL"
    ALL = "chain, PDL, conv too"
    INNER_X = "chain, PDL, x in step"
    ALL_X = "chain, PDL, conv too, x in step"

    @property
    def chained(self) -> bool:
        """Whether the step starts while the conv runs, and the norm while the step runs."""
        return self is not Overlap.NONE

    @property
    def first(self) -> bool:
        """Whether the conv starts while the kernel before the call runs."""
        return self in (Overlap.ALL, Overlap.ALL_X)

    @property
    def x_in_step(self) -> bool:
        """Whether the step convolves x, and the conv before it B and C alone."""
        return self in (Overlap.INNER_X, Overlap.ALL_X)


@dataclass(frozen=True, slots=True)
class ConvCut:
    """How a conv is cut: fields of `ConvShape`; `late` lets the next kernel start only as this one's CTAs end.

    `soon` and `ahead` are for convs that start early themselves (`Overlap.first`).
    """

    vector: int = 8
    threads: int = 128
    rows: int = 1
    each: int | None = None
    carveout: int | None = None
    late: bool = False
    soon: bool = False
    ahead: bool = False

    def __post_init__(self) -> None:
        _check_ints("conv", self, ("vector", "threads", "rows"), ("each", "carveout"))
        _check_bools("conv", self, ("late", "soon", "ahead"))
        if self.soon and self.late:
            raise ValueError("soon: got True, expected False of a conv whose successor starts late")

    def of(self, shape: ConvShape) -> ConvShape:
        """A conv cut so."""
        changes = {name: value for name, value in dataclasses.asdict(self).items() if name != "late"}
        return dataclasses.replace(shape, triggers=shape.triggers and not self.late, **changes)

    def label(self) -> str:
        """Short and readable: '8 x 128', with what differs from the plain one."""
        more = f", {self.rows} rows" if self.rows > 1 else ""
        more += f", {self.each} each" if self.each else ""
        more += _carved(self.carveout)
        more += "".join(f", {name}" for name in ("late", "soon", "ahead") if getattr(self, name))
        return f"{self.vector} x {self.threads}{more}"


@dataclass(frozen=True, slots=True)
class NormCut:
    """How a norm is cut: fields of `NormShape`."""

    warps: int
    together: int = 1
    carveout: int | None = None

    def __post_init__(self) -> None:
        _check_ints("norm", self, ("warps", "together"), ("carveout",))

    def of(self, shape: NormShape) -> NormShape:
        """A norm cut so."""
        return dataclasses.replace(shape, **dataclasses.asdict(self))

    def label(self) -> str:
        """Short and readable: '4 warps', with what differs from the plain one."""
        more = f", {self.together} tokens" if self.together > 1 else ""
        return f"{self.warps} warps{more}{_carved(self.carveout)}"


def _check_ints(what: str, cut: object, names: tuple[str, ...], optional: tuple[str, ...]) -> None:
    """Refuse what is no int; its range is for the shape that is cut so (`of`)."""
    for name in (*names, *optional):
        value = getattr(cut, name)
        if type(value) is not int and not (name in optional and value is None):
            raise TypeError(f"{what}: {name} is {value!r}, expected an int{' or None' if name in optional else ''}")


def _check_bools(what: str, of: object, names: tuple[str, ...]) -> None:
    for name in names:
        if type(value := getattr(of, name)) is not bool:
            raise TypeError(f"{what}: {name} is {value!r}, expected a bool")


def _carved(carveout: int | None) -> str:
    return "" if carveout is None else f", carveout {carveout}"


@dataclass(frozen=True, slots=True)
class Chain:
    """One way to run a decode step.

    Attributes:
        overlap: what starts early, and where x is convolved.
        config: of the step; None: what a step alone would get.
        conv, norm: None: the rules of `shapes`.
        early: as in `StepShape`, where the step convolves x.
    """

    overlap: Overlap
    config: TileConfig | None = None
    conv: ConvCut | None = None
    norm: NormCut | None = None
    early: bool = False

    def __post_init__(self) -> None:
        _check_bools("chain", self, ("early",))
        if self.early and not self.overlap.x_in_step:
            raise ValueError(
                f"early: got True, expected False for {str(self.overlap)!r}: its step has no x to convolve"
            )
        if self.conv is None or not (self.conv.soon or self.conv.ahead):
            return
        if not self.overlap.first:
            raise ValueError(
                f"conv: got {self.conv.label()!r}, expected neither soon nor ahead for {str(self.overlap)!r}: the conv "
                f"does not start early"
            )
        if self.conv.soon and self.early:
            raise ValueError("early: got True, expected False behind a conv with soon: in_proj may still write x")

    def label(self) -> str:
        """Short and readable, for logs and tables."""
        parts = [str(self.overlap)]
        parts += ["early"] if self.early else []
        parts += [] if self.config is None else [f"step {self.config.label()}"]
        parts += [] if self.conv is None else [f"conv {self.conv.label()}"]
        parts += [] if self.norm is None else [f"norm {self.norm.label()}"]
        return "; ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """A plain dict; `from_json` gives the same chain back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Chain:
        """The chain of a `to_json` dict.

        Raises:
            ValueError, TypeError: for unknown fields or values.
        """
        kinds: dict[str, Any] = {"config": TileConfig, "conv": ConvCut, "norm": NormCut}
        if unknown := set(data) - {"overlap", "early", *kinds}:
            raise ValueError(f"chain: unknown fields {sorted(unknown)}")
        made = {n: None if data.get(n) is None else kind(**data[n]) for n, kind in kinds.items()}
        return cls(Overlap(data["overlap"]), **made, early=data.get("early", False))
