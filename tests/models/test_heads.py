"""Heads on the encoder alone: losses, poolings, layouts, initialisation, loading."""

import pytest
import torch
from torch.nn import functional as F
from transformers import T5ForTokenClassification

from fat5 import (
    FAT5Config,
    FAT5EncoderModel,
    FAT5ForConditionalGeneration,
    FAT5ForQuestionAnswering,
    FAT5ForSequenceClassification,
    FAT5ForTextEmbedding,
    FAT5ForTokenClassification,
)
from fat5.errors import CheckpointError
from fat5.nn import POOLINGS
from tests.models.conftest import SIZES
from tests.models.t5_families import t5_model

HEADS = {
    "sequence": FAT5ForSequenceClassification,
    "token": FAT5ForTokenClassification,
    "question": FAT5ForQuestionAnswering,
    "embedding": FAT5ForTextEmbedding,
}
NEW_PARTS = {
    "sequence": {f"classifier.{layer}.{p}" for layer in ("dense", "out_proj") for p in ("weight", "bias")},
    "token": {"classifier.weight", "classifier.bias"},
    "question": {"qa_outputs.weight", "qa_outputs.bias"},
    "embedding": set(),
}


def make(head: str, **changes):
    return HEADS[head](FAT5Config(**SIZES | changes)).eval()


def answer(output) -> torch.Tensor:
    """What a head is for, as one tensor."""
    for name in ("embeddings", "logits"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return torch.stack([output.start_logits, output.end_logits], -1)


@pytest.fixture
def texts(batch) -> dict[str, torch.Tensor]:
    """Rows padded on every side; two EOS in the first row, none in the second, one at the end of the others."""
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    inputs["input_ids"][0, [9, 20]] = 1
    inputs["input_ids"][2, 30] = inputs["input_ids"][3, 39] = 1
    inputs["input_ids"][0, 30] = 1  # padding
    return inputs


def rows_of(texts) -> list[torch.Tensor]:
    return [ids[mask.bool()] for ids, mask in zip(texts["input_ids"], texts["attention_mask"], strict=True)]


def pack(texts, spare: int = 5) -> dict:
    """The same texts side by side, behind them an empty document and tokens of none."""
    rows = rows_of(texts)
    offsets = torch.tensor([0, *(len(row) for row in rows), 0]).cumsum(0).int()
    ids = torch.cat([*rows, torch.full((spare,), 1)])
    return {"input_ids": ids, "cu_seqlens": offsets, "max_seqlen": 40}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("head", ["sequence", "embedding"])
def test_a_text_is_read_alone_in_every_layout(head, pooling, texts):
    """Padding on the left or the right, holes, packing: each row gives what it gives by itself."""
    model = make(head, pooling=pooling, num_labels=3)
    alone = torch.cat([answer(model(row[None])) for row in rows_of(texts)])
    assert alone.std(0).min() > 1e-3
    torch.testing.assert_close(answer(model(**texts)), alone, rtol=1e-4, atol=1e-5)
    packed = answer(model(**pack(texts)))
    assert packed.shape[0] == 5
    torch.testing.assert_close(packed[:4], alone, rtol=1e-4, atol=1e-5)
    if pooling != "eos":
        embedded = texts | {"input_ids": None, "inputs_embeds": model.get_input_embeddings()(texts["input_ids"])}
        torch.testing.assert_close(answer(model(**embedded)), alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", ["token", "question"])
def test_tokens_are_read_alone_in_every_layout(head, texts):
    model = make(head, num_labels=3)
    real = texts["attention_mask"].bool()
    alone = torch.cat([answer(model(row[None]))[0] for row in rows_of(texts)])
    torch.testing.assert_close(answer(model(**texts))[real], alone, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(answer(model(**pack(texts)))[: int(real.sum())], alone, rtol=1e-4, atol=1e-5)


def test_poolings(texts):
    config = FAT5Config(**SIZES)
    states = FAT5EncoderModel(config).eval()
    last_eos = [20, None, 30, 39]
    for pooling in POOLINGS:
        config.pooling = pooling
        model = FAT5ForTextEmbedding(config).eval()
        model.transformer.load_state_dict(states.state_dict())
        output = model(**texts)
        hidden, mask = output.last_hidden_state, texts["attention_mask"].bool()
        for row in range(4):
            own = hidden[row][mask[row]]
            if pooling == "mean":
                want = own.mean(0)
            elif pooling == "first":
                want = own[0]
            else:
                want = own[-1] if last_eos[row] is None else hidden[row, last_eos[row]]
            torch.testing.assert_close(output.embeddings[row], F.normalize(want, dim=0))


def test_a_mask_with_holes_and_a_text_without_tokens(texts):
    model = make("embedding")
    texts["attention_mask"][3, 7:9] = 0
    texts["attention_mask"][1] = 0
    output = model(**texts)
    kept = texts["attention_mask"][3].bool()
    torch.testing.assert_close(output.embeddings[3], F.normalize(output.last_hidden_state[3][kept].mean(0), dim=0))
    assert not output.embeddings[1].any()
    assert output.embeddings.isfinite().all()


@pytest.mark.parametrize(
    ("problem", "num_labels", "labels"),
    [
        ("single_label_classification", 5, torch.tensor([4, 0, 2, 1])),
        ("multi_label_classification", 3, torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0], [1, 1, 1]])),
        ("regression", 1, torch.tensor([0.5, -1.0, 2.0, 0.0])),
        ("regression", 1, torch.tensor([[0.5], [-1.0], [2.0], [0.0]])),
    ],
)
def test_the_problem_follows_from_the_labels_as_in_transformers(problem, num_labels, labels, texts):
    model = make("sequence", num_labels=num_labels)
    output = model(**texts, labels=labels)
    assert model.config.problem_type == problem
    if problem == "single_label_classification":
        want = F.cross_entropy(output.logits, labels)
    elif problem == "regression":
        want = F.mse_loss(output.logits.squeeze(), labels.squeeze())
    else:
        want = F.binary_cross_entropy_with_logits(output.logits, labels)
    torch.testing.assert_close(output.loss, want)
    shape = labels.shape[1:]
    with_empty = torch.cat([labels, torch.full((1, *shape), 0, dtype=labels.dtype)])
    torch.testing.assert_close(model(**pack(texts), labels=with_empty).loss, want)
    model.config.problem_type = "regression"
    if num_labels == 3:
        torch.testing.assert_close(model(**texts, labels=labels).loss, F.mse_loss(output.logits, labels))


