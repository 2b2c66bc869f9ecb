"""`fat5 doctor`: print what works on this machine."""

from __future__ import annotations

from itertools import groupby

from jsonargparse import ArgumentParser, Namespace

_MARKS = {True: "ok", False: "FAIL", None: ""}


def add_arguments(parser: ArgumentParser) -> None:
    """`fat5 doctor` takes no settings."""


def run(args: Namespace) -> int:
    """Print the report; 0 if all that FAT5 needs works, else 1."""
    from fat5.doctor import examine

    report = examine()
    width = max(len(check.name) for check in report.checks)
    for section, checks in groupby(report.checks, key=lambda check: check.section):
        print(f"{section}:")
        for check in checks:
            print(f"  {check.name:<{width}}  {_MARKS[check.ok]:<4}  {check.detail}")
    if not report.healthy:
        failed = ", ".join(check.name for check in report.checks if check.ok is False)
        print(f"\nSomething FAT5 needs does not work here: {failed}.")
        return 1
    print("\nEverything that FAT5 needs works here.")
    return 0
