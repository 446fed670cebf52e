"""CUDA graphs of a decode step, one a batch size: captured once, padded and replayed afterwards.

    inputs = {"slots": GraphInput((), torch.int32, pad=-1), "tokens": GraphInput((4,), torch.int64)}
    graphs = DecodeGraphs(model.step, inputs, buckets=[1, 2, 4, 8, 16, 32, 64])
    print(graphs.capture())  # after replayssm_cute.warmup(problems, graphs.buckets, cache=cache)
    logits = graphs(slots=slots, tokens=tokens)  # 5 rows run in the graph of 8

A batch that no graph was captured for is refused, and so is anything that would compile during a capture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


class NotCaptured(RuntimeError):
    """A batch that no graph was captured for."""


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input of a step: a tensor (batch, *shape).

    Attributes:
        shape: of a row.
        dtype: of the elements.
        pad: what padding rows hold; for slots a padding slot, so that padding rows touch no cache.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pad: int | float | bool = 0


@dataclass(slots=True)
class Captured:
    """What a capture did.

    Attributes:
        device: where.
        buckets: batch sizes that have a graph now.
        seconds: for each of them, the eager run before it included.
    """

    device: str
    buckets: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __str__(self) -> str:
        what = "graphs" if self.device != "cpu" else "batch sizes, run eagerly"
        return f"{len(self.buckets)} {what} on {self.device}: {self.buckets}, {sum(self.seconds):.2f} s"


class DecodeGraphs:
    """Captures a decode step for some batch sizes, and runs any batch in the smallest that holds it.

    `step` is called with the inputs by name, tensors of one of the buckets' sizes at fixed addresses, and gives a
    tensor, or a tuple, list or dict of tensors, with one entry for each row. It must be fit for a CUDA graph: work on
    the current stream, no host syncs, and no effect of padding rows on live ones. Once per bucket it runs eagerly on
    padding rows alone before it is captured, so that libraries set themselves up and what is not compiled is.

    The graphs share one memory pool: outputs are valid until the next call of any size, and calls must not overlap.
    On the CPU there are no graphs; the step runs eagerly, with the same padding and refusals.

    Attributes:
        buckets: batch sizes, ascending.
        buffers: the inputs of the largest size, by name. A caller may write the first rows of a buffer itself and pass
            exactly that view, which is then not copied.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        inputs: Mapping[str, GraphInput],
        buckets: Iterable[int],
        *,
        device: torch.device | str = "cuda",
    ) -> None:
        """Allocate the inputs; see the class.

        Raises:
            ValueError, TypeError: for buckets that are no positive ints, or inputs of wrong types.
        """
        sizes = list(buckets)
        for size in sizes:
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"buckets: got {size!r}, expected positive ints")
        if not sizes:
            raise ValueError("buckets: got none, expected at least one batch size")
        if not inputs:
            raise ValueError("inputs: got none, expected at least one GraphInput")
        for name, given in inputs.items():
            if not isinstance(given, GraphInput):
                raise TypeError(f"inputs[{name!r}]: got {type(given).__name__}, expected GraphInput")
        self.step = step
        self.inputs = dict(inputs)
        self.buckets = sorted(set(sizes))
        most = self.buckets[-1]
        self.buffers = {
            name: torch.full((most, *i.shape), i.pad, dtype=i.dtype, device=device) for name, i in self.inputs.items()
        }
        self.device = next(iter(self.buffers.values())).device
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._outputs: dict[int, Any] = {}

    def capture(self) -> Captured:
        """Run the step once eagerly and capture it, for every bucket, the largest first.

        Only padding rows run, so that no cache changes. Capture again after anything that a graph holds has moved.

        Raises:
            RuntimeError: if a kernel is not ready in the capture, by name; during another capture.
            ValueError: if an output does not have one entry for each row.
        """
        report = Captured(str(self.device))
        self._graphs.clear()
        self._outputs.clear()
        pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        for size in reversed(self.buckets):
            start = time.perf_counter()
            views = {name: buffer[:size] for name, buffer in self.buffers.items()}
            for name, view in views.items():
                view.fill_(self.inputs[name].pad)
            if pool is None:
                _check_rows(self.step(**views), size)
                self._graphs[size] = None
            else:
                self._graphs[size], self._outputs[size] = self._capture_one(views, size, pool)
            report.buckets.insert(0, size)
            report.seconds.insert(0, time.perf_counter() - start)
        return report

    def _capture_one(self, views: dict[str, torch.Tensor], size: int, pool: Any) -> tuple[torch.cuda.CUDAGraph, Any]:
        with torch.cuda.device(self.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                _check_rows(self.step(**views), size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs = self.step(**views)
        return graph, outputs

    def bucket(self, batch: int) -> int:
        """The smallest captured size that holds `batch` rows.

        Raises:
            NotCaptured: if there is none.
        """
        for size in self.buckets:
            if size >= batch and size in self._graphs:
                return size
        if not self._graphs:
            raise NotCaptured(f"batch {batch}: nothing has been captured; call capture() first")
        raise NotCaptured(
            f"batch {batch}: graphs were captured for {', '.join(map(str, sorted(self._graphs)))} rows; add a larger "
            f"bucket, or run this batch eagerly"
        )

    def __call__(self, **inputs: torch.Tensor) -> Any:
        """Run a batch: pad it to its bucket and replay.

        Args:
            inputs: every input by name, (batch, *shape), of its dtype, on any device.

        Returns:
            What the step gave, cut to the batch's rows: views of the graph's own memory, valid until the next call.

        Raises:
            NotCaptured: for a batch that no graph holds.
            ValueError, TypeError: for missing, unknown or misshapen inputs; nothing has run then.
        """
        if set(inputs) != set(self.inputs):
            raise TypeError(f"inputs: got {sorted(inputs)}, expected {sorted(self.inputs)}")
        batch = _batch_of(inputs, self.inputs)
        size = self.bucket(batch)
        for name, value in inputs.items():
            buffer = self.buffers[name]
            own = (value.data_ptr(), value.device, value.stride()) == (
                buffer.data_ptr(),
                buffer.device,
                buffer.stride(),
            )
            if not own:
                buffer[:batch].copy_(value, non_blocking=True)
            if batch < size:
                buffer[batch:size].fill_(self.inputs[name].pad)
        graph = self._graphs[size]
        if graph is None:
            return _rows(self.step(**{name: buffer[:size] for name, buffer in self.buffers.items()}), batch)
        graph.replay()
        return _rows(self._outputs[size], batch)


def _batch_of(given: Mapping[str, torch.Tensor], expected: Mapping[str, GraphInput]) -> int:
    batch = -1
    for name, spec in expected.items():
        value = given[name]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor")
        if value.dtype != spec.dtype:
            raise TypeError(f"{name}: got {value.dtype}, expected {spec.dtype}")
        rows = value.shape[0] if value.dim() else 0
        batch = rows if batch < 0 else batch
        if rows < 1 or rows != batch or tuple(value.shape[1:]) != spec.shape:
            size = "batch" if rows == batch else str(batch)
            raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected {(size, *spec.shape)}")
    return batch


def _rows(outputs: Any, batch: int) -> Any:
    """The first rows of every tensor."""
    if isinstance(outputs, torch.Tensor):
        return outputs[:batch]
    if isinstance(outputs, Mapping):
        return {name: _rows(value, batch) for name, value in outputs.items()}
    cut = [_rows(value, batch) for value in outputs]
    return cut if isinstance(outputs, list) else tuple(cut)


def _check_rows(outputs: Any, size: int) -> None:
    if isinstance(outputs, torch.Tensor):
        if outputs.dim() < 1 or outputs.shape[0] != size:
            raise ValueError(f"step: got an output of shape {tuple(outputs.shape)}, expected ({size}, ...)")
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            _check_rows(value, size)
    elif isinstance(outputs, (tuple, list)):
        for value in outputs:
            _check_rows(value, size)
    else:
        raise TypeError(f"step: got an output of type {type(outputs).__name__}, expected tensors, tuples, lists, dicts")
