"""The splits of a task's data: local tables, read without the package `datasets`, or a data set that it loads."""

from __future__ import annotations

import logging
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fat5.data.hub import load_hub_dataset, may_be_on_hub
from fat5.data.table_files import TABLE_FORMATS, Row, name_classes, read_table, table_format
from fat5.errors import ConfigError, DataError, nearest, nearest_path
from fat5.tasks.columns import Field, convert_rows, map_columns
from fat5.tasks.extras import require

logger = logging.getLogger(__name__)

TRAIN, VALIDATION, TEST = "train", "validation", "test"
_USUAL_NAMES = {TRAIN: ("train", "training"), VALIDATION: ("validation", "valid", "val", "dev"), TEST: ("test", "eval")}


@dataclass(frozen=True)
class TaskData:
    """Which data to learn from and to be judged on.

    Attributes:
        source: A table (.jsonl, .json, .csv, .tsv or .parquet; all but the last also .gz or .zst) with a column that
            names the split; a folder of tables named after their split, such as train.jsonl or
            data/train-00000-of-00001.parquet; a folder written by `datasets`; or the name of a data set of the hub.
        name: Configuration of the hub data set, where it has several.
        split_column: Column of a single table that names each row's split; without it all rows are training rows.
        train: Name of the training split, or a table that holds it; found by its usual names if null.
        validation: The same of the validation split. Where there is none, a share of the training rows is taken.
        test: The same of the test split. Where there is none, scores are those of the validation split.
        validation_fraction: That share; rows are chosen by a hash of their content, so always the same ones.
        columns: Field of the task to the column that holds it, where the usual names do not tell, such as
            {text: review}.
        max_train: Use at most so many training rows, the first by a hash of their content; null for all.
        max_validation: The same of the validation split, which is scored after each evaluation.
        max_test: The same of the test split.
    """

    source: str | None = None
    name: str | None = None
    split_column: str = "split"
    train: str | None = None
    validation: str | None = None
    test: str | None = None
    validation_fraction: float = 0.1
    columns: dict[str, str] = field(default_factory=dict)
    max_train: int | None = None
    max_validation: int | None = None
    max_test: int | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.validation_fraction < 1.0:
            raise ConfigError(f"data.validation_fraction is {self.validation_fraction}, expected more than 0, below 1")
        for name in ("max_train", "max_validation", "max_test"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"data.{name} is {value}, expected at least 1")


@dataclass(frozen=True)
class Splits:
    """Rows with the task's fields.

    Attributes:
        train: To learn from; empty where only an evaluation was asked for and the data has none.
        validation: To choose the best model by.
        test: To be judged on.
        test_name: "test", or "validation" where the data has no test split.
    """

    train: list[Row]
    validation: list[Row]
    test: list[Row]
    test_name: str


def load_splits(task: str, fields: Sequence[Field], data: TaskData, *, need_train: bool = True) -> Splits:
    """Read the data, map its columns, and see to it that each split has rows.

    Args:
        task: Name of the task, for the messages.
        fields: What it reads.
        data: Where the data is.
        need_train: Whether a missing training split is an error.

    Raises:
        ConfigError: Settings do not fit together, or the package `datasets` is needed and missing.
        DataError: A file is damaged; a column or a split is missing; a split is empty; a value has a wrong form.
        FileNotFoundError: A file does not exist.
    """
    tables = _tables(data)
    found = {role: _find(tables, role, getattr(data, role)) for role in (TRAIN, VALIDATION, TEST)}
    splits: dict[str, list[Row]] = {}
    for role, name in found.items():
        if name is None:
            continue
        if not tables[name]:
            raise DataError(f"the split {name!r} of {data.source} is empty")
        columns = list(dict.fromkeys(column for row in tables[name] for column in row))
        mapping = map_columns(task, fields, columns, data.columns)
        splits[role] = convert_rows(tables[name], fields, mapping, f"{name} of {data.source or name}")
    unused = [f"{name!r} of {len(rows):,} rows" for name, rows in tables.items() if name not in found.values()]
    if unused and splits:
        logger.warning("splits not used: %s (data.train, data.validation and data.test name splits)", ", ".join(unused))
    train, validation, test = (splits.get(role, []) for role in (TRAIN, VALIDATION, TEST))
    if not train and need_train:
        raise DataError(f"{data.source} has no training split; its splits are {', '.join(tables)}. Name it: data.train")
    if not validation and len(train) > 1:
        train, validation = _hold_out(train, data.validation_fraction)
        logger.info("no validation split: %d of the training rows are held out for it", len(validation))
    if not test and not validation:
        counts = ", ".join(f"{name} of {len(rows):,} rows" for name, rows in tables.items())
        raise DataError(
            f"{data.source} has no split to be judged on: expected one named test or valid, or at least 2 training "
            f"rows to hold some out of; got {counts}"
        )
    if not test:
        logger.warning("no test split: the scores are those of the validation split that also chooses the model")
    return Splits(
        train=_first(train, data.max_train),
        validation=_first(validation, data.max_validation),
        test=_first(test or validation, data.max_test),
        test_name=TEST if test else VALIDATION,
    )


