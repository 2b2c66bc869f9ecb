"""Configurations of Transformers' T5 family, to FAT5's and back; the weights are the same either way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

from fat5.errors import ConfigError

FAMILIES = ("t5", "mt5", "umt5")
"""The `model_type`s whose checkpoints FAT5 reads; T5 v1.0, v1.1, FLAN-T5, ByT5 and UL2 are all `t5`."""

_ARCHITECTURE = (
    "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_decoder_layers", "num_heads",
    "relative_attention_num_buckets", "relative_attention_max_distance", "dropout_rate", "layer_norm_epsilon",
    "initializer_factor", "feed_forward_proj", "classifier_dropout", "pad_token_id", "eos_token_id",
)  # fmt: skip
# Names of classes, what T5 derives from other settings, and what nobody reads.
_LEFT_OUT = ("architectures", "dense_act_fn", "is_gated_act", "is_decoder", "n_positions", "output_past", "use_cache")


def settings_from_t5(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `FAT5Config` for the model that a `config.json` of the T5 family describes.

    Most files have one flag for two things: `tie_word_embeddings=false` says that the LM head has a weight of its own
    and that the decoder's output is not scaled. Newer ones add `scale_decoder_outputs`; mT5 never scales. Whether the
    head is tied is settled in the end by the weights, see `fat5.models.loading`.

    Args:
        settings: Content of the file. FAT5's own, or settings without a `model_type`, are returned as they are.

    Raises:
        ConfigError: The file is of another family.
    """
    family = settings.get("model_type", "fat5")
    if family == "fat5":
        return dict(settings)
    if family not in FAMILIES:
        raise ConfigError(
            f"got a checkpoint of model_type={family!r}; expected FAT5's own or one of {', '.join(FAMILIES)} (T5 v1.0 "
            "and v1.1, FLAN-T5, ByT5, mT5, UMT5)"
        )
    # Files leave out what has its default, which differs between the families.
    complete = CONFIG_MAPPING[family].from_dict(dict(settings))
    converted = {name: value for name, value in settings.items() if name not in _LEFT_OUT}
    converted |= {name: getattr(complete, name) for name in _ARCHITECTURE}
    tied = settings.get("tie_word_embeddings") is not False
    return converted | {
        "model_type": "fat5",
        "relative_attention_per_layer": family == "umt5",
        "tie_word_embeddings": tied,
        "scale_decoder_outputs": family != "mt5" and bool(settings.get("scale_decoder_outputs", tied)),
        "is_encoder_decoder": True,
    }


def settings_to_t5(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of the `config.json` with which stock Transformers runs the same model on the same weights.

    A model with a table of biases a layer becomes a `umt5`, every other a `t5`.

    Args:
        settings: All settings of a `FAT5Config`, as `to_dict` gives them.

    Raises:
        ConfigError: T5 knows no such positions.
    """
    for name, expressible in (("position_encoding", "relative"), ("randomized_position_range", None)):
        if settings[name] != expressible:
            raise ConfigError(
                f"a model with {name}={settings[name]!r} is no T5: T5's code has its own relative positions alone, so "
                "Transformers would load the weights and compute something else"
            )
    family = "umt5" if settings["relative_attention_per_layer"] else "t5"
    kept = {name: settings[name] for name in (*_ARCHITECTURE, "decoder_start_token_id")}
    others = ("bos_token_id", "tokenizer_class", "task_specific_params", "dtype", "id2label", "label2id")
    kept |= {name: settings[name] for name in others if settings.get(name) is not None}
    complete = CONFIG_MAPPING[family].from_dict(kept).to_dict()
    # What the files of v1.0 and v1.1 say where both flags agree. Where they don't, Transformers 5 reads the second.
    flags = {name: bool(settings[name]) for name in ("tie_word_embeddings", "scale_decoder_outputs")}
    return complete | flags
