"""The losses' kernels against the formula in float64: through Triton's interpreter on a CPU, compiled on a GPU.

The interpreter cuts bf16 off where a GPU rounds, so on a CPU bf16 has twice the tolerance.
"""

from __future__ import annotations

import pytest
import torch

from fat5.ops.loss import CrossEntropyOutput, cross_entropy, linear_cross_entropy
from fat5.ops.loss.reference import cross_entropy_reference
from fat5.ops.loss.tiles import KERNELS, Tile, candidates, forced_tile, preferred_tile
from tests.ops.kernel_checks import CUDA, DEVICE, needs_kernels, relative_error

REDUCTIONS = ("mean", "sum", "none")
TYPES = (torch.float32, torch.float16, torch.bfloat16)

pytestmark = needs_kernels


def tolerance(dtype: torch.dtype) -> float:
    """Of a gradient that is rounded once to this type."""
    if dtype == torch.float32:
        return 1e-6  # the exponents of scores of about 10 carry a rounding of their own
    return torch.finfo(dtype).eps * (2 if dtype == torch.bfloat16 and not CUDA else 1)


def make_labels(rows: int, vocab: int, ignored: float = 0.3) -> torch.Tensor:
    labels = torch.randint(0, vocab, (rows,), device=DEVICE)
    kept = torch.rand(rows, device=DEVICE) >= ignored
    kept[:1] = True
    return labels.where(kept, -100)


def make_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(rows, vocab, device=DEVICE)).to(dtype).requires_grad_()


