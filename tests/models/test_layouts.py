"""Packed equals padded equals each document alone; gradient checkpointing, dropout and compilation change nothing."""

import pytest
import torch

from fat5 import FAT5Config, FAT5EncoderModel, FAT5ForConditionalGeneration
from fat5.nn import attention as attention_module
from fat5.nn import shared_keys as shared_keys_module
from tests.models.conftest import SIZES


def documents(batch: dict) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each row's real tokens and labels."""
    rows = zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    return [(ids[mask == 1], labels[labels != -100]) for ids, mask, labels in rows]


def pack(batch: dict, spare: int = 5) -> dict:
    """The same documents side by side, with unused tokens and empty slots at the end."""
    docs = documents(batch)
    packed = {}
    for name, prefix, fill, side in (("input_ids", "", 0, 0), ("labels", "decoder_", -100, 1)):
        parts = [d[side] for d in docs]
        packed[name] = torch.cat([*parts, torch.full((spare,), fill)])
        ends = torch.tensor([0, *map(len, parts)]).cumsum(0)
        packed[f"{prefix}cu_seqlens"] = torch.cat([ends, ends[-1:].expand(3)]).int()
        packed[f"{prefix}max_seqlen"] = 40
    return packed


def gradients(model, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def test_packed_equals_padded_equals_each_document_alone(model, batch):
    """Pitfalls: packed documents see each other; losses are means over all tokens, not the kept ones."""
    padded = model(**batch)
    packed = model(**pack(batch))
    alone = [model(input_ids=x[None], labels=y[None], reduction="sum") for x, y in documents(batch)]
    count = sum(int(o.count) for o in alone)
    assert int(padded.count) == int(packed.count) == count
    torch.testing.assert_close(packed.loss, padded.loss)
    torch.testing.assert_close(sum(o.loss for o in alone) / count, padded.loss)
    torch.testing.assert_close(packed.z_loss, padded.z_loss)
    assert int(packed.correct.sum()) == int(padded.correct.sum())
    expected = gradients(model, padded.loss)
    for got in (gradients(model, packed.loss), gradients(model, sum(o.loss for o in alone) / count)):
        for name, grad in got.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_packed_logits_and_decoder_inputs(model, batch):
    packed = pack(batch)
    logits = model(**packed, return_logits=True).logits
    shifted = model.shift_right(packed["labels"], packed["decoder_cu_seqlens"])
    assert torch.equal(logits, model(**{**packed, "decoder_input_ids": shifted}, return_logits=True).logits)
    start = 0
    for x, y in documents(batch):
        assert shifted[start] == model.config.decoder_start_token_id
        assert torch.equal(shifted[start + 1 : start + len(y)], y[:-1])
        alone = model(input_ids=x[None], labels=y[None], return_logits=True).logits[0]
        torch.testing.assert_close(logits[start : start + len(y)], alone)
        start += len(y)
    assert (shifted >= 0).all()


def test_a_packed_budget_without_spare_tokens(model, batch):
    """The last offset may equal the budget."""
    torch.testing.assert_close(model(**pack(batch, spare=0)).loss, model(**batch).loss)


def test_encoder_alone(model, batch):
    encoder = FAT5EncoderModel(model.config).eval()
    missing, unexpected = encoder.load_state_dict(model.state_dict(), strict=False)
    assert not missing
    assert all(k.startswith(("decoder.", "lm_head.")) for k in unexpected)
    states = encoder(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    packed = pack(batch)
    flat = encoder(packed["input_ids"], cu_seqlens=packed["cu_seqlens"], max_seqlen=40).last_hidden_state
    real = batch["attention_mask"].bool()
    torch.testing.assert_close(flat[: int(real.sum())], states[real])
    assert torch.equal(states, model(**batch).encoder_last_hidden_state)


def test_padding_content_does_not_matter(model, batch):
    """Pitfall: a row's output depends on its padding."""
    expected = model(**batch).loss
    batch["input_ids"] = batch["input_ids"].where(batch["attention_mask"] == 1, 50)
    torch.testing.assert_close(model(**batch).loss, expected)


def test_no_real_token_gives_zero_loss_and_gradients(model, batch):
    """Pitfall: all labels ignored gives 0 / 0."""
    batch["labels"][:] = -100
    batch["attention_mask"][1] = 0
    loss = model(**batch).loss
    assert loss == 0
    assert all(not g.any() for g in gradients(model, loss).values())


def test_num_items_in_batch_normalises_the_sum(model, batch):
    total = model(**batch, reduction="sum")
    output = model(**batch, num_items_in_batch=torch.tensor(200))
    torch.testing.assert_close(output.loss, total.loss / 200)
    torch.testing.assert_close(output.z_loss, total.z_loss / 200)


def test_losses_per_token(model, batch):
    output = model(**batch, reduction="none")
    assert output.loss.shape == batch["labels"].shape
    assert not output.loss[batch["labels"] == -100].any()
    torch.testing.assert_close(output.loss.sum() / output.count, model(**batch).loss)


def test_logits_exist_only_when_asked_for(model, batch):
    assert model(**batch).logits is None
    assert model(**batch, return_logits=True).logits.shape == (4, 21, 97)
    labels = batch.pop("labels")
    assert model(**batch, decoder_input_ids=labels.clamp_min(0)).logits.shape == (4, 21, 97)


def test_embeddings_instead_of_tokens(model, batch):
    expected = model(**batch).loss
    embeds = model.shared(batch.pop("input_ids"))
    decoder_embeds = model.shared(model.shift_right(batch["labels"]))
    output = model(**batch, inputs_embeds=embeds, decoder_inputs_embeds=decoder_embeds)
    torch.testing.assert_close(output.loss, expected)


def test_encoder_outputs_are_reused(model, batch):
    encoded = model.encoder(batch["input_ids"], batch["attention_mask"])
    output = model(encoder_outputs=encoded, attention_mask=batch["attention_mask"], labels=batch["labels"])
    assert torch.equal(output.loss, model(**batch).loss)


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_gradient_checkpointing_changes_nothing(batch, layout, dropout):
    """Pitfall: recomputation draws new dropout. Gradients are equal with and without."""
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES | {"dropout_rate": dropout})).train()
    inputs = pack(batch) if layout == "packed" else batch

    def run():
        torch.manual_seed(3)
        return gradients(model, model(**inputs).loss)

    expected = run()
    model.gradient_checkpointing_enable()
    for name, grad in run().items():
        torch.testing.assert_close(grad, expected[name], msg=name)


