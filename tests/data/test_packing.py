"""The planner: every window once, within both budgets, the same for all who ask."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest

from fat5.data.budgets import suggest_decoder_budget
from fat5.data.counter_random import permute
from fat5.data.denoisers import PRESETS, Denoiser
from fat5.data.packing import BatchPlan, Budgets, Planner
from fat5.data.spans import SpanTable
from fat5.errors import ConfigError, DataError
from tests.data import denoising_reference as reference

MIXTURE = PRESETS["fat5"]
TABLE = SpanTable.build(MIXTURE, max_input_length=128, max_target_length=96, num_sentinels=256)
BUDGETS = Budgets(encoder_budget=1024, decoder_budget=768, max_documents=24, look_ahead=32)
MIXED_LENGTHS = np.concatenate(
    [[0, 1, 2, 100_000, 0, 3, 1, 250], np.random.default_rng(5).integers(0, 400, 300)]
).astype(np.int64)


def log_normal_lengths(documents: int) -> np.ndarray:
    return np.exp(np.random.default_rng(0).normal(math.log(400), 1.0, documents)).astype(np.int64)


def planner(lengths=MIXED_LENGTHS, table=TABLE, budgets=BUDGETS, **options) -> Planner:
    return Planner(lengths, table, budgets, **{"epochs": 1, **options})


def rows(plans: list[BatchPlan]) -> list[list[tuple[int, ...]]]:
    return [list(zip(*(column.tolist() for column in plan), strict=True)) for plan in plans]


def identities(plan: BatchPlan) -> list[tuple[int, int]]:
    return list(zip(plan.document.tolist(), plan.window.tolist(), strict=True))


def take(source: Planner, batches: int) -> list[BatchPlan]:
    return [plan for plan, _ in zip(source, range(batches), strict=False)]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("look_ahead", [0, 1, 32, 2000])
def test_every_token_is_in_one_window_or_counted_as_skipped(shuffle, look_ahead):
    """Pitfall: documents dropped by packing without a word."""
    source = planner(shuffle=shuffle, budgets=Budgets(1024, 768, 24, look_ahead))
    covered = defaultdict(list)
    for plan in source:
        for document, start, length in zip(plan.document, plan.start, plan.length, strict=True):
            covered[document].append((start, start + length))
    tails = 0
    for document, length in enumerate(MIXED_LENGTHS.tolist()):
        pieces = sorted(covered.pop(document, []))
        if length < 2:
            assert pieces == []
            continue
        assert pieces[0][0] == 0
        assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))
        assert length - pieces[-1][1] in (0, 1)
        tails += length - pieces[-1][1]
    assert not covered
    statistics = source.statistics()
    assert list(statistics.skipped.values()) == [int((MIXED_LENGTHS < 2).sum()), tails]
    assert statistics.skipped_tokens == int((MIXED_LENGTHS == 1).sum()) + tails
    assert statistics.text_tokens + statistics.skipped_tokens == MIXED_LENGTHS.sum()
    assert statistics.documents == len(MIXED_LENGTHS)
    assert statistics.waiting_windows == 0


def test_batches_keep_to_their_budgets_and_windows_to_their_limits():
    """Pitfall: sides longer than the maximum after prefix, sentinels and EOS; windows are the longest that fit."""
    for plan in planner():
        assert 1 <= len(plan.document) <= BUDGETS.max_documents
        assert plan.input_length.sum() <= BUDGETS.encoder_budget
        assert plan.target_length.sum() <= BUDGETS.decoder_budget
        for document, start, length, denoiser, _, _, *sides, _ in rows([plan])[0]:
            assert tuple(sides) == reference.side_lengths(length, MIXTURE[denoiser], 256)
            assert sides[0] <= 128
            assert sides[1] <= 96
            rest = MIXED_LENGTHS[document] - start
            assert length == min(rest, TABLE.longest[denoiser])


def test_denoisers_are_drawn_from_seed_epoch_document_and_window():
    for seed in (0, 2**63 - 1):
        for plan in take(planner(seed=seed, epochs=None), 60):
            for document, _, _, denoiser, window, epoch, *_ in rows([plan])[0]:
                key = reference.window_key(seed, epoch, document, window)
                assert denoiser == reference.choose_denoiser(MIXTURE, key)


def test_denoisers_come_in_proportion_to_their_weights():
    counts = planner(log_normal_lengths(30_000))
    counts.skip(10**6)
    windows = counts.statistics().denoiser_windows
    total = sum(windows.values())
    for denoiser in MIXTURE:
        deviation = math.sqrt(denoiser.weight * (1 - denoiser.weight) / total)
        assert abs(windows[denoiser.name] / total - denoiser.weight) < 4 * deviation


def test_mean_noise_density_is_each_denoisers():
    masked, text = Counter(), Counter()
    for plan in planner(log_normal_lengths(2_000)):
        for _, _, length, denoiser, *_ in rows([plan])[0]:
            text[denoiser] += length
            masked[denoiser] += int(TABLE.noise_tokens[denoiser, length])
    for index, denoiser in enumerate(MIXTURE):
        assert masked[index] / text[index] == pytest.approx(denoiser.noise_density, abs=0.002)


@pytest.mark.parametrize("limit", [512, 1024])
def test_nearly_all_slots_are_filled(limit):
    lengths = log_normal_lengths(8_000)
    limits = {"max_input_length": limit, "max_target_length": limit, "num_sentinels": 256}
    encoder_budget = 32 * 1024
    decoder_budget = suggest_decoder_budget(MIXTURE, lengths, encoder_budget, **limits)
    budgets = Budgets(encoder_budget, decoder_budget, 256, look_ahead=256)
    source = planner(lengths, SpanTable.build(MIXTURE, **limits), budgets, epochs=None)
    source.skip(60)
    statistics = source.statistics()
    assert statistics.fill > 0.99
    assert min(statistics.encoder_fill, statistics.decoder_fill) > 0.985
    assert statistics.input_tokens + statistics.target_tokens == pytest.approx(
        statistics.fill * 60 * (encoder_budget + decoder_budget)
    )


def test_oldest_window_opens_the_next_batch():
    """So none waits for ever, not even where budgets in the wrong proportion leave no batch full."""
    budgets = Budgets(encoder_budget=1024, decoder_budget=128, max_documents=24, look_ahead=32)
    in_order = Budgets(encoder_budget=128, decoder_budget=96, max_documents=1, look_ahead=0)
    oldest_first = [identities(plan)[0] for plan in planner(budgets=in_order)]
    taken: set[tuple[int, int]] = set()
    for plan in planner(budgets=budgets):
        windows = identities(plan)
        assert windows[0] == next(window for window in oldest_first if window not in taken)
        taken.update(windows)
    assert taken == set(oldest_first)


def test_skipping_equals_consuming():
    whole = rows(list(planner(epochs=2)))
    for start in (0, 1, 7, len(whole) - 1):
        source = planner(epochs=2)
        source.skip(start)
        assert source.batches_planned == start
        assert rows(list(source)) == whole[start:]
    past_the_end = planner(epochs=2)
    past_the_end.skip(len(whole) + 5)
    assert past_the_end.next_batch() is None
    assert past_the_end.batches_planned == len(whole)


def test_state_restores_the_stream():
    source = planner(epochs=None)
    source.skip(20)
    state = source.state_dict()
    expected = rows(take(source, 30))
    other = planner(epochs=None)
    other.load_state_dict(state)
    assert rows(take(other, 30)) == expected
    with pytest.raises(DataError, match=r"planner state: pool has shape .* were other settings used"):
        planner(budgets=Budgets(1024, 768, 25, 32)).load_state_dict(state)


def test_epochs_differ_and_follow_without_a_gap():
    """Pitfall: each epoch the same."""
    windows = defaultdict(list)
    plans = list(planner(epochs=3))
    for plan in plans:
        for document, _, _, denoiser, window, epoch, *_ in rows([plan])[0]:
            windows[epoch].append((document, window, denoiser))
    usable = set(np.flatnonzero(MIXED_LENGTHS >= 2).tolist())
    assert all({document for document, _, _ in windows[epoch]} == usable for epoch in range(3))
    assert [d for d, w, _ in windows[0] if w == 0] != [d for d, w, _ in windows[1] if w == 0]
    drawn = [{d: denoiser for d, w, denoiser in windows[epoch] if w == 0} for epoch in range(3)]
    assert sum(drawn[0][d] != drawn[1][d] for d in usable) > len(usable) / 2
    assert any(len(set(plan.epoch.tolist())) == 2 for plan in plans)
    fullest = [max(plan.input_length.sum() / 1024, plan.target_length.sum() / 768) for plan in plans]
    assert min(fullest[:-3]) > 0.8


def test_seeds_differ():
    assert rows(take(planner(seed=1), 3)) != rows(take(planner(seed=2), 3))


def test_without_shuffling_documents_come_as_stored():
    source = planner(shuffle=False, budgets=Budgets(1024, 768, 24, look_ahead=0))
    order = [window[0] for plan in rows(list(source)) for window in plan]
    assert order == sorted(order)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100, 256, 257, 1000])
def test_order_of_documents_is_a_permutation(size):
    orders = {tuple(permute(index, size, np.uint64(key)) for index in range(size)) for key in range(20)}
    assert all(sorted(order) == list(range(size)) for order in orders)
    if size >= 100:
        assert len(orders) == 20


def test_order_of_few_documents_is_even():
    size, keys = 5, 8_000
    counts = np.zeros((size, size))
    for key in range(keys):
        for index in range(size):
            counts[index, permute(index, size, np.uint64(reference.draw(11, key)))] += 1
    chi_square = ((counts - keys / size) ** 2 / (keys / size)).sum()
    assert chi_square < 40  # 16 degrees of freedom: p = 0.0008


def test_read_only_memory_map_of_lengths_serves(tmp_path):
    np.save(tmp_path / "lengths.npy", MIXED_LENGTHS)
    mapped = np.load(tmp_path / "lengths.npy", mmap_mode="r")
    assert rows(list(planner(mapped))) == rows(list(planner()))


@pytest.mark.parametrize("lengths", [[], [0], [1, 0, 1]])
def test_nothing_to_denoise_is_an_error_not_an_endless_loop(lengths):
    with pytest.raises(DataError, match=f"none of the {len(lengths)} documents has 2 tokens or more"):
        planner(np.array(lengths, dtype=np.int64), epochs=None)


@pytest.mark.parametrize(
    ("budgets", "message"), [((100, 768), "encoder_budget is 100"), ((1024, 50), "decoder_budget")]
)
def test_budget_below_the_longest_window_is_refused(budgets, message):
    with pytest.raises(ConfigError, match=message):
        planner(budgets=Budgets(*budgets, 24, 32))


def test_budgets_of_one_window_still_use_every_window():
    table = SpanTable.build([Denoiser()], max_input_length=30, max_target_length=20, num_sentinels=4)
    longest = int(table.longest[0])
    sides = int(table.input_lengths[0, longest]), int(table.target_lengths[0, longest])
    source = planner(table=table, budgets=Budgets(*sides, 1, 0))
    assert all(len(plan.document) == 1 for plan in source)
    assert source.statistics().text_tokens + source.statistics().skipped_tokens == MIXED_LENGTHS.sum()
