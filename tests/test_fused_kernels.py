"""The conv and norm kernels without a GPU: thread by thread against the reference, and compiled for every target."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import fused_lanes
import pretend_cuda
import pytest
import torch
from fused_bounds import error
from fused_calls import copied, kwargs, layer, random_layer_call
from test_fused_overlap import written

from replayssm_cute import compiler, fingerprint, plan, resources, tables, target
from replayssm_cute.config import TileConfig
from replayssm_cute.fused import chains, launches, overlap, proof, shapes
from replayssm_cute.fused.problem import LayerCall, layer_problem
from replayssm_cute.fused.recipes import LayerRecipe
from replayssm_cute.fused.reference import conv_reference, decode_step_reference
from replayssm_cute.fused.shapes import ConvShape, NormShape
from replayssm_cute.problem import Problem
from replayssm_cute.reference import checkpointing_ssu_reference

CPU = torch.device("cpu")
CONV = ConvShape(96, 4, 12, "bf16", "bf16", "f32", "i32", vector=8, threads=32)
NORM = NormShape(512, 2, 3, "bf16", "bf16", "i32", warps=1)
CONVS = [
    CONV,
    dataclasses.replace(CONV, tokens=1, ring_rows=4, vector=2, pdl=True),
    dataclasses.replace(CONV, tokens=1, ring_rows=17, vector=4, bias_dtype=None, index_dtype=None),
    dataclasses.replace(CONV, tokens=16, ring_rows=32, io_dtype="f16", weight_dtype="f32", bias_dtype="f16", pdl=True),
    dataclasses.replace(CONV, channels=520, vector=4, weight_dtype="f16", index_dtype="i64", triggers=False),
    dataclasses.replace(CONV, channels=136, tokens=2, ring_rows=5, vector=2, weight_dtype="f32", bias_dtype="bf16"),
    dataclasses.replace(CONV, rows=2, pdl=True),
    dataclasses.replace(CONV, rows=4, tokens=1, ring_rows=4, channels=520, vector=4),
    dataclasses.replace(CONV, rows=2, tokens=2, index_dtype=None, bias_dtype=None, triggers=False),
    dataclasses.replace(CONV, each=1, pdl=True, carveout=100),
    dataclasses.replace(CONV, each=2, rows=2, vector=4, channels=520),
    dataclasses.replace(CONV, pdl=True, soon=True),
    dataclasses.replace(CONV, pdl=True, ahead=True, triggers=False),
    dataclasses.replace(CONV, pdl=True, soon=True, ahead=True, rows=2, tokens=6, each=3, ring_rows=9),
    dataclasses.replace(CONV, tokens=6, each=3, ring_rows=9, vector=2, weight_dtype="f16"),
]
NORMS = [
    NORM,
    dataclasses.replace(NORM, warps=2, weight_dtype="f32", pdl=False, triggers=False),
    dataclasses.replace(NORM, d_inner=960, groups=3, tokens=1, warps=2, io_dtype="f16", weight_dtype="f16"),
    dataclasses.replace(NORM, d_inner=1024, groups=1, tokens=2, warps=3, index_dtype=None),
    dataclasses.replace(NORM, d_inner=24, groups=3, tokens=2, warps=1, index_dtype="i64"),
    dataclasses.replace(NORM, together=3, carveout=100),
    dataclasses.replace(NORM, tokens=4, together=2, warps=2, pdl=False),
    dataclasses.replace(NORM, d_inner=1024, groups=1, tokens=2, together=2, warps=3, index_dtype=None),
]  # fmt: skip


@pytest.mark.parametrize("shape", [*CONVS, *NORMS], ids=lambda s: f"{s.__class__.__name__}-{s.io_dtype}-{s.tokens}")
def test_kernels_are_the_reference(shape: ConvShape | NormShape) -> None:
    """The self-check itself, on the host: values, what stays untouched, and the order of accesses under PDL."""
    recipe = LayerRecipe(shape)
    proof.prove(recipe, fused_lanes.kernel(recipe), CPU)


def _slip(kind: str, method: str, change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    owner = getattr(fused_lanes.MODULES[kind], f"{kind.capitalize()}Kernel")
    return lambda patch: patch.setattr(owner, method, change(getattr(owner, method)))


SLIPS: dict[str, tuple[ConvShape | NormShape, Callable[[pytest.MonkeyPatch], None]]] = {
    "ring rows that do not wrap": (CONV, _slip("conv", "wrapped", lambda f: lambda self, r: min(r, 11))),
    "history one row late": (
        CONV, _slip("conv", "wrapped", lambda f: lambda self, r: f(self, r - (r >= self.shape.ring_rows))),
    ),
    "a warp's sum only": (dataclasses.replace(NORM, warps=2), _slip("norm", "put", lambda f: lambda *a: None)),
    "rows beyond the batch": (
        dataclasses.replace(CONV, rows=2, index_dtype=None),
        _slip("conv", "rows_of", lambda f: lambda self, bundle, batch: f(self, bundle, batch + 1)),
    ),
    "the same row twice": (
        dataclasses.replace(CONV, rows=4),
        _slip("conv", "rows_of", lambda f: lambda self, bundle, batch: ([True] * 4, [min(4 * bundle, batch - 1)] * 4)),
    ),
    "tokens before a thread's from the ring": (
        dataclasses.replace(CONV, each=2),
        _slip("conv", "series", lambda f: lambda self, old, new, first: old + new[3:]),
    ),
    "all tokens are the first": (
        dataclasses.replace(CONV, each=2),
        _slip("conv", "load_new", lambda f: lambda self, t, row, first, c: f(self, t, row, 0, c)),
    ),
    "one sum for all tokens": (
        dataclasses.replace(NORM, together=3, carveout=100),
        _slip("norm", "totals", lambda f: lambda self, values, thread: [f(self, values, thread)[0]] * 3),
    ),
    "another group's columns": (
        NORM, _slip("norm", "place", lambda f: lambda self, t, r, k, c: f(self, t, r, k, c % self.shape.group)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", list(SLIPS))
def test_wrong_kernels_are_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, slip = SLIPS[what]
    slip(monkeypatch)
    recipe = LayerRecipe(shape)
    found = r"self-check: decode_step's (conv|norm) .* gave wrong values in |\(3, .* of shape \(3, "
    with pytest.raises((RuntimeError, AssertionError), match=found):
        proof.prove(recipe, fused_lanes.kernel(recipe), CPU)


CONVOLVED = fused_lanes.MODULES["conv"].convolved
VALUE_SLIPS: dict[str, tuple[ConvShape | NormShape, str, str, Any]] = {
    "no gate": (NORM, "norm", "silu", lambda v: v),
    "no SiLU": (CONV, "values", "silu", lambda v: v),
    "halves swapped": (CONV, "conv", "pack", lambda k, low, high: fused_lanes.REPLACED["pack"](k, high, low)),
    "three taps": (
        CONV,
        "conv",
        "convolved",
        lambda u, w, b: CONVOLVED([[0 * v for v in u[0]], *u[1:]], w, b),
    ),
}


@pytest.mark.parametrize("what", list(VALUE_SLIPS))
def test_wrong_arithmetic_is_found(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, module, name, value = VALUE_SLIPS[what]
    monkeypatch.setattr(fused_lanes.MODULES[module], name, value)
    recipe = LayerRecipe(shape)
    with pytest.raises((RuntimeError, AssertionError), match=r"wrong values|multiple of"):
        proof.prove(recipe, fused_lanes.kernel(recipe), CPU)


def test_order_under_pdl_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate through L1, and a kernel that lets dependents start before its own wait."""
    recipe = LayerRecipe(NORM)
    with monkeypatch.context() as patch:
        patch.setattr(fused_lanes.MODULES["norm"], "load_shared_by_all", lambda p: fused_lanes._load_words(p, 4))
        with pytest.raises(AssertionError, match="gate is read before the wait"):
            proof.prove(recipe, fused_lanes.kernel(recipe), CPU)
    with monkeypatch.context() as patch:
        patch.setattr(fused_lanes.ARCH, "griddepcontrol_wait", lambda: None)
        with pytest.raises(AssertionError, match="dependents start before"):
            proof.prove(recipe, fused_lanes.kernel(recipe), CPU)
    recipe = LayerRecipe(dataclasses.replace(CONV, pdl=True, ahead=True))
    with monkeypatch.context() as patch:  # the inputs themselves, in place of a prefetch
        patch.setattr(fused_lanes.MODULES["conv"], "bring_to_l2", lambda p: fused_lanes._load_words(p, 4))
        with pytest.raises(AssertionError, match="inputs is read before the wait"):
            proof.prove(recipe, fused_lanes.kernel(recipe), CPU)


