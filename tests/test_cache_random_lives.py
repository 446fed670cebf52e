"""Random lives of slots in short and long, dense and ragged windows: every output against the float64 recurrence.

Requests step in packed ragged batches with padding rows among them, and are reset, prefilled, copied, folded, exported
and moved to caches of another T and W in between, with commits of either kind.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from cache_runs import LOW, Request, decays, poison
from oracle import as_array

from replayssm_cute import checkpointing_ssu
from replayssm_cute.cache import CacheSpec, LogicalState, ReplayCache, migrate, replay_cache, stored, torch_ops
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

SIZES = [(4, 16), (32, 64), (32, 32), (7, 33), (1, 64), (17, 50), (2, 2), (1, 1)]  # (T, W)
SLOTS = 5
Token = tuple[torch.Tensor, ...]


# Kinds of state, and what outputs then differ by, of a window's largest one: what rounding of the state, or of the copy
# that is read, costs at most.
PLAIN: list[dict[str, str]] = [{}]
ERRORS = {"f32": 3e-6, "bf16": 2e-2, "i8": 6e-2, "f8e4m3": 0.3}


def spec_of(tokens: int, window: int, **kind: str) -> CacheSpec:
    return CacheSpec(layers=1, heads=2, head_dim=64, d_state=64, groups=1, tokens=tokens, window=window, **kind)


class Lives:
    """A cache in use, and the truth of each of its slots.

    Attributes:
        requests: by slot; slots that hold none have NaN in them.
        pending: with deferred commits, tokens accepted of a slot's open window.
        done: how often each operation ran, and "flush".
    """

    def __init__(
        self, spec: CacheSpec, seed: int, *, deferred: bool, device: str, sizes: list[tuple[int, int]],
        kinds: list[dict[str, str]],
    ) -> None:  # fmt: skip
        self.rng, self.gen = random.Random(seed), torch.Generator().manual_seed(seed)
        self.deferred, self.device, self.sizes, self.kinds = deferred, device, sizes, kinds
        # States may have been in caches of any of the kinds.
        self.error = max(ERRORS[name] for kind in kinds for name in kind.values() or ["f32"])
        if device != "cpu":
            self.error = max(self.error, 1e-2)
        self.cache = self.fresh(spec)
        self.requests: dict[int, Request] = {}
        self.pending: dict[int, int] = {}
        self.done: dict[str, int] = {}

    def fresh(self, spec: CacheSpec) -> ReplayCache:
        """A cache in which nothing that was not written can be read unseen."""
        cache = ReplayCache.allocate(spec, SLOTS, self.device, A=decays(spec))
        poison(cache)
        return cache

    def token(self) -> Token:
        """x (H, P), dt (H,), B and C (G, N)."""
        spec, gen = self.cache.spec, self.gen
        x = torch.randn(spec.heads, spec.head_dim, generator=gen).bfloat16()
        B, C = torch.randn(2, spec.groups, spec.d_state, generator=gen).bfloat16()
        return x, torch.rand(spec.heads, generator=gen) * 0.1 + 0.001, B, C

    def live(self, operation: str) -> None:
        """One operation, named by its method."""
        if operation != "reset" and not self.requests:
            operation = "reset"
        if operation in ("copy", "materialize", "export", "move"):
            self.settle()
        getattr(self, operation)()
        self.done[operation] = self.done.get(operation, 0) + 1

    def settle(self) -> None:
        if self.pending:
            self.cache.settle(list(self.pending), list(self.pending.values()))
            self.pending.clear()

    def entered(self, slot: int, request: Request) -> None:
        self.requests[slot] = request
        self.pending.pop(slot, None)  # its count is stale from now on

    # ---- operations --------------------------------------------------------------------------------

    def reset(self) -> None:
        slot = self.rng.randrange(SLOTS)
        self.cache.reset([slot])
        self.entered(slot, Request(self.cache.spec))

    def prefill(self) -> None:
        spec, slot = self.cache.spec, self.rng.randrange(SLOTS)
        states = torch.randn(1, spec.heads, spec.head_dim, spec.d_state, generator=self.gen)
        self.cache.prefill_handoff([slot], [states.to(self.device)])
        self.entered(slot, Request(spec, [as_array(states[0])]))

    def pairs(self) -> list[tuple[int, int]]:
        """(source, destination) of a batch of moves: chains and cycles, sources used twice."""
        targets = self.rng.sample(range(SLOTS), self.rng.randint(1, SLOTS))
        return [(self.rng.choice(sorted(self.requests)), target) for target in targets]

    def copy(self) -> None:
        pairs = self.pairs()
        self.cache.copy(*([pair[k] for pair in pairs] for k in range(2)))
        self.requests |= {d: self.requests[s].fork() for s, d in pairs}

    def materialize(self) -> None:
        """All live rows of the sources, or more than there are."""
        pairs, spec = self.pairs(), self.cache.spec
        counts = [self.rng.choice([spec.window, 999]) for _ in pairs]
        self.cache.materialize(*([pair[k] for pair in pairs] for k in range(2)), counts)
        self.requests |= {d: self.requests[s].fork() for s, d in pairs}
        assert all(int(self.cache.pnat[d]) == 0 for _, d in pairs)

    def export(self) -> None:
        source, target = self.rng.choice(sorted(self.requests)), self.rng.randrange(SLOTS)
        backup = LogicalState.from_dict(self.cache.export_slots([source]).to_dict())
        request = self.requests[source].fork()
        self.cache.reset([source])
        self.requests.pop(source)
        self.cache.import_slots([target], backup)
        self.entered(target, request)

    def move(self) -> None:
        """Every request into a cache of another T and W, and of another kind of state."""
        other = self.fresh(spec_of(*self.rng.choice(self.sizes), **self.rng.choice(self.kinds)))
        sources = sorted(self.requests)
        targets = self.rng.sample(range(SLOTS), len(sources))
        other.import_slots(targets, self.cache.export_slots(sources))
        self.requests = {d: self.requests[s] for s, d in zip(sources, targets, strict=True)}
        self.cache = other

    def step(self) -> None:
        rng, T = self.rng, self.cache.spec.tokens
        named = rng.sample(sorted(self.requests), rng.randint(1, len(self.requests)))
        slots = [s for slot in named for s in ([slot, -1] if rng.random() < 0.3 else [slot])]
        lens = [rng.choice([0, 1, T, rng.randint(0, T)]) for _ in slots]
        accepted = [rng.choice([0, n, rng.randint(0, n)]) for n in lens]
        if not self.deferred:
            self.windows(slots, lens, accepted)
            self.cache.commit(slots, accepted, lens)
            return
        before = [self.pending.get(s, rng.randint(-3, 99)) for s in slots]  # stale where no window is open
        self.cache.begin_step(slots, before, lens)
        self.windows(slots, lens, accepted)
        for slot, count, length in zip(slots, accepted, lens, strict=True):
            self.pending.pop(slot, None)
            if slot >= 0 and length:
                self.pending[slot] = count

    def windows(self, slots: list[int], lens: list[int], accepted: list[int]) -> None:
        """A packed step with some tokens that no row has at its end, and its outputs beside the truth."""
        spec = self.cache.spec
        tokens = [self.token() for _ in range(sum(lens) + self.rng.randint(1, 3))]
        x, dt, B, C = (torch.stack([token[k] for token in tokens])[None] for k in range(4))
        ends = np.cumsum([0, *lens])
        decay = decays(spec)[0][:, None, None].expand(-1, spec.head_dim, spec.d_state)
        out = self.launch(x, dt, B, C, decay, slots, torch.tensor(ends, dtype=torch.int32))
        assert not out[ends[-1] :].any(), "tokens that no row has give zero"
        for row, slot in enumerate(slots):
            own = slice(ends[row], ends[row + 1])
            if slot < 0 or not lens[row]:
                assert not out[own].any(), "padding gives zero"
                continue
            self.done["flush"] = self.done.get("flush", 0) + (int(self.cache.pnat[slot]) + lens[row] > spec.window)
            given = (as_array(t[0, own]) for t in (dt, x, B, C))
            expected = self.requests[slot].layers[0].run(as_array(decay)[:, 0, 0], *given, accepted[row])
            allowed = self.error * np.abs(expected).max()
            np.testing.assert_allclose(out[own], expected, rtol=0, atol=allowed + 1e-9)

    def launch(
        self, x: torch.Tensor, dt: torch.Tensor, B: torch.Tensor, C: torch.Tensor, A: torch.Tensor, slots: list[int],
        cu_seqlens: torch.Tensor,
    ) -> np.ndarray:  # fmt: skip
        """(total, H, P): the float64 reference on the CPU, the kernel on a GPU."""
        cpu = self.device == "cpu"
        on = {k: v.to(self.device) for k, v in {"x": x, "dt": dt[..., None], "B": B, "C": C, "A": A}.items()}
        arguments: dict[str, Any] = {
            **self.cache.step_args(0),
            **on,
            "dt": on["dt"].expand(x.shape),
            "A": on["A"][:, :1, :1].expand(A.shape),
            "out": torch.full(x.shape, float("nan"), dtype=torch.float64 if cpu else x.dtype, device=self.device),
            "state_batch_indices": torch.tensor(slots, dtype=torch.int32, device=self.device),
            "cu_seqlens": cu_seqlens.to(self.device),
            "max_seqlen": self.cache.spec.tokens,
        }
        if cpu:
            checkpointing_ssu_reference(**arguments, compute_dtype=torch.float64)
        else:
            checkpointing_ssu(**arguments)
        return as_array(arguments["out"][0].cpu())


def lives(
    size: tuple[int, int], seed: int, *, deferred: bool, device: str, sizes: list[tuple[int, int]],
    kinds: list[dict[str, str]] = PLAIN,
) -> Lives:  # fmt: skip
    run = Lives(spec_of(*size, **kinds[0]), seed, deferred=deferred, device=device, sizes=sizes, kinds=kinds)
    names = ["step", "reset", "prefill", "copy", "materialize", "export", "move"]
    for operation in run.rng.choices(names, [24, 3, 1, 2, 3, 2, 1], k=140):
        run.live(operation)
    return run


@pytest.mark.parametrize("deferred", [False, True], ids=["commit", "begin_step"])
@pytest.mark.parametrize("size", SIZES, ids=lambda s: f"T{s[0]}-W{s[1]}")
def test_a_request_never_notices(size: tuple[int, int], deferred: bool) -> None:
    """Whatever happens between its steps, its outputs are those of its own accepted tokens alone."""
    run = lives(size, 10 * size[1] + deferred, deferred=deferred, device="cpu", sizes=SIZES)
    assert run.done["step"] > 5 and run.done["flush"] > 0


MIXED = [  # the last moves among kinds whose recurrence is f32
    *([kind] for kind in LOW),
    [{"copy_dtype": "bf16"}, {}, {"copy_dtype": "i8"}],
]


@pytest.mark.parametrize("deferred", [False, True], ids=["commit", "begin_step"])
@pytest.mark.parametrize("kinds", MIXED, ids=lambda k: "+".join("-".join(kind.values()) for kind in k))
@pytest.mark.parametrize("size", [(4, 16), (17, 50), (1, 1)], ids=lambda s: f"T{s[0]}-W{s[1]}")
def test_codes_and_copies_follow(size: tuple[int, int], kinds: list[dict[str, str]], deferred: bool) -> None:
    """The same lives with 8-bit states and read copies: to within what their rounding costs."""
    run = lives(size, 3 * size[1] + deferred, deferred=deferred, device="cpu", sizes=SIZES, kinds=kinds)
    assert run.done["step"] > 5 and run.done["flush"] > 0


@pytest.mark.parametrize("kind", LOW, ids=lambda k: "-".join(k.values()))
def test_a_life_without_new_scales_and_copies_is_noticed(kind: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """States that enter without what is read of them: the copy of the request before, or its scales."""
    encode = stored.encode
    read = "state_copy" if "copy_dtype" in kind else "state_scale"

    def without(spec: CacheSpec, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: t for name, t in encode(spec, values).items() if name != read}

    for module in (replay_cache, migrate, torch_ops):
        monkeypatch.setattr(module.stored if module is migrate else module, "encode", without)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        lives((4, 16), 1, deferred=False, device="cpu", sizes=[(4, 16)], kinds=[kind])


def test_a_wrong_life_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits that take every row for a full window are found out."""
    commit = ReplayCache.commit
    monkeypatch.setattr(ReplayCache, "commit", lambda self, slots, accepted, lens: commit(self, slots, accepted))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        lives((4, 16), 1, deferred=False, device="cpu", sizes=[(4, 16)])


