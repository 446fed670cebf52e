"""DecodeGraphs: padding, buckets, refusals; on a GPU also captures and replays."""

from __future__ import annotations

import itertools
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


PACKED = {
    "slots": INPUTS["slots"],
    "cu_seqlens": GraphInput((), torch.int32, per="boundary"),
    "x": GraphInput((3,), torch.float32, per="token"),
}


class PackedStep:
    """Sums up the tokens of each row, and remembers what it was called with."""

    def __init__(self) -> None:
        self.seen: list[dict[str, torch.Tensor]] = []

    def __call__(self, **given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append({name: t.clone() for name, t in given.items()})
        ends = given["cu_seqlens"].tolist()
        rows = [given["x"][a:b].sum() for a, b in itertools.pairwise(ends)]
        return torch.stack(rows), given["x"] * 2


def packed(buckets: list[int], max_tokens: int = 4) -> tuple[PackedStep, DecodeGraphs]:
    step = PackedStep()
    graphs = DecodeGraphs(step, PACKED, buckets, max_tokens=max_tokens, device="cpu")
    graphs.capture()
    return step, graphs


def rows_of(lens: list[int], extra: int = 0) -> dict[str, torch.Tensor]:
    """Rows of these lengths; x counts the tokens from 1 on."""
    total = sum(lens)
    return {
        "slots": torch.arange(5, 5 + len(lens), dtype=torch.int32),
        "cu_seqlens": torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32),
        "x": torch.arange(1.0, total + extra + 1)[:, None].expand(-1, 3).contiguous(),
    }


def test_packed_rows_are_padded_with_rows_of_no_tokens() -> None:
    step, graphs = packed([1, 4])
    assert [s["x"].shape[0] for s in step.seen] == [16, 4] and not any(s["cu_seqlens"].any() for s in step.seen)
    for extra in (0, 2):
        rows, tokens = graphs(**rows_of([2, 0, 4], extra))
        seen = step.seen[-1]
        assert seen["slots"].tolist() == [5, 6, 7, -1] and seen["cu_seqlens"].tolist() == [0, 2, 2, 6, 6]
        assert seen["x"].shape == (16, 3) and not seen["x"][6 + extra :].any()
        assert rows.tolist() == [9, 0, 54] and tokens[:, 0].tolist() == [2.0 * i for i in range(1, 7 + extra)]
        graphs(**rows_of([4, 4, 4, 4]))  # the second time over what this left
    rows, tokens = graphs(**rows_of([0]))
    assert rows.tolist() == [0] and tokens.shape == (0, 3) and len(step.seen[-1]["slots"]) == 1


def test_a_bucket_has_room_for_rows_and_tokens() -> None:
    """Tokens that no row has may take a larger bucket; what fits into none is refused."""
    step, graphs = packed([1, 2])
    graphs(**rows_of([4], extra=1))
    assert len(step.seen[-1]["slots"]) == 2
    assert (graphs.bucket(1, 4), graphs.bucket(1, 5), graphs.bucket(2)) == (1, 2, 2)
    with pytest.raises(NotCaptured, match="batch 2 of 9 tokens: graphs were captured for 1, 2 rows of at most 4 tok"):
        graphs(**rows_of([4, 4], extra=1))


def test_a_packed_buffers_own_rows_are_not_copied() -> None:
    step, graphs = packed([3])
    graphs.buffers["slots"][:2] = 9
    graphs.buffers["cu_seqlens"][:3] = torch.tensor([0, 1, 3])
    graphs.buffers["x"][:3] = 1.0
    own = {name: graphs.buffers[name][:n] for name, n in (("slots", 2), ("cu_seqlens", 3), ("x", 3))}
    rows, _ = graphs(**own)
    assert rows.tolist() == [3, 6] and step.seen[-1]["cu_seqlens"].tolist() == [0, 1, 3, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.zeros(2, dtype=torch.int32)}, r"cu_seqlens: got shape \(2,\), expected \('2 \+ 1',\)"),
        ({"cu_seqlens": torch.zeros((), dtype=torch.int32)}, r"cu_seqlens: got shape \(\), expected \('2 \+ 1',\)"),
        ({"x": torch.zeros(2)}, r"x: got shape \(2,\), expected \('total', 3\)"),
    ],
)
def test_wrong_packed_inputs_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    step, graphs = packed([2])
    with pytest.raises(ValueError, match=message):
        graphs(**{**rows_of([1, 1]), **change})
    assert len(step.seen) == 1


