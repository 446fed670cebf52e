"""CUDA graphs of a decode step, one a batch size: captured once, padded and replayed afterwards.

    inputs = {"slots": GraphInput((), torch.int32, pad=-1), "tokens": GraphInput((4,), torch.int64)}
    graphs = DecodeGraphs(model.step, inputs, buckets=[1, 2, 4, 8, 16, 32, 64])
    print(graphs.capture())  # after replayssm_cute.warmup(problems, graphs.buckets, cache=cache)
    logits = graphs(slots=slots, tokens=tokens)  # 5 rows run in the graph of 8

Rows with numbers of new tokens of their own lie packed, as in `checkpointing_ssu` with cu_seqlens:

    inputs = {
        "slots": GraphInput((), torch.int32, pad=-1),
        "cu_seqlens": GraphInput((), torch.int32, per="boundary"),
        "tokens": GraphInput((), torch.int64, per="token"),
    }
    graphs = DecodeGraphs(model.step, inputs, buckets=[1, 2, 4, 8], max_tokens=4)
    logits = graphs(slots=slots, cu_seqlens=cu_seqlens, tokens=tokens)  # 3 rows of 1 + 4 + 2 = 7 tokens

A batch that no graph was captured for is refused, and so is anything that would compile during a capture.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch


class NotCaptured(RuntimeError):
    """A batch that no graph was captured for."""


@dataclass(frozen=True, slots=True)
class GraphInput:
    """One input of a step: a tensor (batch, *shape), or packed.

    Attributes:
        shape: of a row, or of a token.
        dtype: of the elements.
        pad: what padding rows hold; for slots a padding slot, so that padding rows touch no cache.
        per: what has an entry: each "row"; each packed "token" of all rows together, (total, *shape); or each
            "boundary" between rows, (batch + 1, *shape), as in cu_seqlens. Padding then repeats the last boundary
            given, so that padding rows have no tokens.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    pad: int | float | bool = 0
    per: Literal["row", "token", "boundary"] = "row"


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
    tensor, or a tuple, list or dict of tensors, with one entry for each row, or for each packed token (with packed
    inputs and max_tokens > 1). A bucket of b rows has room for b times max_tokens packed tokens. `step` must be fit for
    a CUDA graph: work on the current stream, no host syncs, and no effect of padding rows on live ones. Once per bucket
    it runs eagerly on padding rows alone before it is captured, so that libraries set themselves up and what is not
    compiled is.

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
        max_tokens: int | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        """Allocate the inputs; see the class.

        Args:
            step, inputs, buckets: see the class.
            max_tokens: most tokens of a row, for inputs with an entry per token; T of a cache (its max_seqlen).
            device: where.

        Raises:
            ValueError, TypeError: for buckets that are no positive ints, or inputs of wrong types; for packed inputs
                without max_tokens, and the other way round.
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
            if given.per not in ("row", "token", "boundary"):
                raise ValueError(f"inputs[{name!r}]: got per={given.per!r}, expected 'row', 'token' or 'boundary'")
        kinds = {given.per for given in inputs.values()}
        if kinds == {"token"}:
            raise ValueError("inputs: got an entry per token in all, expected one with an entry per row or boundary")
        if ("token" in kinds) != (max_tokens is not None):
            raise ValueError(
                f"max_tokens: got {max_tokens!r} {'beside' if 'token' in kinds else 'without'} inputs per token, "
                f"expected an int beside such inputs, else None"
            )
        if max_tokens is not None and (
            not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1
        ):
            raise ValueError(f"max_tokens: got {max_tokens!r}, expected a positive int")
        self.max_tokens = max_tokens
        self.step = step
        self.inputs = dict(inputs)
        self.buckets = sorted(set(sizes))
        most = self.buckets[-1]
        self.buffers = {
            name: torch.full((self._entries(i, most), *i.shape), i.pad, dtype=i.dtype, device=device)
            for name, i in self.inputs.items()
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
            views = self._views(size)
            for name, view in views.items():
                view.fill_(0 if self.inputs[name].per == "boundary" else self.inputs[name].pad)
            if pool is None:
                self._check_outputs(self.step(**views), size)
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
                self._check_outputs(self.step(**views), size)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                outputs = self.step(**views)
        return graph, outputs

    def bucket(self, batch: int, total: int = 0) -> int:
        """The smallest captured size that holds `batch` rows, and `total` packed tokens.

        Raises:
            NotCaptured: if there is none.
        """
        for size in self.buckets:
            if size >= batch and size in self._graphs and size * (self.max_tokens or 0) >= total:
                return size
        what = f"batch {batch}" + (f" of {total} tokens" if total else "")
        if not self._graphs:
            raise NotCaptured(f"{what}: nothing has been captured; call capture() first")
        each = f" of at most {self.max_tokens} tokens" if self.max_tokens else ""
        raise NotCaptured(
            f"{what}: graphs were captured for {', '.join(map(str, sorted(self._graphs)))} rows{each}; add a larger "
            f"bucket, or run this batch eagerly"
        )

    def __call__(self, **inputs: torch.Tensor) -> Any:
        """Run a batch: pad it to its bucket and replay.

        Args:
            inputs: every input by name, (batch, *shape), of its dtype, on any device; packed ones (total, *shape), and
                boundaries (batch + 1, *shape). Packed tokens beyond the last boundary belong to no row.

        Returns:
            What the step gave, cut to the batch's rows or tokens: views of the graph's own memory, valid until the next
            call.

        Raises:
            NotCaptured: for a batch that no graph holds.
            ValueError, TypeError: for missing, unknown or misshapen inputs; nothing has run then.
        """
        if set(inputs) != set(self.inputs):
            raise TypeError(f"inputs: got {sorted(inputs)}, expected {sorted(self.inputs)}")
        batch, total = _sizes_of(inputs, self.inputs)
        size = self.bucket(batch, total)
        for name, value in inputs.items():
            buffer, given = self.buffers[name], value.shape[0]
            own = (value.data_ptr(), value.device, value.stride()) == (
                buffer.data_ptr(),
                buffer.device,
                buffer.stride(),
            )
            if not own:
                buffer[:given].copy_(value, non_blocking=True)
            if given < (entries := self._entries(self.inputs[name], size)):
                if self.inputs[name].per == "boundary":
                    buffer[given:entries] = buffer[given - 1]
                else:
                    buffer[given:entries].fill_(self.inputs[name].pad)
        graph = self._graphs[size]
        if graph is None:
            return self._cut(self.step(**self._views(size)), size, batch, total)
        graph.replay()
        return self._cut(self._outputs[size], size, batch, total)

    # -----------------------------------------------------------------------------------------------

    def _entries(self, given: GraphInput, size: int) -> int:
        """Entries of an input in a bucket."""
        return {"row": size, "token": size * (self.max_tokens or 0), "boundary": size + 1}[given.per]

    def _views(self, size: int) -> dict[str, torch.Tensor]:
        """The inputs of a bucket."""
        return {name: buffer[: self._entries(self.inputs[name], size)] for name, buffer in self.buffers.items()}

    def _check_outputs(self, outputs: Any, size: int) -> None:
        _check_entries(outputs, [size] if self.max_tokens is None else [size, size * self.max_tokens])

    def _cut(self, outputs: Any, size: int, batch: int, total: int) -> Any:
        """The first rows, or packed tokens, of every tensor."""
        if isinstance(outputs, torch.Tensor):
            return outputs[: batch if outputs.shape[0] == size else total]
        if isinstance(outputs, Mapping):
            return {name: self._cut(value, size, batch, total) for name, value in outputs.items()}
        cut = [self._cut(value, size, batch, total) for value in outputs]
        return cut if isinstance(outputs, list) else tuple(cut)


def _sizes_of(given: Mapping[str, torch.Tensor], expected: Mapping[str, GraphInput]) -> tuple[int, int]:
    """Rows and packed tokens, after the checks of every input."""
    sizes = {"row": -1, "token": -1}
    for name, spec in expected.items():
        value = given[name]
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, expected a torch.Tensor")
        if value.dtype != spec.dtype:
            raise TypeError(f"{name}: got {value.dtype}, expected {spec.dtype}")
        kind, more = ("row", 1) if spec.per == "boundary" else (spec.per, 0)
        found = value.shape[0] - more if value.dim() else -1
        if sizes[kind] < 0:
            sizes[kind] = found
        least = 0 if kind == "token" else 1
        if found < least or found != sizes[kind] or tuple(value.shape[1:]) != spec.shape:
            free = {"row": "batch", "token": "total"}[kind]
            size = (free if found == sizes[kind] else str(sizes[kind])) + (" + 1" if more else "")
            raise ValueError(f"{name}: got shape {tuple(value.shape)}, expected {(size, *spec.shape)}")
    return sizes["row"], max(sizes["token"], 0)


def _check_entries(outputs: Any, allowed: list[int]) -> None:
    if isinstance(outputs, torch.Tensor):
        if outputs.dim() < 1 or outputs.shape[0] not in allowed:
            expected = " or ".join(f"({size}, ...)" for size in allowed)
            raise ValueError(f"step: got an output of shape {tuple(outputs.shape)}, expected {expected}")
    elif isinstance(outputs, Mapping):
        for value in outputs.values():
            _check_entries(value, allowed)
    elif isinstance(outputs, (tuple, list)):
        for value in outputs:
            _check_entries(value, allowed)
    else:
        raise TypeError(f"step: got an output of type {type(outputs).__name__}, expected tensors, tuples, lists, dicts")
