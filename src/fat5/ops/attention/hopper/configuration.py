"""What the compiler specialises the Hopper kernels on: the key of a comparison at first use, and of the compile
gate."""

from __future__ import annotations

import dataclasses

import torch

from fat5.ops.attention.hopper.support import is_ragged, radius_of
from fat5.ops.attention.problem import Problem

EVERYWHERE = -1  # a bias that is constant nowhere, such as ALiBi
KEY_TILE = 128
_THREE_CONSUMERS_FROM = 2048  # keys; below, 192 rows a tile waste more than a third consumer wins


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
        consumers: Warpgroups of 64 queries in the forward.
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
    consumers: int = 2
    table_grad: bool = False
    phased: bool = False
    one_pass: bool = True

    def __str__(self) -> str:
        kind = "no bias" if not self.bias else "ALiBi" if self.radius == EVERYWHERE else f"radius {self.radius}"
        flags = {
            "causal": self.causal,
            "ragged": self.ragged,
            "tails": self.tails and not self.ragged,
            "three consumers": self.consumers == 3,
            "table gradient": self.table_grad,
            "of rows apart": self.phased,
            "deterministic": not self.one_pass,
        }
        words = [name for name, on in flags.items() if on]
        return ", ".join([f"{self.kernel} D{self.head_dim} {str(self.dtype).removeprefix('torch.')}", kind, *words])


def forward_configuration(problem: Problem) -> Configuration:
    """Return the constants of a problem's forward."""
    plain = _common("forward", problem)
    # The third consumer has few registers: it spills without a bias, with tails, and at 128, and causal rows waste it.
    few = plain.head_dim == 64 and plain.bias and not (plain.causal or plain.tails)
    three = few and problem.num_keys > _THREE_CONSUMERS_FROM
    return dataclasses.replace(plain, consumers=3) if three else plain


def backward_configuration(problem: Problem, bias_grad: bool, deterministic: bool) -> Configuration:
    """Return the constants of a problem's backward."""
    apart = problem.key_starts is not None or problem.offsets is not None or (problem.offset or 0) % 64 != 0
    return dataclasses.replace(
        _common("backward", problem),
        table_grad=bias_grad,
        phased=bias_grad and apart and not problem.packed,
        one_pass=not deterministic,
    )


def _common(kernel: str, problem: Problem) -> Configuration:
    ragged = is_ragged(problem)
    alibi = problem.bias_kind.startswith("alibi")
    return Configuration(
        kernel=kernel,
        head_dim=problem.head_dim,
        dtype=problem.q.dtype,
        causal=problem.causal,
        bias=problem.bias is not None or problem.causal,
        radius=EVERYWHERE if alibi else max(1, radius_of(problem)),
        ragged=ragged,
        tails=ragged or problem.num_keys % KEY_TILE != 0,
    )