def test_ignored_labels(texts):
    model = make("sequence", num_labels=3)
    labels = torch.tensor([2, -100, 0, -100])
    output = model(**texts, labels=labels)
    torch.testing.assert_close(output.loss, F.cross_entropy(output.logits, labels))
    nothing = model(**texts, labels=torch.full((4,), -100)).loss
    nothing.backward()
    assert nothing == 0
    assert not model.classifier.out_proj.weight.grad.any()


def test_token_classification_is_that_of_transformers(texts, tmp_path):
    """The same keys, so that its checkpoints load; the same logits, loss and gradients."""
    config = t5_model("t5 v1.1").config
    config.num_labels = 4
    theirs = T5ForTokenClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    ours, info = FAT5ForTokenClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    labels = torch.randint(4, (4, 40)).masked_fill(texts["attention_mask"] == 0, -100)
    got, want = ours(**texts, labels=labels), theirs(**texts, labels=labels)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.loss, want.loss, rtol=1e-5, atol=1e-5)
    got.loss.backward()
    want.loss.backward()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-5, msg=name)
    packed = pack(texts)
    flat = torch.cat([labels[texts["attention_mask"] == 1], torch.full((5,), -100)])
    torch.testing.assert_close(ours(**packed, labels=flat).loss, want.loss, rtol=1e-5, atol=1e-5)


def test_question_answering_loss(texts):
    model = make("question")
    starts, ends = torch.tensor([3, 20, 99, 5]), torch.tensor([[6], [22], [99], [40]])
    output = model(**texts, start_positions=starts, end_positions=ends)
    kept_starts, kept_ends = torch.tensor([3, 20, -100, 5]), torch.tensor([6, 22, -100, -100])
    want = F.cross_entropy(output.start_logits, kept_starts) + F.cross_entropy(output.end_logits, kept_ends)
    torch.testing.assert_close(output.loss, want / 2)


@pytest.mark.parametrize("source", ["whole", "encoder", "t5"])
@pytest.mark.parametrize("head", HEADS)
def test_a_head_starts_from_any_body(head, source, tmp_path, texts, caplog):
    """The decoder is left out without a word, the new head is listed, and nothing else is skipped or made up."""
    config = FAT5Config(**SIZES)
    body = FAT5ForConditionalGeneration(config) if source == "whole" else FAT5EncoderModel(config)
    (t5_model("t5 v1.0") if source == "t5" else body).save_pretrained(tmp_path)
    model, info = HEADS[head].from_pretrained(tmp_path, output_loading_info=True, num_labels=7)
    assert set(info["missing_keys"]) == NEW_PARTS[head]
    assert not info["unexpected_keys"]
    assert "UNEXPECTED" not in caplog.text
    assert "decoder" not in caplog.text
    assert ("MISSING" in caplog.text) == bool(NEW_PARTS[head])
    encoder = FAT5EncoderModel.from_pretrained(tmp_path)
    states = encoder(**texts).last_hidden_state
    assert torch.equal(model.transformer(**texts).last_hidden_state, states)
    assert answer(model(**texts)).isfinite().all()
    assert model.get_input_embeddings().weight is model.transformer.encoder.embed_tokens.weight


