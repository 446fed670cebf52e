"""The step kernel that convolves its own x, in the CTAs that use it; B and C are left to a conv before it.

Every channel of x belongs to one head, and so to one CTA (two with `head_split`, each with channels of its own): doing
its conv here repeats nothing, and x does not go to memory and back between two kernels. A thread takes the pieces of 16
bytes that it would have copied: one token's eight channels, from four raw inputs of the projection or of their ring

    x_t = silu(bias + w_0 u_{t-3} + w_1 u_{t-2} + w_2 u_{t-1} + w_3 u_t)

It asks for them together with the rows of the other rings, once the cursors are known, and convolves after the first
read-out, when the next state is on its way. Under PDL the inputs that need no cursor, the taps and dt of the new tokens
are brought to L2 before the wait. With `early` all of the conv is done before it: then in_proj must have ended before
the conv of B and C let this kernel start (which is not `soon`); that conv neither reads nor writes channels of x. The
arithmetic and its order are those of `conv`, and so are the results.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...kernels.bundles import Entry, NewTokens, Row, Share, Shared, Tensors, Thread
from ...kernels.phases import Inputs, RingInputs
from ...kernels.primitives import CUTLASS_TYPE, pack, quotient, store_words
from ...kernels.signature import compile_options, fake_arguments
from ...kernels.spec import StepSpec
from ...kernels.step import StepKernel
from ...kernels.tokens import PIECE, Tokens
from ...problem import ROW_ALIGN
from ..shapes import StepShape
from .values import TAPS, convolved, load_at, load_values, prefetch, unpack


@dataclass(frozen=True, eq=False)
class LayerTensors(Tensors):
    """A step's arguments, of which x is raw, and what the conv of x takes.

    Attributes:
        conv_cache: (slots, R, H, P), the ring of raw inputs.
        conv_weight: (4·H·P,), the taps of each channel together.
        conv_bias: (H·P,) or None.
    """

    conv_cache: cute.Tensor | None = None
    conv_weight: cute.Tensor | None = None
    conv_bias: cute.Tensor | None = None


class RawTokens(Tokens):
    """The tokens of a step whose x is still to be convolved."""

    def __init__(self, spec: StepSpec, shape: StepShape) -> None:
        super().__init__(spec)
        self.shape = shape

    def copy_new(self, tensors: Tensors, shared: Shared, new: NewTokens, share: Share) -> None:
        """Nothing to copy: `store` writes the new tokens' x."""

    def new_x(self, tensors: Tensors, new: NewTokens, share: Share) -> None:
        """Nothing to hold: see `ask`."""

    def append_new(self, tensors: Tensors, words: None, row: Row, share: Share) -> None:
        """Nothing yet: `store` appends x."""

    @cute.jit
    def prefetch(self, tensors: LayerTensors, entry: Entry, share: Share):
        """Bring to L2 what the conv reads, less what lies in the ring, and dt of the same tokens and heads."""
        for index, token, column, wanted in self._pieces(self.spec.problem.tokens, share):
            if wanted:
                head, p = share.head0 + index, share.rows.cta_p0 + column
                new = self.spec.pointer(tensors.x, entry.new.outer, (token, head), p, PIECE)
                prefetch(Int64(new.toint()))
                channel = self._channel(head, p)
                taps = tensors.conv_weight.iterator + cute.assume(channel * TAPS, divby=TAPS * PIECE)
                prefetch(Int64(taps.toint()))
                if cutlass.const_expr(tensors.conv_bias is not None):
                    bias = tensors.conv_bias.iterator + cute.assume(channel, divby=PIECE)
                    prefetch(Int64(bias.toint()))
                if column == 0:
                    dt = tensors.dt[(entry.new.outer, token, head, None)].iterator
                    prefetch(Int64(dt.toint()))

    @cute.jit
    def ask(self, tensors: LayerTensors, row: Row, share: Share):
        """Ask for the four raw inputs of each of the thread's pieces."""
        pieces = list(self._pieces(self.spec.problem.tokens, share))
        raw = cute.make_rmem_tensor(cute.make_layout(4 * TAPS * len(pieces)), Int32)
        for i, (index, token, column, wanted) in enumerate(pieces):
            if wanted:
                head, p = share.head0 + index, share.rows.cta_p0 + column
                for k in cutlass.range_constexpr(TAPS):
                    at = token + (k - (TAPS - 1))  # below 0: before the new tokens
                    new = self.spec.pointer(tensors.x, row.new.outer, (cutlass.max(at, 0), head), p, PIECE)
                    source = Int64(new.toint())
                    if cutlass.const_expr(k < TAPS - 1):
                        old = self.spec.pointer(tensors.conv_cache, row.slot, (self._raw_row(row, at), head), p, PIECE)
                        source = Int64(cutlass.select_(at < 0, Int64(old.toint()), source))
                    words = load_at(source)
                    for e in cutlass.range_constexpr(4):
                        raw[4 * (TAPS * i + k) + e] = words[e]
        return raw

    def _raw_row(self, row: Row, at):
        """The ring row of the raw input `at` tokens after the first new one, at least three before it."""
        rows = self.spec.problem.ring_rows
        end = self.spec.ring_row(row.start, row.pnat)
        before = end + cutlass.min(at, 0)
        return Int32(cutlass.select_(before < 0, before + rows, before))

    @cute.jit
    def store(self, tensors: LayerTensors, shared: Shared, raw, row: Row, share: Share):
        """Convolve what `ask` read: x to shared memory, raw inputs to their ring; a CTA's only turn appends its x."""
        for i, (index, token, column, wanted) in enumerate(self._pieces(self.spec.problem.tokens, share)):
            if wanted:
                words = [[raw[4 * (TAPS * i + k) + e] for e in range(4)] for k in range(TAPS)]
                head, p = share.head0 + index, share.rows.cta_p0 + column
                packed = self._convolved(tensors, words, head, p)
                at = self._place(index, self.x_rows + token, column)
                store_words(shared.raw + cute.assume(at, divby=16), packed)
                ring = self.spec.ring_row(self.spec.ring_row(row.start, row.pnat), token)
                place = self.spec.pointer(tensors.conv_cache, row.slot, (ring, head), p, PIECE)
                store_words(place, words[TAPS - 1])
                if cutlass.const_expr(self.spec.config.turns == 1):
                    store_words(self._appended(tensors, row, share, index, token, column), packed)

    def _channel(self, head, p):
        """The conv's channel of a head's row of P."""
        return head * self.spec.problem.head_dim + p

    def _convolved(self, tensors: LayerTensors, words, head, p):
        """A piece's x from its raw inputs."""
        io, shape = self.spec.io_kind, self.shape
        channel = self._channel(head, p)
        taps = load_values(tensors.conv_weight, shape.weight_dtype, channel * TAPS, TAPS * PIECE)
        bases = None
        if tensors.conv_bias is not None:
            bases = load_values(tensors.conv_bias, shape.bias_dtype, channel, PIECE)
        values = convolved([unpack(io, held) for held in words], taps, bases)
        return [pack(io, values[e], values[e + 1]) for e in range(0, PIECE, 2)]


