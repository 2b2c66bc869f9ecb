"""The attention case with its real peers, small, on a GPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.command_line import main
from benchmarks.results import read_rows

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_peers_pass_the_gate_and_the_figures_are_plausible(tmp_path):
    sizes = ["--lengths", "512", "--head-dims", "64", "--tokens", "4096", "--results", str(tmp_path)]
    assert main(["attention", "--quick", *sizes]) == 0
    rows = read_rows(tmp_path / "attention.csv")
    names = {row["implementation"] for row in rows if row["status"] == "ok"}
    assert names >= {"cudnn", "fa2", "sdpa-bias", "fat5-triton", "fat5-triton-shared"}
    for row in rows:
        if row["status"] == "ok":
            assert 1 < float(row["tflops"]) < 990
            assert float(row["peak_mib"]) > 1
            assert float(row["ratio"]) > 0.3
    assert {row["bit_equal"] for row in rows if row["implementation"] == "fat5-triton"} == {"True"}


def test_memory_dense_and_packed_tables(tmp_path):
    sizes = ["--lengths", "1024", "--heads", "4", "--tokens", "4096", "--results", str(tmp_path)]
    assert main(["attention", "--quick", "--shapes", "memory", "dense", "packed", "--head-dims", "64", *sizes]) == 0
    rows = [row for row in read_rows(tmp_path / "attention.csv") if row["status"] == "ok"]
    peaks = {row["implementation"]: float(row["peak_mib"]) for row in rows if row["table"] == "memory"}
    assert peaks["fat5-triton"] < peaks["sdpa-bias"]
    assert {"fat5-triton-packed", "fat5-triton", "sdpa-bias"} <= {
        row["implementation"] for row in rows if row["table"] == "packed"
    }
