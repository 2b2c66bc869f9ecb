"""`flash_attention` against the formula: every bias, layout, length and mask."""

import pytest
import torch
from torch import Tensor

from fat5.ops import AlibiBias, DenseBias, RelativeBias, flash_attention
from fat5.ops.attention import blockwise
from fat5.ops.attention.backends import torch_attention, torch_attention_backward
from fat5.ops.attention.reference import attention_reference, packed_attention_reference
from tests.ops.attention_comparison import make_bias as bias_of

HEADS, DIM = 2, 6
BIASES = ["none", "relative", "distance", "alibi", "alibi-signed", "dense"]


def make_bias(kind: str, num_queries: int, num_keys: int, *, causal: bool = False, dtype=torch.float64):
    """A bias of this kind and the leaf tensor that takes its gradient."""
    shapes = {"relative": (8, HEADS), "distance": (HEADS, 15), "dense": (1, HEADS, num_queries, num_keys)}
    leaf = torch.randn(shapes.get(kind, (HEADS,)), dtype=dtype, requires_grad=kind != "none")
    return bias_of(kind, leaf, causal), leaf


def make_qkv(batch: int, num_queries: int, num_keys: int, dtype=torch.float64) -> list[Tensor]:
    shapes = [(batch, n, HEADS, DIM) for n in (num_queries, num_keys, num_keys)]
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in shapes]


def grads(out: Tensor, leaves: list[Tensor], weights: Tensor) -> list[Tensor]:
    found = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def compare(out: Tensor, expected: Tensor, leaves: list[Tensor], tolerance: float = 1e-9) -> None:
    weights = torch.randn_like(out)
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    for got, want in zip(grads(out, leaves, weights), grads(expected, leaves, weights), strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.fixture(params=["one block", "small blocks"])
def block_size(request, monkeypatch):
    """Run with everything in one block, and with blocks far smaller than the inputs."""
    if request.param == "small blocks":
        monkeypatch.setattr(blockwise, "_MAX_BLOCK_SIDE", 16)


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(1, 1), (43, 43), (5, 37), (37, 5)])
def test_outputs_and_gradients_equal_the_formula(kind, causal, num_queries, num_keys):
    """Pitfalls: tails at odd lengths; a causal mask anchored top-left; a bias without the mask's offset."""
    q, k, v = make_qkv(2, num_queries, num_keys)
    bias, leaf = make_bias(kind, num_queries, num_keys, causal=causal)
    options = {"bias": bias, "causal": causal, "softmax_scale": 0.7}
    leaves = [q, k, v] + ([leaf] if bias is not None else [])
    compare(flash_attention(q, k, v, **options), attention_reference(q, k, v, **options), leaves)


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("kind", BIASES)
@pytest.mark.parametrize("causal", [False, True])
def test_padding_and_offsets_of_each_row(kind, causal):
    """Left and right padding, rows without keys, and a position of its own for each row's first query."""
    q, k, v = make_qkv(4, 19, 23)
    bias, leaf = make_bias(kind, 19, 23, causal=causal)
    options = {
        "bias": bias,
        "causal": causal,
        "query_offset": torch.tensor([0, 4, -3, 40]),
        "key_starts": torch.tensor([0, 5, 2, 23]),
        "key_lengths": torch.tensor([23, 7, 0, 0]),
    }
    leaves = [q, k, v] + ([leaf] if bias is not None else [])
    out = flash_attention(q, k, v, **options)
    compare(out, attention_reference(q, k, v, **options), leaves)
    assert not out[2:].any()


@pytest.mark.parametrize("side", ["key_starts", "key_lengths"])
def test_one_bound_alone(side):
    q, k, v = make_qkv(2, 9, 9)
    options = {side: torch.tensor([3, 9])}
    compare(flash_attention(q, k, v, **options), attention_reference(q, k, v, **options), [q, k, v])


