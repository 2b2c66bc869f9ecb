"""How all figures look."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind eyes; the markers differ too.
_LOOKS = {
    "torch": ("#E69F00", "P"),
    "transformers": ("#999999", "v"),
    "fat5-triton": ("#0072B2", "o"),
    "fat5-hopper": ("#D55E00", "s"),
    "fat5-hopper-deterministic": ("#009E73", "<"),
    "cudnn": ("#555555", "D"),
    "fa2": ("#999999", "v"),
    "cudnn-bias": ("#56B4E9", "^"),
    "sdpa-bias": ("#E69F00", "P"),
    "flex": ("#CC79A7", "X"),
    "eager-bias": ("#009E73", "*"),
    "fat5-triton-overwrite": ("#D55E00", "s"),
    "compile": ("#56B4E9", "^"),
    "liger": ("#CC79A7", "X"),
    "eager": ("#009E73", "*"),
    "products": ("#555555", "D"),
    "fat5": ("#0072B2", "o"),
    "fat5-step": ("#D55E00", "s"),
    "fat5-torch": ("#56B4E9", "^"),
    "fat5-fused": ("#0072B2", "o"),
    "fat5-foreach": ("#56B4E9", "^"),
    "adamw-fused": ("#E69F00", "P"),
    "adamw-foreach": ("#999999", "v"),
    "adafactor": ("#009E73", "*"),
    "sdpa": ("#E69F00", "P"),
}
_OTHERS = (("#009E73", "<"), ("#F0E442", ">"), ("#000000", "h"))

LABELS = {
    "torch": "PyTorch",
    "transformers": "Transformers' layer",
    "cudnn": "cuDNN, no bias",
    "fa2": "FlashAttention-2, no bias",
    "cudnn-bias": "cuDNN, bias materialised, without its gradient",
    "sdpa-bias": "SDPA memory-efficient, bias materialised",
    "flex": "FlexAttention, bias table",
    "eager-bias": "plain PyTorch, bias materialised",
    "fat5-triton": "FAT5 triton, bias table",
    "fat5-triton-overwrite": "FAT5 triton, overwriting the logits",
    "compile": "torch.compile",
    "liger": "Liger-Kernel",
    "eager": "plain PyTorch",
    "products": "the three matrix products alone",
    "fat5-hopper": "FAT5 hopper, bias table",
    "fat5-hopper-deterministic": "FAT5 hopper, deterministic",
    "fat5": "FAT5",
    "fat5-step": "FAT5, of the step replayed as a CUDA graph",
    "fat5-fused": "FAT5 AdamWScale, fused",
    "fat5-foreach": "FAT5 AdamWScale, foreach",
    "adamw-fused": "PyTorch AdamW, fused",
    "adamw-foreach": "PyTorch AdamW, foreach",
    "adafactor": "Transformers' Adafactor",
    "sdpa": "SDPA",
}


WITHOUT_BIAS = {"fat5-triton": "FAT5 triton", "fat5-torch": "FAT5 torch"}
"""Labels of FAT5's backends where there is no attention."""


def new_figure(width: float, height: float, *, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """Return a figure and its axes, always a 2-d array."""
    # Figure and canvas directly: pyplot would pick a screen backend and keep global state.
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def look(name: str) -> dict[str, Any]:
    """Return the line style of an implementation, the same in every figure."""
    color, marker = _LOOKS.get(name) or _OTHERS[sum(map(ord, name)) % len(_OTHERS)]
    own = name.startswith("fat5-")
    return {
        "color": color,
        "marker": marker,
        "markersize": 5,
        "linewidth": 2.0 if own else 1.2,
        "zorder": 3 if own else 2,
        "label": LABELS.get(name, name),
    }


def tidy(axes: Axes) -> None:
    """Leave a light grid and no frame."""
    axes.grid(alpha=0.25, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)


def legend_below(figure: Figure, axes: Iterable[Axes], columns: int) -> None:
    """Put one legend for all axes below them."""
    entries = {label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    place = {"loc": "outside lower center", "ncols": columns}
    figure.legend(entries.values(), entries.keys(), fontsize=8, frameon=False, **place)


def caption(rows: Sequence[Mapping[str, str]]) -> str:
    """Return what the figure was measured on: device, software, dates."""
    gpus, dates = (sorted({row[name] for row in rows}) for name in ("gpu", "date"))
    days = sorted({date[:10] for date in dates})
    torch = ", ".join(sorted({row["torch"] for row in rows}))
    machine = ", ".join("CPU" if gpu == "none" else gpu for gpu in gpus)
    return f"{machine}; torch {torch}; {' to '.join(dict.fromkeys((days[0], days[-1])))}"


def latest(rows: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Return the rows of the latest run among these: figures compare within one run alone."""
    newest = max((row["date"] for row in rows), default="")
    return [row for row in rows if row["date"] == newest]


def latest_of_each(rows: Sequence[Mapping[str, str]], *names: str) -> list[Mapping[str, str]]:
    """Return the rows of the latest run of each part, the rows that are equal in these columns, in their order."""
    parts: dict[tuple[str, ...], list[Mapping[str, str]]] = {}
    for row in rows:
        parts.setdefault(tuple(row[name] for name in names), []).append(row)
    return [row for part in parts.values() for row in latest(part)]
