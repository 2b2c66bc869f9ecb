"""Which columns a table shows, under which titles, and how their cells read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.report.rows import ORIGIN, Cells
from benchmarks.session import OK


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: In the CSV file.
        title: In the head of the table.
        form: Format of a number.
    """

    name: str
    title: str
    form: str = ""


_MEASURED = {
    column.name: column
    for column in (
        Column("p50_ms", "p50, ms", ".4g"),
        Column("p20_ms", "p20, ms", ".4g"),
        Column("p80_ms", "p80, ms", ".4g"),
        Column("host_ms", "host, ms", ".3g"),
        Column("ratio", "x yardstick", ".2f"),
        Column("tflops", "TFLOP/s", ".0f"),
        Column("utilisation", "of the peak", ".1%"),
        Column("gb_per_s", "GB/s", ",.0f"),
        Column("copy_gb_per_s", "copy, GB/s", ",.0f"),
        Column("tokens_per_s", "tokens/s", ",.0f"),
        Column("tokens_per_s_per_process", "tokens/s each", ",.0f"),
        Column("share_of_one", "of one alone", ".1%"),
        Column("texts_per_s", "texts/s", ",.0f"),
        Column("documents_per_s", "documents/s", ",.0f"),
        Column("batches_per_s", "batches/s", ",.0f"),
        Column("peak_mib", "peak, MiB", ",.4g"),
        Column("peak_gib", "peak, GiB", ".2f"),
        Column("peak_reserved_gib", "reserved, GiB", ".2f"),
        Column("share_gemm", "matrix products", ".0%"),
        Column("share_attention", "attention", ".0%"),
        Column("share_memory_bound", "memory-bound", ".0%"),
        Column("share_communication", "communication", ".1%"),
        Column("share_communication_alone", "communication alone", ".1%"),
        Column("share_idle", "idle", ".0%"),
        Column("first_step_s", "first steps, s", ".1f"),
        Column("fill", "slots filled", ".2%"),
        Column("encoder_fill", "encoder", ".2%"),
        Column("decoder_fill", "decoder", ".2%"),
        Column("same_tokens", "same tokens", ".1%"),
        Column("score", "score", ".2f"),
        Column("spread", "spread", ".2f"),
        Column("seconds", "seconds", ",.1f"),
        Column("tokens_seen", "tokens seen", ",.0f"),
        Column("loss", "loss", ".4f"),
        Column("last_loss", "loss at the end", ".4f"),
        Column("distance", "from fp32", "+.2%"),
        Column("first_loss_distance", "first loss, from the run to equal", ".1e"),
        Column("loss_distance", "losses, from the run to equal", ".1e"),
        Column("eval_loss", "held-out loss", ".4f"),
        Column("eval_accuracy", "held-out accuracy", ".2%"),
        Column("epoch", "epoch", ".2f"),
        Column("parameters", "parameters", ",.0f"),
        Column("gate", "gate", ".2f"),
        Column("bit_equal", "bit-equal"),
        Column("bias_gradient", "gradient of the bias"),
        Column("repetitions", "timed runs"),
        Column("other_scores", "other scores"),
        Column("error", "what happened"),
    )
}
_LAST = ("status", "error")


def split(rows: Sequence[Cells]) -> tuple[list[tuple[str, str]], list[Column]]:
    """Return what is the same in all rows, as titles and texts, and the columns of what is not.

    Measurements are columns always; a workload's columns come before who computed it, measurements behind.
    """
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name not in ORIGIN]
    if all(row["status"] == OK for row in rows):
        names.remove("status")
    common, workload = [], []
    for name in names:
        if name in _MEASURED or name in _LAST or name in ("implementation", "phase"):
            continue
        held = [row for row in rows if name in row]
        column = Column(name, name.replace("_", " "))
        if len({str(row[name]) for row in held}) == 1 and all(name in row for row in rows if row["status"] == OK):
            common.append((column.title, text(column, held[0])))
        else:
            workload.append(column)
    who = [Column(name, name) for name in ("implementation", "phase") if name in names]
    measured = [column for name, column in _MEASURED.items() if name in names and name not in _LAST]
    ends = [_MEASURED.get(name, Column(name, name)) for name in _LAST if name in names]
    return common, [*workload, *who, *measured, *ends]


def text(column: Column, row: Cells) -> str:
    """Return a cell as it is shown, empty where the row has none."""
    value = row[column.name]
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float) and column.form.endswith(".0f") and abs(value) < 100:
        return f"{value:.3g}"
    if isinstance(value, int | float) and column.form:
        return f"{value:{column.form}}"
    return f"{value:,}" if isinstance(value, int) and abs(value) >= 10_000 else str(value)


def is_number(column: Column, rows: Sequence[Cells]) -> bool:
    """Return whether a column holds numbers, which are aligned right."""
    values: list[Any] = [row[column.name] for row in rows if row[column.name] is not None]
    return bool(values) and all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
