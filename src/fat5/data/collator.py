"""The collator: writes the windows of a plan, noised, straight from the flat token buffers into a batch of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from fat5.data.counter_random import draw, draw_below
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.jit import jit, read_only
from fat5.data.packing import BatchPlan, Budgets
from fat5.data.spans import SpanTable
from fat5.data.special_tokens import SpecialTokens
from fat5.data.window_tokens import WindowTokens
from fat5.errors import ConfigError, nearest

Allocate = Callable[[int], np.ndarray]

IGNORE_INDEX = -100
"""Label of the slots that hold no target token; the losses leave it out."""


class _Windows(NamedTuple):
    """Where each window comes from and goes to; int64 [windows], `position` is its first token in the shard."""

    position: np.ndarray
    length: np.ndarray
    noise_tokens: np.ndarray
    spans: np.ndarray
    document: np.ndarray
    window: np.ndarray
    epoch: np.ndarray
    prefix: np.ndarray
    with_sentinels: np.ndarray
    input_start: np.ndarray
    target_start: np.ndarray


class _Buffers(NamedTuple):
    """The batch's flat arrays, int64 [slots]."""

    input_ids: np.ndarray
    decoder_input_ids: np.ndarray
    labels: np.ndarray


@jit
def random_segments(num_items: int, num_segments: int, key: np.uint64, counter: int, segments: np.ndarray) -> None:
    """Write the sizes of `num_segments` non-empty segments of `num_items` items; all such divisions are equally likely.

    Selection sampling (Knuth, TAOCP 2, 3.4.2 S) of num_segments - 1 cuts among the num_items - 1 places between items;
    place i uses draw number `counter` + i.
    """
    segment = 0
    size = 1
    for place in range(num_items - 1):
        cuts_left = num_segments - 1 - segment
        if cuts_left == 0:
            size += num_items - 1 - place
            break
        if draw_below(key, counter + place, num_items - 1 - place) < cuts_left:
            segments[segment] = size
            segment += 1
            size = 0
        size += 1
    segments[segment] = size


@jit
def _write_windows(
    tokens: np.ndarray, windows: _Windows, seed: int, sentinels: np.ndarray, eos: int, start: int, buffers: _Buffers
) -> None:
    """Noise each window and write its input, its labels, and its labels shifted right behind `start`.

    Number 0 of the window's stream drew its denoiser; the next ones cut the hidden tokens into spans, then the others.
    """
    input_ids, decoder_input_ids, labels = buffers
    hidden = np.empty(len(sentinels) + 1, np.int64)
    clean = np.empty(len(sentinels) + 1, np.int64)
    for index in range(len(windows.position)):
        epoch_key = draw(np.uint64(seed), windows.epoch[index])
        key = draw(draw(epoch_key, windows.document[index]), windows.window[index])
        noise_tokens = windows.noise_tokens[index]
        spans = windows.spans[index]
        random_segments(noise_tokens, spans, key, 1, hidden)
        random_segments(windows.length[index] - noise_tokens, spans, key, noise_tokens, clean)
        source = windows.position[index]
        slot = windows.input_start[index]
        target = first = windows.target_start[index]
        if windows.prefix[index] >= 0:
            input_ids[slot] = windows.prefix[index]
            slot += 1
        for span in range(spans):
            for _ in range(clean[span]):
                input_ids[slot] = tokens[source]
                slot += 1
                source += 1
            if windows.with_sentinels[index]:
                input_ids[slot] = sentinels[span]
                labels[target] = sentinels[span]
                slot += 1
                target += 1
            for _ in range(hidden[span]):
                labels[target] = tokens[source]
                target += 1
                source += 1
        input_ids[slot] = eos
        labels[target] = eos
        decoder_input_ids[first] = start
        for place in range(first, target):
            decoder_input_ids[place + 1] = labels[place]


