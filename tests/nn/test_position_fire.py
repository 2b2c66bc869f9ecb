"""FIRE against its formula, term by term."""

from __future__ import annotations

import math

import pytest
import torch

from fat5.nn import FireBias


def formula(module: FireBias, i: int, j: int, *, as_published: bool = False) -> list[float]:
    """The bias of one pair for each head in Python's floats; as published, the query's own position normalises."""
    c, threshold = module.scale.item(), module.threshold_factor.item() * module.initial_threshold
    reach = max(threshold, i) if as_published else max(threshold, i, j)
    share = math.log(c * abs(i - j) + 1) / (math.log(c * reach + 1) + 1e-6)
    weights, biases = module.hidden.weight[:, 0].tolist(), module.hidden.bias.tolist()
    hidden = [max(0.0, w * share + b) for w, b in zip(weights, biases, strict=True)]
    weights, biases = module.output.weight.tolist(), module.output.bias.tolist()
    return [sum(w * h for w, h in zip(row, hidden, strict=True)) + b for row, b in zip(weights, biases, strict=True)]


@pytest.fixture
def module() -> FireBias:
    module = FireBias(3, width=5, threshold=6.0)
    with torch.no_grad():
        module.scale.fill_(0.7)
        module.threshold_factor.fill_(1.5)
    return module


def test_equals_the_formula(module):
    positions = torch.tensor([[0, 1, 2, 5, 9, 30], [0, 3, 4, 40, 41, 1000]])
    bias = module(positions)
    assert bias.shape == (2, 3, 6, 6)
    assert bias.is_contiguous()
    for b, row in enumerate(positions.tolist()):
        for m, i in enumerate(row):
            for n, j in enumerate(row):
                expected = torch.tensor(formula(module, i, j))
                torch.testing.assert_close(bias[b, :, m, n], expected, rtol=1e-4, atol=1e-5)
                if j <= i:
                    torch.testing.assert_close(expected, torch.tensor(formula(module, i, j, as_published=True)))


def test_within_the_threshold_the_distance_alone_counts_and_beyond_it_all_stays_in_bounds(module):
    bias = module(torch.arange(9)[None])[0]
    assert torch.equal(bias[:, :-1, :-1], bias[:, 1:, 1:])
    assert torch.equal(bias, bias.transpose(1, 2))
    far = module(torch.tensor([[0, 10, 10_000_000]]))[0]
    assert not torch.equal(far[:, 0, 1], far[:, 1, 2])
    torch.testing.assert_close(far[:, 2, 0], torch.tensor(formula(module, 10_000_000, 0)))


def test_every_parameter_gets_a_gradient(module):
    module(torch.arange(40)[None]).square().sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.ndim > 0, f"{name}: sharded training takes no scalars"
        assert parameter.grad.abs().max() > 0, name


def test_is_computed_in_float32_under_autocast_and_in_bf16(module):
    """Pitfalls: mixed types under autocast; a parameter's type changes the type of the result."""
    positions = torch.arange(300)[None]
    expected = module(positions)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(module(positions), expected)
    module.to(torch.bfloat16)
    assert module(positions).dtype == torch.float32
    rounded = FireBias(3, width=5, threshold=6.0)
    rounded.load_state_dict(module.state_dict())
    assert torch.equal(module(positions), rounded(positions))
    assert module.double()(positions).dtype == torch.float64
