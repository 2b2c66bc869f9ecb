"""Layouts of padded rows, and the forms in which attention takes them."""

import pytest
import torch

from fat5.nn import SequenceLayout
from fat5.nn.position import hide_holes

MASKS = {
    "right": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]],
    "left": [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
    "nothing real": [[0, 0, 0, 0, 0], [0, 1, 1, 1, 0]],
    "holes": [[1, 0, 1, 0, 0], [1, 1, 1, 1, 0]],
}


@pytest.mark.parametrize("name", MASKS)
def test_a_layout_in_full_is_its_mask(name):
    given = torch.tensor(MASKS[name])
    layout = SequenceLayout.from_attention_mask(given)
    full = layout.in_full(5)
    assert (layout.mask is None) == (name != "holes")
    assert torch.equal(full.mask, given.bool())
    bias = hide_holes(full).tensor
    assert bias is full.hidden
    assert torch.equal(bias[:, 0, 0] == 0, given.bool())
    assert torch.equal(bias[:, 0, 0] == -torch.inf, given == 0)
    moved = full.to("cpu")
    assert torch.equal(moved.hidden, full.hidden)


def test_a_layout_without_padding_stays():
    layout = SequenceLayout.from_attention_mask(torch.ones(2, 5))
    assert layout.in_full(5) is layout
    assert hide_holes(layout) is None
