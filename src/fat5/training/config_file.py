"""Settings from a YAML file and `key=value` overrides, merged strictly into a frozen dataclass, and back to YAML."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from fat5.errors import ConfigError, nearest_path

Config = TypeVar("Config")

# Names of Transformers' TrainingArguments that look like none of ours.
_TRANSFORMERS_NAMES = {
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "batch_size",
    "per_device_eval_batch_size": "eval_batch_size",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "logging_steps": "log_every",
}


def load_settings(
    cls: type[Config], path: str | os.PathLike[str] | None = None, overrides: Sequence[str] = ()
) -> Config:
    """Read the YAML file, apply the overrides in order, check every key and type, and build `cls`.

    Args:
        cls: a dataclass, its fields dataclasses or plain types.
        path: a YAML file; None starts from the defaults.
        overrides: `section.key=value`, the value in YAML; a mapping stands in braces.

    Raises:
        FileNotFoundError: there is no such file.
        ConfigError: the file is no YAML mapping; a key is unknown (the nearest known one is named) or missing; a value
            has a wrong type (got and expected are named) or is refused by the dataclass.
    """
    settings = _read_yaml(settings_file(path)) if path is not None else {}
    for override in overrides:
        _apply(settings, override)
    return build_settings(cls, settings)


def settings_file(path: str | os.PathLike[str]) -> Path:
    """Return the path of a file of settings.

    Raises:
        FileNotFoundError: There is none; the message names the nearest.
    """
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no file {os.fspath(path)}{nearest_path(path)}")
    return Path(path)


def build_settings(cls: type[Config], settings: Mapping[str, Any]) -> Config:
    """Check a nested mapping of settings and build `cls`; the errors are those of `load_settings`."""
    _check_keys(cls, settings)
    hints = typing.get_type_hints(cls)
    # A section whose lines are all comments is null in YAML.
    settings = {
        name: {} if value is None and dataclasses.is_dataclass(hints[name]) else value
        for name, value in settings.items()
    }
    _build_optional_sections(cls, settings)
    return _build(cls, settings)


def _build_optional_sections(cls: type, settings: Mapping[str, Any], prefix: str = "") -> None:
    """Build the sections that may be null for their errors: of a choice of types the parser names no key."""
    hints = typing.get_type_hints(cls)
    for name, kind in section_fields(cls).items():
        value = settings.get(name)
        if not dataclasses.is_dataclass(kind) or not isinstance(value, Mapping):
            continue
        section, inner = typing.cast(type, kind), f"{prefix}{name}."
        if dataclasses.is_dataclass(hints[name]):
            _build_optional_sections(section, value, inner)
        else:
            _build(section, value, inner)


def _build(cls: type[Config], settings: Mapping[str, Any], prefix: str = "") -> Config:
    parser = settings_parser(cls)
    try:
        return cls(**vars(parser.instantiate(parser.parse_object(dict(settings)))))
    except ArgumentError as error:
        raise ConfigError(_explain(cls, settings, str(error), prefix)) from error
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error


def settings_parser(cls: type) -> ArgumentParser:
    """Return a parser that knows every key of `cls` under its dotted name."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls)
    return parser


def to_yaml(config: object) -> str:
    """Return a dataclass as YAML that `load_settings` reads back into an equal one."""
    return yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True, default_flow_style=False)


def flatten(config: object) -> dict[str, Any]:
    """Return `{"section.key": value}` over all leaves of a dataclass."""
    return dict(_leaves(_plain(config)))


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def known_keys(cls: type, prefix: str = "") -> list[str]:
    """Return the dotted names of all keys of a dataclass, sections included."""
    names = []
    for name, kind in section_fields(cls).items():
        names.append(prefix + name)
        if dataclasses.is_dataclass(kind):
            names += known_keys(typing.cast(type, kind), f"{prefix}{name}.")
    return names


def section_fields(cls: Any) -> dict[str, Any]:
    """Return the type of each field of a dataclass; that of `Section | None` is Section."""
    hints = typing.get_type_hints(cls)
    kinds = {}
    for field in dataclasses.fields(cls):
        sections = [choice for choice in _choices(hints[field.name]) if dataclasses.is_dataclass(choice)]
        kinds[field.name] = sections[0] if len(sections) == 1 else hints[field.name]
    return kinds


