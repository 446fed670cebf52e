"""Instructions that data-centre Blackwell has: tensor memory, MMAs on shared memory, cluster launch control, fences."""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.cutlass_dsl import T, dsl_user_op

from ..primitives import _asm_memory


@dsl_user_op
def allocate(to: Int32, columns: int, *, loc: Any = None, ip: Any = None) -> None:
    """Allocate columns of tensor memory, by a whole warp; their address is left in shared memory at `to`.

    The warp gives up its right to allocate again, so that the CTAs behind it may.
    """
    operands = [Int32(to).ir_value(loc=loc, ip=ip), Int32(columns).ir_value(loc=loc, ip=ip)]
    _asm_memory(
        None,
        operands,
        "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [$0], $1; "
        "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
        "r,r",
        loc,
        ip,
    )


@dsl_user_op
def release(base: Int32, columns: int, *, loc: Any = None, ip: Any = None) -> None:
    """Free what `allocate` gave, by the same warp."""
    operands = [Int32(base).ir_value(loc=loc, ip=ip), Int32(columns).ir_value(loc=loc, ip=ip)]
    _asm_memory(None, operands, "tcgen05.dealloc.cta_group::1.sync.aligned.b32 $0, $1;", "r,r", loc, ip)


@dsl_user_op
def multiply(
    kind: str, to: Int32, a: Int64, b: Int64, shape: int, adds: bool, *, loc: Any = None, ip: Any = None
) -> None:
    """Start D = A·B (`adds`: D += A·B) on matrices in shared memory, by one thread; D is in tensor memory.

    `kind` is "tf32" or "f16" (also for bf16), a and b are shared-memory descriptors, `shape` the instruction's.
    """
    operands = [
        Int32(to).ir_value(loc=loc, ip=ip),
        Int64(a).ir_value(loc=loc, ip=ip),
        Int64(b).ir_value(loc=loc, ip=ip),
        Int32(shape).ir_value(loc=loc, ip=ip),
        Int32(int(adds)).ir_value(loc=loc, ip=ip),
    ]
    text = (
        f"{{ .reg .pred adds; setp.ne.b32 adds, $4, 0; tcgen05.mma.cta_group::1.kind::{kind} [$0], $1, $2, $3, adds; }}"
    )
    _asm_memory(None, operands, text, "r,l,l,r,r", loc, ip)


@dsl_user_op
def commit(barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Let the barrier at a shared-memory address count one arrival once this thread's MMAs are done."""
    text = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [$0];"
    _asm_memory(None, [Int32(barrier).ir_value(loc=loc, ip=ip)], text, "r", loc, ip)


@dsl_user_op
def load_accumulators(addresses: Any, *, loc: Any = None, ip: Any = None) -> list[tuple[Float32, ...]]:
    """Read 16 lanes x 8 columns of tensor memory at each address, by a whole warp, and wait for them.

    The fragment is that of an m16n8 MMA's accumulators: lane (g, t) = (l // 4, l % 4) gets columns 2t and 2t + 1 of
    lane g, then of lane g + 8. The wait is part of the same piece of PTX, so that nothing is used before it.
    """
    count = len(addresses)
    text = ""
    for i in range(count):
        registers = ", ".join(f"${4 * i + e}" for e in range(4))
        text += f"tcgen05.ld.sync.aligned.16x256b.x1.b32 {{{registers}}}, [${4 * count + i}]; "
    result = _asm_memory(
        llvm.StructType.get_literal([T.f32()] * (4 * count)),
        [Int32(address).ir_value(loc=loc, ip=ip) for address in addresses],
        text + "tcgen05.wait::ld.sync.aligned;",
        ",".join(["=&f"] * (4 * count) + ["r"] * count),  # outputs are written while addresses are still needed
        loc,
        ip,
    )
    values = [Float32(llvm.extractvalue(T.f32(), result, [i], loc=loc, ip=ip)) for i in range(4 * count)]
    return [tuple(values[4 * i : 4 * i + 4]) for i in range(count)]


@dsl_user_op
def ask_for_work(answer: Int32, barrier: Int32, *, loc: Any = None, ip: Any = None) -> None:
    """Ask the hardware, by one thread, for a CTA of the grid that has not started: it will not start any more.

    The answer's 16 bytes come to a shared-memory address and are counted by the barrier there. Whoever has seen that
    there was none must not ask again.
    """
    operands = [Int32(answer).ir_value(loc=loc, ip=ip), Int32(barrier).ir_value(loc=loc, ip=ip)]
    text = "clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [$0], [$1];"
    _asm_memory(None, operands, text, "r,r", loc, ip)


@dsl_user_op
def given_work(answer: Int32, *, loc: Any = None, ip: Any = None) -> Int32:
    """The number of the CTA that an answer gives away, -1 if none was left; by any threads."""
    text = (
        "{ .reg .b128 answer; .reg .pred given; ld.shared.b128 answer, [$1]; mov.b32 $0, -1; "
        "clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 given, answer; "
        "@given clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 $0, answer; }"
    )
    return Int32(_asm_memory(T.i32(), [Int32(answer).ir_value(loc=loc, ip=ip)], text, "=r,r", loc, ip))


def _nullary(text: str) -> Any:
    @dsl_user_op
    def instruction(*, loc: Any = None, ip: Any = None) -> None:
        _asm_memory(None, [], text, "", loc, ip)

    return instruction


fence_before_sync = _nullary("tcgen05.fence::before_thread_sync;")
fence_after_sync = _nullary("tcgen05.fence::after_thread_sync;")
fence_writes = _nullary("fence.proxy.async.shared::cta;")
"""Shared memory that this thread wrote may be read by MMAs after the next barrier."""
