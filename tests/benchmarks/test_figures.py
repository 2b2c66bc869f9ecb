"""Every figure is drawn from the CSV files alone; where there are no rows it is skipped and said so."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib import colors, image

from benchmarks.command_line import main
from benchmarks.figures import FIGURES, attention
from benchmarks.figures.style import look
from benchmarks.results import append_rows, read_rows

ENVIRONMENT = {"gpu": "a GPU", "torch": "2.11", "status": "ok"}


def attention_rows(date: str, factor: float = 1.0) -> list[dict]:
    base = {**ENVIRONMENT, "case": "attention", "date": date, "dtype": "bf16", "heads": 12}
    rows = [
        {**base, "table": "sweep", "implementation": name, "head_dim": head_dim, "mask": mask, "length": length,
         "phase": phase, "tflops": factor * speed * (1 - 128 / length)}
        for name, speed in (("cudnn", 500.0), ("fat5-triton", 400.0))
        for head_dim in (64, 128) for mask in ("full", "causal")
        for length in (512, 1024, 4096) for phase in ("forward", "backward")
    ]  # fmt: skip
    failed = {**base, "status": "FAILED", "table": "sweep", "implementation": "flex", "head_dim": 64, "mask": "full"}
    memory = [
        {**base, "table": "memory", "implementation": name, "head_dim": 64, "length": length, "peak_mib": peak}
        for name, power in (("fat5-triton", 1), ("sdpa-bias", 2))
        for length in (512, 8192) for peak in [float(length**power)]
    ]  # fmt: skip
    return [*rows, {**failed, "length": 512}, *memory]


def collator_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "collator", "date": "2026-01-01T00:00:00Z", "table": "workers", "denoisers": "fat5"}
    return [
        {**base, "cores_allowed": 16, "workers": workers, "pin_memory": pinned, "tokens_per_s": 1e7 * (workers + 1)}
        for workers in (0, 1, 4)
        for pinned in (False, True)
    ]


BANDWIDTH_COLUMNS = {
    "rms_norm": {"operation": "rms_norm", "rows": 8, "width": 4},
    "rotary": {"tokens": 8, "heads": 2, "head_dim": 4, "interleaved": False},
    "geglu": {"rows": 8, "width": 4, "approximate": "tanh", "layout": "apart"},
    "cross_entropy": {"table": "times", "rows": 8, "vocab": 4, "ignored": 0.0},
    "linear_cross_entropy": {"table": "times", "rows": 8, "width": 2, "vocab": 4, "ignored": 0.0, "peak_mib": 9.0},
    "optimizer": {"table": "step", "tensors": "130M"},
}


def bandwidth_rows(case: str) -> list[dict]:
    base = {**ENVIRONMENT, "case": case, "date": "2026-01-01T00:00:00Z", "dtype": "bf16", **BANDWIDTH_COLUMNS[case]}
    return [
        {**base, "implementation": "fat5-triton", "phase": phase, "p50_ms": 1.0, "gb_per_s": 3, "copy_gb_per_s": 4}
        for phase in ("forward", "backward")
    ]


def precision_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "precision", "date": "2026-01-01T00:00:00Z", "table": "curve", "steps": 20}
    return [
        {**base, "implementation": name, "step": step, "loss": loss / step}
        for name, loss in (("fp32", 8.0), ("bf16-kahan", 8.1), ("bf16", 9.0))
        for step in (10, 20)
    ]


def curve_rows() -> list[dict]:
    base = {**ENVIRONMENT, "case": "curves", "date": "2026-01-01T00:00:00Z", "table": "curves", "model": "8x64"}
    return [
        {**base, "implementation": name, "seconds": step, "tokens": step * speed, "eval_loss": 9 - step / 100,
         "eval_accuracy": step / 1000}
        for name, speed in (("fat5-compiled", 2e6), ("transformers-compiled", 1e6)) for step in (0, 100, 200)
    ]  # fmt: skip


def has_color(path, color: str) -> bool:
    pixels = image.imread(path)[..., :3]
    return bool((np.abs(pixels - np.array(colors.to_rgb(color))).max(-1) < 0.02).sum() > 30)


def test_figures_show_their_implementations(tmp_path, capsys):
    append_rows(tmp_path / "attention.csv", attention_rows("2026-01-01T00:00:00Z"))
    append_rows(tmp_path / "collator.csv", collator_rows())
    append_rows(tmp_path / "precision.csv", precision_rows())
    for case in BANDWIDTH_COLUMNS:
        append_rows(tmp_path / f"{case}.csv", bandwidth_rows(case))
    append_rows(tmp_path / "curves.csv", curve_rows())
    assert main(["plot", "--results", str(tmp_path), "--figures", str(tmp_path / "figures")]) == 0
    assert sorted(file.stem for file in (tmp_path / "figures").iterdir()) == sorted(FIGURES)
    for name in ("attention_speed", "attention_memory", *BANDWIDTH_COLUMNS):
        assert has_color(tmp_path / "figures" / f"{name}.png", look("fat5-triton")["color"])
    assert has_color(tmp_path / "figures" / "attention_speed.png", look("cudnn")["color"])
    assert has_color(tmp_path / "figures" / "collator_workers.png", "#E69F00")
    assert has_color(tmp_path / "figures" / "curves.png", "#0072B2")
    assert "skipped" not in capsys.readouterr().out


def test_missing_results_are_skipped_and_named(tmp_path, capsys):
    append_rows(tmp_path / "collator.csv", collator_rows())
    assert main(["plot", "--results", str(tmp_path), "--figures", str(tmp_path / "figures")]) == 0
    assert [file.name for file in (tmp_path / "figures").iterdir()] == ["collator_workers.png"]
    lines = capsys.readouterr().out.splitlines()
    skipped = [line.split(":")[0] for line in lines if "skipped" in line]
    assert skipped == [name for name in FIGURES if name != "collator_workers"]
    assert "run python -m benchmarks attention" in lines[0]


def test_a_figure_shows_the_latest_run_alone(tmp_path):
    """Pitfall: figures of two runs compared in one plot."""
    for date, factor in (("2026-01-02T00:00:00Z", 0.5), ("2026-01-01T00:00:00Z", 1.0)):
        append_rows(tmp_path / "attention.csv", attention_rows(date, factor))
    figure = attention.draw_speed(read_rows(tmp_path / "attention.csv"))
    assert len(figure.axes) == 8
    for axes in figure.axes:
        assert axes.get_ylim()[0] == 0
        heights = {line.get_label(): max(line.get_ydata()) for line in axes.get_lines()}
        assert heights == {
            look("cudnn")["label"]: pytest.approx(0.5 * 500 * (1 - 128 / 4096), rel=1e-4),
            look("fat5-triton")["label"]: pytest.approx(0.5 * 400 * (1 - 128 / 4096), rel=1e-4),
        }
    assert "2026-01-02" in figure.get_suptitle()
    assert "2026-01-01" not in figure.get_suptitle()
