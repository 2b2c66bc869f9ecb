"""From the columns of a table to the fields of a task, with errors that name the columns found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fat5.data.table_files import Row
from fat5.errors import ConfigError, DataError, nearest


@dataclass(frozen=True)
class Field:
    """What a task reads from a row.

    Attributes:
        name: Its name in the task.
        convert: Returns the value in the task's own form; raises ValueError with the expected form.
        aliases: Names that usual data sets give to the column, beside `name`, the likeliest first.
        optional: The column may be missing; the field is then None.
    """

    name: str
    convert: Callable[[Any], Any]
    aliases: tuple[str, ...] = ()
    optional: bool = False


def map_columns(task: str, fields: Sequence[Field], present: Sequence[str], given: Mapping[str, str]) -> dict[str, str]:
    """Return field to column.

    Args:
        task: Name of the task, for the messages.
        fields: What it reads.
        present: Columns of the table.
        given: The user's choice, `data.columns`.

    Raises:
        ConfigError: `given` names a field that the task does not have.
        DataError: A column is missing; the message names the columns found.
    """
    names = [field.name for field in fields]
    for name, column in given.items():
        if name not in names:
            raise ConfigError(f"data.columns.{name}: {task} reads the fields {', '.join(names)}{nearest(name, names)}")
        if column not in present:
            raise DataError(
                f"data.columns.{name} is {column!r}, but the columns are {', '.join(present)}{nearest(column, present)}"
            )
    mapping = {}
    for field in fields:
        usual = (field.name, *field.aliases)
        found = given.get(field.name) or next((column for column in usual if column in present), None)
        if found is not None:
            mapping[field.name] = found
        elif not field.optional:
            raise DataError(
                f"{task} needs a column for {field.name!r} and found none of {', '.join(usual)}; the columns are "
                f"{', '.join(present)}. Name it with data.columns.{field.name}=COLUMN"
            )
    return mapping


def convert_rows(rows: Sequence[Row], fields: Sequence[Field], mapping: Mapping[str, str], place: str) -> list[Row]:
    """Return rows that hold the task's fields alone.

    Args:
        rows: Rows of a table.
        fields: What the task reads.
        mapping: What `map_columns` returned.
        place: Name of the split, for the messages.

    Raises:
        DataError: A value has another form than the field needs; the message names split, row and column.
    """
    converted = []
    for index, row in enumerate(rows):
        entry = {}
        for field in fields:
            column = mapping.get(field.name)
            try:
                entry[field.name] = None if column is None else field.convert(row.get(column))
            except (ValueError, TypeError, KeyError) as error:
                raise DataError(f"{place}, row {index:,}, column {column!r}: {error}") from error
        converted.append(entry)
    return converted


def text(value: Any) -> str:
    """Return a text that is not blank."""
    if not isinstance(value, str):
        raise ValueError(f"expected text, got {_kind(value)}")
    if not value.strip():
        raise ValueError("expected text, got a blank one")
    return value


def label(value: Any) -> str:
    """Return the name of a class: a text, or a whole number as one."""
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, bool | int):
        return str(int(value))
    raise ValueError(f"expected the name or the number of a class, got {_kind(value)}")


def number(value: Any) -> float:
    """Return a number, also one spelled as text."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"expected a number, got {_kind(value)}") from None
    if result != result:
        raise ValueError("expected a number, got NaN")
    return result


def words(value: Any) -> list[str]:
    """Return a list of words or tags; blank words become U+FFFD, so that each keeps its place."""
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"expected a list of words, got {_kind(value) if value != [] else 'an empty one'}")
    return [label(item) if not isinstance(item, str) or item.strip() else "\ufffd" for item in value]


def _kind(value: Any) -> str:
    return "none" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"
