"""Rows with all their columns out of local files (JSON, JSON lines, CSV, Parquet), with class names put in."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fat5.data.text_files import open_parquet, read_lines, without_surrogates
from fat5.errors import DataError

Row = dict[str, Any]

TABLE_FORMATS = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_COMPRESSED = (".gz", ".zst")
_MAX_FIELD = 2**31 - 1  # what a C long holds on every platform


def table_format(path: Path) -> str | None:
    """Return the suffix of a table by the name of `path`, compression aside, or None for other files."""
    name = path.with_suffix("") if path.suffix.lower() in _COMPRESSED else path
    suffix = name.suffix.lower()
    if suffix not in TABLE_FORMATS or (suffix == ".parquet" and name != path):
        return None
    return suffix


def read_table(path: Path) -> list[Row]:
    """Return the rows of one file; a JSON file is a list of objects, or an object that holds one under "data".

    Lone surrogates, which JSON can spell but UTF-8 not hold, become U+FFFD, in place: spans stay where they are.
    Integers that a Parquet file of the hub declares to be classes become the names of these.

    Raises:
        DataError: The file is damaged, not UTF-8, of another format, or without rows.
    """
    suffix = table_format(path)
    if suffix is None:
        raise DataError(f"{path} is no table; expected a file of {', '.join(TABLE_FORMATS)}")
    if suffix == ".parquet":
        rows = _read_parquet(path)
    elif suffix == ".jsonl":
        rows = list(_read_json_lines(path))
    elif suffix == ".json":
        rows = _read_json(path)
    else:
        rows = _read_csv(path, delimiter="\t" if suffix == ".tsv" else ",")
    if not rows:
        raise DataError(f"{path} holds no row")
    return rows


def _read_json_lines(path: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path), start=1):
        if line.strip():
            yield _checked_row(_parsed(line, f"{path}, line {number:,}"), f"{path}, line {number:,}")


def _read_json(path: Path) -> list[Row]:
    loaded = _parsed("".join(read_lines(path, keep_ends=True)), str(path))
    rows = loaded.get("data") if isinstance(loaded, dict) else loaded
    if not isinstance(rows, list):
        raise DataError(f'{path}: expected a list of objects, or an object with one under "data"')
    return [_checked_row(row, f"{path}, entry {index:,}") for index, row in enumerate(rows)]


def _read_csv(path: Path, *, delimiter: str) -> list[Row]:
    # The module's limit of 131,072 characters a field is less than a long document, and cannot be set for one reader.
    csv.field_size_limit(_MAX_FIELD)
    reader = csv.DictReader(read_lines(path, keep_ends=True), delimiter=delimiter)
    try:
        names = list(reader.fieldnames or [])
        twice = sorted({name for name in names if name and names.count(name) > 1})
        if twice:
            raise DataError(f"{path} has more than one column of the name {twice[0]!r}; expected each name once")
        if len(names) == 1 and ";" in names[0]:
            raise DataError(
                f"{path} has one column, {names[0]!r}: it seems to be separated by ';', expected {delimiter!r}"
            )
        rows = []
        for row in reader:
            if None in row:
                raise DataError(
                    f"{path}, line {reader.line_num:,}: {len(names) + len(row[None])} values for {len(names)} columns; "
                    f"a text that holds {delimiter!r} stands in double quotes"
                )
            rows.append(row)
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num:,}: {error}") from error
    return rows


def _parsed(text: str, place: str) -> Any:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: no JSON: {error}") from error
    return _without_surrogates(value) if "\\u" in text else value


def _without_surrogates(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_surrogates(item) for item in value]
    return without_surrogates(value) if isinstance(value, str) else value


def _checked_row(row: Any, place: str) -> Row:
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected a JSON object, got {type(row).__name__}")
    return row


def _read_parquet(path: Path) -> list[Row]:
    import pyarrow

    file = open_parquet(path)
    try:
        rows = file.read().to_pylist()
    except UnicodeDecodeError as error:
        raise DataError(f"{path} holds text that is not UTF-8") from error
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged: {str(error).splitlines()[0]}") from error
    metadata = (file.schema_arrow.metadata or {}).get(b"huggingface")
    features = json.loads(metadata).get("info", {}).get("features", {}) if metadata else {}
    return name_classes(rows, features)


def name_classes(rows: list[Row], features: Mapping[str, Any]) -> list[Row]:
    """Replace the integers of class columns, and of columns of lists of classes, by the names of the classes.

    Args:
        rows: Changed in place.
        features: Column to its description, as `datasets.Features.to_dict()` has it.
    """
    for column, feature in features.items():
        names = _class_names(feature)
        if names is None:
            continue
        for row in rows:
            row[column] = _named(row[column], names)
    return rows


def _class_names(feature: Any) -> list[str] | None:
    inner = feature
    while isinstance(inner, list | Mapping):
        if isinstance(inner, list):
            inner = inner[0] if len(inner) == 1 else None
        elif inner.get("_type") == "ClassLabel":
            return list(inner["names"])
        else:
            inner = inner.get("feature")
    return None


def _named(value: Any, names: list[str]) -> Any:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_named(item, names) for item in value]
    # The hub writes -1 for a label that is kept secret.
    return names[value] if isinstance(value, int) and 0 <= value < len(names) else None
