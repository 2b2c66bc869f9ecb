"""Where tokens stand, plain and drawn at random, in padded and packed batches; the settings' own checks."""

from __future__ import annotations

import pytest
import torch

from fat5.nn import PositionSettings, SequenceLayout
from fat5.nn.position import draw_positions, locate
from fat5.nn.position.tokens import drawn_positions, token_positions

CPU = torch.device("cpu")
PACKED = SequenceLayout.packed(torch.tensor([0, 3, 3, 8, 8], dtype=torch.int32), 6)


def test_packed_positions_start_over_at_each_document():
    """Pitfall: packed documents see each other."""
    assert token_positions(PACKED, 10, CPU)[:8].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]


def test_padded_positions_count_from_the_first_real_token():
    assert token_positions(SequenceLayout(), 4, CPU).tolist() == [[0, 1, 2, 3]]
    right = SequenceLayout(starts=torch.tensor([0, 0]), lengths=torch.tensor([4, 2]))
    assert token_positions(right, 4, CPU).tolist() == [[0, 1, 2, 3]]
    left = SequenceLayout(starts=torch.tensor([0, 2]), lengths=torch.tensor([4, 2]))
    assert token_positions(left, 4, CPU).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    holes = SequenceLayout(mask=torch.tensor([[False, True, False, True], [True, True, True, True]]))
    assert token_positions(holes, 4, CPU).tolist() == [[0, 0, 1, 2], [0, 1, 2, 3]]


def test_a_draw_is_a_rising_subset_of_the_range():
    lengths = torch.tensor([0, 1, 7, 20])
    drawn = draw_positions(lengths, 20, 25)
    for row, length in zip(drawn, lengths.tolist(), strict=True):
        real = row[:length]
        assert (real[1:] > real[:-1]).all()
        assert ((real >= 0) & (real < 25)).all()
        assert (row[length:] == 25).all()
    assert draw_positions(torch.tensor([20]), 20, 20).tolist() == [list(range(20))]


def test_every_position_is_drawn_equally_often_whatever_the_padding():
    """A row of 3 real tokens in 8 slots spreads over the whole range, not over its lower part."""
    drawn = draw_positions(torch.full((20_000,), 3), 8, 10)[:, :3]
    shares = torch.bincount(drawn.flatten(), minlength=10) / 20_000
    torch.testing.assert_close(shares, torch.full((10,), 0.3), rtol=0, atol=0.015)
    pairs = torch.bincount(drawn[:, 0] * 100 + drawn[:, 2])
    assert (pairs > 0).sum() == 36  # first and last of a subset of 3: all pairs at least 2 apart


def test_sequences_and_calls_draw_apart_and_the_seed_decides():
    """Pitfall: identical random numbers each time."""
    lengths = torch.full((4,), 10)
    torch.manual_seed(5)
    first, second = draw_positions(lengths, 10, 1000), draw_positions(lengths, 10, 1000)
    assert len({tuple(row) for row in torch.cat([first, second]).tolist()}) == 8
    torch.manual_seed(5)
    assert torch.equal(draw_positions(lengths, 10, 1000), first)


def test_a_range_below_the_length_is_refused():
    with pytest.raises(ValueError, match="up to 11 tokens with randomized_position_range=10"):
        draw_positions(torch.tensor([3]), 11, 10)


def test_drawn_positions_of_packed_documents():
    drawn = drawn_positions(PACKED, 0, 10, 50, CPU)
    assert drawn.shape == (10,)
    for a, b in ((0, 3), (3, 8)):
        assert (drawn[a + 1 : b] > drawn[a : b - 1]).all()
        assert (drawn[a:b] < 50).all()
    everything = SequenceLayout.packed(torch.tensor([0, 6, 6]), 6)
    assert drawn_positions(everything, 0, 6, 6, CPU).tolist() == list(range(6))


@pytest.mark.parametrize(
    ("layout", "real"),
    [
        (SequenceLayout(starts=torch.tensor([0, 2, 5]), lengths=torch.tensor([6, 3, 0])), [(0, 6), (2, 5), (5, 5)]),
        (SequenceLayout(mask=torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0]]).bool()),
         [(0, 6), (2, 5), (0, 0)]),
        (SequenceLayout(), [(0, 6)] * 3),
    ],
)  # fmt: skip
def test_drawn_positions_of_padded_rows(layout, real):
    drawn = drawn_positions(layout, 3, 6, 30, CPU)
    assert drawn.shape == (3, 6)
    for row, (a, b) in zip(drawn, real, strict=True):
        assert (row[a + 1 : b] > row[a : max(b - 1, a)]).all()
        assert (row[a:b] < 30).all()
    assert drawn_positions(layout, 3, 6, 6, CPU)[0].tolist() == list(range(6))