class DenoisingCollator:
    """Turns plans into batches; a pure function of the plan, the data, the mixture and the seed.

    All layouts give `labels` (-100 where there is no target), `decoder_input_ids` (the labels shifted right inside
    each window, the pad id first), `denoiser_ids` (-1 on empty slots), and the Python ints `num_input_tokens` and
    `num_target_tokens` (prefixes, sentinels and EOS included, padding not). Token ids are int64; padding is the pad id.

    - packed: `input_ids` [encoder_budget], `labels` and `decoder_input_ids` [decoder_budget], `cu_seqlens` and
      `decoder_cu_seqlens` int32 [max_documents + 1] (the tail repeats the last offset), `denoiser_ids`
      [max_documents], `max_seqlen` and `decoder_max_seqlen` (the configured maxima, so that shapes stay static).
    - padded and concat: `input_ids` and `attention_mask` [batch_size, input length], `labels` and `decoder_input_ids`
      [batch_size, target length], `denoiser_ids` [batch_size]. A last, partial batch has fewer rows.

    Args:
        windows: Finds the windows' tokens.
        special_tokens: Ids of the special tokens; every prefix of the mixture must be among them.
        table: Lengths of the noised sides, with the mixture.
        config: Layout, longest sides and seed.
        budgets: Sizes of a batch.

    Raises:
        ConfigError: A denoiser's prefix is not among the special tokens.
    """

    def __init__(
        self,
        windows: WindowTokens,
        special_tokens: SpecialTokens,
        table: SpanTable,
        config: DenoisingConfig,
        budgets: Budgets,
    ) -> None:
        self._config = config
        self._budgets = budgets
        self._table = table
        self._special_tokens = special_tokens
        self._sentinels = read_only(np.array(special_tokens.sentinels, dtype=np.int64))
        self._prefixes = np.array([_prefix_id(denoiser.prefix, special_tokens) for denoiser in table.denoisers])
        self._with_sentinels = np.array([denoiser.use_sentinels for denoiser in table.denoisers])
        self._windows = windows
        self._layout = self._packed if config.layout == "packed" else self._padded

    def __call__(self, plan: BatchPlan, allocate: Allocate | None = None) -> dict[str, Any]:
        """Write the batch of `plan` in the configured layout.

        Args:
            plan: The windows.
            allocate: Where the large arrays lie: returns an int64 array of a given size; new memory if None.
        """
        batch = self._layout(plan, allocate or _new_memory)
        batch["num_input_tokens"] = int(plan.input_length.sum())
        batch["num_target_tokens"] = int(plan.target_length.sum())
        return batch

    def _packed(self, plan: BatchPlan, allocate: Allocate) -> dict[str, Any]:
        slots = self._budgets.max_documents
        cu_seqlens = _offsets(plan.input_length, slots)
        decoder_cu_seqlens = _offsets(plan.target_length, slots)
        buffers = self._buffers(self._budgets.encoder_budget, self._budgets.decoder_budget, allocate)
        self._write(plan, cu_seqlens, decoder_cu_seqlens, buffers)
        denoiser_ids = np.full(slots, -1, dtype=np.int64)
        denoiser_ids[: len(plan.denoiser)] = plan.denoiser
        return {
            "input_ids": torch.from_numpy(buffers.input_ids),
            "cu_seqlens": torch.from_numpy(cu_seqlens.astype(np.int32)),
            "max_seqlen": self._config.max_input_length,
            "decoder_input_ids": torch.from_numpy(buffers.decoder_input_ids),
            "labels": torch.from_numpy(buffers.labels),
            "decoder_cu_seqlens": torch.from_numpy(decoder_cu_seqlens.astype(np.int32)),
            "decoder_max_seqlen": self._config.max_target_length,
            "denoiser_ids": torch.from_numpy(denoiser_ids),
        }

    def _padded(self, plan: BatchPlan, allocate: Allocate) -> dict[str, Any]:
        rows = len(plan.document)
        input_width, target_width = self._config.max_input_length, self._config.max_target_length
        if self._config.pad_to == "longest":
            input_width, target_width = int(plan.input_length.max()), int(plan.target_length.max())
        buffers = self._buffers(rows * input_width, rows * target_width, allocate)
        self._write(plan, np.arange(rows) * input_width, np.arange(rows) * target_width, buffers)
        attention_mask = np.arange(input_width) < plan.input_length[:, None]
        return {
            "input_ids": torch.from_numpy(buffers.input_ids).view(rows, input_width),
            "attention_mask": torch.from_numpy(attention_mask.astype(np.int64)),
            "decoder_input_ids": torch.from_numpy(buffers.decoder_input_ids).view(rows, target_width),
            "labels": torch.from_numpy(buffers.labels).view(rows, target_width),
            "denoiser_ids": torch.from_numpy(plan.denoiser),
        }

    def _buffers(self, input_slots: int, target_slots: int, allocate: Allocate) -> _Buffers:
        buffers = _Buffers(*(allocate(size) for size in (input_slots, target_slots, target_slots)))
        for array, value in zip(
            buffers, (self._special_tokens.pad, self._special_tokens.pad, IGNORE_INDEX), strict=True
        ):
            array.fill(value)
        return buffers

    def _write(self, plan: BatchPlan, input_starts: np.ndarray, target_starts: np.ndarray, buffers: _Buffers) -> None:
        for here, tokens, position in self._windows.locate(plan):
            document, length, denoiser = plan.document[here], plan.length[here], plan.denoiser[here]
            windows = _Windows(
                position=position,
                length=length,
                noise_tokens=self._table.noise_tokens[denoiser, length].astype(np.int64),
                spans=self._table.spans[denoiser, length].astype(np.int64),
                document=document,
                window=plan.window[here],
                epoch=plan.epoch[here],
                prefix=self._prefixes[denoiser],
                with_sentinels=self._with_sentinels[denoiser],
                input_start=input_starts[here],
                target_start=target_starts[here],
            )
            special = self._special_tokens
            _write_windows(tokens, windows, self._config.seed, self._sentinels, special.eos, special.pad, buffers)


def _new_memory(size: int) -> np.ndarray:
    return np.empty(size, dtype=np.int64)


def _offsets(lengths: np.ndarray, slots: int) -> np.ndarray:
    offsets = np.zeros(slots + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1 : len(lengths) + 1])
    offsets[len(lengths) + 1 :] = offsets[len(lengths)]
    return offsets


def _prefix_id(prefix: str | None, special_tokens: SpecialTokens) -> int:
    if prefix is None:
        return -1
    if prefix not in special_tokens.prefixes:
        known = ", ".join(special_tokens.prefixes) or "none"
        hint = nearest(prefix, special_tokens.prefixes)
        raise ConfigError(f"the tokenizer's special tokens have no denoiser prefix {prefix!r}{hint} (known: {known})")
    return special_tokens.prefixes[prefix]