def item_class(kind: Any) -> type | None:
    """Return the dataclass of the items where a field may be a list of them, else None."""
    for choice in _choices(kind):
        if typing.get_origin(choice) in (list, tuple) and dataclasses.is_dataclass(typing.get_args(choice)[0]):
            return typing.get_args(choice)[0]
    return None


def type_name(kind: Any) -> str:
    """Return a type as people write it in YAML: `int | null`, `auto | fp32`, `list[float]`."""
    if typing.get_origin(kind) is typing.Literal:
        return " | ".join(map(str, typing.get_args(kind)))
    if len(_choices(kind)) > 1:
        return " | ".join(map(type_name, _choices(kind)))
    if kind is type(None):
        return "null"
    if typing.get_origin(kind) is dict:
        return f"dict[{', '.join(map(type_name, typing.get_args(kind)))}]"
    if items := typing.get_args(kind):
        return f"list[{', '.join(type_name(item) for item in items if item is not ...)}]"
    return getattr(kind, "__name__", str(kind))


def _choices(kind: Any) -> tuple[Any, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text; expected a YAML file of settings") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path} holds a {type(settings).__name__}, expected a mapping of sections to settings")
    return settings


def _apply(settings: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"{override!r} is not a setting; expected section.key=value, such as training.max_steps=1000")
    try:
        value = yaml.safe_load(text) if text else ""
    except yaml.YAMLError as error:
        raise ConfigError(f"the value of {override!r} is not valid YAML") from error
    if isinstance(value, dict) and not text.lstrip().startswith("{"):
        value = text  # `options.prefix="translate: "` is a text that ends in a colon
    *sections, name = key.split(".")
    target = settings
    for depth, section in enumerate(sections, start=1):
        if target.get(section) is None:  # missing, or a section whose lines are all comments
            target[section] = {}
        inner = target[section]
        if not isinstance(inner, dict):
            whole = ".".join(sections[:depth])
            raise ConfigError(f"{override!r} sets a key inside {whole}, which is {inner!r} and has no keys")
        target = inner
    target[name] = value


def _check_keys(cls: type, settings: Mapping[str, Any], prefix: str = "", root: type | None = None) -> None:
    root = root or cls
    fields = section_fields(cls)
    for name, value in settings.items():
        if name not in fields:
            raise ConfigError(f"unknown setting {prefix}{name}{_nearest_key(f'{prefix}{name}', cls, root)}")
        item = item_class(fields[name])
        if item is not None and isinstance(value, list):
            for index, entry in enumerate(value):
                if isinstance(entry, Mapping):
                    _check_keys(item, entry, f"{prefix}{name}[{index}].", item)
        if not dataclasses.is_dataclass(fields[name]):
            continue
        if isinstance(value, Mapping):
            _check_keys(typing.cast(type, fields[name]), value, f"{prefix}{name}.", root)
        elif value is not None:
            keys = ", ".join(section_fields(fields[name]))
            raise ConfigError(f"{prefix}{name} is {value!r}, expected a section of settings ({keys})")


def _nearest_key(key: str, section: type, root: type) -> str:
    keys = known_keys(root)
    if key in keys:
        return "; in YAML, a setting stands inside its section"
    leaf = key.rsplit(".", 1)[-1]
    leaf = _TRANSFORMERS_NAMES.get(leaf, leaf)
    # A right name in a wrong section is the more likely slip than a wrong name that looks alike.
    same = [known for known in keys if known.rsplit(".", 1)[-1] == leaf]
    near = same or difflib.get_close_matches(key, keys, n=1, cutoff=0.6)
    if not near:
        leaves = {known.rsplit(".", 1)[-1]: known for known in keys}
        near = [leaves[name] for name in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.6)]
    return f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(section_fields(section))}"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value) if field.init}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _explain(cls: type, settings: Mapping[str, Any], message: str, prefix: str) -> str:
    """Turn the parser's report into one line: the missing keys, or key, value got and type expected."""
    text = " ".join(message.split())
    required = re.search(r"arguments are required: (.*)$", text)
    if required:
        names = ", ".join(prefix + name for name in required.group(1).split(", "))
        return f"missing settings: {names}; they have no default"
    match = re.search(r'Parser key "([^"]+)"', text)
    if match is None:
        return text
    key = match.group(1)
    kind: Any = cls
    value: Any = settings
    for name in key.split("."):
        kind = section_fields(kind)[name]
        value = value[name]
    return f"{prefix}{key} is {value!r}, expected {type_name(kind)}"
