"""Every position encoding on a GPU in bf16: equal to float32 on the CPU within a small multiple of bf16's own error."""

import pytest
import torch

from tests.models.position_variants import ENCODINGS, LAYOUTS, make
from tests.models.test_layouts import gradients, pack

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def step(model, inputs: dict, device: str) -> tuple[float, dict[str, torch.Tensor]]:
    inputs = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    loss = model(**inputs).loss
    return loss.item(), {name: grad.float().cpu() for name, grad in gradients(model, loss).items()}


def distance(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: float((got[name] - grad).norm() / grad.norm()) for name, grad in expected.items()}


@pytest.mark.parametrize(("encoding", "layout"), [pair for pair in LAYOUTS if pair[0] in ENCODINGS])
def test_bf16_on_the_gpu_is_as_near_float32_as_bf16_on_the_cpu(encoding, layout, batch):
    inputs = pack(batch) if layout == "packed" else batch
    model = make(encoding, d_kv=16)
    loss, expected = step(model, inputs, "cpu")
    _, plain = step(model.bfloat16(), inputs, "cpu")
    got_loss, got = step(model.to(DEVICE), inputs, DEVICE)
    assert abs(got_loss - loss) < 0.02 * loss
    allowed = distance(plain, expected)
    for name, error in distance(got, expected).items():
        assert error < 3 * allowed[name] + 0.02, name


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_twice_1024_tokens_are_finite(encoding):
    model = make(encoding, d_kv=64, rotary_scale_base=512.0) if encoding == "xpos" else make(encoding, d_kv=64)
    model.to(DEVICE, torch.bfloat16)
    ids = torch.randint(2, 97, (2, 2048), device=DEVICE)
    loss = model(input_ids=ids, labels=ids).loss
    assert all(grad.isfinite().all() and grad.any() for grad in gradients(model, loss).values())
