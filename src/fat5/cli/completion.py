"""Completion of the `fat5` command line in a shell, made from the parsers that the commands use."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from importlib.util import find_spec

from fat5.errors import ConfigError

SHELLS = ("bash", "zsh", "tcsh")
_FOLDERS = ("--output", "--output-dir", "--tokenizer")


def completion_script(parsers: Mapping[str, argparse.ArgumentParser], helps: Mapping[str, str], shell: str) -> str:
    """Return the script that completes commands, options, and what options take.

    Args:
        parsers: Each command's parser.
        helps: Each command's line of help.
        shell: A name in `SHELLS`.

    Raises:
        ConfigError: There is no such shell, or the package shtab is missing.
    """
    if shell not in SHELLS:
        raise ConfigError(f"got the shell {shell!r}; expected one of {', '.join(SHELLS)}")
    if find_spec("shtab") is None:
        raise ConfigError("completion needs the package shtab: pip install 'fat5[completion]'")
    import shtab

    root = argparse.ArgumentParser(prog="fat5", add_help=False)
    root.add_argument("--help", action="help", help="list the commands")
    root.add_argument("--version", action="version", help="print the version")
    commands = root.add_subparsers()
    for name, parser in parsers.items():
        command = commands.add_parser(name, help=helps[name], add_help=False)
        for action in parser._actions:
            _copy(action, command, shtab)
    return shtab.complete(root, shell)


def _copy(action: argparse.Action, command: argparse.ArgumentParser, shtab: object) -> None:
    """Add an argument of the same look: only names, help and what it takes matter to a shell."""
    # The types of jsonargparse's parsers are annotations, which argparse would not take.
    # Help may be lines long, and may hold percent signs that argparse would expand.
    text = " ".join((action.help or "").split()).replace("%", "%%")
    if action.option_strings and action.nargs == 0:
        command.add_argument(*action.option_strings, action="store_true", help=text, dest=action.dest)
        return
    names = action.option_strings or [action.dest]
    added = command.add_argument(*names, nargs=action.nargs, choices=action.choices, help=text)
    if action.choices is None:
        folder = any(name in _FOLDERS for name in action.option_strings)
        added.complete = getattr(shtab, "DIRECTORY" if folder else "FILE")  # type: ignore[attr-defined]
