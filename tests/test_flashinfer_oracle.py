"""FlashInfer's `checkpointing_ssu` as an oracle: on the same inputs, its results and ours are this far apart at most.

Shares no code with this project, so that a misreading of the operation shows here and nowhere else. The two are
compared with each other, not each with the reference, and the limits are fixed: about what the roundings of FlashInfer
0.7.4 cost. How exact ours is, the tests of the step say, which hold it to float64. Needs a GPU and
flashinfer-python; problems that an installation has no compiled library for are skipped by name.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable

import pytest
import torch
from fakes import SMALL
from replayssm_tuning import peers

import replayssm_cute
from replayssm_cute import tables, target
from replayssm_cute.calls import Call, random_call
from replayssm_cute.config import TileConfig
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

Step = Callable[[Call], None]

# How far apart FlashInfer's results and ours may be. Behind each, what a run of four of the problems on an H200 found.
# A float64 model with the state and the weights of ring rows rounded to bf16 gives 2.6e-3 for "out" too.
LIMITS = {
    "out": 3.2e-3,  # 2.02e-3 to 2.78e-3
    # Each row's norm taken as the tensor's rms row at least: where terms cancel, errors have the size of the terms, and
    # the row's own size says nothing (rows differed by up to 0.28 of that). The sum of both errors: at most 5e-3 of
    # ours (compare.bounds), and 5.7e-3 of the model. Found: 4.56e-3 to 8.63e-3.
    "out_row": 1.1e-2,
    "dt": 2e-4,  # 7.9e-5 to 1.07e-4: log(1 + e^v) in f32 alone loses 5.9e-5 of e^v at v = -7
}
STATE_LIMITS = {"f32": 2e-3, "bf16": 3.2e-3}  # 9.9e-4 to 1.65e-3; 2.38e-3 to 2.70e-3: both round to bf16
PROBLEMS = [
    Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16),
    Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16, state_dtype="bf16"),
    Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=1, window=16),
    Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=1, window=16, state_dtype="bf16"),
    Problem(heads=16, head_dim=64, d_state=128, groups=1, tokens=6, window=16),
    Problem(heads=96, head_dim=80, d_state=128, groups=8, tokens=4, window=16),
    Problem(heads=64, head_dim=64, d_state=128, groups=8, tokens=16, window=16),
]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    kind = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


def apart(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> float:
    """||a - b|| / ||scale||."""
    return float((a.double() - b.double()).norm() / scale.double().norm())


def rows_apart(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> float:
    """The largest ||a - b|| of a (row, token, head) over its scale's norm, but at least the rms of all such norms."""
    norms = scale.double().norm(dim=-1)
    return float(((a.double() - b.double()).norm(dim=-1) / norms.clamp_min(norms.square().mean().sqrt())).max())


def distances(problem: Problem, before: Call, ours: Call, theirs: Call) -> dict[str, float]:
    """How far apart two steps on the same inputs are, over the exact results' sizes; names are those of the limits.

    Raises:
        AssertionError: where what must be equal bit for bit is not.
    """
    assert before.state_batch_indices is not None
    live_row = before.state_batch_indices >= 0
    live = before.state_batch_indices[live_row].long()
    exact = before.clone()
    exact.state, exact.out, exact.dt_cache = exact.state.double(), exact.out.double(), exact.dt_cache.double()
    checkpointing_ssu_reference(**exact.kwargs(), compute_dtype=torch.float64)
    for name in ("x_cache", "B_cache"):
        assert same_bits(getattr(ours, name), getattr(theirs, name)), f"{name}: the rings differ"
    parked = torch.ones(len(before.state), dtype=torch.bool, device=before.state.device)
    parked[live] = False
    flush = before.prev_num_accepted_tokens[live] + problem.tokens > problem.window
    kept = parked.clone()
    kept[live[~flush]] = True
    for name, call in (("ours", ours), ("theirs", theirs)):
        assert same_bits(call.state[kept], before.state[kept]), f"state: {name} wrote a slot that does not flush"
        for cursor in ("ring_start", "prev_num_accepted_tokens"):
            assert torch.equal(getattr(call, cursor), getattr(before, cursor)), f"{cursor}: moved by {name}"
    outputs = ours.out[live_row], theirs.out[live_row], exact.out[live_row]
    dt = (ours.dt_cache - theirs.dt_cache).abs() / exact.dt_cache.abs().clamp_min(1e-30)
    found = {"out": apart(*outputs), "out_row": rows_apart(*outputs), "dt": float(dt.max())}
    flushed = live[flush]
    if len(flushed):
        found["state"] = apart(ours.state[flushed], theirs.state[flushed], exact.state[flushed])
    return found