def test_what_starts_early_is_checked() -> None:
    for wrong in ({"soon": True}, {"ahead": True}, {"soon": True, "pdl": True, "triggers": False}):
        with pytest.raises(ValueError, match=r"soon|ahead"):
            dataclasses.replace(CONV, **wrong)
    with pytest.raises(ValueError, match="soon"):
        chains.ConvCut(soon=True, late=True)
    for kind in (overlap.Overlap.INNER, overlap.Overlap.INNER_X, overlap.Overlap.NONE):
        with pytest.raises(ValueError, match="neither soon nor ahead"):
            chains.Chain(kind, conv=chains.ConvCut(ahead=True))
    with pytest.raises(ValueError, match="early"):
        chains.Chain(overlap.Overlap.ALL_X, conv=chains.ConvCut(soon=True), early=True)
    cut = chains.ConvCut(4, 64, soon=True, ahead=True)
    chain = chains.Chain(overlap.Overlap.ALL_X, conv=cut)
    assert chains.Chain.from_json(chain.to_json()) == chain and cut.label() == "4 x 64, soon, ahead"
    assert cut.of(dataclasses.replace(CONV, pdl=True)) == dataclasses.replace(
        CONV, vector=4, threads=64, pdl=True, soon=True, ahead=True
    )


def test_the_switch_of_self_checks_serves_here_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    ran = []
    proof.prove(LayerRecipe(NORM), lambda *args: ran.append(args), CPU)
    assert len(ran) == 1, "its code has to reach the device all the same"


