"""The matrix product of the joined projection with the gated GELU behind its last sum."""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.activation.kernels import gelu_factor


@triton.jit
def forward_kernel(
    X, Weight, Joined, Out, rows, width, depth, programs,
    TANH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The joined projection, and the activation of it. Joined may be None.

    All tensors are descriptors: tiles of X are [BM, BK], of the weight, seen as [2, width, depth], [2, BN, BK], of both
    results [BM, BN]. BN divides the width; the hardware looks after tails of the rest.

    A program takes one tile after the other, as one loop: the first steps of a tile are on their way while the one
    before is finished and stored. GROUP tiles of rows go through the columns together, which keeps what they read in
    the L2 cache.
    """
    across = width // BN
    down = tl.cdiv(rows, BM)
    for tile in tl.range(tl.program_id(0), down * across, programs, flatten=True):
        group = tile // (GROUP * across)
        tall = tl.minimum(down - group * GROUP, GROUP)
        inside = tile % (GROUP * across)
        row = (group * GROUP + inside % tall) * BM
        column = (inside // tall) * BN
        sums = tl.zeros((BM, 2 * BN), tl.float32)
        for k in range(0, depth, BK):
            # One product of both halves reads tiles of X from shared memory once.
            both = tl.reshape(Weight.load([0, column, k]), (2 * BN, BK))
            sums = tl.dot(X.load([row, k]), both.T, sums, input_precision="ieee")
        projected = tl.reshape(sums.to(Out.dtype), (BM, 2, BN))
        gate, up = tl.split(tl.permute(projected, (0, 2, 1)))
        # From what the backward reads, rounded as it is, so that it makes the same activation.
        wide = gate.to(tl.float32)
        out = wide * gelu_factor(wide, TANH) * up.to(tl.float32)
        if Joined is not None:
            Joined.store([row, column], gate)
            Joined.store([row, width + column], up)
        Out.store([row, column], out.to(Out.dtype))
