"""Whether tensors that a call writes share memory with others of it.

Page pools and projections interleave tensors in one storage: their address ranges cross, their bytes do not. So two
tensors are compared as what they are, runs of bytes repeated at strides. The comparison is exact, but for views of
strides that nearly agree and never nest, of which it gives up after `_STEPS` steps: such views pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch

_STEPS = 10_000  # of one comparison; views whose strides do not nest could take more, and then pass unseen


class _Runs(NamedTuple):
    """Bytes at `first`, `run` in a row, repeated over `dims`: (stride in bytes, count), the largest stride first."""

    first: int
    run: int
    dims: tuple[tuple[int, int], ...]

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.first + _extent(self.run, self.dims)


class _GaveUp(Exception):
    pass


def check(tensors: Mapping[str, torch.Tensor | None], written: Collection[str]) -> None:
    """Refuse a call in which a tensor that is written shares memory with another one.

    Args:
        tensors: a call's tensors on one device, by argument name; None is left out.
        written: names of those that may be written. Others may share what they like with each other.

    Raises:
        ValueError: naming two arguments that do.
    """
    runs = [
        (name, _runs(t))
        for name, t in tensors.items()
        if t is not None and not t.is_meta and t.numel() and t.data_ptr()
    ]
    runs.sort(key=lambda item: item[1].first)
    open_: list[tuple[str, _Runs, int]] = []
    for name, own in runs:
        open_ = [item for item in open_ if item[2] > own.first]
        for other, theirs, _ in open_:
            if (name in written or other in written) and _meet(theirs, own):
                first, second = (name, other) if name in written else (other, name)
                raise ValueError(f"{first}: shares memory with {second}, expected memory of its own")
        open_.append((name, own, own.end))


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on one device have bytes in common."""
    return bool(one.numel() and other.numel()) and _meet(_runs(one), _runs(other))


def _runs(t: torch.Tensor) -> _Runs:
    size = t.element_size()
    run = size
    dims: list[tuple[int, int]] = []
    # Expanded dimensions are the same bytes again.
    for stride, count in sorted((s * size, n) for s, n in zip(t.stride(), t.shape, strict=True) if n > 1 and s):
        if stride <= run and not dims:  # bytes in a row
            run += stride * (count - 1)
        elif dims and stride == dims[-1][0] * dims[-1][1]:  # the same steps go on
            dims[-1] = (dims[-1][0], dims[-1][1] * count)
        else:
            dims.append((stride, count))
    return _Runs(t.data_ptr(), run, tuple(reversed(dims)))


def _extent(run: int, dims: tuple[tuple[int, int], ...]) -> int:
    return run + sum(stride * (count - 1) for stride, count in dims)


def _meet(one: _Runs, other: _Runs) -> bool:
    left = [_STEPS]
    try:
        return _cross(other.first - one.first, one.run, one.dims, other.run, other.dims, left)
    except _GaveUp:
        return False


def _cross(
    ahead: int,
    run: int,
    dims: tuple[tuple[int, int], ...],
    other_run: int,
    other_dims: tuple[tuple[int, int], ...],
    left: list[int],
) -> bool:
    """Whether bytes coincide where the other one begins `ahead` bytes after the first.

    The largest stride is taken off: of its steps only those matter at which the rest can meet. Where both have it, as
    views into the same pages do, only the difference of their steps counts.
    """
    left[0] -= 1
    if left[0] < 0:
        raise _GaveUp
    if ahead >= _extent(run, dims) or ahead + _extent(other_run, other_dims) <= 0:
        return False
    if not dims and not other_dims:
        return True
    stride = max((d[0][0] for d in (dims, other_dims) if d), default=0)
    back = on = 0
    if dims and dims[0][0] == stride:
        back, dims = dims[0][1] - 1, dims[1:]
    if other_dims and other_dims[0][0] == stride:
        on, other_dims = other_dims[0][1] - 1, other_dims[1:]
    # ahead + k·stride must be below the first one's extent and above minus the other one's
    lowest = max(-back, (-_extent(other_run, other_dims) - ahead) // stride + 1)
    highest = min(on, (_extent(run, dims) - 1 - ahead) // stride)
    return any(_cross(ahead + k * stride, run, dims, other_run, other_dims, left) for k in range(lowest, highest + 1))
