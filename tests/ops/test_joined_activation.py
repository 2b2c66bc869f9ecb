"""The gated GELU of a joined projection, and with the projection behind it: gradients, and what they keep."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fat5.ops import gated_gelu, gated_gelu_linear, joined_gated_gelu
from fat5.ops.activation.reference import gated_gelu_reference
from tests.ops.kernel_checks import (
    CUDA,
    DEVICE,
    LOW_PRECISION,
    captured,
    hold_the_tolerance_rule,
    leaf,
    needs_gpu,
    needs_kernels,
    with_gradients,
)

BACKENDS = ["torch", pytest.param("triton", marks=needs_kernels)]


def joined_reference(joined: Tensor, *, approximate: str = "tanh") -> Tensor:
    return gated_gelu_reference(*joined.chunk(2, -1), approximate=approximate)


def linear_reference(joined: Tensor, weight: Tensor, *, approximate: str = "tanh") -> Tensor:
    return F.linear(joined_reference(joined, approximate=approximate), weight)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("approximate", ["tanh", "none"])
@pytest.mark.parametrize("shape", [(14,), (1, 2), (43, 66), (2, 3, 704), (3, 2200)])
def test_equals_the_reference_with_gradients(backend, approximate, shape):
    options = {"approximate": approximate}
    joined = leaf(*shape)
    hold_the_tolerance_rule(
        functools.partial(joined_gated_gelu, backend=backend, **options),
        functools.partial(joined_reference, **options),
        [joined],
    )
    hold_the_tolerance_rule(
        functools.partial(gated_gelu_linear, backend=backend, **options),
        functools.partial(linear_reference, **options),
        [joined, leaf(5, shape[-1] // 2)],
    )


@needs_kernels
@pytest.mark.parametrize("dtype", LOW_PRECISION)
def test_low_precision_holds_the_tolerance_rule(dtype):
    leaves = [leaf(50, 96, dtype=dtype), leaf(16, 48, dtype=dtype)]
    results = hold_the_tolerance_rule(functools.partial(gated_gelu_linear, backend="triton"), linear_reference, leaves)
    assert {x.dtype for x in results} == {dtype}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("frozen", [0, 1])
def test_frozen_inputs(backend, frozen):
    leaves = [leaf(7, 40), leaf(6, 20)]
    leaves[frozen].requires_grad_(False)
    hold_the_tolerance_rule(functools.partial(gated_gelu_linear, backend=backend), linear_reference, leaves)


@needs_kernels
def test_strided_and_expanded_inputs_and_gradients():
    leaves = [leaf(6, 12), leaf(4, 6)]
    views = (lambda x: x[::2], lambda x: x[:, ::2].t(), lambda x: x[:1].expand(5, 12), lambda x: x.reshape(2, 3, 12))
    for view in views:
        for functions in ((joined_gated_gelu, joined_reference), (gated_gelu_linear, linear_reference)):
            joined = view(leaves[0])
            weights = [leaves[1][:, : joined.shape[-1] // 2]] if functions[0] is gated_gelu_linear else []
            results = []
            for function, options in zip(functions, ({"backend": "triton"}, {}), strict=True):
                out = function(joined, *weights, **options)
                results.append([out, *torch.autograd.grad(out.sum(), leaves[: 1 + len(weights)], retain_graph=True)])
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(0, 16), (2, 0, 16), (3, 0)])
def test_empty_inputs(backend, shape):
    joined, weight = leaf(*shape), leaf(4, shape[-1] // 2)
    out = gated_gelu_linear(joined, weight, backend=backend)
    grads = torch.autograd.grad(out.sum(), [joined, weight])
    assert out.shape == (*shape[:-1], 4)
    assert [x.shape for x in grads] == [joined.shape, weight.shape]
    assert not grads[1].any()
    assert joined_gated_gelu(joined, backend=backend).shape == (*shape[:-1], shape[-1] // 2)


@needs_kernels
def test_the_backward_makes_the_forward_s_own_activation():
    from fat5.ops.activation.custom_ops import triton_joined_gated_gelu, triton_joined_gated_gelu_backward

    joined = torch.randn(33, 2200, device=DEVICE)
    grad = torch.randn(33, 1100, device=DEVICE)
    for tanh in (True, False):
        out = triton_joined_gated_gelu(joined, tanh)
        approximate = "tanh" if tanh else "none"
        assert torch.equal(out, gated_gelu(*joined.chunk(2, -1), approximate=approximate, backend="triton"))
        grad_joined, again = triton_joined_gated_gelu_backward(grad, joined, tanh, True)
        assert torch.equal(out, again)
        alone, nothing = triton_joined_gated_gelu_backward(grad, joined, tanh, False)
        assert torch.equal(grad_joined, alone)
        assert nothing.numel() == 0


@needs_kernels
def test_keeps_the_projection_and_the_weight_alone():
    leaves = [leaf(8, 32), leaf(4, 16)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.data_ptr()) or x, lambda x: x):
        out = gated_gelu_linear(*leaves, backend="triton")
    assert out.requires_grad
    assert sorted(saved) == sorted(x.data_ptr() for x in leaves)


@needs_kernels
def test_a_compiled_step_keeps_no_activation_either():
    """What the partitioner hands to the backward, which runs the forward's kernel no second time."""
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    leaves = [leaf(40, 12), leaf(32, 12), leaf(12, 16)]

    def step(x, joined, weight):
        return gated_gelu_linear(F.linear(x, joined), weight, backend="triton").sin()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    results = [with_gradients(f, leaves, [torch.ones(40, 12, device=DEVICE)]) for f in (compiled, step)]
    torch.testing.assert_close(*results)
    _, backward = graphs
    handed = [tuple(node.meta["val"].shape) for node in backward.graph.nodes if node.op == "placeholder"]
    assert (40, 32) in handed  # the projection
    assert (40, 16) not in handed
    names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum("joined_gated_gelu" in name and "backward" not in name for name in names) == 1
    assert sum(name.startswith("aten.mm") for name in names) == 2 + 4


