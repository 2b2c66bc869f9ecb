"""Classification of texts and of tokens, with the encoder alone."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_outputs import SequenceClassifierOutput, TokenClassifierOutput

from fat5.models.configuration import FAT5Config
from fat5.models.encoder_head import FAT5EncoderHead
from fat5.models.modeling import IGNORE_INDEX
from fat5.nn import SequenceLayout
from fat5.ops import cross_entropy


class ClassificationHead(nn.Module):
    """T5's head for whole texts: `out_proj(tanh(dense(x)))`, dropout before each layer."""

    def __init__(self, config: FAT5Config) -> None:
        super().__init__()
        self.dense = nn.Linear(config.d_model, config.d_model)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.out_proj = nn.Linear(config.d_model, cast(int, config.num_labels))

    def forward(self, pooled: Tensor) -> Tensor:
        """Map [B, d_model] to logits [B, num_labels]."""
        inner = torch.tanh(self.dense(self.dropout(pooled)))
        return self.out_proj(self.dropout(inner))


class FAT5ForSequenceClassification(FAT5EncoderHead):
    """A class, several, or a number for each text."""

    _new_parts = ("classifier",)

    def __init__(self, config: FAT5Config) -> None:
        super().__init__(config)
        self.classifier = ClassificationHead(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> SequenceClassifierOutput | tuple[Any, ...]:
        """Classify texts.

        Args:
            input_ids: [B, L], or packed [total].
            attention_mask: [B, L], non-zero where real; padding on any side, or holes.
            inputs_embeds: Instead of input_ids; `pooling="eos"` then takes each text's last token.
            labels: Whole numbers [B] for one class of several (-100 is ignored), floats [B, num_labels] for several
                classes at once, floats [B] or [B, num_labels] for regression. B is the number of documents where
                packed, and documents without tokens are ignored. `config.problem_type` says which it is; where it is
                None, it is set from `num_labels` and the type of the labels, as Transformers does.
            cu_seqlens: Packed: offsets of the documents, int tensor [documents + 1].
            max_seqlen: Packed: longest document, or an upper bound.
            output_hidden_states: Return the states before each block, and the last.
            output_attentions: Return the attention weights of each layer, see `FAT5Stack.forward`.
            return_dict: False for a plain tuple.

        Returns:
            `loss`, a float32 scalar, and `logits` [B, num_labels].
        """
        encoded, layout = self._encode(
            input_ids, attention_mask, inputs_embeds, cu_seqlens, max_seqlen, output_hidden_states, output_attentions
        )
        logits = self.classifier(self._pool(encoded[0], layout, input_ids))
        output = SequenceClassifierOutput(
            loss=None if labels is None else self._loss(logits, labels, layout),
            logits=logits,
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
        return output if return_dict is not False else output.to_tuple()

    def _loss(self, logits: Tensor, labels: Tensor, layout: SequenceLayout) -> Tensor:
        rows, num_labels = logits.shape
        problem = self._problem_type(labels)
        columns = 1 if problem == "single_label_classification" else num_labels
        expected = [(rows, columns), *([(rows,)] if columns == 1 else [])]
        if labels.shape not in expected:
            raise ValueError(
                f"got labels {list(labels.shape)} for {problem} of {rows} texts; expected {list(expected[-1])}"
            )
        if problem == "single_label_classification":
            labels = labels.view(rows)
            if layout.cu_seqlens is not None:
                labels = torch.where(layout.cu_seqlens.diff() > 0, labels, IGNORE_INDEX)
            return cross_entropy(logits, labels, ignore_index=IGNORE_INDEX).loss
        got, wanted = logits.float(), labels.float().view(rows, num_labels)
        wanted = torch.nan_to_num(wanted) if layout.is_packed else wanted
        if problem == "regression":
            losses = F.mse_loss(got, wanted, reduction="none").mean(1)
        else:
            losses = F.binary_cross_entropy_with_logits(got, wanted, reduction="none").mean(1)
        if layout.cu_seqlens is None:
            return losses.mean()
        real = layout.cu_seqlens.diff() > 0
        return (losses * real).sum() / real.sum().clamp_min(1)

    def _problem_type(self, labels: Tensor) -> str:
        if self.config.problem_type is None:
            if self.config.num_labels == 1:
                self.config.problem_type = "regression"
            elif labels.dtype in (torch.int64, torch.int32):
                self.config.problem_type = "single_label_classification"
            else:
                self.config.problem_type = "multi_label_classification"
        return self.config.problem_type


class FAT5ForTokenClassification(FAT5EncoderHead):
    """A class for each token; keys and shapes are those of Transformers' T5ForTokenClassification."""

    _new_parts = ("classifier",)

    def __init__(self, config: FAT5Config) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(config.classifier_dropout)
        self.classifier = nn.Linear(config.d_model, cast(int, config.num_labels))
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> TokenClassifierOutput | tuple[Any, ...]:
        """Classify tokens.

        Args:
            input_ids: [B, L], or packed [total].
            attention_mask: [B, L], non-zero where real; padding on any side, or holes.
            inputs_embeds: Instead of input_ids.
            labels: A class for each token, shaped as the tokens; -100 is ignored.
            cu_seqlens: Packed: offsets of the documents, int tensor [documents + 1].
            max_seqlen: Packed: longest document, or an upper bound.
            output_hidden_states: Return the states before each block, and the last.
            output_attentions: Return the attention weights of each layer, see `FAT5Stack.forward`.
            return_dict: False for a plain tuple.

        Returns:
            `loss`, a float32 scalar, 0 where no label counts, and `logits` [B, L, num_labels] or [total, num_labels].
        """
        encoded, _ = self._encode(
            input_ids, attention_mask, inputs_embeds, cu_seqlens, max_seqlen, output_hidden_states, output_attentions
        )
        logits = self.classifier(self.dropout(encoded[0]))
        loss = None
        if labels is not None:
            if labels.shape != logits.shape[:-1]:
                raise ValueError(
                    f"got labels {list(labels.shape)} for tokens {list(logits.shape[:-1])}; expected one label a token"
                )
            loss = cross_entropy(logits, labels, ignore_index=IGNORE_INDEX).loss
        output = TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )
        return output if return_dict is not False else output.to_tuple()
