"""A figure of matplotlib as SVG inside a page: text as text, colours from the page's theme, names of its own."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

from matplotlib import rc_context

from benchmarks.report.markup import escape

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {
    "#000000": ("#1c1c1c", "#e9e9e6"),
    "#555555": ("#555555", "#c4c4c0"),
    "#999999": ("#8b8b88", "#92928e"),
    "#b0b0b0": ("#b0b0b0", "#6a6a68"),
    "#0072b2": ("#0072b2", "#4aa8e8"),
    "#56b4e9": ("#4aa9df", "#8fd0f5"),
    "#d55e00": ("#d55e00", "#f2803a"),
    "#e69f00": ("#dd9700", "#f0b63c"),
    "#009e73": ("#00946b", "#35c79d"),
    "#cc79a7": ("#c56a9c", "#dd94bb"),
    "#f0e442": ("#a89b00", "#f0e442"),
}
"""By the colour that a figure is drawn in: the one on a light page, and the one on a dark page."""

_SMALLEST = 0.8  # of its natural width that a figure is shown in; below, its box scrolls


def inline_svg(figure: Figure, name: str, title: str) -> str:
    """Return a figure as an `svg` element.

    Args:
        figure: What to show.
        name: Unique on the page; all names inside begin with it.
        title: For those who cannot see it.
    """
    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    svg = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<!--.*?-->|<metadata>.*?</metadata>", "", file.getvalue(), flags=re.S)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.S)
    svg = re.sub(r"\sxmlns(:xlink)?=\"[^\"]*\"|\sversion=\"1.1\"", "", svg).replace("xlink:href", "href")
    svg = re.sub(r"\bid=\"", f'id="{name}-', svg)
    svg = re.sub(r"href=\"#", f'href="#{name}-', svg).replace("url(#", f"url(#{name}-")
    svg = re.sub(r"#[0-9a-fA-F]{6}\b", lambda match: _variable(match.group()), svg)
    width, height = (float(size) for size in re.findall(r"<svg[^>]*?([\d.]+)pt\"[^>]*?([\d.]+)pt\"", svg)[0])
    shape = f'style="aspect-ratio:{width:g}/{height:g};max-width:{width:g}pt;min-width:{_SMALLEST * width:g}pt"'
    head = f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {width:g} {height:g}" {shape}>'
    return re.sub(r"<svg.*?>", head, svg, count=1, flags=re.S).strip()


def variables(side: int) -> str:
    """Return the CSS variables of all colours: side 0 of a light page, 1 of a dark one."""
    return "".join(f"{_name(color)}:{shades[side]};" for color, shades in COLORS.items())


def _variable(color: str) -> str:
    return f"var({_name(color.lower())})" if color.lower() in COLORS else color


def _name(color: str) -> str:
    return f"--drawn-{color.removeprefix('#')}"
