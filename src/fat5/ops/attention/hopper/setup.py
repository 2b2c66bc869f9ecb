"""The kernel that runs ahead of a Hopper kernel and writes the bias by distance.

Anew for each call or plan: nothing that lives on the device outlasts them, which CUDA graphs would forbid.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fat5.ops.dependent_launch import gdc_launch_dependents, gdc_wait

NONE = tl.constexpr(0)
DISTANCE = tl.constexpr(1)
ALIBI = tl.constexpr(2)
ALIBI_SIGNED = tl.constexpr(3)


@triton.jit
def _bias_at(distance, Bias, head, scale, RADIUS: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the bias over the scale at each distance, -inf where causal attention hides it."""
    values = tl.zeros(distance.shape, tl.float32)
    if BIAS == DISTANCE:
        place = tl.minimum(tl.maximum(distance, -RADIUS), RADIUS) + RADIUS
        values = tl.load(Bias + head * (2 * RADIUS + 1) + place) / scale
    elif BIAS == ALIBI:
        values = tl.load(Bias + head) * -tl.abs(distance).to(tl.float32) / scale
    elif BIAS == ALIBI_SIGNED:
        values = tl.load(Bias + head) * distance.to(tl.float32) / scale
    if CAUSAL:
        values = tl.where(distance > 0, -float("inf"), values)
    return values


@triton.jit
def setup_kernel(
    Bias,
    Table,
    scale,
    span,
    RADIUS: tl.constexpr,
    BIAS: tl.constexpr,
    CAUSAL: tl.constexpr,
    REVERSED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAIN: tl.constexpr,
):
    """Write the table of one head, BLOCK entries a program.

    Table: [H, 2 * span] pairs (t[d], t[d + 1]) for d from -span, or REVERSED (t[-d], t[-d - 1]); t is the bias over the
    scale. A causal table hides positive distances, so that no kernel has a causal mask.
    """
    if CHAIN:
        gdc_launch_dependents()
    head = tl.program_id(1)
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    distance = entry - span
    step = 1
    if REVERSED:
        distance = -distance
        step = -1
    first = _bias_at(distance, Bias, head, scale, RADIUS, BIAS, CAUSAL)
    second = _bias_at(distance + step, Bias, head, scale, RADIUS, BIAS, CAUSAL)
    pairs = Table + (head.to(tl.int64) * 2 * span + entry) * 2
    if CHAIN:
        gdc_wait()
    tl.store(pairs, first, mask=entry < 2 * span)
    tl.store(pairs + 1, second, mask=entry < 2 * span)
