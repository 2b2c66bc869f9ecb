"""The data of a run: tokenizer, training stream and evaluation set, checked against each other before any work."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fat5.data.denoising_config import DenoisingConfig
from fat5.data.denoising_dataset import DenoisingDataset
from fat5.data.pretokenize import TOKENIZER_FOLDER
from fat5.data.special_tokens import SpecialTokens
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
        train: The token files of training.
        validation: The held-out token files, or None.
        denoising: The settings with the batch sizes that the training text asked for, used on both.
    """

    tokenizer: PreTrainedTokenizerBase
    special_tokens: SpecialTokens
    train: TokenDataset
    validation: TokenDataset | None
    denoising: DenoisingConfig

    @property
    def slots(self) -> int:
        """Token slots of a batch, both sides."""
        budgets = DenoisingDataset(self.train, self.special_tokens, self.denoising).budgets
        return budgets.encoder_budget + budgets.decoder_budget

    def training_stream(self, *, rank: int = 0, world_size: int = 1, start_batch: int = 0) -> DenoisingDataset:
        """Return the endless stream of this rank's training batches, from its batch `start_batch` on."""
        return DenoisingDataset(
            self.train, self.special_tokens, self.denoising, rank=rank, world_size=world_size, start_batch=start_batch
        )

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
    """Open tokenizer and token files and check that they belong together.

    Raises:
        FileNotFoundError: A folder is missing.
        DataError: Token files are damaged, empty or made with another tokenizer; the tokenizer lacks a special token.
        ConfigError: A size does not fit.
    """
    train = TokenDataset(data.train)
    validation = TokenDataset(data.validation) if data.validation is not None else None
    tokenizer = load_tokenizer(data.tokenizer if data.tokenizer is not None else _tokenizer_beside(data.train))
    for dataset in (train, validation):
        if dataset is not None:
            dataset.check_tokenizer(tokenizer)
    prefixes = list(dict.fromkeys(denoiser.prefix for denoiser in denoising.mixture if denoiser.prefix is not None))
    special_tokens = SpecialTokens.from_tokenizer(tokenizer, prefixes)
    budgets = DenoisingDataset(train, special_tokens, denoising).budgets
    if denoising.layout == "packed":
        # The training text sets the sizes, so that evaluation runs in the same shapes.
        denoising = dataclasses.replace(
            denoising, decoder_budget=budgets.decoder_budget, max_documents=budgets.max_documents
        )
    return RunData(tokenizer, special_tokens, train, validation, denoising)


def _tokenizer_beside(train: str) -> Path:
    folders = [Path(train) / TOKENIZER_FOLDER, Path(train).resolve().parent / TOKENIZER_FOLDER]
    for folder in folders:
        if folder.is_dir():
            return folder
    raise ConfigError(f"data.tokenizer is null and there is no tokenizer beside {train}; give its folder or hub name")
