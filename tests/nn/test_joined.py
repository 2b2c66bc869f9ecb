"""Attention and feed-forward on joined weights: equal results, fewer products, no copies; and when they stay apart."""

from __future__ import annotations

import collections
import functools

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode

from fat5.nn import Attention, FeedForward, PositionSettings, SequenceLayout
from fat5.nn.joined import can_join, is_plain, joined_weight, joined_weights
from tests.ops.kernel_checks import DEVICE, needs_gpu, needs_kernels

WIDTH, TOKENS = 12, 60


def attention(**options) -> Attention:
    torch.manual_seed(1)
    return Attention(WIDTH, 2, 16, **options).to(DEVICE)


def feed_forward(**options) -> FeedForward:
    torch.manual_seed(1)
    return FeedForward(WIDTH, 20, **{"activation": "gelu_new", "gated": True} | options).to(DEVICE)


def states(*shape: int, dtype=torch.float32) -> Tensor:
    return torch.randn(*shape, WIDTH, device=DEVICE, dtype=dtype, requires_grad=True)


def hooked(module: nn.Module) -> nn.Module:
    """With hooks that do nothing, so that every map is called by itself."""
    for linear in (m for m in module.modules() if isinstance(m, nn.Linear)):
        linear.register_forward_hook(lambda *_: None)
    return module


def step(module: nn.Module, *inputs: Tensor, **options) -> list[Tensor]:
    """The output, and the gradients of inputs and parameters."""
    out = module(*inputs, **options)
    torch.manual_seed(2)
    leaves = [x for x in (*inputs, *options.values(), *module.parameters()) if isinstance(x, Tensor)]
    return [out, *torch.autograd.grad(out, leaves, torch.randn_like(out))]


class Counted(TorchDispatchMode):
    """Count what is called, and what writes at least so many elements."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.large = large
        self.calls: collections.Counter[str] = collections.Counter()
        self.large_calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        self.calls[name] += 1
        first = out[0] if isinstance(out, (tuple, list)) else out
        self.large_calls[name] += isinstance(first, Tensor) and first.numel() >= self.large
        return out


def packed_layout() -> SequenceLayout:
    return SequenceLayout.packed(torch.tensor([0, 9, 9, 40, 52], dtype=torch.int32, device=DEVICE), 31)


LAYOUTS = {
    "rows": (lambda: states(2, 30), SequenceLayout),
    "padded": (lambda: states(2, 30), lambda: SequenceLayout(lengths=torch.tensor([30, 11], device=DEVICE))),
    "packed": (lambda: states(TOKENS), packed_layout),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cross", [False, True])
def test_attention_equals_that_of_maps_apart(layout, causal, cross):
    make, make_layout = LAYOUTS[layout]
    options = {"layout": make_layout(), "key_value_layout": make_layout() if cross else None}
    hidden, options["key_value_states"] = make(), make() if cross else None
    position, table = None, []
    if not cross:
        position, table = PositionSettings(), [torch.randn(2, 15, device=DEVICE)]
    results = []
    for change in (lambda x: x, hooked):
        module = change(attention(causal=causal and not cross, position=position))
        options["position_bias"] = table[0].clone().requires_grad_() if table else None
        results.append(step(module, hidden, **options))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
        assert ours.any()


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=needs_kernels)])
@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "silu"])
def test_feed_forward_equals_that_of_maps_apart(activation, backend):
    hidden = states(2, 30)
    results = [
        step(change(feed_forward(activation=activation, backend=backend)), hidden) for change in (nn.Sequential, hooked)
    ]
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


_MOVES_NOTHING = {"view", "_unsafe_view", "t", "detach", "unbind", "alias"}


def training_step(module: nn.Module, *inputs: Tensor, **options) -> Counted:
    """Count the calls of a step whose tensors of tokens are larger than all weights together."""
    large = inputs[0].numel()
    assert large > sum(p.numel() for p in module.parameters())
    grad = torch.ones_like(inputs[0])
    with Counted(large) as seen:
        module(*inputs, **options).backward(grad)
    assert all(p.grad.any() for p in module.parameters())
    return seen


@pytest.mark.parametrize(("cross", "products"), [(False, 2), (True, 3)])
def test_products_and_copies_of_an_attention_s_step(cross, products):
    """One product for q, k and v (k and v), one for their input's gradient; no sum, no copy of activations."""
    keys = {"key_value_states": states(2, 200), "key_value_layout": SequenceLayout()} if cross else {}
    seen = training_step(attention(backend="torch"), states(2, 200), layout=SequenceLayout(), **keys)
    assert seen.calls["mm"] == 3 * products
    attended = {"torch_joined_attention", "torch_joined_attention_backward"}
    assert set(+seen.large_calls) - _MOVES_NOTHING == {"mm", *attended}
    apart = training_step(hooked(attention(backend="torch")), states(2, 200), layout=SequenceLayout(), **keys)
    assert apart.calls["mm"] == 3 * 4
    assert apart.large_calls["add"] + apart.large_calls["add_"] > 0  # which this count would have seen


