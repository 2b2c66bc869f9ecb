"""What users of Transformers do with a model: pipelines, adapters, devices, types, vocabularies, the hub."""

import copy

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTextEncoding,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
    pipeline,
)

from fat5 import (
    FAT5Config,
    FAT5EncoderModel,
    FAT5ForConditionalGeneration,
    FAT5ForQuestionAnswering,
    FAT5ForSequenceClassification,
    FAT5ForTextEmbedding,
    FAT5ForTokenClassification,
)
from fat5.nn import SequenceLayout
from fat5.nn.position import locate
from tests.data.small_tokenizer import small_tokenizer
from tests.models.conftest import SIZES
from tests.models.position_variants import make

NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}


def folder_of(model, path):
    model.save_pretrained(path)
    small_tokenizer().save_pretrained(path)
    return str(path)


def classifier(**changes) -> FAT5ForSequenceClassification:
    labels = {"id2label": NLI, "label2id": {name: n for n, name in NLI.items()}}
    return FAT5ForSequenceClassification(FAT5Config(**SIZES | {"vocab_size": 1024}, **labels, **changes)).eval()


AUTO_CLASSES = {
    FAT5ForSequenceClassification: AutoModelForSequenceClassification,
    FAT5ForTokenClassification: AutoModelForTokenClassification,
    FAT5ForQuestionAnswering: AutoModelForQuestionAnswering,
    FAT5EncoderModel: AutoModelForTextEncoding,
}


@pytest.mark.parametrize("cls", AUTO_CLASSES)
def test_auto_classes_of_the_heads(cls, tmp_path):
    cls(FAT5Config(**SIZES)).save_pretrained(tmp_path)
    assert type(AUTO_CLASSES[cls].from_pretrained(tmp_path)) is cls


def test_text_classification_pipeline(tmp_path):
    model = classifier()
    run = pipeline("text-classification", folder_of(model, tmp_path))
    results = run(["oui", "Le conseil municipal a voté la loi."], batch_size=2, top_k=None)
    batch = small_tokenizer()(["oui", "Le conseil municipal a voté la loi."], padding=True, return_tensors="pt")
    expected = model(**batch).logits.softmax(-1)
    for row, scores in zip(results, expected, strict=True):
        got = torch.tensor([{entry["label"]: entry["score"] for entry in row}[NLI[n]] for n in range(3)])
        torch.testing.assert_close(got, scores, rtol=1e-4, atol=1e-5)


def test_zero_shot_pipeline(tmp_path):
    run = pipeline("zero-shot-classification", folder_of(classifier(), tmp_path))
    result = run("La loi est votée.", candidate_labels=["droit", "cuisine"], hypothesis_template="C'est : {}.")
    assert sorted(result["labels"]) == ["cuisine", "droit"]
    assert abs(sum(result["scores"]) - 1) < 1e-5


def test_token_classification_pipeline(tmp_path):
    model = FAT5ForTokenClassification(FAT5Config(**SIZES | {"vocab_size": 1024}, num_labels=4)).eval()
    text = "Le conseil municipal"
    result = pipeline("token-classification", folder_of(model, tmp_path), ignore_labels=[])(text)
    ids = small_tokenizer()(text, return_tensors="pt")
    expected = model(**ids).logits[0].argmax(-1).tolist()
    assert [entry["entity"] for entry in result] == [f"LABEL_{n}" for n in expected[: len(result)]]
    assert len(result) == len(expected) - 1  # without the end of the sequence


@pytest.mark.parametrize("cls", [FAT5EncoderModel, FAT5ForConditionalGeneration, FAT5ForTextEmbedding])
def test_feature_extraction_pipeline(cls, tmp_path):
    model = cls(FAT5Config(**SIZES | {"vocab_size": 1024})).eval()
    got = torch.tensor(pipeline("feature-extraction", folder_of(model, tmp_path))("le conseil"))
    ids = small_tokenizer()("le conseil", return_tensors="pt")["input_ids"]
    want = model.get_encoder()(ids).last_hidden_state
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_trainer_finetunes_a_classifier(tmp_path):
    model = classifier(classifier_dropout=0.1)
    rows = [{"input_ids": torch.full((6,), 300 + n % 3), "labels": n % 3} for n in range(12)]
    settings = TrainingArguments(
        tmp_path, per_device_train_batch_size=12, max_steps=25, learning_rate=1e-2, report_to="none", use_cpu=True,
        save_strategy="no", disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < before / 2
    assert model.config.problem_type == "single_label_classification"


@pytest.mark.parametrize("tied", [True, False])
def test_resizing_keeps_the_old_rows_and_starts_new_ones_near_their_mean(tied, batch):
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES, tie_word_embeddings=tied)).eval()
    with torch.no_grad():
        model.lm_head.weight += 3.0
    before = {name: getattr(model, name).weight.detach().clone() for name in ("shared", "lm_head")}
    expected = model(**batch, return_logits=True).logits
    model.resize_token_embeddings(100, pad_to_multiple_of=64)
    assert model.config.vocab_size == model.lm_head.out_features == model.shared.num_embeddings == 128
    torch.testing.assert_close(model(**batch, return_logits=True).logits[..., :97], expected)
    for name, old in before.items():
        new = getattr(model, name).weight
        assert torch.equal(new[:97], old)
        torch.testing.assert_close(new[97:].mean(0), old.mean(0), rtol=0, atol=0.5)
    assert (model.lm_head.weight is model.shared.weight) is tied
    model.resize_token_embeddings(60)
    assert model.lm_head.weight.shape[0] == model.decoder.embed_tokens.weight.shape[0] == 60


