"""Finds, in disassembled Hopper code, matrix products whose descriptors depend on the way that led to them.

ptxas 12.8 has computed the descriptor of a buffer once, for two products, in a block of code that a branch jumps over
on the way to the second: that one then read another buffer, without a word. Kernels here compute each descriptor where
it is used, or ahead of its loop, so that exactly one instruction sets each register of it, besides those that bring it
back from where it was kept (R2UR). This follows the flow of control and names the descriptors that more than one other
instruction may have set.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"/\*([0-9a-f]+)\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;?\s*(?:\(\*|/\*|$)")
_LABEL = re.compile(r"^(\.L_x_\d+):")
_ENDS = ("EXIT", "BRX", "RET", "JMP")


def unsteady_descriptors(listing: str) -> list[str]:
    """Return the descriptors that several instructions may have set; empty where all is well."""
    lines: list[tuple[str, str, str]] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        if found := _LINE.search(line):
            lines.append((found[2] or "", found[3], line[line.index(found[3]) :]))
    before = _predecessors(lines, labels)
    wrong = []
    for index, (_, operation, text) in enumerate(lines):
        descriptor = re.search(r"gdesc\[UR(\d+)\]", text) if operation.startswith("HGMMA") else None
        if descriptor is None:
            continue
        # A descriptor has 64 bits, A's stands before B's; where A is in registers, nothing reads the first.
        skipped = 2 if re.search(r"R\d+, R\d+(?:\.reuse)?, gdesc", text) else 0
        for register in range(int(descriptor[1]) + skipped, int(descriptor[1]) + 4):
            sources = {i for i in _reaching(lines, before, index, register) if lines[i][1] != "R2UR"}
            if len({lines[i][2].split(";")[0] for i in sources}) > 1:
                names = ", ".join(f"{lines[i][1]} ({i})" for i in sorted(sources))
                wrong.append(f"descriptor UR{register} of the HGMMA {index} may come from {names}")
    return wrong


def _predecessors(lines: list[tuple[str, str, str]], labels: dict[str, int]) -> list[list[int]]:
    before: list[list[int]] = [[] for _ in lines]
    for index, (predicate, operation, text) in enumerate(lines):
        targets = [labels[name] for name in re.findall(r"\.L_x_\d+", text) if name in labels]
        if operation.startswith(("BRA", "BRX")):
            for target in targets:
                before[target].append(index)
        goes_on = predicate.strip() not in ("", "@PT", "@UPT") or not operation.startswith(("BRA", *_ENDS))
        if goes_on and index + 1 < len(lines):
            before[index + 1].append(index)
    return before


def _reaching(lines: list[tuple[str, str, str]], before: list[list[int]], index: int, register: int) -> set[int]:
    found, seen, open_ends = set(), set(), list(before[index])
    while open_ends:
        place = open_ends.pop()
        if place in seen:
            continue
        seen.add(place)
        predicate, operation, text = lines[place]
        if _sets(operation, text, register):
            found.add(place)
            if not predicate:
                continue
        open_ends += before[place]
    return found


def _sets(operation: str, text: str, register: int) -> bool:
    if operation.startswith(("HGMMA", "UTMA", "SYNCS", "BRA")):
        return False
    first = re.match(r"\S+\s+(?:U?P\w+, )*UR(\d+)\b", text)
    if first is None:
        return False
    width = 2 if (".64" in operation or "WIDE" in operation) else 1
    return int(first[1]) <= register < int(first[1]) + width
