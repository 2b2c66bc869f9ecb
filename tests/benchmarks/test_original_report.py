"""The figures of attention on the page about the original are those of the rows it names."""

from __future__ import annotations

from pathlib import Path

from benchmarks.command_line import RESULTS
from benchmarks.report.rows import Cells, read_runs

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "original-report.md").read_text(encoding="utf-8")
PLACE = ("dtype", "batch", "length", "head_dim", "mask", "bias", "phase")


def rows(table: str, date: str) -> list[Cells]:
    """Return the rows of a run that the page names."""
    assert date in PAGE
    (run,) = [run for run in read_runs(RESULTS / "attention.csv") if (run.table, run.date) == (table, date)]
    return run.rows


def speed_ups(held: list[Cells], phase: str, mask: str) -> list[float]:
    """Return how many times faster than SDPA with a materialised bias, sorted."""
    dense = any(str(row["bias"]).startswith("dense") for row in held)
    place = PLACE if dense else tuple(name for name in PLACE if name != "bias")
    peers = {tuple(row[name] for name in place): row["p50_ms"] for row in held if row["implementation"] == "sdpa-bias"}
    return sorted(
        peers[tuple(row[name] for name in place)] / row["p50_ms"]
        for row in held
        if (row["implementation"], row["phase"], row["mask"]) == ("fat5-triton", phase, mask)
    )


def said(values: list[float]) -> str:
    return f"{values[0]:.2f} to {values[-1]:.2f} x"


def test_speed_over_sdpa_with_a_materialised_bias():
    table = rows("must-reach", "2026-11-30T23:59:53Z")
    for phase in ("forward", "backward"):
        line = f"{said(speed_ups(table, phase, 'causal'))} (not causal: {said(speed_ups(table, phase, 'full'))})"
        assert line in PAGE
    dense = rows("dense", "2026-12-01T00:01:02Z")
    assert f"{said(speed_ups(dense, 'forward', 'full'))} at length 1,024" in PAGE
    assert f"{said(speed_ups(dense, 'backward', 'full'))} (same run)" in PAGE


def test_fp16_beside_bf16_and_memory():
    bf16, fp16 = (
        {
            tuple(row[name] for name in PLACE[1:]): row["p50_ms"]
            for row in rows("must-reach", date)
            if row["implementation"] == "fat5-triton"
        }
        for date in ("2026-11-30T23:59:53Z", "2026-12-01T00:05:06Z")
    )
    ratios = sorted(time / bf16[place] for place, time in fp16.items())
    assert f"times in fp16 are {ratios[0]:.3f} to {ratios[-1]:.3f} of those in bf16" in PAGE
    peaks = {(r["implementation"], r["length"]): r["peak_mib"] for r in rows("memory", "2026-12-01T00:06:06Z")}
    ours, longest = peaks["fat5-triton", 8192], peaks["fat5-triton", 131072]
    assert f"{ours:.1f} MiB at 8,192 tokens, {longest:.0f} MiB at 131,072: {longest / ours / 16:.2f} of linear" in PAGE
    assert f"{peaks['sdpa-bias', 8192]:,.0f} MiB at 8,192" in PAGE


def peers(case: str, phase: str, **place: str) -> dict[str, Cells]:
    """Return the rows of a case's only run, by implementation."""
    held = [row for run in read_runs(RESULTS / f"{case}.csv") if run.table != "copy" for row in run.rows]
    held = [row for row in held if row["status"] == "ok" and row["phase"] == phase]
    return {row["implementation"]: row for row in held if all(row[name] == value for name, value in place.items())}


def over(found: dict[str, Cells], peer: str, column: str) -> float:
    return found[peer][column] / found["fat5-triton"][column]


def test_losses_and_norm():
    given, made = (peers(case, "forward+backward") for case in ("cross_entropy", "linear_cross_entropy"))
    assert (
        f"{over(given, 'eager', 'p50_ms'):.1f} x over eager PyTorch, {over(given, 'compile', 'p50_ms'):.2f} x" in PAGE
    )
    assert f"1 / {over(given, 'eager', 'peak_mib'):.1f} of eager PyTorch's beyond the logits" in PAGE
    eager, compiled = (over(made, name, "peak_mib") for name in ("eager", "compile"))
    assert f"1 / {eager:.1f} of eager PyTorch's and 1 / {compiled:.2f} of torch.compile's" in PAGE
    for phase in ("forward", "backward"):
        norm = peers("rms_norm", phase, operation="rms_norm")
        formula, torch, compiled = (over(norm, name, "p50_ms") for name in ("transformers", "torch", "compile"))
        assert f"{formula:.1f} x over the formula" in PAGE
        assert f"{torch:.2f} x over `F.rms_norm`, {compiled:.2f} x over torch.compile" in PAGE
    memory = over(norm, "transformers", "peak_mib"), 1 / over(norm, "torch", "peak_mib")
    assert f"1 / {memory[0]:.2f} of the formula's beyond the inputs, {memory[1]:.2f} times `F.rms_norm`'s" in PAGE
