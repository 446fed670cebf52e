"""The conv's step: T raw inputs a row from the projection, convolved and gated by SiLU, and appended to their ring.

A thread takes `vector` neighbouring channels of `rows` rows through all their tokens. It keeps every raw input in
registers: three from the ring, at rows ring_start + pnat - 3 .. ring_start + pnat - 1, and T new ones, each read once:

    out_t = silu(bias + w_0 u_{t-3} + w_1 u_{t-2} + w_2 u_{t-1} + w_3 u_t)

With `each`, tokens are shared out: a thread takes so many in a row, and the inputs before them from where they are.
Taps and bias are read once for all rows of a thread.

Under PDL what no predecessor writes (slots, cursors, ring, weights) is asked for before the wait, and with `ahead` the
new inputs are brought to L2. The kernel lets its successor start after its own wait, with `soon` before it, so that the
step's states are asked for while this kernel's predecessor still runs; it writes no more than `projected`, which the
step reads after its own wait. Every thread waits: whoever waits for this kernel's end knows that its predecessor has
ended too.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...kernels.primitives import CUTLASS_TYPE, load_words, pack, quotient, remainder, store_words
from ..shapes import ConvShape
from .values import TAPS, bring_to_l2, carved, convolved, load_values, unpack


class ConvKernel:
    """One conv kernel, specialized on its shape."""

    def __init__(self, shape: ConvShape) -> None:
        self.shape = shape

    @cute.jit
    def __call__(
        self,
        inputs: cute.Tensor,
        conv_cache: cute.Tensor,
        ring_start: cute.Tensor,
        pnat: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor | None,
        out: cute.Tensor,
        slots: cute.Tensor | None,
        pad_slot_id: Int64,
        stream,
    ):
        shape = self.shape
        self.kernel(slots, pad_slot_id, ring_start, pnat, inputs, conv_cache, weight, bias, out).launch(
            grid=[self.bundles(inputs.shape[0]) * (shape.tokens // shape.chunk * shape.ctas_per_row), 1, 1],
            block=[shape.threads, 1, 1],
            stream=stream,
            use_pdl=shape.pdl,
            **carved(shape.carveout),
        )

    @cute.kernel
    def kernel(
        self,
        slots: cute.Tensor | None,  # first what the first loads need: parameters come 64 bytes at a time
        pad_slot_id: Int64,
        ring_start: cute.Tensor,
        pnat: cute.Tensor,
        inputs: cute.Tensor,
        conv_cache: cute.Tensor,
        weight: cute.Tensor,
        bias: cute.Tensor | None,
        out: cute.Tensor,
    ):
        shape = self.shape
        vector, rows = shape.vector, range(shape.rows)
        block = cute.arch.block_idx()[0]
        bundle, part = quotient(block, shape.ctas_per_row), remainder(block, shape.ctas_per_row)
        first = 0  # of the thread's tokens
        if cutlass.const_expr(shape.chunk < shape.tokens):
            chunks = shape.tokens // shape.chunk
            bundle, first = quotient(bundle, chunks), remainder(bundle, chunks) * shape.chunk
        wanted = (part * shape.threads + cute.arch.thread_idx()[0]) * vector
        channel = Int32(cutlass.min(wanted, shape.channels - vector))
        there, row = self.rows_of(bundle, inputs.shape[0])
        slot = [Int64(r) for r in row]
        if cutlass.const_expr(slots is not None):
            slot = [Int64(slots[r]) for r in row]
        new = []
        if cutlass.const_expr(not shape.pdl):  # all predecessors have ended: nothing has to wait
            self.trigger()
            new = [self.load_new(inputs, r, first, channel) for r in row]
        if cutlass.const_expr(shape.ahead):  # before the step's states, which fill the memory's queues
            self.prefetch_new(inputs, row, first, channel)
        if cutlass.const_expr(shape.soon):
            self.trigger()
        taps = load_values(weight, shape.weight_dtype, channel * TAPS, TAPS * vector)
        bases = None
        if cutlass.const_expr(bias is not None):
            bases = load_values(bias, shape.bias_dtype, channel, vector)
        cute.arch.sync_warp()  # a fence for the scheduler: loads above it are issued above it
        # Threads without work read what is there, branch-free, and write nothing.
        works = [(slot[i] != pad_slot_id) & (slot[i] >= 0) & (wanted < shape.channels) & there[i] for i in rows]
        safe = [Int64(cutlass.select_(works[i], slot[i], Int64(0))) for i in rows]
        end = [self.wrapped(Int32(ring_start[s]) + Int32(pnat[s])) for s in safe]
        old = [self.load_history(conv_cache, safe[i], end[i], first, channel) for i in rows]
        if cutlass.const_expr(shape.pdl):
            cute.arch.griddepcontrol_wait()
            if cutlass.const_expr(not shape.soon):
                self.trigger()
            new = [self.load_new(inputs, r, first, channel) for r in row]
        cute.arch.sync_warp()
        for i in cutlass.range_constexpr(shape.rows):
            raw = self.series(old[i], new[i], first)
            self.convolve(raw, taps, bases, works[i], out, conv_cache, row[i], safe[i], end[i], first, channel)

    @cute.jit
    def convolve(self, raw, taps, bases, works, out, conv_cache, row, slot, end, first, channel):
        """Write a row's outputs from its token `first` on, and these tokens' raw inputs into their ring."""
        shape = self.shape
        values = [unpack(shape.io_dtype, words) for words in raw]
        if works:
            for t in cutlass.range_constexpr(shape.chunk):
                result = convolved(values[t : t + TAPS], taps, bases)
                packed = [pack(shape.io_dtype, result[e], result[e + 1]) for e in range(0, shape.vector, 2)]
                store_words(self.place(out, row, first + t, channel), packed)
                ring = self.wrapped(end + (first + t))
                store_words(self.place(conv_cache, slot, ring, channel), raw[TAPS - 1 + t])

    def rows_of(self, bundle, batch):
        """Of a thread's rows: whether each is in the batch, and which it is; the last one in place of those beyond."""
        if self.shape.rows == 1:
            return [True], [bundle]
        wanted = [bundle * self.shape.rows + i for i in range(self.shape.rows)]
        return [r < batch for r in wanted], [cutlass.min(r, batch - 1) for r in wanted]

    def load_history(self, conv_cache, slot, end, first, channel):
        """A row's three raw inputs before token `first` that lie in the ring; others stand for those that do not.

        They are asked for before the wait, when no new token may be read.
        """
        half, rows = self.shape.vector // 2, self.shape.ring_rows
        found = []
        for k in range(TAPS - 1):
            at = first + (k - (TAPS - 1))
            at = cutlass.min(at, -1) if self.shape.chunk < self.shape.tokens else at
            found.append(load_words(self.place(conv_cache, slot, self.wrapped(end + rows + at), channel), half))
        return found

    def series(self, old, new, first):
        """The raw inputs of a thread's tokens, three before them first, from `load_history` and `load_new`."""
        if self.shape.chunk == self.shape.tokens:
            return old + new
        before = [
            [Int32(cutlass.select_(first + (k - (TAPS - 1)) < 0, o, n)) for o, n in zip(old[k], new[k], strict=True)]
            for k in range(TAPS - 1)
        ]
        return before + new[TAPS - 1 :]

    def trigger(self):
        """Let the next kernel start, if it is one that may."""
        if self.shape.triggers:
            cute.arch.griddepcontrol_launch_dependents()

    def bundles(self, batch):
        """How many threads share a batch."""
        rows = self.shape.rows
        return batch if rows == 1 else (batch + rows - 1) // rows

    def load_new(self, inputs, row, first, channel):
        """A thread's new tokens of a row; if that is not all of them, three before them first, where there are."""
        half = self.shape.vector // 2
        return [load_words(self.place(inputs, row, t, channel), half) for t in self.wanted_tokens(first)]

    def prefetch_new(self, inputs, rows, first, channel):
        """Ask for what `load_new` will read, as far as L2."""
        for row in rows:
            for t in self.wanted_tokens(first):
                bring_to_l2(self.place(inputs, row, t, channel))

    def wanted_tokens(self, first):
        """The new tokens that `load_new` reads."""
        chunk = self.shape.chunk
        tokens = list(range(chunk))
        if chunk < self.shape.tokens:
            tokens = [cutlass.max(first + (k - (TAPS - 1)), 0) for k in range(TAPS - 1)]
            tokens += [first + t for t in range(chunk)]
        return tokens

    def wrapped(self, ring):
        """A ring row modulo R, for less than 2 R."""
        rows = self.shape.ring_rows
        return Int32(cutlass.select_(ring >= rows, ring - rows, ring))

    def place(self, tensor, outer, inner, channel):
        """Where this thread's channels of a row are."""
        return tensor[(outer, inner, None)].iterator + cute.assume(channel, divby=self.shape.vector)


