"""Texts to token ids at the speed of the tokenizers library, for pretraining data: no text becomes a special token."""

from __future__ import annotations

import hashlib
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from tokenizers import Tokenizer

from fat5.data.worker_processes import end_when_parent_is_gone

# A Unicode noncharacter before a special token's text: a spelling that no text has.
_UNREACHABLE = "\uffff"


@dataclass(frozen=True)
class EncodedDocuments:
    """The documents of one batch that go to one split.

    Attributes:
        tokens: Token ids of all documents, one after the other.
        lengths: Number of tokens of each document, int64.
        text_bytes: Bytes of their text in UTF-8.
        skipped: Number of documents left out, by reason.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    text_bytes: int
    skipped: dict[str, int]


@dataclass(frozen=True)
class EncoderSettings:
    """What `TextEncoder` needs, in a form that travels to another process.

    Attributes:
        tokenizer_json: The tokenizer, as `tokenizers.Tokenizer.to_str` writes it.
        dtype: NumPy name of the type of token ids.
        min_tokens: Documents with fewer tokens are skipped.
        validation_fraction: Share of documents, chosen by a hash of their text, that goes to validation.
    """

    tokenizer_json: str
    dtype: str
    min_tokens: int
    validation_fraction: float


class TextEncoder:
    """Encodes batches of documents without special tokens, and sorts them into training and validation."""

    def __init__(self, settings: EncoderSettings) -> None:
        self._settings = settings
        self._backend = Tokenizer.from_str(plain_text_json(settings.tokenizer_json))
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    def encode(self, texts: Sequence[str]) -> list[EncodedDocuments]:
        """Return the kept documents of `texts`, in order: one entry a split, training first."""
        settings = self._settings
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [encoding.ids for encoding in encodings]
        raw = [text.encode() for text in texts]
        split_of = [self._split(text) for text in raw]
        result = []
        for split in range(2 if settings.validation_fraction > 0 else 1):
            kept: list[int] = []
            skipped: dict[str, int] = {}
            for i in (i for i, s in enumerate(split_of) if s == split):
                reason = self._reason_to_skip(texts[i], len(ids[i]))
                if reason:
                    skipped[reason] = skipped.get(reason, 0) + 1
                else:
                    kept.append(i)
            lengths = np.fromiter((len(ids[i]) for i in kept), dtype=np.int64, count=len(kept))
            tokens = np.fromiter(
                chain.from_iterable(ids[i] for i in kept), dtype=settings.dtype, count=int(lengths.sum())
            )
            result.append(EncodedDocuments(tokens, lengths, sum(len(raw[i]) for i in kept), skipped))
        return result

    def _reason_to_skip(self, text: str, num_tokens: int) -> str | None:
        if not text or text.isspace() or num_tokens == 0:
            return "empty"
        return "fewer than min_tokens" if num_tokens < self._settings.min_tokens else None

    def _split(self, raw: bytes) -> int:
        if self._settings.validation_fraction <= 0:
            return 0
        draw = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") / 2**64
        return int(draw < self._settings.validation_fraction)


def plain_text_json(tokenizer_json: str) -> str:
    """Return the tokenizer with its special tokens out of the reach of text; all ids stay.

    `split_special_tokens` alone is not enough: a Unigram model, such as T5's, holds `</s>` and the sentinels as pieces
    and finds them in text again. Here their pieces get a spelling that no text has, and merges into them are dropped.
    """
    state = json.loads(tokenizer_json)
    special = {token["content"] for token in state["added_tokens"] if token["special"]}

    def hidden(piece: str) -> str:
        return _UNREACHABLE + piece if piece in special else piece

    for token in state["added_tokens"]:
        token["content"] = hidden(token["content"])
    model = state["model"]
    if isinstance(model["vocab"], dict):
        model["vocab"] = {hidden(piece): index for piece, index in model["vocab"].items()}
    else:
        model["vocab"] = [[hidden(piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") is not None:
        model["unk_token"] = hidden(model["unk_token"])
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if "".join(pair) not in special and not special.intersection(pair)]
    state["post_processor"] = None
    return json.dumps(state)


_encoder: TextEncoder | None = None


def start_worker(settings: EncoderSettings) -> None:
    """Prepare this process to encode batches; the initialiser of a process pool."""
    global _encoder
    # One process a core already: threads of the tokenizers library would only fight over them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl+C reaches every process of the terminal; the parent alone answers it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_when_parent_is_gone()
    _encoder = TextEncoder(settings)


def encode_in_worker(texts: Sequence[str]) -> list[EncodedDocuments]:
    """Encode one batch in a process prepared by `start_worker`."""
    if _encoder is None:
        raise RuntimeError("start_worker was not called in this process")
    return _encoder.encode(texts)
