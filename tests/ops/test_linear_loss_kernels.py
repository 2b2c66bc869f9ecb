"""The kernels around the head's matrix products, and what both losses share: operators, torch.compile, backends."""

from __future__ import annotations

import pytest
import torch

from fat5.ops.loss import cross_entropy, linear_cross_entropy
from fat5.ops.loss.backends import BACKENDS
from fat5.ops.loss.reference import linear_cross_entropy_reference
from tests.ops.kernel_checks import CUDA, DEVICE, needs_gpu, needs_kernels, relative_error

REDUCTIONS = ("mean", "sum", "none")
TYPES = (torch.float32, torch.float16, torch.bfloat16)
WIDTH, VOCAB = 12, 37

pytestmark = needs_kernels


def make_hidden(rows: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight = (torch.randn(n, WIDTH, device=DEVICE).to(dtype).requires_grad_() for n in (rows, VOCAB))
    labels = torch.randint(0, VOCAB, (rows,), device=DEVICE)
    kept = torch.rand(rows, device=DEVICE) >= 0.3
    kept[:1] = True
    return hidden, weight, labels.where(kept, -100)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_derivatives_are_refused(reduction):
    hidden, weight, labels = make_hidden(9)
    for loss, of in (
        (linear_cross_entropy(hidden, weight, labels, reduction=reduction, backend="triton").loss.sum(), hidden),
        (cross_entropy(hidden @ weight.mT, labels, reduction=reduction, backend="triton").loss.sum(), weight),
    ):
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(torch.autograd.grad(loss, of, create_graph=True)[0].sum(), of)


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_empty_batch(shape, reduction):
    labels = torch.zeros(shape, dtype=torch.long, device=DEVICE)
    hidden = torch.zeros(*shape, WIDTH, device=DEVICE, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, device=DEVICE, requires_grad=True)
    terms = {"reduction": reduction, "backend": "triton"}
    for got in (
        linear_cross_entropy(hidden, weight, labels, **terms),
        cross_entropy(hidden @ weight.mT, labels, **terms),
    ):
        assert got.loss.shape == (shape if reduction == "none" else ())
        assert got.loss.sum() == 0
        assert got.count == 0
        _, by_weight = torch.autograd.grad(got.loss, (hidden, weight), torch.ones_like(got.loss))
        assert torch.equal(by_weight, torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_linear_error_is_near_that_of_plain_pytorch(dtype, reduction):
    hidden, weight, labels = make_hidden(48, dtype)
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    terms = {"label_smoothing": 0.1, "z_loss": 0.01, "reduction": reduction}
    truth = linear_cross_entropy_reference(*wide, labels, **terms)
    plain = linear_cross_entropy_reference(hidden, weight, labels, **terms)
    ours = linear_cross_entropy(hidden, weight, labels, backend="triton", chunk_bytes=20 * 48 * dtype.itemsize, **terms)
    grad = torch.rand_like(truth.loss)
    got, low, exact = (output.loss.detach() for output in (ours, plain, truth))
    floor = torch.finfo(dtype).eps  # a mean may come out nearly exact in plain PyTorch, by chance
    assert relative_error(got, exact) <= 2 * relative_error(low, exact) + floor
    assert torch.equal(ours.count, truth.count)
    for got, low, exact in zip(
        torch.autograd.grad(ours.loss, (hidden, weight), grad.float()),
        torch.autograd.grad(plain.loss, (hidden, weight), grad.to(plain.loss.dtype)),
        torch.autograd.grad(truth.loss, wide, grad),
        strict=True,
    ):
        assert got.dtype == dtype
        assert relative_error(got, exact) <= 3 * relative_error(low, exact) + 1e-6


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("chunk_bytes", [1, 1000, None])
def test_linear_in_chunks_equals_the_torch_backend(reduction, chunk_bytes):
    """Ignored tokens with NaN reach neither gradient; frozen inputs take none."""
    hidden, weight, labels = make_hidden(19)
    with torch.no_grad():
        hidden[labels == -100] = torch.nan
    results = []
    for backend in ("triton", "torch"):
        terms = {"reduction": reduction, "backend": backend, "chunk_bytes": chunk_bytes, "z_loss": 0.1}
        got = linear_cross_entropy(hidden, weight, labels, **terms)
        grad = torch.linspace(1, 2, got.loss.numel(), device=DEVICE).view(got.loss.shape)
        grads = torch.autograd.grad(got.loss, (hidden, weight), grad)
        frozen_weight = linear_cross_entropy(hidden, weight.detach(), labels, **terms).loss
        frozen_hidden = linear_cross_entropy(hidden.detach(), weight, labels, **terms).loss
        assert torch.equal(torch.autograd.grad(frozen_weight, hidden, grad)[0], grads[0])
        assert torch.equal(torch.autograd.grad(frozen_hidden, weight, grad)[0], grads[1])
        results.append((got.loss, got.z_loss, got.correct, *grads))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    assert all(grad.any() for grad in results[0][3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=needs_gpu)])
@pytest.mark.parametrize("rows", [1, 341, 342])
def test_gradients_are_scaled_and_rounded_once(dtype, rows):
    """Rows of 12: less than a block of 4,096 elements, and on both sides of its end."""
    hidden, weight = torch.randn(rows, WIDTH, device=DEVICE).to(dtype), torch.randn(rows, WIDTH, device=DEVICE)
    grad = torch.tensor(1 / 3, device=DEVICE)
    by_hidden, by_weight = BACKENDS["triton"].hidden.scale(grad, hidden, weight, dtype)
    assert torch.equal(by_hidden, (hidden.float() * grad).to(dtype))
    assert torch.equal(by_weight, (weight * grad).to(dtype))
    assert by_hidden.any()
    assert by_weight.any()


def test_opcheck():
    from fat5.ops.loss.with_gradient import cross_entropy_with_gradient, multiply_gradient_

    triton = BACKENDS["triton"]
    hidden, weight, labels = make_hidden(6)
    logits = (hidden @ weight.mT).detach().requires_grad_()
    lse = torch.logsumexp(logits.detach(), -1)
    grad = torch.randn(6, device=DEVICE)
    terms = (-100, 0.1, 0.01, VOCAB * 4 * 4)
    plain = [tensor.detach() for tensor in (hidden, weight)]
    for operator, sample in (
        (triton.rows, (logits, labels, *terms)),
        (triton.rows_backward, (grad, logits.detach(), labels, lse, *terms)),
        (triton.hidden.rows, (hidden, weight, labels, *terms)),
        (triton.hidden.rows_backward, (grad, *plain, labels, lse, *terms, True, True)),
        (triton.hidden.rows_backward, (grad, *plain, labels, lse, *terms, False, True)),
        (triton.hidden.sum, (hidden, weight, labels, *terms, True, True)),
        (triton.hidden.sum, (*plain, labels, *terms, False, False)),
        (triton.hidden.scale, (torch.tensor(0.5, device=DEVICE), *plain, torch.float16)),
        (triton.hidden.scale, (torch.tensor(0.5, device=DEVICE), plain[0], plain[1][:0], torch.float16)),
        (cross_entropy_with_gradient, (logits.detach(), labels, torch.zeros_like(logits), -100, 0.1, 0.01, True)),
        (multiply_gradient_, (torch.randn(4, 5, device=DEVICE), torch.tensor(2.0, device=DEVICE))),
    ):
        torch.library.opcheck(operator, sample)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_without_a_graph_break(reduction, autocast):
    hidden, weight, labels = make_hidden(6)

    def step(hidden, weight, labels):
        terms = {"reduction": reduction, "z_loss": 0.01, "backend": "triton"}
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            fused = linear_cross_entropy(hidden * 2, weight, labels, **terms)
            plain = cross_entropy((hidden @ weight.mT).float(), labels, overwrite_logits=True, **terms)
        return fused.loss.sum() + plain.loss.sum(), fused.correct

    backend = "inductor" if CUDA else "aot_eager"
    loss, correct = torch.compile(step, fullgraph=True, backend=backend)(hidden, weight, labels)
    expected_loss, expected_correct = step(hidden, weight, labels)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-2 if autocast else 1e-5, atol=0)
    assert torch.equal(correct, expected_correct) or autocast
    got, expected = (torch.autograd.grad(value, (hidden, weight)) for value in (loss, expected_loss))
    torch.testing.assert_close(got, expected, rtol=2e-2 if autocast else 1e-4, atol=2e-2 if autocast else 1e-5)
    assert all(grad.any() for grad in got)


def test_backend_is_chosen_by_name():
    logits, labels = torch.randn(3, 16, device=DEVICE), torch.tensor([0, 1, 2], device=DEVICE)
    with pytest.raises(ValueError, match=r"cross_entropy: got backend='tritn'.*did you mean 'triton'"):
        cross_entropy(logits, labels, backend="tritn")
    with pytest.raises(ValueError, match="its kernels take bfloat16, float16 and float32, not torch"):
        cross_entropy(logits.double(), labels, backend="triton")
    with pytest.raises(ValueError, match="linear_cross_entropy: got backend='triton', which does not work here"):
        linear_cross_entropy(logits.double(), logits.double(), labels, backend="triton")
    assert cross_entropy(logits.double(), labels).loss.dtype == torch.float64
