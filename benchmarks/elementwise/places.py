"""The workload of a row in a few words, for tables and figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = Mapping[str, Any]


def rms_norm(row: Row) -> str:
    """Return operation, size and type."""
    return f"{row['operation']} {row['rows']}x{row['width']} {row['dtype']}"


def rotary(row: Row) -> str:
    """Return size, form and type."""
    form = "interleaved" if str(row["interleaved"]) == "True" else "halves"
    return f"{row['tokens']} tokens H{row['heads']} D{row['head_dim']} {form} {row['dtype']}"


def geglu(row: Row) -> str:
    """Return size, form, layout of the projections and type."""
    return f"{row['rows']}x{row['width']} {row['approximate']} {row['layout']} {row['dtype']}"
