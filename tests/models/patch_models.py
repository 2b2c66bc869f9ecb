"""Small models of Transformers' T5 family, as they come and patched, and batches for them."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from fat5.models.patch import patch

SIZES = {
    "vocab_size": 97, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2,
    "num_heads": 3, "dropout_rate": 0.0, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16,
    "decoder_start_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "t5-v1.0": (T5Config, {"feed_forward_proj": "relu"}),
    "t5-v1.1": (T5Config, {"feed_forward_proj": "gated-gelu"}),
    "mt5": (MT5Config, {}),
    "umt5": (UMT5Config, {}),
}
SEQ2SEQ = {T5Config: T5ForConditionalGeneration, MT5Config: MT5ForConditionalGeneration}
SEQ2SEQ[UMT5Config] = UMT5ForConditionalGeneration
CACHE = "cache" if "cache" in inspect.signature(T5ForConditionalGeneration.forward).parameters else "past_key_values"
TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(autouse=True)
def one_thread():
    """Run on one thread: models this small only wait for each other's threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Give the bias tables and norms values that matter; fresh ones are near 0 and 1."""
    for name, parameter in model.named_parameters():
        if "relative_attention_bias" in name:
            nn.init.normal_(parameter, std=2.0)
        elif "layer_norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def make(name: str, attention: str = "eager", **settings) -> PreTrainedModel:
    """A model as Transformers makes it."""
    config, extra = CONFIGS[name]
    model = SEQ2SEQ[config](config(**SIZES | extra | settings, attn_implementation=attention))
    if name != "t5-v1.0":
        # Transformers 5 ties whatever it is told; and a model with a head of its own has more than one favourite token.
        model.lm_head.weight = nn.Parameter(0.3 * torch.randn_like(model.lm_head.weight))
    return spread(model)


def make_pair(name: str, attention: str = "eager", **settings) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A patched model, and the same one as Transformers makes it."""
    theirs = make(name, attention, **settings)
    return patch(copy.deepcopy(theirs)), theirs


def make_batch() -> dict[str, Tensor]:
    """Four rows: right-padded, left-padded, padded on both sides, and full; labels of several lengths."""
    attention_mask = torch.ones(4, 40, dtype=torch.int64)
    attention_mask[0, 25:] = 0
    attention_mask[1, :13] = 0
    attention_mask[2, :5] = attention_mask[2, 31:] = 0
    labels = torch.randint(2, 97, (4, 21))
    labels[0, 9:] = labels[2, 20:] = -100
    return {"input_ids": torch.randint(2, 97, (4, 40)), "attention_mask": attention_mask, "labels": labels}


def compare(ours: nn.Module, theirs: nn.Module, batch: dict[str, Tensor], kept: Tensor | None = None) -> None:
    """Compare logits (of the labels that are kept, where given), loss and every gradient."""
    got, want = ours(**batch), theirs(**batch)
    where = slice(None) if kept is None else kept
    torch.testing.assert_close(got.logits[where], want.logits[where], **TOLERANCE)
    torch.testing.assert_close(got.loss, want.loss, **TOLERANCE)
    compare_gradients(ours, theirs, got.loss, want.loss)


def compare_gradients(ours: nn.Module, theirs: nn.Module, got: Tensor, want: Tensor) -> None:
    """Compare the gradients of two scalars with regard to every parameter."""
    ours.zero_grad()
    theirs.zero_grad()
    got.backward()
    want.backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert set(expected) == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        if expected[name] is None:
            assert parameter.grad is None, name
            continue
        assert expected[name].abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, expected[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")
