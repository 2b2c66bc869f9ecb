"""What both cross-entropies mean: formula, means, ignored tokens, accuracy, types, odd shapes, errors at the door."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from fat5.ops.loss import CrossEntropyOutput, cross_entropy, from_hidden, from_logits, linear_cross_entropy
from fat5.ops.loss.reference import cross_entropy_reference, linear_cross_entropy_reference

VOCAB, WIDTH = 37, 12
REDUCTIONS = ("mean", "sum", "none")
Loss = Callable[..., CrossEntropyOutput]


def through_logits(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, **kwargs) -> CrossEntropyOutput:
    return cross_entropy(hidden @ weight.mT, labels, **kwargs)


@pytest.fixture(params=[False, True], ids=["kept_rows", "all_rows"])
def row_choice(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test as on a CPU, where ignored rows are left out of the blocks, and as on a GPU, where they come along."""

    def every_row(labels: torch.Tensor, ignore_index: int, size: int):
        return (slice(start, start + size) for start in range(0, len(labels), size))

    if request.param:
        for module in (from_hidden, from_logits):
            monkeypatch.setattr(module, "row_blocks", every_row)


both = pytest.mark.parametrize("loss_of", [through_logits, linear_cross_entropy], ids=["from_logits", "from_hidden"])


def inputs(*shape: int, dtype: torch.dtype = torch.float64, ignored: float = 0.3) -> tuple[torch.Tensor, ...]:
    hidden = torch.randn(*shape, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, shape)
    return hidden, weight, torch.where(torch.rand(shape) < ignored, -100, labels)


def gradients(output: CrossEntropyOutput, *of: torch.Tensor, grad: torch.Tensor | None = None):
    return torch.autograd.grad(output.loss, of, grad)


@both
@pytest.mark.usefixtures("row_choice")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(1,), (2, 19, 5)])
@pytest.mark.parametrize("chunk_bytes", [1, 5000, None])
@pytest.mark.parametrize(("label_smoothing", "z_loss"), [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.2, 0.01)])
def test_equals_the_reference_with_gradients(loss_of, reduction, shape, chunk_bytes, label_smoothing, z_loss):
    hidden, weight, labels = inputs(*shape, ignored=0.3 if shape != (1,) else 0.0)
    terms = {"label_smoothing": label_smoothing, "z_loss": z_loss, "reduction": reduction}
    got = loss_of(hidden, weight, labels, chunk_bytes=chunk_bytes, **terms)
    expected = linear_cross_entropy_reference(hidden, weight, labels, **terms)
    close = {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(got.loss, expected.loss, **close)
    torch.testing.assert_close(got.z_loss, expected.z_loss.detach(), **close)
    assert torch.equal(got.correct, expected.correct)
    assert torch.equal(got.count, expected.count)
    grad = torch.randn_like(expected.loss)
    torch.testing.assert_close(
        gradients(got, hidden, weight, grad=grad), gradients(expected, hidden, weight, grad=grad), **close
    )


@both
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.15])
def test_equals_torch_cross_entropy(loss_of, reduction, label_smoothing):
    hidden, weight, labels = inputs(3, 14)
    got = loss_of(hidden, weight, labels, label_smoothing=label_smoothing, reduction=reduction)
    logits = (hidden @ weight.mT).flatten(0, 1)
    expected = F.cross_entropy(logits, labels.flatten(), label_smoothing=label_smoothing, reduction=reduction)
    torch.testing.assert_close(got.loss, expected.view(got.loss.shape))
    grad = torch.randn_like(got.loss)
    torch.testing.assert_close(
        torch.autograd.grad(got.loss, (hidden, weight), grad),
        torch.autograd.grad(expected, (hidden, weight), grad.view(expected.shape)),
    )


