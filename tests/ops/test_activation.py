"""gated_gelu: values against float64, gradients, halves of one projection, odd inputs, errors at the door."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from fat5.ops import gated_gelu
from fat5.ops.activation.reference import gated_gelu_reference
from tests.ops.kernel_checks import (
    CUDA,
    DEVICE,
    LOW_PRECISION,
    REASON,
    captured,
    hold_the_tolerance_rule,
    leaf,
    needs_gpu,
    needs_kernels,
    with_gradients,
)

BACKENDS = ["torch", pytest.param("triton", marks=needs_kernels)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("shape", [(7,), (1, 1), (43, 33), (2, 3, 704), (3, 1500)])
def test_equals_the_reference_with_gradients(backend, approximate, shape):
    options = {"approximate": approximate}
    ours = functools.partial(gated_gelu, backend=backend, **options)
    leaves = [leaf(*shape), leaf(*shape)]
    with torch.no_grad():
        leaves[0].mul_(3)
    hold_the_tolerance_rule(ours, functools.partial(gated_gelu_reference, **options), leaves)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_two_forms_are_those_of_pytorch_and_differ(backend):
    x = torch.linspace(-6, 6, 1001, device=DEVICE)
    outputs = []
    for approximate in ("tanh", "none"):
        outputs.append(gated_gelu(x, torch.ones_like(x), approximate=approximate, backend=backend))
        torch.testing.assert_close(outputs[-1], F.gelu(x, approximate=approximate), rtol=1e-5, atol=1e-6)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-4
    assert torch.equal(outputs[0], gated_gelu(x, torch.ones_like(x), backend=backend))  # the tanh form is the default


@needs_kernels
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_large_inputs_have_finite_gradients(approximate):
    x = torch.tensor([-3e38, -1e20, -300.0, 0.0, 300.0, 1e20, 3e38], device=DEVICE, requires_grad=True)
    up = torch.full_like(x, 0.5, requires_grad=True)
    function = functools.partial(gated_gelu, approximate=approximate, backend="triton")
    y, grad, grad_up = with_gradients(function, [x, up], [torch.ones_like(x)])
    positive = x.detach().clamp_min(0)
    torch.testing.assert_close(y, 0.5 * positive)
    torch.testing.assert_close(grad_up, positive)
    torch.testing.assert_close(grad, torch.tensor([0, 0, 0, 0.25, 0.5, 0.5, 0.5], device=DEVICE))


@needs_kernels
@pytest.mark.parametrize("dtype", LOW_PRECISION)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_low_precision_holds_the_tolerance_rule(dtype, approximate):
    options = {"approximate": approximate}
    leaves = [leaf(50, 96, dtype=dtype), leaf(50, 96, dtype=dtype)]
    results = hold_the_tolerance_rule(
        functools.partial(gated_gelu, backend="triton", **options),
        functools.partial(gated_gelu_reference, **options),
        leaves,
    )
    assert {x.dtype for x in results} == {dtype}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frozen", [None, 0, 1])
def test_halves_of_one_projection_and_frozen_ones(backend, frozen):
    def halves(both, function, **options):
        gate, up = both.chunk(2, dim=-1)
        parts = [x.detach() if place == frozen else x for place, x in enumerate((gate, up))]
        return function(*parts, **options)

    leaves = [leaf(3, 7, 100)]
    hold_the_tolerance_rule(
        functools.partial(halves, function=gated_gelu, backend=backend),
        functools.partial(halves, function=gated_gelu_reference),
        leaves,
    )


@needs_kernels
def test_strided_and_expanded_inputs_and_gradients():
    gate, up = leaf(6, 10), leaf(6, 10)
    function = functools.partial(gated_gelu, backend="triton")
    for view in (lambda x: x.t(), lambda x: x[::2, 1::2], lambda x: x[:1].expand(4, 10), lambda x: x.reshape(2, 30)):
        got, expected = (f(view(gate), view(up)) for f in (function, gated_gelu_reference))
        torch.testing.assert_close(got, expected)
        grads = [torch.autograd.grad(y.sum(), (gate, up)) for y in (got, expected)]  # a gradient without strides
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (3, 0)])
def test_empty_inputs(backend, shape):
    leaves = [leaf(*shape), leaf(*shape)]
    function = functools.partial(gated_gelu, backend=backend)
    assert [x.shape for x in with_gradients(function, leaves, leaves[:1])] == [shape] * 3


@needs_kernels
def test_saves_the_two_projections_alone():
    gate, up = leaf(8, 16), leaf(8, 16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        y = gated_gelu(gate, up, backend="triton")
    assert y.requires_grad
    assert sorted(saved) == sorted([gate.data_ptr(), up.data_ptr()])


def test_gradcheck_in_float64():
    leaves = [leaf(3, 5, dtype=torch.float64), leaf(3, 5, dtype=torch.float64)]
    for approximate in ("tanh", "none"):
        assert torch.autograd.gradcheck(functools.partial(gated_gelu, approximate=approximate), leaves)


@needs_kernels
def test_opcheck():
    from fat5.ops.activation.custom_ops import triton_gated_gelu, triton_gated_gelu_backward

    gate, up = leaf(3, 20), leaf(3, 20)
    torch.library.opcheck(triton_gated_gelu, (gate, up, True))
    plain = [x.detach() for x in (gate, gate, up)]
    for wanted in ((True, True), (True, False), (False, True)):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(triton_gated_gelu_backward, (*plain, False, *wanted), test_utils=checks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiles_whole_with_dynamic_lengths(backend):
    def step(gate, up):
        return gated_gelu(gate, up, backend=backend) * 2

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="inductor" if CUDA else "aot_eager")
    for rows in (7, 12):
        leaves = [leaf(rows, 24), leaf(rows, 24)]
        got, expected = (with_gradients(f, leaves, leaves[:1]) for f in (compiled, step))
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: gated_gelu(x, x[:1]), r"gate \[2, 4\].*up \[1, 4\]"),
        (lambda x: gated_gelu(x, x.double()), "up .* torch.float64"),
        (lambda x: gated_gelu(x.long(), x.long()), "one floating type"),
        (lambda x: gated_gelu(x, x, approximate="erf"), "'tanh' or 'none', got 'erf'"),
        (lambda x: gated_gelu(x, x, backend="trition"), "did you mean 'triton'"),
        (lambda x: gated_gelu(x.double(), x.double(), backend="triton"), "not work here"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 4, device=DEVICE))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("shape", [(32_768, 2048), (361, 1408), (1, 2048)])
def test_real_sizes(dtype, approximate, shape):
    options = {"approximate": approximate}
    hold_the_tolerance_rule(
        functools.partial(gated_gelu, backend="triton", **options),
        functools.partial(gated_gelu_reference, **options),
        [leaf(*shape, dtype=dtype), leaf(*shape, dtype=dtype)],
    )


@pytest.mark.gpu
@needs_gpu
def test_auto_takes_the_kernels_in_cuda_graphs_too():
    assert REASON is None
    leaves = [leaf(300, 2048, dtype=torch.bfloat16), leaf(300, 2048, dtype=torch.bfloat16)]
    grads = [torch.randn(300, 2048, device=DEVICE)]
    expected = with_gradients(functools.partial(gated_gelu, backend="triton"), leaves, grads)
    for results in (with_gradients(gated_gelu, leaves, grads), captured(gated_gelu, leaves, grads)):
        assert all(torch.equal(got, want) for got, want in zip(results, expected, strict=True))


@pytest.mark.gpu
@needs_gpu
def test_more_than_2_to_the_31_elements():
    """Pitfall: 32-bit offsets wrap."""
    both = torch.ones(2**31 // 4096 + 3, 8192, device=DEVICE, dtype=torch.bfloat16)
    both[-1] = 2.0
    gate, up = both.chunk(2, dim=-1)
    y = gated_gelu(gate, up)
    torch.testing.assert_close(y[-1], 2 * F.gelu(torch.full_like(y[-1], 2.0), approximate="tanh"))
