"""What else computes attention: PyTorch's kernels and FlexAttention."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.attention.implementation import (
    Implementation,
    Run,
    buckets_of_distances,
    buckets_of_materialised,
    heads_of_dense,
)
from benchmarks.attention.own import relative_bias
from benchmarks.attention.workload import DTYPES, Inputs, Workload, buckets_by_distance, real_tokens

_LARGEST_SHARE = 0.4  # of the card's memory that a materialised bias and its gradient may take

# FlexAttention's own choice needs more shared memory than a Hopper card has.
_FLEX_TILES = {
    "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_M1": 64, "BLOCK_N1": 64, "BLOCK_M2": 64, "BLOCK_N2": 64, "num_stages": 2,
}  # fmt: skip


def sdpa(name: str, kernel: SDPBackend, *, bias: bool, bias_gradient: bool = False) -> Implementation:
    """Make a kernel of PyTorch's `scaled_dot_product_attention`, with the bias materialised or without one."""

    def prepare(workload: Workload, inputs: Inputs) -> Run:
        mask = materialised_bias(workload, inputs) if bias else None

        def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            causal = workload.causal and mask is None
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=1.0)

        return _materialised_run(forward, workload, inputs, mask, bias_gradient)

    return Implementation(name, prepare, bias, lambda w, d: _needs_gpu(d) or (_too_large(w, d) if bias else None))


def eager(name: str) -> Implementation:
    """Make attention as Transformers' eager T5 computes it: all scores in memory, the softmax in float32."""

    def prepare(workload: Workload, inputs: Inputs) -> Run:
        def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
            scores = q @ k.transpose(-1, -2) + mask
            return scores.float().softmax(-1).type_as(scores) @ v

        return _materialised_run(forward, workload, inputs, materialised_bias(workload, inputs), bias_gradient=True)

    return Implementation(name, prepare, has_bias=True, unavailable=_too_large)


def flex(name: str) -> Implementation:
    """Make FlexAttention with T5's bias as a captured table by distance, whose gradient it adds up with atomics."""

    def prepare(workload: Workload, inputs: Inputs) -> Run:
        # Each shape is compiled alone; past a number of shapes the compiler would give up and run the slow path.
        torch._dynamo.reset()
        # A compiled backward may otherwise take the memory of what the forward saved, and be run once.
        torch._functorch.config.donated_buffer = False
        q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
        table = relative_bias(inputs.table, workload).by_distance().table.requires_grad_()
        radius = table.shape[1] // 2

        def add_bias(score: Tensor, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return score + table[head, (key - query).clamp(-radius, radius) + radius]

        block_mask = None
        if workload.causal:
            block_mask = create_block_mask(
                lambda batch, head, query, key: query >= key,
                None, None, workload.length, workload.length, device=q.device,
            )  # fmt: skip
        attend = torch.compile(flex_attention, dynamic=False)
        return Run(
            forward=lambda: attend(
                q, k, v, score_mod=add_bias, block_mask=block_mask, scale=1.0, kernel_options=_FLEX_TILES
            ),
            leaves=[q, k, v, table],
            grad_out=inputs.grad_out,
            standard=lambda x: x,
            bias_gradient=buckets_of_distances(workload),
        )

    def unavailable(workload: Workload, device: torch.device) -> str | None:
        if workload.dense_bias or workload.documents is not None:
            return "measured with T5's table on full rows alone"
        return _needs_gpu(device)

    return Implementation(name, prepare, has_bias=True, unavailable=unavailable)


def materialised_bias(workload: Workload, inputs: Inputs) -> Tensor:
    """Return bias and masks as one tensor [1 or B, H, L, L] in the type of q; -inf where a key is hidden."""
    length, device = workload.length, inputs.q.device
    if inputs.dense is not None:
        bias = inputs.dense.clone()
    else:
        buckets = buckets_by_distance(length, workload.causal, device)
        by_distance = inputs.table.T.to(inputs.q.dtype)[:, buckets]  # [H, 2L - 1]
        bias = by_distance.unfold(1, length, 1).flip(1)[None]  # [1, H, L, L]
    if workload.causal:
        bias.masked_fill_(torch.ones(length, length, dtype=torch.bool, device=device).triu_(1), -torch.inf)
    if workload.documents is not None:
        bias = bias.masked_fill(~real_tokens(workload, device)[:, None, None], -torch.inf)
    return bias


def _materialised_run(
    forward: Callable[..., Tensor], workload: Workload, inputs: Inputs, mask: Tensor | None, bias_gradient: bool
) -> Run:
    q, k, v = (x.clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    leaves = [q, k, v]
    if mask is not None and bias_gradient:
        leaves.append(mask.requires_grad_())
    gradient = heads_of_dense if workload.dense_bias else buckets_of_materialised(workload)
    return Run(
        forward=lambda: forward(q, k, v, mask),
        leaves=leaves,
        grad_out=inputs.grad_out,
        standard=lambda x: x,
        bias_gradient=gradient if bias_gradient else None,
        held=() if mask is None else (mask,),
    )


def _needs_gpu(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "there is no CUDA GPU"


def _too_large(workload: Workload, device: torch.device) -> str | None:
    """Return why a materialised bias would not fit, or None: it and its gradient, which has all rows of the batch."""
    if device.type != "cuda":
        return None
    needed = 4 * workload.batch * workload.heads * workload.length**2 * DTYPES[workload.dtype].itemsize
    available = torch.cuda.get_device_properties(device).total_memory
    if needed <= _LARGEST_SHARE * available:
        return None
    return f"a materialised bias and its gradient need about {needed / 2**30:.0f} GiB"
