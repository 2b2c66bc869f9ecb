"""The page: one file without a network, light and dark, for a phone and for a desk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report.drawing import variables
from benchmarks.report.markup import box, element, escape, goals, origin, table, verdict
from benchmarks.report.rows import Run, newest, usual_command
from benchmarks.report.sections import TITLES, Drawing, Section, missing_cases, read_sections
from benchmarks.session import FAILED
from fat5.files import atomic_file

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
_TITLE = "FAT5 benchmarks"


def write_report(results: Path, output: Path) -> str:
    """Write the page, and return a line about it.

    Args:
        results: Folder of the CSV files.
        output: The HTML file; replaced as a whole.

    Raises:
        FileNotFoundError: There is no CSV file with rows.
    """
    sections = read_sections(results)
    if not sections:
        raise FileNotFoundError(f"{results} holds no CSV file with rows; run python -m benchmarks CASE first")
    with atomic_file(output) as staging:
        staging.write_text(page(sections), encoding="utf-8")
    met, missed = _verdicts(sections)
    rows = sum(section.rows for section in sections)
    missing = ", ".join(missing_cases(sections)) or "none"
    return (
        f"{output}: {len(sections)} cases, {rows} rows, {met} goals met, {missed} missed; no result on file: {missing}"
    )


def page(sections: Sequence[Section]) -> str:
    """Return the whole page."""
    head = "".join(
        [
            '<meta charset="utf-8" />',
            '<meta name="viewport" content="width=device-width, initial-scale=1" />',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}" />',
            '<meta name="color-scheme" content="light dark" />',
            '<link rel="icon" href="data:," />',
            element("title", _TITLE),
            element("style", _style()),
        ]
    )
    toggle = element("button", "Dark or light", id="theme", type="button")
    top = element("header", element("div", element("h1", _TITLE), toggle, css="bar"), *_overview(sections))
    body = element("body", top, element("main", *map(_section, sections)), element("script", _read("page.js")))
    return f'<!doctype html>\n<html lang="en">{element("head", head)}{body}</html>\n'


def _style() -> str:
    dark = f"{variables(1)}--page:#161615;--raised:#1f1f1e;--ink:#e9e9e6;--soft:#a9a9a5;--line:#3a3a38;"
    dark += "--link:#8fd0f5;--good:#59c48b;--bad:#ff8a75;--own:#1d2c38;color-scheme:dark;"
    light = f"{variables(0)}--page:#ffffff;--raised:#f6f6f4;--ink:#1c1c1c;--soft:#5c5c59;--line:#dcdcd8;"
    light += "--link:#005a8f;--good:#1a7a45;--bad:#b3261e;--own:#eaf3fa;color-scheme:light;"
    themes = [
        f":root{{{light}}}",
        f"@media (prefers-color-scheme: dark){{:root{{{dark}}}}}",
        f":root[data-theme='light']{{{light}}}",
        f":root[data-theme='dark']{{{dark}}}",
    ]
    return "\n".join([*themes, _read("page.css")])


def _overview(sections: Sequence[Section]) -> list[str]:
    met, missed = _verdicts(sections)
    failed = sum(row["status"] == FAILED for section in sections for run in section.runs for row in run.rows)
    dates = [run.date[:10] for section in sections for run in section.runs]
    chips = [
        element("li", f"{sum(section.rows for section in sections):,} rows"),
        element("li", f"{met} goals met", css="met"),
        element("li", f"{missed} goals missed", css="missed" if missed else ""),
        element("li", f"{failed} rows FAILED", css="missed" if failed else ""),
        element("li", escape(f"measured {' to '.join(dict.fromkeys((min(dates), max(dates))))}")),
    ]
    links = [element("li", element("a", escape(section.title), href=f"#{section.case}")) for section in sections]
    how = (
        "FAT5 beside its peers, from the rows in benchmarks/results. Ratios compare implementations in one run, on the "
        "same tensors of the same machine; absolute times hold for that machine alone. Every implementation has passed "
        "a check of its answers before it was timed. Under each figure and table stand the machine, the versions, the "
        "commit, the date, and the command that measures it again."
    )
    return [
        element("p", escape(how)),
        element("ul", *chips, css="chips"),
        element("nav", element("ul", *links), **{"aria-label": "Sections"}),
        *_missing(sections),
    ]


def _missing(sections: Sequence[Section]) -> list[str]:
    missing = missing_cases(sections)
    if not missing:
        return []
    items = [
        element("li", escape(f"{TITLES.get(case, case)}: "), element("code", escape(usual_command(case))))
        for case in missing
    ]
    return [element("p", f"Cases that have no result on file: {len(missing)}."), element("ul", *items, css="missing")]


def _section(section: Section) -> str:
    parts = [element("h2", escape(section.title)), element("p", escape(_sentence(section.summary)), css="summary")]
    if section.claims:
        words = Counter(verdict(claim) for claim, _ in section.claims)
        parts += [
            element("h3", f"Goals: {', '.join(f'{n} {word}' for word, n in words.items())}"),
            goals(section.claims),
        ]
    parts += map(_figure, section.drawings)
    for run in newest(section.runs):
        parts += [element("h3", escape(f"Table: {run.table or section.case}")), *_run(run)]
        earlier = [other for other in section.runs if other.table == run.table and other is not run]
        parts += [_earlier(other) for other in earlier]
    return element("section", *parts, id=section.case)


def _figure(drawing: Drawing) -> str:
    # Tables of one command have one origin.
    origins = dict.fromkeys(map(origin, drawing.runs))
    return element("figure", box(drawing.svg, "figure", "drawing"), element("figcaption", *origins))


def _run(run: Run) -> list[str]:
    return [table(run.rows, f"{run.case} {run.table}, {run.date}"), origin(run)]


def _earlier(run: Run) -> str:
    title = f"An earlier run, {run.date}, commit {run.rows[0]['commit']}, {len(run.rows)} rows"
    return element("details", element("summary", escape(title)), *_run(run))


def _verdicts(sections: Sequence[Section]) -> tuple[int, int]:
    measured = [claim for section in sections for claim, _ in section.claims if claim.measured is not None]
    met = sum(claim.met for claim in measured)
    return met, len(measured) - met


def _sentence(words: str) -> str:
    return f"{words[:1].upper()}{words[1:]}." if words else ""


def _read(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
