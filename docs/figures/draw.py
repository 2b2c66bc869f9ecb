"""Draw the figures of docs/concepts.md with FAT5's own functions: `python docs/figures/draw.py`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from matplotlib import rc_context
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fat5.files import atomic_file
from fat5.ops import RelativeBias, relative_position_buckets, saturation_radius

BUCKETS, MAX_DISTANCE = 32, 128  # T5's own
BLUE, ORANGE, GREY = "#0072B2", "#E69F00", "#999999"


def example_bias(*, bidirectional: bool = True) -> RelativeBias:
    """Return the bias of one head with a table that falls with the distance, as trained ones mostly do."""
    buckets = torch.arange(BUCKETS)
    one_side = BUCKETS // 2 if bidirectional else BUCKETS
    table = 2.0 - 4.0 * torch.sqrt((buckets % one_side) / one_side) + 0.7 * (buckets >= one_side)
    return RelativeBias(table[:, None], bidirectional=bidirectional, max_distance=MAX_DISTANCE)


def three_forms(length: int = 256) -> Figure:
    """One bias as a table by bucket, by distance, and in full."""
    bias = example_bias()
    full = bias.by_distance().dense(length, length, 0)[0, 0]
    distances = torch.arange(1 - length, length)
    by_distance = bias.table[buckets_of(distances), 0]
    figure = Figure(figsize=(9.0, 3.0), layout="constrained")
    table, line, matrix = figure.subplots(1, 3)
    table.bar(range(BUCKETS), bias.table[:, 0], color=BLUE, width=0.7)
    table.set(title=f"the parameter: {BUCKETS} numbers", xlabel="bucket", ylabel="bias")
    line.plot(distances, by_distance, color=BLUE, drawstyle="steps-mid")
    line.set(title=f"by distance: {2 * length - 1:,} numbers", xlabel="key position - query position", ylabel="bias")
    matrix.imshow(full, cmap="viridis", interpolation="nearest", rasterized=True)
    matrix.set(title=f"in full: {length * length:,} numbers", xlabel="key", ylabel="query")
    return figure


def buckets_of(distances: torch.Tensor, *, bidirectional: bool = True) -> torch.Tensor:
    """Return the bucket of each distance."""
    return relative_position_buckets(
        distances, num_buckets=BUCKETS, bidirectional=bidirectional, max_distance=MAX_DISTANCE
    )


def buckets() -> Figure:
    """The bucket of each distance, in the encoder and in the decoder."""
    distances = torch.arange(-160, 161)
    figure = Figure(figsize=(9.0, 3.0), layout="constrained")
    for axes, bidirectional in zip(figure.subplots(1, 2, sharey=True), (True, False), strict=True):
        radius = saturation_radius(BUCKETS, bidirectional, MAX_DISTANCE)
        axes.plot(distances, buckets_of(distances, bidirectional=bidirectional), color=BLUE, drawstyle="steps-mid")
        for edge in (-radius, radius)[: 1 + bidirectional]:
            axes.axvline(edge, color=ORANGE, linestyle="--")
        axes.set(
            title=f"{'encoder' if bidirectional else 'decoder'}: constant from distance {radius}",
            xlabel="key position - query position",
        )
    figure.axes[0].set_ylabel("bucket")
    return figure


def tile_kinds(length: int, tile: int, *, bidirectional: bool) -> np.ndarray:
    """Return for each tile of the scores 2 where the bias varies, 1 where it is one number, 0 where all is masked.

    Args:
        length: Of queries and keys, a multiple of `tile`.
        tile: Rows and columns of a tile.
        bidirectional: False for causal attention.
    """
    distances = torch.arange(length) - torch.arange(length)[:, None]
    found = buckets_of(distances, bidirectional=bidirectional)
    masked = (distances > 0) & (not bidirectional)
    kinds = np.zeros((length // tile, length // tile), dtype=int)
    for row, column in np.ndindex(kinds.shape):
        place = np.s_[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
        if masked[place].all():
            continue
        varies = masked[place].any() or found[place].unique().numel() > 1
        kinds[row, column] = 2 if varies else 1
    return kinds


def tiles(length: int = 1024, tile: int = 64) -> Figure:
    """The tiles of a matrix of scores, by what the kernel has to do for the bias."""
    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    for axes, bidirectional in zip(figure.subplots(1, 2), (True, False), strict=True):
        kinds = tile_kinds(length, tile, bidirectional=bidirectional)
        near, far = int((kinds == 2).sum()), int((kinds == 1).sum())
        colours = np.array([[255, 255, 255], [153, 153, 153], [0, 114, 178]], dtype=np.uint8)
        axes.imshow(colours[kinds], interpolation="nearest", extent=(0, length, length, 0))
        axes.set(
            title=f"{'full' if bidirectional else 'causal'}: {near} tiles look up, {far} add a constant",
            xlabel="key",
            ylabel="query",
        )
        axes.title.set_fontsize(10)
    return figure


FIGURES: dict[str, Callable[[], Figure]] = {"bias_forms": three_forms, "bias_buckets": buckets, "bias_tiles": tiles}
"""By the name of the file."""


def draw(folder: Path) -> list[Path]:
    """Draw every figure into `folder`, equal bytes for equal code, and return the files."""
    paths = []
    for name, make in FIGURES.items():
        path = folder / f"{name}.svg"
        with rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}), atomic_file(path) as staging:
            figure = make()
            FigureCanvasSVG(figure)
            figure.savefig(staging, format="svg", metadata={"Date": None})
        paths.append(path)
    return paths


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draw the figures of docs/concepts.md.")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent, metavar="DIR", help="where they go")
    for written in draw(parser.parse_args().output):
        print(written)
