"""Kernels of the fused AdamWScale: sums of squares, the scalars of each tensor, the update of all tensors.

One launch covers all tensors of a table. `Table` is int64 [tensors, COLUMNS]: the addresses of a parameter and its
state, its number of elements and its first chunk; `Gradients` int64 [tensors] the addresses of the gradients. Tensors
are cut into chunks of CHUNK elements, and `Owners` int32 [chunks] says which tensor a chunk is of. Every address is a
multiple of VECTOR elements. All arithmetic is in float32, and all sums have a fixed order.
"""

from __future__ import annotations

import triton
import triton.language as tl

COLUMNS = tl.constexpr(8)
PARAMETER = tl.constexpr(0)
EXP_AVG = tl.constexpr(1)
EXP_AVG_SQ = tl.constexpr(2)
COMPENSATION = tl.constexpr(3)
STEP = tl.constexpr(4)
NUMEL = tl.constexpr(5)
FIRST_CHUNK = tl.constexpr(6)

# Columns of `Scalars`, float32 [tensors, SCALARS].
SCALARS = tl.constexpr(4)
STEP_SIZE = tl.constexpr(0)
ROOT_FACTOR = tl.constexpr(1)
DECAY = tl.constexpr(2)


@triton.jit
def _elements(address, start, TYPE: tl.constexpr, VECTOR: tl.constexpr):
    """Return a pointer to element `start` of the tensor at an address, known to be a multiple of VECTOR elements."""
    first = address.to(tl.pointer_type(TYPE))
    return tl.multiple_of(first, VECTOR * TYPE.primitive_bitwidth // 8) + start


@triton.jit
def _load(pointers, rest, offsets, WHOLE: tl.constexpr):
    """Load elements in float32, zero beyond the end of the tensor."""
    if WHOLE:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=offsets < rest, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _store(pointers, values, rest, offsets, WHOLE: tl.constexpr):
    """Store elements in the tensor's own type, none beyond its end."""
    if WHOLE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=offsets < rest)


@triton.jit
def _square_sum(first, rest, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr):
    lanes = tl.zeros([BLOCK], tl.float32)
    for block in tl.static_range(BLOCKS):
        offsets = block * BLOCK + tl.arange(0, BLOCK)
        values = _load(first + offsets, rest, offsets, WHOLE)
        lanes += values * values
    return tl.sum(lanes)


@triton.jit
def square_sums_kernel(
    Addresses,
    Table,
    Owners,
    Sums,
    stride,
    TYPE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_A_CHUNK: tl.constexpr,
):
    """Store the sum of the squares of each chunk in `Sums`, of the tensors at `Addresses[tensor * stride]`."""
    chunk = tl.program_id(0)
    owner = tl.load(Owners + chunk)
    row = Table + owner * COLUMNS
    start = (chunk - tl.load(row + FIRST_CHUNK)) * BLOCK * BLOCKS_A_CHUNK
    rest = tl.load(row + NUMEL) - start
    first = _elements(tl.load(Addresses + owner * stride), start, TYPE, VECTOR)
    if rest >= BLOCK * BLOCKS_A_CHUNK:
        total = _square_sum(first, rest, BLOCK, BLOCKS_A_CHUNK, True)
    else:
        total = _square_sum(first, rest, BLOCK, BLOCKS_A_CHUNK, False)
    tl.store(Sums + chunk, total)


@triton.jit
def _total(Sums, count, BLOCK: tl.constexpr):
    """Add `count` sums in a fixed order."""
    offsets = tl.arange(0, BLOCK)
    lanes = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        lanes += tl.load(Sums + start + offsets, mask=start + offsets < count, other=0.0)
    return tl.sum(lanes)


@triton.jit(do_not_specialize=["count"])
def clip_kernel(Sums, Result, count, max_norm, BLOCK: tl.constexpr):
    """Store the root of all sums, and what the gradients are to be multiplied by for a norm of at most `max_norm`."""
    norm = tl.sqrt(_total(Sums, count, BLOCK))
    scale = max_norm / (norm + 1e-6)
    tl.store(Result, norm)
    tl.store(Result + 1, tl.where(scale > 1.0, 1.0, scale))  # and not tl.minimum: NaN stays NaN


@triton.jit
def _bias_correction(log_beta, step):
    """Return 1 - beta^step; for small exponents by a series, since float32 would lose the digits of 1 - 0.999."""
    x = log_beta * step
    series = 1.0 + x / 9.0
    for n in tl.static_range(7):
        series = 1.0 + x / (8.0 - n) * series
    return tl.where(x > -0.5, -x * series, 1.0 - tl.exp(x))


