"""Base of the heads on the encoder alone, for tasks that read a text and generate none."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.modeling_outputs import BaseModelOutput

from fat5.models.configuration import FAT5Config
from fat5.models.modeling import FAT5EncoderModel, FAT5PreTrainedModel
from fat5.models.stack import FAT5Stack
from fat5.models.token_layout import make_layout, token_shape
from fat5.nn import SequenceLayout, pool


class FAT5EncoderHead(FAT5PreTrainedModel):
    """Base of the models with a head on the encoder.

    `from_pretrained` takes a checkpoint of such a model, of the encoder alone, or of encoder and decoder, whose decoder
    is left out; the head is initialised and listed as new where the checkpoint has none.
    """

    _keys_to_ignore_on_load_unexpected = [r"^decoder\.", r"^lm_head\."]  # noqa: RUF012

    def __init__(self, config: FAT5Config) -> None:
        super().__init__(config)
        self.transformer = FAT5EncoderModel(self.config)

    def get_encoder(self, modality: str | None = None) -> FAT5Stack:
        """Return the encoder's stack."""
        return self.transformer.encoder

    def get_input_embeddings(self) -> nn.Embedding:
        """Return the encoder's embedding."""
        return self.transformer.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the encoder's embedding."""
        self.transformer.set_input_embeddings(value)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise the head's layers: the states have mean square 1, and so have the logits at the start."""
        if isinstance(module, nn.Linear):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_factor * self.config.d_model**-0.5)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def _encode(
        self,
        input_ids: Tensor | None,
        attention_mask: Tensor | None,
        inputs_embeds: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int | None,
        output_hidden_states: bool | None,
        output_attentions: bool | None,
    ) -> tuple[BaseModelOutput, SequenceLayout]:
        """Return what the encoder gives, and the layout of the batch."""
        layout = make_layout(token_shape(input_ids, inputs_embeds), attention_mask, cu_seqlens, max_seqlen)
        output = self.transformer.encoder(
            input_ids=input_ids,
            inputs_embeds=inputs_embeds,
            layout=layout,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        return output, layout

    def _pool(self, states: Tensor, layout: SequenceLayout, input_ids: Tensor | None) -> Tensor:
        """Return a vector for each text, as the configuration's `pooling` says."""
        eos = self.config.eos_token_id
        eos_token_ids = [eos] if isinstance(eos, int) else eos or []
        return pool(states, layout, self.config.pooling, input_ids, eos_token_ids)
