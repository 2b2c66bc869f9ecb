"""What attention is measured on."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.registry import UsageError
from fat5.ops import relative_position_buckets

NUM_BUCKETS = 32
MAX_DISTANCE = 128
LAYOUTS = ("tokens", "heads")
"""[B, L, H, D], as a model's projections write it, or [B, H, L, D], each head's rows side by side."""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Workload:
    """Shape, mask, type and bias of one self-attention.

    Attributes:
        batch: Rows.
        heads: Heads.
        length: Tokens of a row.
        head_dim: Width of a head.
        causal: Hide later keys.
        dtype: A name in DTYPES.
        dense_bias: Rows of a dense bias [rows, H, L, L], 1 or the batch; 0 for T5's learned table, or no bias.
        documents: Real tokens of each row, from its start; None where all are real.
        layout: A name in LAYOUTS: how q, k, v and the output's gradient lie in memory, for all implementations alike.
    """

    batch: int
    heads: int
    length: int
    head_dim: int
    causal: bool
    dtype: str
    dense_bias: int = 0
    documents: tuple[int, ...] | None = None
    layout: str = "tokens"

    @property
    def real_lengths(self) -> tuple[int, ...]:
        """Real tokens of each row."""
        return self.documents or (self.length,) * self.batch

    @property
    def forward_flops(self) -> float:
        """4 L^2 H D for each row of L real tokens, half of it when causal: two products of matrices."""
        pairs = sum(n * n for n in self.real_lengths)
        return 4 * pairs * self.heads * self.head_dim * (0.5 if self.causal else 1)

    @property
    def backward_flops(self) -> float:
        """Five products for the forward's two."""
        return 2.5 * self.forward_flops

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of a row that name the workload."""
        return {
            "batch": self.batch,
            "heads": self.heads,
            "length": self.length,
            "head_dim": self.head_dim,
            "mask": "causal" if self.causal else "full",
            "dtype": self.dtype,
            "layout": self.layout,
        }


@dataclass(frozen=True)
class Inputs:
    """Tensors that all implementations share: views [B, H, L, D] of memory in the workload's layout.

    Attributes:
        q: [B, H, L, D], scaled so that the scores have a variance of 1, as T5 has them with its softmax scale of 1.
        k: [B, H, L, D].
        v: [B, H, L, D].
        grad_out: [B, H, L, D], 0 at padding.
        table: [32, H] float32, T5's learned bias.
        dense: [1 or B, H, L, L] in the type of q, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    table: Tensor
    dense: Tensor | None

    @staticmethod
    def draw(workload: Workload, device: torch.device, seed: int = 0) -> Inputs:
        """Draw random inputs; equal seeds give equal inputs on one device."""
        generator = torch.Generator(device).manual_seed(seed)
        dtype = DTYPES[workload.dtype]

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        shape = (workload.batch, workload.heads, workload.length, workload.head_dim)
        if workload.layout == "tokens":
            q, k, v, grad_out = (normal(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2) for _ in range(4))
        else:
            q, k, v, grad_out = (normal(*shape) for _ in range(4))
        grad_out.masked_fill_(~real_tokens(workload, device)[:, None, :, None], 0)
        table = torch.randn(NUM_BUCKETS, workload.heads, generator=generator, device=device)
        dense = None
        if workload.dense_bias:
            dense = normal(workload.dense_bias, workload.heads, workload.length, workload.length)
        return Inputs(q.mul_(workload.head_dim**-0.5), k, v, grad_out, table, dense)


def real_tokens(workload: Workload, device: torch.device) -> Tensor:
    """Return a mask [B, L], True where a token is real."""
    lengths = torch.tensor(workload.real_lengths, device=device)
    return torch.arange(workload.length, device=device) < lengths[:, None]


def buckets_by_distance(length: int, causal: bool, device: torch.device) -> Tensor:
    """Return the bucket of each distance from -(length - 1) to length - 1, int64 [2 * length - 1]."""
    return relative_position_buckets(
        torch.arange(1 - length, length, device=device),
        num_buckets=NUM_BUCKETS,
        bidirectional=not causal,
        max_distance=MAX_DISTANCE,
    )


def half_padding(batch: int, length: int, seed: int = 0) -> tuple[int, ...]:
    """Return lengths of which pairs make up `length`, uniform otherwise: half of the batch is padding, exactly."""
    if batch % 2:
        raise UsageError(f"got a batch of {batch} rows of {length} tokens; half of them is padding in pairs of rows")
    draw = random.Random(seed)
    shortest = max(1, length // 16)
    halves = [draw.randint(shortest, length - shortest) for _ in range(batch // 2)]
    lengths = [n for half in halves for n in (half, length - half)]
    draw.shuffle(lengths)
    return tuple(lengths)


def uniform_documents(tokens: int, shortest: int, longest: int, seed: int = 0) -> tuple[int, ...]:
    """Return lengths drawn evenly from `shortest` to `longest`, of at most `tokens` tokens together."""
    draw = random.Random(seed)
    lengths: list[int] = []
    while True:
        length = draw.randint(shortest, longest)
        if lengths and sum(lengths) + length > tokens:
            return tuple(lengths)
        lengths.append(length)
