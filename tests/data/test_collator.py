"""Batches against a plain Python implementation of the same denoisers, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from fat5.data.budgets import resolve_budgets
from fat5.data.collator import DenoisingCollator
from fat5.data.denoisers import PRESETS, Denoiser
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.packing import BatchPlan, Planner
from fat5.data.spans import SpanTable
from fat5.data.token_dataset import TokenDataset
from fat5.data.window_tokens import StoredWindows
from fat5.errors import ConfigError
from tests.data import denoising_reference as reference

ODD_MIXTURE = [
    Denoiser(0.5, 1.0, "[X]", name="as many spans as fit"),
    Denoiser(0.9, 2.0, name="hardly any clean token"),
    Denoiser(0.02, 5.0, "[R]", name="hardly any noise"),
    Denoiser(0.75, None, "[S]", use_sentinels=False, name="prefix, no sentinel"),
    Denoiser(0.4, None, name="sentinel, no prefix"),
]
PACKED = DenoisingConfig(
    max_input_length=96, max_target_length=80, encoder_budget=512, max_documents=12, look_ahead=16, seed=3
)
PADDED = DenoisingConfig(layout="padded", max_input_length=96, max_target_length=80, batch_size=6, seed=3)


class Shards:
    """Documents split over several flat buffers, as a corpus of several files has them."""

    def __init__(self, *parts: TokenDataset) -> None:
        self.lengths = np.concatenate([part.lengths for part in parts])
        self._parts = parts

    def flat_shards(self) -> list[tuple[np.ndarray, np.ndarray]]:
        return [shard for part in self._parts for shard in part.flat_shards()]


def documents(lengths: Sequence[int], vocab_size: int = 32_768, seed: int = 0) -> list[list[int]]:
    # Ids between the special tokens of both sentinel orders, so that text is never taken for a sentinel.
    return [
        np.random.default_rng((seed, n)).integers(300, vocab_size - 1500, k).tolist() for n, k in enumerate(lengths)
    ]


TEXTS = documents([0, 1, 2, 3, 5, 4000, *np.random.default_rng(1).integers(2, 250, 120).tolist()])


def collate(
    config: DenoisingConfig, source, special=None, num_batches: int | None = None
) -> list[tuple[BatchPlan, dict]]:
    special = special or reference.special_tokens()
    table = SpanTable.build(
        config.mixture,
        max_input_length=config.max_input_length,
        max_target_length=config.max_target_length,
        num_sentinels=len(special.sentinels),
    )
    budgets = resolve_budgets(config, source.lengths, len(special.sentinels))
    collator = DenoisingCollator(StoredWindows(source), special, table, config, budgets)
    plans = list(Planner(source.lengths, table, budgets, seed=config.seed, epochs=2))[:num_batches]
    return [(plan, collator(plan)) for plan in plans]


def check_against_reference(config: DenoisingConfig, texts, batches, special) -> set[int]:
    seen = set()
    for plan, batch in batches:
        found = reference.examples(batch)
        assert len(found) == len(plan.document)
        for index, example in enumerate(found):
            document, start, length, denoiser, window, epoch = (int(column[index]) for column in plan[:6])
            text = texts[document][start : start + length]
            key = reference.window_key(config.seed, epoch, document, window)
            source, target = reference.corrupt(text, config.mixture[denoiser], special, key)
            assert example.denoiser == denoiser
            assert example.source == source
            assert example.target == target
            assert example.decoder_input == [special.pad, *target[:-1]]
            assert reference.reconstruct(source, target, config.mixture[denoiser], special) == text
            seen.add(denoiser)
    return seen


@pytest.mark.parametrize("config", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize("denoisers", [*PRESETS, "odd"])
def test_batches_equal_the_reference_token_by_token(config, denoisers):
    """Pitfalls: sentinels by token and in order; documents that see each other; sides cut short."""
    config = replace(config, denoisers=ODD_MIXTURE if denoisers == "odd" else denoisers)
    batches = collate(config, TokenDataset.from_lists(TEXTS, vocab_size=32_768))
    seen = check_against_reference(config, TEXTS, batches, reference.special_tokens())
    assert seen == set(range(len(config.mixture)))


@pytest.mark.parametrize("num_sentinels", [1, 4, 100])
def test_descending_sentinels_of_t5_and_small_pools(num_sentinels):
    """Pitfall: sentinels reversed, computed from the vocabulary's size, or running past the pool."""
    special = reference.special_tokens(num_sentinels, descending=True)
    config = replace(PACKED, denoisers="ul2")
    batches = collate(config, TokenDataset.from_lists(TEXTS, vocab_size=32_768), special, 40)
    check_against_reference(config, TEXTS, batches, special)
    used = {token for _, batch in batches for token in batch["labels"].tolist() if token > 31_800}
    assert used <= set(special.sentinels)
    assert special.sentinels[0] == 31_999
    assert special.sentinels[0] in used


