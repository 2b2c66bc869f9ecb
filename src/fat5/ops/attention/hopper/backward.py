"""The backward kernel: dK and dV of 128 keys a tile, dQ by additions in global memory, the table's share of dS.

One pass over the scores. With ONE_PASS off it leaves dQ out, for the deterministic form: `query_gradient.py` then
computes it without additions in memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fat5.ops.attention.hopper.interface import (
    await_previous,
    copy_async,
    reinterpret,
    release_next,
    tma_add,
    tma_store,
)
from fat5.ops.attention.hopper.tile import (
    accumulator,
    add_bias,
    barriers,
    first_query_tile,
    load_tile,
    next_tile,
    shared_layout,
    store_tile,
    table_ends,
)


@gluon.jit
def own_copy(x, zero, KEEP: gl.constexpr):
    """Return x OR a zero that the compiler can't see.

    ptxas 12.8 overwrites A operands of wgmma in registers that a loop doesn't change: hand it a copy it can't fold
    away.
    """
    if KEEP:
        x = gl.inline_asm_elementwise(
            "or.b32 $0, $1, $2;", "=r,r,r", [x, zero.to(gl.int16)], dtype=x.dtype, is_pure=False, pack=2
        )
    return x


@gluon.jit
def kept(x):
    """Return x, as a value with a use that Triton sees.

    Triton 3.6 drops a value that a loop carries and whose only use is the bound of a loop inside: every turn then has
    the first one's.
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def selectors(K: gl.constexpr, E: gl.constexpr):
    """Make three tiles [8, K]: zeros; ones in row 0; ones in row 1.

    As B operands they add a tile of dS into no column, column 0 or column 1 of an accumulator: the far sums of the
    table, for which additions in registers would spill.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    made = gl.allocate_shared_memory(E, [3, 8, K], gl.NVMMASharedLayout(128, 16, rank=2))
    row = gl.arange(0, 8, layout=gl.SliceLayout(1, L))[:, None]
    column = gl.arange(0, K, layout=gl.SliceLayout(0, L))[None, :]
    for x in gl.static_range(3):
        made.index(x).store(gl.where(row + column * 0 + 1 == x, 1.0, 0.0).to(E))
    fence_async_shared()
    return made


@gluon.jit
def key_producer(
    loads, NB: gl.constexpr, NKV: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr,
    ONE_PASS: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Load a tile of keys and values, then every tile of queries and output gradients that sees one of them."""
    (
        q_desc, k_desc, half_desc, v_desc, do_desc, sq, so, sk, halves, sv, s_lse, s_delta, LSE, Delta, kv_full,
        kv_empty, q_full, o_full, l_full, q_empty, work,
    ) = loads  # fmt: skip
    lanes = gl.arange(0, BM, layout=gl.BlockedLayout([BM // 32], [32], [1], [0]))
    HALVES: gl.constexpr = ONE_PASS and D == 64
    pitch = work[7]
    release_next()
    if RAGGED:
        await_previous()
    loaded = 0
    done = 0
    for turn in range(work[8]):
        there, head, first, qy, qx, ky, kx, queries, keys, shift, rows, slot = next_tile(
            turn, work, 128, CAUSAL, RAGGED, True
        )
        if there:
            kv = done % NKV
            full = kv_full.index(kv)
            mbarrier.wait(kv_empty.index(kv), ((done // NKV) & 1) ^ 1)
            mbarrier.expect(full, 128 * D * (6 if HALVES else 4))
            for c in gl.static_range(2):
                x = kx + first + c * 64
                load_tile(k_desc, ky, head, x, 0, full, sk.index(kv * 2 + c), RAGGED)
                load_tile(v_desc, ky, head, x, 0, full, sv.index(kv * 2 + c), RAGGED)
                if HALVES:  # K in two column halves, the B operands of dQ: half of a 128-byte row can't be sliced off
                    load_tile(half_desc, ky, head, x, 0, full, halves.index(kv * 4 + c), RAGGED)
                    load_tile(half_desc, ky, head, x, 32, full, halves.index(kv * 4 + 2 + c), RAGGED)
            for i in range(first_query_tile(first, shift, BM, CAUSAL), (queries + BM - 1) // BM):
                stage = loaded % NB
                mbarrier.wait(q_empty.index(stage), ((loaded // NB) & 1) ^ 1)
                mbarrier.expect(q_full.index(stage), BM * D * 2)
                load_tile(q_desc, qy, head, qx + i * BM, 0, q_full.index(stage), sq.index(stage), RAGGED)
                mbarrier.expect(o_full.index(stage), BM * D * 2)
                load_tile(do_desc, qy, head, qx + i * BM, 0, o_full.index(stage), so.index(stage), RAGGED)
                if loaded == 0:
                    await_previous()
                place = gl.multiple_of(rows + head * pitch + i * BM, 64)
                copy_async(s_lse.index(stage), LSE + place + lanes)
                copy_async(s_delta.index(stage), Delta + place + lanes)
                async_copy.mbarrier_arrive(l_full.index(stage), increment_count=False)
                loaded += 1
            done += 1


@gluon.jit
def key_consumer(
    shared, c: gl.constexpr, NB: gl.constexpr, NKV: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, R: gl.constexpr,
    CAUSAL: gl.constexpr, BIAS: gl.constexpr, TABLE_GRAD: gl.constexpr, ONE_PASS: gl.constexpr,
    ADD_NEAR: gl.constexpr, GROUP: gl.constexpr, PHASED: gl.constexpr, RAGGED: gl.constexpr, TAILS: gl.constexpr,
):  # fmt: skip
    """64 keys against the queries, transposed: S^T = K Q^T, so P^T and dS^T stay in registers as operands."""
    (
        dk_desc, dv_desc, sum_desc, near_desc, chosen, sq, so, sk, halves, sv, s_ds, s_dq, s_lse, s_delta, kv_full,
        kv_empty, q_full, o_full, l_full, q_empty, ds_full, Table, Far, factor, scale, span, work, slots,
    ) = shared  # fmt: skip
    E: gl.constexpr = dk_desc.dtype
    SL: gl.constexpr = accumulator(BM)
    OL: gl.constexpr = accumulator(D)
    QL: gl.constexpr = accumulator(D // 2)
    FL: gl.constexpr = accumulator(8)
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    AL: gl.constexpr = gl.DotOperandLayout(0, SL, 2)
    CL: gl.constexpr = gl.SliceLayout(0, SL)
    KEEP: gl.constexpr = D == 64  # K and V in registers
    REACH: gl.constexpr = R + BM + 64
    NEAR: gl.constexpr = (R + 62) // 64  # near tiles have |key block - query block| <= NEAR
    FIRST: gl.constexpr = NEAR + 1 if PHASED else NEAR
    OFFSETS: gl.constexpr = FIRST + 1 if CAUSAL else FIRST + NEAR + 1
    zeros = gl.zeros([64, BM], gl.float32, layout=SL)
    dq_zeros = gl.zeros([BM, D // 2], gl.float32, layout=QL)
    H = work[3]
    pitch = work[7]
    zero = gl.minimum(pitch, 0)
    width = 2 * span
    if R >= 0:
        width = 2 * REACH
    s_dq_own = s_dq.index(c)
    await_previous()
    used = 0
    done = 0
    owed = 0  # the last tile's results may still be read from its slices of K and V
    upcoming = next_tile(0, work, 128, CAUSAL, RAGGED, True)
    ends = table_ends(Table, upcoming[1], factor, width, BIAS)
    for turn in range(work[8]):
        there, head, first, qy, qx, ky, kx, queries, keys, shift, rows, slot = upcoming
        if there:
            query_tiles = (kept(queries) + BM - 1) // BM
            n0 = first + c * 64
            origin = n0 - shift  # a query's row at distance 0 from the first key
            table = Table + head * width
            right, left = ends  # the backward's table is reversed
            kv = done % NKV
            sk_own = sk.index(kv * 2 + c)
            sv_own = sv.index(kv * 2 + c)
            if D == 128:
                k_half0 = sk.index(0).slice(c * 64, 64, dim=1)
                k_half1 = sk.index(1).slice(c * 64, 64, dim=1)
            else:
                k_half0 = halves.index(kv * 4 + c * 2)
                k_half1 = halves.index(kv * 4 + c * 2 + 1)
            dk = gl.zeros([64, D], gl.float32, layout=OL)
            dv = gl.zeros([64, D], gl.float32, layout=OL)
            far = gl.zeros([64, 8], gl.float32, layout=FL)
            if not KEEP:  # the last tile's results have left the buffers of both consumers
                tma.store_wait(0)
                mbarrier.arrive(ds_full.index(2), count=1)
                mbarrier.wait(ds_full.index(2), 0)
            mbarrier.wait(kv_full.index(kv), (done // NKV) & 1)
            if KEEP:
                k = sk_own.load(AL)
                v = sv_own.load(AL)
            else:
                k = sk_own
                v = sv_own
            for i in range(first_query_tile(first, shift, BM, CAUSAL), query_tiles):
                stage = used % NB
                phase = (used // NB) & 1
                m0 = i * BM
                corner = origin - m0  # distance between the tile's first key and its first query
                mbarrier.wait(q_full.index(stage), phase)
                s = warpgroup_mma(
                    own_copy(k, zero, KEEP), sq.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                mbarrier.wait(o_full.index(stage), phase)
                dp = warpgroup_mma(
                    own_copy(v, zero, KEEP), so.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
                )
                s = warpgroup_mma_wait(1, deps=[s])
                near = (corner + 63 > -R) & (corner - BM + 1 < R)
                constant = 0.0
                if BIAS:
                    if R < 0:
                        s = add_bias(s, table, span - corner, BM, SL)
                    elif near:
                        s = add_bias(s, table, REACH - corner, BM, SL)
                    else:
                        constant = gl.where(corner < 0, left, right)
                if TAILS:
                    if n0 + 64 > keys:
                        key = gl.arange(0, 64, layout=gl.SliceLayout(1, SL))
                        s = gl.where((key < keys - n0)[:, None], s, -float("inf"))
                mbarrier.wait(l_full.index(stage), phase)
                p = gl.exp2(s * factor - (s_lse.index(stage).load(CL) - constant)[None, :])
                dv = warpgroup_mma(gl.convert_layout(p.to(E), PL), so.index(stage), dv, is_async=True)
                dp = warpgroup_mma_wait(1, deps=[dp])
                ds = (p * (dp - s_delta.index(stage).load(CL)[None, :])).to(E)
                ds_operand = gl.convert_layout(ds, PL)
                buffer = (used & 1) * 2
                if ONE_PASS:
                    s_ds.index(buffer + c).store(ds)
                    fence_async_shared()
                    mbarrier.arrive(ds_full.index(used & 1), count=1)
                dk = warpgroup_mma(ds_operand, sq.index(stage), dk, is_async=True)
                if TABLE_GRAD:
                    side = gl.where(near, 0, gl.where(corner < 0, 1, 2))
                    far = warpgroup_mma(ds_operand, chosen.index(side).permute((1, 0)), far, is_async=True)
                if ONE_PASS:
                    # Both halves of dS are there, and both consumers are done with the other buffer: they waited for
                    # its dQ.
                    mbarrier.wait(ds_full.index(used & 1), (used >> 1) & 1)
                    dq = warpgroup_mma(
                        s_ds.index(buffer).permute((1, 0)), k_half0, dq_zeros, use_acc=False, is_async=True
                    )
                    dq = warpgroup_mma(s_ds.index(buffer + 1).permute((1, 0)), k_half1, dq, is_async=True)
                    if TABLE_GRAD:
                        dk, dv, far = warpgroup_mma_wait(2, deps=[dk, dv, far])
                    else:
                        dk, dv = warpgroup_mma_wait(2, deps=[dk, dv])
                    tma.store_wait(0)  # the last turn's stores have read shared memory; the arrival is a barrier too
                    mbarrier.arrive(q_empty.index(stage), count=1)
                    if KEEP:
                        if owed > 0:
                            mbarrier.arrive(kv_empty.index((done + 1) % NKV), count=1)
                            owed = 0
                    dq = warpgroup_mma_wait(0, deps=[dq])
                    s_dq_own.store(dq)
                    fence_async_shared()
                    tma_add(sum_desc, [rows + head * pitch + m0, c * (D // 2)], s_dq_own)
                else:
                    if TABLE_GRAD:
                        dk, dv, far = warpgroup_mma_wait(0, deps=[dk, dv, far])
                    else:
                        dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
                    tma.store_wait(0)
                    mbarrier.arrive(q_empty.index(stage), count=1)
                    if KEEP:
                        if owed > 0:
                            mbarrier.arrive(kv_empty.index((done + 1) % NKV), count=1)
                            owed = 0
                if TABLE_GRAD:
                    offset = corner >> 6  # floor: blocks stand apart by whole blocks, or PHASED by a fraction more
                    if near & (offset <= (0 if CAUSAL else NEAR)):
                        if not ONE_PASS:
                            s_ds.index(buffer + c).store(ds)
                            fence_async_shared()
                        if ADD_NEAR:
                            place = ((slot // GROUP * H + head) * OFFSETS + offset + FIRST) * 64
                            tma_add(near_desc, [place, 0], s_ds.index(buffer + c))
                        else:
                            place = (((slot * 2 + c) * H + head) * OFFSETS + offset + FIRST) * 64
                            tma_store(near_desc, [place, 0], s_ds.index(buffer + c))
                used += 1
            if TABLE_GRAD:
                sums = gl.sum(far, 0)
                column = gl.arange(0, 8, layout=sums.type.layout)
                gl.store(Far + (column * (2 * slots) + slot * 2 + c) * H + head, sums, mask=column < 2)
            if KEEP:
                if owed > 0:  # no query saw this tile
                    tma.store_wait(0)
                    mbarrier.arrive(kv_empty.index((done + 1) % NKV), count=1)
                # Its slices of K and V, which it has in registers, hold a consumer's results until they have left.
                dk_own = sk_own
                dv_own = sv_own
            else:
                # K and V are free for the next tile; what held dQ and dS holds the results.
                mbarrier.arrive(kv_empty.index(kv), count=1)
                tma.store_wait(0)
                mbarrier.arrive(ds_full.index(2), count=1)
                mbarrier.wait(ds_full.index(2), 1)
                dk_own = reinterpret(s_dq, E, [2, 64, D], shared_layout(64, D, E)).index(c)
                dv_own = reinterpret(s_ds, E, [2, 64, D], shared_layout(64, D, E)).index(c)
            dk_own.store((dk * scale).to(E))
            dv_own.store(dv.to(E))
            fence_async_shared()
            store_tile(dk_desc, ky, head, kx + n0, dk_own, RAGGED)
            store_tile(dv_desc, ky, head, kx + n0, dv_own, RAGGED)
            owed = 1
            upcoming = next_tile(turn + 1, work, 128, CAUSAL, RAGGED, True)
            ends = table_ends(Table, upcoming[1], factor, width, BIAS)
            done += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "blocks", "H", "M", "N", "shift", "pitch", "turns", "chunk", "slots", "span"])
def backward_kernel(
    q_desc, k_desc, half_desc, v_desc, do_desc, dk_desc, dv_desc, sum_desc, near_desc, Table, Far, LSE, Delta, factor,
    scale, span, Records, tiles, blocks, H, M, N, shift, pitch, slots, turns, chunk,
    NB: gl.constexpr, NKV: gl.constexpr, BM: gl.constexpr, D: gl.constexpr, R: gl.constexpr, CAUSAL: gl.constexpr,
    BIAS: gl.constexpr, TABLE_GRAD: gl.constexpr, ONE_PASS: gl.constexpr, ADD_NEAR: gl.constexpr,
    GROUP: gl.constexpr, PHASED: gl.constexpr, RAGGED: gl.constexpr, TAILS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent: each program takes its tiles, 128 keys of one head over all their queries, from the schedule.

    LSE and Delta are padded to whole tiles of BM queries, LSE with infinity: a query past the end then has weight 0.
    `scale` is the factor of dK, `factor` that times log2(e).
    """
    E: gl.constexpr = q_desc.dtype
    VECTOR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    sq = gl.allocate_shared_memory(E, [NB, BM, D], shared_layout(BM, D, E))
    so = gl.allocate_shared_memory(E, [NB, BM, D], shared_layout(BM, D, E))
    sk = gl.allocate_shared_memory(E, [NKV * 2, 64, D], shared_layout(64, D, E))
    sv = gl.allocate_shared_memory(E, [NKV * 2, 64, D], shared_layout(64, D, E))
    halves = gl.allocate_shared_memory(E, [NKV * 4, 64 if D == 64 else 8, D // 2], shared_layout(64, D // 2, E))
    s_ds = gl.allocate_shared_memory(E, [4, 64, BM], shared_layout(64, BM, E))
    s_dq = gl.allocate_shared_memory(
        gl.float32, [2, BM if ONE_PASS or D == 128 else 8, D // 2], shared_layout(BM, D // 2, gl.float32)
    )
    s_lse = gl.allocate_shared_memory(gl.float32, [NB, BM], VECTOR)
    s_delta = gl.allocate_shared_memory(gl.float32, [NB, BM], VECTOR)
    chosen = selectors(BM, E)
    kv_full, kv_empty = barriers(NKV, 1), barriers(NKV, 2)
    q_full, o_full, l_full, q_empty = barriers(NB, 1), barriers(NB, 1), barriers(NB, 32), barriers(NB, 2)
    ds_full = barriers(3, 2)
    work = (Records, tiles, blocks, H, M, N, shift, pitch, turns, chunk)
    loads = (
        q_desc, k_desc, half_desc, v_desc, do_desc, sq, so, sk, halves, sv, s_lse, s_delta, LSE, Delta, kv_full,
        kv_empty, q_full, o_full, l_full, q_empty, work,
    )  # fmt: skip
    shared = (
        dk_desc, dv_desc, sum_desc, near_desc, chosen, sq, so, sk, halves, sv, s_ds, s_dq, s_lse, s_delta, kv_full,
        kv_empty, q_full, o_full, l_full, q_empty, ds_full, Table, Far, factor, scale, span, work, slots,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (
                key_consumer,
                (
                    shared, 0, NB, NKV, BM, D, R, CAUSAL, BIAS, TABLE_GRAD, ONE_PASS, ADD_NEAR, GROUP, PHASED, RAGGED,
                    TAILS,
                ),
            ),
            (
                key_consumer,
                (
                    shared, 1, NB, NKV, BM, D, R, CAUSAL, BIAS, TABLE_GRAD, ONE_PASS, ADD_NEAR, GROUP, PHASED, RAGGED,
                    TAILS,
                ),
            ),
            (key_producer, (loads, NB, NKV, BM, D, CAUSAL, ONE_PASS, RAGGED)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
