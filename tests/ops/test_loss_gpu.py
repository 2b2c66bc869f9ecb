"""The losses on a GPU: the rule for errors, no waiting host, memory, labels out of range, very many logits."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from fat5.ops.loss import cross_entropy, linear_cross_entropy
from fat5.ops.loss.reference import cross_entropy_reference, linear_cross_entropy_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

ROWS, VOCAB, WIDTH = 1501, 8000, 192
REDUCTIONS = ("mean", "sum", "none")
both_backends = pytest.mark.parametrize("backend", ["torch", "triton"])


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden = torch.randn(ROWS, WIDTH, device="cuda").to(dtype).requires_grad_()
    weight = (WIDTH**-0.5 * torch.randn(VOCAB, WIDTH, device="cuda")).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (ROWS,), device="cuda")
    return hidden, weight, labels.where(torch.rand(ROWS, device="cuda") > 0.2, -100)


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((got.double() - expected).norm() / expected.norm()).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", REDUCTIONS)
@both_backends
def test_error_is_near_that_of_plain_pytorch_and_nan_in_ignored_rows_never_matters(dtype, reduction, backend):
    hidden, weight, labels = inputs(dtype)
    terms = {"label_smoothing": 0.1, "reduction": reduction}
    wide = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    truth = linear_cross_entropy_reference(*wide, labels, **terms)
    plain = F.cross_entropy(hidden @ weight.mT, labels, **terms)
    grad = torch.rand_like(truth.loss)
    exact = torch.autograd.grad(truth.loss, wide, grad)
    low = torch.autograd.grad(plain, (hidden, weight), grad.to(plain.dtype))
    with torch.no_grad():
        hidden[labels == -100] = torch.nan
    ours = linear_cross_entropy(hidden, weight, labels, chunk_bytes=2**24, backend=backend, **terms)
    assert error(ours.loss, truth.loss) <= 2 * error(plain, truth.loss) + 1e-6
    assert torch.equal(ours.count, truth.count)
    assert (ours.correct == truth.correct).float().mean() > 0.99
    for got, low_grad, exact_grad in zip(
        torch.autograd.grad(ours.loss, (hidden, weight), grad.float()), low, exact, strict=True
    ):
        assert error(got, exact_grad) <= 3 * error(low_grad, exact_grad)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("compiled", [False, True])
@both_backends
def test_host_never_waits(reduction, compiled, backend):
    hidden, weight, labels = inputs(torch.bfloat16)

    def step() -> torch.Tensor:
        terms = {"reduction": reduction, "backend": backend}
        fused = linear_cross_entropy(hidden, weight, labels, z_loss=1e-4, **terms)
        plain = cross_entropy(hidden @ weight.mT, labels, label_smoothing=0.1, **terms)
        return fused.loss.sum() + plain.loss.sum()

    function = torch.compile(step, fullgraph=True) if compiled else step
    function().backward()  # the first call compiles and sets libraries up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        function().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("reduction", ["mean", "none"])
@both_backends
def test_memory_stays_at_the_chunk_budget(reduction, backend):
    hidden, weight, labels = inputs(torch.bfloat16)
    budget = 2**22

    def fused() -> None:
        terms = {"reduction": reduction, "backend": backend}
        loss = linear_cross_entropy(hidden, weight, labels, chunk_bytes=budget, **terms).loss.sum()
        torch.autograd.grad(loss, (hidden, weight))

    fused()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    fused()
    extra = torch.cuda.max_memory_allocated() - before
    small = 4 * (3 * hidden.numel() + 4 * weight.numel()) + 2**20
    assert extra <= budget + small < ROWS * VOCAB * 2 + small


@pytest.mark.parametrize("call", ["cross_entropy(x @ x.mT, y)", "linear_cross_entropy(x, x, y)"])
def test_label_out_of_range_is_a_device_assertion(call):
    """Pitfall: labels out of range read wild memory. In a process of its own, since the assertion ends CUDA there."""
    program = (
        "import torch; from fat5.ops.loss import cross_entropy, linear_cross_entropy\n"
        "x = torch.randn(4, 8, device='cuda'); y = torch.tensor([0, 1, 2, 4], device='cuda')\n"
        f"print({call}.loss.item())"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "device-side assert" in result.stderr


def test_more_than_two_to_the_31_logits():
    """Pitfall: int32 offsets wrap. The kernels in test_loss_kernels_gpu.py."""
    rows, vocab = 2**16 + 5, 2**15
    logits = torch.zeros(rows, vocab, device="cuda", dtype=torch.bfloat16)
    logits[-3:].normal_()
    logits.requires_grad_()
    labels = torch.full((rows,), -100, device="cuda")
    labels[-3:] = torch.tensor([5, 0, vocab - 1], device="cuda")
    got = cross_entropy(logits, labels, z_loss=1e-3, reduction="none")
    last = logits.detach()[-3:].double().requires_grad_()
    expected = cross_entropy_reference(last, labels[-3:], z_loss=1e-3, reduction="none")
    torch.testing.assert_close(got.loss[-3:].double(), expected.loss, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad(got.loss.sum(), logits)
    (exact,) = torch.autograd.grad(expected.loss.sum(), last)
    torch.testing.assert_close(grad[-3:].double(), exact, rtol=1e-2, atol=1e-6)
    assert grad[:-3].abs().amax() == 0