def test_documents_of_several_files_and_of_wide_ids():
    texts = documents([60, 0, 90, 7, 1, 150, 33], vocab_size=100_000)
    wide = [TokenDataset.from_lists(part, vocab_size=100_000) for part in (texts[:2], texts[2:3], texts[3:])]
    batches = collate(PACKED, Shards(*wide))
    check_against_reference(PACKED, texts, batches, reference.special_tokens())
    assert any(len(set(np.searchsorted([2, 3], plan.document, side="right"))) == 3 for plan, _ in batches)
    assert max(int(batch["input_ids"].max()) for _, batch in batches) > 65_536


def test_packed_batch_has_static_shapes_and_exact_boundaries():
    """Pitfall: packed documents see each other where a boundary is off by one."""
    batches = collate(PACKED, TokenDataset.from_lists(TEXTS, vocab_size=32_768))
    decoder_slots = batches[0][1]["labels"].numel()
    assert decoder_slots % 64 == 0
    for plan, batch in batches:
        assert set(batch) == {
            "input_ids",
            "cu_seqlens",
            "max_seqlen",
            "labels",
            "decoder_input_ids",
            "decoder_cu_seqlens",
            "decoder_max_seqlen",
            "denoiser_ids",
            "num_input_tokens",
            "num_target_tokens",
        }
        shapes = {name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)}
        assert shapes == {
            "input_ids": (512,),
            "cu_seqlens": (13,),
            "labels": (decoder_slots,),
            "decoder_input_ids": (decoder_slots,),
            "decoder_cu_seqlens": (13,),
            "denoiser_ids": (12,),
        }
        types = {name: batch[name].dtype for name in shapes}
        assert types.pop("cu_seqlens") == types.pop("decoder_cu_seqlens") == torch.int32
        assert set(types.values()) == {torch.int64}
        assert (batch["max_seqlen"], batch["decoder_max_seqlen"]) == (96, 80)
        windows = len(plan.document)
        for name, lengths, tokens in (
            ("cu_seqlens", plan.input_length, batch["num_input_tokens"]),
            ("decoder_cu_seqlens", plan.target_length, batch["num_target_tokens"]),
        ):
            offsets = batch[name].tolist()
            assert offsets[0] == 0
            assert np.diff(offsets)[:windows].tolist() == lengths.tolist()
            assert offsets[windows:] == [tokens] * (13 - windows)
        assert (batch["input_ids"][batch["num_input_tokens"] :] == 0).all()
        assert (batch["labels"][batch["num_target_tokens"] :] == -100).all()
        assert (batch["decoder_input_ids"][batch["num_target_tokens"] :] == 0).all()
        assert (batch["labels"] >= 0).sum() == batch["num_target_tokens"]
        assert (batch["denoiser_ids"][windows:] == -1).all()
        assert (batch["denoiser_ids"][:windows] >= 0).all()