class ConvStepKernel(StepKernel):
    """One step kernel with the conv of x in it, specialized on its shape."""

    def __init__(self, shape: StepShape, arch: str | None = None) -> None:
        super().__init__(shape.problem, shape.config, arch)
        self.shape = shape
        self.tokens = RawTokens(self.spec, shape)
        self.write_back.tokens = self.tokens

    @cute.jit
    def __call__(
        self,
        state: cute.Tensor,
        x_cache: cute.Tensor,
        b_cache: cute.Tensor,
        dt_cache: cute.Tensor,
        ring_start: cute.Tensor,
        pnat: cute.Tensor,
        x: cute.Tensor,
        dt: cute.Tensor,
        a: cute.Tensor,
        b: cute.Tensor,
        c: cute.Tensor,
        out: cute.Tensor,
        d: cute.Tensor | None,
        z: cute.Tensor | None,
        dt_bias: cute.Tensor | None,
        slots: cute.Tensor | None,
        cu_seqlens: cute.Tensor | None,
        pad_slot_id: Int64,
        stream,
        conv_cache: cute.Tensor,
        conv_weight: cute.Tensor,
        conv_bias: cute.Tensor | None,
    ):
        tensors = LayerTensors.of_call(
            x_cache, b_cache, dt_cache, ring_start, pnat, x, dt, a, b, c, out, d, z, dt_bias, slots, cu_seqlens,
            pad_slot_id, state, conv_cache=conv_cache, conv_weight=conv_weight, conv_bias=conv_bias,
        )  # fmt: skip
        self.start(tensors, stream)

    @cute.kernel
    def kernel(
        self,
        tensors: LayerTensors,
        read: Any,
        checkpoint: Any,
    ):
        """A step's, but for what `early` asks for; see `StepKernel.kernel`."""
        spec, p = self.spec, self.spec.problem
        number, split, head0, count = self.grid.place(cute.arch.block_idx()[0], tensors.batch)
        group = quotient(head0, p.heads_per_group)
        thread = self.thread()
        rows = self.rows(split, thread)
        slot = self.slot(tensors, number)
        new = spec.new_tokens(number, tensors)
        shared = self.views(*self.allocate(spec.shared.total))
        pipe = self.copies.pipe(read, checkpoint, shared, thread)
        self.copies.prepare(pipe, thread)
        share = self.share(rows, head0, count, thread)
        entry = self.entry(tensors, slot, group, new)
        start, pnat = Int32(0), Int32(0)
        if cutlass.const_expr(p.pdl):
            if entry.live:
                start, pnat = self.ask_state(tensors, pipe, entry, share, thread)
                if cutlass.const_expr(self.shape.early):
                    raw = self.tokens.ask(tensors, entry.at(start, pnat), share)
                    self.tokens.store(tensors, shared, raw, entry.at(start, pnat), share)
                else:
                    self.tokens.prefetch(tensors, entry, share)
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        inputs = self.ask_inputs(tensors, shared, entry, share, thread)
        if entry.live:
            if cutlass.const_expr(not p.pdl):
                start, pnat = self.ask_state(tensors, pipe, entry, share, thread)
            self.work(tensors, shared, pipe, entry.at(start, pnat), share, thread, inputs)
        else:
            self.leave_out(tensors, new, share, thread)

    def ask_ring(self, tensors: LayerTensors, shared: Shared, row: Row, share: Share, thread: Thread):
        """The raw inputs too, until `multiply_and_scan` needs them."""
        ring = super().ask_ring(tensors, shared, row, share, thread)
        return ring if self.shape.early else dataclasses.replace(ring, raw=self.tokens.ask(tensors, row, share))

    @cute.jit
    def multiply_and_scan(
        self,
        tensors: Tensors,
        shared: Shared,
        row: Row,
        share: Share,
        thread: Thread,
        inputs: Inputs,
        ring: RingInputs,
        flush,
    ):
        """The conv of x first; the barrier behind this phase is the one that x waits for."""
        if cutlass.const_expr(not self.shape.early):
            self.tokens.store(tensors, shared, ring.raw, row, share)
        StepKernel.multiply_and_scan(self, tensors, shared, row, share, thread, inputs, ring, flush)