def _find(tables: dict[str, list[Row]], role: str, given: str | None) -> str | None:
    if given is None:
        return next((name for name in _USUAL_NAMES[role] if name in tables), None)
    if given not in tables:
        raise DataError(
            f"data.{role} is {given!r}, which is no file and no split; the splits are "
            f"{', '.join(tables) or 'none'}{nearest(given, tables)}"
        )
    return given


def _tables(data: TaskData) -> dict[str, list[Row]]:
    """Return the rows of every split by the split's name, or by the path where a role names a file."""
    own_files = [value for value in (data.train, data.validation, data.test) if value and table_format(Path(value))]
    for value in own_files:
        if not Path(value).exists():
            raise FileNotFoundError(f"there is no file {value}{nearest_path(value)}")
    tables = {value: read_table(Path(value)) for value in own_files}
    if data.source is None:
        if not tables:
            raise ConfigError("data.source (--data) is missing: a table, a folder of tables, or a data set of the hub")
        return tables
    path = Path(data.source)
    saved = any((path / name).is_file() for name in ("state.json", "dataset_dict.json"))
    if path.is_file():
        return tables | _split_table(read_table(path), data.split_column)
    if path.is_dir() and not saved:
        return tables | _folder(path)
    if not saved and not may_be_on_hub(data.source):
        raise FileNotFoundError(f"there is no file or folder {data.source}{nearest_path(path)}")
    return tables | _datasets(data.source, data.name, saved=saved)


def _split_table(rows: list[Row], column: str) -> dict[str, list[Row]]:
    tables: dict[str, list[Row]] = {}
    for row in rows:
        tables.setdefault(str(row.get(column, TRAIN)), []).append(row)
    return tables


def _folder(folder: Path) -> dict[str, list[Row]]:
    """Read the tables of a folder; `NAME.jsonl` and `NAME-00000-of-00002.parquet` belong to the split NAME."""
    tables: dict[str, list[Row]] = {}
    visible = (p for p in folder.rglob("*") if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    for path in sorted(path for path in visible if path.is_file() and table_format(path)):
        name = re.sub(r"-\d{5}-of-\d{5}.*$", "", path.name.split(".")[0])
        tables.setdefault(name, []).extend(read_table(path))
    if not tables:
        raise DataError(f"the folder {folder} holds no table; expected files of {', '.join(TABLE_FORMATS)}")
    return tables


def _datasets(source: str, name: str | None, *, saved: bool) -> dict[str, list[Row]]:
    datasets: Any = require("datasets", "tasks", f"the data set {source}")
    if saved and name is not None:
        raise ConfigError(f"data.name applies to data sets of the hub, not to the folder {source}")
    loaded = _saved(datasets, source) if saved else load_hub_dataset(source, name)
    splits = loaded if isinstance(loaded, dict) else {TRAIN: loaded}
    return {name: name_classes(table.to_list(), table.features.to_dict()) for name, table in splits.items()}


def _saved(datasets: Any, folder: str) -> Any:
    try:
        return datasets.load_from_disk(folder)
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"the data set in {folder} could not be loaded: {reason}") from error


def _hash(row: Row) -> int:
    return zlib.crc32(repr(sorted(row.items())).encode("utf-8", "surrogatepass"))


def _hold_out(rows: list[Row], fraction: float) -> tuple[list[Row], list[Row]]:
    chosen = sorted(range(len(rows)), key=lambda index: (_hash(rows[index]), index))
    held = set(chosen[: max(1, round(fraction * len(rows)))])
    return (
        [row for index, row in enumerate(rows) if index not in held],
        [row for index, row in enumerate(rows) if index in held],
    )


def _first(rows: list[Row], limit: int | None) -> list[Row]:
    if limit is None or len(rows) <= limit:
        return rows
    # By hash rather than by place: files are often sorted by class.
    chosen = sorted(range(len(rows)), key=lambda index: (_hash(rows[index]), index))[:limit]
    return [rows[index] for index in sorted(chosen)]
