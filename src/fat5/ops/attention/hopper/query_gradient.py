"""The query kernel: dQ of 128 queries a tile without additions in memory, for the deterministic backward."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from fat5.ops.attention.hopper.interface import await_previous, group_barrier, release_next
from fat5.ops.attention.hopper.tile import (
    accumulator,
    add_bias,
    barriers,
    key_tiles,
    load_tile,
    next_tile,
    shared_layout,
    store_tile,
    table_ends,
)


@gluon.jit
def query_producer(
    loads, NB: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr
):
    """Load a tile of queries and output gradients, then every tile of keys and values that they see."""
    (
        q_desc, k_desc, v_desc, do_desc, sq, so, sk, sv, q_full, q_empty, k_full, v_full, k_empty, v_empty, work,
    ) = loads  # fmt: skip
    release_next()
    if RAGGED:
        await_previous()
    loaded = 0
    done = 0
    for turn in range(work[8]):
        there, head, first, qy, qx, ky, kx, queries, keys, shift, rows, slot = next_tile(
            turn, work, 128, CAUSAL, RAGGED, False
        )
        if there:
            for i in range(key_tiles(first, keys, shift, 128, BN, CAUSAL)):
                stage = loaded % NB
                phase = ((loaded // NB) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), BN * D * 2)
                load_tile(k_desc, ky, head, kx + i * BN, 0, k_full.index(stage), sk.index(stage), RAGGED)
                if i == 0:
                    mbarrier.wait(q_empty, (done & 1) ^ 1)
                    mbarrier.expect(q_full, 128 * D * 4)
                    for c in gl.static_range(2):
                        x = qx + first + c * 64
                        load_tile(q_desc, qy, head, x, 0, q_full, sq.index(c), RAGGED)
                        load_tile(do_desc, qy, head, x, 0, q_full, so.index(c), RAGGED)
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), BN * D * 2)
                load_tile(v_desc, ky, head, kx + i * BN, 0, v_full.index(stage), sv.index(stage), RAGGED)
                loaded += 1
            done += 1


@gluon.jit
def query_consumer(
    shared, c: gl.constexpr, NB: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, R: gl.constexpr, CAUSAL: gl.constexpr,
    BIAS: gl.constexpr, RAGGED: gl.constexpr, TAILS: gl.constexpr,
):  # fmt: skip
    """64 queries against the keys; dS stays in registers as an operand of dQ."""
    (
        dq_desc, sq, so, sk, sv, q_full, q_empty, k_full, v_full, k_empty, v_empty, Table, LSE, Delta, factor, scale,
        span, work,
    ) = shared  # fmt: skip
    E: gl.constexpr = dq_desc.dtype
    SL: gl.constexpr = accumulator(BN)
    OL: gl.constexpr = accumulator(D)
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    REACH: gl.constexpr = R + BN + 64
    zeros = gl.zeros([64, BN], gl.float32, layout=SL)
    pitch = work[7]
    width = 2 * span
    if R >= 0:
        width = 2 * REACH
    sq_own = sq.index(c)
    so_own = so.index(c)
    await_previous()
    used = 0
    done = 0
    upcoming = next_tile(0, work, 128, CAUSAL, RAGGED, False)
    ends = table_ends(Table, upcoming[1], factor, width, BIAS)
    for turn in range(work[8]):
        there, head, first, qy, qx, ky, kx, queries, keys, shift, rows, slot = upcoming
        if there:
            q0 = first + c * 64
            table = Table + head * width
            left, right = ends
            lanes = gl.arange(0, 64, layout=gl.SliceLayout(1, SL))
            place = rows + head * pitch + q0 + lanes
            lse = gl.load(LSE + place, mask=q0 + lanes < queries, other=float("inf"))
            delta = gl.load(Delta + place, mask=q0 + lanes < queries, other=0.0)
            dq = gl.zeros([64, D], gl.float32, layout=OL)
            mbarrier.wait(q_full, done & 1)
            for i in range(key_tiles(first, keys, shift, 128, BN, CAUSAL)):
                stage = used % NB
                phase = (used // NB) & 1
                n0 = i * BN
                corner = n0 - q0 - shift
                mbarrier.wait(k_full.index(stage), phase)
                s = warpgroup_mma(sq_own, sk.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(stage), phase)
                dp = warpgroup_mma(so_own, sv.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(1, deps=[s])
                constant = 0.0
                if BIAS:
                    if R < 0:
                        s = add_bias(s, table, corner + span, BN, SL)
                    elif (corner + BN - 1 > -R) & (corner - 63 < R):
                        s = add_bias(s, table, corner + REACH, BN, SL)
                    else:
                        constant = gl.where(corner < 0, left, right)
                if TAILS:
                    if n0 + BN > keys:
                        columns = gl.arange(0, BN, layout=gl.SliceLayout(0, SL))
                        s = gl.where((columns < keys - n0)[None, :], s, -float("inf"))
                p = gl.exp2(s * factor - (lse - constant)[:, None])
                dp = warpgroup_mma_wait(0, deps=[dp])
                mbarrier.arrive(v_empty.index(stage), count=1)
                ds = p * (dp - delta[:, None])
                dq = warpgroup_mma(gl.convert_layout(ds.to(E), PL), sk.index(stage), dq, is_async=True)
                dq = warpgroup_mma_wait(0, deps=[dq])
                mbarrier.arrive(k_empty.index(stage), count=1)
                used += 1
            # Rows of no document have no keys; whatever their output's gradient holds, times no weight, is 0.
            dq = gl.where(keys > 0, dq, gl.zeros([64, D], gl.float32, layout=OL))
            sq_own.store((dq * scale).to(E))
            fence_async_shared()
            if q0 < queries:
                store_tile(dq_desc, qy, head, qx + q0, sq_own, RAGGED)
            upcoming = next_tile(turn + 1, work, 128, CAUSAL, RAGGED, False)
            ends = table_ends(Table, upcoming[1], factor, width, BIAS)
            tma.store_wait(0)
            group_barrier()
            mbarrier.arrive(q_empty, count=1)
            done += 1


@gluon.jit(do_not_specialize=["tiles", "blocks", "H", "M", "N", "shift", "pitch", "turns", "chunk", "span"])
def query_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, Table, LSE, Delta, factor, scale, span, Records, tiles, blocks, H, M,
    N, shift, pitch, turns, chunk,
    NB: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, R: gl.constexpr, CAUSAL: gl.constexpr, BIAS: gl.constexpr,
    RAGGED: gl.constexpr, TAILS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent: each program takes its tiles, 128 queries of one head over all their keys, from the schedule."""
    E: gl.constexpr = q_desc.dtype
    sq = gl.allocate_shared_memory(E, [2, 64, D], shared_layout(64, D, E))
    so = gl.allocate_shared_memory(E, [2, 64, D], shared_layout(64, D, E))
    sk = gl.allocate_shared_memory(E, [NB, BN, D], shared_layout(BN, D, E))
    sv = gl.allocate_shared_memory(E, [NB, BN, D], shared_layout(BN, D, E))
    q_full, q_empty = barriers(1, 1).index(0), barriers(1, 2).index(0)
    k_full, v_full, k_empty, v_empty = barriers(NB, 1), barriers(NB, 1), barriers(NB, 2), barriers(NB, 2)
    work = (Records, tiles, blocks, H, M, N, shift, pitch, turns, chunk)
    loads = (
        q_desc, k_desc, v_desc, do_desc, sq, so, sk, sv, q_full, q_empty, k_full, v_full, k_empty, v_empty, work,
    )  # fmt: skip
    shared = (
        dq_desc, sq, so, sk, sv, q_full, q_empty, k_full, v_full, k_empty, v_empty, Table, LSE, Delta, factor, scale,
        span, work,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (query_consumer, (shared, 0, NB, BN, D, R, CAUSAL, BIAS, RAGGED, TAILS)),
            (query_consumer, (shared, 1, NB, BN, D, R, CAUSAL, BIAS, RAGGED, TAILS)),
            (query_producer, (loads, NB, BN, D, CAUSAL, RAGGED)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