def conv_arguments(shape: StepShape) -> list[Any]:
    """Arguments of the kernel for `cute.compile`: a step's, and the conv's."""
    p = shape.problem
    step = fake_arguments(p)
    io = CUTLASS_TYPE[p.io_dtype]
    slots, divisor = step[0].shape[0], ROW_ALIGN * 8 // io.width
    rows = tuple(cute.sym_int64(divisibility=divisor) for _ in range(2))
    head = p.head_dim

    def vector(kind: str, size: int) -> Any:
        return cute.runtime.make_fake_tensor(CUTLASS_TYPE[kind], (size,), (1,), assumed_align=ROW_ALIGN)

    return [
        *step,
        cute.runtime.make_fake_tensor(
            io, (slots, p.ring_rows, p.heads, head), (*rows, head, 1), assumed_align=ROW_ALIGN
        ),
        vector(shape.weight_dtype, TAPS * p.heads * head),
        None if shape.bias_dtype is None else vector(shape.bias_dtype, p.heads * head),
    ]


def compile_conv_step(shape: StepShape, arch: str):
    """Compile for `arch`; needs no GPU.

    Returns:
        A callable of a step's arguments as `kernels.step.compile_step` has them, x raw and B and C convolved, and of
        conv_cache (slots, R, H, P), conv_weight (4·H·P,) and conv_bias (H·P,) or None, on torch's current stream.
    """
    return cute.compile(
        ConvStepKernel(shape, arch), *conv_arguments(shape), options=compile_options(arch, shape.config)
    )
