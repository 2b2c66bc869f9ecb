"""Heads and attention weights on a GPU in bf16: as near to float32 on the CPU as bf16 on the CPU is."""

import pytest
import torch

from fat5 import FAT5Config, FAT5ForConditionalGeneration, FAT5ForSequenceClassification, FAT5ForTokenClassification
from fat5.nn import POOLINGS
from tests.models.conftest import SIZES
from tests.models.test_heads import pack
from tests.models.test_layouts import gradients
from tests.models.test_positions_gpu import distance

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
LABELS = torch.tensor([2, 0, 1, 2])


def moved(inputs: dict, device: str) -> dict:
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def texts_of(batch: dict, layout: str) -> dict:
    texts = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return pack(texts) | {"labels": torch.tensor([*LABELS, -100])} if layout == "packed" else texts | {"labels": LABELS}


def step(model, inputs: dict, device: str) -> tuple[float, dict[str, torch.Tensor]]:
    loss = model(**moved(inputs, device)).loss
    return loss.item(), {name: grad.float().cpu() for name, grad in gradients(model, loss).items()}


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_classifier_in_bf16(layout, pooling, batch):
    inputs = texts_of(batch, layout)
    model = FAT5ForSequenceClassification(FAT5Config(**SIZES | {"d_kv": 16}, num_labels=3, pooling=pooling)).eval()
    loss, expected = step(model, inputs, "cpu")
    _, plain = step(model.bfloat16(), inputs, "cpu")
    got_loss, got = step(model.to(DEVICE), inputs, DEVICE)
    assert abs(got_loss - loss) < 0.02 * loss
    allowed = distance(plain, expected)
    for name, error in distance(got, expected).items():
        assert error < 3 * allowed[name] + 0.02, name


def test_pooling_twice_gives_equal_bits(batch):
    """Sums over packed documents are no atomics."""
    model = FAT5ForSequenceClassification(FAT5Config(**SIZES | {"d_kv": 16}, num_labels=3)).eval().to(DEVICE)
    inputs = texts_of(batch, "packed")
    first, second = (step(model, inputs, DEVICE)[1] for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first if "embed" not in name and "shared" not in name)


def test_inference_as_a_cuda_graph(batch):
    """Nothing in a head waits for the host."""
    model = FAT5ForTokenClassification(FAT5Config(**SIZES | {"d_kv": 16}, num_labels=5)).eval()
    model.to(DEVICE, torch.bfloat16)
    packed = moved({name: value for name, value in texts_of(batch, "packed").items() if name != "labels"}, DEVICE)
    with torch.no_grad():
        expected = model(**packed).logits
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(**packed)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(**packed).logits
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(logits, expected)


def test_attention_weights_on_the_gpu(batch):
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES | {"d_kv": 16})).eval()
    expected = model(**batch, output_attentions=True)
    got = model.to(DEVICE)(**moved(batch, DEVICE), output_attentions=True)
    for field in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for on_gpu, on_cpu in zip(getattr(got, field), getattr(expected, field), strict=True):
            torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=0.02, atol=0.01)
