"""What the Hopper kernels take. All of it is known on the host without looking at a value on the device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fat5.ops.attention.problem import Problem

HEAD_DIMS = (64, 128)
DTYPES = (torch.bfloat16, torch.float16)
BIAS_KINDS = ("none", "distance", "alibi", "alibi-signed")
LARGEST_RADIUS = 1024  # a near tile costs more than a far one, and each radius is compiled by itself
FEWEST_QUERIES = 16
_SCALES = (2.0**-16, 2.0**16)  # the bias is divided by the scale
_LARGEST_INDEX = 2**31 - 2**20  # int32, with room for the last tile
_LARGEST_ROWS = 2**29  # rows of a descriptor of sequences end at 2**30


def takes_tensors(q: Tensor) -> bool:
    """Whether queries are of a type and a head dimension that the Hopper kernels take; traceable by torch.compile."""
    return q.dtype in DTYPES and q.shape[-1] in HEAD_DIMS


def plannable(problem: Problem) -> bool:
    """Whether there may be calls with a problem's types, sizes, lengths and bias that the kernels take.

    It looks at no address and no stride: calls that differ in these share one plan.
    """
    if problem.packed and problem.cu_seqlens_q is not None and problem.cu_seqlens_q.shape[0] < 2:
        return False
    bounded = not problem.bias_kind.startswith("alibi") or problem.offsets is None
    scaled = _SCALES[0] <= problem.softmax_scale <= _SCALES[1]
    known = problem.bias_kind in BIAS_KINDS and radius_of(problem) <= LARGEST_RADIUS
    return takes_tensors(problem.q) and problem.dropout_p == 0 and bounded and scaled and known


def refused(problem: Problem) -> str | None:
    """Return why the Hopper kernels do not take a problem, or None if they do."""
    if not takes_tensors(problem.q):
        types = " and ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        return f"they take {types} and head dimensions {HEAD_DIMS}, not {problem.q.dtype} and {problem.head_dim}"
    if problem.bias_kind not in BIAS_KINDS:
        return f"they have no {problem.bias_kind} bias"
    if problem.dropout_p > 0:
        return "they have no dropout"
    if not _SCALES[0] <= problem.softmax_scale <= _SCALES[1]:
        return f"they divide the bias by the scale, and {problem.softmax_scale} is outside {_SCALES}"
    if radius_of(problem) > LARGEST_RADIUS:
        return f"they take tables of a radius of at most {LARGEST_RADIUS}, not {radius_of(problem)}"
    if problem.bias_kind.startswith("alibi") and problem.offsets is not None:
        return "they tabulate ALiBi, and offsets on the device leave its distances without a bound"
    if not problem.packed and problem.num_queries < FEWEST_QUERIES:
        return f"{problem.num_queries} queries are a step of decoding, for which they launch more than one kernel"
    if problem.packed and problem.cu_seqlens_q is not None and problem.cu_seqlens_q.shape[0] < 2:
        return "there is no document"
    documents = 0 if problem.cu_seqlens_q is None else problem.cu_seqlens_q.shape[0]
    rows = max(problem.num_queries, problem.num_keys) + 256 + 128 * documents  # each may end inside a tile
    if problem.batch * problem.heads * rows > _LARGEST_INDEX or problem.batch * rows > _LARGEST_ROWS:
        return f"{problem.batch} x {problem.heads} x {rows} rows do not fit their 32-bit indices"
    for name, x in (("q", problem.q), ("k", problem.k), ("v", problem.v)):
        reason = strides_refused(name, x, problem)
        if reason is not None:
            return reason
    return None


def backward_refused(problem: Problem, grad_out: Tensor, bias_grad: bool) -> str | None:
    """Return why the Hopper kernels do not take a problem's backward, or None if they do."""
    reason = refused(problem) or strides_refused("the output's gradient", grad_out, problem)
    if reason is not None or not bias_grad:
        return reason
    if problem.bias_kind != "distance":
        return "they have no gradient of ALiBi's slopes"
    if problem.packed and (problem.offset is not None or problem.offsets is not None):
        return "they have no gradient of a table with packed documents and query offsets"
    if problem.packed and not same_offsets(problem.cu_seqlens_q, problem.cu_seqlens_k):
        return "they have no gradient of a table between different documents"
    if not is_ragged(problem) and (problem.offset or 0) % 64:
        return "they have no gradient of a table where queries and keys are not a multiple of 64 apart, but for padding"
    documents = 0 if problem.cu_seqlens_q is None else problem.cu_seqlens_q.shape[0]
    blocks = 2 * problem.batch * (problem.num_keys // 128 + 8 + documents)
    if 64 * blocks * problem.heads * (2 * radius_of(problem) // 64 + 4) > _LARGEST_INDEX:
        return f"the near tiles of {blocks} blocks of keys do not fit their 32-bit indices"
    return None


def strides_refused(name: str, x: Tensor, problem: Problem) -> str | None:
    """Return why TMA cannot read a tensor where it lies, or None if it can."""
    if x.data_ptr() % 16:
        return _misplaced(name)
    return _layout_refused(name, x.shape, x.stride(), x.element_size(), is_ragged(problem) and not problem.packed)


@functools.lru_cache(1024)
def _layout_refused(
    name: str, sizes: tuple[int, ...], strides: tuple[int, ...], itemsize: int, evenly: bool
) -> str | None:
    if strides[-1] != 1:
        return _misplaced(name)
    if any(n > 1 and (s <= 0 or s * itemsize % 16) for n, s in zip(sizes[:-1], strides[:-1], strict=True)):
        return f"TMA needs strides of multiples of 16 bytes; {name} has {list(strides)}"
    if evenly and sizes[0] > 1 and strides[0] != sizes[1] * strides[1]:
        return (
            "with padding they need rows evenly apart from one sequence to the next; "
            f"{name} has strides {list(strides)}"
        )
    return None


def _misplaced(name: str) -> str:
    return f"TMA needs neighbouring elements from a multiple of 16 bytes on, which {name} has not"


def is_ragged(problem: Problem) -> bool:
    """Whether sequences differ in length or offset, or have keys that are not real."""
    return (
        problem.packed
        or problem.offsets is not None
        or problem.key_starts is not None
        or problem.key_lengths is not None
    )


def radius_of(problem: Problem) -> int:
    """Return the distance from which a table is constant, 0 for other biases."""
    return problem.bias.shape[1] // 2 if problem.bias is not None and problem.bias_kind == "distance" else 0


def same_offsets(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors of offsets are one and the same memory."""
    return a is not None and b is not None and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()
