"""Filling masked text: what a pretrained model says in the place of each sentinel."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import torch

from fat5.data.special_tokens import PREFIX_TOKENS, SpecialTokens, sentinel_token
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
    prefix: str | None = None,
    max_new_tokens: int = 24,
) -> str:
    """Return `text` with each `<extra_id_i>` replaced by what the model generates for it, greedily.

    A masked span takes the space before it along, as in training, where words carry their leading space.

    Args:
        model: A pretrained model.
        tokenizer: Its tokenizer.
        text: Text with the sentinels `<extra_id_0>`, `<extra_id_1>`, ... in that order.
        prefix: See `masked_input`.
        max_new_tokens: Most tokens to generate for all spans together.

    Raises:
        DataError: The text has no sentinel, or they do not count up from 0.
    """
    inputs = tokenizer(masked_input(tokenizer, text, prefix), return_tensors="pt").to(model.device)
    model.eval()
    output = model.generate(**inputs, do_sample=False, max_new_tokens=max_new_tokens)[0]
    return fill_sentinels(tokenizer, text, output.tolist())


def has_sentinels(text: str) -> bool:
    """Return whether there is something to fill in."""
    return _SENTINEL.search(text) is not None


def masked_input(tokenizer: PreTrainedTokenizerBase, text: str, prefix: str | None = None) -> str:
    """Return what the encoder reads for a text with sentinels.

    Args:
        tokenizer: The model's tokenizer.
        text: The text.
        prefix: The denoiser's prefix token, empty for none; by default [R] where the tokenizer has it.

    Raises:
        DataError: The text has no sentinel, they do not count up from 0, or the tokenizer has not so many.
    """
    numbers = [int(number) for number in _SENTINEL.findall(text)]
    if not numbers or numbers != list(range(len(numbers))):
        raise DataError(f"expected the sentinels {sentinel_token(0)}, {sentinel_token(1)}, ... in order in {text!r}")
    known = len(SpecialTokens.from_tokenizer(tokenizer, prefixes=()).sentinels)
    if len(numbers) > known:
        raise DataError(f"got {len(numbers)} sentinels; the tokenizer has {known}")
    if prefix is None:
        prefix = PREFIX_TOKENS[0] if PREFIX_TOKENS[0] in tokenizer.all_special_tokens else ""
    return prefix + _SENTINEL.sub(lambda match: match.group().lstrip(), text)


def fill_sentinels(tokenizer: PreTrainedTokenizerBase, text: str, output: list[int]) -> str:
    """Return `text` with each sentinel replaced by what stands behind it in the token ids `output`."""
    sentinels = SpecialTokens.from_tokenizer(tokenizer, prefixes=()).sentinels
    ends = {*sentinels, *tokenizer.all_special_ids}

    def span(match: re.Match[str]) -> str:
        number = int(match.group(1))
        if sentinels[number] not in output:
            return ""
        tokens = []
        for token in output[output.index(sentinels[number]) + 1 :]:
            if token in ends:
                break
            tokens.append(token)
        filled = str(tokenizer.decode(tokens))
        # SentencePiece tokenizers lose the space in front of a first word.
        lost = filled and not filled[0].isspace() and match.group()[0].isspace() and not _keeps_leading_space(tokenizer)
        return f"{match.group()[0]}{filled}" if lost else filled

    return _SENTINEL.sub(span, text)


def _keeps_leading_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    return str(tokenizer.decode(tokenizer(" a", add_special_tokens=False).input_ids)).startswith(" ")
