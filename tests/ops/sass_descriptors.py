"""Finds, in disassembled Hopper code, matrix products whose descriptors depend on the way that led to them.

ptxas 12.8 has computed the descriptor of a buffer once, for two products, in a block of code that a branch jumps over
on the way to the second: that one then read another buffer, without a word. Kernels here compute each descriptor where
it is used, or ahead of its loop, so that exactly one instruction sets each register of it, besides those that bring it
back from where it was kept (R2UR). This follows the flow of control and names the descriptors that more than one other
instruction may have set.
"""

from __future__ import annotations

import functools
import re

from tests.ops.sass_flow import Flow, Line


def unsteady_descriptors(listing: str) -> list[str]:
    """Return the descriptors that several instructions may have set; empty where all is well."""
    flow = Flow(listing)
    wrong = []
    for index, line in enumerate(flow.lines):
        descriptor = re.search(r"gdesc\[UR(\d+)\]", line.operands) if line.operation.startswith("HGMMA") else None
        if descriptor is None:
            continue
        # A descriptor has 64 bits, A's stands before B's; where A is in registers, nothing reads the first.
        skipped = 2 if re.match(r"R\d+, R\d+(?:\.reuse)?, gdesc", line.operands) else 0
        for register in range(int(descriptor[1]) + skipped, int(descriptor[1]) + 4):
            found = flow.last(index, functools.partial(_sets, register))
            sources = {i for i in found if flow.lines[i].operation != "R2UR"}
            if len({str(flow.lines[i]) for i in sources}) > 1:
                names = ", ".join(f"{flow.lines[i].operation} ({i})" for i in sorted(sources))
                wrong.append(f"descriptor UR{register} of the HGMMA {index} may come from {names}")
    return wrong


def _sets(register: int, line: Line) -> bool:
    if line.operation.startswith(("HGMMA", "UTMA", "SYNCS", "BRA")):
        return False
    first = re.match(r"(?:U?P\w+, )*UR(\d+)\b", line.operands)
    if first is None:
        return False
    width = 2 if (".64" in line.operation or "WIDE" in line.operation) else 1
    return int(first[1]) <= register < int(first[1]) + width
