"""What MkDocs does to the pages: text kept elsewhere is put in, and tables are made from the measurements.

A line `<!-- include: FILE -->` or `<!-- include: FILE # Heading -->` stands for a file of the repository, or for one of
its sections; `<!-- table: gates -->` for the worst share of its tolerance that each implementation took in
benchmarks/results.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
_INCLUDE = re.compile(r"^<!-- include: (?P<file>\S+?)(?: # (?P<heading>.+?))? -->$", re.MULTILINE)
_TABLE = re.compile(r"^<!-- table: gates -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Return the page with everything put in; called by MkDocs for each page."""
    markdown = _INCLUDE.sub(lambda match: included(match["file"], match["heading"]), markdown)
    return _TABLE.sub(lambda _: gate_table(RESULTS), markdown)


def included(file: str, heading: str | None) -> str:
    """Return a file of the repository, or what stands below one of its headings, with links that fit the site.

    Raises:
        KeyError: The file has no such heading.
    """
    text = (ROOT / file).read_text(encoding="utf-8")
    if heading is not None:
        text = section(text, heading)
    text = text.replace("](docs/", "](")
    # What is not part of the site keeps its name and loses its link.
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#)(?:src/[^)]*|[A-Z]+\.md)\)", r"\1", text)


def section(text: str, heading: str) -> str:
    """Return what stands between a heading and the next one of its level or above; the heading is left out."""
    lines = text.splitlines()
    level, start, fenced = 0, None, False
    for number, line in enumerate(lines):
        fenced ^= line.startswith("```")
        match = None if fenced else re.match(r"(#+) (.*)", line)
        if match is None:
            continue
        if start is not None and len(match[1]) <= level:
            return "\n".join(lines[start:number])
        if start is None and match[2] == heading:
            level, start = len(match[1]), number + 1
    if start is None:
        raise KeyError(f"no heading {heading!r}")
    return "\n".join(lines[start:])


def gate_rows(results: Path) -> Iterator[tuple[str, str, str, int, float]]:
    """Yield case, FAT5's implementation, type, how many workloads were compared, and the worst share of the tolerance.

    `fat5-*` rows that were run alone; an implementation of which nothing has been measured has no row.
    """
    worst: dict[tuple[str, str, str], list[float]] = {}
    for path in sorted(results.glob("*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["implementation"].startswith("fat5") and row["status"] == "ok" and row.get("gate"):
                    key = (row["case"], row["implementation"], row.get("dtype") or "")
                    worst.setdefault(key, []).append(float(row["gate"]))
    for (case, implementation, dtype), shares in sorted(worst.items()):
        yield case, implementation, dtype, len(shares), max(shares)


def gate_table(results: Path) -> str:
    """Return `gate_rows` as a Markdown table."""
    lines = [
        "| case | implementation | type | rows compared | largest error, share of its tolerance |",
        "|---|---|---|---:|---:|",
    ]
    for case, implementation, dtype, count, share in gate_rows(results):
        lines.append(f"| {case} | `{implementation}` | {dtype} | {count} | {share:.1%} |")
    return "\n".join(lines)
