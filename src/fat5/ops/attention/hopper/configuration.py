"""What the compiler specialises the Hopper kernels on: the key of a comparison at first use, and of the compile
gate."""

from __future__ import annotations

import dataclasses
import functools

import torch

from fat5.ops.attention.hopper.support import is_ragged, radius_of
from fat5.ops.attention.problem import Problem

EVERYWHERE = -1  # a bias that is constant nowhere, such as ALiBi
KEY_TILE = 128
_LONG = 2048  # keys; rows of fewer waste more of tiles of 192 rows than a third consumer wins
QUERY_BUFFERS = 2
TURNS_A_CHUNK = 4
"""Causal tiles are sorted by work inside chunks of so many turns: few heads at a time, whose keys and values stay in
the L2."""


@dataclasses.dataclass(frozen=True)
class ForwardShape:
    """How the forward shares a multiprocessor among its parts. It changes the time, not the result.

    Attributes:
        consumers: Warpgroups of 64 queries, 2 or 3; 2 where work comes as records, which are of 128 queries.
        stages: Tiles of keys, and as many of values, in shared memory.
        ahead: A program begins its next tile beside the last product of the one before.
        chunk: Turns of causal tiles that are sorted by work together.
        alternate: Two consumers issue their products in turn.
        halves: Queries that see none of the second half of their last tile of keys multiply its first half alone, and
            the two consumers change places from tile to tile. Not with tiles begun ahead.
    """

    consumers: int = 2
    stages: int = 2
    ahead: bool = True
    chunk: int = TURNS_A_CHUNK
    alternate: bool = False
    halves: bool = False

    def __post_init__(self) -> None:
        if self.halves and (self.consumers != 2 or self.ahead):
            raise ValueError(f"got halves with {self.consumers} consumers and ahead={self.ahead}, expected 2 and False")

    def __str__(self) -> str:
        words = [f"{self.consumers} consumers", f"{self.stages} stages", "ahead" if self.ahead else "not ahead"]
        words += ["alternating"] * self.alternate + ["halves"] * self.halves
        return ", ".join(words + [f"chunks of {self.chunk}"] * (self.chunk != TURNS_A_CHUNK))

    def shared_bytes(self, head_dim: int) -> int:
        """Return the shared memory of its queries, outputs, keys and values, in bytes; barriers come to it."""
        rows = 64 * self.consumers * (QUERY_BUFFERS + 1) + 2 * KEY_TILE * self.stages
        return 2 * head_dim * rows


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One set of compile-time constants.

    Attributes:
        kernel: "forward" or "backward", with all the kernels that it takes.
        head_dim: 64 or 128.
        dtype: bfloat16 or float16.
        causal: Later keys are hidden, by the table.
        bias: A table is read: there is a bias, or attention is causal.
        radius: Distance from which the table is constant, at least 1; EVERYWHERE for ALiBi; 1 without a bias.
        ragged: Work comes as records: padding, documents, or offsets of their own.
        tails: The last tile of keys may be partly real.
        shape: Of the forward.
        table_grad: The backward leaves what the table's gradient needs.
        phased: Blocks of queries and keys may stand apart by any distance, which each row has for itself.
        one_pass: The backward adds dQ in memory; else a second kernel computes it, with equal bits from run to run.
    """

    kernel: str
    head_dim: int
    dtype: torch.dtype
    causal: bool
    bias: bool
    radius: int
    ragged: bool
    tails: bool
    shape: ForwardShape = ForwardShape()
    table_grad: bool = False
    phased: bool = False
    one_pass: bool = True

    @property
    def halves(self) -> bool:
        """The forward multiplies half tiles of keys: its shape says so, and some queries may see no more of their
        last."""
        return self.shape.halves and (self.causal or self.tails)

    def __str__(self) -> str:
        kind = "no bias" if not self.bias else "ALiBi" if self.radius == EVERYWHERE else f"radius {self.radius}"
        flags = {
            "causal": self.causal,
            "ragged": self.ragged,
            "tails": self.tails and not self.ragged,
            str(self.shape): self.shape != ForwardShape(),
            "table gradient": self.table_grad,
            "of rows apart": self.phased,
            "deterministic": not self.one_pass,
        }
        words = [name for name, on in flags.items() if on]
        return ", ".join([f"{self.kernel} D{self.head_dim} {str(self.dtype).removeprefix('torch.')}", kind, *words])


def forward_configuration(problem: Problem) -> Configuration:
    """Return the constants of a problem's forward."""
    common = _common(problem)
    return _configuration("forward", *common, forward_shape(_configuration("forward", *common), problem.num_keys))


def forward_shape(configuration: Configuration, num_keys: int) -> ForwardShape:
    """Return the shape of a forward on rows of `num_keys` keys, as measured on an H200."""
    # The third consumer has few registers: it spills with tails and at 128; causal rows and rows without a bias are not
    # measured with it.
    wide = configuration.head_dim == 128
    few = not wide and configuration.bias and not (configuration.causal or configuration.tails)
    if few and num_keys > _LONG:
        return ForwardShape(consumers=3, ahead=False)  # nor has it registers for a tile begun ahead
    # ALiBi with tails has no registers for the next tile.
    spare = not (configuration.tails and configuration.radius == EVERYWHERE)
    if configuration.causal:
        # Short causal tiles end beside each other anyway; so do those at 64 at any length. They gain by half tiles, for
        # which tails at 128 have no registers.
        late = wide and spare and num_keys > _LONG
        halves = not late and not (wide and configuration.tails and not configuration.ragged)
        return ForwardShape(
            stages=2 if wide else 3, ahead=late, chunk=2 if late or halves else TURNS_A_CHUNK, halves=halves
        )
    return ForwardShape(stages=2 if wide else 3, ahead=spare)


def backward_configuration(problem: Problem, bias_grad: bool, deterministic: bool) -> Configuration:
    """Return the constants of a problem's backward."""
    apart = problem.key_starts is not None or problem.offsets is not None or (problem.offset or 0) % 64 != 0
    phased = bias_grad and apart and not problem.packed
    return _configuration("backward", *_common(problem), ForwardShape(), bias_grad, phased, not deterministic)


_configuration = functools.lru_cache(1024)(Configuration)


def _common(problem: Problem) -> tuple[int, torch.dtype, bool, bool, int, bool, bool]:
    """Return a configuration's fields from `head_dim` to `tails`."""
    ragged = is_ragged(problem)
    bias = problem.bias is not None or problem.causal
    tails = ragged or problem.num_keys % KEY_TILE != 0
    return problem.head_dim, problem.q.dtype, problem.causal, bias, table_radius(problem), ragged, tails


def table_radius(problem: Problem) -> int:
    """Return the radius that a problem's kernels are compiled for."""
    return EVERYWHERE if problem.bias_kind.startswith("alibi") else max(1, radius_of(problem))