@pytest.mark.parametrize("function", [joined_gated_gelu, gated_gelu_linear])
def test_gradcheck_in_float64(function):
    leaves = [leaf(3, 10, dtype=torch.float64)]
    leaves += [leaf(2, 5, dtype=torch.float64)] if function is gated_gelu_linear else []
    for approximate in ("tanh", "none"):
        assert torch.autograd.gradcheck(functools.partial(function, approximate=approximate), leaves)


@needs_kernels
def test_opcheck():
    from fat5.ops.activation.custom_ops import triton_joined_gated_gelu, triton_joined_gated_gelu_backward

    joined = leaf(3, 20)
    torch.library.opcheck(triton_joined_gated_gelu, (joined, True))
    grad = torch.randn(3, 10, device=DEVICE)
    for again in (True, False):
        checks = ("test_schema", "test_faketensor")
        inputs = (grad, joined.detach(), False, again)
        torch.library.opcheck(triton_joined_gated_gelu_backward, inputs, test_utils=checks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_casts_at_the_door(backend):
    if backend == "triton" and not CUDA:
        pytest.skip("the interpreter truncates bf16")
    leaves = [leaf(9, 12), leaf(4, 6)]
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = gated_gelu_linear(*leaves, backend=backend)
    assert out.dtype == torch.bfloat16
    got = torch.autograd.grad(out.sum(), leaves)
    want = torch.autograd.grad(linear_reference(*leaves).sum(), leaves)
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: joined_gated_gelu(x[:, :3]), r"\[\.\.\., 2 D\].*got \[2, 3\]"),
        (lambda x: joined_gated_gelu(x.long()), "floating projection"),
        (lambda x: joined_gated_gelu(x, approximate="erf"), "joined_gated_gelu: .* got 'erf'"),
        (lambda x: gated_gelu_linear(x, x), r"weight \[any, 2\] .* got \[2, 4\]"),
        (lambda x: gated_gelu_linear(x, x[:, :2].double()), "got .* torch.float64"),
        (lambda x: joined_gated_gelu(x, backend="trition"), "did you mean 'triton'"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.ones(2, 4, device=DEVICE))


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(32_768, 4096), (361, 2816), (1, 4096)])
def test_real_sizes(dtype, shape):
    leaves = [leaf(*shape, dtype=dtype), leaf(768, shape[1] // 2, dtype=dtype)]
    hold_the_tolerance_rule(functools.partial(gated_gelu_linear, backend="triton"), linear_reference, leaves)


@pytest.mark.gpu
@needs_gpu
def test_cuda_graphs():
    leaves = [leaf(300, 4096, dtype=torch.bfloat16), leaf(768, 2048, dtype=torch.bfloat16)]
    grads = [torch.randn(300, 768, device=DEVICE)]
    expected = with_gradients(gated_gelu_linear, leaves, grads)
    for got, want in zip(captured(gated_gelu_linear, leaves, grads), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.gpu
@needs_gpu
def test_the_peak_of_memory_has_no_activation_in_it():
    """Between forward and backward stand the projection and the output, not the activation."""
    tokens, width = 8192, 2048
    leaves = [leaf(tokens, 2 * width, dtype=torch.bfloat16), leaf(64, width, dtype=torch.bfloat16)]
    gated_gelu_linear(*leaves).sum().backward()
    before = torch.cuda.memory_allocated()
    out = gated_gelu_linear(*leaves)
    assert torch.cuda.memory_allocated() - before < tokens * width  # half of the activation's bytes
    assert out.any()