@pytest.mark.parametrize("pad_to", ["max_length", "longest"])
def test_padded_batch_is_padded_on_the_right(pad_to):
    batches = collate(replace(PADDED, pad_to=pad_to), TokenDataset.from_lists(TEXTS, vocab_size=32_768))
    for plan, batch in batches:
        rows = len(plan.document)
        widths = (plan.input_length.max(), plan.target_length.max()) if pad_to == "longest" else (96, 80)
        assert batch["input_ids"].shape == batch["attention_mask"].shape == (rows, widths[0])
        assert batch["labels"].shape == batch["decoder_input_ids"].shape == (rows, widths[1])
        assert batch["attention_mask"].dtype == torch.int64
        assert batch["attention_mask"].sum(1).tolist() == plan.input_length.tolist()
        assert (batch["attention_mask"].diff(dim=1) <= 0).all()
        assert (batch["input_ids"][batch["attention_mask"] == 0] == 0).all()
        assert (batch["labels"] >= 0).sum(1).tolist() == plan.target_length.tolist()
        assert (batch["decoder_input_ids"][:, 1:][batch["labels"][:, 1:] < 0] == 0).all()
        assert batch["denoiser_ids"].tolist() == plan.denoiser.tolist()
        assert batch["num_input_tokens"] == plan.input_length.sum()
        assert batch["num_target_tokens"] == plan.target_length.sum()
    assert [len(plan.document) for plan, _ in batches[:-1]] == [6] * (len(batches) - 1)
    assert 1 <= len(batches[-1][0].document) <= 6


def test_layouts_hold_the_same_windows():
    source = TokenDataset.from_lists(TEXTS, vocab_size=32_768)

    def contents(config: DenoisingConfig) -> list[tuple[list[int], list[int]]]:
        return sorted((e.source, e.target) for _, batch in collate(config, source) for e in reference.examples(batch))

    assert contents(PACKED) == contents(PADDED)


@pytest.mark.parametrize("limits", [(4, 3), (9, 40), (40, 9), (43, 43)])
def test_sides_stay_within_their_limits_on_texts_of_any_length(limits):
    """Pitfall: longer than the maximum after prefix, sentinels and EOS; more noise spans than clean tokens."""
    config = DenoisingConfig(
        layout="padded", batch_size=16, max_input_length=limits[0], max_target_length=limits[1], pad_to="longest"
    )
    texts = documents([*range(2, 90), 1000])
    batches = collate(config, TokenDataset.from_lists(texts, vocab_size=32_768))
    check_against_reference(config, texts, batches, reference.special_tokens())
    widths = np.array([(batch["input_ids"].shape[1], batch["labels"].shape[1]) for _, batch in batches])
    assert (widths <= limits).all()
    assert (widths.max(axis=0) == limits).any()


def test_prefix_lm_input_is_the_prefix_token_and_the_first_quarter():
    config = replace(PADDED, denoisers=[Denoiser(0.75, None, "[S]")], batch_size=1)
    text = documents([80])[0]
    ((_, batch), _) = collate(config, TokenDataset.from_lists([text], vocab_size=32_768))
    assert batch["input_ids"][0, :23].tolist() == [5, *text[:20], 7, 1]
    assert batch["labels"][0, :62].tolist() == [7, *text[20:], 1]


def test_seed_and_epoch_change_the_spans_of_a_document():
    """Pitfall: each epoch the same."""
    source = TokenDataset.from_lists(documents([60]), vocab_size=32_768)
    config = replace(PADDED, denoisers="t5", batch_size=1)
    inputs = [batch["input_ids"] for seed in (0, 1) for _, batch in collate(replace(config, seed=seed), source)]
    assert len(inputs) == 4
    assert len({tuple(ids.flatten().tolist()) for ids in inputs}) == 4


def test_missing_prefix_names_the_nearest():
    config = replace(PADDED, denoisers=[Denoiser(prefix="[r]")])
    with pytest.raises(ConfigError, match=r"no denoiser prefix '\[r\]'; did you mean '\[[RSX]\]'\? \(known: \[R\]"):
        collate(config, TokenDataset.from_lists(TEXTS, vocab_size=32_768))