def test_heads_resize_and_exchange_their_embedding(batch):
    model = FAT5ForSequenceClassification(FAT5Config(**SIZES)).eval()
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = model(**inputs).logits
    model.resize_token_embeddings(120)
    assert model.transformer.shared.weight.shape[0] == model.config.vocab_size == 120
    torch.testing.assert_close(model(**inputs).logits, expected)
    model.set_input_embeddings(nn.Embedding(120, SIZES["d_model"]))
    assert model.get_input_embeddings() is model.transformer.encoder.embed_tokens
    assert not torch.allclose(model(**inputs).logits, expected)


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"shared": 0, "encoder": 0, "decoder": 0, "lm_head": 0}])
@pytest.mark.parametrize("tied", [True, False])
def test_device_maps(device_map, tied, tmp_path, batch):
    if isinstance(device_map, dict):
        device_map = dict.fromkeys(device_map, "cpu")
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES, tie_word_embeddings=tied)).eval()
    model.save_pretrained(tmp_path)
    again = FAT5ForConditionalGeneration.from_pretrained(tmp_path, device_map=device_map)
    assert torch.equal(again(**batch).loss, model(**batch).loss)


@pytest.mark.parametrize("tied", [True, False])
def test_parts_on_the_disk(tied, tmp_path, batch):
    """The loss is right although the head's weight exists while the head is called alone."""
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES, tie_word_embeddings=tied, z_loss=1e-2)).eval()
    model.save_pretrained(tmp_path / "model")
    device_map = {"shared": "cpu", "encoder": "cpu", "decoder.embed_tokens": "cpu", "decoder.block.0": "cpu"}
    device_map |= dict.fromkeys(("decoder.block.1", "decoder.block.2", "decoder.final_layer_norm"), "disk")
    device_map["lm_head"] = "cpu" if tied else "disk"
    again = FAT5ForConditionalGeneration.from_pretrained(
        tmp_path / "model", device_map=device_map, offload_folder=tmp_path / "disk"
    )
    assert again.decoder.block[1].layer[0].SelfAttention.q.weight.device.type == "meta"
    for _ in range(2):
        torch.testing.assert_close(again(**batch).loss, model(**batch).loss)


@pytest.mark.parametrize("encoding", ["rotary", "fire"])
def test_layouts_and_positions_follow_a_model_over_devices(encoding):
    """accelerate moves a block's arguments to the block's device by their `to`."""
    model = make(encoding)
    mask = torch.ones(2, 6)
    mask[0, 4:] = 0
    layouts = [SequenceLayout.from_attention_mask(mask), SequenceLayout.packed(torch.tensor([0, 6]), 6)]
    hidden = torch.zeros(2, 6, 32)
    positions = locate(model.config.position_settings, layouts[0], hidden, 12, causal=True, training=False)
    for holder in (*layouts, positions):
        moved = holder.to("meta")
        parts = {**vars(moved), **(vars(moved.rotation) if getattr(moved, "rotation", None) else {})}
        tensors = [value for value in parts.values() if isinstance(value, torch.Tensor)]
        assert tensors
        assert all(value.device.type == "meta" for value in tensors)
        assert type(moved) is type(holder)


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_loading_in_another_type(name, tmp_path, batch):
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES)).eval()
    model.save_pretrained(tmp_path)
    again = FAT5ForConditionalGeneration.from_pretrained(tmp_path, **{name: torch.bfloat16}, low_cpu_mem_usage=True)
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(again(**batch).loss, model(**batch).loss, rtol=0.02, atol=0.02)
    again.save_pretrained(tmp_path)
    assert FAT5ForConditionalGeneration.from_pretrained(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("encoding", ["relative", "alibi", "alibi, learned", "xpos", "fire"])
def test_a_model_made_on_the_meta_device(encoding, batch):
    """Nothing that the model needs is made in its constructor alone, so no buffer is left empty."""
    model = make(encoding)
    with torch.device("meta"):
        empty = FAT5ForConditionalGeneration(model.config)
    again = empty.to_empty(device="cpu").eval()
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(**batch).loss, model(**batch).loss)


