"""The command line: `python -m benchmarks CASE [CASE ...] [options]`, and the commands `plot`, `report`, `record`."""

from __future__ import annotations

import argparse
import itertools
import os
import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks.registry import UsageError, case_names, load_case

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
FIGURES = ROOT / "docs" / "figures"

_WAYS = ("FAT5_AUTOTUNE", "FAT5_FEED_FORWARD", "FAT5_HOPPER")

_SUMMARIES = {
    "plot": "redraw every figure of the docs from benchmarks/results",
    "report": "write one HTML page with all figures and tables of benchmarks/results",
    "record": "append the rows of --json files, written on another machine, to benchmarks/results",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the arguments ask for, and return the exit code: 1 if a correctness gate failed."""
    argv = list(sys.argv[1:] if argv is None else argv)
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    if not names:
        return _overview(argv)
    if find_spec("fat5") is None:
        ArgumentParser(prog="python -m benchmarks").error(
            "the package fat5 is not installed here; run `pip install --editable .`, or set PYTHONPATH=src"
        )
    if names[0] == "plot":
        return _plot(argv[1:])
    if names[0] == "report":
        return _report(argv[1:])
    if names[0] == "record":
        return _record(argv[1:])
    return _run_cases(names, argv[len(names) :])


def _overview(argv: Sequence[str]) -> int:
    summaries = {name: load_case(name).SUMMARY for name in case_names()} | _SUMMARIES
    width = max(map(len, summaries))
    listing = "\n".join(f"  {name:<{width}}  {summary}" for name, summary in summaries.items())
    parser = ArgumentParser(
        prog="python -m benchmarks",
        usage="python -m benchmarks CASE [CASE ...] [options]",
        description="Measure FAT5 beside its peers. Cases and commands:",
        epilog=f"{listing}\n\n`python -m benchmarks CASE --help` shows the options of a case.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)
    parser.error("name a case first, options after it")


def _run_cases(names: Sequence[str], argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog=f"python -m benchmarks {' '.join(names)}", formatter_class=_HelpFormatter)
    try:
        loaded = [load_case(name, commands=_SUMMARIES) for name in names]
    except UsageError as error:
        parser.error(str(error))
    _add_common_arguments(parser)
    if len(loaded) == 1:
        parser.description = loaded[0].SUMMARY
        loaded[0].add_arguments(parser.add_argument_group("options of the case"))
    arguments = parser.parse_args(argv)

    from benchmarks.session import Session

    failures, rows = 0, []
    for name, case in zip(names, loaded, strict=True):
        defaults = ArgumentParser()
        case.add_arguments(defaults)
        own = Namespace(**{**vars(defaults.parse_args([])), **vars(arguments)})
        session = Session(
            name,
            quick=arguments.quick,
            results=None if arguments.no_save else arguments.results,
            json_file=arguments.json,
            earlier_rows=rows,
            command=reproducing_command(name, argv),
        )
        try:
            case.run(own, session)
        except UsageError as error:
            parser.error(str(error))
        rows = session.rows
        failures += session.failures
    return 1 if failures else 0


def reproducing_command(name: str, argv: Sequence[str]) -> str:
    """Return the command that measures a case again with these options, without where its rows went.

    The variables that change the package's ways stand before it. Files and folders bear their last name alone: where
    they lie is a matter of the machine.
    """
    words = iter(argv)
    kept = []
    for word in words:
        option, equals, value = word.partition("=")
        if option in ("--json", "--results"):
            if not equals:
                next(words, None)
        elif option != "--no-save":
            kept.append("".join(Path(part).name if part.startswith("/") else part for part in (option, equals, value)))
    ways = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key in _WAYS]
    return " ".join([*ways, shlex.join(["python", "-m", "benchmarks", name, *kept])])


def _add_common_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="the main table only, with fewer repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there, as a JSON list")
    parser.add_argument("--no-save", action="store_true", help="do not append the rows to the CSV file")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the CSV files are")


def _plot(argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog="python -m benchmarks plot", description=_SUMMARIES["plot"])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the CSV files are")
    parser.add_argument("--figures", type=Path, default=FIGURES, metavar="DIR", help="where the figures go")
    arguments = parser.parse_args(argv)

    from benchmarks.figures import draw_all

    for line in draw_all(arguments.results, arguments.figures):
        print(line)
    return 0


def _report(argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog="python -m benchmarks report", description=_SUMMARIES["report"])
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the CSV files are")
    output = "the page, report.html by default; it needs no other file and no network"
    parser.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE", help=output)
    arguments = parser.parse_args(argv)

    from benchmarks.report.page import write_report

    try:
        print(write_report(arguments.results, arguments.output))
    except OSError as error:
        parser.error(str(error))
    return 0


def _record(argv: Sequence[str]) -> int:
    parser = ArgumentParser(prog="python -m benchmarks record", description=_SUMMARIES["record"])
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="a file written with --json")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the CSV files are")
    arguments = parser.parse_args(argv)

    from benchmarks.results import append_rows, read_json
    from fat5.errors import nearest_path

    for file in arguments.files:
        try:
            rows = read_json(file)
        except FileNotFoundError:
            parser.error(f"there is no file {file}{nearest_path(file)}")
        except (OSError, ValueError) as error:
            parser.error(str(error))
        for case in dict.fromkeys(str(row["case"]) for row in rows):
            own = [row for row in rows if row["case"] == case]
            path = arguments.results / f"{case}.csv"
            added = append_rows(path, own)
            print(f"{path}: {added} rows added, {len(own) - added} were there")
    return 0


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default where it says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        shown = action.default not in (None, False, argparse.SUPPRESS) and action.dest != "results"
        return super()._get_help_string(action) if shown else action.help
