"""`fat5 export`: stock Transformers and sentence-transformers load what it writes, and compute the same."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch.nn import functional as F
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoTokenizer, T5ForTokenClassification

from fat5 import (
    FAT5Config,
    FAT5EncoderModel,
    FAT5ForConditionalGeneration,
    FAT5ForSequenceClassification,
    FAT5ForTextEmbedding,
    FAT5ForTokenClassification,
)
from fat5.cli.main import main
from fat5.errors import CheckpointError, ConfigError
from fat5.models.export import export_checkpoint
from fat5.nn import POOLINGS
from tests.data.small_tokenizer import small_tokenizer
from tests.models.position_variants import ENCODINGS, RANDOMIZED
from tests.models.t5_families import FAMILIES, SIZES, UMT5_ALWAYS_SCALES, save_t5, t5_logits

TEXTS = ["Le conseil municipal délibère.", "Article 3 : la présente loi sera exécutée.", "oui"]


def weights_of(folder) -> dict[str, torch.Tensor]:
    return {name: w for path in sorted(folder.glob("*.safetensors")) for name, w in load_file(path).items()}


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(2, 97, (2, 30)), "decoder_input_ids": torch.randint(2, 97, (2, 21))}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_round_trip_is_bit_equal(name, tmp_path, inputs):
    theirs = save_t5(name, tmp_path / "t5")
    model = FAT5ForConditionalGeneration.from_pretrained(tmp_path / "t5")
    model.save_pretrained(tmp_path / "fat5")
    loads_as = export_checkpoint(tmp_path / "fat5", tmp_path / "back")
    assert loads_as == f"{'UMT5' if name.startswith('umt5') else 'T5'}ForConditionalGeneration"
    before, after = weights_of(tmp_path / "t5"), weights_of(tmp_path / "back")
    assert set(before) == set(after)
    assert all(torch.equal(before[key], after[key]) for key in before)
    again, info = AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "back", output_loading_info=True, attn_implementation="eager"
    )
    assert type(again).__name__ == loads_as
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    want = t5_logits(name, theirs, inputs)
    assert torch.equal(t5_logits(name, again, inputs), want)
    torch.testing.assert_close(model(**inputs).logits, want, rtol=1e-5, atol=1e-5)
    twice = FAT5ForConditionalGeneration.from_pretrained(tmp_path / "back")
    assert torch.equal(twice(**inputs).logits, model(**inputs).logits)
    for field in ("tie_word_embeddings", "scale_decoder_outputs", "feed_forward_proj", "layer_norm_epsilon"):
        assert getattr(twice.config, field) == getattr(model.config, field)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("proj", ["relu", "gated-gelu", "gated-silu", "gelu"])
def test_every_model_with_t5_s_positions_can_be_expressed(tie, scale, proj, tmp_path, inputs):
    config = FAT5Config(**SIZES, tie_word_embeddings=tie, scale_decoder_outputs=scale, feed_forward_proj=proj)
    model = FAT5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "fat5", max_shard_size="30KB")
    export_checkpoint(tmp_path / "fat5", tmp_path / "t5")
    assert len(list((tmp_path / "t5").glob("*.safetensors"))) > 1
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "t5")
    torch.testing.assert_close(theirs(**inputs).logits, model(**inputs).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "encoding", [*(name for name in ENCODINGS if name != "relative"), *(name for name in RANDOMIZED)]
)
def test_positions_that_t5_lacks_are_refused(encoding, tmp_path):
    sizes = {name: value for name, value in SIZES.items() if not name.startswith("relative_")}
    settings = (ENCODINGS | RANDOMIZED)[encoding]
    FAT5ForConditionalGeneration(FAT5Config(**sizes | settings)).save_pretrained(tmp_path / "fat5")
    with pytest.raises(ConfigError, match=r"is no T5: .* compute something else"):
        export_checkpoint(tmp_path / "fat5", tmp_path / "t5")
    assert not (tmp_path / "t5").exists()


def test_encoders_and_token_classifiers(tmp_path, inputs):
    for cls, name in ((FAT5EncoderModel, "T5EncoderModel"), (FAT5ForTokenClassification, "T5ForTokenClassification")):
        model = cls(FAT5Config(**SIZES, num_labels=5)).eval()
        model.save_pretrained(tmp_path / name / "fat5")
        assert export_checkpoint(tmp_path / name / "fat5", tmp_path / name / "t5") == name
        theirs, info = getattr(transformers, name).from_pretrained(tmp_path / name / "t5", output_loading_info=True)
        assert not info["missing_keys"]
        got, want = theirs(inputs["input_ids"])[0], model(inputs["input_ids"])[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    assert isinstance(theirs, T5ForTokenClassification)
    assert theirs.config.num_labels == 5


def test_the_tokenizer_goes_with_the_weights(tmp_path):
    tokenizer = small_tokenizer()
    FAT5ForConditionalGeneration(FAT5Config(**SIZES | {"vocab_size": 1024})).save_pretrained(tmp_path / "fat5")
    tokenizer.save_pretrained(tmp_path / "fat5")
    (tmp_path / "fat5" / "optimizer.pt").write_text("large")
    export_checkpoint(tmp_path / "fat5", tmp_path / "t5")
    again = AutoTokenizer.from_pretrained(tmp_path / "t5")
    assert again(TEXTS)["input_ids"] == tokenizer(TEXTS)["input_ids"]
    assert not (tmp_path / "t5" / "optimizer.pt").exists()
    assert json.loads((tmp_path / "t5" / "generation_config.json").read_text())["decoder_start_token_id"] == 0


def test_what_cannot_be_exported_is_named(tmp_path):
    source, output = tmp_path / "fat5", tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        export_checkpoint(tmp_path, output)
    save_t5("t5 v1.0", tmp_path / "t5")
    with pytest.raises(ConfigError, match="model_type='t5'"):
        export_checkpoint(tmp_path / "t5", output)
    FAT5ForSequenceClassification(FAT5Config(**SIZES)).save_pretrained(tmp_path / "classifier")
    with pytest.raises(ConfigError, match="got a FAT5ForSequenceClassification"):
        export_checkpoint(tmp_path / "classifier", output)
    FAT5ForConditionalGeneration(FAT5Config(**SIZES)).save_pretrained(source)
    with pytest.raises(ConfigError, match="did you mean 't5'"):
        export_checkpoint(source, output, to="t4")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"num_layers": 3}))
    with pytest.raises(CheckpointError, match=r"encoder\.block\.2\."):
        export_checkpoint(source, output)
    weights = (source / "model.safetensors").read_bytes()
    (source / "config.json").write_text(json.dumps(config))
    (source / "model.safetensors").write_bytes(weights[:-100])
    with pytest.raises(CheckpointError, match="damaged or cut short"):
        export_checkpoint(source, output)
    (source / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        export_checkpoint(source, output)
    assert not output.exists()


def test_the_command(tmp_path, capsys):
    FAT5ForConditionalGeneration(FAT5Config(**SIZES)).save_pretrained(tmp_path / "fat5")
    command = ["export", str(tmp_path / "fat5"), "--to", "t5", str(tmp_path / "t5")]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{tmp_path}/t5: load it with T5ForConditionalGeneration\n"
    assert main(command) == 2
    assert "already exists" in capsys.readouterr().err


def embedding_folder(tmp_path, pooling: str, route: str):
    """A folder for sentence-transformers, made by the model or by the command; and the model."""
    tokenizer = small_tokenizer()
    model = FAT5ForTextEmbedding(FAT5Config(**SIZES | {"vocab_size": 1024}, pooling=pooling)).eval()
    if route == "save_pretrained":
        model.save_pretrained(tmp_path / "sentences")
        tokenizer.save_pretrained(tmp_path / "sentences")
    else:
        model.transformer.save_pretrained(tmp_path / "fat5")
        tokenizer.save_pretrained(tmp_path / "fat5")
        assert (
            main(["export", str(tmp_path / "fat5"), str(tmp_path / "sentences"), "--to", "sentence-transformers"]) == 0
        )
    return tmp_path / "sentences", model, tokenizer


@pytest.mark.parametrize("route", ["save_pretrained", "export"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_files_of_sentence_transformers(pooling, route, tmp_path):
    """By the documented format: the modules in order, the pooling, and a model that AutoModel finds for it."""
    folder, model, tokenizer = embedding_folder(tmp_path, pooling, route)
    modules = json.loads((folder / "modules.json").read_text())
    kinds = [module["type"].rsplit(".", 1)[1] for module in modules]
    assert kinds == ["Transformer", "Pooling", "Normalize"]
    assert all((folder / module["path"]).is_dir() for module in modules)
    modes = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert modes.pop("word_embedding_dimension") == SIZES["d_model"]
    names = {"mean": "mean_tokens", "first": "cls_token", "eos": "lasttoken"}
    assert [name for name, on in modes.items() if on] == [f"pooling_mode_{names[pooling]}"]
    encoder = AutoModel.from_pretrained(folder)
    assert type(encoder) is FAT5EncoderModel
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    assert torch.equal(encoder(**batch).last_hidden_state, model(**batch).last_hidden_state)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_sentence_transformers_gives_the_model_s_embeddings(pooling, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    folder, model, tokenizer = embedding_folder(tmp_path, pooling, "save_pretrained")
    got = torch.as_tensor(sentence_transformers.SentenceTransformer(str(folder), device="cpu").encode(TEXTS))
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    want = model(**batch).embeddings
    torch.testing.assert_close(want, F.normalize(want, dim=-1))
    assert got.std(0).max() > 1e-3
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_an_encoder_is_exported_with_the_pooling_it_has(tmp_path):
    """A checkpoint of a whole model becomes an embedding model without its decoder."""
    FAT5ForConditionalGeneration(FAT5Config(**SIZES)).save_pretrained(tmp_path / "fat5")
    assert export_checkpoint(tmp_path / "fat5", tmp_path / "out", to="sentence-transformers") == "SentenceTransformer"
    assert not any(name.startswith(("decoder", "lm_head")) for name in weights_of(tmp_path / "out"))
    assert json.loads((tmp_path / "out" / "1_Pooling" / "config.json").read_text())["pooling_mode_mean_tokens"]


@pytest.mark.skipif(UMT5_ALWAYS_SCALES, reason="transformers 5.17 scales UMT5's output whatever its file says")
def test_a_table_a_layer_becomes_a_umt5(tmp_path, inputs):
    config = FAT5Config(**SIZES, relative_attention_per_layer=True)
    model = FAT5ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path / "fat5")
    assert export_checkpoint(tmp_path / "fat5", tmp_path / "t5") == "UMT5ForConditionalGeneration"
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "t5")
    torch.testing.assert_close(theirs(**inputs).logits, model(**inputs).logits, rtol=1e-5, atol=1e-5)


def test_mteb_scores_the_folder_offline(tmp_path, monkeypatch):
    mteb = pytest.importorskip("mteb")
    tasks = pytest.importorskip("mteb.mocks.mock_tasks.sts")
    sentence_transformers = pytest.importorskip("sentence_transformers")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder, _, _ = embedding_folder(tmp_path, "mean", "save_pretrained")
    model = sentence_transformers.SentenceTransformer(str(folder), device="cpu")
    (result,) = mteb.evaluate(model, tasks=[tasks.MockSTSTask()], cache=None).task_results
    assert -1 <= result.get_score() <= 1
