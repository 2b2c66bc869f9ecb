"""Budgets proposed from the mixture and the documents' lengths."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fat5.data.budgets import resolve_budgets, suggest_decoder_budget
from fat5.data.denoisers import PRESETS, Denoiser
from fat5.data.denoising_config import DenoisingConfig
from fat5.data.packing import Budgets, Planner
from fat5.data.spans import SpanTable

LENGTHS = np.exp(np.random.default_rng(0).normal(math.log(400), 1.0, 5_000)).astype(np.int64)
LIMITS = {"max_input_length": 256, "max_target_length": 256, "num_sentinels": 256}


def test_decoder_budget_has_the_proportion_of_the_sides():
    # 100 tokens, half of them hidden in one span: 1 + 50 + 1 on the input's side, 51 + 1 on the target's.
    halves = [Denoiser(0.5, None, prefix="[S]")]
    assert suggest_decoder_budget(halves, np.full(50, 100), 5300, **LIMITS, multiple_of=1) == 5200
    assert suggest_decoder_budget(halves, np.full(50, 100), 5300, **LIMITS) == 5248


def test_decoder_budget_holds_the_longest_target_at_least():
    assert suggest_decoder_budget(PRESETS["t5"], LENGTHS, 256, **LIMITS) == 256


def test_decoder_budget_hangs_on_the_mixture():
    budgets = [suggest_decoder_budget(PRESETS[name], LENGTHS, 16_384, **LIMITS) for name in ("t5", "ul2", "fat5")]
    assert budgets == sorted(set(budgets))


def test_defaults_are_filled_in_and_given_numbers_kept():
    config = DenoisingConfig(max_input_length=256, max_target_length=256)
    budgets = resolve_budgets(config, LENGTHS, 256)
    assert budgets.encoder_budget == 32 * 256
    assert budgets.decoder_budget == suggest_decoder_budget(config.mixture, LENGTHS, 32 * 256, **LIMITS)
    assert budgets.look_ahead == 256
    assert budgets.max_documents % 8 == 0
    given = DenoisingConfig(encoder_budget=2048, decoder_budget=1025, max_documents=7, look_ahead=0)
    assert resolve_budgets(given, LENGTHS, 256) == Budgets(2048, 1025, 7, 0)


def test_padded_layout_has_room_for_rows_of_full_length():
    config = DenoisingConfig(layout="padded", batch_size=4, max_input_length=100, max_target_length=60)
    assert resolve_budgets(config, LENGTHS, 256) == Budgets(400, 240, 4, 0)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_proposed_number_of_windows_does_not_cap_batches(preset):
    config = DenoisingConfig(denoisers=preset, max_input_length=256, max_target_length=256)
    budgets = resolve_budgets(config, LENGTHS, 256)
    sizes = [
        len(plan.document) for plan in Planner(LENGTHS, SpanTable.build(config.mixture, **LIMITS), budgets, epochs=1)
    ]
    assert np.mean(np.array(sizes) == budgets.max_documents) < 0.05
    assert np.mean(sizes) > budgets.max_documents / 3
