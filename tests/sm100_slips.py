"""Slips put into the Blackwell step kernel, which its simulation must not let pass.

Each is (module, its text, what it becomes, what is said about it).
"""

from __future__ import annotations

RAGGED_SLIPS = {
    "states refilled as if every row were as long as the longest": (
        "entry.new.length, self.spec.problem.window",
        "self.spec.problem.tokens, self.spec.problem.window",
    ),
    "what belongs to no row is left as it was": ("self.tokens.zero_tail(", "(lambda *_: None)("),
}
SLIPS = {
    "half the stride of a descriptor": ("operands", "ROW_GROUP = 8 * 128", "ROW_GROUP = 4 * 128", "error|read"),
    "no swizzle in a descriptor": ("operands", "| 2 << 61", "| 0 << 61", "swizzle"),
    "a descriptor without its version": ("operands", "| 1 << 46 ", "", "version"),
    "K that goes on in the wrong block": (
        "operands",
        "step * K_BYTES // 128 *",
        "step * K_BYTES // 64 *",
        "on its way|outside",
    ),
    "K twice the same": ("operands", "+ step * K_BYTES % 128", "", "error"),
    "C without its swizzle": ("operands", "remainder(chunk, 8) ^ remainder(token, 8)", "remainder(chunk, 8)", "error"),
    "C of f16 for bf16": ("operands", '"bf16": 1, "f16": 0', '"bf16": 0, "f16": 1', "error"),
    "N of 8": ("operands", "columns // 8 << 17", "1 << 17", "\\(128, 8\\)"),
    "lanes of another warp": ("step", "(warp * spec.warp_rows << 16)", "((3 - warp) * spec.warp_rows << 16)", "lane"),
    "tiles of a warp exchanged": ("step", "(P_TILE * tile << 16)", "(P_TILE * (1 - tile) << 16)", "error"),
    "tokens of the next tile": ("step", "<< 16) + 8 * n", "<< 16) + 8 * (n + 1)", "not awaited"),
    "sums of the first turn again": ("step", "read_out, base + at * spec.columns", "read_out, base", "error"),
    "one set of sums for all turns": (
        "step",
        "accumulators = base + at * spec.columns",
        "accumulators = base",
        "under way",
    ),
    "MMAs that do not add": ("step", "operands.shape, step > 0", "operands.shape, False", "error"),
    "a first MMA that adds": ("step", "operands.shape, step > 0", "operands.shape, True", "adds to sums"),
    "no wait for the sums": (
        "step",
        "            cute.arch.mbarrier_wait(barriers.done + at, round_)\n            self.take",
        "            self.take",
        "under way|no MMA|not awaited|agents",
    ),
    "no wait for the state": (
        "step",
        "cute.arch.mbarrier_wait(barriers.full + stage, phase)\n"
        "                self.start_read_out(address, base, stage, i)",
        "self.start_read_out(address, base, stage, i)",
        "on its way",
    ),
    "a flush before the MMAs are done": (
        "step",
        "                cute.arch.mbarrier_wait(barriers.done, remainder(before, 2))  # results replace what the MMAs "
        "read\n",
        "",
        "an MMA may read it",
    ),
    "a stage filled while MMAs read it": (
        "step",
        "                            cute.arch.mbarrier_wait(barriers.done + i, 0)\n",
        "                            pass\n",
        "while an MMA may read it",
    ),
    "a stage filled before it was flushed": (
        "step",
        "cute.arch.mbarrier_wait(barriers.empty + stage, phase)",
        "cute.arch.mbarrier_wait(barriers.done + i, 0)",
        "while others may read it|while an MMA|on its way|error",
    ),
    "C without a fence": (
        "step",
        "inputs.c)\n        fence_writes()\n",
        "inputs.c)\n",
        "without a fence",
    ),
    "flushed rows without a fence": (
        "step",
        "                        fence_writes()\n",
        "",
        "over unfenced words",
    ),
    "tensor memory freed before it was read": (
        "step",
        "            cute.arch.mbarrier_wait(barriers.read, 0)\n",
        "",
        "released",
    ),
    "dependents before the allocation": (
        "step",
        "griddepcontrol_wait()\n        inputs =",
        "griddepcontrol_wait()\n            cute.arch.griddepcontrol_launch_dependents()\n        inputs =",
        "allocated when dependents may hold",
    ),
    "no wait for the predecessor": (
        "step",
        "            cute.arch.griddepcontrol_wait()\n        inputs =",
        "            pass\n        inputs =",
        "still be writing",
    ),
    "tensor memory never freed": ("step", "            release(base, tensor.columns)\n", "", "allocated"),
    "tensor memory of padding rows": (
        "step",
        "        if entry.live:\n            for stage in cutlass.range_constexpr(config.stages):\n",
        "        if not entry.live:\n"
        "            allocate(address + tensor.base, 32)\n"
        "        if entry.live:\n"
        "            for stage in cutlass.range_constexpr(config.stages):\n",
        "ended with tensor memory allocated",
    ),
    "an arrival too few": (
        "step",
        "mbarrier_init(barriers.read, spec.warps)",
        "mbarrier_init(barriers.read, spec.warps + 1)",
        "hangs",
    ),
    "an arrival too many": (
        "step",
        "mbarrier_init(barriers.done + turn, 1)",
        "mbarrier_init(barriers.done + turn, 2)",
        "hangs",
    ),
    "bytes too few": (
        "state_copies",
        "expect_tx(full + stage, self.spec.shared.stage_bytes)",
        "expect_tx(full + stage, 4096)",
        "hangs|on its way",
    ),
    "a barrier without the issuer": (
        "step",
        "        if entry.live:\n"
        "            cute.arch.barrier(barrier_id=STAGED, number_of_threads=spec.staging_threads)\n",
        "        if entry.live:\n            cute.arch.sync_warp()\n",
        "no barrier after the write|hangs",
    ),
    "heads exchanged": (
        "step",
        "        first = quotient(place.head0, config.parallel_heads)\n        flush",
        "        first = quotient(place.head0, config.parallel_heads) ^ 1\n        flush",
        "beyond its tensor|state",
    ),
    "a state row's wrong place": (
        "write_back",
        "(thread.warp * spec.warp_rows + tile * P_TILE) * 128",
        "(thread.warp * spec.warp_rows + (1 - tile) * P_TILE) * 128",
        "error|read",
    ),
    "x without its barrier": ("tokens", "exists = position < row.pnat", "exists = position <= row.pnat", "x_cache"),
}
OF_BF16 = {"C of f16 for bf16"}
BEHIND_ANOTHER = {
    "dependents before the allocation",
    "no wait for the predecessor",
    "dependents before the next places' allocation",
}
LONG = {"tokens of the next tile"}


