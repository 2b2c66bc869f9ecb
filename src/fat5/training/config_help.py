"""The list of all settings for `--help`, from the dataclasses' own docstrings."""

from __future__ import annotations

import dataclasses
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import docstring_parser
import yaml

from fat5.training.config_file import item_class, section_fields, type_name

_WIDTH = 110


def describe_settings(cls: type) -> str:
    """Return one entry for each setting of a configuration: dotted name, type, default, and its description."""
    return "\n".join(_sections(cls, ""))


def _sections(cls: Any, prefix: str, default: Any = None) -> Iterator[str]:
    """Yield the entries of a section; `default` is what stands there where nothing is set, None for its own."""
    descriptions = {entry.arg_name: entry.description for entry in docstring_parser.parse(cls.__doc__ or "").params}
    hints = typing.get_type_hints(cls)
    kinds = section_fields(cls)
    for field in dataclasses.fields(cls):
        text = " ".join((descriptions.get(field.name) or "").split())
        if dataclasses.is_dataclass(kinds[field.name]):
            yield f"\n{prefix}{field.name}: {text}"
            yield from _sections(kinds[field.name], f"{prefix}{field.name}.", _section_default(field))
        else:
            yield f"  {prefix}{field.name}  ({type_name(hints[field.name])}, {_default(field, default)})"
            yield textwrap.fill(text, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
            item = item_class(hints[field.name])
            if item is not None:
                yield from _sections(item, f"{prefix}{field.name}[].")


def _section_default(field: dataclasses.Field[Any]) -> Any:
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _default(field: dataclasses.Field[Any], section: Any = None) -> str:
    if section is not None:
        value = getattr(section, field.name)
    elif field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    value = list(value) if isinstance(value, tuple) else value
    text = yaml.safe_dump(value, default_flow_style=True).replace("\n...", "").strip()
    return f"default {text}"
