"""The losses as operators: gradients needed or not, autocast, torch.compile, opcheck, memory."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from fat5.ops.loss import cross_entropy, linear_cross_entropy
from fat5.ops.loss.backends import TORCH

VOCAB, WIDTH, ROWS = 23, 8, 15
REDUCTIONS = ("mean", "sum", "none")


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, VOCAB, (3, 5))
    labels[0, :2] = -100
    hidden = torch.randn(3, 5, WIDTH, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, torch.randn(VOCAB, WIDTH, dtype=torch.float64).to(dtype).requires_grad_(), labels


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_gradcheck_in_float64(reduction):
    hidden, weight, labels = inputs()
    terms = {"label_smoothing": 0.1, "z_loss": 0.05, "reduction": reduction, "chunk_bytes": VOCAB * 8 * 4}
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, labels, **terms).loss, (hidden, weight))
    logits = (hidden @ weight.mT).detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: cross_entropy(x, labels, **terms).loss, (logits,))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_backward_can_run_twice_and_scales_with_the_incoming_gradient(reduction):
    hidden, weight, labels = inputs(torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction).loss.sum()
    first = torch.autograd.grad(3.0 * loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    torch.testing.assert_close(first, tuple(3.0 * grad for grad in second))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_second_derivatives_are_refused(reduction):
    hidden, weight, labels = inputs()
    for loss, of in (
        (linear_cross_entropy(hidden, weight, labels, reduction=reduction).loss.sum(), hidden),
        (cross_entropy(hidden @ weight.mT, labels, reduction=reduction).loss.sum(), weight),
    ):
        with pytest.raises(RuntimeError, match="no autograd formula"):
            torch.autograd.grad(torch.autograd.grad(loss, of, create_graph=True)[0].sum(), of)


def matrix_products(reduction: str, hidden_grad: bool, weight_grad: bool, grad_mode: bool = True) -> int:
    """Count the matrix products of one block, forward and backward."""
    hidden, weight, labels = inputs(torch.float32)
    hidden, weight = hidden.detach().requires_grad_(hidden_grad), weight.detach().requires_grad_(weight_grad)
    with profile(activities=[ProfilerActivity.CPU]) as record, torch.set_grad_enabled(grad_mode):
        loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction).loss.sum()
        if loss.requires_grad:
            loss.backward()
    for tensor, wanted in ((hidden, hidden_grad), (weight, weight_grad)):
        assert (tensor.grad is not None) == (wanted and grad_mode)
    calls = Counter(event.name for event in record.events())
    return calls["aten::mm"] + calls["aten::addmm_"]


def test_only_the_gradients_that_are_needed_are_computed():
    for reduction, recomputed in (("mean", 0), ("none", 1)):
        assert matrix_products(reduction, True, True) == 3 + recomputed
        assert matrix_products(reduction, True, False) == 2 + recomputed
        assert matrix_products(reduction, False, True) == 2 + recomputed
        assert matrix_products(reduction, False, False) == 1
        assert matrix_products(reduction, True, True, grad_mode=False) == 1


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_autocast_casts_at_the_door_and_the_backward_runs_in_the_same_type(reduction):
    """Pitfall: mixed types under autocast."""
    hidden, weight, labels = inputs(torch.float32)
    hidden = hidden.detach().bfloat16().requires_grad_()  # bf16 states with a float32 head, as under autocast
    terms = {"z_loss": 0.1, "reduction": reduction, "chunk_bytes": VOCAB * 6 * 4}
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, labels, **terms)
        inside = torch.autograd.grad(got.loss.sum(), (hidden, weight), retain_graph=True)
    outside = torch.autograd.grad(got.loss.sum(), (hidden, weight))
    low = [hidden.detach().requires_grad_(), weight.detach().bfloat16().requires_grad_()]
    expected = linear_cross_entropy(*low, labels, **terms)
    by_hand = torch.autograd.grad(expected.loss.sum(), low)
    assert torch.equal(got.loss, expected.loss)
    for grads in (inside, outside):
        assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32]
        for grad, hand in zip(grads, by_hand, strict=True):
            assert torch.equal(grad, hand.to(grad.dtype))


def test_autocast_leaves_logits_alone():
    logits = torch.randn(4, VOCAB)
    labels = torch.tensor([1, 2, 3, 4])
    with torch.autocast("cpu", torch.bfloat16):
        got = cross_entropy(logits, labels)
    assert torch.equal(got.loss, cross_entropy(logits, labels).loss)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("autocast", [False, True])
def test_compiles_without_a_graph_break(reduction, autocast):
    hidden, weight, labels = inputs(torch.float32)

    def step(hidden, weight, labels):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            fused = linear_cross_entropy(hidden * 2, weight, labels, z_loss=0.01, reduction=reduction)
            plain = cross_entropy(hidden @ weight.mT, labels, label_smoothing=0.1, reduction=reduction)
        return fused.loss.sum() + plain.loss.sum(), fused, plain.correct

    loss, fused, correct = torch.compile(step, fullgraph=True, backend="aot_eager")(hidden, weight, labels)
    expected_loss, expected_fused, expected_correct = step(hidden, weight, labels)
    torch.testing.assert_close(loss, expected_loss)
    torch.testing.assert_close(fused.z_loss, expected_fused.z_loss)
    assert torch.equal(fused.count, expected_fused.count)
    assert torch.equal(correct, expected_correct)
    got, expected = (torch.autograd.grad(value, (hidden, weight)) for value in (loss, expected_loss))
    torch.testing.assert_close(got, expected, rtol=2e-2 if autocast else 1e-5, atol=1e-2 if autocast else 1e-5)


def test_opcheck():
    hidden, weight, labels = inputs(torch.float32)
    hidden, labels = hidden.detach().view(ROWS, WIDTH).requires_grad_(), labels.view(ROWS)
    logits = (hidden @ weight.mT).detach().requires_grad_()
    terms = (-100, 0.1, 0.01, VOCAB * 4 * 4)
    lse = torch.logsumexp(logits.detach(), -1)
    grad = torch.randn(ROWS)
    plain = [tensor.detach() for tensor in (hidden, weight)]
    for operator, samples in (
        (TORCH.rows, [(logits, labels, *terms)]),
        (TORCH.rows_backward, [(grad, logits.detach(), labels, lse, *terms)]),
        (TORCH.hidden.rows, [(hidden, weight, labels, *terms)]),
        (
            TORCH.hidden.rows_backward,
            [(grad, *plain, labels, lse, *terms, *flags) for flags in ((True, True), (False, True))],
        ),
        (
            TORCH.hidden.sum,
            [(hidden, weight, labels, *terms, True, True), (*plain, labels, *terms, False, False)],
        ),
        (TORCH.hidden.scale, [(torch.tensor(0.5), *plain, torch.bfloat16)]),
    ):
        for sample in samples:
            torch.library.opcheck(operator, sample)


def extra_peak_bytes(function) -> int:
    """Return the most bytes that tensors made inside `function` held at one time on the CPU."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        function()
    held = peak = 0
    for event in sorted(record.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("ignored", [False, True])
def test_memory_stays_at_the_chunk_budget(dtype, reduction, ignored):
    rows, vocab, width, budget = 8192, 1024, 16, 2**19
    hidden = torch.randn(rows, width).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (rows,))
    if ignored:
        labels[::7] = -100

    def fused() -> None:
        output = linear_cross_entropy(hidden, weight, labels, z_loss=0.1, reduction=reduction, chunk_bytes=budget)
        output.loss.sum().backward()

    def plain() -> None:
        torch.nn.functional.cross_entropy(hidden @ weight.mT, labels).backward()

    fused()
    plain()  # gradients and one-time buffers exist from here on
    small = 4 * (2 * hidden.numel() + 4 * weight.numel()) + 16 * 8 * rows  # gradients, sums, vectors over the rows
    if dtype == torch.bfloat16:
        small += 2**22  # some CPUs pack bf16 matrices before they multiply them
    peak = extra_peak_bytes(fused)
    assert budget // 2 <= peak <= budget + small
    assert extra_peak_bytes(plain) > rows * vocab * dtype.itemsize > 2 * (budget + small)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cross_entropy_holds_one_block_beside_the_logits_and_their_gradient(dtype):
    rows, vocab, budget = 2048, 1024, 2**19
    logits = torch.randn(rows, vocab).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (rows,))

    def both_passes() -> None:
        torch.autograd.grad(cross_entropy(logits, labels, label_smoothing=0.1, chunk_bytes=budget).loss, logits)

    both_passes()
    gradient = logits.numel() * dtype.itemsize
    assert gradient <= extra_peak_bytes(both_passes) <= gradient + budget + 16 * 8 * rows
