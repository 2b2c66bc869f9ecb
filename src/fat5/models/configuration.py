"""Configuration of a FAT5 model: T5's own fields, with tying and the scale of the LM head apart."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from fat5.models.conversion import settings_from_t5
from fat5.nn import POOLINGS
from fat5.nn.feed_forward import ACTIVATIONS
from fat5.nn.position import PositionSettings
from fat5.ops.attention.backends import BACKENDS


@strict
class FAT5Config(PreTrainedConfig):
    r"""Configuration of the FAT5 models.

    `FAT5Config.from_pretrained` also reads the files of T5, mT5 and UMT5 checkpoints.

    Args:
        vocab_size: Rows of the embedding; at least the tokenizer's length, best a multiple of 64.
        d_model: Width of the model.
        d_kv: Width of a head.
        d_ff: Inner width of the feed-forward layers.
        num_layers: Layers of the encoder.
        num_decoder_layers: Layers of the decoder; by default as many as the encoder's.
        num_heads: Attention heads; the inner width is `num_heads * d_kv`, which need not be `d_model`.
        position_encoding: Position encoding of self-attention: `"relative"` (T5's), `"alibi"`, `"rotary"`, `"fire"` or
            `"none"`. Cross-attention has none. The settings of the encodings that are not chosen must keep their
            defaults.
        relative_attention_num_buckets: relative: rows of the table.
        relative_attention_max_distance: relative: distance in tokens from which the last bucket holds.
        relative_attention_per_layer: relative: a table a layer, as UMT5 has it, rather than a table a stack.
        alibi_symmetric: alibi: in the encoder, penalise earlier and later keys alike; False lets the first half of the
            heads see earlier keys alone and the second half later keys alone.
        alibi_learned_slopes: alibi: train the slopes.
        rotary_theta: rotary: base of the frequencies.
        rotary_fraction: rotary: share of each head's channels that is rotated, rounded down to an even number.
        rotary_interleaved: rotary: pair neighbouring channels instead of the first half with the second.
        rotary_scale_base: rotary: scale base of xPos in tokens, for the decoder alone; None for none.
        fire_threshold: fire: initial threshold L in tokens. Fire's memory is quadratic and it takes no packed batches.
        fire_width: fire: hidden units of the function that makes the bias.
        randomized_position_range: In training each sequence takes a sorted random subset of range(this) as its
            positions. rotary: at no cost; other encodings: padded batches alone, with quadratic memory in training.
        dropout_rate: Dropout in every place where T5 has it: embeddings, attention weights, inner activations,
            the output of each sublayer, and the output of each stack.
        layer_norm_epsilon: Added to the mean square in the norms.
        initializer_factor: Factor of T5's initialisation, 1.0.
        feed_forward_proj: `"relu"` (T5 v1.0), `"gated-gelu"` (v1.1; the tanh approximation) or another activation
            with or without `gated-`.
        tie_word_embeddings: Use the embedding as LM head.
        scale_decoder_outputs: Multiply the decoder's output by `d_model ** -0.5` before the LM head, as T5 v1.0 does;
            by default as `tie_word_embeddings`.
        z_loss: Weight of the z-loss, `z_loss * logsumexp(logits) ** 2` a target token, part of the training loss.
        label_smoothing: Share of the target's probability spread over the vocabulary in the training loss.
        classifier_dropout: Heads on the encoder: dropout before each of their linear layers.
        pooling: Heads on the encoder that see a text as one vector: `"mean"` over its tokens, its `"first"` token, or
            its `"eos"`, the last EOS (the last token where a text has none).
        attention_backend: "auto" for the fastest attention that works, or a backend by name; see
            `fat5.ops.flash_attention`.
        pad_token_id: Padding.
        eos_token_id: End of a sequence.
        decoder_start_token_id: First input of the decoder; T5's is the padding.

    Raises:
        ValueError: a field has a value that no model can have.
    """

    model_type = "fat5"
    attribute_map = {  # noqa: RUF012
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    }

    vocab_size: int = 32768
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 12
    num_decoder_layers: int | None = None
    num_heads: int = 8
    position_encoding: str = "relative"
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    relative_attention_per_layer: bool = False
    alibi_symmetric: bool = True
    alibi_learned_slopes: bool = False
    rotary_theta: float | int = 10000.0
    rotary_fraction: float | int = 1.0
    rotary_interleaved: bool = False
    rotary_scale_base: float | int | None = None
    fire_threshold: float | int = 512.0
    fire_width: int = 32
    randomized_position_range: int | None = None
    dropout_rate: float | int = 0.0
    layer_norm_epsilon: float = 1e-6
    initializer_factor: float = 1.0
    feed_forward_proj: str = "gated-gelu"
    tie_word_embeddings: bool = False
    scale_decoder_outputs: bool | None = None
    z_loss: float | int = 0.0
    label_smoothing: float | int = 0.0
    classifier_dropout: float | int = 0.0
    pooling: str = "mean"
    attention_backend: str = "auto"
    pad_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 1
    decoder_start_token_id: int | None = 0
    is_encoder_decoder: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_decoder_layers is None:
            self.num_decoder_layers = self.num_layers
        if self.scale_decoder_outputs is None:
            self.scale_decoder_outputs = self.tie_word_embeddings
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Read a `config.json`; one of T5, mT5 or UMT5 is converted."""
        settings, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return settings_from_t5(settings), unused

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> FAT5Config:
        """Make a configuration from settings; those of a T5, mT5 or UMT5 are converted."""
        return super().from_dict(settings_from_t5(config_dict), **kwargs)

    @property
    def activation(self) -> str:
        """Name of the feed-forward activation in `fat5.nn.feed_forward.ACTIVATIONS`."""
        # T5 v1.1's "gated-gelu" has always meant the tanh approximation.
        return "gelu_new" if self.feed_forward_proj == "gated-gelu" else self.feed_forward_proj.removeprefix("gated-")

    @property
    def is_gated(self) -> bool:
        """True for gated feed-forward layers."""
        return self.feed_forward_proj.startswith("gated-")

    @property
    def position_settings(self) -> PositionSettings:
        """The position encoding of self-attention, checked."""
        return PositionSettings(**{field.name: getattr(self, field.name) for field in fields(PositionSettings)})

    def validate_architecture(self) -> None:
        """Check the sizes; part of the validation that Transformers runs."""
        sizes = (
            "vocab_size", "d_model", "d_kv", "d_ff", "num_heads", "relative_attention_num_buckets",
            "relative_attention_max_distance",
        )  # fmt: skip
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"got {name}={value!r}; expected an integer of at least 1")
        if self.num_layers < 0 or (self.num_decoder_layers or 0) < 0:
            raise ValueError(f"got {self.num_layers} and {self.num_decoder_layers} layers; expected at least 0")
        buckets, distance = self.relative_attention_num_buckets, self.relative_attention_max_distance
        if buckets < 4 or buckets % 2 or distance <= buckets // 2:
            raise ValueError(
                f"got relative_attention_num_buckets={buckets} and relative_attention_max_distance={distance}; "
                "expected an even number of at least 4 buckets, and a distance above half of them"
            )
        self.position_settings.check_head(self.num_heads, self.d_kv)
        if not 0 <= self.classifier_dropout < 1 or self.pooling not in POOLINGS:
            raise ValueError(
                f"got classifier_dropout={self.classifier_dropout} and pooling={self.pooling!r}; expected the first in "
                f"[0, 1), the second one of {list(POOLINGS)}"
            )
        if not 0 <= self.dropout_rate < 1 or not 0 <= self.label_smoothing < 1 or self.z_loss < 0:
            raise ValueError(
                f"got dropout_rate={self.dropout_rate}, label_smoothing={self.label_smoothing}, z_loss={self.z_loss}; "
                "expected the first two in [0, 1) and z_loss at least 0"
            )
        if self.attention_backend not in ("auto", *BACKENDS):
            raise ValueError(
                f"got attention_backend={self.attention_backend!r}; expected 'auto' or one of {sorted(BACKENDS)}"
            )
        if self.activation not in ACTIVATIONS:
            raise ValueError(
                f"got feed_forward_proj={self.feed_forward_proj!r}; expected one of {sorted(ACTIVATIONS)}, "
                "with or without 'gated-' in front"
            )