def compare(
    got: CrossEntropyOutput, logits: torch.Tensor, labels: torch.Tensor, grad: torch.Tensor | None = None, **terms
) -> None:
    """Hold an output and its gradient to those of the formula in float64."""
    exact = logits.detach().double().requires_grad_()
    expected = cross_entropy_reference(exact, labels, **terms)
    grad = torch.rand_like(expected.loss) if grad is None else grad.double()
    for ours, exactly in ((got.loss, expected.loss), (got.z_loss, expected.z_loss)):
        torch.testing.assert_close(ours.detach().double(), exactly.detach(), rtol=2e-6, atol=2e-6)
    assert torch.equal(got.correct, expected.correct)
    assert torch.equal(got.count, expected.count)
    (by_logits,) = torch.autograd.grad(got.loss, logits, grad.float())
    (truth,) = torch.autograd.grad(expected.loss, exact, grad)
    assert by_logits.dtype == logits.dtype
    # With one or two logits a token, gradients are small differences of numbers near 1.
    assert (by_logits.double() - truth).norm() < tolerance(logits.dtype) * truth.norm() + 1e-6
    assert not by_logits[labels == -100].any()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("vocab", [1, 2, 37, 2050, 5000])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_equals_the_formula(dtype, vocab, reduction):
    logits, labels = make_logits(5, vocab, dtype), make_labels(5, vocab)
    labels[0] = logits[0].argmax()
    terms = {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": reduction}
    compare(cross_entropy(logits, labels, backend="triton", **terms), logits, labels, **terms)


@pytest.mark.parametrize(("smoothing", "z_loss"), [(0.0, 0.0), (0.2, 0.0), (0.0, 0.02)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_term_alone(smoothing, z_loss, dtype):
    logits, labels = make_logits(9, 300, dtype), make_labels(9, 300)
    terms = {"label_smoothing": smoothing, "z_loss": z_loss}
    compare(cross_entropy(logits, labels, backend="triton", **terms), logits, labels, **terms)


def test_rows_of_many_blocks_equal_the_formula():
    """The running maximum of the block kernel: rising, falling, and a first block of -inf."""
    logits = torch.randn(4, 3000)
    logits[0] += torch.linspace(0, 60, 3000)
    logits[1] -= torch.linspace(0, 60, 3000)
    logits[2, :1500] = -1e4
    logits = logits.to(DEVICE).requires_grad_()
    labels = torch.tensor([5, 2999, 2000, 1024], device=DEVICE)
    with forced_tile("blocks", Tile(1024, 4, 2)):
        got = cross_entropy(logits, labels, backend="triton", z_loss=0.01)
        hidden = cross_entropy(logits.masked_fill(logits == -1e4, -torch.inf), labels, backend="triton", z_loss=0.01)
    assert torch.equal(got.loss, hidden.loss)
    compare(got, logits, labels, z_loss=0.01)


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_candidate_tile_equals_the_formula(kernel):
    vocab = 4096
    dtype = torch.bfloat16 if kernel == "pairs" else torch.float32
    reduction = "none" if kernel == "gradient" else "mean"
    tiles = candidates(kernel, vocab, dtype.itemsize)
    assert tiles[0] == preferred_tile(kernel, vocab)
    assert len(tiles) > 2
    rows = 6 if kernel == "pairs" else 2  # more than the interpreter has programs that take row after row
    logits = make_logits(rows, vocab, dtype)
    labels = torch.tensor([4095, -100, 0, 1, -100, 9], device=DEVICE)[:rows]
    for tile in tiles:
        with forced_tile(kernel, tile):
            got = cross_entropy(logits, labels, backend="triton", reduction=reduction)
            compare(got, logits, labels, reduction=reduction)
    assert preferred_tile(kernel, vocab) == tiles[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_correct_takes_the_lowest_index_on_ties(dtype):
    """In the first block or a later one, in either half of a pair, and false where ignored."""
    vocab = 3000
    logits = torch.zeros(8, vocab, device=DEVICE, dtype=dtype)
    places = [(0, [0, 1]), (1, [0, 1]), (2, [2047, 2048]), (3, [2047, 2048]), (4, [1500, 2999]), (5, [2998, 2999])]
    for row, columns in places:
        logits[row, columns] = 4.0
    labels = torch.tensor([0, 1, 2047, 2048, 2999, 2999, 0, -100], device=DEVICE)
    for kernel, tile in (("blocks", Tile(1024, 4)), ("blocks", Tile(4096, 4)), ("pairs", Tile(4096, 4))):
        with forced_tile(kernel, tile):
            got = cross_entropy(logits, labels, backend="triton")
        assert got.correct.tolist() == [True, False, True, False, False, False, True, False]
        assert got.correct.dtype == torch.bool
        assert got.count == 7


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ignored_rows_are_never_read(reduction, dtype):
    """NaN in them reaches nothing; all ignored gives 0 and zero gradients, not 0/0 (pitfall)."""
    logits, labels = make_logits(6, 100, dtype), torch.tensor([3, -100, 99, 0, -100, -100], device=DEVICE)
    clean = logits.detach().clone().requires_grad_()
    with torch.no_grad():
        logits[labels == -100] = torch.nan
    terms = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": reduction, "backend": "triton"}
    for rows in (labels, torch.full_like(labels, -100)):
        got, expected = cross_entropy(logits, rows, **terms), cross_entropy(clean, rows, **terms)
        assert torch.equal(got.loss, expected.loss)
        assert torch.equal(got.z_loss, expected.z_loss)
        grad = torch.ones_like(got.loss)
        (by_logits,), (by_clean,) = (
            torch.autograd.grad(o.loss, x, grad) for o, x in ((got, logits), (expected, clean))
        )
        assert torch.equal(by_logits, by_clean)
        assert bool(by_logits.any()) == bool((rows != -100).any()) == bool(got.loss.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("scale", [1.0, -3.0, 0.0])
def test_incoming_gradient_scales_and_overwriting_takes_the_memory_of_the_logits(dtype, overwrite, reduction, scale):
    leaf, labels = make_logits(4, 130, dtype), make_labels(4, 130)
    logits = leaf * 1
    before = logits.detach().clone()
    got = cross_entropy(logits, labels, backend="triton", reduction=reduction, overwrite_logits=overwrite)
    assert bool((logits == before).all()) != overwrite
    grad = torch.tensor(scale, device=DEVICE)
    (by_logits,) = torch.autograd.grad(got.loss, logits, grad)
    assert (by_logits.data_ptr() == logits.data_ptr()) == overwrite
    exact = before.double().requires_grad_()
    expected = cross_entropy_reference(exact, labels, reduction=reduction).loss
    (truth,) = torch.autograd.grad(expected, exact, grad.double())
    assert relative_error(by_logits, truth) < 2 * tolerance(dtype)
    assert by_logits.any() or scale == 0


def test_overwriting_leaves_logits_alone_whose_rows_share_memory():
    row, labels = make_logits(1, 64), torch.tensor([3, 5, -100], device=DEVICE)
    before = row.detach().clone()
    logits = row.expand(3, 64)
    compare(cross_entropy(logits, labels, backend="triton", overwrite_logits=True), logits, labels)
    assert torch.equal(row, before)


def test_overwriting_logits_that_another_operator_still_needs_is_an_error():
    leaf = make_logits(3, 16)
    labels = torch.zeros(3, dtype=torch.long, device=DEVICE)
    loss = cross_entropy(leaf.tanh(), labels, backend="triton", overwrite_logits=True).loss
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_backward_pass_is_right_and_leaves_the_first_alone():
    logits, labels = make_logits(4, 130), make_labels(4, 130)
    loss = cross_entropy(logits, labels, backend="triton", label_smoothing=0.1, z_loss=0.01).loss
    (first,) = torch.autograd.grad(3 * loss, logits, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(loss, logits, retain_graph=True)
    (third,) = torch.autograd.grad(loss, logits)
    assert torch.equal(first, kept)
    assert torch.equal(second, third)
    torch.testing.assert_close(first, 3 * second)
    assert first.any()


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_second_backward_pass_over_overwritten_logits_is_an_error(create_graph):
    logits = make_logits(3, 16) * 1
    loss = cross_entropy(
        logits, torch.zeros(3, dtype=torch.long, device=DEVICE), backend="triton", overwrite_logits=True
    )
    if not create_graph:
        loss.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="expected overwrite_logits=False where the graph is used twice"):
        loss.loss.backward(create_graph=create_graph)


def test_float16_gradients_do_not_underflow_before_a_loss_scale():
    """Pitfall of one pass: dividing by the number of tokens first would round small gradients to 0."""
    rows = 64
    logits = torch.tensor([[0.0, 12.0]], device=DEVICE).half().repeat(rows, 1).requires_grad_()
    scale = 2.0**16
    loss = cross_entropy(logits, torch.ones(rows, dtype=torch.long, device=DEVICE), backend="triton").loss
    (got,) = torch.autograd.grad(scale * loss, logits)
    exact = scale / rows * torch.sigmoid(torch.tensor(-12.0, dtype=torch.float64))
    torch.testing.assert_close(got[:, 0].double().cpu(), exact.expand(rows), rtol=1e-3, atol=0)


@pytest.mark.parametrize("wrong", [100, -1, -101, 2**40])
def test_label_out_of_range_is_an_error_on_a_cpu(wrong):
    """Pitfall: labels out of range read wild memory. On a GPU it is a device-side assertion."""
    if CUDA:
        pytest.skip("a device-side assertion ends CUDA in this process; tested in one of its own")
    labels = torch.tensor([1, 2, wrong])
    with pytest.raises(ValueError, match=rf"\[0, 100\) or equal ignore_index=-100, got {wrong} at position 2"):
        cross_entropy(make_logits(3, 100), labels, backend="triton")


@pytest.mark.parametrize("label_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_and_expanded_logits(label_dtype, dtype):
    labels = make_labels(4, 50).to(label_dtype)
    leaf = make_logits(50, 4, dtype)
    wide = make_logits(4, 131, dtype)
    row = make_logits(1, 50, dtype)
    for logits in (leaf.t(), wide[:, 1:51], wide[:, 2:52], row.expand(4, 50)):
        compare(cross_entropy(logits, labels, backend="triton", z_loss=0.1), logits, labels.long(), z_loss=0.1)
        one = cross_entropy(logits[:1], labels[:1], backend="triton", reduction="none").loss
        part = cross_entropy(logits.view(2, 2, 50), labels.view(2, 2), backend="triton", reduction="none")
        assert part.loss.shape == part.correct.shape == (2, 2)
        assert torch.equal(part.loss.flatten()[:1], one)


def test_strided_labels():
    logits, labels = make_logits(4, 50), make_labels(8, 50, ignored=0.0)
    for view in (labels[::2], labels[:1].expand(4)):
        compare(cross_entropy(logits, view, backend="triton"), logits, view)
        hidden, weight = torch.randn(4, 3, device=DEVICE), torch.randn(50, 3, device=DEVICE)
        got, expected = (
            linear_cross_entropy(hidden, weight, rows, backend="triton").loss for rows in (view, view.contiguous())
        )
        assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_beyond_two_to_the_31_elements(dtype):
    """Pitfall: int32 offsets wrap. Rows far apart in memory that nobody touches in between."""
    stride, vocab = 2**30 + 8, 64
    storage = torch.empty(2 * stride + vocab, dtype=torch.int16, device=DEVICE).view(dtype)
    logits = storage.as_strided((3, vocab), (stride, 1))
    logits.copy_(torch.randn(3, vocab))
    logits.requires_grad_()
    labels = torch.tensor([5, 6, 63], device=DEVICE)
    for reduction in ("mean", "none"):
        compare(
            cross_entropy(logits, labels, backend="triton", reduction=reduction), logits, labels, reduction=reduction
        )
