"""The page of all results: every row, every figure, every goal, and nothing from outside."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.command_line import RESULTS, main
from benchmarks.figures import FIGURES
from benchmarks.loss.stage import PHASE
from benchmarks.registry import case_names
from benchmarks.report.rows import typed, usual_command
from benchmarks.results import append_rows, read_rows
from tests.benchmarks.made_up import DATE, ENVIRONMENT, collator_rows, make_results


def written(results: Path) -> ElementTree.Element:
    """Write the page and return it; it is well-formed XML too."""
    output = results / "page.html"
    assert main(["report", "--results", str(results), "--output", str(output)]) == 0
    text = output.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    return ElementTree.fromstring(text.removeprefix("<!doctype html>"))


def lines(tree: ElementTree.Element) -> list[list[str]]:
    """Return the cells of all tables but those of goals."""
    boxes = [box for box in tree.iter("div") if box.get("class") == "scroll"]
    return [["".join(cell.itertext()) for cell in row] for box in boxes for row in box.iterfind("table/tbody/tr")]


def goals(section: ElementTree.Element) -> list[list[str]]:
    boxes = [box for box in section.iter("div") if box.get("class") == "scroll goals"]
    return [["".join(cell.itertext()) for cell in row] for box in boxes for row in box.iterfind("table/tbody/tr")]


def section(tree: ElementTree.Element, case: str) -> ElementTree.Element:
    (found,) = [one for one in tree.iter("section") if one.get("id") == case]
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple[Path, ElementTree.Element]:
    results = tmp_path_factory.mktemp("results")
    make_results(results)
    return results, written(results)


def test_all_rows_and_figures_of_all_cases_are_there(whole):
    results, tree = whole
    rows = {path.stem: read_rows(path) for path in results.glob("*.csv")}
    assert sorted(rows) == case_names()
    assert {one.get("id"): len(lines(one)) for one in tree.iter("section")} == {
        case: len(held) for case, held in rows.items()
    }
    assert len(list(tree.iter("svg"))) == len(FIGURES)
    for figure in tree.iter("figure"):
        (caption,) = figure.iter("figcaption")
        said = "".join(caption.itertext())
        for origin in ("a GPU", "torch 2.11", "commit 0123456", DATE, "python -m benchmarks "):
            assert origin in said


def test_nothing_comes_from_outside_and_every_name_is_there_once(whole):
    results, tree = whole
    page = (results / "page.html").read_text(encoding="utf-8")
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", page)
    (policy,) = [one.get("content") for one in tree.iter("meta") if one.get("http-equiv")]
    assert policy.startswith("default-src 'none';")
    names = Counter(one.get("id") for one in tree.iter() if one.get("id"))
    assert set(names.values()) == {1}
    links = [one.get("href") for one in tree.iter() if one.get("href")] + re.findall(r"url\((#[^)]+)\)", page)
    assert len(links) > 100
    assert all(link.removeprefix("#") in names for link in links if link != "data:,")
    assert not [one for one in tree.iter() if one.get("src")]


def test_every_colour_of_a_figure_is_one_of_the_themes(whole):
    results, tree = whole
    page = (results / "page.html").read_text(encoding="utf-8")
    used = set()
    for svg in tree.iter("svg"):
        words = ElementTree.tostring(svg, encoding="unicode")
        assert not re.search(r"(fill|stroke): #", words)
        used |= set(re.findall(r"var\((--drawn-\w+)\)", words))
    assert len(used) > 5
    for name in used:
        assert len(set(re.findall(rf"{name}:(#\w+);", page))) == 2 or name == "--drawn-b0b0b0"


def test_goals_are_met_or_missed_and_those_missed_come_first(whole):
    shown = goals(section(whole[1], "scaling"))
    assert [line[:4] for line in shown] == [
        ["missed", "small x2, times the batch: fsdp2, tokens/s a GPU over one's", "0.94", "at least 0.95"],
        ["met", "small x2, times the batch: ddp, tokens/s a GPU over one's", "0.96", "at least 0.95"],
    ]
    assert shown[0][4:] == [DATE[:10], "a GPU"]
    assert ["met", "greedy tokens/s", "24,000", "at least 20,000"] in [
        line[:4] for line in goals(section(whole[1], "generation"))
    ]
    for case in ("collator", "curves", "heads", "pretrain", "tasks"):
        assert goals(section(whole[1], case)), case


def test_what_the_repository_has_on_file_is_shown(tmp_path):
    """Rows of today's cases and of earlier commits, whatever columns they have."""
    for path in RESULTS.glob("*.csv"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tree = written(tmp_path)
    for path in tmp_path.glob("*.csv"):
        assert len(lines(section(tree, path.stem))) == len(read_rows(path))
    assert goals(section(tree, "attention"))


def test_cases_without_a_result_are_named_with_their_commands(tmp_path, capsys):
    append_rows(tmp_path / "collator.csv", collator_rows())
    tree = written(tmp_path)
    (box,) = [one for one in tree.iter("ul") if one.get("class") == "missing"]
    commands = ["".join(code.itertext()) for code in box.iter("code")]
    assert len(commands) == len(case_names()) - 1
    assert "python -m benchmarks tasks --data DIR" in commands
    assert [one.get("aria-label") for one in tree.iter("svg")] == ["collator workers"]
    assert [one.get("id") for one in tree.iter("section")] == ["collator"]
    assert "1 cases, 6 rows" in capsys.readouterr().out


def test_what_is_equal_stands_once_and_text_is_text(tmp_path):
    base = {**ENVIRONMENT, "case": "rotary", "date": DATE, "table": "<b>", "tokens": 16384, "yardstick": "eager"}
    timed = {**base, "heads": 8, "implementation": "eager", "p50_ms": 0.25, "gb_per_s": 1234.0, "bit_equal": True}
    failed = {**base, "heads": 4, "implementation": "fat5-triton", "status": "FAILED", "error": "1 < 2 & <script>"}
    append_rows(tmp_path / "rotary.csv", [timed, failed])
    tree = section(written(tmp_path), "rotary")
    heads = ["".join(cell.itertext()) for cell in tree.find("div/table/thead/tr")]
    assert heads == ["heads", "implementation", "p50, ms", "GB/s", "bit-equal", "status", "what happened"]
    assert lines(tree) == [
        ["8", "eager", "0.25", "1,234", "yes", "ok", ""],
        ["4", "fat5-triton", "", "", "", "FAILED", "1 < 2 & <script>"],
    ]
    (common,) = [one.text for one in tree.iter("p") if one.get("class") == "common"]
    assert common == "All rows: tokens 16,384, yardstick eager"
    assert [one.get("class") for one in tree.iter("tr") if one.get("class")] == ["failed"]


def test_the_newest_run_is_open_and_the_earlier_ones_are_folded(tmp_path):
    base = {**ENVIRONMENT, "case": "toy", "table": "a", "implementation": "fat5"}
    runs = [{**base, "date": f"2026-01-0{day}T00:00:00Z", "p50_ms": float(day)} for day in (1, 3, 2)]
    append_rows(tmp_path / "toy.csv", [*runs, {**runs[0], "table": "b", "command": "python -m benchmarks toy --b"}])
    tree = section(written(tmp_path), "toy")
    assert [line[1] for line in lines(tree)] == ["3", "2", "1", "1"]
    assert [lines(one)[0][1] for one in tree.iter("details")] == ["2", "1"]
    commands = ["".join(one.itertext()) for one in tree.iter("code")]
    assert commands == [*["python -m benchmarks toy"] * 3, "python -m benchmarks toy --b"]


def test_a_goal_is_judged_by_the_newest_run_that_measured_it(tmp_path):
    for date, rate in (("2026-01-02T00:00:00Z", 9e6), ("2026-01-01T00:00:00Z", 1e6)):
        row = {**ENVIRONMENT, "case": "collator", "date": date, "table": "one core", "phase": "collate", "p50_ms": 1.0}
        append_rows(tmp_path / "collator.csv", [{**row, "implementation": "fat5", "tokens_per_s": rate}])
    shown = goals(section(written(tmp_path), "collator"))
    assert shown == [
        ["met", "real tokens/s on one core, millions", "9", "at least 8", "2026-01-02", "a GPU"],
        ["not measured", "share of all slots filled", "", "at least 0.97", "", ""],
    ]


@pytest.mark.parametrize(
    ("case", "columns", "goal"),
    [
        ("cross_entropy", {"rows": 16384, "vocab": 32768}, "at most 0.65 ms"),
        ("linear_cross_entropy", {"rows": 16384, "width": 512, "vocab": 32768, "peak_mib": 300.0}, "at most 3.1 ms"),
        ("rms_norm", {"operation": "rms_norm", "rows": 32768, "width": 512, "phase": "forward"}, "at most 0.023 ms"),
        ("optimizer", {"tensors": "130M", "phase": "clip + step", "implementation": "fat5-fused"}, "at most 0.85 ms"),
    ],
)
def test_goals_of_times_are_found_in_rows_of_a_file(tmp_path, case, columns, goal):
    base = {**ENVIRONMENT, "case": case, "date": DATE, "table": "times", "dtype": "bf16", "ignored": 0.0}
    base |= {"phase": PHASE, "implementation": "fat5-triton", "p50_ms": 0.01}
    append_rows(tmp_path / f"{case}.csv", [{**base, **columns}])
    shown = goals(section(written(tmp_path), case))
    assert ["met", "0.01 ms", goal] in [[line[0], *line[2:4]] for line in shown]


def test_a_folder_without_rows_is_an_error(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["report", "--results", str(tmp_path), "--output", str(tmp_path / "page.html")])
    assert "holds no CSV file with rows; run python -m benchmarks CASE first" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_cells_have_types_and_empty_ones_are_none():
    row = typed(
        {"length": "1024", "p50_ms": "1.5e-05", "pin_memory": "False", "torch": "2.11", "ratio": "", "mask": "full"}
    )
    assert row == {"length": 1024, "p50_ms": 1.5e-05, "pin_memory": False, "torch": "2.11", "mask": "full"}
    assert row["ratio"] is None
    assert "ratio" not in row


def test_usual_commands():
    assert usual_command("attention", "sweep") == "python -m benchmarks attention --shapes sweep"
    assert usual_command("attention") == "python -m benchmarks attention"
    assert usual_command("cross_entropy", "times") == "python -m benchmarks cross_entropy"
    assert usual_command("tasks") == usual_command("tasks", "leaks") == "python -m benchmarks tasks --data DIR"
