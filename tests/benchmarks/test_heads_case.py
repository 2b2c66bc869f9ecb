"""The heads case at toy sizes: the implementations agree, and the gate finds what is wrong."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from benchmarks.command_line import main
from benchmarks.heads import gate, models
from benchmarks.heads.stage import Stage
from benchmarks.heads.workload import EOS, Texts, Workload
from benchmarks.results import read_rows
from benchmarks.subject import GateError
from benchmarks.timing import QUICK

CPU = torch.device("cpu")
WORKLOAD = Workload("tiny", "fp32", 4, 24, padded=True)
UNCOMPILED = ["transformers", "transformers-encoder", "fat5", "fat5-packed"]


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("padded", [True, False])
def test_texts_end_in_their_only_eos(padded):
    workload = dataclasses.replace(WORKLOAD, padded=padded)
    texts = Texts.draw(workload, CPU)
    assert ((texts.input_ids == EOS).sum(1) == 1).all()
    assert (texts.input_ids == EOS).int().argmax(1).tolist() == [n - 1 for n in workload.lengths]
    packed = texts.packed_inputs()
    assert packed["input_ids"].numel() == sum(workload.lengths) == (48 if padded else 96)
    assert (packed["input_ids"] > 0).all()


def test_implementations_share_the_body():
    """Half the parameters: the encoder of Transformers' classifier is the one of ours."""
    ours, theirs, plain = (build(WORKLOAD) for build in (models.fat5, models.transformers, models.plain))
    assert {name: p.shape for name, p in ours.named_parameters()} == {
        name: p.shape for name, p in plain.named_parameters()
    }
    encoder = "transformer.encoder.block.1.layer.1.DenseReluDense.wo.weight"
    assert torch.equal(ours.get_parameter(encoder), theirs.get_parameter(encoder))
    assert torch.equal(ours.transformer.shared.weight, theirs.transformer.shared.weight)


@pytest.mark.parametrize("change", ["a zero head", "another layer", "lost padding"])
def test_gate_finds_a_wrong_model(change, monkeypatch):
    def build(workload):
        model = models.fat5(workload)
        with torch.no_grad():
            if change == "a zero head":
                model.classifier.out_proj.weight.zero_()
            else:
                model.transformer.encoder.block[1].layer[0].SelfAttention.v.weight.mul_(1.02)
        return model

    implementation = models.Implementation("fat5", build)
    if change == "lost padding":
        implementation = models.Implementation("fat5", models.fat5)
        padded = Texts.padded_inputs
        monkeypatch.setattr(
            models.Implementation,
            "inputs",
            lambda self, texts, rows=None: padded(texts, rows) | {"attention_mask": None},
        )
    with pytest.raises(GateError, match="off by"):
        Stage(WORKLOAD, CPU).subject(implementation).prepare().check()


def test_gate_wants_every_gradient():
    truth = gate.answer(models.plain(WORKLOAD), Texts.draw(WORKLOAD, CPU).padded_inputs(2))
    assert gate.check(truth, truth, None) == 0
    some = dataclasses.replace(truth, gradients=dict(list(truth.gradients.items())[1:]))
    with pytest.raises(GateError, match="expected those of"):
        gate.check(some, truth, None)


def test_run_of_the_whole_case(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("benchmarks.session.Budget", lambda: QUICK)
    options = ["--size", "tiny", "--batch", "4", "--length", "24", "--dtype", "fp32", "--implementations", *UNCOMPILED]
    assert main(["heads", *options, "--results", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "heads.csv")
    assert [row["status"] for row in rows] == ["ok"] * 16
    assert {(row["table"], row["phase"]) for row in rows} == {
        (table, phase) for table in ("full", "padded") for phase in ("inference", "training")
    }
    by_name = {row["implementation"]: row for row in rows if row["table"] == "full" and row["phase"] == "training"}
    parameters = {name: int(row["parameters"]) for name, row in by_name.items()}
    assert parameters["fat5"] == parameters["transformers-encoder"] < 0.6 * parameters["transformers"]
    ratio = float(by_name["fat5"]["p50_ms"]) / float(by_name["transformers"]["p50_ms"])
    assert float(by_name["fat5"]["ratio"]) == pytest.approx(ratio, rel=1e-3)
    assert float(by_name["fat5"]["texts_per_s"]) == pytest.approx(4e3 / float(by_name["fat5"]["p50_ms"]), rel=1e-3)
    printed = capsys.readouterr().out
    assert "fat5 training, tiny fp32 B4 L24, throughput over transformers" in printed
    assert "half padding" in printed


def test_compiled_models_are_compared_with_eager_ones(monkeypatch):
    """A stand-in compiles wrongly, and is found."""

    def wrong(model):
        def run(**inputs):
            output = model(**inputs)
            return dataclasses.replace(output, logits=output.logits * 1.2)

        return run

    (implementation,) = models.choose(["fat5-compiled"], quick=False)
    monkeypatch.setattr(torch, "compile", wrong)
    with pytest.raises(GateError, match="compiled logits"):
        Stage(WORKLOAD, CPU).subject(implementation).prepare().check()
    monkeypatch.setattr(torch, "compile", lambda model: model)
    assert 0 < Stage(WORKLOAD, CPU).subject(implementation).prepare().check() <= 1


def test_an_unknown_implementation_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["heads", "--implementations", "fat5-pakced", "--no-save"])
    assert "did you mean 'fat5-packed'" in capsys.readouterr().err
