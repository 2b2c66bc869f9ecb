"""Compile the kernels for every card of the tile tables, without a GPU, and check what the assembler says.

`python -m tests.ops.compile_gate` compiles the worst case of each row, `--all` every set of flags. It fails on spills,
on serialised matrix products, and on more shared memory than the card has. Attention's cases are here, those of the
other kernels in `tests.ops.compile_cases`. Run it in a process of its own: Triton's interpreter must be off when the
kernels are imported.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import pkgutil
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from triton.compiler import ASTSource

from fat5.ops.attention import backward, bias_gradient, decode, forward, query_gradient
from fat5.ops.attention.tiles import SHARED_MEMORY, Tile, preferred_tile, table_rows
from tests.ops import compile_cases
from tests.ops.compilation import Compilation, assemble

MAX_SPILL_BYTES = 16
MAX_SPILL_BYTES_CAPPED = 200  # rows with a cap on registers were measured faster with these spills than without
MAX_SPILL_BYTES_FLOAT32 = 4096  # the exact path, without matrix units: operands live in registers
KERNELS = {
    "forward": forward.forward_kernel,
    "decode": decode.decode_kernel,
    "key_value": backward.key_value_kernel,
    "query": query_gradient.query_kernel,
    "band": bias_gradient.band_kernel,
    "dense_bias": bias_gradient.dense_bias_kernel,
}
INT_POINTERS = {"Tiles": "*i32", "CuQ": "*i32", "CuK": "*i32", "KeyStarts": "*i64", "KeyLengths": "*i64",
                "Offsets": "*i64", "Seed": "*i64"}  # fmt: skip
FLOAT_POINTERS = {"LSE", "Stats", "Sums", "Parts", "PartLSE"}
FLOATS = {"scale", "softmax_scale", "keep_scale"}
PLACES = ("after", "before", "start", "turned")
BIAS_NAMES = ("none", "distance", "alibi", "alibi-signed", "dense")


@dataclass(frozen=True)
class Case:
    """One compilation."""

    architecture: int
    kernel: str
    block_d: int
    itemsize: int
    tile: Tile
    bias: int
    causal: bool
    packed: bool
    tails: bool
    dropout: bool

    def __str__(self) -> str:
        flags = [n for n in ("causal", "packed", "tails", "dropout") if getattr(self, n)]
        size = f"{self.tile.queries}x{self.tile.keys} {self.tile.warps} warps {self.tile.stages} stages"
        what = f"{self.kernel} D{self.block_d} {8 * self.itemsize} bit"
        return f"sm_{self.architecture} {what}, {size}, {BIAS_NAMES[self.bias]} {' '.join(flags)}"


def source(case: Case) -> ASTSource:
    """The kernel with the types and constants that a launch would give it."""
    kernel = KERNELS[case.kernel]
    element = "*bf16" if case.itemsize == 2 else "*fp32"
    tails = case.tails or case.packed
    constants = {
        "BM": 16 if case.kernel == "decode" else case.tile.queries, "BN": case.tile.keys, "D": case.block_d,
        "BLOCK_D": case.block_d, "BIAS": case.bias, "SPLIT": True,
        "RADIUS": (113 if case.causal else 91) if case.bias == 1 else 0, "CAUSAL": case.causal, "VARLEN": case.packed,
        "OFFSET": 2 if case.packed else 0, "HAS_STARTS": False, "HAS_LENGTHS": case.tails and not case.packed,
        "EVEN_M": not tails, "EVEN_N": not tails, "DROPOUT": case.dropout, "BIAS_GRAD": case.bias in (1, 2, 3),
        "ASM": True, "PRECISION": "ieee", "RATIO": max(1, case.tile.keys // case.tile.queries), "SUM_ROWS": False,
        "STORE_BIAS_GRAD": case.bias == 4, "PAIRED": case.itemsize == 2 and not tails,
        "PDL": case.architecture >= 90, "BIAS_PLACE": PLACES.index(case.tile.bias),
        "SETTLE": case.tile.settled, "PAIRED_STATS": 2 * case.tile.queries >= 32 * case.tile.warps,
    }  # fmt: skip
    absent = set() if case.packed else {"Tiles", "CuQ", "CuK"}
    absent |= {"Offsets", "KeyStarts"} | (set() if constants["HAS_LENGTHS"] else {"KeyLengths"})
    absent |= set() if case.dropout else {"Seed"}
    absent |= {"Bias"} if case.bias == 0 else set()
    absent |= {"DBias"} if case.kernel == "query" and case.bias != 4 else set()
    signature, values, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], values[name] = "constexpr", constants[name]
        elif name in absent:
            signature[name], values[name] = "constexpr", None
        elif name in INT_POINTERS:
            signature[name] = INT_POINTERS[name]
        elif name in FLOAT_POINTERS or (name == "Bias" and case.bias in (1, 2, 3)):
            signature[name] = "*fp32"
        elif name[0].isupper() and name not in ("H", "M", "N"):
            signature[name] = element
        else:
            signature[name] = "fp32" if name in FLOATS else "i32"
        whole_tiles = name in ("M", "N") and not tails
        if whole_tiles or signature[name].startswith("*") or name.endswith(("_row", "_head", "_batch")):
            attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, values, attributes)


def check(case: Case | Compilation) -> tuple[str, list[str]]:
    """Compile one case and return a line about it and what is wrong."""
    if isinstance(case, Compilation):
        return case.check()
    tile = case.tile
    if case.kernel == "query" and case.bias == 4 and not tile.settled:
        tile = dataclasses.replace(tile, stages=1)  # as launched where it stores the bias's gradient
    try:
        got = assemble(source(case), case.architecture, tile.options())
    except Exception as error:  # the compiler raises many kinds
        return str(case), [f"does not compile: {error}"]
    # A dense bias is loaded in the loop, around which the assembler may serialise unless each product is waited for.
    may_serialise = case.bias == 4 and not case.tile.settled
    wrong = [line.strip() for line in got.text.splitlines() if "C75" in line and not may_serialise]
    limit = MAX_SPILL_BYTES if case.tile.registers is None else MAX_SPILL_BYTES_CAPPED
    if got.spilled > (limit if case.itemsize == 2 else MAX_SPILL_BYTES_FLOAT32):
        wrong.append(f"spills {got.spilled} bytes")
    if got.shared > SHARED_MEMORY[case.architecture]:
        wrong.append(f"needs {got.shared} bytes of shared memory; the card has {SHARED_MEMORY[case.architecture]}")
    has_wide_tiles = case.architecture == 90 and case.itemsize == 2 and case.kernel != "decode"
    if has_wide_tiles and "wgmma" not in got.ptx:
        wrong.append("has no wgmma")
    if got.failed:
        wrong.append(got.text[-300:])
    return f"{case}: {got.registers} registers, {got.spilled} B spilled, {got.shared} B shared", wrong


def other_cases(everything: bool) -> list[Compilation]:
    """The compilations of the other families of kernels."""
    names = [module.name for module in pkgutil.iter_modules(compile_cases.__path__)]
    families = (importlib.import_module(f"{compile_cases.__name__}.{name}") for name in names)
    return [case for family in families for case in family.cases(everything)]


def cases(everything: bool) -> list[Case]:
    """The compilations: for each row of the table its worst case, or every set of flags."""
    found = []
    for call, tile in table_rows():
        architecture, kernel, block_d, itemsize = call.capability, call.kernel, call.block_d, call.itemsize
        biases = {"band": [1], "dense_bias": [4]}.get(kernel, range(5) if everything else [1])
        if call.dense:
            biases = [4]
        if everything:
            flags = itertools.product(biases, (False, True), (False, True), (False, True), (False, True))
        else:
            tails = "causal" not in call.variants
            packs = tails and not call.dense and kernel not in ("dense_bias", "decode")
            flags = [(bias, call.causal or kernel == "decode", packs, tails, False) for bias in biases]
            if preferred_tile(dataclasses.replace(call, tails=True)) != tile and itemsize == 2:
                flags = [(bias, call.causal, False, False, False) for bias in biases]  # tails read another row
        for bias, causal, packed, tails, dropout in flags:
            if packed and (bias == 4 or not tails):
                continue
            if kernel == "decode" and (packed or dropout or not tails):
                continue  # it takes neither, and looks at each row's bounds in any case
            if kernel == "decode" and not everything and architecture not in (86, 90):
                continue  # on the others the same tiles have more room
            if preferred_tile(dataclasses.replace(call, causal=causal, tails=tails, dense=bias == 4)) != tile:
                continue  # such a call reads another row
            size = tile
            if kernel == "band":  # its tiles are the query kernel's, cut square
                asked = dataclasses.replace(call, kernel="query", causal=causal, tails=tails)
                side, rows = preferred_tile(asked).keys, preferred_tile(asked).queries
                size = dataclasses.replace(tile, queries=side, keys=rows)
            found.append(Case(architecture, kernel, block_d, itemsize, size, bias, causal, packed, tails, dropout))
    if not everything:  # equal rows of several cards once, and the float32 rows of one card
        seen = set()
        kept = []
        for case in found:
            key = (
                case.kernel,
                case.block_d,
                case.itemsize,
                case.tile,
                SHARED_MEMORY[case.architecture],
                case.architecture == 90,
            )
            if key in seen or (case.itemsize == 4 and case.architecture != 86) or case.block_d in (16, 32):
                continue
            seen.add(key)
            kept.append(case)
        return kept
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every set of flags, not the worst case of each row")
    parser.add_argument("--architecture", type=int, help="only this card, as 90")
    parser.add_argument("--kernel", metavar="NAME", help="only kernels of which this is a part of the name")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="a line a compilation, also where all is well")
    arguments = parser.parse_args()
    chosen = [
        c for c in (*cases(arguments.all), *other_cases(arguments.all))
        if arguments.architecture in (None, c.architecture) and (arguments.kernel or "") in c.kernel
    ]  # fmt: skip
    failed = 0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        for line, wrong in pool.map(check, chosen):
            failed += bool(wrong)
            if wrong or arguments.verbose:
                print(("FAILED " if wrong else "ok     ") + line, *wrong, sep="\n       " if wrong else "")
    print(f"{len(chosen)} compilations, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
