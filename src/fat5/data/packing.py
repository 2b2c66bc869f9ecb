"""The planner: which windows of which documents make up each batch, from the documents' lengths alone.

One sequential pass reads the documents in the epoch's order, cuts them into windows, draws a denoiser for each, and
fills batches with them. It touches no token, so every rank and every worker runs it whole and agrees on every batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fat5.data import packing_kernels as kernels
from fat5.data.jit import read_only
from fat5.data.spans import SpanTable
from fat5.errors import ConfigError, DataError


@dataclass(frozen=True)
class Budgets:
    """Sizes of a batch.

    Attributes:
        encoder_budget: Encoder slots, at least the longest input.
        decoder_budget: Decoder slots, at least the longest target.
        max_documents: Most windows.
        look_ahead: Windows among which the last places of a batch are filled; 0 packs in order.
    """

    encoder_budget: int
    decoder_budget: int
    max_documents: int
    look_ahead: int

    @property
    def slots(self) -> int:
        """Token slots of a batch, both sides."""
        return self.encoder_budget + self.decoder_budget


class BatchPlan(NamedTuple):
    """The windows of one batch, in the order of their slots; all arrays are int64 [windows].

    Attributes:
        document: Index of the document.
        start: First token of the window inside its document.
        length: Tokens of the window.
        denoiser: Index of the denoiser.
        window: Number of the window inside its document, from 0.
        epoch: Epoch, from 0.
        input_length: Tokens of the noised input.
        target_length: Tokens of the target.
        position: Place of the document in the epoch's order.
    """

    document: np.ndarray
    start: np.ndarray
    length: np.ndarray
    denoiser: np.ndarray
    window: np.ndarray
    epoch: np.ndarray
    input_length: np.ndarray
    target_length: np.ndarray
    position: np.ndarray


@dataclass(frozen=True)
class PackingStatistics:
    """What became of the documents read so far, over all ranks.

    Attributes:
        batches: Batches planned.
        documents: Documents read, counted again in each epoch.
        windows: Windows in those batches.
        waiting_windows: Windows cut but not yet in a batch.
        skipped: Number of documents and tails left out, by reason.
        skipped_tokens: Tokens in them.
        text_tokens: Tokens of the documents in the windows, before noising.
        input_tokens: Encoder tokens, with prefixes, sentinels and EOS.
        target_tokens: Decoder tokens, with sentinels and EOS.
        encoder_fill: Share of the encoder's slots that hold a token; likewise `decoder_fill`.
        fill: Share of all slots that hold a token.
        denoiser_windows: Windows of each denoiser, by name.
    """

    batches: int
    documents: int
    windows: int
    waiting_windows: int
    skipped: Mapping[str, int]
    skipped_tokens: int
    text_tokens: int
    input_tokens: int
    target_tokens: int
    encoder_fill: float
    decoder_fill: float
    fill: float
    denoiser_windows: Mapping[str, int]


class Planner:
    """Plans batches one after the other; any two planners with equal arguments plan equal batches.

    The stream runs over the epochs without a gap: windows left over at an epoch's end go into the first batches of the
    next. After the last epoch the remaining windows fill the last batches, the very last one partly. No window is
    dropped; documents and tails of less than 2 tokens cannot be noised and are counted as skipped.

    Args:
        lengths: Tokens of each document, int64 [documents]; a memory map serves. At least one must have 2 tokens.
        table: Lengths of the noised sides.
        budgets: Sizes of a batch.
        seed: Seed of the order and of the denoisers.
        shuffle: Read the documents in a new pseudo-random order each epoch; otherwise as they are stored.
        epochs: Number of epochs; None for no end.
        concatenate: Cut rows from the documents end to end, whatever their boundaries: each row is one window, the
            longest of its denoiser, and `document`, `start` and `position` say where it begins. It may end in another
            document, of the next epoch even. Only what is left at the very end can be shorter. A row's random numbers
            hang on the document in which it begins. Documents of 1 token are used, too.

    Raises:
        DataError: There is no document of 2 tokens or more.
        ConfigError: A budget is smaller than the longest window of the table, which would then fit no batch.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        table: SpanTable,
        budgets: Budgets,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        concatenate: bool = False,
    ) -> None:
        if len(lengths) == 0 or np.max(lengths) < 2:
            raise DataError(f"none of the {len(lengths)} documents has 2 tokens or more: there is nothing to denoise")
        for side, budget, side_lengths in (
            ("encoder", budgets.encoder_budget, table.input_lengths),
            ("decoder", budgets.decoder_budget, table.target_lengths),
        ):
            needed = int(np.take_along_axis(side_lengths, table.longest[:, None], axis=1).max())
            if budget < needed:
                raise ConfigError(f"{side}_budget is {budget} tokens, but a window may have {needed} on that side")
        self._lengths = read_only(lengths, np.int64)
        self._denoisers = table.denoisers
        self._plan_batches = kernels.cut_rows if concatenate else kernels.plan_batches
        weights = np.cumsum([denoiser.weight for denoiser in table.denoisers])
        self._rules = kernels.Rules(
            input_lengths=read_only(table.input_lengths),
            target_lengths=read_only(table.target_lengths),
            longest=read_only(table.longest),
            cumulative_weights=read_only(weights / weights[-1]),
            seed=seed,
            num_epochs=-1 if epochs is None else epochs,
            shuffle=shuffle,
            encoder_budget=budgets.encoder_budget,
            decoder_budget=budgets.decoder_budget,
            max_documents=budgets.max_documents,
            look_ahead=budgets.look_ahead,
        )
        cursor = np.zeros(kernels.CURSOR_SIZE, np.int64)
        cursor[kernels.OPEN_DOCUMENT] = -1
        self._state = kernels.State(
            cursor=cursor,
            pool=np.zeros((budgets.max_documents + budgets.look_ahead, kernels.NUM_COLUMNS), np.int64),
            counters=np.zeros(kernels.NUM_COUNTERS + len(table.denoisers), np.int64),
        )
        self._plan = np.zeros((budgets.max_documents, kernels.NUM_COLUMNS), np.int64)

    def next_batch(self) -> BatchPlan | None:
        """Plan the next batch; None once the last epoch is used up."""
        size = self._plan_batches(self._lengths, self._rules, self._state, self._plan, 1)
        return BatchPlan(*self._plan[:size].T.copy()) if size else None

    def __iter__(self) -> Iterator[BatchPlan]:
        while (plan := self.next_batch()) is not None:
            yield plan

    def skip(self, num_batches: int) -> None:
        """Plan `num_batches` batches, or all that are left, without returning them (millions of documents a second)."""
        if num_batches > 0:
            self._plan_batches(self._lengths, self._rules, self._state, self._plan, num_batches)

    @property
    def batches_planned(self) -> int:
        """Number of batches planned since the start of the stream."""
        return int(self._state.counters[kernels.BATCHES])

    def state_dict(self) -> dict[str, np.ndarray]:
        """Return a copy of the memory: a few hundred windows, whatever the size of the corpus."""
        return {name: array.copy() for name, array in self._state._asdict().items()}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from a `state_dict` taken by a planner with equal arguments.

        Raises:
            DataError: The arrays' shapes show that the arguments were others.
        """
        for name, array in self._state._asdict().items():
            if name not in state or state[name].shape != array.shape:
                got = "is missing" if name not in state else f"has shape {state[name].shape}"
                raise DataError(f"planner state: {name} {got}, expected {array.shape}; were other settings used?")
            array[:] = state[name]

    def statistics(self) -> PackingStatistics:
        """Sum up the batches planned so far."""
        counters = self._state.counters.tolist()
        batches, inputs, targets = (
            counters[place] for place in (kernels.BATCHES, kernels.INPUT_TOKENS, kernels.TARGET_TOKENS)
        )
        encoder_slots, decoder_slots = batches * self._rules.encoder_budget, batches * self._rules.decoder_budget
        windows = counters[kernels.NUM_COUNTERS :]
        return PackingStatistics(
            batches=batches,
            documents=counters[kernels.DOCUMENTS],
            windows=sum(windows),
            waiting_windows=int(self._state.cursor[kernels.WAITING]),
            skipped={
                "documents of fewer than 2 tokens": counters[kernels.SHORT_DOCUMENTS],
                "last tokens of a document, left alone by its windows": counters[kernels.SHORT_TAILS],
            },
            skipped_tokens=counters[kernels.SKIPPED_TOKENS],
            text_tokens=counters[kernels.TEXT_TOKENS],
            input_tokens=inputs,
            target_tokens=targets,
            encoder_fill=inputs / max(encoder_slots, 1),
            decoder_fill=targets / max(decoder_slots, 1),
            fill=(inputs + targets) / max(encoder_slots + decoder_slots, 1),
            denoiser_windows={denoiser.name: count for denoiser, count in zip(self._denoisers, windows, strict=True)},
        )
