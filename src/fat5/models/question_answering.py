"""Extractive question answering with the encoder alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import QuestionAnsweringModelOutput

from fat5.models.configuration import FAT5Config
from fat5.models.encoder_head import FAT5EncoderHead
from fat5.models.modeling import IGNORE_INDEX
from fat5.ops import cross_entropy


class FAT5ForQuestionAnswering(FAT5EncoderHead):
    """The first and the last token of the answer to a question, in a text that holds it."""

    _new_parts = ("qa_outputs",)

    def __init__(self, config: FAT5Config) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.qa_outputs = nn.Linear(config.d_model, 2)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> QuestionAnsweringModelOutput | tuple[Any, ...]:
        """Score each token as the start and as the end of the answer.

        Args:
            input_ids: [B, L], or packed [total].
            attention_mask: [B, L], non-zero where real; padding on any side, or holes.
            inputs_embeds: Instead of input_ids.
            start_positions: [B], first token of the answer; one outside of the text is ignored. Padded batches alone.
            end_positions: [B], its last token.
            cu_seqlens: Packed: offsets of the documents, int tensor [documents + 1].
            max_seqlen: Packed: longest document, or an upper bound.
            output_hidden_states: Return the states before each block, and the last.
            output_attentions: Return the attention weights of each layer, see `FAT5Stack.forward`.
            return_dict: False for a plain tuple.

        Returns:
            `loss`, a float32 scalar, the mean over both positions of the cross-entropy over all L tokens of a row, as
            in Transformers; `start_logits` and `end_logits`, [B, L] or [total].
        """
        if (start_positions is None) != (end_positions is None):
            raise ValueError("got one of start_positions and end_positions; the loss needs both")
        if start_positions is not None and cu_seqlens is not None:
            raise ValueError("got start_positions with cu_seqlens; the loss takes padded batches, [B, L], alone")
        encoded, _ = self._encode(
            input_ids, attention_mask, inputs_embeds, cu_seqlens, max_seqlen, output_hidden_states, output_attentions
        )
        start_logits, end_logits = self.qa_outputs(self.dropout(encoded[0])).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            start_loss = _span_loss(start_logits, start_positions)
            loss = (start_loss + _span_loss(end_logits, end_positions)) / 2
        output = QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
        return output if return_dict is not False else output.to_tuple()


def _span_loss(logits: Tensor, positions: Tensor) -> Tensor:
    rows, length = logits.shape
    if positions.numel() != rows:
        raise ValueError(f"got positions {list(positions.shape)} for {rows} texts; expected one a text")
    positions = positions.view(rows)
    inside = (positions >= 0) & (positions < length)
    return cross_entropy(logits, torch.where(inside, positions, IGNORE_INDEX), ignore_index=IGNORE_INDEX).loss
