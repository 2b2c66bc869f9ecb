"""T5's buckets and their expansion by distance."""

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from fat5.ops import DistanceBias, RelativeBias, relative_position_buckets, saturation_radius


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"),
    [(8, 16), (12, 50), (32, 128), (32, 129), (64, 128), (64, 1000), (128, 4096), (256, 3_000)],
)
def test_buckets_equal_transformers_at_every_distance(bidirectional, num_buckets, max_distance):
    """Pitfall: ids off by one at the edges of the logarithmic buckets."""
    distance = torch.arange(-2 * max_distance - 5, 2 * max_distance + 6)
    expected = T5Attention._relative_position_bucket(distance, bidirectional, num_buckets, max_distance)
    got = relative_position_buckets(
        distance, num_buckets=num_buckets, bidirectional=bidirectional, max_distance=max_distance
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize(("bidirectional", "radius"), [(True, 91), (False, 113)])
def test_radius_of_the_usual_tables(bidirectional, radius):
    assert saturation_radius(32, bidirectional, 128) == radius


@pytest.mark.parametrize("bidirectional", [True, False])
def test_expansion_by_distance_equals_lookup_and_sums_its_gradient(bidirectional):
    table = torch.randn(32, 3, dtype=torch.float64, requires_grad=True)
    expanded = RelativeBias(table, bidirectional=bidirectional).by_distance().table
    radius = expanded.shape[1] // 2
    distance = torch.arange(-radius, radius + 1)
    buckets = relative_position_buckets(distance, num_buckets=32, bidirectional=bidirectional, max_distance=128)
    assert torch.equal(expanded, table[buckets].T)
    weights = torch.randn_like(expanded)
    (grad,) = torch.autograd.grad((expanded * weights).sum(), table)
    expected = torch.zeros_like(table).index_add_(0, buckets, weights.T)
    torch.testing.assert_close(grad, expected)


def test_a_table_first_expanded_in_inference_mode_can_be_trained():
    """What is kept between calls must not be an inference tensor, which autograd refuses."""
    table = torch.randn(28, 2, requires_grad=True)  # sizes of no other test, so that nothing is kept yet
    with torch.inference_mode():
        expected = RelativeBias(table, bidirectional=True, max_distance=77).by_distance().table
    expanded = RelativeBias(table, bidirectional=True, max_distance=77).by_distance().table
    assert torch.equal(expanded, expected)
    expanded.sum().backward()
    assert table.grad.any()


def test_expansion_of_a_bf16_table_is_fp32():
    table = torch.randn(32, 2, dtype=torch.bfloat16)
    assert RelativeBias(table, bidirectional=True).by_distance().table.dtype == torch.float32


def test_dense_form_follows_the_offset_of_each_row():
    bias = DistanceBias(torch.randn(2, 9))
    offsets = torch.tensor([0, 3])
    dense = bias.dense(5, 7, offsets)
    assert dense.shape == (2, 2, 5, 7)
    assert torch.equal(dense[1], bias.dense(5, 7, 3)[0])
    assert dense[1, 1, 4, 6] == bias.table[1, (6 - 4 - 3) + 4]


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (torch.zeros(32), {}, "expected a floating tensor"),
        (torch.zeros(31, 2), {}, "even number"),
        (torch.zeros(32, 2), {"max_distance": 8}, "max_distance > 8"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(table, options, message):
    with pytest.raises(ValueError, match=message):
        RelativeBias(table, bidirectional=True, **options)
