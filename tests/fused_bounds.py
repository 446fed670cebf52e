"""How far a decode step's outputs may be from float64: over a tensor, and in one row of a few tokens.

Roundings of x, B and C, of y and of the result cost 1.65e-3 each in bf16; the step itself adds 2e-4 and more (see
`compare.bounds`). Over a whole tensor they add up to 3.0e-3 (f16: an eighth of that).

A single row may be much further off than the tensor: where C·B·x of its tokens nearly cancel, y is small beside the
terms that were rounded, and the norm makes it large again. The reference on the CPU, rounded where the kernels round
and nowhere else, over the hundred steps of the GPU test (8 heads of 64 by 128, 2 groups of the norm, rows of one or
four tokens; 40 and 20 seeds):

    T   rows  median      99%    99.9%  largest  rows beyond 4.5e-3  rms of each run
    1   9609  2.9e-3   6.7e-3   1.2e-2   2.1e-2  4.9%, in every run  2.9e-3 .. 3.7e-3
    4   4832  3.0e-3   5.5e-3   8.7e-3   1.2e-2  3.0%, in every run  3.0e-3 .. 3.7e-3

So a row is held to what the same roundings cost that very row, and the run as a whole to the bound of tensors. The step
kernel's own source, run on the simulator over the GPU test's steps between that conv and that norm, adds 6.2e-4 at most
to a row's error, and gives to the last digit the two that an H200 gave where the bound was one for all: 5.53e-3 in the
fifth step at T 1, of which the roundings make 5.32e-3, and 5.86e-3 in step 67 at T 4, of which they make 5.85e-3.
"""

from __future__ import annotations

import torch

EXACT = {"bf16": 4.5e-3, "f16": 1.2e-3}  # against float64
ALIKE = {"bf16": 3.3e-3, "f16": 1.1e-3}  # beside the same roundings: only those that fall apart count
APPENDED = {"bf16": 2.5e-3, "f16": 3.2e-4}  # one rounding
ROW_FACTOR, ROW_MORE = 1.1, 8e-4  # of a row in bf16, times and beside the error of the same roundings


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """||got - expected|| / ||expected||."""
    wanted = torch.as_tensor(expected).double()
    return float((got.double() - wanted).norm() / wanted.norm())


class RowErrors:
    """Errors of a run's rows in bf16: outputs `got`, the truth, and the reference with the kernels' roundings."""

    def __init__(self) -> None:
        self.got: list[torch.Tensor] = []
        self.exact: list[torch.Tensor] = []

    def add(self, got: torch.Tensor, exact: torch.Tensor, rounded: torch.Tensor) -> None:
        """Hold one row to its roundings."""
        most = ROW_FACTOR * error(rounded, exact) + ROW_MORE
        assert error(got, exact) < most, f"row {len(self.got)}: {error(got, exact):.3g}, its roundings allow {most:.3g}"
        self.got.append(got.clone())
        self.exact.append(exact)

    def whole(self) -> float:
        """The error of all rows together."""
        return error(torch.stack(self.got), torch.stack(self.exact))

    def worst(self) -> float:
        """The largest error of a row."""
        return max(error(got, exact) for got, exact in zip(self.got, self.exact, strict=True))
