"""Decoding with the standard update: one token a step, for which every layer reads and writes its whole state.

Three implementations of it: FlashInfer's, where it is installed; a Triton kernel, where there is a GPU; plain torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from .decoder import PAD, Decoder
from .model import Block, Model, Shape

# (state (slots, H, P, N), x (b, H, P), dt (b, H), A (H,), B and C (b, G, N), D (H,), dt_bias (H,), slots (b,)) -> y;
# dt is raw, and rows of the null slot have no y and leave no trace.
Update = Callable[..., torch.Tensor]


def by_torch(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor, dt_bias: torch.Tensor, slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Plain torch, in the state's dtype: S <- exp(A dt) S + dt x (outer) B, y = S C + D x, dt = softplus(dt + bias).

    Padding rows all write the null slot, whose content nobody reads.
    """
    index, wide = slots.clamp(min=0).long(), state.dtype
    x, A, D = x.to(wide), A.to(wide), D.to(wide)
    dt = F.softplus(dt.to(wide) + dt_bias.to(wide))[..., None, None]
    B, C = (t.to(wide).repeat_interleave(x.shape[1] // B.shape[1], dim=1)[:, :, None] for t in (B, C))
    S = torch.exp(A[:, None, None] * dt) * state[index] + dt * x[..., None] * B
    state[index] = S
    return (S * C).sum(-1) + D[:, None] * x


def by_flashinfer(
    state: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor,
    D: torch.Tensor, dt_bias: torch.Tensor, slots: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """FlashInfer's kernel for the ordinary update."""
    from flashinfer.mamba import selective_state_update  # type: ignore[import-not-found, unused-ignore]

    heads, head_dim, d_state = state.shape[1:]
    out = torch.empty_like(x)
    selective_state_update(
        state, x, dt[..., None].expand(x.shape), A[:, None, None].expand(heads, head_dim, d_state), B, C,
        D[:, None].expand(heads, head_dim), z=None, dt_bias=dt_bias[:, None].expand(heads, head_dim),
        dt_softplus=True, state_batch_indices=slots, pad_slot_id=PAD, out=out,
    )  # fmt: skip
    return out


def choose(name: str, shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Update, str]:
    """An implementation and what it is in words, with why another does not serve.

    Args:
        name: "auto", the first that gives right numbers of FlashInfer, Triton (on a GPU) and torch; or one of
            "flashinfer", "triton" and "torch", and no other.
        dtype: of dt, D and dt_bias.

    Raises:
        RuntimeError: if the one that is asked for cannot be used, or gives wrong numbers.
    """
    if name == "torch" or (name == "auto" and device.type == "cpu"):
        return by_torch, "plain torch"
    complaints = []
    for each in ("flashinfer", "triton") if name == "auto" else (name,):
        try:
            update, words = _flashinfer() if each == "flashinfer" else _triton(shape, dtype, device)
            _check(update, shape, dtype, device)
        except Exception as error:  # a build that is not there, a geometry that is not served, no compiler, ...
            complaints.append(f"{each}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
            continue
        return update, "; ".join([words, *(f"not {c}" for c in complaints)])
    if name != "auto":
        raise RuntimeError(f"the standard update of {complaints[0]}")
    return by_torch, "; ".join(["plain torch", *(f"not {c}" for c in complaints)])


def _flashinfer() -> tuple[Update, str]:
    import flashinfer  # type: ignore[import-not-found, unused-ignore]

    return by_flashinfer, f"flashinfer.mamba.selective_state_update {getattr(flashinfer, '__version__', '')}".strip()


def _triton(shape: Shape, dtype: torch.dtype, device: torch.device) -> tuple[Update, str]:
    from . import standard_triton

    rows = standard_triton.fastest(example_inputs(shape, dtype, device, batch=64))
    return standard_triton.of(rows), f"a Triton kernel, {rows} rows of a state a program"


def example_inputs(shape: Shape, dtype: torch.dtype, device: torch.device, batch: int = 5) -> dict[str, torch.Tensor]:
    """An update's arguments, random; row 0 is padding."""
    gen = torch.Generator().manual_seed(0)
    s, slots = shape, torch.arange(batch)

    def random(*size: int, kind: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*size, generator=gen).to(device, kind)

    return {
        "state": random(batch, s.heads, s.head_dim, s.d_state),
        "x": random(batch, s.heads, s.head_dim, kind=torch.bfloat16),
        "dt": random(batch, s.heads, kind=dtype),
        "A": -random(s.heads).abs() - 0.5,
        "B": random(batch, s.groups, s.d_state, kind=torch.bfloat16),
        "C": random(batch, s.groups, s.d_state, kind=torch.bfloat16),
        "D": random(s.heads, kind=dtype),
        "dt_bias": random(s.heads, kind=dtype),
        "slots": slots.to(device, torch.int32),
    }


def _check(update: Update, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
    """Hold an implementation to plain torch in float64."""
    given = example_inputs(shape, dtype, device)
    exact = {**given, "state": given["state"].double()}
    y, expected = update(**given), by_torch(**exact)
    for what, got, right, allowed in (
        ("outputs", y[1:], expected[1:], 5e-3), ("states", given["state"][1:], exact["state"][1:], 1e-5),
    ):  # fmt: skip
        error = float((got.double() - right).norm() / right.norm())
        if not error <= allowed:
            raise RuntimeError(f"wrong {what}: relative error {error:.1e}, expected at most {allowed:.0e}")


class StandardDecoder(Decoder):
    """See `Decoder`: T is 1. States are f32 (on the CPU the model's dtype, if that is wider), as those of a cache.

    Args:
        update: as in `choose`.
    """

    def __init__(self, model: Model, requests: int, update: str = "auto", buckets: list[int] | None = None) -> None:
        super().__init__(model, requests, 1, buckets)
        s = model.shape
        self._apply, self.update = choose(update, s, self.narrow, self.device)
        kind = torch.float64 if self.dtype == torch.float64 else torch.float32
        size = (s.layers, requests + 1, s.heads, s.head_dim, s.d_state)
        self.states = torch.zeros(size, dtype=kind, device=self.device)
        self.started = torch.zeros(requests + 1, dtype=torch.int64, device=self.device)  # 1 after a slot's first step
        self.capture()

    def _enter(self, slots: torch.Tensor, states: list[torch.Tensor]) -> None:
        self.states[:, slots.long()] = torch.stack(states).to(self.states.dtype)
        self.started[slots.long()] = 0

    def _begin(self, slots: torch.Tensor, accepted: torch.Tensor) -> torch.Tensor:
        index = slots.clamp(min=0).long()
        moved = self.started[index]
        self.started.index_fill_(0, index, 1)  # an assignment would copy the 1 from the host, which a graph cannot
        return moved

    def _update(
        self, layer: int, block: Block, slots: torch.Tensor, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor,
        C: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        D, bias = block.D.to(self.narrow), block.dt_bias.to(self.narrow)
        y = self._apply(self.states[layer], x[:, 0], dt[:, 0], self.A[layer], B[:, 0], C[:, 0], D, bias, slots)
        return y[:, None]
