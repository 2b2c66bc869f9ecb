"""A corpus from token files or from text, without the package `datasets`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.registry import UsageError
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.special_tokens import SpecialTokens
from fat5.data.text_files import read_file
from fat5.data.token_dataset import TokenDataset
from fat5.data.tokenizer import backend_of, load_tokenizer
from fat5.errors import nearest_path

_BATCH = 1000


@dataclass(frozen=True)
class Corpus:
    """Training and validation batches of rows, the same for every model.

    Attributes:
        train: Batches without end.
        validation: Batches of one epoch.
        tokens: Tokens of the training text.
        vocab_size: Rows that a model needs, a multiple of 64.
    """

    train: DenoisingDataset
    validation: DenoisingDataset
    tokens: int
    vocab_size: int


def open_corpus(train: Path, validation: Path, tokenizer: Path, config: DenoisingConfig) -> Corpus:
    """Open token files (folders), or tokenise text files (.jsonl, .txt, .parquet; .jsonl and .txt also .gz).

    Raises:
        UsageError: A path does not exist.
    """
    for path in (train, validation, tokenizer):
        if not path.exists():
            raise UsageError(f"{path} does not exist{nearest_path(path)}")
    loaded = load_tokenizer(tokenizer)
    prefixes = list(dict.fromkeys(denoiser.prefix for denoiser in config.mixture if denoiser.prefix is not None))
    special = SpecialTokens.from_tokenizer(loaded, prefixes)
    text, held_out = _source(train, loaded), _source(validation, loaded)
    return Corpus(
        train=DenoisingDataset(text, special, config),
        validation=DenoisingDataset(held_out, special, config, shuffle=False, epochs=1),
        tokens=int(text.lengths.sum()),
        vocab_size=-(-len(loaded) // 64) * 64,
    )


def _source(path: Path, tokenizer: Any) -> TokenDataset:
    if path.is_dir():
        return TokenDataset(path)
    backend, documents, texts = backend_of(tokenizer), [], []

    def encode() -> None:
        for encoding in backend.encode_batch_fast(texts, add_special_tokens=False):
            if len(encoding.ids) > 1:
                documents.append(encoding.ids)
        texts.clear()

    for text in read_file(path, documents="paragraph", text_column="text"):
        texts.append(text)
        if len(texts) == _BATCH:
            encode()
    encode()
    return TokenDataset.from_lists(documents, vocab_size=len(tokenizer))
