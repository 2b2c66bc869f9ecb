"""Span counts and lengths against their formulas, and the random segmentation against its distribution."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from fat5.data.collator import random_segments
from fat5.data.counter_random import draw, draw_below, draw_unit
from fat5.data.denoisers import PRESETS, Denoiser
from fat5.data.jit import jit
from fat5.data.spans import SpanTable
from fat5.errors import ConfigError
from tests.data import denoising_reference as reference

EVERY_DENOISER = tuple({d.name: d for mixture in PRESETS.values() for d in mixture}.values())
ODD_DENOISERS = tuple(
    Denoiser(density, length)
    for density, length in itertools.product((0.01, 0.2, 1 / 3, 0.5, 0.85, 0.99), (1.0, 1.5, 3.0, 10.0, 200.0))
)


def table(denoisers, max_input_length=300, max_target_length=200, num_sentinels=256) -> SpanTable:
    return SpanTable.build(
        denoisers,
        max_input_length=max_input_length,
        max_target_length=max_target_length,
        num_sentinels=num_sentinels,
    )


@pytest.mark.parametrize("num_sentinels", [1, 5, 256])
@pytest.mark.parametrize("denoisers", [EVERY_DENOISER, ODD_DENOISERS], ids=["presets", "odd"])
def test_table_follows_the_formulas_at_every_length(denoisers, num_sentinels):
    spans = table(denoisers, num_sentinels=num_sentinels)
    for row, denoiser in enumerate(denoisers):
        for length in range(2, int(spans.longest[row]) + 1):
            assert (spans.noise_tokens[row, length], spans.spans[row, length]) == reference.span_counts(
                length, denoiser, num_sentinels
            )
            assert (spans.input_lengths[row, length], spans.target_lengths[row, length]) == reference.side_lengths(
                length, denoiser, num_sentinels
            )


@pytest.mark.parametrize("limits", [(4, 3), (5, 900), (900, 5), (43, 361), (1024, 512)])
def test_longest_window_fits_both_limits_and_the_next_does_not(limits):
    """Pitfall: an input or a target longer than its maximum after prefix, sentinels and EOS."""
    spans = table(EVERY_DENOISER, *limits)
    for denoiser, longest in zip(EVERY_DENOISER, spans.longest.tolist(), strict=True):
        fits = [
            all(
                side <= limit for side, limit in zip(reference.side_lengths(length, denoiser, 256), limits, strict=True)
            )
            for length in (longest, longest + 1)
        ]
        assert fits == [True, False]


def test_sides_never_shrink_as_the_window_grows():
    spans = table(EVERY_DENOISER + ODD_DENOISERS, num_sentinels=17)
    for side in (spans.input_lengths, spans.target_lengths):
        assert (np.diff(side[:, 2:], axis=1) >= 0).all()


def test_spans_are_capped_at_the_sentinels_and_grow_longer_instead():
    """Pitfall: more spans than the tokenizer has sentinels."""
    few = table([Denoiser(0.5, 3.0)], num_sentinels=10)
    assert few.spans.max() == 10
    assert few.noise_tokens[0, 200] == 100


def test_short_windows_keep_a_clean_token_for_each_span():
    """Pitfall: more noise spans than clean tokens on a short text."""
    spans = table([Denoiser(0.9, 1.0)])
    assert spans.spans[0, 2:12].tolist() == [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    clean = np.arange(spans.spans.shape[1]) - spans.noise_tokens[0]
    assert (spans.spans[0, 2:] <= clean[2:]).all()
    assert (clean[2:] >= 1).all()


def test_halves_round_up():
    assert table([Denoiser(0.5, 3.0)]).noise_tokens[0, 5] == 3


def test_missing_sentinels_are_refused():
    with pytest.raises(ConfigError, match="marks spans by sentinels, but the tokenizer has none"):
        table(PRESETS["t5"], num_sentinels=0)
    table(PRESETS["prefix-lm"], num_sentinels=0)


def test_every_division_into_segments_is_equally_likely():
    draws = 20_000
    found: Counter[tuple[int, ...]] = Counter()
    sizes = np.empty(3, np.int64)
    for key in range(draws):
        random_segments(7, 3, np.uint64(key), 1, sizes)
        found[tuple(sizes.tolist())] += 1
    divisions = [s for s in itertools.product(range(1, 6), repeat=3) if sum(s) == 7]
    assert set(found) == set(divisions)
    expected = draws / len(divisions)
    chi_square = sum((count - expected) ** 2 / expected for count in found.values())
    assert chi_square < 37  # 14 degrees of freedom: p = 0.0007


def test_single_segment_and_segments_of_one_item():
    sizes = np.empty(5, np.int64)
    random_segments(9, 1, np.uint64(3), 1, sizes)
    assert sizes[0] == 9
    random_segments(5, 5, np.uint64(3), 1, sizes)
    assert sizes.tolist() == [1, 1, 1, 1, 1]


def test_random_numbers_equal_the_published_generator():
    """SplitMix64 from seed 1234567, as its author's code prints it."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [draw(np.uint64(1234567), counter) for counter in range(5)] == expected
    assert [reference.draw(1234567, counter) for counter in range(5)] == expected


def test_bounded_and_unit_draws_cover_their_range_evenly():
    key = np.uint64(7)
    numbers = np.array([draw_below(key, counter, 6) for counter in range(6000)])
    assert (np.abs(np.bincount(numbers, minlength=6) - 1000) < 120).all()
    shares = np.array([draw_unit(key, counter) for counter in range(4000)])
    assert shares.min() >= 0
    assert shares.max() < 1
    assert abs(shares.mean() - 0.5) < 0.02


def test_functions_compile_where_no_cache_can_be_written():
    namespace: dict = {}
    exec("def double(x):\n    return 2 * x", namespace)
    assert jit(namespace["double"])(21) == 42