@needs_kernels
def test_products_and_copies_of_a_feed_forward_s_step():
    seen = training_step(feed_forward(backend="triton"), states(2, 200))
    assert seen.calls["mm"] == 3 * 2
    activated = {"triton_joined_gated_gelu", "triton_joined_gated_gelu_backward"}
    assert set(+seen.large_calls) - _MOVES_NOTHING == {"mm", *activated}


@needs_kernels
@pytest.mark.parametrize(("dropout", "keep", "count"), [(0.0, False, 0), (0.2, False, 2), (0.0, True, 1)])
def test_what_a_feed_forward_keeps_for_its_backward(dropout, keep, count):
    """Not the activation, unless asked to; with dropout the product behind it has to keep what it was given."""
    module, hidden = feed_forward(backend="triton", dropout=dropout, keep_inner=keep), states(2, 200)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel() // 400) or x, lambda x: x):
        module(hidden)
    assert kept.count(2 * 20) == 1  # the projection
    assert kept.count(20) == count  # with dropout what it made, and its mask


@needs_kernels
def test_keeping_the_activation_changes_no_gradient():
    hidden = states(2, 30)
    results = [step(feed_forward(backend="triton", keep_inner=keep), hidden) for keep in (False, True)]
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.any()


def test_dropout_in_training_alone_takes_the_longer_way():
    module, hidden = feed_forward(dropout=0.5), states(2, 200)
    assert not torch.equal(module(hidden), module(hidden))
    module.eval()
    assert torch.equal(module(hidden), module(hidden))
    torch.testing.assert_close(module(hidden), hooked(module)(hidden))


def test_gradients_stay_those_of_three_parameters():
    module = attention()
    module(states(2, 30), SequenceLayout()).sum().backward()
    for linear in (module.q, module.k, module.v):
        assert linear.weight.grad.shape == linear.weight.shape
        assert linear.weight.grad.is_contiguous()
    assert not torch.equal(module.q.weight.grad, module.k.weight.grad)


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Quantised(Tensor):
    """As libraries put them into a plain `nn.Linear`."""


def subclassed(module: Attention) -> None:
    module.v = Halved(WIDTH, 32, bias=False)


def replaced(module: Attention) -> None:
    original = module.v.forward
    module.v.forward = lambda x: 0.5 * original(x)


def parametrised(module: Attention) -> None:
    parametrize.register_parametrization(module.v, "weight", Doubled())


def hook(module: Attention) -> None:
    module.v.register_forward_hook(lambda m, x, out: 0.5 * out)


def hook_before(module: Attention) -> None:
    module.v.register_forward_pre_hook(lambda m, x: (0.5 * x[0],))


def with_bias(module: Attention) -> None:
    module.v = nn.Linear(WIDTH, 32)


@pytest.mark.parametrize("change", [subclassed, replaced, parametrised, hook, hook_before, with_bias])
def test_a_map_that_does_more_is_called(change):
    """An attention to one key returns its value: what the map of values makes of the input."""
    module = attention()
    weight = module.v.weight.detach().clone()
    module.o = nn.Identity()
    change(module)
    module.to(DEVICE)
    hidden = states(3, 1)
    torch.testing.assert_close(module(hidden, SequenceLayout()), module.v(hidden))
    assert (module.v(hidden) - hidden @ weight.T).abs().max() > 1e-3


