"""Whether a program would take a command: its own parser reads it, and nothing is run."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import runpy
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import yaml
from torch.distributed.run import get_args_parser

from benchmarks import command_line
from benchmarks.registry import case_names, load_case
from fat5.cli.completion import SHELLS
from fat5.cli.main import COMMANDS, _words_first, command_parser
from fat5.cli.task_settings import told_apart
from fat5.tasks.settings import load_task_config
from fat5.training.config import PretrainConfig
from fat5.training.config_file import load_settings

from .markdown import ROOT

# Of the shell itself: a file that is read, a folder, a repository to copy.
SHELL = ("cat", "cd", "git", "source")
IMPLEMENTATIONS = ("fat5 static", "fat5 graph")  # names in tables of the benchmarks, not commands
BENCHMARK_COMMANDS = tuple(command_line._SUMMARIES)  # what `python -m benchmarks` does beside the cases
TASK_COMMANDS = ("finetune", "evaluate", "sweep")


def check(words: list[str]) -> None:
    """Raise unless the command's program knows every word of it."""
    program, *rest = words
    if program == "fat5":
        check_fat5(rest)
    elif words[:3] == ["python", "-m", "benchmarks"]:
        check_benchmarks(words[3:])
    elif program == "python":
        check_script(rest)
    elif program == "torchrun":
        check_torchrun(rest)
    elif program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert set(rest) <= set(targets), rest
    elif program == "pip":
        check_pip(rest)
    else:
        assert program in SHELL, f"no test knows the program {program!r}"


def check_fat5(words: list[str]) -> None:
    name, *rest = words
    if name == "--print-completion":
        assert len(rest) == 1
        assert rest[0] in SHELLS
        return
    if name.startswith("--"):
        assert name in ("--help", "--version")
        return
    assert name in COMMANDS, name
    if rest == ["--help"]:
        return
    parser = command_parser(name)
    parsed = parser.parse_args(_words_first(rest, parser))
    if name == "pretrain":
        files = [word for word in parsed.settings if "=" not in word]
        overrides = [word for word in parsed.settings if "=" in word]
        assert len(files) <= 1
        # A file of the reader's own may hold anything: only what is changed is checked, beside the least it must have.
        shipped = [ROOT / file for file in files if file.startswith("configs/")]
        least = [] if shipped else ["training.output_dir=run", "training.max_steps=1"]
        load_settings(PretrainConfig, shipped[0] if shipped else None, [*least, *overrides])
    elif name in TASK_COMMANDS:
        given = told_apart(list(parsed.words) if "words" in parsed else rest)
        files = [ROOT / file for file in given.files]
        load_task_config(given.task, files[0] if files else None, given.overrides)


class Parsed(Exception):  # noqa: N818
    """A program has read its arguments, and goes no further."""


@contextlib.contextmanager
def parsing_alone(argv: list[str]) -> Iterator[None]:
    """Have a program that uses argparse read `argv` and stop; raise unless it did."""

    def stopping(original: Callable[..., object]) -> Callable[..., None]:
        def parse(parser: ArgumentParser, *arguments: object) -> None:
            original(parser, *arguments)
            raise Parsed

        return parse

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", argv))
        for name in ("parse_args", "parse_intermixed_args"):
            stack.enter_context(mock.patch.object(ArgumentParser, name, stopping(getattr(ArgumentParser, name))))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(pytest.raises(Parsed))
        yield


def check_benchmarks(words: list[str]) -> None:
    """Let the harness read the command."""
    if words[-1:] == ["--help"]:
        assert set(words[:-1]) <= {*case_names(), *BENCHMARK_COMMANDS}
        return
    with parsing_alone(["benchmarks", *words]):
        command_line.main(words)


def check_script(words: list[str]) -> None:
    """Let a script's own parser read the words."""
    script = ROOT / words[0]
    assert script.is_file(), words[0]
    with parsing_alone(words):
        runpy.run_path(str(script), run_name="__main__")


def check_torchrun(words: list[str]) -> None:
    parsed = get_args_parser().parse_args(words)
    assert parsed.module
    assert parsed.training_script == "fat5"
    check_fat5(parsed.training_script_args)


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    extras = re.findall(r"^(\w+) = \[", extras_of_pyproject(), re.MULTILINE)
    for word in words[1:]:
        named = [name for names in re.findall(r"\[(.*?)\]", word) for name in names.split(",")]
        assert set(named) <= set(extras), word


def extras_of_pyproject() -> str:
    text = (ROOT / "pyproject.toml").read_text()
    return text.split("[project.optional-dependencies]")[1].split("\n[")[0]


def check_settings(text: str) -> None:
    """Raise unless a YAML text is (part of) what `fat5 pretrain` reads."""
    given = yaml.safe_load(text)
    path = Path("settings.yaml")
    base = {"training": {"output_dir": "run", "max_steps": 1}, "data": {"train": "tokens/train"}}
    path.write_text(yaml.safe_dump(base | given), encoding="utf-8")
    load_settings(PretrainConfig, path, [])


def check_inline(text: str) -> None:
    """Check a command within a sentence, which may be cut short: its names and its options must exist."""
    words = text.split()
    options = [word.split("=")[0] for word in words if word.startswith("--")]
    if words[0] == "fat5":
        if words[1].startswith("--") or words[1].isupper() or text in IMPLEMENTATIONS:
            return
        assert words[1] in COMMANDS, text
        known = {option for action in command_parser(words[1])._actions for option in action.option_strings}
        assert set(options) <= known, text
    elif words[0] == "make":
        check(words)
    elif words[1] == "-m":
        names = list(itertools.takewhile(lambda word: word in (*case_names(), *BENCHMARK_COMMANDS), words[3:]))
        assert names or words[3].isupper(), text
        if not set(names) <= set(case_names()):
            return
        parser = ArgumentParser()
        if len(names) == 1:
            load_case(names[0]).add_arguments(parser)
        command_line._add_common_arguments(parser)
        known = {option for action in parser._actions for option in action.option_strings}
        assert set(options) <= known, text
    else:
        assert (ROOT / words[1]).is_file(), text
