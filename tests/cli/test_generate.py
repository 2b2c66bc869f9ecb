"""`fat5 generate`: where texts come from, what is written, and errors of one line."""

from __future__ import annotations

import io
import json

import pytest
import torch

from fat5 import FAT5Config, FAT5EncoderModel, FAT5ForConditionalGeneration, FAT5ForSequenceClassification
from fat5.cli import main as cli
from fat5.data.sample import sample_documents
from fat5.data.tokenizer import load_tokenizer, save_tokenizer
from fat5.data.tokenizer_training import TokenizerConfig, train_tokenizer
from fat5.errors import ConfigError
from fat5.training.text_generation import GenerationSettings, generate_texts, load_model

SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
TEXTS = ["La loi du pays", "Le conseil", "Un texte bien plus long que tous les autres de cette liste", ""]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    documents = [next(iter(sample_documents()))[:4000]]
    tokenizer = train_tokenizer(documents, TokenizerConfig(vocab_size=576), show_progress=False)
    torch.manual_seed(0)
    model = FAT5ForConditionalGeneration(FAT5Config(vocab_size=576, **SIZES, position_encoding="rotary"))
    for weight in (model.lm_head.weight, model.decoder.block[0].layer[1].EncDecAttention.o.weight):
        torch.nn.init.normal_(weight)  # what is generated depends on the text
    save_tokenizer(tokenizer, folder)
    model.save_pretrained(folder)
    return folder


def generate(capsys, *arguments):
    assert cli.main(["generate", *map(str, arguments), "--max-new-tokens", "6"]) == 0
    return capsys.readouterr().out


def standard_input(content):
    return io.TextIOWrapper(io.BytesIO(content))


def test_texts_come_back_in_order_from_everywhere(checkpoint, capsys, tmp_path, monkeypatch):
    """Arguments, a text file, JSON lines and the standard input; batches of similar lengths, alone or together."""
    model, tokenizer = load_model(checkpoint)
    alone = [next(generate_texts(model, tokenizer, [t], GenerationSettings(max_new_tokens=6))).outputs for t in TEXTS]
    assert len({out for (out,) in alone}) > 2
    want = [{"input": text, "outputs": out} for text, out in zip(TEXTS, alone, strict=True)]

    def read(text):
        return [json.loads(line) for line in text.splitlines()]

    assert read(generate(capsys, checkpoint, *TEXTS, "--json", "--batch-size", 2)) == want
    (tmp_path / "a.txt").write_text("\n".join(TEXTS) + "\n")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"question": text}) + "\n" for text in TEXTS))
    assert read(generate(capsys, checkpoint, "--file", tmp_path / "a.txt", "--json")) == want
    out = tmp_path / "new" / "out.jsonl"
    options = ["--file", tmp_path / "a.jsonl", "--text-column", "question", "--json", "--output", out]
    assert generate(capsys, checkpoint, *options) == ""
    assert read(out.read_text()) == want
    monkeypatch.setattr("sys.stdin", standard_input(b"\xef\xbb\xbf" + "\r\n".join(TEXTS).encode() + b"\r\n"))
    assert read(generate(capsys, checkpoint, "--json", "--cuda-graph")) == want
    monkeypatch.setattr("sys.stdin", standard_input("\n".join(TEXTS[:2]).encode()))
    assert generate(capsys, checkpoint).count("\n") >= 2


def test_sentinels_are_filled_in_place(checkpoint, capsys):
    text = "Le <extra_id_0> fixe la <extra_id_1> du conseil."
    outputs = generate(capsys, checkpoint, text, "--num-beams", 3, "--num-return-sequences", 2)
    for line in outputs.splitlines():
        assert line.startswith("Le")
        assert " fixe la" in line
        assert line.endswith(" du conseil.")
        assert "extra_id" not in line


