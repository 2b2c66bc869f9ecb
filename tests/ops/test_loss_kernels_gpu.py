"""The losses' kernels at real sizes: every kernel and type, memory, CUDA graphs, a host that never waits."""

from __future__ import annotations

import pytest
import torch

from fat5.ops.loss import cross_entropy, linear_cross_entropy
from fat5.ops.loss.hidden_gradients import adds_in_place
from fat5.ops.loss.reference import cross_entropy_reference, linear_cross_entropy_reference
from fat5.ops.loss.tiles import candidates, forced_tile

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

VOCABULARIES = (32_768, 32_128, 32_130, 50_257, 65_536, 250_112)
"""Whole tiles; T5's; pairs without 16-byte loads; odd; the longest row in registers; mT5's."""


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got.double() - expected).norm() / expected.norm()).detach())


def make_labels(rows: int, vocab: int) -> torch.Tensor:
    labels = torch.randint(0, vocab, (rows,), device="cuda")
    return labels.where(torch.rand(rows, device="cuda") > 0.1, -100)


def make_logits(rows: int, vocab: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, vocab, device="cuda").mul_(3).to(dtype).requires_grad_()


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_real_sizes_equal_the_formula(vocab, dtype, reduction):
    logits, labels = make_logits(261, vocab, dtype), make_labels(261, vocab)
    labels[:50] = logits[:50].argmax(1)
    terms = {"label_smoothing": 0.1, "z_loss": 1e-3, "reduction": reduction}
    got = cross_entropy(logits, labels, backend="triton", **terms)
    exact = logits.detach().double().requires_grad_()
    expected = cross_entropy_reference(exact, labels, **terms)
    grad = torch.rand_like(expected.loss)
    assert error(got.loss, expected.loss) < 2e-6
    assert torch.equal(got.correct, expected.correct)
    assert got.correct.sum() > 30
    (by_logits,), (truth,) = (
        torch.autograd.grad(o.loss, x, grad.to(o.loss.dtype)) for o, x in ((got, logits), (expected, exact))
    )
    assert error(by_logits, truth) < max(torch.finfo(dtype).eps, 2e-6)


@pytest.mark.parametrize("kernel", ["pairs", "blocks", "gradient"])
def test_every_candidate_tile_equals_the_formula(kernel):
    dtype = torch.bfloat16 if kernel == "pairs" else torch.float16
    reduction = "none" if kernel == "gradient" else "sum"
    logits, labels = make_logits(64, 32_768, dtype), make_labels(64, 32_768)
    exact = logits.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(cross_entropy_reference(exact, labels, reduction="sum").loss, exact)
    for tile in candidates(kernel, 32_768):
        with forced_tile(kernel, tile):
            loss = cross_entropy(logits, labels, reduction=reduction).loss
            (by_logits,) = torch.autograd.grad(loss.sum(), logits)
        assert error(by_logits, truth) < torch.finfo(dtype).eps, tile


@pytest.mark.parametrize("overwrite", [False, True])
def test_cross_entropy_takes_no_memory_beyond_logits_and_gradient(overwrite):
    leaf, labels = make_logits(4096, 32_768, torch.bfloat16), make_labels(4096, 32_768)
    for _ in range(2):
        logits = leaf * 1
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = cross_entropy(logits, labels, z_loss=1e-4, overwrite_logits=overwrite).loss
        (by_logits,) = torch.autograd.grad(loss, logits)
        extra = torch.cuda.max_memory_allocated() - before
    assert by_logits.any()
    gradient = 0 if overwrite else logits.numel() * logits.element_size()
    assert gradient <= extra <= gradient + 2**20


