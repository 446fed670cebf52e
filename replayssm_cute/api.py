"""The public call: one checkpointing step, and the explanation of how it is run."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import checks, compiler, plan, tables, torch_op
from .calls import Call
from .config import TileConfig
from .problem import Problem, check_philox_rounds
from .reference import checkpointing_ssu_reference
from .target import Target, named


def checkpointing_ssu(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    state_copy: torch.Tensor | None = None,
    precision: str = "default",
    config: TileConfig | None = None,
) -> torch.Tensor:
    """One checkpointing step of Mamba2 on T new tokens a row, in place, on the operands' device and current stream.

    Computes the outputs of the T tokens from each row's logical state (its checkpoint advanced through the live
    ring rows), appends the tokens to the ring, and writes the logical state of before the new tokens to `state`
    for the rows that flush: those with pnat + T > W. Cursors are read, never written (see `commit`).
    With b rows, H heads of P (head_dim) by N (d_state), G groups, R = W + T ring rows, W <= 64, T <= 32, T <= W:

    Args:
        state: (slots, H, P, N) checkpoints, f32, bf16, f16, float8_e4m3fn or int8.
        x_cache: (slots, H, R, P) ring of x, x's dtype.
        B_cache: (slots, G, R, N) ring of B, x's dtype.
        dt_cache: (slots, H, R) ring of processed dt, f32.
        ring_start: (slots,) int32, the oldest live ring row, 0..R-1; may be strided.
        prev_num_accepted_tokens: (slots,) int32, the number of live rows (pnat), 0..W; may be strided.
        x: (b, T, H, P) bf16 or f16.
        dt: (b, T, H, P) with stride 0 on P, x's dtype or f32.
        A: (H, P, N) with strides 0 on P and N, f32, bf16 or f16; negative values.
        B, C: (b, T, G, N), x's dtype.
        out: (b, T, H, P), x's dtype; written.
        D: (H, P) with stride 0 on P, f32, bf16 or f16: y += D x.
        z: (b, T, H, P), x's dtype: y *= z sigmoid(z).
        dt_bias: (H, P) with stride 0 on P, f32, bf16 or f16: added to dt.
        dt_softplus: whether dt goes through softplus (after the bias).
        state_batch_indices: (b,) int32 or int64 slots; None means row i uses slot i. Live slots are distinct.
        pad_slot_id: rows with this slot, or a negative one, are padding: output zero, caches untouched.
        state_scale: (slots, H, P) f32, where state or state_copy is 8-bit: what its codes are multiplied with, row by
            row of N. A flush writes it anew, amax / 448 (float8_e4m3fn) or amax / 127 (int8), 1 for a row of zeros.
        rand_seed: (1,) or () int64: a flush rounds stochastically, with bits from this seed, the slot, the head and the
            element alone (see `rounding`). Read-only: give every layer and every step another one; a CUDA graph
            replays with what the tensor holds by then. None rounds to nearest. An f32 state, and a read copy, are
            never rounded stochastically.
        philox_rounds: rounds of the generator, 1..16; no effect without rand_seed.
        cu_seqlens: (b + 1,) int32, contiguous: rows have lengths of their own and lie packed (see below).
        max_seqlen: with cu_seqlens, the most tokens that a row may have, 1..32; this is T of R = W + T.
        enable_pdl: promises that the direct predecessor on the stream writes only x, B, C, dt and z.
        state_copy: (slots, H, P, N) bf16, float8_e4m3fn or int8, beside an f32 state: steps read this copy; a row
            that flushes reads state instead, and writes both. So the recurrence stays exact, and what a step reads is
            as small as the copy. Where a slot's state is set by other means, so must its copy be
            (`rounding.encode` makes one).
        precision: "highest" reads an f32 state without a copy with all its bits (errors before the rounding of the
            output of at most 1e-5 instead of about 3e-4), at the price of twice the products with the state.
        config: forces a tile config; None takes the tuned tables' or the default rule's. No effect on the CPU.

    **Packed ragged windows.** With cu_seqlens and max_seqlen, x, dt, z and out are (1, total, H, P), B and C
    (1, total, G, N), and row i has the tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1: T_i of them, 0 <= T_i <=
    max_seqlen. It flushes if pnat + T_i > W and appends T_i rows; nothing happens to a row of length 0. cu_seqlens
    begins with 0, never decreases and ends at total or before; tokens beyond its end give zeros, as those of padding
    rows do. The total may be another in every call. `commit` takes the lengths.

    Slots may be strided views into a page pool. Rows (the last dimension) are contiguous; rows of state, x_cache,
    B_cache, x, B, C, z and out start at multiples of 16 bytes. What is written (state, the caches, state_scale,
    state_copy, out) shares no memory with another argument; views that interleave, as a pool's do, share none. This is
    checked on CUDA when a call with such shapes, strides and dtypes comes for the first time, and by `prepare` and
    `Plan.bind`. CPU tensors run the reference. REPLAYSSM_CHECK=1 checks it in every call on CUDA, and also slots,
    cursors and cu_seqlens, which synchronizes; not while a graph is captured. Under torch.compile the call becomes one
    node, the operator `replayssm_cute::checkpointing_ssu`.

    NaN and Inf outside the live rows change nothing. In a new token's x they reach the outputs of that row, head and
    column of P for earlier tokens of the same call too, since a kernel multiplies all tokens at once.

    Returns:
        `out`.

    Raises:
        TypeError: an argument of a wrong type or dtype.
        ValueError: a wrong rank, shape, device, stride, alignment or value, shared memory, cu_seqlens or max_seqlen
            without the other, or a config that cannot run here.
        NotImplementedError: what is not served yet.
        RuntimeError: no kernels for this GPU, none that passed its self-check on it, or a kernel that is not ready
            during a graph capture.
    """
    if _compiling():
        if config is not None:
            raise ValueError("config: got a TileConfig under torch.compile, expected None; put it into a tuned table")
        torch_op.step(
            state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out, D, z,
            dt_bias, dt_softplus, state_batch_indices, cu_seqlens, pad_slot_id, max_seqlen, enable_pdl, state_scale,
            rand_seed, philox_rounds, state_copy, precision,
        )  # fmt: skip
        return out
    arguments: tuple[Any, ...] = (
        state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out, D, z, dt_bias,
        state_batch_indices, cu_seqlens, pad_slot_id,
    )  # fmt: skip
    options = plan.PLAIN
    if state_scale is not None or rand_seed is not None or state_copy is not None or precision != "default":
        arguments, options = plan.with_options(arguments, state_scale, rand_seed, philox_rounds, state_copy, precision)
    elif philox_rounds != options[0]:
        check_philox_rounds(philox_rounds)
    if isinstance(state, torch.Tensor) and state.is_cuda:
        if _CHECK and not compiler.capturing():
            call = plan.as_call(arguments, dt_softplus, max_seqlen, options)
            _check_values(call, plan.checked_problem(call, enable_pdl))
        return plan.run(arguments, dt_softplus, enable_pdl, config, max_seqlen, options)
    call = plan.as_call(arguments, dt_softplus, max_seqlen, options)
    _run_reference(call, _reference_problem(call, enable_pdl, config))
    return out


_CHECK = checks.enabled()
_compiling = torch.compiler.is_compiling  # looked up once: a warm call counts in tenths of a microsecond
_SIGNATURE = inspect.signature(checkpointing_ssu)


def _reference_problem(call: Call, enable_pdl: bool, config: object) -> Problem:
    """The problem of a call on the CPU, after every check of it but those of values."""
    problem = plan.checked_problem(call, enable_pdl)
    if call.state.device.type != "cpu":
        raise ValueError(f"state: on device {call.state.device}, expected a CUDA device or the CPU")
    if config is not None and not isinstance(config, TileConfig):
        raise TypeError(f"config: got {type(config).__name__}, expected TileConfig or None")
    return problem


def _check_values(call: Call, problem: Problem) -> None:
    checks.check_values(
        call.ring_start,
        call.prev_num_accepted_tokens,
        call.state_batch_indices,
        call.pad_slot_id,
        batch=call.batch,
        tokens=problem.tokens,
        window=problem.window,
        cu_seqlens=call.cu_seqlens,
        total=call.x.shape[1],
    )


def _run_reference(call: Call, problem: Problem) -> None:
    """Run a checked call on the CPU, once its slots, cursors and row lengths are seen to be in range."""
    _check_values(call, problem)
    # Kernels write tensors of any mode; inference mode is the only one in which torch does too.
    with torch.inference_mode():
        checkpointing_ssu_reference(**call.kwargs())


def prepare(
    state: torch.Tensor,
    x_cache: torch.Tensor,
    B_cache: torch.Tensor,
    dt_cache: torch.Tensor,
    ring_start: torch.Tensor,
    prev_num_accepted_tokens: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    out: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    state_scale: torch.Tensor | None = None,
    rand_seed: torch.Tensor | None = None,
    philox_rounds: int = 10,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    enable_pdl: bool = False,
    state_copy: torch.Tensor | None = None,
    precision: str = "default",
    config: TileConfig | None = None,
) -> plan.Plan:
    """Check a call and load its kernel, without running it: for launches that cost the host as little as can be.

    Takes exactly the arguments of `checkpointing_ssu`, which documents them. `Plan.launch` of the result runs the
    step, on these tensors or on others like them; it documents what it checks and what it takes on trust. The plan
    holds no tensors, and keeps its config: tables named later do not change it.

    Nothing is written. The first plan of a problem compiles or loads its kernels and checks them, as a first call
    does, so that a plan made before a graph capture may be launched in it.

    Raises:
        As `checkpointing_ssu` for the same arguments, less the checks of slots, cursors and row lengths.
    """
    arguments, options = plan.with_options(
        (
            state, x_cache, B_cache, dt_cache, ring_start, prev_num_accepted_tokens, x, dt, A, B, C, out, D, z, dt_bias,
            state_batch_indices, cu_seqlens, pad_slot_id,
        ),
        state_scale, rand_seed, philox_rounds, state_copy, precision,
    )  # fmt: skip
    call = plan.as_call(arguments, dt_softplus, max_seqlen, options)
    if isinstance(state, torch.Tensor) and state.is_cuda:
        return plan.make(plan.checked_problem(call, enable_pdl), call.batch, state.get_device(), config)
    problem = _reference_problem(call, enable_pdl, config)

    def checked_reference(*arguments: Any) -> None:
        call = plan.call_of(problem, arguments)
        given = _reference_problem(call, enable_pdl, None)
        if given != problem:
            raise ValueError("a call of another problem")  # Plan.launch says in what
        _run_reference(call, given)

    return plan.Plan(problem, call.batch, None, None, checked_reference)


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a call is run, and why; `str()` of it is for people.

    Attributes:
        problem, batch: what is asked.
        target: the GPU, None when CPU tensors run the reference.
        choice: config, source and reason; None for the reference.
    """

    problem: Problem
    batch: int
    target: Target | None
    choice: tables.Choice | None

    @property
    def config(self) -> TileConfig | None:
        """The tile config, None for the reference."""
        return self.choice.config if self.choice else None

    @property
    def source(self) -> str:
        """ "table", "nearest", "default", "fallback", "forced" or "reference"."""
        return self.choice.source if self.choice else "reference"

    def __str__(self) -> str:
        head = f"{self.problem.label()}, batch {self.batch}"
        if self.choice is None or self.target is None:
            return f"{head}: CPU tensors run the reference in plain torch"
        lines = [
            f"{head} on {self.target.name} ({self.target.arch})",
            f"  config: {self.choice.config.label()}  ({self.choice.config})",
            f"  why:    {self.choice.reason}",
        ]
        if self.choice.table is not None:
            lines.append(f"  table:  {self.choice.table}")
        if self.choice.provenance == "estimated":
            lines.append("  note:   estimated by the cost model, never measured on this GPU")
        if (cell := self.choice.cell) is not None:
            verb = "estimated" if self.choice.provenance == "estimated" else "measured"
            lines.append(
                f"  {verb}: {cell.time_us:.1f} us at batch {cell.batch}, {cell.gb_s:.0f} GB/s, "
                f"{100 * cell.limit_fraction:.0f}% of the read limit"
            )
            if cell.runner_up is not None and (slower := cell.runner_up_slower) is not None:
                kept = " but not by enough to replace the default rule's config" if slower < 0 else ""
                lines.append(
                    f"  next:   {cell.runner_up.label()}, {100 * abs(slower):.1f}% "
                    f"{'faster' if slower < 0 else 'slower'}{kept}"
                )
            if cell.default_us is not None:
                lines.append(f"  default rule's config: {cell.default_us:.1f} us")
            lines += [f"  {name}: {us:.1f} us" for name, us in sorted(cell.peers.items())]
        return "\n".join(lines)


