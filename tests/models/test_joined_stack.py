"""A compiled step joins the weights of a stack at its beginning: equal gradients, whatever is frozen or wrapped."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile

from fat5.nn.joined import keep_apart
from tests.models.test_shared_keys import gradients, make_batch, make_model


def nothing(model: nn.Module) -> None:
    pass


def frozen(model: nn.Module) -> None:
    model.encoder.block[0].layer[0].SelfAttention.q.requires_grad_(False)
    model.decoder.block[1].layer[-1].requires_grad_(False)


def hooked(model: nn.Module) -> None:
    model.decoder.block[1].layer[0].SelfAttention.v.register_forward_hook(lambda m, x, out: 0.5 * out)


def apart(model: nn.Module) -> None:
    keep_apart(model)


CASES = {
    "relative": ({}, nothing, 2 + 2 + 1),
    "rotary": ({"position_encoding": "rotary"}, nothing, 2 + 1),
    "one-sided": ({"position_encoding": "alibi", "alibi_symmetric": False}, nothing, 1 + 2 + 1),
    "plain feed-forward": ({"feed_forward_proj": "gated-silu"}, nothing, 2 + 1),
    "frozen": ({}, frozen, 1 + 3 + 1),
    "hooked": ({}, hooked, 2 + 2 + 1),
    "apart": ({}, apart, 0),
}


FAST = ("relative", "frozen")


@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in FAST else pytest.mark.slow) for x in CASES])
def test_gradients_equal_those_of_an_eager_step(case):
    settings, change, launches = CASES[case]
    model, batch = make_model(**settings), make_batch()
    del batch["attention_mask"]
    change(model)
    expected = gradients(model, batch)
    model.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    with profile() as seen:
        found = gradients(model, batch)
    assert found.keys() == expected.keys()
    for name, ours in found.items():
        torch.testing.assert_close(ours, expected[name], rtol=1e-4, atol=1e-6)
    ran = [event for event in seen.function_events if event.name == "aten::_foreach_copy_"]
    assert len(ran) == launches
    torch._dynamo.reset()
