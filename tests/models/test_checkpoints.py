"""Saving, loading, tying, resizing, and the configuration."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSeq2SeqLM

from fat5 import FAT5Config, FAT5EncoderModel, FAT5ForConditionalGeneration
from fat5.nn.position import POSITION_ENCODINGS
from tests.models.conftest import SIZES

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}


def load(path, cls=FAT5ForConditionalGeneration):
    model, info = cls.from_pretrained(path, output_loading_info=True)
    assert not any(info[k] for k in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    return model.eval()


@pytest.mark.parametrize("tying", [TIED, UNTIED])
def test_round_trip_is_bit_equal(tmp_path, batch, tying):
    """Pitfalls: tied tensors refuse to save; weights are skipped with a warning; untied weights come back tied."""
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES, **tying)).eval()
    model.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))
    assert torch.equal(model(**batch).loss, again(**batch).loss)
    assert (again.lm_head.weight is again.shared.weight) == tying["tie_word_embeddings"]
    assert again.encoder.embed_tokens.weight is again.decoder.embed_tokens.weight is again.shared.weight
    saved = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in saved) != tying["tie_word_embeddings"]
    assert "shared.weight" in saved


@pytest.mark.parametrize(("tying", "margin"), [(TIED, 128**0.5 + 1), (UNTIED, 1.0)])
@pytest.mark.parametrize("scale", [True, False])
def test_initial_loss_is_near_that_of_a_uniform_guess(tying, margin, scale):
    """Pitfall: an untied head initialised with std 1 starts at a loss of about 110.

    A tied head sees the embedding of the previous token in its own states: that token's logit starts near
    sqrt(d_model), as in T5.
    """
    config = FAT5Config(**SIZES | {"d_model": 128, "vocab_size": 1000}, **tying, scale_decoder_outputs=scale)
    model = FAT5ForConditionalGeneration(config)
    loss = model(input_ids=torch.randint(1000, (8, 30)), labels=torch.randint(1000, (8, 30))).loss
    assert abs(loss - math.log(1000)) < margin


def test_auto_classes(tmp_path, model, batch):
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), FAT5Config)
    assert isinstance(AutoModelForSeq2SeqLM.from_pretrained(tmp_path), FAT5ForConditionalGeneration)
    encoder = AutoModel.from_pretrained(tmp_path)
    assert isinstance(encoder, FAT5EncoderModel)


def test_encoder_loads_from_the_whole_model(tmp_path, model, batch):
    model.save_pretrained(tmp_path)
    encoder = load(tmp_path, FAT5EncoderModel)
    states = encoder(batch["input_ids"], batch["attention_mask"]).last_hidden_state
    assert torch.equal(states, model(**batch).encoder_last_hidden_state)


@pytest.mark.parametrize("tying", [TIED, UNTIED])
def test_resizing_the_vocabulary(batch, tying):
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES, **tying)).eval()
    model.resize_token_embeddings(128, mean_resizing=False)
    assert model.config.vocab_size == 128
    assert model.shared.weight.shape == model.lm_head.weight.shape == (128, SIZES["d_model"])
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight
    assert (model.lm_head.weight is model.shared.weight) == tying["tie_word_embeddings"]
    batch["labels"][0, 0] = batch["input_ids"][0, 0] = 127
    assert model(**batch).loss.isfinite()


def test_config_round_trip_and_defaults(tmp_path):
    config = FAT5Config(**SIZES, tie_word_embeddings=True, scale_decoder_outputs=False, z_loss=1e-4)
    config.save_pretrained(tmp_path)
    again = FAT5Config.from_pretrained(tmp_path)
    assert again.to_dict() == config.to_dict()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "fat5"
    assert not again.scale_decoder_outputs
    assert FAT5Config(tie_word_embeddings=True).scale_decoder_outputs
    assert not FAT5Config().scale_decoder_outputs
    assert FAT5Config(num_layers=5).num_decoder_layers == 5


OF_ENCODING = {
    "alibi_symmetric": ("alibi", False),
    "alibi_learned_slopes": ("alibi", True),
    "rotary_theta": ("rotary", 50.0),
    "rotary_fraction": ("rotary", 0.5),
    "rotary_interleaved": ("rotary", True),
    "rotary_scale_base": ("rotary", 30.0),
    "fire_threshold": ("fire", 4.0),
    "fire_width": ("fire", 8),
}


@pytest.mark.parametrize("field", [
    "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads", "relative_attention_num_buckets",
    "relative_attention_max_distance", "dropout_rate", "layer_norm_epsilon", "initializer_factor",
    "feed_forward_proj", "tie_word_embeddings", "scale_decoder_outputs", "z_loss", "label_smoothing", "vocab_size",
    "randomized_position_range", "relative_attention_per_layer", *OF_ENCODING,
])  # fmt: skip
def test_no_field_is_dead(field, batch):
    """Every field changes a training step from the same seed, or the shapes of the weights."""
    other = {
        "num_heads": 2, "feed_forward_proj": "relu", "tie_word_embeddings": True, "scale_decoder_outputs": True,
        "dropout_rate": 0.3, "layer_norm_epsilon": 0.1, "z_loss": 0.1, "label_smoothing": 0.2, "num_layers": 1,
        "num_decoder_layers": 1, "initializer_factor": 2.0, "relative_attention_num_buckets": 6,
        "randomized_position_range": 100, "relative_attention_per_layer": True,
    }  # fmt: skip
    settings = SIZES
    if field in OF_ENCODING:
        encoding, other[field] = OF_ENCODING[field]
        settings = {k: v for k, v in SIZES.items() if not k.startswith("relative_")} | {"position_encoding": encoding}

    def step(**changes):
        torch.manual_seed(1)
        config = FAT5Config(**settings | changes)
        model = FAT5ForConditionalGeneration(config).train()
        shapes = {k: v.shape for k, v in model.state_dict().items()}
        return shapes, model.lm_head.weight.std().item(), model(**batch).loss.item()

    value = other.get(field, SIZES.get(field, 0) * 2)
    assert step() != step(**{field: value})


def test_no_two_position_encodings_are_the_same(batch):
    sizes = {k: v for k, v in SIZES.items() if not k.startswith("relative_")}
    plain = FAT5ForConditionalGeneration(FAT5Config(**sizes, position_encoding="none")).state_dict()
    losses = set()
    for encoding in POSITION_ENCODINGS:
        torch.manual_seed(1)
        model = FAT5ForConditionalGeneration(FAT5Config(**sizes, position_encoding=encoding)).eval()
        model.load_state_dict(plain, strict=False)
        losses.add(model(**batch).loss.item())
    assert len(losses) == len(POSITION_ENCODINGS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 0}, "d_model=0"),
        ({"feed_forward_proj": "gated-relux"}, "gated-relux"),
        ({"relative_attention_num_buckets": 7}, "even number"),
        ({"relative_attention_max_distance": 4}, "distance"),
        ({"dropout_rate": 1.0}, "dropout_rate=1.0"),
        ({"num_layers": -1}, "-1"),
        ({"d_model": "wide"}, "d_model"),
    ],
)
def test_a_configuration_that_no_model_can_have_is_refused(change, message):
    with pytest.raises(Exception, match=message):
        FAT5Config(**SIZES | change)


def test_generation_config_knows_the_special_tokens(model):
    assert model.generation_config.decoder_start_token_id == 0
    assert model.generation_config.eos_token_id == 1
    assert model.generation_config.pad_token_id == 0
