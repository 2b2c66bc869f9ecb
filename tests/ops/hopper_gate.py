"""Compile the Hopper kernels for sm_90a without a GPU, and check what the assembler made of them.

`python -m tests.ops.hopper_gate` compiles the worst cases, `--all` every configuration, `--shapes` T5's forward in
every shape that `python -m benchmarks hopper_forward` tries, and with tails. It fails on spills beyond
its limits, on serialised matrix products (C75xx), on too much shared memory, on A operands of wgmma that something
overwrites (`sass.py`), and on descriptors that depend on the way to them (`sass_descriptors.py`). Run it in a process
of its own, with Triton's interpreter off.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from fat5.ops.attention.hopper import finish, records, rows, setup, table_gradient
from fat5.ops.attention.hopper.backward import backward_kernel
from fat5.ops.attention.hopper.configuration import Configuration, ForwardShape
from fat5.ops.attention.hopper.forward import forward_kernel
from fat5.ops.attention.hopper.launch import constants
from fat5.ops.attention.hopper.query_gradient import query_kernel
from fat5.ops.attention.hopper.records import FIELDS
from fat5.ops.attention.hopper.self_check import all_configurations, all_shapes
from fat5.ops.attention.tiles import SHARED_MEMORY
from tests.ops.sass import overwritten_operands
from tests.ops.sass_descriptors import unsteady_descriptors

BINARIES = Path(triton.backends.__file__).parent / "nvidia" / "bin"
KERNELS = {"forward_kernel": forward_kernel, "backward_kernel": backward_kernel, "query_kernel": query_kernel}
MAX_SPILL_BYTES = {  # by kernel and head dimension: as found, with some room (the forward's at 128 with tails: 188)
    ("forward_kernel", 64): 64,
    ("forward_kernel", 128): 208,
    ("backward_kernel", 64): 64,
    ("backward_kernel", 128): 240,
    ("query_kernel", 64): 16,
    ("query_kernel", 128): 96,
}
MAX_SPILL_OF_THREE_WITH_TAILS = 224  # no choice of today's: three consumers take whole tiles
ELEMENTS = {torch.bfloat16: ("bf16", gl.bfloat16), torch.float16: ("fp16", gl.float16)}
POINTERS = {"Table": "*i64", "LSE": "*fp32", "Delta": "*fp32", "Far": "*fp32", "Records": "*i32"}
FLOATS = {"factor", "scale"}


def kernels_of(configuration: Configuration) -> list[str]:
    """The kernels that a configuration launches."""
    if configuration.kernel == "forward":
        return ["forward_kernel"]
    return ["backward_kernel"] if configuration.one_pass else ["backward_kernel", "query_kernel"]


def signature(kernel: str, configuration: Configuration) -> dict[str, str]:
    """The types of a kernel's arguments, as a launch would find them."""
    dim, keys = configuration.head_dim, 64 if kernel == "backward_kernel" else 128
    name, element = ELEMENTS[configuration.dtype]
    boxes = {"k_desc": [1, 1, 1, keys, dim], "v_desc": [1, 1, 1, keys, dim], "half_desc": [1, 1, 1, 64, dim // 2]}
    boxes |= {"near_desc": [64, 64], "sum_desc": [64, dim // 2]}
    types = {}
    for parameter in KERNELS[kernel].params:
        if parameter.is_constexpr:
            types[parameter.name] = "constexpr"
        elif parameter.name.endswith("_desc"):
            box = boxes.get(parameter.name, [1, 1, 1, 64, dim])
            kind, of = ("fp32", gl.float32) if parameter.name == "sum_desc" else (name, element)
            types[parameter.name] = f"tensordesc<{kind}{box},{gl.NVMMASharedLayout.get_default_for(box, of)!r}>"
        else:
            types[parameter.name] = POINTERS.get(parameter.name, "fp32" if parameter.name in FLOATS else "i32")
    return types


def check(case: tuple[str, Configuration]) -> tuple[str, list[str]]:
    """Compile one kernel and return a line about it and what is wrong."""
    kernel, configuration = case
    types = signature(kernel, configuration)
    names = list(types)
    values = {(names.index(n),): v for n, v in constants(configuration, kernel).items()}
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n].startswith("*")}
    source = GluonASTSource(KERNELS[kernel], types, values, aligned)
    title = f"{kernel}, {configuration}"
    try:
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    except Exception as error:  # the compiler raises many kinds
        return title, [f"does not compile: {error}"]
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(compiled.asm["ptx"])
        assembler = get_ptxas(90)  # Triton 3.9 takes that of CUDA 13, by another name, and allocates registers its way
        ways = ["--regAllocOptLevel=2"] if assembler.version.startswith("13") else []
        command = [assembler.path, "-v", "-arch=sm_90a", *ways, ptx, "-o", cubin]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
        if said.returncode:
            return title, [f"does not assemble: {said.stderr.strip()}"]
        command = [BINARIES / "nvdisasm", "-c", cubin]
        listing = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    text = said.stdout + said.stderr
    registers = int((re.search(r"Used (\d+) registers", text) or [0, 0])[1])
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", text)))
    wrong = [line.strip() for line in text.splitlines() if "C75" in line]
    limit = MAX_SPILL_BYTES[kernel, configuration.head_dim]
    if configuration.tails and configuration.shape.consumers == 3:
        limit = MAX_SPILL_OF_THREE_WITH_TAILS
    if spilled > limit:
        wrong.append(f"spills {spilled} bytes")
    if compiled.metadata.shared > SHARED_MEMORY[90]:
        wrong.append(f"needs {compiled.metadata.shared} bytes of shared memory")
    if "HGMMA" not in listing:
        wrong.append("has no HGMMA")
    if configuration.ragged:
        wrong += stale_fields(compiled.asm["ptx"], 3 if configuration.shape.consumers == 3 else 2)
    wrong += overwritten_operands(listing)[:4] + unsteady_descriptors(listing)[:4]
    return f"{title}: {registers} registers, {spilled} B spilled, {compiled.metadata.shared} B shared", wrong


def stale_fields(ptx: str, consumers: int) -> list[str]:
    """Return what is wrong with the loads of a record's fields.

    Each consumer loads a field before its loop and in each turn of it, the producer once. Triton 3.6 drops a value that
    a loop carries and whose only use is the bound of a loop inside: it is then loaded before the loop alone, and every
    tile has the first one's.
    """
    places = dict(re.findall(r"add\.s64\s+(%rd\d+), %rd\d+, (\d+);", ptx))
    loaded = re.findall(r"ld\.global\.b32 \{ %r\d+ \}, \[ (%rd\d+) \+ 0 \]", ptx)
    counts = Counter(int(places[place]) // 4 for place in loaded if place in places)
    stale = [field for field in range(1, FIELDS.value) if 1 < counts[field] < 2 * consumers]
    return [f"field {field} of a record is loaded for a program's first tile alone" for field in stale]


def cases(everything: bool) -> Iterator[tuple[str, Configuration]]:
    """The compilations; by default the kernels with the most registers, and the most code, of each head dimension."""
    if everything:
        for configuration in all_configurations():
            for kernel in kernels_of(configuration):
                # The query kernel does not know of the table's gradient.
                if kernel != "query_kernel" or not configuration.table_grad:
                    yield kernel, configuration
        return
    even = (64, torch.bfloat16, False, True, 91, False, False)
    yield "forward_kernel", Configuration("forward", *even, shape=ForwardShape(3, ahead=False))
    yield "backward_kernel", Configuration("backward", *even, table_grad=True)
    ragged = (128, torch.float16, True, True, 113, True, True)
    yield "backward_kernel", Configuration("backward", *ragged, table_grad=True, phased=True)


def shapes() -> Iterator[tuple[str, Configuration]]:
    """The compilations of the forward's shapes."""
    for head_dim, causal, tails in itertools.product((64, 128), (False, True), (False, True)):
        for shape in all_shapes(head_dim):
            fixed = (head_dim, torch.bfloat16, causal, True, 113 if causal else 91, False, tails)
            configuration = Configuration("forward", *fixed, shape=shape)
            if configuration.halves == shape.halves:  # else it is compiled as if without
                yield "forward_kernel", configuration


_QUERIES_OR_KEYS = {"KIND": 0, "PADDED": False, "SLOTS": 64, "SHARE": 16, "CHAIN": True}
_DOCUMENTS = {"VARLEN": True, "OFFSET": 2, "HAS_STARTS": False, "HAS_LENGTHS": False}
_ROWS = {"VARLEN": False, "OFFSET": 1, "HAS_STARTS": True, "HAS_LENGTHS": True}
_TABLE = {"RADIUS": 91, "BIAS": 1, "CAUSAL": True, "REVERSED": True, "BLOCK": 512, "CHAIN": True}
_FINISH = {"D": 128, "VARLEN": False, "WRITTEN": True, "BY_ROW": False, "REVERSED": True, "CHAIN": True}
_PREPARE = {"D": 64, "VARLEN": False, "CLEAR": True, "REVERSED": True, "CHAIN": True}
_ALL_REAL = {"HAS_STARTS": False, "HAS_LENGTHS": False, "KeyStarts": None, "KeyLengths": None}
_GRADIENT = {"SHARES": 16, "RADIUS": 91, "OFFSETS": 5, "WIDTH": 64, "PHASED": False, "CHAIN": True}
SUPPORTING = (
    (setup.setup_kernel, _TABLE, ()),
    (setup.setup_kernel, _TABLE | {"BIAS": 2, "REVERSED": False}, ()),
    (setup.setup_kernel, _TABLE | {"BIAS": 0}, ("Bias",)),
    (
        records.record_kernel,
        _QUERIES_OR_KEYS | _DOCUMENTS | {"CAUSAL": True},
        ("KeyStarts", "KeyLengths", "Offsets", "Map"),
    ),
    (
        records.record_kernel,
        _QUERIES_OR_KEYS | _DOCUMENTS | {"CAUSAL": False, "KIND": 1, "PADDED": True},
        ("KeyStarts", "KeyLengths", "Offsets"),
    ),
    (
        records.record_kernel,
        _QUERIES_OR_KEYS | _ROWS | {"CAUSAL": True, "KIND": 1, "PADDED": True},
        ("CuQ", "CuK", "Map"),
    ),
    (rows.prepare_kernel, _PREPARE | _ALL_REAL, ("Map",)),
    (rows.prepare_kernel, _PREPARE | {"HAS_STARTS": True, "HAS_LENGTHS": True}, ("Map",)),
    (rows.prepare_kernel, _PREPARE | _ALL_REAL | {"D": 128, "VARLEN": True, "CLEAR": False, "CHAIN": False}, ()),
    (finish.finish_kernel, _FINISH, ("Map",)),
    (finish.finish_kernel, _FINISH | {"D": 64, "VARLEN": True, "WRITTEN": False}, ()),
    (finish.finish_kernel, _FINISH | {"WRITTEN": False, "BY_ROW": True}, ("Map",)),
    (table_gradient.table_kernel, _GRADIENT, ("Phases",)),
    (table_gradient.table_kernel, _GRADIENT | {"RADIUS": 113, "OFFSETS": 19, "PHASED": True}, ()),
)
"""The kernels around, in Triton's own language: constants, and arguments that are None."""


def check_supporting(index: int) -> tuple[str, list[str]]:
    """Compile one of the kernels around, which the interpreter alone does not show to compile."""
    kernel, values, absent = SUPPORTING[index]
    values = values | dict.fromkeys(absent)
    types = {}
    for parameter in kernel.params:
        name = parameter.name
        if name in values:
            types[name] = "constexpr"
        elif name in ("Records", "Map", "CuQ", "CuK", "Phases"):
            types[name] = "*i32"
        elif name in ("KeyStarts", "KeyLengths", "Offsets"):
            types[name] = "*i64"
        elif name in ("O", "DO", "DQ", "DK", "DV", "Near"):
            types[name] = "*bf16"
        else:
            pointer = name[0].isupper() and len(name) > 1
            types[name] = "*fp32" if pointer else "fp32" if name == "scale" else "i32"
    title = f"{kernel.__name__} {values}"
    try:
        ptx = triton.compile(ASTSource(kernel, types, values), target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    except Exception as error:  # the compiler raises many kinds
        return title, [f"does not compile: {error}"]
    early = "st.global" in ptx.split("griddepcontrol.wait")[0]
    return title, ["stores before it waits for the kernel before"] * (early and values.get("CHAIN", False))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="every configuration, not the worst cases")
    parser.add_argument("--shapes", action="store_true", help="every shape of the forward instead")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="a line a compilation, also where all is well")
    arguments = parser.parse_args()
    chosen = list(shapes() if arguments.shapes else cases(arguments.all))
    failed = 0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        around = pool.map(check_supporting, range(len(SUPPORTING)))
        for line, wrong in itertools.chain(around, pool.map(check, chosen)):
            failed += bool(wrong)
            if wrong or arguments.verbose:
                print(("FAILED " if wrong else "ok     ") + line, *wrong, sep="\n       " if wrong else "")
    print(f"{len(SUPPORTING) + len(chosen)} compilations, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
