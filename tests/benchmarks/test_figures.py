"""Every figure is drawn from the CSV files alone; where there are no rows it is skipped and said so."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib import colors, image

from benchmarks.cases import tasks
from benchmarks.command_line import main
from benchmarks.figures import FIGURES, attention, models
from benchmarks.figures.style import look
from benchmarks.results import append_rows, read_rows
from tests.benchmarks.made_up import (
    BANDWIDTH_COLUMNS,
    attention_rows,
    collator_rows,
    generation_rows,
    make_results,
    tasks_rows,
)


def has_color(path, color: str) -> bool:
    pixels = image.imread(path)[..., :3]
    return bool((np.abs(pixels - np.array(colors.to_rgb(color))).max(-1) < 0.02).sum() > 30)


def test_figures_show_their_implementations(tmp_path, capsys):
    make_results(tmp_path)
    assert main(["plot", "--results", str(tmp_path), "--figures", str(tmp_path / "figures")]) == 0
    assert sorted(file.stem for file in (tmp_path / "figures").iterdir()) == sorted(FIGURES)
    for name in ("attention_speed", "attention_memory", *BANDWIDTH_COLUMNS):
        assert has_color(tmp_path / "figures" / f"{name}.png", look("fat5-triton")["color"])
    assert has_color(tmp_path / "figures" / "attention_speed.png", look("cudnn")["color"])
    assert has_color(tmp_path / "figures" / "collator_workers.png", "#E69F00")
    for name in ("curves", "decode", "pretrain", "pretrain_shares", "scaling", "tasks"):
        assert has_color(tmp_path / "figures" / f"{name}.png", "#0072B2"), name
    assert has_color(tmp_path / "figures" / "heads.png", "#56B4E9")
    assert has_color(tmp_path / "figures" / "generation.png", "#D55E00")
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


def test_commands_that_shared_the_work_stand_in_one_figure(tmp_path):
    later = "2026-03-01T00:00:00Z"
    first = [row for row in tasks_rows() if row["implementation"] != "random"]
    random = [row | {"date": later, "score": 70.0} for row in tasks_rows() if row["implementation"] == "random"]
    rows = [*first, *random, *(row | {"date": later, "task": "qa_fr"} for row in random)]
    append_rows(tmp_path / "tasks.csv", [{"status": "ok", **row} for row in rows])
    (axes,) = models.draw_tasks(read_rows(tmp_path / "tasks.csv")).axes
    assert sorted(label.get_text().split("\n")[0] for label in axes.get_yticklabels()) == ["qa_fr", "topic_fr"]
    (claim,) = [x for x in tasks.claims(tasks.comparison(rows)) if "random twin" in x.text]
    assert claim.measured == 91.0 - 70.0
    long = [row | {"date": later, "length": 8192} for row in generation_rows()]
    append_rows(tmp_path / "generation.csv", [*generation_rows(), *long])
    (axes,) = models.draw_generation(read_rows(tmp_path / "generation.csv")).axes
    assert {label.get_text().split()[0] for label in axes.get_yticklabels()} >= {"512", "8192"}