def too_far(problem: Problem, found: dict[str, float]) -> list[str]:
    """The distances beyond their limits, in words; NaN is beyond all."""
    limits = {**LIMITS, "state": STATE_LIMITS[problem.state_dtype]}
    return [
        f"{name}: {value:.2e}, limit {limits[name]:g}" for name, value in found.items() if not value <= limits[name]
    ]


def decode(problem: Problem, ours: Step, theirs: Step, device: str, steps: int) -> dict[str, float]:
    """The largest distances over steps whose cursors evolve; every step begins with the same bytes for both."""
    counts = [*range(problem.window + 1), 0, 0]
    call = random_call(
        problem, len(counts), pnat=counts, padding=(17, 18), dead=0.0, seed=0, device=torch.device(device)
    )
    assert call.state_batch_indices is not None
    gen, numbers = torch.Generator().manual_seed(1), torch.Generator(device).manual_seed(2)
    found: dict[str, list[float]] = {}
    for _ in range(steps):
        for t in (call.x, call.B, call.C):
            t.normal_(generator=numbers)
        call.dt[..., 0].uniform_(-5, 0, generator=numbers)
        before, other = call.clone(), call.clone()
        ours(call)
        theirs(other)
        for name, value in distances(problem, before, call, other).items():
            found.setdefault(name, []).append(value)
        replayssm_cute.commit(
            call.ring_start, call.prev_num_accepted_tokens, call.state_batch_indices,
            torch.randint(0, problem.tokens + 1, (len(counts),), generator=gen).to(call.ring_start),
            tokens=problem.tokens, window=problem.window,
        )  # fmt: skip
    assert "state" in found, "no step flushed"
    return {name: float(torch.tensor(values).max()) for name, values in found.items()}  # NaN stays NaN


def ours(call: Call) -> None:
    replayssm_cute.checkpointing_ssu(**call.kwargs())


def kernel(where: target.Target, problem: Problem) -> list[tuple[Problem, TileConfig]]:
    """Ours of a problem: one config, since the tests of the step run them all. None where there is no FlashInfer."""
    installed = importlib.util.find_spec("flashinfer") is not None
    return [(problem, tables.choose(problem, 19, where).config)] if installed else []