@pytest.mark.parametrize("mask", [None, torch.tensor([[0, 1, 0, 0]]).bool()])
def test_a_short_row_draws_from_the_whole_range(mask):
    """The one real token of four slots; drawn with its padding it would nearly always come early."""
    one = torch.tensor([1])
    layout = SequenceLayout(starts=one, lengths=one) if mask is None else SequenceLayout(mask=mask)
    drawn = torch.cat([drawn_positions(layout, 1, 4, 4, CPU) for _ in range(400)])
    assert torch.bincount(drawn[:, 1], minlength=4).min() > 60


def test_without_training_positions_are_plain():
    settings = PositionSettings(position_encoding="rotary", randomized_position_range=100)
    plain = PositionSettings(position_encoding="rotary")
    states = torch.zeros(2, 7, 8)
    evaluated = locate(settings, SequenceLayout(), states, 8, causal=False, training=False)
    expected = locate(plain, SequenceLayout(), states, 8, causal=False, training=True)
    assert torch.equal(evaluated.rotation.query_cos, expected.rotation.query_cos)
    drawn = locate(settings, SequenceLayout(), states, 8, causal=False, training=True)
    assert not torch.equal(drawn.rotation.query_cos, expected.rotation.query_cos.expand(2, -1, -1))
    assert torch.equal(drawn.rotation.query_cos, drawn.rotation.key_cos)


def test_xpos_scales_causal_attention_alone():
    settings = PositionSettings(position_encoding="rotary", rotary_scale_base=64.0)
    states = torch.zeros(2, 7, 8)
    decoder = locate(settings, SequenceLayout(), states, 8, causal=True, training=False).rotation
    encoder = locate(settings, SequenceLayout(), states, 8, causal=False, training=False).rotation
    assert torch.equal(encoder.query_cos, encoder.key_cos)
    torch.testing.assert_close(decoder.query_cos * decoder.key_cos, encoder.query_cos.square())
    assert (decoder.key_cos.abs()[:, 1:] > encoder.key_cos.abs()[:, 1:]).all()


@pytest.mark.parametrize(("dtype", "longest"), [(torch.float16, 10), (torch.bfloat16, 200), (torch.float32, 200)])
def test_xpos_refuses_lengths_that_its_scale_does_not_survive(dtype, longest):
    settings = PositionSettings(position_encoding="rotary", rotary_scale_base=2.0)
    with pytest.raises(ValueError, match="rotary_scale_base of at least") as error:
        locate(settings, SequenceLayout(), torch.zeros(1, longest, 8, dtype=dtype), 8, causal=True, training=False)
    enough = float(str(error.value).rsplit(maxsplit=1)[-1])
    settings = PositionSettings(position_encoding="rotary", rotary_scale_base=enough)
    states = torch.zeros(1, longest, 8, dtype=dtype)
    rotation = locate(settings, SequenceLayout(), states, 8, causal=True, training=False).rotation
    assert rotation.key_cos.to(dtype).isfinite().all()


def test_xpos_looks_at_the_type_of_autocast():
    settings = PositionSettings(position_encoding="rotary", rotary_scale_base=2.0)
    states = torch.zeros(1, 50, 8)
    locate(settings, SequenceLayout(), states, 8, causal=True, training=False)
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match=r"range of torch\.float16"):
        locate(settings, SequenceLayout(), states, 8, causal=True, training=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"position_encoding": "rotery"}, r"rotery.*did you mean 'rotary'"),
        ({"rotary_theta": 500.0}, r"rotary_theta=500.0 with position_encoding='relative'.*position_encoding='rotary'"),
        ({"position_encoding": "alibi", "fire_width": 8}, "setting of 'fire'"),
        ({"position_encoding": "none", "alibi_symmetric": False}, "setting of 'alibi'"),
        ({"position_encoding": "rotary", "relative_attention_num_buckets": 8}, "setting of 'relative'"),
        ({"position_encoding": "rotary", "rotary_fraction": 1.5}, "rotary_fraction=1.5"),
        ({"position_encoding": "rotary", "rotary_theta": 0.0}, "rotary_theta=0.0"),
        ({"position_encoding": "rotary", "rotary_scale_base": -1.0}, "rotary_scale_base=-1.0"),
        ({"position_encoding": "fire", "fire_threshold": 0.0}, "fire_threshold=0.0"),
        ({"position_encoding": "fire", "fire_width": 0}, "fire_width=0"),
        ({"position_encoding": "alibi", "alibi_symmetric": 0}, "alibi_symmetric=0; expected true or false"),
        ({"position_encoding": "none", "randomized_position_range": 10}, "no positions to randomise"),
        ({"randomized_position_range": 0}, "randomized_position_range=0"),
    ],
)
def test_settings_that_cannot_be_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        PositionSettings(**settings)


@pytest.mark.parametrize(("fraction", "head_dim", "dim"), [(1.0, 64, 64), (0.25, 64, 16), (0.7, 10, 6), (0.3, 20, 6)])
def test_the_rotated_share_is_rounded_down_to_pairs(fraction, head_dim, dim):
    settings = PositionSettings(position_encoding="rotary", rotary_fraction=fraction)
    assert settings.rotary_dim(head_dim) == dim
