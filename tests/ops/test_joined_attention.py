"""`joined_attention`: that of the parts apart, and one gradient that every backend writes in place."""

import functools

import pytest
import torch
from torch import Tensor
from torch.autograd.profiler import profile

from fat5.ops import DenseBias, DistanceBias, flash_attention, joined_attention
from fat5.ops.attention import backends
from fat5.ops.attention.backends import BACKENDS
from fat5.ops.attention.reference import attention_reference, packed_attention_reference
from tests.ops.kernel_checks import CUDA, DEVICE, hold_the_tolerance_rule, leaf, relative_error

HEADS, DIM = 2, 16
AVAILABLE = [name for name, reason in BACKENDS.items() if reason() is None]
BIASES = {"none": None, "distance": (HEADS, 15), "dense": (1, HEADS, 37, 37)}


def make_bias(kind: str, *values: Tensor):
    return None if kind == "none" else {"distance": DistanceBias, "dense": DenseBias}[kind](*values)


def bias_leaf(kind: str, dtype=torch.float32) -> list[Tensor]:
    return [leaf(*BIASES[kind], dtype=dtype)] if BIASES[kind] is not None else []


def parts(tensors: list[Tensor]) -> list[Tensor]:
    joined, *q = tensors
    return [*q, *joined.unbind(-3)]


def apart(tensors: list[Tensor], function=flash_attention, **options) -> Tensor:
    return function(*parts(tensors), **options)


def together(tensors: list[Tensor], **options) -> Tensor:
    return joined_attention(*tensors, **options)


PADDED = {
    "self": lambda **o: [leaf(2, 37, 3, HEADS, DIM, **o)],
    "cross": lambda **o: [leaf(2, 37, 2, HEADS, DIM, **o), leaf(2, 37, HEADS, DIM, **o)],
}


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize(("inputs", "causal"), [("self", False), ("self", True), ("cross", False)])
def test_equals_the_formula_with_gradients(backend, kind, inputs, causal):
    options = {"causal": causal, "softmax_scale": 0.4}
    tensors, bias = PADDED[inputs](), bias_leaf(kind)
    count = len(tensors)

    def run(function, *leaves, **more):
        return function(list(leaves[:count]), bias=make_bias(kind, *leaves[count:]), **options, **more)

    hold_the_tolerance_rule(
        functools.partial(run, together, backend=backend),
        functools.partial(run, functools.partial(apart, function=attention_reference)),
        [*tensors, *bias],
    )


def packed_inputs(inputs: str, dtype=torch.float32, dim: int = DIM) -> tuple[list[Tensor], dict]:
    """Documents with an empty one, one without keys, and rows of none behind the last."""
    queries = torch.tensor([0, 7, 7, 27, 30, 30], dtype=torch.int32, device=DEVICE)
    if inputs == "self":
        return [leaf(34, 3, HEADS, dim, dtype=dtype)], {"cu_seqlens_q": queries, "cu_seqlens_k": queries}
    keys = torch.tensor([0, 3, 9, 40, 40, 40], dtype=torch.int32, device=DEVICE)
    tensors = [leaf(42, 2, HEADS, dim, dtype=dtype), leaf(34, HEADS, dim, dtype=dtype)]
    return tensors, {"cu_seqlens_q": queries, "cu_seqlens_k": keys}


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("kind", ["none", "distance"])
@pytest.mark.parametrize("inputs", ["self", "cross"])
def test_packed_documents(backend, kind, inputs):
    """Rows of no document get zero gradients, though nobody clears the joined gradient."""
    tensors, offsets = packed_inputs(inputs)
    bias, count = bias_leaf(kind), len(tensors)

    def run(function, *leaves, **more):
        return function(list(leaves[:count]), bias=make_bias(kind, *leaves[count:]), softmax_scale=0.4, **more)

    lengths = {"max_seqlen_q": 20, "max_seqlen_k": 31}
    reference = functools.partial(apart, function=packed_attention_reference, **offsets)
    results = hold_the_tolerance_rule(
        functools.partial(run, together, backend=backend, **offsets, **lengths),
        functools.partial(run, reference),
        [*tensors, *bias],
    )
    grad = results[1]
    assert not grad[offsets["cu_seqlens_k"][-1] :].any()
    assert grad[:7].any()


