"""rms_norm on a GPU, where PyTorch's fused kernel runs."""

from __future__ import annotations

import pytest
import torch

from fat5.ops.norm import rms_norm
from fat5.ops.norm.reference import rms_norm_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got.double() - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("shape", [(32_768, 512), (361, 176), (0, 64)])
def test_types_and_errors(x_dtype, weight_dtype, autocast, shape):
    """Pitfall: a float32 weight changes the output type; the weight gradient is summed in bf16."""
    x = torch.randn(shape, device="cuda").to(x_dtype).requires_grad_()
    weight = (1 + 0.1 * torch.randn(shape[-1], device="cuda")).to(weight_dtype).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y = rms_norm(x, weight)
    assert y.dtype == x_dtype
    grad = (1 + torch.randn(shape, device="cuda")).to(x_dtype)
    got = (y, *torch.autograd.grad(y, (x, weight), grad))
    assert [t.dtype for t in got] == [x_dtype, x_dtype, weight_dtype]
    if not x.numel():
        assert torch.equal(got[2], torch.zeros_like(weight))
        return
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = rms_norm_reference(*wide)
    exact = (expected, *torch.autograd.grad(expected, wide, grad.double()))
    for ours, truth in zip(got, exact, strict=True):
        assert error(ours, truth) < torch.finfo(ours.dtype).eps / 2 + 1e-6
