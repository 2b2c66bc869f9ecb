"""FAT5's backends of attention."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.attention.implementation import (
    Implementation,
    Run,
    buckets_of_distances,
    heads_of_dense,
    heads_of_table,
)
from benchmarks.attention.workload import DTYPES, MAX_DISTANCE, Inputs, Workload, real_tokens
from fat5.ops import DenseBias, DistanceBias, RelativeBias, flash_attention, plan_attention
from fat5.ops.attention.backends import BACKENDS, choose_backend


def relative_bias(table: Tensor, workload: Workload) -> RelativeBias:
    """Return T5's bias of an encoder, or of a decoder where the workload is causal."""
    return RelativeBias(table, bidirectional=not workload.causal, max_distance=MAX_DISTANCE)


@contextlib.contextmanager
def equal_bits() -> Iterator[None]:
    """Ask PyTorch for deterministic algorithms, without its filling of new memory, which is for finding faults."""
    fill, torch.utils.deterministic.fill_uninitialized_memory = (
        torch.utils.deterministic.fill_uninitialized_memory,
        False,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def fat5(
    backend: str, *, packed: bool = False, by_distance: bool = False, deterministic: bool = False
) -> Implementation:
    """Make one of FAT5's backends: the public function, which takes views [B, L, H, D].

    Args:
        backend: Name of the backend.
        packed: Leave the padding out and pass `cu_seqlens`; otherwise padding is passed as `key_lengths`.
        by_distance: Pass the table expanded by distance, and a plan where the backend has plans, as the layers of a
            stack get them that share both.
        deterministic: Run the backward under `torch.use_deterministic_algorithms`.
    """

    def unavailable(workload: Workload, device: torch.device) -> str | None:
        reason = BACKENDS[backend]()
        if reason is not None:
            return reason
        try:
            choose_backend(backend, torch.empty(0, workload.head_dim, dtype=DTYPES[workload.dtype], device=device))
        except ValueError as error:
            return str(error)
        return None

    def prepare(workload: Workload, inputs: Inputs) -> Run:
        mask = real_tokens(workload, inputs.q.device)

        def own_layout(x: Tensor) -> Tensor:
            x = x.transpose(1, 2)
            return x[mask] if packed else x.clone()

        def standard(x: Tensor) -> Tensor:
            if packed:
                x = x.new_zeros(*mask.shape, *x.shape[1:]).masked_scatter_(mask[..., None, None], x)
            return x.transpose(1, 2)

        q, k, v, grad_out = (own_layout(x) for x in (inputs.q, inputs.k, inputs.v, inputs.grad_out))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        options = {"causal": workload.causal, "backend": backend}
        lengths = torch.tensor(workload.real_lengths, dtype=torch.int32, device=q.device)
        if packed:
            offsets = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            options |= {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
            options |= {"max_seqlen_q": workload.length, "max_seqlen_k": workload.length}
        elif workload.documents is not None:
            options["key_lengths"] = lengths
        if inputs.dense is not None:
            leaf = inputs.dense.clone().requires_grad_()
            make, gradient, held = DenseBias, heads_of_dense, (leaf,)
        elif by_distance:
            leaf = relative_bias(inputs.table, workload).by_distance().table.requires_grad_()
            make, gradient, held = DistanceBias, buckets_of_distances(workload), ()
        else:
            leaf = inputs.table.clone().requires_grad_()
            make, gradient, held = (lambda table: relative_bias(table, workload)), heads_of_table, ()
        if by_distance:
            options["plan"] = plan_attention(q, k, bias=make(leaf), **options)
        return Run(
            forward=lambda: flash_attention(q, k, v, bias=make(leaf), **options),
            leaves=[*leaves, leaf],
            grad_out=grad_out,
            standard=standard,
            bias_gradient=gradient,
            held=held,
            context=equal_bits if deterministic else contextlib.nullcontext,
        )

    flags = {"packed": packed, "shared": by_distance, "deterministic": deterministic}
    name = "-".join(["fat5", backend, *(flag for flag, on in flags.items() if on)])
    return Implementation(name, prepare, has_bias=True, unavailable=unavailable, own=True)
