"""What the tests of the kernels bound by memory share: where they run, and the rule for tolerances."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fat5.ops.attention.backends import BACKENDS

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# The interpreter truncates bf16 where a GPU rounds.
LOW_PRECISION = (torch.bfloat16, torch.float16) if CUDA else (torch.float16,)

REASON = BACKENDS["triton"]()
needs_kernels = pytest.mark.skipif(REASON is not None, reason=str(REASON))
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")

Outputs = Tensor | tuple[Tensor, ...]


def leaf(*shape: int, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> Tensor:
    """A random tensor that takes a gradient."""
    return (mean + torch.randn(*shape, device=DEVICE)).to(dtype).requires_grad_()


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def with_gradients(function: Callable[..., Outputs], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of a function, then the gradients of those leaves that take one."""
    out = function(*leaves)
    outputs = [out] if isinstance(out, Tensor) else list(out)
    chosen = [(x, g.to(x.dtype)) for x, g in zip(outputs, grads, strict=True) if x.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    return [*outputs, *torch.autograd.grad([x for x, _ in chosen], wanted, [g for _, g in chosen])]


def hold_the_tolerance_rule(
    function: Callable[..., Outputs], reference: Callable[..., Outputs], leaves: Sequence[Tensor]
) -> list[Tensor]:
    """Compare with float64: twice the error of plain PyTorch in the same type, three times for gradients."""
    wide = [x.detach().double().requires_grad_(x.requires_grad) for x in leaves]
    exact = reference(*wide)
    count = 1 if isinstance(exact, Tensor) else len(exact)
    grads = [
        torch.randn_like(exact if isinstance(exact, Tensor) else exact[n]).to(leaves[0].dtype) for n in range(count)
    ]
    ours = with_gradients(function, leaves, grads)
    plain = with_gradients(reference, [x.detach().requires_grad_(x.requires_grad) for x in leaves], grads)
    truth = with_gradients(reference, wide, grads)
    for place, (got, simple, true) in enumerate(zip(ours, plain, truth, strict=True)):
        assert got.shape == true.shape, place
        assert true.any(), place
        factor = 2 if place < count else 3
        limit = max(factor * relative_error(simple, true), factor * torch.finfo(got.dtype).eps / 8, 3e-6)
        error = relative_error(got, true)
        assert error <= min(limit, 0.1), f"tensor {place}: {error:.2e}, more than {limit:.2e}"
    return ours


def captured(function: Callable[..., Outputs], leaves: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
    """Outputs and gradients of a CUDA graph, replayed."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # leaves made on the default stream would draw it into the capture
        own = [x.detach().clone().requires_grad_(x.requires_grad) for x in leaves]
        with_gradients(function, own, grads)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = with_gradients(function, own, grads)
        graph.replay()
    torch.cuda.synchronize()
    return results
