"""The case of the loss curves on little text and a tiny model."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.command_line import main
from benchmarks.figures import precision
from benchmarks.precision import runs
from benchmarks.precision.runs import Curve
from benchmarks.results import read_rows
from fat5.data.sample import sample_documents


def tiny(monkeypatch) -> None:
    """Little text, and a model of one layer."""
    sizes = ("d_model=32", "d_kv=8", "d_ff=48", "num_layers=1", "num_heads=4")
    small = (*(f"model.{size}" for size in sizes), "denoising.encoder_budget=256")
    monkeypatch.setattr(runs, "sample_documents", lambda: islice(sample_documents(), 80))
    monkeypatch.setattr(runs, "VOCAB_SIZE", 640)
    monkeypatch.setattr(runs, "RUNS", {name: (*own, *small) for name, own in runs.RUNS.items()})


def test_the_three_runs_differ_in_their_numbers_alone(tmp_path):
    fp32, kahan, plain = (runs.settings(name, 50, tmp_path) for name in runs.RUNS)
    assert [x.training.precision for x in (fp32, kahan, plain)] == ["fp32", "bf16", "bf16"]
    assert [x.optimizer.kahan for x in (fp32, kahan, plain)] == [None, True, False]
    assert fp32.model == kahan.model == plain.model
    assert fp32.denoising == kahan.denoising
    assert fp32.training.seed == kahan.training.seed
    assert (fp32.training.max_steps, fp32.training.log_every) == (50, 1)


@pytest.mark.slow
def test_trains_records_and_says_the_distance(tmp_path, monkeypatch, capsys):
    tiny(monkeypatch)
    monkeypatch.setattr(runs, "POINTS", 3)
    assert main(["precision", "--steps", "6", "--results", str(tmp_path)]) == 0
    rows = read_rows(tmp_path / "precision.csv")
    ends = {row["implementation"]: row for row in rows if row["table"] == "run"}
    assert list(ends) == ["fp32", "bf16-kahan", "bf16"]
    losses = [float(row["last_loss"]) for row in ends.values()]
    assert len(set(losses)) == 3
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert float(ends["bf16-kahan"]["distance"]) == pytest.approx(losses[1] / losses[0] - 1, abs=1e-5)
    curves = [row for row in rows if row["table"] == "curve"]
    assert [row["step"] for row in curves if row["implementation"] == "bf16"] == ["2", "4", "6"]
    shown = capsys.readouterr().out
    assert "met     bf16 with Kahan summation from fp32, of the loss" in shown
    assert "% from fp32" in shown
    figure = precision.draw_curves(rows)
    assert [len(axes.get_lines()) for axes in figure.axes] == [3, 3]


def test_a_distance_beyond_the_goal_is_said_and_a_run_that_learns_nothing_fails(tmp_path, monkeypatch, capsys):
    ends = {"fp32": 1.0, "bf16-kahan": 1.05, "bf16": 9.0}

    def train(name, steps, folder):
        return Curve([5.0] * (steps - 10) + [ends[name]] * 10, 2.0)

    monkeypatch.setattr(runs, "train", train)
    monkeypatch.setattr(runs, "prepare_text", lambda folder: None)
    assert main(["precision", "--steps", "100", "--results", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "MISSED  bf16 with Kahan summation from fp32, of the loss: 5 % (<= 1 %)" in shown
    assert "FAILED 100 steps bf16: GateError: the loss went from 5.000 to 9.000" in shown


def test_steps_below_one_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["precision", "--steps", "-3", "--no-save"])
    assert "--steps is -3, expected at least 1" in capsys.readouterr().err
