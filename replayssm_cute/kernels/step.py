"""The portable step kernel: checkpointing SSU on warp-level MMAs and TMA, one source for every target.

A CTA takes `heads_per_cta` heads of one group of one batch row, one after the other. Warp w owns 16 rows of P
of each of them: it loads its own tile of the state by TMA behind its own barrier, so no CTA-wide wait stands
between memory and arithmetic. With S the checkpoint, c the sums of A·dt (design, section 1), per token t:

    y_t = exp(C_tot + n_t) (S C_t) + sum_j G_old[j, t] x_j + sum_s G_new[s, t] x_s
    G_old[j, t] = exp(C_tot - c_j + n_t) dt_j (B_j·C_t),  G_new[s, t] = [s <= t] exp(n_t - n_s) dt_s (B_s·C_t) + [s = t] D

B·C is shared by all heads of the CTA; it is split over the warps by columns of N and summed through shared
memory, behind the CTA's only barrier.

Fragments. An MMA's K order and row order are free as long as both operands agree. Each lane (g = lane / 4,
t = lane % 4) reads the state in 16-byte chunks of rows 2g and 2g + 1 (MMA rows g and g + 8): one chunk feeds
two MMAs, the two rows of a lane become one 4-byte output, and the chunks {0, 1, 4, 5}[t] (then those + 2) are
free of bank conflicts under the 128-byte swizzle and fill whole 32-byte sectors when a flush writes them.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.cute.nvgpu import cpasync
from cutlass.memory import SmemAllocator

from ..config import P_TILE, TileConfig, shared_layout
from ..problem import Problem
from ..ring import flushes
from .primitives import (
    CUTLASS_TYPE,
    as_float,
    bits,
    high_half,
    load_words,
    low_half,
    mma_16bit,
    mma_tf32,
    pack,
    store_words,
    to_tf32,
)

WARP = 32


class StepKernel:
    """One step kernel, specialized on a problem and a tile config."""

    def __init__(self, problem: Problem, config: TileConfig) -> None:
        self.problem = problem
        self.config = config
        self.shared = shared_layout(problem, config)
        self.warps = config.warps(problem)
        self.state_kind = problem.state_dtype
        self.io_kind = problem.io_dtype
        self.chunk = 16 // problem.state_bytes  # state elements in 16 bytes
        self.block = 8 * self.chunk  # columns of N in one 128-byte shared-memory row
        self.blocks = problem.d_state // self.block
        self.token_tiles = -(-problem.tokens // 8)  # n-tiles of the outputs, k-steps of the new tokens
        self.old_steps = -(-problem.window // 8)  # k-steps of the ring
        self.tokens_pad = 8 * self.token_tiles
        self.window_pad = 8 * self.old_steps
        self.units = problem.d_state // 32  # column units of B·C
        # bf16 times bf16 and f16 times f16 need no conversion; everything else goes through tf32, exactly
        # for 2-byte values and with 11 bits for f32.
        self.native = self.state_kind == self.io_kind

    # ------------------------------------------------------------------------------------------------
    # Host side: layouts and launch
    # ------------------------------------------------------------------------------------------------

    def staged_layout(self) -> cute.ComposedLayout:
        """Shared-memory layout of the state: (column, row, block, warp, stage), 128-byte swizzle."""
        tile = P_TILE * self.problem.d_state
        outer = cute.make_layout(
            (self.block, P_TILE, self.blocks, self.warps, self.config.stages),
            stride=(1, self.block, P_TILE * self.block, tile, tile * self.warps),
        )
        return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, outer)

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
        pad_slot_id: Int64,
        stream,
    ):
        p, config = self.problem, self.config
        box = (self.block, P_TILE, self.blocks)
        tiled_state = cute.make_tensor(
            state.iterator,
            cute.make_layout(
                (self.block, p.head_dim, self.blocks, p.heads, state.shape[0]),
                stride=(1, state.stride[2], self.block, state.stride[1], state.stride[0]),
            ),
        )
        atom, tma_state = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), tiled_state, cute.select(self.staged_layout(), mode=[0, 1, 2]), box
        )
        self.kernel(
            atom, tma_state, state, x_cache, b_cache, dt_cache, ring_start, pnat,
            x, dt, a, b, c, out, d, z, dt_bias, slots, pad_slot_id,
        ).launch(
            grid=[x.shape[0] * (p.heads // config.heads_per_cta * config.head_split), 1, 1],
            block=[self.warps * WARP, 1, 1],
            stream=stream,
            use_pdl=p.pdl,
        )  # fmt: skip

    # ------------------------------------------------------------------------------------------------
    # Device side
    # ------------------------------------------------------------------------------------------------

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        tma_state: cute.Tensor,
        state: cute.Tensor,
        x_cache: cute.Tensor,
        b_cache: cute.Tensor,
        dt_cache: cute.Tensor,
        ring_start: cute.Tensor,
        pnat_of: cute.Tensor,
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
        pad_slot_id: Int64,
    ):
        p, config, shared = self.problem, self.config, self.shared
        per_row = p.heads // config.heads_per_cta * config.head_split
        bid = cute.arch.block_idx()[0]
        row = bid // per_row
        within = bid % per_row
        split = within % config.head_split
        head0 = (within // config.head_split) * config.heads_per_cta
        group = head0 // p.heads_per_group
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        g, t = lane // 4, lane % 4
        tile = split * self.warps + warp  # which 16 rows of P
        p0 = tile * P_TILE

        slot = Int64(row)
        if cutlass.const_expr(slots is not None):
            slot = Int64(slots[row])

        smem = SmemAllocator()
        raw = smem.allocate(shared.total, byte_alignment=1024)
        barriers = cute.recast_ptr(raw + shared.barriers, dtype=Int64)
        products = cute.make_tensor(cute.recast_ptr(raw + shared.products, dtype=Float32), cute.make_layout(1 << 20))
        vectors = cute.make_tensor(cute.recast_ptr(raw + shared.vectors, dtype=Float32), cute.make_layout(1 << 20))
        staged = self.staged_layout()
        shared_state = cute.make_tensor(
            cute.recast_ptr(raw, staged.inner, dtype=CUTLASS_TYPE[self.state_kind]), staged.outer
        )
        tiles = cute.local_tile(tma_state, (self.block, P_TILE, self.blocks), (None, None, None, None, None))
        to_shared, from_global = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(shared_state, 0, 3),
            cute.group_modes(tiles, 0, 3),
        )
        warp_barriers = barriers + warp * config.stages

        if slot == pad_slot_id or slot < 0:
            self.zero_padding(out, row, head0, p0, g, t)
        else:
            # ---- the state is on its way before anything else is known ----
            if lane == 0:
                for stage in cutlass.range_constexpr(config.stages):
                    cute.arch.mbarrier_init(warp_barriers + stage, 1)
                cute.arch.mbarrier_init_fence()
                for stage in cutlass.range_constexpr(config.stages):
                    cute.arch.mbarrier_arrive_and_expect_tx(warp_barriers + stage, shared.warp_bytes)
            cute.arch.sync_warp()
            slot32 = Int32(slot)
            for stage in cutlass.range_constexpr(config.stages):
                cute.copy(
                    atom,
                    from_global[None, 0, tile, 0, head0 + stage, slot32],
                    to_shared[None, warp, stage],
                    tma_bar_ptr=warp_barriers + stage,
                )
            cute.arch.sync_warp()  # a fence for the scheduler: later loads must not overtake the state's

            start = Int32(ring_start[slot])
            pnat = Int32(pnat_of[slot])
            if cutlass.const_expr(p.pdl):
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
            flush = Boolean(flushes(pnat, p.tokens, p.window))

            # ---- once per CTA: B·C, decay vectors, appended rows of B and dt ----
            self.partial_products(b_cache, b, c, products, row, slot, group, start, pnat, warp, g, t)
            for i in cutlass.range(warp, config.heads_per_cta, self.warps, unroll=1):
                self.decay_vectors(dt_cache, dt, a, dt_bias, vectors, i, row, slot, head0 + i, start, pnat, split, lane)
            if head0 % p.heads_per_group == 0 and split == 0:
                self.append_b(b_cache, b, row, slot, group, start, pnat)

            c_words = self.load_c(c, row, group, g, t)
            xs = self.load_x(x_cache, x, row, slot, head0, p0, start, pnat, g, t)
            x_words = cute.make_rmem_tensor(cute.make_layout(len(xs)), Int32)
            for i in cutlass.range_constexpr(len(xs)):
                x_words[i] = xs[i]
            cute.arch.sync_warp()
            cute.arch.sync_threads()
            dots = self.sum_products(products, g, t)

            for i in cutlass.range(config.heads_per_cta, unroll=1):
                head = head0 + i
                stage = i % config.stages
                phase = (i // config.stages) % 2
                current = [x_words[k] for k in range(len(xs))]
                if cutlass.const_expr(config.heads_per_cta > 1):
                    following = head0 + cutlass.min(i + 1, config.heads_per_cta - 1)
                    coming = self.load_x(x_cache, x, row, slot, following, p0, start, pnat, g, t)
                    for k in cutlass.range_constexpr(len(xs)):
                        x_words[k] = coming[k]
                gates = self.load_gates(z, row, head, p0, g, t)
                skip = Float32(0.0)
                if cutlass.const_expr(d is not None):
                    skip = Float32(d[head, 0])

                cute.arch.mbarrier_wait(warp_barriers + stage, phase)
                mine = cute.assume(stage * shared.stage_bytes + warp * shared.warp_bytes, divby=1024)
                words = cute.recast_ptr(raw + mine, dtype=Int32)
                acc = self.read_out(words, c_words, g, t)
                if flush:
                    self.flush_tile(
                        state, b_cache, vectors, words, current, i, slot, group, head, p0, start, pnat, g, t
                    )
                if cutlass.const_expr(config.stages < config.heads_per_cta):
                    cute.arch.sync_warp()
                    if i + config.stages < config.heads_per_cta:
                        if lane == 0:
                            cute.arch.mbarrier_arrive_and_expect_tx(warp_barriers + stage, shared.warp_bytes)
                        cute.copy(
                            atom,
                            from_global[None, 0, tile, 0, head + config.stages, slot32],
                            to_shared[None, warp, stage],
                            tma_bar_ptr=warp_barriers + stage,
                        )
                acc = self.add_inputs(acc, current, dots, vectors, i, skip, pnat, g, t)
                self.epilogue(out, acc, gates, row, head, p0, g, t)
                self.append_x(x_cache, current, slot, head, p0, start, pnat, g, t)

    # ---- addressing ----------------------------------------------------------------------------------

    def ring_row(self, start: Int32, offset: Int32) -> Int32:
        """(start + offset) mod R for start < R and 0 <= offset < R."""
        rows = self.problem.ring_rows
        index = start + offset
        return Int32(cutlass.select_(index >= rows, index - rows, index))

    def live_row(self, start: Int32, pnat: Int32, j: Int32) -> Int32:
        """Ring row of live row j; dead ones give the last live row again: no extra traffic, a valid address."""
        return self.ring_row(start, cutlass.max(cutlass.min(j, pnat - 1), 0))

    def token(self, s: Int32) -> Int32:
        """Token s, clamped to the last: padding lanes repeat it."""
        return Int32(cutlass.min(s, self.problem.tokens - 1))

    # ---- phases --------------------------------------------------------------------------------------

    @cute.jit
    def zero_padding(self, out, row, head0, p0, g, t):
        """A padding row's output is zero."""
        for i in cutlass.range_constexpr(self.config.heads_per_cta):
            for k in cutlass.range_constexpr(-(-self.problem.tokens // 4)):
                s = t + 4 * k
                if s < self.problem.tokens:
                    store_words(out[row, s, head0 + i, None].iterator + pair_column(p0, g), [Int32(0)])

    @cute.jit
    def partial_products(self, b_cache, b, c, products, row, slot, group, start, pnat, warp, g, t):
        """This warp's column units of B·C: (ring rows, then new tokens) x tokens, one partial sum a warp."""
        shared = self.shared
        if warp < shared.units:
            old = [[Float32(0.0)] * 4 for _ in range(self.token_tiles)]
            new = [[Float32(0.0)] * 4 for _ in range(self.token_tiles)]
            for k in cutlass.range_constexpr(self.units // shared.units):
                column = cute.assume((warp + k * shared.units) * 32 + 8 * t, divby=8)
                c_rows = [
                    load_words(c[row, self.token(g + 8 * n), group, None].iterator + column, 4)
                    for n in range(self.token_tiles)
                ]
                new_rows = [
                    load_words(b[row, self.token(g + 8 * m), group, None].iterator + column, 4)
                    for m in range(self.token_tiles)
                ]
                old_rows = [
                    load_words(
                        b_cache[slot, group, self.live_row(start, pnat, g + 8 * m), None].iterator + column, 4
                    )
                    for m in range(self.old_steps)
                ]
                none = [Int32(0)] * 4
                for n in cutlass.range_constexpr(self.token_tiles):
                    for q in cutlass.range_constexpr(2):
                        b_frag = (c_rows[n][2 * q], c_rows[n][2 * q + 1])
                        for sums, rows in ((new, new_rows), (old, old_rows)):
                            first, second = rows[0], rows[1] if len(rows) > 1 else none
                            a_frag = (first[2 * q], second[2 * q], first[2 * q + 1], second[2 * q + 1])
                            sums[n] = mma_16bit(self.io_kind, sums[n], a_frag, b_frag)
            base = warp * shared.product_floats
            for n in cutlass.range_constexpr(self.token_tiles):
                for sums, first_row, tiles in ((old, 0, self.old_steps), (new, self.window_pad, self.token_tiles)):
                    for m in cutlass.range_constexpr(tiles):
                        at = base + (first_row + 8 * m + g) * shared.product_stride + 8 * n + 2 * t
                        products[at] = sums[n][2 * m]
                        products[at + 1] = sums[n][2 * m + 1]

    def sum_products(self, products, g, t):
        """B·C as B-fragments: per k-step (ring, then new tokens) and n-tile the values of rows t and t + 4."""
        shared = self.shared
        fragments = []
        for step in range(self.old_steps + self.token_tiles):
            for n in range(self.token_tiles):
                pair = []
                for half in range(2):
                    at = (8 * step + 4 * half + t) * shared.product_stride + 8 * n + g
                    value = products[at]
                    for unit in range(1, shared.units):
                        value = value + products[at + unit * shared.product_floats]
                    pair.append(value)
                fragments.append(pair)
        return fragments

    @cute.jit
    def decay_vectors(self, dt_cache, dt, a, dt_bias, vectors, i, row, slot, head, start, pnat, split, lane):
        """One head's decays, by one warp: lanes 0..15 the ring (newest first), lanes 16..31 the new tokens.

        Both halves are then prefix scans, so no decay is a difference of two long sums. Appends dt to the ring.
        """
        p = self.problem
        place = lane % 16
        s = place
        j = 15 - place
        is_new = lane >= 16
        old_dt = Float32(dt_cache[slot, head, self.live_row(start, pnat, j)])
        new_dt = Float32(dt[row, self.token(s), head, 0])
        rate = Float32(a[head, 0, 0])
        if cutlass.const_expr(dt_bias is not None):
            new_dt = new_dt + Float32(dt_bias[head, 0])
        if cutlass.const_expr(p.dt_softplus):
            # linear above 20, where log1p(exp(v)) equals v in f32: exp must not overflow
            bounded = cutlass.min(new_dt, Float32(20.0))
            new_dt = Float32(cutlass.select_(new_dt > 20.0, new_dt, cute.math.log1p(cute.math.exp(bounded))))
        old_dt = Float32(cutlass.select_(j < pnat, old_dt, Float32(0.0)))
        step = Float32(cutlass.select_(is_new, new_dt, old_dt))
        step = Float32(cutlass.select_(is_new & (s >= p.tokens), Float32(0.0), step))
        log_decay = rate * step
        inclusive = log_decay
        for k in cutlass.range_constexpr(4):
            distance = 1 << k
            other = cute.arch.shuffle_sync_up(inclusive, distance, mask_and_clamp=0x1000)
            inclusive = inclusive + Float32(cutlass.select_(place >= distance, other, Float32(0.0)))
        exclusive = cute.arch.shuffle_sync_up(inclusive, 1, mask_and_clamp=0x1000)
        exclusive = Float32(cutlass.select_(place == 0, Float32(0.0), exclusive))
        base = i * self.shared.vector_floats
        decayed = cute.math.exp(Float32(cutlass.select_(is_new, inclusive, exclusive)))
        if is_new:
            if s < self.tokens_pad:
                at = base + self.window_pad + s
                vectors[at] = decayed
                vectors[at + self.tokens_pad] = step
                vectors[at + 2 * self.tokens_pad] = log_decay
            if (s < p.tokens) & (split == 0):
                dt_cache[slot, head, self.ring_row(start, pnat + s)] = step
        else:
            if j < self.window_pad:
                vectors[base + j] = decayed * step
            if j == 0:
                vectors[base + self.window_pad + 3 * self.tokens_pad] = cute.math.exp(inclusive)

    @cute.jit
    def append_b(self, b_cache, b, row, slot, group, start, pnat):
        """Append the new tokens' B, 16 bytes a thread."""
        pieces = self.problem.d_state // 8
        thread = cute.arch.thread_idx()[0]
        for k in cutlass.range_constexpr(-(-self.problem.tokens * pieces // (self.warps * WARP))):
            piece = thread + k * self.warps * WARP
            if piece < self.problem.tokens * pieces:
                s, column = piece // pieces, cute.assume(piece % pieces * 8, divby=8)
                values = load_words(b[row, s, group, None].iterator + column, 4)
                store_words(b_cache[slot, group, self.ring_row(start, pnat + s), None].iterator + column, values)

    def load_c(self, c, row, group, g, t):
        """C as B-fragments of the read-out: per block, chunk and n-tile this lane's chunk of columns as words."""
        fragments = []
        first = (t & 1) | ((t & 2) << 1)
        for n in range(self.token_tiles):
            pointer = c[row, self.token(g + 8 * n), group, None].iterator
            for block in range(self.blocks):
                for which in range(2):
                    column = block * self.block + (first + 2 * which) * self.chunk
                    fragments.append(load_words(pointer + cute.assume(column, divby=self.chunk), self.chunk // 2))
        return fragments

    def load_x(self, x_cache, x, row, slot, head, p0, start, pnat, g, t):
        """x of ring rows and new tokens as words of rows 2g and 2g + 1: per k-step rows t and t + 4."""
        words = []
        column = pair_column(p0, g)
        for k in range(2 * self.old_steps):
            j = t + 4 * k
            word = load_words(x_cache[slot, head, self.live_row(start, pnat, j), None].iterator + column, 1)[0]
            words.append(Int32(cutlass.select_(j < pnat, word, Int32(0))))
        for k in range(2 * self.token_tiles):
            s = t + 4 * k
            word = load_words(x[row, self.token(s), head, None].iterator + column, 1)[0]
            words.append(Int32(cutlass.select_(s < self.problem.tokens, word, Int32(0))))
        return words

    def load_gates(self, z, row, head, p0, g, t):
        """z of this lane's outputs: per n-tile tokens 2t and 2t + 1, as words."""
        if z is None:
            return []
        return [
            load_words(z[row, self.token(2 * t + e + 8 * n), head, None].iterator + pair_column(p0, g), 1)[0]
            for n in range(self.token_tiles)
            for e in range(2)
        ]

    def state_words(self, words, block, which, g, t):
        """One 16-byte chunk of each of this lane's two state rows, as words (undoing the 128-byte swizzle)."""
        first = (t & 1) | ((t & 2) << 1)
        even = 2 * g
        chunk = (first ^ (even & 7)) ^ (2 * which)
        base = block * (P_TILE * 32)
        low = load_words(words + cute.assume(base + even * 32 + chunk * 4, divby=4), 4)
        high = load_words(words + cute.assume(base + even * 32 + 32 + (chunk ^ 1) * 4, divby=4), 4)
        return low, high

    def read_out(self, words, c_words, g, t):
        """S·C for this warp's 16 rows: per n-tile (rows 2g, 2g + 1) x (tokens 2t, 2t + 1)."""
        acc = [[Float32(0.0)] * 4 for _ in range(self.token_tiles)]
        per_tile = 2 * self.blocks
        for block in range(self.blocks):
            for which in range(2):
                low, high = self.state_words(words, block, which, g, t)
                for half in range(2):
                    l0, l1, h0, h1 = low[2 * half], low[2 * half + 1], high[2 * half], high[2 * half + 1]
                    for n in range(self.token_tiles):
                        c_chunk = c_words[n * per_tile + 2 * block + which]
                        if self.native:
                            acc[n] = mma_16bit(
                                self.io_kind, acc[n], (l0, h0, l1, h1), (c_chunk[2 * half], c_chunk[2 * half + 1])
                            )
                        elif self.state_kind == "f32":
                            a_frag = [to_tf32(as_float(v)) for v in (l0, h0, l1, h1)]
                            word = c_chunk[half]
                            b_frag = (bits(low_half(self.io_kind, word)), bits(high_half(self.io_kind, word)))
                            acc[n] = mma_tf32(acc[n], a_frag, b_frag)
                        else:
                            for low_word, high_word, word in ((l0, h0, c_chunk[2 * half]), (l1, h1, c_chunk[2 * half + 1])):
                                a_frag = [
                                    bits(side(self.state_kind, v))
                                    for side in (low_half, high_half)
                                    for v in (low_word, high_word)
                                ]
                                b_frag = (bits(low_half(self.io_kind, word)), bits(high_half(self.io_kind, word)))
                                acc[n] = mma_tf32(acc[n], a_frag, b_frag)
        return acc

    def x_fragment(self, x_words, step):
        """x of k-step `step` as an A-fragment: (row 2g, 2g + 1) x (k = t, t + 4), exact in tf32."""
        first, second = x_words[2 * step], x_words[2 * step + 1]
        return [side(self.io_kind, word) for word in (first, second) for side in (low_half, high_half)]

    def add_inputs(self, acc, x_words, dots, vectors, i, skip, pnat, g, t):
        """Scale the read-out by its decay and add the ring's and the new tokens' contributions."""
        p = self.problem
        base = i * self.shared.vector_floats
        at_token = base + self.window_pad
        total = vectors[at_token + 3 * self.tokens_pad]
        result = []
        for n in range(self.token_tiles):
            mine = 8 * n + g  # the token of this lane's B-fragment
            columns = [total * vectors[at_token + 8 * n + 2 * t + e] for e in range(2)]
            tile = [acc[n][0] * columns[0], acc[n][1] * columns[1], acc[n][2] * columns[0], acc[n][3] * columns[1]]
            token_decay = vectors[at_token + mine]
            for step in range(self.old_steps):
                b_frag = []
                for half in range(2):
                    j = 8 * step + 4 * half + t
                    weight = dots[step * self.token_tiles + n][half] * (vectors[base + j] * token_decay)
                    # a dead row's product may be NaN: select, never multiply
                    b_frag.append(to_tf32(Float32(cutlass.select_(j < pnat, weight, Float32(0.0)))))
                a_frag = [bits(v) for v in self.x_fragment(x_words, step)]
                tile = mma_tf32(tile, a_frag, b_frag)
            for step in range(n + 1):  # later tokens do not reach this tile
                b_frag = []
                for half in range(2):
                    s = 8 * step + 4 * half + t
                    between = Float32(0.0)
                    for later in range(8 * step + 1, min(8 * n + 8, p.tokens)):
                        inside = (s < later) & (later <= mine)
                        between = between + Float32(
                            cutlass.select_(inside, vectors[at_token + 2 * self.tokens_pad + later], Float32(0.0))
                        )
                    dot = dots[(self.old_steps + step) * self.token_tiles + n][half]
                    weight = cute.math.exp(between) * (vectors[at_token + self.tokens_pad + s] * dot)
                    weight = Float32(cutlass.select_(s == mine, weight + skip, weight))
                    b_frag.append(to_tf32(Float32(cutlass.select_(s <= mine, weight, Float32(0.0)))))
                a_frag = [bits(v) for v in self.x_fragment(x_words, self.old_steps + step)]
                tile = mma_tf32(tile, a_frag, b_frag)
            result.append(tile)
        return result

    @cute.jit
    def epilogue(self, out, acc, gates, row, head, p0, g, t):
        """Gate, round and store: two rows of P a word."""
        for n in cutlass.range_constexpr(self.token_tiles):
            for e in cutlass.range_constexpr(2):
                low, high = acc[n][e], acc[n][2 + e]
                if cutlass.const_expr(len(gates) > 0):
                    word = gates[2 * n + e]
                    low = low * silu(low_half(self.io_kind, word))
                    high = high * silu(high_half(self.io_kind, word))
                token = 2 * t + e + 8 * n
                if token < self.problem.tokens:
                    store_words(out[row, token, head, None].iterator + pair_column(p0, g), [pack(self.io_kind, low, high)])

    @cute.jit
    def append_x(self, x_cache, x_words, slot, head, p0, start, pnat, g, t):
        """Append the new tokens' x, bit for bit."""
        for k in cutlass.range_constexpr(2 * self.token_tiles):
            s = t + 4 * k
            if s < self.problem.tokens:
                pointer = x_cache[slot, head, self.ring_row(start, pnat + s), None].iterator + pair_column(p0, g)
                store_words(pointer, [x_words[2 * self.old_steps + k]])

    @cute.jit
    def flush_tile(self, state, b_cache, vectors, words, x_words, i, slot, group, head, p0, start, pnat, g, t):
        """Write the logical state back: S' = exp(C_tot) S + sum_j (w_j x_j) (outer) B_j, in tf32 high and low terms.

        A lane's two chunks of a row are the two columns of an accumulator pair: element e of chunk
        {0, 1, 4, 5}[t] in column 2t, of the chunk 2 further in column 2t + 1.
        """
        base = i * self.shared.vector_floats
        total = vectors[base + self.window_pad + 3 * self.tokens_pad]
        high_terms, low_terms = [], []
        for step in cutlass.range_constexpr(self.old_steps):
            values = self.x_fragment(x_words, step)
            weights = [vectors[base + 8 * step + t], vectors[base + 8 * step + 4 + t]]
            products = [v * weights[k // 2] for k, v in enumerate(values)]
            high = [to_tf32(v) for v in products]
            high_terms.append(high)
            low_terms.append([to_tf32(v - as_float(h)) for v, h in zip(products, high)])
        first = (t & 1) | ((t & 2) << 1)
        pair = g // 2
        b_chunk = ((pair & 1) | ((pair & 2) << 1)) + 2 * (g % 2)  # the chunk of B that accumulator column g means
        b_rows = [
            b_cache[slot, group, self.live_row(start, pnat, t + 4 * k), None].iterator
            for k in range(2 * self.old_steps)
        ]
        low_row = state[slot, head, p0 + 2 * g, None].iterator
        high_row = state[slot, head, p0 + 2 * g + 1, None].iterator
        for block in cutlass.range(self.blocks, unroll=1):
            b_words = [
                load_words(pointer + cute.assume(block * self.block + b_chunk * self.chunk, divby=self.chunk), self.chunk // 2)
                for pointer in b_rows
            ]
            chunks = [self.state_words(words, block, which, g, t) for which in range(2)]
            rows = [[self.unpack(chunks[which][side]) for which in range(2)] for side in range(2)]
            for e in cutlass.range_constexpr(self.chunk):
                tile = [rows[side][which][e] * total for side in range(2) for which in range(2)]
                for step in cutlass.range_constexpr(self.old_steps):
                    side = low_half if e % 2 == 0 else high_half
                    b_frag = [bits(side(self.io_kind, b_words[2 * step + half][e // 2])) for half in range(2)]
                    tile = mma_tf32(tile, low_terms[step], b_frag)
                    tile = mma_tf32(tile, high_terms[step], b_frag)
                for k in cutlass.range_constexpr(4):
                    rows[k // 2][k % 2][e] = tile[k]
            for which in cutlass.range_constexpr(2):
                column = cute.assume(block * self.block + (first + 2 * which) * self.chunk, divby=self.chunk)
                store_words(low_row + column, self.repack(rows[0][which]))
                store_words(high_row + column, self.repack(rows[1][which]))

    def unpack(self, words):
        """State elements of a 16-byte chunk, as f32."""
        if self.state_kind == "f32":
            return [as_float(w) for w in words]
        return [side(self.state_kind, w) for w in words for side in (low_half, high_half)]

    def repack(self, values):
        """f32 values as the words of a 16-byte chunk of state, rounded to nearest."""
        if self.state_kind == "f32":
            return [bits(v) for v in values]
        return [pack(self.state_kind, values[k], values[k + 1]) for k in range(0, len(values), 2)]


def pair_column(p0: Int32, g: Int32) -> Int32:
    """Column of the two rows of P that a lane owns: even, so that a word access is aligned."""
    return cute.assume(p0 + 2 * g, divby=2)


def silu(v: Float32) -> Float32:
    """v * sigmoid(v)."""
    return v / (Float32(1.0) + cute.math.exp(-v))


# ----------------------------------------------------------------------------------------------------
# Compilation without tensors
# ----------------------------------------------------------------------------------------------------


def _fake(kind: str, shape: tuple, divisor_bytes: int, zero_strides: tuple[int, ...] = (), unit_last: bool = True):
    """A tensor of run-time strides; dynamic strides are multiples of `divisor_bytes`."""
    dtype = CUTLASS_TYPE[kind]
    size = dtype.width // 8
    strides = []
    for dim in range(len(shape)):
        if dim in zero_strides:
            strides.append(0)
        elif unit_last and dim == len(shape) - 1:
            strides.append(1)
        else:
            strides.append(cute.sym_int64(divisibility=max(1, divisor_bytes // size)))
    return cute.runtime.make_fake_tensor(dtype, shape, tuple(strides), assumed_align=max(divisor_bytes, size))


def compile_step(problem: Problem, config: TileConfig, arch: str):
    """Compile the step kernel for `arch` ("sm_90a", …); needs no GPU and no tensors.

    Returns:
        A callable that takes torch tensors in the order of `checkpointing_ssu` (state … out, D, z, dt_bias,
        state_batch_indices, pad_slot_id) and launches on torch's current stream.
    """
    p = problem
    slots, batch = cute.sym_int64(), cute.sym_int()
    tokens, rows = p.tokens, p.ring_rows
    io = p.io_dtype
    args = [
        _fake(p.state_dtype, (slots, p.heads, p.head_dim, p.d_state), 16),
        _fake(io, (slots, p.heads, rows, p.head_dim), 16),
        _fake(io, (slots, p.groups, rows, p.d_state), 16),
        _fake("f32", (slots, p.heads, rows), 4),
        _fake("i32", (slots,), 4, unit_last=False),
        _fake("i32", (slots,), 4, unit_last=False),
        _fake(io, (batch, tokens, p.heads, p.head_dim), 16),
        _fake(p.dt_dtype, (batch, tokens, p.heads, p.head_dim), 1, zero_strides=(3,)),
        _fake(p.a_dtype, (p.heads, p.head_dim, p.d_state), 1, zero_strides=(1, 2)),
        _fake(io, (batch, tokens, p.groups, p.d_state), 16),
        _fake(io, (batch, tokens, p.groups, p.d_state), 16),
        _fake(io, (batch, tokens, p.heads, p.head_dim), 16),
        None if p.d_dtype is None else _fake(p.d_dtype, (p.heads, p.head_dim), 1, zero_strides=(1,)),
        _fake(io, (batch, tokens, p.heads, p.head_dim), 16) if p.has_z else None,
        None if p.dt_bias_dtype is None else _fake(p.dt_bias_dtype, (p.heads, p.head_dim), 1, zero_strides=(1,)),
        None if p.index_dtype is None else _fake(p.index_dtype, (batch,), 1, unit_last=False),
        Int64(0),
        cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True),
    ]
    return cute.compile(StepKernel(problem, config), *args, options=f"--enable-tvm-ffi --gpu-arch {arch}")
