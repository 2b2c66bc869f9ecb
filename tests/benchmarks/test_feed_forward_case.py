"""The case feed_forward at toy size: both ways are held against float64, timed, and set side by side."""

from __future__ import annotations

import pytest
import torch

from benchmarks.feed_forward import show, stage
from benchmarks.results import read_rows
from benchmarks.session import Session
from benchmarks.subject import GateError
from fat5.ops.kernels_or_torch import HAS_TRITON
from tests.ops.kernel_checks import CUDA, needs_kernels

pytestmark = needs_kernels
# The interpreter truncates bf16 where a GPU rounds.
DTYPE = torch.bfloat16 if CUDA else torch.float16

if HAS_TRITON:
    from fat5.ops.feed_forward.tiles import ProductTile

    SMALL, OTHER = ProductTile(64, 32, 16, 4, 2, 1, 1), ProductTile(64, 64, 16, 4, 2, 2, 1)


def toy() -> stage.Stage:
    return stage.Stage(40, 16, 64, torch.device("cuda" if CUDA else "cpu"), DTYPE)


def test_a_run(monkeypatch, tmp_path):
    monkeypatch.setattr(stage, "_tiles", lambda every: [SMALL, OTHER] if every else [SMALL])
    session = Session("feed_forward", quick=True, results=tmp_path)
    rows = stage.measure(session, [40], [(16, 64)], every_tile=True, dtype=DTYPE)
    assert session.failures == 0
    assert [row["implementation"] for row in rows] == [stage.YARDSTICK, str(SMALL), str(OTHER)]
    assert all(0 < row["gate"] <= 1 and row["p50_ms"] > 0 for row in rows)
    assert rows[0]["ratio"] == 1
    assert len(read_rows(tmp_path / "feed_forward.csv")) == len(rows)
    printed = show.table(rows)
    assert "40x16x64" in printed
    assert printed.count("present") == 1
    assert str(OTHER) in printed


def test_the_gate_finds_a_wrong_answer():
    own = toy()
    assert 0 < own.check(lambda: own.fused(SMALL)) <= 1
    for change in (lambda x: x * 1.05, torch.zeros_like, lambda x: x * float("nan")):
        with pytest.raises(GateError, match="tensor 0 is off"):
            own.check(lambda change=change: tuple(map(change, own.fused(SMALL))))
        with pytest.raises(GateError, match="tensor 1 is off"):
            own.check(lambda change=change: (own.fused(SMALL)[0], change(own.fused(SMALL)[1])))
