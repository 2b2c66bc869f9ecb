"""The fenced blocks and the commands of README.md and docs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {"gpu", "hub", "network"}
"""What may be missing where the tests run: `<!-- needs: gpu, hub -->` on the line before a block says so."""

_FENCE = re.compile(
    r"^(?:<!-- needs: (?P<needs>[a-z, ]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_INLINE = re.compile(r"`((?:fat5|python -m benchmarks|python docs|python examples|make) [^`]+)`")


class Block(NamedTuple):
    """A fenced block."""

    page: str
    line: int
    language: str
    needs: frozenset[str]
    text: str

    @property
    def place(self) -> str:
        """Where it stands."""
        return f"{self.page}:{self.line}"


def pages() -> list[Path]:
    """Return the pages that users read; the working log tells of commands of its day."""
    docs = sorted((ROOT / "docs").rglob("*.md"))
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(page for page in docs if page.name != "log.md")]


def blocks(language: str | None = None) -> list[Block]:
    """Return all fenced blocks, or those of one language."""
    found = []
    for page in pages():
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            needs = frozenset(re.split(r",\s*", match["needs"])) if match["needs"] else frozenset()
            line = text[: match.start("language")].count("\n") + 1
            found.append(Block(str(page.relative_to(ROOT)), line, match["language"], needs, match["text"]))
    return [block for block in found if language in (None, block.language)]


def commands(text: str) -> Iterator[list[list[str]]]:
    """Yield the words of each command of a shell text, one list for each part of a pipe.

    `a && b` are two commands. Comments are left out, and so is what is written to a file.
    """
    for line in re.sub(r"\\\n", " ", text).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&>")
        lexer.commenters, lexer.whitespace_split = "#", True
        parts: list[list[str]] = [[]]
        words = iter(lexer)
        for word in words:
            if word == "&&":
                yield parts
                parts = [[]]
            elif word == "|":
                parts.append([])
            elif word == ">":
                next(words)
            else:
                parts[-1].append(word)
        if parts != [[]]:
            yield parts


def inline_commands() -> Iterator[tuple[str, str]]:
    """Yield page and text of each command within a sentence."""
    for page in pages():
        text = _FENCE.sub("", page.read_text(encoding="utf-8"))
        for match in _INLINE.finditer(text):
            yield str(page.relative_to(ROOT)), " ".join(match[1].split())