@pytest.mark.parametrize("head", HEADS)
def test_round_trip_and_the_way_back_to_the_encoder(head, tmp_path, texts):
    model = make(head, num_labels=3)
    model.save_pretrained(tmp_path)
    again, info = HEADS[head].from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert torch.equal(answer(again(**texts)), answer(model(**texts)))
    encoder = FAT5EncoderModel.from_pretrained(tmp_path)
    assert torch.equal(encoder(**texts).last_hidden_state, model.transformer(**texts).last_hidden_state)
    with pytest.raises(CheckpointError, match="it lacks decoder"):
        FAT5ForConditionalGeneration.from_pretrained(tmp_path)


@pytest.mark.parametrize("head", ["sequence", "token", "question"])
def test_a_new_head_starts_with_logits_of_order_one(head):
    """Transformers starts the token classifier with standard deviation 1, and logits of sqrt(d_model)."""
    torch.manual_seed(0)
    model = make(head, d_model=256, num_labels=50)
    for name, parameter in model.named_parameters():
        if name in NEW_PARTS[head]:
            expected = 256**-0.5 if name.endswith("weight") else 0.0
            torch.testing.assert_close(parameter.std(), torch.tensor(expected), rtol=0.2, atol=1e-6)
    logits = answer(model(torch.randint(97, (8, 30))))
    assert 0.05 < logits.std() < 2


@pytest.mark.parametrize("head", ["sequence", "token", "question"])
def test_classifier_dropout_acts_in_training_alone(head, texts):
    model = make(head, classifier_dropout=0.5)
    assert torch.equal(answer(model(**texts)), answer(model(**texts)))
    model.train()
    assert not torch.equal(answer(model(**texts)), answer(model(**texts)))


@pytest.mark.parametrize(("pooling", "layout"), [("mean", "padded"), ("mean", "packed"), ("eos", "packed")])
def test_training_in_one_graph_and_with_checkpointing(pooling, layout, texts):
    model = make("sequence", num_labels=3, pooling=pooling).train()
    labels = torch.tensor([0, 1, 2, 0])
    inputs = texts | {"labels": labels}
    if layout == "packed":
        inputs = pack(texts) | {"labels": torch.tensor([*labels, -100])}
    model.config.problem_type = "single_label_classification"

    def gradients(run):
        model.zero_grad()
        run(**inputs).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = gradients(model)
    assert all(grad.any() for grad in expected.values())
    compiled = gradients(torch.compile(model, fullgraph=True, backend="aot_eager"))
    model.gradient_checkpointing_enable()
    for got in (compiled, gradients(model)):
        for name, grad in got.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_classifier_learns(texts):
    model = make("sequence", num_labels=4).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(30):
        loss = model(**texts, labels=torch.arange(4)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1


@pytest.mark.parametrize(
    ("head", "change", "message"),
    [
        ("sequence", {"labels": torch.zeros(3, dtype=torch.int64)}, r"\[3\].* of 4 texts; expected \[4\]"),
        ("sequence", {"labels": torch.zeros(4)}, r"expected \[4, 2\]"),
        ("token", {"labels": torch.zeros(4, 39, dtype=torch.int64)}, r"\[4, 39\] for tokens \[4, 40\]"),
        ("question", {"start_positions": torch.zeros(4, dtype=torch.int64)}, "the loss needs both"),
        ("question", {"start_positions": torch.zeros(3).long(), "end_positions": torch.zeros(3).long()}, r"4 texts"),
    ],
)
def test_labels_that_do_not_fit_are_named(head, change, message, texts):
    with pytest.raises(ValueError, match=message):
        make(head)(**texts, **change)


def test_settings_that_no_head_can_have_are_named():
    with pytest.raises(Exception, match=r"pooling='max'"):
        FAT5Config(pooling="max")
    with pytest.raises(Exception, match=r"classifier_dropout=1\.0"):
        FAT5Config(classifier_dropout=1.0)
