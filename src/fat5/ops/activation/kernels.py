"""The kernels of the gated GELU."""

from __future__ import annotations

import triton
import triton.language as tl

_SQRT_8_OVER_PI = tl.constexpr(1.5957691216057308)
_CUBIC = tl.constexpr(0.044715)
_SQRT_HALF = tl.constexpr(0.7071067811865476)
_DENSITY_AT_0 = tl.constexpr(0.3989422804014327)


@triton.jit
def gelu_factor(x, TANH: tl.constexpr):
    """The factor of x in GELU."""
    if TANH:
        # (1 + tanh(u)) / 2 is the logistic function of 2 u, which loses no digits where u is far below 0.
        return 1.0 / (1.0 + tl.exp(-_SQRT_8_OVER_PI * (x + _CUBIC * x * x * x)))
    return 0.5 * (1.0 + tl.erf(x * _SQRT_HALF))


@triton.jit
def _derivative(x, phi, TANH: tl.constexpr):
    """The derivative of x * phi(x)."""
    if TANH:
        # Beyond 100 phi is 0 or 1 and its slope 0, whatever the square overflows to.
        near = tl.minimum(tl.maximum(x, -100.0), 100.0)
        return phi + near * phi * (1.0 - phi) * _SQRT_8_OVER_PI * (1.0 + 3.0 * _CUBIC * near * near)
    return phi + x * _DENSITY_AT_0 * tl.exp(-0.5 * x * x)


@triton.jit
def _locate(blocks_a_row, width, BLOCK: tl.constexpr):
    """Row and first column of this program's block, in 64 bits, its columns from there, and which of them exist."""
    row = (tl.program_id(0) // blocks_a_row).to(tl.int64)
    first = (tl.program_id(0) % blocks_a_row).to(tl.int64) * BLOCK
    columns = tl.arange(0, BLOCK)
    return row, first, columns, columns < tl.minimum(width - first, BLOCK).to(tl.int32)


@triton.jit
def forward_kernel(
    Gate, Up, Out, gate_row, up_row, width, blocks_a_row, TANH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """GELU of one block of a row, times the other projection."""
    row, first, columns, inside = _locate(blocks_a_row, width, BLOCK)
    x = tl.load(Gate + (row * gate_row + first) + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(Up + (row * up_row + first) + columns, mask=inside, other=0.0).to(tl.float32)
    out = x * gelu_factor(x, TANH) * up
    tl.store(Out + (row * width + first) + columns, out.to(Out.dtype.element_ty), mask=inside)


@triton.jit
def backward_kernel(
    Grad, Gate, Up, GradGate, GradUp, Out, grad_row, gate_row, up_row, made_row, width, blocks_a_row,
    TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of both projections, `made_row` from row to row, and the forward's output again; each may be None."""
    row, first, columns, inside = _locate(blocks_a_row, width, BLOCK)
    grad = tl.load(Grad + (row * grad_row + first) + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(Gate + (row * gate_row + first) + columns, mask=inside, other=0.0).to(tl.float32)
    phi = gelu_factor(x, TANH)
    made = (row * made_row + first) + columns
    if GradUp is not None:
        tl.store(GradUp + made, (grad * (x * phi)).to(GradUp.dtype.element_ty), mask=inside)
    if GradGate is not None or Out is not None:
        up = tl.load(Up + (row * up_row + first) + columns, mask=inside, other=0.0).to(tl.float32)
    if Out is not None:
        tl.store(Out + (row * width + first) + columns, (x * phi * up).to(Out.dtype.element_ty), mask=inside)
    if GradGate is not None:
        slope = _derivative(x, phi, TANH)
        tl.store(GradGate + made, (grad * up * slope).to(GradGate.dtype.element_ty), mask=inside)
