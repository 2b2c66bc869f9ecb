"""Pooling beside the plain formula: types, padding that holds anything, documents that hold nothing."""

import pytest
import torch

from fat5.nn import POOLINGS, SequenceLayout, pool

EOS = (1, 4)


def rows() -> tuple[torch.Tensor, torch.Tensor, SequenceLayout]:
    """Three rows: padded on the left, on the right with an EOS inside, and without tokens; NaN in the padding."""
    mask = torch.zeros(3, 9)
    mask[0, 3:] = mask[1, :7] = 1
    states = torch.randn(3, 9, 8).masked_fill(mask[..., None] == 0, torch.nan)
    ids = torch.full((3, 9), 7)
    ids[1, 2], ids[1, 4], ids[1, 8], ids[2, 3] = 1, 4, 1, 1
    return states, ids, SequenceLayout.from_attention_mask(mask)


CHOSEN = {"first": (3, 0), "eos": (8, 4)}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_padded_and_packed_rows(pooling):
    states, ids, layout = rows()
    got = pool(states, layout, pooling, ids, EOS)
    if pooling == "mean":
        want = torch.stack([states[0, 3:].mean(0), states[1, :7].mean(0)])
    else:
        want = torch.stack([states[row, slot] for row, slot in enumerate(CHOSEN[pooling])])
    torch.testing.assert_close(got[:2], want)
    assert not got[2].any()
    flat = torch.cat([states[0, 3:], states[1, :7], torch.full((2, 8), torch.nan)])
    flat_ids = torch.cat([ids[0, 3:], ids[1, :7], torch.tensor([1, 1])])
    offsets = torch.tensor([0, 6, 13, 13], dtype=torch.int32)
    packed = pool(flat, SequenceLayout.packed(offsets, 7), pooling, flat_ids, EOS)
    torch.testing.assert_close(packed[:2], want)
    assert not packed[2].any()


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_mean_of_a_long_text_in_bf16(layout):
    """Summed in bf16, 4,096 tokens of 1 would stop at 256."""
    states = torch.ones(1, 4096, 4, dtype=torch.bfloat16)
    offsets = torch.tensor([0, 4096], dtype=torch.int32)
    packed = layout == "packed"
    got = pool(
        states[0] if packed else states, SequenceLayout.packed(offsets, 4096) if packed else SequenceLayout(), "mean"
    )
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, torch.ones_like(got))


def test_gradients_stay_out_of_the_padding():
    states, ids, layout = rows()
    states = states.nan_to_num().requires_grad_()
    for pooling in POOLINGS:
        (grad,) = torch.autograd.grad(pool(states, layout, pooling, ids, EOS).sum(), states)
        assert grad[0, 3:].any()
        assert not grad[0, :3].any()
        assert not grad[2].any()


def test_an_unknown_pooling_is_named():
    with pytest.raises(ValueError, match="did you mean 'mean'"):
        pool(torch.zeros(1, 2, 3), SequenceLayout(), "means")
