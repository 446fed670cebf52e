"""The cursors of a batch of slots in one launch: reset, commit, and the deferred commit that begins a step."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from ...ring import flushes
from . import index
from .index import Vector

THREADS = 128


class CursorKernel:
    """One thread a row. T, W and the form are run-time values: a single kernel serves every cache and operation."""

    @cute.jit
    def __call__(
        self,
        ring_start: cute.Tensor,
        pnat: cute.Tensor,
        last_tokens: cute.Tensor,
        slots: Int64,
        slots_step: Int32,
        slots_wide: Int32,
        counts: Int64,
        counts_step: Int32,
        counts_wide: Int32,
        lens: Int64,
        lens_step: Int32,
        lens_wide: Int32,
        batch: Int32,
        tokens: Int32,
        window: Int32,
        pad_slot_id: Int64,
        ragged: Int32,
        deferred: Int32,
        opened: Int32,
        emptied: Int32,
        stream,
    ):
        self.kernel(
            ring_start, pnat, last_tokens, Vector(slots, slots_step, slots_wide),
            Vector(counts, counts_step, counts_wide), Vector(lens, lens_step, lens_wide), batch, tokens, window,
            pad_slot_id, ragged, deferred, opened, emptied,
        ).launch(
            grid=[(batch + THREADS - 1) // THREADS, 1, 1], block=[THREADS, 1, 1], stream=stream
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self,
        ring_start: cute.Tensor,
        pnat_of: cute.Tensor,
        last_tokens: cute.Tensor,
        slots: Vector,
        counts: Vector,
        lens: Vector,
        batch: Int32,
        tokens: Int32,
        window: Int32,
        pad_slot_id: Int64,
        ragged: Int32,
        deferred: Int32,
        opened: Int32,
        emptied: Int32,
    ):
        row = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if row < batch:
            # All three are asked for at once: only the cursors wait for the slot.
            slot = index.read(slots, row)
            count = index.read(counts, row)
            length = index.clamped(index.read(lens, row), tokens)
            given = Int32(cutlass.select_(ragged != 0, length, tokens))
            if index.is_live(slot, pad_slot_id):
                start, pnat, open_tokens = ring_start[slot], pnat_of[slot], last_tokens[slot]
                ran = Int32(cutlass.select_(deferred != 0, open_tokens, given))
                accepted = index.clamped(count, ran)
                flushed = Boolean(flushes(pnat, ran, window)) & (ran > 0)
                turned = start + pnat
                turned = Int32(cutlass.select_(turned >= window + tokens, turned - (window + tokens), turned))
                kept = Int32(cutlass.select_(flushed, 0, pnat))
                start = Int32(cutlass.select_(flushed, turned, start))
                ring_start[slot] = Int32(cutlass.select_(emptied != 0, 0, start))
                pnat_of[slot] = Int32(cutlass.select_(emptied != 0, 0, kept + accepted))
                last_tokens[slot] = Int32(cutlass.select_(opened != 0, given, 0))


def compile_cursors(arch: str):
    """Compile for `arch`; needs no GPU.

    Returns:
        A callable of `CursorKernel.__call__`'s arguments less the stream. ring_start, pnat and last_tokens are (slots,)
        int32; slots, counts and lens are addresses of `batch` integers each, with step and width as in `index.Vector`.
        A window has T tokens, or with `ragged` those of lens. It is the window that is committed, or with `deferred`
        the one to come, and the open one is committed; `opened` notes it as open. With `emptied` the ring is empty
        afterwards, whatever it held. Vectors that are not asked for are read all the same, and must be there.
    """

    def cursor():
        return cute.runtime.make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=4)

    numbers = [Int64(0), Int32(0), Int32(0)] * 3 + [Int32(0)] * 3 + [Int64(0)] + [Int32(0)] * 4
    return cute.compile(
        CursorKernel(), cursor(), cursor(), cursor(), *numbers,
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True), options=f"--enable-tvm-ffi --gpu-arch {arch}",
    )  # fmt: skip
