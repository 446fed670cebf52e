"""Are a cache's kernels right on this GPU? They are compared with the torch operations, once per process and shape."""

from __future__ import annotations

import dataclasses

import torch

from .. import selfcheck
from . import layout, recipes
from .launches import Launches
from .layout import LayerTensors, Shared
from .recipes import CacheRecipe
from .spec import CacheSpec
from .stored import as_bits, encode
from .torch_ops import TorchOps

SLOTS, LAYERS = 7, 2
FOLD_ERROR = 1e-6  # of the largest element, for f32; half a unit in the last place is added for shorter states
_ULP = {"f32": 0.0, "bf16": 2**-8, "f16": 2**-11}  # of those whose fold is a kernel

_proven: set[tuple[CacheRecipe, int]] = set()


def prove(spec: CacheSpec, device: torch.device) -> int:
    """Compare the kernels of a cache with the torch operations, on a small cache of random content.

    Returns:
        The number of kernels that were compared now; those that this process has proven before are not.

    Raises:
        RuntimeError: naming the operation and the tensor that differs.
    """
    if not selfcheck.enabled():
        return 0
    wanted = {(recipe, device.index or 0) for recipe in recipes.all_of(spec)}
    if wanted <= _proven:
        return 0
    small = dataclasses.replace(spec, layers=min(spec.layers, LAYERS))
    content = _content(small, device)
    for name, arguments in _operations(spec, device).items():
        got, expected = (_copied(small, content) for _ in range(2))
        getattr(Launches(small, *got, -1), name.partition(" ")[0])(*arguments)
        getattr(TorchOps(small, *expected, -1), name.partition(" ")[0])(*arguments)
        _compare(name, small, _named(*got), _named(*expected))
    count = len(wanted - _proven)
    _proven.update(wanted)
    return count


def _operations(spec: CacheSpec, device: torch.device) -> dict[str, tuple[object, ...]]:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    slots, accepted = ints(3, -1, 0, 6, 1), ints(0, 1, spec.tokens, 2 * spec.tokens, -1)
    lens = ints(spec.tokens, 0, 1, 0, spec.tokens)
    # a chain, a cycle, a source of two, a slot of its own, and padding
    sources, targets = ints(0, 1, 2, 3, 3, 5, -1), ints(1, 2, 0, 4, 6, 5, 3)
    counts = ints(0, 1, spec.window, 2, spec.window, 3, 1)
    operations: dict[str, tuple[object, ...]] = {
        "commit": (slots, accepted, None),
        "commit ragged": (slots, accepted, lens),
        "begin_step": (slots, accepted, lens),
        "settle": (slots, accepted),
        "reset": (slots, True),
        "reset cursors": (slots, False),
        "materialize": (sources, targets, counts),
        "copy": (sources, targets),
    }
    if not spec.plain:
        del operations["materialize"]  # no kernel
    return operations


Content = tuple[tuple[LayerTensors, ...], Shared]


def _content(spec: CacheSpec, device: torch.device) -> Content:
    """Random content; NaN in dead rows."""
    layers, shared = layout.allocate(spec, SLOTS, device)
    gen = torch.Generator().manual_seed(0)
    start = torch.randint(0, spec.ring_rows, (SLOTS,), generator=gen)
    live = torch.randint(0, spec.window + 1, (SLOTS,), generator=gen)
    live[2] = spec.window
    shared.ring_start.copy_(start)
    shared.pnat.copy_(live)
    shared.last_tokens.copy_(torch.randint(0, spec.tokens + 1, (SLOTS,), generator=gen))
    shared.A.copy_(-16 * torch.rand(shared.A.shape, generator=gen))
    dead = ((torch.arange(spec.ring_rows) - start[:, None]) % spec.ring_rows >= live[:, None]).to(device)
    for layer in layers:
        for name, made in encode(spec, torch.randn(layer.state.shape, generator=gen)).items():
            as_bits(getattr(layer, name)).copy_(as_bits(made))
        layer.x_cache.copy_(torch.randn(layer.x_cache.shape, generator=gen))
        layer.B_cache.copy_(torch.randn(layer.B_cache.shape, generator=gen))
        layer.dt_cache.copy_(0.1 * torch.rand(layer.dt_cache.shape, generator=gen))
        for t in (layer.x_cache, layer.B_cache, layer.dt_cache):
            t.transpose(1, 2)[dead] = float("nan")
    return layers, shared


def _copied(spec: CacheSpec, content: Content) -> Content:
    layers, shared = layout.allocate(spec, SLOTS, content[1].A.device)
    for t, source in zip(_named(layers, shared).values(), _named(*content).values(), strict=True):
        as_bits(t).copy_(as_bits(source))
    shared.A.copy_(content[1].A)
    return layers, shared


def _named(layers: tuple[LayerTensors, ...], shared: Shared) -> dict[str, torch.Tensor]:
    named = {"ring_start": shared.ring_start, "pnat": shared.pnat, "last_tokens": shared.last_tokens}
    for i, layer in enumerate(layers):
        named |= {f"{name} of layer {i}": t for name, t in layer.named().items()}
    return named


def _compare(name: str, spec: CacheSpec, got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for tensor, value in got.items():
        other = expected[tensor]
        if name == "materialize" and tensor.startswith("state"):
            # Both round once, so that where they round apart they are a whole unit from each other.
            allowed = 2 * _ULP[spec.state_dtype] * other.double().abs() + FOLD_ERROR * other.double().abs().max()
            right = bool(((value.double() - other.double()).abs() <= allowed).all())
        else:
            right = torch.equal(as_bits(value), as_bits(other))
        if not right:
            raise RuntimeError(
                f"self-check: the cache's {name} gave wrong values in {tensor}, for {spec.problem().label()}"
            )