def explain(
    *args: Any,
    problem: Problem | None = None,
    batch: int | None = None,
    target: Target | str | None = None,
    table_paths: Sequence[Path | str] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Which config a call gets, from which table or rule, and why. Compiles and launches nothing.

    Args:
        args, kwargs: the arguments of `checkpointing_ssu`; or none of them, and:
        problem, batch: a problem and the number of rows.
        target: the GPU to explain for, as a Target or a name ("b300", "sm_100a"); default the operands' device, or
            the current one.
        table_paths: user tables to take in place of REPLAYSSM_TABLES, see `use_tables`.

    Raises:
        TypeError, ValueError: for arguments that the call itself would refuse, or too few of these.
    """
    config = kwargs.get("config")
    device: int | None = None
    if problem is None:
        bound = _SIGNATURE.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        call = Call(**{f.name: given[f.name] for f in dataclasses.fields(Call)})
        problem = plan.checked_problem(call, given["enable_pdl"])
        batch, config = call.batch, given["config"]
        if given["state"].is_cuda:
            device = given["state"].get_device()
        elif target is None:
            return Explanation(problem, batch, None, None)
    elif not isinstance(problem, Problem):
        raise TypeError(f"problem: got {type(problem).__name__}, expected Problem or None")
    elif args or set(kwargs) - {"config"}:
        raise TypeError("problem: give either a problem and a batch or the call's tensors, not both")
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise ValueError(f"batch: got {batch!r}, expected a positive int")
    if isinstance(target, str):
        target = named(target)
    elif target is not None and not isinstance(target, Target):
        raise TypeError(f"target: got {type(target).__name__}, expected Target, str or None")
    if target is None:
        if device is None and not torch.cuda.is_available():
            raise ValueError('target: got None without a GPU, expected a Target or a name such as "b300" or "sm_100a"')
        device = plan.current_device() if device is None else device
        target = plan.device_target(device)
    else:
        device = None  # explained for any GPU of that kind
    if config is not None:
        choice = plan.forced(problem, config, target)
    elif table_paths is not None:
        choice = tables.Tables.of(target, table_paths).choose(problem, batch)
    else:
        choice = tables.choose(problem, batch, target)
        if device is not None:
            choice = plan.expected(problem, batch, choice, device)
    return Explanation(problem, batch, target, choice)


def use_tables(paths: Sequence[Path | str] | None) -> None:
    """Take the tables at `paths` before the shipped ones, in place of REPLAYSSM_TABLES; None goes back to that.

    "estimated" in place of a path stands for the estimated tables that the package brings for the GPU at hand.
    """
    tables.use(paths)
    plan.forget()
