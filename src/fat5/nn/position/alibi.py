"""ALiBi: slopes, fixed or learned, and the form whose heads look one way."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from fat5.nn.layout import SequenceLayout
from fat5.nn.position.tokens import packed_tokens
from fat5.ops import AlibiBias, flash_attention


def slope_exponents(num_heads: int, *, symmetric: bool = True, device: torch.device | str | None = None) -> Tensor:
    """Return log2 of ALiBi's slopes for any number of heads, float32 [num_heads].

    For a power of two n the slopes are `2 ** (-8 h / n)`, h = 1 .. n. Other counts take those of the power of two
    below, then every other slope of the power of two above.

    Args:
        num_heads: Heads, at least 1; at least 2 where not symmetric.
        symmetric: False for two groups of heads, the first looking back, the last ahead, each with slopes of its own.
        device: Where the result is made.

    Reference: Press et al., Train short, test long, arXiv:2108.12409, and its published code.
    """
    if not symmetric:
        back = heads_looking_back(num_heads)
        return torch.cat([slope_exponents(n, device=device) for n in (back, num_heads - back)])
    below = 2 ** (num_heads.bit_length() - 1)
    own = torch.arange(1, below + 1, device=device, dtype=torch.float32) * (-8 / below)
    between = torch.arange(num_heads - below, device=device, dtype=torch.float32) * 2 + 1
    return torch.cat([own, between * (-4 / below)])


def heads_looking_back(num_heads: int) -> int:
    """Return how many heads, from the first, see earlier keys where heads look one way: half, rounded up."""
    return num_heads - num_heads // 2


class AlibiSlopes(nn.Module):
    """ALiBi's slopes, [num_heads].

    A learned slope is stored as its logarithm, `slope = 2 ** log2_slopes`: it stays above 0 whatever the update, all
    heads move by similar ratios though their slopes differ a hundredfold, and the paper's slopes of 1, 2, 4, ... heads
    are exact in bfloat16. Fixed slopes are no parameter and no buffer, so that no change of the model's type rounds
    them.

    Args:
        num_heads: Heads.
        learned: Train the slopes.
        symmetric: False where half of the heads look back and half ahead; see `slope_exponents`.
    """

    log2_slopes: nn.Parameter | None

    def __init__(self, num_heads: int, *, learned: bool = False, symmetric: bool = True) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.symmetric = symmetric
        learned_slopes = nn.Parameter(slope_exponents(num_heads, symmetric=symmetric)) if learned else None
        self.register_parameter("log2_slopes", learned_slopes)

    def forward(self, device: torch.device | str | None = None) -> Tensor:
        """Return the slopes in float32, or float64 for float64 parameters."""
        if self.log2_slopes is None:
            return slope_exponents(self.num_heads, symmetric=self.symmetric, device=device).exp2()
        return self.log2_slopes.to(torch.promote_types(self.log2_slopes.dtype, torch.float32)).exp2()

    def extra_repr(self) -> str:
        """Return what `print(module)` shows."""
        return f"{self.num_heads}, symmetric={self.symmetric}"


def one_sided_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor,
    layout: SequenceLayout,
    *,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Self-attention whose first heads see earlier keys alone and whose last heads see later keys alone.

    `bias[h, i, j] = -slopes[h] |i - j|` on the side that a head sees, -inf on the other; all heads see the token
    itself. Each side is a causal attention, the second of the sequence read from its end, so that neither computes what
    its heads do not see.

    Args:
        q: [B, L, H, D], or packed [total, H, D].
        k: Shaped as q.
        v: Shaped as q.
        slopes: [H].
        layout: Layout of the batch, without holes.
        dropout_p: Probability of dropping an attention weight.
        backend: Backend of `flash_attention`.

    Returns:
        Shaped as q.

    Reference: the asymmetric form for encoders that ALiBi's authors published beside arXiv:2108.12409.
    """
    back = heads_looking_back(slopes.shape[0])
    earlier = _causal(q[..., :back, :], k[..., :back, :], v[..., :back, :], slopes[:back], layout, dropout_p, backend)
    reversal = _Reversal(layout, q.shape[-3])
    q, k, v = (reversal(x[..., back:, :]) for x in (q, k, v))
    later = _causal(q, k, v, slopes[back:], reversal.layout, dropout_p, backend)
    return torch.cat([earlier, reversal(later)], -2)


def _causal(
    q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, layout: SequenceLayout, dropout_p: float, backend: str
) -> Tensor:
    return flash_attention(
        q,
        k,
        v,
        bias=AlibiBias(slopes),
        causal=True,
        key_starts=layout.starts,
        key_lengths=layout.lengths,
        cu_seqlens_q=layout.cu_seqlens,
        cu_seqlens_k=layout.cu_seqlens,
        max_seqlen_q=layout.max_seqlen,
        max_seqlen_k=layout.max_seqlen,
        dropout_p=dropout_p,
        backend=backend,
    )


class _Reversal:
    """Turns each sequence of a batch round; twice is the batch again."""

    def __init__(self, layout: SequenceLayout, num_tokens: int) -> None:
        self.order: Tensor | None = None
        self.layout = layout
        if layout.cu_seqlens is not None:
            rows = torch.arange(num_tokens, device=layout.cu_seqlens.device)
            document, start = packed_tokens(layout.cu_seqlens, num_tokens)
            ends = torch.cat([layout.cu_seqlens[1:], layout.cu_seqlens[-1:]])
            turned = start + ends[document] - 1 - rows
            self.order = torch.where(rows < layout.cu_seqlens[-1], turned, rows)
        elif layout.starts is not None and layout.lengths is not None:
            self.layout = dataclasses.replace(layout, starts=num_tokens - layout.starts - layout.lengths)

    def __call__(self, x: Tensor) -> Tensor:
        """Turn [B, L, H, D] or packed [total, H, D]."""
        return x.flip(1) if self.order is None else x.index_select(0, self.order)
