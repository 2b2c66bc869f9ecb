"""Attention weights on request: Transformers' for T5, and what attention really did for everything else."""

import pytest
import torch

from fat5 import FAT5Config, FAT5ForConditionalGeneration, FAT5ForSequenceClassification
from fat5.nn.attention_weights import attention_weights
from fat5.ops import AlibiBias, flash_attention
from tests.models.conftest import SIZES
from tests.models.position_variants import LAYOUTS, make
from tests.models.t5_families import save_t5

FIELDS = ("encoder_attentions", "decoder_attentions", "cross_attentions")


@pytest.mark.parametrize("name", ["t5 v1.0", "umt5"])
def test_weights_are_those_of_transformers(name, tmp_path, batch):
    theirs = save_t5(name, tmp_path)
    ours = FAT5ForConditionalGeneration.from_pretrained(tmp_path)
    batch["attention_mask"][3, 7:9] = 0
    got, want = (model(**batch, output_attentions=True) for model in (ours, theirs))
    assert torch.equal(got.loss, ours(**batch).loss)
    for field in FIELDS:
        layers = getattr(got, field)
        assert len(layers) == len(getattr(want, field)) > 1
        for mine, other in zip(layers, getattr(want, field), strict=True):
            pairs = [mine, other]
            if field == "encoder_attentions":  # what padding looks at means nothing
                pairs = [weights.transpose(1, 2)[batch["attention_mask"].bool()] for weights in pairs]
            torch.testing.assert_close(*pairs, rtol=1e-4, atol=1e-6)
    assert ours(**batch).encoder_attentions is None


def test_weights_in_generation(tmp_path, batch):
    """A query at a time, with the keys of a cache, as Transformers returns them."""
    theirs = save_t5("t5 tied, gated", tmp_path)
    ours = FAT5ForConditionalGeneration.from_pretrained(tmp_path)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "output_attentions": True, "return_dict_in_generate": True}
    got, whole = ours.generate(**inputs, **options), theirs.generate(**inputs, **options, use_cache=False)
    assert torch.equal(got.sequences, whole.sequences)
    torch.testing.assert_close(got.encoder_attentions[-1], whole.encoder_attentions[-1], rtol=1e-4, atol=1e-6)
    for step in range(4):
        for field in FIELDS[1:]:
            mine, other = getattr(got, field)[step][-1], getattr(whole, field)[step][-1]
            torch.testing.assert_close(mine[:, :, -1], other[:, :, -1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("encoding", "layout"), LAYOUTS)
def test_weights_of_every_encoding_and_layout(encoding, layout):
    """They add up to 1 wherever a key is seen, and give the same states when they are applied by hand."""
    model = make(encoding)
    ids = torch.randint(2, 97, (1, 11))
    inputs = {"input_ids": ids, "decoder_input_ids": ids}
    if layout == "packed":
        offsets = torch.tensor([0, 4, 11], dtype=torch.int32)
        inputs = {name: value[0] for name, value in inputs.items()}
        inputs |= {"cu_seqlens": offsets, "decoder_cu_seqlens": offsets, "max_seqlen": 7, "decoder_max_seqlen": 7}
    output = model(**inputs, output_attentions=True)
    for field in FIELDS:
        for weights in getattr(output, field):
            weights = weights if layout == "packed" else weights[0]
            assert weights.shape == (3, 11, 11)
            torch.testing.assert_close(weights.sum(-1), torch.ones(3, 11), rtol=1e-4, atol=1e-4)
            if field == "decoder_attentions":
                assert not weights.triu(1).any()
            if layout == "packed":
                assert not weights[:, :4, 4:].any()
                assert not weights[:, 4:, :4].any()
    attention = model.encoder.block[0].layer[0].SelfAttention
    normed = model.encoder.block[0].layer[0].layer_norm(model.shared(inputs["input_ids"]))
    values = attention.v(normed).unflatten(-1, (3, 12))
    by_hand = torch.einsum("...hij,...jhd->...ihd", output.encoder_attentions[0], values)
    seen = []
    attention.o.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(**inputs)
    torch.testing.assert_close(by_hand.flatten(-2), seen[0], rtol=1e-4, atol=1e-5)


def test_heads_configuration_and_tuples(batch):
    config = FAT5Config(**SIZES, output_attentions=True)
    model = FAT5ForSequenceClassification(config).eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    output = model(**inputs)
    assert [tuple(weights.shape) for weights in output.attentions] == [(4, 3, 40, 40)] * 2
    assert model(**inputs, output_attentions=False).attentions is None
    assert len(model(**inputs, return_dict=False)) == 2


def test_training_with_weights_and_checkpointing(batch):
    """They carry no gradients, and nothing is left behind in the model."""
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES | {"dropout_rate": 0.1})).train()
    model.gradient_checkpointing_enable()
    output = model(**batch, output_attentions=True)
    torch.testing.assert_close(output.encoder_attentions[0][3].sum(-1), torch.ones(3, 40), rtol=1e-4, atol=1e-4)
    output.loss.backward()
    assert all(p.grad.any() for p in model.parameters())
    for module in model.modules():
        assert getattr(module, "weights", None) is None
        assert not getattr(module, "keeps_weights", False)


@pytest.mark.parametrize("keys", [1, 16, 37])
def test_any_number_of_keys(keys):
    q, k = torch.randn(2, 5, 3, 16), torch.randn(2, keys, 3, 16)
    bias = AlibiBias(torch.rand(3))
    weights = attention_weights(lambda *x: flash_attention(*x, bias=bias, causal=True), q, k)
    values = torch.randn(2, keys, 3, 16)
    want = flash_attention(q, k, values, bias=bias, causal=True)
    torch.testing.assert_close(torch.einsum("bihj,bjhd->bihd", weights, values), want, rtol=1e-4, atol=1e-5)
