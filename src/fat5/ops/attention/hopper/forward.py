"""The forward kernel: one warp loads, two or three warpgroups of 64 queries each multiply."""

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

from fat5.ops.attention.hopper.forward_steps import (
    HIDDEN,
    apart,
    await_turn,
    await_values,
    first_weights,
    half_step,
    last_product,
    pass_turn,
    softmax_step,
    store_sums,
    whole_tiles,
)
from fat5.ops.attention.hopper.interface import await_previous, group_barrier
from fat5.ops.attention.hopper.tile import (
    accumulator,
    barriers,
    key_tiles,
    load_tile,
    next_tile,
    shared_layout,
    store_tile,
    table_ends,
)


@gluon.jit
def forward_producer(
    loads, NC: gl.constexpr, NQ: gl.constexpr, NB: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
):  # fmt: skip
    """Load queries, keys and values as their buffers fall empty. `loaded` counts tiles of keys, `done` tiles of
    work."""
    q_desc, k_desc, v_desc, sq, sk, sv, q_full, q_empty, k_full, v_full, k_empty, v_empty, work = loads
    if RAGGED:
        await_previous()
    loaded = 0
    done = 0
    for turn in range(work[8]):
        there, head, first, qy, qx, ky, kx, queries, keys, shift, rows, slot = next_tile(
            turn, work, NC * 64, CAUSAL, RAGGED, False
        )
        if there:
            for i in range(key_tiles(first, keys, shift, NC * 64, BN, CAUSAL)):
                stage = loaded % NB
                phase = ((loaded // NB) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), BN * D * 2)
                load_tile(k_desc, ky, head, kx + i * BN, 0, k_full.index(stage), sk.index(stage), RAGGED)
                if i == 0:
                    buffer = done % NQ
                    mbarrier.wait(q_empty.index(buffer), ((done // NQ) & 1) ^ 1)
                    mbarrier.expect(q_full.index(buffer), NC * 64 * D * 2)
                    for c in gl.static_range(NC):
                        target = sq.index(buffer * NC + c)
                        load_tile(q_desc, qy, head, qx + first + c * 64, 0, q_full.index(buffer), target, RAGGED)
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), BN * D * 2)
                load_tile(v_desc, ky, head, kx + i * BN, 0, v_full.index(stage), sv.index(stage), RAGGED)
                loaded += 1
            done += 1


@gluon.jit
def forward_consumer(
    shared, c: gl.constexpr, NC: gl.constexpr, NQ: gl.constexpr, NB: gl.constexpr, BN: gl.constexpr, D: gl.constexpr,
    R: gl.constexpr, CAUSAL: gl.constexpr, BIAS: gl.constexpr, RAGGED: gl.constexpr, TAILS: gl.constexpr,
    AHEAD: gl.constexpr, ALTERNATE: gl.constexpr, HALVES: gl.constexpr,
):  # fmt: skip
    """Attend with 64 queries; the product of the next keys' scores runs beside that of this one's weights.

    AHEAD, the next keys may be the first of the program's next tile, so that none of its products stands alone, and a
    product of weights runs beside the next ones' arithmetic. HALVES, which goes with two consumers that do not begin
    ahead, queries that see none of the second half of their last tile of keys multiply the first half alone. Of causal
    tiles those are mostly the upper queries; so the consumers change places from tile to tile.
    """
    o_desc, sq, sk, sv, so, q_full, q_empty, k_full, v_full, k_empty, v_empty, go, Table, LSE, factor, span, work = (
        shared
    )
    E: gl.constexpr = o_desc.dtype
    SL: gl.constexpr = accumulator(BN)
    OL: gl.constexpr = accumulator(D)
    PL: gl.constexpr = gl.DotOperandLayout(0, OL, 2)
    HL: gl.constexpr = accumulator(BN // 2)
    zeros = gl.zeros([64, BN], gl.float32, layout=SL)
    so_own = so.index(c)
    pitch = work[7]
    zero = gl.minimum(pitch, 0)
    width = 2 * span
    if R >= 0:
        width = 2 * (R + BN + 64)
    await_previous()
    used = 0
    done = 0
    begun = False  # the upcoming tile's first weights are there
    if AHEAD:
        peak = gl.full([64], HIDDEN, gl.float32, layout=gl.SliceLayout(1, SL))
        total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SL))
        p = zeros
    upcoming = next_tile(0, work, NC * 64, CAUSAL, RAGGED, False)
    ends = table_ends(Table, upcoming[1], factor, width, BIAS)
    for turn in range(work[8]):
        there, head, first, qy, qx, ky, kx, queries, keys, shift, rows, slot = upcoming
        if there:
            own = c
            if HALVES:
                own = c ^ (done & 1)
            q0 = first + own * 64
            n = key_tiles(first, keys, shift, NC * 64, BN, CAUSAL)
            buffer = done % NQ
            if q0 >= queries:  # past the sequence's end: only keep the barriers moving
                mbarrier.wait(q_full.index(buffer), (done // NQ) & 1)
                mbarrier.arrive(q_empty.index(buffer), count=1)
                for _ in range(n):
                    mbarrier.wait(k_full.index(used % NB), (used // NB) & 1)
                    await_turn(go, used, c, ALTERNATE)
                    pass_turn(go, c, ALTERNATE)
                    mbarrier.arrive(k_empty.index(used % NB), count=1)
                    mbarrier.wait(v_full.index(used % NB), (used // NB) & 1)
                    mbarrier.arrive(v_empty.index(used % NB), count=1)
                    used += 1
                upcoming = next_tile(turn + 1, work, NC * 64, CAUSAL, RAGGED, False)
                ends = table_ends(Table, upcoming[1], factor, width, BIAS)
                begun = False
            else:
                table = Table + head * width
                left, right = ends
                corner = -(q0 + shift)
                sq_own = sq.index(buffer * NC + own)
                whole = n
                if HALVES:
                    whole = whole_tiles(n, corner, keys, BN, CAUSAL)
                if AHEAD:
                    if not begun:
                        p, peak, total = first_weights(
                            sq_own, sk, q_full, k_full, k_empty, go, done, used, factor, table, corner, keys, span,
                            left, right, c, ALTERNATE, NQ, NB, R, BN, BIAS, TAILS, SL,
                        )  # fmt: skip
                        await_values(v_full, used, NB)
                else:
                    p, peak, total = first_weights(
                        sq_own, sk, q_full, k_full, k_empty, go, done, used, factor, table, corner, keys, span,
                        left, right, c, ALTERNATE, NQ, NB, R, BN, BIAS, TAILS, SL,
                    )  # fmt: skip
                acc = gl.zeros([64, D], gl.float32, layout=OL)
                if AHEAD:
                    # ptxas 12.8 computes a descriptor that two blocks of code share in one of them, and here the first
                    # can be jumped over: a zero that it can't see keeps this one apart.
                    sq_own = sq.index(buffer * NC + c + zero)
                for i in range(1, whole):
                    last = used % NB
                    used += 1
                    stage = used % NB
                    weights = gl.convert_layout(p.to(E), PL)
                    mbarrier.wait(k_full.index(stage), (used // NB) & 1)
                    await_turn(go, used, c, ALTERNATE)
                    s = warpgroup_mma(sq_own, sk.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
                    if not AHEAD:
                        await_values(v_full, used - 1, NB)
                    acc = warpgroup_mma(weights, sv.index(last), acc, is_async=True)
                    pass_turn(go, c, ALTERNATE)
                    s = warpgroup_mma_wait(1, deps=[s])
                    mbarrier.arrive(k_empty.index(stage), count=1)
                    n0 = i * BN
                    p, peak, total, decay = softmax_step(
                        s, peak, total, factor, table, n0, corner + n0, keys, span, left, right, R, BN, BN, BIAS,
                        TAILS, SL,
                    )  # fmt: skip
                    if AHEAD:
                        await_values(v_full, used, NB)
                    acc = warpgroup_mma_wait(0, deps=[acc])
                    mbarrier.arrive(v_empty.index(last), count=1)
                    acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, OL))[:, None]
                place = (LSE, rows, head, pitch, q0, queries)
                if HALVES:
                    if whole < n:
                        p_half, acc, peak_half, total_half = half_step(
                            p, acc, peak, total, sq_own, sk, sv, k_full, k_empty, v_full, v_empty, go, used,
                            factor, table, whole * BN, corner, keys, span, left, right, c, ALTERNATE, NB, R, BN, BIAS,
                            TAILS, HL, OL,
                        )  # fmt: skip
                        mbarrier.arrive(q_empty.index(buffer), count=1)
                        used += 1
                        await_values(v_full, used, NB)
                        acc, inverse, upcoming, ends = last_product(
                            p_half, sv.index(used % NB).slice(0, BN // 2), acc, peak_half, total_half, place,
                            turn, work, Table, factor, width, NC * 64, CAUSAL, BIAS, RAGGED,
                            gl.SliceLayout(1, HL), OL,
                        )  # fmt: skip
                        used = apart(used)
                    else:
                        mbarrier.arrive(q_empty.index(buffer), count=1)
                        await_values(v_full, used, NB)
                        acc, inverse, upcoming, ends = last_product(
                            p, sv.index(used % NB), acc, peak, total, place, turn, work, Table, factor,
                            width, NC * 64, CAUSAL, BIAS, RAGGED, gl.SliceLayout(1, SL), OL,
                        )  # fmt: skip
                    last = used % NB
                    used += 1
                else:
                    mbarrier.arrive(q_empty.index(buffer), count=1)
                    last = used % NB
                    used += 1
                    inverse = store_sums(place, peak, total, gl.SliceLayout(1, SL), OL)
                    weights = gl.convert_layout(p.to(E), PL)
                    if not AHEAD:
                        await_values(v_full, used - 1, NB)
                        acc = warpgroup_mma(weights, sv.index(last), acc, is_async=True)
                    upcoming = next_tile(turn + 1, work, NC * 64, CAUSAL, RAGGED, False)
                    ends = table_ends(Table, upcoming[1], factor, width, BIAS)
                    if AHEAD:
                        first = upcoming[2] + c * 64
                        begun = upcoming[0] & (first < upcoming[7])
                        if begun:
                            left, right = ends
                            buffer = (done + 1) % NQ
                            stage = used % NB
                            mbarrier.wait(q_full.index(buffer), ((done + 1) // NQ) & 1)
                            mbarrier.wait(k_full.index(stage), (used // NB) & 1)
                            sq_own = sq.index(buffer * NC + c)
                            await_turn(go, used, c, ALTERNATE)
                            s = warpgroup_mma(
                                sq_own, sk.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True
                            )
                            acc = warpgroup_mma(weights, sv.index(last), acc, is_async=True)
                            pass_turn(go, c, ALTERNATE)
                            s = warpgroup_mma_wait(1, deps=[s])
                            mbarrier.arrive(k_empty.index(stage), count=1)
                            peak = gl.full([64], HIDDEN, gl.float32, layout=gl.SliceLayout(1, SL))
                            total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SL))
                            p, peak, total, decay = softmax_step(
                                s, peak, total, factor, Table + upcoming[1] * width, 0, -(first + upcoming[9]),
                                upcoming[8], span, left, right, R, BN, BN, BIAS, TAILS, SL,
                            )  # fmt: skip
                            await_values(v_full, used, NB)
                            acc = warpgroup_mma_wait(0, deps=[acc])
                        else:
                            acc = warpgroup_mma(weights, sv.index(last), acc, is_async=True)
                            acc = warpgroup_mma_wait(0, deps=[acc])
                    else:
                        acc = warpgroup_mma_wait(0, deps=[acc])
                mbarrier.arrive(v_empty.index(last), count=1)
                tma.store_wait(0)
                group_barrier()
                so_own.store((acc * inverse[:, None]).to(E))
                fence_async_shared()
                store_tile(o_desc, qy, head, qx + q0, so_own, RAGGED)
            done += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "blocks", "H", "M", "N", "shift", "pitch", "turns", "chunk", "span"])
def forward_kernel(
    q_desc, k_desc, v_desc, o_desc, Table, LSE, factor, span, Records, tiles, blocks, H, M, N, shift, pitch, turns,
    chunk, NC: gl.constexpr, NQ: gl.constexpr, NB: gl.constexpr, BN: gl.constexpr, D: gl.constexpr, R: gl.constexpr,
    CAUSAL: gl.constexpr, BIAS: gl.constexpr, RAGGED: gl.constexpr, TAILS: gl.constexpr, AHEAD: gl.constexpr,
    ALTERNATE: gl.constexpr, HALVES: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Persistent: each program takes its tiles, NC * 64 queries of one head over all their keys, from the schedule.

    Exponents are of 2: `factor` is the scale times log2(e), and LSE is a log2. R is the table's radius, or -1 where the
    bias is constant nowhere; the table then reaches `span` either side.
    """
    E: gl.constexpr = q_desc.dtype
    sq = gl.allocate_shared_memory(E, [NQ * NC, 64, D], shared_layout(64, D, E))
    sk = gl.allocate_shared_memory(E, [NB, BN, D], shared_layout(BN, D, E))
    sv = gl.allocate_shared_memory(E, [NB, BN, D], shared_layout(BN, D, E))
    so = gl.allocate_shared_memory(E, [NC, 64, D], shared_layout(64, D, E))
    q_full, q_empty = barriers(NQ, 1), barriers(NQ, NC)
    k_full, v_full, k_empty, v_empty = barriers(NB, 1), barriers(NB, 1), barriers(NB, NC), barriers(NB, NC)
    go = barriers(2, 1)
    work = (Records, tiles, blocks, H, M, N, shift, pitch, turns, chunk)
    loads = (q_desc, k_desc, v_desc, sq, sk, sv, q_full, q_empty, k_full, v_full, k_empty, v_empty, work)
    shared = (
        o_desc, sq, sk, sv, so, q_full, q_empty, k_full, v_full, k_empty, v_empty, go, Table, LSE, factor, span,
        work,
    )  # fmt: skip
    # Constants stand in the call: in a tuple with a name they would become values.
    if NC == 3:
        gl.warp_specialize(
            [
                (
                    forward_consumer,
                    (shared, 0, NC, NQ, NB, BN, D, R, CAUSAL, BIAS, RAGGED, TAILS, AHEAD, ALTERNATE, HALVES),
                ),
                (
                    forward_consumer,
                    (shared, 1, NC, NQ, NB, BN, D, R, CAUSAL, BIAS, RAGGED, TAILS, AHEAD, ALTERNATE, HALVES),
                ),
                (
                    forward_consumer,
                    (shared, 2, NC, NQ, NB, BN, D, R, CAUSAL, BIAS, RAGGED, TAILS, AHEAD, ALTERNATE, HALVES),
                ),
                (forward_producer, (loads, NC, NQ, NB, BN, D, CAUSAL, RAGGED)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    forward_consumer,
                    (shared, 0, NC, NQ, NB, BN, D, R, CAUSAL, BIAS, RAGGED, TAILS, AHEAD, ALTERNATE, HALVES),
                ),
                (
                    forward_consumer,
                    (shared, 1, NC, NQ, NB, BN, D, R, CAUSAL, BIAS, RAGGED, TAILS, AHEAD, ALTERNATE, HALVES),
                ),
                (forward_producer, (loads, NC, NQ, NB, BN, D, CAUSAL, RAGGED)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