def test_packed_windows_decode_on_a_cache_as_rows_alone_do() -> None:
    """Ragged steps and deferred commits in padded batches, beside batches of exactly their rows."""
    spec = CacheSpec(layers=2, heads=2, head_dim=64, d_state=64, groups=1, tokens=5, window=9)
    cache, model = (ReplayCache.allocate(spec, 12, "cpu", pad_slot_id=0) for _ in range(2))
    inputs = packed_inputs(spec)
    before = cache.layers[0].state.clone()
    graphs = DecodeGraphs(PackedLayers(cache), inputs, [1, 4, 8], max_tokens=spec.tokens, device="cpu")
    graphs.capture()
    assert torch.equal(cache.layers[0].state, before) and not cache.pnat.any() and not cache.last_tokens.any()
    check_packed_decoding(graphs, PackedLayers(model), most=8, steps=25)
    for layer, other in zip(cache.layers, model.layers, strict=True):
        assert torch.equal(layer.state[1:], other.state[1:]) and layer.state[1:].any(), "rows flushed"
    assert torch.equal(cache.pnat, model.pnat) and torch.equal(cache.last_tokens, model.last_tokens)


@pytest.mark.fault(22)
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
    token, row = PACKED["x"], INPUTS["slots"]
    for inputs, most, error, message in (
        ({"x": token}, 4, ValueError, "inputs: got an entry per token in all, expected one with an entry per row or b"),
        ({"x": token, "s": row}, None, ValueError, "max_tokens: got None beside inputs per token, expected an int"),
        ({"s": row}, 4, ValueError, "max_tokens: got 4 without inputs per token, expected an int beside such inputs"),
        ({"x": token, "s": row}, 0, ValueError, "max_tokens: got 0, expected a positive int"),
        ({"x": GraphInput((), torch.int32, per="rows")}, None, ValueError, r"inputs\['x'\]: got per='rows', expected"),
    ):
        with pytest.raises(error, match=message):
            DecodeGraphs(Step(), inputs, [1], max_tokens=most, device="cpu")  # type: ignore[arg-type, dict-item]
    with pytest.raises(ValueError, match=r"step: got an output of shape \(3,\), expected \(2, ...\) or \(8, ...\)"):
        DecodeGraphs(lambda x, s: torch.zeros(3), {"x": token, "s": row}, [2], max_tokens=4, device="cpu").capture()


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


class PackedLayers:
    """Layers on a cache whose rows have lengths of their own, with inputs that come from x (total, H, P) alone."""

    def __init__(self, cache: ReplayCache) -> None:
        self.cache, spec = cache, cache.spec
        gen = torch.Generator().manual_seed(0)
        shape = (spec.groups, spec.d_state)
        self.B, self.C = (torch.randn(shape, generator=gen).bfloat16().to(cache.device) for _ in range(2))
        rate = -torch.linspace(1, 8, spec.heads, device=cache.device)
        self.A = rate[:, None, None].expand(-1, spec.head_dim, spec.d_state)

    def __call__(
        self, slots: torch.Tensor, cu_seqlens: torch.Tensor, accepted: torch.Tensor, x: torch.Tensor
    ) -> torch.Tensor:
        spec, x = self.cache.spec, x[None]
        self.cache.begin_step(slots, accepted, cu_seqlens.diff())
        for layer in range(spec.layers):
            dt = torch.full((*x.shape[:3], 1), 0.05, device=x.device, dtype=torch.bfloat16)
            B, C = (t.expand(*x.shape[:2], -1, -1).contiguous() for t in (self.B, self.C))
            out = torch.empty_like(x)
            arguments: dict[str, Any] = dict(self.cache.step_args(layer))
            api.checkpointing_ssu(
                **arguments, x=x, dt=dt.expand(x.shape), A=self.A, B=B, C=C, out=out, state_batch_indices=slots,
                pad_slot_id=self.cache.pad_slot_id, cu_seqlens=cu_seqlens, max_seqlen=spec.tokens,
            )  # fmt: skip
            x = x + out
        return x[0]