CASES = [
    {"key_starts": [0, 5], "key_lengths": [37, 0]},
    {"query_offset": [3, -4], "causal": True},
    {"dropout_p": 0.3},
    {"softmax_scale": -0.4},
]


@pytest.mark.parametrize("backend", [name for name in AVAILABLE if name != "hopper"])
@pytest.mark.parametrize("inputs", PADDED)
@pytest.mark.parametrize("case", CASES)
def test_is_the_same_computation_as_that_of_the_parts(backend, inputs, case):
    tensors, bias = PADDED[inputs](), bias_leaf("distance")
    options = {k: torch.tensor(v, device=DEVICE) if isinstance(v, list) else v for k, v in case.items()}
    scale = {"softmax_scale": options.pop("softmax_scale", 0.4)}
    results = []
    for function in (together, apart):
        torch.manual_seed(3)
        out = function(tensors, bias=DistanceBias(*bias), backend=backend, **options, **scale)
        torch.manual_seed(4)
        results.append([out, *torch.autograd.grad(out, [*tensors, *bias], torch.randn_like(out))])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*results, strict=True))
    assert all(x.any() for x in results[0])


@pytest.mark.parametrize("inputs", PADDED)
def test_the_kernels_write_into_the_joined_gradient(inputs):
    """No tensor of its size is copied, joined or cleared."""
    if "triton" not in AVAILABLE:
        pytest.skip("needs the kernels")
    tensors = PADDED[inputs]()
    out = joined_attention(*tensors, backend="triton")
    grad = torch.randn_like(out)
    with profile(record_shapes=True) as seen:
        torch.autograd.grad(out, tensors, grad)
    moved = {"aten::copy_", "aten::cat", "aten::stack", "aten::clone", "aten::zero_"}
    names = {event.name for event in seen.function_events}
    assert "fat5::triton_joined_attention_backward" in names
    own = [e for e in seen.function_events if e.name in moved and e.input_shapes and len(e.input_shapes[0]) > 3]
    assert not own, own


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
def test_empty_inputs(backend, lengths):
    kv, q = leaf(2, lengths[1], 2, HEADS, DIM), leaf(2, lengths[0], HEADS, DIM)
    out = joined_attention(kv, q, backend=backend)
    grads = torch.autograd.grad(out.sum(), [kv, q])
    assert out.shape == q.shape
    assert not any(x.any() for x in (out, *grads))


def test_autocast_casts_at_the_door():
    tensors = PADDED["cross"]()
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        out = together(tensors)
    assert out.dtype == torch.bfloat16
    got = torch.autograd.grad(out.float().square().sum(), tensors)
    want = torch.autograd.grad(apart(tensors).square().sum(), tensors)
    assert all(g.dtype == torch.float32 and relative_error(g, w) < 0.05 for g, w in zip(got, want, strict=True))


def op_inputs(inputs: str, packed: bool) -> tuple:
    if packed:
        tensors, offsets = packed_inputs(inputs)
        bounds = (None, None, None, None, *offsets.values())
    else:
        tensors, bounds = PADDED[inputs](), (1, None, torch.tensor([0, 5], device=DEVICE), None, None, None)
    q = tensors[1] if inputs == "cross" else None
    return (tensors[0], q, *bias_leaf("distance"), "distance", *bounds, 0.4, False, 0.0, None, None)


