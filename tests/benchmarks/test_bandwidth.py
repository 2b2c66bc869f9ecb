"""Cases bound by memory: the copy beside which they are shown, the table, the figures to reach."""

from __future__ import annotations

import pytest

from benchmarks import bandwidth
from benchmarks.figures.bandwidth import draw_shares
from benchmarks.session import Session


def row(implementation: str, milliseconds: float, phase: str = "forward", **columns) -> dict:
    base = {"status": "ok", "date": "2026-01-01", "gpu": "a GPU", "torch": "2.11", "rows": 8, "copy_gb_per_s": 4000.0}
    measured = {"phase": phase, "p50_ms": milliseconds, "gb_per_s": 100 / milliseconds, "yardstick": "torch"}
    return {**base, **measured, "ratio": milliseconds / 0.1, "implementation": implementation, "gate": 0.5, **columns}


def place(entry) -> str:
    return f"{entry['rows']} rows"


def test_copy_speed_is_a_row_of_its_own(monkeypatch):
    monkeypatch.setattr(bandwidth, "_HOST_BYTES", 2**16)
    session = Session("toy", quick=True)
    speed = bandwidth.copy_speed(session)
    assert session.rows[0]["implementation"] == "copy"
    assert speed == session.rows[0]["gb_per_s"] == pytest.approx(2**17 / session.rows[0]["p50_ms"] / 1e6)


def test_table_shows_each_time_beside_the_limit():
    failed = {"status": "FAILED", "implementation": "broken", "rows": 8, "error": "wrong"}
    copy = row("copy", 1.0, "copy")
    lines = bandwidth.show([copy, row("torch", 0.1), row("fat5-triton", 0.05), failed], place).splitlines()
    assert len(lines) == 4
    assert lines[0].split() == ["implementation", "ms", "limit", "share", "GB/s", "x", "torch", "MiB", "gate"]
    assert lines[2].split() == ["fat5-triton", "0.0500", "0.0250", "50%", "2000", "0.50", "-", "0.50"]
    assert lines[3].split() == ["8", "rows", "broken", "FAILED"]


def test_claims_take_the_named_implementation_and_workload_alone():
    own = "fat5-triton"
    rows = [row(own, 0.05), row(own, 0.05, rows=9), row("torch", 0.1), row(own, 2, "step")]
    (claim,) = bandwidth.time_claims(rows, {("8 rows", "forward"): 0.04}, "fat5-triton", place)
    assert str(claim).startswith("MISSED  fat5-triton forward, 8 rows: 0.05 ms (<= 0.04 ms)")


def test_figure_shows_the_share_of_the_latest_run_alone():
    """Pitfall: figures of two runs compared in one plot."""
    rows = [row("torch", 0.1), row("torch", 0.2, date="2025-12-31"), row("copy", 1.0, "copy", copy_gb_per_s=None)]
    text = [{name: "" if value is None else str(value) for name, value in entry.items()} for entry in rows]
    figure = draw_shares(text, "A norm", place)
    bars = figure.axes[0].containers[0]
    assert [bar.get_width() for bar in bars] == [pytest.approx(0.25)]
    assert draw_shares(text[2:], "A norm", place) is None