def test_settings_reach_generate(checkpoint, capsys):
    drawn = ["--do-sample", "--temperature", "3.0", "--top-k", 50, "--num-return-sequences", 4]
    first = generate(capsys, checkpoint, TEXTS[0], *drawn, "--seed", 1)
    assert first == generate(capsys, checkpoint, TEXTS[0], *drawn, "--seed", 1)
    assert first != generate(capsys, checkpoint, TEXTS[0], *drawn, "--seed", 2)
    one = generate(capsys, checkpoint, TEXTS[0])
    assert one == generate(capsys, checkpoint, TEXTS[0], "--do-sample", "--top-k", 1)
    assert one != generate(capsys, checkpoint, TEXTS[0], "--prefix", "[S]")


def test_errors_are_one_line(checkpoint, capsys, tmp_path, monkeypatch):
    encoder, bare, other = (tmp_path / name for name in ("encoder", "bare", "other"))
    FAT5EncoderModel(FAT5Config(vocab_size=576, **SIZES)).save_pretrained(encoder)
    save_tokenizer(load_tokenizer(checkpoint), other)
    (other / "config.json").write_text(json.dumps({"model_type": "bert"}))
    bare.mkdir()
    classifier = tmp_path / "classifier"
    FAT5ForSequenceClassification(FAT5Config(vocab_size=576, **SIZES)).save_pretrained(classifier)
    short = tmp_path / "xpos"
    limited = FAT5Config(vocab_size=576, **SIZES, position_encoding="rotary", rotary_scale_base=0.02)
    FAT5ForConditionalGeneration(limited).save_pretrained(short)
    save_tokenizer(load_tokenizer(checkpoint), tmp_path / "t")
    for file in (tmp_path / "t").iterdir():
        file.rename(short / file.name)
        for folder in (encoder, classifier):
            (folder / file.name).write_bytes((short / file.name).read_bytes())
    cases = [
        ([tmp_path / "none", "a"], f"there is no folder {tmp_path / 'none'}"),
        ([bare, "a"], "holds no model: it has no config.json"),
        ([encoder, "a"], "lacks"),
        ([classifier, "a"], f"got a FAT5ForSequenceClassification in {classifier}, which has no decoder"),
        ([other, "a"], "bert"),
        ([short, "a"], "the model cannot generate this: got sequences of up to"),
        ([checkpoint, "a", "--device", "cuda:77"], "got device='cuda:77', which does not work here"),
        ([checkpoint, "a", "--dtype", "bfloat61"], "did you mean 'bfloat16'?"),
        ([checkpoint, "a", "--top-k", 5], "got top_k without do_sample"),
        ([checkpoint, "a", "--num-return-sequences", 2], "expected at least as many beams"),
        ([checkpoint, "a", "--max-input-tokens", 1], "text 1 has"),
        ([checkpoint, "a", "<extra_id_1>"], "text 2: expected the sentinels <extra_id_0>"),
        ([checkpoint, "a", "--file", "b.txt"], "got texts and --file"),
        ([checkpoint, "--file", tmp_path / "b.txt"], "there is no file"),
        ([checkpoint, "--file", checkpoint / "config.json"], "expected .txt, .jsonl or .parquet"),
        ([checkpoint, "a", "caf\udce9"], "text 2 is not UTF-8: 'caf\\udce9'"),
        ([checkpoint], "the standard input is not UTF-8: byte 0xe9 at offset 5; if it is ISO-8859-1"),
        ([checkpoint, "a", "--output", bare], f"{bare} is a folder; expected the name of a file"),
        ([], "the following arguments are required: checkpoint;"),
    ]
    monkeypatch.setattr("sys.stdin", standard_input(b"a\ncaf\xe9\n"))
    for arguments, message in cases:
        assert cli.main(["generate", *map(str, arguments), "--max-new-tokens", "3"]) == 2, arguments
        captured = capsys.readouterr()
        last = captured.err.strip().splitlines()[-1]
        assert last.startswith("fat5: error: "), captured.err
        assert message in last
        assert captured.out == ""


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 0}, {"temperature": 0.0, "do_sample": True}, {"top_p": 1.5}])
def test_values_that_cannot_be(wrong):
    with pytest.raises(ConfigError, match=f"got {next(iter(wrong))}="):
        GenerationSettings(**wrong)
