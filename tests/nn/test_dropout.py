"""Dropout that costs little where it does nothing."""

import torch
from torch import nn

from fat5.nn.dropout import Dropout


def test_drops_in_training_as_pytorchs_and_not_in_evaluation():
    x = torch.randn(50, 40)
    ours, theirs = Dropout(0.3), nn.Dropout(0.3)
    torch.manual_seed(1)
    got = ours(x)
    torch.manual_seed(1)
    assert torch.equal(got, theirs(x))
    assert (got == 0).any()
    assert ours.eval()(x) is x


def test_its_own_mode_counts_and_hooks_are_called():
    """Dropout at test time, as for estimates of uncertainty, sets the mode of these modules alone."""
    model = nn.Sequential(nn.Identity(), Dropout(0.5)).eval()
    seen = []
    model[1].register_forward_hook(lambda *arguments: seen.append(arguments))
    model(torch.ones(8))
    model[1].train()
    assert (model(torch.ones(1000)) == 0).any()
    assert len(seen) == 2
