"""Dropout in every place where T5 has it, and nowhere in evaluation.

That gradients are equal where blocks are computed again is tested for each position encoding in `test_positions`.
"""

import pytest
import torch
from torch import nn
from transformers import T5Config, T5ForConditionalGeneration

from fat5 import FAT5Config, FAT5ForConditionalGeneration
from fat5.nn import Attention, SequenceLayout
from tests.models.conftest import SIZES
from tests.models.position_variants import ENCODINGS, make
from tests.models.test_layouts import pack


def places(model: nn.Module) -> dict[str, float]:
    """Every place of a model that drops: modules by name, and the weights of each attention."""
    found = {name: module.p for name, module in model.named_modules() if isinstance(module, nn.Dropout)}
    attentions = {name: m for name, m in model.named_modules() if name.endswith(("SelfAttention", "EncDecAttention"))}
    return found | {name: module.dropout for name, module in attentions.items()}


def inputs_of_dropout(model: nn.Module, batch: dict) -> dict[str, list[torch.Tensor]]:
    """What each dropout module is given, call by call."""
    seen: dict[str, list[torch.Tensor]] = {}
    hooks = [
        module.register_forward_hook(lambda _, args, __, name=name: seen.setdefault(name, []).append(args[0]))
        for name, module in model.named_modules()
        if isinstance(module, nn.Dropout)
    ]
    model(**batch)
    for hook in hooks:
        hook.remove()
    return seen


PLACES = list(places(FAT5ForConditionalGeneration(FAT5Config(**SIZES))))


@pytest.mark.parametrize("feed_forward_proj", ["relu", "gated-gelu"])
def test_the_places_are_those_of_t5(feed_forward_proj):
    settings = SIZES | {"dropout_rate": 0.3, "feed_forward_proj": feed_forward_proj}
    theirs = places(T5ForConditionalGeneration(T5Config(**settings)))
    assert places(FAT5ForConditionalGeneration(FAT5Config(**settings))) == theirs
    assert set(theirs.values()) == {0.3}


def test_each_place_drops_what_t5_drops_there(pair, batch):
    """Embeddings, inner activations, each sublayer's output, and the output of each stack behind its norm."""
    ours, theirs = (inputs_of_dropout(model, batch) for model in pair)
    assert {name: len(calls) for name, calls in ours.items()} == {name: len(calls) for name, calls in theirs.items()}
    assert len(ours["encoder.dropout"]) == len(ours["decoder.dropout"]) == 2
    for name, calls in ours.items():
        for got, expected in zip(calls, theirs[name], strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, msg=name)


def drop_in(model: nn.Module, place: str, rate: float) -> None:
    module = model.get_submodule(place)
    setattr(module, "p" if isinstance(module, nn.Dropout) else "dropout", rate)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_each_place_acts_on_its_own(model, batch, place, layout):
    inputs = pack(batch) if layout == "packed" else batch
    expected = model(**inputs).loss
    drop_in(model.train(), place, 0.5)
    losses = {model(**inputs).loss.item() for _ in range(2)}
    assert len(losses | {expected.item()}) == 3
    assert torch.equal(model.eval()(**inputs).loss, expected)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_attention_weights_are_dropped_with_every_position_encoding(encoding, batch):
    model = make(encoding)
    for stack in ("encoder", "decoder"):
        expected = model.eval()(**batch).loss
        assert torch.equal(model.train()(**batch).loss, expected)
        drop_in(model, f"{stack}.block.0.layer.0.SelfAttention", 0.5)
        assert model(**batch).loss != model(**batch).loss
        assert torch.equal(model.eval()(**batch).loss, expected)
        drop_in(model, f"{stack}.block.0.layer.0.SelfAttention", 0.0)


@pytest.mark.parametrize("layout", [SequenceLayout(), SequenceLayout(mask=torch.ones(4000, 1, dtype=torch.bool))])
def test_a_dropped_weight_loses_its_value_and_a_kept_one_is_scaled(layout):
    """With one key each head's output is its value, times 0 or 1 / (1 - p)."""
    attention = Attention(8, 2, 4, dropout=0.25).double()
    attention.o = nn.Identity()
    states = torch.randn(4000, 1, 8, dtype=torch.float64)
    factors = (attention(states, layout) / attention.v(states)).view(-1, 2, 4)
    assert torch.allclose(factors, factors[..., :1])
    kept = factors[..., 0] > 0.5
    torch.testing.assert_close(factors[..., 0], kept.double() / 0.75)
    assert abs(kept.double().mean() - 0.75) < 0.02
    assert abs((kept[:, 0] == kept[:, 1]).double().mean() - (0.75**2 + 0.25**2)) < 0.03  # heads drop apart


def test_dropout_leaves_the_mean_of_attention_as_it_is():
    attention = Attention(8, 2, 4, dropout=0.4)
    states = torch.randn(1, 5, 8).expand(20_000, 5, 8)
    mean = attention(states, SequenceLayout()).mean(0)
    torch.testing.assert_close(mean, attention.eval()(states[0][None], SequenceLayout())[0], rtol=0, atol=0.02)


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_evaluation_is_deterministic_and_without_dropout(encoding, batch):
    model, same = make(encoding, dropout_rate=0.5), make(encoding)
    same.load_state_dict(model.state_dict())
    losses = {m(**batch).loss.item() for m in (model, model, same)}
    assert len(losses) == 1
