"""Filling masked text: what a pretrained model says in the place of each sentinel."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from fat5.data.special_tokens import sentinel_token
from fat5.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from fat5.models import FAT5ForConditionalGeneration

_SENTINEL = re.compile(r"\s?<extra_id_(\d+)>")


@torch.no_grad()
def fill_masks(
    model: FAT5ForConditionalGeneration,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    prefix: str = "[R]",
    max_new_tokens: int = 24,
) -> str:
    """Return `text` with each `<extra_id_i>` replaced by what the model generates for it, greedily.

    A masked span takes the space before it along, as in training, where words carry their leading space.

    Args:
        model: A pretrained model.
        tokenizer: Its tokenizer.
        text: Text with the sentinels `<extra_id_0>`, `<extra_id_1>`, ... in that order.
        prefix: The denoiser's prefix token; empty for none.
        max_new_tokens: Most tokens to generate for all spans together.

    Raises:
        DataError: The text has no sentinel, or they do not count up from 0.
    """
    numbers = [int(number) for number in _SENTINEL.findall(text)]
    if not numbers or numbers != list(range(len(numbers))):
        raise DataError(f"expected the sentinels {sentinel_token(0)}, {sentinel_token(1)}, ... in order in {text!r}")
    compact = _SENTINEL.sub(lambda match: match.group().lstrip(), text)
    inputs = tokenizer(prefix + compact, return_tensors="pt").to(model.device)
    model.eval()
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)[0]
    return _SENTINEL.sub(lambda match: _span(tokenizer, output.tolist(), int(match.group(1))), text)


def _span(tokenizer: PreTrainedTokenizerBase, output: list[int], number: int) -> str:
    """Return the text behind sentinel `number` in the output, up to the next special token."""
    sentinel = tokenizer.convert_tokens_to_ids(sentinel_token(number))
    if sentinel not in output:
        return ""
    tokens = []
    for token in output[output.index(sentinel) + 1 :]:
        if token in tokenizer.all_special_ids:
            break
        tokens.append(token)
    return str(tokenizer.decode(tokens))
