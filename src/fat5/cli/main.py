"""The `fat5` command: a table of commands, each imported only when it is used, and one line for every user error."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from fat5.errors import FAT5Error, nearest
from fat5.version import __version__

if TYPE_CHECKING:
    from jsonargparse import ArgumentError, ArgumentParser

USER_ERROR = 2
INTERRUPTED = 130  # 128 + SIGINT, what a shell reports for Ctrl+C


class Command(NamedTuple):
    """One row of the table: the module that holds `add_arguments` and `run`, and its line in `fat5 --help`."""

    module: str
    help: str


COMMANDS = {
    "quickstart": Command("fat5.cli.quickstart", "from raw French text to a small pretrained T5 in minutes, on a CPU"),
    "train-tokenizer": Command("fat5.cli.train_tokenizer", "train a byte-level BPE tokenizer with sentinels"),
    "pretokenize": Command("fat5.cli.pretokenize", "turn text into token files that training reads"),
    "pretrain": Command("fat5.cli.pretrain", "pretrain a T5 from a YAML configuration"),
    "export": Command("fat5.cli.export", "write a checkpoint for stock Transformers or sentence-transformers"),
    "generate": Command("fat5.cli.generate", "generate text with a model, or fill in masked text"),
    "cost": Command("fat5.cli.cost", "hours, energy, CO2 and cost of a planned run, from a measured rate"),
    "finetune": Command("fat5.cli.finetune", "finetune a model on a task, once a seed, and judge it"),
    "evaluate": Command("fat5.cli.evaluate", "judge any finetuned model, and simple baselines, on a task"),
    "sweep": Command("fat5.cli.sweep", "finetune every checkpoint of a pretraining, and draw the scores"),
    "doctor": Command("fat5.cli.doctor", "show versions, GPUs and which attention backends work here"),
}


def overview() -> str:
    """Return the text of `fat5 --help`."""
    width = max(map(len, COMMANDS)) + 2
    lines = [
        "usage: fat5 [--help] [--version] [--print-completion SHELL] COMMAND ...",
        "",
        "Flash Attention T5: pretrain, adapt and serve encoder-decoder language models on a small budget.",
        "",
        "commands:",
        *(f"  {name:<{width}}{command.help}" for name, command in COMMANDS.items()),
        "",
        "Start with `fat5 quickstart`; `fat5 COMMAND --help` describes a command and its settings.",
        "`fat5 --print-completion bash` (zsh, tcsh) prints a script that completes all of them in the shell.",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code: 0 done, 2 a user error, 130 interrupted.

    Args:
        argv: the arguments after the program's name; `sys.argv[1:]` if None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"fat5 {__version__}")
        return 0
    try:
        if arguments[0] == "--print-completion":
            return _print_completion(arguments[1:])
        return _dispatch(arguments[0], arguments[1:])
    except (FAT5Error, OSError) as error:
        return _fail(_one_line(error))
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def _dispatch(name: str, arguments: list[str]) -> int:
    if name not in COMMANDS:
        kind = "option" if name.startswith("-") else "command"
        return _fail(f"unknown {kind} {name!r}{nearest(name, COMMANDS)}; `fat5 --help` lists the commands")
    # Before torch starts its threads: by default they spin for long while they wait for one another, and training on
    # a busy CPU then crawls. On an idle one brief spinning costs it about a tenth, none at all two fifths.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Only now, so that `fat5 --help` answers at once; and here rather than at the top of each command module.
    from jsonargparse import ArgumentError

    module = importlib.import_module(COMMANDS[name].module)
    parser = command_parser(name)
    try:
        parsed = parser.parse_args(_words_first(arguments, parser))
    except ArgumentError as error:
        message = _parse_message(error, parser)
        return _fail(f"{message}{_nearest_option(message, parser)}; `fat5 {name} --help` lists the settings")
    return module.run(parsed)


def command_parser(name: str) -> ArgumentParser:
    """Return the parser of one command."""
    from jsonargparse import ArgumentParser

    command = COMMANDS[name]
    parser = ArgumentParser(
        prog=f"fat5 {name}", description=_sentence(command.help), exit_on_error=False, allow_abbrev=False
    )
    importlib.import_module(command.module).add_arguments(parser)
    return parser


def _print_completion(shells: list[str]) -> int:
    from fat5.cli.completion import SHELLS, completion_script

    if len(shells) != 1:
        return _fail(f"--print-completion expects one of {', '.join(SHELLS)}, got {' '.join(shells) or 'nothing'}")
    helps = {name: command.help for name, command in COMMANDS.items()}
    print(completion_script({name: command_parser(name) for name in COMMANDS}, helps, shells[0]))
    return 0


def _words_first(arguments: list[str], parser: ArgumentParser) -> list[str]:
    """Return the arguments with options last: argparse takes a list of words in one piece alone."""
    takes_value = {option: action.nargs is None for action in parser._actions for option in action.option_strings}
    words, options = [], []
    rest = iter(arguments)
    for argument in rest:
        if argument.startswith("-") and argument != "-":
            options.append(argument)
            if takes_value.get(argument, False):
                options += [value for value in [next(rest, None)] if value is not None]
        else:
            words.append(argument)
    return words + options


def _parse_message(error: ArgumentError, parser: ArgumentParser) -> str:
    """Return jsonargparse's message with options as they are typed, and types as they stand in the help."""
    from fat5.training.config_file import type_name

    message = " ".join(str(error).split())
    options: dict[str, Any] = {action.dest: action for action in parser._actions}
    wrong = re.match(r'Parser key "(\w+)": .*(?:Got value|Given value): (.*)', message)
    kind = getattr(options.get(wrong[1]), "_typehint", None) if wrong else None
    if wrong and kind is not None:
        return f"{_typed(options[wrong[1]])} is {wrong[2]!r}, expected {type_name(kind)}"
    required = "the following arguments are required: "
    if message.startswith(required):
        names = message.removeprefix(required).split(", ")
        return required + ", ".join(_typed(options[name]) if name in options else name for name in names)
    return message


def _typed(action: Any) -> str:
    return str(action.option_strings[-1] if action.option_strings else action.dest)


def _nearest_option(message: str, parser: ArgumentParser) -> str:
    marker = "unrecognized arguments: "
    if marker not in message:
        return ""
    typed = message.split(marker, 1)[1].split()[0].split("=")[0]
    if "." in typed and "key=value" in (parser.usage or ""):
        return f"; settings of a configuration have no dashes: {typed.lstrip('-')}=VALUE"
    return nearest(typed, [option for action in parser._actions for option in action.option_strings])


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        names = " -> ".join(os.fspath(name) for name in (error.filename, error.filename2) if name is not None)
        return f"{names}: {error.strerror}" if names else error.strerror
    return " ".join(str(error).split())


def _fail(message: str, code: int = USER_ERROR) -> int:
    print(f"fat5: error: {message}", file=sys.stderr)
    return code
