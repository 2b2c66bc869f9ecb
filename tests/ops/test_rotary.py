"""Rotary embedding: values against complex numbers, the rule for types, gradients, shapes, xPos, errors."""

from __future__ import annotations

import pytest
import torch

from fat5.ops.rotary import apply_rotary, rotary_phases, xpos_scale
from fat5.ops.rotary.reference import rotary_reference

POSITIONS = {
    "padded": ((2, 43, 3, 24), torch.arange(43)),
    "a row": ((2, 5, 3, 24), torch.tensor([[0, 3, 4, 9, 70], [1, 2, 40, 41, 1000]])),
    "packed": ((11, 3, 24), torch.tensor([0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1])),
    "one token": ((1, 1, 1, 24), torch.tensor([7])),
    "empty": ((2, 0, 3, 24), torch.arange(0)),
}


def rotate(x, positions, dim, *, interleaved=False, theta=10000.0, dtype=torch.float64):
    cos, sin = rotary_phases(positions, dim, theta=theta, dtype=dtype)
    return apply_rotary(x, cos, sin, interleaved=interleaved)


@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dim", [24, 10])
def test_equals_complex_numbers_with_gradients(where, interleaved, dim):
    shape, positions = POSITIONS[where]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    got = rotate(x, positions, dim, interleaved=interleaved, theta=500.0)
    expected = rotary_reference(x, positions, dim, interleaved=interleaved, theta=500.0)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert torch.equal(got[..., dim:], x[..., dim:])
    weights = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, weights) for y in (got, expected)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradcheck(interleaved):
    x = torch.randn(2, 3, 2, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotate(x, torch.tensor([2, 5, 90]), 4, interleaved=interleaved), x)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("scale_base", [None, 40.0])
def test_scores_depend_on_the_distance_alone(interleaved, scale_base):
    q, k = torch.randn(2, 9, 3, 16, dtype=torch.float64)

    def scores(shift):
        positions = torch.arange(9) + shift
        cos, sin = rotary_phases(positions, 16, dtype=torch.float64)
        scale = 1.0 if scale_base is None else xpos_scale(positions, 16, scale_base=scale_base, dtype=torch.float64)
        queries = apply_rotary(q, cos * scale, sin * scale, interleaved=interleaved)
        keys = apply_rotary(k, cos / scale, sin / scale, interleaved=interleaved)
        return torch.einsum("ihd,jhd->hij", queries, keys)

    torch.testing.assert_close(scores(0), scores(1000), rtol=1e-9, atol=1e-9)
    assert (scores(0) - torch.einsum("ihd,jhd->hij", q, k)).abs().max() > 0.1


def test_pairs_keep_their_length_and_position_0_changes_nothing():
    x = torch.randn(6, 2, 8)
    y = rotate(x, torch.arange(6), 8, dtype=torch.float32)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(y[0], x[0])
    assert (y[1] - x[1]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("phase_dtype", [torch.float32, torch.float64])
def test_output_has_the_type_of_x_and_is_rounded_once(dtype, phase_dtype):
    """Pitfall: a float32 table with bf16 input changes the output type."""
    x = torch.randn(3, 50, 2, 16, dtype=torch.float64).to(dtype).requires_grad_()
    y = rotate(x, torch.arange(50), 16, dtype=phase_dtype)
    assert y.dtype == dtype
    expected = rotary_reference(x.detach(), torch.arange(50), 16)
    narrowest = torch.finfo(torch.float32 if phase_dtype == torch.float32 else dtype).eps
    error = (y.double() - expected).abs() - torch.finfo(dtype).eps * expected.abs() / 2
    assert error.max() < 100 * narrowest + torch.finfo(dtype).tiny
    y.sum().backward()
    assert x.grad.dtype == dtype


def test_autocast_changes_nothing():
    """Pitfall: mixed types under autocast."""
    x = torch.randn(2, 300, 2, 16)
    expected = rotate(x, torch.arange(300), 16, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(rotate(x, torch.arange(300), 16, dtype=torch.float32), expected)
        assert rotate(x.bfloat16(), torch.arange(300), 16, dtype=torch.float32).dtype == torch.bfloat16


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.02), (torch.float64, 1e-10)])
def test_far_positions_keep_their_phases(dtype, tolerance):
    """In a half-precision type the positions 100,000 and 100,001 would be one."""
    positions = torch.tensor([100_000, 100_001])
    x = torch.randn(2, 1, 64, dtype=torch.float64)
    torch.testing.assert_close(
        rotate(x, positions, 64, dtype=dtype), rotary_reference(x, positions, 64), rtol=0, atol=tolerance
    )


def test_non_contiguous_and_expanded_inputs():
    x = torch.randn(16, 2, 12, 3).permute(1, 2, 3, 0)
    assert torch.equal(rotate(x, torch.arange(12), 16), rotate(x.contiguous(), torch.arange(12), 16))
    one = torch.randn(1, 12, 1, 16).expand(2, 12, 3, 16)
    assert torch.equal(rotate(one, torch.arange(12), 16), rotate(one.contiguous(), torch.arange(12), 16))


@pytest.mark.parametrize("interleaved", [False, True])
def test_xpos_equals_complex_numbers_and_decays(interleaved):
    positions, base = torch.arange(200), 64.0
    x = torch.randn(200, 2, 16, dtype=torch.float64)
    cos, sin = rotary_phases(positions, 16, dtype=torch.float64)
    scale = xpos_scale(positions, 16, scale_base=base, dtype=torch.float64)
    for is_key, factor in ((False, scale), (True, 1 / scale)):
        got = apply_rotary(x, cos * factor, sin * factor, interleaved=interleaved)
        expected = rotary_reference(x, positions, 16, interleaved=interleaved, scale_base=base, is_key=is_key)
        torch.testing.assert_close(got, expected)
    assert scale[0].eq(1).all()
    assert (scale[1:] < scale[:-1]).all()
    torch.testing.assert_close(scale[64, 0], torch.tensor(0.4 / 1.4, dtype=torch.float64))


def test_compiles_whole():
    x = torch.randn(2, 7, 3, 16, requires_grad=True)

    def step(x, positions):
        return rotate(x, positions, 12, interleaved=True, dtype=torch.float32)

    expected = step(x, torch.arange(7))
    got = torch.compile(step, fullgraph=True, backend="aot_eager")(x, torch.arange(7))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), x) for y in (got[..., :5], expected[..., :5])))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, c: rotary_phases(torch.arange(3), 5), "dim=5"),
        (lambda x, c: xpos_scale(torch.arange(3), 0), "dim=0"),
        (lambda x, c: xpos_scale(torch.arange(3), 4, scale_base=0), "scale_base"),
        (lambda x, c: rotary_phases(torch.arange(3), 4, theta=-1.0), "theta"),
        (lambda x, c: rotary_phases(torch.arange(3), 4, dtype=torch.bfloat16), "bfloat16"),
        (lambda x, c: apply_rotary(x, c, c[:4]), r"sin \[4, 4\]"),
        (lambda x, c: apply_rotary(x, c[:4], c[:4]), r"broadcast to \[2, 5\]"),
        (lambda x, c: apply_rotary(x[..., :6], c, c), "at most 3 pairs"),
        (lambda x, c: apply_rotary(x[0, 0], c, c), r"x \[3, 8\]"),
        (lambda x, c: apply_rotary(x.long(), c, c), "int64"),
        (lambda x, c: apply_rotary(x, c.to("meta"), c.to("meta")), "cos on meta"),
    ],
)
def test_inputs_that_do_not_fit_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 5, 3, 8), torch.randn(5, 4))
