"""The site builds strictly, needs nothing from a network, and shows what the code and the measurements say."""

from __future__ import annotations

import csv
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from .markdown import ROOT

HOOKS = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
DRAW = runpy.run_path(str(ROOT / "docs" / "figures" / "draw.py"))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings_handlers.python")
    folder = tmp_path_factory.mktemp("site")
    # A proxy that nobody listens at: whatever wants the network fails.
    environment = {"NO_MKDOCS_2_WARNING": "1", "PATH": "", "HOME": str(folder)}
    environment |= dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_every_page_is_built(site):
    pages = {str(page.relative_to(ROOT / "docs").with_suffix("")) for page in (ROOT / "docs").rglob("*.md")}
    pages = {page.replace("README", "index") for page in pages}
    built = {str(page.relative_to(site).with_suffix("")) for page in site.rglob("*.html")}
    assert pages <= built
    assert len(pages) > 30
    assert not list(site.rglob("*.py"))


def test_nothing_is_fetched_by_a_reader(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"?(https?:|//)", page.read_text())
        assert not fetched, page
    sheets = "".join(sheet.read_text() for sheet in site.rglob("*.css"))
    assert len(sheets) > 10_000
    assert not re.findall(r"url\(\"?https?:", sheets)


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("ops", ["flash_attention", "RelativeBias", "linear_cross_entropy", "rms_norm"]),
        ("models", ["FAT5ForConditionalGeneration", "FAT5Config", "patch", "export_checkpoint"]),
        ("optim", ["AdamWScale", "get_schedule"]),
        ("training", ["TrainingConfig", "pretrain"]),
    ],
)
def test_the_reference_is_made_from_the_docstrings(site, page, names):
    text = (site / "api" / f"{page}.html").read_text()
    headings = re.findall(r"<h\d[^>]*class=\"doc doc-heading\".*?</h\d>", text, re.DOTALL)
    for name in names:
        assert any(name in heading for heading in headings), name
    assert "Parameters:" in text or "Attributes:" in text


def test_what_is_kept_elsewhere_is_put_in(site):
    performance = (site / "performance.html").read_text()
    assert "attention_speed.png" in performance
    assert "cuDNN" in performance
    assert "<!-- include" not in performance
    assert "pre-commit" in (site / "contributing.html").read_text()
    numerics = (site / "numerics.html").read_text()
    assert "fat5-triton" in numerics
    with (ROOT / "benchmarks" / "results" / "attention.csv").open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["implementation"] == "fat5-triton" and row["gate"]]
    worst = max(float(row["gate"]) for row in rows if row["dtype"] == "bf16" and row["status"] == "ok")
    assert f"{worst:.1%}" in numerics


def test_sections_and_links_of_included_text():
    text = "# A\n\none\n\n```bash\n# no heading\n```\n\n## B\n\ntwo\n\n# C\nthree\n"
    assert HOOKS["section"](text, "A").split() == ["one", "```bash", "#", "no", "heading", "```", "##", "B", "two"]
    assert HOOKS["section"](text, "B").strip() == "two"
    with pytest.raises(KeyError, match="no heading 'D'"):
        HOOKS["section"](text, "D")


def test_a_measurement_that_failed_is_no_figure(tmp_path):
    head = "case,implementation,status,gate,dtype\n"
    ours = [f"a,fat5-x,{rest}\n" for rest in ("ok,0.5,bf16", "ok,0.25,bf16", "FAILED,3,bf16", "skipped,,fp16")]
    (tmp_path / "a.csv").write_text("".join([head, *ours, "a,peer,ok,1,bf16\n"]))
    assert list(HOOKS["gate_rows"](tmp_path)) == [("a", "fat5-x", "bf16", 2, 0.5)]


def test_the_figures_are_those_that_the_script_draws(tmp_path):
    for path in DRAW["draw"](tmp_path):
        kept = ROOT / "docs" / "figures" / path.name
        assert kept.is_file()
        # Another release of matplotlib draws other bytes; the titles hold the figures that were computed.
        assert words_of(path) == words_of(kept)
        assert len(words_of(kept)) > 4


def words_of(figure: Path) -> list[str]:
    """Return the titles and labels of an SVG, without those of the ticks."""
    texts = re.findall(r"<text [^>]*>([^<]+)</text>", figure.read_text(encoding="utf-8"))
    return [text for text in texts if re.search("[a-z]", text)]


def test_links_of_the_readme_lead_somewhere():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    anchors = {
        re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.M)
    }
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 20
    for link in links:
        assert link[1:] in anchors if link.startswith("#") else (ROOT / link).exists(), link


def test_the_tiles_that_look_up_grow_with_the_length_and_not_with_its_square():
    near = {length: int((DRAW["tile_kinds"](length, 64, bidirectional=True) == 2).sum()) for length in (1024, 2048)}
    assert near == {1024: 74, 2048: 154}
    causal = DRAW["tile_kinds"](1024, 64, bidirectional=False)
    assert (causal[:4, 4:] == 0).all()
    assert causal[0, 0] == 2
