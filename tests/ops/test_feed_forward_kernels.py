"""The fused kernel of the feed-forward layer by itself, at real sizes, and in graphs."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F

from fat5.nn import FeedForward
from fat5.ops import gated_feed_forward
from tests.ops.kernel_checks import (
    CUDA,
    DEVICE,
    captured,
    hold_the_tolerance_rule,
    leaf,
    needs_gpu,
    needs_kernels,
    relative_error,
    with_gradients,
)
from tests.ops.test_feed_forward import HOPPER, leaves_of, needs_fused, reference

needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
DTYPE = torch.bfloat16 if CUDA else torch.float32


def tile(*sizes, **options):
    from fat5.ops.feed_forward.tiles import ProductTile

    return ProductTile(*sizes, **options)


@needs_kernels
@needs_fused
@pytest.mark.parametrize("resident", [1, 3])
@pytest.mark.parametrize("tanh", [True, False])
@pytest.mark.parametrize(("rows", "wide", "width"), [(1, 16, 64), (70, 48, 192), (150, 80, 64)])
def test_equals_a_product_and_a_kernel(resident, tanh, rows, wide, width):
    """With several tiles a program, tails of rows and of the sum; the activation bit by bit."""
    from fat5.ops.activation.custom_ops import triton_joined_gated_gelu
    from fat5.ops.feed_forward.launch import run_forward

    x, joined_weight, _ = (t.detach() for t in leaves_of(rows, wide=wide, width=width, dtype=DTYPE))
    joined = F.linear(x, joined_weight)
    for size in (tile(64, 32, 16, 4, 2, 1, resident), tile(64, 64, 32, 4, 3, 2, resident)):
        made, activation = run_forward(x, joined_weight, tanh, True, size)
        assert relative_error(made, joined) < (1e-2 if CUDA else 1e-6)
        assert torch.equal(activation, triton_joined_gated_gelu(made, tanh))
        nothing, alone = run_forward(x, joined_weight, tanh, False, size)
        assert nothing is None
        assert torch.equal(alone, activation)


@needs_kernels
@needs_fused
def test_addresses_and_strides_that_descriptors_do_not_take():
    from fat5.ops.feed_forward.launch import run_forward

    store, weights = torch.randn(50, 72, device=DEVICE).to(DTYPE), torch.randn(130, 40, device=DEVICE).to(DTYPE)
    views = [store[:, 1:41], store.view(-1)[3 : 3 + 40 * 80].view(80, 40), store[:7].t()[:, :7].t()[:, 32:],
             store[:1, :40].expand(30, 40), store.view(-1)[: 40 * 70].view(40, 70).t()]  # fmt: skip
    for x in views:
        for weight in (weights[1:129], weights.view(-1)[5 : 5 + 128 * 40].view(128, 40)):
            made, _ = run_forward(x, weight, True, True)
            assert relative_error(made, F.linear(x, weight)) < (1e-2 if CUDA else 1e-6)


@needs_kernels
@needs_fused
def test_large_gates_give_no_nan():
    from fat5.ops.feed_forward.launch import run_forward

    x = torch.tensor([-3e4, 3e4, -1.0, 0.0], device=DEVICE, dtype=torch.float16)[:, None].expand(4, 16).contiguous()
    weight = torch.ones(128, 16, device=DEVICE, dtype=torch.float16) / 16
    for tanh in (True, False):
        joined, inner = run_forward(x, weight, tanh, True)
        assert torch.equal(joined[:, 0], x[:, 0])
        assert not inner.isnan().any()
        assert inner[2].all()
        assert not inner[3].any()


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("options", [{}, {"keep_inner": True}, {"approximate": "none"}])
@pytest.mark.parametrize("sizes", [(16_384, 512, 2048), (4133, 768, 3072), (4097, 1024, 2816), (300, 48, 64)])
def test_real_sizes(dtype, options, sizes):
    rows, wide, width = sizes
    leaves = leaves_of(rows, wide=wide, width=width, out=wide, dtype=dtype)
    truth = functools.partial(reference, approximate=options.get("approximate", "tanh"))
    hold_the_tolerance_rule(functools.partial(gated_feed_forward, fused=True, **options), truth, leaves)


@pytest.mark.gpu
@needs_hopper
def test_every_tile_to_be_tried_gives_the_same():
    from fat5.ops.activation.custom_ops import triton_joined_gated_gelu
    from fat5.ops.feed_forward.launch import run_forward
    from fat5.ops.feed_forward.tiles import candidates

    x, joined_weight, _ = (t.detach() for t in leaves_of(1111, wide=512, width=2048, dtype=DTYPE))
    for size in candidates():
        made, activation = run_forward(x, joined_weight, True, True, size)
        assert relative_error(made, F.linear(x, joined_weight)) < 5e-3, size
        assert relative_error(activation, triton_joined_gated_gelu(made, True)) < 1e-3, size


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("keep_inner", [False, True])
def test_cuda_graphs(keep_inner):
    leaves = leaves_of(300, wide=512, width=2048, out=512, dtype=torch.bfloat16)
    own = functools.partial(gated_feed_forward, fused=True, keep_inner=keep_inner)
    grads = [torch.randn(300, 512, device=DEVICE)]
    for got, want in zip(captured(own, leaves, grads), with_gradients(own, leaves, grads), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.gpu
@needs_gpu
def test_compiled_with_cuda_graphs():
    """Descriptors hold addresses: each replay has to read and write where the graph's tensors are."""
    own = functools.partial(gated_feed_forward, fused=True)
    compiled = torch.compile(lambda *x: own(*x).sin(), mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        leaves = leaves_of(4096, wide=512, width=2048, out=512, dtype=torch.bfloat16)
        grads = [torch.randn(4096, 512, device=DEVICE)]
        results = [with_gradients(f, leaves, grads) for f in (compiled, lambda *x: own(*x).sin())]
        for got, want in zip(*results, strict=True):
            assert relative_error(got, want) < 1e-2


@pytest.mark.gpu
@needs_gpu
def test_the_module_gives_the_same_with_and_without(monkeypatch):
    layer = FeedForward(512, 2048, activation="gelu_new", gated=True).to(DEVICE, torch.bfloat16)
    x = leaf(8192, 512, dtype=torch.bfloat16)
    results = []
    for asked in ("0", "1"):
        monkeypatch.setenv("FAT5_FEED_FORWARD", asked)
        out = layer(x)
        results.append([out, *torch.autograd.grad(out.sum(), [x, *layer.parameters()])])
    for got, want in zip(*results, strict=True):
        assert relative_error(got, want) < 1e-2


@pytest.mark.gpu
@needs_gpu
def test_memory_between_forward_and_backward():
    """The projection and the output stand there; the activation only if it is to be kept."""
    leaves = leaves_of(8192, wide=64, width=2048, out=64, dtype=torch.bfloat16)
    inner = 8192 * 2048 * 2
    for keep_inner in (False, True):
        own = functools.partial(gated_feed_forward, fused=True, keep_inner=keep_inner)
        own(*leaves).sum().backward()
        before = torch.cuda.memory_allocated()
        out = own(*leaves)
        held = torch.cuda.memory_allocated() - before
        assert 2 * inner <= held < (3.25 if keep_inner else 2.25) * inner
        assert out.any()
        del out
