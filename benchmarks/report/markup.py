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


def box(inside: str, label: str, css: str) -> str:
    """Return a box that scrolls by itself, also from the keyboard."""
    return element("div", inside, css=css, tabindex="0", role="region", **{"aria-label": label})


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


def goals(claims: Sequence[tuple[Claim, Run]]) -> str:
    """Return figures beside the ones to reach as a table in a box of its own."""
    titles = ("", "goal", "measured", "to reach", "date", "device")
    numbers = ("measured", "to reach")
    head = element("tr", *(element("th", title, css="number" if title in numbers else "") for title in titles))
    lines = [_goal(claim, run) for claim, run in claims]
    whole = element("table", element("thead", head), element("tbody", *lines))
    return box(whole, "goals", "scroll goals")


def verdict(claim: Claim) -> str:
    """Return "met", "missed" or "not measured"."""
    return "not measured" if claim.measured is None else "met" if claim.met else "missed"


def _goal(claim: Claim, run: Run) -> str:
    measured = "" if claim.measured is None else f"{_figure(claim.measured)}{claim.unit}"
    goal = f"{'at most' if claim.at_most else 'at least'} {_figure(claim.target)}{claim.unit}"
    device = str(run.rows[0]["gpu"]) if run.on_gpu else "CPU"
    where = ("", "") if claim.measured is None else (run.date[:10], device)
    word = verdict(claim)
    return element(
        "tr",
        element("td", element("b", word, css=word.replace(" ", "-"))),
        element("td", escape(claim.text)),
        element("td", escape(measured), css="number"),
        element("td", escape(goal), css="number"),
        *(element("td", escape(words)) for words in where),
    )


def table(rows: Sequence[Cells], label: str) -> str:
    """Return rows as a table in a box of its own, and before it what is the same in all of them."""
    common, columns = split(rows)
    said = ", ".join(f"{title} {words}" for title, words in common if words)
    numbers = {column.name for column in columns if is_number(column, rows)}
    head = element("tr", *(_cell("th", escape(column.title), column, numbers) for column in columns))
    body = [
        element("tr", *(_cell("td", escape(text(c, row)), c, numbers) for c in columns), css=_kind(row)) for row in rows
    ]
    whole = element("table", element("thead", head), element("tbody", *body))
    return (element("p", escape(f"All rows: {said}"), css="common") if said else "") + box(whole, label, "scroll")


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _cell(name: str, inside: str, column: Column, numbers: set[str]) -> str:
    css = "number" if column.name in numbers else "long" if column.name in ("error", "other_scores") else ""
    return element(name, inside, css=css)


def _kind(row: Cells) -> str:
    if row["status"] == FAILED:
        return "failed"
    return "own" if str(row["implementation"]).startswith("fat5") else ""
