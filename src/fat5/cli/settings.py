"""Command line options made from the fields of a settings class, their help from its docstring."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar, get_type_hints

import docstring_parser

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

T = TypeVar("T")


def add_settings(parser: ArgumentParser, settings: type, *, positional: str | None = None) -> None:
    """Add one option for each field of the dataclass `settings`: `num_proc` becomes `--num-proc`.

    Args:
        parser: The command's parser.
        settings: A dataclass whose docstring describes its fields under `Attributes:`.
        positional: A field that holds a list, taken from the arguments that follow the command.
    """
    parsed = docstring_parser.parse(settings.__doc__ or "")
    described = {entry.arg_name: entry.description for entry in parsed.params}
    hints = get_type_hints(settings)
    for field in fields(settings):
        help_text = " ".join((described[field.name] or "").split())
        if field.name == positional:
            parser.add_argument(field.name, nargs="+", help=help_text)
            continue
        option = f"--{field.name.replace('_', '-')}"
        if hints[field.name] is bool:
            parser.add_argument(option, action="store_true", help=help_text)
        elif field.default is MISSING:
            parser.add_argument(option, type=hints[field.name], required=True, help=help_text)
        else:
            parser.add_argument(option, type=hints[field.name], default=field.default, help=help_text)


def settings_from(args: Namespace, settings: type[T]) -> T:
    """Build the dataclass `settings` from the options that `add_settings` added."""
    values: dict[str, Any] = {field.name: getattr(args, field.name) for field in fields(settings)}  # type: ignore[arg-type]
    return settings(**values)
