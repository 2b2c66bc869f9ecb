"""The data of a run: tokenizer, training batches and evaluation set, checked against each other before any work."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.packing import Budgets
from fat5.data.pretokenize import TOKENIZER_FOLDER
from fat5.data.special_tokens import SpecialTokens
from fat5.data.streaming_dataset import StreamingDataset
from fat5.data.text_stream import StreamConfig
from fat5.data.token_dataset import TokenDataset
from fat5.data.tokenizer import load_tokenizer
from fat5.errors import ConfigError
from fat5.training.config import DataConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RunData(NamedTuple):
    """What a run reads.

    Attributes:
        tokenizer: Saved with every checkpoint.
        special_tokens: Its special ids.
        train: The text of training: token files, or the sources of a stream.
        validation: The held-out token files, or None.
        denoising: The settings with the batch sizes that the training text asked for, used on both.
        budgets: Sizes of a batch.
    """

    tokenizer: PreTrainedTokenizerBase
    special_tokens: SpecialTokens
    train: TokenDataset | StreamConfig
    validation: TokenDataset | None
    denoising: DenoisingConfig
    budgets: Budgets

    @property
    def slots(self) -> int:
        """Token slots of a batch, both sides."""
        return self.budgets.slots

    @property
    def num_tokens(self) -> int | None:
        """Tokens of the training text; None for a stream, which is not counted ahead."""
        return None if isinstance(self.train, StreamConfig) else self.train.manifest.tokens

    @property
    def summary(self) -> str:
        """The training text in a few words."""
        if isinstance(self.train, StreamConfig):
            count = len(self.train.sources)
            return f"a stream of {count} source{'s' if count > 1 else ''}"
        return f"{self.train.manifest.documents:,} documents, {self.train.manifest.tokens:,} tokens"

    def describe(self) -> dict[str, Any]:
        """Return what tells the training text from another: counts of token files, the fingerprint of a stream."""
        if isinstance(self.train, StreamConfig):
            return {"stream": self._streamed(self.train).fingerprint}
        return {"documents": self.train.manifest.documents, "tokens": self.train.manifest.tokens}

    def training_set(
        self, *, rank: int = 0, world_size: int = 1, start_batch: int = 0
    ) -> DenoisingDataset | StreamingDataset:
        """Return this rank's training batches, without end.

        Args:
            rank: This process's number.
            world_size: Number of processes.
            start_batch: Batches of token files to leave out at the start; the loader of a stream takes a state instead.
        """
        if isinstance(self.train, StreamConfig):
            return self._streamed(self.train, rank=rank, world_size=world_size)
        return DenoisingDataset(
            self.train, self.special_tokens, self.denoising, rank=rank, world_size=world_size, start_batch=start_batch
        )

    def _streamed(self, stream: StreamConfig, **share: int) -> StreamingDataset:
        return StreamingDataset(stream, self.tokenizer, self.denoising, **share)

    def evaluation_set(self, *, rank: int = 0, world_size: int = 1) -> DenoisingDataset | None:
        """Return this rank's evaluation batches, always the same, or None without validation text."""
        if self.validation is None:
            return None
        return DenoisingDataset(
            self.validation,
            self.special_tokens,
            self.denoising,
            shuffle=False,
            epochs=1,
            rank=rank,
            world_size=world_size,
        )


def open_run_data(data: DataConfig, denoising: DenoisingConfig) -> RunData:
    """Open tokenizer and text and check that they belong together.

    Raises:
        FileNotFoundError: A folder or file is missing.
        DataError: Text is damaged, empty or made with another tokenizer; the tokenizer lacks a special token.
        ConfigError: A size does not fit, or no tokenizer is named and none lies beside the token files.
    """
    train = data.stream if data.stream is not None else TokenDataset(str(data.train))
    validation = TokenDataset(data.validation) if data.validation is not None else None
    tokenizer = load_tokenizer(data.tokenizer if data.tokenizer is not None else _tokenizer_beside(data))
    for dataset in (train, validation):
        if isinstance(dataset, TokenDataset):
            dataset.check_tokenizer(tokenizer)
    prefixes = list(dict.fromkeys(denoiser.prefix for denoiser in denoising.mixture if denoiser.prefix is not None))
    special_tokens = SpecialTokens.from_tokenizer(tokenizer, prefixes)
    if isinstance(train, StreamConfig):
        budgets = StreamingDataset(train, tokenizer, denoising).budgets
    else:
        budgets = DenoisingDataset(train, special_tokens, denoising).budgets
    if denoising.layout == "packed":
        # The training text sets the sizes, so that evaluation runs in the same shapes.
        denoising = dataclasses.replace(
            denoising, decoder_budget=budgets.decoder_budget, max_documents=budgets.max_documents
        )
    return RunData(tokenizer, special_tokens, train, validation, denoising, budgets)


def _tokenizer_beside(data: DataConfig) -> Path:
    token_files = data.train if data.train is not None else data.validation
    if token_files is None:
        raise ConfigError("data.tokenizer is null, and a stream has none beside it; give its folder or hub name")
    folders = [Path(token_files) / TOKENIZER_FOLDER, Path(token_files).resolve().parent / TOKENIZER_FOLDER]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise ConfigError(
        f"data.tokenizer is null and there is no tokenizer beside {token_files}; give its folder or hub name"
    )
