"""The Hopper kernels against the formula in float64: on a CPU their own code by `gluon_emulator`, or on the device.

`test_attention_kernels.py` holds the backend to the claims of all backends, on a Hopper card alone.
"""

import types

import pytest
import torch

from fat5.ops import AlibiBias, DistanceBias, flash_attention, joined_attention
from fat5.ops.attention import backends
from fat5.ops.attention.hopper import configuration, dispatch, launch
from fat5.ops.attention.hopper.configuration import ForwardShape
from fat5.ops.attention.reference import attention_reference, packed_attention_reference
from tests.ops.attention_comparison import CUDA, DEVICE, compare, make_inputs, relative_error, reproducible, run
from tests.ops.gluon_emulator import EmulatedKernel, HazardError
from tests.ops.table_rounding import table_rounding

BF16 = torch.bfloat16
KERNELS = ("forward_kernel", "backward_kernel", "query_kernel")


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """List the kernels that are launched, with three programs; without a GPU run them on the emulator."""
    if CUDA and backends.BACKENDS["hopper"]() is not None:
        pytest.skip(backends.BACKENDS["hopper"]())
    launched = []

    def recording(name):
        kernel = getattr(launch, name) if CUDA else EmulatedKernel(name)

        class Recorder:
            arg_names = kernel.arg_names

            def __getitem__(self, grid):
                launched.append(name)
                return kernel[grid]

        return Recorder()

    for name in KERNELS:
        monkeypatch.setattr(launch, name, recording(name))
    monkeypatch.setattr(launch, "processors", lambda device: 3)  # so that each program has several tiles
    if not CUDA:
        monkeypatch.setattr(dispatch, "_runs_here", lambda problem: problem.q.numel() > 0 and problem.k.numel() > 0)
    monkeypatch.setattr(dispatch, "verdict", lambda configuration, device: None)
    monkeypatch.setitem(backends._reasons, "hopper", None)
    return launched


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("dim", "length"), [(64, 290), (128, 130), (64, 128)] + ([(64, 2500), (128, 2048)] if CUDA else [])
)
def test_outputs_and_gradients_equal_the_formula(causal, dim, length, launches):
    """Whole tiles and tails on both sides, several tiles of work a program."""
    compare(
        "hopper", "relative", make_inputs("relative", 2, length, length, dim, BF16), causal, softmax_scale=dim**-0.5
    )
    assert launches == ["forward_kernel", "backward_kernel"]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(64, 250), (250, 70), (17, 3)])
def test_queries_and_keys_of_different_lengths(causal, lengths, launches):
    """Pitfall: a mask anchored top-left; rows without keys, and rows of which all keys come later."""
    compare("hopper", "none", make_inputs("none", 1, *lengths, 64, BF16), causal, softmax_scale=0.125)
    assert launches == ["forward_kernel", "backward_kernel"]


@pytest.mark.parametrize("offset", [128, -64])
def test_table_gradient_with_an_offset(offset, launches):
    leaves = make_inputs("relative", 1, 100, 200, 64, torch.float16)
    compare("hopper", "relative", leaves, softmax_scale=0.125, query_offset=offset)
    assert launches == ["forward_kernel", "backward_kernel"]


def test_a_gradient_that_the_kernels_do_not_take_comes_from_the_portable_ones(launches):
    leaves = make_inputs("relative", 1, 20, 31, 64, torch.float16)
    compare("hopper", "relative", leaves, softmax_scale=0.125)
    assert launches == ["forward_kernel"]


@pytest.mark.parametrize(("kind", "causal"), [("relative", False), ("relative", True), ("none", True)])
def test_padding_and_offsets_of_each_row(kind, causal, launches):
    """Left and right padding, a row without keys, and a position of its own for each row's first query."""
    options = {
        "query_offset": torch.tensor([3, -150, 90], device=DEVICE),
        "key_starts": torch.tensor([0, 7, 2], device=DEVICE),
        "key_lengths": torch.tensor([150, 60, 0], device=DEVICE),
    }
    ours = compare("hopper", kind, make_inputs(kind, 3, 140, 150, 64, BF16), causal, softmax_scale=0.125, **options)
    assert not ours[0][2].any()
    assert launches == ["forward_kernel", "backward_kernel"]