@pytest.mark.gpu
@pytest.mark.kernels.with_args(kernel)
@pytest.mark.parametrize("problem", PROBLEMS, ids=Problem.label)
def test_flashinfer_and_ours_agree(problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("flashinfer") is None:
        pytest.skip("flashinfer-python is not installed")
    if (version := peers.installed()["flashinfer"]) != peers.REFINED_VERSION:
        pytest.skip(f"flashinfer-python is {version}; the limits are those of {peers.REFINED_VERSION}")
    default = next(v for v in peers.variants(problem, 19, torch.device("cuda")) if v.default)
    ((_, config),) = kernel(target.of_device(torch.cuda.current_device()), problem)

    def theirs(call: Call) -> None:
        try:
            default.run(call)
        except Exception as error:
            if "MissingJITCacheError" in {kind.__name__ for kind in type(error).__mro__}:
                pytest.skip(f"FlashInfer has no compiled library for {problem.label()}: {error}")
            raise
        torch.cuda.synchronize()

    def served(call: Call) -> None:
        replayssm_cute.checkpointing_ssu(**call.kwargs(), config=config)

    theirs(random_call(problem, 2, dead=0.0, device="cuda"))  # is there a library at all
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    found = decode(problem, served, theirs, "cuda", steps=3)
    print(problem.label(), config.label(), {name: f"{value:.2e}" for name, value in found.items()})
    assert not too_far(problem, found)


# ---------------------------------------------------------------------------------------------------
# The comparison bites
# ---------------------------------------------------------------------------------------------------


def narrowed(call: Call) -> None:
    """A step whose outputs come from a state that is narrowed to bf16."""
    rounded = call.clone()
    rounded.state = rounded.state.bfloat16().float()
    checkpointing_ssu_reference(**rounded.kwargs())
    checkpointing_ssu_reference(**call.kwargs())
    call.out.copy_(rounded.out)


def early_flush(call: Call) -> None:
    """A step that writes the state of its first row, which is not full yet."""
    before = call.clone()
    checkpointing_ssu_reference(**call.kwargs())
    assert call.state_batch_indices is not None
    slot = int(call.state_batch_indices[0])
    call.state[slot] = before.state[slot] * 1.5


def late_ring(call: Call) -> None:
    checkpointing_ssu_reference(**call.kwargs())
    call.x_cache.copy_(call.x_cache.roll(1, 2))


def moved_cursors(call: Call) -> None:
    checkpointing_ssu_reference(**call.kwargs())
    call.prev_num_accepted_tokens += 1


def no_skip(call: Call) -> None:
    checkpointing_ssu_reference(**{**call.kwargs(), "D": None})


def changed(largest: bool, share: float) -> Step:
    """A step whose largest or smallest (row, token, head) is off by a share of the rms one."""

    def run(call: Call) -> None:
        checkpointing_ssu_reference(**call.kwargs())
        norms = call.out[:17].float().norm(dim=-1)
        chosen = norms.argmax() if largest else norms.argmin()
        row = call.out[:17].view(-1, call.out.shape[-1])[chosen]
        row *= 1 + share * float(norms.square().mean().sqrt() / norms.flatten()[chosen])

    return run


def drifting(state: float = 1.0, dt: float = 1.0, out: float = 1.0) -> Step:
    """A step whose flushed states, processed dt or outputs are all off by a factor."""

    def run(call: Call) -> None:
        before = call.clone()
        checkpointing_ssu_reference(**call.kwargs())
        for name, factor in (("state", state), ("dt_cache", dt)):
            was, now = getattr(before, name), getattr(call, name)
            now.copy_(torch.where(was == now, now, now * factor))
        call.out *= out

    return run


SMALL_16 = Problem(heads=SMALL.heads, head_dim=64, d_state=64, groups=2, tokens=2, window=16)
SMALL_BF16 = dataclasses.replace(SMALL_16, state_dtype="bf16")


def test_a_peer_that_narrows_the_state_is_near() -> None:
    found = decode(SMALL_16, ours, narrowed, "cpu", steps=3)
    assert not too_far(SMALL_16, found)
    assert found["out"] > 0.2 * LIMITS["out"] and found["out_row"] > 0.2 * LIMITS["out_row"], "the limits are near"
    assert found["state"] == found["dt"] == 0


def test_a_small_row_is_held_to_the_size_of_the_others() -> None:
    """What rounding leaves of terms that cancel is no slip, though it is more than 1% of the row here."""
    peer = changed(largest=False, share=0.004)
    call = random_call(SMALL_16, 19, padding=(17, 18), dead=0.0)
    right = call.clone()
    peer(call)
    ours(right)
    off = (call.out - right.out)[:17].float().norm(dim=-1) / right.out[:17].float().norm(dim=-1)
    assert float(off.max()) > 0.01
    assert not too_far(SMALL_16, decode(SMALL_16, ours, peer, "cpu", steps=3))


@pytest.mark.parametrize(
    ("peer", "said"),
    [
        (early_flush, "state: theirs wrote a slot"),
        (late_ring, "x_cache: the rings differ"),
        (moved_cursors, "prev_num_accepted_tokens: moved by theirs"),
    ],
)
def test_a_peer_with_other_bytes_is_seen(peer: Step, said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        decode(SMALL_16, ours, peer, "cpu", steps=1)


@pytest.mark.parametrize(
    ("problem", "peer", "seen"),
    [
        (SMALL_16, no_skip, {"out", "out_row"}),
        (SMALL_16, drifting(out=1.004), {"out"}),
        (SMALL_16, changed(largest=True, share=0.035), {"out_row"}),
        (SMALL_16, changed(largest=False, share=0.015), {"out_row"}),
        (SMALL_16, drifting(state=1.003), {"state"}),
        (SMALL_BF16, drifting(state=1.006), {"state"}),
        (SMALL_16, drifting(dt=1.0003), {"dt"}),
        (SMALL_16, drifting(out=float("nan")), {"out", "out_row"}),
        (SMALL_16, drifting(state=float("nan")), {"state"}),
        (SMALL_16, drifting(dt=float("nan")), {"dt"}),
    ],
)  # fmt: skip
def test_a_peer_with_other_numbers_is_seen(problem: Problem, peer: Step, seen: set[str]) -> None:
    found = decode(problem, ours, peer, "cpu", steps=2)
    assert {line.split(":")[0] for line in too_far(problem, found)} == seen, found