@triton.jit(do_not_specialize=["first_tensor"])
def scalars_kernel(
    Table,
    Sums,
    Scalars,
    LearningRate,
    first_tensor,
    weight_decay,
    log_beta1,
    log_beta2,
    LR_IS_TENSOR: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Count a tensor's step and store what its update multiplies by: the step size, 1 / sqrt(1 - beta2^t), the decay.

    `Sums` are those of the parameters; `LearningRate` is a pointer where LR_IS_TENSOR, else a number.
    """
    tensor = first_tensor + tl.program_id(0)
    row = Table + tensor * COLUMNS
    numel = tl.load(row + NUMEL)
    chunks = (numel + CHUNK - 1) // CHUNK
    rms = tl.sqrt(_total(Sums + tl.load(row + FIRST_CHUNK), chunks, BLOCK) / tl.maximum(numel, 1).to(tl.float32))
    counter = tl.load(row + STEP).to(tl.pointer_type(tl.float32))
    step = tl.load(counter) + 1.0
    tl.store(counter, step)
    if LR_IS_TENSOR:
        lr = tl.load(LearningRate).to(tl.float32)
    else:
        lr = LearningRate
    scale = tl.where(rms < MIN_SCALE, MIN_SCALE, rms)
    out = Scalars + tensor * SCALARS
    tl.store(out + STEP_SIZE, lr * scale / _bias_correction(log_beta1, step))
    tl.store(out + ROOT_FACTOR, 1.0 / tl.sqrt(_bias_correction(log_beta2, step)))
    tl.store(out + DECAY, 1.0 - lr * weight_decay)


@triton.jit
def _update(
    parameters,
    gradients,
    firsts,
    seconds,
    compensations,
    rest,
    grad_scale,
    step_size,
    root_factor,
    decay,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Update the block at these pointers to its first elements; `compensations` may be None."""
    offsets = tl.arange(0, BLOCK)
    value = _load(parameters + offsets, rest, offsets, WHOLE)
    grad = _load(gradients + offsets, rest, offsets, WHOLE)
    first = _load(firsts + offsets, rest, offsets, WHOLE)
    second = _load(seconds + offsets, rest, offsets, WHOLE)
    if compensations is not None:
        value += _load(compensations + offsets, rest, offsets, WHOLE)
    grad *= grad_scale
    first += one_minus_beta1 * (grad - first)
    second = beta2 * second + one_minus_beta2 * grad * grad
    denominator = tl.sqrt(second) * root_factor + eps
    value = value * decay - step_size * (first / denominator)
    rounded = value.to(parameters.dtype.element_ty)
    _store(firsts + offsets, first.to(firsts.dtype.element_ty), rest, offsets, WHOLE)
    _store(seconds + offsets, second, rest, offsets, WHOLE)
    _store(parameters + offsets, rounded, rest, offsets, WHOLE)
    if compensations is not None:
        left = value - rounded.to(tl.float32)
        _store(compensations + offsets, left.to(compensations.dtype.element_ty), rest, offsets, WHOLE)


@triton.jit
def update_kernel(
    Table,
    Gradients,
    Owners,
    Scalars,
    GradScale,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    TYPE: tl.constexpr,
    GRAD_TYPE: tl.constexpr,
    KAHAN: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS_A_CHUNK: tl.constexpr,
):
    """Update parameters and state, a block of a chunk each program."""
    # From the last block to the first: the sums read the last one last, and its lines may still be in the L2.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    chunk = block // BLOCKS_A_CHUNK
    owner = tl.load(Owners + chunk)
    row = Table + owner * COLUMNS
    start = ((chunk - tl.load(row + FIRST_CHUNK)) * BLOCKS_A_CHUNK + block % BLOCKS_A_CHUNK) * BLOCK
    rest = tl.load(row + NUMEL) - start
    # All of them before the branch, so that they are on their way together.
    parameters = _elements(tl.load(row + PARAMETER), start, TYPE, VECTOR)
    gradients = _elements(tl.load(Gradients + owner), start, GRAD_TYPE, VECTOR)
    firsts = _elements(tl.load(row + EXP_AVG), start, TYPE, VECTOR)
    seconds = _elements(tl.load(row + EXP_AVG_SQ), start, tl.float32, VECTOR)
    compensations = _elements(tl.load(row + COMPENSATION), start, TYPE, VECTOR) if KAHAN else None
    scalars = Scalars + owner * SCALARS
    step_size, root_factor = tl.load(scalars + STEP_SIZE), tl.load(scalars + ROOT_FACTOR)
    decay = tl.load(scalars + DECAY)
    grad_scale = tl.load(GradScale) if GradScale is not None else 1.0
    if rest >= BLOCK:
        _update(parameters, gradients, firsts, seconds, compensations, rest, grad_scale, step_size, root_factor, decay,
                one_minus_beta1, beta2, one_minus_beta2, eps, BLOCK, True)  # fmt: skip
    elif rest > 0:
        _update(parameters, gradients, firsts, seconds, compensations, rest, grad_scale, step_size, root_factor, decay,
                one_minus_beta1, beta2, one_minus_beta2, eps, BLOCK, False)  # fmt: skip