@pytest.mark.parametrize("causal", [False, True])
def test_nan_in_unused_slots_does_not_matter(causal, launches):
    leaves = make_inputs("relative", 2, 140, 140, 64, BF16)
    lengths = torch.tensor([129, 0], device=DEVICE)
    weights = torch.randn_like(leaves[0])
    exact = [x.detach().double().requires_grad_() for x in leaves]
    options = {"key_lengths": lengths, "softmax_scale": 0.125}
    want = run(attention_reference, "relative", exact, weights, causal, **options)
    with torch.no_grad():
        for x in leaves[1:3]:
            x[0, 129:] = x[1] = torch.nan
    ours = run(flash_attention, "relative", leaves, weights, causal, backend="hopper", **options)
    for got, expected in zip(ours, want, strict=True):
        assert relative_error(got.detach(), expected.detach()) < 1e-2
    assert not ours[0][1].any()
    assert set(launches) == {"forward_kernel", "backward_kernel"}


@pytest.mark.parametrize(
    ("kind", "causal", "dim"),
    [("relative", False, 64), ("relative", True, 64), ("none", False, 64), ("relative", True, 128)],
)
def test_packed_documents_equal_each_document_alone(kind, causal, dim, launches):
    """Pitfall: packed documents see each other. Unused rows give 0 and take no gradient, whatever they hold."""
    queries = torch.tensor([0, 7, 8, 8, 209, 230, 230], dtype=torch.int32, device=DEVICE)
    keys = (
        queries
        if kind == "relative"
        else torch.tensor([0, 130, 131, 140, 140, 230, 230], dtype=torch.int32, device=DEVICE)
    )
    leaves = make_inputs(kind, 1, 470, 470, dim, BF16)
    leaves = [x.detach()[0].requires_grad_() if x.ndim == 4 else x for x in leaves]
    with torch.no_grad():
        for x in leaves[:3]:
            x[230:] = torch.nan
    ours = compare(
        "hopper", kind, leaves, causal, reference=packed_attention_reference, cu_seqlens_q=queries, cu_seqlens_k=keys,
        max_seqlen_q=201, max_seqlen_k=201, softmax_scale=0.125,
    )  # fmt: skip
    assert all(not x[230:].any() for x in ours[:4])
    assert launches == ["forward_kernel", "backward_kernel"]


