"""Small models, and Hugging Face's T5 with the same weights."""

from __future__ import annotations

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from fat5 import FAT5Config, FAT5ForConditionalGeneration

SIZES = {
    "vocab_size": 97, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 3, "dropout_rate": 0.0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
}  # fmt: skip
VARIANTS = {
    "v1.0": {"feed_forward_proj": "relu", "tie_word_embeddings": True},
    "v1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


@pytest.fixture(params=VARIANTS)
def pair(request):
    """A FAT5 model and a Transformers T5 with the same weights: v1.0 tied ReLU with scale, v1.1 gated untied."""
    settings = SIZES | VARIANTS[request.param]
    theirs = T5ForConditionalGeneration(T5Config(**settings, decoder_start_token_id=0)).eval()
    if not settings["tie_word_embeddings"]:
        # Transformers 5 ties whatever it is told.
        theirs.lm_head.weight = torch.nn.Parameter(0.3 * torch.randn(SIZES["vocab_size"], SIZES["d_model"]))
    ours = FAT5ForConditionalGeneration(FAT5Config(**settings)).eval()
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


@pytest.fixture
def model() -> FAT5ForConditionalGeneration:
    """A small v1.1 model."""
    return FAT5ForConditionalGeneration(FAT5Config(**SIZES, z_loss=1e-3, label_smoothing=0.1)).eval()


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    """Four rows: right-padded, left-padded, padded on both sides, and full; labels of several lengths."""
    attention_mask = torch.ones(4, 40, dtype=torch.int64)
    attention_mask[0, 25:] = 0
    attention_mask[1, :13] = 0
    attention_mask[2, :5] = attention_mask[2, 31:] = 0
    labels = torch.randint(2, 97, (4, 21))
    labels[0, 9:] = labels[2, 20:] = -100
    return {"input_ids": torch.randint(2, 97, (4, 40)), "attention_mask": attention_mask, "labels": labels}