# The same of what launch control adds.
LAUNCH_SLIPS = {
    "an answer before all have the last": (
        "step",
        "mbarrier_init(barriers.taken + answer, spec.warps + 1)",
        "mbarrier_init(barriers.taken + answer, 1)",
        "more arrivals|others may read|hangs",
    ),
    "an answer whoever has the last": (
        "step",
        "            cute.arch.mbarrier_wait(barriers.taken + answer, phase ^ 1)\n",
        "",
        "others may read|more arrivals|hangs",
    ),
    "an answer before the reads of the last are fenced": (
        "step",
        "block = given_work(self.answer(address, answer))\n        fence_writes()",
        "block = given_work(self.answer(address, answer))",
        "another was read without a fence",
    ),
    "an answer that is not awaited": (
        "step",
        "            cute.arch.mbarrier_wait(barriers.known + answer, phase)\n            block = self.take(address",
        "            block = self.take(address",
        "on its way|never written|no barrier after",
    ),
    "an answer of another size": (
        "step",
        "barriers.known + answer, ANSWER_BYTES)",
        "barriers.known + answer, 8)",
        "hangs",
    ),
    "answers in one place": (
        "step",
        "ANSWER_BYTES * answer)",
        "0 * answer)",
        "others may read|without a fence|on its way",
    ),
    "no end to the asking": (
        "step",
        "        while block >= 0:\n            before = self.load_place(tensors, barriers, pipe, block, before)",
        "        while True:\n            before = self.load_place(tensors, barriers, pipe, max(block, 0), before)",
        "asked again after there was none|hangs",
    ),
    "inputs replaced while other warps read them": (
        "step",
        "            cute.arch.barrier(barrier_id=EPILOGUE, number_of_threads=self.spec.threads)\n"
        "        self.tell_read",
        "        self.tell_read",
        "others may read|written over|on its way|error",
    ),
    "a stage emptied by a flush and by its MMAs": (
        "step",
        "if not flush:",
        "if True:",
        "more arrivals|while|written over|hangs",
    ),
    "a stage that nobody empties": ("step", "if not flush:", "if False:", "hangs"),
    "a stage filled whoever flushes it": (
        "step",
        "                cute.arch.mbarrier_wait(barriers.empty + stage, phase ^ 1)\n                self.copies",
        "                self.copies",
        "while|written over|more arrivals",
    ),
    "a stage left before all warps have flushed": (
        "step",
        "        fence_writes()\n        cute.arch.barrier(barrier_id=EPILOGUE, number_of_threads=self.spec.threads)\n",
        "        fence_writes()\n",
        "others may read|written over|unfenced",
    ),
    "a flushed stage left without a fence": (
        "step",
        "        fence_writes()\n        cute.arch.barrier(barrier_id=EPILOGUE",
        "        cute.arch.barrier(barrier_id=EPILOGUE",
        "over unfenced words",
    ),
    "MMAs of the next place before the last one's sums are read": (
        "step",
        "            cute.arch.barrier(barrier_id=STAGED, number_of_threads=spec.staging_threads)\n"
        "            fence_after_sync()\n            for _",
        "            for _",
        "no barrier after the write|hangs|on its way",
    ),
    "phases of the first place for all": (
        "step",
        "Int32(remainder(quotient(before, count), 2))",
        "Int32(0)",
        "hangs|under way|while|awaited",
    ),
    "a CTA that ends before its stages are empty": (
        "step",
        "        self.await_stages(barriers, before)\n",
        "",
        "on its way|ended",
    ),
    "tensor memory freed before the last place is read": (
        "step",
        "            answer, phase = following(answer, phase, ANSWERS)\n"
        "        cute.arch.mbarrier_wait(barriers.read, 0)\n",
        "            answer, phase = following(answer, phase, ANSWERS)\n",
        "released",
    ),
    "barriers that others may not know of": (
        "step",
        "            allocate(address + tensor.base, tensor.columns)\n        cute.arch.sync_threads()\n",
        "            allocate(address + tensor.base, tensor.columns)\n",
        "KeyError|never written|no barrier",
    ),
    "dependents before the next places' allocation": (
        "step",
        "        if thread.warp == spec.issuer:\n            allocate",
        "        cute.arch.griddepcontrol_launch_dependents()\n"
        "        if thread.warp == spec.issuer:\n            allocate",
        "allocated when dependents may hold",
    ),
}
# And of heads of 80 rows.
NARROW_SLIPS = {
    "warps by their hardware numbers": (
        "spec",
        "if self.halves else warp",
        "if False else warp",
        "lane|converged|hangs|D\\(-1",
    ),
    "blocks of 128 rows": (
        "operands",
        "step * K_BYTES // 128 * block_bytes",
        "step * K_BYTES // 128 * 16384",
        "outside",
    ),
    "C dealt to hardware warps": (
        "operands",
        "if self.spec.halves:",
        "if False:",
        "never written|error|outside|written",
    ),
}
