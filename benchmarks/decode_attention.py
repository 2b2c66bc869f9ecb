"""Attention of the few queries of a step of decoding: workloads, implementations, and their gate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.bandwidth import moved_bytes
from benchmarks.subject import GateError, Phase, Prepared, Subject
from fat5.ops import RelativeBias, flash_attention
from fat5.ops.attention.reference import attention_reference
from fat5.ops.step import step_attention

NAMES = ("fat5", "fat5-step", "sdpa")
"""`fat5-step` is the kernel of one query a row, which in self-attention stores its key and value, too."""

YARDSTICK = "sdpa"
_FACTOR, _LARGEST_LIMIT = 2.0, 0.1


@dataclass(frozen=True)
class Step:
    """One attention of a step of decoding.

    Attributes:
        kind: "cross", or "self": causal, with T5's bias, in a cache that is full but for its last quarter.
        batch: Rows.
        queries: Queries of each row: 1, or the beams that share the row's keys.
        keys: Keys of each row, or slots of its cache.
        heads: Heads.
        head_dim: Channels of a head.
    """

    kind: str
    batch: int
    queries: int
    keys: int
    heads: int = 8
    head_dim: int = 64

    def __str__(self) -> str:
        return f"{self.kind} B{self.batch} q{self.queries} k{self.keys} D{self.head_dim}"


STEPS = (
    Step("cross", 16, 1, 512),
    Step("cross", 16, 4, 512),
    Step("self", 16, 1, 128),
    Step("cross", 16, 1, 8192),
    Step("cross", 16, 1, 32768),
    Step("cross", 1, 1, 512),
    Step("cross", 1, 1, 32768),
    Step("cross", 16, 1, 512, head_dim=128),
)
TOY = (Step("cross", 2, 1, 40, 2, 16), Step("cross", 2, 3, 40, 2, 16), Step("self", 2, 1, 24, 2, 16))


def subjects(step: Step, dtype: torch.dtype, device: torch.device, copy: float | None) -> Iterator[Subject]:
    """Yield each implementation at a step, the yardstick first.

    Args:
        step: The workload.
        dtype: Type of queries, keys and values.
        device: Where.
        copy: GB/s of a copy on this device.
    """
    for name in (YARDSTICK, *(n for n in NAMES if n != YARDSTICK)):
        if name == "fat5-step" and step.queries > 1:
            continue
        yield Subject(
            implementation=name,
            parameters={"table": "decode", **asdict(step), "dtype": str(dtype).removeprefix("torch.")},
            prepare=lambda name=name: _prepare(name, step, dtype, device, copy),
            yardstick=YARDSTICK,
        )


def _prepare(name: str, step: Step, dtype: torch.dtype, device: torch.device, copy: float | None) -> Prepared:
    torch.manual_seed(0)
    used = step.keys if step.kind == "cross" else max(1, step.keys * 3 // 4)
    q = torch.randn(step.batch, step.queries, step.heads, step.head_dim, device=device, dtype=dtype)
    k, v = torch.randn(2, step.batch, step.keys, step.heads, step.head_dim, device=device, dtype=dtype)
    arguments: dict[str, Any] = {"softmax_scale": step.head_dim**-0.5}
    if step.kind == "self":
        bias = RelativeBias(torch.randn(32, step.heads, device=device), bidirectional=False).by_distance()
        arguments |= {"bias": bias, "causal": True, "query_offset": torch.full((step.batch,), used - 1, device=device)}
    run = {"fat5": _fat5, "fat5-step": _step, "sdpa": _sdpa}[name](q, k, v, arguments, used)

    def check() -> float:
        exact = attention_reference(q.double(), k.double(), v.double(), **arguments)
        plain = attention_reference(q, k, v, **arguments)
        limit = min(_FACTOR * _error(plain, exact), _LARGEST_LIMIT)
        error = _error(run(), exact)
        if not error <= limit:
            raise GateError(f"it is off by {error:.2e} of its norm, more than the {limit:.2e} allowed")
        return error / limit

    moved = moved_bytes(q, k[:, :used], v[:, :used], q)
    return Prepared(check, (Phase("forward", lambda: run, bytes=moved),), figures=lambda: {"copy_gb_per_s": copy})


def _fat5(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], used: int) -> Callable[[], Tensor]:
    return lambda: flash_attention(q, k, v, **arguments)


def _step(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], used: int) -> Callable[[], Tensor]:
    query, scale = q[:, 0], arguments["softmax_scale"]
    if "bias" not in arguments:
        return lambda: step_attention(query, k, v, softmax_scale=scale)[:, None]
    positions, table = arguments["query_offset"], arguments["bias"].table
    new = k[:, used - 1].clone(), v[:, used - 1].clone()
    return lambda: step_attention(
        query, k, v, new=new, positions=positions, table=table, softmax_scale=scale
    )[:, None]  # fmt: skip


def _sdpa(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any], used: int) -> Callable[[], Tensor]:
    """PyTorch's choice of kernel, on contiguous tensors of its own layout that hold the used keys alone."""
    turned = [x.transpose(1, 2).contiguous() for x in (q, k[:, :used], v[:, :used])]
    mask = None
    if "bias" in arguments:
        mask = arguments["bias"].dense(q.shape[1], used, used - 1).to(q.dtype)
    scale = arguments["softmax_scale"]
    return lambda: F.scaled_dot_product_attention(*turned, attn_mask=mask, scale=scale).transpose(1, 2)


def _error(x: Tensor, truth: Tensor) -> float:
    return float((x.double() - truth).norm() / truth.norm())
