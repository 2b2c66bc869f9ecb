"""The generation case at toy size: it measures what is right, and its gate finds what is not."""

from __future__ import annotations

import pytest
import torch

from benchmarks.command_line import main
from benchmarks.generation import measurements
from benchmarks.generation.measurements import IMPLEMENTATIONS, Generation
from benchmarks.generation.workload import Workload
from benchmarks.results import read_rows
from benchmarks.subject import GateError

TOY = Workload("tiny", batch=2, length=9, beams=1, new_tokens=8, dtype="fp32", encode=True)


def test_a_run_gates_times_and_records_every_implementation(tmp_path, capsys):
    options = ["--size", "tiny", "--batch", "2", "--new-tokens", "5", "--dtype", "fp32", "--results", str(tmp_path)]
    assert main(["generation", *options, "--lengths", "20", "--beams", "1", "2"]) == 0
    assert main(["generation", *options, "--lengths", "520", "--beams", "1", "--quick"]) == 0
    rows = read_rows(tmp_path / "generation.csv")
    assert {row["status"] for row in rows} == {"ok"}
    assert len(rows) == 2 * 5 + 3
    assert {row["implementation"] for row in rows} == set(IMPLEMENTATIONS)
    assert all(float(row["tokens_per_s"]) > 0 and float(row["same_tokens"]) == 1.0 for row in rows)
    table = capsys.readouterr().out
    assert "fat5 graph" in table
    assert "not measured  greedy tokens/s" in table


def test_the_gate_finds_other_tokens_and_a_model_that_repeats_itself(monkeypatch):
    generation = Generation("tiny", torch.device("cpu"))
    prepared = generation.subject("fat5 graph", TOY).prepare()
    assert prepared.check() == 0.0
    right = measurements.generated

    def wrong(model, inputs, **options):
        return right(model, inputs, **options).fill_(3) if options else right(model, inputs)

    monkeypatch.setattr(measurements, "generated", wrong)
    with pytest.raises(GateError, match="in float32 it generates"):
        prepared.check()
    monkeypatch.setattr(measurements, "generated", lambda *args, **options: right(*args, **options).fill_(3))
    with pytest.raises(GateError, match="repeats itself"):
        Generation("tiny", torch.device("cpu")).subject("fat5", TOY).prepare().check()