def test_dropout_acts_in_training_alone(batch):
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES | {"dropout_rate": 0.2})).train()
    assert model(**batch).loss != model(**batch).loss
    model.eval()
    assert model(**batch).loss == model(**batch).loss


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_compiles_whole(model, batch, layout):
    """Forward and backward in one graph without breaks."""
    inputs = pack(batch) if layout == "packed" else batch
    expected = gradients(model, model(**inputs).loss)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for name, grad in gradients(model, compiled(**inputs).loss).items():
        torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_compiled_model_stops_at_a_mask_with_holes(model, batch):
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    batch["attention_mask"][3, 7] = 0
    with pytest.raises(RuntimeError, match="holes"):
        compiled(**batch)


def test_bf16_training_step(model, batch):
    model.to(torch.bfloat16).train()
    loss = model(**batch).loss
    assert loss.dtype == torch.float32
    for name, grad in gradients(model, loss).items():
        assert grad.dtype == torch.bfloat16
        assert grad.isfinite().all(), name
        assert grad.any(), name


def test_autocast_gives_fp32_gradients_of_the_same_direction(model, batch):
    expected = gradients(model, model(**batch).loss)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(**batch).loss
    for name, grad in gradients(model, loss).items():
        assert grad.dtype == torch.float32
        assert torch.cosine_similarity(grad.flatten(), expected[name].flatten(), dim=0) > 0.99, name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(4, 3, dtype=torch.int64), "decoder_input_ids": torch.zeros(4, 4).long()}, r"\[4, 3\]"),
        ({"attention_mask": torch.ones(4, 39)}, r"attention_mask \[4, 39\]"),
        ({"cu_seqlens": torch.tensor([0, 40])}, "one side alone"),
        ({"max_seqlen": 40}, "belong together"),
        ({"input_ids": torch.zeros(40, dtype=torch.int64), "attention_mask": None}, r"\[batch, length\]"),
        ({"input_ids": None}, "exactly one of input_ids"),
        ({"labels": None}, "decoder_input_ids"),
    ],
)
def test_inputs_that_do_not_fit_are_named(model, batch, change, message):
    with pytest.raises(ValueError, match=message):
        model(**batch | change)


def test_packed_on_one_side_alone_is_named(model, batch):
    packed = pack(batch)
    with pytest.raises(ValueError, match="one side alone"):
        model(**{k: v for k, v in packed.items() if not k.startswith("decoder_")})


def recording(attend, asked: list[str]):
    """An attention function that notes the backend it was asked for."""

    def recorded(*args, **kwargs):
        asked.append(kwargs["backend"])
        return attend(*args, **kwargs)

    return recorded


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_attention_backend_reaches_every_attention(batch, layout, monkeypatch):
    """The setting is heard by encoder, decoder and cross-attention, and every backend gives the same loss."""
    from fat5.ops.attention.backends import BACKENDS

    working = [name for name, reason in BACKENDS.items() if reason() is None]
    losses = {}
    for name in working:
        asked: list[str] = []
        for module, function in (
            (attention_module, "flash_attention"),
            (attention_module, "joined_attention"),
            (shared_keys_module, "shared_attention"),
        ):
            monkeypatch.setattr(module, function, recording(getattr(module, function), asked))
        torch.manual_seed(0)
        model = FAT5ForConditionalGeneration(FAT5Config(**SIZES | {"d_kv": 16}, attention_backend=name)).eval()
        losses[name] = model(**pack(batch) if layout == "packed" else batch).loss
        assert asked == [name] * (2 + 2 * 3)
        monkeypatch.undo()
    for loss in losses.values():
        torch.testing.assert_close(loss, losses["torch"], rtol=1e-4, atol=1e-5)


def test_an_unknown_attention_backend_is_named():
    with pytest.raises(Exception, match="attention_backend='tritan'"):
        FAT5Config(attention_backend="tritan")
