"""The special tokens of a FAT5 tokenizer, and how the rest of the package finds their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fat5.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD_TOKEN = "<pad>"
EOS_TOKEN = "</s>"
UNK_TOKEN = "<unk>"
BOS_TOKEN = "<s>"
PREFIX_TOKENS = ("[R]", "[S]", "[X]")
NUM_SENTINELS = 256


def sentinel_token(index: int) -> str:
    """Return the text of sentinel number `index`, in T5's spelling."""
    return f"<extra_id_{index}>"


def special_token_texts() -> list[str]:
    """Return every special token of a tokenizer trained by FAT5, in id order from 0.

    Padding is 0, the end of sequence 1, as in T5; the sentinels ascend and come last.
    """
    sentinels = [sentinel_token(i) for i in range(NUM_SENTINELS)]
    return [PAD_TOKEN, EOS_TOKEN, UNK_TOKEN, BOS_TOKEN, *PREFIX_TOKENS, *sentinels]


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens that denoising and packing write.

    Ids are looked up by token, never computed from the vocabulary's size: T5's own sentinels descend from the end of
    its vocabulary, FAT5's ascend from its start, and both work.

    Attributes:
        pad: Id of the padding token, which also starts every decoder sequence.
        eos: Id of the end-of-sequence token.
        bos: Id of the beginning-of-sequence token, or None if the tokenizer has none.
        prefixes: Id of each denoiser prefix, by its text.
        sentinels: Ids of `<extra_id_0>`, `<extra_id_1>`, ... in that order; their number caps the spans of a document.
    """

    pad: int
    eos: int
    bos: int | None
    prefixes: Mapping[str, int]
    sentinels: tuple[int, ...]

    @classmethod
    def from_tokenizer(
        cls, tokenizer: PreTrainedTokenizerBase, prefixes: Sequence[str] = PREFIX_TOKENS
    ) -> SpecialTokens:
        """Look the special tokens up in `tokenizer`.

        Args:
            tokenizer: Any tokenizer of Transformers; T5, mT5 and UMT5 ones are understood.
            prefixes: Texts of the denoiser prefixes needed; empty for plain span corruption.

        Raises:
            DataError: The tokenizer has no padding token, no end-of-sequence token, no sentinel, or lacks a prefix.
        """
        vocabulary = tokenizer.get_vocab()
        name = tokenizer.name_or_path or "in memory"
        if tokenizer.pad_token_id is None or tokenizer.eos_token_id is None:
            missing = "padding" if tokenizer.pad_token_id is None else "end-of-sequence"
            raise DataError(f"the tokenizer {name!r} has no {missing} token; an encoder-decoder model needs one")
        sentinels = _sentinel_ids(vocabulary)
        if not sentinels:
            raise DataError(
                f"the tokenizer {name!r} has no sentinel {sentinel_token(0)!r}, which span corruption needs; train one "
                "with `fat5 train-tokenizer`, or add sentinels with tokenizer.add_special_tokens"
            )
        lacking = [prefix for prefix in prefixes if prefix not in vocabulary]
        if lacking:
            raise DataError(
                f"the tokenizer {name!r} has no denoiser prefix {', '.join(map(repr, lacking))}; use denoisers without "
                "a prefix, or add the tokens with tokenizer.add_special_tokens"
            )
        return cls(
            pad=tokenizer.pad_token_id,
            eos=tokenizer.eos_token_id,
            bos=tokenizer.bos_token_id,
            prefixes={prefix: vocabulary[prefix] for prefix in prefixes},
            sentinels=sentinels,
        )


def _sentinel_ids(vocabulary: Mapping[str, int]) -> tuple[int, ...]:
    # mT5's SentencePiece model stores its sentinels as pieces that begin with the word mark.
    for mark in ("", "\u2581"):
        ids: list[int] = []
        while (token := mark + sentinel_token(len(ids))) in vocabulary:
            ids.append(vocabulary[token])
        if ids:
            return tuple(ids)
    return ()
