"""The steps of the forward kernel's consumers: scores, weights and products of 64 queries."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from fat5.ops.attention.hopper.tile import add_bias, next_tile, table_ends

HIDDEN = gl.constexpr(-1e30)
"""Of row maxima: finite, so that a row of hidden keys alone sums to 0, without NaN."""


@gluon.jit
def softmax_step(
    s, peak, total, factor, table, n0, corner, keys, span, left, right,
    R: gl.constexpr, BN: gl.constexpr, W: gl.constexpr, BIAS: gl.constexpr, TAILS: gl.constexpr, SL: gl.constexpr,
):  # fmt: skip
    """Return the weights of W keys, the new row maxima and sums, and the factor of what was summed before.

    The table is divided by the scale, so that a near tile costs one addition an element and a far tile nothing: its
    constant goes into the row maximum. `corner` is the distance between the tile's first key and its first query.
    """
    constant = 0.0
    if BIAS:
        if R < 0:
            s = add_bias(s, table, corner + span, W, SL)
        elif (corner + W - 1 > -R) & (corner - 63 < R):
            s = add_bias(s, table, corner + R + BN + 64, W, SL)
        else:
            constant = gl.where(corner < 0, left, right)
    if TAILS:
        if n0 + W > keys:
            columns = gl.arange(0, W, layout=gl.SliceLayout(0, SL))
            s = gl.where((columns < keys - n0)[None, :], s, -float("inf"))
    new_peak = gl.maximum(peak, gl.max(s, 1) * factor + constant)
    p = gl.exp2(s * factor - (new_peak - constant)[:, None])
    decay = gl.exp2(peak - new_peak)
    return p, new_peak, total * decay + gl.sum(p, 1), decay


@gluon.jit
def await_values(v_full, used, NB: gl.constexpr):
    """Wait until the values of the keys whose weights were just computed are there.

    AHEAD, this stands between those weights and the wait for the product before them, although the values are needed
    only after it: the wait is a loop, and so ends a block of code. Without one there, ptxas moves the product's wait
    ahead of the weights' arithmetic, and the two no longer overlap.
    """
    mbarrier.wait(v_full.index(used % NB), (used // NB) & 1)


@gluon.jit
def await_turn(go, issued, c: gl.constexpr, ALTERNATE: gl.constexpr):
    """Wait until the other consumer has issued as many products of scores; consumer 0 is one ahead.

    ALTERNATE, one consumer's products then run beside the other's arithmetic; without, both tend to do the same at a
    time.
    """
    if ALTERNATE:
        mbarrier.wait(go.index(c), (issued & 1) ^ (1 - c))


@gluon.jit
def pass_turn(go, c: gl.constexpr, ALTERNATE: gl.constexpr):
    """Let the other consumer issue its products."""
    if ALTERNATE:
        mbarrier.arrive(go.index(1 - c), count=1)


@gluon.jit
def first_weights(
    sq_own, sk, q_full, k_full, k_empty, go, done, used, factor, table, corner, keys, span, left, right,
    c: gl.constexpr, ALTERNATE: gl.constexpr, NQ: gl.constexpr, NB: gl.constexpr, R: gl.constexpr, BN: gl.constexpr,
    BIAS: gl.constexpr, TAILS: gl.constexpr, SL: gl.constexpr,
):  # fmt: skip
    """Return the weights of a tile's first keys, its row maxima and sums."""
    peak = gl.full([64], HIDDEN, gl.float32, layout=gl.SliceLayout(1, SL))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, SL))
    zeros = gl.zeros([64, BN], gl.float32, layout=SL)
    stage = used % NB
    mbarrier.wait(q_full.index(done % NQ), (done // NQ) & 1)
    mbarrier.wait(k_full.index(stage), (used // NB) & 1)
    await_turn(go, used, c, ALTERNATE)
    s = warpgroup_mma(sq_own, sk.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
    pass_turn(go, c, ALTERNATE)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    p, peak, total, decay = softmax_step(
        s, peak, total, factor, table, 0, corner, keys, span, left, right, R, BN, BN, BIAS, TAILS, SL
    )
    return p, peak, total


@gluon.jit
def whole_tiles(n, corner, keys, BN: gl.constexpr, CAUSAL: gl.constexpr):
    """Return how many of n tiles of keys 64 queries look at as a whole: n, or n - 1 where they see none of the last
    one's second half.

    `corner` is the distance between the first key and the first query. A first tile counts as a whole.
    """
    seen = keys
    if CAUSAL:
        seen = gl.minimum(keys, 64 - corner)  # by the last query
    return gl.where((n > 1) & (seen <= n * BN - BN // 2), n - 1, n)


@gluon.jit
def store_sums(place, peak, total, L: gl.constexpr, OL: gl.constexpr):
    """Store the log-sum-exp of 64 rows, and return the factor of their outputs."""
    LSE, rows, head, pitch, q0, queries = place
    lanes = gl.arange(0, 64, layout=L)
    seen = total > 0
    safe = gl.where(seen, total, 1.0)
    lse = gl.where(seen, peak + gl.log2(safe), float("inf"))
    gl.store(LSE + rows + head * pitch + q0 + lanes, lse, mask=q0 + lanes < queries)
    return gl.convert_layout(gl.where(seen, 1.0 / safe, 0.0), gl.SliceLayout(1, OL))


@gluon.jit
def half_step(
    p, acc, peak, total, sq_own, sk, sv, k_full, k_empty, v_full, v_empty, go, used, factor, table, n0, corner,
    keys, span, left, right, c: gl.constexpr, ALTERNATE: gl.constexpr, NB: gl.constexpr, R: gl.constexpr,
    BN: gl.constexpr, BIAS: gl.constexpr, TAILS: gl.constexpr, HL: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """Add the weights of tile `used` of keys, and go on to the first half of the next.

    Returns:
        The weights of that half, the output so far, row maxima and sums.
    """
    HALF: gl.constexpr = BN // 2
    last = used % NB
    stage = (used + 1) % NB
    zeros = gl.zeros([64, HALF], gl.float32, layout=HL)
    mbarrier.wait(k_full.index(stage), ((used + 1) // NB) & 1)
    await_turn(go, used + 1, c, ALTERNATE)
    k = sk.index(stage).slice(0, HALF)
    s = warpgroup_mma(sq_own, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
    await_values(v_full, used, NB)
    weights = gl.convert_layout(p.to(sv.dtype), gl.DotOperandLayout(0, OL, 2))
    acc = warpgroup_mma(weights, sv.index(last), acc, is_async=True)
    pass_turn(go, c, ALTERNATE)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    peak = gl.convert_layout(peak, gl.SliceLayout(1, HL))
    total = gl.convert_layout(total, gl.SliceLayout(1, HL))
    p, peak, total, decay = softmax_step(
        s, peak, total, factor, table, n0, corner + n0, keys, span, left, right, R, BN, HALF, BIAS, TAILS, HL
    )
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(v_empty.index(last), count=1)
    return p, acc * gl.convert_layout(decay, gl.SliceLayout(1, OL))[:, None], peak, total


@gluon.jit
def apart(x):
    """Return x, by an instruction that the other branch lacks.

    What two branches end with alike, the compiler moves behind them: a wait for a product too, which is then under way
    where they meet, and ptxas serialises all products (C7512).
    """
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def last_product(
    p, values, acc, peak, total, place, turn, work, Table, factor, width, ROWS: gl.constexpr,
    CAUSAL: gl.constexpr, BIAS: gl.constexpr, RAGGED: gl.constexpr, L: gl.constexpr, OL: gl.constexpr,
):  # fmt: skip
    """Add a tile's last weights; the log-sum-exp is stored, and the next tile found, beside that product.

    Returns:
        The output, its factor, the next tile, and the ends of its table.
    """
    weights = gl.convert_layout(p.to(values.dtype), gl.DotOperandLayout(0, OL, 2))
    acc = warpgroup_mma(weights, values, acc, is_async=True)
    inverse = store_sums(place, peak, total, L, OL)
    upcoming = next_tile(turn + 1, work, ROWS, CAUSAL, RAGGED, False)
    ends = table_ends(Table, upcoming[1], factor, width, BIAS)
    acc = warpgroup_mma_wait(0, deps=[acc])
    return acc, inverse, upcoming, ends