def compile_conv(shape: ConvShape, arch: str):
    """Compile for `arch`; needs no GPU.

    Returns:
        A callable of (inputs (b, T, channels), conv_cache (slots, R, channels), ring_start, prev_num_accepted_tokens,
        conv_weight, conv_bias, out (b, T, channels), state_batch_indices, pad_slot_id) as `decode_step` has them, on
        torch's current stream.
    """
    batch, slots = cute.sym_int(), cute.sym_int64()

    def rows(outer, inner):
        strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
        kind = CUTLASS_TYPE[shape.io_dtype]
        return cute.runtime.make_fake_tensor(kind, (outer, inner, shape.channels), strides, assumed_align=16)

    def vector(kind, size, stride=1, align=16):
        return cute.runtime.make_fake_tensor(CUTLASS_TYPE[kind], (size,), (stride,), assumed_align=align)

    def cursor():
        return vector("i32", slots, cute.sym_int64(), 4)

    weight = cute.runtime.make_fake_tensor(
        CUTLASS_TYPE[shape.weight_dtype], (shape.channels, TAPS), (TAPS, 1), assumed_align=16
    )
    bias = None if shape.bias_dtype is None else vector(shape.bias_dtype, shape.channels)
    index = shape.index_dtype
    return cute.compile(
        ConvKernel(shape), rows(batch, shape.tokens), rows(slots, shape.ring_rows), cursor(), cursor(), weight, bias,
        rows(batch, shape.tokens),
        None if index is None else vector(index, batch, cute.sym_int64(), CUTLASS_TYPE[index].width // 8),
        Int64(0), cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
        options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )  # fmt: skip
