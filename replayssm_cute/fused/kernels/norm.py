"""The gated RMSNorm: y·silu(z), divided by its root mean square over a group, times a weight; in place of y.

A CTA takes one group of one token, a thread 16-byte pieces of it that lie `threads` apart. Under PDL the gates, the
weights and the slot, which the step does not write, are asked for while the step still runs. z was written before the
conv began (see `conv`), so it may be; but through L2. Padding rows keep the zeros that the step gave them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from ...config import WARP
from ...kernels.primitives import CUTLASS_TYPE, load_words, pack, store_words
from ..shapes import PIECE, NormShape
from .values import load_shared_by_all, load_values, silu, unpack


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
            grid=[y.shape[0] * (shape.tokens * shape.groups), 1, 1],
            block=[shape.threads, 1, 1],
            stream=stream,
            use_pdl=shape.pdl,
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
        group, of_row = block % shape.groups, block // shape.groups
        row, token = of_row // shape.tokens, of_row % shape.tokens
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
            gates.append(load_shared_by_all(self.place(z, row, token, columns[i])))
        if cutlass.const_expr(shape.pdl):
            cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(shape.triggers):
            cute.arch.griddepcontrol_launch_dependents()
        gated = []
        squares = Float32(0.0)
        for i in cutlass.range_constexpr(shape.pieces):
            values = unpack(shape.io_dtype, load_words(self.place(y, row, token, columns[i]), PIECE // 2))
            gate = unpack(shape.io_dtype, gates[i])
            gated.append([v * silu(g) for v, g in zip(values, gate, strict=True)])
            sum_ = Float32(0.0)
            for v in gated[i]:
                sum_ = sum_ + v * v
            squares = squares + Float32(cutlass.select_(inside[i], sum_, Float32(0.0)))
        total = self.total(squares, thread)
        scale = cute.math.rsqrt(total * Float32(1.0 / shape.group) + eps)
        works = (slot != pad_slot_id) & (slot >= 0)
        for i in cutlass.range_constexpr(shape.pieces):
            if works & inside[i]:
                result = [v * scale * w for v, w in zip(gated[i], weights[i], strict=True)]
                packed = [pack(shape.io_dtype, result[e], result[e + 1]) for e in range(0, PIECE, 2)]
                store_words(self.place(y, row, token, columns[i]), packed)

    def total(self, value, thread):
        """The sum of a value over the CTA's threads."""
        warps = self.shape.warps
        for k in range(5):
            value = value + cute.arch.shuffle_sync_bfly(value, 1 << k)
        if warps == 1:
            return value
        memory = SmemAllocator().allocate(4 * warps, byte_alignment=16)
        sums = cute.make_tensor(cute.recast_ptr(memory, dtype=Float32), cute.make_layout(warps))
        self.put(sums, value, thread)
        cute.arch.sync_threads()
        found = sums[0]
        for k in range(1, warps):
            found = found + sums[k]
        return found

    @cute.jit
    def put(self, sums, value, thread):
        """A warp's sum into its place."""
        if thread % WARP == 0:
            sums[thread // WARP] = value

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
