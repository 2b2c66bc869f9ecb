"""Finds, in disassembled Hopper code, A operands of wgmma in registers that something else has overwritten.

ptxas 12.8 does that, without a word, to operands that a loop does not change. Two rules, over the listing in order:

- The last instruction that wrote an A register before its HGMMA is one that makes operands: a conversion, a copy, the
  OR with a hidden zero of `own_copy`, or a spilled one's return. In a loop the search goes on from the loop's end,
  where an operand that nothing in it makes would have to survive the turn.
- Nothing writes an A register between its HGMMA and the wait that covers it.
"""

from __future__ import annotations

import re

_MAKERS = ("LOP3", "F2FP", "MOV", "IMAD.MOV", "PRMT", "SHF", "LDS", "LDSM", "LDL")
_WIDTHS = {".64": 2, ".128": 4}
_LINE = re.compile(r"/\*([0-9a-f]+)\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_LABEL = re.compile(r"^(\.L_x_\d+):")


class Instruction:
    """One line: its operation, the registers it writes, and the A operand if it is an HGMMA."""

    def __init__(self, operation: str, operands: str) -> None:
        self.operation, self.operands = operation, operands
        first = re.match(r"(?:U?P\w+, )*R(\d+)\b", operands)
        self.writes: frozenset[int] = frozenset()
        if first and not operation.startswith(("ST", "RED", "SYNCS", "BAR", "UTMA", "R2UR", "BRA", "WARP")):
            width = next((n for suffix, n in _WIDTHS.items() if suffix in operation), 1)
            if operation.startswith("HGMMA"):
                width = int(operation.split("x")[1]) // 2
            elif operation.startswith("LDSM"):
                width = 4
            self.writes = frozenset(range(int(first[1]), int(first[1]) + width))
        operand = re.match(r"R\d+, R(\d+)(?:\.reuse)?, gdesc", operands)
        self.a_operand = None
        if operation.startswith("HGMMA") and operand:
            self.a_operand = range(int(operand[1]), int(operand[1]) + 4)


def parse(listing: str) -> tuple[list[Instruction], list[tuple[int, int]]]:
    """Return the instructions and the loops among them, (first, last), innermost first."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        label = _LABEL.match(line)
        if label:
            labels[label[1]] = len(instructions)
        found = _LINE.search(line)
        if found:
            instructions.append(Instruction(found[2], found[3]))
    loops = []
    for index, instruction in enumerate(instructions):
        target = re.search(r"`\((\.L_x_\d+)\)", instruction.operands) if instruction.operation == "BRA" else None
        # A wait on a barrier tries again in a few instructions of its own, and branches back from there: no loop.
        waits = any("TRYWAIT" in x.operation for x in instructions[max(0, index - 3) : index])
        if target and labels.get(target[1], index + 1) <= index and not waits:
            loops.append((labels[target[1]], index))
    return instructions, sorted(loops, key=lambda loop: loop[1] - loop[0])


def overwritten_operands(listing: str) -> list[str]:
    """Return what breaks a rule; empty where all is well."""
    instructions, loops = parse(listing)
    wrong = []
    for index, instruction in enumerate(instructions):
        if instruction.a_operand is None:
            continue
        loop = next((x for x in loops if x[0] <= index <= x[1]), None)
        before = range(index - 1, loop[0] - 1 if loop else -1, -1)
        around = range(loop[1], index, -1) if loop else range(0)
        for register in instruction.a_operand:
            writer = next((i for i in (*before, *around) if register in instructions[i].writes), None)
            if writer is not None and not instructions[writer].operation.startswith(_MAKERS):
                wrong.append(
                    f"A register R{register} of instruction {index} comes from {instructions[writer].operation}"
                )
    return wrong + _written_in_flight(instructions)


def _written_in_flight(instructions: list[Instruction]) -> list[str]:
    wrong = []
    groups: list[set[int]] = []
    current: set[int] = set()
    for index, instruction in enumerate(instructions):
        for register in instruction.writes:
            if any(register in group for group in (*groups, current)) and not instruction.operation.startswith("HGMMA"):
                wrong.append(f"R{register} is written by {instruction.operation} ({index}) while an HGMMA reads it")
        if instruction.operation.startswith("HGMMA"):
            current |= set(instruction.a_operand or ())
            if "gsb0" in instruction.operands:
                groups.append(current)
                current = set()
        elif instruction.operation.startswith("WARPGROUP.DEPBAR"):
            left = int(re.search(r"gsb0, 0x([0-9a-f]+)", instruction.operands)[1], 16)
            groups = groups[len(groups) - left :] if left else []
    return wrong
