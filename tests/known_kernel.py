"""A kernel by the DSL's own operations that does what the Blackwell step kernel's inline PTX does: a yardstick.

One tile: A by TMA, A·B by tcgen05, sums through tensor memory to global memory, and one request to cluster launch
control. It is compiled, never run. What it says of layouts and instructions is NVIDIA's word, not ours.

As a script it compiles all that the tests ask about and writes it into the working directory, where the DSL leaves the
PTX anyhow: an object file for each (kind, architecture), and `known.json`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as blackwell
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, tcgen05
from cutlass.memory import SmemAllocator

ROWS, COLUMNS, K = 128, 16, 128
ASKED = (("f32", "sm_100a"), ("f32", "sm_103a"), ("bf16", "sm_100a"), ("bf16", "sm_103a"), ("f16", "sm_100a"))
LAYOUTS: dict[str, Any] = {}
"""What was printed at the last compilation: layouts of A and B in shared memory, of the copy, and of its source."""


class KnownKernel:
    """(128, K) times (16, K) transposed, for f32 (as tf32), bf16 or f16."""

    def __init__(self, kind: str, k: int) -> None:
        self.kind, self.k = kind, k
        self.element = {"f32": Float32, "bf16": cutlass.BFloat16, "f16": cutlass.Float16}[kind]

    @cute.jit
    def __call__(self, a: cute.Tensor, b: cute.Tensor, out: cute.Tensor, stream):
        one, shared, k_major = tcgen05.CtaGroup.ONE, tcgen05.OperandSource.SMEM, OperandMajorMode.K
        if cutlass.const_expr(self.kind == "f32"):
            operation = tcgen05.MmaTF32Op((ROWS, COLUMNS, 8), one, shared, k_major, k_major)
        else:
            operation = tcgen05.MmaF16BF16Op(self.element, Float32, (ROWS, COLUMNS, 16), one, shared, k_major, k_major)
        mma = cute.make_tiled_mma(operation)
        tile = (ROWS, COLUMNS, self.k)
        a_layout = blackwell.make_smem_layout_a(mma, tile, self.element, 1)
        b_layout = blackwell.make_smem_layout_b(mma, tile, self.element, 1)
        LAYOUTS.update(a=str(a_layout), b=str(b_layout))
        atom, tma_a = cute.nvgpu.make_tiled_tma_atom_A(
            cpasync.CopyBulkTensorTileG2SOp(one), a, cute.select(a_layout, mode=[0, 1, 2]), tile, mma
        )
        self.kernel(mma, atom, tma_a, out, a_layout, b_layout).launch(grid=[1, 1, 1], block=[128, 1, 1], stream=stream)

    @cute.kernel
    def kernel(
        self,
        mma: cute.TiledMma,
        atom: cute.CopyAtom,
        tma_a: cute.Tensor,
        out: cute.Tensor,
        a_layout: cute.ComposedLayout,
        b_layout: cute.ComposedLayout,
    ):
        smem = SmemAllocator()
        barriers = smem.allocate(64, byte_alignment=8)
        full = cute.recast_ptr(barriers, dtype=Int64)
        base = cute.recast_ptr(barriers + 32, dtype=Int32)
        shared_a = smem.allocate_tensor(self.element, a_layout.outer, byte_alignment=1024, swizzle=a_layout.inner)
        shared_b = smem.allocate_tensor(self.element, b_layout.outer, byte_alignment=1024, swizzle=b_layout.inner)
        answer = smem.allocate(16, byte_alignment=16)
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_init(full, 1)
                cute.arch.mbarrier_init(full + 1, 1)
                cute.arch.mbarrier_init(full + 2, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.alloc_tmem(32, base)
            cute.arch.relinquish_tmem_alloc_permit()
        cute.arch.sync_threads()
        accumulators = cute.make_tensor(
            cute.arch.retrieve_tmem_ptr(Float32, 16, base),
            mma.make_fragment_C(mma.partition_shape_C((ROWS, COLUMNS))).layout,
        )
        a_fragment, b_fragment = mma.make_fragment_A(shared_a), mma.make_fragment_B(shared_b)
        tiles = mma.get_slice(0).partition_A(cute.local_tile(tma_a, (ROWS, self.k), (0, None)))
        to_shared, from_global = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(shared_a, 0, 3), cute.group_modes(tiles, 0, 3)
        )
        if warp == 0:
            with cute.arch.elect_one():
                cute.arch.mbarrier_arrive_and_expect_tx(full, ROWS * self.k * self.element.width // 8)
            cute.copy(atom, from_global[None, 0], to_shared[None, 0], tma_bar_ptr=full)
            cute.arch.mbarrier_wait(full, 0)
            for k in cutlass.range_constexpr(cute.size(a_fragment, mode=[2])):
                mma.set(tcgen05.Field.ACCUMULATE, k != 0)
                cute.gemm(mma, accumulators, a_fragment[None, None, k, 0], b_fragment[None, None, k, 0], accumulators)
            with cute.arch.elect_one():
                tcgen05.commit(full + 1)
                cute.arch.mbarrier_arrive_and_expect_tx(full + 2, 16)
                cute.arch.issue_clc_query(full + 2, answer, multicast=False)
        cute.arch.mbarrier_wait(full + 1, 0)
        sums = accumulators[(None, None), 0, 0]
        copy = tcgen05.make_tmem_copy(cute.make_copy_atom(tcgen05.Ld16x256bOp(tcgen05.Repetition.x1), Float32), sums)
        source, target = copy.get_slice(thread).partition_S(sums), copy.get_slice(thread).partition_D(out)
        LAYOUTS.update(copy=str(copy.layout_dst_tv_tiled), source=str(source.layout), target=str(target.layout))
        values = cute.make_rmem_tensor(target.shape, Float32)
        cute.copy(copy, source, values)
        cute.arch.fence_view_async_tmem_load()
        cute.autovec_copy(values, target)
        cute.arch.mbarrier_wait(full + 2, 0)
        block, _, _, given = cute.arch.clc_response(answer)
        if given != 0:
            out[block, 0] = Float32(block)  # so that the answer is read
        cute.arch.sync_threads()
        if warp == 0:
            cute.arch.dealloc_tmem(accumulators.iterator, 32)


def compile_known(kind: str, k: int, arch: str) -> Any:
    """Compile it; the result can be exported."""
    kernel = KnownKernel(kind, k)

    def fake(element: Any, *shape: int) -> Any:
        return cute.runtime.make_fake_compact_tensor(element, shape, stride_order=(1, 0), assumed_align=16)

    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    tensors = fake(kernel.element, ROWS, k), fake(kernel.element, COLUMNS, k), fake(Float32, ROWS, COLUMNS)
    return cute.compile(kernel, *tensors, stream, options=f"--enable-tvm-ffi --gpu-arch {arch} --keep-ptx")


def main() -> None:
    """Compile everything of `ASKED`."""
    found = {}
    for kind, arch in ASKED:
        compiled = compile_known(kind, K, arch)
        compiled.export_to_c(f"{kind}-{arch}.o", function_name="known")
        found[f"{kind}-{arch}"] = {"layouts": dict(LAYOUTS), "ptx": compiled.__ptx__}
    Path("known.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
