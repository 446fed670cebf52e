"""An oracle of the step that shares no code with `replayssm_cute`: plain loops over rows, heads and tokens.

Everything is float64 numpy; nothing is vectorized over rows, heads or tokens, and the flush rule, the ring and
softplus are written out again from the definition of the operation, so that a slip there cannot hide here.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass
class OracleResult:
    """What one step leaves behind, all float64."""

    state: np.ndarray
    x_cache: np.ndarray
    B_cache: np.ndarray
    dt_cache: np.ndarray
    out: np.ndarray
    flushed: set[int]


def as_array(t: torch.Tensor) -> np.ndarray:
    """A float64 numpy copy."""
    return t.detach().double().numpy().copy()


def softplus(v: float) -> float:
    return math.log1p(math.exp(-abs(v))) + max(v, 0.0)


def token(
    S: np.ndarray, decay_rate: float, dt: float, x: np.ndarray, B: np.ndarray, C: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """One token of one head: the new state, and S @ C if C is given."""
    S = math.exp(decay_rate * dt) * S + dt * np.outer(x, B)
    return S, None if C is None else S @ C


def gate(y: np.ndarray, z: np.ndarray) -> np.ndarray:
    return y * z / (1.0 + np.exp(-z))


def oracle_step(call: Any) -> OracleResult:
    """The step on a call's tensors (which stay as they are), returned as new arrays.

    In a ragged call dimension 0 of the tokens has one entry, and row i the tokens cu_seqlens[i] .. cu_seqlens[i+1]-1.
    """
    state, x_cache, B_cache, dt_cache = map(as_array, (call.state, call.x_cache, call.B_cache, call.dt_cache))
    x, B, C = as_array(call.x), as_array(call.B), as_array(call.C)
    raw_dt, rate = as_array(call.dt)[:, :, :, 0], as_array(call.A)[:, 0, 0]
    bias = None if call.dt_bias is None else as_array(call.dt_bias)[:, 0]
    skip = None if call.D is None else as_array(call.D)[:, 0]
    z = None if call.z is None else as_array(call.z)
    H = x.shape[2]
    G, R = B_cache.shape[1], B_cache.shape[2]
    # where[row]: (index of dimension 0, index of dimension 1) of each of its tokens
    if call.cu_seqlens is None:
        most = x.shape[1]
        where = [[(row, t) for t in range(most)] for row in range(x.shape[0])]
        out = np.full(x.shape, np.nan)
    else:
        most = call.max_seqlen
        begins = [int(v) for v in call.cu_seqlens]
        where = [[(0, t) for t in range(a, b)] for a, b in itertools.pairwise(begins)]
        out = np.zeros(x.shape)
    W = R - most
    flushed = set()
    for row, tokens in enumerate(where):
        slot = row if call.state_batch_indices is None else int(call.state_batch_indices[row])
        if slot == call.pad_slot_id or slot < 0:
            for at in tokens:
                out[at] = 0.0
            continue
        start, pnat = int(call.ring_start[slot]), int(call.prev_num_accepted_tokens[slot])
        live_rows = [(start + j) % R for j in range(pnat)]
        new_rows = [(start + pnat + t) % R for t in range(len(tokens))]
        flush = pnat + len(tokens) > W
        if flush:
            flushed.add(slot)
        for h in range(H):
            g = h // (H // G)
            S = state[slot, h].copy()
            for r in live_rows:
                S, _ = token(S, rate[h], dt_cache[slot, h, r], x_cache[slot, h, r], B_cache[slot, g, r])
            if flush:
                state[slot, h] = S
            for t, at in enumerate(tokens):
                dt = raw_dt[at][h] + (0.0 if bias is None else bias[h])
                if call.dt_softplus:
                    dt = softplus(dt)
                S, y = token(S, rate[h], dt, x[at][h], B[at][g], C[at][g])
                if skip is not None:
                    y = y + skip[h] * x[at][h]
                if z is not None:
                    y = gate(y, z[at][h])
                out[at][h] = y
                x_cache[slot, h, new_rows[t]] = x[at][h]
                dt_cache[slot, h, new_rows[t]] = dt
        for g in range(G):
            for t, at in enumerate(tokens):
                B_cache[slot, g, new_rows[t]] = B[at][g]
    return OracleResult(state, x_cache, B_cache, dt_cache, out, flushed)


class History:
    """One slot's truth: the state after the tokens that were accepted, which never saw a rejected one."""

    def __init__(self, state: np.ndarray) -> None:
        self.state = state.copy()  # (H, P, N)

    def run(
        self, rate: np.ndarray, dt: np.ndarray, x: np.ndarray, B: np.ndarray, C: np.ndarray, accepted: int
    ) -> np.ndarray:
        """Outputs (T, H, P) of T tokens; the first `accepted` of them become history.

        Args:
            rate: (H,), dt: (T, H) processed, x: (T, H, P), B and C: (T, G, N).
        """
        T, H, _ = x.shape
        G = B.shape[1]
        y = np.zeros(x.shape)
        for h in range(H):
            S = self.state[h]
            for t in range(T):
                g = h // (H // G)
                S, y[t, h] = token(S, rate[h], dt[t, h], x[t, h], B[t, g], C[t, g])
                if t + 1 == accepted:
                    kept = S
            if accepted:
                self.state[h] = kept
        return y
