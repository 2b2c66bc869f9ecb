"""The kernels that expand T5's table by distance and sum its gradient."""

import pytest
import torch

pytest.importorskip("triton")

from fat5.ops import RelativeBias, relative_position_buckets, saturation_radius
from fat5.ops.attention import bias
from fat5.ops.attention.bucket_kernels import expand_buckets, sum_buckets
from tests.ops.kernel_checks import DEVICE, LOW_PRECISION, needs_gpu, needs_kernels

gpu = pytest.mark.gpu
pytestmark = needs_kernels


def usual_buckets(num_buckets: int, max_distance: int, bidirectional: bool = True) -> torch.Tensor:
    radius = saturation_radius(num_buckets // (2 if bidirectional else 1), False, max_distance)
    distance = torch.arange(-radius, radius + 1, device=DEVICE)
    return relative_position_buckets(
        distance, num_buckets=num_buckets, bidirectional=bidirectional, max_distance=max_distance
    )


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance", "heads"), [(32, 128, 12), (12, 50, 3), (64, 700, 1)], ids=["t5", "small", "wide"]
)
@pytest.mark.parametrize("dtype", [torch.float32, LOW_PRECISION[0]])
def test_expansion_is_a_lookup_and_its_gradient_a_sum(num_buckets, max_distance, heads, bidirectional, dtype):
    buckets = usual_buckets(num_buckets, max_distance, bidirectional)
    table = torch.randn(num_buckets, heads, device=DEVICE).to(dtype).requires_grad_()
    expanded = expand_buckets(table, buckets)
    assert expanded.dtype == torch.float32
    assert torch.equal(expanded, table.detach()[buckets].T.float())
    weights = torch.randn(heads, buckets.shape[0], device=DEVICE)
    (grad,) = torch.autograd.grad(expanded, table, weights)
    expected = torch.zeros(num_buckets, heads, dtype=torch.float64, device=DEVICE)
    expected.index_add_(0, buckets, weights.T.double())
    assert grad.dtype == dtype
    torch.testing.assert_close(grad.double(), expected, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5)
    (again,) = torch.autograd.grad(expand_buckets(table, buckets), table, weights)
    assert torch.equal(again, grad)


def test_tables_and_gradients_of_any_strides():
    buckets = usual_buckets(8, 16)
    rows = torch.randn(3, 8, device=DEVICE)
    assert torch.equal(expand_buckets(rows.T, buckets), rows[:, buckets])
    grad = torch.randn(buckets.shape[0], 3, device=DEVICE).T
    assert torch.equal(
        sum_buckets(grad, buckets, 8, torch.float32), sum_buckets(grad.contiguous(), buckets, 8, torch.float32)
    )
    one = torch.ones(1, 1, device=DEVICE).expand(3, buckets.shape[0])  # the gradient of a plain sum
    counts = torch.bincount(buckets, minlength=8).float()
    assert torch.equal(sum_buckets(one, buckets, 8, torch.float32), counts[:, None].expand(8, 3))


def test_second_derivatives():
    """The sum's own gradient is the expansion, as where both are plain PyTorch."""
    buckets = usual_buckets(8, 16)
    table = torch.randn(8, 2, device=DEVICE, requires_grad=True)
    weights = torch.randn(2, buckets.shape[0], device=DEVICE, requires_grad=True)
    (grad,) = torch.autograd.grad((expand_buckets(table, buckets) * weights).sum(), table, create_graph=True)
    direction = torch.randn_like(table)
    (second,) = torch.autograd.grad((grad * direction).sum(), weights)
    torch.testing.assert_close(second, direction[buckets].T)


def test_opcheck():
    buckets = usual_buckets(8, 16)
    table = torch.randn(8, 2, device=DEVICE, requires_grad=True)
    grad = torch.randn(2, buckets.shape[0], device=DEVICE, requires_grad=True)
    torch.library.opcheck(expand_buckets, (table, buckets))
    torch.library.opcheck(sum_buckets, (grad, buckets, 8, torch.float32))


@gpu
@needs_gpu
def test_a_bias_on_a_gpu_takes_the_kernels_and_equals_plain_pytorch(monkeypatch):
    table = torch.randn(32, 12, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.randn(12, 183, device=DEVICE)
    results = []
    for has_kernels in (True, False):
        monkeypatch.setattr(bias, "_has_kernels", lambda table, answer=has_kernels: answer)
        expanded = RelativeBias(table, bidirectional=True).by_distance().table
        results.append((expanded.detach(), *torch.autograd.grad(expanded, table, weights)))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], rtol=1e-2, atol=1e-2)
    monkeypatch.undo()
    assert bias._has_kernels(table)
