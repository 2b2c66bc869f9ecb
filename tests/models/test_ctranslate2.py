"""An exported model in CTranslate2: the same tokens with the same probabilities, as docs/recipes/serve.md says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from fat5 import FAT5Config, FAT5ForConditionalGeneration
from fat5.models.export import export_checkpoint
from tests.data.small_tokenizer import small_tokenizer

ctranslate2 = pytest.importorskip("ctranslate2")
pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "recipes" / "serve.md"
# The head dimension is not d_model / num_heads, and the decoder is not as deep as the encoder.
SIZES = {"d_model": 48, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
TEXTS = ["Le conseil municipal <extra_id_0> la demande. " * 8, "oui", "La loi <extra_id_0> exécutée <extra_id_1>."]
VARIANTS = {
    "default": {},
    "untied, unscaled": {"tie_word_embeddings": False, "scale_decoder_outputs": False},
    "tied, scaled": {"tie_word_embeddings": True, "scale_decoder_outputs": True},
    "tied, unscaled": {"tie_word_embeddings": True, "scale_decoder_outputs": False},
    "gated-gelu": {"feed_forward_proj": "gated-gelu"},
    "relu": {"feed_forward_proj": "relu"},
    "gated-silu": {"feed_forward_proj": "gated-silu"},
    "other buckets": {"relative_attention_num_buckets": 16, "relative_attention_max_distance": 40},
    "a table a layer": {"relative_attention_per_layer": True},
}


def converter():
    """Return the class that the page shows."""
    code = re.search(r"```python\n(from ctranslate2.*?)\n\nT5Converter\(", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, type] = {}
    exec(code[1], names)
    return names["T5Converter"]


def model_of(**settings: object) -> FAT5ForConditionalGeneration:
    """Return a random model whose every part matters."""
    torch.manual_seed(0)
    config = FAT5Config(**{"vocab_size": 1024, "decoder_start_token_id": 0} | SIZES | settings)
    model = FAT5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "relative" in name:
                parameter.normal_()
            elif "layer_norm" in name:
                parameter.uniform_(0.5, 1.5)
        model.shared.weight.normal_(std=0.3)
        if not model.config.tie_word_embeddings:
            model.lm_head.weight.normal_(std=0.3)
    return model


def translator_of(model: FAT5ForConditionalGeneration, folder: Path, convert=None):
    model.save_pretrained(folder / "fat5")
    small_tokenizer().save_pretrained(folder / "fat5")
    export_checkpoint(folder / "fat5", folder / "t5")
    (convert or converter())(str(folder / "t5")).convert(str(folder / "served"))
    return ctranslate2.Translator(str(folder / "served"), device="cpu", intra_threads=1)


def greedy(model: FAT5ForConditionalGeneration, ids: list[int]) -> list[int]:
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=16, do_sample=False)[0, 1:].tolist()
    return tokens[:-1] if tokens[-1] == model.config.eos_token_id else tokens


def log_probabilities(model: FAT5ForConditionalGeneration, ids: list[int], target: list[int]) -> torch.Tensor:
    labels = torch.tensor([[*target, model.config.eos_token_id]])
    logits = model(input_ids=torch.tensor([ids]), labels=labels, return_logits=True).logits
    return logits.log_softmax(-1)[0].gather(-1, labels[0, :, None])[:, 0].detach()


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_and_probabilities_are_fat5_s(variant, tmp_path):
    model, tokenizer = model_of(**VARIANTS[variant]), small_tokenizer()
    translator = translator_of(model, tmp_path)
    for text in TEXTS:
        ids = tokenizer(text).input_ids
        source, want = tokenizer.convert_ids_to_tokens(ids), greedy(model, ids)
        [found] = translator.translate_batch([source], beam_size=1, max_decoding_length=16)
        assert tokenizer.convert_tokens_to_ids(found.hypotheses[0]) == want
        [scored] = translator.score_batch([source], [tokenizer.convert_ids_to_tokens(want)])
        got = torch.tensor(scored.log_probs)
        torch.testing.assert_close(got, log_probabilities(model, ids, want), rtol=1e-4, atol=1e-4)


def test_the_override_is_needed(tmp_path):
    """Without it the scores of a model with an unscaled output are wrong; once they are right, the page can lose it."""
    from ctranslate2.converters import TransformersConverter

    model, tokenizer = model_of(), small_tokenizer()
    translator = translator_of(model, tmp_path, TransformersConverter)
    ids = tokenizer(TEXTS[1]).input_ids
    want = greedy(model, ids)
    source = tokenizer.convert_ids_to_tokens(ids)
    [found] = translator.translate_batch([source], beam_size=1, max_decoding_length=16)
    assert tokenizer.convert_tokens_to_ids(found.hypotheses[0]) == want
    [scored] = translator.score_batch([source], [tokenizer.convert_ids_to_tokens(want)])
    assert (torch.tensor(scored.log_probs) - log_probabilities(model, ids, want)).abs().max() > 0.5


def test_sentinels_keep_their_ids_where_the_vocabulary_is_larger_than_the_tokenizer(tmp_path):
    model, tokenizer = model_of(vocab_size=1088), small_tokenizer()
    with torch.no_grad():
        model.lm_head.weight[1024:] = 0.0
    translator = translator_of(model, tmp_path)
    ids = tokenizer(TEXTS[2]).input_ids
    source, target = (tokenizer.convert_ids_to_tokens(tokens) for tokens in (ids, [300, 400]))
    [scored] = translator.score_batch([source], [target])
    want = log_probabilities(model, ids, [300, 400])
    torch.testing.assert_close(torch.tensor(scored.log_probs), want, rtol=1e-4, atol=1e-4)