def test_nan_in_unused_slots_does_not_matter():
    """Pitfall: rows without a visible key give NaN. They give 0, and zero gradients."""
    q, k, v = (x.detach() for x in make_qkv(2, 7, 11))
    lengths = torch.tensor([4, 0])
    clean = flash_attention(q, k, v, key_lengths=lengths)
    k[0, 4:], v[0, 4:], k[1], v[1] = torch.nan, torch.nan, torch.nan, torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = flash_attention(*leaves, key_lengths=lengths)
    assert torch.equal(out, clean)
    assert clean[0].any()
    assert not out[1].any()
    for grad in torch.autograd.grad(out.sum(), leaves):
        assert grad.isfinite().all()
        assert not grad[1].any()


def test_causal_rows_before_the_first_key_give_zero():
    q, k, v = make_qkv(1, 8, 3)
    out = flash_attention(q, k, v, causal=True)
    assert not out[:, :5].any()
    assert out[:, 5:].any(-1).all()
    assert torch.allclose(out[:, 5], v[:, 0])


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("batch", [0, 2])
def test_empty_inputs(lengths, batch):
    q, k, v = make_qkv(batch, *lengths)
    bias, leaf = make_bias("relative", *lengths)
    out = flash_attention(q, k, v, bias=bias)
    assert out.shape == q.shape
    assert not out.any()
    for grad in torch.autograd.grad(out.sum(), [q, k, v, leaf], allow_unused=True):
        assert grad is None or not grad.any()


DOCUMENTS = {
    "self": ([7, 1, 0, 20, 4], [7, 1, 0, 20, 4]),
    "cross": ([7, 1, 5, 0, 4], [3, 20, 0, 6, 4]),
}


