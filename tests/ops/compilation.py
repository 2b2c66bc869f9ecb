"""Compiling one kernel for one card without a GPU, and reading what the assembler says of it."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fat5.ops.attention.tiles import SHARED_MEMORY

ARCHITECTURES = tuple(SHARED_MEMORY)


@dataclass(frozen=True)
class Assembled:
    """What became of a kernel.

    Attributes:
        ptx: Its code before the assembler.
        text: What the assembler said.
        registers: Registers a thread.
        spilled: Bytes of spill stores.
        shared: Bytes of shared memory.
        failed: The assembler stopped.
    """

    ptx: str
    text: str
    registers: int
    spilled: int
    shared: int
    failed: bool


def assemble(source: ASTSource, architecture: int, options: Mapping[str, Any]) -> Assembled:
    """Compile and assemble a kernel for an architecture (compute capability times ten)."""
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(options))
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        suffix = "a" if architecture in (90, 100, 120) else ""
        program = "ptxas-blackwell" if architecture >= 100 else "ptxas"
        ptxas = Path(triton.backends.__file__).parent / "nvidia" / "bin" / program
        command = [ptxas, "-v", f"-arch=sm_{architecture}{suffix}", ptx, "-o", f"{folder}/kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=False)
    text = said.stdout + said.stderr
    registers = int((re.search(r"Used (\d+) registers", text) or [0, 0])[1])
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill stores", text)))
    return Assembled(compiled.asm["ptx"], text, registers, spilled, compiled.metadata.shared, said.returncode != 0)


@dataclass(frozen=True)
class Compilation:
    """One kernel bound by memory, with the types and constants that a launch would give it.

    Attributes:
        family: Module of `tests.ops.compile_cases`.
        kernel: Name in its `KERNELS`.
        architecture: Compute capability times ten.
        types: Of the tensors, as "bf16", None for one that is absent; and of scalars that are no int32.
        constants: Values of the compile-time arguments.
        options: Of the compiler, such as num_warps.
        max_spilled: Bytes of spill stores that are let through.
        unaligned: Pointers and strides are multiples of nothing.
    """

    family: str
    kernel: str
    architecture: int
    types: Mapping[str, str | None]
    constants: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    max_spilled: int = 16
    unaligned: bool = False

    def __str__(self) -> str:
        flags = " ".join(f"{name}={value}" for name, value in (*self.constants.items(), *self.options.items()))
        types = " ".join(f"{name}:{kind}" for name, kind in self.types.items() if kind is not None)
        return f"sm_{self.architecture} {self.kernel}, {types}, {flags}{' unaligned' if self.unaligned else ''}"

    def source(self) -> ASTSource:
        """Return the kernel with these types and constants."""
        kernel = importlib.import_module(f"tests.ops.compile_cases.{self.family}").KERNELS[self.kernel]
        signature, values, attributes = {}, {}, {}
        for index, parameter in enumerate(kernel.params):
            name = parameter.name
            if parameter.is_constexpr:
                signature[name], values[name] = "constexpr", self.constants[name]
            elif name[0].isupper() and self.types[name] is None:
                signature[name], values[name] = "constexpr", None
            elif name[0].isupper():
                described = str(self.types[name]).startswith("tensordesc")
                signature[name] = self.types[name] if described else f"*{self.types[name]}"
            else:
                signature[name] = self.types.get(name) or "i32"
            multiples = ("_row", "_head", "_batch", "_token", "width", "depth", "vocab_size")
            divisible = signature[name].startswith("*") or name.endswith(multiples)
            if divisible and not self.unaligned:
                attributes[(index,)] = [["tt.divisibility", 16]]
        return ASTSource(kernel, signature, values, attributes)

    def check(self) -> tuple[str, list[str]]:
        """Compile, and return a line about it and what is wrong."""
        try:
            got = assemble(self.source(), self.architecture, self.options)
        except Exception as error:  # the compiler raises many kinds
            return str(self), [f"does not compile: {error}"]
        wrong = [got.text[-300:]] if got.failed else []
        if got.spilled > self.max_spilled:
            wrong.append(f"spills {got.spilled} bytes")
        if got.shared > SHARED_MEMORY[self.architecture]:
            wrong.append(f"needs {got.shared} bytes of shared memory; the card has {SHARED_MEMORY[self.architecture]}")
        wide = any(instruction in got.ptx for instruction in (".v4.b32", "cp.async.bulk.tensor"))
        if not self.unaligned and not wide and self.kernel != "rms_norm sum":
            wrong.append("has no 16-byte loads")
        return f"{self}: {got.registers} registers, {got.spilled} B spilled, {got.shared} B shared", wrong