@pytest.mark.parametrize("name", ["sdpa", "flash_attention_2", "fat5", "xyz"])
def test_attention_is_chosen_by_the_backend(name, tmp_path):
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES))
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"attn_implementation='{name}'.*attention_backend"):
        FAT5ForConditionalGeneration.from_pretrained(tmp_path, attn_implementation=name)
    assert FAT5ForConditionalGeneration.from_pretrained(tmp_path, attn_implementation="eager")
    again = FAT5ForConditionalGeneration.from_pretrained(tmp_path, attention_backend="torch")
    assert again.decoder.block[0].layer[1].EncDecAttention.backend == "torch"


def test_hidden_states_by_the_configuration(batch):
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES, output_hidden_states=True)).eval()
    output = model(**batch)
    assert (len(output.encoder_hidden_states), len(output.decoder_hidden_states)) == (3, 4)
    assert model(**batch, output_hidden_states=False).encoder_hidden_states is None


def test_push_to_hub_sends_the_files_of_sentence_transformers(tmp_path, monkeypatch):
    sent = []

    def record(self, working_dir, repo_id, files_timestamps=None, **options):
        from pathlib import Path

        sent.append((repo_id, {str(p.relative_to(working_dir)) for p in Path(working_dir).rglob("*") if p.is_file()}))

    monkeypatch.setattr(FAT5ForTextEmbedding, "_upload_modified_files", record)
    for module in ("transformers.utils.hub", "transformers.modeling_utils"):
        monkeypatch.setattr(f"{module}.create_repo", lambda repo_id, **_: type("Repo", (), {"repo_id": repo_id})())
    model = FAT5ForTextEmbedding(FAT5Config(**SIZES))
    model.push_to_hub("somebody/sentences")
    model.save_pretrained(tmp_path / "sentences", push_to_hub=True, repo_id="somebody/more")
    assert [name for name, _ in sent] == ["somebody/sentences", "somebody/more"]
    for _, files in sent:
        assert {"config.json", "model.safetensors", "modules.json", "1_Pooling/config.json"} <= files
    assert (tmp_path / "sentences" / "modules.json").is_file()


class ScaledHead(nn.Module):
    """A stand-in for an adapter on the LM head: what it computes is not what its weight says."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head, self.weight = head, head.weight

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * self.head(hidden_states)


def test_an_adapter_on_the_head_counts_in_the_loss(batch):
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES)).eval()
    adapted = copy.deepcopy(model)
    adapted.lm_head = ScaledHead(adapted.lm_head)
    with torch.no_grad():
        model.lm_head.weight *= 2
    torch.testing.assert_close(adapted(**batch).loss, model(**batch).loss)


def test_lora(tmp_path, batch):
    peft = pytest.importorskip("peft")
    model = FAT5ForConditionalGeneration(FAT5Config(**SIZES)).eval()
    expected = model(**batch).loss
    settings = peft.LoraConfig(task_type="SEQ_2_SEQ_LM", target_modules=["q", "v", "wo", "lm_head"], r=4)
    adapted = peft.get_peft_model(model, settings)
    torch.testing.assert_close(adapted(**batch).loss, expected)
    adapted.train()
    optimizer = torch.optim.SGD([p for p in adapted.parameters() if p.requires_grad], lr=1.0)
    for _ in range(5):
        optimizer.zero_grad()
        adapted(**batch).loss.backward()
        optimizer.step()
    trained = adapted.eval()(**batch).loss
    assert trained < expected - 0.05
    adapted.save_pretrained(tmp_path)
    plain = adapted.merge_and_unload()
    torch.testing.assert_close(plain(**batch).loss, trained)


@pytest.mark.parametrize(
    ("cls", "task"),
    [
        (FAT5ForSequenceClassification, "SEQ_CLS"),
        (FAT5ForTokenClassification, "TOKEN_CLS"),
        (FAT5ForQuestionAnswering, "QUESTION_ANS"),
    ],
)
def test_lora_trains_the_new_head_in_full(cls, task):
    """PEFT knows heads by name."""
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(task_type=task, target_modules=["q", "v"])
    adapted = peft.get_peft_model(cls(FAT5Config(**SIZES)), settings)
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    assert any("lora_A" in name for name in trained)
    assert any("classifier" in name or "qa_outputs" in name for name in trained)
