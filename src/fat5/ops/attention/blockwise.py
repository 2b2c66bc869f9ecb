"""Blockwise attention in plain PyTorch: the arithmetic of the `torch` backend.

Scores exist one block at a time. The softmax is built online (Milakov and Gimelshein, 2018; Dao et al., 2022), and the
backward recomputes each block from the saved log-sum-exp. Accumulation is in float32, in float64 for float64 inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fat5.ops.attention.bias_blocks import BiasBlocks

# Scores of one block, all batches and heads together: 32 MB in float32. Each block has a handful of such temporaries.
_BLOCK_ELEMENTS = 2**23
_MAX_BLOCK_SIDE = 1024


@dataclass(frozen=True)
class Dropout:
    """Dropout on the attention weights from a counter: the mask is a hash of (seed, query token, head, key token).

    Nothing is stored, the backward hashes again, and the blocks' sizes don't matter.
    """

    probability: float
    seed: int

    def keep(self, query_ids: Tensor, key_ids: Tensor, num_heads: int) -> Tensor:
        """Return 0 or 1 / (1 - p) for query tokens [B, m] and key tokens [B, n], as [B, H, m, n] in float32."""
        mask32 = 0xFFFFFFFF
        heads = torch.arange(num_heads, device=query_ids.device).view(1, -1, 1, 1) + 1
        rows = (query_ids[:, None, :, None] * 0x9E3779B1 + self.seed) & mask32
        x = (rows ^ (heads * 0xC2B2AE3D)) & mask32
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask32
        x = (x + key_ids[:, None, None, :] * 0x85EBCA77) & mask32
        x = ((x ^ (x >> 16)) * 0x7FEB352D) & mask32
        x = ((x ^ (x >> 15)) * 0x846CA68B) & mask32
        x = x ^ (x >> 16)
        return (x >= int(self.probability * 2**32)).float() / (1 - self.probability)


@dataclass(frozen=True)
class Sequences:
    """One group of sequences that share lengths and offset: where they lie and what each query sees.

    `starts` and `ends` [B] bound the real keys of each sequence; None where all are real. `query_ids` and `key_ids`
    [B, L] are token positions in the whole input, for dropout.
    """

    q: Tensor  # [B, H, Lq, D], in the accumulation type
    k: Tensor  # [B, H, Lk, D]
    v: Tensor  # [B, H, Lk, D]
    offset: int
    causal: bool
    scale: float
    bias: BiasBlocks
    starts: Tensor | None = None
    ends: Tensor | None = None
    dropout: Dropout | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None

    def blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        """Yield each block of queries with the blocks of keys that any of its rows may see."""
        batch, heads, num_queries, _ = self.q.shape
        num_keys = self.k.shape[2]
        block_keys = max(1, min(num_keys, _MAX_BLOCK_SIDE))
        block_queries = min(max(16, _BLOCK_ELEMENTS // max(1, batch * heads * block_keys)), _MAX_BLOCK_SIDE)
        for i0 in range(0, num_queries, block_queries):
            i1 = min(i0 + block_queries, num_queries)
            end = max(0, min(num_keys, i1 + self.offset)) if self.causal else num_keys
            yield slice(i0, i1), [slice(j, min(j + block_keys, end)) for j in range(0, end, block_keys)]

    def scores(self, rows: slice, cols: slice) -> Tensor:
        """Scores of one block, [B, H, m, n]; invisible keys are -inf."""
        scores = (self.q[:, :, rows] * self.scale) @ self.k[:, :, cols].transpose(-1, -2)
        scores = self.bias.add(scores, rows, cols, self.offset)
        keys = torch.arange(cols.start, cols.stop, device=scores.device)
        if self.causal and cols.stop - 1 > rows.start + self.offset:
            queries = torch.arange(rows.start, rows.stop, device=scores.device) + self.offset
            scores = scores.masked_fill(keys > queries[:, None], -torch.inf)
        if self.starts is not None and self.ends is not None:
            hidden = (keys < self.starts[:, None]) | (keys >= self.ends[:, None])  # [B, n]
            scores = scores.masked_fill(hidden[:, None, None], -torch.inf)
        return scores

    def keep(self, rows: slice, cols: slice) -> Tensor | None:
        """Dropout's factors of one block, or None without dropout."""
        if self.dropout is None or self.query_ids is None or self.key_ids is None:
            return None
        factors = self.dropout.keep(self.query_ids[:, rows], self.key_ids[:, cols], self.q.shape[1])
        return factors.to(self.q.dtype)


def attend(seqs: Sequences) -> tuple[Tensor, Tensor]:
    """Return the output [B, H, Lq, D] and the log-sum-exp of the scores [B, H, Lq], natural logarithm.

    A row that sees no key gives 0 and a log-sum-exp of +inf, so that its probabilities, recomputed, are 0.
    """
    out, lse = torch.zeros_like(seqs.q), seqs.q.new_full(seqs.q.shape[:3], torch.inf)
    for rows, key_blocks in seqs.blocks():
        shape = seqs.q[:, :, rows].shape
        peak = seqs.q.new_full((*shape[:3], 1), -torch.inf)
        total = seqs.q.new_zeros((*shape[:3], 1))
        acc = seqs.q.new_zeros(shape)
        for cols in key_blocks:
            scores = seqs.scores(rows, cols)
            new_peak = torch.maximum(peak, scores.amax(-1, keepdim=True))
            shift = new_peak.masked_fill(new_peak == -torch.inf, 0)
            weights = (scores - shift).exp_()
            decay = (peak - shift).exp_()
            total = total * decay + weights.sum(-1, keepdim=True)
            keep = seqs.keep(rows, cols)
            if keep is not None:
                weights *= keep
            acc = acc * decay + weights @ seqs.v[:, :, cols]
            peak = new_peak
        seen = total > 0
        out[:, :, rows] = torch.where(seen, acc / total, 0)
        lse[:, :, rows] = torch.where(seen, peak + total.log(), torch.inf).squeeze(-1)
    return out, lse


def attend_backward(seqs: Sequences, out: Tensor, lse: Tensor, grad_out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, [B, H, L, D], and add the bias's to `seqs.bias`.

    With P the weights, dP = dO V^T and delta = rowsum(dO * O): dS = P * (dP - delta).
    """
    grad_q, grad_k, grad_v = (torch.zeros_like(x) for x in (seqs.q, seqs.k, seqs.v))
    delta = (out * grad_out).sum(-1, keepdim=True)
    for rows, key_blocks in seqs.blocks():
        queries, grad_rows = seqs.q[:, :, rows], grad_out[:, :, rows]
        for cols in key_blocks:
            weights = (seqs.scores(rows, cols) - lse[:, :, rows, None]).exp_()
            grad_weights = grad_rows @ seqs.v[:, :, cols].transpose(-1, -2)
            keep = seqs.keep(rows, cols)
            if keep is not None:
                grad_weights *= keep
            grad_scores = weights * (grad_weights - delta[:, :, rows])
            if keep is not None:
                weights *= keep
            grad_v[:, :, cols] += weights.transpose(-1, -2) @ grad_rows
            grad_q[:, :, rows] += grad_scores @ seqs.k[:, :, cols] * seqs.scale
            grad_k[:, :, cols] += grad_scores.transpose(-1, -2) @ queries * seqs.scale
            seqs.bias.accumulate(grad_scores, rows, cols, seqs.offset)
    return grad_q, grad_k, grad_v
