"""Embeddings of texts with the encoder alone."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from fat5.models.configuration import FAT5Config
from fat5.models.encoder_head import FAT5EncoderHead
from fat5.models.outputs import FAT5EmbeddingOutput
from fat5.models.sentence_folder import write_sentence_files

_OF_THE_HUB = ("repo_id", "commit_message", "commit_description", "private", "token", "revision", "create_pr", "tags")


class FAT5ForTextEmbedding(FAT5EncoderHead):
    """A vector of length 1 for each text: its pooled states, normalised. It has no weights beyond the encoder's.

    `save_pretrained` writes a folder that sentence-transformers loads, too, once the tokenizer is saved there.
    """

    def __init__(self, config: FAT5Config) -> None:
        super().__init__(config)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> FAT5EmbeddingOutput | tuple[Any, ...]:
        """Embed texts; the arguments are those of `FAT5Stack.forward`.

        Returns:
            `embeddings`, [B, d_model], of length 1 (0 for a text without tokens), and `last_hidden_state`.
        """
        encoded, layout = self._encode(
            input_ids, attention_mask, inputs_embeds, cu_seqlens, max_seqlen, output_hidden_states, output_attentions
        )
        output = FAT5EmbeddingOutput(
            embeddings=F.normalize(self._pool(encoded[0], layout, input_ids), dim=-1),
            last_hidden_state=encoded[0],
            hidden_states=encoded.hidden_states,
            attentions=encoded.attentions,
        )
        return output if return_dict is not False else output.to_tuple()

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as every model does, with the files that sentence-transformers reads."""
        push_to_hub = kwargs.pop("push_to_hub", False)
        to_hub = {name: kwargs.pop(name) for name in _OF_THE_HUB if name in kwargs} if push_to_hub else {}
        super().save_pretrained(save_directory, *args, **kwargs)
        write_sentence_files(save_directory, self.config)
        if push_to_hub:
            # Saves again, to a folder of its own; what Transformers would send from here lacks these files.
            repo_id = to_hub.pop("repo_id", os.path.basename(os.path.normpath(save_directory)))  # noqa: PTH119
            self.push_to_hub(repo_id, **to_hub)
