"""The gated feed-forward layer: values, gradients, what it keeps, and its fused kernel."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from fat5.ops import gated_feed_forward
from fat5.ops.activation.reference import gated_gelu_reference
from tests.ops.kernel_checks import (
    CUDA,
    DEVICE,
    LOW_PRECISION,
    hold_the_tolerance_rule,
    leaf,
    needs_kernels,
    with_gradients,
)

HOPPER = CUDA and torch.cuda.get_device_capability() == (9, 0)
needs_fused = pytest.mark.skipif(CUDA and not HOPPER, reason="needs a Hopper GPU, or none")
KERNEL_TYPES = LOW_PRECISION if CUDA else (torch.float32, *LOW_PRECISION)


def reference(x: Tensor, joined: Tensor, weight: Tensor, *, approximate: str = "tanh") -> Tensor:
    return F.linear(gated_gelu_reference(*F.linear(x, joined).chunk(2, -1), approximate=approximate), weight)


def leaves_of(*leading: int, wide: int = 48, width: int = 64, out: int = 32, dtype=torch.float32) -> list[Tensor]:
    weights = [(leaf(2 * width, wide), wide), (leaf(out, width), width)]
    return [leaf(*leading, wide, dtype=dtype)] + [
        (w.detach() * fan_in**-0.5).to(dtype).requires_grad_() for w, fan_in in weights
    ]


def triton(fused=True, **options):
    return functools.partial(gated_feed_forward, backend="triton", fused=fused, **options)


@pytest.mark.parametrize("shape", [(3,), (2, 5), ()])
def test_plain_pytorch_equals_the_reference(shape):
    for approximate in ("tanh", "none"):
        options = {"approximate": approximate}
        for keep in (False, True):
            own = functools.partial(gated_feed_forward, backend="torch", keep_inner=keep, **options)
            hold_the_tolerance_rule(own, functools.partial(reference, **options), leaves_of(*shape))


@needs_kernels
@pytest.mark.parametrize("dtype", KERNEL_TYPES)
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1,), {}),
        ((43,), {"keep_inner": True}),
        ((2, 65), {"approximate": "none"}),
        ((361,), {"approximate": "none", "keep_inner": True}),
    ],
)
def test_the_fused_kernel_holds_the_tolerance_rule(dtype, shape, options):
    truth = functools.partial(reference, approximate=options.get("approximate", "tanh"))
    results = hold_the_tolerance_rule(triton(**options), truth, leaves_of(*shape, dtype=dtype))
    assert {x.dtype for x in results} == {dtype}


@needs_kernels
@pytest.mark.parametrize("keep_inner", [False, True])
def test_separate_kernels_give_the_same(keep_inner):
    dtype = torch.bfloat16 if CUDA else torch.float32
    leaves, grads = leaves_of(70, dtype=dtype), [torch.randn(70, 32, device=DEVICE)]
    plain = with_gradients(triton(False), leaves, grads)
    tolerance = {"rtol": 0.05, "atol": 0.02} if CUDA else {"rtol": 1e-4, "atol": 1e-4}
    for got, want in zip(with_gradients(triton(keep_inner=keep_inner), leaves, grads), plain, strict=True):
        torch.testing.assert_close(got, want, **tolerance)


@needs_kernels
@pytest.mark.parametrize("frozen", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 2)])
def test_frozen_inputs(frozen):
    dtype = torch.bfloat16 if CUDA else torch.float32
    for keep_inner in (False, True):
        leaves = leaves_of(20, dtype=dtype)
        for place in frozen:
            leaves[place].requires_grad_(False)
        hold_the_tolerance_rule(triton(keep_inner=keep_inner), reference, leaves)


@needs_kernels
def test_without_gradients_the_projection_is_not_returned():
    dtype = torch.bfloat16 if CUDA else torch.float32
    leaves = leaves_of(37, dtype=dtype)
    with torch.no_grad():
        out = triton()(*leaves)
    assert torch.equal(out, triton()(*leaves))
    assert not out.requires_grad


@needs_kernels
def test_strided_and_expanded_inputs_and_gradients():
    dtype = torch.bfloat16 if CUDA else torch.float32
    x, joined, weight = leaves_of(40, wide=64, dtype=dtype)
    wide = leaf(64, 200, dtype=dtype)
    views = [
        (x[::3], joined, weight),
        (wide[:, 8:72], joined, weight),
        (wide.t()[:40], joined, weight),
        (x[:1].expand(9, 64), joined, weight),
        (x, joined.t().contiguous().t(), weight.t().contiguous().t()),
        (x.reshape(2, 20, 64)[:, ::2], joined, weight),
    ]
    tolerance = {"rtol": 0.05, "atol": 0.1} if CUDA else {"rtol": 1e-4, "atol": 1e-4}
    for view in views:
        results = []
        for function in (triton(), reference):
            out = function(*view)
            used = [t for t in (x, wide, joined, weight) if t is not (wide if view[0]._base is x else None)]
            grads = torch.autograd.grad(out.sum(), used, allow_unused=True, retain_graph=True)
            results.append([out, *(g for g in grads if g is not None)])
        assert len(results[0]) == 4
        torch.testing.assert_close(*results, **tolerance)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_kernels)])
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_empty_inputs(backend, shape):
    leaves = leaves_of(*shape)
    out = gated_feed_forward(*leaves, backend=backend, fused=True)
    assert out.shape == (*shape, 32)
    grads = torch.autograd.grad(out.sum(), leaves)
    assert [g.shape for g in grads] == [x.shape for x in leaves]
    assert not any(g.any() for g in grads)


@needs_kernels
@pytest.mark.parametrize(("wide", "width"), [(44, 64), (48, 72)])
def test_widths_that_the_kernel_does_not_take_go_the_other_way(wide, width, monkeypatch):
    from fat5.ops.feed_forward import layer

    monkeypatch.setattr(layer, "triton_feed_forward_inner", None)
    hold_the_tolerance_rule(triton(), reference, leaves_of(5, wide=wide, width=width))


@needs_kernels
@needs_fused
def test_keeps_the_activation_only_if_asked_to():
    dtype = torch.bfloat16 if CUDA else torch.float32
    for keep_inner in (False, True):
        leaves, saved = leaves_of(24, dtype=dtype), []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=saved: to.append(tuple(x.shape)) or x, lambda x: x):
            triton(keep_inner=keep_inner)(*leaves)
        inner = [(24, 64)] if keep_inner else []
        assert sorted(saved) == sorted([(24, 48), (128, 48), (32, 64), (24, 128), *inner])


@needs_kernels
@needs_fused
@pytest.mark.parametrize(
    ("frozen", "unused"),
    [((1,), {(24, 48)}), ((1, 2), {(24, 48), (24, 64)}), ((0,), {(128, 48)}), ((0, 1), {(24, 48), (128, 48)})],
)
def test_keeps_nothing_for_gradients_that_nobody_asks_for(frozen, unused):
    leaves, saved = leaves_of(24, dtype=torch.bfloat16 if CUDA else torch.float32), []
    for place in frozen:
        leaves[place].requires_grad_(False)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        triton(keep_inner=True)(*leaves)
    assert set(saved) == {(24, 48), (128, 48), (32, 64), (24, 128), (24, 64)} - unused


@needs_kernels
@needs_fused
@pytest.mark.parametrize("keep_inner", [False, True])
def test_a_compiled_step_is_one_graph_of_plain_products_around_the_kernels(keep_inner):
    graphs = []

    def compiler(graph, inputs):
        graphs.append(graph)
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=min_cut_rematerialization_partition)
    dtype = torch.bfloat16 if CUDA else torch.float32
    leaves = leaves_of(40, dtype=dtype)

    def step(*inputs):
        return triton(keep_inner=keep_inner)(*inputs).sin()

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    grads = [torch.ones(40, 32, device=DEVICE)]
    torch.testing.assert_close(with_gradients(compiled, leaves, grads), with_gradients(step, leaves, grads))
    names = [[str(node.target) for node in graph.graph.nodes] for graph in graphs]
    assert [sum(name.startswith("aten.mm") for name in graph) for graph in names] == [1, 4]
    assert [sum("feed_forward_inner" in name for name in graph) for graph in names] == [1, 0]
    assert [sum("gated_gelu_backward" in name for name in graph) for graph in names] == [0, 1]
    handed = [tuple(n.meta["val"].shape) for n in graphs[1].graph.nodes if n.op == "placeholder"]
    assert (40, 128) in handed
    assert ((40, 64) in handed) == keep_inner


@needs_kernels
@needs_fused
def test_opcheck():
    from fat5.ops.feed_forward.custom_ops import triton_feed_forward_inner

    dtype = torch.bfloat16 if CUDA else torch.float32
    x, joined_weight, _ = (t.detach() for t in leaves_of(9, dtype=dtype))
    for keep in (True, False):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(triton_feed_forward_inner, (x, joined_weight, True, keep), test_utils=checks)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_kernels)])
def test_autocast_casts_at_the_door(backend):
    if backend == "triton" and not CUDA:
        pytest.skip("the interpreter truncates bf16")
    leaves = leaves_of(30)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = gated_feed_forward(*leaves, backend=backend, fused=True)
    assert out.dtype == torch.bfloat16
    got = torch.autograd.grad(out.sum(), leaves)
    want = torch.autograd.grad(reference(*leaves).sum(), leaves)
    torch.testing.assert_close(got, want, rtol=0.05, atol=0.1)


def test_gradcheck_in_float64():
    leaves = leaves_of(3, wide=4, width=5, out=2, dtype=torch.float64)
    for keep_inner in (False, True):
        assert torch.autograd.gradcheck(functools.partial(gated_feed_forward, keep_inner=keep_inner), leaves)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, j, w: gated_feed_forward(x[:, :3], j, w), r"x \[\.\.\., E\].*got x \[4, 3\]"),
        (lambda x, j, w: gated_feed_forward(x, j[:7], w), r"weights \[7, 48\]"),
        (lambda x, j, w: gated_feed_forward(x, j.double(), w), "got .* torch.float64"),
        (lambda x, j, w: gated_feed_forward(x, j, w, approximate="erf"), "gated_feed_forward: .* got 'erf'"),
        (lambda x, j, w: gated_feed_forward(x, j, w, backend="trition"), "did you mean 'triton'"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(*leaves_of(4))


def test_the_environment_keeps_the_kernel_out(monkeypatch):
    """Asked in a compiled step too, without a break of the graph."""
    from fat5.ops.feed_forward.choice import SWITCH, fuses_by_default

    for value, want in (("0", False), ("1", True), (None, True)):
        monkeypatch.delenv(SWITCH, raising=False)
        if value is not None:
            monkeypatch.setenv(SWITCH, value)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: x + fuses_by_default(), backend="eager", fullgraph=True)
        assert compiled(torch.zeros(())) == fuses_by_default() == want


@pytest.mark.parametrize(("hopper", "rows", "fused"), [(True, 9000, True), (True, 100, False), (False, 9000, False)])
def test_by_default_many_tokens_are_fused_on_hopper(hopper, rows, fused, monkeypatch):
    from types import SimpleNamespace

    from fat5.ops.feed_forward import api
    from fat5.ops.feed_forward.choice import SWITCH

    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(api, "card_can_fuse", lambda: hopper)
    x = SimpleNamespace(is_cuda=True, numel=lambda: rows * 64, element_size=lambda: 2)
    weight = torch.empty(128, 64)
    assert api._fuses(x, weight, None) == fused
    assert api._fuses(x, weight, True) == hopper
    monkeypatch.setenv(SWITCH, "0")
    assert not api._fuses(x, weight, None)
