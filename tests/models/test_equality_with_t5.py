"""The model equals Hugging Face's T5 with the same weights: keys, logits, loss, gradients, greedy output."""

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from fat5 import FAT5Config, FAT5ForConditionalGeneration
from tests.models.conftest import SIZES, VARIANTS

TOLERANCE = {"rtol": 1e-4, "atol": 1e-4}


def test_state_dict_is_that_of_t5(pair):
    ours, theirs = pair
    assert {k: v.shape for k, v in ours.state_dict().items()} == {k: v.shape for k, v in theirs.state_dict().items()}


def compare(ours, theirs, batch: dict) -> None:
    got = ours(**batch, return_logits=True)
    want = theirs(**batch)
    torch.testing.assert_close(got.logits, want.logits, **TOLERANCE)
    torch.testing.assert_close(got.loss, want.loss, **TOLERANCE)
    got.loss.backward()
    want.loss.backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    assert set(expected) == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert parameter.grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad, expected[name], **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}")


def test_logits_loss_and_every_gradient(pair, batch):
    """Pitfalls: a scale of 1 / sqrt(D); a relative bias in cross-attention; a tied head without its scale."""
    compare(*pair, batch)


def test_attention_mask_with_holes(pair, batch):
    batch["attention_mask"][3, 7:9] = 0
    batch["attention_mask"][0, 3] = 0
    compare(*pair, batch)


def test_decoder_mask_with_padding(pair, batch):
    mask = torch.ones_like(batch["labels"])
    mask[0, 12:] = 0
    mask[3, 4] = 0
    labels = batch["labels"].masked_fill(mask == 0, -100)
    compare(*pair, batch | {"labels": labels, "decoder_attention_mask": mask})


def test_mask_of_any_type(pair, batch):
    ours, _ = pair
    expected = ours(**batch).loss
    for dtype in (torch.bool, torch.float32, torch.int32):
        assert ours(**batch | {"attention_mask": batch["attention_mask"].to(dtype)}).loss == expected


def test_greedy_generation(pair, batch):
    """Pitfall: the encoder's mask lost in generate. A row's output does not depend on its padding."""
    ours, theirs = pair
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": 96}
    got = ours.generate(**inputs, **options)
    assert torch.equal(got, theirs.generate(**inputs, **options, use_cache=False))
    assert torch.equal(got, ours.generate(**inputs, **options, use_cache=True))
    alone = ours.generate(inputs["input_ids"][1:2, 13:], **options)[0]
    assert torch.equal(got[1, : len(alone)], alone)


def test_hidden_states_on_request(pair, batch):
    ours, theirs = pair
    got, want = ours(**batch, output_hidden_states=True), theirs(**batch, output_hidden_states=True)
    for side in ("encoder_hidden_states", "decoder_hidden_states"):
        assert len(getattr(got, side)) == len(getattr(want, side))
    for a, b in zip(got.decoder_hidden_states, want.decoder_hidden_states, strict=True):
        torch.testing.assert_close(a, b, **TOLERANCE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_initialisation_is_that_of_t5(variant):
    """Every tensor's standard deviation, but for the untied head, whose T5 initialisation starts with a loss of 100."""
    torch.manual_seed(0)
    settings = SIZES | VARIANTS[variant] | {"d_model": 128, "d_ff": 256, "num_heads": 8, "vocab_size": 512}
    ours = FAT5ForConditionalGeneration(FAT5Config(**settings)).state_dict()
    theirs = T5ForConditionalGeneration(T5Config(**settings, decoder_start_token_id=0)).state_dict()
    for name, weight in ours.items():
        if name == "lm_head.weight" and variant == "v1.1":
            torch.testing.assert_close(weight.std(), torch.tensor(128**-0.5), rtol=0.05, atol=0)
        elif "layer_norm" in name:
            assert torch.equal(weight, theirs[name]), name
        else:
            torch.testing.assert_close(
                weight.std(), theirs[name].std(), rtol=0.35 if "relative" in name else 0.06, atol=0, msg=name
            )


def test_training_follows_t5(pair, batch):
    """Twenty steps of both give the same losses."""
    losses = []
    for model in pair:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses.append([])
        for _ in range(20):
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0] - 0.5
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-4, atol=1e-4)
