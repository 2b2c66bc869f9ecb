"""What the models return."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from transformers.utils import ModelOutput


@dataclass
class FAT5Seq2SeqOutput(ModelOutput):
    """Output of `FAT5ForConditionalGeneration`; fields that were not asked for are None.

    Args:
        loss: Training loss with its z-loss, a scalar in float32, or a loss a token shaped as the labels
            (reduction "none").
        logits: [B, L, vocab_size] or packed [total, vocab_size]; with labels only where `return_logits=True`.
        z_loss: The z-loss's share of `loss`.
        correct: Bool, shaped as the labels: the most likely token is the label. False where ignored.
        count: Number of labels that are not ignored.
        encoder_last_hidden_state: [B, L, d_model] or packed.
        decoder_last_hidden_state: [B, L, d_model] or packed.
        encoder_hidden_states: The encoder's states before each block, and its last.
        decoder_hidden_states: The decoder's.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    z_loss: Tensor | None = None
    correct: Tensor | None = None
    count: Tensor | None = None
    encoder_last_hidden_state: Tensor | None = None
    decoder_last_hidden_state: Tensor | None = None
    encoder_hidden_states: tuple[Tensor, ...] | None = None
    decoder_hidden_states: tuple[Tensor, ...] | None = None


@dataclass
class FAT5EmbeddingOutput(ModelOutput):
    """Output of `FAT5ForTextEmbedding`; fields that were not asked for are None.

    Args:
        embeddings: [B, d_model], of length 1.
        last_hidden_state: The encoder's, [B, L, d_model] or packed [total, d_model].
        hidden_states: The states before each block, and the last.
        attentions: The attention weights of each layer.
    """

    embeddings: Tensor | None = None
    last_hidden_state: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
