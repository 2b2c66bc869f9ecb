"""Where each token of a batch stands in its sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fat5.nn.layout import SequenceLayout
from fat5.nn.position.randomized import draw_positions


class PackedTokens(NamedTuple):
    """Of each token of a packed batch: its document, and the document's first row. Each [total].

    Rows after the last document count as one document more.
    """

    document: Tensor
    start: Tensor


def packed_tokens(cu_seqlens: Tensor, num_tokens: int) -> PackedTokens:
    """Find the document of each token without a look at the device."""
    rows = torch.arange(num_tokens, device=cu_seqlens.device, dtype=cu_seqlens.dtype)
    document = torch.searchsorted(cu_seqlens, rows, right=True) - 1
    return PackedTokens(document, cu_seqlens[document])


def token_positions(layout: SequenceLayout, num_tokens: int, device: torch.device, *, look: bool = True) -> Tensor:
    """Return the position of each token, from 0 at the first real token of its sequence.

    Args:
        layout: Layout of the batch.
        num_tokens: Tokens of a padded row, or of the packed batch.
        device: Where the result is made.
        look: False where no one may wait for the device, or where a graph is being prepared that cannot.

    Returns:
        int64 [1, L] where all rows are alike, else [B, L]; packed [total]. Padding before the first token counts as 0.
    """
    rows = torch.arange(num_tokens, device=device)
    if layout.cu_seqlens is not None:
        return rows - packed_tokens(layout.cu_seqlens, num_tokens).start
    starts = _first_slots(layout)
    # Rows that all start at 0 share their positions: worth the wait for the device, as what is made of the positions
    # is quadratic. A graph cannot look, traced or captured.
    in_graph = torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())
    if starts is None or not (in_graph or not look or starts.any()):
        return rows[None]
    return (rows - starts[:, None]).clamp_min(0)


def drawn_positions(
    layout: SequenceLayout, batch: int, num_tokens: int, position_range: int, device: torch.device
) -> Tensor:
    """Return random positions for each token: `draw_positions` laid out as the batch is.

    Args:
        layout: Layout of the batch.
        batch: Rows of a padded batch; unused where packed.
        num_tokens: Tokens of a padded row, or of the packed batch.
        position_range: Positions lie below it.
        device: Where the batch is.

    Returns:
        int64 [B, L], or packed [total]; entries of padding have no meaning.
    """
    rows = torch.arange(num_tokens, device=device)
    if layout.cu_seqlens is not None:
        document, start = packed_tokens(layout.cu_seqlens, num_tokens)
        longest = layout.max_seqlen or 1
        drawn = draw_positions(F.pad(layout.cu_seqlens.diff(), (0, 1)), longest, position_range)
        return drawn[document, (rows - start).clamp_max(longest - 1)]
    starts, spans = _first_slots(layout), _spans(layout)
    if spans is None:
        spans = torch.full((batch,), num_tokens, device=device)
    drawn = draw_positions(spans, num_tokens, position_range)
    return drawn if starts is None else drawn.gather(1, (rows - starts[:, None]).clamp_min(0))


def _first_slots(layout: SequenceLayout) -> Tensor | None:
    """Return the first real slot of each padded row, [B]."""
    return layout.starts if layout.mask is None else layout.mask.int().argmax(1)


def _spans(layout: SequenceLayout) -> Tensor | None:
    """Return the slots from each padded row's first real one to its last, [B]; holes between them count."""
    if layout.mask is None:
        return layout.lengths
    mask = layout.mask.int()
    return mask.shape[1] - mask.flip(1).argmax(1) - mask.argmax(1)
