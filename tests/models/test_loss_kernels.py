"""The model's loss on the kernels: tied and untied heads, the scale of the decoder's outputs, frozen weights."""

from __future__ import annotations

import pytest
import torch

from fat5 import FAT5Config, FAT5ForConditionalGeneration
from tests.models.conftest import SIZES
from tests.ops.kernel_checks import DEVICE, needs_gpu, needs_kernels

SMALL = {"vocab_size": 61, "num_layers": 1, "num_decoder_layers": 1, "d_model": 24, "d_ff": 40, "num_heads": 2}


def small_batch() -> dict[str, torch.Tensor]:
    labels = torch.randint(2, 61, (2, 7), device=DEVICE)
    labels[0, 4:] = -100
    return {"input_ids": torch.randint(2, 61, (2, 9), device=DEVICE), "labels": labels}


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """Rows of each launch of the kernel behind the model's loss."""
    from fat5.ops.loss import triton_backend

    found: list[int] = []
    original = triton_backend.store_losses
    monkeypatch.setattr(triton_backend, "store_losses", lambda *x, **o: found.append(len(x[0])) or original(*x, **o))
    return found


@needs_kernels
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("frozen", [(), ("lm_head.weight",), ("shared.weight",)])
def test_kernels_change_nothing_but_rounding(tied, scaled, frozen, launches):
    settings = {"tie_word_embeddings": tied, "scale_decoder_outputs": scaled, "z_loss": 0.01, "label_smoothing": 0.1}
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES | SMALL | settings)).to(DEVICE)
    assert (model.lm_head.weight is model.shared.weight) == tied
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(name not in frozen)
    batch, results = small_batch(), []
    for backend in ("torch", "triton"):
        model.config.kernel_backend = backend  # of the loss alone: the modules took theirs when they were made
        model.zero_grad()
        assert not launches
        output = model(**batch)
        output.loss.backward()
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        results.append({"loss": output.loss.detach(), "z_loss": output.z_loss, "correct": output.correct, **grads})
    assert launches == [14]
    for name, expected in results[0].items():
        got = results[1][name]
        assert (got is None) == (expected is None)
        if got is not None:
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    assert results[1]["shared.weight"] is None or results[1]["shared.weight"].any()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_model_on_a_gpu_takes_the_kernels(compiled, launches):
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES | SMALL)).to(DEVICE).bfloat16()
    if compiled:
        model.compile(fullgraph=True)
    model(**small_batch()).loss.backward()
    assert launches
    assert model.shared.weight.grad.any()
