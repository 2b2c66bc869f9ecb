"""Reads disassembled Hopper code, and follows its flow of control backwards."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

_LINE = re.compile(r"/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;?\s*(?:\(\*|/\*|$)")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_ENDS = ("EXIT", "BRX", "RET", "JMP")


@dataclasses.dataclass(frozen=True)
class Line:
    """One instruction: whether a predicate may leave it out, its operation, and what follows that."""

    predicated: bool
    operation: str
    operands: str

    def __str__(self) -> str:
        return f"{self.operation} {self.operands.split(';')[0]}"


class Flow:
    """The instructions of a listing in order, and which may come right before each."""

    def __init__(self, listing: str) -> None:
        self.lines: list[Line] = []
        labels: dict[str, int] = {}
        for line in listing.splitlines():
            if label := _LABEL.match(line):
                labels[label[1]] = len(self.lines)
            if found := _LINE.search(line):
                predicated = (found[2] or "").strip() not in ("", "@PT", "@UPT")
                self.lines.append(Line(predicated, found[3], line[found.end(3) :].strip()))
        self._before: list[list[int]] = [[] for _ in self.lines]
        for index, line in enumerate(self.lines):
            if line.operation.startswith(("BRA", "BRX")):
                for name in re.findall(r"\.L_x_\d+", line.operands):
                    if labels.get(name, len(self.lines)) < len(self.lines):
                        self._before[labels[name]].append(index)
            goes_on = line.predicated or not line.operation.startswith(("BRA", *_ENDS))
            if goes_on and index + 1 < len(self.lines):
                self._before[index + 1].append(index)

    def last(self, index: int, sets: Callable[[Line], bool]) -> Iterator[int]:
        """Yield the places of the last instructions before `index` that set something, on all ways to it.

        One with a predicate may be left out: the search goes on behind it.
        """
        seen: set[int] = set()
        open_ends = list(self._before[index])
        while open_ends:
            place = open_ends.pop()
            if place in seen:
                continue
            seen.add(place)
            if sets(self.lines[place]):
                yield place
                if not self.lines[place].predicated:
                    continue
            open_ends += self._before[place]
