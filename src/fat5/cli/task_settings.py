"""The arguments that `fat5 finetune`, `evaluate` and `sweep` share, and the settings made from them."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING, NamedTuple

from fat5.errors import ConfigError
from fat5.tasks.registry import TASKS, task_class
from fat5.tasks.settings import TaskConfig, load_task_config
from fat5.training.config_help import describe_settings

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


class Given(NamedTuple):
    """The positional arguments, told apart.

    Attributes:
        task: Name of the task, None where a file names it.
        model: Folder or hub name of a model, None where the settings name it.
        files: YAML files.
        overrides: `section.key=value`.
    """

    task: str | None
    model: str | None
    files: list[str]
    overrides: list[str]


def add_common_arguments(parser: ArgumentParser) -> None:
    """Add data and output, and a help text that lists the tasks and every setting."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    width = max(map(len, TASKS)) + 2
    tasks = "\n".join(f"  {name:<{width}}{entry.help}" for name, entry in TASKS.items())
    parser.epilog = (
        f"tasks:\n{tasks}\n\n"
        "settings, `section.key=value` on the command line and nested in YAML (in brackets: type, default):\n"
        f"{describe_settings(TaskConfig)}\n{_options()}"
    )
    parser.add_argument(
        "--data", type=str, metavar="SOURCE", help="data.source: a table, a folder of tables, or a data set of the hub"
    )
    parser.add_argument("--output", type=str, metavar="FOLDER", help="training.output_dir: the folder of the results")


def _options() -> str:
    lines = []
    for name in TASKS:
        options = task_class(name).Options
        described = describe_settings(dataclasses.make_dataclass("Options", [("options", options)]))
        lines.append(described.replace("\noptions:", f"\noptions of {name}:").rstrip())
    return "\n".join(lines)


def told_apart(words: list[str]) -> Given:
    """Sort the positional arguments: a task is known by its name, a file by its ending, a setting by its `=`.

    Raises:
        ConfigError: There is more than one model.
    """
    overrides = [word for word in words if "=" in word]
    rest = [word for word in words if "=" not in word]
    files = [word for word in rest if word.endswith((".yaml", ".yml"))]
    rest = [word for word in rest if word not in files]
    task = rest.pop(0) if rest and (rest[0] in TASKS or not files) else None
    if task is not None:
        task_class(task)  # the message for a wrong name
    if len(rest) > 1:
        raise ConfigError(f"expected TASK MODEL [CONFIG.yaml] [section.key=value ...], got more: {' '.join(rest[1:])}")
    return Given(task, rest[0] if rest else None, files, overrides)


def config_from(args: Namespace, shortcuts: list[str]) -> TaskConfig:
    """Return the settings: those of the file, then the options, then the `section.key=value`.

    Args:
        args: With `words`, `data` and `output`.
        shortcuts: Further settings that options stand for.
    """
    given = told_apart(list(args.words))
    if len(given.files) > 1:
        raise ConfigError(f"expected one file of settings, got {', '.join(given.files)}")
    if given.model is not None:
        shortcuts = [f"model.checkpoint={given.model}", *shortcuts]
    if args.data is not None:
        shortcuts.append(f"data.source={args.data}")
    if args.output is not None:
        shortcuts.append(f"training.output_dir={args.output}")
    return load_task_config(given.task, given.files[0] if given.files else None, [*shortcuts, *given.overrides])
