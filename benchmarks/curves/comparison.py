"""Which curves on file may stand beside one another: two cards may have drawn one each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

MODELS = ("fat5", "transformers")
"""How the names of an implementation's rows begin."""

_DATA = ("train", "validation", "tokenizer", "text_tokens", "denoisers", "batch", "input_length", "target_length")
_SCHEDULE = ("minutes", "max_steps", "lr", "warmup", "evaluate_every", "eval_batches", "eager")
_PLACE = ("gpu", "torch")
SAME = ("model", *_DATA, *_SCHEDULE, *_PLACE)
"""Columns in which curves must be equal to be compared; where both lack one, both were drawn before there was such."""

Row = TypeVar("Row", bound=Mapping[str, Any])


def curve_of(rows: Sequence[Row], model: str) -> list[Row]:
    """Return the points of one of MODELS, without what failed."""
    return [row for row in rows if row["implementation"].startswith(model) and row.get("eval_loss") not in (None, "")]


def newest_comparison(rows: Sequence[Row]) -> list[Row]:
    """Return the newest curve of each model, out of rows of one or several runs that are equal in SAME.

    Of several comparisons the newest is taken, but a curve alone only where no two can be compared.
    """
    settings: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        settings.setdefault(tuple(row.get(name) or "" for name in SAME), []).append(row)
    best: list[list[Row]] = []
    for own in settings.values():
        curves = [_newest(curve_of(own, model)) for model in MODELS]
        best = max(best, [curve for curve in curves if curve], key=_rank)
    return [row for curve in best for row in curve]


def _newest(curve: list[Row]) -> list[Row]:
    date = max((row["date"] for row in curve), default=None)
    return [row for row in curve if row["date"] == date]


def _rank(curves: list[list[Row]]) -> tuple[int, str]:
    return len(curves), max((curve[0]["date"] for curve in curves), default="")