def offsets_of(lengths: list[int], slots: int, dtype=torch.int32) -> Tensor:
    """cu_seqlens with empty slots at the end."""
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([ends, ends[-1:].expand(slots - len(lengths))]).to(dtype)


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("kind", [b for b in BIASES if b != "dense"])
@pytest.mark.parametrize(("case", "causal"), [("self", False), ("self", True), ("cross", False)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_documents_equal_each_document_alone(kind, case, causal, dtype):
    """Pitfall: packed documents see each other. Unused rows are 0 and take no gradient."""
    lengths_q, lengths_k = DOCUMENTS[case]
    total_q, total_k = sum(lengths_q) + 3, sum(lengths_k) + 2
    q, k, v = (torch.randn(n, HEADS, DIM, dtype=torch.float64, requires_grad=True) for n in (total_q, total_k, total_k))
    bias, leaf = make_bias(kind, 0, 0, causal=causal)
    cu_q, cu_k = offsets_of(lengths_q, 8, dtype), offsets_of(lengths_k, 8, dtype)
    out = flash_attention(
        q, k, v, bias=bias, causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=20, max_seqlen_k=20
    )
    expected = packed_attention_reference(q, k, v, cu_q, cu_k, bias=bias, causal=causal)
    compare(out, expected, [q, k, v] + ([leaf] if bias is not None else []))
    assert not out[-3:].any()


def test_packed_offsets_of_each_document():
    """Each document's first query stands where `query_offset` says, as in the padded layout."""
    q, k, v = make_qkv(3, 6, 6)
    bias, _ = make_bias("relative", 6, 6)
    offsets = torch.tensor([0, 2, -1])
    cu = torch.arange(0, 19, 6)
    packed = flash_attention(
        *(x.flatten(0, 1) for x in (q, k, v)), bias=bias, causal=True, query_offset=offsets,
        cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=6, max_seqlen_k=6,
    )  # fmt: skip
    padded = flash_attention(q, k, v, bias=bias, causal=True, query_offset=offsets)
    torch.testing.assert_close(packed, padded.flatten(0, 1))


@pytest.mark.parametrize("shape", [(3, 2, 5, 9), (1, 2, 5, 9), (3, 1, 5, 9), (1, 1, 1, 9), (3, 1, 1, 9)])
def test_dense_bias_of_any_broadcast_shape(shape):
    """Pitfall: the gradient of a broadcast bias summed over the wrong axes. Also with q, k and v frozen."""
    q, k, v = make_qkv(3, 5, 9)
    tensor = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    compare(
        flash_attention(q, k, v, bias=DenseBias(tensor)),
        attention_reference(q, k, v, bias=DenseBias(tensor)),
        [q, k, v, tensor],
    )
    frozen = [x.detach() for x in (q, k, v)]
    compare(
        flash_attention(*frozen, bias=DenseBias(tensor)),
        attention_reference(*frozen, bias=DenseBias(tensor)),
        [tensor],
    )


def test_dense_mask_of_infinities():
    """A row masked whole by -inf gives 0 and finite gradients, to the mask too."""
    q, k, v = make_qkv(1, 3, 4)
    mask = torch.zeros(1, 1, 3, 4, dtype=torch.float64)
    mask[..., 1, :] = mask[..., 0, 2] = -torch.inf
    mask.requires_grad_()
    out = flash_attention(q, k, v, bias=DenseBias(mask))
    assert not out[:, 1].any()
    assert out[:, [0, 2]].all()
    for grad in torch.autograd.grad(out.sum(), [q, k, v, mask]):
        assert grad.isfinite().all()


def test_strided_and_expanded_inputs():
    """Views as projections make them: [B, H, L, D] transposed, one tensor cut in three, stride 0."""
    joint = torch.randn(2, HEADS, 9, 3 * DIM, dtype=torch.float64)
    q, k, v = joint.transpose(1, 2).chunk(3, dim=-1)
    v = v[:, :1].expand_as(v)
    assert 0 in v.stride()
    torch.testing.assert_close(flash_attention(q, k, v), attention_reference(q, k, v))


def test_scale_is_one_unless_said():
    """Pitfall: 1 / sqrt(D) applied to T5."""
    q, k, v = make_qkv(1, 4, 4)
    scores = torch.einsum("bihd,bjhd->bhij", q, k)
    expected = torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v)
    torch.testing.assert_close(flash_attention(q, k, v), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_low_precision_is_within_twice_the_error_of_plain_attention(dtype, causal):
    """Pitfall: the table's gradient accumulated in low precision. It has the table's type, summed in float32."""
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in make_qkv(2, 61, 61))
    table = torch.randn(8, HEADS, requires_grad=True)
    weights = torch.randn_like(q)

    def run(attention, leaves, work_dtype):
        leaves = [x.detach().to(work_dtype).requires_grad_() for x in leaves]
        bias = RelativeBias(leaves[3], bidirectional=not causal, max_distance=20)
        out = attention(*leaves[:3], bias=bias, causal=causal)
        return [out, *torch.autograd.grad((out * weights.to(out.dtype)).sum(), leaves)]

    exact = run(attention_reference, [q, k, v, table], torch.float64)
    plain = run(attention_reference, [q, k, v, table], dtype)
    bias = RelativeBias(table, bidirectional=not causal, max_distance=20)
    out = flash_attention(q, k, v, bias=bias, causal=causal)
    ours = [out, *torch.autograd.grad((out * weights).sum(), [q, k, v, table])]
    assert ours[0].dtype == dtype
    assert ours[4].dtype == torch.float32
    for n, (a, b, c) in enumerate(zip(ours, plain, exact, strict=True)):
        limit = (2 if n == 0 else 3) * (b.double() - c).norm() + 1e-6 * c.norm()
        assert (a.double() - c).norm() <= limit


@pytest.mark.parametrize("kind", BIASES)
def test_gradcheck(kind):
    q, k, v = make_qkv(1, 4, 5)
    bias, leaf = make_bias(kind, 4, 5)

    def run(q, k, v, leaf):
        current = bias if bias is None else type(bias)(leaf, **{n: getattr(bias, n) for n in options})
        return flash_attention(q, k, v, bias=current, key_lengths=torch.tensor([4]))

    options = {"relative": ("bidirectional", "max_distance"), "alibi-signed": ("symmetric",)}.get(kind, ())
    assert torch.autograd.gradcheck(run, (q, k, v, leaf))


def test_autocast_casts_at_the_door():
    """Pitfall: mixed types under autocast. The output has autocast's type, the gradients those of the leaves."""
    q, k, v = (x.detach().float().requires_grad_() for x in make_qkv(1, 9, 9))
    k16 = k.detach().to(torch.bfloat16).requires_grad_()
    table = torch.randn(8, HEADS, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attention(q, k16, v, bias=RelativeBias(table, bidirectional=True, max_distance=20))
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out.float().square().sum(), [q, k16, v, table])
    assert [g.dtype for g in gradients] == [torch.float32, torch.bfloat16, torch.float32, torch.float32]
    assert all(g.any() for g in gradients)


def dropout_mask(q: Tensor, k: Tensor, **options) -> Tensor:
    """The factors of dropout, seen through values that are unit vectors: [B, Lq, H, Lk]."""
    v = torch.eye(k.shape[1], dtype=k.dtype)[None, :, None].expand(k.shape[0], -1, k.shape[2], -1)
    uniform = [torch.zeros_like(v[:, : q.shape[1]]), torch.zeros_like(v), v]
    return flash_attention(*uniform, **options) * k.shape[1]


def test_dropout_drops_the_stated_share_and_keeps_the_mean():
    q, k, _ = (x.detach() for x in make_qkv(4, 64, 64))
    factors = dropout_mask(q, k, dropout_p=0.25)
    assert set(factors.round(decimals=6).unique().tolist()) == {0.0, round(1 / 0.75, 6)}
    share = (factors == 0).double()
    assert abs(share.mean() - 0.25) < 0.01
    for axis in range(4):
        others = [a for a in range(4) if a != axis]
        assert (share.mean(others) - 0.25).abs().max() < 0.06
    other = dropout_mask(q, k, dropout_p=0.25)
    assert not torch.equal(other, factors)


def test_dropout_gradients_and_blocks(monkeypatch):
    """The backward draws the same mask, whatever the blocks, and the same seed gives the same output."""
    q, k, v = make_qkv(2, 40, 40)
    bias, leaf = make_bias("relative", 40, 40)

    def run():
        torch.manual_seed(5)
        out = flash_attention(q, k, v, bias=bias, dropout_p=0.3)
        return [out, *torch.autograd.grad(out.square().sum(), [q, k, v, leaf])]

    once = run()
    monkeypatch.setattr(blockwise, "_MAX_BLOCK_SIDE", 16)
    for a, b in zip(once, run(), strict=True):
        torch.testing.assert_close(a, b)

    def seeded(q, k, v):
        torch.manual_seed(5)
        return flash_attention(q, k, v, dropout_p=0.3)

    small = [x.detach()[:1, :4].requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(seeded, small)


def op_arguments(case: str) -> tuple:
    table = torch.randn(HEADS, 9, requires_grad=True)
    if case == "packed":
        q, k, v = (torch.randn(n, HEADS, DIM, requires_grad=True) for n in (9, 12, 12))
        cu_q, cu_k = torch.tensor([0, 4, 8, 8]), torch.tensor([0, 6, 11, 11])
        return (q, k, v, table, "distance", None, None, None, None, cu_q, cu_k, 1.0, True, 0.0, None, None)
    q, k, v = (x.detach().float().requires_grad_() for x in make_qkv(2, 4, 6))
    bounds = (torch.tensor([0, 1]), torch.tensor([6, 3]))
    return (q, k, v, table, "distance", 2, None, *bounds, None, None, 0.5, True, 0.2, torch.tensor(7), None)


@pytest.mark.parametrize("case", ["packed", "padded"])
def test_opcheck(case):
    arguments = op_arguments(case)
    torch.library.opcheck(torch_attention, arguments)
    with torch.no_grad():
        q, k, v, *rest = (x.detach() if isinstance(x, Tensor) else x for x in arguments)
        out, lse = torch_attention(q, k, v, *rest)
        for bias_grad in (True, False):
            inputs = (torch.randn_like(out), out, lse, bias_grad, q, k, v, *rest)
            torch.library.opcheck(torch_attention_backward, inputs)


@pytest.mark.parametrize("packed", [False, True])
def test_compiles_whole_with_dynamic_lengths(packed):
    def attend(q, k, v, table, offsets):
        bias = RelativeBias(table, bidirectional=True, max_distance=20)
        if packed:
            q, k, v = (x.flatten(0, 1) for x in (q, k, v))
            return flash_attention(
                q, k, v, bias=bias, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=64, max_seqlen_k=64
            )
        return flash_attention(q, k, v, bias=bias, key_lengths=offsets)

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (9, 17):
        q, k, v = make_qkv(2, length, length, dtype=torch.float32)
        table = torch.randn(8, HEADS, requires_grad=True)
        offsets = torch.tensor([0, 5, 2 * length - 1]) if packed else torch.tensor([length, 3])
        compare(compiled(q, k, v, table, offsets), attend(q, k, v, table, offsets), [q, k, v, table], tolerance=1e-5)


def test_memory_is_linear_in_the_length():
    """The largest tensor made on the way, forward and backward, does not grow with the square of the length."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(x, Tensor):
                    self.elements = max(self.elements, x.untyped_storage().size() // x.element_size())
            return out

    length = 6000
    q, k, v = (torch.randn(1, length, 1, 2, requires_grad=True) for _ in range(3))
    table = torch.randn(8, 1, requires_grad=True)
    with Largest() as seen:
        out = flash_attention(q, k, v, bias=RelativeBias(table, bidirectional=True, max_distance=20))
        out.sum().backward()
    assert out.any()
    assert seen.elements <= 3 * 1024**2
    assert length**2 > 10 * seen.elements


Q = torch.zeros(2, 4, HEADS, DIM)
CU = torch.tensor([0, 4])


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((Q, Q, Q[..., :3]), {}, r"v \[2, 4, 2, 3\]"),
        ((Q[0], Q[0], Q[0]), {}, "expected padded inputs"),
        ((Q, Q, Q.double()), {}, "expected one floating type"),
        ((Q, Q, Q), {"backend": "tritan"}, "expected 'auto'"),
        ((Q, Q, Q), {"window_size": (1, 1)}, "reserved"),
        ((Q, Q, Q), {"dropout_p": 1.0}, "dropout_p < 1"),
        ((Q, Q, Q), {"key_lengths": torch.zeros(3, dtype=torch.int64)}, r"key_lengths \[3\]"),
        ((Q, Q, Q), {"key_starts": torch.zeros(2)}, "expected an int32 or int64"),
        ((Q, Q, Q), {"max_seqlen_q": 4}, "without cu_seqlens"),
        ((Q, Q, Q), {"bias": AlibiBias(torch.zeros(3))}, "3 heads"),
        ((Q, Q, Q), {"bias": DenseBias(torch.zeros(1, 3, 4, 4))}, r"\[1, 3, 4, 4\]"),
        ((Q, Q, Q), {"bias": DenseBias(torch.zeros(1, 1, 4, 1))}, r"\[1, 1, 4, 1\]"),
        ((Q, Q, Q), {"bias": torch.zeros(4, 4)}, "bias of type Tensor"),
        ((Q[0], Q[0], Q[0]), {"cu_seqlens_q": CU}, "all four"),
    ],
)
def test_wrong_arguments_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        flash_attention(*arguments, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens_k": torch.tensor([0, 2, 4])}, "same number of documents"),
        ({"cu_seqlens_q": torch.tensor([0.0, 4.0])}, "int32 or int64"),
        ({"cu_seqlens_q": torch.tensor([1, 4])}, "start at 0"),
        ({"cu_seqlens_q": torch.tensor([0, 9]), "max_seqlen_q": 9}, "end at 4 or before"),
        ({"max_seqlen_k": 3}, "max_seqlen_k=3"),
        ({"bias": DenseBias(torch.zeros(1, 1, 4, 4))}, "no packed form"),
        ({"key_lengths": torch.tensor([4])}, "cu_seqlens alone"),
    ],
)
def test_wrong_packed_arguments_are_named(options, message):
    packed = {"cu_seqlens_q": CU, "cu_seqlens_k": CU, "max_seqlen_q": 4, "max_seqlen_k": 4}
    with pytest.raises(ValueError, match=message):
        flash_attention(Q[0], Q[0], Q[0], **(packed | options))
