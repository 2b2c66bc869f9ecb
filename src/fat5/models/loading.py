"""Loading of weights: which of a file's tensors a model needs, which of its own it may lack, and what is tied."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fat5.errors import CheckpointError

_EMBEDDINGS = ("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_LM_HEAD = "lm_head.weight"
_SHOWN = 4


class CheckpointLoading(PreTrainedModel):
    """What `from_pretrained` does beyond Transformers' own: it is strict, and the weights decide on tying.

    Every tensor of the model must be in the checkpoint and every tensor of the checkpoint must be the model's, but for
    those that the class names. Transformers would initialise the former and skip the latter with a warning.
    """

    # A table that the first checkpoints of T5 carry and that no version of the model has read.
    _keys_to_ignore_on_load_unexpected = [  # noqa: RUF012
        r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$"
    ]
    _new_parts: tuple[str, ...] = ()
    """Parts that a checkpoint may lack, to be trained: they are initialised, and Transformers lists them."""

    all_tied_weights_keys: dict[str, str]

    def tie_weights(self, missing_keys: set[str] | None = None, recompute_mapping: bool = True) -> None:
        """Tie; after loading, unless the checkpoint holds an LM head that differs from the embedding.

        Files of T5 v1.1, FLAN-T5 and mT5 that Transformers 5 wrote call their separate head tied.
        """
        if missing_keys is not None and _LM_HEAD in self.all_tied_weights_keys and _LM_HEAD not in missing_keys:
            found = next((name for name in _EMBEDDINGS if name not in missing_keys), None)
            if found is not None and not _equal(self.get_parameter(_LM_HEAD), self.get_parameter(found)):
                self.all_tied_weights_keys.pop(_LM_HEAD)
                self.config.tie_word_embeddings = False
        super().tie_weights(missing_keys=missing_keys, recompute_mapping=recompute_mapping)

    def _adjust_missing_and_unexpected_keys(self, loading_info: Any) -> None:
        skipped = set(loading_info.unexpected_keys)
        super()._adjust_missing_and_unexpected_keys(loading_info)
        missing, unexpected = set(loading_info.missing_keys), set(loading_info.unexpected_keys)
        own_parts = tuple(f"{part}." for part in self._new_parts)
        lacking = {name for name in missing if not name.startswith(own_parts)} if own_parts else missing
        if lacking or unexpected:
            raise CheckpointError(
                f"the checkpoint does not fit {type(self).__name__}: "
                + "; ".join(
                    f"{what} {_some(names)}"
                    for what, names in (("it lacks", lacking), ("it has, and the model has not,", unexpected))
                    if names
                )
            )
        if own_parts and not missing and any(re.match(r"decoder\.", name) for name in skipped):
            raise CheckpointError(
                f"the checkpoint has a head ({', '.join(self._new_parts)}) that was trained on the states of its "
                f"decoder, and {type(self).__name__} reads the encoder's; load it in the class that saved it"
            )


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.device.type == "meta" or b.device.type == "meta":  # left on disk by a device_map
        return a.device.type == b.device.type
    return torch.equal(a, b.to(a.device))


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