def lived(sizes: list[tuple[int, int]], kinds: list[dict[str, str]]) -> list[CacheSpec | Problem]:
    """The caches and steps of lives in caches of these sizes and kinds."""
    specs = [spec_of(*size, **kind) for size in sizes for kind in kinds]
    bare: dict[str, Any] = {"d_dtype": None, "dt_bias_dtype": None}
    return [*specs, *(s.problem(dt_dtype="f32", **bare, dt_softplus=False, ragged=True) for s in specs)]


GPU_SIZES = [(32, 64), (3, 5)]
SMALL_SIZES = [(4, 16), (3, 5)]


@pytest.mark.gpu
@pytest.mark.kernels(*lived(GPU_SIZES, PLAIN))
@pytest.mark.parametrize("deferred", [False, True], ids=["commit", "begin_step"])
def test_gpu_a_request_never_notices(deferred: bool) -> None:
    """The kernels in the place of the reference, at the longest windows and at short ones."""
    run = lives((32, 64), 5 + deferred, deferred=deferred, device="cuda", sizes=GPU_SIZES)
    assert run.done["step"] > 5 and run.done["flush"] > 0 and run.done["move"] > 0


@pytest.mark.gpu
@pytest.mark.kernels(lambda where, kinds: lived(SMALL_SIZES, kinds))
@pytest.mark.parametrize("deferred", [False, True], ids=["commit", "begin_step"])
@pytest.mark.parametrize("kinds", MIXED, ids=lambda k: "+".join("-".join(kind.values()) for kind in k))
def test_gpu_codes_and_copies_follow(kinds: list[dict[str, str]], deferred: bool) -> None:
    run = lives((4, 16), 5 + deferred, deferred=deferred, device="cuda", sizes=SMALL_SIZES, kinds=kinds)
    assert run.done["step"] > 5 and run.done["flush"] > 0 and run.done["move"] > 0
