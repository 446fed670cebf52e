"""The gated RMSNorm: y·silu(z), divided by its root mean square over a group, times a weight; in place of y.

A CTA takes one group of `together` tokens of a row, a thread 16-byte pieces of it that lie `threads` apart; the weights
are read once for all tokens. Under PDL the gates, the weights and the slot, which the step does not write, are asked
for while the step still runs. The step lets this kernel start after its own wait for the conv, and so after the end of
in_proj, which wrote z; z is read through L2. Padding rows keep the zeros that the step gave them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from ...config import WARP
from ...kernels.primitives import CUTLASS_TYPE, load_words, pack, quotient, remainder, store_words
from ..shapes import PIECE, NormShape
from .values import carved, load_shared_by_all, load_values, silu, unpack


class NormKernel:
    """One norm kernel, specialized on its shape."""

    def __init__(self, shape: NormShape) -> None:
        self.shape = shape

    @cute.jit
    def __call__(
        self,
        y: cute.Tensor,
        z: cute.Tensor,
        weight: cute.Tensor,
        slots: cute.Tensor | None,
        eps: Float32,
        pad_slot_id: Int64,
        stream,
    ):
        shape = self.shape
        self.kernel(y, z, weight, slots, eps, pad_slot_id).launch(
            grid=[y.shape[0] * (shape.tokens // shape.together * shape.groups), 1, 1],
            block=[shape.threads, 1, 1],
            stream=stream,
            use_pdl=shape.pdl,
            **carved(shape.carveout),
        )

    @cute.kernel
    def kernel(
        self,
        y: cute.Tensor,
        z: cute.Tensor,
        weight: cute.Tensor,
        slots: cute.Tensor | None,
        eps: Float32,
        pad_slot_id: Int64,
    ):
        shape = self.shape
        block, thread = cute.arch.block_idx()[0], cute.arch.thread_idx()[0]
        group, of_row = remainder(block, shape.groups), quotient(block, shape.groups)
        bundles = shape.tokens // shape.together
        row = quotient(of_row, bundles)
        first = remainder(of_row, bundles) * shape.together
        tokens = [first + t for t in range(shape.together)]
        slot = Int64(row)
        if cutlass.const_expr(slots is not None):
            slot = Int64(slots[row])
        pieces = shape.group // PIECE
        columns, inside, weights, gates = [], [], [], []
        for i in cutlass.range_constexpr(shape.pieces):
            piece = i * shape.threads + thread
            inside.append(piece < pieces)
            columns.append(group * shape.group + cutlass.min(piece, pieces - 1) * PIECE)
            weights.append(load_values(weight, shape.weight_dtype, columns[i], PIECE))
            gates.append([load_shared_by_all(self.place(z, row, t, columns[i])) for t in tokens])
        if cutlass.const_expr(shape.pdl):
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(shape.triggers):
            cute.arch.griddepcontrol_launch_dependents()
        gated = []
        squares = [Float32(0.0)] * shape.together
        for i in cutlass.range_constexpr(shape.pieces):
            values = [load_words(self.place(y, row, t, columns[i]), PIECE // 2) for t in tokens]
            gated.append([self.gated(v, g) for v, g in zip(values, gates[i], strict=True)])
            for t in cutlass.range_constexpr(shape.together):
                sum_ = Float32(0.0)
                for v in gated[i][t]:
                    sum_ = sum_ + v * v
                squares[t] = squares[t] + Float32(cutlass.select_(inside[i], sum_, Float32(0.0)))
        scales = [cute.math.rsqrt(total * Float32(1.0 / shape.group) + eps) for total in self.totals(squares, thread)]
        works = (slot != pad_slot_id) & (slot >= 0)
        for i in cutlass.range_constexpr(shape.pieces):
            if works & inside[i]:
                for t in cutlass.range_constexpr(shape.together):
                    result = [v * scales[t] * w for v, w in zip(gated[i][t], weights[i], strict=True)]
                    packed = [pack(shape.io_dtype, result[e], result[e + 1]) for e in range(0, PIECE, 2)]
                    store_words(self.place(y, row, tokens[t], columns[i]), packed)

    def gated(self, y, z):
        """A piece's outputs times their gates."""
        kind = self.shape.io_dtype
        return [v * silu(g) for v, g in zip(unpack(kind, y), unpack(kind, z), strict=True)]

    def totals(self, values, thread):
        """The sums of some values over the CTA's threads."""
        warps, count = self.shape.warps, len(values)
        for k in range(5):
            values = [v + cute.arch.shuffle_sync_bfly(v, 1 << k) for v in values]
        if warps == 1:
            return values
        memory = SmemAllocator().allocate(4 * warps * count, byte_alignment=16)
        sums = cute.make_tensor(cute.recast_ptr(memory, dtype=Float32), cute.make_layout(warps * count))
        self.put(sums, values, thread)
        cute.arch.sync_threads()
        found = [sums[t * warps] for t in range(count)]
        for k in range(1, warps):
            found = [found[t] + sums[t * warps + k] for t in range(count)]
        return found

    @cute.jit
    def put(self, sums, values, thread):
        """A warp's sums into their places."""
        if remainder(thread, WARP) == 0:
            for t in cutlass.range_constexpr(self.shape.together):
                sums[t * self.shape.warps + quotient(thread, WARP)] = values[t]

    def place(self, tensor, row, token, column):
        """Where a piece is."""
        return tensor[(row, token, None)].iterator + cute.assume(Int32(column), divby=PIECE)


def compile_norm(shape: NormShape, arch: str):
    """Compile for `arch`; needs no GPU.

    Returns:
        A callable of (y (b, T, d_inner), written in place, z (b, T, d_inner), norm_weight, state_batch_indices, eps,
        pad_slot_id) as `decode_step` has them, on torch's current stream.
    """
    batch, io = cute.sym_int(), CUTLASS_TYPE[shape.io_dtype]

    def rows():
        strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
        return cute.runtime.make_fake_tensor(io, (batch, shape.tokens, shape.d_inner), strides, assumed_align=16)

    index = None
    if shape.index_dtype is not None:
        kind = CUTLASS_TYPE[shape.index_dtype]
        index = cute.runtime.make_fake_tensor(kind, (batch,), (cute.sym_int64(),), assumed_align=kind.width // 8)
    weight = cute.runtime.make_fake_tensor(CUTLASS_TYPE[shape.weight_dtype], (shape.d_inner,), (1,), assumed_align=16)
    return cute.compile(
        NormKernel(shape), rows(), rows(), weight, index, Float32(0.0), Int64(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )  # fmt: skip
