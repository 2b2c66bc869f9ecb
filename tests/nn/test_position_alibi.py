"""ALiBi: slopes for any number of heads, learned slopes, and heads that look one way."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from fat5.nn import AlibiSlopes, SequenceLayout
from fat5.nn.position import one_sided_attention, slope_exponents
from fat5.optim import parameter_groups


def published_slopes(n: int) -> list[float]:
    """The recursion of ALiBi's authors."""
    if math.log2(n).is_integer():
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start ** (h + 1) for h in range(n)]
    below = 2 ** math.floor(math.log2(n))
    return published_slopes(below) + published_slopes(2 * below)[0::2][: n - below]


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 6, 8, 12, 14, 16, 20, 33])
def test_slopes_are_the_published_ones_for_any_number_of_heads(num_heads):
    """Pitfall: head counts that are no power of two."""
    slopes = AlibiSlopes(num_heads)()
    expected = torch.tensor(published_slopes(num_heads))
    torch.testing.assert_close(slopes, expected)
    assert slopes.dtype == torch.float32
    assert len(set(slopes.tolist())) == num_heads


def test_slopes_of_eight_heads():
    assert AlibiSlopes(8)().tolist() == [2.0**-h for h in range(1, 9)]


@pytest.mark.parametrize("num_heads", [2, 5, 8])
def test_each_direction_has_slopes_of_its_own(num_heads):
    back = -(-num_heads // 2)
    expected = torch.tensor(published_slopes(back) + published_slopes(num_heads - back))
    torch.testing.assert_close(slope_exponents(num_heads, symmetric=False).exp2(), expected)


def test_fixed_slopes_are_no_state_and_survive_any_type():
    module = AlibiSlopes(12).to(torch.bfloat16)
    assert not module.state_dict()
    assert not list(module.parameters())
    torch.testing.assert_close(module(), torch.tensor(published_slopes(12)))


@pytest.mark.parametrize("num_heads", [8, 12])
def test_learned_slopes_start_at_the_fixed_ones_and_stay_positive(num_heads):
    module = AlibiSlopes(num_heads, learned=True)
    assert torch.equal(module(), AlibiSlopes(num_heads)())
    assert {k: v.shape for k, v in module.state_dict().items()} == {"log2_slopes": (num_heads,)}
    with torch.no_grad():
        module.log2_slopes -= 50
    assert (module() > 0).all()


def test_learned_slopes_in_bf16_start_exact_and_are_computed_in_float32():
    """Pitfall: a parameter's type changes the type of the result."""
    module = AlibiSlopes(8, learned=True).to(torch.bfloat16)
    assert module().tolist() == [2.0**-h for h in range(1, 9)]
    assert module().dtype == torch.float32
    assert AlibiSlopes(8, learned=True).double()().dtype == torch.float64
    module().sum().backward()
    assert module.log2_slopes.grad.dtype == torch.bfloat16
    assert (module.log2_slopes.grad > 0).all()


def test_learned_slopes_do_not_decay():
    module = AlibiSlopes(8, learned=True)
    (group,) = parameter_groups(module, 0.1)
    assert group["weight_decay"] == 0
    assert group["params"] == [module.log2_slopes]


def one_sided_reference(q, k, v, slopes, start=0, length=None):
    """Every score of one sequence [L, H, D], with what a head does not see at -inf."""
    rows = torch.arange(q.shape[0])
    distance = rows[None] - rows[:, None]
    back = -(-len(slopes) // 2)
    scores = torch.einsum("ihd,jhd->hij", q, k) - slopes[:, None, None] * distance.abs()
    for head in range(len(slopes)):
        hidden = distance > 0 if head < back else distance < 0
        scores[head] = scores[head].masked_fill(hidden, -torch.inf)
    end = len(rows) if length is None else start + length
    scores = scores.masked_fill((rows < start) | (rows >= end), -torch.inf)
    weights = scores.softmax(-1).nan_to_num(0)
    return torch.einsum("hij,jhd->ihd", weights, v)


def compare(got, expected, inputs):
    torch.testing.assert_close(got, expected)
    weights = torch.randn_like(expected)
    gradients = (torch.autograd.grad(x, inputs, weights) for x in (got, expected))
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)
        assert a.abs().max() > 0


@pytest.mark.parametrize("heads", [2, 3, 5])
def test_one_sided_padded_rows(heads):
    slopes = torch.rand(heads, dtype=torch.float64, requires_grad=True)
    q, k, v = (torch.randn(3, 13, heads, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    starts, lengths = torch.tensor([0, 4, 2]), torch.tensor([13, 9, 6])
    got = one_sided_attention(q, k, v, slopes, SequenceLayout(starts=starts, lengths=lengths))
    rows = zip(q, k, v, starts.tolist(), lengths.tolist(), strict=True)
    expected = torch.stack([one_sided_reference(*row[:3], slopes, *row[3:]) for row in rows])
    compare(got, expected, (q, k, v, slopes))
    got = one_sided_attention(q, k, v, slopes, SequenceLayout())
    compare(got, torch.stack([one_sided_reference(*row, slopes) for row in zip(q, k, v, strict=True)]), (q, k, v))


def test_one_sided_packed_documents():
    """Empty documents, repeated last offsets and unused rows included."""
    slopes = torch.rand(3, dtype=torch.float64, requires_grad=True)
    q, k, v = (torch.randn(17, 3, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    offsets = [0, 5, 5, 6, 14, 14]
    layout = SequenceLayout.packed(torch.tensor(offsets, dtype=torch.int32), 10)
    got = one_sided_attention(q, k, v, slopes, layout)
    documents = [one_sided_reference(*(x[a:b] for x in (q, k, v)), slopes) for a, b in itertools.pairwise(offsets)]
    compare(got, torch.cat([*documents, torch.zeros(3, 3, 4, dtype=torch.float64)]), (q, k, v, slopes))


def test_one_sided_dropout_acts():
    q = torch.randn(2, 9, 4, 8)
    torch.manual_seed(0)
    out = one_sided_attention(q, q, q, AlibiSlopes(4, symmetric=False)(), SequenceLayout(), dropout_p=0.5)
    again = one_sided_attention(q, q, q, AlibiSlopes(4, symmetric=False)(), SequenceLayout(), dropout_p=0.5)
    for heads in (slice(0, 2), slice(2, 4)):
        assert not torch.equal(out[:, :, heads], again[:, :, heads])