@both
@pytest.mark.usefixtures("row_choice")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_all_labels_ignored_gives_zero_loss_and_zero_gradients(loss_of, reduction):
    """Pitfall: 0/0."""
    hidden, weight, _ = inputs(2, 7)
    labels = torch.full((2, 7), -100)
    got = loss_of(hidden, weight, labels, label_smoothing=0.1, z_loss=0.1, reduction=reduction)
    assert torch.equal(got.loss, torch.zeros_like(got.loss))
    assert torch.equal(got.z_loss, torch.zeros_like(got.loss))
    assert not got.correct.any()
    assert got.count == 0
    for grad in gradients(got, hidden, weight, grad=torch.ones_like(got.loss)):
        assert torch.equal(grad, torch.zeros_like(grad))


@both
@pytest.mark.usefixtures("row_choice")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ignored_rows_count_neither_in_the_mean_nor_in_the_smoothing(loss_of, reduction):
    """Pitfall: label smoothing counts ignored rows, and means are taken over all tokens."""
    hidden, weight, labels = inputs(40)
    kept = labels != -100
    terms = {"label_smoothing": 0.3, "z_loss": 0.05, "reduction": reduction}
    alone = loss_of(hidden[kept], weight, labels[kept], **terms)
    among = loss_of(hidden, weight, labels, **terms)
    assert 0 < kept.sum() < 40
    for field in ("loss", "z_loss", "count"):
        torch.testing.assert_close(getattr(among, field), getattr(alone, field), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients(among, hidden, weight), gradients(alone, hidden, weight))


@both
@pytest.mark.usefixtures("row_choice")
def test_z_loss_is_the_mean_of_squares_and_reported_apart(loss_of):
    """Pitfall: z-loss as the square of a mean, or not reported."""
    hidden, weight, labels = inputs(30)
    lse = torch.logsumexp(hidden @ weight.mT, -1)[labels != -100]
    got, without = loss_of(hidden, weight, labels, z_loss=0.1), loss_of(hidden, weight, labels)
    torch.testing.assert_close(got.z_loss, 0.1 * lse.square().mean().detach())
    assert abs(got.z_loss - 0.1 * lse.mean().square()) > 0.01
    torch.testing.assert_close(got.loss, without.loss + got.z_loss)
    assert not got.z_loss.requires_grad
    assert without.z_loss == 0


@both
@pytest.mark.parametrize("wrong", [VOCAB, -1, -101, 2**40])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_label_out_of_range_is_an_error(loss_of, wrong, reduction):
    """Pitfall: labels out of range read wild memory."""
    hidden, weight, labels = inputs(2, 9)
    labels[1, 3] = wrong
    with pytest.raises(ValueError, match=rf"\[0, {VOCAB}\) or equal ignore_index=-100, got {wrong} at position 12"):
        loss_of(hidden, weight, labels, reduction=reduction)


@both
@pytest.mark.parametrize("ignore_index", [0, -1, VOCAB + 5])
def test_any_ignore_index(loss_of, ignore_index):
    hidden, weight, labels = inputs(2, 16)
    labels = torch.where(labels == 0, 1, labels)
    expected = loss_of(hidden, weight, labels)
    got = loss_of(hidden, weight, torch.where(labels == -100, ignore_index, labels), ignore_index=ignore_index)
    assert torch.equal(got.loss, expected.loss)
    assert torch.equal(got.count, expected.count)


@both
@pytest.mark.usefixtures("row_choice")
def test_correct_takes_the_lowest_index_on_ties_and_is_false_where_ignored(loss_of):
    weight = torch.eye(4, dtype=torch.float64)
    hidden = torch.tensor([[1.0, 3, 3, 0], [1, 3, 3, 0], [5, 5, 5, 5], [0, 0, 0, 9], [0, 0, 0, 9]]).double()
    labels = torch.tensor([1, 2, 0, 3, -100])
    got = loss_of(hidden, weight, labels)
    assert got.correct.tolist() == [True, False, True, True, False]
    assert got.correct.dtype == torch.bool
    assert (got.count.dtype, got.count.item()) == (torch.int64, 4)


