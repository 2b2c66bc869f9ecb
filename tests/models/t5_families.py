"""Small random checkpoints of every member of the T5 family, as Transformers' own classes write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

SIZES = {
    "vocab_size": 97, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3,
    "num_heads": 3, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
}  # fmt: skip
CLASSES = {
    "t5": (T5Config, T5ForConditionalGeneration),
    "mt5": (MT5Config, MT5ForConditionalGeneration),
    "umt5": (UMT5Config, UMT5ForConditionalGeneration),
}
# Of each name: model_type, the file's tie_word_embeddings, a separate LM head, other settings.
FAMILIES: dict[str, tuple[str, bool | None, bool, dict[str, Any]]] = {
    "t5 v1.0": ("t5", None, False, {"feed_forward_proj": "relu"}),
    "t5 v1.1": ("t5", False, True, {"feed_forward_proj": "gated-gelu", "layer_norm_epsilon": 1e-5}),
    "flan-t5": ("t5", False, True, {"feed_forward_proj": "gated-gelu", "d_kv": 8}),
    "byt5": ("t5", False, True, {"feed_forward_proj": "gated-gelu", "num_layers": 3, "num_decoder_layers": 1}),
    "ul2": ("t5", False, True, {"feed_forward_proj": "gated-silu"}),
    "t5 tied, gated": ("t5", True, False, {"feed_forward_proj": "gated-relu"}),
    "t5 tied, unscaled": ("t5", False, False, {"feed_forward_proj": "gelu"}),
    "t5 untied, scaled": ("t5", True, True, {"feed_forward_proj": "gelu_new"}),
    "mt5": ("mt5", False, True, {}),
    "mt5 tied": ("mt5", True, False, {"feed_forward_proj": "relu"}),
    "umt5": ("umt5", False, True, {}),
    "umt5 tied": ("umt5", True, False, {"feed_forward_proj": "relu"}),
}
UMT5_ALWAYS_SCALES = transformers.__version__.startswith("5.17.")
"""That release of Transformers scales UMT5's decoder output whatever the file says; later ones don't."""


def t5_model(name: str) -> PreTrainedModel:
    """Return a small random model of the family; its biases and its head have values that matter."""
    family, tied, separate_head, settings = FAMILIES[name]
    config_class, model_class = CLASSES[family]
    flag = {} if tied is None else {"tie_word_embeddings": tied}
    torch.manual_seed(0)
    # The eager code, since with sdpa 5.17's UMT5 decoder sees later tokens.
    model = model_class(config_class(**SIZES | settings, **flag, attn_implementation="eager")).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "relative_attention_bias" in parameter_name:
                parameter.normal_()
        model.shared.weight.normal_(std=0.3)
    if separate_head:
        model.lm_head.weight = nn.Parameter(0.3 * torch.randn(SIZES["vocab_size"], SIZES["d_model"]))
    return model


def save_t5(name: str, folder: Path, **options: Any) -> PreTrainedModel:
    """Write a checkpoint whose `config.json` has the flag of the family's official files, and return the model."""
    model = t5_model(name)
    model.save_pretrained(folder, **options)
    path, tied = folder / "config.json", FAMILIES[name][1]
    settings = json.loads(path.read_text())
    settings.pop("tie_word_embeddings")
    if FAMILIES[name][2] != (tied is not False):
        # One flag says both, as in the official files, whose writers knew one alone.
        settings.pop("scale_decoder_outputs", None)
    else:
        settings["scale_decoder_outputs"] = tied is not False
    settings |= {} if tied is None or "unscaled" in name else {"tie_word_embeddings": tied}
    path.write_text(json.dumps(settings))
    return model


def t5_logits(name: str, model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Return Transformers' logits, as later releases compute them where an old one has a fault."""
    logits = model(**batch).logits
    if FAMILIES[name][0] == "umt5" and FAMILIES[name][1] is False and UMT5_ALWAYS_SCALES:
        logits = logits * SIZES["d_model"] ** 0.5
    return logits
