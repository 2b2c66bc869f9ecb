"""Checkpoints of Transformers' T5 family load strictly, and compute what Transformers computes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BertConfig, T5EncoderModel, T5ForSequenceClassification

from fat5 import FAT5Config, FAT5EncoderModel, FAT5ForConditionalGeneration
from fat5.errors import CheckpointError, ConfigError
from tests.models.t5_families import FAMILIES, SIZES, UMT5_ALWAYS_SCALES, save_t5, t5_logits, t5_model

EXACT = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    """Rows padded on the right, the left and not at all."""
    mask = torch.ones(3, 40, dtype=torch.int64)
    mask[0, 25:] = mask[1, :13] = 0
    return {
        "input_ids": torch.randint(2, 97, (3, 40)),
        "attention_mask": mask,
        "decoder_input_ids": torch.randint(2, 97, (3, 31)),
    }


def load(folder, cls=FAT5ForConditionalGeneration, **options):
    model, info = cls.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_are_those_of_transformers(name, tmp_path, inputs):
    """Pitfalls: weights untied where lm_head and shared differ; the scale read off the tying; mT5 never scales."""
    theirs = save_t5(name, tmp_path)
    ours = load(tmp_path)
    _, tied, separate_head, _ = FAMILIES[name]
    assert ours.config.tie_word_embeddings is (ours.lm_head.weight is ours.shared.weight) is not separate_head
    assert ours.config.scale_decoder_outputs is (tied is not False and not name.startswith("mt5"))
    want = t5_logits(name, theirs, inputs)
    got = ours(**inputs).logits
    assert want.std() > 0.1
    torch.testing.assert_close(got, want, **EXACT)
    got.square().mean().backward()
    want.square().mean().backward()
    gradients = {key: p.grad for key, p in theirs.named_parameters()}
    assert set(gradients) == {key for key, _ in ours.named_parameters()}
    for key, parameter in ours.named_parameters():
        assert parameter.grad.any(), key
        torch.testing.assert_close(parameter.grad, gradients[key], **EXACT, msg=lambda m, k=key: f"{k}: {m}")


@pytest.mark.parametrize("name", ["t5 v1.0", "umt5"])
def test_greedy_output_is_that_of_transformers(name, tmp_path, inputs):
    theirs = save_t5(name, tmp_path)
    inputs.pop("decoder_input_ids")
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": 96}
    # Without a cache: 5.17 makes theirs for as many layers as the encoder has.
    want = theirs.generate(**inputs, **options, use_cache=False)
    assert torch.equal(load(tmp_path).generate(**inputs, **options), want)


@pytest.mark.parametrize("name", ["t5 v1.0", "t5 v1.1", "umt5"])
@pytest.mark.parametrize("form", ["sharded", "bin"])
def test_every_form_of_the_weights(name, form, tmp_path, inputs):
    theirs = save_t5(name, tmp_path, max_shard_size="20KB" if form == "sharded" else "5GB")
    if form == "sharded":
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    else:
        # As torch.save wrote them: every name, those of tied tensors too.
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    torch.testing.assert_close(load(tmp_path)(**inputs).logits, t5_logits(name, theirs, inputs), **EXACT)


def test_the_unread_table_of_the_first_checkpoints(tmp_path, inputs):
    """The first files carry a relative bias of cross-attention. Nobody reads it, and nothing else is skipped."""
    theirs = save_t5("t5 v1.0", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    table = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file(weights | {table: torch.randn(8, 3)}, tmp_path / "model.safetensors", {"format": "pt"})
    torch.testing.assert_close(load(tmp_path)(**inputs).logits, theirs(**inputs).logits, **EXACT)
    save_file(weights | {table.replace("0", "1", 1): torch.randn(8, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"it has, and the model has not, decoder\.block\.1"):
        FAT5ForConditionalGeneration.from_pretrained(tmp_path)


def test_a_lacking_tensor_is_an_error(tmp_path):
    """Pitfall: weights are skipped with a warning."""
    save_t5("t5 v1.1", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["decoder.block.2.layer.1.EncDecAttention.q.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks decoder\.block\.2\.layer\.1\.EncDecAttention\.q\.weight$"):
        FAT5ForConditionalGeneration.from_pretrained(tmp_path)


def test_an_untied_head_that_is_lacking_is_an_error(tmp_path):
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES, tie_word_embeddings=False))
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        FAT5ForConditionalGeneration.from_pretrained(tmp_path)


def test_an_encoder_that_was_saved_alone_or_with_its_decoder(tmp_path, inputs):
    whole = save_t5("t5 v1.1", tmp_path / "whole")
    alone = T5EncoderModel.from_pretrained(tmp_path / "whole")
    alone.save_pretrained(tmp_path / "alone")
    rows = {k: inputs[k] for k in ("input_ids", "attention_mask")}
    want = alone(**rows).last_hidden_state
    torch.testing.assert_close(whole.encoder(**rows).last_hidden_state, want)
    for folder in ("whole", "alone"):
        states = load(tmp_path / folder, FAT5EncoderModel)(**rows).last_hidden_state
        torch.testing.assert_close(states, want, **EXACT)


def test_padding_of_the_vocabulary_is_kept(tmp_path):
    """Files have more rows than their tokenizer has tokens."""
    save_t5("mt5", tmp_path)
    assert load(tmp_path).config.vocab_size == load(tmp_path).shared.weight.shape[0] == SIZES["vocab_size"]


def test_defaults_of_a_file_are_those_of_its_family(tmp_path):
    """Files leave out what has its default: an old T5 is plain ReLU, an mT5 is gated."""
    expected = {
        "t5": ("relu", 32128, 512, 2048, 6, 6, True, True),
        "mt5": ("gated-gelu", 250112, 512, 1024, 8, 8, True, False),
        "umt5": ("gated-gelu", 250112, 512, 1024, 8, 8, True, True),
    }
    for family, values in expected.items():
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "n_positions": 512}))
        config = FAT5Config.from_pretrained(tmp_path)
        fields = ("feed_forward_proj", "vocab_size", "d_model", "d_ff", "num_layers", "num_decoder_layers")
        got = [getattr(config, name) for name in (*fields, "tie_word_embeddings", "scale_decoder_outputs")]
        assert tuple(got) == values, family
        assert config.dropout_rate == 0.1
        assert config.relative_attention_per_layer == (family == "umt5")
        assert config.model_type == "fat5"
        assert not hasattr(config, "n_positions")


def test_settings_beyond_the_architecture_survive(tmp_path):
    settings = {
        "model_type": "t5", "task_specific_params": {"summarization": {"prefix": "summarize: "}}, "num_layers": 3,
        "id2label": {"0": "no", "1": "yes", "2": "maybe"}, "tokenizer_class": "T5Tokenizer", "dropout_rate": 0.2,
        "classifier_dropout": 0.3, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(settings))
    config = FAT5Config.from_pretrained(tmp_path, attention_backend="torch")
    assert config.task_specific_params == settings["task_specific_params"]
    assert (config.num_labels, config.id2label[2], config.tokenizer_class) == (3, "maybe", "T5Tokenizer")
    assert (config.num_layers, config.dropout_rate, config.classifier_dropout) == (3, 0.2, 0.3)
    assert (config.tie_word_embeddings, config.layer_norm_epsilon) == (False, 1e-5)
    assert config.attention_backend == "torch"
    config.save_pretrained(tmp_path)
    assert FAT5Config.from_pretrained(tmp_path, attention_backend="torch").to_dict() == config.to_dict()


def test_another_family_is_named(tmp_path):
    BertConfig(hidden_size=8, num_attention_heads=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model_type='bert'"):
        FAT5ForConditionalGeneration.from_pretrained(tmp_path)


def test_a_whole_classifier_of_transformers_is_refused(tmp_path):
    """Its head was trained on the decoder's states; loaded onto the encoder it would classify at random."""
    from fat5 import FAT5ForSequenceClassification

    T5ForSequenceClassification(t5_model("t5 v1.0").config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"classification_head\.dense"):
        FAT5ForSequenceClassification.from_pretrained(tmp_path)


@pytest.mark.skipif(UMT5_ALWAYS_SCALES, reason="transformers 5.17 scales UMT5's output whatever its file says")
def test_umt5_is_not_scaled_where_its_file_says_so(tmp_path, inputs):
    theirs = save_t5("umt5", tmp_path)
    torch.testing.assert_close(load(tmp_path)(**inputs).logits, theirs(**inputs).logits, **EXACT)