@both
@pytest.mark.usefixtures("row_choice")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nan_in_an_ignored_row_never_matters(loss_of, reduction):
    hidden, weight, labels = inputs(11)
    with torch.no_grad():
        hidden[labels == -100] = torch.nan
    clean = hidden.detach().nan_to_num().requires_grad_()
    terms = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": reduction}
    got, expected = loss_of(hidden, weight, labels, **terms), loss_of(clean, weight, labels, **terms)
    assert torch.equal(got.loss, expected.loss)
    (by_weight,) = gradients(expected, weight, grad=torch.ones_like(got.loss))
    if loss_of is linear_cross_entropy:
        assert torch.equal(gradients(got, weight, grad=torch.ones_like(got.loss))[0], by_weight)
    else:
        logits = (hidden @ weight.mT).detach().requires_grad_()
        got = cross_entropy(logits, labels, **terms)
        assert gradients(got, logits, grad=torch.ones_like(got.loss))[0][labels == -100].abs().max() == 0


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_low_precision_error_is_near_that_of_plain_pytorch(loss_of, dtype, reduction):
    hidden, weight, labels = inputs(361, dtype=dtype)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = linear_cross_entropy_reference(*wide, labels, reduction=reduction)
    ours = loss_of(hidden, weight, labels, reduction=reduction, chunk_bytes=VOCAB * 6 * 100)
    plain = F.cross_entropy(hidden @ weight.mT, labels, reduction=reduction)
    assert ours.loss.dtype == torch.float32
    grad = torch.rand_like(truth.loss)

    def error(got: torch.Tensor, expected: torch.Tensor) -> float:
        return float(((got.double() - expected).norm() / expected.norm()).detach())

    assert error(ours.loss, truth.loss) <= 2 * error(plain, truth.loss) + 1e-3
    for got, low, exact in zip(
        gradients(ours, hidden, weight, grad=grad.float()),
        torch.autograd.grad(plain, (hidden, weight), grad.to(dtype)),
        torch.autograd.grad(truth.loss, wide, grad),
        strict=True,
    ):
        assert got.dtype == dtype
        assert error(got, exact) <= 3 * error(low, exact)


def test_float16_gradients_do_not_underflow_in_a_long_mean():
    """The mean over 2**16 tokens divides after the products, not before: 1/65,536 is below float16's normal numbers."""
    rows = 2**16
    hidden = torch.ones(rows, 1, dtype=torch.float16, requires_grad=True)
    weight = torch.tensor([[0.0], [12.0]], dtype=torch.float16, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.ones(rows, dtype=torch.long)).loss
    (by_weight,) = torch.autograd.grad(loss, weight)
    exact = torch.sigmoid(torch.tensor(-12.0, dtype=torch.float64))
    torch.testing.assert_close(by_weight.double(), torch.stack([exact, -exact])[:, None], rtol=0.05, atol=0)