def test_deterministic_backward_takes_two_kernels(launches):
    leaves = make_inputs("relative", 1, 140, 140, 64, BF16)
    torch.manual_seed(1)
    weights = torch.randn_like(leaves[0])
    with reproducible("hopper"):
        torch.manual_seed(1)
        first = compare("hopper", "relative", leaves, softmax_scale=0.125)
        second = run(flash_attention, "relative", leaves, weights, backend="hopper", softmax_scale=0.125)
    assert launches == ["forward_kernel", "backward_kernel", "query_kernel"] * 2
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_deterministic_backward_of_packed_documents(launches):
    """Unused rows give 0 in all gradients, and near tiles that no document has give the table nothing."""
    offsets = torch.tensor([0, 7, 8, 8, 150, 150], dtype=torch.int32, device=DEVICE)
    leaves = make_inputs("relative", 1, 190, 190, 64, BF16)
    leaves = [x.detach()[0].requires_grad_() if x.ndim == 4 else x for x in leaves]
    with reproducible("hopper"):
        ours = compare(
            "hopper", "relative", leaves, reference=packed_attention_reference, cu_seqlens_q=offsets,
            cu_seqlens_k=offsets, max_seqlen_q=142, max_seqlen_k=142, softmax_scale=0.125,
        )  # fmt: skip
    assert all(not x[150:].any() for x in ours[:4])
    assert launches == ["forward_kernel", "backward_kernel", "query_kernel"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_gradient_of_rows_of_no_document_does_not_matter(deterministic, launches):
    offsets = torch.tensor([0, 70, 150, 150], dtype=torch.int32, device=DEVICE)
    leaves = [x.detach()[0].requires_grad_() for x in make_inputs("none", 1, 400, 400, 64, BF16)]
    weights = torch.randn_like(leaves[0])
    results = []
    for value in (0.0, torch.nan):
        weights[150:] = value
        with reproducible("hopper" if deterministic else ""):
            out = flash_attention(
                *leaves, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=80, max_seqlen_k=80,
                softmax_scale=0.125, backend="hopper",
            )  # fmt: skip
            results.append(torch.autograd.grad(out, leaves, weights))
    for ours, want in zip(*results, strict=True):
        assert relative_error(ours, want) < 1e-2
        assert not ours[150:].any()
        assert ours[:150].any()


def test_deterministic_backward_of_padded_rows(launches):
    options = {
        "key_starts": torch.tensor([0, 7], device=DEVICE),
        "key_lengths": torch.tensor([130, 60], device=DEVICE),
    }
    leaves = make_inputs("relative", 2, 100, 150, 64, BF16)
    with reproducible("hopper"):
        compare("hopper", "relative", leaves, softmax_scale=0.125, **options)
    assert launches == ["forward_kernel", "backward_kernel", "query_kernel"]


def assert_equals_formula(leaves, make, causal):
    """Compare outputs and gradients; `make` builds the bias from the leaves after q, k and v."""
    weights = torch.randn_like(leaves[0])
    results = []
    for attention, options in ((flash_attention, {"backend": "hopper"}), (attention_reference, {})):
        tensors = leaves if options else [x.detach().double().requires_grad_() for x in leaves]
        out = attention(*tensors[:3], bias=make(*tensors[3:]), causal=causal, softmax_scale=0.125, **options)
        results.append([out, *torch.autograd.grad(out, tensors, weights.to(out.dtype))])
    table_gradient = results[1][-1]
    for index, (ours, exact) in enumerate(zip(*results, strict=True)):
        allowed = 8e-3
        if index > 3:
            allowed = max(allowed, 3 * table_rounding("relative", results[0][0], weights, table_gradient))
        assert relative_error(ours.detach(), exact.detach()) < allowed, index


@pytest.mark.parametrize(("symmetric", "causal"), [(True, False), (False, True)])
def test_alibi_with_fixed_slopes(symmetric, causal, launches):
    slopes = torch.tensor([0.5, 0.01], device=DEVICE)
    leaves = make_inputs("none", 1, 150, 150, 64, BF16)
    assert_equals_formula(leaves, lambda: AlibiBias(slopes, symmetric=symmetric), causal)
    assert launches == ["forward_kernel", "backward_kernel"]


@pytest.mark.parametrize("radius", [1, 40, 150])
def test_tables_of_any_radius(radius, launches):
    leaves = [
        *make_inputs("none", 1, 200, 200, 64, BF16),
        torch.randn(2, 2 * radius + 1, device=DEVICE, requires_grad=True),
    ]
    assert_equals_formula(leaves, DistanceBias, causal=radius == 1)
    assert launches == ["forward_kernel", "backward_kernel"]


def test_frozen_table_costs_nothing(launches, monkeypatch):
    monkeypatch.setattr(launch, "table_kernel", None)
    leaves = make_inputs("relative", 1, 100, 100, 64, BF16)
    leaves[3] = leaves[3].detach()
    out = flash_attention(*leaves[:3], bias=DistanceBias(leaves[3].T.contiguous()[:, :7]), backend="hopper")
    assert all(g.any() for g in torch.autograd.grad(out.sum(), leaves[:3]))
    assert launches == ["forward_kernel", "backward_kernel"]


SHAPES = [  # three consumers: 192 queries a tile, and at 256 and 200 some that none of the third's queries stand on
    (64, 256, False, ForwardShape(3, ahead=False)),
    (64, 256, True, ForwardShape(3, ahead=False)),
    (64, 200, True, ForwardShape(3, 3, chunk=2)),
    (64, 300, False, ForwardShape(2, 4, ahead=False)),
    (64, 390, True, ForwardShape(2, 3, chunk=1)),
    (128, 130, False, ForwardShape(2, 2, ahead=False)),
    (64, 256, True, ForwardShape(2, 3, ahead=False, halves=True)),
    (128, 320, True, ForwardShape(2, 2, ahead=False, halves=True)),
    (64, 190, False, ForwardShape(2, 3, ahead=False, halves=True)),
]


@pytest.mark.parametrize(("dim", "length", "causal", "shape"), SHAPES)
def test_every_shape_of_the_forward_gives_the_same(dim, length, causal, shape, monkeypatch, launches):
    monkeypatch.setattr(configuration, "forward_shape", lambda *_: shape)
    seen = []
    original = launch.constants
    monkeypatch.setattr(launch, "constants", lambda *a: seen.append(original(*a)) or original(*a))
    compare("hopper", "relative", make_inputs("relative", 1, length, length, dim, BF16), causal, softmax_scale=0.125)
    assert [seen[0][name] for name in ("NC", "NB", "AHEAD")] == [shape.consumers, shape.stages, shape.ahead]


@pytest.mark.parametrize("ahead", [True, False])
def test_consumers_that_alternate(monkeypatch, ahead, launches):
    """Each waits for the other's products of scores; one has no queries in the last tiles, and passes its turns on."""
    original = launch.constants

    def constants(configuration, kernel):
        found = original(configuration, kernel)
        return found | {"ALTERNATE": True, "AHEAD": ahead} if kernel == "forward_kernel" else found

    monkeypatch.setattr(launch, "constants", constants)
    leaves = make_inputs("relative", 2, 290, 290, 64, BF16)
    compare("hopper", "relative", leaves, softmax_scale=0.125)


def test_strided_inputs_are_read_where_they_lie(launches, monkeypatch):
    """Slices of a joint projection, and heads before rows in memory: no copy, so no `contiguous` on the way."""
    joint = torch.randn(2, 150, 2, 3 * 64, device=DEVICE).to(BF16).requires_grad_()
    q, k, v = joint.chunk(3, dim=-1)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    described = []
    original = launch.rows_descriptor
    monkeypatch.setattr(launch, "rows_descriptor", lambda x, *a: described.append(x.data_ptr()) or original(x, *a))
    out = flash_attention(q, k, v, backend="hopper", softmax_scale=0.125)
    (grad,) = torch.autograd.grad(out.float().square().sum(), joint)
    assert {x.data_ptr() for x in (q, k, v)} <= set(described)
    want_joint = joint.detach().double().requires_grad_()
    want = attention_reference(*want_joint.chunk(3, dim=-1), softmax_scale=0.125)
    (want_grad,) = torch.autograd.grad(want.square().sum(), want_joint)
    assert relative_error(out.detach(), want.detach()) < 4e-3
    assert relative_error(grad, want_grad) < 1e-2
    assert launches == ["forward_kernel", "backward_kernel"]


@pytest.mark.parametrize(
    ("layout", "deterministic"),
    [("rows", True), ("padded", False), ("packed", False), ("packed", True), ("cross", False)],
)
def test_joined_gradients_are_those_of_the_parts(layout, deterministic, launches):
    """The kernels store into slices of one gradient what they store apart, and nothing else: its memory starts as NaN.

    Equal bits where the backward is deterministic; in one pass the queries' gradient is added up in any order.
    """
    batch, length, total, options = 2, 100, 150, {"softmax_scale": 0.125}
    if layout == "padded":
        options |= {"key_lengths": torch.tensor([100, 60], device=DEVICE)}
    shape = (batch, length)
    if layout == "packed":
        offsets = torch.tensor([0, 7, 8, 8, 137, 137], dtype=torch.int32, device=DEVICE)
        options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 129, "max_seqlen_k": 129}
        shape = (total,)
    parts, q = (2, [torch.randn(*shape, 2, 64, device=DEVICE).to(BF16)]) if layout == "cross" else (3, [])
    joined = torch.randn(*shape, parts, 2, 64, device=DEVICE).to(BF16)
    leaves = [x.requires_grad_() for x in (joined, *q, torch.randn(2, 183, device=DEVICE))]
    results = []
    for function in (joined_attention, lambda x, *q, **o: flash_attention(*q, *x.unbind(-3), **o)):
        with reproducible("hopper" if deterministic else ""):
            out = function(*leaves[:-1], bias=DistanceBias(leaves[-1]), backend="hopper", **options)
            torch.manual_seed(1)
            results.append([out, *torch.autograd.grad(out, leaves, torch.randn_like(out))])
    once = ["forward_kernel", "backward_kernel", "query_kernel"][: 2 + deterministic]
    assert launches == once * 2
    for ours, theirs in zip(*results, strict=True):
        limit = 1e-2 if ours.ndim > 2 else 3e-2  # one pass sums the table's near tiles in bf16
        assert torch.equal(ours, theirs) if deterministic else relative_error(ours.detach(), theirs.detach()) < limit
        assert ours.any()
        assert ours.isfinite().all()


@pytest.mark.skipif(CUDA, reason="the device itself runs the kernels")
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("mbarrier.wait", "while|under way"),
        ("mbarrier.arrive", "deadlock"),
        ("fence_async_shared", "before a fence"),
        ("group_barrier", "do not know of a store's end"),
    ],
)
def test_the_emulator_sees_what_each_means_of_order_is_for(part, message, monkeypatch):
    kernel = EmulatedKernel("forward_kernel")
    space = kernel.function.__globals__
    name, _, member = part.partition(".")
    nothing = lambda *a, **k: None  # noqa: E731
    changed = types.SimpleNamespace(**{**vars(space[name]), member: nothing}) if member else nothing
    monkeypatch.setitem(space, name, changed)
    monkeypatch.setattr(launch, "forward_kernel", kernel)
    monkeypatch.setattr(dispatch, "_give_up", lambda configuration, device, error: (_ for _ in ()).throw(error))
    with pytest.raises(HazardError, match=message):
        flash_attention(*make_inputs("none", 1, 300, 300, 64, BF16), backend="hopper")