# ---------------------------------------------------------------------------------------------------
# The chain
# ---------------------------------------------------------------------------------------------------

STEP = Problem(heads=2, head_dim=64, d_state=64, groups=1, tokens=3, window=5)


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Launches as on a GPU, of kernels that run on the host; the list names what was launched."""
    ran: list[str] = []

    def step(*arguments: Any) -> None:
        ran.append("step")
        checkpointing_ssu_reference(**plan.as_call(arguments, True).kwargs())

    def step_with_conv(*arguments: Any) -> None:
        """The step that convolves its x, by the reference; its own source runs in test_fused_step."""
        *plain, ring, weight, bias = arguments
        call = plan.as_call(tuple(plain), True)
        flat = (
            ring.view(*ring.shape[:2], -1)
            if ring.is_contiguous()
            else ring.as_strided(
                (*ring.shape[:2], ring.shape[2] * ring.shape[3]), (*ring.stride()[:2], 1), ring.storage_offset()
            )
        )
        x = torch.zeros(*call.x.shape[:2], flat.shape[-1], dtype=call.x.dtype)
        conv_reference(
            call.x.flatten(-2), flat, call.ring_start, call.prev_num_accepted_tokens, weight.view(-1, 4), bias, x,
            call.state_batch_indices, call.pad_slot_id,
        )  # fmt: skip
        ran.append("step with conv")
        checkpointing_ssu_reference(**dataclasses.replace(call, x=x.view(call.x.shape)).kwargs())

    def load(recipe: LayerRecipe, *_: Any) -> Callable[..., None]:
        if recipe.kind == "step":
            return step_with_conv
        kernel = fused_lanes.kernel(recipe)
        return lambda *args: (ran.append(recipe.kind), kernel(*args), None)[2]

    monkeypatch.setattr(launches, "_kernels", {})
    monkeypatch.setattr(launches, "_plans", {})
    monkeypatch.setattr(compiler, "load", load)
    monkeypatch.setattr(plan, "device_target", lambda index: target.named("h200"))
    monkeypatch.setattr(plan, "on_device", lambda index: __import__("contextlib").nullcontext())
    monkeypatch.setattr(plan, "current_device", lambda: -1)
    monkeypatch.setattr(plan, "tensor_device", lambda index: CPU)
    choice = tables.Choice(TileConfig(), "default", "")
    monkeypatch.setattr(plan, "make", lambda p, b, device, config: plan.Plan(p, b, choice, None, step))
    monkeypatch.setenv("REPLAYSSM_SELFCHECK", "0")
    return ran


def test_a_call_is_three_launches(on_host: list[str]) -> None:
    """Numbers of the whole chain, a warm call's launches, and a call whose memory is misaligned."""
    problem = layer(STEP, norm_groups=2)
    for seed in range(2):
        call = random_layer_call(problem, 3, padding=(1,), seed=seed, wide=8)
        model = copied(call)
        decode_step_reference(model, 2)
        on_host.clear()
        launches.run(call, False, None)
        if seed:
            assert on_host == ["conv", "step", "norm"]
        assert error(call.out, model.out) < 3e-3
        assert not call.out[1].any()
        for name in ("conv_cache", "state"):
            assert error(getattr(call, name).nan_to_num(), getattr(model, name).nan_to_num()) < 1e-3
    flat = torch.zeros(call.out.numel() * 2, dtype=call.out.dtype)
    odd = flat.as_strided(call.out.shape, call.out.stride(), 1)
    on_host.clear()
    with pytest.raises(ValueError, match="out: got a data pointer 2 bytes past"):
        launches.run(dataclasses.replace(call, out=odd), False, None)
    for changes, kind in (
        ({"eps": -1.0}, ValueError),
        ({"norm_groups": True}, TypeError),
        ({"pad_slot_id": 1.0}, TypeError),
        ({"dt_softplus": 1}, TypeError),
        ({"A": None}, TypeError),
        ({"conv_bias": call.conv_bias[1:]}, ValueError),
    ):
        with pytest.raises(kind):
            launches.run(dataclasses.replace(call, **changes), False, None)
    assert on_host == []


