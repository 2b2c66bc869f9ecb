"""Inputs of attention's kernels, and the comparison with the formula that every backend's tests make."""

import contextlib

import pytest
import torch
from torch import Tensor

from fat5.ops import AlibiBias, DenseBias, DistanceBias, RelativeBias, flash_attention
from fat5.ops.attention.backends import BACKENDS
from fat5.ops.attention.reference import attention_reference
from tests.ops.alibi_rounding import exponent_rounding, slope_rounding
from tests.ops.table_rounding import table_rounding

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
KERNEL_BACKENDS = [name for name in BACKENDS if name != "torch"]
BIASES = ["none", "relative", "alibi", "alibi-signed", "dense"]
HEADS = 2

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")


@contextlib.contextmanager
def reproducible(backend):
    """Ask for equal bits where a backend gives them only when asked."""
    torch.use_deterministic_algorithms(backend == "hopper", warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def make_bias(kind: str, leaf: Tensor, causal: bool):
    return {
        "none": lambda: None,
        "relative": lambda: RelativeBias(leaf, bidirectional=not causal, max_distance=20),
        "distance": lambda: DistanceBias(leaf),
        "alibi": lambda: AlibiBias(leaf),
        "alibi-signed": lambda: AlibiBias(leaf, symmetric=False),
        "dense": lambda: DenseBias(leaf),
    }[kind]()


def make_inputs(kind, batch, num_queries, num_keys, dim, dtype=torch.float32, dense_shape=None, heads=HEADS):
    """q, k, v and the leaf that the bias stands on."""
    shapes = [(batch, n, heads, dim) for n in (num_queries, num_keys, num_keys)]
    leaves = [torch.randn(s, device=DEVICE).to(dtype) for s in shapes]
    if kind != "none":
        dense_shape = dense_shape or (1, heads, num_queries, num_keys)
        leaves.append(torch.rand({"relative": (8, heads), "dense": dense_shape}.get(kind, (heads,)), device=DEVICE))
    return [x.requires_grad_() for x in leaves]


def run(attention, kind, leaves, weights, causal=False, **options):
    """Output and gradients of every leaf."""
    leaf = leaves[3] if kind != "none" else None
    out = attention(*leaves[:3], bias=make_bias(kind, leaf, causal), causal=causal, **options)
    return [out, *torch.autograd.grad(out, leaves, weights.to(out.dtype))]


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm().clamp_min(1e-30))


def compare(backend, kind, leaves, causal=False, reference=attention_reference, **options):
    """Hold the tolerance rule: twice the error of plain PyTorch in the same type forward, three times in gradients."""
    weights = torch.randn_like(leaves[0])
    ours = run(flash_attention, kind, leaves, weights, causal, backend=backend, **options)
    drop = ("max_seqlen_q", "max_seqlen_k")
    options = {k: v for k, v in options.items() if k not in drop}
    exact = run(reference, kind, [x.detach().double().requires_grad_() for x in leaves], weights, causal, **options)
    plain = run(reference, kind, [x.detach().requires_grad_() for x in leaves], weights, causal, **options)
    for n, (a, b, c) in enumerate(zip(ours, plain, exact, strict=True)):
        assert a.isfinite().all(), n
        if not c.any():  # with one key, two equal sums in float32 cancel
            assert float(a.detach().abs().max()) <= (2e-5 if leaves[1].shape[-3] == 1 else 0), n
            continue
        # The last gradient of a bias may be a small difference of large sums.
        floor = 1e-5 if n < 4 else max(2e-4, 3 * table_rounding(kind, ours[0], weights, c))
        if kind.startswith("alibi") and reference is attention_reference and leaves[1].shape[1] > 256:
            floor = max(floor, exponent_rounding(leaves[3], leaves[0].shape[1], leaves[1].shape[1]))
            if n == 4:
                terms = slope_rounding(leaves, weights, causal, kind == "alibi-signed", options["softmax_scale"])
                floor = max(floor, terms / float(c.norm()))
        assert relative_error(a, c) <= max((2 if n == 0 else 3) * relative_error(b, c), floor), n
    return ours