@both
@pytest.mark.parametrize("shape", [(0,), (2, 0)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_empty_batch(loss_of, shape, reduction):
    hidden, weight, labels = inputs(*shape)
    got = loss_of(hidden, weight, labels, reduction=reduction)
    assert got.loss.shape == (shape if reduction == "none" else ())
    assert got.loss.sum() == 0
    assert got.correct.shape == shape
    by_hidden, by_weight = gradients(got, hidden, weight, grad=torch.ones_like(got.loss))
    assert by_hidden.shape == hidden.shape
    assert torch.equal(by_weight, torch.zeros_like(weight))


@both
def test_one_token_without_a_batch_dimension(loss_of):
    hidden, weight, _ = inputs()
    got = loss_of(hidden, weight, torch.tensor(5), reduction="none")
    torch.testing.assert_close(got.loss, F.cross_entropy(hidden @ weight.mT, torch.tensor(5)))
    assert got.correct.shape == got.loss.shape == ()


@pytest.mark.parametrize("label_dtype", [torch.int32, torch.int64])
def test_strided_and_expanded_inputs_equal_contiguous_ones(label_dtype):
    hidden, weight, labels = inputs(6, 8)
    labels = labels.to(label_dtype).t()
    for view in (hidden.transpose(0, 1), hidden[:1, :1].expand(8, 6, WIDTH)):
        by_view = linear_cross_entropy(view, weight.detach().mT.contiguous().mT, labels, reduction="none")
        expected = linear_cross_entropy(view.contiguous(), weight, labels, reduction="none")
        torch.testing.assert_close(by_view.loss, expected.loss)
        logits = view @ weight.mT
        for strided in (logits.detach().mT.contiguous().mT, logits.detach()[:1].expand_as(logits)):
            got = cross_entropy(strided.requires_grad_(), labels)
            expected = cross_entropy(strided.contiguous(), labels)
            torch.testing.assert_close(got.loss, expected.loss)
            torch.testing.assert_close(*(torch.autograd.grad(o.loss, strided)[0] for o in (got, expected)))


def test_more_than_two_to_the_31_logits():
    """Pitfall: int32 offsets wrap. Overlapping rows of one short vector make 2**31 logits without the memory."""
    vocab, rows = 2**15, 2**16 + 3
    storage = torch.randn(vocab + rows)
    logits = storage.as_strided((rows, vocab), (1, 1))
    labels = torch.full((rows,), -100)
    labels[-2:] = torch.tensor([7, vocab - 1])
    got = cross_entropy(logits, labels, z_loss=0.1, reduction="none")
    expected = cross_entropy_reference(logits[-2:], labels[-2:], z_loss=0.1, reduction="none")
    assert rows * vocab > 2**31
    torch.testing.assert_close(got.loss[-2:], expected.loss)
    assert got.loss[:-2].abs().max() == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label_smoothing": 1.0}, r"label_smoothing in \[0, 1\), got 1.0"),
        ({"label_smoothing": -0.1}, "got -0.1"),
        ({"z_loss": -1e-4}, "z_loss >= 0, got -0.0001"),
        ({"z_loss": float("nan")}, "got nan"),
        ({"reduction": "meen"}, "one of mean, sum, none, got 'meen'; did you mean 'mean'"),
        ({"chunk_bytes": 0}, "chunk_bytes >= 1 or None, got 0"),
        ({"labels": torch.zeros(2, 5, dtype=torch.long)}, r"labels of shape \(2, 5\)"),
        ({"labels": torch.zeros(2, 4)}, "int64 or int32, got torch.float32"),
        ({"labels": torch.zeros(2, 4, dtype=torch.long, device="meta")}, "on cpu and labels on meta"),
        ({"hidden": torch.zeros(2, 4, WIDTH, dtype=torch.long)}, "(logits|hidden) of a floating type, got torch.int64"),
    ],
)
@both
def test_bad_arguments_are_named(loss_of, changes, message):
    labels, hidden = torch.zeros(2, 4, dtype=torch.long), torch.zeros(2, 4, WIDTH)
    arguments = {"hidden": hidden, "weight": torch.zeros(VOCAB, WIDTH), "labels": labels, **changes}
    if loss_of is through_logits:
        arguments["weight"] = arguments["weight"].to(arguments["hidden"].dtype)
    with pytest.raises(ValueError, match=message):
        loss_of(**arguments)


def test_bad_shapes_and_types_of_a_head_are_named():
    hidden, labels = torch.zeros(3, WIDTH), torch.zeros(3, dtype=torch.long)
    with pytest.raises(
        ValueError, match=rf"weight \[V, D\].* hidden of shape \(3, {WIDTH}\), weight of shape \(37, 5\)"
    ):
        linear_cross_entropy(hidden, torch.zeros(37, 5), labels)
    with pytest.raises(ValueError, match="vocabulary of one or more"):
        linear_cross_entropy(hidden, torch.zeros(0, WIDTH), labels)
    with pytest.raises(ValueError, match="vocabulary of one or more"):
        cross_entropy(torch.zeros(3, 0), labels)
    with pytest.raises(ValueError, match=r"hidden torch.float32 and weight torch.bfloat16"):
        linear_cross_entropy(hidden, torch.zeros(VOCAB, WIDTH, dtype=torch.bfloat16), labels)
