"""The figures of whole models: the training step, generation, classification, tasks, and several GPUs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from benchmarks.figures.bars import cell, draw_bars
from benchmarks.figures.style import caption, latest, latest_of_each, legend_below, new_figure, tidy
from benchmarks.tasks.finetuning import newest_scores

Row = Mapping[str, str]
Rows = Sequence[Row]

_BLUE, _LIGHT, _RED, _ORANGE, _GREY, _GREEN = "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#999999", "#009E73"

_STEPS = {
    "fat5-compiled": (_BLUE, "FAT5, compiled"),
    "fat5-cuda-graphs": (_RED, "FAT5, CUDA graphs"),
    "fat5-eager": (_LIGHT, "FAT5, eager"),
    "transformers-compiled": (_ORANGE, "Transformers' T5, compiled"),
    "transformers-eager": (_GREY, "Transformers' T5, eager"),
}
_GENERATION = {
    "fat5": (_LIGHT, "FAT5"),
    "fat5 static": (_BLUE, "FAT5, static cache, compiled"),
    "fat5 graph": (_RED, "FAT5, CUDA graph"),
    "transformers": (_GREY, "Transformers' T5"),
    "transformers static": (_ORANGE, "Transformers' T5, static cache, compiled"),
}
_HEADS = {
    "fat5": (_LIGHT, "FAT5, encoder alone"),
    "fat5-compiled": (_BLUE, "FAT5, compiled"),
    "fat5-packed": (_GREEN, "FAT5, packed"),
    "transformers-compiled": (_RED, "Transformers' T5, compiled"),
    "transformers": (_GREY, "Transformers' T5"),
    "transformers-encoder": (_ORANGE, "Transformers' encoder alone"),
}
_TASKS = {"pretrained": (_BLUE, "pretrained"), "random": (_ORANGE, "its random twin")}
_SIMPLE = (_GREY, "a simple method")
_SCALING = {
    "one": (_GREY, "one alone"),
    "ddp": (_BLUE, "DDP"),
    "fsdp2": (_RED, "FSDP2"),
}
_SHARES = {
    "gemm": (_BLUE, "matrix products"),
    "attention": (_RED, "attention"),
    "memory_bound": (_LIGHT, "memory-bound"),
    "communication": ("#CC79A7", "communication"),
    "idle": (_GREY, "idle"),
}


def draw_step(rows: Rows) -> Figure | None:
    """Draw tokens per second of the whole step, with its time and memory, of the latest run of each table."""
    return draw_bars(
        _steps(rows),
        title="Pretraining step",
        axis="thousand tokens per second",
        place=lambda row: row["table"],
        value=lambda row: _thousands(row, "tokens_per_s"),
        label=lambda row: _joined(f"{float(row['p50_ms']):.1f} ms", _with_unit(row, "peak_gib", ".1f", "GiB")),
        looks=_STEPS,
    )


def draw_step_shares(rows: Rows) -> Figure | None:
    """Draw where the time of a step goes on the GPU."""
    shown = [row for row in _steps(rows) if cell(row, "share_idle") is not None]
    if not shown:
        return None
    figure, grid = new_figure(7.0, 1.5 + 0.22 * len(shown))
    axes = grid[0, 0]
    starts = [0.0] * len(shown)
    for name, (color, label) in _SHARES.items():
        parts = [cell(row, f"share_{name}") or 0.0 for row in shown]
        if any(parts):
            axes.barh(range(len(shown)), parts, 0.8, left=starts, color=color, label=label)
        starts = [start + part for start, part in zip(starts, parts, strict=True)]
    names = [_STEPS.get(row["implementation"], ("", row["implementation"]))[1] for row in shown]
    axes.set_yticks(range(len(shown)), [f"{row['table']}: {name}" for row, name in zip(shown, names, strict=True)])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the time of a step", fontsize=8)
    axes.set_title(f"Where the time goes ({caption(shown)})", fontsize=9)
    tidy(axes)
    legend_below(figure, [axes], columns=5)
    return figure


def draw_generation(rows: Rows) -> Figure | None:
    """Draw tokens per second of the latest run of each length and way to search."""
    return draw_bars(
        latest_of_each(_timed(rows), "length", "phase"),
        title="Generation",
        axis="tokens per second",
        place=lambda row: f"{row['length']} encoder tokens\n{row['phase']}",
        value=lambda row: cell(row, "tokens_per_s"),
        label=lambda row: _joined(f"{float(row['tokens_per_s']):,.0f}", _times(row)),
        looks=_GENERATION,
    )


def draw_heads(rows: Rows) -> Figure | None:
    """Draw texts per second of the latest run, inference and training."""
    return draw_bars(
        latest(_timed(rows)),
        title="Classification of texts",
        axis="texts per second",
        place=lambda row: f"{row['phase']}\n{'half padding' if row['table'] == 'padded' else 'no padding'}",
        value=lambda row: cell(row, "texts_per_s"),
        label=lambda row: _joined(f"{float(row['texts_per_s']):,.0f}", _times(row)),
        looks=_HEADS,
    )


def draw_tasks(rows: Rows) -> Figure | None:
    """Draw the latest score on each task: pretrained, random twin, and the best simple method."""
    scored = newest_scores(rows)
    best: dict[str, Row] = {}
    for row in scored:
        if row["implementation"] not in _TASKS:
            best[row["task"]] = max(row, best.get(row["task"], row), key=lambda one: float(one["score"]))
    kept = [row for row in scored if row["implementation"] in _TASKS or row is best[row["task"]]]
    return draw_bars(
        kept,
        title="Finetuned on tasks",
        axis="score",
        place=lambda row: f"{row['task']}\n{row['metric']}",
        value=lambda row: cell(row, "score"),
        label=lambda row: _joined(
            f"{float(row['score']):.1f}", "" if row["implementation"] in _TASKS else row["implementation"]
        ),
        looks={row["implementation"]: _SIMPLE for row in kept} | _TASKS,
    )


def draw_scaling(rows: Rows) -> Figure | None:
    """Draw tokens per second of each process beside those of one alone, of the latest run of each model."""
    fine = [
        row for row in rows if row["table"] == "runs" and row["status"] == "ok" and row["implementation"] in _SCALING
    ]
    shown = latest_of_each(fine, "model")
    sizes = {"same": "one batch between all", "times": "a batch each"}
    return draw_bars(
        shown,
        title="Pretraining by several processes",
        axis="thousand tokens per second of each process",
        place=lambda row: f"{row['model']}, x{row['several']}\n{sizes[row['batch']]}",
        value=lambda row: _thousands(row, "tokens_per_s_per_process"),
        label=lambda row: _joined(
            f"{float(row['share_of_one']):.1%}" if row["share_of_one"] else "",
            _with_unit(row, "peak_reserved_gib", ".1f", "GiB"),
        ),
        looks=_SCALING,
    )


def _steps(rows: Rows) -> list[Row]:
    timed = _timed(rows)
    return latest_of_each(timed, "table")


def _timed(rows: Rows) -> list[Row]:
    return [row for row in rows if row["status"] == "ok" and row.get("p50_ms")]


def _thousands(row: Row, name: str) -> float | None:
    value = cell(row, name)
    return None if value is None else value / 1e3


def _with_unit(row: Row, name: str, form: str, unit: str) -> str:
    value = cell(row, name)
    return "" if value is None else f"{value:{form}} {unit}"


def _times(row: Row) -> str:
    """Return how many times faster than the yardstick a row is."""
    ratio = cell(row, "ratio")
    return "" if ratio is None else f"{1 / ratio:.2f} x"


def _joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
