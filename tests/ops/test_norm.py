"""rms_norm and its module: values, the rule for types, gradients, odd inputs, errors at the door."""

from __future__ import annotations

import pytest
import torch

from fat5.nn.norm import RMSNorm
from fat5.ops.norm import rms_norm
from fat5.ops.norm.reference import rms_norm_reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def inputs(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
    weight = (1 + 0.3 * torch.randn(shape[-1], generator=generator, dtype=torch.float64)).to(dtype)
    return x.requires_grad_(), weight.requires_grad_()


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got.double() - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("shape", [(7,), (1, 1), (43, 33), (2, 3, 5, 48)])
def test_equals_the_reference_with_gradients(shape):
    x, weight = inputs(*shape)
    y, expected = rms_norm(x, weight, 1e-3), rms_norm_reference(x, weight, 1e-3)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    grad = torch.randn_like(expected)
    torch.testing.assert_close(
        torch.autograd.grad(y, (x, weight), grad),
        torch.autograd.grad(expected, (x, weight), grad),
        rtol=1e-11,
        atol=1e-12,
    )


@pytest.mark.parametrize("x_dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", FLOATS)
def test_output_has_the_type_of_x_whatever_the_type_of_the_weight(x_dtype, weight_dtype):
    """Pitfall: a float32 weight with bf16 input changes the output type."""
    x, weight = inputs(5, 24)
    x, weight = x.detach().to(x_dtype).requires_grad_(), weight.detach().to(weight_dtype).requires_grad_()
    y = rms_norm(x, weight)
    assert y.dtype == x_dtype
    expected = rms_norm_reference(x.double(), weight.double())
    assert relative_error(y, expected) < 2 * torch.finfo(x_dtype).eps + 1e-7 * (x_dtype != torch.float64)
    y.sum().backward()
    assert x.grad.dtype == x_dtype
    assert weight.grad.dtype == weight_dtype


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_weight_gradient_is_summed_in_float32(weight_dtype):
    """Pitfall: a norm's weight gradient summed in bf16; over 20,000 rows of ones such a sum sticks at 256."""
    rows, size = 20_000, 8
    x = torch.ones(rows, size, dtype=torch.bfloat16)
    weight = torch.ones(size, dtype=weight_dtype, requires_grad=True)
    rms_norm(x, weight).sum().backward()
    torch.testing.assert_close(weight.grad.double(), torch.full((size,), float(rows)).double(), rtol=4e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_error_is_near_that_of_plain_pytorch(dtype):
    x, weight = inputs(361, 176, dtype=dtype)
    grad = torch.randn(361, 176).to(dtype)
    results = {}
    for name, function in (("ours", rms_norm), ("plain", rms_norm_reference)):
        y = function(x, weight)
        results[name] = (y, *torch.autograd.grad(y, (x, weight), grad))
    wide = tuple(t.detach().double().requires_grad_() for t in (x, weight))
    expected = rms_norm_reference(*wide)
    exact = (expected, *torch.autograd.grad(expected, wide, grad.double()))
    for ours, plain, truth, factor in zip(results["ours"], results["plain"], exact, (2, 3, 3), strict=True):
        assert relative_error(ours, truth) <= factor * relative_error(plain, truth)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_autocast_leaves_the_type_of_x_alone(x_dtype):
    x, weight = inputs(3, 16)
    x, weight = x.detach().to(x_dtype), weight.detach().float()
    with torch.autocast("cpu", torch.bfloat16):
        y = rms_norm(x, weight)
    assert y.dtype == x_dtype
    torch.testing.assert_close(y, rms_norm(x, weight))


def test_gradcheck_in_float64():
    x, weight = inputs(3, 2, 5)
    assert torch.autograd.gradcheck(rms_norm, (x.transpose(0, 1), weight))


@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16)])
def test_empty_input_gives_empty_output_and_zero_weight_gradient(shape):
    weight = torch.ones(16, requires_grad=True)
    y = rms_norm(torch.zeros(shape), weight)
    assert y.shape == shape
    y.sum().backward()
    assert torch.equal(weight.grad, torch.zeros(16))


def test_strided_and_expanded_inputs_equal_contiguous_ones():
    x, weight = inputs(6, 10)
    for view in (x[:, :6], x.t(), x[::2, 1::2], x[:1].expand(4, 10)):
        gain = weight[: view.shape[-1]]
        torch.testing.assert_close(rms_norm(view, gain), rms_norm(view.contiguous(), gain))


def test_zero_rows_are_finite():
    x = torch.zeros(2, 8, requires_grad=True)
    y = rms_norm(x, torch.ones(8), 1e-6)
    y.sum().backward()
    assert torch.equal(y, torch.zeros(2, 8))
    torch.testing.assert_close(x.grad, torch.full((2, 8), 1e3))


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_compiles_without_a_graph_break(weight_dtype):
    x, weight = inputs(4, 12)
    x, weight = x.detach().bfloat16().requires_grad_(), weight.detach().to(weight_dtype).requires_grad_()
    compiled = torch.compile(rms_norm, fullgraph=True, backend="aot_eager")
    got, expected = compiled(x, weight), rms_norm(x, weight)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(
        torch.autograd.grad(got.float().square().sum(), (x, weight)),
        torch.autograd.grad(expected.float().square().sum(), (x, weight)),
    )


@pytest.mark.parametrize(
    ("x", "weight", "eps", "message"),
    [
        (torch.ones(2, 4), torch.ones(5), 1e-6, r"\(2, 4\) and weight of shape \(5,\)"),
        (torch.ones(2, 4), torch.ones(1, 4), 1e-6, r"weight \[D\]"),
        (torch.tensor(1.0), torch.ones(1), 1e-6, r"x \[\.\.\., D\]"),
        (torch.ones(2, 4, dtype=torch.int64), torch.ones(4), 1e-6, "got x torch.int64"),
        (torch.ones(2, 4), torch.ones(4, device="meta"), 1e-6, "x on cpu and weight on meta"),
        (torch.ones(2, 4), torch.ones(4), -1.0, "eps >= 0, got -1.0"),
    ],
)
def test_bad_arguments_are_named(x, weight, eps, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, eps)


def test_module_holds_one_weight_and_scales_rows():
    module = RMSNorm(6, eps=1e-5, dtype=torch.bfloat16)
    assert {name: p.dtype for name, p in module.named_parameters()} == {"weight": torch.bfloat16}
    with torch.no_grad():
        module.weight.copy_(torch.arange(1, 7))
    x = torch.randn(2, 6, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(module(x), rms_norm_reference(x, torch.arange(1.0, 7.0), 1e-5))
    assert repr(module) == "RMSNorm(6, eps=1e-05)"
