"""The decode case at toy size: it measures both implementations, and its gate finds a wrong one."""

from __future__ import annotations

import pytest
import torch

from benchmarks import decode_attention
from benchmarks.command_line import main
from benchmarks.decode_attention import TOY, subjects
from benchmarks.results import read_rows
from benchmarks.subject import GateError


def test_a_run_gates_times_and_records(tmp_path, capsys):
    assert main(["decode", "--dtype", "fp32", "--quick", "--results", str(tmp_path)]) == 0
    rows = [row for row in read_rows(tmp_path / "decode.csv") if row["table"] == "decode"]
    assert {row["status"] for row in rows} == {"ok"}
    assert len(rows) == sum(3 if step.queries == 1 else 2 for step in TOY)
    assert all(0 < float(row["gate"]) <= 1 and float(row["gb_per_s"]) > 0 for row in rows)
    assert "self B2 q1 k24 D16 forward" in capsys.readouterr().out


def test_the_gate_finds_a_bias_that_stays_behind(monkeypatch):
    right = decode_attention._fat5

    def wrong(q, k, v, arguments, used):
        return right(q, k, v, arguments | {"query_offset": arguments["query_offset"] - 1}, used)

    monkeypatch.setattr(decode_attention, "_fat5", wrong)
    _, ours, _ = subjects(TOY[2], torch.float32, torch.device("cpu"), None)
    with pytest.raises(GateError, match="off by"):
        ours.prepare().check()