@pytest.mark.parametrize("kind", [k for k in overlap.Overlap if k.x_in_step])
def test_a_step_may_convolve_x(on_host: list[str], kind: overlap.Overlap) -> None:
    """The whole chain's numbers, with scratch and without, biases and without, where the conv has B and C alone."""
    for number, bias in enumerate(("f32", None)):
        problem = layer(STEP, norm_groups=2, conv_bias_dtype=bias)
        call = random_layer_call(problem, 3, padding=(1,), seed=number, wide=8)
        if number:
            scratch = torch.full((3, STEP.tokens, problem.channels), float("nan"), dtype=call.out.dtype)
            call = dataclasses.replace(call, scratch=scratch)
        model = copied(call)
        decode_step_reference(model, 2)
        made = launches.make(problem, 3, 0, overlap=kind)
        on_host.clear()
        made.launch(call)
        assert on_host == ["conv", "step with conv", "norm"]
        assert error(call.out, model.out) < 3e-3 and not call.out[1].any()
        for name in ("conv_cache", "state", "x_cache", "B_cache"):
            assert error(getattr(call, name).nan_to_num(), getattr(model, name).nan_to_num()) < 3e-3, name
        if call.scratch is not None:
            assert call.scratch[..., : problem.d_inner].isnan().all(), "x went to memory"


