"""Finds, in disassembled Hopper code, A operands of wgmma in registers that something else has overwritten.

ptxas 12.8 does that, without a word, to operands that a loop does not change. Two rules:

- The last instruction that wrote an A register before its HGMMA, on every way to it, is one that makes operands: a
  conversion, a copy, the OR with a hidden zero of `own_copy`, or a spilled one's return. In a loop one of the ways
  leads around it, where an operand that nothing in it makes has to survive the turn.
- Nothing writes an A register between its HGMMA and the wait that covers it, in the order of the listing.
"""

from __future__ import annotations

import re

from tests.ops.sass_flow import Flow, Line

_MAKERS = ("LOP3", "F2FP", "MOV", "IMAD.MOV", "PRMT", "SHF", "LDS", "LDSM", "LDL")
_WIDTHS = {".64": 2, ".128": 4}
_NO_RESULT = ("ST", "RED", "SYNCS", "BAR", "UTMA", "R2UR", "BRA", "WARP")


def overwritten_operands(listing: str) -> list[str]:
    """Return what breaks a rule; empty where all is well."""
    flow = Flow(listing)
    wrong = []
    for index, line in enumerate(flow.lines):
        for register in _operand(line):
            for writer in flow.last(index, lambda line, register=register: register in _written(line)):
                operation = flow.lines[writer].operation
                if not operation.startswith(_MAKERS):
                    wrong.append(f"A register R{register} of instruction {index} comes from {operation}")
    return wrong + _written_in_flight(flow.lines)


def _written(line: Line) -> range:
    """The registers that an instruction writes."""
    first = re.match(r"(?:U?P\w+, )*R(\d+)\b", line.operands)
    if first is None or line.operation.startswith(_NO_RESULT):
        return range(0)
    width = next((n for suffix, n in _WIDTHS.items() if suffix in line.operation), 1)
    if line.operation.startswith("HGMMA"):
        width = int(line.operation.split("x")[1]) // 2
    elif line.operation.startswith("LDSM"):
        width = 4
    return range(int(first[1]), int(first[1]) + width)


def _operand(line: Line) -> range:
    """The registers of an HGMMA's A operand."""
    operand = re.match(r"R\d+, R(\d+)(?:\.reuse)?, gdesc", line.operands)
    if not line.operation.startswith("HGMMA") or operand is None:
        return range(0)
    return range(int(operand[1]), int(operand[1]) + 4)


def _written_in_flight(lines: list[Line]) -> list[str]:
    wrong = []
    groups: list[set[int]] = []
    current: set[int] = set()
    for index, line in enumerate(lines):
        for register in _written(line):
            if any(register in group for group in (*groups, current)) and not line.operation.startswith("HGMMA"):
                wrong.append(f"R{register} is written by {line.operation} ({index}) while an HGMMA reads it")
        if line.operation.startswith("HGMMA"):
            current |= set(_operand(line))
            if "gsb0" in line.operands:
                groups.append(current)
                current = set()
        elif line.operation.startswith("WARPGROUP.DEPBAR"):
            left = int(re.search(r"gsb0, 0x([0-9a-f]+)", line.operands)[1], 16)
            groups = groups[len(groups) - left :] if left else []
    return wrong
