"""DecodeGraphs: padding, buckets, refusals; on a GPU also captures and replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from replayssm_cute import DecodeGraphs, GraphInput, NotCaptured, api, compiler, warmup
from replayssm_cute.cache import CacheSpec, ReplayCache, launches

INPUTS = {"slots": GraphInput((), torch.int32, pad=-1), "x": GraphInput((3,), torch.float32)}


class Step:
    """Adds up, and remembers what it was called with."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], torch.Tensor]] = []

    def __call__(self, slots: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
        self.seen.append((slots.tolist(), x.clone()))
        return {"sum": x.sum(1), "pair": (slots + 1, [x * 2])}


def captured(buckets: list[int]) -> tuple[Step, DecodeGraphs]:
    step = Step()
    graphs = DecodeGraphs(step, INPUTS, buckets, device="cpu")
    report = graphs.capture()
    assert report.buckets == sorted(set(buckets)) and "run eagerly" in str(report)
    return step, graphs


def test_capture_runs_padding_alone_the_largest_first() -> None:
    step, _ = captured([4, 1, 4])
    assert [slots for slots, _ in step.seen] == [[-1] * 4, [-1]]
    assert all(not x.any() for _, x in step.seen)


def test_a_batch_is_padded_to_its_bucket_and_outputs_are_cut() -> None:
    step, graphs = captured([1, 4, 8])
    x = torch.arange(9.0).view(3, 3)
    for _ in range(2):  # the second time over what the first left
        out = graphs(slots=torch.tensor([5, 6, 7], dtype=torch.int32), x=x)
        slots, given = step.seen[-1]
        assert slots == [5, 6, 7, -1] and torch.equal(given[:3], x) and not given[3].any()
        assert torch.equal(out["sum"], x.sum(1)) and out["pair"][0].tolist() == [6, 7, 8]
        assert isinstance(out["pair"], tuple) and torch.equal(out["pair"][1][0], x * 2)
        graphs(slots=torch.arange(8, dtype=torch.int32), x=torch.ones(8, 3))
    assert [graphs.bucket(n) for n in (1, 2, 4, 5, 8)] == [1, 4, 4, 8, 8]


def test_a_buffers_own_rows_are_not_copied() -> None:
    step, graphs = captured([2])
    graphs.buffers["slots"][:1] = 9
    graphs.buffers["x"][:1] = 4.0
    out = graphs(**{name: buffer[:1] for name, buffer in graphs.buffers.items()})
    assert step.seen[-1][0] == [9, -1] and out["sum"].tolist() == [12.0]


def test_what_was_not_captured_is_refused() -> None:
    graphs = DecodeGraphs(Step(), INPUTS, [2], device="cpu")
    rows = {"slots": torch.zeros(3, dtype=torch.int32), "x": torch.zeros(3, 3)}
    with pytest.raises(NotCaptured, match=r"batch 3: nothing has been captured; call capture\(\) first"):
        graphs(**rows)
    graphs.capture()
    with pytest.raises(NotCaptured, match="batch 3: graphs were captured for 2 rows; add a larger bucket"):
        graphs(**rows)
    assert len(graphs.step.seen) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": None}, TypeError, "x: got NoneType, expected a torch.Tensor"),
        ({"x": torch.zeros(2, 3).double()}, TypeError, r"x: got torch.float64, expected torch.float32"),
        ({"x": torch.zeros(2, 4)}, ValueError, r"x: got shape \(2, 4\), expected \('batch', 3\)"),
        ({"x": torch.zeros(1, 3)}, ValueError, r"x: got shape \(1, 3\), expected \('2', 3\)"),
        ({"slots": torch.zeros((), dtype=torch.int32)}, ValueError, r"slots: got shape \(\)"),
        ({"more": torch.zeros(2)}, TypeError, r"inputs: got \['more', 'slots', 'x'\], expected \['slots', 'x'\]"),
    ],
)
def test_wrong_inputs_are_refused_before_anything_runs(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    step, graphs = captured([2])
    with pytest.raises(error, match=message):
        graphs(**{"slots": torch.zeros(2, dtype=torch.int32), "x": torch.zeros(2, 3), **change})
    assert len(step.seen) == 1


def test_wrong_definitions_are_refused() -> None:
    for buckets in ([0], [True], [1.5], []):
        with pytest.raises(ValueError, match="buckets: got"):
            DecodeGraphs(Step(), INPUTS, buckets, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="inputs: got none"):
        DecodeGraphs(Step(), {}, [1], device="cpu")
    with pytest.raises(TypeError, match=r"inputs\['x'\]: got tuple, expected GraphInput"):
        DecodeGraphs(Step(), {"x": ((3,), torch.float32)}, [1], device="cpu")  # type: ignore[dict-item]
    for step, error, message in (
        (lambda x: x[:1], ValueError, r"step: got an output of shape \(1, 3\), expected \(2, \.\.\.\)"),
        (lambda x: {"a": (x.sum(),)}, ValueError, r"step: got an output of shape \(\)"),
        (lambda x: None, TypeError, "step: got an output of type NoneType"),
    ):
        with pytest.raises(error, match=message):
            DecodeGraphs(step, {"x": INPUTS["x"]}, [2], device="cpu").capture()


# ---- on a GPU --------------------------------------------------------------------------------------

SPEC = CacheSpec(layers=2, heads=16, head_dim=64, d_state=128, groups=1, tokens=4, window=16)


class Layers:
    """Layers on a cache, with inputs that come from x alone."""

    def __init__(self, cache: ReplayCache) -> None:
        spec = cache.spec
        self.cache, self.spec = cache, spec
        gen = torch.Generator().manual_seed(0)
        self.A = [a[:, None, None].expand(-1, spec.head_dim, spec.d_state) for a in cache.A]
        self.B, self.C = (torch.randn(spec.groups, spec.d_state, generator=gen).bfloat16().cuda() for _ in range(2))

    def __call__(self, slots: torch.Tensor, accepted: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        spec, batch = self.spec, len(slots)
        self.cache.begin_step(slots, accepted)
        for layer in range(spec.layers):
            out = torch.empty_like(x)
            dt = torch.full((batch, spec.tokens, spec.heads, 1), 0.05, device=x.device, dtype=torch.bfloat16)
            shared = (batch, spec.tokens, spec.groups, spec.d_state)
            B, C = (t.expand(shared).contiguous() for t in (self.B, self.C))
            arguments: dict[str, Any] = dict(self.cache.step_args(layer))
            api.checkpointing_ssu(
                **arguments, x=x, dt=dt.expand(x.shape), A=self.A[layer], B=B, C=C, out=out,
                state_batch_indices=slots, pad_slot_id=self.cache.pad_slot_id,
            )  # fmt: skip
            x = x + out
        return x


def gpu_cache() -> ReplayCache:
    return ReplayCache.allocate(SPEC, 24, "cuda", A=[-torch.linspace(1, 8, SPEC.heads)] * 2, pad_slot_id=0)


@pytest.mark.gpu
def test_replays_are_the_eager_steps_bit_for_bit() -> None:
    """Many steps of changing batches, acceptance and slots; capturing changes no byte of the cache."""
    from replayssm_cute.cache.digest import digest

    shape = (SPEC.tokens, SPEC.heads, SPEC.head_dim)
    inputs = {
        "slots": GraphInput((), torch.int32, pad=-1),
        "accepted": GraphInput((), torch.int32),
        "x": GraphInput(shape, torch.bfloat16),
    }
    cache, model = gpu_cache(), gpu_cache()
    problem = SPEC.problem(dt_dtype="bf16", d_dtype=None, dt_bias_dtype=None, dt_softplus=False)
    warmup([problem], [1, 4, 16], cache=cache)
    for c in (cache, model):
        c.reset(torch.arange(1, 24, device="cuda"))
    before = digest(cache.layers, cache._shared)
    compiler.reset_counters()
    graphs = DecodeGraphs(Layers(cache), inputs, [1, 4, 16])
    print(graphs.capture())
    assert compiler.counters().compiled == compiler.counters().disk == 0
    assert digest(cache.layers, cache._shared) == before
    eager = Layers(model)
    gen = torch.Generator().manual_seed(1)
    for _ in range(40):
        batch = int(torch.randint(1, 17, (), generator=gen))
        slots = (torch.randperm(23, generator=gen)[:batch] + 1).int().cuda()
        accepted = torch.randint(0, SPEC.tokens + 1, (batch,), generator=gen).int().cuda()
        x = torch.randn(batch, *shape, generator=gen).bfloat16().cuda()
        got = graphs(slots=slots, accepted=accepted, x=x).clone()
        # padded too: another batch size may have another tile config, and with it another order of sums
        rows = graphs.bucket(batch) - batch
        padded = (
            torch.cat((t, t.new_full((rows, *t.shape[1:]), pad))) for t, pad in ((slots, -1), (accepted, 0), (x, 0))
        )
        assert torch.equal(got, eager(*padded)[:batch])
    assert digest(cache.layers, cache._shared) == digest(model.layers, model._shared)


@pytest.mark.gpu
def test_a_kernel_that_is_not_ready_stops_the_capture_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tripwire: what a capture alone reaches cannot be compiled in it."""
    cache = gpu_cache()

    def step(slots: torch.Tensor) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            cache.commit(slots, slots)
        return slots + 1

    monkeypatch.setattr(launches, "_touched", set())
    graphs = DecodeGraphs(step, {"slots": GraphInput((), torch.int32, pad=-1)}, [2])
    with pytest.raises(RuntimeError, match="the cache's cursors is not ready, and a CUDA graph is being captured"):
        graphs.capture()
    cache.prepare()
    graphs.capture()
    assert graphs(slots=torch.tensor([3], dtype=torch.int32)).tolist() == [4]
