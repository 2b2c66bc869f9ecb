"""`shared_attention`: that of each layer by itself, and one gradient of all layers that nobody clears or copies."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from fat5.ops import DenseBias, flash_attention
from fat5.ops.attention import backends
from fat5.ops.attention.backends import BACKENDS
from fat5.ops.attention.reference import attention_reference
from fat5.ops.attention.shared import shared_attention
from tests.ops.kernel_checks import CUDA, DEVICE, hold_the_tolerance_rule, leaf, needs_gpu

LAYERS, HEADS, DIM = 3, 2, 16
AVAILABLE = [name for name, reason in BACKENDS.items() if reason() is None]


def inputs(layers: int = LAYERS, heads: int = HEADS, dim: int = DIM, dtype=torch.float32) -> list[Tensor]:
    """Keys and values of all layers, and the queries of each."""
    queries = [leaf(2, 29, heads, dim, dtype=dtype) for _ in range(layers)]
    return [leaf(2, 37, layers, 2, heads, dim, dtype=dtype), *queries]


def together(shared: Tensor, *queries: Tensor, layers=tuple(range(LAYERS)), **options) -> Tensor:
    """All layers, each output weighted by its number, so that no two have the same gradient."""
    link, first, total = shared, 0, shared.new_zeros(())
    for layer in layers:
        out, link = shared_attention(shared, link, queries[layer], layer=layer, first=first, **options)
        total, first = total + (layer + 1) * out, layer + 1
    return total


def apart(shared: Tensor, *queries: Tensor, function=flash_attention, layers=tuple(range(LAYERS)), **options) -> Tensor:
    return sum((n + 1) * function(queries[n], *shared.select(-4, n).unbind(-3), **options) for n in layers)


@pytest.mark.parametrize("backend", AVAILABLE)
def test_equals_the_formula_with_gradients(backend):
    hold_the_tolerance_rule(
        functools.partial(together, softmax_scale=0.4, backend=backend),
        functools.partial(apart, function=attention_reference, softmax_scale=0.4),
        inputs(),
    )


OFFSETS = {"cu_seqlens_q": [0, 7, 7, 24, 29], "cu_seqlens_k": [0, 3, 9, 33, 33]}
CASES = {
    "packed": OFFSETS | {"max_seqlen_q": 17, "max_seqlen_k": 24},
    "padded": {"key_starts": [0, 5], "key_lengths": [37, 9]},
    "dropout": {"dropout_p": 0.3},
    "negative scale": {"softmax_scale": -0.4},
    "dense bias": {"bias": (1, HEADS, 29, 37)},
}


@pytest.mark.parametrize("backend", [name for name in AVAILABLE if name != "hopper"])
@pytest.mark.parametrize("case", CASES)
def test_is_the_same_computation_as_that_of_each_layer(backend, case):
    options = {"softmax_scale": 0.4, "backend": backend} | CASES[case]
    tensors = inputs()
    if case == "packed":
        tensors = [x[0].detach().requires_grad_() for x in tensors]
        options |= {name: torch.tensor(ends, dtype=torch.int32, device=DEVICE) for name, ends in OFFSETS.items()}
    if case == "padded":
        options |= {name: torch.tensor(value, device=DEVICE) for name, value in CASES[case].items()}
    leaves = list(tensors)
    if case == "dense bias":
        leaves.append(leaf(*CASES[case]["bias"]))
        options["bias"] = DenseBias(leaves[-1])
    results = []
    for function in (together, apart):
        torch.manual_seed(3)
        out = function(*tensors, **options)
        torch.manual_seed(4)
        results.append([out, *torch.autograd.grad(out, leaves, torch.randn_like(out))])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert ours.any()
    if case == "packed":  # rows of no document, which nobody cleared
        assert not results[0][1][33:].any()


@pytest.mark.parametrize("layers", [(0,), (1,), (2,), (0, 2), (1, 2), (0, 1)])
def test_layers_left_out_have_no_gradient(layers):
    tensors = inputs()
    wanted = [tensors[0], *(tensors[1 + n] for n in layers)]
    ours = torch.autograd.grad(together(*tensors, layers=layers).sum(), wanted)
    theirs = torch.autograd.grad(apart(*tensors, layers=layers).sum(), wanted)
    torch.testing.assert_close(ours, theirs)
    assert not any(ours[0][:, :, n].any() for n in set(range(LAYERS)) - set(layers))


@pytest.mark.parametrize("used", range(LAYERS))
def test_layers_whose_output_nobody_uses_have_no_gradient(used):
    shared, *queries = inputs()
    link, outs = shared, []
    for layer, q in enumerate(queries):
        out, link = shared_attention(shared, link, q, layer=layer, first=layer)
        outs.append(out)
    (ours,) = torch.autograd.grad(outs[used].sum(), shared)
    (theirs,) = torch.autograd.grad(apart(shared, *queries, layers=[used]).sum(), shared)
    torch.testing.assert_close(ours, theirs / (used + 1))


def test_a_second_backward_pass_gives_the_same():
    tensors = inputs()
    out = together(*tensors)
    first = torch.autograd.grad(out.sum(), tensors, retain_graph=True)
    kept = [x.clone() for x in first]
    second = torch.autograd.grad(2 * out.sum(), tensors)
    torch.testing.assert_close(list(first), kept)
    torch.testing.assert_close(second, tuple(2 * x for x in kept))


def test_anomaly_detection_sees_no_memory_that_nobody_has_written():
    tensors = inputs()
    torch.use_deterministic_algorithms(True)  # new memory is full of NaN
    try:
        with torch.autograd.set_detect_anomaly(True):
            ours = torch.autograd.grad(together(*tensors).sum(), tensors)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(ours, torch.autograd.grad(apart(*tensors).sum(), tensors))


@pytest.mark.parametrize("backend", [name for name in AVAILABLE if name != "torch"])
def test_the_kernels_write_into_one_gradient(backend):
    """No tensor of keys and values is copied, joined or cleared, and no two gradients are added up."""
    tensors = inputs()
    out = together(*tensors, backend=backend)
    grad = torch.randn_like(out)
    with profile(record_shapes=True) as seen:
        torch.autograd.grad(out, tensors, grad)
    events = [event for event in seen.function_events if event.input_shapes and len(event.input_shapes[0]) > 4]
    moved = ("aten::copy_", "aten::cat", "aten::clone", "aten::zero_", "aten::add", "aten::add_")
    assert sum(event.name == "fat5::room_for_shared_gradient" for event in events) == 1
    own = [event for event in events if event.name in moved and 0 not in event.input_shapes[0]]
    assert not own, own


@pytest.mark.parametrize("backend", AVAILABLE)
def test_opcheck(backend):
    forward, backward = (getattr(backends, f"{backend}_shared{suffix}") for suffix in ("", "_backward"))
    shared, q, *_ = inputs()
    rest = (None, "none", 8, None, None, None, None, None, 0.4, False, 0.0, None, None)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(forward, (shared, shared, q, 1, 0, *rest), test_utils=checks)
    with torch.no_grad():
        out, lse, link = forward(shared.detach(), shared.detach(), q.detach(), 1, 0, *rest)
        assert link.untyped_storage().nbytes() <= 8
        given = (torch.zeros_like(shared), torch.randn_like(out), out, lse, False, shared.detach(), q.detach(), 1)
        torch.library.opcheck(backward, (*given, *rest), test_utils=checks[:2])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_whole(dynamic):
    compiled = torch.compile(together, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    tensors = inputs()
    for function in (compiled, together):
        results = [f(*tensors) for f in (function, apart)]
        torch.testing.assert_close(*results)
        grads = [torch.autograd.grad(out.square().sum(), tensors) for out in results]
        torch.testing.assert_close(*grads)


def test_second_derivatives_are_an_error():
    tensors = inputs()
    with pytest.raises(RuntimeError, match="first derivatives alone"):
        torch.autograd.grad(together(*tensors).sum(), tensors, create_graph=True)


@pytest.mark.parametrize(
    ("shape", "layer", "first"),
    [((5, 2, HEADS, DIM), 0, 0), ((5, 3, 2, HEADS, DIM), 3, 0), ((5, 3, 2, HEADS, DIM), 0, 1)],
)
def test_bad_arguments_are_named(shape, layer, first):
    shared = torch.zeros(shape)
    with pytest.raises(ValueError, match=rf"for layer {layer} behind {first}"):
        shared_attention(shared, shared, torch.zeros(2, 5, HEADS, DIM), layer=layer, first=first)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("backend", [name for name in AVAILABLE if name != "torch"] if CUDA else ["triton"])
def test_on_the_card(backend):
    """bf16, packed, as many layers and heads as a model has: bit for bit the gradients of each layer by itself."""
    layers = range(12)
    tensors = [x[0].detach().requires_grad_() for x in inputs(len(layers), 8, 64, torch.bfloat16)]
    options = {"max_seqlen_q": 17, "max_seqlen_k": 24, "backend": backend, "softmax_scale": 0.1}
    options |= {name: torch.tensor(ends, dtype=torch.int32, device=DEVICE) for name, ends in OFFSETS.items()}
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for function in (together, apart):
            out = function(*tensors, layers=layers, **options)
            torch.manual_seed(4)
            results.append([out, *torch.autograd.grad(out, tensors, torch.randn_like(out))])
    finally:
        torch.use_deterministic_algorithms(False)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.any()
