"""Who computes the losses: FAT5's backends, PyTorch, torch.compile, Liger-Kernel."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from benchmarks.loss.gate import formula
from benchmarks.loss.workload import DTYPES, IGNORE_INDEX, Workload
from benchmarks.registry import UsageError
from fat5.ops import cross_entropy, linear_cross_entropy
from fat5.ops.attention.backends import BACKENDS as REASONS
from fat5.ops.loss.backends import BACKENDS
from fat5.ops.loss.tiles import MAX_PAIRED_COLUMNS, Tile, candidates, forced_tile

COMPILED = "compile"
"""The peer that the ratios of given logits are to."""

Loss = Callable[[tuple[Tensor, ...], Tensor], Tensor]


@dataclass(frozen=True)
class Implementation:
    """One way to compute the loss.

    Attributes:
        name: As the tables show it.
        make: Returns the function from leaves and labels to the mean loss, for one workload.
        unavailable: Returns why it cannot run here, or None.
        own: It is FAT5's.
        around: Makes what is entered while it runs, such as a tile that is forced.
    """

    name: str
    make: Callable[[Workload], Loss]
    unavailable: Callable[[torch.device], str | None] = lambda device: None
    own: bool = False
    around: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


def fat5(backend: str, *, overwrite: bool = False, chunk_mib: int | None = None) -> Implementation:
    """Make one of FAT5's backends.

    Args:
        backend: Its name.
        overwrite: The gradient takes the memory of the logits.
        chunk_mib: MiB of logits at a time, of a loss from hidden states.
    """

    def make(workload: Workload) -> Loss:
        terms = {"z_loss": workload.z_loss, "backend": backend, "ignore_index": IGNORE_INDEX}
        if workload.width:
            chunk_bytes = None if chunk_mib is None else chunk_mib * 2**20
            return lambda leaves, labels: linear_cross_entropy(*leaves, labels, chunk_bytes=chunk_bytes, **terms).loss
        return lambda leaves, labels: cross_entropy(*leaves, labels, overwrite_logits=overwrite, **terms).loss

    suffix = "-overwrite" if overwrite else "" if chunk_mib is None else f"-{chunk_mib}MiB"
    return Implementation(f"fat5-{backend}{suffix}", make, lambda device: _missing(backend, device), own=True)


def forced(kernel: str, tile: Tile) -> Implementation:
    """Make the kernels with a tile of choice."""
    registers = "" if tile.registers is None else f" {tile.registers}r"
    name = f"{kernel} {tile.columns} {tile.warps}w {tile.stages}s{registers}"
    plain = fat5("triton")
    return Implementation(name, plain.make, plain.unavailable, True, lambda: forced_tile(kernel, tile))


def tiles_of(workload: Workload) -> Iterator[Implementation]:
    """Yield the kernels with every tile worth measuring at this workload."""
    paired = workload.dtype == "bf16" and workload.vocab % 2 == 0 and workload.vocab <= MAX_PAIRED_COLUMNS
    for kernel in ("pairs", "blocks") if paired else ("blocks",):
        for tile in candidates(kernel, workload.vocab, DTYPES[workload.dtype].itemsize):
            yield forced(kernel, tile)


def _missing(backend: str, device: torch.device) -> str | None:
    if backend == "torch":
        return None
    return REASONS[backend]() or (None if device.type == "cuda" else "timed on a GPU alone")


def _plain(workload: Workload) -> Loss:
    def loss(leaves: tuple[Tensor, ...], labels: Tensor) -> Tensor:
        logits = leaves[0] @ leaves[1].T if workload.width else leaves[0]
        return formula(logits, labels, workload.z_loss)

    return loss


def _compiled(workload: Workload) -> Loss:
    torch._dynamo.reset()
    return torch.compile(_plain(workload), dynamic=False)


def _liger(workload: Workload) -> Loss:
    from liger_kernel.transformers import functional

    function = functional.liger_fused_linear_cross_entropy if workload.width else functional.liger_cross_entropy
    terms = {"lse_square_scale": workload.z_loss, "ignore_index": IGNORE_INDEX}
    if workload.width:
        return lambda leaves, labels: function(leaves[0], leaves[1], labels, **terms)
    return lambda leaves, labels: function(leaves[0], labels, **terms)


def _without_liger(device: torch.device) -> str | None:
    if find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed"
    return None if device.type == "cuda" else "there is no CUDA GPU"


def _no_compiler(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "timed on a GPU alone"


def catalogue(workload: Workload) -> dict[str, Implementation]:
    """Return all implementations that compute this loss."""
    variants = [fat5("triton", overwrite=True)] if not workload.width and "triton" in BACKENDS else []
    return {
        x.name: x
        for x in (
            Implementation(COMPILED, _compiled, _no_compiler),
            Implementation("eager", _plain),
            Implementation("liger", _liger, _without_liger),
            *(fat5(name) for name in BACKENDS),
            *variants,
        )
    }


def choose(names: Sequence[str] | None, workload: Workload) -> list[Implementation]:
    """Return the implementations of these names, all by default, in the order of the tables.

    Raises:
        UsageError: There is no such implementation; the message names the nearest.
    """
    known = catalogue(workload)
    for name in names or ():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"no implementation {name!r}; expected some of {', '.join(known)}{hint}")
    return [implementation for name, implementation in known.items() if names is None or name in names]


def products(leaves: tuple[Tensor, ...]) -> None:
    """Run the three matrix products of a loss from hidden states alone: the limit of any that keeps their number."""
    hidden, weight = leaves
    logits = hidden @ weight.T
    logits @ weight
    logits.T @ hidden
