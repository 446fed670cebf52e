"""The floor: a kernel that streams a step's state rows, rewrites its flush rows, and computes nothing.

No step can be much faster than this kernel plus the remaining bytes at the read limit of the same run. It asks for the
state as the step kernel does, by TMA, many heads in flight, and writes the flushed tiles back from shared memory in
16-byte stores, unchanged: it may be timed on live caches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from replayssm_cute import ring
from replayssm_cute.config import P_TILE, WARP
from replayssm_cute.kernels.primitives import CUTLASS_TYPE, load_words, store_words
from replayssm_cute.problem import Problem


@dataclass(frozen=True, slots=True)
class FloorConfig:
    """Shape of the floor kernel: heads that a CTA streams, all in flight at once."""

    heads_per_cta: int = 1

    def shared_bytes(self, problem: Problem) -> int:
        """Bytes of shared memory a CTA asks for."""
        head = problem.head_dim * problem.d_state * problem.state_bytes
        return self.heads_per_cta * head + 8 * self.heads_per_cta


def configs(problem: Problem, shared_per_block: int) -> list[FloorConfig]:
    """The shapes to try; the fastest is the floor."""
    found = [FloorConfig(n) for n in (1, 2, 3, 4) if problem.heads % n == 0]
    return [c for c in found if c.shared_bytes(problem) <= shared_per_block]


class FloorKernel:
    """Streams whole heads; one barrier a head, one warp's lane asks for all of it."""

    def __init__(self, problem: Problem, config: FloorConfig) -> None:
        self.problem = problem
        self.config = config
        self.warps = problem.head_dim // P_TILE
        self.columns = 128 // problem.state_bytes  # of N in a 128-byte row of the box
        self.blocks = problem.d_state // self.columns
        self.head_bytes = problem.head_dim * problem.d_state * problem.state_bytes

    def box_layout(self) -> Any:
        """Shared memory as the box arrives: (column, row, block, head), no swizzle."""
        p = self.problem
        return cute.make_layout(
            (self.columns, p.head_dim, self.blocks, self.config.heads_per_cta),
            stride=(1, self.columns, self.columns * p.head_dim, p.head_dim * p.d_state),
        )

    @cute.jit
    def __call__(self, state: cute.Tensor, pnat: cute.Tensor, slots: cute.Tensor, stream) -> None:
        p = self.problem
        tiled = cute.make_tensor(
            state.iterator,
            cute.make_layout(
                (self.columns, p.head_dim, self.blocks, p.heads, state.shape[0]),
                stride=(1, state.stride[2], self.columns, state.stride[1], state.stride[0]),
            ),
        )
        atom, tma_state = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            tiled,
            cute.select(self.box_layout(), mode=[0, 1, 2]),
            (self.columns, p.head_dim, self.blocks),
        )
        self.kernel(atom, tma_state, state, pnat, slots).launch(
            grid=[slots.shape[0] * (p.heads // self.config.heads_per_cta), 1, 1],
            block=[self.warps * WARP, 1, 1],
            stream=stream,
        )

    @cute.kernel
    def kernel(
        self, atom: cute.CopyAtom, tma_state: cute.Tensor, state: cute.Tensor, pnat: cute.Tensor, slots: cute.Tensor
    ) -> None:
        p, heads = self.problem, self.config.heads_per_cta
        per_row = p.heads // heads
        bid = cute.arch.block_idx()[0]
        row, head0 = bid // per_row, bid % per_row * heads
        thread = cute.arch.thread_idx()[0]
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        slot = Int64(slots[row])
        raw = SmemAllocator().allocate(self.config.shared_bytes(p), byte_alignment=1024)
        barriers = cute.recast_ptr(raw + heads * self.head_bytes, dtype=Int64)
        boxes = cute.make_tensor(cute.recast_ptr(raw, dtype=CUTLASS_TYPE[p.state_dtype]), self.box_layout())
        tiles = cute.local_tile(tma_state, (self.columns, p.head_dim, self.blocks), (None, None, None, None, None))
        to_shared, from_global = cpasync.tma_partition(
            atom, 0, cute.make_layout(1), cute.group_modes(boxes, 0, 3), cute.group_modes(tiles, 0, 3)
        )
        if thread == 0:
            for i in cutlass.range_constexpr(heads):
                cute.arch.mbarrier_init(barriers + i, 1)
            cute.arch.mbarrier_init_fence()
            for i in cutlass.range_constexpr(heads):
                cute.arch.mbarrier_arrive_and_expect_tx(barriers + i, self.head_bytes)
        cute.arch.sync_threads()
        if warp == 0:
            for i in cutlass.range_constexpr(heads):
                cute.copy(
                    atom,
                    from_global[None, 0, 0, 0, head0 + i, Int32(slot)],
                    to_shared[None, i],
                    tma_bar_ptr=barriers + i,
                )
        flush = Boolean(ring.flushes(Int32(pnat[slot]), p.tokens, p.window))
        for i in cutlass.range_constexpr(heads):
            cute.arch.mbarrier_wait(barriers + i, 0)
            if flush:
                self.write_back(state, raw + i * self.head_bytes, slot, head0 + i, thread)

    @cute.jit
    def write_back(self, state, box, slot, head, thread) -> None:
        """A head's box to where it came from, 16 bytes a thread; eight threads a 128-byte row."""
        p = self.problem
        chunk = 16 // p.state_bytes
        rows = self.blocks * p.head_dim
        for k in cutlass.range(0, rows * 8, self.warps * WARP, unroll=4):
            piece = k + thread
            box_row, column = piece // 8, piece % 8 * chunk
            block, position = box_row // p.head_dim, box_row % p.head_dim
            words = load_words(box + cute.assume(piece * 16, divby=16), 4)
            target = state[slot, head, position, None].iterator + cute.assume(
                block * self.columns + column, divby=chunk
            )
            store_words(target, words)


def compile_floor(problem: Problem, config: FloorConfig, arch: str) -> Callable[..., None]:
    """Compile for `arch`; the result takes (state, prev_num_accepted_tokens, state_batch_indices) as torch tensors."""
    p = problem
    aligned = cute.sym_int64(divisibility=16 // p.state_bytes)
    slots = cute.sym_int64()
    fake = cute.runtime.make_fake_tensor
    arguments = [
        fake(
            CUTLASS_TYPE[p.state_dtype],
            (slots, p.heads, p.head_dim, p.d_state),
            (aligned, p.head_dim * p.d_state, p.d_state, 1),
            assumed_align=16,
        ),
        fake(CUTLASS_TYPE["i32"], (slots,), (cute.sym_int64(),), assumed_align=4),
        fake(CUTLASS_TYPE[p.index_dtype or "i32"], (cute.sym_int(),), (1,), assumed_align=4),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    ]
    compiled: Callable[..., None] = cute.compile(
        FloorKernel(problem, config), *arguments, options=f"--enable-tvm-ffi --gpu-arch {arch}"
    )
    return compiled
