"""Which parameters decay."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fat5.nn.norm import RMSNorm
from fat5.optim import AdamWScale, parameter_groups


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4, bias=False)
        self.relative_attention_bias = nn.Embedding(32, 2)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Embedding(10, 4)
        self.attention = SelfAttention()
        self.layer_norm = RMSNorm(4)
        self.head = nn.Linear(4, 3)
        self.frozen = nn.Linear(4, 4)
        self.frozen.requires_grad_(False)
        self.lm_head = nn.Linear(4, 10, bias=False)
        self.lm_head.weight = self.shared.weight


def test_norms_biases_and_relative_biases_do_not_decay_and_tied_weights_come_once():
    """Pitfall: norm weights decayed."""
    model = Model()
    decayed, kept = parameter_groups(model, 0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert [names[id(p)] for p in decayed["params"]] == ["shared.weight", "attention.q.weight", "head.weight"]
    assert [names[id(p)] for p in kept["params"]] == [
        "attention.relative_attention_bias.weight",
        "layer_norm.weight",
        "head.bias",
    ]


def test_decay_alone_shrinks_matrices_and_nothing_else():
    model = Model()
    optimizer = AdamWScale(parameter_groups(model, 0.5), lr=0.1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        decays = name in ("shared.weight", "attention.q.weight", "head.weight")
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if decays else 1.0))


def test_no_empty_group_and_an_error_without_trainable_parameters():
    assert [len(group["params"]) for group in parameter_groups(RMSNorm(4), 0.1)] == [1]
    with pytest.raises(ValueError, match="Linear has no parameter that requires a gradient"):
        parameter_groups(nn.Linear(2, 2).requires_grad_(False), 0.1)