@pytest.mark.parametrize("backend", AVAILABLE)
@pytest.mark.parametrize(("inputs", "packed"), [("self", True), ("cross", False)])
def test_opcheck(backend, inputs, packed):
    forward, backward = (getattr(backends, f"{backend}_joined{suffix}") for suffix in ("", "_backward"))
    arguments = op_inputs(inputs, packed)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(forward, arguments, test_utils=checks)
    with torch.no_grad():
        plain = [x.detach() if isinstance(x, Tensor) else x for x in arguments]
        out, lse = forward(*plain)
        for bias_grad in (True, False):
            torch.library.opcheck(backward, (torch.randn_like(out), out, lse, bias_grad, *plain), test_utils=checks[:2])


@pytest.mark.parametrize("inputs", PADDED)
def test_compiles_whole_with_dynamic_lengths(inputs):
    def attend(joined, table, *q):
        return joined_attention(joined, *q, bias=DistanceBias(table))

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (9, 17):
        joined, *q = (x.detach()[:, :length].requires_grad_() for x in PADDED[inputs]())
        leaves = [joined, *bias_leaf("distance"), *q]
        results = [f(*leaves) for f in (compiled, attend)]
        grads = [torch.autograd.grad(out.square().sum(), leaves) for out in results]
        torch.testing.assert_close(*results)
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: joined_attention(torch.zeros(2, 5, 2, HEADS, DIM)), r"\[2, 5, 2, 2, 16\].*length, 3, heads"),
        (lambda: joined_attention(torch.zeros(2, 5, 3, HEADS, DIM), torch.zeros(2, 5, HEADS, DIM)), "length, 2, heads"),
        (lambda: joined_attention(torch.zeros(5, 3, DIM)), r"got a joined projection \[5, 3, 16\]"),
        (lambda: joined_attention(torch.zeros(5, 3, HEADS, DIM)), "expected padded inputs"),
        (lambda: joined_attention(torch.zeros(1, 5, 3, HEADS, DIM), window_size=3), "window_size=3"),
        (lambda: joined_attention(torch.zeros(1, 5, 3, HEADS, DIM), backend="torhc"), "did you mean 'torch'"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA GPU")
@pytest.mark.parametrize("backend", [name for name in AVAILABLE if name != "torch"])
@pytest.mark.parametrize("inputs", PADDED)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_the_gpu_writes_what_it_writes_apart(backend, inputs, packed, dim):
    """Bit for bit where a backend is deterministic; `hopper` is that when asked."""
    generator = functools.partial(leaf, dtype=torch.bfloat16)
    total = 2000
    parts, q = (3, []) if inputs == "self" else (2, [generator(total, 12, dim)])
    tensors = [generator(total, parts, 12, dim), *q]
    options: dict = {"softmax_scale": dim**-0.5}
    if packed:
        offsets = torch.tensor([0, 130, 131, 131, 900, 1900, 1900], dtype=torch.int32, device=DEVICE)
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 1000, "max_seqlen_k": 1000}
    else:
        tensors = [x.detach().unflatten(0, (4, 500)).requires_grad_() for x in tensors]
    table = [leaf(12, 183)] if inputs == "self" else []
    results = []
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        for function in (together, apart):
            out = function(tensors, bias=make_bias("distance" if table else "none", *table), backend=backend, **options)
            torch.manual_seed(4)
            results.append([out, *torch.autograd.grad(out, [*tensors, *table], torch.randn_like(out))])
    finally:
        torch.use_deterministic_algorithms(False)
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.any()
    # One pass adds up the queries' gradient in any order.
    out = together(tensors, bias=make_bias("distance" if table else "none", *table), backend=backend, **options)
    torch.manual_seed(4)
    grads = torch.autograd.grad(out, [*tensors, *table], torch.randn_like(out))
    for ours, theirs in zip(grads, results[1][1:], strict=True):
        limit = 1e-2 if ours.ndim > 2 else 3e-2  # it sums the table's near tiles in bf16
        assert relative_error(ours, theirs) < limit