def test_a_chain_forces_the_cuts(on_host: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Config, conv and norm of a chain serve; a config whose kernel failed its self-check does not."""
    asked: list[Any] = []
    monkeypatch.setattr(launches, "ready", lambda recipe, device: asked.append(recipe.shape) or print)
    configs: list[Any] = []
    make = plan.make
    monkeypatch.setattr(plan, "make", lambda p, b, d, config: configs.append(config) or make(p, b, d, config))
    config = TileConfig(head_split=2)
    chain = chains.Chain(overlap.Overlap.ALL_X, config, chains.ConvCut(4, 64, late=True), chains.NormCut(2, 3))
    for passes in (True, False):
        monkeypatch.setattr(plan, "_ready", lambda p, c, device, batch, passes=passes: passes)
        asked.clear()
        made = launches.make(layer(STEP, norm_groups=2), 3, 0, overlap=chain)
        assert configs.pop() == (config if passes else None) and made.overlap is chain.overlap
        conv, norm = asked[-2:]
        assert (conv.vector, conv.threads, conv.triggers, conv.pdl) == (4, 64, False, True)
        assert conv.channels == 2 * STEP.groups * STEP.d_state and (norm.warps, norm.together) == (2, 3)


def test_other_batch_sizes_find_their_kernels_ready(on_host: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    problem = layer(STEP, norm_groups=2)
    launches.run(random_layer_call(problem, 2), False, None)
    monkeypatch.setattr(compiler, "capturing", lambda: True)
    monkeypatch.setattr(shapes, "SPREAD_VECTORS", 1)  # so that a few rows count as many
    launches.run(random_layer_call(problem, 3), False, None)
    with pytest.raises(RuntimeError, match=r"decode_step's conv.*is not ready.*decode_step once"):
        launches.run(random_layer_call(problem, 3), True, None)


def test_a_measured_table_chooses_what_overlaps(
    on_host: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """Each batch size gets its choice, and a first call readies the kernels of all of them."""
    alone, together = dict.fromkeys(overlap.Overlap, 2.0) | {"chain": 1.0}, dict.fromkeys(overlap.Overlap, 1.0)
    written(tmp_path / "a.json", {2: alone, 64: together}, STEP)
    monkeypatch.setattr(overlap, "FOLDER", tmp_path)
    overlap.forget()
    steps: list[Problem] = []
    monkeypatch.setattr(
        plan, "make", lambda p, b, device, config: steps.append(p) or plan.Plan(p, b, None, None, print)
    )
    problem = layer(STEP, norm_groups=2)
    try:
        first = launches.make(problem, 2, 0)
        assert [p.pdl for p in steps] == [True, False] and first.problem.step is steps[1]
        monkeypatch.setattr(compiler, "capturing", lambda: True)
        other = launches.make(problem, 40, 0)
        found = [(p.overlap, p.conv, p.norm) for p in (first, other)]
        assert [f[0] for f in found] == [overlap.Overlap.NONE, overlap.Overlap.INNER] and steps[2].pdl
        assert found[0][1] is not found[1][1] and found[0][2] is not found[1][2]
    finally:
        overlap.forget()


def test_kernels_that_are_wrong_here_never_serve(on_host: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REPLAYSSM_SELFCHECK")
    monkeypatch.setattr(fused_lanes.MODULES["norm"], "silu", lambda v: v)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"self-check: decode_step's norm .* gave wrong values in out"):
            launches.run(random_layer_call(layer(STEP), 2), False, None)
    assert "step" not in on_host


# ---------------------------------------------------------------------------------------------------
# Compiled
# ---------------------------------------------------------------------------------------------------

SUPER = layer(Problem(heads=128, head_dim=64, d_state=128, groups=8, tokens=4, window=16, pdl=True))


def compiled_shapes() -> list[ConvShape | NormShape]:
    """Each cut of the rules, dtype and option at least once."""
    half = layer(dataclasses.replace(SUPER.step, head_dim=80, io_dtype="f16", dt_dtype="f16"), norm_groups=1)
    small = layer(dataclasses.replace(SUPER.step, heads=24, groups=1, index_dtype=None, tokens=1), norm_dtype="f32")
    long = layer(dataclasses.replace(SUPER.step, tokens=32, window=32), conv_bias_dtype=None, conv_dtype="f32")
    eight = layer(dataclasses.replace(SUPER.step, tokens=8, index_dtype="i64"))
    found: list[ConvShape | NormShape] = []
    for problem in (SUPER, small):
        found += [*shapes.conv_shapes(problem, chained=True, pdl=True), shapes.norm_shape(problem, chained=True)]
    found += [shapes.conv_shape(p, 256, chained=False, pdl=False) for p in (half, long, eight)]
    found += [shapes.norm_shape(half, chained=False)]
    conv, norm = shapes.conv_shape(SUPER, 256, chained=True, pdl=True), shapes.norm_shape(SUPER, chained=True)
    found += [dataclasses.replace(conv, vector=v, rows=r) for v, r in ((8, 2), (4, 2), (4, 4))]
    found += [dataclasses.replace(conv, each=e, carveout=100) for e in (1, 2)]
    found += [dataclasses.replace(conv, soon=True), dataclasses.replace(conv, ahead=True)]
    found += [dataclasses.replace(norm, together=n) for n in (2, 4)]
    found += [dataclasses.replace(norm, carveout=100)]
    found += [shapes.conv_shape(SUPER, b, chained=True, pdl=True, with_x=False) for b in (1, 256)]
    return found


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernels_compile_without_spills(arch: str) -> None:
    where = target.named(arch)
    for shape in compiled_shapes():
        found = compiler.entry_of(LayerRecipe(shape), where).resources
        assert found.stack_bytes == 0, shape
        assert found.threads == shape.threads
        assert found.registers * found.threads <= where.registers_per_sm


def test_keys_tell_kernels_apart_and_the_step_keeps_its_own() -> None:
    """A change to these kernels is none to the step: tuned tables stay."""
    recipes = [LayerRecipe(s) for s in compiled_shapes()]
    assert len({compiler._directory(r, "sm_90a") for r in recipes}) == len(recipes)
    assert not [name for name in fingerprint.kernel_sources() if name.startswith("fused/")]
    assert {"fused/kernels/conv.py", "fused/shapes.py", "kernels/primitives.py"} <= set(
        fingerprint.kernel_sources("fused")
    )
    assert recipes[0].sources() == fingerprint.kernels("fused") != fingerprint.kernels()


def loads_around_the_wait(shape: ConvShape | NormShape) -> tuple[int, int]:
    """Loads from global memory before and after the wait for the predecessor, in Hopper's machine code."""
    found = compiler.entry_of(LayerRecipe(shape), target.named("sm_90a"))
    if resources.nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")
    before, wait, after = resources.disassemble(resources.cubin(found.object_bytes())).partition("ACQBULK")
    assert wait
    return tuple(resources.count_opcodes(part).get("LDG", 0) for part in (before, after))  # type: ignore[return-value]


def prefetches_before_the_wait(shape: ConvShape) -> int:
    """Prefetches to L2, none of which may come after the wait."""
    found = compiler.entry_of(LayerRecipe(shape), target.named("sm_90a"))
    before, _, after = resources.disassemble(resources.cubin(found.object_bytes())).partition("ACQBULK")
    counts = [resources.count_opcodes(part).get("CCTL", 0) for part in (before, after)]
    assert counts[1] == 0
    return counts[0]


def test_code_asks_for_what_needs_no_predecessor_before_it_waits() -> None:
    """Norm: slot, weights and gates, then y. Conv: slot, cursors, taps, bias and history, then the new tokens."""
    assert loads_around_the_wait(shapes.norm_shape(SUPER, chained=True)) == (3, 1)
    conv = shapes.conv_shape(SUPER, 256, chained=True, pdl=True)
    assert loads_around_the_wait(conv) == (3 + 4 + 2 + 3, 4)
    early = dataclasses.replace(conv, soon=True, ahead=True)
    assert loads_around_the_wait(early) == (3 + 4 + 2 + 3, 4) and prefetches_before_the_wait(early) == 4
    # of two rows: everything but the weights twice, and all of it before the wait that it was before
    assert loads_around_the_wait(dataclasses.replace(conv, rows=2)) == (2 * 3 + 4 + 2 + 2 * 3, 2 * 4)
    assert loads_around_the_wait(dataclasses.replace(shapes.norm_shape(SUPER, chained=True), together=4)) == (2 + 4, 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a driver: addresses are made up")
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("index_dtype", ["i32", "i64", None])
@pytest.mark.parametrize("x_in_step", [False, True])
def test_real_kernels_take_these_arguments_as_far_as_the_missing_driver(
    index_dtype: str | None, batch: int, x_in_step: bool
) -> None:
    """Every check that compiled code makes of a call's tensors lets them pass; a wrong one it names."""
    step = dataclasses.replace(STEP, index_dtype=index_dtype, pdl=True)
    problem = layer(step, norm_groups=2, conv_bias_dtype=None if index_dtype is None else "f32")
    with_x = not x_in_step
    call = random_layer_call(problem, batch, wide=8)
    where = target.named("h200")
    found = [compiler._load(compiler.entry_of(LayerRecipe(s), where).path) for s in (
        shapes.conv_shape(problem, batch, chained=True, pdl=False, with_x=with_x),
        shapes.norm_shape(problem, chained=True), shapes.step_shape(problem, TileConfig()),
    )]  # fmt: skip
    inner = plan.Plan(step, batch, None, None, compiler.get(step, TileConfig(), where))
    if with_x:
        found[2] = None
    made = launches.LayerPlan(problem, overlap.Overlap.INNER, inner, *found)

    def pretended(arguments: tuple[Any, ...]) -> list[Any]:
        return [pretend_cuda.Pretend.like(a).tensor() if isinstance(a, torch.Tensor) else a for a in arguments]

    for kernel, arguments in made.parts(call):
        with pytest.raises(RuntimeError, match=r"(?i)cuda|driver"):
            kernel(*pretended(arguments))
        short = pretended(arguments)
        short[0] = pretend_cuda.Pretend.like(arguments[0][..., :-8]).tensor()
        with pytest.raises(ValueError, match=r"(?i)mismatch|shape"):
            kernel(*short)


def test_a_problem_is_that_of_its_call() -> None:
    call = random_layer_call(SUPER, 1, dead=None)
    assert layer_problem(call, pdl=True) == SUPER
    assert isinstance(call, LayerCall) and kwargs(call)["norm_groups"] == 8