def test_linear_cross_entropy_stays_below_400_mb():
    """At 16,384 x 512 to 32,768, beyond inputs and returned gradients: logits of 256 MiB, and the sum of dW."""
    rows, width, vocab = 16_384, 512, 32_768
    hidden = torch.randn(rows, width, device="cuda").bfloat16().requires_grad_()
    weight = (width**-0.5 * torch.randn(vocab, width, device="cuda")).bfloat16().requires_grad_()
    labels = make_labels(rows, vocab)
    returned = 2 * (hidden.numel() + weight.numel())
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        grads = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels, z_loss=1e-4).loss, (hidden, weight))
        extra = torch.cuda.max_memory_allocated() - before
        assert all(grad.any() for grad in grads)
        del grads
    assert adds_in_place(hidden.dtype, hidden.device), "this PyTorch needs a second float32 copy of dW"
    assert extra - returned < 400e6, extra


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("vocab", [32_768, 32_127])
def test_linear_at_real_sizes(reduction, vocab):
    hidden = torch.randn(3001, 512, device="cuda").bfloat16().requires_grad_()
    weight = (512**-0.5 * torch.randn(vocab, 512, device="cuda")).bfloat16().requires_grad_()
    labels = make_labels(3001, vocab)
    terms = {"z_loss": 1e-3, "label_smoothing": 0.1, "reduction": reduction}
    got = linear_cross_entropy(hidden, weight, labels, chunk_bytes=2**26, **terms)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    expected = linear_cross_entropy_reference(*wide, labels, **terms)
    plain = linear_cross_entropy_reference(hidden, weight, labels, **terms)
    grad = torch.rand_like(expected.loss)
    assert error(got.loss, expected.loss) <= 2 * error(plain.loss, expected.loss) + 1e-3
    for ours, low, exact in zip(
        torch.autograd.grad(got.loss, (hidden, weight), grad.float()),
        torch.autograd.grad(plain.loss, (hidden, weight), grad.to(plain.loss.dtype)),
        torch.autograd.grad(expected.loss, wide, grad),
        strict=True,
    ):
        assert error(ours, exact) <= 3 * error(low, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equal_bits_from_run_to_run(dtype):
    logits, labels = make_logits(3000, 32_768, dtype), make_labels(3000, 32_768)
    runs = []
    for _ in range(3):
        got = cross_entropy(logits, labels, z_loss=1e-4)
        runs.append((got.loss, got.z_loss, *torch.autograd.grad(got.loss, logits)))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))
    assert runs[0][2].any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_cuda_graphs(reduction, overwrite):
    """The labels change between replays, as they do in training."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # leaves made on the default stream would draw it into the capture
        hidden = torch.randn(700, 64, device="cuda").bfloat16().requires_grad_()
        weight = torch.randn(2048, 64, device="cuda").bfloat16().requires_grad_()
        labels, others = make_labels(700, 2048), make_labels(700, 2048)

        def step() -> tuple[torch.Tensor, ...]:
            fused = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_bytes=2**20)
            logits = hidden @ weight.mT
            plain = cross_entropy(logits, labels, reduction=reduction, overwrite_logits=overwrite)
            loss = fused.loss.sum() + plain.loss.sum()
            return loss.detach(), fused.correct, *torch.autograd.grad(loss, (hidden, weight))

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            captured = step()
        others[::9] = (hidden @ weight.mT).argmax(1)[::9]  # chance alone makes one label in 2,048 correct
        labels.copy_(others)
        graph.replay()
        expected = step()
    torch.cuda.synchronize()
    for got, want in zip(captured, expected, strict=True):
        torch.testing.assert_close(got, want)
        assert want.any()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_host_never_waits(reduction, overwrite):
    hidden = torch.randn(700, 64, device="cuda").bfloat16().requires_grad_()
    weight = torch.randn(2048, 64, device="cuda").bfloat16().requires_grad_()
    labels = make_labels(700, 2048)

    def step() -> None:
        fused = linear_cross_entropy(hidden, weight, labels, reduction=reduction, z_loss=1e-4)
        plain = cross_entropy(hidden @ weight.mT, labels, reduction=reduction, overwrite_logits=overwrite)
        (3 * (fused.loss.sum() + plain.loss.sum())).backward()

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert hidden.grad is not None
    assert hidden.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_more_than_two_to_the_31_logits_with_their_gradient(dtype):
    """Pitfall: int32 offsets wrap, in either kernel, also where the gradient overwrites the logits."""
    rows, vocab = 2**16 + 5, 2**15
    if torch.cuda.mem_get_info()[0] < 3 * rows * vocab * 2:
        pytest.skip("needs 13 GB of free memory")
    logits = torch.zeros(rows, vocab, device="cuda", dtype=dtype)
    logits[-3:].normal_()
    labels = torch.full((rows,), -100, device="cuda")
    labels[-3:] = torch.tensor([5, 0, vocab - 1], device="cuda")
    exact = logits[-3:].double().requires_grad_()
    expected = cross_entropy_reference(exact, labels[-3:], z_loss=1e-3)
    (truth,) = torch.autograd.grad(expected.loss, exact)
    logits.requires_grad_()
    got = cross_entropy(logits, labels, z_loss=1e-3)
    (by_logits,) = torch.autograd.grad(got.loss, logits)
    assert error(got.loss, expected.loss) < 2e-6
    assert error(by_logits[-3:], truth) < torch.finfo(dtype).eps
    assert by_logits[:-3].abs().amax() == 0
    del by_logits, got
    if dtype == torch.bfloat16:
        overwritten = cross_entropy(logits * 1, labels, z_loss=1e-3, overwrite_logits=True).loss
        (by_logits,) = torch.autograd.grad(overwritten, logits)
        assert error(by_logits[-3:], truth) < torch.finfo(dtype).eps
