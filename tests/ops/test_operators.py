"""Operators of the package's own kind: what torch.library.custom_op promises holds for them too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from fat5.ops import operators
from fat5.ops.operators import call, operator, register_autograd

NAME = "test_scaled_sum"


def scaled_sum(x: Tensor, y: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    total = x if y is None else x + y
    return total * scale, total.sum()


def fake(x, y, scale):
    return x.new_empty(x.shape), x.new_empty(())


def setup_context(ctx, inputs, output):
    ctx.scale, ctx.has_y = inputs[2], inputs[1] is not None
    ctx.save_for_backward(output[0])


def differentiate(ctx, grad, grad_sum):
    (out,) = ctx.saved_tensors
    grad = grad * ctx.scale + grad_sum.expand(out.shape)
    return grad, grad if ctx.has_y else None, None


def define(formula=True, factor=1.0):
    def function(x: Tensor, y: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
        return scaled_sum(x, y, factor * scale)

    defined = operator(NAME, fake=fake)(function)
    if formula:
        register_autograd(defined, differentiate, setup_context=setup_context)
    return defined


@pytest.fixture(autouse=True)
def undefine():
    yield
    operators._libraries.pop(NAME, None)


def leaves():
    return torch.randn(3, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)


def test_opcheck():
    op = define()
    x, y = leaves()
    torch.library.opcheck(op, (x, y, 0.5))
    torch.library.opcheck(op, (x, None, 0.5))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_values_in_every_mode(mode):
    op = define()
    x, y = leaves()
    with mode():
        out, total = op(x, y, 0.5)
    assert torch.equal(out, (x + y) * 0.5)
    assert torch.equal(total, (x + y).sum())
    assert out.requires_grad == (mode is torch.enable_grad)


def test_gradients_go_where_they_are_asked_for():
    op = define()
    x, y = leaves()
    out, total = op(x, y.detach(), 0.5)
    (out.square().sum() + total).backward()
    torch.testing.assert_close(x.grad, (x + y).detach() * 0.5 + 1)
    assert y.grad is None


def test_compiles_whole_with_gradients():
    op = define()
    x, y = leaves()

    def run(x, y):
        out, total = op(x.sin(), y, 0.5)
        return out.cos().sum() + total

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    want, got = (torch.autograd.grad(f(x, y), (x, y)) for f in (run, compiled))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_the_function_is_not_traced_behind_a_graph_break():
    """The dispatcher calls it while the compiler looks at each new frame of the Python code around."""
    seen = []

    def function(x: Tensor) -> Tensor:
        seen.append(torch.compiler.is_compiling())
        return x + 1

    op = operator(NAME, fake=lambda x: x.new_empty(x.shape))(function)
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph.forward

    def run(x):
        torch._dynamo.graph_break()
        return op(x)

    x = torch.zeros(2)
    assert torch.equal(torch.compile(run, backend=backend)(x), x + 1)
    assert seen == [False]
    assert all(node.target is not torch.add for graph in frames for node in graph.graph.nodes)


def test_without_a_formula_the_backward_pass_raises():
    op = define(formula=False)
    x, y = leaves()
    out, _ = op(x, y, 0.5)
    with pytest.raises(RuntimeError, match=f"fat5::{NAME} has no autograd formula"):
        out.sum().backward()


def test_functional_transforms_raise_rather_than_give_wrong_numbers():
    op = define()
    x, y = leaves()
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: op(x, y, 0.5)[0].sum())(x)


def test_a_second_definition_takes_the_place_of_the_first():
    x, y = leaves()
    define()
    again = define(factor=10.0)
    assert torch.equal(again(x, y, 0.5)[0], (x + y) * 5)
    assert torch.equal(getattr(torch.ops.fat5, NAME)(x, y, 0.5)[0], (x + y) * 5)


class Listing(TorchDispatchMode):
    """Lists the operators of the package that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == operators.NAMESPACE:
            self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_a_call_goes_past_the_dispatcher_where_nobody_looks(monkeypatch):
    op = define()
    x, y = (leaf.detach() for leaf in leaves())
    want = scaled_sum(x, y, 0.5)
    direct = []
    function = operators._functions[op]
    monkeypatch.setitem(operators._functions, op, lambda *arguments: direct.append(1) or function(*arguments))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            for got, expected in zip(call(op, x, y, 0.5), want, strict=True):
                assert torch.equal(got, expected)
    assert len(direct) == 2


def test_a_call_is_the_operators_where_somebody_does(monkeypatch):
    """Gradients, modes, subclasses, transforms and traces."""
    op = define()
    monkeypatch.delitem(operators._functions, op)
    x, y = leaves()
    out, _ = call(op, x, y, 0.5)
    assert out.requires_grad
    with torch.no_grad():
        with Listing() as mode:
            assert torch.equal(call(op, x.detach(), None, 0.5)[0], x * 0.5)
        assert mode.seen == [op]
        assert torch.equal(call(op, torch.nn.Parameter(x.detach()), None, 0.5)[0], x * 0.5)
        fake_x = FakeTensorMode().from_tensor(x.detach())
        assert call(op, fake_x, None, 0.5)[0].shape == x.shape
        compiled = torch.compile(lambda x: call(op, x, None, 0.5)[0], fullgraph=True, backend="eager")
        assert torch.equal(compiled(x.detach()), x * 0.5)
        got = torch.func.vmap(lambda row: call(op, row, None, 0.5)[0])(x.detach())
        assert torch.equal(got, x * 0.5)


@pytest.mark.parametrize("gradients", [False, True])
def test_tracers_of_other_kinds_see_the_operator(gradients):
    """They would record what a function does with its tensors instead, and of a kernel's launch nothing."""
    op, x = define(), torch.randn(3, 4)
    with torch.set_grad_enabled(gradients):
        graph = torch.jit.trace(lambda x: call(op, x, None, 0.5)[0], x)
        assert f"fat5::{NAME}" in [node.kind() for node in graph.graph.nodes()]
        assert torch.equal(graph(2 * x), x)
        made = make_fx(lambda x: call(op, x, None, 0.5)[0], pre_dispatch=True)(x)
        assert op in [node.target for node in made.graph.nodes]
        assert torch.equal(made(2 * x), x)