def packed_inputs(spec: CacheSpec) -> dict[str, GraphInput]:
    return {
        "slots": GraphInput((), torch.int32, pad=-1),
        "cu_seqlens": GraphInput((), torch.int32, per="boundary"),
        "accepted": GraphInput((), torch.int32),
        "x": GraphInput((spec.heads, spec.head_dim), torch.bfloat16, per="token"),
    }


def check_packed_decoding(graphs: DecodeGraphs, eager: PackedLayers, most: int, steps: int) -> None:
    """Batches of any rows and lengths through the graphs, and on another cache without padding: the same bits."""
    spec, device = eager.cache.spec, eager.cache.device
    gen, lengths = torch.Generator().manual_seed(1), set()
    for _ in range(steps):
        batch = int(torch.randint(1, most + 1, (), generator=gen))
        lens = torch.randint(0, spec.tokens + 1, (batch,), generator=gen)
        lens[0] = max(int(lens[0]), 1)  # a step without any token is none
        lengths.update(lens.tolist())
        total = int(lens.sum())
        given = {
            "slots": torch.randperm(eager.cache.slots - 1, generator=gen)[:batch].int() + 1,
            "cu_seqlens": torch.cat((torch.zeros(1), lens.cumsum(0))).int(),
            "accepted": torch.randint(0, spec.tokens + 1, (batch,), generator=gen).int(),
            "x": torch.randn(total, spec.heads, spec.head_dim, generator=gen).bfloat16(),
        }
        given = {name: t.to(device) for name, t in given.items()}
        got, expected = graphs(**given), eager(**given)
        assert torch.equal(got, expected) and got.shape[0] == total
    assert lengths == set(range(spec.tokens + 1))


SERVED = SPEC.problem(dt_dtype="bf16", d_dtype=None, dt_bias_dtype=None, dt_softplus=False)
PACKED_SPEC = CacheSpec(layers=2, heads=8, head_dim=64, d_state=128, groups=2, tokens=6, window=40)
PACKED_PROBLEM = PACKED_SPEC.problem(d_dtype=None, dt_bias_dtype=None, dt_softplus=False, ragged=True)


def gpu_cache() -> ReplayCache:
    return ReplayCache.allocate(SPEC, 24, "cuda", A=[-torch.linspace(1, 8, SPEC.heads)] * 2, pad_slot_id=0)


@pytest.mark.gpu
@pytest.mark.kernels(SERVED, SPEC)
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
    warmup([SERVED], [1, 4, 16], cache=cache)
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
@pytest.mark.kernels(PACKED_PROBLEM, PACKED_SPEC)
def test_replays_of_packed_rows_are_the_eager_steps_bit_for_bit() -> None:
    """Rows of 0 to T tokens in a long window; capturing changes no byte of the cache and compiles nothing."""
    from replayssm_cute.cache.digest import digest

    spec = PACKED_SPEC
    cache, model = (ReplayCache.allocate(spec, 24, "cuda", pad_slot_id=0) for _ in range(2))
    warmup([PACKED_PROBLEM], [1, 4, 16], cache=cache)
    for c in (cache, model):
        c.reset(torch.arange(1, 24, device="cuda"))
    before = digest(cache.layers, cache._shared)
    compiler.reset_counters()
    graphs = DecodeGraphs(PackedLayers(cache), packed_inputs(spec), [1, 4, 16], max_tokens=spec.tokens)
    graphs.capture()
    assert compiler.counters().compiled == compiler.counters().disk == 0
    assert digest(cache.layers, cache._shared) == before
    check_packed_decoding(graphs, PackedLayers(model), most=16, steps=60)
    assert digest(cache.layers, cache._shared) == digest(model.layers, model._shared) != before


@pytest.mark.gpu
@pytest.mark.kernels(SPEC)
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
