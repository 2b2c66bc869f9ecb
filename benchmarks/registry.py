"""The cases by name: every module of `benchmarks.cases` is one."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, cast

from benchmarks import cases

if TYPE_CHECKING:
    from benchmarks.session import Session


class UsageError(ValueError):
    """An option of a case cannot be used as given; the command line shows the message alone."""


class Case(Protocol):
    """What a module of `benchmarks.cases` has. Its top imports nothing heavy, so that `--help` answers at once."""

    SUMMARY: str
    """One line for `--help`."""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the case's own options, used when the case is run alone; with several cases all have their defaults."""

    def run(self, arguments: Namespace, session: Session) -> None:
        """Measure through the session, and print the tables."""

    # A case with figures to reach also has `claims(rows) -> list[Claim]`: those of which the rows of one run speak. A
    # row from a file lacks the columns that it leaves empty. One whose implementations may be measured by several runs
    # has `comparison(rows)`: of all rows on file, those that its figure sets side by side.


def case_names() -> list[str]:
    """Return the names of all cases."""
    return sorted(module.name for module in pkgutil.iter_modules(cases.__path__))


def load_case(name: str, commands: Iterable[str] = ()) -> Case:
    """Import a case.

    Args:
        name: Its name.
        commands: What else may have been meant.

    Raises:
        UsageError: There is no such case; the message names the nearest.
    """
    names = case_names()
    if name not in names:
        near = difflib.get_close_matches(name, [*names, *commands], n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise UsageError(f"no case {name!r}; expected one of {', '.join(names)}{hint}")
    return cast(Case, importlib.import_module(f"benchmarks.cases.{name}"))