def test_weights_that_are_not_plain_stay_apart():
    linears = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    assert can_join(linears)
    linears[1].weight = nn.Parameter(linears[1].weight.detach().as_subclass(Quantised))
    assert not is_plain(linears[1])
    assert joined_weight(linears, torch.ones(9, 4)) is None
    mixed = [nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False).half()]
    assert joined_weight(mixed, torch.ones(9, 4)) is None


def test_frozen_maps():
    """All frozen, they are joined; some frozen, nobody computes gradients that nobody asked for."""
    module = attention().requires_grad_(False)
    hidden = states(2, 30)
    assert joined_weight([module.q, module.k, module.v], hidden) is not None
    (grad,) = torch.autograd.grad(module(hidden, SequenceLayout()).sum(), hidden)
    assert grad.any()
    module.v.requires_grad_(True)
    assert joined_weight([module.q, module.k, module.v], hidden) is None
    module(hidden, SequenceLayout()).sum().backward()
    assert module.q.weight.grad is None
    assert module.v.weight.grad.any()


def test_many_groups_are_joined_as_each_by_itself():
    """Also of several types; frozen ones ask for no gradient; one that cannot be joined leaves the others alone."""
    make = functools.partial(nn.Linear, 4, bias=False)
    groups = [[make(3), make(5)], [], [make(2).half()], [hooked(make(2)), make(2)], [make(1), make(1)], [make(6)]]
    for linear in groups[4]:
        linear.requires_grad_(False)
    joined = joined_weights(groups)
    assert [x is None for x in joined] == [False, True, False, True, False, False]
    for group, weight in zip(groups, joined, strict=True):
        if weight is not None:
            assert torch.equal(weight, torch.cat([linear.weight for linear in group]))
            assert weight.requires_grad == group[0].weight.requires_grad
    torch.autograd.backward([joined[0], joined[5]], [torch.arange(32.0).view(8, 4), torch.ones(6, 4)])
    assert torch.equal(groups[0][1].weight.grad, torch.arange(12.0, 32.0).view(5, 4))
    assert groups[2][0].weight.grad is None
    groups[5][0].requires_grad_(False)
    groups[0][0].requires_grad_(False)
    assert joined_weights(groups)[0] is None


@pytest.mark.parametrize("device", ["cpu", "meta", pytest.param("cuda", marks=[pytest.mark.gpu, needs_gpu])])
def test_without_gradients_weights_are_copied_for_large_inputs_alone(device):
    """And not on a CPU. A step of decoding would read and write all weights once more."""
    linears = [nn.Linear(4, 4, bias=False, device=device) for _ in range(2)]
    for rows in (1, 7, 8, 90):
        hidden = torch.ones(rows, 4, device=device)
        assert joined_weight(linears, hidden) is not None
        with torch.no_grad():
            assert (joined_weight(linears, hidden) is not None) == (device != "cpu" and rows >= 8)


@pytest.mark.parametrize("module", [attention, feed_forward])
def test_autocast(module):
    layout = {"layout": SequenceLayout()} if module is attention else {}
    hidden = states(2, 30)
    exact = step(module(), hidden, **layout)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        rounded = module()(hidden, **layout)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact[0], rtol=0.05, atol=0.05)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
def test_empty_inputs_give_empty_results(shape):
    for module, layout in ((attention(), [SequenceLayout()]), (feed_forward(), [])):
        hidden = states(*shape)
        out = module(hidden, *layout)
        assert out.shape == hidden.shape
        out.sum().backward()
        assert not any(parameter.grad.any() for parameter in module.parameters())


@pytest.mark.parametrize("module", [attention, feed_forward])
def test_compiles_whole(module):
    layout = {"layout": SequenceLayout()} if module is attention else {}
    hidden = states(2, 30)
    plain, compiled = module(), torch.compile(module(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(step(compiled, hidden, **layout), step(plain, hidden, **layout))
