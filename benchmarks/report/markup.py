"""Pieces of HTML; the page is well-formed XML too."""

from __future__ import annotations

import html
from collections.abc import Sequence

from benchmarks.report.columns import Column, is_number, split, text
from benchmarks.report.rows import MACHINE, Cells, Run
from benchmarks.session import FAILED
from benchmarks.tables import Claim

_NAMES = {"gpu": "device", "cpu_cores": "CPU cores", "cuda": "CUDA", "cudnn": "cuDNN", "python": "Python"}


def escape(words: str) -> str:
    """Return text as it stands in HTML."""
    return html.escape(words, quote=True)


def element(name: str, *children: str, css: str = "", **attributes: str) -> str:
    """Return an element; children are HTML, attributes are text."""
    named = {"class": css, **attributes} if css else attributes
    inside = "".join(f' {key}="{escape(value)}"' for key, value in named.items())
    return f"<{name}{inside}>{''.join(children)}</{name}>"


def origin(run: Run) -> str:
    """Return what a run was measured on, when, and how to measure it again."""
    first = run.rows[0]
    facts = []
    for name in MACHINE:
        value = first[name]
        if value in (None, "none"):
            continue
        facts.append(f"{_NAMES.get(name, name)} {value}")
    where = " · ".join([*([] if run.on_gpu else ["without a GPU"]), *facts, run.date])
    return element("p", element("span", escape(where)), element("code", escape(run.command())), css="origin")


def claim_item(claim: Claim, date: str) -> str:
    """Return a figure beside the one to reach, as an item of a list."""
    verdict = "not measured" if claim.measured is None else "met" if claim.met else "missed"
    mark = element("b", verdict, css=verdict.replace(" ", "-"))
    if claim.measured is None:
        return element("li", mark, " ", escape(claim.text))
    sign = "at most" if claim.at_most else "at least"
    goal = f"goal: {sign} {claim.target:g}{claim.unit}"
    figures = f"{claim.measured:.4g}{claim.unit}"
    return element(
        "li",
        mark,
        " ",
        escape(f"{claim.text}: "),
        element("strong", escape(figures)),
        escape(f" ({goal}; {date[:10]})"),
    )


def table(rows: Sequence[Cells]) -> str:
    """Return rows as a table in a box of its own, and before it what is the same in all of them."""
    common, columns = split(rows)
    said = ", ".join(f"{title} {words}" for title, words in common if words)
    numbers = {column.name for column in columns if is_number(column, rows)}
    head = element("tr", *(_cell("th", escape(column.title), column, numbers) for column in columns))
    body = [
        element("tr", *(_cell("td", escape(text(c, row)), c, numbers) for c in columns), css=_kind(row)) for row in rows
    ]
    whole = element("table", element("thead", head), element("tbody", *body))
    box = element("div", whole, css="scroll", tabindex="0", role="region")
    return (element("p", escape(f"All rows: {said}"), css="common") if said else "") + box


def _cell(name: str, inside: str, column: Column, numbers: set[str]) -> str:
    return element(name, inside, css="number" if column.name in numbers else "")


def _kind(row: Cells) -> str:
    if row["status"] == FAILED:
        return "failed"
    return "own" if str(row["implementation"]).startswith("fat5") else ""
