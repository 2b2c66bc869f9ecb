"""The sections of the page: a case each, with its goals, figures and runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.figures import FIGURES
from benchmarks.registry import case_names, load_case
from benchmarks.report.drawing import inline_svg
from benchmarks.report.rows import Cells, Run, by_command, newest, read_runs
from benchmarks.results import read_rows
from benchmarks.tables import Claim

TITLES = {
    "attention": "Attention with T5's bias",
    "hopper_forward": "Shapes of the Hopper attention's forward",
    "decode": "Attention in a step of decoding",
    "cross_entropy": "Cross-entropy of given logits",
    "linear_cross_entropy": "Linear + cross-entropy",
    "rms_norm": "RMS norm",
    "rotary": "Rotary embedding",
    "geglu": "Gated GELU",
    "optimizer": "Optimizer step",
    "pretrain": "The whole pretraining step",
    "curves": "Learning curves",
    "precision": "Number formats",
    "scaling": "Several GPUs",
    "generation": "Generation",
    "heads": "Classification with the encoder alone",
    "tasks": "Tasks after a pretraining of minutes",
    "collator": "The data pipeline",
}
"""By case, in the order of the page; a case that is not named comes behind, under its own name."""

_SOURCES = {
    "attention_speed": ("sweep",),
    "attention_memory": ("memory",),
    "collator_workers": ("workers",),
    "cross_entropy": ("times",),
    "linear_cross_entropy": ("times",),
    "optimizer": ("step",),
    "precision": ("curve",),
    "decode": ("decode",),
    "tasks": ("tasks",),
    "scaling": ("runs",),
}
"""By figure the tables that it is drawn from; all of the case where none are named."""


@dataclass(frozen=True)
class Drawing:
    """A figure.

    Attributes:
        name: In FIGURES.
        svg: Its element.
        runs: What it was drawn from: the newest run of each table, or those that the case compares.
    """

    name: str
    svg: str
    runs: list[Run]


@dataclass(frozen=True)
class Section:
    """What a case has on file.

    Attributes:
        case: Its name.
        summary: Its own line.
        runs: All of it, the newest of each table first.
        claims: Goals, each with the rows that speak of it.
        drawings: Figures.
    """

    case: str
    summary: str
    runs: list[Run]
    claims: list[tuple[Claim, Run]] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Its heading."""
        return TITLES.get(self.case, self.case)

    @property
    def rows(self) -> int:
        """Rows on file."""
        return sum(len(run.rows) for run in self.runs)


def read_sections(results: Path) -> list[Section]:
    """Return a section for each CSV file that has rows, in the order of the page."""
    sections = []
    for path in sorted(results.glob("*.csv"), key=lambda path: (_place(path.stem), path.stem)):
        runs = read_runs(path)
        if runs:
            known = path.stem in case_names()
            summary = load_case(path.stem).SUMMARY if known else ""
            claims = _claims(path.stem, runs) if known else []
            sections.append(Section(path.stem, summary, runs, claims, _drawings(path, runs)))
    return sections


def missing_cases(sections: Sequence[Section]) -> list[str]:
    """Return the cases without a row on file, in the order of the page."""
    return sorted(set(case_names()) - {section.case for section in sections}, key=lambda name: (_place(name), name))


def _place(case: str) -> int:
    return list(TITLES).index(case) if case in TITLES else len(TITLES)


def _claims(case: str, runs: Sequence[Run]) -> list[tuple[Claim, Run]]:
    """Return each goal once, as the newest run that measured it has it: those missed, those met, those not measured."""
    claims = getattr(load_case(case), "claims", None)
    if claims is None:
        return []
    found: dict[str, tuple[Claim, Run]] = {}
    compared = _compared(case, runs)
    for command in [*([Run(case, "", compared)] if compared else []), *by_command(runs)]:
        claim: Claim
        for claim in claims(command.rows):
            held = found.get(claim.text)
            if held is None or (held[0].measured is None and claim.measured is not None):
                found[claim.text] = (claim, command)
    return sorted(found.values(), key=lambda item: (item[0].measured is None, item[0].met))


def _compared(case: str, runs: Sequence[Run]) -> list[Cells]:
    """Return the rows of several runs that the case compares as if they were of one; none in most cases."""
    comparison = getattr(load_case(case), "comparison", None) if case in case_names() else None
    return [] if comparison is None else comparison([row for run in runs for row in run.rows])


def _drawings(path: Path, runs: Sequence[Run]) -> list[Drawing]:
    rows = read_rows(path)
    dates = {row["date"] for row in _compared(path.stem, runs)}
    shown = [run for run in runs if run.date in dates] or newest(runs)
    drawings = []
    for name, (case, draw) in FIGURES.items():
        figure = draw(rows) if case == path.stem else None
        if figure is not None:
            tables = _SOURCES.get(name)
            sources = [run for run in shown if tables is None or run.table in tables]
            drawings.append(Drawing(name, inline_svg(figure, name, name.replace("_", " ")), sources))
    return drawings
